"""Which index is built under which limits, and that what is predicted of it comes true."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from pipeline import index_choice
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, IndexingError
from pipeline.index_choice import MAX_PARTS, IndexOptions, choices, index_bytes, index_options, parse_size, predict
from pipeline.indexer import build_index
from pipeline.memory import granted_memory, short_bytes
from tests.test_indexer import FakeOutput, clustered, hard

GB = 10**9


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    return FakeOutput(tmp_path / "out")


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists from 1,000 vectors on, a byte a dimension from 2,000 on."""
    monkeypatch.setattr(index_choice, "FLAT_LIMIT", 1000)
    monkeypatch.setattr(index_choice, "WHOLE_LIMIT", 2000)


def tried(num_vectors: int, dim: int = 384, **options: object) -> list[str]:
    options = {"max_index_ram": 1000 * GB, **options}
    return [choice.factory for choice in choices(IndexOptions(**options), num_vectors, dim)]  # type: ignore[arg-type]


# -- the ladder ------------------------------------------------------------------------------------------------------


def test_the_ladder_follows_the_count() -> None:
    assert tried(50_000) == ["IDMap2,Flat"]
    assert tried(50_001) == ["IVF1024,Flat"]
    assert tried(1_000_000) == ["IVF4096,Flat"]
    assert tried(2_000_000) == ["IVF16384,SQ8", "IVF16384,SQfp16", "IVF16384,Flat"]
    assert tried(50_000_000, 768)[0] == "IVF65536_HNSW32,SQ8"
    assert tried(500_000_000, 768)[0] == "IVF131072_HNSW32,SQ8"
    [million] = choices(IndexOptions(max_index_ram=1000 * GB), 1_000_000, 384)
    assert million.num_train == 50 * 4096
    for choice in choices(IndexOptions(max_index_ram=1000 * GB), 60_000, 8):
        assert choice.num_train >= 39 * choice.num_lists


