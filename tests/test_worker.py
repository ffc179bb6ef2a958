"""One worker as the coordinator sees it: stages overlap across shards, and what goes wrong stays with its unit."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import build_config
from pipeline.ledger import Ledger, read_run
from pipeline.prefetch import Follow
from pipeline.records import EncoderSettings
from pipeline.run import run
from pipeline.shards import Columns, find_shards
from pipeline.verdict import Load
from pipeline.worker import Worker
from pipeline.worker_settings import WorkerSettings
from tests.conftest import STAND_IN, read_output, vectors_of, write_shard
from tests.stand_in import StandIn, vector_of


class RunsOutOfMemory(StandIn):
    """Has room for 60 tokens, and finds out as a device does."""

    num_oom_splits, token_limit = 0, None

    def encode(self, batch):  # type: ignore[no-untyped-def]
        if batch.num_tokens > 60:
            self.num_oom_splits, self.token_limit = self.num_oom_splits + 1, 60
        return super().encode(batch)


class FailsAtTheLetterZ(StandIn):
    def encode(self, batch):  # type: ignore[no-untyped-def]
        if (batch.input_ids == 26).any():
            raise ZeroDivisionError("our mistake")
        return super().encode(batch)


def answers(source: Path, output: Path, stand_in: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """What a worker says when it is sent all shards at once."""
    said: list[tuple[str, dict[str, Any]]] = []
    chosen = WorkerSettings(
        EncoderSettings("none"), str(output), Columns("text", "id"), fingerprint="f", stand_in=stand_in, **options
    )
    worker = Worker(chosen, lambda event, **values: said.append((event, values)))
    worker.run(iter([{"do": "shard", "shard": asdict(shard)} for shard in find_shards([str(source)])]))
    return said


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(4):
        write_shard(tmp_path / "in" / f"part-{number}.parquet", [f"shard {number} row {row}" for row in range(50)])
    return tmp_path / "in"


def test_shards_end_in_the_order_they_were_sent(corpus: Path, tmp_path: Path) -> None:
    said = answers(corpus, tmp_path / "out", STAND_IN, max_batch_tokens=100)
    assert [values["unit"] for event, values in said if event == "done"] == [f"part-{n}" for n in range(4)]
    # The next one can be sent while the one before is still computed and written.
    assert said.index(("free", {"unit": "part-1"})) < next(
        at for at, (event, values) in enumerate(said) if event == "done" and values["unit"] == "part-1"
    )


def test_a_bug_in_one_shard_leaves_its_neighbours_alone(corpus: Path, tmp_path: Path) -> None:
    write_shard(corpus / "part-1.parquet", ["fine", "a z", "fine too"])
    said = answers(corpus, tmp_path / "out", "tests.test_worker:FailsAtTheLetterZ")
    ends = {values["unit"]: event for event, values in said if event in ("done", "error", "bad")}
    assert ends == {"part-0": "done", "part-1": "error", "part-2": "done", "part-3": "done"}
    assert "our mistake" in next(values["trace"] for event, values in said if event == "error")
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert Ledger(str(tmp_path / "out")).record("part-1") is None


def test_a_shard_that_goes_bad_while_it_is_read_fails_alone(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "part-2.parquet"
    content = bytearray(path.read_bytes())
    content[20:200] = bytes(180)
    path.write_bytes(content)
    said = answers(corpus, tmp_path / "out", STAND_IN)
    ends = {values["unit"]: event for event, values in said if event in ("done", "error", "bad")}
    assert ends == {"part-0": "done", "part-1": "done", "part-2": "bad", "part-3": "done"}


def test_a_device_with_little_memory_lowers_the_budget_for_the_rest(corpus: Path, tmp_path: Path) -> None:
    said = answers(corpus, tmp_path / "out", "tests.test_worker:RunsOutOfMemory", max_batch_tokens=400)
    records = [values["record"] for event, values in said if event == "done"]
    assert [record["counts"]["oom_splits"] for record in records] == [1, 0, 0, 0]
    for record in records[1:]:
        assert record["counts"]["batches"] >= record["counts"]["tokens"] / 60
    table = read_output(tmp_path / "out")
    expected = [vector_of(f"shard {number} row {row}") for number in range(4) for row in range(50)]
    np.testing.assert_allclose(vectors_of(table), expected, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_tokenizer_processes_give_the_same_output(corpus: Path, tmp_path: Path, workers: int) -> None:
    answers(corpus, tmp_path / "here", STAND_IN)
    answers(corpus, tmp_path / "apart", STAND_IN, tokenizer_workers=workers)
    assert read_output(tmp_path / "apart").equals(read_output(tmp_path / "here"))


def test_times_of_all_shards_add_up_to_the_workers(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.1")
    start = time.perf_counter()
    said = answers(corpus, tmp_path / "out", STAND_IN, max_batch_tokens=200)
    took = time.perf_counter() - start
    records = [values["record"] for event, values in said if event == "done"]
    together = sum(record["seconds"]["wall"] for record in records)
    assert took - 0.5 < together <= took  # which began with loading and ended with the last file on the disk
    for record in records:
        stages = dict(record["seconds"])
        assert stages.pop("wall") == pytest.approx(sum(stages.values()), abs=0.01)


def test_a_device_of_fixed_speed_hardly_waits(tmp_path: Path, model_dir: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS_PER_TOKEN", "5e-5")
    for number in range(5):
        texts = [f"shard {number} row {row}" for row in range(1_000)]
        write_shard(tmp_path / "in" / f"part-{number}.parquet", texts)
    given = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out"), "model": model_dir, "id_column": "id"}
    report = run(build_config(None, {**given, "index": "none"}), stand_in=STAND_IN)
    # 3 % on a machine that does nothing else; tests may run on one that does.
    assert Load.of(report.shards[1:]).idle < 0.10
    assert report.verdict.startswith("device-bound")


def test_an_unfinished_run_keeps_its_budget(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    given = {"input": str(corpus), "output": str(tmp_path / "out"), "model": model_dir, "id_column": "id"}
    run(build_config(None, {**given, "index": "none"}), stand_in=STAND_IN)
    assert read_run(str(tmp_path / "out"))["budget"] == {"device": "cpu", "max_batch_tokens": 2048}


def test_follow_keeps_the_order_waits_in_the_end_and_is_bounded() -> None:
    taken: list[int] = []
    go = threading.Event()

    def take(item: int) -> None:
        go.wait()
        taken.append(item)

    with Follow(take, depth=1) as following:
        for item in range(2):
            following.put(item)
        blocked = threading.Thread(target=following.put, args=(2,))
        blocked.start()
        blocked.join(timeout=0.1)
        assert blocked.is_alive()  # one is taken, one waits: there is no room for a third
        go.set()
        blocked.join()
    assert taken == [0, 1, 2]
