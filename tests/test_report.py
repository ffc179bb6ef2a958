"""What ``report`` says of outputs: the sums of their records, the state of a job, a page that needs nothing else."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline import remote, report_records, shards
from pipeline.errors import ConfigError
from pipeline.ledger import Ledger
from pipeline.report import make_report
from pipeline.report_chart import compact, scale
from pipeline.report_page import page, write_page
from pipeline.report_records import duration, iso
from pipeline.report_text import renderables
from pipeline.storage import Output
from pipeline.telemetry import RunReport
from tests.conftest import ROOT, RunCommand, write_shard
from tests.s3_server import serving
from tests.test_run import embed, start
from tests.test_tracing import Collector, facts

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--allow-file-access-from-files",
)  # fmt: skip
MARK = "f" * 32
NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
HOSTILE = "<script>alert('x')</script>&\"q\"\x1b[31m"


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def write_run(output: Path, num_shards: int, rows: int, **config: Any) -> Path:
    """The ``run.json`` of a job."""
    options = {"output": str(output), "input": ["in"], "index": "none", "tokenizer_workers": "auto", **config}
    run = {"version": 1, "fingerprint": MARK, "config": options, "model": {"name": "model"}}
    write_json(output / "run.json", {**run, "input": {"shards": num_shards, "rows": rows}})
    return output


def write_record(
    output: Path,
    key: str,
    ended: float,
    *,
    wall_s: float = 100.0,
    tokens: int = 10_000,
    rows: int = 100,
    part: int | None = None,
    seconds: dict[str, float] | None = None,
    size_bytes: int = 1,
    **fields: Any,
) -> None:
    """A commit record as a worker writes it."""
    stages = seconds or {"encode": 0.9 * wall_s, "pack": 0.1 * wall_s}
    shard: dict[str, Any] = {"key": key, "path": f"in/{key}.parquet", "size_bytes": size_bytes, "mtime_ns": 1}
    if part is not None:
        shard["part"] = {"number": part}
    counts = {"rows": rows, "rows_out": rows, "texts": rows, "tokens": tokens, "computed_tokens": tokens}
    record = {
        "version": 1,
        "fingerprint": MARK,
        "shard": {**shard, "num_rows": rows, "num_row_groups": 1},
        "output": {"path": "", "rows": rows, "bytes": 0, "sha256": hashlib.sha256(key.encode()).hexdigest(), "dim": 8},
        "seconds": {"wall": wall_s, **stages},
        "busy_seconds": {"device": stages["encode"], "read": 1.0, "tokenize": 2.0},
        "flops": tokens * 1e6,
        "peak_share": 0.5,
        "length_histogram": {"64": rows},
        "cost": None,
        "device": "cuda:0",
        "dtype": "float16",
        "attention": "torch-varlen",
        "host": "host",
        "finished": datetime.datetime.fromtimestamp(ended, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **fields,
        "counts": {**counts, **fields.get("counts", {})},
    }
    write_json(output / (f"commits/{key}.json" if part is None else f"parts/{key}/{part:05}.json"), record)


def report_of(output: Path | str, now: float = NOW, **options: Any) -> dict[str, Any]:
    """The one job of a report."""
    [job] = make_report([str(output)], now=now, **options)["jobs"]
    assert isinstance(job, dict)
    return job


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> tuple[RunReport, Path]:
    """A run with nulls, repeats, long texts, a large file in parts, two devices, a price and a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    for number in range(3):
        texts = [f"text {row % 20} of {number}" * (1 + row % 4) for row in range(40)]
        write_shard(folder / "in" / f"part-{number}.parquet", [*texts, None, None])
    write_shard(folder / "in" / f"{HOSTILE.replace('/', '_')}.parquet", ["one text"])
    write_shard(folder / "in" / "large.parquet", [f"row {row}" for row in range(100)], row_group_size=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PART_ROWS", 20)
        report = embed(
            folder / "in", folder / "out", model_dir, devices="cpu,cpu", price_per_hour=3.6, index="auto", verify=True
        )
    assert report.exit_code == 0
    return report, folder / "out"


def test_totals_are_the_sums_of_the_records_and_those_of_the_run(done: tuple[RunReport, Path]) -> None:
    report, output = done
    document = make_report([str(output)])
    [job] = document["jobs"]
    counts, records = report.counts, Ledger(str(output)).commits()
    assert len(records) == 5 and sum("parts" in record for record in records) == 1
    for sums in (job, document["total"]):
        assert sums["tokens"]["computed"] == counts.tokens == sum(r["counts"]["tokens"] for r in records) > 0
        assert sums["tokens"]["dropped"] == counts.dropped_tokens > 0
        assert sums["texts"] == {
            "different": counts.texts,
            "duplicates": counts.duplicates,
            "reused": counts.reused,
            "truncated": counts.truncated_texts,
        }
        assert counts.duplicates > 0 and counts.truncated_texts > 0
        assert sums["rows"]["quarantined"] == counts.quarantined == {"null text": 6}
        assert (sums["rows"]["done"], sums["rows"]["vectors"]) == (report.total_rows, report.total_rows_out)
        assert (sums["rows"]["expected"], sums["rows"]["left"]) == (report.total_rows, 0)
        assert sums["shards"] == {"expected": 5, "done": 5, "in_parts": 0, "left": 0}
        assert sums["cost"]["total"] == pytest.approx(sum(record["cost"] for record in records))
        each = sum(record["cost"] for record in records) / counts.tokens * 1e6
        assert sums["cost"]["per_million_tokens"] == pytest.approx(each)
        assert report.cost is not None and 0 < sums["cost"]["total"] <= report.cost
        wall_s = sum(record["seconds"]["wall"] for record in records)
        assert sums["time"]["device_s"] == pytest.approx(wall_s, abs=0.01)
        assert sum(stage["seconds"] for stage in sums["stages"]) == pytest.approx(wall_s, rel=0.02, abs=0.01)
        assert sum(stage["share"] for stage in sums["stages"]) == pytest.approx(1.0, abs=0.02)
        assert sum(sums["lengths"].values()) == sum(sum(r["length_histogram"].values()) for r in records)
    assert (job["state"], job["index"]["vectors"], job["index"]["current"]) == ("finished", report.total_rows_out, True)
    assert job["certificate"]["ok"] and job["certificate"]["current"]
    assert document["total"]["states"] == {"finished": 1}


def test_spans_and_counters_add_up_to_the_report(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "TRACE")):
            monkeypatch.delenv(name)
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    try:
        for number in range(2):
            write_shard(tmp_path / "in" / f"{number}.parquet", [*(f"text {row} " * 9 for row in range(30)), None])
        embed(tmp_path / "in", tmp_path / "out", model_dir, devices="cpu")
    finally:
        collector.close()
    job, counters = report_of(tmp_path / "out", time.time()), collector.totals()
    spans = [facts(span.attributes) for span in collector.named("embed_corpus.shard")]
    assert job["tokens"]["computed"] == counters["tokens"] == sum(span["tokens"] for span in spans) > 0
    assert job["texts"]["different"] == counters["texts"]
    assert job["texts"]["truncated"] == counters["truncated"] > 0
    assert job["rows"]["num_quarantined"] == counters["quarantined"] == 2
    assert job["rows"]["done"] == counters["rows"]


