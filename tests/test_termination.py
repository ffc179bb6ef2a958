"""The reason of a failure as a container's termination message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import termination
from pipeline.termination import MAX_BYTES, VARIABLE, cut, write_reason


def test_the_last_reason_stands_alone_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reason"
    monkeypatch.setenv(VARIABLE, str(path))
    write_reason("a longer reason of an earlier failure")
    write_reason("part-3.parquet: größer als erlaubt")
    assert path.read_text(encoding="utf-8") == "part-3.parquet: größer als erlaubt"


def test_the_default_file_is_written_only_where_kubernetes_has_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(termination, "DEFAULT_PATH", str(path))
    write_reason("nobody asked", environ={})
    assert not path.exists()
    path.touch()
    write_reason("why", environ={})
    assert path.read_text() == "why"


@pytest.mark.parametrize("letter", ["a", "ä", "€", "🙂"])
@pytest.mark.parametrize("shift", range(4))
def test_a_long_reason_is_cut_between_characters(letter: str, shift: int) -> None:
    data = cut("x" * shift + letter * 5000)
    assert MAX_BYTES - 4 < len(data) <= MAX_BYTES
    assert data.decode("utf-8") == "x" * shift + letter * (len(data.decode()) - shift - 1) + "…"


def test_a_reason_that_just_fits_is_kept_whole() -> None:
    assert cut("a" * MAX_BYTES) == b"a" * MAX_BYTES


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert cut("\ud800.parquet") == b"?.parquet"


@pytest.mark.parametrize("path", ["missing/folder/reason", ".", "null\0byte"])
def test_a_path_that_cannot_be_written_is_no_failure(tmp_path: Path, path: str) -> None:
    write_reason("why", environ={VARIABLE: f"{tmp_path}/{path}"})


def test_a_pipe_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_reason("why", environ={VARIABLE: str(tmp_path / "pipe")})
