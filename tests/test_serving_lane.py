"""The ONNX lane and the batch engine's: made, proven, refused; their vectors beside those of the batch engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.batcher import pack
from pipeline.encoder import Encoder
from pipeline.errors import ConfigError
from pipeline.records import EncoderSettings
from pipeline.serving import kit as kits
from pipeline.serving.engine import Engine
from pipeline.serving.errors import EngineDown
from pipeline.serving.export import make_kit
from pipeline.serving.kit import Kit
from pipeline.serving.lanes import ProcessLane
from pipeline.serving.onnx_lane import OnnxEncoder, Parity, Probes, rectangles
from pipeline.serving.settings import ServeSettings
from pipeline.tokenizer import Tokenizer
from tests import model_zoo

TEXTS = [
    "how do small boats keep their balance in a rough winter sea",
    "boat",
    "",
    "The ship left the harbor before dawn, and nobody on the pier knew where it was bound. " * 40,
    "Segelschiff im Sturm — ein Märchen",
    "a b c d e f g",
]


def test_texts_of_one_length_are_one_rectangle_and_padding_is_weighed_against_calls() -> None:
    assert rectangles([5, 5, 5], 4) == [(0, 3)]
    assert rectangles([9, 9, 3], 4) == [(0, 2), (2, 3)]
    assert rectangles([9, 9, 8], 4) == [(0, 3)]
    assert rectangles([12, 1], 4) == [(0, 1), (1, 2)]
    assert rectangles([], 4) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 40))
def test_rectangles_cost_least_of_all_ways_to_cut(lengths: list[int], call_tokens: int) -> None:
    lengths = sorted(lengths, reverse=True)

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum(call_tokens + lengths[first] * (stop - first) for first, stop in cuts)

    found = rectangles(lengths, call_tokens)
    assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == len(lengths)
    borders = range(1, len(lengths))
    ways = []
    for chosen in range(1 << len(borders)):
        edges = [0, *(border for border in borders if chosen >> (border - 1) & 1), len(lengths)]
        ways.append(list(itertools.pairwise(edges)))
    assert cost(found) == min(map(cost, ways))


def test_parity_tells_rounding_from_another_vector() -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    assert not Parity.of(vectors * (1 + 1e-7), vectors).fault()
    assert "cosine" in Parity.of(vectors + 0.01, vectors).fault()
    assert not Parity.of(vectors + 0.01, vectors).fault(int8=True)
    assert Parity.of(vectors[::-1].copy(), vectors).fault(int8=True)
    assert Parity.of(vectors * np.float32(np.nan), vectors).fault()


def made(folder: Path, model: Path | str, prompts: list[str], **options: Any) -> Kit:
    folder.mkdir()
    make_kit(folder, EncoderSettings(str(model), **options), prompts, threads=2)
    kit = Kit.read(folder)
    assert kit is not None
    return kit


def embedded(encoder: Encoder, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """The batch engine's input and vectors, longest text first."""
    tokens = Tokenizer(encoder.tokenizer_spec()).encode(texts)
    batch = pack(tokens, np.argsort(-tokens.lengths, kind="stable").astype(np.int64))
    return batch.input_ids, batch.lengths, encoder.encode(batch)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "qwen3"])
def test_the_graph_of_an_architecture_gives_the_batch_vectors_or_says_why_there_is_none(
    architecture: str, tmp_path: Path
) -> None:
    model = model_zoo.build(architecture, tmp_path / "model")
    kit = made(tmp_path / "kit", model, ["query: "])
    if kit.reason:  # which of them can be exported depends on the versions; these two must
        assert architecture not in ("bert", "roberta"), kit.reason
        assert not kit.graph(int8=False).exists()
        return
    encoder = Encoder.load(EncoderSettings(str(model)))
    ids, lengths, expected = embedded(encoder, [model_zoo.sentence(count, count) for count in (1, 2, 2, 7, 30, 110)])
    found = OnnxEncoder(kit.graph(int8=False), 2).encode(ids, lengths)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(kit.timed) and all(seconds > 0 for row in kit.timed for seconds in row[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooling", "options"),
    [
        ("max", {"normalize": False}),
        ("lasttoken", {"dimensions": 8}),
        ("weightedmean", {}),
        (["mean", "cls"], {"dimensions": 40, "normalize": True}),
    ],
)
def test_the_graph_ends_in_final_vectors_whatever_pooling_and_cut(
    pooling: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    model = model_zoo.build("bert", tmp_path / "model")
    model_zoo.write_pooling(model, pooling=pooling, dim=32)
    kit = made(tmp_path / "kit", model, [], **options)
    assert not kit.reason, kit.reason
    encoder = Encoder.load(EncoderSettings(str(model), **options))
    ids, lengths, expected = embedded(encoder, [model_zoo.sentence(count, count) for count in (1, 5, 6, 40)])
    found = OnnxEncoder(kit.graph(int8=False), 2).encode(ids, lengths)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-5)
    unit = np.allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-4)
    assert kit.facts["normalize"] == unit


