"""The index stage, on small made-up vectors whose neighbours are known."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipeline import index_choice, index_training, indexer, ledger
from pipeline.errors import ConfigError, IndexingError, OutputError
from pipeline.indexer import build_index
from pipeline.storage import Output, sha256_file

DIM = 16


def clustered(num: int, dim: int = DIM, clusters: int = 20, seed: int = 0) -> NDArray[np.float32]:
    """Unit vectors around a few centres, (num, dim) float32."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dim))
    vectors = centres[rng.integers(clusters, size=num)] + 0.3 * rng.normal(size=(num, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def hard(num: int = 4000) -> NDArray[np.float32]:
    """No clusters at all: neighbours lie in many lists, so few probes are not enough."""
    return clustered(num, dim=DIM, clusters=1) * 1.0


class FakeOutput:
    """An output folder as a run leaves it, with vectors of the test's own."""

    def __init__(self, root: Path, fingerprint: str = "f1", dim: int = DIM) -> None:
        self.root, self.fingerprint, self.dim = root, fingerprint, dim
        self.store = Output(root)
        self.write_run()

    def __str__(self) -> str:
        return str(self.root)

    def write_run(self) -> None:
        config = {"model": "m", "id_column": None, "columns": ["text"]}
        self.store.write_json("run.json", {"fingerprint": self.fingerprint, "fields": {}, "config": config})

    def add(
        self,
        key: str,
        vectors: NDArray[Any],
        ids: Sequence[Any] | pa.Array | None = None,
        quarantined: Sequence[int] = (),
        row_group_size: int = 97,
    ) -> None:
        n = len(vectors)
        kind = pa.list_(pa.field("element", pa.from_numpy_dtype(vectors.dtype), nullable=False), self.dim)
        ids = pa.array(ids if ids is not None else [f"{key}:{row}" for row in range(n)])
        table = pa.table(
            [ids, pa.array([f"text {key} {row}" for row in range(n)]), self.column(vectors, kind)],
            schema=pa.schema(
                [pa.field("id", ids.type), ("text", pa.string()), pa.field("embedding", kind, nullable=False)]
            ),
        )
        output = self.write(f"embeddings/{key}.parquet", table, row_group_size)
        rejected = pa.table({"row": pa.array(quarantined, pa.int64())})
        quarantine = self.write(f"quarantine/{key}.parquet", rejected) if quarantined else None
        record = {
            "shard": {"key": key, "path": f"in/{key}.parquet", "num_rows": n + len(quarantined)},
            "fingerprint": self.fingerprint,
            "output": {**output, "dim": self.dim},
            "quarantine": quarantine,
        }
        ledger.Ledger(self.store).forget(key)  # as a run does before it replaces files
        ledger.Ledger(self.store).commit(record)

    def column(self, vectors: NDArray[Any], kind: pa.DataType) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind)

    def write(self, name: str, table: pa.Table, row_group_size: int = 1000) -> dict[str, Any]:
        path = self.store.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=row_group_size, write_page_checksum=True, compression="none")
        return {
            "path": name,
            "rows": table.num_rows,
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }

    def index_files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "index").iterdir())

    def ids(self) -> pa.Table:
        return pq.read_table(self.root / "index" / self.document()["ids_file"])

    def document(self) -> dict[str, Any]:
        return json.loads((self.root / "index/index.json").read_text())

    def faiss_index(self) -> Any:
        return faiss.read_index(str(self.root / "index" / self.document()["index_file"]))


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    return FakeOutput(tmp_path / "out")


@pytest.fixture
def small_flat_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_choice, "FLAT_LIMIT", 1000)


# -- what is built ---------------------------------------------------------------------------------------------------


