"""Single short texts on a GPU without the cost of launching their kernels one by one.

The forward of one text is hundreds of small kernels, and the host takes longer to launch them than the device to run
them. A CUDA graph is that sequence recorded once and started with one call, on the same memory each time. So there is
one graph a bucket of lengths: a text is copied into the bucket's buffer, together with where it ends, and the recorded
kernels run over the whole bucket. What stands behind the text's end is computed and left out: attention reads the end
from the device (``cu_seqlens``), and so does pooling.

Only attention that reads lengths on the device can be recorded so (`KINDS`). A bucket answers only after its vectors of
probe texts were those of the normal path; all else takes that path.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.encoder import Encoder, Submitted, _DeviceBatch
from pipeline.errors import ModelError, one_line
from pipeline.pooling import Segments
from pipeline.records import Batch
from pipeline.serving.onnx_lane import Parity
from pipeline.tokenizer import Tokenizer
from pipeline.transfer import Download

BUCKETS = (16, 32, 64, 128)
"""Tokens; a text goes into the smallest that holds it."""

KINDS = ("torch-varlen", "flash-attn")
"""Attention that knows where texts end from the device alone; the host gives no more than an upper bound."""

MIN_COSINE, MAX_DIFFERENCE = 0.9999, 5e-3
"""Of each probe vector with the normal path's; the difference is of one number, relative to the vector's length.

The kernels may round in another order, as matrix products of another height do; in float16 that is far less.
"""

WARM_UP = 3  # forwards before one is recorded: libraries choose their kernels and take their memory in the first


class Graph(Protocol):
    """A computation that is recorded once and repeated on the same memory."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Record `compute`; the tensor it gives is written again by every ``replay``."""
        ...

    def replay(self) -> None: ...


class DeviceGraph:
    """A `Graph` on the current CUDA device.

    Args:
        pool: memory that graphs share which never run at the same time.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        current, beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                compute()
        current.wait_stream(beside)
        with torch.cuda.graph(self._graph, pool=self._pool):
            return compute()

    def replay(self) -> None:
        self._graph.replay()


class QueryGraphs:
    """The graphs of one encoder; use `of`.

    Args:
        encoder: computes with them.
        buckets: by their size, smallest first.
        reasons: why others are not there; one line each.
    """

    def __init__(self, encoder: Encoder, buckets: dict[int, Bucket], reasons: list[str]) -> None:
        self._encoder, self._buckets, self.reasons = encoder, buckets, reasons

    @classmethod
    def of(cls, encoder: Encoder) -> QueryGraphs:
        """Those that an encoder can have where it is; none on a CPU."""
        if not encoder.device.startswith("cuda"):
            return cls(encoder, {}, [f"the device is {encoder.device}, graphs are for CUDA"])
        return cls.captured(encoder, partial(DeviceGraph, torch.cuda.graph_pool_handle()))

    @classmethod
    def captured(cls, encoder: Encoder, make_graph: Callable[[], Graph]) -> QueryGraphs:
        """Record each bucket and compare its vectors; those that differ, or cannot be recorded, are left out.

        Raises:
            ModelError: the encoder does not compute any more after a recording that failed.
        """
        if encoder.attention not in KINDS:
            return cls(encoder, {}, [f"attention {encoder.attention} needs the lengths of texts on the host"])
        longest = min(encoder.max_length or BUCKETS[-1], BUCKETS[-1])
        ids = _probe_ids(encoder, longest)
        expected = {length: encoder.encode(_one_text(ids[:length])) for length in _probe_lengths(longest)}
        buckets: dict[int, Bucket] = {}
        reasons: list[str] = []
        # The largest first: its memory serves the others, which never run at the same time.
        for size in reversed(
            [size for size, smaller in zip(BUCKETS, (0, *BUCKETS), strict=False) if smaller < longest]
        ):
            lengths = [length for length in expected if length <= size]
            try:
                bucket = Bucket(encoder, size, ids[:size], make_graph())
                found = np.concatenate([bucket.compute(ids[:length]).result() for length in lengths])
            except Exception as error:  # a model's code may do what cannot be recorded, in any way
                reasons.append(f"texts of up to {size} tokens cannot be recorded ({one_line(error)})")
                _check_still_computes(encoder, ids, error)
                break  # smaller ones run the same code
            parity = Parity.of(found, np.concatenate([expected[length] for length in lengths]))
            if parity.cosine >= MIN_COSINE and parity.difference <= MAX_DIFFERENCE:
                buckets[size] = bucket
            else:
                told = f"cosine {parity.cosine:.6f}, difference {parity.difference:.1e}"
                reasons.append(f"recorded texts of up to {size} tokens have other vectors ({told})")
        return cls(encoder, dict(sorted(buckets.items())), reasons)

    @property
    def facts(self) -> dict[str, Any]:
        """What is recorded, and why the rest is not; JSON."""
        return {"buckets": list(self._buckets), "reasons": self.reasons}

    def submit(self, batch: Batch) -> Submitted | None:
        """Start computing a batch of one text, as `Encoder.submit` does; None where no bucket is for it."""
        if batch.num_texts != 1 or not batch.num_tokens:
            return None
        bucket = next((bucket for size, bucket in self._buckets.items() if batch.num_tokens <= size), None)
        if bucket is None:
            return None
        return Submitted(self._encoder, batch, np.zeros(1, np.int64), [bucket.compute(batch.input_ids)])


class Bucket:
    """The recorded forward of one text of up to `size` tokens, from ids to its final vector.

    Args:
        encoder: see `QueryGraphs`.
        size: tokens that are computed, whatever the text's length.
        input_ids: (L,) of the text that it is recorded with, L at most `size`.
        graph: not used yet.
    """

    def __init__(self, encoder: Encoder, size: int, input_ids: NDArray[np.int32], graph: Graph) -> None:
        self._encoder, self._size, self._graph = encoder, size, graph
        with torch.inference_mode():
            # Ids, positions and cu_seqlens in one, so that a text is one copy.
            self._input = torch.from_numpy(self._filled(input_ids)).to(encoder.device, copy=True)
            self._output = graph.capture(self._forward)

    @torch.inference_mode()
    def compute(self, input_ids: NDArray[np.int32]) -> Download:
        """Start computing a text.

        Args:
            input_ids: (L,), L from 1 to the bucket's size.

        Returns:
            (1, dim) float32 on its way to the host.
        """
        transfer = self._encoder._transfer
        uploaded = transfer.upload(self._filled(input_ids))
        began = transfer.begin()
        self._input.copy_(uploaded)
        self._graph.replay()
        # A copy: the next text's replay writes here while this vector may still be on its way.
        return transfer.download(self._output.clone(), began)

    def _filled(self, input_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(2 * size + 2,) int32; all of it is written, so nothing of a longer text before is left."""
        size, length = self._size, len(input_ids)
        values = np.zeros(2 * size + 2, np.int32)
        values[:length] = input_ids
        values[size : size + length] = _positions(input_ids, self._encoder._position_padding_idx)
        values[-1] = length
        return values

    def _forward(self) -> Tensor:
        """(1, dim) float32; the host knows nothing of the text, not even its length."""
        encoder, size = self._encoder, self._size
        ids, position_ids, cu_seqlens = self._input[:size], self._input[size:-2], self._input[-2:]
        positions = torch.arange(size, device=self._input.device)
        segments = Segments(cu_seqlens[:1].long(), cu_seqlens[1:].long(), positions)
        inputs = _Filled(ids.long(), cu_seqlens, segments, ((1, size),), size, position_ids.long())
        states = encoder._forward_packed(inputs)
        return encoder._finish(encoder._chain.vectors(states, segments, encoder._chain.after_pooling))


