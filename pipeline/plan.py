"""The dry run: what a run would read, compute, take and leave, before it is started.

Rows come from the footers, token lengths from a sample (`sample.py`), seconds from batches of that sample, computed by
a worker that has loaded the model (`calibration.py`). What is predicted is the run of ``run.py``: its options are
resolved by the same functions, its windows and batches are planned by the same rule, and its shards are dealt out to
the devices in the same order.

The whole input is planned, as if nothing of it were finished. Texts that repeat are counted each time, though a run
computes them once a window. Nothing is written but ``plan.json``, and that only where it is asked for. Neither torch
nor faiss enters this process.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.batcher import plan_batches
from pipeline.calibration import cost_terms, windows
from pipeline.config import RunConfig
from pipeline.devices import num_gpus, resolve_devices
from pipeline.errors import ConfigError
from pipeline.indexer import plan_index
from pipeline.model import open_model
from pipeline.pool import QueryWorker
from pipeline.progress import Display, NoDisplay
from pipeline.reader import WINDOW_BYTES, WINDOW_ROWS
from pipeline.records import Shard
from pipeline.run import default_batch_tokens, encoder_settings, resolve_columns, vector_fields
from pipeline.sample import Sample, draw_sample
from pipeline.shards import check_shards, find_shards
from pipeline.storage import Storage, open_output
from pipeline.threads import available_cores
from pipeline.worker_settings import WorkerSettings

PLAN_FILE = "plan.json"
VERSION = 1
MIN_TIMED = 6  # batches below which one mean serves better than three coefficients
OTHER_LOAD = 0.15  # share of the time that no sample can tell: other load on the machine, its clock and its heat
WRITE_BYTES_PER_S = 200e6
COMPRESSED_SHARE = 0.85  # of float32 vectors in Parquet; measured on all-MiniLM-L6-v2, December 2026
SHARD_S = 0.05  # to open, flush and rename the files of a shard
INDEX_START_S = 1.0  # a process that loads faiss
INDEX_FLOPS_PER_CORE = 20e9
INDEX_KMEANS_ROUNDS = 10
HASH_BYTES = 16  # of a row in reuse/
INDEX_ROW_BYTES = 12  # of a row in the table of ids, beside the id
WORKER_GROWTH = 1.25  # its allocator goes on growing: 0.80 GB while timing, 1.00 after 43 batches (all-MiniLM-L6-v2)
COORDINATOR_BYTES = 200_000_000
INDEXER_BYTES = 250_000_000
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % band."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, half: float) -> Estimate:
        return cls(round(value, 3), round(max(0.0, value - half), 3), round(value + half, 3))

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class IndexPlan:
    """The index that a run would build.

    Attributes:
        factory: as ``index.json`` will say.
        size_bytes: of the index file; None for a factory whose size is not known here.
        num_train: vectors it trains on.
        warnings: the indexer's.
    """

    factory: str
    size_bytes: int | None
    num_train: int
    warnings: list[str] = field(default_factory=list)


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
    price_per_hour: float | None = None,
    save: bool = False,
    stand_in: str | None = None,
) -> Plan:
    """Plan the run of these options.

    Args:
        config: the options of the run.
        display: is told what is being done.
        price_per_hour: of the machine with all its devices, in whatever currency.
        save: write ``plan.json`` to the output, for the run to compare itself with.
        stand_in: see ``WorkerSettings``.

    Raises:
        ConfigError: as the run would, and where there is no row to plan for.
        ShardError: no shard could be read where the sample hit it.
        Stopped: the worker died.
    """
    display = display or NoDisplay()
    if price_per_hour is not None and price_per_hour < 0:
        raise ConfigError(f"--price-per-hour {price_per_hour}: expected 0 or more")
    output = open_output(config.output)
    columns, _ = resolve_columns(config)
    model = open_model(config.model, trust_remote_code=config.trust_remote_code)
    devices = resolve_devices(config.devices, num_gpus())
    checked = check_shards(find_shards(config.input, config.output), columns)
    encoder = encoder_settings(config, model, devices[0])
    rows = sum(shard.num_rows or 0 for shard in checked.shards)
    if not rows:
        raise ConfigError(f"input: the {len(checked.shards)} shards hold no row; there is nothing to plan")
    if config.index not in ("auto", "none"):
        plan_index(config.index, rows)  # a wrong factory is told before the model is loaded
    if save:
        output.prepare()
    display.line(f"{len(checked.shards)} shards, {rows:,} rows; reading a sample and loading the model")
    sample = draw_sample(checked.shards, columns)
    damaged = {shard.key for shard, _ in sample.damaged}
    shards = [shard for shard in checked.shards if shard.key not in damaged]
    window_rows = _window_rows(shards, sample)
    budget = config.max_batch_tokens or default_batch_tokens(devices[0])
    settings = WorkerSettings(
        encoder=encoder,
        max_batch_tokens=budget,
        long_texts=config.long_texts,
        chunk_overlap=config.chunk_overlap,
        stand_in=stand_in,
    )
    worker = QueryWorker(devices[0], settings, max(1, available_cores() // len(devices)))
    try:
        start = time.perf_counter()
        worker.start()
        load_s = time.perf_counter() - start
        display.line(f"model ready in {load_s:.1f} s; timing batches of {len(sample.texts):,} sampled rows")
        usual = int(np.median([min(shard.num_rows or 0, window_rows) for shard in shards if shard.num_rows]))
        answer = worker.ask(do="calibrate", texts=sample.texts, window_rows=usual)
    finally:
        worker.close()
    measured = Measured.of(answer, sample, budget, window_rows)
    ready = worker.ready
    bad = [*checked.bad, *sample.damaged]
    plan = _put_together(config, devices, shards, bad, sample, measured, ready, load_s, price_per_hour)
    if save:
        fields = {**vector_fields(config, model, encoder), **({"stand_in": stand_in} if stand_in else {})}
        save_plan(output, plan, ledger.fingerprint(fields))
    return plan


def _window_rows(shards: Sequence[Shard], sample: Sample) -> int:
    """Rows of a full window of the run."""
    longest = max(shard.num_rows or 0 for shard in shards)
    return min(WINDOW_ROWS, longest, max(1, math.ceil(WINDOW_BYTES / (sample.text_bytes + 16))))


@dataclass
class Measured:
    """What the worker found, and what follows from it for any number of rows.

    Attributes:
        pieces: (num_sampled_rows,) vectors of each row.
        weights: (num_sampled_rows,) sum 1: what share of all rows each stands for.
        lengths: (num_pieces,) tokens of each.
        dropped: (num_pieces,) tokens cut off each.
        spots: sampled rows of each spot, in order; empty where every row was read.
        coefficients: (3,) seconds of each of ``cost_terms``.
        scatter: 95 % band of the mean seconds of a batch, as a share.
        tokenize_s: a row.
    """

    pieces: NDArray[np.int64]
    weights: NDArray[np.float64]
    lengths: NDArray[np.int32]
    dropped: NDArray[np.int64]
    spots: list[int]
    padded: bool
    budget: int
    window_rows: int
    text_bytes: float
    coefficients: NDArray[np.float64]
    scatter: float
    num_timed: int
    tokenize_s: float
    peak_memory_bytes: int
    _known: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: dict[str, Any], sample: Sample, budget: int, window_rows: int) -> Measured:
        coefficients, scatter = fit_cost(np.array(answer["timed"], np.float64).reshape(-1, 4))
        spots = np.array([len(sample.texts)] if sample.every_row else sample.spots)
        return cls(
            weights=np.repeat(1 / (len(spots) * spots), spots),
            pieces=np.array(answer["pieces"], np.int64),
            lengths=np.array(answer["lengths"], np.int32),
            dropped=np.array(answer["dropped"], np.int64),
            spots=[] if sample.every_row else sample.spots,
            padded=bool(answer["padded"]),
            budget=budget,
            window_rows=window_rows,
            text_bytes=sample.text_bytes,
            coefficients=coefficients,
            scatter=scatter,
            num_timed=len(answer["timed"]),
            tokenize_s=float(answer["tokenize_s"]) / len(sample.texts),
            peak_memory_bytes=int(answer["peak_memory_bytes"]),
        )

    def tokens_a_row(self) -> tuple[float, float]:
        """Mean, and the half width of its 95 % band: from the scatter of the spots, 0 where every row was read."""
        owner = np.repeat(np.arange(len(self.pieces)), self.pieces)
        per_row = np.bincount(owner, weights=self.lengths, minlength=len(self.pieces))
        mean = float(self.weights @ per_row)
        if len(self.spots) < 2:
            return mean, mean if self.spots else 0.0
        means = np.add.reduceat(per_row, np.cumsum([0, *self.spots[:-1]])) / np.array(self.spots)
        return mean, half_width(means)

    def truncated_share(self) -> float:
        """Of all vectors, those whose text is cut."""
        weights = np.repeat(self.weights, self.pieces)
        return float(weights @ (self.dropped > 0) / weights.sum()) if len(weights) else 0.0

    def shard(self, num_rows: int) -> tuple[float, float]:
        """Batches of a shard of so many rows, and the seconds they take."""
        full, rest = divmod(num_rows, self.window_rows)
        terms = full * self._window(self.window_rows) + self._window(rest)
        # Windows are laid out from the sample as it is; where spots differ in size its rows stand for more or fewer.
        plain = float(self.lengths.sum()) / len(self.pieces)
        weight = self.tokens_a_row()[0] / plain if plain else 1.0
        return float(terms[2]) * weight, float(terms @ self.coefficients) * weight

    def _window(self, num_rows: int) -> NDArray[np.float64]:
        """(3,) ``cost_terms`` of all batches of a window; large ones are rounded, so that few differ."""
        if not num_rows:
            return np.zeros(3)
        rounded = num_rows if num_rows <= 256 else min(self.window_rows, math.ceil(num_rows / 256) * 256)
        if rounded not in self._known:
            laid_out = windows(self.pieces, rounded)
            terms = [
                cost_terms(self.lengths[window[batch]], padded=self.padded)
                for window in laid_out
                for batch in plan_batches(self.lengths[window], self.budget, padded=self.padded)
            ]
            self._known[rounded] = np.array(terms, np.float64).reshape(-1, 3).sum(axis=0) / len(laid_out)
        terms_of_window = self._known[rounded] * (num_rows / rounded)
        terms_of_window[2] = math.ceil(terms_of_window[2])
        return terms_of_window


def half_width(means: NDArray[np.float64]) -> float:
    """Of the 95 % band of the mean of spots in row order.

    Each spot stands in a part of the rows of its own, so only what differs between neighbours is chance; how the parts
    differ is not. (The successive difference estimator; it errs on the safe side.)
    """
    variance = float((np.diff(means) ** 2).mean()) / 2
    return student(len(means)) * math.sqrt(variance / len(means))


def student(num: int) -> float:
    """Half width of the 95 % band of a mean of ``num`` values in standard errors; within 2 % from 5 values on."""
    return 1.96 + 2.4 / max(1, num - 1) + 4.8 / max(1, num - 1) ** 2


def fit_cost(timed: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Non-negative least squares of seconds on ``cost_terms``.

    Args:
        timed: (n, 4) three terms and the seconds of each batch.

    Returns:
        (3,) coefficients, and the half width of the 95 % band of the mean, as a share.
    """
    if not len(timed):
        return np.zeros(3), 0.0
    terms, seconds = timed[:, :3], timed[:, 3]
    best, smallest = np.array([seconds.sum() / max(1.0, terms[:, 0].sum()), 0.0, 0.0]), math.inf
    scale = np.maximum(terms.max(axis=0), 1.0)
    for chosen in _subsets(3) if len(timed) >= MIN_TIMED else []:
        found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], seconds, rcond=None)[0] / scale[chosen]
        error = float(((terms[:, chosen] @ found - seconds) ** 2).sum())
        if (found >= 0).all() and error < smallest:
            best, smallest = np.zeros(3), error
            best[chosen] = found
    if len(timed) < 2 or not seconds.sum():
        return best, 1.0
    errors = terms @ best - seconds
    return best, student(len(timed)) * float(errors.std(ddof=1)) / math.sqrt(len(timed)) / float(seconds.mean())


