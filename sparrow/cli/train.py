"""Train a model on a prepared log."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sparrow.cli._parse import parse
from sparrow.core.config import flatten, named, read_toml, to_dict
from sparrow.core.errors import UserError

if TYPE_CHECKING:  # it takes time to import
    from rich.table import Table

    from sparrow.trained.run import Run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a model on a prepared log. Any setting of a run can be set: --model.dim 32 --precision bf16."""

    run: tyro.conf.Positional[Path]
    """A prepared log, for a run with default settings in runs/NAME; or a run file, such as recipes/demo.toml."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue from the run's last checkpoint (or begin, if there is none)."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Begin again, and delete the checkpoints that are in the run directory."""
    budget: str | None = None
    """Try several settings for so long, such as 60s or 10m, and keep the run that is best on the valid part."""
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write a trace of some steps (trace.json.gz, for Perfetto) and a table of where their time goes."""
    probe: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Learn how the operands of each product are distributed (probe.safetensors, for `sparrow numerics`)."""


def main(arguments: Sequence[str]) -> int:
    """`sparrow train PREPARED|RUN.toml [--resume] [--any.leaf value]`."""
    if any(a in ("-h", "--help") for a in arguments):
        _help([a for a in arguments if a not in ("-h", "--help")])
    known, rest = parse(Arguments, arguments, "train", unknown=True)
    from sparrow.analysis.numerics.auto import settled
    from sparrow.analysis.picture import draw
    from sparrow.cli import _show
    from sparrow.distributed import Lobby, leads, said
    from sparrow.trained.run import Run
    from sparrow.training import train
    from sparrow.training.defaults import defaults
    from sparrow.training.rundir import Held
    from sparrow.training.search import search

    given = named(Run, overrides(rest))
    if known.run.is_file() and known.run.suffix != ".toml":
        remedy = f"prepare it first (`sparrow prepare {known.run} --out data/NAME`) and train on that"
        raise UserError(f"{known.run}: neither a prepared log nor a run's .toml; if it is a log, {remedy}")
    if known.budget is not None:
        _check_budget(known)
    run = Run.of(known.run, defaults(known.run, given)) if known.run.is_dir() else Run.load(known.run, given)
    begun, goes_on = Path(run.run_dir) / "run.toml", known.resume and known.run.is_dir()

    def look() -> dict[str, Any] | None:
        return read_toml(begun) if goes_on and begun.is_file() else None

    # rank 0 looks, because others may see the folder later; the World does not exist yet: the file says how it begins
    if (held := said(Lobby(run.sharding.timeout_s), "the run's settings", look)) is not None:
        run = Run.load(begun, {**given, "data.path": str(known.run)}, held)  # settings that are not given again stay
    view = _show.TrainView()
    with Held() as taken:  # until its last file is written the run's directory is no other training's
        common: dict[str, Any] = {"overwrite": known.overwrite, "listener": view, "held": taken}
        try:
            if known.budget is not None:
                results = search(known.run, given, seconds(known.budget), **common)
                run = Run.load(Path(results["run_dir"]) / "run.toml")
            else:
                run = settled(run, resume=known.resume, **common)
                results = train(run, resume=known.resume, profile=known.profile, probe=known.probe, **common)
        finally:
            view.bar.stop()
        if not leads():  # only one of the ranks prints
            return 0
        _tell(run, results)
        if known.profile:
            _show_profile(Path(run.run_dir))
        picture = draw(Path(run.run_dir))
    files = f"results.json, log.jsonl, checkpoints/{', ' + picture if picture else ''}"
    _show.out.print(f"{results['run_dir']}: {files}", soft_wrap=True)
    if results["stopped_by"]:
        told = f"stopped by {results['stopped_by']} after step {results['step']}"
        _show.out.print(f"{told}; --resume continues from there")
    return 130 if results["stopped_by"] == "SIGINT" else 0


