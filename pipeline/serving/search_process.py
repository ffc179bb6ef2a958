"""The process that searches: ``python -m pipeline.serving.search_process OUTPUT``. FAISS lives here, a model never.

It answers one request at a time and meanwhile looks for a new generation of the index; that is opened beside the old
one and takes its place between two requests, so none is dropped. While both are open, both are in memory. A generation
that cannot be opened is reported once and tried again; the old one goes on answering.

With ``--rings`` vectors may come out of the encoder process' memory on the device instead of the request
(`device_ring`); torch is loaded only then, to read it. One ring is open at a time, the one that was told last.

When stdin ends the server is gone and the process exits at once.

    requests   {id, deadline, n, k, columns, where} + (n, dim) float32
               {…, ring} + (n,) int64 numbers in that ring; {…, ring, open}: which is to be opened first
    answers    hits {id, generation, seconds, warnings} + JSON, a list of hits a query
               refused {id, message} · expired {id} · failed {id, message, trace}
               none {id, message}: there is no index yet, or it is about to be replaced
               gone {id, message, for_good}: the ring has not got the vectors any more; ask with their bytes
               index {generation, ntotal, dim, factory, …}: opened · trouble {message}: one could not be opened
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import ledger
from pipeline.corpus import Positions, Vectors
from pipeline.errors import ConfigError, EmbedCorpusError, one_line
from pipeline.index_document import NAME
from pipeline.rows import by_group, group_starts
from pipeline.search import CorpusIndex, SearchResult, StaleShard, open_index
from pipeline.serving import frames
from pipeline.serving.device_ring import OpenedRing, Ring, RingGone
from pipeline.storage import Storage, open_output

MAX_FILES = 10_000  # whose row groups' sizes are remembered
MAX_WAIT_S = 60.0  # between two attempts to open the same generation
STALE = "columns of some hits are left out: their shards were embedded again after the index was built"


class RowGroups:
    """Row groups of Parquet files as Arrow columns; those used last are kept, up to a number of bytes.

    Decoding a row group to take one row of it costs tens of milliseconds; a server is asked for the same ones again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._columns: OrderedDict[tuple[str, int, str], pa.ChunkedArray] = OrderedDict()
        self._starts: OrderedDict[str, Positions] = OrderedDict()

    def take(self, name: str, open_file: OpenFile, rows: Positions, columns: list[str]) -> pa.Table:
        """Rows of a file, in the order asked for.

        Args:
            name: of the file's content: another content has another name.
            open_file: opens it, and on leaving raises where it is not that content; not called for what is kept.
            rows: (m,) positions in it, m > 0.
            columns: wanted, at least one.
        """
        with contextlib.ExitStack() as stack:
            opened: list[pq.ParquetFile] = []

            def parquet() -> pq.ParquetFile:
                if not opened:
                    opened.append(stack.enter_context(open_file()))
                return opened[0]

            def read(group: int, hits: Positions) -> pa.Table:
                table = pa.table({column: self._column(name, group, column, parquet) for column in columns})
                return table.take(pa.array(rows[hits] - starts[group]))

            starts = self._group_starts(name, parquet)
            return by_group(np.searchsorted(starts[1:], rows, side="right"), read, pa.table({}))

    def _group_starts(self, name: str, parquet: Callable[[], pq.ParquetFile]) -> Positions:
        if name not in self._starts:
            self._starts[name] = group_starts(parquet())
            if len(self._starts) > MAX_FILES:
                self._starts.popitem(last=False)
        return self._starts[name]

    def _column(self, name: str, group: int, column: str, parquet: Callable[[], pq.ParquetFile]) -> pa.ChunkedArray:
        key = (name, group, column)
        if key in self._columns:
            self._columns.move_to_end(key)
            return self._columns[key]
        values = parquet().read_row_group(group, columns=[column]).column(column)
        self._columns[key] = values
        self._bytes += values.nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._columns.popitem(last=False)[1].nbytes
        return values

    def forget(self, name: str) -> None:
        """What was read of a file turned out to be of another content."""
        self._starts.pop(name, None)
        for key in [key for key in self._columns if key[0] == name]:
            self._bytes -= self._columns.pop(key).nbytes


