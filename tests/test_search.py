"""Searching an index, built here by the index stage from made-up vectors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipeline import ledger, nearest, search
from pipeline.errors import ConfigError
from pipeline.ids_file import rows_called
from pipeline.indexer import build_index
from pipeline.recall import load_faiss
from pipeline.search import SearchResult, open_index
from pipeline.shards import find_shards
from pipeline.storage import Output, sha256_file
from tests.conftest import ROOT

DIM = 8


def unit(num: int, seed: int = 0) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(num, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write_run(root: Path, fingerprint: str = "f1") -> None:
    document = {
        "fingerprint": fingerprint,
        "fields": {},
        "config": {"id_column": "doc_id", "columns": ["text", "score"]},
    }
    Output(root).write_json("run.json", document)


def add_shard(
    root: Path,
    key: str,
    vectors: NDArray[Any],
    ids: Sequence[Any] | None = None,
    quarantined: Sequence[int] = (),
    *,
    source: Path | None = None,
    **columns: pa.Array,
) -> None:
    """One committed shard: doc_id, text and score carried, or doc_id and ``columns``; row groups of 50."""
    n = len(vectors)
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(vectors.dtype), nullable=False), DIM)
    carried = columns or {"text": [f"text {key} {row}" for row in range(n)], "score": pa.array(np.arange(n) * 10)}
    table = pa.table(
        {
            "doc_id": pa.array(ids if ids is not None else [f"{key}:{row}" for row in range(n)]),
            **carried,
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind),
        }
    )
    parts: dict[str, Any] = {"quarantine": None}
    for part, rows in (("output", table), ("quarantine", pa.table({"row": pa.array(quarantined, pa.int64())}))):
        if rows.num_rows or part == "output":
            name = f"{'embeddings' if part == 'output' else part}/{key}.parquet"
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(rows, path, row_group_size=50)
            parts[part] = {"path": name, "rows": rows.num_rows, "bytes": path.stat().st_size}
            parts[part] |= {"sha256": sha256_file(path), "dim": DIM}
    parts["output"]["chunked"] = "chunk" in columns
    shard = {"path": key} if source is None else find_shards([str(source)])[0].identity()
    shard |= {"key": key, "num_rows": None if "chunk" in columns else n + len(quarantined)}
    ledger.Ledger(str(root)).forget(key)  # as a run does before it replaces files
    ledger.Ledger(str(root)).commit({"shard": shard, "fingerprint": "f1", **parts})


VECTORS = {"lang=de/a": unit(120, 1), "lang=en/b": unit(80, 2)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built") / "out"
    write_run(root)
    for key, vectors in VECTORS.items():
        add_shard(root, key, vectors, quarantined=[0, 2] if "en" in key else [])
    build_index(str(root))
    return root


@pytest.fixture
def out(built: Path, tmp_path: Path) -> Path:
    """A copy of one's own to damage."""
    return Path(shutil.copytree(built, tmp_path / "out"))


def encoder(texts: list[str]) -> NDArray[np.float32]:
    """A text ``<key> <row>`` has the vector of that output row."""
    parts = [text.rsplit(" ", 1) for text in texts]
    return np.stack([VECTORS[key][int(row)] for key, row in parts])


# -- what comes back -------------------------------------------------------------------------------------------------


def test_hits_carry_id_shard_row_and_columns(built: Path) -> None:
    result = open_index(str(built)).search(VECTORS["lang=en/b"][[70, 3]], k=3)
    assert result.table.column_names == ["query", "rank", "score", "id", "shard", "row", "text", "score_column"]
    assert result.table.column("query").to_pylist() == [0, 0, 0, 1, 1, 1]
    assert result.table.column("rank").to_pylist() == [1, 2, 3, 1, 2, 3]
    best = [hits[0] for hits in result.to_list()]
    assert [hit["id"] for hit in best] == ["lang=en/b:70", "lang=en/b:3"]
    assert [hit["row"] for hit in best] == [72, 5], "input rows, the quarantined 0 and 2 stepped over"
    assert [hit["text"] for hit in best] == ["text lang=en/b 70", "text lang=en/b 3"]
    assert [hit["score_column"] for hit in best] == [700, 30], "a carried column may be called like one of ours"
    assert [hit["score"] for hit in best] == pytest.approx([1, 1], abs=1e-5)
    assert len(result) == 2


