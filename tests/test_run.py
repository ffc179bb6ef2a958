"""A whole run with the stand-in encoder: what comes out, what is skipped, what fails alone, what survives a kill."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import build_config
from pipeline.errors import ConfigError, Stopped
from pipeline.ledger import Ledger
from pipeline.run import run
from pipeline.storage import Output
from pipeline.telemetry import RunReport
from tests.conftest import ROOT, STAND_IN, read_output, vectors_of, write_shard
from tests.stand_in import MAX_LENGTH, vector_of


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = random.Random(3)
    for number in range(5):
        texts = ["".join(rng.choices("abcdefg h", k=rng.randrange(1, 60))) for _ in range(60)]
        write_shard(tmp_path / "in" / f"part-{number}.parquet", texts)
    return tmp_path / "in"


def embed(source: Path, output: Path, model: str, **options: Any) -> RunReport:
    given = {"input": str(source), "output": str(output), "model": model, "id_column": "id", "index": "none", **options}
    return run(build_config(None, given), stand_in=STAND_IN)


def start(source: Path, output: Path, model: str, seconds: float = 0.0, **options: Any) -> subprocess.Popen[str]:
    """The same as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.drive", str(source), str(output), model, json.dumps(options)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "STAND_IN_SECONDS": str(seconds)},
    )  # fmt: skip


def digests(output: Path) -> dict[str, str]:
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("embeddings", "quarantine")
        for path in sorted((output / folder).rglob("*.parquet"))
    }


