"""A file of queries -> their texts: one a line, JSON lines, or a column of a Parquet file."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, one_line

COLUMN = "text"
ROWS_AT_ONCE = 1_024


def read_queries(name: str) -> Iterator[str]:
    """Its queries, in order and read as they are wanted.

    Args:
        name: ``-`` for lines of stdin; a file that ends in ``.parquet`` with a column ``text``; in ``.jsonl`` or
            ``.ndjson`` with a string a line, or an object that has ``text``; any other has one query a line.

    Raises:
        ConfigError: it cannot be read, or holds something else; names the line.
    """
    try:
        if name.endswith(".parquet"):
            yield from _column(name)
        elif name == "-":
            yield from _lines(sys.stdin)
        else:
            with open(name, encoding="utf-8-sig") as file:
                yield from _objects(name, file) if name.endswith((".jsonl", ".ndjson")) else _lines(file)
    except OSError as error:
        raise ConfigError(f"--queries {name}: cannot be read ({error.strerror or one_line(error)})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--queries {name}: not UTF-8 ({error.reason} at byte {error.start})") from None


def blocks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of at most ``size``."""
    rest = iter(texts)
    while block := list(itertools.islice(rest, size)):
        yield block


def _lines(file: Iterable[str]) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file)


def _objects(name: str, file: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--queries {name}: line {number} is not JSON ({one_line(error)})") from None
        text = found.get(COLUMN) if isinstance(found, dict) else found
        if not isinstance(text, str):
            raise ConfigError(f"--queries {name}: line {number}: expected a string, or an object with '{COLUMN}'")
        yield text


def _column(name: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(Path(name)) as file:
            if COLUMN not in file.schema_arrow.names:
                raise ConfigError(f"--queries {name}: no column '{COLUMN}'; there are {file.schema_arrow.names}")
            row = 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[COLUMN]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise ConfigError(f"--queries {name}: row {row} of '{COLUMN}' is {text!r}; expected text")
                    yield text
                    row += 1
    except pa.ArrowException as error:
        raise ConfigError(f"--queries {name}: not a readable Parquet file ({one_line(error)})") from None
