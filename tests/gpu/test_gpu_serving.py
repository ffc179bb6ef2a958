"""What only a real device shows of the server: recorded kernels, and memory that two processes share on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pipeline.encoder import Encoder
from pipeline.records import EncoderSettings
from pipeline.serving.cuda_graphs import BUCKETS, MIN_COSINE, QueryGraphs, _one_text
from pipeline.serving.onnx_lane import Parity
from tests import model_zoo
from tests.test_serving_cuda_graphs import computed, ids_of
from tests.test_serving_device_ring import (
    check_an_exporter_that_dies,
    check_reading,
    check_reading_while_it_is_written,
    serve_and_search,
    tiny_output,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
HEADS = {"hidden_size": 128, "num_attention_heads": 4}  # of 32 numbers: the kernels' smallest common one


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_recorded_vectors_are_the_normal_paths(cuda: str, architecture: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 rounding alone may be more than a bucket is admitted with; then it says so."""
    folder = model_zoo.build(architecture, tmp_path / "model", initializer_range=0.1, **HEADS)
    encoder = Encoder.load(EncoderSettings(str(folder), device=cuda, dtype=dtype))
    if encoder.attention not in ("torch-varlen", "flash-attn"):
        pytest.skip(f"attention is {encoder.attention}: {encoder.attention_reason}")
    graphs = QueryGraphs.of(encoder)
    assert not [reason for reason in graphs.reasons if "cannot be recorded" in reason], graphs.reasons
    if dtype == "float16":
        assert graphs.facts == {"buckets": list(BUCKETS), "reasons": []}
    if not graphs.facts["buckets"]:
        pytest.skip("; ".join(graphs.reasons))
    lengths = np.random.default_rng(0).permutation(graphs.facts["buckets"][-1]) + 1
    ids = [ids_of(encoder, length, seed=length) for length in lengths.tolist()]
    submitted = [graphs.submit(_one_text(each)) for each in ids]  # none waits for the one before
    found = np.concatenate([each.result() for each in submitted if each is not None])
    parity = Parity.of(found, np.concatenate([encoder.encode(_one_text(each)) for each in ids]))
    assert parity.cosine >= MIN_COSINE, parity
    np.testing.assert_array_equal(computed(graphs, ids[0]), found[:1])


def test_float32_keeps_to_the_normal_path_and_says_so(cuda: str, tmp_path: Path) -> None:
    folder = model_zoo.build("bert", tmp_path / "model", **HEADS)
    encoder = Encoder.load(EncoderSettings(str(folder), device=cuda, dtype="float32"))
    assert QueryGraphs.of(encoder).reasons == ["attention grouped needs the lengths of texts on the host"]


def test_another_process_reads_vectors_bit_for_bit_and_overwritten_ones_never(device: str) -> None:
    check_reading(device)


def test_a_vector_that_is_overwritten_while_it_is_read_is_never_torn(device: str) -> None:
    check_reading_while_it_is_written(device)


def test_the_ring_of_a_killed_process_is_gone(device: str) -> None:
    check_an_exporter_that_dies(device)


def test_a_search_by_text_hands_over_places_and_all_else_bytes(cuda: str, tmp_path: Path) -> None:
    texts = [model_zoo.sentence(1 + number % 12, seed=number) for number in range(30)]
    output = tiny_output(tmp_path, texts, cuda)
    asyncio.run(serve_and_search(output, texts[-6:], device=cuda, warm_spare=True))
