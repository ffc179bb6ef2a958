"""Figures of a benchmark's rounds into medians, ratios, shares, a table and a chart. Nothing is measured here.

A ratio is taken round by round and its median shown: the processes of one round ran next to each other, so a drift of
the machine falls out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.flops import flops

if TYPE_CHECKING:
    from rich.table import Table

OURS, HOST_ONLY = "embed-corpus run", "all but the forward"
OURS_COLOR, OTHER_COLOR, TEXT_COLOR = "#1f6feb", "#b4bcc6", "#333333"


@dataclass
class Contender:
    """What one way of doing the job took, a value a round.

    Attributes:
        process_s: whole process: start Python, load the model, read Parquet, embed, write Parquet.
        work_s: the part after the model was ready.
        peak_bytes: largest resident size of the process tree; None where it cannot be read.
        parity: against our own output of the same round.
    """

    process_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    peak_bytes: list[int | None] = field(default_factory=list)
    parity: list[dict[str, Any]] = field(default_factory=list)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``[3, 1, 2]`` gives median 2, min 1, max 3, and the rounds as they were."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """How many times as long they took, round by round."""
    return spread([other / own for other, own in zip(theirs, ours, strict=True)])


def summary(
    contenders: dict[str, Contender],
    facts: dict[str, Any],
    peaks: Sequence[dict[str, Any]],
    tokenize_s: Sequence[float],
) -> dict[str, Any]:
    """The measured part of the result.

    Args:
        contenders: by name; ``OURS`` and ``HOST_ONLY`` among them.
        facts: see ``bench_model.facts``.
        peaks: one a round; the best of all is the limit.
        tokenize_s: of the bare tokenizer, one a round.
    """
    size = (facts["parameters"], facts["layers"], facts["width"])
    need = {
        name: flops(sum(lengths), sum(length * length for length in lengths), *size)
        for name, lengths in (("every_row", facts["lengths"]), ("computed_once", facts["computed"]))
    }
    peak = max(peaks, key=lambda one: float(one["flops_per_s"]))
    tokens, texts = sum(facts["lengths"]), len(facts["lengths"])
    ours, rows = contenders[OURS], []
    for name, taken in contenders.items():
        row: dict[str, Any] = {
            "name": name,
            "process_s": spread(taken.process_s),
            "work_s": spread(taken.work_s),
            "tokens_per_s": spread([tokens / seconds for seconds in taken.work_s]),
            "texts_per_s": spread([texts / seconds for seconds in taken.work_s]),
        }
        memory = [peak_bytes for peak_bytes in taken.peak_bytes if peak_bytes is not None]
        if name != HOST_ONLY:
            done = need["computed_once" if name == OURS else "every_row"]
            row["share_of_peak"] = spread([done / seconds / peak["flops_per_s"] for seconds in taken.work_s])
            row["peak_memory_bytes"] = max(memory) if memory else None
        if name not in (OURS, HOST_ONLY):
            row["embed_corpus_is_faster"] = {
                "process": ratios(taken.process_s, ours.process_s),
                "work": ratios(taken.work_s, ours.work_s),
            }
            row["parity"] = {
                "rows": min(one["rows"] for one in taken.parity),
                "max_abs_difference": max(one["max_abs_difference"] for one in taken.parity),
                "min_cosine": min(one["min_cosine"] for one in taken.parity),
            }
        rows.append(row)
    return {
        "contenders": rows,
        "model_flops": {**need, "parameters": size[0], "layers": size[1], "width": size[2]},
        "tokenizer": {
            "tokens_per_s": spread([tokens / seconds for seconds in tokenize_s]),
            "host_only_share": spread(
                [alone / run for alone, run in zip(tokenize_s, contenders[HOST_ONLY].work_s, strict=True)]
            ),
        },
        "peak": {**peak, "rounds": [one["flops_per_s"] for one in peaks]},
    }


def tables(document: dict[str, Any]) -> list[Table | str]:
    """What a person is shown, from top to bottom."""
    from rich.table import Table

    given, peak, flops = document["input"], document["peak"], document["model_flops"]
    speed = Table(box=None, pad_edge=False)
    columns = ("", "process, s", "after loading, s", "tokens/s", "texts/s", "of the peak", "memory")
    for title in columns:
        speed.add_column(title, justify="right" if title else "left")
    versus = Table(box=None, pad_edge=False)
    for title in ("embed-corpus is faster than", "process", "after loading", "max |difference|", "min cosine"):
        versus.add_column(title, justify="left" if title.endswith("than") else "right")
    for row in document["contenders"]:
        share, memory = row.get("share_of_peak"), row.get("peak_memory_bytes")
        speed.add_row(
            row["name"],
            _range(row["process_s"], "{:,.1f}"),
            _range(row["work_s"], "{:,.1f}"),
            _range(row["tokens_per_s"], "{:,.0f}"),
            f"{row['texts_per_s']['median']:,.0f}",
            _range(share, "{:.0%}") if share else "",
            f"{memory / 2**20:,.0f} MiB" if memory else "",
        )
        if "parity" in row:
            faster, parity = row["embed_corpus_is_faster"], row["parity"]
            versus.add_row(
                row["name"],
                _range(faster["process"], "{:.2f}") + " ×",
                _range(faster["work"], "{:.2f}") + " ×",
                f"{parity['max_abs_difference']:.1e}",
                f"{parity['min_cosine']:.6f}",
            )
    product = " × ".join(f"{size:,}" for size in peak.get("shape", ()))
    intro = (
        f"{given['texts']:,} texts, {given['tokens']:,} tokens (median {given['median_length']:,.0f}, longest "
        f"{given['longest']:,}); {document['model']} in {document['dtype']} on {document['machine']}, "
        f"{document['threads']} threads; median [min–max] of {document['rounds']} rounds"
    )
    outro = (
        f"Peak: matrix products of the model's shapes reach {peak['flops_per_s'] / 1e9:,.0f} GFLOP/s here ({product}). "
        f"The model needs {flops['every_row'] / max(1, given['tokens']) / 1e6:,.1f} MFLOP a token, padding not counted."
    )
    tokenizer = document["tokenizer"]
    host = (
        f"Host: the tokenizer alone makes {_range(tokenizer['tokens_per_s'], '{:,.0f}')} tokens/s on these cores; "
        f"all but the forward, Parquet to Parquet, reaches {_range(tokenizer['host_only_share'], '{:.0%}')} of that."
    )
    return [intro, speed, *([versus] if versus.row_count else []), outro, host]


def _range(values: dict[str, Any], form: str) -> str:
    median, low, high = (form.format(values[name]) for name in ("median", "min", "max"))
    return median if low == high else f"{median} [{low}–{high}]"


def plot(document: dict[str, Any], file: str) -> None:
    """Write a bar chart of tokens/s as PNG: the medians, a line from the slowest to the fastest round."""
    from matplotlib.figure import Figure

    rows = [row for row in document["contenders"] if row["name"] != HOST_ONLY][::-1]
    speeds = [row["tokens_per_s"] for row in rows]
    medians = [speed["median"] for speed in speeds]
    reach = [[s["median"] - s["min"] for s in speeds], [s["max"] - s["median"] for s in speeds]]
    figure = Figure(figsize=(8, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    colors = [OURS_COLOR if row["name"] == OURS else OTHER_COLOR for row in rows]
    axes.barh(range(len(rows)), medians, color=colors, height=0.65)
    axes.errorbar(medians, range(len(rows)), xerr=reach, fmt="none", ecolor=TEXT_COLOR, elinewidth=1, capsize=3)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    for place, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
        faster = row.get("embed_corpus_is_faster")
        label = f"{speed['median']:,.0f}" + (f"   embed-corpus: {faster['work']['median']:.2f} ×" if faster else "")
        axes.annotate(label, (speed["max"], place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(speed["max"] for speed in speeds) * 1.35)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    given = document["input"]
    axes.set_xlabel("tokens/s after loading, Parquet to Parquet")
    axes.set_title(
        f"{document['model']}, {document['dtype']}, {document['machine']}, {document['threads']} threads\n"
        f"{given['texts']:,} texts, {given['tokens']:,} tokens; "
        f"median of {document['rounds']} rounds, line: min to max",
        fontsize=9, loc="left", color=TEXT_COLOR,
    )  # fmt: skip
    figure.savefig(file, dpi=150, format="png")
