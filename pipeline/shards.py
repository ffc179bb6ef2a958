"""Input names into a checked list of shards: what to read, in which order, and which ones cannot be read at all.

Everything here happens before a model is loaded. A shard whose own data is bad is named and left to fail alone; what is
wrong with all of them at once (no such column, ids of different types) stops the run, since it is the command that is
wrong. Only footers are read, never a row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import nearest
from pipeline.errors import ConfigError, ShardError, Stopped
from pipeline.records import Part, Shard
from pipeline.remote import RemoteFile, is_remote, open_filesystem, protocols, tried

SUFFIXES = (".parquet", ".parq", ".pq")
READ_BUFFER_BYTES = 1024 * 1024
REMOTE_READ_BUFFER_BYTES = 8 * 1024 * 1024  # a request each; it costs as long as a megabyte or two takes
PART_ROWS = 32_768  # a part costs two files more; a device takes seconds for it, so several share one file evenly
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
Types = dict[str, pa.DataType]
_MAGIC_CHARACTERS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Columns:
    """Which columns of a shard are read, as names for the reader.

    Attributes:
        text: column or dotted path of the text.
        id: column of the key, or None where the key is made from shard and row.
        carried: further columns of the output.
    """

    text: str
    id: str | None
    carried: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [self.text, *([self.id] if self.id else []), *self.carried]


@dataclass(frozen=True)
class Checked:
    """The outcome of the check.

    Attributes:
        shards: readable shards in natural order of their keys.
        bad: (shard, reason) of those that fail alone.
    """

    shards: list[Shard]
    bad: list[tuple[Shard, str]]


def natural_key(name: str) -> tuple[Any, ...]:
    """Sort key under which ``part-2`` comes before ``part-10``."""
    return tuple((0, int(piece), piece) if piece.isdigit() else (1, 0, piece) for piece in re.split(r"(\d+)", name))


def find_shards(inputs: Sequence[str], output: str | None = None) -> list[Shard]:
    """Expand files, folders and globs into shards, in natural order of their keys.

    Hidden files, names that begin with ``_`` and other file types are skipped below a folder; a file that is named is
    always taken. What lies in ``output`` is no input, unless it is named.

    Raises:
        ConfigError: an input does not exist or holds no Parquet file, or two shards would get the same output name.
    """
    skip = _place(output) if output is not None else None
    found: dict[str, Shard] = {}
    for name in inputs:
        shards = [s for s in _expand(name) if skip is None or _inside(name, skip) or not _inside(s.path, skip)]
        if not shards:
            raise ConfigError(
                f"input {name}: no Parquet file found; expected a .parquet file, a folder of them, or a glob"
            )
        for shard in shards:
            other = found.get(shard.key)
            if other is not None and other.path != shard.path:
                raise ConfigError(
                    f"input: {other.path} and {shard.path} would both be written as embeddings/{shard.key}.parquet; "
                    "give their common parent folder as one INPUT"
                )
            found[shard.key] = shard
    return sorted(found.values(), key=lambda shard: natural_key(shard.key))


def _expand(name: str) -> Iterable[Shard]:
    filesystem, path = open_filesystem(name)
    what = f"input {name}: cannot be listed"
    try:
        if _is_local(filesystem):
            return _listed(filesystem, path, name)
        return tried(what, lambda: _listed(filesystem, path, name))
    except ConnectionError as error:
        raise Stopped(f"{error}; run again when the store answers") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error) if str(error).startswith(what) else f"{what}: {error}") from None


def _listed(filesystem: Any, path: str, name: str) -> list[Shard]:
    filesystem.invalidate_cache()  # of an earlier call in this process
    # An existing path is meant literally, also when it holds a '[' or a '*'.
    if filesystem.exists(path):
        if filesystem.isfile(path):
            root, files = path.rpartition("/")[0], {path: filesystem.info(path)}
        else:
            root, files = path, _below(filesystem, path, path)
    elif _MAGIC_CHARACTERS.search(name):
        root = _MAGIC_CHARACTERS.split(path, maxsplit=1)[0].rpartition("/")[0]
        files = {}
        for hit, info in filesystem.glob(path, detail=True).items():
            if not _is_hidden(hit, root):
                found = {hit: info} if filesystem.isfile(hit) else _below(filesystem, hit, root)
                files |= {file: info for file, info in found.items() if _is_shard(file, root)}
    else:
        raise ConfigError(f"input {name}: does not exist; expected a Parquet file, a folder or a glob")
    return [_shard(filesystem, file, root, files[file]) for file in sorted(files)]


def _below(filesystem: Any, folder: str, root: str) -> dict[str, Any]:
    """Shards and what the listing says of them: asking for each one would take a request a shard."""
    return {file: info for file, info in filesystem.find(folder, detail=True).items() if _is_shard(file, root)}


def _is_shard(path: str, root: str) -> bool:
    return path.lower().endswith(SUFFIXES) and not _is_hidden(path, root)


def _is_hidden(path: str, root: str) -> bool:
    """Below a dot or ``_`` name, as Spark's bookkeeping is; ``_key=value`` is a partition all the same."""
    return any(part.startswith((".", "_")) and "=" not in part for part in PurePosixPath(_relative(path, root)).parts)


