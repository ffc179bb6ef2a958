"""Output folders -> what their jobs have done, what it took, and what is left, as one plain document.

Read are ``run.json``, ``runs/``, ``plan.json``, the commit records of shards and parts, ``index/index.json`` and
``certificate.json``: no vector, no input, no lock, and nothing is written. So a report can be made from any machine
that sees the output, as often as one likes, while the job is running or long after it.

What is counted: a *record* is of a finished shard, or of a finished part of a large shard that is not finished itself.
What is in work has no record and is not in any figure. Whether the files that a record names are there as they were
written is the business of ``verify``. A shard that left the input counts until ``--prune`` removes it, and which shards
are missing stands nowhere in an output, so only their number is known.

The document of ``--json``; keys stay, others may be added. None where something is not known; times are UTC.

    version, made, price_per_hour     of this report
    jobs[]                            one an output, in the order given
      output, fingerprint, model, dim, dtypes, attentions, options
      state                           waiting: no record yet · running · silent: no record for much longer than one
                                      takes · stopped: the run ended before all was done · embedded: all shards, but no
                                      index of them · finished
      state_text, warnings
      runs[]                          the last one, or the last of each rank: rank, host, began; ended, exit_code,
                                      outcome, reason, retries, failed[] where it lived to say so
      index                           factory, vectors, recall_at_10, latency_ms, bytes, created; current: of these rows
      certificate                     ok, created, num_faults, faults (the first); current: no record is younger
      verdict                         what bounded it, in a sentence; empty where too little was computed
      plan                            expected beside actual: tokens, embed_s, cost (of embed_s); whole: all is done
      slowest[], latest[], workers[]  at most 10, 10, 20 of them; num_workers says how many there are
      throughput                      bins (at_s, tokens_per_s, devices) of bin_s on an axis of length_s that leaves out
                                      stops; segments (at_s, began, length_s) tie the axis to the clock
      and what a total has:
    total                             of all jobs; jobs and states count them
      shards                          expected, done, in_parts (begun, not finished), left
      rows                            expected, done, left, vectors, quarantined by reason, num_quarantined
      texts                           different (in a window), duplicates, reused, truncated
      tokens                          computed (real ones, what the speed and cost are of), dropped, efficiency
      lengths                         texts by number of tokens, "32" are 17 to 32
      time                            began, last_record, age_s; worked_s: at least one device was at work;
                                      device_s: summed over devices; computed_s: of that, the device computed
      speed                           tokens_per_s, rows_per_s: by worked_s; tokens_per_device_s: by device_s;
                                      recent_tokens_per_s, recent_rows_per_s: over the last recent_s
      eta_s                           rows left by the recent rate; a job that is not running has none
      cost                            total, per_million_tokens, source: records (the price was known to the run: model
                                      loading and index are not in it) or --price-per-hour (of a machine, for the
                                      machine_s in which it had work); num_unpriced records are not in it
      stages[]                        name, seconds, share: exclusive, they sum to device_s
      beside                          seconds of other threads and processes meanwhile, by stage
      device_idle, peak_share, oom_splits
      damaged                         count, first[] (record, reason): they are in no figure
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.records import Counters
from pipeline.report_records import Record, Seen, duration, epoch, iso, look
from pipeline.report_shards import latest, slowest, workers
from pipeline.report_time import STOP_S, Times, covered_s, segments, throughput, times
from pipeline.storage import open_output
from pipeline.telemetry import rate
from pipeline.verdict import Load, verdict

VERSION = 1
STATES = ("waiting", "running", "silent", "stopped", "embedded", "finished")
MAX_FAILURES = 5  # in words
MAX_NAMED = 20  # damaged records and faults in the document
SILENT_S = 120.0  # and at least SILENT_TIMES the longest of the recent records
SILENT_TIMES = 4
RECENT_S = 60.0  # and at least RECENT_TIMES the usual record
RECENT_TIMES = 5


def make_report(
    directories: Sequence[str], *, price_per_hour: float | None = None, now: float | None = None
) -> dict[str, Any]:
    """The document described above.

    Args:
        directories: output folders or URLs; one that is given twice counts once.
        price_per_hour: of a machine with all its devices, in place of what the records say; each host name is one.
        now: seconds since 1970; the clock's where it is not given.

    Raises:
        ConfigError: one of them is no output, or its store refuses.
        OutputError: a store does not answer.
    """
    now = time.time() if now is None else now
    stores = {str(store.root): store for store in map(open_output, directories)}
    seen = [look(store) for store in stores.values()]
    jobs = [_job(one, price_per_hour, now) for one in seen]
    records = sorted((record for one in seen for record in one.records), key=lambda record: record.ended)
    total = _sums(records, price_per_hour, now)
    left = [job["eta_s"] for job in jobs if job["state"] == "running"]
    return {
        "version": VERSION,
        "made": iso(now),
        "price_per_hour": price_per_hour,
        "jobs": jobs,
        "total": {
            "jobs": len(jobs),
            "states": {state: n for state in STATES if (n := sum(job["state"] == state for job in jobs))},
            **total,
            "shards": {name: _sum(job["shards"][name] for job in jobs) for name in total["shards"]},
            "rows": {
                **total["rows"],
                **{name: _sum(job["rows"][name] for job in jobs) for name in ("expected", "left")},
            },
            "eta_s": max(left) if left and None not in left else None,
            "damaged": {
                "count": sum(len(one.damaged) for one in seen),
                "first": [damage for job in jobs for damage in job["damaged"]["first"]][:MAX_NAMED],
            },
        },
    }


def _job(seen: Seen, price_per_hour: float | None, now: float) -> dict[str, Any]:
    records, run, shards = seen.records, seen.run, seen.shards
    config, size = run.get("config") or {}, run.get("input") or {}
    sums = _sums(records, price_per_hour, now)
    expected, expected_rows = size.get("shards"), size.get("rows")
    index = _index(seen)
    state, text = _state(seen, index, now)
    left = None if expected_rows is None else max(0, expected_rows - sums["rows"]["done"])
    recent = sums["speed"]["recent_rows_per_s"]
    sums["shards"] |= {"expected": expected, "left": None if expected is None else max(0, expected - len(shards))}
    sums["rows"] |= {"expected": expected_rows, "left": left}
    if state == "running" and left is not None and recent:
        sums["eta_s"] = round(max(0.0, left / recent - sums["time"]["age_s"]), 1)
    return {
        "output": seen.output,
        "fingerprint": run.get("fingerprint"),
        "model": (run.get("model") or {}).get("name"),
        "dim": records[-1].dim if records else None,
        "dtypes": sorted({record.dtype for record in records}),
        "attentions": sorted({record.attention for record in records}),
        "options": {name: value for name, value in config.items() if value is not None},
        "state": state,
        "state_text": text,
        "runs": seen.runs,
        "warnings": [*_warnings(seen, expected), *_failures(seen.runs, state)],
        **sums,
        "verdict": _verdict(records, config.get("tokenizer_workers")),
        "index": index,
        "certificate": _certificate(seen),
        "plan": _plan(seen, sums, whole=state in ("embedded", "finished")),
        "slowest": slowest(records),
        "latest": latest(records),
        "workers": workers(records),
        "num_workers": len({(record.host, record.device) for record in records}),
        "throughput": throughput(records),
        "damaged": {
            "count": len(seen.damaged),
            "first": [
                {"record": f"{seen.output}/{name}", "reason": reason}
                for name, reason in list(seen.damaged.items())[:MAX_NAMED]
            ],
        },
    }


def _state(seen: Seen, index: dict[str, Any] | None, now: float) -> tuple[str, str]:
    """Its name, and a sentence. There is no lock to ask: a job is known by the age of what it wrote last."""
    expected, shards = (seen.run.get("input") or {}).get("shards"), seen.shards
    failed = any(failure["shard"] != "index" for run in seen.runs if run["ended"] for failure in run["failed"])
    if expected is not None and len(shards) >= expected and len(shards) == len(seen.records) and not failed:
        wanted = (seen.run.get("config") or {}).get("index") != "none" and any(one.counts.rows_out for one in shards)
        if wanted and index is None:
            return "embedded", "all shards are embedded, no index is built yet"
        if wanted and index is not None and not index["current"]:
            return "embedded", "all shards are embedded, the index is of other rows: it is not built again yet"
        return "finished", "all shards are embedded" + (", and in the index" if wanted else "")
    if seen.runs and len(seen.runs) >= seen.runs[0]["num_ranks"] and all(run["ended"] for run in seen.runs):
        return "stopped", _end(seen.runs, now)
    if not seen.records:
        return "waiting", "no shard is finished yet"
    last = max(record.ended for record in seen.records)
    limit = max(SILENT_S, SILENT_TIMES * max(record.ended - record.began for record in seen.records[-20:]))
    if now - last > limit:
        without = "" if expected is None else f"; shards without a record: {expected - len(shards):,}"
        return "silent", f"the last record is {duration(now - last)} old, much longer than one takes{without}"
    return "running", f"the last record is {duration(max(0.0, now - last))} old"


def _end(runs: Sequence[dict[str, Any]], now: float) -> str:
    """How the last run ended, or the last of the ranks that did not do all of their share."""
    ill = [run for run in runs if run["exit_code"]]
    run = (ill or list(runs))[-1]
    who = f"{len(ill)} of {len(runs)} ranks; the last, {run['rank']}," if run["rank"] else "the run"
    reasons = [run["reason"], *(failure["reason"] for failure in run["failed"])]
    why = next((f": {reason}" for reason in reasons if reason), "")
    ago = duration(max(0.0, now - epoch(run["ended"])))
    return f"{who} ended {ago} ago on {run['host']} with exit code {run['exit_code']}, {run['outcome']}{why}"


def _sums(records: Sequence[Record], price_per_hour: float | None, now: float) -> dict[str, Any]:
    """What is of one job and of all jobs alike."""
    counts = Counters()
    for record in records:
        counts.add(record.counts)
    load = Load.of(record.load for record in records)
    began, ended = times(records)
    worked_s = covered_s(began, ended)
    last = float(ended.max()) if len(records) else None
    lengths: dict[int, int] = {}
    for record in records:
        for limit, count in record.lengths.items():
            lengths[limit] = lengths.get(limit, 0) + count
    shards = {record.key for record in records if record.part is None}
    in_parts = {record.key for record in records if record.part is not None}
    return {
        "shards": {"expected": None, "done": len(shards), "in_parts": len(in_parts), "left": None},
        "rows": {
            "expected": None,
            "done": counts.rows,
            "left": None,
            "vectors": counts.rows_out,
            "extra_chunks": counts.extra_chunks,
            "quarantined": dict(sorted(counts.quarantined.items())),
            "num_quarantined": sum(counts.quarantined.values()),
        },
        "texts": {
            "different": counts.texts,
            "duplicates": counts.duplicates,
            "reused": counts.reused,
            "truncated": counts.truncated_texts,
        },
        "tokens": {
            "computed": counts.tokens,
            "dropped": counts.dropped_tokens,
            "efficiency": round(counts.tokens / counts.computed_tokens, 6) if counts.computed_tokens else None,
        },
        "lengths": {str(limit): lengths[limit] for limit in sorted(lengths)},
        "time": {
            "began": iso(float(began.min())) if len(records) else None,
            "last_record": None if last is None else iso(last),
            "age_s": None if last is None else round(max(0.0, now - last), 1),
            "worked_s": round(worked_s, 1),
            "device_s": round(load.wall_s, 3),
            "computed_s": round(load.busy["device"], 3),
        },
        "speed": {
            "tokens_per_s": rate(counts.tokens, worked_s),
            "rows_per_s": rate(counts.rows, worked_s),
            "tokens_per_device_s": rate(counts.tokens, load.wall_s),
            **_recent(records, began, ended),
        },
        "eta_s": None,
        "cost": _cost(records, counts.tokens, price_per_hour),
        "stages": [
            {"name": name, "seconds": round(seconds, 3), "share": round(seconds / load.wall_s, 6)}
            for name, seconds in sorted(load.stages.items(), key=lambda item: -item[1])
            if load.wall_s
        ],
        "beside": {name: round(seconds, 3) for name, seconds in sorted(load.busy.items())},
        "device_idle": round(load.idle, 4) if load.wall_s else None,
        "peak_share": None if load.peak_share is None else round(load.peak_share, 4),
        "oom_splits": counts.oom_splits,
    }


def _recent(records: Sequence[Record], began: Times, ended: Times) -> dict[str, float | None]:
    """The rate of late. Records count where they end, so that what several devices have in work makes it no lower."""
    if not records:
        return {"recent_tokens_per_s": None, "recent_rows_per_s": None, "recent_s": None}
    usual = float(np.median((ended - began)[-20:]))
    last, stretch = float(ended.max()), segments(began, ended, STOP_S)[-1]
    since = max(float(stretch[0]), last - max(RECENT_S, RECENT_TIMES * usual))
    seconds = max(1.0, last - since)
    ended_since = [record.counts for record, end in zip(records, ended, strict=True) if end > since]
    return {
        "recent_tokens_per_s": rate(sum(counts.tokens for counts in ended_since), seconds),
        "recent_rows_per_s": rate(sum(counts.rows for counts in ended_since), seconds),
        "recent_s": round(seconds, 1),
    }


def _cost(records: Sequence[Record], tokens: int, price_per_hour: float | None) -> dict[str, Any]:
    """Money, in the currency of the price."""
    hosts: dict[str, list[Record]] = {}
    for record in records:
        hosts.setdefault(record.host, []).append(record)
    machine_s = sum(covered_s(*times(own)) for own in hosts.values())
    priced = [record for record in records if record.cost is not None]
    if price_per_hour is not None:
        total: float | None = machine_s / 3600 * price_per_hour
        source, of_tokens, unpriced = "--price-per-hour", tokens, 0
    else:
        total = sum(record.cost or 0.0 for record in priced) if priced else None
        source, of_tokens = "records", sum(record.counts.tokens for record in priced)
        unpriced = len(records) - len(priced) if priced else 0
    return {
        "total": total,
        "per_million_tokens": total / of_tokens * 1e6 if total is not None and of_tokens else None,
        "source": source if total is not None else None,
        "num_unpriced": unpriced,
        "machine_s": round(machine_s, 1),
    }


def _verdict(records: Sequence[Record], tokenizer_workers: Any) -> str:
    """As the run says it; how many more processes it takes is left out where it is not known how many there were."""
    known = isinstance(tokenizer_workers, int)
    unknown = not known and any(record.device != "cpu" for record in records)
    said = verdict([record.load for record in records], tokenizer_workers if known else 0, 1)
    return said.partition(";")[0] if unknown and said.startswith("tokenizer-bound") else said


def _index(seen: Seen) -> dict[str, Any] | None:
    index = seen.index
    if index is None:
        return None
    inside = {(shard["key"], shard["sha256"]) for shard in index["shards"]}
    return {
        "factory": index["factory"],
        "vectors": index["ntotal"],
        "nprobe": index.get("nprobe"),
        "recall_at_10": index.get("recall_at_10"),
        "latency_ms": index.get("latency_ms"),
        "bytes": (index.get("bytes") or {}).get("index"),
        "created": index.get("created"),
        "num_shards": len(inside),
        "current": inside == {(record.key, record.sha256) for record in seen.shards},
        "warnings": index.get("warnings", []),
    }


def _certificate(seen: Seen) -> dict[str, Any] | None:
    certificate = seen.certificate
    if certificate is None:
        return None
    created, faults = certificate.get("created"), certificate["faults"]
    try:
        younger = sum(record.ended > epoch(str(created)) for record in seen.records)
    except ValueError:
        younger = len(seen.records)
    return {
        "ok": bool(certificate.get("ok")),
        "created": created,
        "num_faults": len(faults),
        "faults": [str(fault) for fault in faults[:MAX_NAMED]],
        "checked": certificate.get("checked"),
        "parity": certificate.get("parity"),
        "current": not younger and certificate.get("fingerprint") == seen.run.get("fingerprint"),
    }


def _plan(seen: Seen, sums: dict[str, Any], *, whole: bool) -> dict[str, Any] | None:
    plan = seen.plan
    if plan is None or plan.get("fingerprint") != seen.run.get("fingerprint"):
        return None
    price, embed_s = plan.get("price_per_hour"), plan["embed_s"]
    cost = None if price is None else embed_s / 3600 * price
    return {
        "tokens": {"expected": plan["tokens"]["value"], "actual": sums["tokens"]["computed"]},
        "embed_s": {"expected": embed_s, "actual": sums["time"]["worked_s"]},
        "cost": {"expected": cost, "actual": sums["cost"]["total"]},
        "whole": whole and not sums["texts"]["reused"],
    }


def _warnings(seen: Seen, expected: int | None) -> list[str]:
    done, warnings = len(seen.shards), list[str]()
    if expected is not None and done > expected:
        warnings.append(f"{done - expected} finished shards more than the input has now; --prune removes what left it")
    if seen.num_other:
        warnings.append(f"records of another configuration, in no figure: {seen.num_other}")
    if seen.plan is not None and seen.plan.get("fingerprint") != seen.run.get("fingerprint"):
        warnings.append("plan.json is of another configuration; it is left out")
    if len({record.dim for record in seen.records}) > 1:
        warnings.append("records of different dimensions lie in one output")
    return warnings


def _failures(runs: Sequence[dict[str, Any]], state: str) -> list[str]:
    """What the last runs could not do, as long as it is not done."""
    ended = [run for run in runs if run["ended"]]
    failed = [] if state == "finished" else [failure["reason"] for run in ended for failure in run["failed"]]
    left = sum(run["num_failed"] for run in ended) - MAX_FAILURES
    lost = sum(run["retries"] for run in ended)
    return [
        *failed[:MAX_FAILURES],
        *([f"and {left:,} failures more; the first of each run are in --json"] if failed and left > 0 else []),
        *([f"given out again in the last run, because a worker was lost: {lost:,} shards or parts"] if lost else []),
    ]


def _sum(values: Iterator[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)