def test_hits_are_the_exact_nearest(built: Path) -> None:
    everything = np.concatenate(list(VECTORS.values()))
    queries = unit(5, seed=9)
    hits = open_index(str(built)).search(queries, k=10, columns=["doc_id"]).to_list()
    names = [f"{key}:{row}" for key, vectors in VECTORS.items() for row in range(len(vectors))]
    for query, found in zip(queries, hits, strict=True):
        scores = everything @ query
        assert [hit["id"] for hit in found] == [names[at] for at in np.argsort(-scores)[:10]]
        assert [hit["doc_id"] for hit in found] == [hit["id"] for hit in found]
        assert [hit["score"] for hit in found] == pytest.approx(np.sort(scores)[::-1][:10], abs=1e-5)


def test_texts_are_embedded_by_the_encoder(built: Path) -> None:
    index = open_index(str(built), encoder=encoder)
    one = index.search("lang=de/a 7", k=1)
    assert one.to_list()[0][0]["id"] == "lang=de/a:7"
    two = index.search(["lang=en/b 1", "lang=de/a 3"], k=1)
    assert [hits[0]["id"] for hits in two.to_list()] == ["lang=en/b:1", "lang=de/a:3"]


def test_columns_are_chosen(built: Path) -> None:
    index = open_index(str(built))
    assert index.search(unit(1), columns=[]).table.column_names == list(search.RESERVED)
    assert index.search(unit(1), columns=["text"]).table.column_names == [*search.RESERVED, "text"]
    with pytest.raises(ConfigError, match=r"no column 'txet' in .*there are \['doc_id', 'text', 'score'\]"):
        index.search(unit(1), columns=["txet"])


