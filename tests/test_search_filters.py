"""``--where``: the language beside a plain Python reading of it, and the rows that a filtered search finds."""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline import nearest
from pipeline.errors import ConfigError
from pipeline.filters import parse_filter
from pipeline.indexer import build_index
from pipeline.nearest import Allowed
from pipeline.search import open_index
from tests.test_search import add_shard, unit, write_run

# -- the language ----------------------------------------------------------------------------------------------------

ROWS: dict[str, list[Any]] = {
    "pos": ["n", "v", None, "it's", "", "N"],
    "year": [1990, None, 2000, -5, 0, 1990],
    "size": [0.5, 1.5, None, -2.0, 1e9, 0.1],
    "good": [True, False, None, True, False, True],
}
TABLE = pa.table({**ROWS, "year": pa.array(ROWS["year"], pa.int16()), "size": pa.array(ROWS["size"], pa.float32())})
Row = dict[str, Any]
Truth = Callable[[Row], "bool | None"]
Case = tuple[str, Truth]

ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def compared(column: str, sign: str, value: Any, text: str) -> Case:
    def truth(row: Row) -> bool | None:
        return None if row[column] is None else ORDER[sign](row[column], value)

    return f"{column} {sign} {text}", truth


def among(column: str, values: list[tuple[Any, str]], negated: bool) -> Case:
    def truth(row: Row) -> bool | None:
        return None if row[column] is None else (row[column] in [value for value, _ in values]) != negated

    return f"{column} {'NOT in' if negated else 'in'} ({', '.join(text for _, text in values)})", truth


def liked(pattern: str, negated: bool) -> Case:
    expected = re.compile("".join({"%": ".*", "_": "."}.get(sign, re.escape(sign)) for sign in pattern))

    def truth(row: Row) -> bool | None:
        return None if row["pos"] is None else bool(expected.fullmatch(row["pos"])) != negated

    return f"pos {'not ' if negated else ''}LIKE {quoted(pattern)}", truth


def missing(column: str, negated: bool) -> Case:
    return f"{column} is {'not ' if negated else ''}null", lambda row: (row[column] is None) != negated


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


words = st.sampled_from(["n", "v", "it's", "", "zz"]).map(lambda value: (value, quoted(value)))
years = st.integers(-(2**15), 2**15 - 1).map(lambda value: (value, str(value)))
sizes = st.sampled_from([(0.5, ".5"), (1.5, "1.50"), (-2.0, "-2"), (1e9, "1e9"), (float(np.float32(0.1)), "0.1")])
VALUES = {"pos": words, "year": years | st.sampled_from([(1990, "1990"), (0, "0")]), "size": sizes}
columns = st.sampled_from(sorted(VALUES))
signs = st.sampled_from(sorted(ORDER))
leaves: st.SearchStrategy[Case] = st.one_of(
    columns.flatmap(lambda name: st.builds(lambda sign, value: compared(name, sign, *value), signs, VALUES[name])),
    columns.flatmap(
        lambda name: st.builds(among, st.just(name), st.lists(VALUES[name], min_size=1, max_size=3), st.booleans())
    ),
    st.builds(liked, st.sampled_from(["n", "%", "_", "i%s", "", "%'_", "N", "z.%"]), st.booleans()),
    st.builds(missing, st.sampled_from(sorted(ROWS)), st.booleans()),
    st.just(("good", lambda row: row["good"])),
)


def opposite(case: Case) -> Case:
    def truth(row: Row) -> bool | None:
        found = case[1](row)
        return None if found is None else not found

    return f"not ({case[0]})", truth


def joined(word: str, one: Case, other: Case) -> Case:
    def truth(row: Row) -> bool | None:
        both = (one[1](row), other[1](row))
        decides = word == "or"
        return decides if decides in both else None if None in both else not decides

    return f"({one[0]}) {word} ({other[0]})", truth


trees = st.recursive(
    leaves,
    lambda smaller: st.one_of(
        st.builds(opposite, smaller), st.builds(joined, st.sampled_from(["and", "or"]), smaller, smaller)
    ),
    max_leaves=8,
)