def input_rows(source: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(source.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_every_row_gets_the_vector_of_its_own_text_in_input_order(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    report = embed(corpus, tmp_path / "out", model_dir, max_batch_tokens=100)
    table, rows = read_output(tmp_path / "out"), input_rows(corpus)
    assert table["id"].to_pylist() == [row["id"] for row in rows]
    np.testing.assert_allclose(vectors_of(table), [vector_of(row["text"]) for row in rows], atol=1e-6)
    assert (report.shards_done, report.total_rows, report.total_rows_out, report.exit_code) == (5, 300, 300, 0)


def test_the_record_adds_up(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    write_shard(corpus / "part-0.parquet", ["ab", None, "ab", "x" * 40, "", "ab"])
    embed(corpus, tmp_path / "out", model_dir)
    record = Ledger(str(tmp_path / "out")).commits()[0]
    counts = record["counts"]
    assert counts["rows"] == 6
    assert counts["rows_out"] == 4
    assert counts["quarantined"] == {"null text": 1, "no tokens": 1}
    assert counts["duplicates"] == 2
    assert counts["tokens"] == counts["computed_tokens"] == 2 + MAX_LENGTH
    assert (counts["truncated_texts"], counts["dropped_tokens"]) == (1, 40 - MAX_LENGTH)
    assert record["token_efficiency"] == 1.0
    seconds = dict(record["seconds"])
    assert seconds.pop("wall") == pytest.approx(sum(seconds.values()), abs=0.01)
    for name in ("tokens_per_s", "texts_per_s", "peak_memory_bytes", "device", "attention", "dtype", "fingerprint"):
        assert record[name], name
    assert {"path", "size_bytes", "mtime_ns", "num_rows", "num_row_groups"} <= set(record["shard"])
    assert {"path", "rows", "sha256"} <= set(record["output"])


def test_the_same_command_again_does_nothing(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    embed(corpus, tmp_path / "out", model_dir)
    before = file_times(tmp_path / "out")
    report = embed(corpus, tmp_path / "out", model_dir)
    assert (report.shards_done, report.shards_skipped) == (0, 5)
    assert report.sentence().startswith("Nothing to do: all 5 shards")
    assert file_times(tmp_path / "out") == before


def test_a_run_that_was_stopped_before_its_first_shard_does_not_say_that_all_is_done() -> None:
    assert (
        RunReport("out", shards_total=3, shards_skipped=1, stopped="--max-cost 1 is reached")
        .sentence()
        .startswith("0 of 3 shards")
    )
    assert "no shard" in RunReport("out").sentence()


def file_times(folder: Path) -> dict[Path, int]:
    """Of all but the lock, and the note that a run leaves however little it did."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.stat().st_mtime_ns for path in files if path.parent.name != "runs"}


@pytest.mark.parametrize("damage", ["delete", "empty", "cut", "forget"])
def test_a_damaged_output_is_made_again_and_the_others_are_not(
    corpus: Path, tmp_path: Path, model_dir: str, damage: str
) -> None:
    embed(corpus, tmp_path / "out", model_dir)
    before = digests(tmp_path / "out")
    victim = tmp_path / "out" / "embeddings" / "part-2.parquet"
    if damage == "delete":
        victim.unlink()
    elif damage == "forget":
        (tmp_path / "out" / "commits" / "part-2.json").unlink()
    else:
        victim.write_bytes(b"" if damage == "empty" else victim.read_bytes()[:-10])
    report = embed(corpus, tmp_path / "out", model_dir)
    assert [record["shard"]["key"] for record in report.shards] == ["part-2"]
    assert digests(tmp_path / "out") == before


def test_a_changed_input_is_made_again(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    embed(corpus, tmp_path / "out", model_dir)
    write_shard(corpus / "part-1.parquet", ["new"])
    report = embed(corpus, tmp_path / "out", model_dir)
    assert [record["shard"]["key"] for record in report.shards] == ["part-1"]
    assert report.total_rows == 241


def test_a_new_shard_that_sorts_first_leaves_the_others_alone(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    embed(corpus, tmp_path / "out", model_dir)
    write_shard(corpus / "part--1.parquet", ["new"] * 10)
    report = embed(corpus, tmp_path / "out", model_dir)
    assert (report.shards_done, report.shards_skipped, report.total_rows) == (1, 5, 310)


def test_shards_that_left_the_input_are_reported_and_pruned_on_demand(
    corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    embed(corpus, tmp_path / "out", model_dir, index="Flat")
    (corpus / "part-1.parquet").unlink()
    report = embed(corpus, tmp_path / "out", model_dir, index="Flat")
    assert (report.total_rows, report.index["ntotal"]) == (300, 300)  # type: ignore[index]
    assert any("1 finished shards are not in the input any more (part-1)" in warning for warning in report.warnings)
    report = embed(corpus, tmp_path / "out", model_dir, index="Flat", prune=True)
    assert (report.shards_pruned, report.total_rows, report.index["ntotal"]) == (1, 240, 240)  # type: ignore[index]
    assert [path for path in (tmp_path / "out").rglob("*") if path.stem == "part-1"] == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": "query: "}, "prompt"),
        ({"max_length": 16}, "max-length"),
        ({"dimensions": 4}, "dimensions"),
        ({"normalize": False}, "normalize"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"embedding_dtype": "float16"}, "embedding-dtype"),
        ({"text_column": "id"}, "text-column"),
        ({"id_column": None}, "id-column"),
        ({"columns": "text"}, "columns"),
        ({"long_texts": "chunk"}, "long-texts"),
    ],
)
def test_another_option_is_refused_by_name(
    corpus: Path, tmp_path: Path, model_dir: str, options: dict[str, Any], named: str
) -> None:
    embed(corpus, tmp_path / "out", model_dir)
    before = digests(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"made with another configuration: {named} is"):
        embed(corpus, tmp_path / "out", model_dir, **options)
    assert digests(tmp_path / "out") == before


def test_another_model_is_refused_and_the_same_model_elsewhere_is_not(
    corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    import shutil

    embed(corpus, tmp_path / "out", model_dir)
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    assert embed(corpus, tmp_path / "out", str(copy)).shards_done == 0
    config = json.loads((copy / "1_Pooling" / "config.json").read_text())
    (copy / "1_Pooling" / "config.json").write_text(json.dumps({**config, "pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="model-modules is"):
        embed(corpus, tmp_path / "out", str(copy))
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(config))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # one bit of one weight
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="model-weights is"):
        embed(corpus, tmp_path / "out", str(copy))


def test_bad_shards_fail_alone_and_the_exit_code_says_so(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    (corpus / "part-1.parquet").write_bytes(b"")
    pq.write_table(pa.table({"id": ["x"], "body": ["y"]}), corpus / "part-3.parquet")
    report = embed(corpus, tmp_path / "out", model_dir)
    assert report.exit_code == 65
    assert (report.shards_done, report.shards_failed, report.total_rows) == (3, 2, 180)
    assert ["part-1.parquet" in report.failed[0].reason, "empty" in report.failed[0].reason] == [True, True]
    assert "no column 'text'" in report.failed[1].reason


def test_data_that_turns_out_damaged_in_mid_run_fails_its_shard_alone(
    corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    path = write_shard(corpus / "part-2.parquet", [str(n) * 40 for n in range(5000)], write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    report = embed(corpus, tmp_path / "out", model_dir)
    assert (report.exit_code, report.shards_done) == (65, 4)
    assert "part-2.parquet: damaged data" in report.failed[0].reason
    assert not (tmp_path / "out" / "embeddings" / "part-2.parquet").exists()


def test_two_workers_give_the_bytes_of_one(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    embed(corpus, tmp_path / "one", model_dir)
    embed(corpus, tmp_path / "two", model_dir, devices="cpu,cpu")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_an_output_that_another_run_holds_is_refused(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    output = Output(tmp_path / "out")
    output.prepare()
    with output.lock(), pytest.raises(Stopped, match="another run holds its lock"):
        embed(corpus, tmp_path / "out", model_dir)


@pytest.mark.parametrize("carried", ["id", "embedding"])
def test_two_output_columns_of_one_name_are_refused(corpus: Path, tmp_path: Path, model_dir: str, carried: str) -> None:
    with pytest.raises(ConfigError, match=f"'{carried}' is the name"):
        embed(corpus, tmp_path / "out", model_dir, id_column=None, columns=carried)


@pytest.mark.slow
def test_ten_kills_at_random_moments_then_the_bytes_of_an_undisturbed_run(
    corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    embed(corpus, tmp_path / "calm", model_dir, max_batch_tokens=64)
    rng, kills = random.Random(11), 0
    while kills < 10:
        process = start(corpus, tmp_path / "out", model_dir, seconds=0.002, max_batch_tokens=64)
        try:
            process.communicate(timeout=rng.uniform(0.6, 2.0))
        except subprocess.TimeoutExpired:
            tree = [process, *psutil.Process(process.pid).children(recursive=True)]
            rng.choice(tree).send_signal(signal.SIGKILL)  # the coordinator or its worker
            kills += 1
            if process.poll() is None:
                process.kill()
            process.communicate()
        else:  # it had finished: take two shards back and go on
            for key in ("part-1", "part-3"):
                (tmp_path / "out" / "commits" / f"{key}.json").unlink()
    process = start(corpus, tmp_path / "out", model_dir, max_batch_tokens=64)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert digests(tmp_path / "out") == digests(tmp_path / "calm")
    assert list((tmp_path / "out").rglob("*.tmp")) == []
    assert read_output(tmp_path / "out")["id"].to_pylist() == [row["id"] for row in input_rows(corpus)]


def workers_of(process: subprocess.Popen[str], timeout: float = 20) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        children = psutil.Process(process.pid).children(recursive=True)
        if children:
            return children
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def test_a_killed_worker_is_replaced_and_its_shard_done_again(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    process = start(corpus, tmp_path / "out", model_dir, seconds=0.05, max_batch_tokens=64)
    workers_of(process)[0].kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["total_rows_out"] == 300
    assert "signal 9" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_resumably_and_leaves_no_process(
    corpus: Path, tmp_path: Path, model_dir: str, number: int
) -> None:
    process = start(corpus, tmp_path / "out", model_dir, seconds=0.2, max_batch_tokens=64)
    workers = workers_of(process)
    time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    assert time.monotonic() - begun < 20
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    assert embed(corpus, tmp_path / "out", model_dir, max_batch_tokens=64).total_rows_out == 300


def test_a_worker_does_not_outlive_a_killed_coordinator(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    process = start(corpus, tmp_path / "out", model_dir, seconds=0.2, max_batch_tokens=64)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path: Path, model_dir: str) -> None:
    """A shard of two million short texts stays within 200 MB of one of a hundred thousand."""
    peaks = {}
    for rows in (100_000, 2_000_000):
        source = tmp_path / f"{rows}"
        source.mkdir()
        numbers = pa.array(np.arange(rows)).cast(pa.string())
        pq.write_table(pa.table({"id": numbers, "text": numbers}), source / "x.parquet", row_group_size=rows)
        del numbers
        process = start(source, tmp_path / f"out-{rows}", model_dir, max_batch_tokens=200_000)
        peaks[rows] = 0
        while process.poll() is None:
            peaks[rows] = max(peaks[rows], tree_bytes(process.pid))
            time.sleep(0.05)
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert json.loads(out)["total_rows_out"] == rows
    assert peaks[2_000_000] - peaks[100_000] < 200e6, peaks


def tree_bytes(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def test_an_index_that_cannot_be_built_leaves_the_vectors_and_the_report(
    corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    # One probe of many tiny lists cannot reach the recall that is promised, so nothing is published.
    report = embed(corpus, tmp_path / "out", model_dir, index="PQ4x4")
    assert (report.exit_code, report.shards_done, report.shards_failed, report.index) == (65, 5, 0, None)
    assert report.failed[0].reason.startswith("index: ")
    assert "recall" in report.failed[0].reason


@pytest.mark.parametrize("factory", ["IVF16Flat", "PQ5"])
def test_an_index_that_cannot_be_made_is_refused_before_the_first_shard(
    corpus: Path, tmp_path: Path, model_dir: str, factory: str
) -> None:
    with pytest.raises(ConfigError, match=f"--index .*{factory}: FAISS cannot make it for 8 dimensions"):
        embed(corpus, tmp_path / "out", model_dir, index=factory, max_batch_tokens=64)
    assert len(Ledger(str(tmp_path / "out")).commits()) <= 1
