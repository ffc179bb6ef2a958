"""The document of ``report.py`` -> one HTML page that needs nothing else: no network, no script, no font, no file.

It opens from a disk, a mail or a bucket, in light and dark, on a phone and on paper. Whatever comes from an output is
escaped: names of files may hold anything. The page stays small however many shards and jobs there are.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.report_chart import bar, compact, stacked, time_chart
from pipeline.report_records import duration
from pipeline.report_text import (
    certificate_in_words,
    clock,
    cost_in_words,
    device_in_words,
    efficiency_in_words,
    index_in_words,
    money,
    of,
    percent_of,
    plain,
    plan_in_words,
    share,
    stage_name,
    states,
)
from pipeline.storage import TEMPORARY_SUFFIX

MAX_JOBS = 20  # in full; the others have their line in the table of jobs
MAX_LINES = 500  # of that table
MAX_NAME = 120  # characters of a shard's name
STYLE = Path(__file__).with_name("report_page.css")
STAGE_ORDER = ("encode", "wait_for_input", "wait_for_writer", "pack", "reuse", "other")
BADGES = {
    "waiting": "no record yet",
    "running": "running",
    "silent": "killed or stalled",
    "stopped": "stopped",
    "embedded": "embedded, no index",
    "finished": "finished",
}
OF_STAGES = {
    "encode": "the device computes, or is waited for",
    "wait_for_input": "rows being read, texts being tokenized",
    "wait_for_writer": "vectors being written and committed",
    "pack": "texts being sorted and laid into batches",
    "reuse": "vectors of an earlier version being looked up",
    "other": "between batches and shards",
}


def write_page(document: dict[str, Any], file: str) -> None:
    """Write the page; a reader never sees half of one.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(os.path.abspath(file))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
    try:
        temporary.write_text(page(document), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"--html {file}: cannot be written ({error.strerror}); expected a file of yours") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def page(document: dict[str, Any]) -> str:
    """All of it."""
    jobs = document["jobs"]
    title = e(jobs[0]["output"]) if len(jobs) == 1 else f"{len(jobs):,} jobs"
    several = _several(document) if len(jobs) > 1 else ""
    details = "".join(_job(job, number, len(jobs)) for number, job in enumerate(jobs[:MAX_JOBS], 1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title} · embed-corpus report</title>\n<style>\n{STYLE.read_text('utf-8')}</style>\n</head>\n"
        "<body>\n<main>\n"
        f'<p class="made">embed-corpus report, made {e(clock(document["made"]))} UTC</p>\n'
        f"{several}{details}</main>\n<footer>{_notes(document)}</footer>\n</body>\n</html>\n"
    )


def e(value: Any) -> str:
    """Escaped, also for an attribute."""
    return escape(plain(value))


def name_of(shard: str) -> str:
    """A shard's name, the end of it where it is long."""
    text = plain(shard)
    return f"<bdi>{escape(text if len(text) <= MAX_NAME else '…' + text[-MAX_NAME:])}</bdi>"


def amount(value: float) -> str:
    """Whole below a million."""
    return f"{value:,.0f}" if value < 1e6 else compact(value)


def _several(document: dict[str, Any]) -> str:
    jobs, total = document["jobs"], document["total"]
    rows = [
        [
            f'<a href="#job-{number}">{e(job["output"])}</a>' if number <= MAX_JOBS else e(job["output"]),
            _badge(job),
            e(of(job["shards"]["done"], job["shards"]["expected"])),
            e(percent_of(job["rows"]).strip(" ()")),
            f"{job['tokens']['computed']:,}",
            f"{job['speed']['tokens_per_s']:,.0f}",
            "" if job["cost"]["total"] is None else money(job["cost"]["total"]),
            "" if job["eta_s"] is None else duration(job["eta_s"]),
        ]
        for number, job in enumerate(jobs[:MAX_LINES], 1)
    ]
    heads = ["output", "state", "shards", "rows", "tokens", "tokens/s", "cost", "left"]
    more = f"<p>and {len(jobs) - MAX_LINES:,} more</p>" if len(jobs) > MAX_LINES else ""
    return (
        f"<header><h1>{e(states(total['states']))}</h1></header>{_progress(total)}{_tiles(total)}"
        f'<section class="wide"><h2>Jobs</h2>{_table(heads, rows, left=2)}{more}</section>'
    )