OpenFile = Callable[[], contextlib.AbstractContextManager[pq.ParquetFile]]


class ServedIndex(CorpusIndex):
    """One generation, opened for as long as it counts; shards may be embedded again meanwhile.

    What was not read yet of such a shard is `StaleShard` from then on; what was read is of the indexed vectors.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groups = RowGroups(0)

    def keep(self, max_bytes: int) -> None:
        """How much of the files' content stays in memory; and read what the first search would wait for."""
        self._groups = RowGroups(max_bytes)
        with contextlib.suppress(StaleShard):
            self.search(np.ones((1, self.dim), dtype=np.float32), k=1)

    def about(self) -> dict[str, Any]:
        names = ("ntotal", "dim", "factory", "metric", "fingerprint", "created", "id_column", "recall_at_10")
        facts = {name: self.info.get(name) for name in names}
        return {"generation": generation(self.info), "num_unindexed": self.num_unindexed, **facts}

    @contextlib.contextmanager
    def _open_shard(self, shard: dict[str, Any]) -> Iterator[pq.ParquetFile]:
        """The output file of a shard; on leaving, what was read is what was indexed.

        A run takes a shard's record back before it replaces the file, so the record is looked at last.
        """
        try:
            with super()._open_shard(shard) as parquet:
                yield parquet
        except ConfigError:
            if self._is_current(shard):
                raise
        if not self._is_current(shard):
            raise StaleShard(self._stale(shard["key"]))

    def _is_current(self, shard: dict[str, Any]) -> bool:
        record = ledger.Ledger(self._store).record(shard["key"])
        return record is not None and record["output"]["sha256"] == shard["sha256"]

    def _rows_of(self, shard: dict[str, Any], rows: Positions, columns: list[str]) -> pa.Table:
        try:
            return self._groups.take(shard["sha256"], lambda: self._open_shard(shard), rows, columns)
        except StaleShard:
            self._groups.forget(shard["sha256"])
            raise

    def _lines(self, positions: Positions, columns: list[str]) -> pa.Table:
        if not len(positions):
            return super()._lines(positions, columns)
        return self._groups.take("ids", lambda: contextlib.nullcontext(self._ids), positions, columns)


def generation(document: dict[str, Any]) -> str:
    """A name of an index's content, as its files have it."""
    return str(document["index_file"]).removeprefix("index-").removesuffix(".faiss")


class Watcher:
    """Holds the generation that counts, and looks for the next one.

    Args:
        store: the output.
        poll_s: how often it looks.
        cache_bytes: see `ServedIndex.keep`.
        say: tells the server.
    """

    def __init__(self, store: Storage, poll_s: float, cache_bytes: int, say: Callable[..., None]) -> None:
        self._store, self._poll_s, self._cache_bytes, self._say = store, poll_s, cache_bytes, say
        self._served: ServedIndex | None = None
        self._trouble = ""
        self.lock = threading.Lock()
        """Held while the index is searched or replaced."""

    @property
    def served(self) -> ServedIndex | None:
        return self._served

    def run(self) -> None:
        """Look for ever."""
        tried: Any = None
        wait_s, again_at = self._poll_s, 0.0
        while True:
            document = self._read()
            if self._served is None or document != self._served.info:
                if document != tried:
                    wait_s, again_at = self._poll_s, 0.0
                if time.monotonic() >= again_at:
                    tried = document
                    if not self._open():
                        again_at, wait_s = time.monotonic() + wait_s, min(2 * wait_s, MAX_WAIT_S)
            time.sleep(self._poll_s)

    def _read(self) -> Any:
        try:
            return self._store.read_json(NAME)
        except OSError:  # an object store that is away for a moment
            return None if self._served is None else self._served.info

    def _open(self) -> bool:
        try:
            opened = open_index(str(self._store.root), texts=True, kind=ServedIndex)
            assert isinstance(opened, ServedIndex)
            opened.keep(self._cache_bytes)
        except (EmbedCorpusError, OSError, KeyError) as error:
            if (message := one_line(error)) != self._trouble:
                self._trouble = message
                self._say("trouble", message=message)
            return False
        with self.lock:
            old, self._served, self._trouble = self._served, opened, ""
            if old is not None:
                old.close()
        self._say("index", **opened.about())
        return True