def test_a_stopped_and_continued_job_is_seen_as_one(tmp_path: Path, model_dir: str) -> None:
    for number in range(4):
        write_shard(tmp_path / "in" / f"{number}.parquet", [f"text {row} of {number}" for row in range(50)])
    options: dict[str, Any] = {"devices": "cpu"}
    first = embed(tmp_path / "in", tmp_path / "out", model_dir, max_tokens=1, **options)
    assert first.stopped
    job = report_of(tmp_path / "out", time.time())
    assert (job["state"], job["shards"]["done"], job["eta_s"]) == ("stopped", first.shards_done, None)
    assert job["shards"]["left"] == 4 - first.shards_done > 0
    assert job["rows"]["left"] == 200 - first.total_rows
    shutil.rmtree(tmp_path / "out" / "runs")  # a run that was killed does not say that it has ended
    assert report_of(tmp_path / "out", time.time())["eta_s"] is not None
    assert report_of(tmp_path / "out", time.time() + 3600)["state"] == "silent"
    second = embed(tmp_path / "in", tmp_path / "out", model_dir, **options)
    job = report_of(tmp_path / "out", time.time())
    assert (job["state"], job["rows"]["left"], job["eta_s"]) == ("finished", 0, None)
    assert job["tokens"]["computed"] == first.counts.tokens + second.counts.tokens


def test_a_job_is_watched_while_another_process_works_on_it(
    tmp_path: Path, model_dir: str, command: RunCommand
) -> None:
    for number in range(30):
        write_shard(tmp_path / "in" / f"{number:02}.parquet", [f"text {row} of {number}" for row in range(20)])
    with start(tmp_path / "in", tmp_path / "out", model_dir, seconds=0.4, devices="cpu") as process:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "out").glob("commits/*.json")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        seen = command("report", "out", "--json")
        assert process.poll() is None
        process.terminate()
        process.communicate()
    assert seen.returncode == 0, seen.stderr
    [job] = json.loads(seen.stdout)["jobs"]
    assert job["state"] == "running"
    assert 1 <= job["shards"]["done"] < 30 and job["shards"]["expected"] == 30
    assert job["rows"] == {**job["rows"], "expected": 600, "done": 20 * job["shards"]["done"]}


