"""Matrices one after the other in messages, and the bytes that a codec makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import torch
from torch import Tensor

from sparrow.distributed import Codec

Shape = tuple[int, int, tuple[int, ...]]
"""Of a matrix: its rows, its columns, and those of each of its blocks (one table's vectors) from
left to right.
"""


@dataclass(frozen=True, eq=False)
class Form:
    """What some messages hold: each has matrices of these shapes, row by row, float32.

    Together they are one vector.
    """

    messages: Sequence[Sequence[Shape]]

    @cached_property
    def numbers(self) -> list[int]:
        """How many numbers each message holds."""
        return [_numbers(shapes) for shapes in self.messages]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all messages' matrices, in order."""
        return list(chain.from_iterable(self.messages))

    def matrices(self, flat_N: Tensor) -> list[Tensor]:
        """Returns the matrices [rows, columns] of all messages, as views of their numbers, float32
        [N].
        """
        sides = [(rows, columns) for rows, columns, _ in self.shapes]
        parts = flat_N.split([rows * columns for rows, columns in sides]) if sides else ()
        return [part.view(side) for part, side in zip(parts, sides, strict=True)]


def by_rank(
    matrices: Sequence[Tensor], form: Form, places: Sequence[int], device: torch.device
) -> Tensor:
    """Matrices of the rows of all ranks -> messages of this form with a part of each; places: of
    every rank's parts.
    """
    if len(matrices) == 1 and places == range(len(places)):  # it is the messages
        return matrices[0].flatten()
    shapes = form.shapes
    count = len(matrices)
    parts = [torch.empty(0, device=device)] * len(shapes)
    for number, matrix in enumerate(matrices):
        numbers = [place * count + number for place in places]
        for at, part in zip(numbers, matrix.split([shapes[at][0] for at in numbers]), strict=True):
            parts[at] = part
    return flat(parts, device)


def by_matrix(flat_N: Tensor, form: Form, places: Sequence[int]) -> list[Tensor]:
    """Returns the matrices from which `by_rank` made such messages."""
    shapes = form.shapes
    count = len(shapes) // len(places)
    if count == 1 and places == range(len(places)):
        return [flat_N.view(-1, shapes[0][1])]
    parts = form.matrices(flat_N)
    matrices = []
    for number in range(count):
        matrices.append(torch.cat([parts[place * count + number] for place in places]))
    return matrices


def flat(matrices: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the numbers of these matrices, one matrix after the other: float32 [N]."""
    return torch.cat([torch.empty(0, device=device), *[matrix.reshape(-1) for matrix in matrices]])


def pack(
    codec: Codec, flat_N: Tensor, form: Form, step: int, forward: bool
) -> tuple[Tensor, list[int]]:
    """Returns the bytes of messages, one after the other, and how many each has.

    Where the codec's blocks have no fixed size, their sizes come first in a message, int64.
    """
    if columns := _joined(codec, form):
        matrix = flat_N.view(flat_N.numel() // columns, columns)
        return codec.encode(matrix, step, forward), sizes(codec, form)
    parts = [flat_N.new_empty(0, dtype=torch.uint8)]
    counts: list[int] = []
    for part, shapes in zip(flat_N.split(form.numbers), form.messages, strict=True):
        blocks = [codec.encode(block, step, forward) for block in _cut(codec, part, shapes)]
        if not is_fixed(codec):
            lengths = [block.numel() for block in blocks]
            head = torch.tensor(lengths, dtype=torch.int64, device=flat_N.device)
            blocks.insert(0, head.view(torch.uint8))
        parts += blocks
        counts.append(sum(block.numel() for block in blocks))
    return torch.cat(parts), counts


def is_fixed(codec: Codec) -> bool:
    """Returns whether the shape of a block tells its bytes."""
    return codec.size(1, 1) is not None


def sizes(codec: Codec, form: Form) -> list[int]:
    """Returns the bytes of every message, by a codec for which that is known."""
    if columns := _joined(codec, form):
        return [codec.size(count // columns, columns) or 0 for count in form.numbers]
    return [
        sum(codec.size(*shape) or 0 for shape in _blocks(codec, shapes)) for shapes in form.messages
    ]


def unpack(codec: Codec, data: Tensor, counts: Sequence[int], form: Form) -> Tensor:
    """Returns the vector of messages. counts: the bytes of each message."""
    if columns := _joined(codec, form):
        return codec.decode(data, sum(form.numbers) // columns, columns).view(-1)
    pairs = zip(data.split(list(counts)), form.messages, strict=True)
    return flat(
        chain.from_iterable(_unpack(codec, part, shapes) for part, shapes in pairs),
        data.device,
    )


def _unpack(codec: Codec, data: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    blocks = _blocks(codec, shapes)
    if _columns(codec, shapes):
        return [codec.decode(data, *blocks[0])]
    if is_fixed(codec):
        lengths = [codec.size(*shape) or 0 for shape in blocks]
    else:
        head = len(blocks) * 8
        # a clone is aligned
        lengths = data[:head].clone().view(torch.int64).tolist()
        data = data[head:]
    pairs = zip(data.split(lengths), blocks, strict=True) if blocks else ()
    decoded = iter(
        [codec.decode(part if part.data_ptr() % 8 == 0 else part.clone(), *s) for part, s in pairs]
    )
    matrices = []
    for rows, _, widths in shapes:
        count = sum(width > 0 for width in widths) if rows else 0
        if count:
            matrices.append(torch.cat(list(islice(decoded, count)), 1))
    return matrices


def _cut(codec: Codec, flat_N: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns the blocks of a message's numbers that are encoded by themselves."""
    if _columns(codec, shapes):
        return [flat_N.view(side) for side in _blocks(codec, shapes)]
    pairs = zip(Form([shapes]).matrices(flat_N), shapes, strict=True)
    blocks: list[Tensor] = []
    for matrix, (_, _, widths) in pairs:
        if widths:
            blocks += [block for block in matrix.split(list(widths), 1) if block.numel()]
    return blocks


def _blocks(codec: Codec, shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Returns the shapes of these blocks."""
    if columns := _columns(codec, shapes):
        return [(_numbers(shapes) // columns, columns)]
    blocks: list[tuple[int, int]] = []
    for rows, _, widths in shapes:
        blocks += [(rows, width) for width in widths if rows and width]
    return blocks


def _joined(codec: Codec, form: Form) -> int:
    """Returns the columns of the one block that all messages together are; 0 if they are not."""
    unit = codec.unit
    if not isinstance(unit, int):
        return 0
    return unit if unit == 1 or all(_columns(codec, shapes) for shapes in form.messages) else 0


def _columns(codec: Codec, shapes: Sequence[Shape]) -> int:
    """Returns the columns of the one block that a message is; 0 if each table is a block, or there
    are no numbers.
    """
    unit = codec.unit
    if unit == "message":
        return _numbers(shapes)
    if unit == "table":
        return 0
    widths = chain.from_iterable(shape_widths for _, _, shape_widths in shapes)
    return 0 if any(width % unit for width in widths) else unit


def _numbers(shapes: Sequence[Shape]) -> int:
    return sum([rows * columns for rows, columns, _ in shapes])