def _job(job: dict[str, Any], number: int, of_jobs: int) -> str:
    level = "h1" if of_jobs == 1 else "h2"
    return (
        f'<article id="job-{number}"><header><{level}>{e(job["output"])}</{level}>'
        f"<p>{_badge(job)} {e(job['state_text'])}</p></header>"
        f"{_alerts(job)}{_progress(job)}{_tiles(job)}"
        f'<div class="sections">{_throughput(job)}{_stages(job)}{_lengths(job)}{_slowest(job)}{_workers(job)}'
        f"{_rows(job)}{_result(job)}{_latest(job)}{_made_of(job)}</div></article>"
    )


def _badge(job: dict[str, Any]) -> str:
    return f'<span class="badge {job["state"]}">{BADGES[job["state"]]}</span>'


def _alerts(job: dict[str, Any]) -> str:
    alerts = list(job["warnings"])
    damaged, certificate = job["damaged"], job["certificate"]
    if damaged["count"]:
        names = "; ".join(f"{damage['record']}: {damage['reason']}" for damage in damaged["first"][:3])
        alerts.append(f"{damaged['count']:,} damaged files, in no figure: {names}")
    if certificate and not certificate["ok"]:
        alerts.append(f"not proven: {'; '.join(certificate['faults'][:3])}")
    if job["index"] and not job["index"]["current"] and job["state"] == "embedded":
        alerts.append("the index is of other rows; `embed-corpus index` builds it")
    items = "".join(f"<li>{e(alert)}</li>" for alert in alerts)
    return f'<ul class="alerts">{items}</ul>' if alerts else ""


def _progress(sums: dict[str, Any]) -> str:
    rows, shards = sums["rows"], sums["shards"]
    if not rows["expected"]:
        return ""
    begun = f", {shards['in_parts']:,} in parts" if shards["in_parts"] else ""
    left = f"{rows['left']:,} rows left" if rows["left"] else "no row left"
    return (
        f'<div class="progress">{bar(rows["done"] / rows["expected"])}'
        f"<p><strong>{share(min(1.0, rows['done'] / rows['expected']))}</strong> of the rows, "
        f"{e(of(shards['done'], shards['expected']))} shards{begun}; {left}</p></div>"
    )