def test_only_row_groups_with_hits_are_read(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, tuple[str, ...]]] = []
    real = pq.ParquetFile.read_row_group

    def spy(self: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        read.append((group, tuple(columns)))
        return real(self, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    open_index(str(built)).search(VECTORS["lang=de/a"][110], k=1, columns=["text"])
    assert read == [(0, ("faiss_id", "id", "shard", "row")), (2, ("text",))]


def test_more_than_there_are_gives_all_of_them_once(built: Path) -> None:
    hits = open_index(str(built)).search(unit(2), k=10_000).to_list()
    for found in hits:
        assert len(found) == len({hit["id"] for hit in found}) == 200
        assert [hit["rank"] for hit in found] == list(range(1, 201))


@pytest.mark.parametrize("factory", ["IVF16,Flat", "PCAR8,IVF16,SQ8", "HNSW8", "PCAR8,HNSW8,Flat"])
def test_few_probed_lists_never_mean_few_hits(out: Path, factory: str) -> None:
    build_index(str(out), factory, min_recall=0.0)
    index = open_index(str(out))
    for k in (1, 50, 500):
        hits = index.search(unit(3, seed=4), k=k).to_list()
        assert [len(found) for found in hits] == [min(k, 200)] * 3
        assert all(hit["id"] is not None for found in hits for hit in found)


def nprobe_of(index: search.CorpusIndex) -> int:
    return int(load_faiss().extract_index_ivf(index._index).nprobe)


def test_a_wide_search_leaves_the_measured_setting(out: Path) -> None:
    nprobe = build_index(str(out), "IVF16,Flat", min_recall=0.5)["nprobe"]
    index = open_index(str(out))
    before = index.search(unit(20, seed=4), k=3).table
    index.search(unit(1), k=200)
    assert nprobe_of(index) == nprobe
    assert index.search(unit(20, seed=4), k=3).table.equals(before)


def test_measured_nprobe_is_set_on_opening(out: Path) -> None:
    document = build_index(str(out), "IVF16,Flat", min_recall=1.0)
    assert document["nprobe"] > 1
    index = open_index(str(out))
    assert nprobe_of(index) == document["nprobe"]


@pytest.mark.parametrize("ids", [[2**63 - 1, 5, -(2**63)], ["x", "y", "z"], [b"\xff", b"", b"0"]])
def test_ids_come_back_exactly(tmp_path: Path, ids: list[Any]) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(3), ids=ids)
    build_index(str(tmp_path))
    hits = open_index(str(tmp_path)).search(unit(3), k=1).to_list()
    assert [found[0]["id"] for found in hits] == ids


def test_float16_output_is_searched(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(60).astype(np.float16))
    build_index(str(tmp_path))
    for dtype in (np.float16, np.float32, np.float64):
        hits = open_index(str(tmp_path)).search(unit(60)[[33]].astype(dtype), k=1).to_list()
        assert hits[0][0]["id"] == "a:33"


def test_result_shows_itself_in_a_notebook(built: Path) -> None:
    result = open_index(str(built)).search(unit(1), k=60)
    page = result._repr_html_()
    assert page.count("<tr>") == 51 and "and 10 more" in page
    hostile = SearchResult(pa.table({"query": [0], "text": ["<script>" + "x" * 500]}), 1)._repr_html_()
    assert "<script>" not in hostile and "…" in hostile


def test_threads_share_one_index(built: Path) -> None:
    index = open_index(str(built))
    queries = np.concatenate(list(VECTORS.values()))
    found: dict[int, str] = {}

    def ask(at: int) -> None:
        found[at] = index.search(queries[at], k=1).to_list()[0][0]["text"]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(0, 200, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[130] == "text lang=en/b 10" and len(found) == 20


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [[], np.empty((0, DIM), np.float32), np.empty((0,), np.float32)])
def test_no_queries_give_an_empty_result(built: Path, queries: Any) -> None:
    result = open_index(str(built), encoder=encoder).search(queries)
    assert result.to_list() == [] and len(result) == 0
    full = open_index(str(built)).search(unit(1))
    assert result.table.schema.equals(full.table.schema)


def test_another_dimension_names_both(built: Path) -> None:
    with pytest.raises(ConfigError, match="queries have 5 dimensions, the index has 8"):
        open_index(str(built)).search(np.ones((2, 5)))
    with pytest.raises(ConfigError, match="queries have 3 dimensions, the index has 8"):
        open_index(str(built), encoder=lambda texts: np.ones((len(texts), 3), np.float32)).search("x")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_is_refused(built: Path, bad: float) -> None:
    queries = unit(3)
    queries[1, 0] = bad
    with pytest.raises(ConfigError, match="query 1: its vector is not finite"):
        open_index(str(built)).search(queries)


def test_texts_need_an_encoder_and_k_a_hit(built: Path) -> None:
    with pytest.raises(ConfigError, match="without an encoder"):
        open_index(str(built)).search("text")
    with pytest.raises(ConfigError, match="k = 0"):
        open_index(str(built)).search(unit(1), k=0)


def test_no_index_tells_the_command(out: Path) -> None:
    (out / "index/index.json").unlink()
    with pytest.raises(ConfigError, match=f"no index here; run `embed-corpus index {out}`"):
        open_index(str(out))


def index_file(out: Path, what: str) -> Path:
    return out / "index" / json.loads((out / "index/index.json").read_text())[f"{what}_file"]


@pytest.mark.parametrize("what", ["index", "ids"])
def test_one_flipped_byte_is_refused(out: Path, what: str) -> None:
    path = index_file(out, what)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged, its sha256"):
        open_index(str(out))


@pytest.mark.parametrize("what", ["index", "ids"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_cut_or_missing_file_is_refused(out: Path, what: str, verify: bool) -> None:
    path = index_file(out, what)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="missing or cut"):
        open_index(str(out), verify=verify)
    path.unlink()
    with pytest.raises(ConfigError, match="missing or cut"):
        open_index(str(out), verify=verify)


def test_an_index_of_another_configuration_is_refused(out: Path) -> None:
    write_run(out, fingerprint="f2")
    with pytest.raises(ConfigError, match="fingerprint f1, the folder now holds f2"):
        open_index(str(out))


def test_columns_of_a_shard_embedded_again_are_not_mixed_up(out: Path) -> None:
    add_shard(out, "lang=en/b", unit(80, 7))
    index = open_index(str(out))
    assert index.stale_shards == ("lang=en/b",)
    query = VECTORS["lang=en/b"][4]
    assert index.search(query, k=1, columns=[]).to_list()[0][0]["id"] == "lang=en/b:4"
    assert index.search(VECTORS["lang=de/a"][4], k=1).to_list()[0][0]["text"] == "text lang=de/a 4"
    with pytest.raises(ConfigError, match="shard lang=en/b changed after the index was built; run `embed-corpus index"):
        index.search(query, k=1)


def test_without_columns_an_index_is_searched_though_every_shard_changed(out: Path) -> None:
    for key in VECTORS:
        add_shard(out, key, unit(10, 7))
    index = open_index(str(out), texts=True)
    assert len(index.search(unit(1), k=3, columns=[]).to_list()[0]) == 3
    with pytest.raises(search.StaleShard):
        index.search(unit(1), k=3)


def test_what_is_wrong_is_told_before_a_query_is_embedded(built: Path) -> None:
    def never(texts: list[str]) -> NDArray[np.float32]:
        raise AssertionError("embedded")

    index = open_index(str(built), encoder=never)
    for wrong in ({"where": "scores > 1"}, {"columns": ["none"]}, {"k": 0}):
        with pytest.raises(ConfigError):
            index.search("x", **wrong)  # type: ignore[arg-type]


def test_shards_not_in_the_index_are_counted(out: Path) -> None:
    assert open_index(str(out)).num_unindexed == 0
    add_shard(out, "c", unit(5))
    index = open_index(str(out))
    assert (index.num_unindexed, index.stale_shards) == (1, ())


def test_an_open_index_outlives_a_new_build(out: Path) -> None:
    index = open_index(str(out))
    add_shard(out, "aaa", unit(30, 5))
    build_index(str(out))
    assert index.search(VECTORS["lang=en/b"][4], k=1).to_list()[0][0]["text"] == "text lang=en/b 4"
    assert index.ntotal == 200 and open_index(str(out)).ntotal == 230


def test_closing_is_what_leaving_does(built: Path) -> None:
    with open_index(str(built)) as index:
        assert len(index) == 200 and index.dim == DIM
    index.close()


# -- names, rows like another, exact scores --------------------------------------------------------------------------


def test_a_carried_name_that_is_ours_stays_apart_from_all_others(tmp_path: Path) -> None:
    write_run(tmp_path)
    same = {"rank": pa.array([7]), "rank_column": pa.array([8]), "id": pa.array([9])}
    add_shard(tmp_path, "a", unit(1), **same)
    build_index(str(tmp_path))
    [[hit]] = open_index(str(tmp_path)).search(unit(1), k=1).to_list()
    assert (hit["rank"], hit["rank_column_column"], hit["rank_column"], hit["id_column"]) == (1, 7, 8, 9)
    [[hit]] = open_index(str(tmp_path)).search(unit(1), k=1, columns=["rank"]).to_list()
    assert (hit["rank"], hit["rank_column"]) == (1, 7)


def nearest_names(query: NDArray[Any], leave_out: str, num: int) -> list[str]:
    names = [f"{key}:{row}" for key, vectors in VECTORS.items() for row in range(len(vectors))]
    order = np.argsort(-(np.concatenate(list(VECTORS.values())) @ query), kind="stable")
    return [names[at] for at in order if names[at] != leave_out][:num]


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "IVF16,Flat"])
def test_rows_like_a_row_leave_it_out(out: Path, factory: str) -> None:
    build_index(str(out), factory, min_recall=1.0)
    index = open_index(str(out))
    [found] = index.search(like="lang=en/b:7", k=5).to_list()
    assert [hit["id"] for hit in found] == nearest_names(VECTORS["lang=en/b"][7], "lang=en/b:7", 5)
    assert [hit["rank"] for hit in found] == [1, 2, 3, 4, 5]
    several = index.search(like=["lang=de/a:0", "lang=en/b:7"], k=500).to_list()
    assert [len(hits) for hits in several] == [199, 199]
    assert "lang=de/a:0" not in {hit["id"] for hit in several[0]}
    assert index.search(like=[], k=3).to_list() == []


