"""Several processes that share the shards of one output, and runs that end where their budget does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import build_config
from pipeline.errors import ConfigError, Stopped
from pipeline.ledger import Ledger
from pipeline.limits import Limits, Meter
from pipeline.pool import Event
from pipeline.records import Part, Shard
from pipeline.run import run
from pipeline.storage import Output
from pipeline.telemetry import RunReport
from tests.conftest import ROOT, STAND_IN, RunCommand, read_output, vectors_of, write_shard
from tests.stand_in import vector_of

NUM_SHARDS, ROWS = 7, 30


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(NUM_SHARDS):
        texts = [f"shard {number} row {row}" for row in range(ROWS)]
        write_shard(tmp_path / "in" / f"part-{number}.parquet", texts)
    return tmp_path / "in"


def embed(source: Path, output: Path, model: str, **options: Any) -> RunReport:
    given = {"input": str(source), "output": str(output), "model": model, "id_column": "id", "index": "none", **options}
    return run(build_config(None, given), stand_in=STAND_IN)


def check_complete(output: Path) -> None:
    table = read_output(output)
    expected = [
        (f"part-{shard}-{row}", f"shard {shard} row {row}") for shard in range(NUM_SHARDS) for row in range(ROWS)
    ]
    assert table["id"].to_pylist() == [key for key, _ in expected]
    np.testing.assert_allclose(vectors_of(table), [vector_of(text) for _, text in expected], atol=1e-6)


def test_ranks_one_after_the_other_do_everything_once(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    reports = [embed(corpus, tmp_path / "out", model_dir, rank=rank, world_size=3) for rank in range(3)]
    assert sum(report.shards_done for report in reports) == NUM_SHARDS
    assert [report.rank for report in reports] == ["0 of 3", "1 of 3", "2 of 3"]
    check_complete(tmp_path / "out")
    assert embed(corpus, tmp_path / "out", model_dir).shards_done == 0


def test_what_a_lost_rank_left_is_done_without_a_rank(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    embed(corpus, tmp_path / "out", model_dir, rank=0, world_size=2)
    report = embed(corpus, tmp_path / "out", model_dir)
    assert 0 < report.shards_done < NUM_SHARDS
    check_complete(tmp_path / "out")


def test_all_ranks_at_once_and_one_of_them_twice(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    ranks = [0, 1, 1, 2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.drive", str(corpus), str(tmp_path / "out"), model_dir,
             json.dumps({"rank": rank, "world_size": 3, "max_batch_tokens": 64})],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "STAND_IN_SECONDS": "0.01"},
        )
        for rank in ranks
    ]  # fmt: skip
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(ranks), ends
    for rank, (_, log) in zip(ranks, ends, strict=True):
        assert f"rank {rank} of 3: " in log, log
    check_complete(tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_ranks_and_a_whole_run_keep_out_of_each_others_way(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    output = Output(tmp_path / "out")
    output.prepare()
    with output.lock(shared=True) as first, Output(tmp_path / "out").lock(shared=True) as second:
        assert first and second
        with pytest.raises(Stopped, match="another run holds its lock"):
            embed(corpus, tmp_path / "out", model_dir)
    with output.lock(), pytest.raises(Stopped, match="another run holds its lock"):
        embed(corpus, tmp_path / "out", model_dir, rank=0, world_size=2)


@pytest.mark.parametrize("option", ["prune", "verify"])
def test_a_rank_does_not_judge_the_whole(corpus: Path, tmp_path: Path, model_dir: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} is for a run of all shards; this is rank 1 of 2"):
        embed(corpus, tmp_path / "out", model_dir, rank=1, world_size=2, **{option: True})


def test_a_run_stops_between_shards_and_continues(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    report = embed(corpus, tmp_path / "out", model_dir, max_tokens=600)
    assert report.exit_code == 75
    assert "--max-tokens 600 is reached" in report.stopped
    assert 600 <= report.counts.tokens < 600 + 3 * ROWS * 20  # what was in work is finished
    done = len(Ledger(str(tmp_path / "out")).commits())
    assert done == report.shards_done < NUM_SHARDS
    rest = embed(corpus, tmp_path / "out", model_dir)
    assert (rest.exit_code, rest.shards_done) == (0, NUM_SHARDS - done)
    embed(corpus, tmp_path / "whole", model_dir)
    whole, parts = read_output(tmp_path / "whole"), read_output(tmp_path / "out")
    assert whole.equals(parts)


def test_a_limit_that_the_last_shard_reaches_is_no_stop(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    tokens = embed(corpus, tmp_path / "whole", model_dir).counts.tokens
    report = embed(corpus, tmp_path / "out", model_dir, max_tokens=tokens)
    assert (report.exit_code, report.stopped, report.shards_done) == (0, "", NUM_SHARDS)


def test_what_a_run_cost_is_its_time_by_the_price(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    report = embed(corpus, tmp_path / "out", model_dir, price_per_hour=3600)
    assert report.cost == pytest.approx(report.wall_s)
    document = report.to_dict()
    assert document["cost_per_million_tokens"] == pytest.approx(report.wall_s / report.counts.tokens * 1e6)
    assert f"cost {report.cost:,.4g}" in report.sentence()


def test_a_meter_counts_what_is_in_work_and_no_part_twice() -> None:
    clock = [0.0]
    meter = Meter(Limits(max_tokens=100, max_cost=2.0, max_hours=3.0, price_per_hour=1.0), 0.0, lambda: clock[0])
    parts = (Part(0, 0, 1, 0, 5), Part(1, 1, 2, 5, 5))
    whole = Shard("a", "/a.parquet", 9, 0, parts=parts)
    first = Shard("a", "/a.parquet", 9, 0, parts=parts, part=parts[0])
    record = {"counts": {"tokens": 60}}
    assert not meter.exceeded(Event("progress", first, {"tokens": 40}))
    assert not meter.exceeded(Event("part", first, record))
    assert meter.tokens == 60
    assert not meter.exceeded(Event("done", whole, record))
    assert meter.tokens == 60
    assert not meter.exceeded(Event("progress", Shard("b", "/b.parquet", 9, 0), {"tokens": 39}))
    assert "--max-tokens 100" in meter.exceeded(Event("progress", Shard("b", "/b.parquet", 9, 0), {"tokens": 40}))
    assert not meter.exceeded(Event("lost", Shard("b", "/b.parquet", 9, 0)))
    clock[0] = 2.0 * 3600
    assert "--max-cost 2.00" in meter.exceeded(Event("tick"))
    assert not Meter(Limits(), 0.0, lambda: 1e9).exceeded(Event("tick"))
    assert "--max-hours 3" in Meter(Limits(max_hours=3), 0.0, lambda: 3 * 3600.0).exceeded(Event("tick"))


def test_a_cost_needs_a_price(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-cost needs --price-per-hour"):
        build_config(None, {"input": "in", "output": str(tmp_path), "model": "m", "max_cost": 1.0})


def test_an_index_over_some_of_the_shards_says_so(
    corpus: Path, tmp_path: Path, model_dir: str, command: RunCommand
) -> None:
    done = embed(corpus, tmp_path / "out", model_dir, rank=0, world_size=2).shards_done
    said = command("index", tmp_path / "out")
    assert said.returncode == 0, said.stderr
    assert f"warning: {NUM_SHARDS - done} of {NUM_SHARDS} shards are not finished and not indexed" in said.stderr
    embed(corpus, tmp_path / "out", model_dir, rank=1, world_size=2)
    assert "not finished" not in command("index", tmp_path / "out").stderr
