"""The page about what few bits do to a run's products: a table, a heat map, histograms of values, the recipe."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparrow.analysis import elements, picture
from sparrow.analysis.numerics.dispatch import HIGH, LEAST_SPEEDUP, MOST_MERE
from sparrow.analysis.numerics.found import LEARNED, NORMAL, REAL, SHOWN, Numerics
from sparrow.analysis.numerics.measure import PASSES, Site
from sparrow.numerics import FORMATS

CANDIDATES = ("ms, native", "chosen", "why")  # columns of a table of their own
DRAWN = 8  # sites whose values are drawn, those of most FLOPs
LOW, HIGHEST = -40, 12  # powers of two that are drawn
SPANS = ("bf16", "e5m2", "e4m3", "mxfp8", "mxint8", "mxfp4")
WORDS = {"forward": "forward", "input_gradient": "input gradient", "weight_gradient": "weight gradient"}
HEADER = (
    "product", "pass", "W", "FLOPs", "QSNR, dB", "MERE, real", "learned", "N(0, 1)", "NE alone, %", "ms, native",
    "chosen", "why", "fewest bits",
)  # fmt: skip


def page_of(done: Numerics, recipe: str) -> str:
    """Returns the HTML of a page. recipe: the file's text."""
    low = sum(verdict.chosen != HIGH for of in done.verdicts.values() for verdict in of)
    rise, told = "0", "rise of NE by the recipe, over fp32"
    if done.rise is not None:
        rise, told = f"{100 * done.rise.value:+.4f} %", f"{told} (95 %: at most {100 * done.rise.upper:+.4f} %)"
    cards = [
        (f"{done.ne:.4f}", "NE as the run is, of the rows that judge"),
        (f"{len(done.sites)}", "products with a name"),
        (f"{low} of {3 * len(done.verdicts)}", "passes that the recipe has in fewer bits"),
        (rise, told),
    ]
    sections = [
        ("What this stands on", "".join(elements.text(note) for note in done.notes) + _unseen(done)),
        (f"Products, in {done.shown}", _table(done)),
        ("Who computes what", _candidates(done)),
        ("Products and precisions", _maps(done)),
        ("Values and the ranges of formats", _values(done)),
        ("Recipe", _recipe(done, recipe)),
    ]
    return elements.page(f"Number formats for {done.run_dir.resolve().name}", _under(done), cards, sections)


def _under(done: Numerics) -> str:
    return (
        "Emulated results are exact, and say nothing about speed. The recipe was chosen by rows on which NE rises by "
        f"no more than {100 * done.budget:g} % (95 %). How much it rises is told of others."
    )


def _unseen(done: Numerics) -> str:
    if not done.unseen:
        return ""
    names = ", ".join(done.unseen)
    told = f"Not watched: {names}. They are within tables, or no gradient flowed through them."
    return elements.text(told, soft=True)


def rows(done: Numerics) -> list[list[Any]]:
    """Returns the lines of the table, as HEADER names them."""
    total, lines = sum(site.flops for site in done.sites) or 1.0, []
    for site in done.sites:
        for number, which in enumerate(PASSES):
            error, decibels = done.errors[site.name, which, REAL, done.shown]
            learned = done.errors.get((site.name, which, LEARNED, done.shown))
            normal = done.errors[site.name, which, NORMAL, done.shown][0]
            is_first = number == 0
            lines.append([
                site.name if is_first else "", WORDS[which], " x ".join(map(str, site.shape)) if is_first else "",
                elements.share(site.flops / total / 3), f"{decibels:.1f}", f"{error.mere:.4f}",
                "none" if learned is None else f"{learned[0].mere:.4f}", f"{normal.mere:.4f}",
                _rise(done, site) if is_first else "", *_verdict(done, site, number),
                done.narrowest(site.name) if is_first else "",
            ])  # fmt: skip
    return lines


def _rise(done: Numerics, site: Site) -> str:
    rise = done.rises[site.name][done.shown]
    return f"{100 * rise.value:+.4f} ± {100 * (rise.upper - rise.value):.4f}"


def _verdict(done: Numerics, site: Site, number: int) -> list[str]:
    if site.name not in done.verdicts:
        return ["", HIGH, "stays high unless a recipe names it"]
    of = done.verdicts[site.name][number]
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in of.milliseconds.items())
    return [times, of.chosen, of.why]


def _columns(done: Numerics, names: tuple[str, ...], kind: str) -> str:
    """Returns some columns of the table. kind: a class of `elements.STYLE`."""
    at = [HEADER.index(name) for name in names]
    lines = [[line[i] for i in at] for line in rows(done)]
    return f'<div class="{kind}">{elements.table(names, lines)}</div>'


