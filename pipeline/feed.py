"""Requests into tokenized windows, in a thread of its own: the reading half of a worker.

Texts that repeat within a window are tokenized, and computed, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.chunker import Chunker, Span
from pipeline.ledger import Ledger, is_of
from pipeline.reader import read_windows
from pipeline.records import Shard, Tokens, Window
from pipeline.reuse import open_previous, token_hashes
from pipeline.storage import open_output
from pipeline.tokenizer import Tokenizer
from pipeline.units import End, Say, TokenizedWindow, Unit
from pipeline.worker_settings import WorkerSettings
from pipeline.writer import NO_TOKENS


class Pending(Protocol):
    """Texts that are being tokenized."""

    def result(self) -> tuple[Tokens, NDArray[np.uint64]]: ...


class Tokenizing(Protocol):
    """Where texts are tokenized: here (`InThread`) or in processes (`TokenizerProcesses`).

    Attributes:
        windows_ahead: how many windows can be in work behind the one that is wanted.
        busy_seconds: of work in other processes so far.
    """

    windows_ahead: int
    busy_seconds: float

    def submit(self, texts: Sequence[str]) -> Pending: ...
    def cut(self, texts: Sequence[str | None]) -> list[list[Span]]: ...


class Feed:
    """Requests into tokenized windows; what is no shard goes through as it is."""

    def __init__(self, settings: WorkerSettings, chunker: Chunker | None, tokenizing: Tokenizing, say: Say) -> None:
        self._settings, self._chunker = settings, chunker
        self._tokenizing, self._say = tokenizing, say
        self._output = open_output(settings.output) if settings.output else None
        self._busy_seconds = 0.0  # of the tokenizer processes, as far as it is accounted for

    def items(self, requests: Iterator[dict[str, Any]]) -> Iterator[TokenizedWindow | End | dict[str, Any]]:
        for request in requests:
            if request["do"] == "stop":
                return
            if request["do"] != "shard":
                yield request
                continue
            unit = Unit(Shard.from_json(request["shard"]))
            try:
                yield from self._windows(unit)
            except Exception as error:  # told by the sink, in its turn
                unit.error = error
            self._say("free", unit=unit.shard.unit)
            yield End(unit)

    def _windows(self, unit: Unit) -> Iterator[TokenizedWindow]:
        assert self._output is not None
        shard, settings, beside = unit.shard, self._settings, unit.beside
        record = Ledger(self._output).record(shard.key, shard.part_number)
        if is_of(record, shard, settings.fingerprint):  # by another run since this one began
            unit.done = record
            return
        if unit.is_join:
            return
        # Texts of a part may have their vector in the shard's previous output.
        earlier = record if shard.part is None else Ledger(self._output).record(shard.key)
        unit.previous = open_previous(self._output, earlier, settings.fingerprint)
        ahead: deque[tuple[Window, NDArray[np.int64], Pending]] = deque()
        for window in beside.waiting("read", read_windows(shard, settings.columns, settings.id_name)):
            if unit.error is not None:
                return
            if self._chunker is not None:
                with beside.stage("chunk"):
                    window = self._chunker.expand(window, self._tokenizing.cut(window.texts))
            with beside.stage("tokenize"):
                texts, text_of_row = distinct(window.texts)
                ahead.append((window, text_of_row, self._tokenizing.submit(texts)))
            if len(ahead) > self._tokenizing.windows_ahead:
                yield self._tokenized(unit, *ahead.popleft())
        while ahead:
            yield self._tokenized(unit, *ahead.popleft())

    def _tokenized(
        self, unit: Unit, window: Window, text_of_row: NDArray[np.int64], pending: Pending
    ) -> TokenizedWindow:
        tokens, hashes = pending.result()
        unit.beside.add("tokenize", self._tokenizing.busy_seconds - self._busy_seconds)
        self._busy_seconds = self._tokenizing.busy_seconds
        _reject_tokenless(window, text_of_row, tokens)
        return TokenizedWindow(unit, window, text_of_row, tokens, hashes)


class InThread:
    """Tokenizes where it is asked to; the interface of `TokenizerProcesses` without a process."""

    windows_ahead = 0
    busy_seconds = 0.0

    def __init__(self, tokenizer: Tokenizer, chunker: Chunker | None = None) -> None:
        self._tokenizer, self._chunker = tokenizer, chunker

    def submit(self, texts: Sequence[str]) -> Pending:
        tokens = self._tokenizer.encode(texts)
        return _Tokenized(tokens, token_hashes(tokens))

    def cut(self, texts: Sequence[str | None]) -> list[list[Span]]:
        """As the chunker does."""
        assert self._chunker is not None
        return self._chunker.cut(texts)


@dataclass(frozen=True)
class _Tokenized:
    tokens: Tokens
    hashes: NDArray[np.uint64]

    def result(self) -> tuple[Tokens, NDArray[np.uint64]]:
        return self.tokens, self.hashes


def distinct(texts: list[str | None]) -> tuple[list[str], NDArray[np.int64]]:
    """Each different text once, in order of first appearance, and which of them every row has (-1: none)."""
    position: dict[str, int] = {}
    rows = np.fromiter(
        (-1 if text is None else position.setdefault(text, len(position)) for text in texts), np.int64, len(texts)
    )
    return list(position), rows


def _reject_tokenless(window: Window, text_of_row: NDArray[np.int64], tokens: Tokens) -> None:
    empty = tokens.lengths == 0
    if empty.any():
        for row in np.flatnonzero(text_of_row >= 0):
            if empty[text_of_row[row]]:
                window.rejected[int(row)] = NO_TOKENS
                text_of_row[row] = -1
