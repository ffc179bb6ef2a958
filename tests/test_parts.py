"""Large files: split by row groups, worked on by several workers, resumed part by part, put together as one shard."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import shards
from pipeline.config import build_config
from pipeline.ledger import Ledger
from pipeline.pool import Event
from pipeline.progress import NoDisplay
from pipeline.records import Part, Shard
from pipeline.run import run
from pipeline.telemetry import RunReport
from tests.conftest import ROOT, STAND_IN, read_output, vectors_of
from tests.stand_in import vector_of
from tests.test_run import digests
from tests.test_stress import kill_one

TEXTS = [None if row % 17 == 3 else f"row {row % 40}" for row in range(100)]
GROUPS = 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", 20)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    write(folder / "sub" / "large.parquet", TEXTS)
    write(folder / "small.parquet", ["one", "two"])
    return folder


def write(path: Path, texts: Sequence[str | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string()), "note": [f"n{row}" for row in range(len(texts))]})
    pq.write_table(table, path, row_group_size=20, write_page_checksum=True)


class Watch(NoDisplay):
    """Keeps the events; calls ``then`` with each."""

    def __init__(self, then: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self._then = then

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Callable[[Event], None]]:
        def show(event: Event) -> None:
            self.events.append(event)
            self._then(event)

        yield show

    def kinds(self, kind: str) -> list[str]:
        return [event.shard.unit for event in self.events if event.kind == kind and event.shard]


def embed(source: Path, output: Path, model: str, watch: Watch | None = None, **options: Any) -> RunReport:
    given = {"input": str(source), "output": str(output), "model": model, "index": "none", "columns": "note", **options}
    return run(build_config(None, given), watch, stand_in=STAND_IN)


def check_complete(output: Path) -> None:
    table = read_output(output)
    rows = [row for row, text in enumerate(TEXTS) if text is not None]
    expected = [f"sub/large:{row}" for row in rows]
    large = pq.read_table(output / "embeddings" / "sub" / "large.parquet", partitioning=None)
    assert large["id"].to_pylist() == expected
    assert large["note"].to_pylist() == [f"n{row}" for row in rows]
    np.testing.assert_allclose(vectors_of(large), [vector_of(TEXTS[row] or "") for row in rows], atol=1e-6)
    assert table.num_rows == len(rows) + 2
    quarantined = pq.read_table(output / "quarantine" / "sub" / "large.parquet", partitioning=None)
    assert quarantined["row"].to_pylist() == [row for row, text in enumerate(TEXTS) if text is None]
    assert not (output / "parts").exists()


@pytest.mark.parametrize(
    ("group_rows", "parts"),
    [
        ([], []),
        ([100], []),
        ([5, 5, 5], []),
        ([20, 20], [(0, 1, 0, 20), (1, 2, 20, 20)]),
        ([5, 30, 1, 1], [(0, 2, 0, 35), (2, 4, 35, 2)]),
        ([50, 0, 50, 0], [(0, 1, 0, 50), (1, 3, 50, 50)]),
    ],
)
def test_row_groups_are_put_together_until_a_part_is_large_enough(group_rows: list[int], parts: list[Any]) -> None:
    assert shards.split(group_rows) == tuple(Part(number, *extent) for number, extent in enumerate(parts))


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_large_file_comes_out_as_if_it_had_not_been_split(
    large: Path, tmp_path: Path, model_dir: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    report = embed(large, tmp_path / "out", model_dir, watch, devices=devices)
    assert sorted(watch.kinds("part")) == [f"sub/large#{number}" for number in range(GROUPS)]
    assert (report.shards_done, report.shards_failed, report.total_rows) == (2, 0, 102)
    check_complete(tmp_path / "out")
    record = Ledger(str(tmp_path / "out")).record("sub/large")
    monkeypatch.setattr(shards, "PART_ROWS", 1000)
    embed(large, tmp_path / "whole", model_dir, devices=devices)
    whole = Ledger(str(tmp_path / "whole")).record("sub/large")
    assert record is not None
    assert whole is not None
    of_work = ("batches", "texts", "duplicates", "tokens", "computed_tokens")  # a window ends where its part does
    for name, value in whole["counts"].items():
        assert name in of_work or record["counts"][name] == value, name
    assert record["counts"]["rows"] == record["counts"]["rows_out"] + sum(record["counts"]["quarantined"].values())
    assert {key: value for key, value in record["shard"].items() if key != "part"} == whole["shard"]
    assert record["seconds"]["wall"] == pytest.approx(sum(record["seconds"].values()) / 2, abs=0.01)
    assert embed(large, tmp_path / "out", model_dir).shards_skipped == 2


def test_one_file_feeds_two_workers(
    large: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.5")
    processes = tmp_path / "processes"
    processes.mkdir()
    monkeypatch.setenv("STAND_IN_PROCESSES", str(processes))
    (large / "small.parquet").unlink()
    watch = Watch()
    embed(large, tmp_path / "out", model_dir, watch, devices="cpu,cpu")
    assert sum(event.kind == "ready" for event in watch.events) == 2
    assert sorted(watch.kinds("part")) == [f"sub/large#{number}" for number in range(GROUPS)]
    assert len(list(processes.iterdir())) == 2


def test_a_stopped_run_keeps_its_finished_parts(
    large: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_two(event: Event) -> None:
        if len(watch.kinds("part")) == 2:
            raise KeyboardInterrupt

    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    watch = Watch(stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        embed(large, tmp_path / "out", model_dir, watch)
    kept = len(list((tmp_path / "out" / "parts" / "sub" / "large").glob("*.json")))
    assert kept >= 2
    again = Watch()
    report = embed(large, tmp_path / "out", model_dir, again)
    assert len(again.kinds("part")) == GROUPS - kept
    assert report.exit_code == 0
    check_complete(tmp_path / "out")


def test_parts_of_an_older_file_are_not_used(
    large: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: Event) -> None:
        if watch.kinds("part"):
            raise KeyboardInterrupt

    watch = Watch(stop)
    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    write(large / "sub" / "large.parquet", [f"old {row}" for row in range(100)])
    with pytest.raises(KeyboardInterrupt):
        embed(large, tmp_path / "out", model_dir, watch)
    write(large / "sub" / "large.parquet", TEXTS)
    again = Watch()
    embed(large, tmp_path / "out", model_dir, again)
    assert len(again.kinds("part")) == GROUPS
    check_complete(tmp_path / "out")


def test_a_part_that_was_damaged_since_is_computed_again(
    large: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(event: Event) -> None:
        for file in (tmp_path / "out" / "parts" / "sub" / "large").glob("00000.embeddings.parquet"):
            if event.kind == "part" and not damaged:
                damaged.append(file)
                content = bytearray(file.read_bytes())
                content[len(content) // 3] ^= 0xFF
                file.write_bytes(content)

    damaged: list[Path] = []
    monkeypatch.setenv("STAND_IN_SECONDS", "0.1")
    report = embed(large, tmp_path / "out", model_dir, Watch(damage))
    assert damaged
    assert report.exit_code == 65
    assert "00000.embeddings.parquet: damaged" in report.failed[0].reason
    watch = Watch()
    assert embed(large, tmp_path / "out", model_dir, watch).exit_code == 0
    assert watch.kinds("part") == ["sub/large#0"]
    check_complete(tmp_path / "out")


def test_a_bad_part_fails_its_shard_once_and_no_other(large: Path, tmp_path: Path, model_dir: str) -> None:
    path = large / "sub" / "large.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)
    report = embed(large, tmp_path / "out", model_dir, devices="cpu,cpu")
    assert [(failure.shard, failure.kind) for failure in report.failed] == [(str(path), "bad")]
    assert (report.shards_done, report.exit_code) == (1, 65)


def test_parts_of_nobody_are_swept(large: Path, tmp_path: Path, model_dir: str) -> None:
    embed(large, tmp_path / "out", model_dir)
    left = tmp_path / "out" / "parts" / "gone" / "00000.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    embed(large, tmp_path / "out", model_dir)
    assert not (tmp_path / "out" / "parts").exists()


def test_kills_anywhere_leave_the_parts_put_together_as_in_an_undisturbed_run(
    large: Path, tmp_path: Path, model_dir: str
) -> None:
    embed(large, tmp_path / "calm", model_dir, max_batch_tokens=64)
    options = json.dumps({"devices": "cpu,cpu", "max_batch_tokens": 64, "columns": "note", "id_column": None})
    script = "import pipeline.shards as s; s.PART_ROWS = 20; from tests import drive; raise SystemExit(drive.main())"
    command = [sys.executable, "-c", script, str(large), str(tmp_path / "out"), model_dir, options]
    environment = {**os.environ, "STAND_IN_SECONDS": "0.1"}
    rng = random.Random(3)
    for _ in range(12):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.6, 2.2))
        kill_one(process, rng)
        process.kill()
        process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "out") == digests(tmp_path / "calm")
    assert not (tmp_path / "out" / "parts").exists()
    check_complete(tmp_path / "out")
