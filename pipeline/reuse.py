"""The previous output of a changed shard, and which of the new texts already have their vector there.

Texts are recognised by a hash of their token ids, which is all that the model sees of them: within one fingerprint
equal ids mean equal vectors, also where only a dropped tail or white space changed. The hashes lie beside the
embeddings, a row each, in the same order; vectors are read from the old file, a row group at a time.

Whatever is not as it was committed is not used: a text that is not found is simply computed again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.records import Tokens

HASH_BYTES = 16
COLUMN = "tokens_hash"
SCHEMA = pa.schema([pa.field(COLUMN, pa.binary(HASH_BYTES), nullable=False)])


def token_hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """(n, 2) uint64: a 128-bit hash of each text's token ids."""
    ends = np.cumsum(tokens.lengths, dtype=np.int64)
    view = tokens.input_ids.astype("<i4", copy=False).view(np.uint8).data
    digests = b"".join(
        hashlib.blake2b(view[4 * start : 4 * end], digest_size=HASH_BYTES).digest()
        for start, end in zip(ends - tokens.lengths, ends, strict=True)
    )
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2).astype(np.uint64)


def hash_table(hashes: NDArray[np.uint64]) -> pa.Table:
    """(n, 2) hashes as a table of ``SCHEMA``."""
    buffer = pa.py_buffer(np.ascontiguousarray(hashes.astype("<u8")).tobytes())
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(hashes), [None, buffer])
    return pa.Table.from_arrays([column], schema=SCHEMA)


class PreviousVectors:
    """Vectors of an earlier output of the same shard and fingerprint.

    Args:
        embeddings: its embeddings file, opened; kept open, so replacing the file does no harm.
        hashes: (n, 2) of its rows.
    """

    def __init__(self, embeddings: pq.ParquetFile, hashes: NDArray[np.uint64]) -> None:
        self._embeddings = embeddings
        self._hashes = hashes
        self._order = np.argsort(hashes[:, 0], kind="stable")
        self._sorted = hashes[self._order, 0]
        sizes = [embeddings.metadata.row_group(group).num_rows for group in range(embeddings.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._group: tuple[int, NDArray[np.float32]] | None = None  # neighbours lie in one row group: keep the last

    def close(self) -> None:
        self._embeddings.close()

    def fill(self, hashes: NDArray[np.uint64], vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Put the vectors that are known into ``vectors`` (n, dim); returns (n,) which ones those were."""
        rows = self.find(hashes)
        known = rows >= 0
        if known.any():
            try:
                vectors[known] = self.take(rows[known])
            except (OSError, pa.ArrowException):  # damaged since it was committed: compute them again
                known[:] = False
        return known

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """(n,) row of the previous output for each of (n, 2) hashes, -1 where there is none."""
        if not len(self._sorted):
            return np.full(len(hashes), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, hashes[:, 0]), len(self._sorted) - 1)
        rows = self._order[at]
        # Half the hash finds the row, all of it must agree.
        return np.where((self._hashes[rows] == hashes).all(axis=1), rows, -1)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, dim) float32 vectors of n rows."""
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        vectors: NDArray[np.float32] | None = None
        for group in np.unique(groups):
            chosen = groups == group
            found = self._read(int(group))[rows[chosen] - self._starts[group]]
            if vectors is None:
                vectors = np.empty((len(rows), found.shape[1]), np.float32)
            vectors[chosen] = found
        assert vectors is not None, "no rows to take. This is a bug."
        return vectors

    def _read(self, group: int) -> NDArray[np.float32]:
        if self._group is None or self._group[0] != group:
            column = self._embeddings.read_row_group(group, columns=["embedding"]).column("embedding").combine_chunks()
            flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            self._group = (group, flat.reshape(len(column), -1))
        return self._group[1]


def open_previous(output: Any, record: dict[str, Any] | None, fingerprint: str) -> PreviousVectors | None:
    """The vectors behind a commit record, or None where there are none to be used.

    Args:
        output: the output folder.
        record: commit record of the shard's previous version.
        fingerprint: of the run; vectors of another one are of another space.
    """
    if record is None or record["fingerprint"] != fingerprint or not record.get("reuse"):
        return None
    try:
        with pq.ParquetFile(output.source(record["reuse"]["path"]), page_checksum_verification=True) as file:
            column = file.read().column(COLUMN).combine_chunks()
        hashes = np.frombuffer(column.buffers()[1], dtype="<u8").reshape(-1, 2)
        embeddings = pq.ParquetFile(output.source(record["output"]["path"]), page_checksum_verification=True)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None
    if not len(hashes) == embeddings.metadata.num_rows == record["output"]["rows"]:
        embeddings.close()
        return None
    return PreviousVectors(embeddings, hashes.astype(np.uint64))
