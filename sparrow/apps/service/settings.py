"""What a service is told, beside its limits. It travels to the processes that answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparrow.apps.service.logs import Logs
from sparrow.apps.service.lookups import Lookups
from sparrow.core.config import flag
from sparrow.core.errors import require
from sparrow.extensions.tiers.serving import Ssd


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service answers.

    Args:
        token_file: holds the token that callers have to send as `Authorization: Bearer TOKEN`, for
            all but health.
        name: of the model, in the Open Inference Protocol.
        workers: processes that answer. They share the memory of the model's tables.
        threads: how many batches each of them scores at a time.
        batching: "off" scores each request alone.
        lookups: where columns come from that requests do not have.
        ssd: which tables are read from an SSD, if any. The workers share its caches if they can.
        logs: what it writes down.
        token: what `token_file` holds, which `serve` reads.

    Raises:
        UserError: for a number that is out of range.
    """

    token_file: Path | None = None
    name: str = "model"
    workers: int = 1
    threads: int = 1
    batching: Literal["on", "off"] = "on"
    lookups: Lookups = field(default_factory=Lookups)
    ssd: Ssd | None = None
    logs: Logs = field(default_factory=Logs)
    token: bytes | None = field(default=None, repr=False, metadata=flag(None))

    def __post_init__(self) -> None:
        require(least=1, most=1_000, workers=self.workers, threads=self.threads)