def test_few_vectors_are_searched_exactly(out: FakeOutput) -> None:
    out.add("a", clustered(300))
    out.add("b", clustered(200, seed=1))
    result = build_index(str(out))
    assert result["factory"] == "IDMap2,Flat"
    assert result["requested"] == "auto"
    assert (result["ntotal"], result["dim"], result["metric"]) == (500, DIM, "inner_product")
    assert result["nprobe"] is None
    assert result["normalized"] is True
    assert result["recall_at_10"]["value"] == 1.0
    assert result["recall_at_10"]["queries"] == 200
    assert 0.9 < result["recall_at_10"]["low"] < 1.0
    assert result["latency_ms"]["p99"] >= result["latency_ms"]["p50"] > 0
    assert 4 * DIM < result["bytes_per_vector"] < 4 * DIM + 20
    assert result["fingerprint"] == "f1"
    assert result["warnings"] == []
    assert {"scan", "train", "add", "write", "tune", "publish"} <= set(result["seconds"])
    assert result == {**out.document(), "reused": False}
    for what in ("index", "ids"):
        assert sha256_file(out.root / "index" / result[f"{what}_file"]) == result["sha256"][what]


@pytest.mark.usefixtures("small_flat_limit")
def test_more_vectors_get_an_inverted_file_with_a_measured_nprobe(out: FakeOutput) -> None:
    vectors = clustered(3000)
    out.add("a", vectors[:1700])
    out.add("b", vectors[1700:])
    result = build_index(str(out), min_recall=0.97)
    lists = 64  # 4 * sqrt(3000) rounds to 256, but 2800 training vectors allow 71 lists
    assert result["factory"] == f"IVF{lists},Flat"
    assert 1 <= result["nprobe"] <= lists
    recall = result["recall_at_10"]
    assert 0.97 <= recall["value"] <= 1.0
    assert recall["low"] <= recall["value"] <= recall["high"]
    assert recall["queries"] == 100
    index = out.faiss_index()
    assert index.ntotal == 3000
    index.nprobe = lists
    found = index.search(vectors[[5, 2000]], 1)[1].ravel()
    assert found.tolist() == [5, 1 << 32 | 300]


