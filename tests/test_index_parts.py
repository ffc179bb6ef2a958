"""An index built in parts: the same bytes as in one, whatever is killed in between."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from pipeline import index_choice, index_parts, index_training
from pipeline.errors import IndexingError, OutputError
from pipeline.index_parts import Lists, frame, merge
from pipeline.indexer import build_index
from pipeline.storage import sha256_file
from tests.test_indexer import FakeOutput, clustered

SMALL = (
    "from pipeline import index_choice, index_parts, indexer\n"
    "index_choice.PART_BYTES, index_choice.CHUNK_BYTES, index_parts.CHUNK_BYTES = 20_000, 1, 3_000\n"
    "index_choice.WHOLE_PARTS = 0\n"
)
"""For another process: parts of 20 kB."""


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    return FakeOutput(tmp_path / "out")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_choice, "WHOLE_PARTS", 0)
    monkeypatch.setattr(index_choice, "PART_BYTES", 20_000)
    monkeypatch.setattr(index_choice, "CHUNK_BYTES", 1)
    monkeypatch.setattr(index_parts, "CHUNK_BYTES", 3_000)


def fill(out: FakeOutput, num: int = 1800) -> None:
    vectors = clustered(num)
    for number, start in enumerate(range(0, num, 500)):
        out.add(f"s{number}", vectors[start : start + 500])


@pytest.mark.parametrize(
    "factory",
    ["IVF16,Flat", "IVF16,SQ8", "IVF8,PQ4x4", "PCAR12,IVF8,SQ8", "RR,IVF8,RaBitQ4", "IVF64_HNSW8,SQ8"],
)
def test_parts_make_the_index_that_faiss_would_write(
    out: FakeOutput, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of shards are far above 2**32: a merge that loses them would be noticed here."""
    fill(out)
    whole = build_index(str(out), factory, min_recall=0.0)
    assert whole["predicted"]["parts"] == 0
    index = out.faiss_index()
    copy = out.root / "copy.faiss"
    faiss.write_index(index, str(copy))
    assert sha256_file(copy) == whole["sha256"]["index"]
    ids = ids_of_lists(index)
    assert sorted(np.concatenate(ids).tolist()) == out.ids().column("faiss_id").to_pylist()
    monkeypatch.setattr(index_choice, "WHOLE_PARTS", 0)
    monkeypatch.setattr(index_choice, "CHUNK_BYTES", 1)
    monkeypatch.setattr(index_parts, "CHUNK_BYTES", 3_000)
    for part_bytes in (index_choice.PART_BYTES, 15_000):
        monkeypatch.setattr(index_choice, "PART_BYTES", part_bytes)
        (out.root / "index/index.json").unlink()
        parts = build_index(str(out), factory, min_recall=0.0)
        assert (parts["predicted"]["parts"] > 1) == (part_bytes == 15_000)
        assert parts["bytes"] == whole["bytes"]
        assert [list(some) for some in ids_of_lists(out.faiss_index())] == [list(some) for some in ids]
        if factory.startswith(("RR", "PCAR")):
            # How a product rounds depends on how many vectors are rotated at once (seen on AMD), and that on the part.
            assert parts["recall_at_10"] == pytest.approx(whole["recall_at_10"], abs=0.02)
        else:
            assert parts["sha256"]["index"] == whole["sha256"]["index"]
            assert parts["recall_at_10"] == whole["recall_at_10"]
    assert out.index_files() == sorted(["index.json", parts["index_file"], parts["ids_file"], parts["truth"]["file"]])