def _tiles(sums: dict[str, Any]) -> str:
    rows, tokens, speed, times, cost = (sums[name] for name in ("rows", "tokens", "speed", "time", "cost"))
    tiles = [
        ("rows", amount(rows["done"]), f"of {rows['expected']:,}" if rows["expected"] else "done"),
        ("tokens", amount(tokens["computed"]), "computed" + efficiency_in_words(tokens)),
    ]
    if times["began"]:
        lately = f"{amount(speed['recent_tokens_per_s'])} in the last {duration(speed['recent_s'])}"
        tiles.append(("tokens/s", amount(speed["tokens_per_s"]), lately))
    if sums["eta_s"] is not None:
        tiles.append(("time left", duration(sums["eta_s"]), f"after {duration(times['worked_s'])} of work"))
    elif times["began"]:
        tiles.append(("time", duration(times["worked_s"]), f"of work; {duration(times['device_s'])} over all devices"))
    if cost["total"] is not None:
        each = cost["per_million_tokens"]
        tiles.append(("cost", money(cost["total"]), "" if each is None else f"{money(each)} a million tokens"))
    if sums["device_idle"] is not None:
        peak = sums["peak_share"]
        said = "the device computed" if peak is None else f"computed, at {share(peak)} of the peak"
        tiles.append(("device busy", share(1 - sums["device_idle"]), said))
    cells = (f"<div><dt>{e(what)}</dt><dd>{e(value)}<small>{e(said)}</small></dd></div>" for what, value, said in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _section(title: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h3>{e(title)}</h3>{content}</section>' if content else ""


def _throughput(job: dict[str, Any]) -> str:
    throughput = job["throughput"]
    if not throughput["bins"]:
        return ""
    several = max(one["devices"] for one in throughput["bins"]) >= 1.5
    note = f"Tokens a second, each bar {duration(throughput['bin_s'])}; time in UTC."
    if len(throughput["segments"]) > 1:
        note += " Dashed lines: the axis is cut where nothing was done for long."
    if job["state"] == "running" and several:
        note += " The end is low while shards are in work: they count when they are finished."
    charts = time_chart(throughput, "tokens_per_s", "tokens/s", axis=not several)
    if several:
        charts += '<p class="note">Devices at work, on average.</p>'
        charts += time_chart(throughput, "devices", "devices", short=True)
    return _section("Throughput over time", f'<p class="note">{e(note)}</p>{charts}', "wide")


def _stages(job: dict[str, Any]) -> str:
    by_name = {stage["name"]: stage for stage in job["stages"]}
    names = [*(name for name in STAGE_ORDER if name in by_name), *(name for name in by_name if name not in STAGE_ORDER)]
    if not names:
        return ""
    kinds = {name: f"s{min(number, 5)}" for number, name in enumerate([*STAGE_ORDER, *names[len(STAGE_ORDER) :]])}
    parts = [
        (kinds.get(name, "s5"), by_name[name]["share"], f"{stage_name(name)} {share(by_name[name]['share'])}")
        for name in names
    ]
    rows = [
        [
            f"{_swatch(kinds.get(name, 's5'))}{e(stage_name(name))}<small>{e(OF_STAGES.get(name, ''))}</small>",
            share(by_name[name]["share"]),
            duration(by_name[name]["seconds"]),
        ]
        for name in names
    ]
    beside = ", ".join(f"{e(name)} {duration(seconds)}" for name, seconds in job["beside"].items())
    said = f"<p>The run was {e(job['verdict'])}.</p>" if job["verdict"] else ""
    return _section(
        "Where the time went",
        f"{stacked(parts)}{_table(['stage of the device’s thread', 'share', 'time'], rows)}{said}"
        f'<p class="note">The device: {e(device_in_words(job))}. Beside the thread that feeds it: {beside}.</p>',
    )


def _swatch(kind: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class="{kind}" width="1" height="1"/></svg>'


def _lengths(job: dict[str, Any]) -> str:
    lengths = {int(limit): count for limit, count in job["lengths"].items()}
    if not lengths:
        return ""
    limits, most, total = [1], max(lengths.values()), sum(lengths.values())
    while limits[-1] < max(lengths):
        limits.append(limits[-1] * 2)
    limits = [limit for limit in limits if limit >= min(lengths)]
    rows = [
        [
            f"{limit // 2 + 1:,}–{limit:,}" if limit > 2 else str(limit),
            bar(lengths.get(limit, 0) / most, "thin"),
            f"{lengths.get(limit, 0):,}",
            share(lengths.get(limit, 0) / total),
        ]
        for limit in limits
    ]
    texts, tokens = job["texts"], job["tokens"]
    cut = f"{texts['truncated']:,} texts were truncated and lost {tokens['dropped']:,} tokens"
    return _section(
        "Lengths of the texts",
        f'{_table(["tokens", "", "texts", "share"], rows, bars=True)}<p class="note">{e(cut)}.</p>',
    )


def _slowest(job: dict[str, Any]) -> str:
    if not job["slowest"]:
        quiet = "No record lost more than a tenth of its time against the usual one."
        return _section("Slowest shards", f'<p class="note">{quiet}</p>', "wide") if job["latest"] else ""
    rows = [
        [
            f"{name_of(row['shard'])}<small>{e(row['why'])}; on {e(row['host'])}, {e(row['device'])}</small>",
            f"{row['tokens_per_s']:,.0f}",
            duration(row["seconds"]),
            duration(row["lost_s"]),
        ]
        for row in job["slowest"]
    ]
    note = "Lost is what they took beyond the usual time for as many tokens; below the name is where most of it went."
    table = _table(["shard", "tokens/s", "took", "lost"], rows)
    return _section("Slowest shards", f'{table}<p class="note">{note}</p>', "wide")


def _workers(job: dict[str, Any]) -> str:
    if job["num_workers"] < 2:
        return ""
    rows = [
        [
            e(row["host"]),
            e(row["device"]),
            f"{row['records']:,}",
            amount(row["tokens"]),
            f"{row['tokens_per_device_s']:,.0f}",
            share(row["device_idle"]),
            e(clock(row["last_record"])),
        ]
        for row in job["workers"]
    ]
    more = job["num_workers"] - len(rows)
    table = _table(["host", "device", "records", "tokens", "tokens/s", "idle", "last record, UTC"], rows, left=2)
    rest = f'<p class="note">and {more:,} more, silent for longer</p>' if more else ""
    return _section("Who works", table + rest, "wide")


def _rows(job: dict[str, Any]) -> str:
    rows, texts = job["rows"], job["texts"]
    lines = [("rows with a vector", rows["vectors"] - rows["extra_chunks"])]
    lines += [(f"quarantined: {plain(reason)}", count) for reason, count in rows["quarantined"].items()]
    if not rows["quarantined"]:
        lines.append(("quarantined", 0))
    lines.append(("rows done", rows["done"]))
    beside = [
        ("further chunks of long texts", rows["extra_chunks"]),
        ("texts that stood in their window before", texts["duplicates"]),
        ("texts whose vector was known from before", texts["reused"]),
        ("texts cut at the length limit", texts["truncated"]),
        ("batches halved for want of memory", job["oom_splits"]),
    ]
    tables = [
        _table(["rows", ""], [[e(what), f"{count:,}"] for what, count in lines], last_is_sum=True),
        _table(["beside", ""], [[e(what), f"{count:,}"] for what, count in beside]),
    ]
    return _section("Rows and texts", "".join(tables))


def _result(job: dict[str, Any]) -> str:
    lines = [("index", index_in_words(job)), ("verified", certificate_in_words(job))]
    certificate = job["certificate"]
    if certificate and (certificate["parity"] or {}).get("rows"):
        parity = certificate["parity"]
        compared = f"{parity['rows']:,} rows, cosine at least {parity['cosine_min']:.6f}"
        lines.append(("against sentence-transformers", compared))
    lines.append(("planned", "no plan" if job["plan"] is None else plan_in_words(job["plan"])))
    if job["cost"]["total"] is not None:
        lines.append(("cost", cost_in_words(job["cost"])))
    return _section("Result", _definitions(lines))


def _latest(job: dict[str, Any]) -> str:
    if not job["latest"]:
        return ""
    rows = [
        [
            name_of(row["shard"]),
            e(clock(row["ended"])),
            f"{row['rows']:,}",
            f"{row['tokens']:,}",
            f"{row['tokens_per_s']:,.0f}",
        ]
        for row in job["latest"]
    ]
    table = _table(["shard", "finished, UTC", "rows", "tokens", "tokens/s"], rows, left=2)
    return _section("Latest records", table, "wide")


def _made_of(job: dict[str, Any]) -> str:
    options = {name: value for name, value in job["options"].items() if name not in ("output", "model")}
    lines = [
        ("model", f"{job['model']}" + ("" if job["dim"] is None else f", {job['dim']} dimensions")),
        ("computed in", ", ".join(job["dtypes"])),
        ("attention", ", ".join(job["attentions"])),
        *((name.replace("_", "-"), _option(value)) for name, value in options.items() if value not in (False, [])),
        ("fingerprint", str(job["fingerprint"])),
    ]
    inside = _definitions([(what, text) for what, text in lines if text])
    return f'<section class="wide"><details><summary>Options of the run</summary>{inside}</details></section>'


def _option(value: Any) -> str:
    if isinstance(value, list):
        shown = [str(one) for one in value[:5]]
        return ", ".join(shown) + (f" and {len(value) - 5:,} more" if len(value) > 5 else "")
    return str(value)


def _definitions(lines: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{e(what)}</dt><dd>{e(text)}</dd>' for what, text in lines)}</dl>"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, bars: bool = False, last_is_sum: bool = False
) -> str:
    """Cells are HTML. The first ``left`` columns are text, the others numbers; the second may be ``bars``."""

    def kind(column: int) -> str:
        return ' class="bars"' if bars and column == 1 else "" if column < left else ' class="n"'

    head = "".join(f'<th scope="col"{kind(column)}>{e(name)}</th>' for column, name in enumerate(heads))
    body = "".join(
        f"<tr{' class=sum' if last_is_sum and number == len(rows) else ''}>"
        + "".join(f"<td{kind(column)}>{cell}</td>" for column, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows, 1)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _notes(document: dict[str, Any]) -> str:
    price = document["price_per_hour"]
    cost = (
        "Cost is the sum of what the records say: a device’s share of the machine’s price while it was at work on a "
        "shard; loading the model and the index are not in it."
        if price is None
        else f"Cost is {price:g} an hour for the time in which a machine (a host name) was at work on shards."
    )
    return (
        "<p>Everything here is counted from the records that finished shards and parts leave; what is in work is in no "
        "figure. Time of work is when at least one device was at work, so several at once count once; tokens/s go by "
        f"it. Time over all devices counts each. Tokens are those the model computed. {e(cost)}</p>"
    )
