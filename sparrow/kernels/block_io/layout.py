"""Where the records of a table lie in blocks, and what a block says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.checksum import mixed_sum
from sparrow.kernels.formats import Field

# bytes: the checksum (8), the number (4), the generation (4); a bit for each record follows
HEAD = 16
MOST = 1 << 16  # bytes of a block


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Records in the order of their rows, as many to a block as fit. The last block has the rows
    that are left.

    A block is: checksum, number of the block, generation, a bit for each record that says whether
    it was ever put, then the records. A record is the bytes of its fields in their order. The
    checksum covers all else that is in the block.

    Args:
        fields: name -> field of a record.
        rows: R.
        block: the bytes of a block, a power of two of 512 to 65,536. By default the least from
            4,096 on that holds a
            record: devices read 4,096 at least as fast as fewer.

    Raises:
        UserError: when a record does not fit in a block.
    """

    fields: Mapping[str, Field]
    rows: int
    block: int = 0

    def __post_init__(self) -> None:
        enough = 1 << (self.start_of(1) + self.record_bytes - 1).bit_length()
        if not self.block:
            object.__setattr__(self, "block", min(max(enough, 4096), MOST))
        if not 512 <= self.block <= MOST or self.block & (self.block - 1):
            raise UserError(f"block: {self.block} bytes; give a power of two of 512 to {MOST}")
        if self.per_block < 1:
            remedy = f"give {enough}" if enough <= MOST else "lower the dim of its table"
            raise UserError(
                f"block: a row of {self.record_bytes} bytes does not fit in {self.block}; {remedy}"
            )

    @property
    def record_bytes(self) -> int:
        """The bytes of a record."""
        return sum(field.bytes_row for field in self.fields.values())

    @property
    def per_block(self) -> int:
        """How many records a full block has."""
        # a record has a bit beside its bytes
        count = 8 * (self.block - HEAD) // (8 * self.record_bytes + 1)
        fits = self.start_of(count) + count * self.record_bytes <= self.block
        return count if fits else count - 1

    @property
    def start(self) -> int:
        """Where in a block its first record begins."""
        return self.start_of(self.per_block)

    @property
    def blocks(self) -> int:
        """K, the number of blocks of the table."""
        return -(-self.rows // self.per_block)

    @staticmethod
    def start_of(records: int) -> int:
        """Where the records of a block begin if there are so many."""
        return HEAD + -(-records // 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMap:
    """Which block of a file holds which block of a table.

    Args:
        file: the number that the file was given when it was made, 0 <= file < 2**63.
        places_K: int32 [K], the place of each block of the table, in blocks of the file. 0: it was
            never written.
        generations_K: int32 [K], how often it was written.
    """

    file: int
    places_K: Tensor
    generations_K: Tensor


def checksum(words: Tensor, file: int) -> int:
    """Returns the checksum of a block, a sum in which each word is mixed with its place and the
    number of the file.

    Mixing is a bijection. So a change of one word is always found, any other but for a chance of
    2**-64.

    Args:
        words: int64 [block / 8]; the first, which is the checksum itself, does not count.
        file: see `BlockMap`.
    """
    return mixed_sum(words[1:], 1 + file, impl="reference")
