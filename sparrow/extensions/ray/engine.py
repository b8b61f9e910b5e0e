"""Opens the engine of a cluster. Ray and daft are loaded once it is known that they can do the
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.logs.read import Log
from sparrow.features.schema import Schema

if TYPE_CHECKING:
    from sparrow.extensions.ray.cluster import OnRay


def open_engine(
    address: str, schema: Schema, logs: Sequence[Log], work: Path, progress: Progress
) -> OnRay:
    """Returns the engine (see `Engine`) on a Ray cluster.

    Args:
        address: the cluster's, "auto" for the one that Ray finds, or "local" for one of this
            machine.
        schema: says what the columns are.
        logs: one, or those of train, valid and test.
        work: a folder that all machines see.
        progress: see `Progress`.

    Raises:
        UserError: for a column whose counts one machine has to make, for a table in memory, and
            where no cluster answers.
    """
    for name in schema.counted:
        reason = "counts rows that are earlier in any file, for which one machine must see all"
        raise UserError(f"ray: columns.{name} {reason}; leave out ray, or the column")
    from sparrow.extensions.ray.cluster import OnRay  # needs the extra [ray]

    return OnRay(schema, logs, work, progress, address=address)
