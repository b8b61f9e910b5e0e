"""`InOrder`: all rows of a table on an SSD, slice by slice."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparrow.embeddings.stores.store import First
from sparrow.extensions.tiers.stores.saved import put_into, take_rows
from sparrow.kernels.block_io import Blocks


class InOrder:
    """Reads slices of rows, most of which were perhaps never written, while nothing changes.

    All of a slice get first values, which neighbours have without an index each. Rows of blocks and
    of frames are put over them.

    Args:
        blocks: the file.
        first: gives first values.
        rows_H: int64 [H], ascending, the rows that are in frames.
        frames_H: int64 [H], their frames.
        held: field -> what the frames have, [F, ...].
    """

    def __init__(
        self,
        blocks: Blocks,
        first: First,
        rows_H: Tensor,
        frames_H: Tensor,
        held: Mapping[str, Tensor],
    ) -> None:
        self._blocks = blocks
        self._first = first
        self._held = held
        self._rows_H = rows_H
        self._frames_H = frames_H

    def read(self, at: slice) -> dict[str, Tensor]:
        """Returns all fields of the rows, as copies in the memory of the host. at: with both ends
        and no step.
        """
        fields = {name: values.contiguous() for name, values in self._first(at).items()}
        rows_U = self._blocks.known(at.start, at.stop)
        if len(rows_U):
            self._blocks.wait(self._blocks.fetch(rows_U, fields, rows_U - at.start))
        low, high = torch.searchsorted(self._rows_H, torch.tensor([at.start, at.stop])).tolist()
        if low < high:
            frames_V = self._frames_H[low:high]
            put_into(fields, self._rows_H[low:high] - at.start, take_rows(self._held, frames_V))
        return fields
