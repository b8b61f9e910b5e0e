"""Write a model folder in fewer bits, within a stated loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from sparrow.analysis.bits.quantize import Quantized


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

    Each table and each product begins in the narrowest format. Those that harm NE most, each measured alone on rows of
    the valid part, get wider ones until the upper end of the 95 % interval of NE's rise is within the budget. Ranges of
    inputs are calibrated on the end of the training part. The test part is not used for any of this.

    Args:
        model: A folder that `sparrow export` wrote.
        out: The folder to make. It must not exist. Needed, but with --compare it is not.
        log: The prepared log that the model was trained on. Needed, but with --compare it is not.
        ne_budget: How much NE may rise, as a share of it, such as 0.02%; "inf" takes the narrowest formats.
        tables: The narrowest format of rows of tables.
        products: The narrowest format of matrix products.
        inputs: Whether the inputs of an int8 product have one range, of the training part, or each row has its own.
        rows: Rows of the valid part that choose, and of the training part that calibrate.
        picture: Where to draw what each part does, OUT.png by default.
        compare: Make no folder. Say in which product the numbers of MODEL and of this other folder begin to differ.
    """
    from sparrow.core.errors import UserError, require

    if compare is not None:
        _compare(model, compare)
        return
    if out is None or log is None:
        what = "OUT" if out is None else "--data"
        raise UserError(f"quantize: {what} is missing; give MODEL OUT --data PREPARED, or --compare OTHER")
    require(least=100, rows=rows)
    from sparrow.analysis.bits.draw import draw
    from sparrow.analysis.bits.quantize import quantize as write
    from sparrow.cli import _show

    budget = parsed(ne_budget)
    with _show.progress_bar() as told:
        done = write(
            model, out, log, budget=budget, tables=tables, products=products, inputs=inputs, rows=rows, told=told
        )
    _show_parts(done, out)
    drawn = picture or out.with_name(f"{out.name}.png")
    if draw(done, drawn):
        _show.out.print(f"{drawn}: what each part does, and all together", markup=False, soft_wrap=True)


def parsed(budget: str) -> float:
    """Returns a share of NE that a text says, such as "0.02%" or "0.0002".

    Raises:
        UserError: when it says none.
    """
    from sparrow.core.errors import UserError

    text = budget.strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise UserError(f"--ne-budget: {budget!r} is no share of NE; write such as 0.02%, or inf")
    return found


def _show_parts(done: Quantized, out: Path) -> None:
    from sparrow.cli import _show

    table = _show.Table(
        title=f"{out}: {done.scorer.name}, step {done.scorer.step}", title_justify="left", box=_show.SLIM
    )
    for name in ("part", "shape", "MFLOP", "bytes", "error", "NE alone, %", "format"):
        table.add_column(name, justify="left" if name in ("part", "format") else "right")
    for part in done.parts:
        table.add_row(*_cells(part))
    _show.out.print(table)
    best, before, after = done.found.best.rise, done.bytes_of({}), done.bytes_of(done.found.best.choice)
    lines = [
        f"NE {done.found.ne[0]:.5f} rises by {100 * best.value:+.4f} % (95 %: at most {100 * best.upper:+.4f} %)",
        f"bytes {before:,} -> {after:,} ({before / max(after, 1):.1f} times fewer)",
        f"100 rows take {done.ms_before:.2f} -> {done.ms_after:.2f} ms ({done.ms_before / done.ms_after:.2f} times)",
    ]
    if done.checked is not None:
        value, upper = 100 * done.checked.value, 100 * done.checked.upper
        lines.insert(1, f"on as many other rows of the valid part by {value:+.4f} % (at most {upper:+.4f} %)")
    if done.needed is not None:
        unit = "rows or sessions" if done.needed > 1 else "row"
        lines.append(
            f"the narrowest formats may keep to the budget: {done.needed:,} {unit} of a valid part would show it, and "
            f"{best.units:,} were there"
        )
    for line in lines:
        _show.out.print(line, markup=False, soft_wrap=True)


def _cells(part: dict[str, Any]) -> list[str]:
    chosen, narrowest = part["format"], next(iter(part["damage"]))
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


def _compare(model: Path, other: Path) -> None:
    from sparrow.analysis.bits.compare import PARTED, partings
    from sparrow.cli import _show
    from sparrow.serving import load

    found = partings(load(model), load(other))
    table = _show.Table(title="relative difference", title_justify="left", box=_show.SLIM)
    for name in ("product", "inputs", "outputs"):
        table.add_column(name, justify="left" if name == "product" else "right")
    for one in found.products:
        mark = " <- first" if one is found.first else ""
        table.add_row(one.site.removeprefix("model.") + mark, f"{one.inputs:.2e}", f"{one.outputs:.2e}")
    _show.out.print(table)
    first = found.first
    where = "nowhere" if first is None else f"in {first.site.removeprefix('model.')}"
    if first is not None and first.inputs > PARTED:
        where = f"before {first.site.removeprefix('model.')}, in what it reads"
    _show.out.print(f"they part {where}; scores differ by {found.scores:.2e} at most", markup=False, soft_wrap=True)
