"""The command ``embed-corpus``: parse, one call into ``pipeline``, print. Results go to stdout, all else to stderr.

What is heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pipeline.search import SearchResult
    from pipeline.telemetry import RunReport

app = typer.Typer(
    name="embed-corpus",
    help="Embed a corpus of Parquet shards with a sentence-transformers model, index the vectors and search them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]
Progress = Annotated[str, typer.Option(help="auto (a bar in a terminal, lines elsewhere), rich, plain or none")]
NO_OPTIONS_OF_A_RUN = ("inputs", "job", "as_json", "progress", "log_format")
IndexOption = Annotated[str | None, typer.Option(help="auto (default), none, or a FAISS factory string")]
MaxIndexRam = Annotated[
    str | None, typer.Option(help="memory the index may take, such as 8GB; default: half of what is granted here")
]
MinRecall = Annotated[float | None, typer.Option(help="recall@10 below which no index is published; default: 0.95")]
MaxLatency = Annotated[float | None, typer.Option("--max-latency-ms", help="median time of a search, one thread")]
Metric = Annotated[str | None, typer.Option(help="ip or l2, for vectors that are not normalised; default: ip")]
QUERIES_AT_ONCE = 1_024
MAX_SHOWN = 300  # characters of a value in a table; --json has all of it
LOG_FORMAT: ContextVar[str] = ContextVar("LOG_FORMAT", default="text")


def show_version(asked: bool) -> None:
    if asked:
        from pipeline import __version__

        print(f"embed-corpus {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None: ...


@app.command(epilog="Exit codes: 0 done, 2 wrong use, 65 bad data, 75 stopped and resumable, 78 wrong configuration.")
def run(
    inputs: Annotated[list[str] | None, typer.Argument(metavar="INPUT...", help="Parquet file, folder or glob")] = None,
    job: Annotated[str | None, typer.Option(help="YAML file of these options; the command line wins")] = None,
    output: Annotated[str | None, typer.Option(help="folder for embeddings, ledger and index")] = None,
    model: Annotated[str | None, typer.Option(help="sentence-transformers folder, or an id in the hub cache")] = None,
    text_column: Annotated[str | None, typer.Option(help="default: text; a dotted path reaches into a struct")] = None,
    id_column: Annotated[str | None, typer.Option(help="key of each row; default: <shard>:<row> as 'id'")] = None,
    columns: Annotated[str | None, typer.Option(help="columns carried through, comma separated")] = None,
    prompt: Annotated[str | None, typer.Option(help="text put before each document")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="a prompt of the model; default: as encode_document")] = None,
    max_length: Annotated[int | None, typer.Option(help="token limit a text; default: the model's")] = None,
    dimensions: Annotated[int | None, typer.Option(help="keep the first N dimensions, renormalised")] = None,
    normalize: Annotated[bool | None, typer.Option(help="L2-normalise; default: as the model says")] = None,
    dtype: Annotated[str | None, typer.Option(help="compute type: auto, float32, float16, bfloat16")] = None,
    embedding_dtype: Annotated[str | None, typer.Option(help="stored type: float32, float16 (half the size)")] = None,
    devices: Annotated[str | None, typer.Option(help="auto, cpu, cpu,cpu, cuda, cuda:0,cuda:1: a worker each")] = None,
    backend: Annotated[str | None, typer.Option(help="local (default), or ray: workers on a Ray cluster")] = None,
    attention: Annotated[
        str | None, typer.Option(help="auto, torch-varlen, flash-attn, grouped, padded; auto probes and picks")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="tokens computed at once; default: measured, about 2048 on a CPU, 32768 on a GPU")
    ] = None,
    tokenizer_workers: Annotated[
        str | None, typer.Option(help="tokenizer processes a device: a number, or auto (none on a CPU)")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile", help="torch.compile the model: for small models on a GPU")
    ] = None,
    index: IndexOption = None,
    max_index_ram: MaxIndexRam = None,
    min_recall: MinRecall = None,
    max_latency_ms: MaxLatency = None,
    metric: Metric = None,
    long_texts: Annotated[
        str | None, typer.Option(help="truncate (default; counted), or chunk: a row for each overlapping piece")
    ] = None,
    chunk_overlap: Annotated[int | None, typer.Option(help="tokens that pieces share; default: an eighth")] = None,
    prune: Annotated[bool | None, typer.Option("--prune", help="remove what is no longer in the input")] = None,
    verify: Annotated[bool | None, typer.Option("--verify", help="prove the output in the end, like 'verify'")] = None,
    rank: Annotated[int | None, typer.Option(help="which of --world-size this is; default: the scheduler's")] = None,
    world_size: Annotated[int | None, typer.Option(help="how many processes share the shards, on any machines")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="stop before a shard once so many are computed")] = None,
    max_cost: Annotated[float | None, typer.Option(help="stop before a shard once the run has cost so much")] = None,
    max_hours: Annotated[float | None, typer.Option(help="stop before a shard after so many hours")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="of the machine, all devices: adds the cost")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="run Python code that the model folder brings")
    ] = None,
    as_json: Json = False,
    progress: Progress = "auto",
    log_format: Annotated[str, typer.Option(help="text, or json: an object a line on stderr")] = "text",
) -> None:
    """Embed what is not embedded yet, then index. Running it again continues."""
    options = {key: value for key, value in locals().items() if key not in NO_OPTIONS_OF_A_RUN}
    stop_on_sigterm()
    with errors(log_format):
        from pipeline.config import build_config
        from pipeline.progress import make_display
        from pipeline.run import run as run_pipeline

        config = build_config(job, {"input": inputs, **options})
        report = run_pipeline(config, make_display(progress, log_format))
        show_report(report, as_json)
        for failure in report.failed:
            complain(failure.reason)
        show_faults(report.certificate)
        if report.stopped:
            complain(report.stopped)
    raise typer.Exit(report.exit_code)


def options_of_run(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the arguments and options of ``run`` before its own, as ``**options``."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        own = parameters(command)
        own.pop("options")
        shared = [value for name, value in parameters(run).items() if name not in (*without, *own)]
        shared = [value.replace(kind=inspect.Parameter.KEYWORD_ONLY) for value in shared]
        command.__signature__ = inspect.Signature([*shared, *own.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {**run.__annotations__, **command.__annotations__}
        return command

    def parameters(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(command, eval_str=True).parameters)  # evaluated: typer reads the annotations

    return extend


@app.command("plan")
@options_of_run("backend", "prune", "verify", "rank", "world_size", "max_tokens", "max_cost", "max_hours", "log_format")
def plan_command(
    *,
    as_json: Json = False,
    progress: Progress = "auto",
    **options: Any,
) -> None:
    """Say what 'run' would take, from a sample: tokens, time, cost, memory, disk, index. Embeds nothing.

    With --output the plan is also written there, as plan.json, and the run compares itself with it.
    """
    stop_on_sigterm()
    with errors():
        from pipeline.config import build_config
        from pipeline.errors import EXIT_DATA, EXIT_OK
        from pipeline.plan import describe_plan, make_plan
        from pipeline.progress import make_display

        job, save = options.pop("job"), options["output"] is not None
        # Without an output there is none to leave out of the input: nothing lies below os.devnull.
        config = build_config(job, {"input": options.pop("inputs"), **options}, {"output": os.devnull})
        plan = make_plan(config, make_display(progress), save=save)
        for warning in plan.warnings:
            warn(warning)
        if as_json:
            print(json.dumps(plan.to_dict(), indent=2, ensure_ascii=False))
        else:
            for name, text in describe_plan(plan):
                print(f"{name:<10}{text}")
        for shard in plan.bad:
            reason = shard["reason"]
            named = reason if reason.startswith(shard["shard"]) else f"{shard['shard']}: {reason}"
            say(named)
    raise typer.Exit(EXIT_DATA if plan.bad else EXIT_OK)


@app.command("index")
def index_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="the --output folder of a run")],
    index: IndexOption = None,
    max_index_ram: MaxIndexRam = None,
    min_recall: MinRecall = None,
    max_latency_ms: MaxLatency = None,
    metric: Metric = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="draw recall against latency; needs matplotlib")
    ] = None,
    as_json: Json = False,
    progress: Progress = "auto",
) -> None:
    """Build or update the index of DIR from its committed shards. Options not given are those of its run."""
    stop_on_sigterm()
    with errors():
        from pipeline.bench import check_plot
        from pipeline.errors import ConfigError
        from pipeline.index_choice import IndexOptions, parse_size
        from pipeline.index_plot import plot as write_plot
        from pipeline.ledger import read_run
        from pipeline.progress import make_display
        from pipeline.run import build_index
        from pipeline.storage import open_output

        if plot is not None:
            check_plot(plot)
        if index is not None and index.strip().lower() in ("", "none"):
            raise ConfigError(f"--index '{index}': nothing to build; expected auto or a factory such as IVF1024,SQ8")
        output = open_output(directory)
        run = read_run(output)
        told = run.get("config", {})
        asked = "auto" if told.get("index") in (None, "none") else told["index"]
        ram = max_index_ram or told.get("max_index_ram")
        options = IndexOptions(
            index or asked,
            told.get("min_recall", 0.95) if min_recall is None else min_recall,
            parse_size(ram) if ram else None,
            told.get("max_latency_ms") if max_latency_ms is None else max_latency_ms,
            told.get("metric") if metric is None else metric,  # type: ignore[arg-type]  # checked there
        )
        document = build_index(output, options, make_display(progress), thorough=True)
        expected, found = run.get("input", {}).get("shards", 0), len(document["shards"])
        if found < expected:
            warn(f"{expected - found} of {expected} shards are not finished and not indexed")
        if plot is not None:
            write_plot(document, plot)
        if as_json:
            print(json.dumps(document, indent=2))
        else:
            print(describe_index(document))


@app.command("verify")
def verify_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="the --output folder of a run")],
    sample: Annotated[int, typer.Option(min=1, help="rows that sentence-transformers embeds again")] = 256,
    as_json: Json = False,
    progress: Progress = "auto",
) -> None:
    """Prove DIR complete: every row, order and ids, checksums, vectors, index, and a sample's vectors compared."""
    stop_on_sigterm()
    with errors():
        from pipeline.errors import EXIT_DATA, EXIT_OK
        from pipeline.progress import make_display
        from pipeline.verify import verify

        certificate = verify(directory, sample=sample, progress=make_display(progress).line)
        print(json.dumps(certificate, indent=2, ensure_ascii=False) if as_json else describe_certificate(certificate))
        show_faults(certificate)
    raise typer.Exit(EXIT_OK if certificate["ok"] else EXIT_DATA)


