"""The dry run: what a run would read, compute, take and leave, before it is started.

Rows come from the footers, token lengths from a sample (`sample.py`), seconds from batches of that sample, computed by
a worker that has loaded the model (`calibration.py`); `forecast.py` computes what follows. What is predicted is the run
of ``run.py``: its options are resolved by the same functions, its windows and batches are planned by the same rule, and
its shards are dealt out to the devices in the same order.

The whole input is planned, as if nothing of it were finished. Texts that repeat are counted each time, though a run
computes them once a window. Nothing is written but ``plan.json``, and that only where it is asked for. Neither torch
nor faiss enters this process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeline import ledger
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.forecast import (
    OTHER_LOAD,
    Estimate,
    IndexPlan,
    Measured,
    disk_bytes,
    embedding,
    full_window_rows,
    index_plan,
    index_seconds,
    memory_bytes,
    whole_run,
)
from pipeline.index_choice import choices, index_options
from pipeline.memory import short_bytes
from pipeline.pool import QueryWorker
from pipeline.progress import Display, NoDisplay
from pipeline.records import Shard
from pipeline.run import resolve, vector_fields
from pipeline.sample import Sample, draw_sample
from pipeline.storage import Storage
from pipeline.threads import available_cores
from pipeline.worker_settings import WorkerSettings

PLAN_FILE = "plan.json"
VERSION = 1
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Plan:
    """What a run is expected to be.

    Attributes:
        num_shards, rows: readable shards and their rows.
        bad: those that would fail alone, and why.
        sampled_rows: rows that were read; ``every_row`` says that these are all.
        vectors, quarantined: rows of the output, and rows without text or tokens.
        tokens: of all texts, after the cut at the length limit.
        truncated_share: of the vectors, those whose text is cut.
        lengths: percentiles of tokens a vector, and the longest one seen.
        batches: forward passes.
        seconds: of the whole run, without ``--verify``; ``load_s``, ``embed_s`` and ``index_s`` are its parts.
        cost: ``seconds`` at ``price_per_hour``.
        memory_bytes: of all processes at once, while embedding or indexing, whichever needs more.
        disk_bytes: by what it holds; quarantine excluded.
        index: None where none is built.
        rests_on: what each figure comes from.
    """

    model: str
    devices: list[str]
    attention: str
    dtype: str
    dim: int
    max_batch_tokens: int
    num_shards: int
    bad: list[dict[str, str]]
    rows: int
    sampled_rows: int
    every_row: bool
    vectors: int
    quarantined: int
    tokens: Estimate
    truncated_share: float
    lengths: dict[str, int]
    batches: int
    seconds: Estimate
    load_s: float
    embed_s: float
    index_s: float
    price_per_hour: float | None
    cost: Estimate | None
    memory_bytes: int
    disk_bytes: dict[str, int | None]
    index: IndexPlan | None
    rests_on: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    config: RunConfig,
    display: Display | None = None,
    *,
    save: bool = False,
    stand_in: str | None = None,
) -> Plan:
    """Plan the run of these options.

    Args:
        config: the options of the run.
        display: is told what is being done.
        save: write ``plan.json`` to the output, for the run to compare itself with.
        stand_in: see ``WorkerSettings``.

    Raises:
        ConfigError: as the run would, and where there is no row to plan for.
        ShardError: no shard could be read where the sample hit it.
        Stopped: the worker died.
    """
    display = display or NoDisplay()
    job = resolve(config)
    output, checked, devices = job.output, job.checked, job.devices
    rows = sum(shard.num_rows or 0 for shard in checked.shards)
    if not rows:
        raise ConfigError(f"input: the {len(checked.shards)} shards hold no row; there is nothing to plan")
    if (options := index_options(config)) is not None and options.factory != "auto":
        choices(options, rows, 1)  # a wrong factory is told before the model is loaded
    if save:
        output.prepare()
    display.line(f"{len(checked.shards)} shards, {rows:,} rows; reading a sample and loading the model")
    sample = draw_sample(checked.shards, job.columns)
    damaged = {shard.key for shard, _ in sample.damaged}
    shards = [shard for shard in checked.shards if shard.key not in damaged]
    window_rows = full_window_rows(shards, sample)
    settings = WorkerSettings(
        encoder=job.encoder,
        max_batch_tokens=config.max_batch_tokens or 0,
        tune=True,
        long_texts=config.long_texts,
        chunk_overlap=config.chunk_overlap,
        stand_in=stand_in,
    )
    worker = QueryWorker(devices[0], settings, max(1, available_cores() // len(devices)))
    try:
        start = time.perf_counter()
        worker.start()
        load_s = time.perf_counter() - start - worker.ready["tune_s"]
        display.line(f"model ready in {load_s:.1f} s; timing batches of {len(sample.texts):,} sampled rows")
        usual = int(np.median([min(shard.num_rows or 0, window_rows) for shard in shards if shard.num_rows]))
        answer = worker.ask(do="calibrate", texts=sample.texts, window_rows=usual)
    finally:
        worker.close()
    measured = Measured.of(answer, sample, worker.ready["max_batch_tokens"], window_rows)
    ready = worker.ready
    bad = [*checked.bad, *sample.damaged]
    plan = _put_together(config, devices, shards, bad, sample, measured, ready, load_s, config.price_per_hour)
    if save:
        fields = {**vector_fields(config, job.model, job.encoder), **({"stand_in": stand_in} if stand_in else {})}
        save_plan(output, plan, ledger.fingerprint(fields))
    return plan


def _put_together(
    config: RunConfig,
    devices: list[str],
    shards: Sequence[Shard],
    bad: Sequence[tuple[Shard, str]],
    sample: Sample,
    measured: Measured,
    ready: dict[str, Any],
    load_s: float,
    price_per_hour: float | None,
) -> Plan:
    dim = int(ready["dim"])
    rows = sum(shard.num_rows or 0 for shard in shards)
    num_sampled, num_pieces = len(measured.pieces), len(measured.lengths)
    vectors = round(rows * float(measured.weights @ measured.pieces))
    mean, half = measured.tokens_a_row()
    tokens = Estimate.around(round(mean * rows), half * rows)
    index = index_plan(index_options(config), vectors, dim)
    batches, embed_s = embedding(measured, shards, devices, vectors, dim)
    index_s = index_seconds(index, vectors, dim) if index else 0.0
    seconds = whole_run(measured, load_s, embed_s, index_s)
    percentiles = np.percentile(measured.lengths, PERCENTILES, method="inverted_cdf") if num_pieces else [0, 0, 0]
    return Plan(
        model=config.model,
        devices=devices,
        attention=str(ready["attention"]),
        dtype=str(ready["dtype"]),
        dim=dim,
        max_batch_tokens=measured.budget,
        num_shards=len(shards),
        bad=[{"shard": shard.path, "reason": reason} for shard, reason in bad],
        rows=rows,
        sampled_rows=num_sampled,
        every_row=sample.every_row,
        vectors=vectors,
        quarantined=round(rows * float(measured.weights @ (measured.pieces == 0))),
        tokens=tokens,
        truncated_share=round(measured.truncated_share(), 6),
        lengths={
            **{f"p{at}": int(value) for at, value in zip(PERCENTILES, percentiles, strict=True)},
            "longest": int(measured.lengths.max(initial=0)),
        },
        batches=round(batches),
        seconds=seconds,
        load_s=round(load_s, 3),
        embed_s=round(embed_s, 3),
        index_s=round(index_s, 3),
        price_per_hour=price_per_hour,
        cost=seconds.times(price_per_hour / 3600) if price_per_hour is not None else None,
        memory_bytes=memory_bytes(measured, len(devices), dim, index),
        disk_bytes=disk_bytes(config.embedding_dtype, sample.carried_bytes, vectors, dim, index),
        index=index,
        rests_on=_rests_on(sample, measured, devices, index),
        warnings=_warnings(config, devices, index),
    )


def _rests_on(sample: Sample, measured: Measured, devices: Sequence[str], index: IndexPlan | None) -> list[str]:
    drawn = (
        "every row, tokenized"
        if sample.every_row
        else f"{len(sample.texts):,} rows from {len(sample.spots)} spots spread over all shards"
    )
    device = devices[0] + (" alone, the other devices taken as alike" if len(devices) > 1 else "")
    lines = [
        f"tokens, lengths, batches: {drawn}; repeats counted each time",
        f"time: the model's loading and {measured.num_timed} batches on {device}; ±{OTHER_LOAD:.0%} for other load",
        "time leaves out: --verify, waiting for a slow store",
    ]
    if index is not None:
        lines.append("index time: an allowance from its size, not measured")
    lines.append("memory: the worker's peak while timing and a window more, no GPU memory; disk: no quarantine")
    return lines


def _warnings(config: RunConfig, devices: Sequence[str], index: IndexPlan | None) -> list[str]:
    warnings = list(index.warnings) if index else []
    if config.devices == "auto" and list(devices) == ["cpu"]:
        warnings.append("no GPU found: planned for the CPU")
    if index is not None and index.size_bytes is None:
        warnings.append(f"the size of {index.factory} is not known; it is left out of memory and disk")
    return warnings


def save_plan(output: Storage, plan: Plan, fingerprint: str) -> None:
    output.write_json(PLAN_FILE, {"version": VERSION, "fingerprint": fingerprint, **plan.to_dict()})


def planned(output: Storage, fingerprint: str) -> dict[str, float] | None:
    """Tokens and seconds that a plan of this output and configuration expected."""
    document = output.read_json(PLAN_FILE)
    if not isinstance(document, dict) or document.get("fingerprint") != fingerprint:
        return None
    return {"tokens": document["tokens"]["value"], "seconds": document["seconds"]["value"]}


def describe_plan(plan: Plan) -> list[tuple[str, str]]:
    """(what, in words) for a person."""
    tokens, seconds = plan.tokens, plan.seconds
    known = "every row read" if plan.every_row else f"{tokens.low:,.0f}-{tokens.high:,.0f}, 95 %"
    shown = ", ".join(f"{name} {value}" for name, value in plan.lengths.items())
    parts = f"{short_time(plan.load_s)} to load the model, {short_time(plan.embed_s)} to embed"
    lines = [
        ("shards", f"{plan.num_shards:,} readable, {len(plan.bad):,} bad"),
        ("rows", f"{plan.rows:,}: {plan.vectors:,} vectors of {plan.dim}, {plan.quarantined:,} rows quarantined"),
        ("tokens", f"{tokens.value:,.0f} ({known}), {plan.truncated_share:.1%} of the texts truncated"),
        ("lengths", f"{shown} tokens"),
        ("batches", f"{plan.batches:,} of up to {plan.max_batch_tokens:,} tokens"),
        (
            "time",
            f"{short_time(seconds.value)} ({short_time(seconds.low)} to {short_time(seconds.high)}) on "
            f"{','.join(plan.devices)}: {parts}" + (f", {short_time(plan.index_s)} to index" if plan.index else ""),
        ),
    ]
    if plan.cost is not None:
        cost = plan.cost
        lines.append(("cost", f"{cost.value:,.2f} ({cost.low:,.2f} to {cost.high:,.2f}) at {plan.price_per_hour}/h"))
    names = ", ".join(f"{name} {short_bytes(size)}" for name, size in plan.disk_bytes.items() if name != "total")
    lines.append(("memory", short_bytes(plan.memory_bytes)))
    lines.append(("disk", f"{short_bytes(plan.disk_bytes['total'])}: {names}"))
    lines.append(("index", f"{plan.index.factory}, {short_bytes(plan.index.size_bytes)}" if plan.index else "none"))
    return lines + [("rests on" if not number else "", line) for number, line in enumerate(plan.rests_on)]


def short_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