def _tell(run: Run, results: dict[str, Any]) -> None:
    """Print how well the run has learnt, and what its tables take."""
    from sparrow.analysis.parts import beside
    from sparrow.cli import _show
    from sparrow.models.blend.forest import available
    from sparrow.trained.labels import by_label, of_first

    if tried := results.get("tries"):
        _show.out.print(_tries_table(tried, of_first(results["labels"])))
    labels, windows = results["labels"], results["progressive"]
    rows = [(f"part {i + 1} of {len(windows)}", window) for i, window in enumerate(windows)]
    if rows:
        title = f"progressive validation{of_first(labels)}: each batch predicted, then trained on"
        _show.out.print(_show.metrics_table(rows, title))
    if valid := results["best"] or results["valid"]:
        lines = by_label(labels, valid)
        if baseline := beside(run, results):
            lines.append((f"a logistic regression{of_first(labels)}", baseline))
        _show.out.print(_show.metrics_table(lines, f"held out, after step {valid['step']}"))
        name = run.loop.monitor
        worse = (valid[name] - baseline[name]) * (1 if name in ("ne", "logloss") else -1) if baseline else 0.0
        if worse > 0:  # not where it is undefined
            advice = "try the default settings, --budget 60s, or the rates in docs/choosing-a-model.md"
            _show.out.print(f"the logistic regression is better by {worse:.4f} of {name}; {advice}", soft_wrap=True)
    if results["best_step"] is not None:
        monitor = f"{run.loop.monitor}{of_first(labels)}"
        _show.out.print(f"best by {monitor}: step {results['best_step']}; evaluate and predict use it by default")
    if (of := results.get("calibrated")) and of["test"]:
        _show.out.print(_show.calibrated_table(of))
        _show.notes(_show.calibrated_worse(of, Path(run.run_dir)))
    if parts := results["best"].get("parts"):
        _show.out.print(_parts_table(parts, of_first(labels)))
        if not available():
            _show.out.print("boosted trees are no part: LightGBM is not installed; pip install 'sparrow-rec[trees]'")
    told = f"tables: {results['tables']['bytes'] / 1e6:,.1f} MB"
    if rates := results["tables"]["hit_rate"]:
        told += f"; rows of batches that were in caches: {', '.join(f'{n} {r:.1%}' for n, r in rates.items())}"
    for name, of in results["tables"].get("ssd", {}).items():
        told += f"\n{name}: on an SSD; {of['hits'] / max(of['used'], 1):.1%} of rows of batches were in frames; "
        told += f"{of['bytes_read'] / 1e6:,.1f} MB read, {of['bytes_written'] / 1e6:,.1f} MB written"
    for name, ids in results["tables"]["ids"].items():
        rate, lost = ids["live"] / max(ids["looked_up"], 1), ids["evicted"] + ids["expired"]
        told += f"\n{name}: {ids['rows']:,} of {ids['capacity']:,} rows in use; {ids['admitted']:,} ids got one and "
        told += f"{lost:,} lost it; {rate:.1%} of lookups found one"
    _show.out.print(told, markup=False, soft_wrap=True)


