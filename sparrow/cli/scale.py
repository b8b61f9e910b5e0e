"""Train a family of growing models and draw quality against floating-point operations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from sparrow.apps.scaling import Law


def scale(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml...")],
    /,
    sizes: int = 4,
    seeds: int = 1,
    out: Path = Path("scale.png"),
) -> None:
    """Train a family of growing models and draw quality against floating-point operations.

    Each size is a run of its own, RUN_DIR/size-0 and so on (RUN_DIR/size-0-seed-1 for another
    seed). Runs that are already there are kept, and runs that were stopped continue. Several files,
    of models to be compared, are drawn together. These models can grow: wukong (layers first, then
    n_f, n_l, k and width together), dlrm and dcnv2 (width and a layer in each step).

    Args:
        runs: Run files; each is the smallest size of its family.
        sizes: How many sizes of each.
        seeds: Runs of each size, with the run's seed and those after it; the law is fitted to all
            of them.
        out: The picture.
    """
    from sparrow.apps.scaling import Point, digits, draw, law
    from sparrow.apps.scaling import scale as run
    from sparrow.apps.scaling import sizes as family_of
    from sparrow.cli import _show
    from sparrow.core.errors import UserError, require
    from sparrow.trained.run import Run

    require(least=2, most=20, sizes=sizes)
    require(least=1, seeds=seeds)
    if out.suffix != ".png":
        raise UserError(f"--out: {out} is no name for a picture of PNG; end it in .png")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out: no folder {out.resolve().parent}; make it first")
    if not runs:
        raise UserError("scale: name a run file, the smallest of its family")
    families = {}
    for path in runs:
        first = Run.load(path)
        if first.run_dir in families:
            raise UserError(
                f"{path}: writes to {first.run_dir}, as another file does; give it a run_dir of"
                " its own"
            )
        families[first.run_dir] = family_of(first, sizes, seeds)
    points: dict[str, list[Point]] = {}

    def say(place: str) -> None:
        _show.err.print(f"training {place}", soft_wrap=True)

    for name, family in families.items():
        points[name] = run(family, say)
        table = _show.Table(title=f"{name}: {points[name][0].family}", title_justify="left")
        for header in ("size", "GFLOP an example", "dense weights", "NE", "AUC"):
            table.add_column(header, justify="right")
        for size in range(sizes):
            same_size = points[name][size * seeds : (size + 1) * seeds]
            flops = digits(same_size[0].flops / 1e9)
            ne = _over_seeds([point.ne for point in same_size])
            auc = _over_seeds([point.auc for point in same_size])
            table.add_row(str(size), flops, f"{same_size[0].weights:,}", ne, auc)
        _show.out.print(table)
        _show.out.print(
            f"NE of {points[name][0].measured}{', ± standard deviation' if seeds > 1 else ''}"
        )
        _show.out.print(_law(law(points[name]), points[name][-1].flops), soft_wrap=True)
    if draw(points, out):
        _show.out.print(f"{out}: the picture", soft_wrap=True)


def _law(fitted: Law, largest: float) -> str:
    """Returns the law with its error, and what it promises."""
    if math.isnan(fitted.margin):
        return f"NE = {fitted} through two points, which say nothing of its error"
    text = f"NE = {fitted} by least squares, exponent ± {fitted.margin:.4f} (95 %)"
    if abs(fitted.b) < fitted.margin:
        return f"{text}: not to be told from none"
    gain, margin = fitted.doubled(largest)
    return f"{text}; twice the FLOP of the largest: NE {gain:+.4f} ± {margin:.4f}"


def _over_seeds(values: Sequence[float]) -> str:
    """Returns the mean, and the standard deviation of several values."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"