def _relative(path: str, root: str) -> str:
    return path[len(root) :].lstrip("/") if root and path.startswith(root.rstrip("/") + "/") else path.lstrip("/")


def _shard(filesystem: Any, path: str, root: str, info: dict[str, Any]) -> Shard:
    relative = _relative(path, root)
    key = relative[: -len(".parquet")] if relative.lower().endswith(".parquet") else relative
    if _is_local(filesystem):
        status = os.stat(path)
        return Shard(key, path, status.st_size, status.st_mtime_ns, partitions=_partitions(relative))
    return Shard(
        key,
        filesystem.unstrip_protocol(path),
        int(info.get("size") or 0),
        _modified_ns(info),
        partitions=_partitions(relative),
        etag=next((str(info[name]) for name in ("ETag", "etag", "blob_id") if info.get(name)), None),
    )


def _modified_ns(info: dict[str, Any]) -> int:
    """0 where the filesystem does not say."""
    stamp = next((info[n] for n in ("mtime", "LastModified", "last_modified", "updated", "created") if info.get(n)), 0)
    if isinstance(stamp, str):
        stamp = datetime.fromisoformat(stamp)
    return int((stamp.timestamp() if isinstance(stamp, datetime) else float(stamp)) * 1e9)


def _is_local(filesystem: Any) -> bool:
    return "file" in protocols(filesystem)


def _inside(path: str, folder: str) -> bool:
    return _place(path).startswith(folder.rstrip("/") + "/")


def _place(name: str) -> str:
    """One spelling for one place."""
    if not is_remote(name):
        return os.path.realpath(name.removeprefix("file://"))
    filesystem, path = open_filesystem(name)
    return str(filesystem.unstrip_protocol(path))


def _partitions(relative: str) -> dict[str, str | None]:
    pairs = (part.partition("=") for part in PurePosixPath(relative).parts[:-1] if "=" in part)
    return {key: None if value == HIVE_NULL else unquote(value) for key, _, value in pairs if key}


def open_parquet(path: str) -> pq.ParquetFile:
    """The file, local or remote; page checksums are verified where the writer left some.

    Raises:
        ShardError: it is not a readable Parquet file; the message says what it is instead, without the path.
    """
    try:
        source, buffer_bytes = _opened(path)
        # A buffer size makes the reader stream a column chunk instead of loading it whole; pre-buffering, on unless it
        # is turned off, would load the wanted columns of all row groups first (365 MB of a 362 MB file, against 7).
        return pq.ParquetFile(source, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True)
    except FileNotFoundError:
        raise ShardError("the file is gone; was it moved while the job ran?") from None
    except (PermissionError, ConnectionError) as error:
        raise ShardError(f"cannot be read: {error}") from None
    except (OSError, pa.ArrowException) as error:
        raise ShardError(_what_it_is(path, error)) from None


def _opened(path: str) -> tuple[Any, int]:
    """What pyarrow reads, and how much of each column at once."""
    filesystem, name = open_filesystem(path)
    if _is_local(filesystem):
        return name, READ_BUFFER_BYTES
    return RemoteFile(filesystem, name), REMOTE_READ_BUFFER_BYTES


def _what_it_is(path: str, error: Exception) -> str:
    filesystem, name = open_filesystem(path)

    def beginning() -> bytes:
        with filesystem.open(name, "rb") as file:
            return bytes(file.read(64))

    head = tried("cannot be read", beginning)
    if not head:
        return "the file is empty (0 bytes); expected Parquet"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data; run 'git lfs pull'"
    if not head.startswith(b"PAR1"):
        return f"not a Parquet file: it begins with {head[:8]!r}, expected b'PAR1'"
    return f"a damaged Parquet file ({' '.join(str(error).split())}); copy it again"


