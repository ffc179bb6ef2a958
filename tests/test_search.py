"""Searching an index, built here by the index stage from made-up vectors."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipeline import ledger, search
from pipeline.errors import ConfigError
from pipeline.indexer import build_index
from pipeline.search import SearchResult, open_index
from pipeline.storage import Output, sha256_file

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
) -> None:
    """One committed shard: doc_id, text and score carried, row groups of 50."""
    n = len(vectors)
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(vectors.dtype), nullable=False), DIM)
    table = pa.table(
        {
            "doc_id": pa.array(ids if ids is not None else [f"{key}:{row}" for row in range(n)]),
            "text": [f"text {key} {row}" for row in range(n)],
            "score": pa.array(np.arange(n) * 10),
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
    shard = {"key": key, "path": key, "num_rows": n + len(quarantined)}
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


def test_a_wide_search_leaves_the_measured_setting(out: Path) -> None:
    nprobe = build_index(str(out), "IVF16,Flat", min_recall=0.5)["nprobe"]
    index = open_index(str(out))
    before = index.search(unit(20, seed=4), k=3).table
    index.search(unit(1), k=200)
    assert index._faiss.extract_index_ivf(index._index).nprobe == nprobe
    assert index.search(unit(20, seed=4), k=3).table.equals(before)


def test_measured_nprobe_is_set_on_opening(out: Path) -> None:
    document = build_index(str(out), "IVF16,Flat", min_recall=1.0)
    assert document["nprobe"] > 1
    index = open_index(str(out))
    assert index._faiss.extract_index_ivf(index._index).nprobe == document["nprobe"]


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
