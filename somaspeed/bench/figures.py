"""The report's pictures, each drawn once for both the page (SVG) and a file (PNG).

They are narrow, one above the other, so that their text is readable on a phone; nothing is told by colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from somaspeed.bench.documents import Comparison, Phase, ScalingRow

WIDTH = 5.4  # inches; at 10 pt text this stays readable at 360 CSS pixels
NATIVE, OURS, IDEAL, INK = "#8b93a1", "#0b7a75", "#b8bec8", "#20242c"
# Of the phases of an update; the first two are of both trainers.
PHASE_COLOURS = {
    "data_wait": "#d1495b",
    "prepare": "#edae49",
    "prefix": "#00798c",
    "expert": "#30638e",
    "forward": "#5b8e7d",
    "backward": "#4b4e6d",
    "reduce_exposed": "#7b4ea3",
    "update": "#9aa5b1",
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#c3c8d0",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "text.color": INK,
    "xtick.color": "#5a6270",
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: searchable, and sharp at any size
    "svg.hashsalt": "somaspeed",
    "figure.constrained_layout.use": True,
}
NAMES = {"pi05": "π0.5", "groot": "GR00T N1.7", "molmoact2": "MolmoAct2"}


def name_of(model: str) -> str:
    """A policy's name as people write it."""
    return NAMES.get(model, model)


def render(draw: Callable[..., Figure], *data: Any) -> tuple[bytes, bytes]:
    """Draw a figure; its SVG and PNG."""
    with matplotlib.rc_context(STYLE):
        figure = draw(*data)
        files = []
        for kind, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 200})):
            stream = io.BytesIO()
            figure.savefig(stream, format=kind, **options)
            files.append(stream.getvalue())
    return files[0], files[1]


def stacked_axes(heights: list[float]) -> tuple[Figure, Sequence[Axes]]:
    """A figure with axes of `heights` inches, one above the other."""
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.35))
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    return figure, [axis for (axis,) in axes]


