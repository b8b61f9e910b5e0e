"""A run's checkpoints: what they hold of it, written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from sparrow import checkpoint, training
from sparrow.trained.build import fitted_values
from sparrow.trained.dense import optimizer_to_save, weights_to_save
from sparrow.training.callbacks import Callback, Job
from sparrow.training.progress import Progress
from sparrow.training.saver import Saver, random_state


class Checkpointer:
    """Saves a run, and continues it.

    saver: writes, at once or in a thread. saved_step: the step of the last checkpoint.

    Args:
        job: the run.
        callbacks: what goes along with it.
    """

    def __init__(self, job: Job, callbacks: Callback) -> None:
        self.saver = Saver(job.ranks.world)
        self.saved_step = job.saved.step if job.saved else None
        self._job = job
        self._callbacks = callbacks

    def load(self, saved: checkpoint.Checkpoint) -> Progress:
        """Continue from a checkpoint. Returns how far its run was."""
        job = self._job
        training.restart.load(saved, job.model, job.optimizer, job.device)
        self._callbacks.load(saved)
        job.feed.load_state_dict(saved.state["loader"])
        return Progress.load(saved.state)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of now. If there is one, only what is known of it since is written.

        Raises:
            UserError: when ids or dense weights are spoilt, and when the disk is full.
        """
        job = self._job
        run = job.run
        self._check_sound(progress)
        is_new = self.saved_step != progress.step
        if is_new:  # a run that goes on from here has these on all ranks
            job.ranks.take_rank0s(job.model, job.optimizer, job.say)
        state = self._state(progress)
        parts = self._parts()
        chunks: Iterable[Any] = chain(
            *(tables.saved() for tables in job.tables), self._callbacks.pieces()
        )
        self.saved_step = progress.step  # asked of memory: ranks may see the folder differently
        background = run.checkpoint.background
        if background and is_new:
            chunks = [chunk.copied() for chunk in chunks]
            for name, part in parts.items():
                parts[name] = {key: tensor.clone() for key, tensor in part.items()}
        folder = job.dir.checkpoints
        step = progress.step
        world = job.ranks.world

        def work(wait_for_ranks: Callable[[], None]) -> None:
            if is_new:
                team = checkpoint.Team(
                    rank=world.rank, ranks=world.size, all_written=wait_for_ranks
                )
                checkpoint.save(
                    folder,
                    step,
                    parts=parts,
                    chunks=chunks,
                    team=team,
                    identity=job.identity,
                    state=state,
                    keep=run.checkpoint.keep,
                )
            elif job.ranks.leads:
                checkpoint.update_state(folder, step, state)

        self.saver.save(work, background)
        self._callbacks.after_save(step)

    def _check_sound(self, progress: Progress) -> None:
        """Check that what is saved works: it may replace a checkpoint that does."""
        for tables in self._job.tables:
            tables.raise_bad_ids()  # what they changed is never saved
        if self._job.run.loop.nonfinite == "off":
            return
        if not all(bool(p.isfinite().all()) for p in self._job.dense):
            raise progress.diverged("dense weights")

    def _state(self, progress: Progress) -> dict[str, Any]:
        """Returns plain values, by name."""
        job = self._job
        state = {**vars(progress)}
        state |= {"loader": job.feed.state_dict(), "data": job.dataset.fingerprint}
        state |= self._callbacks.before_save(progress.step)
        state["features"] = fitted_values(job.dataset.schema)
        return state

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """Returns tensors, by the file that has them."""
        job = self._job
        parts: dict[str, dict[str, Tensor]] = {
            "dense": weights_to_save(job.model, job.ranks.world),
            "optimizer": optimizer_to_save(job.model, job.optimizer, job.ranks.world),
        }
        progressive = self._callbacks.state_dict()  # on all ranks: members may wait for each other
        if job.ranks.leads:
            parts |= {"random": random_state(job.device), "progressive": progressive}
        return parts
