"""Train a model on a prepared log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sparrow.cli._parse import overrides, parse
from sparrow.core.config import named, read_toml
from sparrow.core.errors import UserError

if TYPE_CHECKING:  # it takes time to import
    from sparrow.trained.run import Run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a model on a prepared log. Any setting of a run can be set: --model.dim 32 --precision
    bf16.
    """

    run: tyro.conf.Positional[Path]
    """A prepared log, for a run with default settings in runs/NAME; or a run file, such as
    recipes/demo.toml.
    """
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue from the run's last checkpoint (or begin, if there is none)."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Begin again, and delete the checkpoints that are in the run directory."""
    budget: str | None = None
    """Try several settings for so long, such as 60s or 10m, and keep the run that is best on the
    valid part.
    """
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write a trace of some steps (trace.json.gz, for Perfetto) and a table of where their time
    goes.
    """
    probe: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Learn how the operands of each product are distributed (probe.safetensors, for
    `sparrow numerics`).
    """


def main(arguments: Sequence[str]) -> int:
    """`sparrow train PREPARED|RUN.toml [--resume] [--any.leaf value]`."""
    if any(argument in ("-h", "--help") for argument in arguments):
        from sparrow.cli import _settings_help

        _settings_help.show(
            [argument for argument in arguments if argument not in ("-h", "--help")], Arguments
        )
    known, rest = parse(Arguments, arguments, "train", unknown=True)
    from sparrow.analysis.picture import draw
    from sparrow.cli import _show
    from sparrow.distributed import leads
    from sparrow.layers.precision import AUTO
    from sparrow.trained.run import Run
    from sparrow.training import train
    from sparrow.training.rundir import Held

    settings = named(Run, overrides(rest))
    _check_source(known.run)
    if known.budget is not None:
        from sparrow.cli import _budget

        _budget.check(known.run, is_alone=not (known.resume or known.profile or known.probe))
    run = _read_run(known, settings)
    view = _show.TrainView()
    # until its last file is written the run's directory is no other training's
    with Held() as until_written:
        common: dict[str, Any] = {
            "overwrite": known.overwrite,
            "listener": view,
            "held": until_written,
        }
        try:
            if known.budget is not None:
                from sparrow.training.search import search

                results = search(known.run, settings, _budget.seconds(known.budget), **common)
                run = Run.load(Path(results["run_dir"]) / "run.toml")
            else:
                if run.precision.name == AUTO:
                    from sparrow.apps.numerics.auto import choose_precision

                    run = choose_precision(run, resume=known.resume, **common)
                flags = {"profile": known.profile, "probe": known.probe}
                options = {"baseline", *(name for name, is_on in flags.items() if is_on)}
                results = train(run, resume=known.resume, options=options, **common)
        finally:
            view.bar.stop()
        if not leads():  # only one of the ranks prints
            return 0
        show_results(run, results)
        if known.profile:
            from sparrow.cli import _profile

            _profile.show(Path(run.run_dir))
        picture = draw(Path(run.run_dir))
    _show_end(results, picture)
    return 130 if results["stopped_by"] == "SIGINT" else 0


def _show_end(results: dict[str, Any], picture: str | None) -> None:
    """Print what the run has written, and why it ended. picture: the name of its file."""
    from sparrow.cli import _show

    files = f"results.json, log.jsonl, checkpoints/{', ' + picture if picture else ''}"
    _show.out.print(f"{results['run_dir']}: {files}", soft_wrap=True)
    if results["stopped_by"]:
        message = f"stopped by {results['stopped_by']} after step {results['step']}"
        _show.out.print(f"{message}; --resume continues from there")


def _check_source(path: Path) -> None:
    """Check that a training is of a prepared log or of a run file."""
    if path.is_file() and path.suffix != ".toml":
        remedy = f"prepare it first (`sparrow prepare {path} --out data/NAME`) and train on that"
        raise UserError(
            f"{path}: neither a prepared log nor a run's .toml; if it is a log, {remedy}"
        )


def _read_run(known: Arguments, settings: dict[str, Any]) -> Run:
    """Returns the settings of a run: of its file, else of the log's defaults, or of the run that
    goes on. settings: that were given, by dotted name.
    """
    from sparrow.distributed import begin_lobby, run_on_rank0
    from sparrow.trained.run import Run
    from sparrow.training.defaults import defaults

    if known.run.is_dir():
        run = Run.of(known.run, defaults(known.run, settings))
    else:
        run = Run.load(known.run, settings)
    begun = Path(run.run_dir) / "run.toml"
    goes_on = known.resume and known.run.is_dir()

    def look() -> dict[str, Any] | None:
        return read_toml(begun) if goes_on and begun.is_file() else None

    # rank 0 looks, because others may see the folder later; the World does not exist yet: the file
    # says how it begins
    lobby = begin_lobby(run.sharding.timeout_s)
    earlier = run_on_rank0(lobby, "the run's settings", look)
    if earlier is None:
        return run
    # settings that are not given again stay
    return Run.load(begun, {**settings, "data.path": str(known.run)}, earlier)


def show_results(run: Run, results: dict[str, Any]) -> None:
    """Print how well the run has learnt, and what its tables take."""
    from sparrow.cli import _show
    from sparrow.trained.labels import first_label_suffix

    if tried := results.get("tries"):
        from sparrow.cli import _budget

        _show.out.print(_budget.tries_table(tried, first_label_suffix(results["labels"])))
    labels = results["labels"]
    windows = results["progressive"]
    rows = [(f"part {i + 1} of {len(windows)}", window) for i, window in enumerate(windows)]
    if rows:
        name = f"progressive validation{first_label_suffix(labels)}"
        title = f"{name}: each batch predicted, then trained on"
        _show.out.print(_show.metrics_table(rows, title))
    if valid := results["best"] or results["valid"]:
        _show_beside_baseline(run, results, valid)
    if results["best_step"] is not None:
        judged_by = f"{run.loop.monitor}{first_label_suffix(labels)}"
        _show.out.print(
            f"best by {judged_by}: step {results['best_step']}; evaluate and predict use it by"
            " default"
        )
    if refused := results.get("calibrated", {}).get("refused"):
        _show.notes([refused])
    if (calibrated := results.get("calibrated")) and calibrated["test"]:
        from sparrow.cli import _calibration

        _show.out.print(_calibration.metrics_table(calibrated))
        _show.notes(_calibration.worse_labels(calibrated, Path(run.run_dir)))
    if parts := results["best"].get("parts"):
        from sparrow.cli import _blend

        _blend.show_parts(parts, first_label_suffix(labels))
    text = _describe_tables(results["tables"])
    _show.out.print(text, markup=False, soft_wrap=True)


def _show_beside_baseline(run: Run, results: dict[str, Any], valid: dict[str, Any]) -> None:
    """Print the metrics of held-out rows, and a baseline's if the log has one."""
    from sparrow.cli import _show
    from sparrow.extensions.blend.baseline import evaluate_baseline
    from sparrow.metrics import metric_of
    from sparrow.trained.labels import first_label_suffix, split_labels

    labels = results["labels"]
    lines = split_labels(labels, valid)
    if baseline := evaluate_baseline(run, results):
        lines.append((f"a logistic regression{first_label_suffix(labels)}", baseline))
    _show.out.print(_show.metrics_table(lines, f"held out, after step {valid['step']}"))
    # a baseline has no metric of what the model measures
    baseline = baseline or valid
    monitor = metric_of(run.loop.monitor if run.loop.monitor in baseline else "ne")
    worse = monitor.cost(valid[monitor.name]) - monitor.cost(baseline[monitor.name])
    if worse > 0:  # not where it is undefined
        advice = "try the default settings, --budget 60s, or the rates in docs/choosing-a-model.md"
        message = f"the logistic regression is better by {worse:.4f} of {monitor.name}; {advice}"
        _show.out.print(message, soft_wrap=True)


def _describe_tables(tables: dict[str, Any]) -> str:
    """Returns what the tables of a run take, and how often their rows were where it is quick."""
    text = f"tables: {tables['bytes'] / 1e6:,.1f} MB"
    if rates := tables["hit_rate"]:
        text += (
            "; rows of batches that were in caches:"
            f" {', '.join(f'{n} {r:.1%}' for n, r in rates.items())}"
        )
    for name, ssd in tables.get("ssd", {}).items():
        rate = ssd["hits"] / max(ssd["used"], 1)
        text += (
            f"\n{name}: on an SSD; {rate:.1%} of rows of batches were in frames;"
            f" {ssd['bytes_read'] / 1e6:,.1f} MB read, {ssd['bytes_written'] / 1e6:,.1f} MB written"
        )
    for name, ids in tables.get("ids", {}).items():
        rate = ids["live"] / max(ids["looked_up"], 1)
        lost = ids["evicted"] + ids["expired"]
        text += (
            f"\n{name}: {ids['rows']:,} of {ids['capacity']:,} rows in use; {ids['admitted']:,} ids"
            f" got one and {lost:,} lost it; {rate:.1%} of lookups found one"
        )
    return text