def ids_of_lists(index: faiss.Index) -> list[np.ndarray]:
    """The ids in each inverted list."""
    ivf = faiss.extract_index_ivf(index)
    lists = ivf.invlists
    return [faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy() for i in range(ivf.nlist)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("factory", ["IVF16,PQ4x4fs", "IVF16,RaBitQfs4", "IDMap2,SQ8"])
def test_what_keeps_its_codes_in_another_form_is_built_in_one(out: FakeOutput, factory: str) -> None:
    """FAISS' own merge of fast-scan codes forgets the ids it is given."""
    fill(out)
    result = build_index(str(out), factory, min_recall=0.0)
    assert result["factory"] == factory
    index = out.faiss_index()
    if "IVF" in factory:
        index.nprobe = 16
    vectors = clustered(1800)
    found = index.search(vectors[1600:1601], 100)[1].ravel()
    assert 3 << 32 | 100 in found.tolist()


def test_a_long_list_is_merged_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_parts, "CHUNK_BYTES", 100)
    vectors = clustered(600)
    index = faiss.index_factory(16, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    expected = faiss.clone_index(index)
    sources = []
    for number, start in enumerate(range(0, 600, 200)):
        for one in (index, expected) if number != 1 else (index,):
            one.add_with_ids(vectors[start : start + 200], np.arange(start, start + 200) + (number << 32))
        writer = faiss.FileIOWriter(str(tmp_path / f"{number}"))
        faiss.write_InvertedLists(index.invlists, writer)
        del writer
        sources.append(Lists(tmp_path / f"{number}", without=[1]))
        index.reset()
    head = frame(index, 400)
    assert head is not None
    sha256 = merge(tmp_path / "merged", head, sources)
    faiss.write_index(expected, str(tmp_path / "expected"))
    assert sha256 == sha256_file(tmp_path / "merged") == sha256_file(tmp_path / "expected")


def test_lists_of_which_most_are_empty_are_read(tmp_path: Path) -> None:
    index = faiss.index_factory(16, "IVF64,SQ8", faiss.METRIC_INNER_PRODUCT)
    vectors = clustered(3000)
    index.train(vectors)
    index.add_with_ids(np.repeat(vectors[:1], 5, axis=0), np.arange(5))
    faiss.write_index(index, str(tmp_path / "index"))
    index.reset()
    head = frame(index)
    assert head is not None
    lists = Lists(tmp_path / "index", len(head))
    assert lists.sizes.sum() == lists.sizes.max() == 5
    assert len(lists.read(0, 64)) == 64


def test_cut_and_foreign_files_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"something else, and long enough to hold a header")
    with pytest.raises(IndexingError, match="no inverted lists where they should begin"):
        Lists(tmp_path / "foreign")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(IndexingError, match="no inverted lists"):
        Lists(tmp_path / "empty")
    index = faiss.index_factory(16, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(clustered(200))
    index.add_with_ids(clustered(200), np.arange(200))
    writer = faiss.FileIOWriter(str(tmp_path / "cut"))
    faiss.write_InvertedLists(index.invlists, writer)
    del writer
    os.truncate(tmp_path / "cut", (tmp_path / "cut").stat().st_size - 1)
    with pytest.raises(IndexingError, match="cut; remove the file"):
        Lists(tmp_path / "cut")


# -- interrupted -----------------------------------------------------------------------------------------------------


def killed_at_part(out: FakeOutput, number: int) -> None:
    code = (
        SMALL + "import os, signal, sys\nreal = index_parts.Parts.keep\n"
        "def keep(self, number, *rest):\n"
        f"    if number == {number}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, number, *rest)\n"
        "index_parts.Parts.keep = keep\n"
        "indexer.build_index(sys.argv[1], 'IVF16,Flat')\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(out)], check=False).returncode == -9


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_build_goes_on_after_the_last_finished_part(
    out: FakeOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(out)
    expected = build_index(str(out), "IVF16,Flat")
    (out.root / "index/index.json").unlink()
    killed_at_part(out, 3)
    assert not (out.root / "index/index.json").exists()
    assert len(list((out.root / "index/parts").rglob("part-*.lists"))) == 3
    monkeypatch.setattr(index_training, "trained", lambda *_: pytest.fail("trained again"))
    added: list[int] = []
    real = index_training.Adding.add

    def spy(self: Any, block: Any) -> None:
        added.append(len(block.vectors))
        real(self, block)

    monkeypatch.setattr(index_training.Adding, "add", spy)
    lines: list[str] = []
    result = build_index(str(out), "IVF16,Flat", progress=lines.append)
    part_rows = 20_000 // (expected["predicted"]["index_bytes"] // 1800)
    assert sum(added) == 1800 - 3 * part_rows
    assert "index: trained before, 3 of 7 parts finished; going on" in lines
    for name in ("sha256", "recall_at_1", "recall_at_10", "recall_at_100", "normalized", "nprobe"):
        assert result[name] == expected[name], name
    assert not (out.root / "index/parts").exists()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", ["shard", "options", "trained", "truth"])
def test_parts_of_something_else_are_not_used(out: FakeOutput, change: str) -> None:
    fill(out)
    killed_at_part(out, 2)
    factory = "IVF16,Flat"
    [folder] = (out.root / "index/parts").iterdir()
    if change == "shard":
        out.add("s3", clustered(300, seed=5))
    elif change == "options":
        factory = "IVF8,Flat"
    else:
        for path in folder.glob(f"{change}*"):
            path.write_bytes(path.read_bytes()[:-7])
    lines: list[str] = []
    result = build_index(str(out), factory, progress=lines.append)
    assert not any("going on" in line for line in lines)
    fresh = FakeOutput(out.root.parent / "fresh")
    fill(fresh)
    if change == "shard":
        fresh.add("s3", clustered(300, seed=5))
    assert build_index(str(fresh), factory)["sha256"]["index"] == result["sha256"]["index"]


@pytest.mark.usefixtures("small_parts")
def test_a_part_cut_by_a_full_disk_is_told_and_made_again(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(out)
    real = faiss.write_InvertedLists

    def cut(lists: Any, writer: Any) -> None:
        real(lists, writer)
        del writer
        path = next(iter((out.root / "index/parts").rglob(".part-*")))
        with open(path, "r+b") as file:
            file.truncate(100)

    with monkeypatch.context() as broken:
        broken.setattr(faiss, "write_InvertedLists", cut)
        with pytest.raises((OutputError, IndexingError)):
            build_index(str(out), "IVF16,Flat")
    assert not list((out.root / "index/parts").rglob("part-*.lists"))
    assert build_index(str(out), "IVF16,Flat")["ntotal"] == 1800


def valid(out: FakeOutput) -> int:
    """Vectors of the index in reach, after all that is said of it was checked; 0 where there is none."""
    if not (out.root / "index/index.json").exists():
        return 0
    document = out.document()
    for what in ("index", "ids"):
        assert sha256_file(out.root / "index" / document[f"{what}_file"]) == document["sha256"][what]
    assert out.faiss_index().ntotal == document["ntotal"] == len(out.ids())
    return int(document["ntotal"])


@pytest.mark.slow
def test_kills_at_random_moments_never_leave_a_broken_index(out: FakeOutput, tmp_path: Path) -> None:
    """First of a build, then of an update; each is started again until it was not killed in time."""
    code = SMALL + "import sys\nprint('loaded', flush=True)\nindexer.build_index(sys.argv[1], 'IVF32,Flat')\n"
    rng = random.Random(7)
    kills = 0

    def begun(output: Path) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", code, str(output)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"loaded\n"
        return child

    for total in (1800, 2000):
        out.add(f"t{total}", clustered(total - valid(out), seed=total), row_group_size=20)
        before = valid(out)
        undisturbed = Path(shutil.copytree(out.root, tmp_path / f"copy-{total}"))
        with begun(undisturbed) as child:
            start = time.monotonic()
            assert child.wait(120) == 0
        whole_s = time.monotonic() - start
        for attempt in itertools.count():
            assert attempt < 100
            child = begun(out.root)
            assert child.stdout is not None
            try:
                child.wait(whole_s * (0.15 + 0.15 * attempt) * rng.uniform(0.5, 1.2))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
                kills += 1
            child.stdout.close()
            assert valid(out) in (before, total)
            if child.returncode == 0:
                break
        assert valid(out) == total
    assert kills >= 2
    assert len(out.index_files()) == 4


# -- traps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["torch, faiss", "faiss, torch"])
def test_two_openmp_runtimes_in_a_process_give_the_same_index(out: FakeOutput, order: str) -> None:
    fill(out, 600)
    expected = build_index(str(out), "IVF8,SQ8")["sha256"]["index"]
    (out.root / "index/index.json").unlink()
    code = (
        f"import {order}, sys\nfrom pipeline.indexer import build_index\n"
        "torch.ones(64, 64) @ torch.ones(64, 64)\n"
        "print(build_index(sys.argv[1], 'IVF8,SQ8')['sha256']['index'])\n"
        "torch.ones(64, 64) @ torch.ones(64, 64)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_gpu_only_computes_what_is_computed_once(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of the CPU in place of the GPU's: what is built is the same, and an index of the CPU."""
    fill(out)
    expected = build_index(str(out), "IVF16,Flat")
    (out.root / "index/index.json").unlink()
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name, function in {
        "get_num_gpus": lambda: 1,
        "StandardGpuResources": lambda: "resources",
        "index_cpu_to_all_gpus": faiss.clone_index,
        "knn_gpu": lambda resources, *args, **kwargs: faiss.knn(*args, **kwargs),
    }.items():
        monkeypatch.setattr(faiss, name, counted(name, function), raising=False)
    lines: list[str] = []
    result = build_index(str(out), "IVF16,Flat", progress=lines.append)
    assert result["sha256"] == expected["sha256"]
    assert result["recall_at_10"] == expected["recall_at_10"]
    assert {"index_cpu_to_all_gpus", "knn_gpu"} <= set(calls)
    assert calls.count("index_cpu_to_all_gpus") == 2
    assert lines[0].endswith("on a GPU")


def test_progress_says_when_it_will_be_done(out: FakeOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import indexer

    fill(out)
    clock = itertools.count(0, 10)
    monkeypatch.setattr(indexer.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    build_index(str(out), "IVF16,Flat", progress=lines.append)
    assert json.dumps([line for line in lines if "checked 97 of 1,800 vectors, eta 0:0" in line]) != "[]"
    assert any(line.startswith("index: added 1,800 of 1,800 vectors, eta 0:00:00") for line in lines)
    assert time.monotonic is indexer.time.monotonic