@pytest.mark.usefixtures("small_flat_limit")
def test_training_sample_comes_from_all_shards(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted input is the trap: trained on the first shard, all lists would lie where the others have no vector."""
    seen: list[NDArray[np.float32]] = []
    real = index_training.trained

    def spy(choice: Any, sample: NDArray[np.float32], metric: str) -> Any:
        seen.append(sample.copy())
        return real(choice, sample, metric)

    monkeypatch.setattr(index_training, "trained", spy)
    for number, axis in enumerate((0, 1, 2)):
        vectors = np.abs(clustered(2000, seed=number)) * 0.1
        vectors[:, axis] = 1.0
        out.add(f"s{number}", (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    build_index(str(out))
    counts = np.bincount(seen[0].argmax(axis=1), minlength=3)[:3]
    assert counts.sum() == len(seen[0]) and counts.min() > 0.28 * counts.sum()


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("Flat", "IDMap2,Flat"),
        ("IDMap,Flat", "IDMap2,Flat"),
        ("HNSW16", "IDMap2,HNSW16"),
        ("SQfp16", "IDMap2,SQfp16"),
        ("IVF16,SQ8", "IVF16,SQ8"),
        ("PCAR12,IVF8,SQ8", "PCAR12,IVF8,SQ8"),
        ("RR,IVF8,RaBitQ8", "RR,IVF8,RaBitQ8"),
    ],
)
def test_a_given_factory_keeps_the_ids(out: FakeOutput, asked: str, made: str) -> None:
    vectors = clustered(1500)
    out.add("a", vectors[:700])
    out.add("b", vectors[700:])
    result = build_index(str(out), asked, min_recall=0.3)
    assert result["factory"] == made
    assert result["requested"] == asked
    assert result["ntotal"] == 1500
    found = out.faiss_index()
    hits = set(found.search(vectors[900:901], 10)[1].ravel().tolist())
    assert 1 << 32 | 200 in hits


def test_an_inverted_file_is_never_wrapped(out: FakeOutput) -> None:
    """IDMap around IVF gives ids that a later merge loses without an error."""
    out.add("a", clustered(1000))
    result = build_index(str(out), "IDMap2,IVF16,Flat")
    assert result["factory"] == "IVF16,Flat"
    assert "IDMap left out" in result["warnings"][0]


def test_a_graph_index_gets_its_own_setting(out: FakeOutput) -> None:
    out.add("a", clustered(2000, clusters=1))
    result = build_index(str(out), "HNSW8", min_recall=0.98)
    assert result["ef_search"] >= 16 and result["nprobe"] is None
    assert result["recall_at_10"]["value"] >= 0.98


# -- hard inputs -----------------------------------------------------------------------------------------------------


def test_a_factory_for_many_falls_back_to_exact_search_on_twelve(out: FakeOutput) -> None:
    out.add("a", clustered(12))
    lines: list[str] = []
    result = build_index(str(out), "IVF1024,PQ16", progress=lines.append)
    assert result["factory"] == "IDMap2,Flat"
    assert result["requested"] == "IVF1024,PQ16"
    assert any("cannot be trained on 12 vectors" in warning for warning in result["warnings"])
    assert any("warning" in line and "exact search" in line for line in lines)
    assert result["recall_at_10"] == {"value": 1.0, "low": pytest.approx(0.757, abs=1e-3), "high": 1.0} | {
        "queries": 12,
        "k": 10,
    }


@pytest.mark.parametrize("num", [1, 2, 11])
def test_tiny_corpora_are_indexed(out: FakeOutput, num: int) -> None:
    out.add("a", clustered(num))
    result = build_index(str(out))
    assert result["ntotal"] == num
    assert result["recall_at_10"]["value"] == 1.0
    assert result["recall_at_10"]["k"] == max(1, min(10, num - 1))


@pytest.mark.parametrize("factory", ["auto", "IVF16,Flat", "IVF8,SQ8", "SQ8", "HNSW8", "IVF4,PQ4x4"])
def test_identical_vectors_are_ties_not_misses(out: FakeOutput, factory: str) -> None:
    vectors = np.repeat(clustered(1), 900, axis=0)
    out.add("a", vectors)
    result = build_index(str(out), factory)
    assert result["ntotal"] == 900
    assert result["recall_at_10"]["value"] == 1.0


@pytest.mark.usefixtures("small_flat_limit")
def test_half_duplicates_still_reach_the_limit(out: FakeOutput) -> None:
    vectors = clustered(2000)
    vectors[::2] = vectors[0]
    out.add("a", vectors)
    assert build_index(str(out))["recall_at_10"]["value"] >= 0.95


def test_float16_vectors_count_as_normalised(out: FakeOutput) -> None:
    out.add("a", clustered(200).astype(np.float16))
    result = build_index(str(out))
    assert result["normalized"] is True
    assert result["recall_at_10"]["value"] == 1.0


def test_vectors_of_any_length_are_ranked_by_inner_product(out: FakeOutput) -> None:
    vectors = clustered(200) * np.linspace(0, 9, 200, dtype=np.float32)[:, None]
    out.add("a", vectors)
    result = build_index(str(out))
    assert (result["normalized"], result["metric"]) == (False, "inner_product")
    assert "not of unit length" in result["warnings"][0]
    assert result["recall_at_10"]["value"] == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_named(out: FakeOutput, bad: float) -> None:
    vectors = clustered(250)
    vectors[203, 7] = bad
    out.add("x/a", vectors)
    with pytest.raises(IndexingError, match=r"x/a\.parquet: vector at output row 203 is not finite"):
        build_index(str(out), "SQ8")
    assert not (out.root / "index").exists()


def test_nothing_committed_is_a_wrong_folder(out: FakeOutput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing committed in"):
        build_index(str(out))
    with pytest.raises(ConfigError):
        build_index(str(tmp_path / "absent"))


def test_shards_without_any_vector_have_no_index(out: FakeOutput) -> None:
    out.add("a", np.empty((0, DIM), dtype=np.float32), ids=pa.array([], pa.string()), quarantined=[0, 1, 2])
    with pytest.raises(IndexingError, match="hold no vector"):
        build_index(str(out))


def test_an_empty_shard_among_others_is_fine(out: FakeOutput) -> None:
    out.add("a", np.empty((0, DIM), dtype=np.float32), ids=pa.array([], pa.string()), quarantined=[0, 1])
    out.add("b", clustered(50))
    result = build_index(str(out))
    assert result["ntotal"] == 50
    assert out.ids().column("shard").to_pylist() == ["b"] * 50


def test_uncommitted_files_do_not_count(out: FakeOutput) -> None:
    out.add("a", clustered(50))
    out.add("b", clustered(50))
    (out.root / "commits/b.json").unlink()
    assert build_index(str(out))["ntotal"] == 50


def test_a_commit_whose_file_is_gone_is_told(out: FakeOutput) -> None:
    out.add("a", clustered(50))
    out.add("b", clustered(50))
    (out.root / "embeddings/b.parquet").unlink()
    result = build_index(str(out))
    assert result["ntotal"] == 50
    assert "1 commit records left out" in result["warnings"][0]


def change_commit(out: FakeOutput, key: str, part: str, **changes: Any) -> None:
    path = out.root / f"commits/{key}.json"
    record = json.loads(path.read_text())
    record[part].update(changes)
    path.write_text(json.dumps(record))


def test_rows_other_than_committed_are_refused(out: FakeOutput) -> None:
    out.add("a", clustered(50))
    change_commit(out, "a", "output", rows=51)
    with pytest.raises(IndexingError, match=r"found 50 rows of .*, expected 51 rows of 16 dimensions"):
        build_index(str(out))


def test_a_flipped_byte_in_the_embeddings_is_noticed(out: FakeOutput) -> None:
    vectors = clustered(500)
    out.add("a", vectors)
    path = out.root / "embeddings/a.parquet"
    content = bytearray(path.read_bytes())
    content[bytes(content).index(vectors[120].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(IndexingError, match=r"a\.parquet: cannot be read"):
        build_index(str(out))


def test_two_configurations_are_never_mixed(out: FakeOutput) -> None:
    out.add("a", clustered(50))
    out.fingerprint = "f2"
    out.add("b", clustered(50))
    with pytest.raises(ConfigError, match="shard b was embedded with fingerprint f2, expected f1"):
        build_index(str(out))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Fnord7", "FAISS cannot make it"),
        ("PQ7", "multiple"),
        ("IVF16,PQ4,RFlat", "refin"),
        ("IVF16,SQ8,Refine(Flat)", "refin"),
    ],
)
def test_a_wrong_factory_is_refused_before_reading(
    out: FakeOutput, factory: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.add("a", clustered(50))
    monkeypatch.setattr(indexer, "scan", lambda *_: pytest.fail("vectors were read"))
    with pytest.raises(ConfigError, match=message) as caught:
        build_index(str(out), factory)
    assert "\n" not in str(caught.value) and "faiss::" not in str(caught.value)


def test_a_limit_outside_zero_to_one_is_refused(out: FakeOutput) -> None:
    with pytest.raises(ConfigError, match=r"--min-recall 95"):
        build_index(str(out), min_recall=95)


# -- again -----------------------------------------------------------------------------------------------------------


def test_an_index_that_covers_the_shards_is_kept(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    out.add("a", clustered(60))
    first = build_index(str(out))
    monkeypatch.setattr(indexer, "_rebuilt", lambda *_: pytest.fail("built again"))
    again = build_index(str(out))
    assert again == {**first, "reused": True}


def test_whatever_changes_the_index_builds_it_again(out: FakeOutput) -> None:
    out.add("a", clustered(60))
    build_index(str(out))
    assert build_index(str(out), "SQfp16", min_recall=0.5)["reused"] is False
    assert build_index(str(out), "SQfp16", min_recall=0.5)["reused"] is True
    out.add("b", clustered(60, seed=2))
    assert build_index(str(out), "SQfp16", min_recall=0.5)["ntotal"] == 120
    out.add("b", clustered(60, seed=3))
    assert build_index(str(out), "SQfp16", min_recall=0.5)["reused"] is False
    (out.root / "index" / out.document()["ids_file"]).unlink()
    assert build_index(str(out), "SQfp16", min_recall=0.5)["reused"] is False


def test_a_higher_limit_measures_again(out: FakeOutput) -> None:
    out.add("a", hard(1500))
    low = build_index(str(out), "IVF32,Flat", min_recall=0.3)
    high = build_index(str(out), "IVF32,Flat", min_recall=0.99)
    assert not high["reused"] and high["nprobe"] > low["nprobe"]


def test_old_generations_and_leftovers_are_removed(out: FakeOutput) -> None:
    out.add("a", clustered(60))
    first = build_index(str(out))
    (out.root / "index/.index.faiss.123.tmp").write_bytes(b"left by a crash")
    (out.root / "index/notes.txt").write_text("the user's own")
    out.add("b", clustered(60))
    second = build_index(str(out))
    assert first["index_file"] != second["index_file"]
    expected = ["index.json", "notes.txt", second["index_file"], second["ids_file"], second["truth"]["file"]]
    assert out.index_files() == sorted(expected)


def test_an_unreadable_index_json_is_replaced(out: FakeOutput) -> None:
    out.add("a", clustered(60))
    build_index(str(out))
    (out.root / "index/index.json").write_text('{"version": 1, "sha')
    assert build_index(str(out))["reused"] is False


# -- a crash at any step ---------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception, as a kill is none."""


def crash(*_: Any, **__: Any) -> Any:
    raise Crash


def crash_after(real: Callable[..., Any], calls: int) -> Callable[..., Any]:
    left = iter(range(calls))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise Crash
        return real(*args, **kwargs)

    return call


STEPS: list[tuple[Any, str, int]] = [
    (faiss, "write_index", 0),
    (faiss, "write_index", 1),
    (indexer, "write_ids", 0),
    (indexer, "sha256_file", 0),
    (indexer, "sha256_file", 1),
    (indexer, "_measure", 0),
    (os, "fsync", 0),
    (os, "fsync", 2),
    (os, "replace", 0),
    (os, "replace", 1),
    (os, "replace", 2),
    (os, "replace", 3),
    (indexer, "_remove_others", 0),
]


@pytest.mark.parametrize(("place", "name", "calls"), STEPS, ids=[f"{name}-{calls}" for _, name, calls in STEPS])
def test_after_a_crash_at_any_step_an_index_is_there(
    out: FakeOutput, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, calls: int
) -> None:
    out.add("a", clustered(60))
    build_index(str(out))
    out.add("b", clustered(60, seed=1))
    with monkeypatch.context() as broken:
        broken.setattr(place, name, crash_after(getattr(place, name), calls))
        # Leave on disk what a killed process leaves.
        broken.setattr(Path, "unlink", lambda *_, **__: None)
        if (name, calls) == ("write_index", 1):
            broken.setattr(indexer, "write_ids", crash)
        with pytest.raises(Crash):
            build_index(str(out))
    document = out.document()
    assert document["ntotal"] == (120 if name == "_remove_others" else 60)
    for what in ("index", "ids"):
        assert sha256_file(out.root / "index" / document[f"{what}_file"]) == document["sha256"][what]
    assert out.faiss_index().ntotal == document["ntotal"]
    out.add("c", clustered(10, seed=2))
    assert build_index(str(out))["ntotal"] == 130
    assert len(out.index_files()) == 4


def test_a_killed_process_leaves_the_old_index(out: FakeOutput) -> None:
    out.add("a", clustered(60))
    build_index(str(out))
    out.add("b", clustered(60, seed=1))
    code = (
        "import os, signal, sys\nfrom pipeline import indexer\n"
        "indexer._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "indexer.build_index(sys.argv[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(out)], check=False).returncode == -9
    assert out.document()["ntotal"] == 60 and out.faiss_index().ntotal == 60
    assert len(out.index_files()) == 6  # four old ones, and two that are begun
    assert build_index(str(out))["ntotal"] == 120
    assert len(out.index_files()) == 4


def test_a_written_index_that_lost_a_vector_is_not_published(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    out.add("a", clustered(60))
    other = faiss.index_factory(DIM, "IDMap2,Flat", faiss.METRIC_INNER_PRODUCT)
    other.add_with_ids(clustered(59), np.arange(59))
    monkeypatch.setattr(faiss, "read_index", lambda *_: other)
    with pytest.raises(IndexingError, match=r"says 59 vectors and holds 59, expected 60; not published"):
        build_index(str(out))
    assert not (out.root / "index").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(out: FakeOutput) -> None:
    """Files of at most 4 kB: what a full disk does to a write, without a disk of our own."""
    out.add("a", clustered(900))
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.indexer", str(out.root)],
        capture_output=True,
        text=True,
        check=False,
        # In a process of its own: the limit would hit the test runner's log as well.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.returncode == OutputError.exit_code, done.stderr
    assert "the index cannot be written" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (out.root / "index").exists()


def test_a_folder_that_cannot_be_written_is_one_line(out: FakeOutput) -> None:
    out.add("a", clustered(60))
    (out.root / "index").write_text("a file where a folder must be")
    with pytest.raises(ConfigError, match="index: cannot be written") as caught:
        build_index(str(out))
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_told(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Any:
        raise MemoryError("std::bad_alloc")

    out.add("a", clustered(60))
    monkeypatch.setattr(index_training.Adding, "add", too_much)
    with pytest.raises(IndexingError, match="not enough memory to index 60 vectors"):
        build_index(str(out))


def test_thread_count_of_the_caller_is_left_as_it_was(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    before = faiss.omp_get_max_threads()
    monkeypatch.setattr(indexer, "available_cores", lambda: before + 3)
    out.add("a", clustered(60))
    build_index(str(out))
    assert faiss.omp_get_max_threads() == before


# -- its own process -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "pipeline.indexer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_prints_one_document_and_tells_the_rest_on_stderr(out: FakeOutput) -> None:
    out.add("a", clustered(300))
    done = run(str(out), "--factory", "PQ4x4", "--min-recall", "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**out.document(), "reused": False}
    assert "index: 300 vectors of 16 dimensions in 1 shards" in done.stderr


def test_command_fails_with_one_line_and_the_exit_code(out: FakeOutput) -> None:
    done = run(str(out))
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.count("\n") == 1 and "nothing committed" in done.stderr


def test_index_stage_loads_neither_torch_nor_faiss_early() -> None:
    code = "import sys, pipeline.indexer, pipeline.search; print({'torch', 'faiss'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_shard_whose_ids_are_all_null_is_indexed_beside_others(tmp_path: Path) -> None:
    output = FakeOutput(tmp_path / "out")
    output.add("a", clustered(300)[:100], ids=pa.nulls(100))
    output.add("b", clustered(300)[100:])
    build_index(str(output))
    ids = output.ids()
    assert ids["id"].null_count == 100 and ids["id"].to_pylist()[100] == "b:0"


@pytest.mark.parametrize("factory", ["HNSW0", "IVF0,Flat", "PQ0", "OPQ4,PQ0"])
def test_a_size_of_nothing_is_refused_before_faiss_ends_the_process(tmp_path: Path, factory: str) -> None:
    output = FakeOutput(tmp_path / "out")
    output.add("a", clustered(300))
    with pytest.raises(ConfigError, match="expected a factory string such as"):
        build_index(str(output), factory)


def test_pq_is_not_trained_for_hamming_distances_that_nobody_asks() -> None:
    for factory in ("PQ4", "OPQ4,PQ4", "IDMap2,PQ4"):
        index = index_training.made(factory, 16)
        while hasattr(index, "index"):
            index = faiss.downcast_index(index.index)
        assert index.do_polysemous_training is False
