"""What is finished: only what a commit record names, only while its files are whole, only for the same input."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.ledger import Ledger, fingerprint, read_run, start_run
from pipeline.records import Shard
from pipeline.storage import Output

SHARD = Shard("a/x", "in/a/x.parquet", 10, 20, 3, 1)
FIELDS = {"prompt": "", "max_length": None}


def commit(output: Output, shard: Shard = SHARD, mark: str = "f") -> dict[str, Any]:
    name = f"embeddings/{shard.key}.parquet"
    temporary = output.temporary(name)
    temporary.write_bytes(b"vectors")
    output.publish(temporary, name)
    record = {
        "shard": {"key": shard.key, **shard.identity()},
        "fingerprint": mark,
        "output": {"path": name, "bytes": 7, "rows": 3},
        "quarantine": None,
    }
    Ledger(output).commit(record)
    return record


def test_a_committed_shard_is_done_for_its_input_and_configuration_only(tmp_path: Path) -> None:
    output = Output(tmp_path)
    commit(output)
    ledger = Ledger(output)
    assert ledger.is_done(SHARD, "f")
    assert ledger.is_done(replace(SHARD, path="moved/a/x.parquet"), "f")
    assert not ledger.is_done(SHARD, "g")
    assert not ledger.is_done(replace(SHARD, size_bytes=11), "f")
    assert not ledger.is_done(replace(SHARD, mtime_ns=21), "f")
    assert not ledger.is_done(replace(SHARD, key="a/y"), "f")


@pytest.mark.parametrize("damage", ["delete", "empty", "cut"])
def test_a_record_counts_only_while_its_output_is_whole(tmp_path: Path, damage: str) -> None:
    output = Output(tmp_path)
    commit(output)
    path = tmp_path / "embeddings/a/x.parquet"
    path.unlink() if damage == "delete" else path.write_bytes(b"" if damage == "empty" else b"vector")
    assert Ledger(output).commits() == []


@pytest.mark.parametrize("content", ["", "{", '{"version": 0}', "[]"])
def test_a_damaged_record_does_not_count(tmp_path: Path, content: str) -> None:
    output = Output(tmp_path)
    commit(output)
    (tmp_path / "commits/a/x.json").write_text(content, encoding="ascii")
    assert not Ledger(output).is_done(SHARD, "f")


def test_commits_are_listed_in_natural_order(tmp_path: Path) -> None:
    output = Output(tmp_path)
    for number in (10, 9, 1):
        commit(output, replace(SHARD, key=f"p{number}"))
    assert [record["shard"]["key"] for record in Ledger(output).commits()] == ["p1", "p9", "p10"]


def test_the_fingerprint_depends_on_values_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": "ü"}) == fingerprint({"b": "ü", "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_another_configuration_is_refused_and_the_field_named(tmp_path: Path) -> None:
    output = Output(tmp_path)
    start_run(output, FIELDS, {"columns": []}, {}, {}, {})
    commit(output)
    start_run(output, FIELDS, {"columns": []}, {"devices": "cpu,cpu"}, {}, {})
    with pytest.raises(ConfigError, match=r'prompt is "" there and "query: " now'):
        start_run(output, {**FIELDS, "prompt": "query: "}, {"columns": []}, {}, {}, {})
    with pytest.raises(ConfigError, match=r'columns is \[\] there and \["url"\] now'):
        start_run(output, FIELDS, {"columns": ["url"]}, {}, {}, {})


def test_an_output_without_finished_shards_takes_any_configuration(tmp_path: Path) -> None:
    output = Output(tmp_path)
    first = start_run(output, FIELDS, {}, {}, {}, {})
    second = start_run(output, {**FIELDS, "prompt": "p"}, {}, {}, {}, {})
    assert first != second == read_run(output)["fingerprint"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json here"):
        read_run(str(tmp_path))


def test_only_one_holder_of_the_lock(tmp_path: Path) -> None:
    output = Output(tmp_path)
    with output.lock() as first, Output(tmp_path).lock() as second:
        assert (first, second) == (True, False)
    with output.lock() as again:
        assert again


def test_leftovers_of_a_crash_are_swept_and_nothing_else(tmp_path: Path) -> None:
    output = Output(tmp_path)
    commit(output)
    output.temporary("embeddings/a/y.parquet").write_bytes(b"half")
    output.temporary("commits/a/y.json").write_bytes(b"{")
    assert output.sweep() == 2
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["x.json", "x.parquet"]


@pytest.mark.skipif(not os.path.isdir("/proc/1"), reason="needs a folder that even root cannot write")
def test_an_unwritable_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output /proc/1/out: cannot be written"):
        Output("/proc/1/out").prepare()
