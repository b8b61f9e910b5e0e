"""Dynamic ids: ids of a table get rows as they come, and lose them when others need them.

Apps and the command line may import it. It imports the library.
"""

from collections.abc import Collection
from typing import Any

from sparrow.core.extensions import Extension

NAME = "dynamic"


def _applies(run: Any, options: Collection[str]) -> bool:
    """Whether a run has dynamic ids in all tables, in some, or where every size is written out."""
    tables = run.tables
    if type(tables.addressing).__module__ == f"{__name__}.addressing":
        return True
    settings = [override.addressing or {} for override in tables.overrides]
    settings.extend(tables.sizes.values())
    return any(setting.get("name") == NAME for setting in settings)


EXTENSION = Extension(
    members={"sparrow.embeddings.addressing": {NAME: "addressing"}}, applies=_applies
)
