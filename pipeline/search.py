"""An output folder with an index, and queries -> the nearest rows of the corpus, with their ids, columns and texts.

An index is opened only if it is the one that was published (sha256) and belongs to the vectors beside it (fingerprint),
and it is searched at the setting whose recall was measured. Fewer rows than asked for come back only when the corpus,
or the filter, has no more. Ids come from the index's own ids file, columns and exact vectors from the embeddings files,
texts from the input shards, all read for the hits only.

It does not embed: whoever opens the index brings the encoder, so neither torch nor a model is loaded here.
"""

from __future__ import annotations

import contextlib
import functools
import html
import os
import shlex
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.corpus import Positions, Vectors
from pipeline.errors import ConfigError, ShardError, one_line
from pipeline.exact import StoredVectors
from pipeline.filters import parse_filter, rows_that_pass
from pipeline.ids_file import rows_called
from pipeline.index_document import read_document
from pipeline.nearest import Allowed, Nearest, read_index
from pipeline.recall import faiss_reason
from pipeline.rows import by_group, take
from pipeline.source_text import SourceTexts
from pipeline.storage import Storage, open_output, reading, sha256_file
from pipeline.threads import available_cores

RESERVED = ("query", "rank", "score", "id", "shard", "row")
TEXT = "text"
HTML_ROWS = 50
TEXTS_AT_ONCE = 1_024
MAX_FILTERS = 8
"""Remembered; eight bytes for each row they let through."""

EncodeQueries = Callable[[list[str]], Vectors]
"""n texts -> (n, dim) float32, embedded as the corpus was, with the query prompt."""


