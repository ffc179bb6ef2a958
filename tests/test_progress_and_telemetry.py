"""What a run shows and reports: rates, time left, stage seconds that add up."""

from __future__ import annotations

import datetime
import io
import json
import sys
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.pool import Event
from pipeline.progress import JsonDisplay, NoDisplay, PlainDisplay, RichDisplay, Tally, clock, json_line, make_display
from pipeline.records import Counters, Shard
from pipeline.telemetry import Clock, RunReport, shard_telemetry

SHARDS = [Shard("a", "a.parquet", 300, 1, 30), Shard("b", "b.parquet", 100, 1, 10)]


def record(key: str, rows: int, tokens: int) -> dict[str, object]:
    counts = Counters(rows=rows, rows_out=rows, texts=rows, tokens=tokens, computed_tokens=tokens)
    return {"shard": {"key": key}, **shard_telemetry(counts, {"encode": 2.0}, {"read": 0.5}, 2.5)}


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_time_left_follow_bytes_and_tokens() -> None:
    time = Time()
    tally = Tally(SHARDS, time)
    time.now = 5.0
    tally.add(Event("ready", None, {}))  # loading does not count
    time.now = 7.0
    tally.add(Event("progress", SHARDS[0], {"rows": 15, "tokens": 200}))
    assert (tally.tokens_per_s, tally.texts_per_s) == (100.0, 7.5)
    assert tally.share == 0.375
    assert tally.eta_s == pytest.approx(2 * 0.625 / 0.375)
    time.now = 9.0
    tally.add(Event("done", SHARDS[0], record("a", 30, 400)))
    assert (tally.finished_shards, tally.rows_now, tally.share) == (1, 30, 0.75)
    tally.add(Event("progress", SHARDS[1], {"rows": 5, "tokens": 50}))
    tally.add(Event("lost", SHARDS[1], reason="killed"))
    assert (tally.rows_now, tally.share) == (30, 0.75)
    tally.add(Event("bad", SHARDS[1], reason="damaged"))
    assert (tally.finished_shards, tally.share) == (2, 1.0)


