"""The settings that were tried while an index was measured -> a picture of recall against latency."""

from __future__ import annotations

from typing import Any

from pipeline.bench_report import OTHER_COLOR, OURS_COLOR, TEXT_COLOR
from pipeline.errors import ConfigError


def plot(document: dict[str, Any], file: str) -> None:
    """Write the content of ``index.json`` as PNG: a point a setting, the published one marked.

    Raises:
        ConfigError: the index was made by a version that did not keep its settings.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    if not document.get("settings"):
        raise ConfigError("--plot: this index was made by a version that did not keep its settings; remove DIR/index")
    settings, chosen = document["settings"], document["nprobe"] or document["ef_search"]
    name = "nprobe" if document["nprobe"] else "efSearch"
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    times, recalls = zip(*((setting["p50_ms"], setting["recall_at_10"]) for setting in settings), strict=True)
    axes.plot(times, recalls, color=OTHER_COLOR, marker="o", markersize=4, linewidth=1)
    for setting in settings:
        point, ours = (setting["p50_ms"], setting["recall_at_10"]), setting["value"] == chosen
        if ours:
            low, high = document["recall_at_10"]["low"], document["recall_at_10"]["high"]
            reach = [[max(0.0, point[1] - low)], [max(0.0, high - point[1])]]
            axes.errorbar(*point, yerr=reach, fmt="o", color=OURS_COLOR, capsize=3, zorder=3)
        label = f"{name} {setting['value']}" if ours and chosen else setting["value"]
        axes.annotate(
            "" if label is None else str(label),
            point,
            xytext=(6, -10),
            textcoords="offset points",
            fontsize=9 if ours else 7,
            color=OURS_COLOR if ours else TEXT_COLOR,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("median of single queries, one thread, milliseconds")
    axes.set_ylabel("recall@10")
    axes.set_title(
        f"{document['factory']}: {document['ntotal']:,} vectors of {document['dim']}, "
        f"{document['bytes_per_vector']:,.0f} bytes each; "
        f"recall on {document['recall_at_10']['queries']} held-out queries, bar: 95 %",
        fontsize=9, loc="left", color=TEXT_COLOR,
    )  # fmt: skip
    figure.savefig(file, dpi=150, format="png")