def passing(text: str, table: pa.Table = TABLE) -> list[int]:
    numbered = table.append_column("", pa.array(range(table.num_rows)))
    return numbered.filter(parse_filter(text, table.schema).expression).column("").to_pylist()


@given(trees)
@settings(max_examples=300, deadline=None)
def test_a_row_passes_where_three_valued_logic_says_true(case: Case) -> None:
    text, truth = case
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    for row in rows:  # as it is stored
        row["size"] = None if row["size"] is None else float(np.float32(row["size"]))
    assert passing(text) == [number for number, row in enumerate(rows) if truth(row)]


def test_not_binds_stronger_than_and_and_that_stronger_than_or() -> None:
    assert passing("year = 0 or pos = 'n' and size > 1") == [4]
    assert passing("(year = 0 or pos = 'n') and size > 1") == [4]
    assert passing("(year = 0 or pos = 'n') and size < 1") == [0]
    assert passing("not pos = 'n' and year = 1990") == [5]
    assert passing("not (pos = 'n' and year = 1990)") == [1, 2, 3, 4, 5]
    assert passing("NOT good OR good Is Null") == [1, 2, 4]


def test_values_take_the_type_of_their_column() -> None:
    utc = datetime.UTC
    table = pa.table(
        {
            "day": [datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)],
            "seen": pa.array(
                [datetime.datetime(2020, 1, 1, tzinfo=utc), datetime.datetime(2020, 1, 1, 1, tzinfo=utc)],
                pa.timestamp("us", tz="Europe/Berlin"),
            ),
            "price": pa.array(["1.10", "2.20"]).cast(pa.decimal128(9, 2)),
            "raw": [b"a", b"b"],
            "inner": [{"lang": "de"}, {"lang": "en"}],
            "a.b": ["x", "y"],
            "two words": [1, 2],
            "list": [[1], None],
        }
    )
    assert passing("day > '2020-06-30'", table) == [1]
    assert passing("seen = '2020-01-01 02:00:00'", table) == [1]  # without a zone it is the column's
    assert passing("seen = '2020-01-01T01:00:00Z'", table) == [1]
    assert passing("price = 1.1 or price in (2.20)", table) == [0, 1]
    assert passing("raw = 'b'", table) == [1]
    assert passing("inner.lang = 'en'", table) == [1]
    assert passing("a.b = 'y'", table) == [1]
    assert passing('"two words" = 2', table) == [1]
    assert passing("list is null", table) == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pos = n", "found n at character 7; expected a value: 'text', a number, true or false"),
        ("pos = 'n", "found ' at character 7; expected its end"),
        ("(pos = 'n'", "it ends at character 11; expected ')'"),
        ("pos = 'n' year = 1", "found year at character 11; expected 'and', 'or' or the end"),
        ("posi = 'n'", "found posi at character 1; no such column; did you mean 'pos'?"),
        ("pos", "it ends at character 4; expected = != < <= > >= in, like or is null after pos"),
        ("", "it ends at character 1; expected a column"),
        ("pos = null", "found null at character 7; expected pos is null"),
        ("pos is empty", "found empty at character 8; expected 'null'"),
        ("year = 'x'", "found 'x' at character 8; year is int16; expected a whole number in its range"),
        ("year < 1e9", "found 1e9 at character 8; year is int16; expected a whole number in its range"),
        ("year > 1e999999999", "found 1e999999999 at character 8; year is int16; expected a whole number in its range"),
        ("year = 0e999999999", "expected a whole number in its range"),
        ("year = 1.5", "year is int16; expected a whole number"),
        ("pos = 5", "found 5 at character 7; pos is string; expected text in single quotes"),
        ("good = 1", "found 1 at character 8; good is bool; expected true or false"),
        ("pos in ()", "found ) at character 9; expected a value"),
        ("year like '1%'", "year is int16; 'like' is for text"),
        ("pos ; drop", "found ; at character 5; no such sign"),
        ("pos.x = 1", "found pos.x at character 1; pos is string and has no field x"),
        ("__import__('os')", "found __import__ at character 1; no such column"),
        ("(" * 60 + "good" + ")" * 60, "found ( at character 51; expected at most 50 within each other"),
        (" or ".join(["good"] * 1001), "expected at most 1,000 conditions; 'in' takes many values at once"),
    ],
)
def test_what_is_no_condition_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^--where ") as raised:
        parse_filter(text, TABLE.schema)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_thousand_conditions_and_many_values_are_fine() -> None:
    assert passing(" or ".join(f"year = {number}" for number in range(1000))) == [4]
    assert passing(f"year in ({', '.join(map(str, range(5000)))})") == [0, 2, 4, 5]


