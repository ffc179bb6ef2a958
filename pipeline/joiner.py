"""The finished parts of a large shard into the files that any other shard has.

Parts are copied a row group at a time, in order, and checked against their commit records on the way. The parts are
removed when the shard's own record stands; until then another attempt finds them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import telemetry
from pipeline.errors import OutputError, ShardError
from pipeline.ledger import Ledger, is_of, parts_of
from pipeline.records import PARTS, Counters, Shard
from pipeline.storage import Storage
from pipeline.writer import TableFile

FOLDERS = {"output": "embeddings", "reuse": "reuse", "quarantine": "quarantine"}


def join(output: Storage, shard: Shard, dtype: str, fingerprint: str) -> dict[str, Any]:
    """Write the shard's files and commit them; returns the commit record.

    Args:
        output: where the parts are and the shard goes.
        shard: with its ``parts``, all of them finished.
        dtype: stored type of the vectors.
        fingerprint: of the run.

    Raises:
        ShardError: a part is missing or not as it was committed.
        OutputError: the output cannot be written.
    """
    ledger = Ledger(output)
    records = [ledger.record(shard.key, part.number) for part in shard.parts]
    finished = [r for r, part in zip(records, parts_of(shard), strict=True) if is_of(r, part, fingerprint)]
    if len(finished) < len(records):
        raise ShardError(f"{shard.path}: {len(records) - len(finished)} parts of it are not finished; run again")
    files = {
        kind: TableFile(output, shard.output_name(folder), dtype if kind == "output" else "")
        for kind, folder in FOLDERS.items()
    }
    try:
        for kind, file in files.items():
            for record in finished:
                if record.get(kind):
                    _append(file, output, record[kind])
        # From here on the old files are replaced: their record must go first, so that the two never disagree.
        ledger.forget(shard.key)
        published = {kind: files[kind].publish() for kind in ("reuse", "quarantine", "output")}
    except OSError as error:
        where = f"--output {output.root}: cannot write {shard.output_name('embeddings')}"
        raise OutputError(f"{where} ({error}); make room, then run again") from None
    finally:
        for file in files.values():
            file.discard()
    first = finished[0]
    published["output"] = {**(published["output"] or {}), **{k: first["output"][k] for k in ("dim", "chunked")}}
    record = ledger.commit(
        {**first, "shard": {"key": shard.key, **shard.identity()}, **published, **_added_up(finished)}
    )
    output.remove_tree(f"{PARTS}/{shard.key}")
    return record


def _append(file: TableFile, output: Storage, part: dict[str, Any]) -> None:
    rows = 0
    for table in _row_groups(output, part["path"]):
        rows += table.num_rows
        file.append(table)
    if rows != part["rows"]:
        output.remove(part["path"])
        raise ShardError(f"{output.location(part['path'])}: {rows} rows, its record says {part['rows']}; run again")


def _row_groups(output: Storage, name: str) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(output.source(name), pre_buffer=False, page_checksum_verification=True) as source:
            if not source.num_row_groups:
                yield source.schema_arrow.empty_table()  # a shard without a single vector still has a file
            for group in range(source.num_row_groups):
                yield source.read_row_group(group)
    except (OSError, pa.ArrowException) as error:  # a checksum that does not fit is an OSError to pyarrow
        output.remove(name)  # computed again by the next run
        raise ShardError(f"{output.location(name)}: damaged: {' '.join(str(error).split())}; run again") from None


def _added_up(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The measured part of the commit record: sums over the parts, wherever each was computed."""
    counts = Counters()
    for record in records:
        counts.add(Counters(**record["counts"]))
    seconds, busy = (_sums([record[name] for record in records]) for name in ("seconds", "busy_seconds"))
    flops = sum(record["flops"] for record in records)
    peak = max(record["peak_flops_per_s"] for record in records)
    wall_s, costs = seconds.pop("wall"), [record["cost"] for record in records]
    return {
        **telemetry.shard_telemetry(counts, seconds, busy, wall_s, flops, peak),
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
        "parts": len(records),
        "began": min(map(_began, records)),
        "finished": max(record["finished"] for record in records),
        "length_histogram": _sums([record["length_histogram"] for record in records]),
        "cost": None if None in costs else sum(costs),
        "counts": asdict(counts),
    }


def _began(record: dict[str, Any]) -> str:
    """When the work on a part began, as its record writes times; with several devices the parts overlap."""
    began = datetime.fromisoformat(record["finished"]) - timedelta(seconds=record["seconds"]["wall"])
    return began.strftime("%Y-%m-%dT%H:%M:%SZ")


def _sums(many: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(values.get(name, 0) for values in many) for name in dict.fromkeys(k for v in many for k in v)}
