"""Column -> ids and numbers: arrow and numpy functions that preparing a log and serving call alike."""

from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids, as_lists, is_text
from sparrow.features.numeric import Statistics, as_numbers, tamed, transform, untamed
from sparrow.features.times import as_times, ticks_per_second

__all__ = [
    "Statistics",
    "as_ids",
    "as_lists",
    "as_numbers",
    "as_times",
    "hash_ids",
    "is_text",
    "tamed",
    "ticks_per_second",
    "transform",
    "untamed",
]
