"""When each training step ended: the same hook in either side's process."""

from __future__ import annotations

import time

from torch.optim.optimizer import register_optimizer_step_post_hook


class StepTimes:
    """times: seconds at the end of every step of any torch optimizer of this process, from now on."""

    def __init__(self) -> None:
        self.times: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self.times.append(time.perf_counter()))
