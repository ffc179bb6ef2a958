"""The process that computes: ``python -m pipeline.serving.encoder_process``, batches on stdin, vectors on stdout.

It holds one encoder, the batch engine's (``torch``) or a graph in ONNX Runtime (``onnx``), and computes what it is sent
in that order. Frames are those of `pipeline.tokenizer_process`. When stdin ends the server is gone and the process
exits at once, whatever it is doing.

    requests   setup {backend, …} · batch {prompt_length} [input_ids, lengths]
    answers    ready {dim, …} · vectors {seconds} [vectors] · error {message, exit_code, trace}

Where the setup asks for a ring (`device_ring`), ``ready`` says how to open it, and ``vectors`` has a second array: the
vectors' numbers in it, which are there by then.
"""

from __future__ import annotations

import copy
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EXIT_BUG, EmbedCorpusError, ModelError
from pipeline.tokenizer_process import _read as read_frame
from pipeline.tokenizer_process import _write as write_frame

Result = Callable[[], list[NDArray[Any]]]
"""Waits for a batch of n texts: their (n, dim) float32 vectors and, with a ring, (n,) int64 numbers in it."""


class Backend(Protocol):
    """One loaded encoder.

    Attributes:
        facts: what the server must know of it; JSON.
        computes_beside: whether ``start`` returns while the device goes on computing.
    """

    facts: dict[str, Any]
    computes_beside: bool

    def start(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int) -> Result:
        """Begin a batch of texts, longest first."""
        ...


class OnnxBackend:
    """A graph in ONNX Runtime, admitted if its vectors of the probe texts are the batch engine's."""

    computes_beside = False

    def __init__(self, setup: dict[str, Any]) -> None:
        from pipeline.serving.onnx_lane import OnnxEncoder, Probes

        graph, int8 = Path(setup["graph"]), bool(setup["int8"])
        self._encoder = OnnxEncoder(graph, setup["threads"])
        parity = self._encoder.prove(Probes.load(Path(setup["probes"])))
        fault = parity.fault(int8=int8)
        if fault:
            raise ModelError(f"{graph}: {fault}")
        self.facts = {"dim": self._encoder.dim, "cosine": parity.cosine, "difference": parity.difference}

    def start(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int) -> Result:
        assert not prompt_length, "the graph pools all tokens. This is a bug."
        vectors = self._encoder.encode(input_ids, lengths)
        return lambda: [vectors]


