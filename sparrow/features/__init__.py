"""Column -> ids and numbers: arrow and numpy functions that preparing a log and serving call alike."""

from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids, as_lists, encode, is_text
from sparrow.features.numeric import Moments, as_numbers, transform

__all__ = ["Moments", "as_ids", "as_lists", "as_numbers", "encode", "hash_ids", "is_text", "transform"]