@dataclass(frozen=True)
class _Filled(_DeviceBatch):
    """A bucket's buffer as a batch; its positions come from the host, since counting them needs the text's length."""

    given_positions: Tensor

    def position_ids(self, padding_idx: int | None) -> Tensor:
        return self.given_positions


def _positions(input_ids: NDArray[np.int32], padding_idx: int | None) -> NDArray[np.int64]:
    """(L,) as `_DeviceBatch.position_ids` has them for one text."""
    if padding_idx is None:
        return np.arange(len(input_ids))
    counted = input_ids != padding_idx
    positions: NDArray[np.int64] = np.cumsum(counted) * counted + padding_idx
    return positions


def _one_text(input_ids: NDArray[np.int32]) -> Batch:
    length = len(input_ids)
    return Batch(input_ids, np.array([0, length], np.int32), length, np.zeros(1, np.int64))


def _probe_lengths(longest: int) -> list[int]:
    """Lengths at both ends of each bucket and in between, longest first: each finds a longer one's traces behind it."""
    ends = [min(size, longest) for size in BUCKETS]
    middles = [(one + other) // 2 for one, other in itertools.pairwise([0, *ends])]
    near = {1, 2, 3, *middles, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}
    return sorted((length for length in near if 1 <= length <= longest), reverse=True)


def _probe_ids(encoder: Encoder, num_tokens: int) -> NDArray[np.int32]:
    """(num_tokens,) a text out of the vocabulary's own words; its first tokens are the shorter probes."""
    tokenizer = Tokenizer(encoder.tokenizer_spec())
    words = random.Random(0).choices(tokenizer.words(), k=num_tokens)
    return np.resize(tokenizer.encode([" ".join(words)]).input_ids, num_tokens)


def _check_still_computes(encoder: Encoder, ids: NDArray[np.int32], failed: Exception) -> None:
    try:
        encoder.encode(_one_text(ids))
    except Exception as error:
        raise ModelError(
            f"cuda_graphs: recording failed ({one_line(failed)}), and {encoder.device} does not compute any more "
            f"({one_line(error)}); set cuda_graphs to false"
        ) from error
