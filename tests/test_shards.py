"""Input names into shards: what is found, how it is keyed, what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.shards import Columns, check_shards, find_shards, natural_key
from tests.conftest import write_shard

TEXT = Columns("text", None)


def keys(*inputs: Path | str, output: Path | None = None) -> list[str]:
    return [shard.key for shard in find_shards([str(i) for i in inputs], str(output) if output else None)]


def test_a_folder_is_searched_and_keys_are_relative_paths(tmp_path: Path) -> None:
    for name in ("a/part.parquet", "b/part.parquet", "c.pq"):
        write_shard(tmp_path / name, ["x"])
    assert keys(tmp_path) == ["a/part", "b/part", "c.pq"]


def test_part_2_comes_before_part_10(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_shard(tmp_path / f"part-{number}.parquet", ["x"])
    assert keys(tmp_path) == ["part-1", "part-2", "part-10"]
    assert natural_key("a2b") < natural_key("a10b")


def test_bookkeeping_of_other_tools_is_skipped(tmp_path: Path) -> None:
    write_shard(tmp_path / "part-0.parquet", ["x"])
    for name in ("_SUCCESS", ".part-0.parquet.crc", ".hidden.parquet", "_metadata", "_temporary/0/x.parquet",
                 "README.md", "LICENSE", "x.parquet.tmp"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert keys(tmp_path) == ["part-0"]


def test_a_glob_and_a_single_file_name_their_shards_alike(tmp_path: Path) -> None:
    write_shard(tmp_path / "a" / "x.parquet", ["x"])
    write_shard(tmp_path / "a" / "y.parquet", ["x"])
    assert keys(tmp_path / "a" / "*.parquet") == ["x", "y"]
    assert keys(tmp_path / "a" / "x.parquet") == ["x"]
    assert keys(tmp_path / "*" / "x.parquet") == ["a/x"]
    assert keys(tmp_path / "*") == ["a/x", "a/y"]


def test_a_named_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    assert keys(write_shard(tmp_path / "_export.2024[1] ü#%.data", ["x"])) == ["_export.2024[1] ü#%.data"]


def test_the_output_inside_the_input_is_not_an_input(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.parquet", ["x"])
    write_shard(tmp_path / "out" / "embeddings" / "x.parquet", ["x"])
    assert keys(tmp_path, output=tmp_path / "out") == ["x"]


def test_two_inputs_for_one_output_name_are_refused(tmp_path: Path) -> None:
    for folder in "ab":
        write_shard(tmp_path / folder / "x.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"a/x\.parquet and .*b/x\.parquet would both be written"):
        keys(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["missing", "empty", "empty/*.parquet"])
def test_an_input_without_a_shard_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"^input {tmp_path}/{name.replace('*', '.')}"):
        keys(tmp_path / name)


def test_hive_folders_become_values(tmp_path: Path) -> None:
    write_shard(tmp_path / "lang=de%20AT" / "day=__HIVE_DEFAULT_PARTITION__" / "x.parquet", ["x"])
    assert find_shards([str(tmp_path)])[0].partitions == {"lang": "de AT", "day": None}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"id,text\n1,hello world\n", "not a Parquet file"),
        (b"PAR1 but then nothing that ends as it should", "damaged Parquet file"),
    ],
)
def test_a_file_that_is_not_parquet_fails_alone_and_says_what_it_is(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    write_shard(tmp_path / "good.parquet", ["x"])
    (tmp_path / "bad.parquet").write_bytes(content)
    checked = check_shards(find_shards([str(tmp_path)]), TEXT)
    assert [shard.key for shard in checked.shards] == ["good"]
    assert [(shard.key, expected in reason) for shard, reason in checked.bad] == [("bad", True)]


def test_a_missing_column_in_every_shard_stops_the_run_and_hints(tmp_path: Path) -> None:
    pq.write_table(pa.table({"Text": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet: no column 'text'; did you mean 'Text'\?"):
        check_shards(find_shards([str(tmp_path)]), TEXT)


def test_a_missing_column_in_one_shard_fails_that_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", ["x"])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    checked = check_shards(find_shards([str(tmp_path)]), TEXT)
    assert [(s.key, reason) for s, reason in checked.bad] == [("b", "no column 'text'; known: body")]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([["x"]]), "column 'text' is list<"),
        (pa.array([1]), "column 'text' is int64; expected text"),
        (pa.array([{"a": "x"}]), "column 'text' is struct<"),
    ],
)
def test_a_column_without_text_is_refused(tmp_path: Path, column: pa.Array, expected: str) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError) as caught:
        check_shards(find_shards([str(tmp_path)]), TEXT)
    assert expected in str(caught.value)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="2 columns are called 'text'"):
        check_shards(find_shards([str(tmp_path)]), TEXT)


def test_ids_of_different_types_are_refused_naming_both_files(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", ["x"], [1])
    write_shard(tmp_path / "b.parquet", ["x"], ["one"])
    with pytest.raises(ConfigError, match=r"int64 in .*a\.parquet but string in .*b\.parquet"):
        check_shards(find_shards([str(tmp_path)]), Columns("text", "id"))


def test_carried_columns_of_different_types_are_refused_naming_both_files(tmp_path: Path) -> None:
    for name, url in (("a", ["u"]), ("b", [None]), ("c", [3])):
        pq.write_table(pa.table({"text": ["x"], "url": url}), tmp_path / f"{name}.parquet")
    with pytest.raises(ConfigError, match=r"--columns url: string in .*a\.parquet but int64 in .*c\.parquet"):
        check_shards(find_shards([str(tmp_path)]), Columns("text", None, ("url",)))


def test_flavours_of_one_type_are_one_type(tmp_path: Path) -> None:
    for number, kind in enumerate((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        table = pa.table({"id": pa.array(["k"]).cast(kind), "text": pa.array(["x"]).cast(kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    assert len(check_shards(find_shards([str(tmp_path)]), Columns("text", "id")).shards) == 3