@app.command("report")
def report_command(
    directories: Annotated[list[str], typer.Argument(metavar="DIR...", help="the --output folders of runs, or URLs")],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="also write one self-contained page")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="of a machine with all devices, for runs that were not told it")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what running or finished jobs did, cost and still need. Reads records only; takes no lock."""
    with errors():
        from pipeline.errors import EXIT_DATA, EXIT_OK
        from pipeline.report import make_report
        from pipeline.report_text import plain, renderables

        document = make_report(directories, price_per_hour=price_per_hour)
        if html is not None:
            from pipeline.report_page import write_page

            write_page(document, html)
        if as_json:
            print(json.dumps(document, indent=2))
        else:
            from rich.console import Console

            console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
            for part in renderables(document, console.width):
                console.print(part, soft_wrap=isinstance(part, str))
        damaged = document["total"]["damaged"]
        for damage in damaged["first"]:
            say(plain(f"{damage['record']}: {damage['reason']}"))
        if damaged["count"] > len(damaged["first"]):
            say(f"{damaged['count']:,} damaged files in all; they are in no figure")
    raise typer.Exit(EXIT_DATA if damaged["count"] else EXIT_OK)


@app.command("bench")
def bench_command(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Parquet file, folder or glob")],
    model: Annotated[str, typer.Option(help="sentence-transformers folder, or an id in the hub cache")],
    text_column: Annotated[str, typer.Option(help="column to embed; a dotted path reaches into a struct")] = "text",
    against: Annotated[str, typer.Option(help="sentence-transformers, or none")] = "sentence-transformers",
    rounds: Annotated[int, typer.Option(min=1, help="how often each takes its turn")] = 3,
    rows: Annotated[int | None, typer.Option(min=1, help="of each shard in proportion; default: all")] = None,
    batch_sizes: Annotated[str, typer.Option(help="of sentence-transformers; a process each")] = "32,8,16,64",
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="a bar chart; needs matplotlib")] = None,
    as_json: Json = False,
    progress: Progress = "auto",
) -> None:
    """Measure tokens/s here, beside sentence-transformers and the machine's limits. Leave it alone meanwhile."""
    stop_on_sigterm()
    with errors():
        from pipeline.bench import BenchConfig, bench, check_plot, parse_batch_sizes
        from pipeline.bench_report import plot as write_plot
        from pipeline.bench_report import tables
        from pipeline.progress import make_display

        config = BenchConfig(inputs, model, text_column, against, rounds, rows, parse_batch_sizes(batch_sizes))
        if plot is not None:
            check_plot(plot)
        document = bench(config, make_display(progress).line)
        if plot is not None:
            write_plot(document, plot)
        if as_json:
            print(json.dumps(document, indent=2, ensure_ascii=False))
            return
        from rich.console import Console

        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
        for part in tables(document):
            console.print(part, soft_wrap=isinstance(part, str))