# -- searching with it -----------------------------------------------------------------------------------------------

KEYS = ("lang=de/a", "b", "c")
VECTORS = unit(1_500, 3)
SCORES = np.concatenate([np.arange(500) * 10] * 3)
FACTORIES = ["IDMap2,Flat", "IVF16,Flat", "HNSW8", "PCAR8,HNSW8", "PQ4", "PCAR8,IVF16_HNSW8,SQ8", "IVF16,RQ2x4"]
CONDITIONS = {
    "score >= 0": SCORES >= 0,
    "score < 2500": SCORES < 2_500,
    "score >= 4500": SCORES >= 4_500,
    "score < 100": SCORES < 100,
    "score = 4990": SCORES == 4_990,
    "score > 99999": SCORES > 99_999,
}
HALF, TENTH = "score < 2500", "score >= 4500"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output with an index of a kind; the second shard has ids beyond 32 bits, as has the third."""
    made: dict[str, Path] = {}

    def output(factory: str) -> Path:
        if factory not in made:
            root = tmp_path_factory.mktemp("filtered") / "out"
            if made:
                shutil.copytree(next(iter(made.values())), root)
            else:
                write_run(root)
                for at, key in enumerate(KEYS):
                    add_shard(root, key, VECTORS[at * 500 : at * 500 + 500])
            build_index(str(root), factory, min_recall=0.0)
            made[factory] = root
        return made[factory]

    return output


def names(rows: NDArray[Any]) -> list[str]:
    return [f"{KEYS[row // 500]}:{row % 500}" for row in rows]


def allowed_rows(where: str) -> NDArray[Any]:
    return np.flatnonzero(CONDITIONS[where])


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("few", [0, nearest.FEW], ids=["by selector", "compared"])
def test_only_rows_that_pass_are_found_and_as_many_as_there_are(
    outputs: Callable[[str], Path], factory: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "FEW", few)
    index = open_index(str(outputs(factory)))
    for where in CONDITIONS:
        rows = allowed_rows(where)
        for k in (1, 2_000):
            hits = index.search(unit(3, seed=8), k=k, columns=[], where=where).to_list()
            assert [len(found) for found in hits] == [min(k, len(rows))] * 3, (where, k)
            for found in hits:
                ids = [hit["id"] for hit in found]
                assert len(set(ids)) == len(ids)
                assert set(ids) <= set(names(rows))
                assert [hit["score"] for hit in found] == sorted((hit["score"] for hit in found), reverse=True)


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "IVF16,Flat", "HNSW8", "PCAR8,HNSW8"])
def test_few_rows_are_searched_exactly_whatever_the_index(outputs: Callable[[str], Path], factory: str) -> None:
    index, queries = open_index(str(outputs(factory))), unit(20, seed=5)
    for where in CONDITIONS:  # the whole corpus is few here
        rows = allowed_rows(where)
        hits = index.search(queries, k=10, columns=[], where=where).to_list()
        for query, found in zip(queries, hits, strict=True):
            best = rows[np.argsort(-(VECTORS[rows] @ query), kind="stable")[:10]]
            assert [hit["id"] for hit in found] == names(best)


@pytest.mark.parametrize("factory", ["PQ4", "IVF16,RQ2x4"])
def test_an_index_that_cannot_filter_is_answered_from_the_exact_vectors(
    outputs: Callable[[str], Path], factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "FEW", 0)
    index, queries, rows = open_index(str(outputs(factory))), unit(5, seed=5), allowed_rows(HALF)
    hits = index.search(queries, k=10, columns=[], where=HALF).to_list()
    for query, found in zip(queries, hits, strict=True):
        scores = VECTORS[rows] @ query
        assert [hit["id"] for hit in found] == names(rows[np.argsort(-scores, kind="stable")[:10]])
        np.testing.assert_allclose([hit["score"] for hit in found], np.sort(scores)[::-1][:10], atol=1e-6)


def test_a_filter_does_not_cost_recall(outputs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in ten passes, so ten times the lists are looked at."""
    monkeypatch.setattr(nearest, "FEW", 0)
    root, queries = outputs("IVF16,Flat"), unit(200, seed=6)
    index = open_index(str(root))
    index.info["nprobe"] = 2
    index._nearest = nearest.Nearest(index._index, index.info)

    def recall(where: str | None, rows: NDArray[Any]) -> float:
        hits = index.search(queries, k=10, columns=[], where=where).to_list()
        best = [names(rows[np.argsort(-(VECTORS[rows] @ query))[:10]]) for query in queries]
        found = [{hit["id"] for hit in one} for one in hits]
        return float(np.mean([len(set(b) & f) / 10 for b, f in zip(best, found, strict=True)]))

    everything = recall(None, np.arange(1_500))
    assert everything < 0.9
    assert recall(TENTH, allowed_rows(TENTH)) >= everything


