"""An index that is changed instead of rebuilt: what is added, dropped, read, and when it is built anew after all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline import index_training, recall
from pipeline.corpus import Corpus, open_corpus
from pipeline.errors import ConfigError, IndexingError
from pipeline.indexer import LOCK, build_index
from pipeline.recall import Truth
from pipeline.search import open_index
from pipeline.storage import sha256_file
from tests.test_index_parts import SMALL, valid
from tests.test_indexer import FakeOutput, clustered

FACTORY = "IVF16,SQfp16"


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    """Eight shards of 500 vectors and their index."""
    output = FakeOutput(tmp_path / "out")
    for number in range(8):
        output.add(f"s{number}", shard(number))
    assert build_index(str(output), FACTORY)["built"] == "new"
    return output


@pytest.mark.parametrize("what", ["index", "ids"])
def test_a_file_whose_bytes_have_changed_is_made_again_when_asked(out: FakeOutput, what: str) -> None:
    path = out.root / "index" / out.document()[f"{what}_file"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    assert build_index(str(out), FACTORY)["reused"]  # a run reads no index that nothing has changed in
    again = build_index(str(out), FACTORY, thorough=True)
    assert (again["built"], again["why"]) == ("retrained", f"index/{path.name} is damaged")
    assert valid(out)
    assert build_index(str(out), FACTORY, thorough=True)["reused"]


def test_two_at_once_wait_for_each_other_and_leave_a_whole_index(out: FakeOutput) -> None:
    out.add("s8", more(400))
    said: list[str] = []
    with out.store.lock(name=LOCK) as ours, ThreadPoolExecutor(2) as pool:
        assert ours
        builds = [pool.submit(build_index, str(out), FACTORY, progress=said.append) for _ in range(2)]
        while len(said) < 2:
            time.sleep(0.01)
        assert set(said) == {"index: another process builds it; waiting until that has ended"}
        assert out.document()["ntotal"] == 4000
        os.unlink(out.root / LOCK)  # let them go: a new file is another lock
    assert sorted(build.result()["reused"] for build in builds) == [False, True]
    assert valid(out) and out.document()["ntotal"] == 4400


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": None}, {"shards": []}, {"nprobe": -3}, {"ntotal": 999_999}, {"bytes": {}}, {"sha256": 1},
        {"recall_at_10": None}, {"next_ordinal": 0},
    ],
)  # fmt: skip
def test_a_document_that_is_not_whole_counts_as_none(out: FakeOutput, change: dict[str, Any]) -> None:
    out.store.write_json("index/index.json", out.document() | change)
    with pytest.raises(ConfigError, match="no index here; run `embed-corpus index"):
        open_index(str(out))
    assert build_index(str(out), FACTORY)["built"] == "new"
    assert open_index(str(out)).info["ntotal"] == 4000


def shard(number: int, num: int = 500) -> NDArray[np.float32]:
    return clustered(4000)[500 * number : 500 * number + num]


def more(num: int = 40, seed: int = 9) -> NDArray[np.float32]:
    """From the same clusters."""
    rng = np.random.default_rng(seed)
    vectors = clustered(4000)[rng.integers(4000, size=num)] + 0.05 * rng.normal(size=(num, 16))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def update(out: FakeOutput, factory: str = FACTORY, **options: Any) -> dict[str, Any]:
    """An update that must not become a build."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_training, "trained", lambda *_: pytest.fail("trained again"))
        result = build_index(str(out), factory, **options)
    assert (result["built"], result["why"], result["trained_on"]) == ("updated", None, 4000)
    return result


def contents(out: FakeOutput) -> dict[int, bytes]:
    """The code of each FAISS id."""
    index = out.faiss_index()  # kept: its lists end with it
    lists = faiss.extract_index_ivf(index).invlists
    held: dict[int, bytes] = {}
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if size:
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * lists.code_size).reshape(size, -1)
            assert not held.keys() & set(ids.tolist())
            held |= {int(key): bytes(code) for key, code in zip(ids, codes, strict=True)}
    return held


def corpus_of(out: FakeOutput) -> Corpus:
    return open_corpus(out.store, out.document())


def vectors_of(corpus: Corpus) -> NDArray[np.float32]:
    return corpus.vectors_at(np.arange(corpus.num_vectors))


def check_truth(out: FakeOutput, expected_queries: int) -> None:
    """The neighbours that are kept are those of a comparison of everything with everything."""
    corpus, truth = corpus_of(out), Truth.load(out.root / "index" / out.document()["truth"]["file"])
    vectors = vectors_of(corpus)
    assert len(truth.ids) == expected_queries == out.document()["truth"]["queries"]
    for number, key in enumerate(truth.ids):
        position = int(corpus.positions(np.array([key]))[0])
        np.testing.assert_array_equal(truth.queries[number], vectors[position])
        scores = vectors @ truth.queries[number]
        scores[position] = -np.inf
        known = truth.neighbours[number] >= 0
        assert known.sum() >= 100
        best = np.sort(scores)[::-1][: known.sum()]
        np.testing.assert_allclose(truth.scores[number][known], best, atol=1e-6)
        found = corpus.positions(truth.neighbours[number][known])
        np.testing.assert_allclose(scores[found], truth.scores[number][known], atol=1e-6)


