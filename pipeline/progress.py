"""What a run shows while it works: a live bar in a terminal, a plain line every few seconds anywhere else.

Everything goes to stderr. Without a terminal there is no carriage return, no colour and no control code, so a log file
stays readable and small. For a log that a machine reads, each line can be a JSON object of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO

from pipeline.errors import ConfigError
from pipeline.pool import Event
from pipeline.records import Shard

PLAIN_EVERY_S = 5.0
Show = Callable[[Event], None]


class Display(Protocol):
    """How a run tells what it does."""

    def line(self, text: str) -> None: ...
    def embedding(self, shards: Sequence[Shard]) -> contextlib.AbstractContextManager[Show]: ...


class NoDisplay:
    """Says nothing."""

    def line(self, text: str) -> None:
        pass

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Show]:
        yield lambda event: None


class Tally:
    """Where a run stands, from its events.

    The time left is estimated from bytes and tokens: finished shards count with their bytes, those in work with the
    share of their rows, where a window's rows count by its computed tokens; against the time since the first worker
    was ready.
    """

    def __init__(self, shards: Sequence[Shard], now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start = now, now()
        self._size = {shard.key: shard.size_bytes for shard in shards}
        self._num_rows = {shard.key: shard.num_rows or 0 for shard in shards}
        self._part: dict[str, dict[str, tuple[int, int]]] = {}  # shard in work -> its units -> (rows, tokens)
        self.total_rows = sum(self._num_rows.values())
        self.total_shards, self.finished_shards = len(shards), 0
        self.rows = self.tokens = self.bytes_done = 0
        self.current = ""

    def add(self, event: Event) -> None:
        if event.kind == "ready" and not self.rows and not self._part:
            self._start = self._now()  # loading the model is not part of the rate
        if event.shard is None:
            return
        key, unit = event.shard.key, event.shard.unit
        self.current = unit
        if event.kind == "progress":
            assert event.values is not None
            self._part.setdefault(key, {})[unit] = (event.values["rows"], event.values["tokens"])
        elif event.kind == "part":
            assert event.values is not None
            self._part.setdefault(key, {})[unit] = (event.values["counts"]["rows"], event.values["counts"]["tokens"])
        elif event.kind == "lost":
            self._part.get(key, {}).pop(unit, None)
        elif event.kind != "tick":
            self._part.pop(key, None)
            self.finished_shards += 1
            self.bytes_done += self._size[key]
            if event.kind == "done":
                assert event.values is not None
                self.rows += event.values["counts"]["rows"]
                self.tokens += event.values["counts"]["tokens"]

    def _rows_in_work(self, key: str) -> int:
        return sum(rows for rows, _ in self._part[key].values())

    @property
    def rows_now(self) -> int:
        return self.rows + sum(map(self._rows_in_work, self._part))

    @property
    def tokens_now(self) -> int:
        return self.tokens + sum(tokens for units in self._part.values() for _, tokens in units.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_now / max(1e-9, self._now() - self._start)

    @property
    def texts_per_s(self) -> float:
        return self.rows_now / max(1e-9, self._now() - self._start)

    @property
    def share(self) -> float:
        """Done part of the bytes, 0 to 1."""
        total = sum(self._size.values())
        partial = sum(self._size[key] * self._rows_in_work(key) / max(1, self._num_rows[key]) for key in self._part)
        return min(1.0, (self.bytes_done + partial) / total) if total else 1.0

    @property
    def eta_s(self) -> float | None:
        share = self.share
        return (self._now() - self._start) * (1 - share) / share if share > 0 else None

    def sentence(self) -> str:
        eta = self.eta_s
        return (
            f"shard {self.finished_shards}/{self.total_shards}  {self.share:4.0%}  rows {self.rows_now:,}/"
            f"{self.total_rows:,}  {self.tokens_per_s:,.0f} tokens/s  {self.texts_per_s:,.0f} texts/s  "
            f"eta {'?' if eta is None else clock(eta)}  {self.current}"
        )


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainDisplay:
    """One line when something is worth saying, and one every few seconds in between."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now

    def line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._stream or sys.stderr, flush=True)

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Show]:
        tally, last = Tally(shards, self._now), self._now()
        self.line(f"{len(shards)} shards, {tally.total_rows:,} rows to embed; loading the model")

        def show(event: Event) -> None:
            nonlocal last
            tally.add(event)
            said = describe(event)
            if said:
                self.line(said)
            if tally.rows_now and self._now() - last >= PLAIN_EVERY_S:
                last = self._now()
                self.line(tally.sentence())

        yield show


