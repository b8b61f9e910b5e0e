"""Tables larger than memory: rows on an SSD, in the host's memory or in mapped files, and frames
for some of them.

Apps and the command line may import it. It imports the library.
"""

from collections.abc import Collection
from typing import Any

from sparrow.core.extensions import Extension


def _applies(run: Any, options: Collection[str]) -> bool:
    """Whether some rows have frames or are not in memory, or were so in a run that went on before
    in its directory.
    """
    tables = run.tables
    is_chosen = (
        tables.tier.name != "memory"
        or tables.tier.fraction
        or tables.tier.bytes
        or tables.cache.is_on
    )
    was_on = "elsewhere" in options
    return bool(is_chosen or was_on or any(part.tier or part.cache for part in tables.overrides))


EXTENSION = Extension(
    members={
        "sparrow.embeddings.tiers": {"host": "host", "mapped": "mapped", "ssd": "ssd"},
        "sparrow.embeddings.caches": {"frames": "exact"},
        "sparrow.checkpoint": {"blocks": "stores.saved", "mixed_sum": "pieces"},
    },
    settings=True,
    earlier_names={
        "ssd": "folder",
        "checkpoint.whole": "full_checkpoints",
        "loop.ahead": "prefetch",
    },
    may_differ=("folder",),
    applies=_applies,
    elsewhere={".ssd.json": "block_files"},
    plans=True,
)