def test_a_model_whose_pooling_leaves_prompts_out_gets_no_graph(tmp_path: Path) -> None:
    model = model_zoo.build("bert", tmp_path / "model")
    model_zoo.write_pooling(model, pooling="mean", dim=32, include_prompt=False)
    assert "leaves prompts out" in made(tmp_path / "kit", model, []).reason


def test_a_key_differs_with_all_that_changes_the_graph_and_with_nothing_else() -> None:
    files, encoder = {"model_weights": "a"}, EncoderSettings("/somewhere")
    key = kits.kit_key(files, encoder, ["q"], 2, int8=False)
    assert key == kits.kit_key(files, replace(encoder, model_path="/elsewhere", prompt="p"), ["q"], 2, int8=False)
    others = [
        kits.kit_key({"model_weights": "b"}, encoder, ["q"], 2, int8=False),
        kits.kit_key(files, replace(encoder, max_length=9), ["q"], 2, int8=False),
        kits.kit_key(files, replace(encoder, dimensions=9), ["q"], 2, int8=False),
        kits.kit_key(files, replace(encoder, normalize=False), ["q"], 2, int8=False),
        kits.kit_key(files, encoder, ["q", "r"], 2, int8=False),
        kits.kit_key(files, encoder, ["q"], 2, int8=True),
    ]
    assert len({key, *others}) == len(others) + 1


# -- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache for all tests of the real model: its graph is made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "embed-corpus" / "onnx"


@pytest.fixture(scope="module")
def batch_vectors(model_dir: str) -> dict[str, NDArray[np.float32]]:
    """By prompt, what the batch engine gives for ``TEXTS``."""
    vectors = {}
    for prompt in ("", "query: "):
        encoder = Encoder.load(EncoderSettings(model_dir, prompt=prompt))
        tokens = Tokenizer(encoder.tokenizer_spec()).encode(TEXTS)
        vectors[prompt] = encoder.encode(pack(tokens, np.arange(len(TEXTS))))
    return vectors


