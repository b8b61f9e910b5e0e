"""A run is set up: its choices are made, and its model and batches are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparrow import data, training
from sparrow.checkpoint import Checkpoint
from sparrow.core import UserError
from sparrow.core.extensions import adapt_optimizer
from sparrow.distributed import everywhere
from sparrow.layers.dropout import drops
from sparrow.layers.precision import mixing, native
from sparrow.trained.build import identity, tables_of
from sparrow.trained.run import Run
from sparrow.training.callbacks import Job
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed, read_share
from sparrow.training.group_batches import keep_groups_together
from sparrow.training.plan import Plan, identities
from sparrow.training.preflight import check_settings, resolved, with_threads
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import RunDir


def set_up(
    run: Run,
    ranks: Ranks,
    say: Callable[[str], None],
    *,
    resume: bool,
    overwrite: bool,
    options: Collection[str],
) -> Job:
    """Returns a run's job, with every choice made, the same on all ranks.

    Args:
        run: the settings.
        ranks: the ranks.
        say: tells a person.
        resume: go on from the last checkpoint.
        overwrite: begin again where another run's files are.
        options: what else was asked for, by name.

    Raises:
        UserError: when settings, log and run directory do not fit together.
    """
    if resume and overwrite:
        raise UserError(
            "resume and overwrite: one continues the old run, the other drops it; give one of them"
        )
    if ranks.restart_mark.restarted:  # by torchrun, after a rank had died
        resume = True
        overwrite = False
    run_dir = RunDir(Path(run.run_dir))
    dataset = data.open(run.data.path)
    plan = Plan(run=run, dataset=dataset, options=frozenset(options), say=say)
    own_identity = identity(run, dataset.schema)
    if of_extensions := identities(plan):
        own_identity["extensions"] = of_extensions
    saved, settings = run_dir.find(ranks.world, resume, overwrite, own_identity, dataset)
    run = _choose(plan, ranks, saved, settings)
    plan = replace(plan, run=run)
    check_settings(plan)
    model = _build_model(plan, ranks)
    optimizer = run.dense.build([p for p in model.parameters() if p.requires_grad])
    adapt_optimizer(optimizer, run)
    if run.compile:
        # else fused kernels leave out casts to bf16
        model.compile(options={"emulate_precision_casts": True})
    feed = _open_feed(plan, ranks, has_rows=drops(model))
    return Job(
        run=run,
        dataset=dataset,
        model=model,
        optimizer=optimizer,
        tables=tables_of(model),
        feed=feed,
        total_steps=_count_steps(run, len(feed.loader)),
        ranks=ranks,
        dir=run_dir,
        say=say,
        options=plan.options,
        identity=own_identity,
        saved=saved,
    )


def _choose(plan: Plan, ranks: Ranks, saved: Checkpoint | None, settings: Mapping[str, Any]) -> Run:
    """Returns the run with every choice made. settings: those of the run that goes on."""
    run = plan.run
    dataset = plan.dataset
    if saved:
        run = training.restart.with_choices(run, settings, plan.say)
    before = None
    if run.init_from and not saved:
        before = training.earlier_run.read_settings(RunDir(Path(run.init_from)), ranks.world)
    run = resolved(run, dataset, before, plan.say, plan.options)
    ranks.check_same(run, dataset.fingerprint, saved.step if saved else 0)
    size = ranks.world.size
    per_host = ranks.world.local_size
    fits = partial(with_threads, run, dataset, size, per_host, plan.options)
    run = everywhere(ranks.world, "memory and disks", fits, name_rank=True)
    for name, note in dataset.schema.suspects.items():
        plan.say(f"{name}: {note}")
    if (remark := native(run.precision, torch.device(run.device))) is not None:
        plan.say(f"precision: {remark}")
    return run


def _build_model(plan: Plan, ranks: Ranks) -> Any:
    """Returns the model of a run with every choice made."""
    run = plan.run
    dataset = plan.dataset
    torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    model: Any = ranks.build(run, dataset.schema)
    model.begin(dataset.log_odds())
    if mixed := mixing(model, run.precision):
        plan.say(f"precision: {mixed}")
    if ranks.layouts:
        plan.say(ranks.layouts)
    for tables in tables_of(model):
        tables.mode = run.loop.table_mode
    return model


def _open_feed(plan: Plan, ranks: Ranks, *, has_rows: bool) -> Feed:
    """Returns the batches of training. has_rows: whether they have the numbers of their rows."""
    run = plan.run
    dataset = plan.dataset
    share = read_share(run, dataset, ranks.world, "train", shuffle=bool(run.data.shuffle))
    loader = keep_groups_together(share, run, dataset, plan.say)
    if has_rows:
        loader.with_rows()
    drop = Dropout(dataset.schema, run.data.id_dropout or {}, run.seed)
    return Feed(loader, run.loop.accumulate, drop, torch.device(run.device))


def _count_steps(run: Run, batches: int) -> int:
    """Returns how many steps the run has at most. batches: of an epoch."""
    total = math.ceil(batches / run.loop.accumulate) * run.loop.epochs
    return min(total, run.loop.max_steps or total)