def test_a_log_gets_a_line_every_few_seconds_and_no_control_codes() -> None:
    time, stream = Time(), io.StringIO()
    with PlainDisplay(stream, time).embedding(SHARDS) as show:
        for step in range(1, 101):
            time.now = step / 10
            show(Event("progress", SHARDS[0], {"rows": step // 4, "tokens": step}))
        show(Event("done", SHARDS[0], record("a", 30, 400)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4  # the start, two in ten seconds, the finished shard
    assert "shard 0/2" in lines[1]
    assert "eta" in lines[1]
    assert "a: 30 vectors, 400 tokens in 2.5 s" in lines[3]
    assert not set("\r\x1b") & set(stream.getvalue())


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with RichDisplay().embedding(SHARDS) as show:
        show(Event("progress", SHARDS[0], {"rows": 3, "tokens": 9}))
        show(Event("lost", SHARDS[0], reason="worker on cpu killed"))
    assert "worker on cpu killed" in capsys.readouterr().err


def told_as_json(events: list[Event], time: Time) -> list[dict[str, Any]]:
    """What a ``JsonDisplay`` says of events that are two seconds apart."""
    stream = io.StringIO()
    display = JsonDisplay(stream, time)
    display.about(rank=3, trace_id="ab" * 16)
    with display.embedding(SHARDS) as show:
        for event in events:
            time.now += 2.0
            show(event)
    display.line("index: 40 vectors")
    assert "\x1b" not in stream.getvalue()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


READY = {"load_s": 1.5, "dim": 8, "dtype": "float32", "device": "cpu", "attention": "grouped"}


def test_a_machine_gets_every_occasion_as_an_object() -> None:
    lines = told_as_json(
        [
            Event("ready", None, READY),
            Event("progress", SHARDS[0], {"rows": 10, "tokens": 100}),
            Event("progress", SHARDS[0], {"rows": 15, "tokens": 200}),
            Event("lost", SHARDS[0], reason="a.parquet: worker on cpu killed; trying again"),
            Event("done", SHARDS[0], record("a", 30, 400)),
            Event("bad", SHARDS[1], reason="b.parquet: damaged"),
        ],
        Time(),
    )
    assert [(line["event"], line["level"]) for line in lines] == [
        ("start", "info"), ("ready", "info"), ("progress", "info"), ("lost", "warning"), ("done", "info"),
        ("bad", "error"), ("progress", "info"), ("end", "info"), ("line", "info"),
    ]  # fmt: skip
    start, ready, progress, lost, done, bad, _, end, line = lines
    assert (start["shards"], start["rows"]) == (2, 40)
    assert ready["message"].startswith("model ready in 1.5 s: 8 dimensions")
    assert (progress["shard"], progress["rows"], progress["tokens"], progress["tokens_per_s"]) == ("a", 15, 200, 50.0)
    assert progress["eta_s"] == pytest.approx(4 * 0.625 / 0.375, abs=0.1)
    assert (lost["shard"], lost["message"]) == ("a", "a.parquet: worker on cpu killed; trying again")
    assert (done["shard"], done["rows"], done["tokens"], done["tokens_per_s"]) == ("a", 30, 400, 160.0)
    assert (bad["shard"], bad["message"]) == ("b", "b.parquet: damaged")
    assert (end["rows"], end["tokens"], end["eta_s"]) == (30, 400, 0.0)
    assert line["message"] == "index: 40 vectors"


def test_every_object_says_when_and_whose_it_is() -> None:
    for line in told_as_json([Event("bug", SHARDS[0], reason="KeyError")], Time()):
        moment = datetime.datetime.fromisoformat(line["time"])
        assert line["time"].endswith("Z") and moment.utcoffset() == datetime.timedelta()
        assert abs((datetime.datetime.now(datetime.UTC) - moment).total_seconds()) < 60
        assert (line["rank"], line["trace_id"]) == (3, "ab" * 16)


def test_an_object_is_one_line_whatever_it_says() -> None:
    said = json_line("KeyError\nTraceback\x1b[31m \u2028 ü", "error", "bug", shard=None)
    assert said.isascii() and said.isprintable()
    assert json.loads(said)["message"] == "KeyError\nTraceback\x1b[31m \u2028 ü"
    assert "shard" not in json.loads(said)


def test_json_is_never_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(make_display("auto", "json"), JsonDisplay)
    assert isinstance(make_display("plain", "json"), JsonDisplay)
    assert isinstance(make_display("none", "json"), NoDisplay)
    with pytest.raises(ConfigError, match="--log-format json has no bar"):
        make_display("rich", "json")
    with pytest.raises(ConfigError, match="--log-format: found 'yaml'; expected text or json"):
        make_display("auto", "yaml")


def test_displays_are_chosen_by_name_and_terminal() -> None:
    assert isinstance(make_display("none"), NoDisplay)
    assert isinstance(make_display("auto"), PlainDisplay)  # stderr is no terminal under a test runner
    assert isinstance(make_display("rich"), RichDisplay)


def test_an_unknown_display_is_refused() -> None:
    with pytest.raises(ConfigError, match="--progress: found 'foo'; expected auto, rich, plain or none"):
        make_display("foo")


def test_times_are_short() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


def test_stage_seconds_are_exclusive_and_add_up_to_the_wall_time() -> None:
    time = Time()
    stopwatch = Clock(time)
    with stopwatch.stage("encode"):
        time.now = 2.0

    def slow() -> object:
        for item in range(2):
            time.now += 1.0
            yield item

    assert list(stopwatch.waiting("wait_for_input", iter(slow()))) == [0, 1]
    assert stopwatch.seconds == {"encode": 2.0, "wait_for_input": 2.0}
    measured = shard_telemetry(Counters(), stopwatch.seconds, {}, 5.0)["seconds"]
    assert measured == {"wall": 5.0, "encode": 2.0, "wait_for_input": 2.0, "other": 1.0}


def test_efficiency_is_real_tokens_over_computed_tokens() -> None:
    padded = Counters(tokens=75, computed_tokens=100)
    assert shard_telemetry(padded, {}, {}, 1.0)["token_efficiency"] == 0.75
    assert shard_telemetry(Counters(), {}, {}, 1.0)["token_efficiency"] == 1.0


def test_a_report_counts_and_its_exit_code_is_the_gravest() -> None:
    report = RunReport("out", shards_total=3, dim=8)
    report.add_shard(record("a", 30, 400))
    report.encode_wall_s = 4.0
    assert (report.tokens_per_s, report.texts_per_s, report.exit_code) == (100.0, 7.5, 0)
    assert report.to_dict()["shards"][0]["tokens"] == 400
    assert "1 of 3 shards, 30 vectors of 8" in report.sentence()
    for kind, code in (("bad", 65), ("gave up", 75), ("bug", 1)):
        report.add_failure("b.parquet", kind, "why")
        assert report.exit_code == code
    assert report.failed[0].reason == "b.parquet: why"


def test_counters_add_up_by_reason() -> None:
    total = Counters(rows=1, quarantined={"null text": 1})
    total.add(Counters(rows=2, quarantined={"null text": 1, "no tokens": 1}))
    assert (total.rows, total.quarantined) == (3, {"null text": 2, "no tokens": 1})