class Searcher:
    """Requests from a pipe, answers to another.

    Args:
        output: folder or URL.
        poll_s, cache_bytes: see `Watcher`.
        requests, answers: the pipe's ends.
    """

    def __init__(self, output: str, poll_s: float, cache_bytes: int, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._writing = threading.Lock()
        self._ring: OpenedRing | None = None
        self._watcher = Watcher(open_output(output), poll_s, cache_bytes, self._say)

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        while (message := frames.read(self._requests)) is not None:
            self._answer(*message)

    def _watch(self) -> None:
        try:
            self._watcher.run()
        except BaseException:  # our bug: without a watcher the index grows old unnoticed; the server starts us again
            traceback.print_exc()
            os._exit(1)

    def _answer(self, request: dict[str, Any], data: bytes) -> None:
        number = request["id"]
        if time.monotonic() > request["deadline"]:
            self._say("expired", id=number)
            return
        began = time.perf_counter()
        try:
            vectors = self._vectors(request, data)
            with self._watcher.lock:
                served = self._watcher.served
                if served is None:
                    self._say("none", id=number, message="")
                    return
                found = search(served, vectors, request)
                about = {"generation": generation(served.info), "warnings": found.warnings}
            hits = orjson.dumps(found.to_list(), default=str, option=orjson.OPT_NON_STR_KEYS)
            self._say("hits", hits, id=number, seconds=time.perf_counter() - began, **about)
        except RingGone as gone:
            self._say("gone", id=number, message=str(gone), for_good=gone.for_good)
        except StaleShard as error:
            self._say("none", id=number, message=one_line(error))
        except ConfigError as error:
            self._say("refused", id=number, message=one_line(error))
        except Exception as error:
            message = f"{type(error).__name__}: {one_line(error)}"
            self._say("failed", id=number, message=message, trace=traceback.format_exc())

    def _vectors(self, request: dict[str, Any], data: bytes) -> Vectors:
        """(n, dim) float32, from the request or from the ring that it names; RingGone where that has not got them."""
        name: str | None = request.get("ring")
        if name is None:
            return np.frombuffer(data, dtype=np.float32).reshape(request["n"], -1)
        if "open" in request:
            if self._ring is not None:
                self._ring.close()
                self._ring = None
            self._ring = OpenedRing(Ring(**request["open"]))
        if self._ring is None or self._ring.name != name:
            raise RingGone("another ring is open", for_good=False)
        return self._ring.take(np.frombuffer(data, dtype=np.int64))

    def _say(self, event: str, data: bytes = b"", **values: Any) -> None:
        with self._writing:
            self._answers.write(frames.pack({"event": event, **values}, data))
            self._answers.flush()


def search(index: ServedIndex, vectors: Vectors, request: dict[str, Any]) -> SearchResult:
    """The hits of each query; without columns, and with a warning, where they cannot be told any more.

    Raises:
        StaleShard: a filter needs a shard that was embedded again.
        ConfigError: what is asked for does not fit this index.
    """
    k, columns, where = request["k"], request["columns"], request["where"]
    try:
        return index.search(vectors, k, columns, where=where)
    except StaleShard:
        found = index.search(vectors, k, [], where=where)
        return replace(found, warnings=(*found.warnings, STALE))


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.serving.search_process", description=main.__doc__)
    parser.add_argument("output")
    parser.add_argument("--poll-s", type=float, default=2.0)
    parser.add_argument("--cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--rings", action="store_true")
    options = parser.parse_args(arguments)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between the answers
    if options.rings:
        # Now, and not in the middle of a search; and before FAISS, which shares its OpenMP then.
        import torch  # noqa: F401
    with contextlib.suppress(BrokenPipeError):
        Searcher(options.output, options.poll_s, options.cache_bytes, sys.stdin.buffer, answers).run()
    os._exit(0)  # the watcher may be in the middle of a long read


if __name__ == "__main__":
    sys.exit(main())