def number(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def throughput(comparisons: list[Comparison]) -> Figure:
    """Steady samples per second of every phase, each model on a scale of its own, with the ratio to native."""
    every = [throughput_bars(comparison) for comparison in comparisons]
    figure, axes = stacked_axes([0.6 + 0.35 * len(bars) for bars in every])
    for axis, comparison, bars in zip(axes, comparisons, every, strict=True):
        rates = [phase.rate or 0.0 for _, phase, _ in bars]
        places = np.arange(len(bars))[::-1]
        axis.barh(places, rates, color=[colour for *_, colour in bars], height=0.72)
        axis.set_yticks(places, [label for label, *_ in bars])
        axis.set_xlim(0, max(rates, default=0.0) * 1.55 or 1.0)
        for place, rate, (_, phase, _) in zip(places, rates, bars, strict=True):
            ratio = comparison.native.rate and rate / comparison.native.rate
            times = f" · {ratio:.2f}×" if ratio and phase is not comparison.native else ""
            text = f"{number(rate)}{times}" if rate else "did not run"
            weight = "bold" if phase is comparison.somaspeed else "normal"
            beside(axis, rate, place, text, fontweight=weight)
        axis.set_title(name_of(comparison.model))
        axis.tick_params(left=False)
    axes[-1].set_xlabel("samples per second, all devices")
    return figure


def throughput_bars(comparison: Comparison) -> list[tuple[str, Phase, str]]:
    """(label, phase, colour) of every phase of one policy, from top to bottom."""
    bars = [("native", comparison.native, NATIVE)]
    if comparison.native_published:
        bars = [
            ("native, as published", comparison.native_published, "#c3c8d0"),
            ("native, fastest", comparison.native, NATIVE),
        ]
    if comparison.equal_batch:
        bars.append(("somaspeed, same batch", comparison.equal_batch.somaspeed, "#6db5b1"))
    return [*bars, ("somaspeed", comparison.somaspeed, OURS)]


def scaling(models: dict[str, list[ScalingRow]]) -> Figure:
    """Samples per second over devices, with the line of perfect scaling and the efficiency at every point."""
    figure, axes = stacked_axes([2.1] * len(models))
    for axis, (model, rows) in zip(axes, models.items(), strict=True):
        rows = sorted(rows, key=lambda row: row.gpus)
        devices = np.array([row.gpus for row in rows])
        rates = np.array([row.samples_per_second for row in rows])
        ideal = rates[0] / devices[0] * devices
        axis.plot(devices, ideal, "--", color=IDEAL, label="perfect scaling", zorder=1)
        axis.plot(devices, rates, "o-", color=OURS, label="measured", zorder=2)
        low = [row.minimum_samples_per_second for row in rows]
        high = [row.maximum_samples_per_second for row in rows]
        axis.vlines(devices, low, high, color=OURS, linewidth=1)
        for row, rate in zip(rows, rates, strict=True):
            label = f"{number(rate)} ({row.efficiency_percent:.1f} %)"
            axis.annotate(label, (row.gpus, rate), (0, -13), textcoords="offset points", ha="center", va="top")
        axis.set_title(f"{name_of(model)}, {rows[0].per_gpu_batch:g} per device")
        axis.set_xticks(devices, [f"{count:g}" for count in devices])
        span = devices[-1] - devices[0] or 1.0
        axis.set_xlim(devices[0] - 0.17 * span, devices[-1] + 0.17 * span)
        axis.set_ylim(0, max(ideal.max(), rates.max()) * 1.12)
        axis.set_ylabel("samples/s")
    axes[0].legend(loc="upper left")
    axes[-1].set_xlabel("devices")
    return figure


def breakdown(comparisons: list[Comparison]) -> Figure:
    """Where the time of an update goes, as shares; the time per sample beside each bar."""
    bars = [
        (f"{name_of(comparison.model)}\n{label}", phase)
        for comparison in comparisons
        for label, phase in (("native", comparison.native), ("somaspeed", comparison.somaspeed))
        if phase.seconds and phase.global_batch
    ]
    figure = Figure(figsize=(WIDTH, 0.55 * len(bars) + 1.5))
    axis = figure.subplots()
    for place, (_, phase) in enumerate(bars):
        total, left = sum(phase.seconds.values()), 0.0
        for name, seconds in phase.seconds.items():
            share = 100 * seconds / total
            axis.barh(place, share, left=left, color=PHASE_COLOURS.get(name, INK), height=0.68, edgecolor="white")
            if share >= 11:
                axis.text(left + share / 2, place, f"{share:.0f} %", ha="center", va="center", color="white")
            left += share
        assert phase.global_batch is not None
        beside(axis, 100, place, f"{number(1e3 * total / phase.global_batch)} ms")
    axis.set_yticks(range(len(bars)), [label for label, _ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 118)
    axis.set_xticks(range(0, 101, 25))
    axis.set_xlabel("share of an update's time, % (at the right: time per sample)")
    axis.tick_params(left=False)
    used = [name for name in PHASE_COLOURS if any(name in phase.seconds for _, phase in bars)]
    patches = [matplotlib.patches.Patch(color=PHASE_COLOURS[name]) for name in used]
    labels = [name.replace("_", " ") for name in used]
    figure.legend(patches, labels, loc="outside upper left", ncols=4, fontsize=9, columnspacing=1.2)
    return figure


def losses(comparisons: list[Comparison]) -> Figure:
    """The training loss of both trainers over the samples seen."""
    shown = [comparison for comparison in comparisons if comparison.native.losses and comparison.somaspeed.losses]
    figure, axes = stacked_axes([2.0] * len(shown))
    for axis, comparison in zip(axes, shown, strict=True):
        curves = [("native", comparison.native, NATIVE, "-"), ("somaspeed", comparison.somaspeed, OURS, "-")]
        if comparison.equal_batch:
            curves.append(("somaspeed, same batch", comparison.equal_batch.somaspeed, OURS, ":"))
        for label, phase, colour, style in curves:
            if phase.losses:
                steps, values = np.array(phase.losses).T
                label = f"{label} (batch {phase.global_batch})"
                axis.plot(steps * (phase.global_batch or 1), values, style, color=colour, linewidth=1.3, label=label)
        axis.set_xscale("log")
        axis.set_title(name_of(comparison.model))
        axis.set_ylabel("loss")
        axis.legend(fontsize=9, loc="lower left")  # a loss that falls leaves that corner free
    axes[-1].set_xlabel("samples seen")
    return figure


def flops(documents: list[dict[str, Any]]) -> Figure:
    """Counted TFLOP per sample, each model on a scale of its own."""
    figure, axes = stacked_axes([1.75] * len(documents))
    for axis, document in zip(axes, documents, strict=True):
        bars = {f"native, {name}": value for name, value in document.get("native_variants", {}).items()}
        bars = bars or {"native": document["native"]}
        bars |= {"somaspeed": document["somaspeed"], "somaspeed, prefix cached": document["somaspeed_cached"]}
        places = np.arange(len(bars))[::-1]
        colours = [NATIVE if name.startswith("native") else OURS for name in bars]
        axis.barh(places, list(bars.values()), color=colours, height=0.72)
        axis.set_xlim(0, 1.6 * max(bars.values()))
        for place, value in zip(places, bars.values(), strict=True):
            fewer = document["native"] / value
            beside(axis, value, place, number(value) + (f" · {fewer:.3g}× fewer" if fewer > 1 else ""))
        axis.set_yticks(places, list(bars))
        axis.set_title(f"{name_of(document['policy'])}, {document['size']} size")
        axis.tick_params(left=False)
    axes[-1].set_xlabel("TFLOP per sample")
    return figure


def beside(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text just right of a bar's end."""
    axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", **style)
