"""Sizes of a run that asks only whether a program still works: SPARROW_TINY=1 in the environment.

Nothing that is timed then means anything; what a program checks holds at any size.
"""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")
TINY = os.environ.get("SPARROW_TINY") == "1"


def sized(full: Size, tiny: Size) -> Size:
    """The size of a run that counts, or that of a tiny one."""
    return tiny if TINY else full
