"""The dry run against the run: tokens, vectors, batches and time, with an encoder whose cost is known."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import sample
from pipeline.config import build_config
from pipeline.errors import ConfigError, ShardError
from pipeline.forecast import half_width
from pipeline.plan import Plan, describe_plan, make_plan
from pipeline.run import run
from pipeline.shards import Columns, check_shards, find_shards
from pipeline.telemetry import RunReport
from tests.conftest import ROOT, SAMPLE_DATA, STAND_IN, RunCommand, write_shard
from tests.stand_in import MAX_LENGTH


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Six shards of 1,500 rows: short texts in the first, long ones in the last, sorted by length within each."""
    rng = random.Random(5)
    for number in range(6):
        lengths = sorted(rng.randrange(1, 8 + 8 * number) for _ in range(1_500))
        texts = ["".join(rng.choices("abcdefgh", k=length)) for length in lengths]
        write_shard(tmp_path / "in" / f"part-{number}.parquet", texts, row_group_size=250)
    return tmp_path / "in"


def config(source: Path, model: str, output: Path | str = "/dev/null", **options: Any) -> Any:
    given = {"input": str(source), "output": str(output), "model": model, "id_column": "id", "index": "none", **options}
    return build_config(None, given)


def planned(source: Path, model: str, **options: Any) -> Plan:
    return make_plan(config(source, model, **options), stand_in=STAND_IN)


def embedded(source: Path, output: Path, model: str, **options: Any) -> RunReport:
    return run(config(source, model, output, **options), stand_in=STAND_IN)