def test_nothing_but_records_is_read_and_nothing_is_written(
    done: tuple[RunReport, Path], tmp_path: Path, command: RunCommand
) -> None:
    shutil.copytree(done[1], tmp_path / "out")
    for folder in ("embeddings", "reuse", "quarantine", ".lock"):
        place = tmp_path / "out" / folder
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    seen = command("report", "out", "--html", "page.html")
    assert (seen.returncode, seen.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "page.html"}
    code = (
        "import sys, pipeline.report_page, pipeline.report_text; from pipeline.report import make_report; "
        f"pipeline.report_page.page(make_report([{str(tmp_path / 'out')!r}])); "
        "print([name for name in ('torch', 'faiss', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert loaded.stdout == "[]\n"


def test_a_job_is_known_by_the_age_of_its_last_record(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3, 300, index="auto")
    assert report_of(output)["state"] == "waiting"
    write_record(output, "a", NOW - 900)
    write_record(output, "b", NOW - 800)
    assert report_of(output, NOW - 500)["state"] == "running"
    assert report_of(output, NOW - 399)["state"] == "silent"  # four times what a record took
    write_record(output, "c", NOW - 700)
    assert report_of(output)["state"] == "embedded"
    shards_of_index = [{"key": key, "sha256": hashlib.sha256(key.encode()).hexdigest()} for key in "abc"]
    write_json(output / "index" / "index.json", {"factory": "Flat", "ntotal": 300, "shards": shards_of_index[:2]})
    job = report_of(output)
    assert (job["state"], job["index"]["current"]) == ("embedded", False)
    write_json(output / "index" / "index.json", {"factory": "Flat", "ntotal": 300, "shards": shards_of_index})
    job = report_of(output)
    assert (job["state"], job["index"]["current"], job["eta_s"]) == ("finished", True, None)


def write_note(output: Path, name: str = "all", **fields: Any) -> None:
    """How a run ended, as it says so itself."""
    end = {"ended": iso(NOW - 60), "exit_code": 0, "outcome": "done", "reason": "", "retries": 0, "num_failed": 0}
    note = {"version": 1, "rank": "", "num_ranks": 1, "host": "node-1", "pid": 7, "began": iso(NOW - 900)}
    write_json(output / "runs" / f"{name}.json", {**note, **end, "failed": [], **fields})


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3, 300)
    write_record(output, "a", NOW - 70)
    write_note(output, ended=None)
    assert report_of(output)["state"] == "running"
    failed = [{"shard": "in/b.parquet", "kind": "bad", "reason": "in/b.parquet: cut short"}]
    ill = {"exit_code": 65, "outcome": "bad data", "failed": failed, "num_failed": 1, "retries": 2}
    write_note(output, **ill)
    job = report_of(output)
    why = "the run ended 60 s ago on node-1 with exit code 65, bad data: in/b.parquet: cut short"
    assert (job["state"], job["state_text"]) == ("stopped", why)
    assert job["warnings"] == [
        "in/b.parquet: cut short",
        "given out again in the last run, because a worker was lost: 2 shards or parts",
    ]
    for key in "bc":
        write_record(output, key, NOW - 50)
    write_note(output)
    job = report_of(output)
    assert job["state"] == "finished" and "in/b.parquet: cut short" not in job["warnings"]


def test_ranks_have_stopped_when_all_have(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3, 300)
    write_record(output, "a", NOW - 70)
    write_note(output, "rank-0-of-3", rank="0 of 3", num_ranks=3)
    write_note(output, "rank-2-of-3", rank="2 of 3", num_ranks=3, exit_code=75, outcome="stopped", reason="disk full")
    assert report_of(output)["state"] == "running"  # the third one may have to wait for a machine
    write_note(output, "rank-1-of-3", rank="1 of 3", num_ranks=3)
    text = "1 of 3 ranks; the last, 2 of 3, ended 60 s ago on node-1 with exit code 75, stopped: disk full"
    assert report_of(output)["state_text"] == text
    write_note(output, "rank-1-of-3", rank="1 of 3", num_ranks=3, ended=None)
    assert report_of(output)["state"] == "running"


def test_a_run_notes_how_it_ended(tmp_path: Path, model_dir: str, command: RunCommand) -> None:
    write_shard(tmp_path / "in" / "a.parquet", ["one", "two"])
    for name in "bcd":
        write_shard(tmp_path / "in" / f"{name}.parquet", [name])
    asked = ("run", "in", "--output", "out", "--model", model_dir, "--devices", "cpu", "--index", "none")
    assert command(*asked, "--max-tokens", "1").returncode == 75
    job = report_of(tmp_path / "out", time.time())
    assert job["state"] == "stopped" and "exit code 75, stopped: --max-tokens" in job["state_text"], job["state_text"]
    assert [run["shards_done"] for run in job["runs"]] == [job["shards"]["done"]]
    assert command(*asked, "--rank", "0", "--world-size", "2").returncode == 0
    assert [run["rank"] for run in report_of(tmp_path / "out", time.time())["runs"]] == ["0 of 2"]
    data = (tmp_path / "in" / "d.parquet").read_bytes()
    (tmp_path / "in" / "d.parquet").write_bytes(data[:-20])
    assert command(*asked).returncode == 65
    job = report_of(tmp_path / "out", time.time())
    [run] = job["runs"]  # of all shards, in place of those of ranks
    assert (run["outcome"], run["num_failed"], run["failed"][0]["kind"]) == ("bad data", 1, "bad")
    assert "d.parquet" in job["state_text"] and any("d.parquet" in warning for warning in job["warnings"])


