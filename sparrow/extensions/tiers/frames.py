"""How many rows of a component have frames, and what these hold."""

from __future__ import annotations

import math

import torch

from sparrow.embeddings.spec import Component
from sparrow.kernels.formats import Field
from sparrow.kernels.row_cache import WAYS
from sparrow.kernels.row_cache.policies import policy_of

TAG_BYTES = 8  # beside a record in a frame: its row and its last batch
# of a table on an SSD, at least, if nothing is said: its batches under way fit in them
FRAMES = 1 << 16


def exact_fields(component: Component, dim: int) -> dict[str, Field]:
    """Returns the fields of an exact row: those of a row, the row's number, its last batch and its
    last update.
    """
    numbers = {name: Field(dtype=torch.int32, across="max") for name in ("tag", "stamp", "changed")}
    return component.in_frames.fields_of(dim) | numbers


def exact_bytes(component: Component, dim: int) -> int:
    """Returns the bytes of an exact row."""
    return sum(field.bytes_row for field in exact_fields(component, dim).values())


def exact_frames(component: Component, rows: int) -> int:
    """Returns how many frames the cache of exact rows has over a part with so many rows.

    They are whole sets, one at least, and as many as rows need.

    A fraction is rounded up, so that 1 is a frame for each row. Bytes are those of all rows with
    all columns, and a bound that only first sets may pass. Parts of the same rows have the same
    frames, however columns are cut.
    """
    cache = component.cache
    return _frames_of_sets(
        component, cache.fraction, cache.bytes, exact_bytes(component, component.dim), rows
    )


def _frames_of_sets(
    component: Component, fraction: float, size: int, frame_bytes: int, rows: int
) -> int:
    share = size * rows // (component.rows * WAYS * frame_bytes)
    sets = math.ceil(fraction * rows / WAYS) if fraction else share
    return WAYS * max(1, min(sets, -(-rows // WAYS)))


def tier_frames(component: Component, rows: int) -> tuple[int, int]:
    """Returns the frames of a tier over a part with so many rows: of its cache, and those that
    stand by.
    """
    tier = component.tier
    fraction = tier.fraction or (0.0 if tier.bytes else min(max(0.1, FRAMES / max(rows, 1)), 1.0))
    frames = _frames_of_sets(
        component, fraction, tier.bytes * 4 // 5, component.bytes_row + TAG_BYTES, rows
    )
    return frames, min(max(frames // 4, WAYS), max(rows - frames, 0))


def tier_bytes(component: Component, rows: int, dim: int) -> int:
    """Returns the bytes of the frames of a tier for a part of the rows, and of counts of their
    uses.
    """
    frames = sum(tier_frames(component, rows)) * (component.record_bytes(dim) + TAG_BYTES)
    return frames + rows * policy_of(component.tier.policy).bytes_row