def serve(model: str, check: Any, **options: Any) -> None:
    async def main() -> None:
        engine = await Engine.start(None, ServeSettings(model=model, **options))
        try:
            await check(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def ask(engine: Engine, texts: list[str], prompt: str = "") -> NDArray[np.float32]:
    found = await engine.embed(texts, prompt=prompt, deadline=asyncio.get_running_loop().time() + 120)
    return found.vectors


@pytest.mark.slow
def test_served_vectors_are_the_batch_vectors_in_the_onnx_lane(
    cached: Path, model_dir: str, batch_vectors: dict[str, NDArray[np.float32]]
) -> None:
    async def check(engine: Engine) -> None:
        assert engine.info.lane == "onnx" and engine.info.parity["cosine"] >= 0.9999
        assert (engine.info.dim, engine.info.max_length, engine.info.pooling) == (384, 256, "mean")
        for prompt, expected in batch_vectors.items():
            together = await ask(engine, TEXTS, prompt)
            alone = np.concatenate([await ask(engine, [text], prompt) for text in TEXTS])
            for found in (together, alone):
                assert (found * expected).sum(axis=1).min() >= 0.9999
                assert np.abs(found - expected).max() <= 1e-5

    serve(model_dir, check, query_lane="onnx")


@pytest.mark.slow
def test_served_vectors_are_the_batch_vectors_in_the_torch_lane(
    model_dir: str, batch_vectors: dict[str, NDArray[np.float32]]
) -> None:
    async def check(engine: Engine) -> None:
        assert engine.info.lane == "torch"
        for prompt, expected in batch_vectors.items():
            assert np.abs(await ask(engine, TEXTS, prompt) - expected).max() <= 1e-5

    serve(model_dir, check, query_lane="torch", warm_spare=False)


@pytest.mark.slow
def test_sixteen_callers_with_mixed_sizes_get_their_own_vectors(cached: Path, model_dir: str) -> None:
    words = [f"{one} {other}" for one in ("red", "old", "small", "wooden") for other in ("boat", "house", "hat", "dog")]

    async def check(engine: Engine) -> None:
        alone = np.concatenate([await ask(engine, [text]) for text in words])

        async def caller(number: int) -> None:
            random = np.random.default_rng(number)
            for _ in range(6):
                chosen = random.integers(0, len(words), random.integers(1, 9))
                found = await ask(engine, [words[at] for at in chosen])
                assert np.abs(found - alone[chosen]).max() <= 1e-5

        await asyncio.gather(*(caller(number) for number in range(16)))
        assert engine.stats.batches < engine.stats.texts  # calls were computed together

    serve(model_dir, check, query_lane="onnx")


@pytest.mark.slow
def test_a_killed_onnx_process_answers_again_within_five_seconds(cached: Path, model_dir: str) -> None:
    async def check(engine: Engine) -> None:
        [lane] = engine._lanes
        assert isinstance(lane, ProcessLane) and lane.pid is not None
        before = await ask(engine, TEXTS)
        began = time.monotonic()
        os.kill(lane.pid, signal.SIGKILL)
        while True:
            try:
                after = await ask(engine, TEXTS)
                break
            except EngineDown:  # what was in flight, or was sent before the death was noticed
                await asyncio.sleep(0.02)
        assert time.monotonic() - began < 5
        np.testing.assert_array_equal(after, before)

    serve(model_dir, check, query_lane="onnx")


@pytest.mark.slow
def test_the_int8_lane_is_there_only_when_asked_for_and_is_named(
    cached: Path, model_dir: str, batch_vectors: dict[str, NDArray[np.float32]]
) -> None:
    async def check(engine: Engine) -> None:
        assert engine.info.lane == "onnx-int8" and 0.95 <= engine.info.parity["cosine"] < 0.9999
        cosines = (await ask(engine, TEXTS) * batch_vectors[""]).sum(axis=1)
        assert cosines.min() > 0.95

    serve(model_dir, check, query_lane="onnx-int8")


@pytest.mark.slow
def test_a_graph_with_other_vectors_is_not_admitted(cached: Path, model_dir: str) -> None:
    async def nothing(engine: Engine) -> None:
        return

    serve(model_dir, nothing, query_lane="onnx")
    [folder] = [path for path in cached.iterdir() if not (path / "int8.onnx").exists()]
    probes = Probes.load(folder / "probes.npz")
    replace(probes, vectors=probes.vectors[::-1].copy()).save(folder / "probes.npz")
    try:
        with pytest.raises(ConfigError, match="differ from the batch's"):
            serve(model_dir, nothing, query_lane="onnx")

        async def check(engine: Engine) -> None:
            assert engine.info.lane.startswith("torch (no onnx: ") and "differ" in engine.info.lane
            assert np.isfinite(await ask(engine, ["boat"])).all()

        serve(model_dir, check, query_lane="auto", warm_spare=False)
    finally:
        probes.save(folder / "probes.npz")


def test_a_model_that_cannot_be_exported_is_told_once_and_remembered(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = "k" * 32
    folder = tmp_path / "embed-corpus" / "onnx" / key
    folder.mkdir(parents=True)
    (folder / "kit.json").write_text(json.dumps({"facts": {}, "reason": "because", "timed": []}))
    kit = asyncio.run(kits.prepared(key, EncoderSettings("/nowhere"), [], 2))
    assert kit.reason == "because"
    with pytest.raises(ConfigError, match="nowhere"):
        asyncio.run(kits.prepared("other", EncoderSettings("/nowhere"), [], 2))
    assert [path.name for path in folder.parent.iterdir()] == [key], "what was half made is removed"


def test_the_second_lane_is_there_only_where_it_is_worth_it() -> None:
    def kit(*timed: tuple[float, float, float, float]) -> bool:
        return Kit(Path(), {}, "", list(timed)).torch_is_worth_it

    assert not kit((12, 144, 0.002, 0.005), (512, 8192, 0.035, 0.034))
    assert kit((12, 144, 0.002, 0.005), (512, 8192, 0.050, 0.034))


@pytest.mark.slow
def test_memory_of_the_onnx_process_does_not_grow_with_ever_new_shapes(cached: Path, model_dir: str) -> None:
    import psutil

    async def check(engine: Engine) -> None:
        [lane] = engine._lanes
        assert isinstance(lane, ProcessLane)
        process = psutil.Process(lane.pid)
        random = np.random.default_rng(0)
        ids = random.integers(1000, 2000, 512).astype(np.int32)

        async def batches(count: int) -> None:
            for _ in range(count):
                lengths = np.sort(random.integers(1, 80, random.integers(1, 6)))[::-1].astype(np.int32)
                await lane.send(ids[: lengths.sum()], lengths, 0)

        await lane.send(ids, np.array([256, 256], np.int32), 0)  # the most that is ever needed
        await batches(100)
        before = process.memory_info().rss
        await batches(150)
        assert process.memory_info().rss - before < 8 << 20

    serve(model_dir, check, query_lane="onnx")
