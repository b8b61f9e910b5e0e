"""Write a model folder in fewer bits, within a stated loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from sparrow.apps.bits.quantize import Quantized


def quantize(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    out: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")] = None,
    /,
    log: Annotated[Path | None, tyro.conf.arg(name="data", metavar="PREPARED")] = None,
    ne_budget: str = "0.02%",
    tables: Literal["int4", "int8", "fp16", "fp32"] = "int4",
    products: Literal["int8", "bf16", "fp32"] = "int8",
    inputs: Literal["calibrated", "of-each-row"] = "calibrated",
    rows: int = 50_000,
    picture: Path | None = None,
    compare: Annotated[Path | None, tyro.conf.arg(metavar="OTHER")] = None,
) -> None:
    """Write a model folder in fewer bits, within a stated loss.

    Each table and each product begins in the narrowest format. Those that harm NE most, each
    measured alone on rows of the valid part, get wider ones until the upper end of the 95 %
    interval of NE's rise is within the budget. By how much NE rises is then said on other rows of
    the valid part. Ranges of inputs are calibrated on the end of the training part. The test part
    is not used for any of this.

    Args:
        model: A folder that `sparrow export` wrote.
        out: The folder to make. It must not exist. Needed, but with --compare it is not.
        log: The prepared log that the model was trained on. Needed, but with --compare it is not.
        ne_budget: How much NE may rise, as a share of it, such as 0.02%; "inf" takes the narrowest
            formats.
        tables: The narrowest format of rows of tables.
        products: The narrowest format of matrix products.
        inputs: Whether the inputs of an int8 product have one range, of the training part, or each
            row has its own.
        rows: Rows of the valid part that choose, as many others that check the choice (of fewer,
            each has a half), and rows of the training part that calibrate.
        picture: Where to draw what each part does, OUT.png by default.
        compare: Make no folder. Say in which product the numbers of MODEL and of this other folder
            begin to differ.
    """
    from sparrow.core.errors import UserError, require

    if compare is not None:
        _compare(model, compare)
        return
    if out is None or log is None:
        name = "OUT" if out is None else "--data"
        raise UserError(
            f"quantize: {name} is missing; give MODEL OUT --data PREPARED, or --compare OTHER"
        )
    require(least=100, rows=rows)
    from sparrow.apps.bits.draw import draw
    from sparrow.apps.bits.quantize import quantize as write
    from sparrow.cli import _show

    budget = parsed(ne_budget)
    with _show.progress_bar() as progress:
        quantized = write(
            model,
            out,
            log,
            budget=budget,
            tables=tables,
            products=products,
            inputs=inputs,
            rows=rows,
            progress=progress,
        )
    _show_parts(quantized, out)
    drawn = picture or out.with_name(f"{out.name}.png")
    if draw(quantized, drawn):
        _show.out.print(
            f"{drawn}: what each part does, and all together", markup=False, soft_wrap=True
        )


def parsed(budget: str) -> float:
    """Returns a share of NE that a text says, such as "0.02%" or "0.0002".

    Raises:
        UserError: when it says none.
    """
    from sparrow.core.errors import UserError

    text = budget.strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not share >= 0:
        raise UserError(f"--ne-budget: {budget!r} is no share of NE; write such as 0.02%, or inf")
    return share


def _show_parts(quantized: Quantized, out: Path) -> None:
    from sparrow.cli import _show

    table = _show.Table(
        title=f"{out}: {quantized.scorer.name}, step {quantized.scorer.step}",
        title_justify="left",
        box=_show.SLIM,
    )
    for name in ("part", "shape", "MFLOP", "bytes", "error", "NE alone, %", "format"):
        table.add_column(name, justify="left" if name in ("part", "format") else "right")
    for part in quantized.parts:
        table.add_row(*_cells(part))
    _show.out.print(table)
    best = quantized.result.best.rise
    before = quantized.bytes_of({})
    after = quantized.bytes_of(quantized.result.best.choice)
    checked = quantized.result.checked
    unit = "sessions or rows" if checked.units > 1 else "row"
    lines = [
        f"NE rises by {checked} on {checked.units:,} {unit} of the valid part that chose nothing",
        (
            f"on those that chose, of NE {quantized.result.ne[0]:.5f}, by"
            f" {100 * best.value:+.4f} % (at most {100 * best.upper:+.4f} %), where the first of"
            " many choices within a budget is a lucky one"
        ),
        f"bytes {before:,} -> {after:,} ({before / max(after, 1):.1f} times fewer)",
        (
            f"100 rows take {quantized.ms_before:.2f} -> {quantized.ms_after:.2f} ms"
            f" ({quantized.ms_before / quantized.ms_after:.2f} times)"
        ),
    ]
    if checked.upper > quantized.budget:
        lines.append(
            "the rows that chose nothing do not show that the rise is within"
            f" {100 * quantized.budget:g} %; give a smaller --ne-budget, or prepare a log with a"
            " larger valid part"
        )
    if quantized.needed is not None:
        unit = "rows or sessions" if quantized.needed > 1 else "row"
        lines.append(
            f"the narrowest formats may keep to the budget: {quantized.needed:,} {unit} that choose"
            f" would show it, and {best.units:,} were there; half of the valid part chooses, and at"
            " most --rows"
        )
    for line in lines:
        _show.out.print(line, markup=False, soft_wrap=True)


def _cells(part: dict[str, Any]) -> list[str]:
    chosen = part["format"]
    narrowest = next(iter(part["damage"]))
    damage = part["damage"][narrowest]
    flops = "" if part["flops"] is None else f"{part['flops'] / 1e6:.3f}"
    return [
        part["name"].removeprefix("model."),
        " x ".join(f"{size:,}" for size in part["shape"]),
        flops,
        f"{part['bytes'][chosen]:,}",
        f"{part['error'].get(narrowest, 0.0):.4f}",
        f"{100 * damage['value']:+.4f} ± {100 * damage['error']:.4f}",
        chosen if chosen == narrowest else f"{chosen}, not {narrowest}",
    ]


def _compare(model: Path, other_model: Path) -> None:
    from sparrow.apps.bits.compare import PARTED, partings
    from sparrow.cli import _show
    from sparrow.serving import load

    comparison = partings(load(model), load(other_model))
    table = _show.Table(title="relative difference", title_justify="left", box=_show.SLIM)
    for name in ("product", "inputs", "outputs"):
        table.add_column(name, justify="left" if name == "product" else "right")
    for product in comparison.products:
        mark = " <- first" if product is comparison.first else ""
        site = product.site.removeprefix("model.")
        table.add_row(f"{site}{mark}", f"{product.inputs:.2e}", f"{product.outputs:.2e}")
    _show.out.print(table)
    first = comparison.first
    where = "nowhere" if first is None else f"in {first.site.removeprefix('model.')}"
    if first is not None and first.inputs > PARTED:
        where = f"before {first.site.removeprefix('model.')}, in what it reads"
    _show.out.print(
        f"they part {where}; scores differ by {comparison.scores:.2e} at most",
        markup=False,
        soft_wrap=True,
    )
