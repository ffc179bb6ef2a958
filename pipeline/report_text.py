"""The document of ``report.py`` -> lines and tables for a terminal. Nothing is computed here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline.report_records import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

STAGES = {
    "encode": "computing",
    "wait_for_input": "waiting for input",
    "wait_for_writer": "waiting for the writer",
    "pack": "packing batches",
    "reuse": "looking up known vectors",
    "other": "other",
}
MAX_JOBS = 50
LABEL = 12  # columns


def renderables(document: dict[str, Any], width: int) -> Iterator[RenderableType]:
    """What a console of ``width`` columns prints: all of one job, or a line a job and what they add up to."""
    jobs = document["jobs"]
    if len(jobs) == 1:
        yield _facts(in_words(jobs[0]), width)
        if jobs[0]["slowest"]:
            yield ""
            yield _slowest(jobs[0]["slowest"])
        if jobs[0]["num_workers"] > 1:
            yield ""
            yield _workers(jobs[0])
        return
    yield _overview(jobs[:MAX_JOBS])
    if len(jobs) > MAX_JOBS:
        yield f"and {len(jobs) - MAX_JOBS:,} more; --json has them all"
    yield ""
    yield _facts([("total", states(document["total"]["states"])), *sums_in_words(document["total"])], width)


def in_words(job: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, in words) of one job."""
    model = f"{plain(job['model'] or '?')}" + ("" if job["dim"] is None else f", {job['dim']} dimensions")
    made = "".join(f", {', '.join(map(plain, job[name]))}" for name in ("dtypes", "attentions") if job[name])
    lines = [
        ("output", plain(job["output"])),
        ("model", model + made),
        ("state", f"{job['state']}: {job['state_text']}{eta_in_words(job)}"),
        *sums_in_words(job),
    ]
    if job["verdict"]:
        lines.append(("it was", job["verdict"]))
    lines += [("index", index_in_words(job)), ("verified", certificate_in_words(job))]
    if job["plan"] is not None:
        lines.append(("planned", plan_in_words(job["plan"])))
    return [*lines, *(("warning", warning) for warning in job["warnings"])]