class JsonDisplay:
    """What ``PlainDisplay`` says, one JSON object a line, and a last one when the embedding ends.

    Every line has ``time`` (RFC 3339, UTC), ``level`` (``info``, ``warning`` or ``error``), ``message`` and ``event``;
    ``shard``, ``rows``, ``tokens``, ``tokens_per_s`` and ``eta_s`` where they are known.
    """

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now
        self._always: dict[str, Any] = {}

    def about(self, **fields: Any) -> None:
        """Add what is true of the whole run, such as ``rank`` and ``trace_id``, to every line from now on."""
        self._always.update(fields)

    def line(self, text: str, level: str = "info", event: str = "line", **fields: Any) -> None:
        said = json_line(text, level, event, **fields, **self._always)
        print(said, file=self._stream or sys.stderr, flush=True)

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Show]:
        tally, last = Tally(shards, self._now), self._now()
        message = f"{len(shards)} shards, {tally.total_rows:,} rows to embed; loading the model"
        self.line(message, event="start", shards=len(shards), rows=tally.total_rows)

        def show(event: Event) -> None:
            nonlocal last
            tally.add(event)
            said = describe(event)
            if said:
                self.line(said, level_of(event), event.kind.replace(" ", "_"), **facts_of(event))
            if tally.rows_now and self._now() - last >= PLAIN_EVERY_S:
                last = self._now()
                self.line(tally.sentence(), event="progress", shard=tally.current, **standing(tally))

        yield show
        self.line(tally.sentence(), event="end", **standing(tally))


def json_line(message: str, level: str = "info", event: str = "line", **fields: Any) -> str:
    """One line of a log that a machine reads; fields that are None are left out."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({"time": now, "level": level, "message": message, "event": event, **known})


def level_of(event: Event) -> str:
    """How grave it is: a lost worker is replaced, the shard of the others has no vectors."""
    if event.kind == "lost":
        return "warning"
    return "error" if event.kind in ("bad", "gave up", "bug") else "info"


def facts_of(event: Event) -> dict[str, Any]:
    """The numbers of a line about one event."""
    shard = None if event.shard is None else event.shard.unit
    if event.kind not in ("done", "part"):
        return {"shard": shard}
    assert event.values is not None
    counts = event.values["counts"]
    return {
        "shard": shard,
        "rows": counts["rows"],
        "tokens": counts["tokens"],
        "tokens_per_s": event.values["tokens_per_s"],
    }


def standing(tally: Tally) -> dict[str, Any]:
    """The numbers of a line about the whole run."""
    eta = tally.eta_s
    return {
        "rows": tally.rows_now,
        "tokens": tally.tokens_now,
        "tokens_per_s": round(tally.tokens_per_s, 1),
        "eta_s": None if eta is None else round(eta, 1),
    }


class RichDisplay:
    """A live bar; finished shards scroll by above it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console: Any = Console(stderr=True, highlight=False)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def embedding(self, shards: Sequence[Shard]) -> Iterator[Show]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        tally = Tally(shards)
        bar = Progress(
            TextColumn("{task.description}", markup=False),  # a shard's name may hold brackets
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        with bar:
            task = bar.add_task("loading the model", total=1.0, facts="")

            def show(event: Event) -> None:
                tally.add(event)
                said = describe(event)
                if said:
                    bar.console.print(said, markup=False)
                eta = tally.eta_s
                facts = (
                    f"{tally.tokens_per_s:,.0f} tokens/s · {tally.texts_per_s:,.0f} texts/s · "
                    f"{tally.finished_shards}/{tally.total_shards} shards · eta {'?' if eta is None else clock(eta)}"
                )
                if tally.rows_now:
                    bar.update(task, completed=tally.share, description=tally.current, facts=facts)

            yield show


def describe(event: Event) -> str:
    """A line for what a person wants to see afterwards; empty for the rest."""
    values = event.values or {}
    if event.kind == "ready":
        return (
            f"model ready in {values['load_s']:.1f} s: {values['dim']} dimensions, {values['dtype']} on "
            f"{values['device']}, attention {values['attention']}"
        )
    if event.kind in ("done", "part"):
        assert event.shard is not None
        counts = values["counts"]
        return (
            f"{event.shard.unit}: {counts['rows_out']:,} vectors, {counts['tokens']:,} tokens in "
            f"{values['seconds']['wall']:.1f} s, {values['tokens_per_s']:,.0f} tokens/s"
        )
    return event.reason


def make_display(kind: str, log_format: str = "text") -> Display:
    """``auto`` (a bar in a terminal, lines elsewhere), ``rich``, ``plain`` or ``none``.

    With the log format ``json`` there are lines of JSON, and never a bar.

    Raises:
        ConfigError: there is no such display or format, or a bar is to be JSON.
    """
    if kind not in ("auto", "rich", "plain", "none"):
        raise ConfigError(f"--progress: found '{kind}'; expected auto, rich, plain or none")
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format: found '{log_format}'; expected text or json")
    if kind == "none":
        return NoDisplay()
    if log_format == "json":
        if kind == "rich":
            raise ConfigError("--log-format json has no bar: leave out --progress rich")
        return JsonDisplay()
    if kind == "rich" or (kind == "auto" and sys.stderr.isatty()):
        return RichDisplay()
    return PlainDisplay()
