"""Whether torchrun has started a job again, and the run directory holds what an earlier attempt
began.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from sparrow.core.files import write_text
from sparrow.core.torchrun import launcher
from sparrow.distributed import World

PROCESS = uuid.uuid4().hex


class RestartMark:
    """The mark that an attempt leaves in its run directory: the torchrun agents that began it.

    An attempt continues a run when one of its own agents left the mark. An agent that comes back
    has another name; the store may have gone with its host; and the number of restarts counts what
    befell one agent only. Rank 0 decides, for all.
    """

    def __init__(self, world: World, run_dir: Path) -> None:
        self._path = run_dir / ".begun.json"
        self._agents = sorted(set(world.gathered("launchers", launcher())) - {""})
        self.restarted = world.broadcast("whether to go on", world.rank == 0 and self._marked())

    def _marked(self) -> bool:
        try:
            mark = json.loads(self._path.read_text(encoding="utf-8"))
            return mark["process"] != PROCESS and not set(mark["agents"]).isdisjoint(self._agents)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self) -> None:
        """Leave the mark: from now on the run directory holds this job's run."""
        if self._agents:
            write_text(self._path, json.dumps({"agents": self._agents, "process": PROCESS}))
