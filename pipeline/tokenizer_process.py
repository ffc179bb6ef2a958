"""Texts into tokens in child processes, for a worker whose one interpreter cannot keep up with its device.

A window's texts are cut into slices, each goes to whichever child is free, and the results are put together in the
order given. The tokens are those of `Tokenizer`, the spans those of `Chunker`: the children run these two.

Children are plain processes (``python -m pipeline.tokenizer_process``) with a pipe each way. They leave when their
stdin ends, whatever they are doing, so none outlives the worker. One that dies is replaced and its slice done again.

84,000 texts, 5.6 million tokens of all-MiniLM-L6-v2, on a server CPU of 2 cores (2026-12): one child 0.85 million
tokens/s, two 1.66; the library alone on one core 0.80, or 0.90 in blocks of 1,024 texts. The worker's own interpreter
spends 0.1 s on all of it.

A frame on a pipe: a uint32, that many bytes of JSON, and the raw bytes of the arrays whose dtypes and lengths the JSON
gives under ``arrays``.

    requests   setup {spec, chunk, chunk_overlap} · encode, cut {} [characters of each text, all texts as UTF-8]
    answers    {seconds} [input_ids, lengths, dropped, hashes], or [chunks of each text, starts, ends] · {error}
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline import errors
from pipeline.chunker import Chunker, Span
from pipeline.pool import child_environment
from pipeline.records import Tokens
from pipeline.reuse import token_hashes
from pipeline.tokenizer import Tokenizer, TokenizerSpec

MAX_ATTEMPTS = 3  # a slice is given to so many children before it is named as what they die of
MAX_SLICE_TEXTS = 512  # a window of short texts is then enough for 32 children
MAX_SLICE_CHARS = 1 << 20  # a third of a second of work
# A child that answers has its next slice already and need not wait for a thread of this interpreter: beside a thread
# that never lets go of it one child does 0.85 million tokens/s so, 0.53 with one slice at a time (measured as above).
SENT_AHEAD = 2
# More would be taken from what all pipes of a user may hold (64 MiB on Linux) by many workers with many children each.
PIPE_BYTES = 256 << 10
STDERR_LINES = 40

Arrays = Sequence[NDArray[Any]]


class TokenizerProcesses:
    """Child processes that tokenize. Use as a context manager; leaving it leaves no process behind.

    Args:
        spec: the tokenizer.
        count: how many children, at least 1; each uses one core.
        chunk_overlap: as of `Chunker`.
        chunk: whether `cut` will be called.

    Attributes:
        windows_ahead: how many windows should be submitted behind the one that is wanted, so that no child waits while
            that one is put together and the next one is read.
        restarts: children that died and were replaced.
        busy_seconds: CPU seconds of the children's work so far.
    """

    windows_ahead = 2

    def __init__(
        self, spec: TokenizerSpec, count: int, chunk_overlap: int | None = None, *, chunk: bool = False
    ) -> None:
        assert count > 0, "no child to tokenize. This is a bug."
        self._count, self._chunk = count, chunk
        self._setup = {"spec": asdict(spec), "chunk": chunk, "chunk_overlap": chunk_overlap}
        self.restarts, self.busy_seconds = 0, 0.0
        self._order = itertools.count()
        # Lowest first. It holds references to texts that their window holds anyway, so it needs no bound of its own.
        self._waiting: queue.PriorityQueue[tuple[int, int, _Slice | None]] = queue.PriorityQueue()
        self._lock, self._closed = threading.Lock(), False
        self._children: set[_Child] = set()
        self._threads = [
            threading.Thread(target=self._serve, daemon=True, name=f"tokenizer {number}") for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> TokenizerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, texts: Sequence[str]) -> Pending:
        """Begin to tokenize n texts; returns at once.

        At most `SENT_AHEAD` slices a child are held a second time, as bytes; how many windows wait is the caller's
        decision.
        """
        return Pending([self._put("encode", part, urgency=1) for part in _slices(texts)])

    def cut(self, texts: Sequence[str | None]) -> list[list[Span]]:
        """The chunks of each text, as `Chunker.cut` gives them; waits for them.

        Raises:
            EmbedCorpusError, RuntimeError: as `Pending.result`.
        """
        assert self._chunk, "children were not set up to cut. This is a bug."
        # Before whatever waits to be tokenized: of that there is always enough to do.
        futures = [self._put("cut", part, urgency=0) for part in _slices([text or "" for text in texts])]
        spans: list[list[Span]] = []
        for num_spans, starts, ends in _results(futures):
            flat = map(Span, starts.tolist(), ends.tolist())
            spans += [list(islice(flat, of_text)) for of_text in num_spans.tolist()]
        return spans

    def close(self) -> None:
        """End the children; what is not done by then ends in a RuntimeError where it is waited for."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()  # it holds nothing that could be lost
        for _ in self._threads:
            self._waiting.put((-1, next(self._order), None))
        for thread in self._threads:
            thread.join()
        while not self._waiting.empty():
            _, _, piece = self._waiting.get()
            if piece is not None:
                piece.fail(_closed())

    def _put(self, verb: Literal["encode", "cut"], texts: list[str], urgency: int) -> Future[Arrays]:
        assert not self._closed, "tokenizer processes are used after their end. This is a bug."
        piece = _Slice(verb, texts)
        self._waiting.put((urgency, next(self._order), piece))
        return piece.done

    def _serve(self) -> None:
        """One thread a child: it hands over slices and waits for their answers, the oldest first.

        The child reads on while it computes and writes, so both can have their pipes full without a deadlock.
        """
        given: collections.deque[_Slice] = collections.deque()
        child: _Child | None = None
        while not self._closed:
            try:
                if child is None:
                    child = self._started()
                    child.write({"do": "setup", **self._setup})
                    for piece in given:
                        child.send(piece)
                while len(given) < SENT_AHEAD and (taken := self._take(wait=not given)) is not None:
                    given.append(taken)
                    child.send(taken)
                if given:
                    self._settle(given, child.receive())
            except EOFError:
                assert child is not None
                self._bury(child, given)
                child = None
            except Exception as error:  # no process or no memory to be had, say: whoever waits must be told
                self._end(child)
                child = None
                if not given and (taken := self._take(wait=True)) is not None:
                    given.append(taken)
                for piece in given:
                    piece.fail(error)
                given.clear()
        self._end(child)
        for piece in given:
            piece.fail(_closed())

    def _take(self, wait: bool) -> _Slice | None:
        """The next slice; None when it is time to leave, or when the rest had better go to children that are free."""
        while wait or self._waiting.qsize() >= self._count:
            try:
                _, _, piece = self._waiting.get(block=wait)
            except queue.Empty:
                return None
            if piece is None or piece.done.set_running_or_notify_cancel():
                return piece
        return None

    def _settle(self, given: collections.deque[_Slice], answer: tuple[dict[str, Any], Arrays]) -> None:
        piece, (header, arrays) = given.popleft(), answer
        if "error" in header:
            piece.done.set_exception(_error(**header["error"]))
            return
        with self._lock:
            self.busy_seconds += header["seconds"]
        piece.done.set_result(arrays)

    def _started(self) -> _Child:
        with self._lock:
            if self._closed:
                raise _closed()
            child = _Child()
            self._children.add(child)
        return child

    def _end(self, child: _Child | None) -> None:
        if child is not None:
            child.end()
            with self._lock:
                self._children.discard(child)

    def _bury(self, child: _Child, given: collections.deque[_Slice]) -> None:
        """Note that a child died of the oldest slice that it had not answered; the others are not suspected."""
        self._end(child)
        if self._closed:
            return
        with self._lock:
            self.restarts += 1
        if given:
            given[0].attempts += 1
            if given[0].attempts >= MAX_ATTEMPTS:
                cause = f"a tokenizer process {child.cause_of_death()}, {MAX_ATTEMPTS} times at the same texts"
                given.popleft().fail(RuntimeError(cause))


