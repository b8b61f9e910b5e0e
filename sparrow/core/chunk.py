from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.core.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A block of a table's row records, as checkpoints and reshards move it.

    Args:
        table: the name of the component.
        rows: the first row and the row after the last one, counted in the whole component.
        columns: the first column and the column after the last one, counted the same way.
        fields: name -> tensor with one entry per row in its first dimension: "weight" [rows,
            columns], the state of the rule such as "sum" [rows], and "touched" [rows].
        is_cache: whether it has instead the frames of a cache over these rows, see
            `CachedStore.saved`.

    Raises:
        UserError: when a field has another number of rows.
    """

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    fields: dict[str, Tensor]
    is_cache: bool = False

    def copied(self) -> Chunk:
        """Returns one with memory of its own."""
        return replace(self, fields={name: tensor.clone() for name, tensor in self.fields.items()})

    def __post_init__(self) -> None:
        count = self.rows[1] - self.rows[0]
        for name, tensor in self.fields.items() if not self.is_cache else ():
            if tensor.shape[0] != count:
                raise UserError(
                    f"chunk of table {self.table!r}, field {name!r}: {tensor.shape[0]} rows where"
                    f" the range {self.rows} holds {count}; cut the field to the range"
                )


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor on the host, uint8 [bytes]: a view where the tensor is
    contiguous.

    A dimension of one element may have any stride. torch says of it that it is contiguous, and then
    refuses its view.
    """
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided((len(flat),), (1,)).view(torch.uint8)