def _table(done: Numerics) -> str:
    return _columns(done, tuple(name for name in HEADER if name not in CANDIDATES), "passes") + elements.text(
        "QSNR is of the worse one of the two operands. MERE is the mean of |o - r| / max(|r|, 0.01 rms(r)); "
        f"{MOST_MERE} is too much. Learned inputs are drawn from what the probe saw, with the weights as they are. "
        "With weights that are drawn too, numerics.json has them, and they count below. There are none of several "
        "weights at once, and of activations whose sizes differ from batch to batch. NE alone is what the forward of "
        "this product alone does to NE, and half of a 95 % interval; of gradients NE does not tell. The fewest bits "
        "are those in which no pass errs too much and NE keeps to the budget, whether or not this machine multiplies "
        "them.",
        soft=True,
    )


def _candidates(done: Numerics) -> str:
    return _columns(done, ("product", "pass", *CANDIDATES), "words") + elements.text(
        "Chosen is what computes a pass in the recipe. Times are of a batch, conversions included. A candidate is "
        f"allowed if its MERE is below {MOST_MERE}, and if it is {LEAST_SPEEDUP} times as fast as {HIGH} or faster. "
        "Emulated formats have no times.",
        soft=True,
    )


def _recipe(done: Numerics, recipe: str) -> str:
    told = f"No candidate is faster, near enough and within the budget of {100 * done.budget:g} %, so all stays {HIGH}."
    why = "" if done.precision.sites else elements.text(told)
    return f"{why}<pre>{elements.escape(recipe)}</pre>"


def _maps(done: Numerics) -> str:
    names, shown = [site.name for site in done.sites], SHOWN

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        mere = [[max(done.mere(name, which, p) for which in PASSES) for p in shown] for name in names]
        rises = [[100 * done.rises[name][p].value for p in shown] for name in names]
        _map(axes[0], mere, names, shown, "MERE, the worst pass", (1e-3, 1.0), "{:.2g}")
        _map(axes[1], rises, names, shown, "rise of NE alone, %", (1e-4, 1.0), "{:+.3f}")

    return elements.image(
        picture.svg(paint, height=1.6 + 0.26 * len(names)), "MERE and rise of NE of each product in each precision"
    ) + elements.text("Red is worse; both scales are logarithmic, and a rise below 0.0001 % is white.", soft=True)


def _map(
    axis: Any, values: list[list[float]], names: list[str], shown: tuple[str, ...], title: str,
    ends: tuple[float, float], form: str,
) -> None:  # fmt: skip
    from matplotlib.colors import LogNorm

    least, most = ends
    shaded = [[min(max(v, least), most) if math.isfinite(v) else most for v in row] for row in values]
    axis.imshow(shaded, aspect="auto", cmap="Reds", norm=LogNorm(least, 2 * most))
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            color = "white" if shaded[y][x] > (least * most**2) ** (1 / 3) else "black"  # where two thirds are dark
            axis.text(x, y, form.format(value), ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(range(len(shown)), shown, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(length=0)
    axis.set_title(title, loc="left")


def _values(done: Numerics) -> str:
    sites = sorted(done.sites, key=lambda site: -site.flops)[:DRAWN]

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(sites), 3, squeeze=False, sharex=True)
        for row, site in zip(axes, sites, strict=True):
            for axis, name, x in zip(row, ("x", "W", "dy"), site.operands[:3], strict=True):
                _histogram(axis, x)
                axis.set_title(f"{site.name}: {name}", loc="left", fontsize=7)
        for axis in axes[-1]:
            axis.set_xlabel("power of two")

    return elements.image(
        picture.svg(paint, height=0.6 + 1.5 * len(sites)), "Histograms of magnitudes over the ranges of formats"
    ) + elements.text(
        "Magnitudes of values that are not 0, by powers of two. Below: which powers a format has, from its least "
        "number to its largest. Formats with scales end at the largest value of all; those of blocks reach farther "
        "down where a block has no such value.",
        soft=True,
    )


def _histogram(axis: Any, x: Tensor) -> None:
    """Draw the magnitudes of values, and under them the ranges of formats."""
    size = x.abs().flatten()
    size = size[size > 0]
    if not len(size):
        axis.text(0.5, 0.5, "all are 0", transform=axis.transAxes, ha="center")
        return
    counts = torch.histc(size.log2(), HIGHEST - LOW, LOW, HIGHEST)
    counts = counts / counts.max().clamp(min=1)
    axis.bar(torch.arange(LOW, HIGHEST).tolist(), counts.tolist(), width=1.0, align="edge", color=picture.BLUE)
    top = float(size.max().log2())
    for number, name in enumerate(SPANS):
        least, most = (math.log2(of) for of in (FORMATS[name].element.least, FORMATS[name].element.largest))
        begin, end = (least, most) if FORMATS[name].block is None else (top - (most - least), top)
        at = -0.19 * (number + 1)
        axis.plot([max(begin, LOW), min(end, HIGHEST)], [at, at], color=picture.ORANGE, linewidth=1.6)
        axis.text(HIGHEST + 0.3, at, name, fontsize=6, va="center")
    axis.set_xlim(LOW, HIGHEST)
    axis.set_yticks([])
