"""Numbers -> small inline SVG, with its words as HTML beside it, so that they keep their size on any screen.

A plot is stretched to the width there is; axis labels are HTML, placed in percent. Nothing needs a script or a network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any

from pipeline.report_records import duration

WIDTH, HEIGHT = 1000, 100  # of the drawing; it is stretched
TICKS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 345600, 604800,
)  # fmt: skip
MAX_TICKS = 5
LABEL_ROOM = 0.2  # of the width that a label of the time axis needs on a phone
MANY_STOPS = 4  # more of them have no label
STOP_ROOM = 0.3  # of the width, for the label of a stop


def time_chart(throughput: dict[str, Any], name: str, unit: str, *, short: bool = False, axis: bool = True) -> str:
    """Bars over the time axis of ``throughput``.

    Args:
        throughput: as in the document.
        name: the figure of a bin: ``tokens_per_s`` or ``devices``.
        unit: said after a value.
        short: a lower plot.
        axis: with the labels of the time.
    """
    bins, length_s = throughput["bins"], throughput["length_s"]
    ends = [*(one["at_s"] for one in bins[1:]), length_s]
    top, marks = scale(max(one[name] for one in bins), 2 if short else 5)
    bars, seats = [], []
    for one, end in zip(bins, ends, strict=True):
        x, width = one["at_s"] / length_s * WIDTH, (end - one["at_s"]) / length_s * WIDTH
        tall = one[name] / top * HEIGHT
        began, ended = (clock_at(throughput, at).strftime("%Y-%m-%d %H:%M:%S") for at in (one["at_s"], end))
        said = escape(f"{began} to {ended[11:]} UTC: {compact(one[name])} {unit}")
        bars.append(f'<rect x="{x:.2f}" y="{HEIGHT - tall:.2f}" width="{width:.2f}" height="{tall:.2f}"/>')
        seats.append(f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="{HEIGHT}"><title>{said}</title></rect>')
    lines = "".join(f'<path d="M0 {HEIGHT - mark / top * HEIGHT:.2f}H{WIDTH}"/>' for mark in marks)
    stops = "".join(f'<path d="M{at * WIDTH:.2f} 0V{HEIGHT}"/>' for at, _ in _stops(throughput))
    many = " many" if len(throughput["segments"]) > 3 * MANY_STOPS else ""
    shown = "".join(
        f'<span class="y" style="bottom:{mark / top * 100:.2f}%">{compact(mark)}</span>' for mark in [0.0, *marks]
    )
    return (
        f'<div class="chart{" short" if short else ""}"><div class="plot">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(unit)} over time">'
        f'<g class="grid">{lines}</g><g class="bars">{"".join(bars)}</g><g class="stops{many}">{stops}</g>'
        f'<g class="seats">{"".join(seats)}</g></svg>{shown}{"" if short else _stop_labels(throughput)}</div>'
        f"{_time_labels(throughput) if axis else ''}</div>"
    )


def bar(value: float, kind: str = "", second: float = 0.0) -> str:
    """A horizontal bar that is filled to ``value`` of 0 to 1, and to ``second`` more in a lighter tone."""
    value, second = min(1.0, max(0.0, value)), max(0.0, min(second, 1.0 - value))
    more = f'<rect class="second" x="{value * WIDTH:.1f}" width="{second * WIDTH:.1f}" height="1"/>' if second else ""
    return (
        f'<svg class="bar {kind}" viewBox="0 0 {WIDTH} 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="{WIDTH}" height="1"/><rect class="fill" width="{value * WIDTH:.1f}" height="1"/>'
        f"{more}</svg>"
    )


def stacked(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of (class, share, what to say) parts."""
    at, rects = 0.0, []
    for kind, part, said in parts:
        rects.append(
            f'<rect class="{kind}" x="{at * WIDTH:.2f}" width="{part * WIDTH:.2f}" height="1">'
            f"<title>{escape(said)}</title></rect>"
        )
        at += part
    label = escape("; ".join(said for _, _, said in parts))
    return (
        f'<svg class="bar stacked" viewBox="0 0 {WIDTH} 1" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(rects)}</svg>"
    )


