"""A published index beside the committed rows -> the faults in what ``index.json``, the ids file and the index say.

The index must be made from exactly the committed files (their rows and sha256), and line p of the ids file must name
the vector at position p. FAISS is not needed: the number of vectors stands in the file's header, and its sha256 ties
the rest to the build that measured it.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.accounting import Faults, Piece, Stream, first_difference, reading
from pipeline.errors import one_line
from pipeline.index_document import NAME as INDEX
from pipeline.index_document import VERSION
from pipeline.storage import Storage, sha256_of

IDS_ROWS = 65_536
REDO = "run `embed-corpus index` again"


class IdsCheck:
    """The lines of the ids file, compared with the rows as they are read."""

    def __init__(self, path: str, file: pq.ParquetFile, ordinals: dict[str, int], faults: Faults) -> None:
        self._path, self._stream, self._ordinals, self._faults = path, Stream(file, IDS_ROWS), ordinals, faults

    def check(self, piece: Piece, position: int, id_name: str) -> None:
        """Compare the rows of a piece, the first of which is the vector at ``position``."""
        n = piece.found.num_rows
        faiss_ids = (self._ordinals[piece.key] << 32) + np.arange(piece.row, piece.row + n, dtype=np.int64)
        expected = {
            "faiss_id": pa.chunked_array([pa.array(faiss_ids)]),
            "id": piece.found[id_name],
            "shard": pa.chunked_array([pa.repeat(piece.key, n)]),
            "row": pa.chunked_array([pa.array(piece.rows)]),
        }
        try:
            self._stream.take(position - self._stream.row)  # lines of rows that could not be read
            lines = self._stream.take(n)
            for name, column in expected.items():
                found = lines[name].cast(pa.string()) if name == "shard" else lines[name]
                at = first_difference(found, column)
                if at is not None:
                    what = f"{name} {found[at]}" if at < len(found) else "no more lines"
                    wanted = f"{name} {column[at]}, output row {piece.row + at} of {piece.key}"
                    self._faults.add(self._path, f"{what} in line {position + at}", wanted, REDO, kind="ids")
        except (OSError, KeyError, pa.ArrowException) as error:
            self._faults.add(self._path, f"damage ({one_line(error)})", "a file that can be read", REDO, kind="ids")


def check_index(
    store: Storage,
    fingerprint: str,
    records: dict[str, dict[str, Any]],
    faults: Faults,
    opened: contextlib.ExitStack,
) -> IdsCheck | None:
    """Check an index that is there.

    Args:
        store: the output folder.
        fingerprint: of the run.
        records: the commit records that count, in natural order of their keys.
        faults: gets what is wrong.
        opened: closes the ids file in the end.

    Returns:
        The ids file for comparing it with the rows; None where the index is not of these rows.
    """
    total = sum(record["output"]["rows"] for record in records.values())
    index = store.read_json(INDEX)
    if not _is_index(index):
        faults.add(INDEX, "no document that can be read", "what the indexer wrote", REDO)
        return None
    paths, held = {what: f"index/{index[f'{what}_file']}" for what in ("index", "ids")}, 0
    for what, path in paths.items():
        if store.size(path) is None:
            faults.add(path, "no file", f"the one that {INDEX} names", REDO)
            return None
        if what == "index":
            held = _num_vectors(store, path)
        if (found := sha256_of(store, path)) != (expected := index["sha256"][what]):
            faults.add(path, f"sha256 {found[:12]}…", f"{expected[:12]}… as in {INDEX}", REDO)
    made_from = [_described(record) for record in records.values()]
    described = [{name: shard.get(name) for name in DESCRIBED} for shard in index["shards"]]
    if (index["fingerprint"], index["ntotal"], described) != (fingerprint, total, made_from):
        stale = f"a stale index of {index['ntotal']} vectors in {len(described)} shards"
        faults.add(INDEX, stale, f"the {total} vectors of the {len(made_from)} committed shards", REDO)
        return None
    if held != total:
        faults.add(paths["index"], f"{held} vectors", f"the {total} committed ones", REDO)
    try:
        file = opened.enter_context(reading(store, paths["ids"]))
        if file.metadata.num_rows != total:
            faults.add(paths["ids"], f"{file.metadata.num_rows} lines", f"{total}", REDO)
        return IdsCheck(paths["ids"], file, {shard["key"]: shard["ordinal"] for shard in index["shards"]}, faults)
    except (OSError, pa.ArrowException) as error:
        faults.add(paths["ids"], f"damage ({one_line(error)})", "a file that can be read", REDO)
        return None


DESCRIBED = ("key", "path", "rows", "sha256", "quarantine")


def _described(record: dict[str, Any]) -> dict[str, Any]:
    """What index.json must say of a shard."""
    output = {name: record["output"][name] for name in ("path", "rows", "sha256")}
    return {"key": record["shard"]["key"], **output, "quarantine": (record.get("quarantine") or {}).get("sha256")}


def _is_index(index: Any) -> TypeGuard[dict[str, Any]]:
    names = {"index_file", "ids_file", "sha256", "fingerprint", "ntotal", "shards"}
    return isinstance(index, dict) and index.get("version") == VERSION and names <= index.keys()


def _num_vectors(store: Storage, path: str) -> int:
    """From the header every FAISS index file begins with: its kind, dimensions, vectors."""
    with open(store.fetch(path), "rb") as file:  # not released here: its sha256 is wanted next
        head = file.read(16)
    return int(struct.unpack("<4siq", head)[2]) if len(head) == 16 else 0