# -- what changes ----------------------------------------------------------------------------------------------------


def test_a_new_shard_is_added_and_nothing_else_is_read(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    before, old = contents(out), out.document()
    out.add("s10", more())
    read: list[str] = []
    real = Corpus.blocks

    def spy(self: Corpus, *args: Any, **kwargs: Any) -> Any:
        read.extend(file.key for file in self.files)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Corpus, "blocks", spy)
    result = update(out)
    monkeypatch.undo()
    assert set(read) == {"s10"}
    assert (result["ntotal"], result["added_rows"], result["removed_rows"]) == (4040, 40, 0)
    assert result["created"] >= old["created"] and result["index_file"] != old["index_file"]
    after = contents(out)
    assert after.keys() - before.keys() == {8 << 32 | row for row in range(40)}
    assert all(after[key] == code for key, code in before.items())
    assert valid(out) == 4040
    assert len(out.index_files()) == 4
    check_truth(out, 200)


def test_an_updated_index_holds_what_faiss_would_add(out: FakeOutput) -> None:
    index = out.faiss_index()
    out.add("s10", more())
    update(out)
    index.add_with_ids(more(), np.arange(40) + (8 << 32))
    index.nprobe = 1
    faiss.write_index(index, str(out.root / "expected.faiss"))
    assert sha256_file(out.root / "expected.faiss") == out.document()["sha256"]["index"]


def test_a_changed_shard_is_replaced_and_keeps_its_range(out: FakeOutput) -> None:
    before = contents(out)
    out.add("s3", more(30))
    result = update(out)
    assert (result["ntotal"], result["added_rows"], result["removed_rows"]) == (3530, 30, 500)
    after = contents(out)
    assert {key & 0xFFFFFFFF for key in after if key >> 32 == 3} == set(range(30))
    assert all(after[key] == code for key, code in before.items() if key >> 32 != 3)
    assert valid(out) == 3530
    # 500 of 3,530 rows went: too much to judge by the queries that are left.
    assert result["truth"]["drift"] == 0
    check_truth(out, 200)


def test_a_removed_shard_is_dropped(out: FakeOutput) -> None:
    out.add("s10", more())
    update(out)
    (out.root / "commits/s10.json").unlink()
    result = update(out)
    assert (result["ntotal"], result["added_rows"], result["removed_rows"]) == (4000, 0, 40)
    assert all(key >> 32 < 8 for key in contents(out))
    assert result["truth"]["drift"] == 80
    check_truth(out, 200)


def test_a_little_drift_keeps_the_queries_and_much_draws_others(tmp_path: Path) -> None:
    output = FakeOutput(tmp_path / "many")
    for number in range(40):
        output.add(f"s{number}", clustered(4000)[100 * number : 100 * number + 100])
    build_index(str(output), FACTORY)
    output.add("s7", more(60))
    output.add("u", more(20, seed=3))
    result = update(output)
    assert result["truth"] | {"file": "", "sha256": "", "bytes": 0} == {
        "queries": 195, "drift": 180, "file": "", "sha256": "", "bytes": 0,
    }  # fmt: skip
    check_truth(output, 195)
    output.add("v", more(300, seed=4))
    result = update(output)
    assert (result["truth"]["queries"], result["truth"]["drift"]) == (200, 0)
    check_truth(output, 200)


def test_reported_recall_is_that_of_the_whole(out: FakeOutput) -> None:
    out.add("s10", more(80))
    result = update(out, min_recall=0.9)
    corpus, index = corpus_of(out), out.faiss_index()
    vectors = vectors_of(corpus)
    index.nprobe = result["nprobe"]
    chosen = np.arange(0, corpus.num_vectors, 8)
    exact = np.argsort(-(vectors[chosen] @ vectors.T), axis=1)[:, 1:11]
    found = corpus.positions(index.search(vectors[chosen], 11)[1])
    measured = np.mean([len(set(e) & (set(f) - {q})) / 10 for e, f, q in zip(exact, found, chosen, strict=True)])
    assert measured == pytest.approx(result["recall_at_10"]["value"], abs=0.04)


def test_only_other_quarantine_or_paths_rewrite_the_ids(out: FakeOutput) -> None:
    out.add("s2", shard(2), quarantined=[0])
    result = update(out)
    assert (result["added_rows"], result["removed_rows"]) == (0, 0)
    rows = out.ids().column("row").to_pylist()[1000:1500]
    assert rows == list(range(1, 501))