def _subsets(num: int) -> list[list[int]]:
    sizes = range(num, 0, -1)
    return [list(chosen) for size in sizes for chosen in itertools.combinations(range(num), size)]


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
    index = _index_plan(config.index, vectors, dim)
    disk = _disk(config, sample, vectors, dim, index)

    write_s_a_row = vectors / rows * dim * 4 / WRITE_BYTES_PER_S
    on_cpu = devices[0] == "cpu"
    batches, costs = 0.0, []
    for shard in shards:
        count, seconds = measured.shard(shard.num_rows or 0)
        batches += count
        tokenize_s = measured.tokenize_s * (shard.num_rows or 0)
        # On a CPU both want the same cores; on a GPU the tokenizer runs beside it, and only the first window waits.
        first_s = measured.tokenize_s * min(shard.num_rows or 0, measured.window_rows)
        seconds = seconds + tokenize_s if on_cpu else max(seconds + first_s, tokenize_s)
        costs.append(seconds + write_s_a_row * (shard.num_rows or 0) + SHARD_S)
    embed_s = makespan(costs, len(devices))
    index_s = _index_seconds(index, vectors, dim) if index else 0.0
    relative = math.hypot(half / mean if mean else 0.0, measured.scatter, OTHER_LOAD)
    seconds_all = load_s + embed_s + index_s
    band = math.hypot(embed_s * relative, 0.5 * index_s, 0.3 * load_s)
    seconds_estimate = Estimate.around(seconds_all, min(band, 10 * seconds_all))
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
        seconds=seconds_estimate,
        load_s=round(load_s, 3),
        embed_s=round(embed_s, 3),
        index_s=round(index_s, 3),
        price_per_hour=price_per_hour,
        cost=seconds_estimate.times(price_per_hour / 3600) if price_per_hour is not None else None,
        memory_bytes=_memory(measured, devices, dim, index),
        disk_bytes=disk,
        index=index,
        rests_on=_rests_on(sample, measured, devices, index),
        warnings=_warnings(config, devices, index),
    )