@app.command("serve")
def serve_command(
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="the --output folder of a run; left out with --model")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of settings; options win")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on; default: 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; default: 8080; 0 takes a free one")] = None,
    model: Annotated[str | None, typer.Option(help="a model without an output: embeds, searches nothing")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    query_lane: Annotated[str | None, typer.Option(help="auto, onnx, onnx-int8 or torch")] = None,
    threads: Annotated[int | None, typer.Option(help="cores to compute with; default: all")] = None,
) -> None:
    """Answer queries over HTTP: embed texts, search the index of DIR. Ends with SIGTERM or Ctrl-C."""
    with errors():
        from pipeline.serving.settings import load_settings

        options = {"host": host, "port": port, "model": model, "device": device}
        options |= {"query_lane": query_lane, "threads": threads}
        settings = load_settings(config, os.environ, options)
        from pipeline.serving.server import serve

        serve(directory, settings)


@app.command()
def search(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="the --output folder of a run")],
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="what to look for")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="number of hits")] = 10,
    columns: Annotated[str | None, typer.Option(help="columns to show; default: the carried ones and the text")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="FILE", help="many: one a line (- is stdin), .jsonl, or .parquet with 'text'")
    ] = None,
    like: Annotated[str | None, typer.Option(metavar="ID", help="nearest to this row, instead of to a query")] = None,
    where: Annotated[str | None, typer.Option(help="only rows that pass: \"pos = 'n' and year > 1990\"")] = None,
    rerank: Annotated[
        int | None, typer.Option(metavar="N", help="score N candidates with the exact vectors, at least -k")
    ] = None,
    mmap: Annotated[bool, typer.Option("--mmap", help="leave the index on the disk; for one that is large")] = False,
    as_json: Json = False,
) -> None:
    """Embed QUERY as the model embeds queries and show the nearest rows."""
    if sum(given is not None for given in (query, like, queries)) != 1:
        raise typer.BadParameter("give one of QUERY, --like ID and --queries FILE")
    with errors():
        from pipeline.api import open_index
        from pipeline.queries import blocks, read_queries

        names = [name.strip() for name in columns.split(",") if name.strip()] if columns is not None else None
        index = open_index(directory, mmap=mmap)
        find = functools.partial(index.search, k=k, columns=names, where=where, rerank=rerank)
        if queries is None:
            result = find([query]) if query is not None else find(like=like)
            show_answers(None, result, as_json)
        else:
            for texts in blocks(read_queries(queries), QUERIES_AT_ONCE):
                show_answers(texts, find(texts), as_json)


