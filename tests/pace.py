"""Time limits in units of this machine's speed at the moment: it may be slower, or busy with other
work.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

# an import of torch on the machine for which the limits were written, when it has nothing else to
# do
QUIET_S = 2.0


def slowness() -> float:
    """How many times longer than there a bare process that imports torch takes now; never less than
    1.
    """
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - begun) / QUIET_S)


class Deadline:
    """So many seconds of a quiet machine from now on, and `fixed_s` that pass anywhere at the same
    speed.

    The machine is measured when these are over, and not before: where all is quiet it costs
    nothing. Work of this process alone is best counted by `time.process_time`, which stands while
    others have the processor.
    """

    def __init__(
        self, quiet_s: float, fixed_s: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet_s, self.fixed_s, self._slowness = quiet_s, fixed_s, 1.0
        self._clock, self._begun = clock, clock()

    @property
    def over(self) -> bool:
        """Whether more time has passed than anything but a hang explains."""
        passed = self._clock() - self._begun
        if passed > self.fixed_s + self.quiet_s * self._slowness:
            self._slowness = max(self._slowness, slowness())
        return passed > self.fixed_s + self.quiet_s * self._slowness

    def __str__(self) -> str:
        return (
            f"{self.fixed_s + self.quiet_s * self._slowness:.0f} s, {self._slowness:.1f} times"
            " those of a quiet machine"
        )