def test_short_records_do_not_make_a_job_silent_within_two_minutes(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3, 300)
    write_record(output, "a", NOW - 100, wall_s=0.5)
    assert report_of(output)["state"] == "running"


def test_time_of_work_counts_several_devices_at_once_only_once(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 6, 600)
    for device in ("cuda:0", "cuda:1"):
        write_record(output, f"{device[-1]}-a", NOW - 300, device=device)
        write_record(output, f"{device[-1]}-b", NOW - 200, device=device)
    job = report_of(output)
    assert job["time"]["began"] == "2027-01-15T07:53:20Z"
    assert (job["time"]["worked_s"], job["time"]["device_s"]) == (200.0, 400.0)
    assert (job["speed"]["tokens_per_s"], job["speed"]["tokens_per_device_s"]) == (200.0, 100.0)
    bins = job["throughput"]["bins"]
    assert {(one["tokens_per_s"], one["devices"]) for one in bins} == {(200.0, 2.0)}
    assert job["num_workers"] == 2 and {worker["tokens"] for worker in job["workers"]} == {20_000}


def test_what_is_left_follows_from_the_recent_rate(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 100, 10_000)
    for number in range(20):  # slow at first, then a shard a ten seconds
        write_record(output, f"slow-{number}", NOW - 2305 + 100 * number, wall_s=100, rows=100)
    for number in range(40):
        write_record(output, f"fast-{number}", NOW - 395 + 10 * number, wall_s=10, rows=100)
    job = report_of(output)
    assert job["speed"]["recent_rows_per_s"] == pytest.approx(10.0, rel=0.2)
    assert job["rows"]["left"] == 4000
    assert job["eta_s"] == pytest.approx(400 - job["time"]["age_s"], rel=0.2)


def test_a_stop_is_cut_out_of_the_time_axis_and_every_token_is_on_it(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 100, 10_000)
    for number in range(10):
        write_record(output, f"monday-{number}", NOW - 90_000 + 100 * number, tokens=1000 + number)
        write_record(output, f"tuesday-{number}", NOW - 2_000 + 100 * number, tokens=3000)
    throughput = report_of(output)["throughput"]
    assert [one["length_s"] for one in throughput["segments"]] == [1000.0, 1000.0]
    assert throughput["segments"][1]["began"] == "2027-01-15T07:25:00Z"
    assert throughput["length_s"] == 2000.0
    ends = [*(one["at_s"] for one in throughput["bins"][1:]), throughput["length_s"]]
    tokens = sum(one["tokens_per_s"] * (end - one["at_s"]) for one, end in zip(throughput["bins"], ends, strict=True))
    assert tokens == pytest.approx(10 * 1000 + 45 + 10 * 3000, rel=1e-3)


def test_parts_of_a_shard_in_work_count_and_once_only(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 2, 600)
    write_record(output, "small", NOW - 400)
    for part in range(3):
        write_record(output, "large", NOW - 300 + 100 * part, part=part)
    job = report_of(output)
    assert job["shards"] == {"expected": 2, "done": 1, "in_parts": 1, "left": 1}
    assert (job["rows"]["done"], job["tokens"]["computed"]) == (400, 40_000)
    assert job["latest"][0]["shard"] == "large#2"
    write_record(output, "large", NOW, tokens=30_000, rows=300, parts=3)  # put together, its parts still lie there
    for part in range(3):
        write_record(output, "large", NOW - 300 + 100 * part, part=part, shard=identity_of(output, "large", part))
    job = report_of(output)
    assert job["shards"] == {"expected": 2, "done": 2, "in_parts": 0, "left": 0}
    assert (job["rows"]["done"], job["tokens"]["computed"], job["state"]) == (400, 40_000, "finished")


def identity_of(output: Path, key: str, part: int) -> dict[str, Any]:
    """The shard of a part's record: that of the whole one, and which part."""
    shard = json.loads((output / "commits" / f"{key}.json").read_text())["shard"]
    return {**shard, "part": {"number": part}}


def test_a_changed_shard_that_is_being_made_again_is_not_finished(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 1, 300)
    write_record(output, "large", NOW - 5000, tokens=30_000, rows=300)
    write_record(output, "large", NOW - 6000, part=0, size_bytes=2)  # of an older version still: nothing of now
    assert report_of(output)["state"] == "finished"
    write_record(output, "large", NOW - 10, part=0, size_bytes=3)
    write_record(output, "large", NOW - 9000, part=1, size_bytes=2)
    job = report_of(output)
    assert (job["state"], job["shards"]["done"], job["shards"]["in_parts"]) == ("running", 0, 1)
    assert job["rows"]["done"] == 100


