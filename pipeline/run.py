"""The main job, stage by stage: the page to read first.

    shards ──▶ reader ──▶ tokenizer ──▶ batcher ──▶ encoder ──▶ writer ──▶ ledger        indexer ──▶ search
               └──────────── one worker process a device (worker.py) ───────────┘

This is the coordinator: it checks everything that can be checked without a model, hands shards to workers, survives
their death, and starts the index when all shards are committed. It never imports torch or faiss.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import ledger, tracing
from pipeline.config import RunConfig
from pipeline.devices import num_gpus, resolve_devices, resolve_dtype
from pipeline.ending import noted as ending_noted
from pipeline.errors import EXIT_BUG, ConfigError, EmbedCorpusError, IndexingError, Stopped
from pipeline.index_choice import IndexOptions, index_options
from pipeline.ledger import Ledger
from pipeline.limits import Limits, Meter
from pipeline.model import ModelFolder, open_model
from pipeline.pool import Event, Pool, child_environment
from pipeline.progress import Display, NoDisplay
from pipeline.ranks import Rank, resolve_rank, share
from pipeline.records import CHUNK_COLUMNS, EncoderSettings, Shard
from pipeline.shards import Checked, Columns, check_shards, find_shards
from pipeline.storage import Storage, open_output
from pipeline.telemetry import RunReport
from pipeline.threads import auto_tokenizer_workers, available_cores
from pipeline.verdict import verdict
from pipeline.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from pipeline.ray_pool import RayCluster

DEFAULT_ID = "id"


def run(config: RunConfig, display: Display | None = None, *, stand_in: str | None = None) -> RunReport:
    """Embed what is not embedded yet, then build the index.

    Args:
        config: the options.
        display: shows progress.
        stand_in: see ``WorkerSettings``; for tests and measuring.

    Returns:
        The report; bad shards are in ``failed``, they do not raise.

    Raises:
        ConfigError: found before any model is loaded, where that is possible.
        Stopped: the output is in use, or workers died too often.
    """
    rank = resolve_rank(config.rank, config.world_size)
    with tracing.begin(config, rank) as trace, connected(config) as cluster:
        report = _run(config, rank, trace.display(display or NoDisplay()), trace, cluster, stand_in)
        trace.end(report)
    return report


def _run(
    config: RunConfig,
    rank: Rank | None,
    display: Display,
    trace: tracing.Trace,
    cluster: RayCluster | None,
    stand_in: str | None,
) -> RunReport:
    start = time.perf_counter()
    job = resolve(config, cluster)
    output, columns, model, devices, checked = job.output, job.columns, job.model, job.devices, job.checked
    encoder, indexing = job.encoder, index_options(config)
    if rank is not None and (config.prune or config.verify):
        raise ConfigError(f"--{'prune' if config.prune else 'verify'} is for a run of all shards; this is rank {rank}")
    warnings = output.prepare()
    with output.lock(shared=rank is not None) as ours, contextlib.ExitStack() as stack:
        if not ours:
            raise Stopped(f"--output {output.root}: another run holds its lock; wait for it, or use another --output")
        if rank is None:
            output.sweep()  # what other ranks are writing must stay
        fields = {**vector_fields(config, model, encoder), **({"stand_in": stand_in} if stand_in else {})}
        fingerprint = ledger.start_run(
            output, fields, layout_fields(config), *described(config, model, encoder, checked)
        )
        ending = stack.enter_context(ending_noted(output, rank))
        everything, checked = checked, share_of(checked, rank)
        if rank is not None:
            display.line(f"rank {rank}: {len(checked.shards):,} of {len(everything.shards):,} shards are its share")
        todo = Ledger(output).unfinished(checked.shards, fingerprint)
        if rank is None:
            Ledger(output).sweep_parts(unit.key for unit in todo if unit.parts)
        settings = WorkerSettings(
            encoder=encoder,
            output=str(output.root),
            columns=columns,
            id_name=job.id_name,
            embedding_dtype=config.embedding_dtype,
            max_batch_tokens=config.max_batch_tokens or ledger.read_budget(output, devices[0]),
            tune=True,
            fingerprint=fingerprint,
            long_texts=config.long_texts,
            chunk_overlap=config.chunk_overlap,
            tokenizer_workers=tokenizer_workers(config, devices, job.cores),
            price_per_hour=None if config.price_per_hour is None else config.price_per_hour / len(devices),
            offline=not any(shard.path.startswith("hf://") for shard in checked.shards),
            stand_in=stand_in,
        )
        report = ending.report = RunReport(
            output=str(output.root),
            model=config.model,
            device=",".join(devices),
            shards_total=len(checked.shards) + len(checked.bad),
            shards_skipped=len(checked.shards) - sum(unit.part is None for unit in todo),
            rank=str(rank or ""),
            price_per_hour=config.price_per_hour,
            warnings=warnings,
        )
        if config.devices == "auto" and set(devices) == {"cpu"} and todo:
            report.warnings.append("no GPU found: running on the CPU")
        note_removed(report, Ledger(output), everything, prune=config.prune)
        workers = pool_for(cluster, job, settings, fields, display)
        embed(todo, checked, workers, devices, settings, config.index, Meter(Limits.of(config), start), report, display)
        spare = (job.cores - len(devices) * (1 + settings.tokenizer_workers)) // len(devices)
        report.verdict = verdict(report.shards, settings.tokenizer_workers, spare)
        add_totals(report, output)
        if indexing is not None and report.total_rows_out and rank is None and not report.stopped:
            began = time.perf_counter()
            try:
                report.index = build_index(output, indexing, display)
                trace.index(report.index, began, time.perf_counter())
            except IndexingError as error:  # the vectors are safe; the report must still be shown
                report.add_failure("index", "bad", str(error))
        compare_with_plan(report, output, fingerprint, time.perf_counter() - start)
    if config.verify and not report.stopped:
        report.certificate = prove(output, display)
    report.wall_s = time.perf_counter() - start
    return report


def connected(config: RunConfig) -> contextlib.AbstractContextManager[RayCluster | None]:
    """The cluster that workers run on; None for this machine."""
    if config.backend == "local":
        return contextlib.nullcontext()
    from pipeline.ray_pool import RayCluster  # here: nobody else needs it

    return RayCluster()


@dataclass(frozen=True)
class Job:
    """A configuration with everything looked up that can be without a model being loaded.

    ``cores`` are those of all devices together.
    """

    output: Storage
    columns: Columns
    id_name: str
    model: ModelFolder
    devices: list[str]
    cores: int
    checked: Checked
    encoder: EncoderSettings


def resolve(config: RunConfig, cluster: RayCluster | None = None) -> Job:
    """Look up output, columns, model, devices and shards; nothing is written.

    Args:
        config: the options.
        cluster: whose devices they are; None for this machine's.

    Raises:
        ConfigError: one of them is not as the options say.
        Stopped: a store does not answer.
    """
    output = open_output(config.output)
    columns, id_name = resolve_columns(config)
    model = open_model(config.model, trust_remote_code=config.trust_remote_code)
    if cluster is None:
        devices, cores = resolve_devices(config.devices, num_gpus()), available_cores()
    else:
        devices, cores = cluster.resolve_devices(config.devices)
    checked = check_shards(find_shards(config.input, config.output), columns)
    return Job(output, columns, id_name, model, devices, cores, checked, encoder_settings(config, model, devices[0]))


def pool_for(
    cluster: RayCluster | None, job: Job, settings: WorkerSettings, fields: dict[str, Any], display: Display
) -> Pool:
    """The workers of a run, not started yet."""
    if cluster is None:
        return Pool(job.devices, settings, job.cores)
    hashes = {name: value for name, value in fields.items() if name.startswith("model_")}
    return cluster.pool(job.devices, job.cores, settings, job.model, hashes, job.checked.shards, display.line)


def embed(
    todo: Sequence[Shard],
    checked: Checked,
    workers: Pool,
    devices: Sequence[str],
    settings: WorkerSettings,
    factory: str,
    meter: Meter,
    report: RunReport,
    display: Display,
) -> None:
    """Give every shard, or its parts, to workers; what came of each shard goes into ``report``."""
    for shard, reason in checked.bad:
        report.add_failure(shard.path, "bad", reason)
    if not todo:
        return
    start = time.perf_counter()
    shards = [unit for unit in todo if unit.part is None]
    with display.embedding(shards) as show, workers as pool:
        for event in pool.process(todo):
            if event.kind == "ready":
                if not report.dim:
                    start = time.perf_counter()
                    note_encoder(report, event)
                    if not settings.max_batch_tokens:
                        assert event.values is not None
                        ledger.note_budget(open_output(settings.output), devices[0], event.values["max_batch_tokens"])
                    check_factory(settings.output, factory, report.dim, display)
            elif event.kind == "done":
                assert event.values is not None
                report.add_shard(event.values)
            elif event.kind == "lost":
                report.retries += 1
                report.warnings.append(event.reason)
            elif event.kind in ("bad", "gave up", "bug"):
                assert event.shard is not None
                report.add_failure(event.shard.path, event.kind, event.reason)
            show(event)
            if not report.stopped and (reached := meter.exceeded(event)):
                report.stopped = f"{reached}; run the same command again to continue"
                display.line(f"{reached}: what is in work is finished, nothing more is begun")
                pool.stop()
        if report.stopped and report.shards_done + report.shards_failed == len(shards) + len(checked.bad):
            report.stopped = ""  # it was reached by the last of them
    report.encode_wall_s = time.perf_counter() - start


def share_of(checked: Checked, rank: Rank | None) -> Checked:
    """What a rank does of it; all of it without one."""
    if rank is None:
        return checked
    mine = {shard.key for shard in share([*checked.shards, *(shard for shard, _ in checked.bad)], rank)}
    return Checked(
        [shard for shard in checked.shards if shard.key in mine],
        [(shard, reason) for shard, reason in checked.bad if shard.key in mine],
    )


def note_encoder(report: RunReport, event: Event) -> None:
    values = event.values or {}
    report.dim, report.attention, report.dtype = values["dim"], values["attention"], values["dtype"]
    reason = values["attention_reason"]
    if reason and reason not in report.warnings:
        report.warnings.append(reason)


def note_removed(report: RunReport, records: Ledger, checked: Checked, *, prune: bool) -> None:
    """Shards that were embedded once and are not in the input any more: removed with ``prune``, else reported."""
    present = {shard.key for shard in checked.shards} | {shard.key for shard, _ in checked.bad}
    gone = [key for key in records.keys() if key not in present]  # noqa: SIM118 - not a mapping
    if prune:
        for key in gone:
            records.remove(key)
        report.shards_pruned = len(gone)
    elif gone:
        names = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        report.warnings.append(
            f"{len(gone)} finished shards are not in the input any more ({names}); their vectors stay and are "
            "searched; --prune removes them"
        )


def resolve_columns(config: RunConfig) -> tuple[Columns, str]:
    """The columns to read, and the name of the key in the output.

    Raises:
        ConfigError: two output columns would have one name.
    """
    id_name = config.id_column or DEFAULT_ID
    carried = [name for name in dict.fromkeys(config.columns) if name != config.id_column]
    for name in [id_name, *carried]:
        if name == "embedding":
            raise ConfigError("--columns: 'embedding' is the name of the output's vectors; rename that input column")
    if config.long_texts == "chunk":
        for name in [id_name, *carried]:
            if name in CHUNK_COLUMNS:
                raise ConfigError(f"--columns: '{name}' is a column that --long-texts chunk adds; rename the input's")
    if id_name in carried:
        raise ConfigError(f"--columns: '{id_name}' is the name of the output's key; give --id-column {id_name} instead")
    return Columns(config.text_column, config.id_column, tuple(carried)), id_name


def encoder_settings(config: RunConfig, model: ModelFolder, device: str) -> EncoderSettings:
    max_length = config.max_length if config.max_length != model.max_length else None
    return EncoderSettings(
        model_path=str(model.path),
        device=device,
        dtype=resolve_dtype(config.dtype, device, model.checkpoint_dtype),
        attention=config.attention,
        prompt=model.document_prompt(config.prompt, config.prompt_name),
        max_length=max_length,
        dimensions=config.dimensions,
        normalize=config.normalize,
        trust_remote_code=config.trust_remote_code,
        compile=config.compile,
    )


def vector_fields(config: RunConfig, model: ModelFolder, encoder: EncoderSettings) -> dict[str, Any]:
    """All that changes a vector, by the name a user knows it under."""
    return {
        **model.fingerprint_fields(),
        "text_column": config.text_column,
        "prompt": encoder.prompt,
        "max_length": encoder.max_length,
        "dimensions": encoder.dimensions,
        "normalize": encoder.normalize,
        "dtype": encoder.dtype,
        "embedding_dtype": config.embedding_dtype,
    }


def layout_fields(config: RunConfig) -> dict[str, Any]:
    """All that changes the columns of an output file beside the vectors."""
    return {
        "id_column": config.id_column,
        "columns": config.columns,
        "long_texts": config.long_texts,
        "chunk_overlap": config.chunk_overlap,
    }


def described(
    config: RunConfig, model: ModelFolder, encoder: EncoderSettings, checked: Checked
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The ``config``, ``model`` and ``input`` parts of run.json."""
    query = {"path": str(model.path), "name": model.name, "query_prompt": model.query_prompt(), "dtype": encoder.dtype}
    inputs = [name if "://" in name else os.path.abspath(name) for name in config.input]
    # What only one of several ranks says, or only one day's run, is no property of the output.
    own = {"backend", "rank", "world_size", "max_tokens", "max_cost", "max_hours", "price_per_hour"}
    size = {
        "shards": len(checked.shards) + len(checked.bad),
        "rows": sum(shard.num_rows or 0 for shard in checked.shards),
    }
    return {**config.model_dump(exclude=own), "input": inputs}, query, size