def seconds(text: str) -> float:
    """Returns the seconds of a time such as 60s, 10m, 2h or 90."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        found = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise UserError(f"--budget {text}: not a time; give one such as 60s, 10m or 2h")
    return found


def _check_budget(known: Arguments) -> None:
    from sparrow.distributed import Lobby

    if not known.run.is_dir():
        raise UserError(f"--budget: {known.run} is a run file, whose settings are chosen; give a prepared log")
    if known.resume or known.profile or known.probe:
        remedy = "leave --resume, --profile and --probe out"
        raise UserError(f"--budget: neither goes on with a run nor looks into one; {remedy}")
    if Lobby(1.0).size > 1:
        raise UserError("--budget: tries settings in one process; start it without torchrun")


def _tries_table(tries: Sequence[dict[str, Any]], of: str) -> Table:
    from sparrow.cli import _show

    table = _show.Table(title=f"what was tried, judged by the valid part{of}", title_justify="left")
    for name in ("beside the defaults", tries[0]["monitor"], "seconds", ""):
        table.add_column(name, justify="right" if name in ("seconds", tries[0]["monitor"]) else "left")
    for one in tries:
        changed = ", ".join(f"{name} {value}" for name, value in one["changed"].items()) or "nothing"
        value = "not ended" if one["value"] is None else f"{one['value']:.4f}"
        table.add_row(changed, value, f"{one['seconds']:.1f}", "kept" if one["kept"] else "")
    return table


def _parts_table(parts: dict[str, dict[str, float]], of: str) -> Table:
    from sparrow.analysis.parts import NAMES
    from sparrow.cli import _show

    table = _show.Table(title=f"the parts of the blend alone{of}, on the same rows", title_justify="left")
    for name in ("", "weight", "ne"):
        table.add_column(name, justify="right" if name else "left")
    for name, part in parts.items():
        table.add_row(NAMES[name], f"{part['weight']:.2f}", f"{part['ne']:.4f}")
    return table


def _show_profile(run_dir: Path) -> None:
    from sparrow.cli import _show
    from sparrow.training import profiling

    found = profiling.read(run_dir)
    if found is None:
        _show.out.print(f"no profile: the run has fewer than {profiling.WARM_STEPS + 1} steps")
        return
    for title, rows in (("by part", found["parts"]), ("by kind of work", found["kinds"])):
        table = _show.Table(title=f"time of a step {title}, of {found['steps']} steps", title_justify="left")
        table.add_column("")
        for name in ("ms per step", "share"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row["part"], f"{row['ms_per_step']:.2f}", f"{row['share']:.1%}")
        _show.out.print(table)
    _show.out.print(
        f"{run_dir}/trace.json.gz: open it in Perfetto (ui.perfetto.dev) or chrome://tracing", soft_wrap=True
    )


def overrides(rest: Sequence[str]) -> dict[str, Any]:
    """Returns `--a.b 1 --c=x` as {"a.b": 1, "c": "x"}: a value is TOML if it parses, else plain text."""
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
            value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        found[name.replace("-", "_")] = value
    return found


def _help(arguments: Sequence[str]) -> None:
    """Print tyro's help, then every setting with the value it would have, and what the settings mean."""
    from sparrow.cli import _show
    from sparrow.core.config import families
    from sparrow.trained.run import Run
    from sparrow.training.defaults import defaults

    flags = [a for a in arguments if a not in ("--resume", "--overwrite", "--profile", "--probe")]
    valued = [False, *(a.startswith("--") and "=" not in a for a in flags)]  # whether this is the value of a flag
    places = [i for i, a in enumerate(flags) if not a.startswith("--") and not valued[i]]
    place = flags.pop(places[0]) if places else "data/NAME"
    given = overrides(flags)
    if place.endswith(".toml"):
        run = Run.load(place, given)
    else:
        run = Run.of(place, defaults(place, given) if Path(place).is_dir() else given)
    leaves = flatten(to_dict(run, unset=True))
    width = max(map(len, leaves)) + 2
    try:
        parse(Arguments, ["--help"], "train")
    finally:
        say = partial(_show.out.print, markup=False, soft_wrap=True)
        say(f"settings of {place}, each a flag, with the value it has:")
        for name, value in leaves.items():
            say(f"  --{name:<{width}} {'(unset)' if value is None else json.dumps(value)}")
        for part, family in families(run).items():
            say(f"--{part}.name is one of {', '.join(family.names())}")
        say("\nwhat they mean:")
        for name, part in {"": run, **dict(_parts(run))}.items():
            member = f" {leaves[f'{name}.name']}" if f"{name}.name" in leaves else ""
            say(f"\n{name or 'run'}{member}: {inspect.getdoc(type(part))}")


def _parts(config: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the configs in a config, by dotted name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{place}{field.name}", value
            yield from _parts(value, f"{place}{field.name}.")