def scale(largest: float, most: int = 5) -> tuple[float, list[float]]:
    """The top of an axis, and where its lines are: ``most`` of them or fewer, at round values."""
    if largest <= 0:
        return 1.0, [1.0]
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(step * power for step in (0.25, 0.5, 1.0, 2.0, 2.5, 5.0) if largest <= most * step * power)
    count = math.ceil(largest / step - 1e-9)
    return count * step, [number * step for number in range(1, count + 1)]


def compact(value: float) -> str:
    """``950``, ``12.5k``, ``3.1M``, ``5.6B``, ``0.25``; three figures at most."""
    for limit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit * 0.9995:
            return f"{_figures(value / limit)}{name}"
    return _figures(value)


def _figures(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def clock_at(throughput: dict[str, Any], at_s: float) -> datetime:
    """The time of day at a place of the axis."""
    segments = throughput["segments"]
    of = max((one for one in segments if one["at_s"] <= at_s), key=lambda one: one["at_s"], default=segments[0])
    return datetime.fromisoformat(of["began"]) + timedelta(seconds=at_s - of["at_s"])


def _stops(throughput: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """(place on the axis from 0 to 1, seconds in which nothing was done) where something was left out."""
    segments = throughput["segments"]
    for before, after in itertools.pairwise(segments):
        began = [datetime.fromisoformat(one["began"]).timestamp() for one in (before, after)]
        yield after["at_s"] / throughput["length_s"], began[1] - began[0] - before["length_s"]


def _stop_labels(throughput: dict[str, Any]) -> str:
    if len(throughput["segments"]) > MANY_STOPS:
        return ""
    longest_first = sorted(_stops(throughput), key=lambda stop: -stop[1])
    return "".join(
        f'<span class="stop {_side(at)}" style="left:{at:.2%}">{duration(seconds)}</span>'
        for at, seconds in _apart(longest_first, STOP_ROOM, lambda stop: stop[0])
    )


def _time_labels(throughput: dict[str, Any]) -> str:
    """At round times of the day; at the beginnings of the segments where these are many or short."""
    segments, length_s = throughput["segments"], throughput["length_s"]
    step = next((step for step in TICKS_S if length_s / step <= MAX_TICKS), 604800 * math.ceil(length_s / 604800 / 4))
    starts = [(one["at_s"], datetime.fromisoformat(one["began"]).timestamp()) for one in segments]
    labels = [
        (at + tick - began, float(tick))
        for (at, began), one in zip(starts, segments, strict=True)
        for tick in range(math.ceil(began / step) * step, math.floor(began + one["length_s"]) + 1, step)
    ]
    if not labels or len(segments) > MANY_STOPS:
        labels = starts
    kept = sorted(_apart(labels, LABEL_ROOM, lambda label: label[0] / length_s))
    spans = []
    days = {datetime.fromtimestamp(tick, UTC).date() for _, tick in kept}
    before = None
    for at, tick in kept:
        moment = datetime.fromtimestamp(tick, UTC)
        text = moment.strftime("%H:%M:%S" if step < 60 else "%H:%M")
        if len(days) > 1 and moment.date() != before:
            day = f"{moment.day} {moment:%b}"
            text = day if step >= 86400 else f"{day}<br>{text}"
        before = moment.date()
        spans.append(f'<span style="left:{at / length_s:.2%}">{text}</span>')
    return f'<div class="x{" days" if len(days) > 1 else ""}">{"".join(spans)}</div>'


def _apart(labels: Sequence[Any], room: float, place: Callable[[Any], float]) -> list[Any]:
    """Those that do not lie on one that came before them."""
    kept: list[Any] = []
    for label in labels:
        if all(abs(place(label) - place(other)) >= room for other in kept):
            kept.append(label)
    return kept


def _side(at: float) -> str:
    """On which side of its place a label is, so that it stays inside."""
    return "left" if at < 0.06 else "right" if at > 0.94 else "mid"
