from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from sparrow.checkpoint.removal import removed
from sparrow.distributed import World

Work = Callable[[Callable[[], None]], None]
"""Saves; calls what it is given when this rank's files are written, which comes back when
everyone's are.
"""


class Saver:
    """Writes checkpoints at once, or in a thread while training continues; never two at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, work: Work, background: bool) -> None:
        """Do the work. In the background the work must hold copies of what training changes.

        Args:
            work: writes the files.
            background: whether training continues meanwhile.
        """
        self.finish()
        if not background:
            work(partial(self._world.barrier, "checkpoint"))
            self._world.barrier("checkpoint")  # it has its name
            return
        self._written = threading.Event()
        self._everyone = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(work,), daemon=True, name="checkpoint"
        )
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether this rank's files are written and those of other ranks may not be."""
        if self._thread is None or self._error is not None:
            return False
        return self._written.is_set() and not self._everyone.is_set()

    def release(self) -> None:
        """Let the checkpoint get its name: the files of all ranks are written."""
        self._everyone.set()

    def finish(self) -> None:
        """Wait until the checkpoint that is under way has its name, and old ones are gone. Raises
        what went wrong.
        """
        if self._thread is not None:
            self._written.wait()
            if self._error is None and not self._everyone.is_set():
                self._world.barrier("checkpoint")
                self._everyone.set()
            self._thread.join()
            self._thread = None
            error = self._error
            self._error = None
            if error is not None:
                raise error
            self._world.barrier("checkpoint")
        removed()

    def _run(self, work: Work) -> None:
        try:
            work(self._ready)
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _ready(self) -> None:
        self._written.set()
        self._everyone.wait()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of torch's random numbers, of the host and of a GPU."""
    gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **gpu}


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