class Pending:
    """Texts that are being tokenized."""

    def __init__(self, futures: list[Future[Arrays]]) -> None:
        self._futures = futures

    def result(self) -> tuple[Tokens, NDArray[np.uint64]]:
        """Wait for them.

        Returns:
            Tokens of the n texts in the order given, and (n, 2) uint64, what `token_hashes` makes of them.

        Raises:
            EmbedCorpusError: as raised in the child, with its class and message.
            RuntimeError: another error in the child, with its traceback; children died again and again; or they were
                closed before they had done it.
        """
        columns = list(zip(*_results(self._futures), strict=True)) or [()] * 4
        dtypes: tuple[type, ...] = (np.int32, np.int32, np.int64, np.uint64)
        input_ids, lengths, dropped, hashes = (
            np.concatenate([np.zeros(0, dtype), *column]) for column, dtype in zip(columns, dtypes, strict=True)
        )
        return Tokens(input_ids, lengths, dropped), hashes.reshape(-1, 2)


@dataclass(eq=False)
class _Slice:
    """Consecutive texts of a window.

    Attributes:
        verb: what is to be done with them.
        done: receives the arrays of the answer.
        attempts: children that died of them.
    """

    verb: Literal["encode", "cut"]
    texts: list[str]
    done: Future[Arrays] = field(default_factory=Future)
    attempts: int = 0

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits any more
            self.done.set_exception(error)


