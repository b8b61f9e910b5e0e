"""When each training step ended: the same hook in either side's process."""

from __future__ import annotations

import time

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class StepTimes:
    """Notes the steps of every torch optimizer of this process, from now on."""

    def __init__(self) -> None:
        self._times: dict[Optimizer, list[float]] = {}
        register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        self._times.setdefault(optimizer, []).append(time.perf_counter())

    @property
    def times(self) -> list[float]:
        """Seconds at the end of every step of the optimizer that took most of them: others only try
        something.
        """
        return max(self._times.values(), key=len, default=[])