def all_texts(source: Path) -> list[str]:
    return [text for path in sorted(source.glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()]


def test_tokens_of_mixed_lengths_are_estimated_within_their_band(mixed: Path, model_dir: str) -> None:
    plan = planned(mixed, model_dir)
    lengths = [min(len(text), MAX_LENGTH) for text in all_texts(mixed)]
    assert not plan.every_row
    assert plan.rows == plan.vectors == 9_000
    assert plan.sampled_rows <= sample.MAX_TEXTS
    assert plan.tokens.low <= sum(lengths) <= plan.tokens.high
    assert abs(plan.tokens.value / sum(lengths) - 1) < 0.15
    assert plan.tokens.high - plan.tokens.low < 0.2 * plan.tokens.value
    truncated = sum(len(text) > MAX_LENGTH for text in all_texts(mixed)) / 9_000
    assert abs(plan.truncated_share - truncated) < 0.05
    assert abs(plan.lengths["p50"] - np.median(lengths)) <= 3
    assert plan.lengths["longest"] == MAX_LENGTH


def test_the_band_holds_about_as_often_as_it_says(mixed: Path) -> None:
    shards = check_shards(find_shards([str(mixed)]), Columns("text", "id")).shards
    truth = np.mean([len(text) for text in all_texts(mixed)])
    hits = 0
    for seed in range(20):
        drawn = sample.draw_sample(shards, Columns("text", "id"), seed)
        ends = np.cumsum(drawn.spots)
        lengths = np.array([len(text or "") for text in drawn.texts])
        means = np.array([part.mean() for part in np.split(lengths, ends[:-1])])
        hits += abs(means.mean() - truth) <= half_width(means)
    assert hits >= 17


def test_a_small_corpus_is_counted_exactly(tmp_path: Path, model_dir: str) -> None:
    for number in range(3):
        write_shard(tmp_path / "in" / f"{number}.parquet", ["ab", None, "x" * 40, ""] * 20 + ["abc"] * number)
    plan = planned(tmp_path / "in", model_dir, max_batch_tokens=100)
    tokens = 60 * (2 + MAX_LENGTH) + 3 * 3
    assert plan.every_row
    assert (plan.tokens.value, plan.tokens.low, plan.tokens.high) == (tokens, tokens, tokens)
    # 60 null texts, and 60 empty ones: the stand-in's tokenizer has no special tokens
    assert (plan.rows, plan.vectors, plan.quarantined) == (243, 123, 120)
    assert plan.truncated_share == round(60 / 123, 6)


def test_batches_and_chunks_are_those_of_the_run(mixed: Path, tmp_path: Path, model_dir: str) -> None:
    options: dict[str, Any] = {"max_batch_tokens": 500, "max_length": 32, "long_texts": "chunk"}
    plan = planned(mixed, model_dir, **options)
    report = embedded(mixed, tmp_path / "out", model_dir, **options)
    assert abs(plan.vectors / report.total_rows_out - 1) < 0.1
    assert plan.truncated_share == 0
    assert abs(plan.batches / report.counts.batches - 1) < 0.25  # the run leaves out texts that repeat


def test_time_is_estimated_and_the_run_says_how_well(
    mixed: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS_PER_TOKEN", "5e-5")
    output = tmp_path / "out"
    plan = make_plan(config(mixed, model_dir, output, price_per_hour=3600), stand_in=STAND_IN, save=True)
    assert [path.name for path in output.iterdir()] == ["plan.json"]
    assert plan.cost is not None
    assert plan.cost.value == plan.seconds.value
    report = embedded(mixed, output, model_dir)
    assert abs(plan.embed_s / report.encode_wall_s - 1) < 0.25
    assert report.planned is not None
    assert report.planned["tokens"] == plan.tokens.value
    assert f"planned {plan.tokens.value:,.0f} tokens in {plan.seconds.value:,.1f} s, took" in report.sentence()
    assert report.to_dict()["planned"]["took_s"] > 0


def test_a_plan_of_another_configuration_is_not_compared(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "a.parquet", ["one", "two"])
    make_plan(config(tmp_path / "in", model_dir, tmp_path / "out", prompt="a"), stand_in=STAND_IN, save=True)
    report = embedded(tmp_path / "in", tmp_path / "out", model_dir, prompt="b")
    assert report.planned is None
    assert "planned" not in report.sentence()


def test_nothing_is_written_and_nothing_heavy_is_loaded(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "a.parquet", ["one", "two"])
    code = (
        "import sys\nfrom pipeline.plan import make_plan\nfrom pipeline.config import build_config\n"
        f"config = build_config(None, dict(input='in', output='out', model={model_dir!r}))\n"
        f"print(make_plan(config, stand_in={STAND_IN!r}).index.factory)\n"
        "print([name for name in ('torch', 'faiss', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.splitlines() == ["IDMap2,Flat", "[]"], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_shards_are_named_and_left_out(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "good.parquet", ["one", "two"])
    (tmp_path / "in" / "bad.parquet").write_bytes(b"not parquet")
    path = write_shard(tmp_path / "in" / "damaged.parquet", ["x" * 50] * 100, compression="none")
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[4:footer] = bytes(footer - 4)
    path.write_bytes(content)
    plan = planned(tmp_path / "in", model_dir)
    assert plan.rows == 2
    assert [Path(shard["shard"]).name for shard in plan.bad] == ["bad.parquet", "damaged.parquet"]
    (tmp_path / "in" / "good.parquet").unlink()
    with pytest.raises(ShardError, match=r"damaged\.parquet"):
        planned(tmp_path / "in", model_dir)


def test_a_corpus_without_rows_and_an_impossible_index_are_refused(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "a.parquet", [])
    with pytest.raises(ConfigError, match=r"no text|hold no row|is null"):
        planned(tmp_path / "in", model_dir)
    write_shard(tmp_path / "in" / "a.parquet", ["one"])
    with pytest.raises(ConfigError, match="refin"):
        planned(tmp_path / "in", model_dir, index="IVF16,Flat,RFlat")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/no/such/folder"], "input /no/such/folder: does not exist"),
        ([SAMPLE_DATA, "--text-column", "texts"], "no column 'texts'; did you mean 'text'?"),
        ([SAMPLE_DATA, "--price-per-hour", "-1"], "--price-per-hour: found -1.0"),
        ([SAMPLE_DATA, "--dtype", "int8"], "--dtype: found 'int8'"),
    ],
)
def test_errors_are_the_runs(command: RunCommand, model_dir: str, arguments: list[Any], expected: str) -> None:
    done = command("plan", *arguments, "--model", model_dir)
    assert done.returncode == 78, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert expected in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_the_command_plans_the_sample_job(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    job = ROOT / "jobs" / "sample.yaml"
    done = command("plan", SAMPLE_DATA, "--job", job, "--model", model_dir, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["tokens"]["value"] == 82_038
    assert plan["index"].pop("build_bytes") > 100_000_000
    assert plan["index"] == {
        "factory": "IDMap2,Flat", "size_bytes": 2_400 * (4 * 384 + 8), "num_train": 0, "warnings": [],
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_what_a_person_reads_fits_and_names_every_figure(mixed: Path, model_dir: str) -> None:
    plan = make_plan(config(mixed, model_dir, index="auto", price_per_hour=2), stand_in=STAND_IN)
    lines = describe_plan(plan)
    names = [name for name, _ in lines if name]
    assert names == [
        "shards", "rows", "tokens", "lengths", "batches", "time", "cost", "memory", "disk", "index", "rests on",
    ]  # fmt: skip
    assert all(len(text) <= 110 for _, text in lines)
