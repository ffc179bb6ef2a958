"""The texts of hits whose text column was not carried: read from the input, and never another text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.indexer import build_index
from pipeline.search import CorpusIndex, open_index
from pipeline.storage import Output
from tests.test_search import add_shard, unit

NUMBER = pa.array(range(40))


def write_input(path: Path, word: str, num: int = 40) -> Path:
    """Texts ``<word> <row>`` in row groups of 8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"doc": [{"body": f"{word} {row}"} for row in range(num)]}), path, row_group_size=8)
    return path


def write_run(root: Path, inputs: Path, **config: Any) -> None:
    config = {"id_column": "doc_id", "columns": ["number"], "text_column": "doc.body", "input": [str(inputs)], **config}
    Output(root).write_json("run.json", {"fingerprint": "f1", "fields": {}, "config": config})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two shards of 40 rows; row 1 of the second has no vector."""
    out = tmp_path / "out"
    write_run(out, tmp_path / "in")
    source = write_input(tmp_path / "in" / "a.parquet", "alpha")
    add_shard(out, "a", unit(40, 1), source=source, number=NUMBER)
    source = write_input(tmp_path / "in" / "lang=de" / "b.parquet", "beta", 41)
    add_shard(out, "lang=de/b", unit(40, 2), quarantined=[1], source=source, number=NUMBER)
    build_index(str(out))
    return out


def texts(index: CorpusIndex, *queries: Any, **options: Any) -> list[Any]:
    return index.search(np.stack(queries), k=1, **options).table["text"].to_pylist()


def test_the_text_is_that_of_the_input_row(root: Path) -> None:
    index = open_index(str(root), texts=True)
    queries = [unit(40, 1)[33], unit(40, 2)[0], unit(40, 2)[1], unit(40, 1)[2], unit(40, 1)[33]]
    result = index.search(np.stack(queries), k=1)
    assert result.table["text"].to_pylist() == ["alpha 33", "beta 0", "beta 2", "alpha 2", "alpha 33"]
    assert result.table.column_names[-2:] == ["number", "text"]
    assert result.warnings == ()


def test_it_comes_only_where_it_is_asked_for(root: Path) -> None:
    index = open_index(str(root))
    assert "text" not in index.search(unit(1)).table.column_names
    assert index.search(unit(1), columns=["text", "number"]).table.column_names[-2:] == ["text", "number"]
    assert texts(index, unit(40, 1)[3], columns=["text"]) == ["alpha 3"]
    assert "text" not in open_index(str(root), texts=True).search(unit(1), columns=[]).table.column_names
    empty = index.search(np.empty((0, 8), np.float32), columns=["text"]).table
    assert empty.schema.field("text").type == pa.string() and empty.num_rows == 0


def test_a_carried_text_is_not_looked_for_in_the_input(tmp_path: Path) -> None:
    write_run(tmp_path / "out", tmp_path / "gone", text_column="text")
    add_shard(tmp_path / "out", "a", unit(5))
    build_index(str(tmp_path / "out"))
    result = open_index(str(tmp_path / "out"), texts=True).search(unit(5)[2], k=1)
    assert result.table["text"].to_pylist() == ["text a 2"] and result.warnings == ()


def test_a_changed_input_gives_no_text_and_one_warning(root: Path, tmp_path: Path) -> None:
    write_input(tmp_path / "in" / "a.parquet", "gamma")  # as many rows, other texts
    index = open_index(str(root), texts=True)
    result = index.search(np.stack([unit(40, 1)[33], unit(40, 2)[0]]), k=1)
    assert result.table["text"].to_pylist() == [None, "beta 0"]
    assert result.table["number"].to_pylist() == [33, 0]
    [warning] = result.warnings
    assert warning == f"text of 1 hits left out: {tmp_path}/in/a.parquet has changed since it was embedded"
    assert warning in result._repr_html_()


def test_an_input_that_is_gone_gives_no_text_and_one_warning(root: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "in").rglob("*.parquet"):
        path.unlink()
    result = open_index(str(root), texts=True).search(np.stack([unit(40, 1)[33], unit(40, 2)[0]]), k=2)
    assert set(result.table["text"].to_pylist()) == {None}
    [warning] = result.warnings
    assert "is gone; and of 1 more shards" in warning


def test_an_input_of_the_same_content_elsewhere_is_found_by_its_key(root: Path, tmp_path: Path) -> None:
    (tmp_path / "in").rename(tmp_path / "moved")
    write_run(root, tmp_path / "moved")  # as the next run writes it
    queries = unit(40, 1)[33], unit(40, 2)[0]
    assert texts(open_index(str(root), texts=True), *queries) == ["alpha 33", "beta 0"]


def test_a_touched_file_is_a_changed_one(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.parquet"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert texts(open_index(str(root), texts=True), unit(40, 1)[33]) == [None]


def test_a_shard_that_was_embedded_again_gives_no_text_of_its_new_input(root: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in" / "a.parquet", "gamma")
    add_shard(root, "a", unit(40, 3), source=source, number=NUMBER)
    result = open_index(str(root)).search(unit(40, 1)[33], k=1, columns=["text"])
    assert result.table["text"].to_pylist() == [None]
    assert "shard a changed after the index was built" in result.warnings[0]


def test_of_a_long_text_the_piece_is_shown(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "in" / "a.parquet"
    source.parent.mkdir()
    pq.write_table(pa.table({"doc": [{"body": "unused"}, {"body": "äöü one two three"}]}), source)
    write_run(out, source)
    pieces = {
        "row": pa.array([1, 1, 1]),
        "chunk": pa.array([0, 1, 2]),
        "start": pa.array([0, 4, 12]),
        "end": pa.array([3, 11, 17]),
    }
    add_shard(out, "a", unit(3), ids=["x", "x", "x"], source=source, **pieces)
    build_index(str(out))
    index = open_index(str(out), texts=True)
    assert texts(index, *unit(3)) == ["äöü", "one two", "three"]
    assert texts(index, *unit(3), columns=["text"]) == ["äöü", "one two", "three"]