def test_a_row_is_not_like_itself_even_among_its_equals(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", np.repeat(unit(1), 50, axis=0))
    build_index(str(tmp_path))
    [found] = open_index(str(tmp_path)).search(like="a:30", k=10).to_list()
    assert len(found) == 10 and "a:30" not in {hit["id"] for hit in found}


def test_rows_like_a_row_can_be_filtered_and_scored_exactly(built: Path) -> None:
    [found] = open_index(str(built)).search(like="lang=en/b:7", k=3, where="score < 50", rerank=8).to_list()
    assert {hit["score_column"] for hit in found} <= {0, 10, 20, 30, 40}
    everything = nearest_names(VECTORS["lang=en/b"][7], "lang=en/b:7", 200)
    assert [hit["id"] for hit in found] == [name for name in everything if int(name.split(":")[1]) < 5][:3]


@pytest.mark.parametrize("ids", [[7, 5, -3], ["7", "5", "-3"], [b"7", b"5", b"-3"]])
def test_an_id_is_given_in_its_own_type_or_as_text(tmp_path: Path, ids: list[Any]) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(3), ids=ids)
    build_index(str(tmp_path))
    index = open_index(str(tmp_path))
    expected = index.search(like=ids[1], k=2).table
    assert set(expected["id"].to_pylist()) == {ids[0], ids[2]}
    assert index.search(like="5", k=2).table.equals(expected)
    assert index.search(like=pa.scalar(ids[1]), k=2).table.equals(expected)
    assert index.search(like=np.array(ids)[1:2], k=2).table.equals(expected)