def test_a_price_given_afterwards_is_of_machines_not_of_devices(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 9, 900)
    for host in ("one", "two"):
        for device in ("cuda:0", "cuda:1"):
            write_record(output, f"{host}-{device}", NOW - 100, host=host, device=device, wall_s=1800)
    assert report_of(output)["cost"]["total"] is None
    cost = report_of(output, price_per_hour=3.0)["cost"]
    assert (cost["total"], cost["machine_s"], cost["source"]) == (pytest.approx(3.0), 3600.0, "--price-per-hour")
    assert cost["per_million_tokens"] == pytest.approx(3.0 / 0.04)


def test_records_without_a_price_are_counted_beside_the_cost(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 9, 900)
    write_record(output, "priced", NOW - 200, cost=2.0)
    write_record(output, "unpriced", NOW - 100)
    cost = report_of(output)["cost"]
    assert (cost["total"], cost["num_unpriced"], cost["per_million_tokens"]) == (2.0, 1, pytest.approx(200.0))


def test_slow_shards_are_named_with_what_made_them_slow(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 100, 10_000)
    usual = {"encode": 90.0, "wait_for_input": 5.0, "wait_for_writer": 5.0}
    for number in range(9):
        write_record(output, f"usual-{number}", NOW - 3000 + 100 * number, seconds=usual)
    tenfold = {name: 10 * seconds for name, seconds in usual.items()}
    write_record(output, "large", NOW - 900, wall_s=1000, tokens=100_000, seconds=tenfold)
    slow: dict[str, dict[str, Any]] = {
        "input": {"seconds": {**usual, "wait_for_input": 305.0}, "wall_s": 400.0},
        "writer": {"seconds": {**usual, "wait_for_writer": 255.0}, "wall_s": 350.0},
        "device": {"seconds": {**usual, "encode": 290.0}, "wall_s": 300.0},
        "memory": {"seconds": {**usual, "encode": 240.0}, "wall_s": 250.0, "counts": {"oom_splits": 7}},
        "lengths": {"seconds": {**usual, "encode": 190.0}, "wall_s": 200.0, "flops": 2.2e10, "counts": {"texts": 10}},
    }
    for number, (name, fields) in enumerate(slow.items()):
        write_record(output, name, NOW - 500 + number, **fields)
    found = {row["shard"]: row for row in report_of(output)["slowest"]}
    assert list(found) == list(slow)  # the worst first; a large one is not slow
    assert [row["lost_s"] for row in found.values()] == [300.0, 250.0, 200.0, 150.0, 100.0]
    assert found["input"]["why"] == "waited 5.1 min for its input (read 1 s, tokenize 2 s)"
    assert found["writer"]["why"] == "waited 4.2 min for the writer"
    assert found["device"]["why"] == "the device computed at 31% of its usual speed"
    assert found["memory"]["why"] == "memory ended 7 times, batches were halved"
    assert found["lengths"]["why"] == "longer texts: 1,000 tokens, usual are 100"


def test_alike_shards_are_not_called_slow(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3, 300)
    write_record(output, "a", NOW - 200)
    assert report_of(output)["slowest"] == []
    write_record(output, "b", NOW - 100)
    assert report_of(output)["slowest"] == []


def test_a_damaged_record_is_named_and_counted_and_the_others_are_shown(tmp_path: Path, command: RunCommand) -> None:
    output = write_run(tmp_path / "out", 9, 900)
    write_record(output, "good", NOW - 100)
    write_record(output, "renamed", NOW - 100)
    (output / "commits" / "renamed.json").rename(output / "commits" / "other.json")
    (output / "commits" / "cut.json").write_text('{"version": 1, "sha')
    write_json(output / "commits" / "empty.json", {"version": 1, "shard": {"key": "empty"}})
    write_json(output / "commits" / "list.json", [])
    write_record(output, "later", NOW - 100, version=2)
    write_record(output, "words", NOW - 100, counts={"tokens": "many"})
    write_record(output, "number", NOW - 100, wall_s=float("nan"), seconds={"encode": 1.0})
    write_record(output, "stranger", NOW - 100, fingerprint="0" * 32)
    (output / "plan.json").write_text("no JSON")
    write_json(output / "index" / "index.json", {"factory": "Flat", "ntotal": "many", "shards": []})
    write_json(output / "certificate.json", {"ok": True, "faults": [], "parity": {"rows": 3}})
    done = command("report", "out", "--json")
    assert done.returncode == 65
    lines = done.stderr.splitlines()
    for name in ("other", "cut", "empty", "list", "later", "words", "number"):
        assert sum(f"commits/{name}.json: " in line and "run `embed-corpus run` again" in line for line in lines) == 1
    assert "plan.json: cut short" in done.stderr and "`embed-corpus plan` again" in done.stderr
    assert "index.json: not as embed-corpus writes it" in done.stderr and "`embed-corpus index` again" in done.stderr
    assert "certificate.json: not as embed-corpus writes it (no 'cosine_min')" in done.stderr
    assert len(lines) == 10
    document = json.loads(done.stdout)
    assert document["total"]["damaged"]["count"] == 10
    [job] = document["jobs"]
    assert (job["shards"]["done"], job["tokens"]["computed"]) == (1, 10_000)
    assert job["warnings"] == ["records of another configuration, in no figure: 1"]


