"""What plans for tables cost in normalised entropy, by short trainings of them and of the run as it
is.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparrow.analysis.judge import Judge
from sparrow.apps.smaller.plans import Plan
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.core.workplace import workplace
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import TableChoices
from sparrow.extensions.calibration import settings as calibration
from sparrow.metrics.intervals import Estimate, mean
from sparrow.trained.run import Log, Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.rundir import forget

FINALISTS = 3  # the plan that is best after one training each, and its two nearest rivals


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A plan with what short trainings say of it.

    Args:
        plan: the plan.
        damage: by how much its trainings raise the mean NE of those of the run as it is.
        error: the standard error of the damage, of other rows and of other seeds.
        seeds: how many trainings said so.
    """

    plan: Plan
    damage: float
    error: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What short trainings say.

    Args:
        plans: those that were trained. The finalists come first, the best of all before them.
        share: of the steps of the whole run that each training took.
        spread: the standard deviation of NE among seeds of the same tables.
        failures: why plans that are not among these could not be trained, a line each.
    """

    plans: tuple[Trained, ...]
    share: float
    spread: float
    failures: tuple[str, ...]


@dataclass(frozen=True)
class _Scores:
    """NE of one training. choose: of the rows to choose by. check: of other rows."""

    choose: Estimate
    check: Estimate


class _Trainings:
    """Trains a run with other tables and other seeds, and scores it.

    Args:
        run: its settings, every choice made.
        steps: of each training; None are all that the run has.
        folder: for run directories.
        judges: have the rows to choose by, and others.
        total: how many trainings there will be.
        progress: is told how far it is.
    """

    def __init__(
        self,
        run: Run,
        steps: int | None,
        folder: Path,
        judges: tuple[Judge, Judge],
        total: int,
        progress: Progress,
    ) -> None:
        self.judges = judges
        self._progress, self._folder = progress, folder
        self._done, self._total = 0, total
        self.failures: list[str] = []
        loop = replace(run.loop, progressive=False)
        if steps is not None:
            loop = replace(loop, max_steps=steps)
        self._run = replace(
            run,
            loop=loop,
            checkpoint=replace(run.checkpoint, keep=1, every=None),
            log=Log(tensorboard=False),
            init_from=None,
        ).with_settings(calibration.Config())

    def scores(self, tables: TableChoices, seed: int) -> _Scores:
        """Returns the scores of a training with these tables. seed: counted from that of the
        run.
        """
        self._progress("short trainings", self._done, self._total)
        place = self._folder / str(self._done)
        run = replace(self._run, run_dir=str(place), tables=tables, seed=self._run.seed + 1 + seed)
        if train(run)["stopped_by"]:
            raise KeyboardInterrupt
        restored = restore(place)
        choose, check = (judge.ne(restored) for judge in self.judges)
        forget(place)
        shutil.rmtree(place)
        self._done += 1
        self._progress("short trainings", self._done, self._total)
        return _Scores(choose, check)

    def scores_of(self, plan: Plan, seeds: Sequence[int]) -> list[_Scores]:
        """Returns the scores of a training of a plan for each seed; none where one fails, such as
        by divergence.
        """
        try:
            return [self.scores(plan.tables(self._run.tables), seed) for seed in seeds]
        except UserError as error:
            self.failures.append(f"{plan.kind}, {plan.bytes:,} bytes: {error}")
            return []


def by_training(
    run: Run,
    run_dir: Path,
    dataset: Dataset,
    plans: Sequence[Plan],
    judges: tuple[Judge, Judge],
    *,
    examples: int,
    seeds: int,
    progress: Progress,
) -> Verdict:
    """Train plans a short time, beside the run as it is, and return them with what they cost, the
    best one first.

    Each plan is trained once. The best of them and its two nearest rivals are trained again with
    other seeds, and so is the run as it is. The first of the plans has the least mean NE on the
    rows to choose by. What each costs is said by other rows and by seeds that had no part in the
    choice of the finalists.

    Args:
        run: its settings, every choice made.
        run_dir: its directory, beside which trainings have a hidden folder.
        dataset: its log.
        plans: at least one.
        judges: have the rows to choose by, and others.
        examples: rows that a training reads, at most; never more than the run reads.
        seeds: trainings of each finalist.
        progress: is told how far it is.

    Raises:
        UserError: when the run as it is cannot be trained, or no plan.
    """
    run_steps = _steps_of(run, dataset)
    steps = min(run_steps, math.ceil(examples / (run.data.batch_size * run.loop.accumulate)))
    is_screened = len(plans) > FINALISTS
    finalists = min(len(plans), FINALISTS)
    total = (1 + len(plans)) * is_screened + (1 + finalists) * seeds
    with workplace(run_dir, forget) as (folder, _):
        trainings = _Trainings(
            run, steps if steps < run_steps else None, folder, judges, total, progress
        )
        later = range(1, 1 + seeds)
        first = dict[int, list[_Scores]]()
        base_first = [trainings.scores(run.tables, 0)] if is_screened else []
        if is_screened:
            first = {i: trainings.scores_of(plan, [0]) for i, plan in enumerate(plans)}
        order = _order(first) if is_screened else list(range(len(plans)))
        base = [trainings.scores(run.tables, seed) for seed in later]
        later_scores = {i: trainings.scores_of(plans[i], later) for i in order[:FINALISTS]}
    later_scores = {i: scores for i, scores in later_scores.items() if scores}
    if not later_scores:
        raise UserError(f"no plan can be trained: {trainings.failures[0]}")
    spread = _spread([base, *later_scores.values()])
    combined = {i: [*first.get(i, []), *later_scores[i]] for i in later_scores}
    judged = [_judge(plans[i], later_scores[i], base, spread) for i in _order(combined)]
    judged += [_judge(plans[i], first[i], base_first, spread) for i in order[FINALISTS:]]
    failures = tuple(trainings.failures)
    return Verdict(plans=tuple(judged), share=steps / run_steps, spread=spread, failures=failures)


def _order(scores: Mapping[int, Sequence[_Scores]]) -> list[int]:
    """Returns the numbers of the plans that have scores, by their mean NE on the rows to choose
    by.
    """
    means = {
        i: statistics.mean(score.choose.value for score in row) for i, row in scores.items() if row
    }
    return sorted(means, key=lambda i: means[i])


def _steps_of(run: Run, dataset: Dataset) -> int:
    """Returns how many steps a run takes."""
    steps = run.loop.epochs * math.ceil(
        dataset.rows() / (run.data.batch_size * run.loop.accumulate)
    )
    return min(steps, run.loop.max_steps or steps)


def _spread(runs: Sequence[Sequence[_Scores]]) -> float:
    """Returns the standard deviation of NE among seeds, pooled over the tables; NaN of one seed."""
    values = [[scores.check.value for scores in row] for row in runs]
    squares = sum((value - statistics.mean(row)) ** 2 for row in values for value in row)
    freedom = sum(len(row) - 1 for row in values)
    return math.sqrt(squares / freedom) if freedom else math.nan


def _judge(
    plan: Plan, scores: Sequence[_Scores], base: Sequence[_Scores], spread: float
) -> Trained:
    """Returns a plan with what its trainings say beside those of the run as it is, of the same
    seeds.
    """
    rise = mean([new.check - old.check for new, old in zip(scores, base, strict=True)])
    error = math.hypot(rise.error, spread * math.sqrt(2 / len(scores)))
    return Trained(plan=plan, damage=rise.value, error=error, seeds=len(scores))