def sums_in_words(sums: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, in words) of what is of one job and of several alike."""
    shards, rows, texts, tokens = (sums[name] for name in ("shards", "rows", "texts", "tokens"))
    times, speed = sums["time"], sums["speed"]
    begun = f", {shards['in_parts']:,} more in parts" if shards["in_parts"] else ""
    chunks = f", {rows['extra_chunks']:,} of them further chunks of a row" if rows["extra_chunks"] else ""
    truncated = f"{texts['truncated']:,} truncated ({tokens['dropped']:,} tokens dropped)"
    lines = [
        ("shards", f"{of(shards['done'], shards['expected'])} done{begun}"),
        ("rows", f"{of(rows['done'], rows['expected'])} done{percent_of(rows)}: {rows['vectors']:,} vectors{chunks}"),
    ]
    if not times["began"]:
        return lines
    lines += [
        ("quarantine", quarantine_in_words(rows)),
        ("texts", f"{texts['duplicates']:,} duplicates, {texts['reused']:,} reused, {truncated}"),
        ("tokens", f"{tokens['computed']:,} computed{efficiency_in_words(tokens)}"),
    ]
    recent = f", {speed['recent_tokens_per_s']:,.0f} in the last {duration(speed['recent_s'])}"
    lines += [
        ("speed", f"{speed['tokens_per_s']:,.0f} tokens/s, {speed['rows_per_s']:,.0f} rows/s{recent}"),
        (
            "time",
            f"{duration(times['worked_s'])} of work from {clock(times['began'])} to {clock(times['last_record'])} UTC; "
            f"{duration(times['device_s'])} summed over devices ({speed['tokens_per_device_s']:,.0f} tokens/s each)",
        ),
        ("stages", stages_in_words(sums)),
        ("device", device_in_words(sums)),
    ]
    if sums["cost"]["total"] is not None:
        lines.append(("cost", cost_in_words(sums["cost"])))
    return lines


def of(done: int, expected: int | None) -> str:
    return f"{done:,}" if expected is None else f"{done:,} of {expected:,}"


def percent_of(rows: dict[str, Any]) -> str:
    return f" ({share(min(1.0, rows['done'] / rows['expected']))})" if rows["expected"] else ""


def share(value: float) -> str:
    """``0.4%``, ``12%``; only all of it is 100%, and only nothing is 0%."""
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    return f"{value:.1%}" if 0 < value < 0.0995 or 0.99 <= value < 1 else f"{value:.0%}"


def eta_in_words(sums: dict[str, Any]) -> str:
    return "" if sums["eta_s"] is None else f", about {duration(sums['eta_s'])} left"


def states(found: dict[str, int]) -> str:
    return f"{sum(found.values()):,} jobs: " + ", ".join(f"{count:,} {state}" for state, count in found.items())


def quarantine_in_words(rows: dict[str, Any]) -> str:
    if not rows["num_quarantined"]:
        return "no rows"
    reasons = ", ".join(f"{count:,} {plain(reason)}" for reason, count in rows["quarantined"].items())
    return f"{rows['num_quarantined']:,} rows: {reasons}"


def efficiency_in_words(tokens: dict[str, Any]) -> str:
    value = tokens["efficiency"]
    return "" if value is None else f", {'no' if value == 1 else share(1 - value) + ' beside them'} padding"


def stages_in_words(sums: dict[str, Any]) -> str:
    """Those that took a thousandth of the time at least."""
    shown = [f"{stage_name(each['name'])} {share(each['share'])}" for each in sums["stages"] if each["share"] >= 0.001]
    return ", ".join(shown) or "?"


def stage_name(name: str) -> str:
    return STAGES.get(name, name.replace("_", " "))


def device_in_words(sums: dict[str, Any]) -> str:
    said = [] if sums["device_idle"] is None else [f"idle {share(sums['device_idle'])} of the time"]
    if sums["peak_share"] is not None:
        said.append(f"at {share(sums['peak_share'])} of its matrix-product peak while it computed")
    if sums["oom_splits"]:
        said.append(f"memory ended {sums['oom_splits']:,} times (batches were halved)")
    return ", ".join(said) or "?"


def cost_in_words(cost: dict[str, Any]) -> str:
    each = cost["per_million_tokens"]
    text = money(cost["total"]) + ("" if each is None else f", {money(each)} a million tokens")
    if cost["source"] == "records":
        missing = f"; {cost['num_unpriced']:,} records without a price are not in it" if cost["num_unpriced"] else ""
        return f"{text} (work on shards only{missing})"
    return f"{text} ({duration(cost['machine_s'])} of machines with work)"


def money(value: float) -> str:
    """Two decimals, more where the amount is small; its currency is that of the price."""
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def index_in_words(job: dict[str, Any]) -> str:
    index = job["index"]
    if index is None:
        return "none asked for" if job["options"].get("index") == "none" else "none yet"
    recall, latency = index["recall_at_10"], index["latency_ms"]
    text = f"{plain(index['factory'])}, {index['vectors']:,} vectors"
    if recall:
        text += f", recall@10 {recall['value']:.3f} [{recall['low']:.3f}, {recall['high']:.3f}]"
    if latency:
        text += f", p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms"
    return text if index["current"] else f"{text}; NOT of these rows"


def certificate_in_words(job: dict[str, Any]) -> str:
    certificate = job["certificate"]
    if certificate is None:
        return "not yet (embed-corpus verify)"
    when = f" at {clock(certificate['created'])} UTC" if certificate["created"] else ""
    number = certificate["num_faults"]
    found = "proven" if certificate["ok"] else f"NOT proven, {number:,} fault{'' if number == 1 else 's'}"
    return f"{found}{when}" + ("" if certificate["current"] else "; there are younger records")


def plan_in_words(plan: dict[str, Any]) -> str:
    tokens, embed_s, cost = plan["tokens"], plan["embed_s"], plan["cost"]
    priced = cost["expected"] is not None and cost["actual"] is not None
    return (
        f"{tokens['expected']:,.0f} tokens in {duration(embed_s['expected'])}"
        f"{' for ' + money(cost['expected']) if priced else ''}; {'it was' if plan['whole'] else 'so far'} "
        f"{tokens['actual']:,} in {duration(embed_s['actual'])}{' for ' + money(cost['actual']) if priced else ''}"
    )


def clock(moment: str) -> str:
    """``2026-12-01T13:36:53Z`` as ``2026-12-01 13:36:53``."""
    return plain(moment)[:19].replace("T", " ")


def plain(text: Any) -> str:
    """A name of a file may hold anything: what is no printable character is shown by its code."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in str(text))


def _facts(lines: list[tuple[str, str]], width: int) -> str:
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{what:<{LABEL}}",
            subsequent_indent=" " * LABEL,
            break_long_words=False,  # a path stays whole
            break_on_hyphens=False,
        )
        for what, text in lines
    )


def _table(names: list[str], left: int, rows: list[list[str]]) -> RenderableType:
    """A table whose first ``left`` columns are text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _overview(jobs: list[dict[str, Any]]) -> RenderableType:
    rows = [
        [
            plain(job["output"]),
            job["state"],
            of(job["shards"]["done"], job["shards"]["expected"]),
            percent_of(job["rows"]).strip(" ()"),
            f"{job['tokens']['computed']:,}",
            f"{job['speed']['tokens_per_s']:,.0f}",
            "" if job["cost"]["total"] is None else money(job["cost"]["total"]),
            "" if job["eta_s"] is None else duration(job["eta_s"]),
        ]
        for job in jobs
    ]
    return _table(["output", "state", "shards", "rows", "tokens", "tokens/s", "cost", "left"], 2, rows)


def _slowest(slow: list[dict[str, Any]]) -> RenderableType:
    rows = [
        [
            plain(row["shard"]),
            row["why"],
            f"{row['tokens_per_s']:,.0f}",
            duration(row["seconds"]),
            duration(row["lost_s"]),
        ]
        for row in slow
    ]
    return _table(["slowest shards", "why", "tokens/s", "took", "lost"], 2, rows)


def _workers(job: dict[str, Any]) -> RenderableType:
    rows = [
        [
            plain(row["host"]),
            plain(row["device"]),
            f"{row['records']:,}",
            f"{row['tokens']:,}",
            f"{row['tokens_per_device_s']:,.0f}",
            share(row["device_idle"]),
            clock(row["last_record"]),
        ]
        for row in job["workers"]
    ]
    names = ["host", "device", "records", "tokens", "tokens/s", "idle", "last record, UTC"]
    more = job["num_workers"] - len(rows)
    return _table(names, 2, [*rows, [f"and {more:,} more", *[""] * 6]] if more else rows)
