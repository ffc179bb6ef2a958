"""Batches of token ids into vectors with ONNX Runtime: what answers short queries on a CPU.

The graph (made by `export`) takes a rectangle of texts and gives final vectors: transformer, pooling and all modules
behind it. A batch is cut into rectangles of like lengths where a second call costs less than the padding it saves. Its
vectors are those of the batch engine to rounding, which is proven whenever the graph is loaded: `prove` computes the
probe texts and compares them with the batch engine's vectors, stored beside the graph.

Imports neither torch nor transformers: a process that does this is up in about a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CALL_TOKENS = 16
"""What a call of the session costs beside its tokens, in tokens."""

MIN_COSINE, MAX_DIFFERENCE = 0.9999, 1e-5
"""float32: of each probe vector with the batch engine's; the difference is relative to the vector's length."""

MIN_COSINE_INT8 = 0.95
"""An int8 graph is another, near space; below this it is broken."""


@dataclass(frozen=True)
class Parity:
    """How near the vectors of a lane are to the batch engine's.

    Attributes:
        cosine: the smallest of all probe texts.
        difference: the largest of a number, relative to the length of its vector.
    """

    cosine: float
    difference: float

    @classmethod
    def of(cls, found: NDArray[np.float32], expected: NDArray[np.float32]) -> Parity:
        """Compare (n, dim) vectors; one that is not finite is as far away as can be."""
        if found.shape != expected.shape or not np.isfinite(found).all():
            return cls(-1.0, float("inf"))
        one, other = found.astype(np.float64), expected.astype(np.float64)
        norms = np.linalg.norm(other, axis=1).clip(min=1e-12)
        cosines = (one * other).sum(axis=1) / (np.linalg.norm(one, axis=1).clip(min=1e-12) * norms)
        return cls(float(cosines.min()), float((np.abs(one - other) / norms[:, None]).max()))

    def fault(self, *, int8: bool = False) -> str:
        """Why the lane may not answer; empty when it may."""
        if int8:
            near = self.cosine >= MIN_COSINE_INT8
            return "" if near else f"its int8 vectors have cosine {self.cosine:.4f} to the batch's"
        if self.cosine >= MIN_COSINE and self.difference <= MAX_DIFFERENCE:
            return ""
        return f"its vectors differ from the batch's: cosine {self.cosine:.6f}, difference {self.difference:.1e}"


class OnnxEncoder:
    """One loaded graph.

    Args:
        path: the graph.
        threads: cores to compute with.
        spin: let threads wait busily for a moment: 2.2 instead of 3.3 ms for 14 tokens of all-MiniLM-L6-v2 on 2 cores
            (as measured in `export`).
    """

    def __init__(self, path: Path, threads: int, *, spin: bool = True) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Shapes change with every call, and plans of memory are kept by shape: they would add up as long as it runs.
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._int = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}[self._session.get_inputs()[0].type]
        self.dim = int(self._session.get_outputs()[0].shape[1])

    def encode(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """The final vector of each text.

        Args:
            input_ids: (T,) texts back to back.
            lengths: (n,) tokens of each, at least 1, longest first.

        Returns:
            (n, dim) float32, in the order given.
        """
        if len(lengths) == 1:
            return self._rectangle(input_ids[None, :], None)
        ends = np.cumsum(lengths)
        vectors = np.empty((len(lengths), self.dim), np.float32)
        for first, stop in rectangles(lengths.tolist()):
            width = int(lengths[first])
            inside = np.arange(width) < lengths[first:stop, None]
            ids = np.zeros((stop - first, width), np.int32)
            ids[inside] = input_ids[ends[first] - lengths[first] : ends[stop - 1]]
            vectors[first:stop] = self._rectangle(ids, None if inside.all() else inside)
        return vectors

    def _rectangle(self, ids: NDArray[Any], inside: NDArray[np.bool_] | None) -> NDArray[np.float32]:
        mask = np.ones(ids.shape, self._int) if inside is None else inside.astype(self._int)
        inputs = {"input_ids": ids.astype(self._int), "attention_mask": mask}
        vectors: NDArray[np.float32] = self._session.run(None, inputs)[0]
        return vectors

    def prove(self, probes: Probes) -> Parity:
        """How near its vectors of the probe texts are to the batch engine's; each alone and all in one batch."""
        together = self.encode(probes.input_ids, probes.lengths)
        ends = np.cumsum(probes.lengths)
        alone = [
            self.encode(probes.input_ids[end - length : end], np.array([length]))
            for end, length in zip(ends.tolist(), probes.lengths.tolist(), strict=True)
        ]
        expected = np.concatenate([probes.vectors, probes.vectors])
        return Parity.of(np.concatenate([together, *alone]), expected)


def rectangles(lengths: list[int], call_tokens: int = CALL_TOKENS) -> list[tuple[int, int]]:
    """Cut texts of falling length into (first, stop) rectangles, so that padding and calls cost least together.

    Example with 4 tokens a call: lengths ``[9, 9, 3]`` give ``[(0, 2), (2, 3)]``, since a call is cheaper than 6 tokens
    of padding; ``[9, 9, 8]`` give ``[(0, 3)]``.
    """
    # Runs of one length are never cut, so there are few places to choose from.
    starts = [at for at in range(len(lengths)) if at == 0 or lengths[at] != lengths[at - 1]]
    stops = [*starts[1:], len(lengths)]
    best: list[tuple[int, int]] = [(0, 0)]  # (cost of all before, run where the last rectangle begins)
    for end in range(len(starts)):
        best.append(
            min(
                (best[begin][0] + call_tokens + lengths[starts[begin]] * (stops[end] - starts[begin]), begin)
                for begin in range(end + 1)
            )
        )
    cut: list[tuple[int, int]] = []
    end = len(starts)
    while end:
        begin = best[end][1]
        cut.append((starts[begin], stops[end - 1]))
        end = begin
    return cut[::-1]


@dataclass(frozen=True)
class Probes:
    """Texts with the vectors that the batch engine gives for them.

    Attributes:
        input_ids: (T,) int32, texts back to back, longest first.
        lengths: (n,) int32.
        vectors: (n, dim) float32.
    """

    input_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    vectors: NDArray[np.float32]

    def save(self, path: Path) -> None:
        np.savez(path, input_ids=self.input_ids, lengths=self.lengths, vectors=self.vectors)

    @classmethod
    def load(cls, path: Path) -> Probes:
        with np.load(path) as arrays:
            return cls(arrays["input_ids"], arrays["lengths"], arrays["vectors"])