def show_report(report: RunReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    from pipeline.telemetry import SHARD_COLUMNS, display

    for warning in report.warnings:
        warn(warning)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    if report.shards:
        table = Table(box=None, pad_edge=False)
        short = {"tokens_per_s": "tokens/s", "token_efficiency": "efficiency"}
        for name in SHARD_COLUMNS:
            table.add_column(short.get(name, name), justify="left" if name == "shard" else "right")
        for row in report.shard_rows():
            table.add_row(*map(display, row))
        console.print(table)
    console.print(report.sentence(), markup=False, soft_wrap=True)
    if report.verdict:
        console.print(f"The run was {report.verdict}.", markup=False, soft_wrap=True)
    if report.index is not None:
        console.print(describe_index(report.index), markup=False, soft_wrap=True)
    if report.certificate is not None:
        console.print(describe_certificate(report.certificate), markup=False, soft_wrap=True)


def describe_index(document: dict[str, Any]) -> str:
    recall = document["recall_at_10"]
    verb = "unchanged" if document.get("reused") else {"updated": "updated"}.get(document.get("built", ""), "built")
    return (
        f"Index {verb}: {document['ntotal']:,} vectors, {document['factory']}, recall@10 {recall['value']:.3f} "
        f"[{recall['low']:.3f}, {recall['high']:.3f}] on {recall['queries']} queries, "
        f"p50 {document['latency_ms']['p50']:.2f} ms, {document['bytes_per_vector']:,.0f} bytes a vector"
    )


def describe_certificate(certificate: dict[str, Any]) -> str:
    checked, parity = certificate["checked"], certificate["parity"]
    verdict = "Verified" if certificate["ok"] else f"NOT verified, {len(certificate['faults'])} faults"
    text = (
        f"{verdict}: {checked['rows']:,} rows in {checked['shards']:,} shards, {checked['vectors']:,} vectors, "
        f"{checked['quarantined']:,} rows quarantined, {checked['files']:,} files"
    )
    if "skipped" in parity:
        return f"{text}; not compared with sentence-transformers: {parity['skipped']}"
    overlap = "" if parity["rank_overlap_at_10"] is None else f", rank overlap@10 {parity['rank_overlap_at_10']:.3f}"
    return (
        f"{text}; against sentence-transformers in float32 on {parity['rows']:,} rows: cosine min "
        f"{parity['cosine_min']:.6f}, mean {parity['cosine_mean']:.6f}, "
        f"|difference| max {parity['max_abs_difference']:.1e}{overlap}"
    )


def show_faults(certificate: dict[str, Any] | None) -> None:
    for fault in certificate["faults"] if certificate else ():
        say(fault)


def show_answers(texts: list[str] | None, result: SearchResult, as_json: bool) -> None:
    """The hits of one query, or of each of ``texts``: a JSON list, or an object a line."""
    for warning in result.warnings:
        warn(warning)
    for number, hits in enumerate(result.to_list()):
        if not as_json:
            if texts is not None:
                print(f"{texts[number]}")
            show_hits(hits)
            if texts is not None:
                print()
        elif texts is None:
            print(json.dumps(hits, indent=2, ensure_ascii=False, default=str))
        else:
            hits = [{name: value for name, value in hit.items() if name != "query"} for hit in hits]
            print(json.dumps({"query": texts[number], "hits": hits}, ensure_ascii=False, default=str))


def show_hits(hits: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not hits:
        print("no row")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("score", justify="right")
    table.add_column("id", overflow="fold")
    extra = [name for name in hits[0] if name not in ("query", "rank", "score", "id", "shard", "row")]
    for name in [*extra, "shard:row"]:
        table.add_column(name, overflow="fold")
    for hit in hits:
        cells = [f"{hit['score']:.4f}", str(hit["id"]), *(shortened(str(hit[name])) for name in extra)]
        table.add_row(*cells, f"{hit['shard']}:{hit['row']}")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120).print(table)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


@contextmanager
def errors(log_format: str = "text") -> Iterator[None]:
    """An error a user can cause is one line and its exit code; anything else is our bug and keeps its traceback."""
    from pipeline.errors import EXIT_STOPPED, EmbedCorpusError

    LOG_FORMAT.set(log_format)
    try:
        yield
    except EmbedCorpusError as error:
        complain(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to continue")
        raise typer.Exit(EXIT_STOPPED) from None


def complain(message: str) -> None:
    """Say on stderr, and where Kubernetes looks for it, why the command did not end well."""
    from pipeline.termination import write_reason

    say(message)
    write_reason(message)


def warn(message: str) -> None:
    say(message, "warning")


def say(message: str, level: str = "error") -> None:
    """One line on stderr, in the form of the log."""
    if LOG_FORMAT.get() == "json":
        from pipeline.progress import json_line

        print(json_line(message, level, "message"), file=sys.stderr)
    else:
        print(f"{'warning' if level == 'warning' else 'embed-corpus'}: {message}", file=sys.stderr)


def stop_on_sigterm() -> None:
    """SIGTERM and SIGINT end the run in order: workers are ended, finished shards stay, exit code 75."""
    import signal

    def stop(number: int, frame: object) -> NoReturn:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)  # once is enough; the way out must not be interrupted
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)  # a shell starts background jobs with SIGINT ignored


def main() -> None:
    app()


if __name__ == "__main__":
    main()
