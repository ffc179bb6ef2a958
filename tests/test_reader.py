"""Shards into windows: every row once, in order, whatever the column's type, never more in memory than a window."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import reader
from pipeline.errors import ShardError
from pipeline.reader import output_schema, read_windows
from pipeline.records import Shard, Window
from pipeline.shards import Columns, find_shards
from tests.conftest import write_shard

BY_ID = Columns("text", "id")


def windows(path: Path, columns: Columns = BY_ID, id_name: str = "id") -> list[Window]:
    return list(read_windows(find_shards([str(path)])[0], columns, id_name))


def texts(path: Path, columns: Columns = BY_ID) -> list[str | None]:
    return [text for window in windows(path, columns) for text in window.texts]


def test_windows_are_bounded_by_rows_and_keep_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_ROWS", 100)
    monkeypatch.setattr(reader, "MAX_ROWS_AT_ONCE", 40)
    path = write_shard(tmp_path / "x.parquet", [str(n) for n in range(1000)], row_group_size=33)
    got = windows(path)
    assert [window.first_row for window in got] == [sum(w.num_rows for w in got[:n]) for n in range(len(got))]
    assert max(window.num_rows for window in got) < 140
    assert [text for window in got for text in window.texts] == [str(n) for n in range(1000)]
    assert [i for window in got for i in window.table["id"].to_pylist()] == [f"x-{n}" for n in range(1000)]


def test_windows_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_BYTES", 10_000)
    path = write_shard(tmp_path / "x.parquet", ["y" * 1000] * 100)
    assert max(window.num_rows for window in windows(path)) <= 32


def test_a_missing_id_becomes_shard_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_ROWS_AT_ONCE", 16)
    write_shard(tmp_path / "a" / "x.parquet", ["t"] * 40)
    got = windows(tmp_path, Columns("text", None))
    ids = [i for window in got for i in window.table["id"].to_pylist()]
    assert ids == [f"a/x:{row}" for row in range(40)]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
     pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())],
    ids=str,
)  # fmt: skip
def test_every_text_type_reads_alike(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["eins", None, "", "zwei ü"])
    column = column.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else column.cast(kind)
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": column}), tmp_path / "x.parquet")
    assert texts(tmp_path) == ["eins", None, "", "zwei ü"]


def test_a_column_of_nulls_is_a_column_of_texts_to_be_quarantined(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "text": pa.nulls(2)}), tmp_path / "x.parquet")
    assert texts(tmp_path) == [None, None]


def test_bytes_that_are_not_utf8_reject_their_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", None, b"fine"], pa.binary())
    stored = pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": stored}), tmp_path / "x.parquet")
    [window] = windows(tmp_path)
    assert window.texts == ["good", None, None, "fine"]
    assert window.rejected == {1: "not UTF-8"}


def test_a_dotted_path_reaches_into_a_struct_and_a_literal_name_wins(tmp_path: Path) -> None:
    rows = [{"body": {"de": "drin"}}, None, {"body": None}]
    pq.write_table(pa.table({"id": [1, 2, 3], "doc": rows}), tmp_path / "x.parquet")
    assert texts(tmp_path, Columns("doc.body.de", "id")) == ["drin", None, None]
    pq.write_table(pa.table({"id": [1, 2, 3], "doc": rows, "doc.body.de": ["a", "b", "c"]}), tmp_path / "x.parquet")
    assert texts(tmp_path, Columns("doc.body.de", "id")) == ["a", "b", "c"]


def test_hive_values_can_be_carried_and_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lang=de" / "x.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"], "lang": ["xx", "yy"]}), path)
    [window] = windows(tmp_path, Columns("text", "id", ("lang",)))
    assert window.table["lang"].to_pylist() == ["de", "de"]


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([0, -1, 2**53 + 1, 2**63 - 1, None], pa.int64()),
        pa.array([0, 1, 2, 3, 2**64 - 1], pa.uint64()),
        pa.array([b"\x00", b"\xff", b"", b"a", None], pa.binary()),
        pa.array([1, 2, 3, 4, None], pa.timestamp("us", "UTC")),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_are_kept_exactly(tmp_path: Path, ids: pa.Array) -> None:
    pq.write_table(pa.table({"id": ids, "text": ["t"] * 5}), tmp_path / "x.parquet")
    [window] = windows(tmp_path)
    assert window.table["id"].combine_chunks() == ids


def test_an_empty_shard_has_no_window_but_a_schema(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([], pa.int32()), "text": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "x.parquet")
    [shard] = find_shards([str(tmp_path)])
    assert windows(tmp_path) == []
    assert output_schema(shard, Columns("text", "id"), "id") == pa.schema([("id", pa.int32())])


def test_damaged_data_names_the_shard(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.parquet", [str(n) * 40 for n in range(5000)], write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ShardError, match=r"x\.parquet: damaged data"):
        windows(path)


def test_a_file_that_has_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"gone\.parquet: the file is gone"):
        list(read_windows(Shard("gone", str(tmp_path / "gone.parquet"), 0, 0), Columns("text", None), "id"))


def test_a_shard_is_never_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of row groups: 24 MB here, in windows of 1 MB."""
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1 << 20)
    texts = [f"{row:04} " * 200 for row in range(24_000)]
    path = write_shard(tmp_path / "x.parquet", texts, compression="none", use_dictionary=False, row_group_size=2000)
    del texts
    before = peak = pa.total_allocated_bytes()
    for _ in read_windows(find_shards([str(path)])[0], BY_ID, "id"):
        peak = max(peak, pa.total_allocated_bytes())
    assert peak - before < 12e6
