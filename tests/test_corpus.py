"""Which shard, row and id a vector has, whatever was quarantined, added or removed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import IndexingError
from pipeline.indexer import build_index
from tests.test_indexer import FakeOutput, change_commit, clustered


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    return FakeOutput(tmp_path / "out")


def test_quarantined_rows_are_stepped_over(out: FakeOutput) -> None:
    out.add("a", clustered(5), quarantined=[0, 3, 7])
    out.add("b", clustered(3, seed=1))
    build_index(str(out))
    assert out.ids().column("row").to_pylist() == [1, 2, 4, 5, 6, 0, 1, 2]
    assert out.ids().column("faiss_id").to_pylist() == [*range(5), *(1 << 32 | row for row in range(3))]
    assert out.ids().column("shard").to_pylist() == ["a"] * 5 + ["b"] * 3


def test_quarantine_and_rows_must_add_up(out: FakeOutput) -> None:
    out.add("a", clustered(5), quarantined=[0, 3])
    change_commit(out, "a", "shard", num_rows=8)
    with pytest.raises(IndexingError, match="5 vectors and 2 quarantined rows do not make the 8 rows"):
        build_index(str(out))


def test_rows_moved_by_the_quarantine_are_noticed(out: FakeOutput) -> None:
    out.add("a", clustered(5), ids=range(5), quarantined=[0])
    build_index(str(out))
    out.add("a", clustered(5), ids=range(5), quarantined=[3])
    assert build_index(str(out))["reused"] is False
    assert out.ids().column("row").to_pylist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["ä", "", "b\nc", "b\nc"]),
        pa.array([2**63 - 1, -(2**63), 0, 2**53 + 1]),
        pa.array([2**64 - 1, 0, 1, 2], pa.uint64()),
        pa.array([b"\x00\xff", b"", b"x", b"y"]),
        pa.array([1, None, 3, 4], pa.int32()),
    ],
)
def test_ids_keep_their_type_and_value(out: FakeOutput, ids: pa.Array) -> None:
    out.add("a", clustered(4), ids=ids)
    build_index(str(out))
    assert out.ids().column("id").type == ids.type
    assert out.ids().column("id").to_pylist() == ids.to_pylist()


def test_ids_of_two_types_are_refused(out: FakeOutput) -> None:
    out.add("a", clustered(4), ids=[1, 2, 3, 4])
    out.add("b", clustered(4), ids=["1", "2", "3", "4"])
    with pytest.raises(IndexingError, match=r"b\.parquet: the id column is 'id' \(string\), but 'id' \(int64\) in"):
        build_index(str(out))


def ordinals(out: FakeOutput) -> dict[str, int]:
    return {shard["key"]: shard["ordinal"] for shard in out.document()["shards"]}


def test_ordinals_stay_when_a_shard_is_added_in_front(out: FakeOutput) -> None:
    vectors = clustered(90)
    out.add("b", vectors[:30])
    out.add("c", vectors[30:60])
    build_index(str(out))
    assert ordinals(out) == {"b": 0, "c": 1}
    out.add("a", vectors[60:])
    build_index(str(out))
    assert ordinals(out) == {"a": 2, "b": 0, "c": 1}
    assert out.ids().column("shard").to_pylist() == ["a"] * 30 + ["b"] * 30 + ["c"] * 30
    assert out.faiss_index().search(vectors[[0, 31, 62]], 1)[1].ravel().tolist() == [0, 1 << 32 | 1, 2 << 32 | 2]


def test_an_ordinal_is_never_given_to_another_shard(out: FakeOutput) -> None:
    out.add("a", clustered(30))
    out.add("b", clustered(30))
    build_index(str(out))
    (out.root / "commits/b.json").unlink()
    build_index(str(out))
    out.add("c", clustered(30))
    build_index(str(out))
    assert ordinals(out) == {"a": 0, "c": 2}


def test_shards_are_in_natural_order(out: FakeOutput) -> None:
    for key in ("s10", "s9", "s1"):
        out.add(key, clustered(10))
    assert [shard["key"] for shard in build_index(str(out))["shards"]] == ["s1", "s9", "s10"]