def compare_with_plan(report: RunReport, output: Storage, fingerprint: str, took_s: float) -> None:
    """Only a run that did all that was planned can be compared."""
    from pipeline.plan import planned  # here: it resolves the options as this page does

    plan = planned(output, fingerprint)
    if plan is not None and report.shards_done and not report.shards_skipped and not report.counts.reused:
        report.planned = {**plan, "took_s": round(took_s, 3)}


def prove(output: Storage, display: Display) -> dict[str, Any]:
    """The certificate of a finished output, in short."""
    from pipeline.verify import short_form, verify  # here: it resolves the options as this page does

    return short_form(verify(str(output.root), progress=display.line))


def tokenizer_workers(config: RunConfig, devices: Sequence[str], cores: int) -> int:
    """Processes of each worker; 0 for none."""
    if config.tokenizer_workers != "auto":
        return config.tokenizer_workers
    return auto_tokenizer_workers(devices[0], cores, len(devices))


def add_totals(report: RunReport, output: Storage) -> None:
    """Rows of all finished shards, whichever run finished them."""
    for record in Ledger(output).commits():
        counts = record["counts"]
        report.total_rows += counts["rows"]
        report.total_rows_out += counts["rows_out"]
        report.total_quarantined += sum(counts["quarantined"].values())
        report.dim = report.dim or record["output"]["dim"]