@dataclass(frozen=True)
class SearchResult:
    """Hits of all queries.

    Attributes:
        table: one row a hit, by query and then by rank: ``query`` (int64, position in the list of queries), ``rank``
            (from 1), ``score`` (float32, inner product, or squared distance where the index is of that metric), ``id``
            (in the user's own type), ``shard``, ``row`` (in the shard), and the columns; one named like those six has
            ``_column`` put behind its name.
        num_queries: queries asked; one without hits has no row in ``table``.
        warnings: what could not be brought.
    """

    table: pa.Table
    num_queries: int
    warnings: tuple[str, ...] = ()

    def to_list(self) -> list[list[dict[str, Any]]]:
        """A list a query of one dict a hit, best first."""
        hits: list[list[dict[str, Any]]] = [[] for _ in range(self.num_queries)]
        for row in self.table.to_pylist():
            hits[row["query"]].append(row)
        return hits

    def __len__(self) -> int:
        return self.num_queries

    def _repr_html_(self) -> str:
        names = self.table.column_names
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_short(row[name]))}</td>" for name in names) + "</tr>"
            for row in self.table.slice(0, HTML_ROWS).to_pylist()
        )
        left = self.table.num_rows - HTML_ROWS
        more = [f"and {left} more"] if left > 0 else []
        below = "".join(f"<p>{html.escape(line)}</p>" for line in (*more, *self.warnings))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _short(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"


class StaleShard(ConfigError):
    """A hit's shard was embedded again, or removed, after the index was built: its columns cannot be told."""


def open_index(
    output: str,
    *,
    encoder: EncodeQueries | None = None,
    verify: bool = True,
    mmap: bool = False,
    texts: bool = False,
    kind: type[CorpusIndex] | None = None,
) -> CorpusIndex:
    """Open the index of an output folder.

    Args:
        output: the folder given as ``--output``.
        encoder: embeds queries given as text; not needed for queries given as vectors.
        verify: compare the files' sha256, which reads them once more: FAISS does not notice a flipped byte.
        mmap: leave the index on the disk and read what a search needs of it.
        texts: bring the text of each hit unless other columns are asked for; from the input where it was not carried.
        kind: what to open it as.

    Raises:
        ConfigError: there is no index, it is damaged, or it was built from vectors of another configuration.
    """
    store = open_output(output)
    expected = ledger.read_run(store)["fingerprint"]
    document = read_document(store)
    if document is None:
        raise ConfigError(f"{store.root}: no index here; {_rebuild(store)}")
    if document["fingerprint"] != expected:
        raise ConfigError(
            f"{store.root}: the index was built from vectors with fingerprint {document['fingerprint']}, "
            f"the folder now holds {expected}; {_rebuild(store)}"
        )
    for what in ("index", "ids"):
        _check_file(store, document, what, verify)
    return (kind or CorpusIndex)(store, document, encoder, mmap, texts)


def _rebuild(store: Storage) -> str:
    return f"run `embed-corpus index {shlex.quote(str(store.root))}`"


def _check_file(store: Storage, document: dict[str, Any], what: str, verify: bool) -> None:
    name = f"index/{document[f'{what}_file']}"
    if store.size(name) != document["bytes"][what]:
        raise ConfigError(f"{store.location(name)}: missing or cut; {_rebuild(store)}")
    if verify and sha256_file(store.fetch(name)) != document["sha256"][what]:
        store.release(name)
        found = "damaged, its sha256 is not the one in index.json"
        raise ConfigError(f"{store.location(name)}: {found}; {_rebuild(store)}")


def _reading(store: Storage, path: str) -> contextlib.AbstractContextManager[pq.ParquetFile]:
    return reading(store, path, lambda what: ConfigError(f"{what}; {_rebuild(store)}"))


class CorpusIndex:
    """An opened index; made by `open_index`. Threads may share one: searches take turns.

    Attributes:
        info: the content of ``index.json``.
        stale_shards: keys of indexed shards that were embedded again, or removed, since the index was built. Their
            columns are not read, because their rows may have moved.
        num_unindexed: committed shards that the index does not have yet.
    """

    def __init__(
        self,
        store: Storage,
        document: dict[str, Any],
        encoder: EncodeQueries | None,
        mmap: bool = False,
        texts: bool = False,
    ) -> None:
        self.info = document
        self._store, self._encoder, self._texts = store, encoder, texts
        self._lock = threading.Lock()
        _opened.add(self)
        shards = document["shards"]
        committed = {record["shard"]["key"]: record for record in ledger.Ledger(store).commits()}
        sums = {key: record["output"]["sha256"] for key, record in committed.items()}
        self.stale_shards = tuple(shard["key"] for shard in shards if sums.get(shard["key"]) != shard["sha256"])
        self.num_unindexed = len(committed.keys() - {shard["key"] for shard in shards})
        self._inputs = {key: record["shard"] for key, record in committed.items()}
        # Where in that list the shard of an ordinal is, how many rows it has, and how many the shards before it have.
        self._shard_of, self._rows_held = np.zeros((2, document["next_ordinal"]), dtype=np.int64)
        self._shard_of[[shard["ordinal"] for shard in shards]] = np.arange(len(shards))
        self._rows_held[[shard["ordinal"] for shard in shards]] = [shard["rows"] for shard in shards]
        self._starts = np.cumsum([0, *(shard["rows"] for shard in shards)])
        self._filters: OrderedDict[str, Allowed] = OrderedDict()
        self._stored = StoredVectors(document, lambda shard: self._open_shard(shard), available_cores())
        self._index = self._load(mmap)
        self._nearest = Nearest(self._index, document)
        # Kept open: a later build removes the file's name, not the file.
        self._ids = pq.ParquetFile(store.fetch(f"index/{document['ids_file']}"), page_checksum_verification=True)

    def _load(self, mmap: bool) -> Any:
        name = f"index/{self.info['index_file']}"
        try:
            return read_index(self._store.fetch(name), self.info["factory"], mapped=mmap)
        except RuntimeError as error:
            path = self._store.location(name)
            raise ConfigError(f"{path}: cannot be read ({faiss_reason(error)}); {_rebuild(self._store)}") from error
        finally:
            self._store.release(name)

    @property
    def dim(self) -> int:
        return int(self.info["dim"])

    @property
    def ntotal(self) -> int:
        return int(self.info["ntotal"])

    def __len__(self) -> int:
        return self.ntotal

    def __enter__(self) -> CorpusIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ids.close()

    def search(
        self,
        queries: str | Sequence[str] | NDArray[Any] | None = None,
        k: int = 10,
        columns: Sequence[str] | None = None,
        within: Positions | None = None,
        *,
        like: Any = None,
        where: str | None = None,
        rerank: int | None = None,
    ) -> SearchResult:
        """The ``k`` rows of the corpus nearest to each query; all rows where it has fewer.

        Args:
            queries: a text, texts, or vectors (dim,) or (n, dim) of any float type. Vectors are taken as they are:
                an inner product is the cosine only if they are of unit length too.
            columns: which carried columns to bring; None brings all of them, an empty list none. ``text`` is the text
                that was embedded, read from the input shard where it was not carried; null, with a warning, where
                that file is not the one that was embedded any more.
            within: (m,) FAISS ids, the only rows that may be found; None allows all.
            like: instead of ``queries``: an id, or a list of ids. The rows nearest to that row, itself left out.
            where: a condition on the columns of the embeddings files; only rows that fulfil it may be found. See
                `pipeline.filters`.
            rerank: so many candidates of each query get their exact score from the embeddings files, and the best of
                them are the hits; for an index that keeps codes instead of vectors.

        Raises:
            ConfigError: texts without an encoder, vectors of another dimension or not finite, ``k`` below 1, an
                unknown column or id, a wrong condition, or a hit whose shard changed since the index was built.
        """
        if k < 1:
            raise ConfigError(f"k = {k}: expected at least 1")
        if rerank is not None and rerank < k:
            raise ConfigError(f"rerank = {rerank}: expected at least k = {k} candidates")
        if (queries is None) == (like is None):
            raise ConfigError("search: expected queries or like, one of them")
        with self._lock:  # what is wrong is told before queries are embedded
            brought = self._brought(columns)
            allowed = self._allowed(within, where)
            own = None if like is None else rows_called(self._ids, like)
            vectors = None if own is None else self._stored.at(own)
        if vectors is None:
            assert queries is not None
            vectors = self._query_vectors(queries)
        with self._lock:
            scores, ids = self._found(vectors, k, allowed, own, rerank)
            return self._result(scores, ids, *brought)

    # -- which rows --------------------------------------------------------------------------------------------------

    def _query_vectors(self, queries: str | Sequence[str] | NDArray[Any]) -> Vectors:
        texts: list[str] | None = None
        if not isinstance(queries, np.ndarray):
            texts = [queries] if isinstance(queries, str) else list(queries)
            if not texts:
                return np.empty((0, self.dim), dtype=np.float32)
            if self._encoder is None:
                raise ConfigError("queries are texts, but the index was opened without an encoder; give vectors or one")
            parts = [texts[at : at + TEXTS_AT_ONCE] for at in range(0, len(texts), TEXTS_AT_ONCE)]
            queries = np.concatenate([np.asarray(self._encoder(part)) for part in parts])
        vectors = np.ascontiguousarray(np.atleast_2d(queries), dtype=np.float32)
        if queries.size == 0:
            return np.empty((0, self.dim), dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ConfigError(f"queries have {vectors.shape[-1]} dimensions, the index has {self.dim}")
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            which = bad[0] if texts is None else repr(texts[bad[0]])
            raise ConfigError(f"query {which}: its vector is not finite, so nothing is near it")
        return vectors

    def _found(
        self, vectors: Vectors, k: int, allowed: Allowed | None, own: Positions | None, candidates: int | None
    ) -> tuple[Vectors, Positions]:
        """(n, at most k) scores and FAISS ids, best first."""
        most = self.ntotal if allowed is None else len(allowed)
        wanted = min(max(k, candidates or 0) + (own is not None), most)
        if allowed is None:
            scores, ids = self._nearest.search(vectors, wanted)
        else:
            scores, ids = self._nearest.search_among(vectors, wanted, allowed)
            short = np.flatnonzero((ids < 0).any(axis=1))
            if short.size:  # an index that cannot search some rows only, or a graph where nothing leads to some of them
                scores[short], ids[short] = self._stored.nearest(vectors[short], wanted, allowed.ids)
        if own is not None:
            # Itself to the end, and one the less.
            order = np.argsort(ids == own[:, None], axis=1, kind="stable")
            scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
            ids[ids == own[:, None]] = -1
            scores, ids = scores[:, : max(k, candidates or 0)], ids[:, : max(k, candidates or 0)]
        if candidates is not None:
            scores, ids = self._stored.rerank(vectors, ids)
        return scores[:, :k], ids[:, :k]

    def _allowed(self, within: Positions | None, where: str | None) -> Allowed | None:
        passing = None if where is None else self._rows_where(where)
        if within is None:
            return passing
        ids = np.unique(np.asarray(within, dtype=np.int64))
        ordinals = np.clip(ids >> 32, 0, len(self._rows_held) - 1)
        ids = ids[(ordinals == ids >> 32) & ((ids & 0xFFFFFFFF) < self._rows_held[ordinals])]  # those the index has
        return Allowed(ids if passing is None else np.intersect1d(ids, passing.ids), len(self._rows_held))

    def rows_where(self, where: str) -> Positions:
        """(m,) ascending FAISS ids of the rows that fulfil a condition, see `search`; for ``within``."""
        with self._lock:
            return self._rows_where(where).ids

    def _rows_where(self, where: str) -> Allowed:
        if where in self._filters:
            self._filters.move_to_end(where)
            return self._filters[where]
        condition = parse_filter(where, self._merged_schema(any_type=False))

        def passing(shard: dict[str, Any]) -> Positions:
            with self._open_shard(shard) as parquet:
                return (int(shard["ordinal"]) << 32) + rows_that_pass(condition, parquet)

        with ThreadPoolExecutor(available_cores()) as pool:
            ids = np.sort(np.concatenate(list(pool.map(passing, self.info["shards"]))))
        self._filters[where] = Allowed(ids, len(self._rows_held))
        if len(self._filters) > MAX_FILTERS:
            self._filters.popitem(last=False)
        return self._filters[where]

    # -- what is told of them ----------------------------------------------------------------------------------------

    def _brought(self, columns: Sequence[str] | None) -> tuple[pa.Table, list[str]]:
        """The carried columns of a result, without a row, and the names of all columns in their order."""
        wants_text = self._texts if columns is None else TEXT in columns
        if not wants_text or not self._text_is_elsewhere:
            empty = self._no_rows(columns)
            return empty, empty.column_names
        empty = self._no_rows(None if columns is None else [name for name in columns if name != TEXT])
        return empty, [*empty.column_names, TEXT] if columns is None else list(dict.fromkeys(columns))

    def _result(self, scores: Vectors, ids: Positions, empty: pa.Table, names: list[str]) -> SearchResult:
        query, place = np.nonzero(ids >= 0)
        ids = ids[query, place]
        at, rows = self._shard_of[ids >> 32], ids & 0xFFFFFFFF
        keys = self._keys(ids, self._starts[at] + rows)
        found = self._carried(at, rows, empty) if empty.num_columns else empty
        columns = {name: found.column(name) for name in found.column_names}
        warnings: tuple[str, ...] = ()
        if TEXT in names and TEXT not in columns:
            columns[TEXT], warnings = self._source_texts(at, rows, keys)
        ours = [pa.array(query.astype(np.int64)), pa.array(place.astype(np.int64) + 1), pa.array(scores[query, place])]
        told = [columns[name] for name in names]
        table = pa.table([*ours, *keys.columns, *told], names=[*RESERVED, *_apart(names)])
        return SearchResult(table, len(scores), warnings)

    def _no_rows(self, wanted: Sequence[str] | None) -> pa.Table:
        """The carried columns that are wanted, without a row."""
        if wanted is not None and not wanted:
            return pa.table({})
        empty = self._schema.empty_table()
        if self.info["chunked"]:
            empty = empty.drop_columns("row")  # the ids file has it
        if wanted is None:
            return empty.drop_columns(self.info["id_column"])
        for name in wanted:
            if name not in empty.column_names:
                raise ConfigError(
                    f"no column {name!r} in {self._store.root}/embeddings; there are {empty.column_names}"
                )
        return empty.select(list(dict.fromkeys(wanted)))

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        """Columns of the embeddings files, without the vectors."""
        return self._merged_schema(any_type=True)

    def _merged_schema(self, *, any_type: bool) -> pa.Schema:
        """Of the first file alone, or with the types of columns that are all null there, as other files have them."""
        shards = self.info["shards"]
        fresh = [shard for shard in shards if shard["key"] not in self.stale_shards]
        if not fresh:
            raise StaleShard(self._stale(shards[0]["key"]))
        fields: dict[str, pa.Field] = {}
        for shard in fresh:
            with self._open_shard(shard) as parquet:
                for field in parquet.schema_arrow:
                    if field.name not in fields or pa.types.is_null(fields[field.name].type):
                        fields[field.name] = field
            if any_type or not any(pa.types.is_null(field.type) for field in fields.values()):
                break
        return pa.schema([field for name, field in fields.items() if name != "embedding"])

    def _keys(self, faiss_ids: Positions, positions: NDArray[np.int64]) -> pa.Table:
        """id, shard and row of hits, which are line ``positions[i]`` of the ids file."""
        keys = self._lines(positions, ["faiss_id", "id", "shard", "row"])
        if not np.array_equal(keys.column("faiss_id").to_numpy(), faiss_ids):
            raise ConfigError(f"{self.info['ids_file']}: not the ids of this index; {_rebuild(self._store)}")
        return keys.drop_columns("faiss_id")

    def _lines(self, positions: Positions, columns: list[str]) -> pa.Table:
        """Lines of the ids file, in the order asked for."""
        return take(self._ids, positions, columns)

    def _carried(self, at: Positions, rows: Positions, empty: pa.Table) -> pa.Table:
        """The columns of hits, which are row ``rows[i]`` of the output file of shard ``at[i]``."""

        def read(shard_at: int, hits: Positions) -> pa.Table:
            return self._rows_of(self.info["shards"][shard_at], rows[hits], empty.column_names)

        return by_group(at, read, empty)

    def _rows_of(self, shard: dict[str, Any], rows: Positions, columns: list[str]) -> pa.Table:
        """Rows of the output file of a shard, in the order asked for."""
        with self._open_shard(shard) as parquet:
            return take(parquet, rows, columns)

    @contextlib.contextmanager
    def _open_shard(self, shard: dict[str, Any]) -> Iterator[pq.ParquetFile]:
        """The output file of a shard, as it was indexed."""
        if shard["key"] in self.stale_shards:
            raise StaleShard(self._stale(shard["key"]))
        with _reading(self._store, shard["path"]) as parquet:
            if parquet.metadata.num_rows != shard["rows"]:
                raise StaleShard(self._stale(shard["key"]))
            yield parquet

    def _stale(self, key: str) -> str:
        return f"{self._store.root}: shard {key} changed after the index was built; {_rebuild(self._store)}"

    @functools.cached_property
    def _text_is_elsewhere(self) -> bool:
        """Whether the text that was embedded is only in the input."""
        column = ledger.read_run(self._store)["config"].get("text_column")
        return column is not None and not {column, TEXT} & set(self._schema.names)

    @functools.cached_property
    def _source(self) -> SourceTexts:
        config = ledger.read_run(self._store)["config"]
        return SourceTexts(config["text_column"], self._inputs, config.get("input", []), str(self._store.root))

    def _source_texts(self, at: Positions, rows: Positions, keys: pa.Table) -> tuple[pa.Array, tuple[str, ...]]:
        """The texts of hits, or the pieces of them; null where the input is not what was embedded, and why."""
        texts: list[str | None] = [None] * len(at)
        problems: list[str] = []
        input_rows = keys.column("row").to_numpy()
        for shard_at in np.unique(at):
            hits = np.flatnonzero(at == shard_at)
            shard = self.info["shards"][shard_at]
            try:
                if shard["key"] in self.stale_shards:  # the input that is recorded now is another one
                    raise StaleShard(self._stale(shard["key"]))
                found = self._source.read(shard["key"], input_rows[hits])
            except (ShardError, ConfigError) as error:
                problems.append(f"text of {len(hits)} hits left out: {one_line(error)}")
                continue
            if self.info["chunked"]:
                pieces = self._rows_of(shard, rows[hits], ["start", "end"]).to_pylist()
                found = [text and text[p["start"] : p["end"]] for text, p in zip(found, pieces, strict=True)]
            for hit, text in zip(hits, found, strict=True):
                texts[hit] = text
        more = f"; and of {len(problems) - 1} more shards" if len(problems) > 1 else ""
        return pa.array(texts, pa.string()), tuple(f"{problem}{more}" for problem in problems[:1])


def _apart(names: Sequence[str]) -> list[str]:
    """Names of columns that none of ours has: ``score`` is ``score_column``."""
    taken, apart = {*RESERVED, *names}, []
    for name in names:
        shown = name
        while shown in RESERVED or (shown != name and shown in taken):
            shown += "_column"
        taken.add(shown)
        apart.append(shown)
    return apart


_opened: weakref.WeakSet[CorpusIndex] = weakref.WeakSet()


def _unlock() -> None:
    for index in _opened:
        index._lock = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_unlock)