def makespan(seconds: Sequence[float], num_devices: int) -> float:
    """When the last shard is done: each device takes the next shard as soon as it is free."""
    free_at = [0.0] * num_devices
    for cost in seconds:
        heapq.heapreplace(free_at, free_at[0] + cost)
    return max(free_at)


def _index_plan(requested: str, vectors: int, dim: int) -> IndexPlan | None:
    if requested == "none" or not vectors:
        return None
    chosen = plan_index(requested, vectors)
    return IndexPlan(chosen.factory, index_bytes(chosen.factory, vectors, dim), chosen.num_train, chosen.warnings)


def index_bytes(factory: str, vectors: int, dim: int) -> int | None:
    """Size of a FAISS index file, within a few percent; None for kinds whose size is not known here."""
    size = 8.0 * vectors  # the ids
    for part in factory.split(","):
        lists = re.fullmatch(r"IVF(\d+)(_HNSW\d+)?", part)
        graph = re.fullmatch(r"HNSW(\d+)", part)
        codes = _code_bytes(part, dim)
        if lists:
            size += int(lists[1]) * dim * 4
        elif graph:
            size += vectors * (8.0 * int(graph[1]) + 12) + (0 if f"{part}," in factory else 4 * dim * vectors)
        elif codes is not None:
            size += codes * vectors
        elif part not in ("IDMap", "IDMap2"):
            return None
    return round(size)