def test_an_id_that_names_no_row_or_several_is_told(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(5), ids=[1, 2, 2, 2, 2])
    build_index(str(tmp_path))
    index = open_index(str(tmp_path))
    with pytest.raises(ConfigError, match="like 9: no row of the index has this id"):
        index.search(like="9")
    with pytest.raises(ConfigError, match=r"like 2: 4 rows have this id \(a:1, a:2, a:3, …\); expected one"):
        index.search(like=2)
    for wrong in ("nine", 1.5, 2**70):
        with pytest.raises(ConfigError, match="ids of this index are int64"):
            index.search(like=wrong)
    with pytest.raises(ConfigError, match="expected queries or like, one of them"):
        index.search(unit(1), like=1)
    with pytest.raises(ConfigError, match="expected queries or like, one of them"):
        index.search()


def test_an_id_is_looked_up_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    add_shard(tmp_path, "a", unit(20_000), ids=list(range(20_000)))
    build_index(str(tmp_path))
    index, read = open_index(str(tmp_path)), []
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, group: (read.append(group), real(self, group))[1]
    )
    rows_called(index._ids, 19_000)
    assert read == [2]


def recall_of(index: search.CorpusIndex, queries: NDArray[Any], vectors: NDArray[Any], **options: Any) -> float:
    hits = index.search(queries, k=10, columns=[], **options).to_list()
    found = [{hit["row"] for hit in one} for one in hits]
    best = [set(np.argsort(-(vectors @ query))[:10].tolist()) for query in queries]
    return float(np.mean([len(one & other) / 10 for one, other in zip(found, best, strict=True)]))


def test_exact_scores_of_the_candidates_bring_back_what_codes_lost(tmp_path: Path) -> None:
    write_run(tmp_path)
    vectors, queries = unit(2_000, 11), unit(50, 12)
    add_shard(tmp_path, "a", vectors)
    build_index(str(tmp_path), "PQ4x4", min_recall=0.0)
    index = open_index(str(tmp_path))
    plain, better = recall_of(index, queries, vectors), recall_of(index, queries, vectors, rerank=50)
    assert plain < 0.5 < 0.8 < better
    assert recall_of(index, queries, vectors, rerank=2_000) == 1.0
    result = index.search(queries, k=10, rerank=2_000, columns=[]).table
    exact = np.sort(queries @ vectors.T, axis=1)[:, ::-1][:, :10]
    np.testing.assert_allclose(result["score"].to_numpy().reshape(50, 10), exact, atol=1e-6)


