"""What a service is told, beside its limits. It travels to the processes that answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparrow.core.errors import require
from sparrow.serving.service.logs import Logs
from sparrow.serving.service.lookups import Lookups
from sparrow.serving.ssd import Ssd


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service answers.

    Args:
        name: of the model, in the Open Inference Protocol.
        workers: processes that answer. They share the memory of the model's tables.
        threads: how many batches each of them scores at a time.
        token: what callers have to send, if anything.
        is_batching: whether requests may be scored together.
        logs: what it writes down.
        lookups: where columns come from that requests do not have.
        ssd: which tables are read from an SSD, if any. The workers share its caches if they can.

    Raises:
        UserError: for a number that is out of range.
    """

    name: str = "model"
    workers: int = 1
    threads: int = 1
    is_batching: bool = True
    logs: Logs = field(default_factory=Logs)
    lookups: Lookups = field(default_factory=Lookups)
    ssd: Ssd | None = None
    token: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require(least=1, most=1_000, workers=self.workers, threads=self.threads)