def test_less_memory_means_smaller_codes() -> None:
    assert tried(2_000_000, max_index_ram=2 * GB) == ["IVF16384,SQ8", "IVF16384,SQfp16"]
    assert tried(2_000_000, max_index_ram=GB) == ["IVF16384,SQ8"]
    assert tried(2_000_000, max_index_ram=3 * GB // 4) == ["IVF16384,SQ6"]
    assert tried(2_000_000, max_index_ram=GB // 2) == ["IVF16384,RaBitQ4"]
    assert tried(2_000_000, max_index_ram=GB // 4) == ["IVF16384,PQ96"]
    assert tried(50_000, max_index_ram=50_000_000) == ["IDMap2,SQfp16"]
    with pytest.raises(ConfigError, match="the smallest index of 2,000,000 vectors of 384 dimensions takes"):
        tried(2_000_000, max_index_ram=GB // 10)


def test_a_graph_is_only_tried_for_latency() -> None:
    assert tried(50_000, max_latency_ms=1.0) == ["IDMap2,Flat", "IVF1024,Flat", "IDMap2,HNSW32"]
    assert tried(1_000_000, max_latency_ms=1.0) == ["IVF4096,Flat", "IDMap2,HNSW32"]
    assert "IDMap2,HNSW32" not in tried(50_000_000, max_latency_ms=1.0)


def test_the_default_limit_is_half_of_what_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_choice, "granted_memory", lambda: 10 * GB)
    assert IndexOptions().max_bytes == 5 * GB


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * GB), ("8 gb", 8 * GB), ("8G", 8 * GB), ("2GiB", 2 << 30), ("1.5TB", 1500 * GB), ("7", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_wrong_limits_are_refused() -> None:
    for text in ("GB", "8XB", "-1GB", "8GB more"):
        with pytest.raises(ConfigError, match="--max-index-ram"):
            parse_size(text)
    with pytest.raises(ConfigError, match="--max-latency-ms"):
        IndexOptions(max_latency_ms=0.0)
    with pytest.raises(ConfigError, match="--max-index-ram"):
        IndexOptions(max_index_ram=-1)


def test_the_options_of_a_run_are_those_of_the_indexer() -> None:
    config = RunConfig(input=["in"], output="out", model="m", index="SQ8", max_index_ram="2GB", min_recall=0.9)
    options = index_options(config)
    assert options == IndexOptions("SQ8", 0.9, 2 * GB)
    assert options.arguments() == ["--factory", "SQ8", "--min-recall", "0.9", "--max-index-ram", str(2 * GB)]
    assert index_options(config.model_copy(update={"index": "none"})) is None


# -- what is predicted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory",
    [
        "IDMap2,Flat",
        "IDMap2,SQfp16",
        "IDMap2,PQ8x4",
        "IDMap2,HNSW16",
        "IDMap2,HNSW16_SQ8",
        "IVF16,Flat",
        "IVF16,SQfp16",
        "IVF16,SQ8",
        "IVF16,SQ6",
        "IVF16,RaBitQ",
        "IVF16,RaBitQ4",
        "IVF16,PQ8x4",
        "PCAR24,IVF16,SQ8",
        "RR,IVF16,RaBitQ8",
        "IVF256_HNSW32,SQ8",
    ],
)
def test_predicted_bytes_are_those_of_the_file(factory: str) -> None:
    vectors = clustered(10_000, dim=32)
    index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(len(vectors)))
    predicted = index_bytes(factory, len(vectors), 32)
    # PQ's own tables and the like, and the levels of a graph, are left out.
    assert predicted == pytest.approx(len(faiss.serialize_index(index)), rel=0.03, abs=60_000)


def test_an_unknown_kind_has_no_predicted_size() -> None:
    assert index_bytes("IVF16,ITQ16,LSH", 1000, 64) is None
    assert index_bytes("OPQ8_16,IVF16,PQ8x4", 1000, 32) == 1000 * (4 + 8) + 16 * (16 * 4 + 8) + 4 * 16 * 32
    assert index_bytes("IDMap2,Flat", 1000, 64) == 1000 * (4 * 64 + 8)


def test_parts_are_as_large_as_memory_allows() -> None:
    [choice] = choices(IndexOptions("IVF65536_HNSW32,SQ8"), 100_000_000, 768)
    predicted = predict(choice, 100_000_000, 768, 100 * GB)
    assert predicted.num_parts == pytest.approx(MAX_PARTS, rel=0.02)
    assert not predicted.mapped
    small = predict(choice, 100_000_000, 768, 4 * GB)
    assert small.mapped
    assert small.build_bytes is not None
    assert small.build_bytes < 8 * GB  # the sample of 3.3 million vectors is most of it
    update = predict(choice, 100_000_000, 768, 4 * GB, num_added=1_000_000)
    assert update.num_parts == 3


def test_a_build_of_minutes_is_one_piece_where_memory_allows() -> None:
    [choice] = choices(IndexOptions("IVF4096,Flat"), 1_000_000, 384)
    whole, in_parts = (predict(choice, 1_000_000, 384, limit * GB) for limit in (8, 2))
    assert (whole.num_parts, in_parts.num_parts) == (0, 7)
    assert whole.build_bytes is not None and in_parts.build_bytes is not None
    assert 1.6 * 1.55 * GB < whole.build_bytes < 3 * GB  # lists that grow, then what holds them
    assert in_parts.build_bytes < 2 * GB
    assert predict(choice, 3_000_000, 384, 64 * GB).num_parts > 0  # a kill would cost too much


def test_what_does_not_fit_the_machine_is_refused_before_reading(
    out: FakeOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline import indexer

    out.add("a", clustered(50))
    monkeypatch.setattr(indexer, "granted_memory", lambda: 1_000_000)
    monkeypatch.setattr(indexer, "scan", lambda *_: pytest.fail("vectors were read"))
    with pytest.raises(ConfigError, match=r"building it takes about .* of memory, 1\.0 MB are granted here"):
        build_index(str(out))


def test_prediction_is_said_and_kept(out: FakeOutput) -> None:
    out.add("a", clustered(3000))
    lines: list[str] = []
    result = build_index(str(out), "IVF16,SQ8", min_recall=0.5, progress=lines.append)
    assert lines[0].startswith(
        "index: 3,000 vectors of 16 dimensions in 1 shards; IVF16,SQ8, 16 lists, trained on 3,000: about 73.2 kB, "
    )
    assert result["predicted"]["index_bytes"] == pytest.approx(result["bytes"]["index"], rel=0.05)
    assert result["predicted"]["build_bytes"] > 100_000_000
    assert result["peak_memory_bytes"] > 0


# -- hard inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_limits")
def test_where_recall_is_missed_the_next_dearer_index_is_tried(out: FakeOutput) -> None:
    out.add("a", hard(2500))
    lines: list[str] = []
    result = build_index(str(out), min_recall=0.999, progress=lines.append)
    assert result["factory"] in ("IVF32,SQfp16", "IVF32,Flat")
    assert result["recall_at_10"]["value"] >= 0.999
    assert "IVF32,SQ8 reached recall@10 0.9" in result["warnings"][0]
    assert "tried IVF32,SQfp16 next" in result["warnings"][0]
    assert any("tried IVF32,SQfp16 next" in line for line in lines)


@pytest.mark.usefixtures("small_limits")
def test_what_does_not_fit_is_not_tried(out: FakeOutput) -> None:
    out.add("a", hard(2500))
    with pytest.raises(IndexingError, match=r"IVF32,SQ8 reached recall@10 0\.9\d+ at nprobe=\d+, below --min-recall"):
        build_index(str(out), min_recall=0.999, max_index_ram=70_000)
    assert not (out.root / "index").exists()


def test_a_latency_nothing_reaches_is_told_with_the_best_there_is(out: FakeOutput) -> None:
    out.add("a", clustered(2000))
    with pytest.raises(IndexingError, match=r"IDMap2,HNSW32 reached recall@10 .* ms a query, above --max-latency-ms"):
        build_index(str(out), max_latency_ms=1e-6)
    assert not (out.root / "index").exists()
    assert build_index(str(out), max_latency_ms=1e6)["factory"] == "IDMap2,Flat"


@pytest.mark.usefixtures("small_limits")
def test_identical_vectors_are_searched_exactly_and_that_is_told(out: FakeOutput) -> None:
    out.add("a", np.repeat(clustered(1), 1500, axis=0))
    result = build_index(str(out))
    assert result["factory"] == "IDMap2,Flat"
    assert result["warnings"] == ["only 1 different vectors among 1,300 sampled: exact search"]
    assert result["recall_at_10"]["value"] == 1.0


@pytest.mark.usefixtures("small_limits")
def test_a_shard_of_duplicates_means_fewer_lists(out: FakeOutput) -> None:
    out.add("a", np.repeat(clustered(1), 1000, axis=0))
    out.add("b", hard(900))
    result = build_index(str(out))
    assert result["factory"] == "IVF16,Flat"
    assert "16 lists instead of 32" in result["warnings"][0]
    assert result["ntotal"] == 1900


# -- metric ----------------------------------------------------------------------------------------------------------


def long_and_short(num: int = 1500) -> np.ndarray:
    return clustered(num) * np.linspace(0.1, 9, num, dtype=np.float32)[:, None]


@pytest.mark.parametrize("factory", ["auto", "IVF16,Flat"])
def test_l2_is_the_metric_of_vectors_of_any_length(out: FakeOutput, factory: str) -> None:
    vectors = long_and_short()
    out.add("a", vectors)
    result = build_index(str(out), factory, metric="l2")
    assert (result["metric"], result["normalized"]) == ("l2", False)
    assert result["recall_at_10"]["value"] >= 0.95
    assert not result["warnings"]
    index = out.faiss_index()
    assert index.metric_type == faiss.METRIC_L2
    faiss.ParameterSpace().set_index_parameter(index, "nprobe", 16) if factory != "auto" else None
    expected = ((vectors - vectors[700]) ** 2).sum(axis=1).argsort()[:5]
    assert index.search(vectors[700:701], 5)[1].ravel().tolist() == expected.tolist()


def test_asking_for_inner_product_silences_the_warning(out: FakeOutput) -> None:
    out.add("a", long_and_short())
    assert any("favours long vectors" in warning for warning in build_index(str(out))["warnings"])
    result = build_index(str(out), metric="ip")
    assert (result["metric"], result["warnings"]) == ("inner_product", [])


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_metric_is_refused_where_it_makes_no_difference(out: FakeOutput, metric: str) -> None:
    out.add("a", clustered(100))
    with pytest.raises(ConfigError, match=f"--metric {metric}: these vectors are of unit length"):
        build_index(str(out), metric=metric)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected ip or l2"):
        build_index(str(out), metric="cosine")  # type: ignore[arg-type]


def test_vectors_too_long_for_half_precision_are_trained_on_all_the_same(out: FakeOutput) -> None:
    out.add("a", clustered(1500) * np.float32(1e6))
    assert build_index(str(out), "IVF16,Flat")["recall_at_10"]["value"] >= 0.95


# -- memory ----------------------------------------------------------------------------------------------------------


def fake_root(root: Path, total_kb: int, group: str = "", **limits: str) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {total_kb} kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(f"0::/{group}\n")
    for folder, limit in limits.items():
        path = root / "sys/fs/cgroup" / folder.replace("_", "/").replace("top", "") / "memory.max"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    return str(root)


def test_memory_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    assert granted_memory(fake_root(tmp_path / "a", 1000)) == 1_024_000
    assert granted_memory(fake_root(tmp_path / "b", 1000, "x/y", top="max", x="70000", x_y="900000")) == 70_000
    assert granted_memory(fake_root(tmp_path / "c", 1000, "x", x="max")) == 1_024_000
    old = Path(fake_root(tmp_path / "d", 1000))
    (old / "sys/fs/cgroup/memory").mkdir(parents=True)
    (old / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("5000\n")
    assert granted_memory(str(old)) == 5000
    (old / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert granted_memory(str(old)) == 1_024_000
    assert granted_memory() > 1 << 20


def test_sizes_are_shown_in_their_unit() -> None:
    shown = [short_bytes(size) for size in (None, 7, 1500, 2.5e6, 3e9)]
    assert shown == ["unknown", "7.0 B", "1.5 kB", "2.5 MB", "3.0 GB"]