def test_exact_scores_keep_the_order_of_equals_and_read_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    for key in ("a", "b", "c"):
        add_shard(tmp_path, key, np.repeat(unit(2, 4), 100, axis=0))
    build_index(str(tmp_path))
    index, read = open_index(str(tmp_path)), []
    plain = index.search(unit(2, 4)[0], k=7, columns=[]).table
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, group, columns: (read.append((group, columns)), real(self, group, columns=columns))[1],
    )
    reranked = index.search(unit(2, 4)[[0, 0]], k=7, columns=[], rerank=7).table
    assert reranked.slice(0, 7)["id"].equals(plain["id"])
    assert read.count((0, ["embedding"])) == 1, "a row group is read once, for all queries"
    with pytest.raises(ConfigError, match="rerank = 3: expected at least k = 10 candidates"):
        index.search(unit(1), rerank=3)


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "IVF4,Flat", "HNSW8", "IVF4,RQ4x4"])
@pytest.mark.parametrize("few", [0, nearest.FEW])
def test_an_index_of_distances_is_reranked_and_filtered_nearest_first(
    tmp_path: Path, factory: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller is better there."""
    monkeypatch.setattr(nearest, "FEW", few)
    vectors, queries = unit(300, 4) * np.linspace(0.5, 3, 300, dtype=np.float32)[:, None], unit(6, 5)
    write_run(tmp_path)
    add_shard(tmp_path, "a", vectors)
    made = build_index(str(tmp_path), "IDMap2,Flat")
    faiss = load_faiss()
    index = faiss.index_factory(DIM, factory, faiss.METRIC_L2)
    if faiss.try_extract_index_ivf(index) is not None:
        faiss.extract_index_ivf(index).cp.min_points_per_centroid = 1
    index = index if faiss.try_extract_index_ivf(index) is not None or "IDMap" in factory else faiss.IndexIDMap2(index)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(300))
    path = index_file(tmp_path, "index")
    faiss.write_index(index, str(path))
    made |= {"metric": "l2", "factory": factory, "nprobe": 4 if "IVF" in factory else None}
    made["ef_search"] = 64 if "HNSW" in factory else None
    made["sha256"]["index"], made["bytes"]["index"] = sha256_file(path), path.stat().st_size
    (tmp_path / "index/index.json").write_text(json.dumps(made))
    distances = np.square(queries[:, None, :] - vectors[None]).sum(axis=2)
    opened = open_index(str(tmp_path))
    for options, allowed in (({"rerank": 300}, 300), ({"where": "score < 500", "rerank": 50}, 50)):
        found = opened.search(queries, k=7, columns=[], **options).table  # type: ignore[arg-type]
        best = np.argsort(distances[:, :allowed], axis=1)[:, :7]
        assert found["row"].to_numpy().reshape(6, 7).tolist() == best.tolist()
        expected = np.take_along_axis(distances, best, 1)
        np.testing.assert_allclose(found["score"].to_numpy().reshape(6, 7), expected, atol=1e-5)
    if "RQ" not in factory or few == 0:
        found = opened.search(queries, k=7, columns=[], where="score < 500").table
        best = np.argsort(distances[:, :50], axis=1)[:, :7]
        assert found["row"].to_numpy().reshape(6, 7).tolist() == best.tolist()


# -- opened in other ways --------------------------------------------------------------------------------------------


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "IVF16,Flat", "IVF8,SQ8", "HNSW8", "PCAR8,IVF8_HNSW8,Flat", "SQ8"])
def test_a_mapped_index_answers_as_one_in_memory(out: Path, factory: str) -> None:
    build_index(str(out), factory, min_recall=0.0)
    expected = open_index(str(out)).search(unit(20, 3), k=15).table
    assert not mapped(index_file(out, "index"))
    index = open_index(str(out), mmap=True)
    assert mapped(index_file(out, "index"))
    assert index.search(unit(20, 3), k=15).table.equals(expected)
    add_shard(out, "more", unit(10))
    build_index(str(out), factory, min_recall=0.0)
    assert index.search(unit(20, 3), k=15).table.equals(expected), "a newer index does not disturb it"


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "IVF16,Flat"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_cut_file_is_not_mapped(out: Path, factory: str, verify: bool) -> None:
    build_index(str(out), factory, min_recall=0.0)
    path = index_file(out, "index")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="missing or cut"):
        open_index(str(out), verify=verify, mmap=True)


# -- many queries, processes and threads -----------------------------------------------------------------------------


def test_ten_thousand_queries_are_embedded_and_searched_in_blocks(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(str(out), "IVF16,Flat", min_recall=0.0)
    embedded: list[int] = []

    def noted(texts: list[str]) -> NDArray[np.float32]:
        embedded.append(len(texts))
        return unit(10_000, 5)[[int(text) for text in texts]]

    index = open_index(str(out), encoder=noted)
    expected = index.search(unit(10_000, 5), k=10, columns=[]).table
    searched: list[int] = []
    real = index._index.search

    def spy(vectors: NDArray[Any], k: int, params: Any = None) -> Any:
        searched.append(len(vectors) * k)
        return real(vectors, k, params=params)

    index._index.search = spy
    monkeypatch.setattr(nearest, "PAIRS_AT_ONCE", 8_192)
    found = index.search([str(number) for number in range(10_000)], k=10, columns=[]).table
    assert found.equals(expected) and found.num_rows == 100_000
    assert max(embedded) <= 1_024 and max(searched) <= 8_192


@pytest.mark.parametrize(
    ("factory", "mmap"), [("IDMap2,Flat", False), ("IVF16,Flat", False), ("IVF16,Flat", True), ("HNSW8", True)]
)
def test_a_child_that_was_forked_after_a_search_can_search(out: Path, factory: str, mmap: bool) -> None:
    """Also where another thread was searching at that moment. FAISS' own threads are not there in the child."""
    build_index(str(out), factory, min_recall=0.0)
    script = (
        "import os, sys, numpy as np\n"
        "from pipeline import nearest, search\n"
        "nearest.available_cores = lambda: 2\n"
        f"index = search.open_index({str(out)!r}, mmap={mmap})\n"
        "queries = np.random.default_rng(0).standard_normal((64, 8)).astype('float32')\n"
        "expected = index.search(queries, k=5).table\n"
        "index._lock.acquire()  # as another thread of the parent would\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    same = index.search(queries, k=5).table.equals(expected)\n"
        f"    again = search.open_index({str(out)!r}, mmap={mmap}).search(queries, k=5).table.equals(expected)\n"
        "    os._exit(7 if same and again else 1)\n"
        "index._lock.release()\n"
        "assert index.search(queries, k=5).table.equals(expected)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    # A child that hangs keeps the pipes open: the group is ended as a whole.
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)
    try:
        assert process.wait(timeout=60) == 7
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "faiss"])
def test_torch_and_faiss_in_one_process_leave_each_others_threads_alone(built: Path, first: str) -> None:
    second = "faiss" if first == "torch" else "torch"
    script = (
        f"import {first}, {second}, numpy as np\n"
        "from pipeline import nearest, search\n"
        "torch.set_num_threads(3)\n"
        "faiss.omp_set_num_threads(5)\n"
        "before = torch.get_num_threads(), faiss.omp_get_max_threads()\n"
        "nearest.available_cores = lambda: 2\n"
        f"index = search.open_index({str(built)!r})\n"
        "queries = np.random.default_rng(0).standard_normal((300, 8)).astype('float32')\n"
        "a = torch.ones(300, 300)\n"
        "expected = index.search(queries, k=5).table\n"
        "for _ in range(5):\n"
        "    assert float((a @ a).sum()) == 300.0**3\n"
        "    assert index.search(queries, k=5).table.equals(expected)\n"
        "assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == before, before\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
