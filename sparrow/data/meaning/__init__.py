"""What the columns of a stranger's log mean: a first schema, guessed from its beginning."""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["impressions", "lists", "numbers", "requests", "separators", "texts", "times", "vectors"]

if TYPE_CHECKING:
    from sparrow.data.meaning import (
        impressions,
        lists,
        numbers,
        requests,
        separators,
        texts,
        times,
        vectors,
    )
else:
    __getattr__ = loaded_on_use(__name__, __all__)