def _code_bytes(part: str, dim: int) -> float | None:
    fixed = {"Flat": 4.0, "SQ8": 1.0, "SQ6": 0.75, "SQ4": 0.5, "SQfp16": 2.0, "SQbf16": 2.0}
    if part in fixed:
        return fixed[part] * dim
    product = re.fullmatch(r"PQ(\d+)(?:x(\d+))?", part)
    return int(product[1]) * int(product[2] or 8) / 8 if product else None


def _index_seconds(index: IndexPlan, vectors: int, dim: int) -> float:
    """Three reads of the vectors, one write, training and assigning, exact neighbours of 200 queries."""
    found = re.search(r"IVF(\d+)", index.factory)
    lists = int(found[1]) if found else 0
    products = 2.0 * dim * (lists * (vectors + INDEX_KMEANS_ROUNDS * index.num_train) + 200 * vectors)
    moved = 3 * 4 * dim * vectors + 2 * (index.size_bytes or 4 * dim * vectors)
    return INDEX_START_S + moved / WRITE_BYTES_PER_S + products / (INDEX_FLOPS_PER_CORE * available_cores())


def _disk(config: RunConfig, sample: Sample, vectors: int, dim: int, index: IndexPlan | None) -> dict[str, int | None]:
    stored = 2 if config.embedding_dtype == "float16" else 4 * COMPRESSED_SHARE
    disk: dict[str, int | None] = {
        "embeddings": round(vectors * (dim * stored + sample.carried_bytes)),
        "reuse": vectors * HASH_BYTES,
    }
    if index is not None:
        disk["index"] = index.size_bytes and index.size_bytes + round(vectors * INDEX_ROW_BYTES)
    return {**disk, "total": None if None in disk.values() else sum(size or 0 for size in disk.values())}


def _memory(measured: Measured, devices: Sequence[str], dim: int, index: IndexPlan | None) -> int:
    window = measured.window_rows * (2 * 4 * dim + 3 * measured.text_bytes)
    embedding = COORDINATOR_BYTES + len(devices) * (WORKER_GROWTH * measured.peak_memory_bytes + window)
    indexing = 0.0
    if index is not None:
        indexing = COORDINATOR_BYTES + INDEXER_BYTES + (index.size_bytes or 0) + 2 * 4 * dim * index.num_train
    return round(max(embedding, indexing))


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


def short_bytes(size: float | None) -> str:
    if size is None:
        return "unknown"
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= pair[0]), (1, "B"))
    return f"{size / unit:,.1f} {name}"