def check_factory(output: str, factory: str, dim: int, display: Display) -> None:
    """Find out before hours of work that an index cannot be made.

    Raises:
        ConfigError: FAISS does not know the factory, or not for this many dimensions.
    """
    if factory not in ("auto", "none"):
        run_indexer([output, "--factory", factory, "--check-dim", str(dim)], display)


def build_index(output: Storage, options: IndexOptions, display: Display, *, thorough: bool = False) -> dict[str, Any]:
    """Build, update or reuse the index; returns the content of index.json.

    Args:
        output, options, display: see there.
        thorough: read an index that is there before it is kept.

    Raises:
        EmbedCorpusError: as the indexer said.
    """
    return run_indexer([str(output.root), *options.arguments(), *(["--thorough"] if thorough else [])], display)


def run_indexer(arguments: list[str], display: Display) -> dict[str, Any]:
    """The indexer in a process of its own: faiss and torch never share one. Returns what it prints.

    Raises:
        EmbedCorpusError: as the indexer said.
    """
    command = [sys.executable, "-m", "pipeline.indexer", *arguments]
    lines: list[str] = []
    environment = child_environment(available_cores())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if lines:  # the last line is held back: of a failure it is the message, and shown as such
                    display.line(lines[-1])
                lines.append(line.rstrip())
            answer = process.stdout.read()
        except BaseException:
            process.kill()
            raise
    code = process.returncode
    if code == 0:
        for line in lines[-1:]:
            display.line(line)
        document: dict[str, Any] = json.loads(answer)
        return document
    message = lines[-1].removeprefix("error: ") if lines else f"the indexer ended with exit code {code}"
    for kind in (ConfigError, IndexingError, Stopped):
        if code == kind.exit_code:
            raise kind(message)
    if code == EXIT_BUG:
        raise RuntimeError("\n".join(lines))
    if code == -signal.SIGKILL:
        raise Stopped(
            f"the indexer was killed ({message}); where memory ran out, give --max-index-ram or a smaller --index, "
            "and run the same command again"
        )
    raise EmbedCorpusError(f"the indexer {'was killed' if code < 0 else 'ended'} ({code}): {message}")