def test_a_record_that_vanishes_between_listing_and_reading_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = write_run(tmp_path / "out", 2, 200)
    write_record(output, "a", NOW - 100)
    list_files = Output.files

    def listed(store: Output, folder: str, suffix: str, *, hidden: bool = False) -> Iterator[str]:
        yield from list_files(store, folder, suffix, hidden=hidden)
        if folder == "commits":
            yield "commits/gone.json"

    monkeypatch.setattr(Output, "files", listed)
    job = report_of(output)
    assert (job["shards"]["done"], job["damaged"]["count"]) == (1, 0)


def test_a_folder_that_vanishes_while_it_is_listed_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = write_run(tmp_path / "out", 2, 200)
    write_record(output, "a", NOW - 100)
    list_files, failures = Output.files, iter([FileNotFoundError("parts/x"), FileNotFoundError("parts/y")])

    def listed(store: Output, folder: str, suffix: str, *, hidden: bool = False) -> Iterator[str]:
        if (failure := next(failures, None)) is not None:
            raise failure
        return list_files(store, folder, suffix, hidden=hidden)

    monkeypatch.setattr(Output, "files", listed)
    assert report_of(output)["shards"]["done"] == 1
    assert report_records.LISTINGS > 2


def test_what_is_no_output_is_refused(tmp_path: Path, command: RunCommand) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        done = command("report", name)
        assert (done.returncode, done.stdout) == (78, "")
        assert f"{name}: no run.json here" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "empty" / "run.json").write_text("{")
    assert command("report", "empty").returncode == 78
    assert command("report").returncode == 2


