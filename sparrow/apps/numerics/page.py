"""The page about what few bits do to a run's products: a table, a heat map, histograms of values,
the recipe.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparrow.analysis import elements, picture
from sparrow.apps.numerics.dispatch import HIGH, LEAST_SPEEDUP, MOST_MERE
from sparrow.apps.numerics.measure import PASSES, Site
from sparrow.apps.numerics.results import LEARNED, NORMAL, REAL, SHOWN, Numerics
from sparrow.numerics.formats import FORMATS

CANDIDATES = ("ms, native", "chosen", "why")  # columns of a table of their own
DRAWN = 8  # sites whose values are drawn, those of most FLOPs
LOW, HIGHEST = -40, 12  # powers of two that are drawn
SPANS = ("bf16", "e5m2", "e4m3", "mxfp8", "mxint8", "mxfp4")
WORDS = {
    "forward": "forward",
    "input_gradient": "input gradient",
    "weight_gradient": "weight gradient",
}
HEADER = (
    "product",
    "pass",
    "W",
    "FLOPs",
    "QSNR, dB",
    "MERE, real",
    "learned",
    "N(0, 1)",
    "NE alone, %",
    "ms, native",
    "chosen",
    "why",
    "fewest bits",
)


def page_of(results: Numerics, recipe: str) -> str:
    """Returns the HTML of a page. recipe: the file's text."""
    low = 0
    for site_verdicts in results.verdicts.values():
        low += sum(verdict.chosen != HIGH for verdict in site_verdicts)
    rise = "0"
    caption = "rise of NE by the recipe, over fp32"
    if results.rise is not None:
        rise = f"{100 * results.rise.value:+.4f} %"
        caption += f" (95 %: at most {100 * results.rise.upper:+.4f} %)"
    cards = [
        (f"{results.ne:.4f}", "NE as the run is, of the rows that judge"),
        (f"{len(results.sites)}", "products with a name"),
        (f"{low} of {3 * len(results.verdicts)}", "passes that the recipe has in fewer bits"),
        (rise, caption),
    ]
    sections = [
        (
            "What this stands on",
            "".join(elements.text(note) for note in results.notes) + _unseen(results),
        ),
        (f"Products, in {results.shown}", _table(results)),
        ("Who computes what", _candidates(results)),
        ("Products and precisions", _maps(results)),
        ("Values and the ranges of formats", _values(results)),
        ("Recipe", _recipe(results, recipe)),
    ]
    return elements.page(
        f"Number formats for {results.run_dir.resolve().name}", _under(results), cards, sections
    )


def _under(results: Numerics) -> str:
    return (
        "Emulated results are exact, and say nothing about speed. The recipe was chosen by rows on"
        f" which NE rises by no more than {100 * results.budget:g} % (95 %). How much it rises is"
        " told of others."
    )


def _unseen(results: Numerics) -> str:
    if not results.unseen:
        return ""
    names = ", ".join(results.unseen)
    message = f"Not watched: {names}. They are within tables, or no gradient flowed through them."
    return elements.text(message, soft=True)


def rows(results: Numerics) -> list[list[Any]]:
    """Returns the lines of the table, as HEADER names them."""
    total = sum(site.flops for site in results.sites) or 1.0
    lines = []
    for site in results.sites:
        for number, pass_name in enumerate(PASSES):
            error, decibels = results.errors[site.name, pass_name, REAL, results.shown]
            learned = results.errors.get((site.name, pass_name, LEARNED, results.shown))
            normal = results.errors[site.name, pass_name, NORMAL, results.shown][0]
            is_first = number == 0
            lines.append(
                [
                    site.name if is_first else "",
                    WORDS[pass_name],
                    " x ".join(map(str, site.shape)) if is_first else "",
                    elements.share(site.flops / total / 3),
                    f"{decibels:.1f}",
                    f"{error.mere:.4f}",
                    "none" if learned is None else f"{learned[0].mere:.4f}",
                    f"{normal.mere:.4f}",
                    _rise(results, site) if is_first else "",
                    *_verdict(results, site, number),
                    results.narrowest(site.name) if is_first else "",
                ]
            )
    return lines


def _rise(results: Numerics, site: Site) -> str:
    rise = results.rises[site.name][results.shown]
    return f"{100 * rise.value:+.4f} ± {100 * (rise.upper - rise.value):.4f}"


def _verdict(results: Numerics, site: Site, number: int) -> list[str]:
    if site.name not in results.verdicts:
        return ["", HIGH, "stays high unless a recipe names it"]
    verdict = results.verdicts[site.name][number]
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in verdict.milliseconds.items())
    return [times, verdict.chosen, verdict.why]


def _columns(results: Numerics, names: tuple[str, ...], kind: str) -> str:
    """Returns some columns of the table. kind: a class of `elements.STYLE`."""
    at = [HEADER.index(name) for name in names]
    lines = [[line[i] for i in at] for line in rows(results)]
    return f'<div class="{kind}">{elements.table(names, lines)}</div>'


