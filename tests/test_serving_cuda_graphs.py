"""Recorded forwards of single short texts: buckets, buffers and admission, with a recording that runs on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline import attention
from pipeline.attention import Packed
from pipeline.encoder import Encoder, _DeviceBatch
from pipeline.errors import ModelError
from pipeline.records import Batch, EncoderSettings
from pipeline.serving import cuda_graphs
from pipeline.serving.cuda_graphs import BUCKETS, QueryGraphs, _one_text, _positions, _probe_lengths
from pipeline.serving.encoder_process import TorchBackend, batch_of
from pipeline.transfer import Transfer
from tests import model_zoo


def varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: tuple[int, int]
) -> Tensor:
    """As the kernels: knows texts from ``cu_seqlens`` alone, and leaves rubbish behind the last one."""
    out = torch.full_like(query, float("nan"))
    for start, stop in itertools.pairwise(packed.cu_seqlens.tolist()):
        assert stop - start <= packed.max_seqlen
        q, k, v = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        position = torch.arange(stop - start)
        distance = position[None, :] - position[:, None]
        left, right = (stop if side < 0 else side for side in window)
        mask = (distance >= -left) & (distance <= right)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[0] != k.shape[0]
        )
        out[start:stop] = attended.transpose(0, 1)
    return out


class Recorded:
    """A `Graph` that remembers what to compute; like a recording, it writes its result into the same memory."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        self._compute, self._output = compute, compute().clone()
        return self._output

    def replay(self) -> None:
        self.replays += 1
        self._output.copy_(self._compute())


def loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, architecture: str = "bert", pooling: Any = None, **options: Any
) -> Encoder:
    """A tiny model whose attention reads lengths where the kernels of a GPU do."""
    model = model_zoo.build(architecture, folder / "model", **options)
    if pooling is not None:
        model_zoo.write_pooling(model, pooling=pooling, dim=32)
    encoder = Encoder.load(EncoderSettings(str(model)))
    monkeypatch.setattr(attention, "_varlen_call", lambda kind: varlen)
    encoder.attention = "torch-varlen"
    return encoder


def ids_of(encoder: Encoder, length: int, seed: int = 0) -> NDArray[np.int32]:
    vocabulary = encoder.transformer.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def computed(graphs: QueryGraphs, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    submitted = graphs.submit(_one_text(ids))
    assert submitted is not None
    return submitted.result()


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [
        ("bert", "mean"),
        ("bert", ["cls", "max"]),
        ("bert", "weightedmean"),
        ("roberta", "mean"),
        ("modernbert", "cls"),  # windows
        ("qwen3", "lasttoken"),  # causal, fewer key heads
    ],
)
def test_a_text_has_the_normal_vector_whatever_longer_text_was_there_before(
    architecture: str, pooling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch, architecture, pooling)
    graphs = QueryGraphs.captured(encoder, Recorded)
    assert graphs.facts == {"buckets": list(BUCKETS), "reasons": []}
    lengths = np.random.default_rng(1).permutation(128) + 1  # padding tokens are among the ids, too
    for length in [128, *lengths.tolist(), 1]:
        ids = ids_of(encoder, length, seed=length)
        expected = encoder.encode(_one_text(ids))
        np.testing.assert_allclose(computed(graphs, ids), expected, atol=1e-5)


def test_a_text_goes_into_the_smallest_bucket_that_holds_it_and_all_else_the_normal_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch)
    made: list[Recorded] = []

    def make() -> Recorded:
        made.append(Recorded())
        return made[-1]

    graphs = QueryGraphs.captured(encoder, make)
    by_size = dict(zip(reversed(BUCKETS), made, strict=True))
    for graph in made:
        graph.replays = 0
    for length in (1, 16, 17, 32, 33, 64, 65, 128):
        computed(graphs, ids_of(encoder, length))
    assert {size: graph.replays for size, graph in by_size.items()} == {128: 2, 64: 2, 32: 2, 16: 2}
    assert graphs.submit(_one_text(ids_of(encoder, 129))) is None
    assert graphs.submit(_one_text(ids_of(encoder, 0))) is None
    assert graphs.submit(batch_of(ids_of(encoder, 6), np.array([4, 2], np.int32))) is None


def test_a_vector_on_its_way_is_not_overwritten_by_the_next_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch)
    graphs = QueryGraphs.captured(encoder, Recorded)
    one, other = ids_of(encoder, 9, 1), ids_of(encoder, 12, 2)
    first, second = graphs.submit(_one_text(one)), graphs.submit(_one_text(other))
    assert first is not None and second is not None
    for submitted, ids in ((first, one), (second, other)):
        np.testing.assert_allclose(submitted.result(), encoder.encode(_one_text(ids)), atol=1e-5)


def test_buckets_end_where_the_models_texts_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = loaded(tmp_path, monkeypatch, max_length=40)
    graphs = QueryGraphs.captured(encoder, Recorded)
    assert graphs.facts["buckets"] == [16, 32, 64]
    ids = ids_of(encoder, 40)
    np.testing.assert_allclose(computed(graphs, ids), encoder.encode(_one_text(ids)), atol=1e-5)