def test_a_page_that_cannot_be_written_is_named(done: tuple[RunReport, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html .*/no/page\.html: cannot be written \(No such file"):
        write_page(make_report([str(done[1])]), str(tmp_path / "no" / "page.html"))


def test_several_jobs_are_added_up(tmp_path: Path, command: RunCommand) -> None:
    one, two = write_run(tmp_path / "one", 1, 100), write_run(tmp_path / "two", 4, 400)
    write_record(one, "a", NOW - 100, cost=1.0)
    write_record(two, "a", NOW - 100, cost=2.0, counts={"quarantined": {"null text": 3}})
    write_record(two, "b", NOW, cost=2.5)
    document = make_report([str(one), str(two), f"{one}/"], now=NOW)
    total = document["total"]
    assert (total["jobs"], total["states"]) == (2, {"running": 1, "finished": 1})
    assert total["shards"] == {"expected": 5, "done": 3, "in_parts": 0, "left": 2}
    assert (total["rows"]["done"], total["rows"]["left"], total["rows"]["quarantined"]) == (300, 200, {"null text": 3})
    assert (total["tokens"]["computed"], total["cost"]["total"]) == (30_000, 5.5)
    assert (total["time"]["worked_s"], total["time"]["device_s"]) == (200.0, 300.0)
    assert total["eta_s"] == document["jobs"][1]["eta_s"] > 0
    done = command("report", "one", "two", "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert "2 jobs: " in done.stdout and "30,000" in done.stdout
    assert Checked(tmp_path / "page.html").ids == {"job-1", "job-2"}


def test_planned_stands_beside_actual(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 2, 200)
    write_record(output, "a", NOW - 100, cost=1.5)
    plan = {"tokens": {"value": 19_000.0}, "embed_s": 250.0, "seconds": {"value": 300.0}, "price_per_hour": 36.0}
    write_json(output / "plan.json", {"fingerprint": MARK, **plan})
    found = report_of(output)["plan"]
    assert found["tokens"] == {"expected": 19_000.0, "actual": 10_000}
    assert (found["embed_s"], found["whole"]) == ({"expected": 250.0, "actual": 100.0}, False)
    assert "planned     19,000 tokens in 4.2 min for 2.50; so far 10,000 in 100 s for 1.50\n" in text_of(output)
    write_json(output / "plan.json", {"fingerprint": "another", **plan})
    job = report_of(output)
    assert job["plan"] is None and job["warnings"] == ["plan.json is of another configuration; it is left out"]


def test_a_certificate_older_than_a_record_proves_nothing_of_it(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 1, 100)
    write_record(output, "a", NOW - 100)
    certificate = {"fingerprint": MARK, "ok": True, "created": "2027-01-15T07:59:00+00:00", "faults": [], "parity": {}}
    write_json(output / "certificate.json", certificate)
    assert report_of(output)["certificate"]["current"]
    assert "proven at 2027-01-15 07:59:00 UTC\n" in text_of(output) + "\n"
    write_record(output, "a", NOW - 30)
    assert not report_of(output)["certificate"]["current"]
    assert "there are younger records" in text_of(output)


def text_of(output: Path, width: int = 500) -> str:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False)
    for part in renderables(make_report([str(output)], now=NOW), width):
        console.print(part, soft_wrap=isinstance(part, str))
    return stream.getvalue()


def test_the_table_fits_a_terminal_and_holds_no_control_character(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 99, 9900)
    for number in range(20):
        name = f"year=2026/month=12/part-{number:05}-of-00099"
        write_record(output, name, NOW - 3000 + 100 * number, host=f"pod-{number}")
    write_record(output, HOSTILE.replace("/", "_"), NOW - 10, wall_s=900)
    text = text_of(output, 80).replace(str(output), "OUT")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text and "\\x1b[31m" in text
    assert "slowest shards" in text and "last record, UTC" in text


class Checked(HTMLParser):
    """A page that is well formed and asks for nothing outside itself."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, source: Path | str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text = ""
        self.source = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        self.feed(self.source)
        self.close()
        assert self.open == []
        assert {link[1:] for link in self.links} <= self.ids
        assert not {"script", "link", "img", "iframe", "object", "base"} & set(self.tags)
        style = self.source.partition("<style>")[2].partition("</style>")[0]
        assert "url(" not in style and "@import" not in style and "@font-face" not in style

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "data", "action", "xlink:href")
            if name == "id":
                assert value not in self.ids
                self.ids.add(str(value))
            if name == "href":
                assert str(value).startswith("#")
                self.links.add(str(value))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_needs_nothing_and_shows_any_name_as_text(
    done: tuple[RunReport, Path], tmp_path: Path
) -> None:
    report, output = done
    document = make_report([str(output)], price_per_hour=2.0)
    write_page(document, str(tmp_path / "page.html"))
    checked = Checked(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "<script>alert('x')<_script>&\"q\"\\x1b[31m" in checked.text
    assert "default-src 'none'" in checked.source and "prefers-color-scheme: dark" in checked.source
    for said in ("finished", "Throughput over time", "Where the time went", "Lengths of the texts", "Slowest shards"):
        assert said in checked.text
    assert f"{report.counts.tokens:,}" in checked.text
    assert len(checked.source) < 60_000


def test_whatever_an_output_says_is_text_on_the_page(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "_")
    output = write_run(tmp_path / name, 9, 900, text_column=HOSTILE, input=[HOSTILE], index="auto")
    run = json.loads((output / "run.json").read_text())
    write_json(output / "run.json", {**run, "model": {"name": HOSTILE}})
    told = {"host": HOSTILE, "device": HOSTILE, "dtype": HOSTILE, "attention": HOSTILE}
    for number in range(3):
        fields = {**told, "host": f"{HOSTILE}{number}", "counts": {"quarantined": {HOSTILE: 1}}}
        write_record(output, f"{name}{number}", NOW - 900 + 100 * number, wall_s=100 + 50 * number, **fields)
    (output / "commits" / f"{name}-damaged.json").write_text("{")
    write_json(output / "index" / "index.json", {"factory": HOSTILE, "ntotal": 1, "created": HOSTILE, "shards": []})
    write_json(output / "certificate.json", {"ok": False, "faults": [HOSTILE], "created": HOSTILE, "parity": {}})
    document = make_report([str(output), str(write_run(tmp_path / "other", 1, 1))], now=NOW)
    checked = Checked(page(document))
    assert checked.text.count("<script>") > 15 and "\x1b" not in checked.source


@pytest.mark.parametrize("write", [lambda output: None, lambda output: write_record(output, "a", NOW - 30, wall_s=0.0)])
def test_the_page_of_a_job_that_has_hardly_begun_is_whole(tmp_path: Path, write: Callable[[Path], None]) -> None:
    output = write_run(tmp_path / "out", 0, 0)
    write(output)
    checked = Checked(page(make_report([str(output)], now=NOW)))
    assert not re.search(r"\b(nan|inf)\b", checked.text)
    assert text_of(output)


def test_a_page_of_thousands_of_shards_and_many_stops_stays_small_and_tables_bounded(tmp_path: Path) -> None:
    output = write_run(tmp_path / "out", 3000, 300_000)
    for number in range(2000):
        day, hour = divmod(number, 50)
        ended = NOW - 86_400 * (40 - day) + 100 * hour
        write_record(output, f"{number:05}", ended, wall_s=100 + number % 90, host=f"pod-{number}")
    document = make_report([str(output)], now=NOW)
    [job] = document["jobs"]
    assert (len(job["slowest"]), len(job["latest"]), len(job["workers"]), job["num_workers"]) == (10, 10, 20, 2000)
    assert len(job["throughput"]["bins"]) <= 100
    assert len(job["throughput"]["segments"]) == 40
    assert len(Checked(page(document)).source) < 120_000


def test_a_page_of_many_jobs_has_a_line_for_each_and_a_bounded_number_in_full(tmp_path: Path) -> None:
    outputs = [write_run(tmp_path / f"out-{number}", 1, 100) for number in range(25)]
    for output in outputs:
        write_record(output, "a", NOW - 100)
    checked = Checked(page(make_report(list(map(str, outputs)), now=NOW)))
    assert len(checked.ids) == 20
    assert all(f"out-{number}" in checked.text for number in range(25))


def test_an_output_on_an_object_store_reads_the_same_and_only_json(
    done: tuple[RunReport, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir("s3://reports")
        store.put(f"{done[1]}/", "s3://reports/out/", recursive=True)
        s3.requests.clear()
        there, here = report_of("s3://reports/out"), report_of(done[1])
        assert {**there, "output": ""} == {**here, "output": ""}
        assert s3.asked("GET", "commits/") and not s3.asked("GET", ".parquet") and not s3.asked("HEAD", ".parquet")
        assert not s3.asked("PUT") and not s3.asked("POST") and not s3.asked("DELETE")
        fsspec.filesystem("s3").clear_instance_cache()


def test_amounts_are_short_and_axes_round() -> None:
    assert list(map(compact, (0, 0.25, 950, 999.9, 12_500, 3_140_000, 5.6e9))) == [
        "0", "0.25", "950", "1k", "12.5k", "3.14M", "5.6B",
    ]  # fmt: skip
    assert list(map(duration, (0, 0.01, 3.24, 9, 58.4, 150, 2040, 18_400, 300_000))) == [
        "0 s", "<0.1 s", "3.2 s", "9 s", "58 s", "2.5 min", "34 min", "5.1 h", "3.5 days",
    ]  # fmt: skip
    for largest in (1e-3, 0.9, 1.0, 7, 10, 99, 12_345, 4e9):
        top, marks = scale(largest)
        assert largest <= top * 1.0001 and 2 <= len(marks) <= 5 and marks[-1] == top < 3 * largest


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_the_page_without_overflow_or_labels_on_each_other(tmp_path: Path, width: int) -> None:
    output = write_run(tmp_path / "out", 500, 50_000)
    for number in range(200):
        name = f"year=2026/month={number:02}/a-name-without-any-place-to-break-it-{'x' * 80}-{number}"
        ended = NOW - 40_000 + 150 * number + (8000 if number > 80 else 0) + (9000 if number > 180 else 0)
        write_record(output, name, ended, wall_s=300 - number, host=f"pod-{number % 3}", tokens=10**7, cost=1234.5)
    nightly = write_run(tmp_path / "nightly", 60, 6000)
    for number in range(60):
        write_record(nightly, str(number), NOW - 86_400 * (60 - number))
    write_page(make_report([str(output), str(nightly)], now=NOW), str(tmp_path / "page.html"))
    (tmp_path / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)))
    seen = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,900",
         "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "measure.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(seen.stdout.partition("<pre>")[2].partition("</pre>")[0])
    assert found == {"too_wide": 0, "resources": 0, "overlaps": [], "outside": [], "height": found["height"]}
    assert found["height"] > 1000


MEASURE = """<!doctype html>
<body><iframe src="page.html" width="WIDTH" height="800" style="border:0"></iframe><pre></pre>
<script>
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
  const boxes = (inside, selector) =>
    [...inside.querySelectorAll(selector)].map((one) => [one.textContent, one.getBoundingClientRect()]);
  const isOutside = (box) => box.left < 0 || box.right > root.clientWidth;
  const overlaps = [], outside = [];
  for (const chart of page.querySelectorAll(".chart")) {
    for (const kind of [".x span", ".y", ".stop"]) {
      const all = boxes(chart, kind);
      all.forEach(([a, one], i) => all.slice(i + 1).forEach(([b, two]) => {
        if (one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom)
          overlaps.push(`${a} | ${b}`);
      }));
      for (const [text, box] of all) if (isOutside(box)) outside.push(text);
    }
  }
  for (const [text, box] of boxes(page, "h1, .tiles dd, .progress p, .badge, svg.bar"))
    if (isOutside(box)) outside.push(text);
  document.querySelector("pre").textContent = JSON.stringify({
    too_wide: root.scrollWidth - root.clientWidth, height: root.scrollHeight, overlaps, outside,
    resources: frame.contentWindow.performance.getEntriesByType("resource").length,
  });
};
</script></body>"""
