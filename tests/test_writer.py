"""Vectors into files: input order, rows in = rows out + quarantined, nothing visible before it is complete."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import writer
from pipeline.errors import OutputError
from pipeline.records import Shard, Window
from pipeline.storage import Output, sha256_file
from pipeline.writer import ShardWriter
from tests.conftest import vectors_of

SHARD = Shard("a/x", "in/a/x.parquet", 1, 1)
SCHEMA = pa.schema([("id", pa.int64())])


def window(first_row: int, texts: list[str | None], rejected: dict[int, str] | None = None) -> Window:
    ids = pa.array(range(first_row, first_row + len(texts)), pa.int64())
    return Window(first_row, pa.table({"id": ids}), texts, rejected or {})


def vectors(num: int, dim: int = 4) -> np.ndarray:
    return np.random.default_rng(num).standard_normal((num, dim)).astype(np.float32)


def make(tmp_path: Path, dtype: str = "float32") -> ShardWriter:
    return ShardWriter(Output(tmp_path), SHARD, 4, dtype, "id")


def test_rows_without_a_vector_are_quarantined_with_their_reason(tmp_path: Path) -> None:
    values = vectors(3)
    values[2, 1] = np.inf
    with make(tmp_path) as out:
        out.write(window(0, ["a", None, "b"]), np.array([0, -1, 1]), values[:2])
        out.write(window(3, [None, "c", "a"], {0: "not UTF-8"}), np.array([-1, 1, 0]), values[[0, 2]])
        parts = out.finish(SCHEMA)
    table = pq.read_table(tmp_path / "embeddings/a/x.parquet")
    assert table["id"].to_pylist() == [0, 2, 5]
    np.testing.assert_array_equal(vectors_of(table), values[[0, 1, 0]])
    bad = pq.read_table(tmp_path / "quarantine/a/x.parquet")
    assert bad.to_pylist() == [
        {"id": 1, "row": 1, "reason": "null text"},
        {"id": 3, "row": 3, "reason": "not UTF-8"},
        {"id": 4, "row": 4, "reason": "non-finite"},
    ]
    assert (parts["output"]["rows"], parts["quarantine"]["rows"], out.rows_in) == (3, 3, 6)
    assert parts["output"]["sha256"] == sha256_file(tmp_path / "embeddings/a/x.parquet")


def test_the_file_has_the_promised_layout(tmp_path: Path) -> None:
    with make(tmp_path) as out:
        out.write(window(0, ["a"] * 50), np.arange(50), vectors(50))
        out.finish(SCHEMA)
    file = pq.ParquetFile(tmp_path / "embeddings/a/x.parquet")
    field = file.schema_arrow.field("embedding")
    assert field.type == pa.list_(pa.field("element", pa.float32(), nullable=False), 4)
    assert not field.nullable
    column = file.metadata.row_group(0).column(1)
    assert column.path_in_schema == "embedding.list.element"
    assert "BYTE_STREAM_SPLIT" in column.encodings
    assert column.compression == "ZSTD"
    assert column.statistics is None
    assert not column.has_dictionary_page


def test_row_groups_are_neither_tiny_nor_huge(tmp_path: Path) -> None:
    with make(tmp_path) as out:
        for first in range(0, 40_000, 100):
            out.write(window(first, ["a"] * 100), np.zeros(100, dtype=np.int64), vectors(1))
        out.finish(SCHEMA)
    metadata = pq.read_metadata(tmp_path / "embeddings/a/x.parquet")
    sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert sum(sizes) == 40_000
    assert all(8_000 <= size <= 32_000 for size in sizes[:-1])


def test_half_precision_is_stored_as_such(tmp_path: Path) -> None:
    values = vectors(2)
    with make(tmp_path, "float16") as out:
        out.write(window(0, ["a", "b"]), np.arange(2), values)
        out.finish(SCHEMA)
    table = pq.read_table(tmp_path / "embeddings/a/x.parquet")
    np.testing.assert_array_equal(vectors_of(table), values.astype(np.float16))


def test_a_shard_without_a_vector_still_has_a_file(tmp_path: Path) -> None:
    with make(tmp_path) as out:
        out.write(window(0, [None, None]), np.array([-1, -1]), vectors(0))
        out.finish(SCHEMA)
    table = pq.read_table(tmp_path / "embeddings/a/x.parquet")
    assert (table.num_rows, table.schema.names) == (0, ["id", "embedding"])


def test_nothing_is_left_when_a_shard_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MIN_ROW_GROUP_ROWS", 1)
    with pytest.raises(RuntimeError), make(tmp_path) as out:  # noqa: PT012
        out.write(window(0, ["a"]), np.arange(1), vectors(1))
        raise RuntimeError
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    expected = r"cannot write embeddings/a/x\.parquet .*No space left"
    with pytest.raises(OutputError, match=expected), make(tmp_path) as out:  # noqa: PT012
        out.write(window(0, ["a"]), np.arange(1), vectors(1))
        out.finish(SCHEMA)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_older_quarantine_does_not_survive_a_clean_shard(tmp_path: Path) -> None:
    for texts in (["a", None], ["a", "b"]):
        with make(tmp_path) as out:
            out.write(window(0, texts), np.array([0, 1 if texts[1] else -1]), vectors(2 if texts[1] else 1))
            parts = out.finish(SCHEMA)
    assert parts["quarantine"] is None
    assert not (tmp_path / "quarantine/a/x.parquet").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_reader_sees_the_same_vectors(tmp_path: Path, dtype: str) -> None:
    import datasets
    import duckdb
    import pandas
    import polars

    values = vectors(20).astype(dtype).astype(np.float32)
    with make(tmp_path, dtype) as out:
        out.write(window(0, ["a"] * 20), np.arange(20), values)
        out.finish(SCHEMA)
    path = str(tmp_path / "embeddings/a/x.parquet")
    readers = {
        "pandas": np.stack(pandas.read_parquet(path)["embedding"].to_list()),
        "polars": polars.read_parquet(path)["embedding"].to_numpy(),
        "duckdb": np.array([row[0] for row in duckdb.sql(f"select embedding from '{path}' order by id").fetchall()]),
        "datasets": np.array(datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path / "cache"))["embedding"][:]),
    }
    for name, got in readers.items():
        np.testing.assert_array_equal(np.asarray(got, dtype=np.float32), values, err_msg=name)