class TorchBackend:
    """The batch engine's encoder, or a stand-in for it, which has neither graphs nor a ring."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from pipeline.records import EncoderSettings
        from pipeline.worker import load_encoder
        from pipeline.worker_settings import WorkerSettings

        # The prompt is part of the texts as they come; see ``prompt_length``.
        settings = replace(EncoderSettings(**setup["encoder"]), prompt="")
        self._encoder: Any = load_encoder(WorkerSettings(settings, stand_in=setup["stand_in"]))
        self.computes_beside = self._encoder.device != "cpu"
        self.facts = facts_of(self._encoder)
        self._graphs: Any = None
        self._has_ring = False
        if setup["stand_in"] is None:
            if setup["cuda_graphs"]:
                self._record()
            if setup["ring_rows"]:
                self._write_into_a_ring(setup["ring_rows"])

    def start(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int) -> Result:
        from pipeline.worker import _submit

        batch = batch_of(input_ids, lengths)
        # The graphs pool all tokens.
        submitted: Any = None if self._graphs is None or prompt_length else self._graphs.submit(batch)
        if submitted is None:
            submitted = _submit(_leaving_out(self._encoder, prompt_length), batch)

        def result() -> list[NDArray[Any]]:
            vectors = submitted.result()
            if not self._has_ring:
                return [vectors]
            return [vectors, np.concatenate([part.numbers() for part in submitted._parts])]

        return result

    def _record(self) -> None:
        from pipeline.serving.cuda_graphs import QueryGraphs

        self._graphs = QueryGraphs.of(self._encoder)
        self.facts["cuda_graphs"] = self._graphs.facts

    def _write_into_a_ring(self, num_rows: int) -> None:
        from pipeline.serving.device_ring import DeviceRing, RingTransfer

        ring = DeviceRing(num_rows, self._encoder.dim, self._encoder.device)
        self._encoder._transfer = RingTransfer(self._encoder._transfer, ring)
        self._has_ring = True
        self.facts["ring"] = asdict(ring.ring)


def batch_of(input_ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Any:
    """A `Batch` of texts that lie back to back."""
    from pipeline.records import Batch

    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return Batch(input_ids, cu_seqlens, int(lengths.max(initial=0)), np.arange(len(lengths), dtype=np.int64))


def _leaving_out(encoder: Any, prompt_length: int) -> Any:
    """The same encoder with a pooling that leaves out so many leading tokens."""
    if not prompt_length:
        return encoder
    other = copy.copy(encoder)
    other._chain = replace(encoder._chain, prompt_length=prompt_length)
    return other


def facts_of(encoder: Any) -> dict[str, Any]:
    """What a server must know of an encoder: how to tokenize for it, and what it tells its callers."""
    chain, finish = getattr(encoder, "_chain", None), getattr(encoder, "_finish", None)
    pooling = None if chain is None else next(m for m in encoder._st if type(m).__name__ == "Pooling")
    return {
        "dim": encoder.dim,
        "attention": encoder.attention,
        "attention_reason": encoder.attention_reason,
        "device": encoder.device,
        "dtype": encoder.dtype,
        "tokenizer": asdict(replace(encoder.tokenizer_spec(), prompt="")),
        "pooling": [] if chain is None else list(chain.modes),
        "pools_prompt": True if pooling is None else bool(pooling.include_prompt),
        # A stand-in normalises.
        "normalize": True if chain is None or finish is None else bool(finish.normalize or _ends_normal(chain, finish)),
    }


def _ends_normal(chain: Any, finish: Any) -> bool:
    """Whether the chain's vectors stay of unit length: nothing is cut off them."""
    return bool(chain.normalizes and finish.dimensions is None)


def _load(setup: dict[str, Any]) -> Backend:
    return OnnxBackend(setup) if setup["backend"] == "onnx" else TorchBackend(setup)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up between frames
    requests: queue.SimpleQueue[tuple[dict[str, Any], list[NDArray[Any]]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests), daemon=True, name="requests").start()
    setup, _ = requests.get()
    began = time.perf_counter()
    try:
        backend = _load(setup)
    except Exception as error:
        write_frame(answers, _error(error))
        return error.exit_code if isinstance(error, EmbedCorpusError) else EXIT_BUG
    write_frame(answers, {"event": "ready", **backend.facts, "load_s": round(time.perf_counter() - began, 3)})

    def answer(result: Result | Exception, began: float) -> None:
        try:
            if isinstance(result, Exception):
                raise result
            arrays = result()
        except Exception as error:
            write_frame(answers, _error(error))
        else:
            seconds = time.perf_counter() - began
            write_frame(answers, {"event": "vectors", "seconds": seconds}, [array.reshape(-1) for array in arrays])

    # Where the device computes by itself, a second thread waits for it, and this one starts the next batch meanwhile.
    beside = ThreadPoolExecutor(1) if backend.computes_beside else None
    waiting: Future[None] | None = None
    while True:
        header, (input_ids, lengths) = requests.get()
        began = time.perf_counter()
        result: Result | Exception
        try:
            result = backend.start(input_ids, lengths, header["prompt_length"])
        except Exception as error:
            result = error
        if beside is None:
            answer(result, began)
            continue
        if waiting is not None:
            waiting.result()  # never more than one behind
        waiting = beside.submit(answer, result, began)


def _error(error: Exception) -> dict[str, Any]:
    return {
        "event": "error",
        "message": str(error) or type(error).__name__,
        "exit_code": error.exit_code if isinstance(error, EmbedCorpusError) else EXIT_BUG,
        "trace": "".join(traceback.format_exception(error)),
    }


def _listen(stdin: IO[bytes], requests: queue.SimpleQueue[tuple[dict[str, Any], list[NDArray[Any]]]]) -> None:
    """Read on while a batch is computed; the server sends at most one ahead."""
    try:
        while True:
            requests.put(read_frame(stdin))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_BUG)


if __name__ == "__main__":
    sys.exit(main())