def _table(results: Numerics) -> str:
    return _columns(
        results, tuple(name for name in HEADER if name not in CANDIDATES), "passes"
    ) + elements.text(
        "QSNR is of the worse one of the two operands. MERE is the mean of |o - r| / max(|r|, 0.01"
        f" rms(r)); {MOST_MERE} is too much. Learned inputs are drawn from what the probe saw, with"
        " the weights as they are. With weights that are drawn too, numerics.json has them, and"
        " they count below. There are none of several weights at once, of activations whose sizes"
        " differ from batch to batch, and of numbers whose squares are beyond fp32. NE alone is"
        " what the forward of this product alone does to NE, and half of a 95 % interval; of"
        " gradients NE does not tell. The fewest bits are those in which no pass errs too much and"
        " NE keeps to the budget, whether or not this machine multiplies them.",
        soft=True,
    )


def _candidates(results: Numerics) -> str:
    return _columns(results, ("product", "pass", *CANDIDATES), "words") + elements.text(
        "Chosen is what computes a pass in the recipe. Times are of a batch, conversions included."
        f" A candidate is allowed if its MERE is below {MOST_MERE}, and if it is {LEAST_SPEEDUP}"
        f" times as fast as {HIGH} or faster. Emulated formats have no times.",
        soft=True,
    )


def _recipe(results: Numerics, recipe: str) -> str:
    budget = f"{100 * results.budget:g} %"
    message = (
        f"No candidate is faster, near enough and within the budget of {budget}, so all stays"
        f" {HIGH}."
    )
    why = "" if results.precision.sites else elements.text(message)
    return f"{why}<pre>{elements.escape(recipe)}</pre>"


def _maps(results: Numerics) -> str:
    names = [site.name for site in results.sites]
    shown = SHOWN

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        mere = [
            [max(results.mere(name, pass_name, p) for pass_name in PASSES) for p in shown]
            for name in names
        ]
        rises = [[100 * results.rises[name][p].value for p in shown] for name in names]
        _map(axes[0], mere, names, shown, "MERE, the worst pass", (1e-3, 1.0), "{:.2g}")
        _map(axes[1], rises, names, shown, "rise of NE alone, %", (1e-4, 1.0), "{:+.3f}")

    return elements.image(
        picture.svg(paint, height=1.6 + 0.26 * len(names)),
        "MERE and rise of NE of each product in each precision",
    ) + elements.text(
        "Red is worse; both scales are logarithmic, and a rise below 0.0001 % is white.", soft=True
    )


def _map(
    axis: Any, values: list[list[float]], names: list[str], shown: tuple[str, ...], title: str,
    ends: tuple[float, float], form: str,
) -> None:  # fmt: skip
    from matplotlib.colors import LogNorm

    least, most = ends
    shaded = [
        [min(max(v, least), most) if math.isfinite(v) else most for v in row] for row in values
    ]
    axis.imshow(shaded, aspect="auto", cmap="Reds", norm=LogNorm(least, 2 * most))
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            # where two thirds are dark
            color = "white" if shaded[y][x] > (least * most**2) ** (1 / 3) else "black"
            axis.text(x, y, form.format(value), ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(range(len(shown)), shown, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(length=0)
    axis.set_title(title, loc="left")


def _values(results: Numerics) -> str:
    sites = sorted(results.sites, key=lambda site: -site.flops)[:DRAWN]

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(sites), 3, squeeze=False, sharex=True)
        for row, site in zip(axes, sites, strict=True):
            for axis, name, x in zip(row, ("x", "W", "dy"), site.operands[:3], strict=True):
                _histogram(axis, x)
                axis.set_title(f"{site.name}: {name}", loc="left", fontsize=7)
        for axis in axes[-1]:
            axis.set_xlabel("power of two")

    return elements.image(
        picture.svg(paint, height=0.6 + 1.5 * len(sites)),
        "Histograms of magnitudes over the ranges of formats",
    ) + elements.text(
        "Magnitudes of values that are not 0, by powers of two. Below: which powers a format has,"
        " from its least number to its largest. Formats with scales end at the largest value of"
        " all; those of blocks reach farther down where a block has no such value.",
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
    axis.bar(
        torch.arange(LOW, HIGHEST).tolist(),
        counts.tolist(),
        width=1.0,
        align="edge",
        color=picture.BLUE,
    )
    top = float(size.max().log2())
    for number, name in enumerate(SPANS):
        least, most = (
            math.log2(power)
            for power in (FORMATS[name].element.least, FORMATS[name].element.largest)
        )
        begin, end = (least, most) if FORMATS[name].block is None else (top - (most - least), top)
        at = -0.19 * (number + 1)
        axis.plot(
            [max(begin, LOW), min(end, HIGHEST)], [at, at], color=picture.ORANGE, linewidth=1.6
        )
        axis.text(HIGHEST + 0.3, at, name, fontsize=6, va="center")
    axis.set_xlim(LOW, HIGHEST)
    axis.set_yticks([])
