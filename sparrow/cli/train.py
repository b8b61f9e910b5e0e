"""Train a model on a prepared log, as a run file says."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from sparrow.core.config import flatten, to_dict
from sparrow.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a model on a prepared log. Any leaf of the run file can be set: --model.dim 32 --device cuda."""

    run: tyro.conf.Positional[Path]
    """The run file, such as recipes/demo.toml."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the run's last checkpoint (or begin, when there is none)."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Begin again, dropping the checkpoints that are in the run directory."""


def main(arguments: Sequence[str]) -> None:
    """`sparrow train RUN.toml [--resume] [--any.leaf value]`."""
    if any(a in ("-h", "--help") for a in arguments):
        _help(arguments)
    known, rest = tyro.cli(Arguments, args=list(arguments), prog="sparrow train", return_unknown_args=True)
    from sparrow.cli import _show
    from sparrow.training import Run, train
    from sparrow.training.picture import draw

    run = Run.load(known.run, overrides(rest))
    view = _show.TrainView()
    try:
        results = train(run, resume=known.resume, overwrite=known.overwrite, listener=view)
    finally:
        view.bar.stop()
    rows = [(f"train, part {i + 1} of {len(results['progressive'])}", w) for i, w in enumerate(results["progressive"])]
    if rows:
        _show.out.print(_show.metrics_table(rows, "progressive validation: predicted, then trained on"))
    if results["valid"]:
        _show.out.print(_show.metrics_table([("valid", results["valid"])], f"held out, after step {results['step']}"))
    picture = draw(Path(run.run_dir))
    _show.out.print(
        f"{results['run_dir']}: results.json, log.jsonl, checkpoints/{', ' + picture if picture else ''}",
        soft_wrap=True,
    )
    if results["stopped_by_signal"]:
        _show.out.print(f"stopped by a signal after step {results['step']}; --resume goes on from there")


def overrides(rest: Sequence[str]) -> dict[str, Any]:
    """`--a.b 1 --c=x` as {"a.b": 1, "c": "x"}: values are TOML where they parse, plain text otherwise."""
    found: dict[str, Any] = {}
    items = iter(rest)
    for item in items:
        if not item.startswith("--"):
            raise UserError(f"{item!r}: expected --name value; see `sparrow train --help`")
        name, has_value, text = item[2:].partition("=")
        if not has_value:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise UserError(f"{item}: a value must follow; see `sparrow train --help`")
            text = following
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        found[name.replace("-", "_")] = value
    return found


def _help(arguments: Sequence[str]) -> None:
    """tyro's help, then every leaf with the value it would have."""
    from sparrow.cli import _show
    from sparrow.models import dlrm
    from sparrow.training import Data, Run

    files = [a for a in arguments if a.endswith(".toml") and Path(a).exists()]
    run = Run.load(files[0]) if files else Run(run_dir="runs/NAME", data=Data(path="data/NAME"), model=dlrm.Config())
    leaves = flatten(to_dict(run))
    width = max(map(len, leaves)) + 2
    try:
        tyro.cli(Arguments, args=["--help"], prog="sparrow train")
    finally:
        _show.out.print(f"leaves of {files[0] if files else 'a run file (with a model of your choice)'}, each a flag:")
        for name, value in leaves.items():
            _show.out.print(f"  --{name:<{width}} {value}", markup=False)
        _show.out.print("\nwhat they mean: docs/flow.md and the docstrings in sparrow/training/run.py")