def test_within_and_where_both_hold(outputs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(str(outputs("IDMap2,Flat")))
    some = index.rows_where("score < 100")
    assert some.tolist() == [ordinal << 32 | row for ordinal in range(3) for row in range(10)]
    table = index.search(unit(1), k=50, within=some[::2], where="score >= 50").table
    assert sorted(table["score_column"].to_pylist()) == [60, 60, 60, 80, 80, 80]
    assert index.search(unit(1), k=5, within=np.empty(0, np.int64)).table.num_rows == 0
    for few in (0, nearest.FEW):  # rows that the index does not have are not there to be found
        monkeypatch.setattr(nearest, "FEW", few)
        found = index.search(unit(1), k=5, within=np.array([5, 5, 500, -1, 3 << 32, 2 << 32 | 499])).table
        assert sorted(found["id"].to_pylist()) == ["b:5", "lang=de/a:499"]


def test_a_filter_reads_only_its_columns_and_only_once(
    outputs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    read: list[Any] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *arguments: Any, **options: Any) -> Any:
        read.append(options["columns"])
        return real(self, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    index = open_index(str(outputs("IDMap2,Flat")))
    for _ in range(3):
        index.search(unit(1), k=1, where="score < 100 and doc_id like 'b%'")
    assert read == [["score", "doc_id"]] * 3


def test_the_selector_falls_back_to_a_set_where_address_space_is_limited(
    outputs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "FEW", 0)
    root = str(outputs("IVF16,Flat"))
    expected = open_index(root).search(unit(5), k=9, where=HALF).table
    bits = type(Allowed(np.array([5]), 1).selector).__name__
    monkeypatch.setattr("pipeline.nearest.mmap.mmap", lambda *_, **__: (_ for _ in ()).throw(OSError("no memory")))
    assert (bits, type(Allowed(np.array([5]), 1).selector).__name__) == ("IDSelectorBitmap", "IDSelectorBatch")
    assert open_index(root).search(unit(5), k=9, where=HALF).table.equals(expected)


def test_a_column_that_is_all_null_in_one_shard_has_the_type_of_the_others(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(3, 1), notes=pa.nulls(3))
    add_shard(tmp_path, "b", unit(3, 2), notes=pa.array(["x", None, "y"]))
    build_index(str(tmp_path))
    index = open_index(str(tmp_path))
    for where, expected in (("notes = 'x'", ["b:0"]), ("notes is null", ["a:0", "a:1", "a:2", "b:1"])):
        assert sorted(index.search(unit(1), k=9, where=where).table["id"].to_pylist()) == expected


def test_a_changed_shard_is_told_and_not_filtered_by_rows_that_moved(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(30, 1))
    add_shard(tmp_path, "b", unit(30, 2))
    build_index(str(tmp_path))
    add_shard(tmp_path, "b", unit(30, 3))
    with pytest.raises(ConfigError, match="shard b changed after the index was built"):
        open_index(str(tmp_path)).search(unit(1), where="score > 5")


def test_the_wrong_column_is_told_before_anything_is_searched(outputs: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="no such column; did you mean 'score'"):
        open_index(str(outputs("IDMap2,Flat"))).search(unit(1), where="scores > 5")