def test_probes_meet_both_ends_of_every_bucket_longest_first() -> None:
    lengths = _probe_lengths(128)
    assert {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128} <= set(lengths)
    assert lengths == sorted(lengths, reverse=True) and set(_probe_lengths(20)) <= set(range(1, 21))


def test_positions_are_those_of_the_normal_path() -> None:
    transfer = Transfer(torch.device("cpu"))
    ids = np.array([0, 7, 1, 9, 1, 1, 5], np.int32)
    for padding_idx in (None, 1, 0):
        expected = _DeviceBatch.of(_one_text(ids), transfer).position_ids(padding_idx)
        assert _positions(ids, padding_idx).tolist() == expected.tolist()


# -- admission -------------------------------------------------------------------------------------------------------


class Stale(Recorded):
    """Gives the vector of the text before, as a recording that reads its input too early would."""

    def replay(self) -> None:
        self._output.copy_(self._later)
        self._later = self._compute()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        output = super().capture(compute)
        self._later = output.clone()
        return output


class Scaled(Recorded):
    """Right direction, wrong length: the cosine alone does not show it."""

    def replay(self) -> None:
        super().replay()
        self._output.mul_(1.02)


class Broken(Recorded):
    """As a model that waits for the device in its forward."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("wrong", [Stale, Scaled])
def test_a_bucket_with_other_vectors_is_left_out_and_named_and_the_next_one_takes_its_texts(
    wrong: type[Recorded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch)
    kinds = iter([Recorded, Recorded, wrong, Recorded])  # 128, 64, 32, 16
    graphs = QueryGraphs.captured(encoder, lambda: next(kinds)())
    assert graphs.facts["buckets"] == [16, 64, 128]
    [reason] = graphs.reasons
    assert "up to 32 tokens have other vectors (cosine" in reason
    ids = ids_of(encoder, 20)
    np.testing.assert_allclose(computed(graphs, ids), encoder.encode(_one_text(ids)), atol=1e-5)


def test_a_model_that_cannot_be_recorded_says_why_and_computes_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch)
    graphs = QueryGraphs.captured(encoder, Broken)
    assert graphs.facts["buckets"] == []
    assert graphs.reasons == [
        "texts of up to 128 tokens cannot be recorded (operation not permitted when stream is capturing)"
    ]
    assert graphs.submit(_one_text(ids_of(encoder, 5))) is None


def test_a_device_that_a_failed_recording_left_broken_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(tmp_path, monkeypatch)

    class Fatal(Broken):
        def capture(self, compute: Callable[[], Tensor]) -> Tensor:
            monkeypatch.setattr(encoder, "_compute", lambda *arguments: 1 / 0)
            return super().capture(compute)

    with pytest.raises(ModelError, match=r"does not compute any more .* set cuda_graphs to false"):
        QueryGraphs.captured(encoder, Fatal)


def test_attention_that_needs_lengths_on_the_host_is_not_recorded(tmp_path: Path) -> None:
    encoder = Encoder.load(EncoderSettings(str(model_zoo.build("bert", tmp_path / "model"))))
    assert encoder.attention == "grouped"
    assert QueryGraphs.captured(encoder, Recorded).facts == {
        "buckets": [],
        "reasons": ["attention grouped needs the lengths of texts on the host"],
    }
    assert QueryGraphs.of(encoder).reasons == ["the device is cpu, graphs are for CUDA"]


# -- the process that computes ---------------------------------------------------------------------------------------


def test_single_texts_whose_tokens_are_all_pooled_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = loaded(tmp_path, monkeypatch)
    monkeypatch.setattr("pipeline.worker.load_encoder", lambda settings: encoder)
    monkeypatch.setattr(cuda_graphs.QueryGraphs, "of", lambda encoder: QueryGraphs.captured(encoder, Recorded))
    replayed: list[int] = []
    submit = QueryGraphs.submit

    def counting(self: QueryGraphs, batch: Batch) -> Any:
        found = submit(self, batch)
        replayed.append(batch.num_tokens if found is not None else 0)
        return found

    monkeypatch.setattr(QueryGraphs, "submit", counting)
    setup = {"encoder": {"model_path": ""}, "stand_in": None, "cuda_graphs": True, "ring_rows": 8}
    backend = TorchBackend(setup)
    assert backend.facts["cuda_graphs"]["buckets"] == list(BUCKETS)
    for lengths, prompt_length in (([7], 0), ([150], 0), ([4, 3], 0), ([7], 2)):
        ids = ids_of(encoder, sum(lengths))
        vectors, numbers = backend.start(ids, np.array(lengths, np.int32), prompt_length)()
        assert vectors.shape == (len(lengths), encoder.dim) and numbers.all()
        if not prompt_length:
            expected = encoder.encode(batch_of(ids, np.array(lengths, np.int32)))
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert replayed == [7, 0, 0], "a prompt that is not pooled is never replayed"
    assert TorchBackend({**setup, "cuda_graphs": False})._graphs is None