def check_shards(shards: Sequence[Shard], columns: Columns) -> Checked:
    """Read every footer and resolve the columns.

    Raises:
        ConfigError: no shard is readable with these columns, or an output column has different types in two shards.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        results = list(pool.map(lambda shard: _check(shard, columns), shards))
    good = [(shard, types) for shard, types, problem in results if problem is None]
    bad = [(shard, problem) for shard, _, problem in results if problem is not None]
    if not good:
        shard, problem = bad[0]
        more = f" (and {len(bad) - 1} more shards like it)" if len(bad) > 1 else ""
        raise ConfigError(f"{shard.path}: {problem}{more}")
    for name in output_columns(columns):
        _check_one_type(name, "--id-column" if name == columns.id else "--columns", good)
    return Checked([shard for shard, _ in good], bad)


def output_columns(columns: Columns) -> list[str]:
    """Input columns that stand in the output: the id, if it is one, and the carried ones."""
    return [*([columns.id] if columns.id else []), *columns.carried]


def _check_one_type(name: str, option: str, shards: Sequence[tuple[Shard, Types]]) -> None:
    """All output files together are one table. A column of nulls goes with every type."""
    typed = [(shard, types[name]) for shard, types in shards if not pa.types.is_null(types[name])]
    for shard, kind in typed[1:]:
        if kind != typed[0][1]:
            raise ConfigError(
                f"{option} {name}: {typed[0][1]} in {typed[0][0].path} but {kind} in {shard.path}; "
                "expected one type in all shards"
            )


def _check(shard: Shard, columns: Columns) -> tuple[Shard, Types, str | None]:
    try:
        with open_parquet(shard.path) as file:
            footer = file.metadata
            sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            known = replace(shard, num_rows=footer.num_rows, num_row_groups=len(sizes), parts=split(sizes))
            return known, check_columns(file.schema_arrow, columns, shard.partitions), None
    except ShardError as error:
        return shard, {}, str(error)
    except (OSError, pa.ArrowException) as error:
        return shard, {}, f"cannot be read: {' '.join(str(error).split())}"


def split(group_rows: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a large file: row groups together until they have ``PART_ROWS`` rows; none for a file of one part.

    The rule knows nothing but the file, so that whoever continues a run finds the same parts.
    """
    parts: list[Part] = []
    first_group = first_row = rows = 0
    for number, count in enumerate(group_rows):
        rows += count
        if rows >= PART_ROWS or (rows and number == len(group_rows) - 1):
            parts.append(Part(len(parts), first_group, number + 1, first_row, rows))
            first_group, first_row, rows = number + 1, first_row + rows, 0
    return tuple(parts) if len(parts) > 1 else ()


def check_columns(schema: pa.Schema, columns: Columns, partitions: dict[str, str | None]) -> Types:
    """The type of each output column, after making sure that every wanted column can be read.

    Raises:
        ShardError: a column is missing, repeats, or is of a type that holds no text.
    """
    text_type = field_type(schema, columns.text)
    if not is_text(text_type):
        raise ShardError(f"column '{columns.text}' is {text_type}; expected text (string or UTF-8 bytes)")
    types = {
        name: pa.string() if name in partitions else plain_type(field_type(schema, name))
        for name in output_columns(columns)
    }
    if columns.id is not None and pa.types.is_nested(types[columns.id]):
        raise ShardError(f"id column '{columns.id}' is {types[columns.id]}; expected one value a row")
    return types


def field_type(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column or dotted path; a column that is literally called so wins over a path."""
    hits = schema.get_all_field_indices(name)
    if len(hits) > 1:
        raise ShardError(f"{len(hits)} columns are called '{name}'; expected one")
    if hits:
        return schema.field(hits[0]).type
    head, *rest = name.split(".")
    if rest and len(schema.get_all_field_indices(head)) == 1:
        node: pa.DataType = schema.field(head).type
        for part in rest:
            if not pa.types.is_struct(node) or node.get_field_index(part) < 0:
                raise ShardError(f"column '{name}': '{head}' is {node} and has no field '{part}'")
            node = node.field(part).type
        return node
    known = [str(column) for column in schema.names]
    alike = [column for column in known if column.lower() == name.lower()]
    hint = f"did you mean '{alike[0]}'?" if alike else nearest(name, known) if known else "it has no columns at all"
    raise ShardError(f"no column '{name}'; {hint}")


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_null(kind)
    )


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without its encoding: dictionary, large and view flavours of one type count as the same."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind
