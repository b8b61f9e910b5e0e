"""`--precision auto`: a recipe that suits a model and the machine, decided once before a run
begins.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.apps.numerics.dispatch import as_file, verdicts, within_budget
from sparrow.apps.numerics.measure import gather_sites, judges_of
from sparrow.core.config import from_dict
from sparrow.core.errors import UserError
from sparrow.core.files import write_text
from sparrow.core.workplace import workplace
from sparrow.distributed import World, run_on_rank0
from sparrow.extensions.calibration import settings as calibration
from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.precision import recipe_file
from sparrow.extensions.tiers.block_files import BlockFiles, forget, remove_files
from sparrow.extensions.tiers.reuse import silent
from sparrow.extensions.tiers.settings import Config
from sparrow.layers.precision import AUTO, AUTO_FILE, Precision
from sparrow.trained.log import open_log
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training.begin import begin_ranks
from sparrow.training.loop import Listener, Trainer
from sparrow.training.plan import Plan
from sparrow.training.preflight import check_extensions, check_settings, threads_given_back
from sparrow.training.ranks import check_compiles
from sparrow.training.rundir import Held, RunDir

# of the short run that is probed, and of the valid part by which it is judged, then checked
STEPS = 300
ROWS = 20_000
BUDGET = 0.0002  # by which NE may rise, as a share of it


def choose_precision(
    run: Run,
    *,
    resume: bool,
    overwrite: bool,
    listener: Listener | None = None,
    held: Held | None = None,
) -> Run:
    """Returns a run with the precision that is decided for it, if that is "auto". All ranks have
    the same.

    A short run of fp32 in a temporary folder is probed, and candidates are timed. The recipe is
    kept as `run_dir/auto.toml`. A run that is resumed has the recipe that is there.

    Args:
        run: the settings.
        resume, overwrite: see `train`.
        listener: hears what is done.
        held: see `train`. No other training begins here between the short run and the one that
            follows.

    Raises:
        UserError: on all ranks, when nothing can be decided, or the run would be refused: before
            the short one, if that can be known.
    """
    if run.precision.name != AUTO:
        return run
    if run.precision.sites:
        raise UserError(
            "precision.sites: 'auto' chooses for all products; leave out sites, or name another"
            " precision"
        )
    ranks = begin_ranks(run)
    listen = listener if listener and ranks.leads else (lambda event, values: None)
    recipe_path = Path(run.run_dir) / AUTO_FILE
    with Held() as own_hold, threads_given_back(), ranks.world.watched():
        goes_on = resume or ranks.restart_mark.restarted  # by torchrun, after a rank had died
        recipe = run_on_rank0(
            ranks.world, "what auto chose", partial(_read_known, recipe_path, goes_on, overwrite)
        )
        if recipe is None:
            recipe = _decide(run, ranks.world, listen, held or own_hold)
        ranks.world.leave()
    precision = from_dict(Precision, recipe, "precision")
    summary = (
        f"{precision.name}, {len(precision.sites)} products by themselves"
        if precision.sites
        else precision.name
    )
    listen("note", {"text": f"precision: auto has {summary} ({recipe_path})"})
    return replace(run, precision=replace(precision, weights=run.precision.weights))


def _read_known(recipe_path: Path, goes_on: bool, overwrite: bool) -> dict[str, Any] | None:
    """Returns the recipe of a run that goes on; None where it is to be chosen."""
    if goes_on and recipe_path.exists():
        return recipe_file(recipe_path)
    if goes_on and (recipe_path.parent / "run.toml").exists():
        raise UserError(
            f"precision: {recipe_path.parent} began without 'auto'; leave --precision out, or"
            " --overwrite it"
        )
    RunDir(recipe_path.parent).require_free(overwrite)
    return None


def _decide(run: Run, world: World, listen: Listener, held: Held) -> dict[str, Any]:
    """Returns the recipe, which rank 0 chooses after all have trained the short run together."""
    place = RunDir(Path(run.run_dir))
    folders = list[Path]()
    plan = Plan(run=replace(run, precision=Precision()), dataset=data.open(run.data.path))
    check_settings(plan)
    check_extensions(plan)
    tiers = run.settings_of(Config)
    if tiers.folder is not None and world.hosts > 1 and not tiers.full_checkpoints:
        why = "'auto' reads a checkpoint on one host, which has not the blocks of others"
        remedy = "add --tiers.full_checkpoints true, or give a recipe file"
        raise UserError(f"precision: {why}; {remedy}")
    with ExitStack() as work:

        def hidden() -> str:
            held.take(place)
            return work.enter_context(workplace(place.path, forget))[0].name

        folder = place.path.parent / run_on_rank0(world, "run_dir", hidden) / "run"
        work.callback(remove_files, folders)  # each rank those that it has on its SSD
        listen(
            "note",
            {
                "text": (
                    f"precision: auto trains at most {STEPS} steps in fp32, and measures their"
                    " products"
                )
            },
        )
        _try(run, folder, folders, listen)
        listen(
            "note", {"text": "precision: auto measures products, and NE with them in fewer bits"}
        )
        choose = partial(_choose_recipe, folder, place.path / AUTO_FILE, world.size, listen)
        return run_on_rank0(world, "what auto chose", choose)


def _try(run: Run, folder: Path, folders: list[Path], listen: Listener) -> None:
    """Train the short run, which is not compiled, with the probe. folders: get those in which it
    has blocks.
    """
    steps = min(STEPS, run.loop.max_steps or STEPS)
    changes: dict[str, Any] = {
        "run_dir": str(folder),
        "precision": Precision(weights=run.precision.weights),
        "loop": replace(run.loop, max_steps=steps, epochs=1, patience=None, evaluate_every=None),
        "checkpoint": replace(run.checkpoint, every=None, background=False),
        "compile": False,
        "log": replace(run.log, tensorboard=False),
    }
    short = replace(run, **changes).with_settings(calibration.Config())

    def heard(event: str, values: dict[str, Any]) -> None:
        if event in ("begin", "progress"):
            listen(event, values)

    ranks = begin_ranks(short)
    with ranks.world.watched():
        trainer = Trainer(short, ranks, options={"probe"}, listener=heard)
        check_compiles(run, trainer.job.model)
        try:
            stopped = trainer.fit()["stopped_by"]
        finally:
            for member in trainer.callbacks.members:
                folders += member.folders if isinstance(member, BlockFiles) else []
        if stopped:
            raise UserError(f"precision: {stopped} came before 'auto' had chosen; begin again")
        ranks.world.leave()


def _choose_recipe(folder: Path, recipe_path: Path, ranks: int, listen: Listener) -> dict[str, Any]:
    """Returns the recipe that suits the short run, and keeps it. ranks: among which a batch is
    divided.
    """
    restored = restore(folder)
    run = restored.run
    dataset = open_log(restored)
    sites = gather_sites(restored, dataset, probe.load_of_run(folder)[0], silent)
    share = replace(run, data=replace(run.data, batch_size=-(-run.data.batch_size // ranks)))
    judges, _ = judges_of(dataset, ROWS)
    precision, rise = within_budget(
        restored, verdicts(sites, share, silent), judges, BUDGET, silent
    )
    header = f"By `sparrow train --precision auto`, after {restored.step} steps, for this machine."
    if rise is not None:
        header += f"\nOn rows that have not chosen it, NE is above that of fp32 by {rise}."
        listen(
            "note",
            {
                "text": (
                    f"precision: auto: NE is above that of fp32 by {rise}, on rows that have not"
                    " chosen"
                )
            },
        )
    write_text(recipe_path, as_file(precision, header))
    return recipe_file(recipe_path)