class _Child:
    """One child process, seen from the worker."""

    def __init__(self) -> None:
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.tokenizer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(1), "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        for pipe in (self._requests, self._answers):
            _widen(pipe.fileno())
        self._drain = threading.Thread(target=self._read_stderr, daemon=True)
        self._drain.start()

    def send(self, piece: _Slice) -> None:
        # All texts in one go. Lengths count characters, so that the child cuts a string and decodes but once, too.
        utf8 = np.frombuffer("".join(piece.texts).encode("utf-8", "surrogatepass"), np.uint8)
        self.write({"do": piece.verb}, np.fromiter(map(len, piece.texts), np.int64, len(piece.texts)), utf8)

    def write(self, header: dict[str, Any], *arrays: NDArray[Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died, which is noticed where its answer is read
            _write(self._requests, header, arrays)

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        """The next answer, (header, arrays). Raises EOFError when the child is dead and has left no more of them."""
        return _read(self._answers)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """End the process, whatever it is doing, and wait for it; does nothing when that was done."""
        with contextlib.suppress(OSError):  # what was still to be sent to a dead process
            self._requests.close()
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._drain.join()

    def cause_of_death(self) -> str:
        code = self._process.returncode
        cause = f"ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
        last = next((line for line in reversed(self._stderr) if line), "")
        return cause + (f": {last}" if last else "")

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._stderr.append(line.decode("utf-8", "replace").strip())


def _results(futures: Sequence[Future[Arrays]]) -> Iterator[Arrays]:
    """Results in order; after the first failure the rest is not begun."""
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _slices(texts: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive texts, bounded in number and characters; a longer text is a slice of its own."""
    first = num_chars = 0
    for at, text in enumerate(texts):
        if at > first and (at - first == MAX_SLICE_TEXTS or num_chars + len(text) > MAX_SLICE_CHARS):
            yield list(texts[first:at])
            first, num_chars = at, 0
        num_chars += len(text)
    if len(texts):
        yield list(texts[first:])


def _closed() -> RuntimeError:
    return RuntimeError("the tokenizer processes were ended before their work was done")


def _error(kind: str, message: str, trace: str) -> Exception:
    """What was raised in a child, as it is raised again here."""
    ours = getattr(errors, kind, None)
    if isinstance(ours, type) and issubclass(ours, errors.EmbedCorpusError):
        return ours(message)
    return RuntimeError(f"a tokenizer process failed:\n{trace}")


def _widen(pipe: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, OSError):  # only Linux can, and only so many
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _write(stream: IO[bytes], header: dict[str, Any], arrays: Arrays = ()) -> None:
    """Put one frame into a pipe. Arrays are one-dimensional and contiguous."""
    layout = [(array.dtype.newbyteorder("<").str, len(array)) for array in arrays]
    head = json.dumps({**header, "arrays": layout}).encode("ascii")
    stream.write(struct.pack("<I", len(head)) + head)
    for array in arrays:
        stream.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Take one frame from a pipe: (header, arrays). Raises EOFError where it ends before the frame does."""

    def read(dtype: str, length: int) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(length, dtype)
        if stream.readinto(array.data) < array.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    [head_bytes] = read("<u4", 1).tolist()
    header = json.loads(read("|u1", head_bytes).tobytes())
    return header, [read(dtype, length) for dtype, length in header.pop("arrays")]


# What follows runs in the child.

Work = Callable[[str, list[str]], Arrays]


def _work(spec: dict[str, Any], chunk: bool, chunk_overlap: int | None) -> Work:
    """What does a request, given its verb and its texts. An error that it cannot be made is raised by each request."""
    try:
        tokenizer = Tokenizer(TokenizerSpec(**spec))
        chunker = Chunker(tokenizer.spec, chunk_overlap) if chunk else None
    except Exception as error:
        cause = error

        def refuse(verb: str, texts: list[str]) -> Arrays:
            raise cause

        return refuse

    def do(verb: str, texts: list[str]) -> Arrays:
        if verb == "encode":
            tokens = tokenizer.encode(texts)
            return tokens.input_ids, tokens.lengths, tokens.dropped, token_hashes(tokens).reshape(-1)
        assert chunker is not None
        spans = chunker.cut(texts)
        flat = [(span.start, span.end) for of_text in spans for span in of_text]
        starts, ends = np.array(flat, np.int64).reshape(-1, 2).T.copy()
        return np.array([len(of_text) for of_text in spans], np.int64), starts, ends

    return do


def _texts(lengths: NDArray[np.int64], utf8: NDArray[np.uint8]) -> list[str]:
    joined = str(utf8.data, "utf-8", "surrogatepass")
    ends = np.cumsum(lengths)
    return [joined[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when to stop, and ends its children then
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up between frames
    requests: queue.SimpleQueue[tuple[dict[str, Any], Arrays]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests), daemon=True, name="requests").start()
    setup, _ = requests.get()
    work = _work(setup["spec"], setup["chunk"], setup["chunk_overlap"])
    while True:
        request, (lengths, utf8) = requests.get()
        start = time.process_time()
        try:
            arrays = work(request["do"], _texts(lengths, utf8))
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            _write(answers, {"error": {"kind": type(error).__name__, "message": str(error), "trace": trace}})
        else:
            _write(answers, {"seconds": time.process_time() - start}, arrays)


def _listen(stdin: IO[bytes], requests: queue.SimpleQueue[tuple[dict[str, Any], Arrays]]) -> None:
    """Read on while the main thread computes; at most `SENT_AHEAD` requests are ever here."""
    try:
        while True:
            requests.put(_read(stdin))
    except EOFError:
        os._exit(0)  # the worker is gone or has no more to do: stop in mid-work
    except BaseException:
        traceback.print_exc()
        os._exit(errors.EXIT_BUG)


if __name__ == "__main__":
    main()