def test_a_higher_limit_is_met_by_another_setting(out: FakeOutput) -> None:
    low = build_index(str(out), FACTORY, min_recall=0.3)
    assert low["reused"]  # the one that is there is better
    limit = (low["recall_at_10"]["value"] + 1) / 2
    result = update(out, min_recall=limit)
    assert result["recall_at_10"]["value"] >= limit and result["nprobe"] > low["nprobe"]
    assert (result["added_rows"], result["removed_rows"]) == (0, 0)


def test_readers_of_the_old_index_are_not_disturbed(out: FakeOutput) -> None:
    path = out.root / "index" / out.document()["index_file"]
    mapped = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    queries = shard(0)[:20]
    before = mapped.search(queries, 10)[1]
    out.add("s10", more())
    update(out)
    assert not path.exists()
    assert np.array_equal(mapped.search(queries, 10)[1], before)


# -- when it is built anew -------------------------------------------------------------------------------------------


def rebuilt(out: FakeOutput, factory: str = FACTORY, **options: Any) -> str:
    """Why."""
    lines: list[str] = []
    result = build_index(str(out), factory, progress=lines.append, **options)
    assert result["built"] == "retrained"
    assert f"index: built anew: {result['why']}" in lines
    assert result["trained_on"] == result["ntotal"]
    assert valid(out) == result["ntotal"]
    assert not (out.root / "index/parts").exists()
    return str(result["why"])


def test_twice_as_many_vectors(out: FakeOutput) -> None:
    out.add("t", more(4001))
    assert rebuilt(out) == "8,001 vectors, trained when there were 4,000"


def test_half_as_many_vectors(out: FakeOutput) -> None:
    for number in range(5):
        (out.root / f"commits/s{number}.json").unlink()
    assert rebuilt(out) == "1,500 vectors, trained when there were 4,000"


def test_lists_that_got_unbalanced(out: FakeOutput) -> None:
    lone = np.repeat(shard(0)[:1], 3900, axis=0)
    out.add("t", lone)
    assert rebuilt(out).startswith("its lists are filled unevenly: ")


def test_recall_below_the_limit(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    out.add("t", more())
    real, calls = recall.tune, iter([True])

    def too_low_once(*args: Any) -> Any:
        if next(calls, False):
            raise recall.Missed("IVF16,SQfp16 reached recall@10 0.900 at nprobe=16, below --min-recall 0.95", "")
        return real(*args)

    monkeypatch.setattr(recall, "tune", too_low_once)
    assert rebuilt(out) == "IVF16,SQfp16 reached recall@10 0.900 at nprobe=16, below --min-recall 0.95"


def test_other_options(out: FakeOutput) -> None:
    assert rebuilt(out, "IVF8,SQfp16") == "--index is IVF8,SQfp16 now and was IVF16,SQfp16"


@pytest.mark.parametrize("factory", ["IDMap2,Flat", "HNSW8", "IVF16,PQ4x4fs"])
def test_kinds_that_cannot_be_changed(out: FakeOutput, factory: str) -> None:
    build_index(str(out), factory, min_recall=0.0)
    out.add("t", more())
    why = rebuilt(out, factory, min_recall=0.0)
    assert "lists" in why


@pytest.mark.parametrize("what", ["index_file", "truth"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_index_is_no_ground_to_build_on(out: FakeOutput, what: str, how: str) -> None:
    """FAISS would not notice the flipped byte, and it would live on under a new sha256."""
    document = out.document()
    path = out.root / "index" / (document["truth"]["file"] if what == "truth" else document[what])
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    out.add("t", more())
    assert path.name in rebuilt(out)


def test_an_index_of_an_earlier_version(out: FakeOutput) -> None:
    document = out.document()
    for name in ("built", "truth", "trained_on", "options"):
        del document[name]
    out.store.write_json("index/index.json", document)
    assert build_index(str(out), FACTORY)["reused"]  # it is as good as it was
    out.add("t", more())
    assert rebuilt(out) == "the index is of an earlier version"


# -- bad rows and kills ----------------------------------------------------------------------------------------------


def test_a_new_vector_that_is_not_finite_is_named_and_the_old_index_stays(out: FakeOutput) -> None:
    vectors = more()
    vectors[7, 3] = np.nan
    out.add("t", vectors)
    with pytest.raises(IndexingError, match=r"t\.parquet: vector at output row 7 is not finite"):
        build_index(str(out), FACTORY)
    assert valid(out) == 4000


@pytest.mark.parametrize("where", ["indexer.merge", "indexer.write_ids", "index_parts.Parts.keep", "indexer._document"])
def test_a_killed_update_leaves_the_old_index_and_is_done_again(out: FakeOutput, where: str) -> None:
    out.add("t", more())
    code = (
        SMALL + "import os, signal, sys\n"
        f"{where} = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        f"indexer.build_index(sys.argv[1], {FACTORY!r})\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(out)], check=False, env={**os.environ})
    assert killed.returncode == -9
    assert valid(out) == 4000
    assert update(out)["ntotal"] == 4040
    assert len(out.index_files()) == 4
