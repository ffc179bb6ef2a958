"""An output folder with an index, and queries -> the nearest rows of the corpus, with their ids and columns.

An index is opened only if it is the one that was published (sha256) and belongs to the vectors beside it (fingerprint),
and it is searched at the setting whose recall was measured. Fewer rows than asked for come back only when the corpus
has no more. Ids come from the index's own ids file, columns from the embeddings files, read for the hits only.

It does not embed: whoever opens the index brings the encoder, so neither torch nor a model is loaded here. It must not
be followed by a fork: FAISS' threads do not survive one.
"""

from __future__ import annotations

import contextlib
import html
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.corpus import Positions, Vectors
from pipeline.errors import ConfigError, one_line
from pipeline.recall import load_faiss, set_parameter
from pipeline.storage import Storage, open_output, reading, sha256_file
from pipeline.threads import available_cores

VERSION = 1
RESERVED = ("query", "rank", "score", "id", "shard", "row")
HTML_ROWS = 50
SETTINGS = {"nprobe": "nprobe", "efSearch": "ef_search"}
"""FAISS' name of a search parameter: where index.json has its measured value."""

EncodeQueries = Callable[[list[str]], Vectors]
"""n texts -> (n, dim) float32, embedded as the corpus was, with the query prompt."""


@dataclass(frozen=True)
class SearchResult:
    """Hits of all queries.

    Attributes:
        table: one row a hit, by query and then by rank: ``query`` (int64, position in the list of queries), ``rank``
            (from 1), ``score`` (float32, inner product), ``id`` (in the user's own type), ``shard``, ``row`` (in the
            shard), and the carried columns; one named like those six is called ``<name>_column``.
        num_queries: queries asked; one without hits has no row in ``table``.
    """

    table: pa.Table
    num_queries: int

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
        more = f"<p>and {left} more</p>" if left > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _short(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"


def open_index(output: str, *, encoder: EncodeQueries | None = None, verify: bool = True) -> CorpusIndex:
    """Open the index of an output folder.

    Args:
        output: the folder given as ``--output``.
        encoder: embeds queries given as text; not needed for queries given as vectors.
        verify: compare the files' sha256, which reads them once more: FAISS does not notice a flipped byte.

    Raises:
        ConfigError: there is no index, it is damaged, or it was built from vectors of another configuration.
    """
    store = open_output(output)
    expected = ledger.read_run(store)["fingerprint"]
    document = store.read_json("index/index.json")
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ConfigError(f"{store.root}: no index here; {_rebuild(store)}")
    if document["fingerprint"] != expected:
        raise ConfigError(
            f"{store.root}: the index was built from vectors with fingerprint {document['fingerprint']}, "
            f"the folder now holds {expected}; {_rebuild(store)}"
        )
    for what in ("index", "ids"):
        _check_file(store, document, what, verify)
    return CorpusIndex(store, document, encoder)


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


class CorpusIndex:
    """An opened index; made by `open_index`. Threads may share one: searches take turns.

    Attributes:
        info: the content of ``index.json``.
        stale_shards: keys of indexed shards that were embedded again, or removed, since the index was built. Their
            columns are not read, because their rows may have moved.
        num_unindexed: committed shards that the index does not have yet.
    """

    def __init__(self, store: Storage, document: dict[str, Any], encoder: EncodeQueries | None) -> None:
        self.info = document
        self._store, self._encoder = store, encoder
        self._lock = threading.Lock()
        shards = document["shards"]
        committed = {record["shard"]["key"]: record["output"]["sha256"] for record in ledger.Ledger(store).commits()}
        self.stale_shards = tuple(shard["key"] for shard in shards if committed.get(shard["key"]) != shard["sha256"])
        self.num_unindexed = len(committed.keys() - {shard["key"] for shard in shards})
        # Where in that list the shard of an ordinal is, and how many vectors the shards before each one hold.
        self._shard_of = np.zeros(document["next_ordinal"], dtype=np.int64)
        self._shard_of[[shard["ordinal"] for shard in shards]] = np.arange(len(shards))
        self._starts = np.cumsum([0, *(shard["rows"] for shard in shards)])
        self._faiss = load_faiss()
        self._faiss.omp_set_num_threads(available_cores())
        self._index = self._load()
        self._parameter = next((name for name, key in SETTINGS.items() if document[key] is not None), None)
        self._effort = int(document[SETTINGS[self._parameter]]) if self._parameter else self.ntotal
        set_parameter(self._index, self._parameter, self._effort)
        # Kept open: a later build removes the file's name, not the file.
        self._ids = pq.ParquetFile(store.fetch(f"index/{document['ids_file']}"), page_checksum_verification=True)

    def _load(self) -> Any:
        name = f"index/{self.info['index_file']}"
        try:
            return self._faiss.read_index(str(self._store.fetch(name)))
        except RuntimeError as error:
            path = self._store.location(name)
            raise ConfigError(f"{path}: cannot be read ({one_line(error)}); {_rebuild(self._store)}") from error
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
        self, queries: str | Sequence[str] | NDArray[Any], k: int = 10, columns: Sequence[str] | None = None
    ) -> SearchResult:
        """The ``k`` rows of the corpus nearest to each query; all rows where it has fewer.

        Args:
            queries: a text, texts, or vectors (dim,) or (n, dim) of any float type. Vectors are taken as they are:
                the score is the inner product, which is the cosine only if they are of unit length too.
            columns: which carried columns to bring; None brings all of them, an empty list none.

        Raises:
            ConfigError: texts without an encoder, vectors of another dimension or not finite, ``k`` below 1, an
                unknown column, or a hit whose shard changed since the index was built.
        """
        if k < 1:
            raise ConfigError(f"k = {k}: expected at least 1")
        vectors = self._query_vectors(queries)
        with self._lock:
            carried = self._no_rows(columns)
            scores, ids = self._nearest(vectors, min(k, self.ntotal))
            query, place = np.nonzero(ids >= 0)
            at, rows = self._shard_of[ids[query, place] >> 32], ids[query, place] & 0xFFFFFFFF
            keys = self._keys(ids[query, place], self._starts[at] + rows)
            if carried.num_columns:
                carried = self._carried(at, rows, carried)
        names = [f"{name}_column" if name in RESERVED else name for name in carried.column_names]
        found = [pa.array(query.astype(np.int64)), pa.array(place.astype(np.int64) + 1), pa.array(scores[query, place])]
        table = pa.table([*found, *keys.columns, *carried.columns], names=[*RESERVED, *names])
        return SearchResult(table, len(vectors))

    def _query_vectors(self, queries: str | Sequence[str] | NDArray[Any]) -> Vectors:
        if not isinstance(queries, np.ndarray):
            texts = [queries] if isinstance(queries, str) else list(queries)
            if not texts:
                return np.empty((0, self.dim), dtype=np.float32)
            if self._encoder is None:
                raise ConfigError("queries are texts, but the index was opened without an encoder; give vectors or one")
            queries = np.asarray(self._encoder(texts))
        vectors = np.ascontiguousarray(np.atleast_2d(queries), dtype=np.float32)
        if queries.size == 0:
            return np.empty((0, self.dim), dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ConfigError(f"queries have {vectors.shape[-1]} dimensions, the index has {self.dim}")
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise ConfigError(f"query {bad[0]}: its vector is not finite, so nothing is near it")
        return vectors

    def _nearest(self, vectors: Vectors, k: int) -> tuple[Vectors, Positions]:
        """(n, k) scores and FAISS ids, best first; -1 only where a graph index has parts that nothing leads to."""
        scores, ids = self._index.search(vectors, k)
        effort, most = self._effort, self._most_effort()
        try:
            # The lists probed held fewer than ``k`` vectors, or the graph walk ended early: search wider.
            while effort < most and (short := np.flatnonzero((ids < 0).any(axis=1))).size:
                effort = min(2 * effort, most)
                set_parameter(self._index, self._parameter, effort)
                scores[short], ids[short] = self._index.search(vectors[short], k)
        finally:
            set_parameter(self._index, self._parameter, self._effort)
        return scores, ids

    def _most_effort(self) -> int:
        ivf = self._faiss.try_extract_index_ivf(self._index)
        return int(ivf.nlist) if ivf is not None else self.ntotal

    def _no_rows(self, wanted: Sequence[str] | None) -> pa.Table:
        """The carried columns that are wanted, without a row."""
        if wanted is not None and not wanted:
            return pa.table({})
        with _reading(self._store, self._some_file()) as parquet:
            empty = parquet.schema_arrow.empty_table().drop_columns("embedding")
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

    def _some_file(self) -> str:
        shards = self.info["shards"]
        fresh = next((shard for shard in shards if shard["key"] not in self.stale_shards), None)
        if fresh is None:
            raise ConfigError(self._stale(shards[0]["key"]))
        return str(fresh["path"])

    def _keys(self, faiss_ids: Positions, positions: NDArray[np.int64]) -> pa.Table:
        """id, shard and row of hits, which are line ``positions[i]`` of the ids file."""
        keys = _take(self._ids, positions, ["faiss_id", "id", "shard", "row"])
        if not np.array_equal(keys.column("faiss_id").to_numpy(), faiss_ids):
            raise ConfigError(f"{self.info['ids_file']}: not the ids of this index; {_rebuild(self._store)}")
        return keys.drop_columns("faiss_id")

    def _carried(self, at: Positions, rows: Positions, empty: pa.Table) -> pa.Table:
        """The columns of hits, which are row ``rows[i]`` of the output file of shard ``at[i]``."""

        def read(shard_at: int, hits: Positions) -> pa.Table:
            shard = self.info["shards"][shard_at]
            if shard["key"] in self.stale_shards:
                raise ConfigError(self._stale(shard["key"]))
            with _reading(self._store, shard["path"]) as parquet:
                if parquet.metadata.num_rows != shard["rows"]:
                    raise ConfigError(self._stale(shard["key"]))
                return _take(parquet, rows[hits], empty.column_names)

        return _by_group(at, read, empty)

    def _stale(self, key: str) -> str:
        return f"{self._store.root}: shard {key} changed after the index was built; {_rebuild(self._store)}"


def _reading(store: Storage, path: str) -> contextlib.AbstractContextManager[pq.ParquetFile]:
    return reading(store, path, lambda what: ConfigError(f"{what}; {_rebuild(store)}"))


def _take(parquet: pq.ParquetFile, rows: Positions, columns: list[str]) -> pa.Table:
    """Rows of a file in the order asked for, reading only the row groups that hold them."""
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    starts = np.cumsum([0, *sizes])

    def read(group: int, hits: Positions) -> pa.Table:
        table = parquet.read_row_group(group, columns=columns).select(columns)
        return table.take(pa.array(rows[hits] - starts[group]))

    groups = np.searchsorted(starts[1:], rows, side="right")
    return _by_group(groups, read, parquet.schema_arrow.empty_table().select(columns))


def _by_group(groups: NDArray[Any], read: Callable[[int, Positions], pa.Table], empty: pa.Table) -> pa.Table:
    """One row for each of (n,) ``groups``, in their order.

    Args:
        groups: which group each row is in.
        read: reads the rows of one group, given their places among the n.
        empty: what comes back for n = 0.
    """
    if not len(groups):
        return empty
    tables = [read(int(group), np.flatnonzero(groups == group)) for group in np.unique(groups)]
    order = np.argsort(groups, kind="stable")
    return pa.concat_tables(tables, promote_options="permissive").take(pa.array(np.argsort(order)))
