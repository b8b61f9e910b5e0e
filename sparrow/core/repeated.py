"""`Repeated`: a tensor of samples that knows what a user's samples share, so that its products can
run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core.plain import Informed

if TYPE_CHECKING:
    from sparrow.core.arrays import Int64s

LEAST = 1 << 22  # multiply-adds that take as long as taking a product in two
COPYING = 40  # multiply-adds that take as long as copying a number


@dataclass(eq=False)
class Users:
    """Whose the samples are.

    inverse_B: which user each sample is of, int64 [B]. sample_U: a sample of each user, int64 [U];
    any one for a user who has none. saved: multiply-adds that products could do without so far, see
    `Repeated.gains`. writes: how often an operation has written into one of their tensors.
    """

    inverse_B: Tensor
    sample_U: Tensor
    saved: int = 0
    writes: int = 0

    @classmethod
    def of(cls, user_B: Int64s, count: int) -> Users:
        """Returns the users of samples. user_B: whose each is. count: of users, U."""
        inverse_B = torch.from_numpy(user_B)
        sample_U = torch.zeros(count, dtype=torch.int64).scatter_(
            0, inverse_B, torch.arange(len(user_B))
        )
        return cls(inverse_B, sample_U)

    @property
    def repeats(self) -> int:
        """How many samples are not the first of their user, B - U."""
        return self.inverse_B.shape[0] - self.sample_U.shape[0]


class Columns(NamedTuple):
    """Which columns of a matrix a user's samples share, and which they have of their own, int64."""

    shared_S: Tensor
    own_O: Tensor

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, marks: bytes) -> Columns:
        """Returns the columns that the marks of a matrix name."""
        is_shared = torch.zeros(0, dtype=torch.bool)
        if marks:
            is_shared = torch.frombuffer(bytearray(marks), dtype=torch.bool)
        return cls(*(marks_C.nonzero()[:, 0] for marks_C in (is_shared, ~is_shared)))


class Repeated(Informed):
    """A tensor of B samples, some of whose columns are equal in all samples of a user.

    It is whole, and so any operation may use it. Those of `_MARKS` give a `Repeated` again: they
    move, cut or convert columns, or treat each number alone. Every other one gives a plain tensor.
    One that writes into it, or into a `Repeated` that is a view of it, ends what is known of both.

    users: whose the samples are. marks: bool, of the tensor's shape, but 1 where it has B: what
    samples share.
    """

    users: Users
    marks: Tensor
    _halves: tuple[int, Tensor, Tensor] | None

    @classmethod
    def of(cls, tensor: Tensor, users: Users, marks: Tensor) -> Repeated:
        """Returns a tensor with what is known of it."""
        repeated = tensor.as_subclass(cls)
        repeated.users = users
        repeated.marks = marks
        repeated.whole = tensor
        repeated._halves = None
        return repeated

    @classmethod
    def spread(cls, once_UD: Tensor, users: Users) -> Repeated:
        """Returns the row of its user for each sample, [B, D]."""
        rows_BD = once_UD.index_select(0, users.inverse_B)
        return cls.of(rows_BD, users, torch.ones(1, once_UD.shape[1], dtype=torch.bool))

    # -- for products: a matrix [B, C], or vectors that stand before samples, [C, B, D] ------------

    def key(self) -> bytes:
        """Returns for `Columns.of` which of the C are shared; a vector is if all of it is."""
        marks = self.marks if self.marks.dim() == 2 else self.marks.all(2)
        return marks.numpy().tobytes()

    def gains(self, out: int, least: int | None = None, copying: int | None = None) -> bool:
        """Returns whether a product gains by running once for what is shared.

        Args:
            out: how many sums of the C it makes.
            least: multiply-adds that take as long as taking it in two, by default those of fp32.
            copying: multiply-adds that take as long as copying a number, by default those of fp32.
        """
        least = LEAST if least is None else least
        copying = COPYING if copying is None else copying
        shared, own = (columns.shape[0] for columns in Columns.of(self.key()))
        size = self.marks.shape[2] if self.marks.dim() == 3 else 1
        samples = self.users.inverse_B.shape[0]
        saved = size * (self.users.repeats * shared * out - copying * samples * own)
        self.users.saved += max(saved, 0)
        return saved >= least

    def halves(self) -> tuple[Tensor, Tensor]:
        """Returns what samples share, once for each user [U, S] or [S, U, D], and what each has [B,
        O] or [O, B, D].

        It is done once, since often several products have the same input; and again after a write,
        which may have been into a view.
        """
        if self._halves is None or self._halves[0] != self.users.writes:
            shared_S, own_O = Columns.of(self.key())
            samples_dim = self.marks.dim() - 2
            once = self.whole.index_select(samples_dim, self.users.sample_U).index_select(
                1 - samples_dim, shared_S
            )
            self._halves = self.users.writes, once, self.whole.index_select(1 - samples_dim, own_O)
        return self._halves[1:]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do an operation on the whole, and keep what is known."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            in_place = kwargs.get("inplace") or (
                args and result is args[0] and any(argument is True for argument in args)
            )
            if _writes(func.__name__) or "out" in kwargs or in_place:
                for argument in (*args, kwargs.get("out")):
                    if isinstance(argument, Repeated):
                        argument.marks.zero_()  # views of it have views of them
                        argument.users.writes += 1
            elif func in _MARKS and not isinstance(result, Repeated):
                # there was something to be done
                return keep_marks(result, _MARKS[func], *args, **kwargs)
            return result


def keep_marks(result: Any, marks_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what an operation gave, with what is known of it.

    Args:
        result: a tensor, or several.
        marks_of: returns their marks, given what the operation was given. Where it raises, nothing
            is known.
        args, kwargs: of the operation.
    """
    users: list[Users] = []
    for arg in args:
        tensors = arg if isinstance(arg, (list, tuple)) else (arg,)
        users += [tensor.users for tensor in tensors if isinstance(tensor, Repeated)]
    if not users or any(tensor_users is not users[0] for tensor_users in users):
        return result
    try:
        marks = marks_of(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return result  # what was done is nothing that can be done with a batch of one
    if isinstance(result, Tensor):
        return _with_marks(result, users[0], marks)
    if len(result) != len(marks):
        return result
    parts = zip(result, marks, strict=True)
    return tuple(_with_marks(part, users[0], part_marks) for part, part_marks in parts)


def _with_marks(result: Tensor, users: Users, marks: Tensor) -> Tensor:
    """Returns a tensor with its marks, if they are those of this batch."""
    samples = [
        (size, mark) for size, mark in zip(result.shape, marks.shape, strict=False) if size != mark
    ]
    is_batch = result.dim() == marks.dim() and samples == [(users.inverse_B.shape[0], 1)]
    if is_batch and result.device == users.inverse_B.device:
        return Repeated.of(result, users, marks)
    return result


def marks_of_one(x: Tensor) -> Tensor:
    """Returns the marks of a tensor [B, ...]: those that are known, or of a row for all samples
    that it is shared.
    """
    return x.marks if isinstance(x, Repeated) else torch.full((1, *x.shape[1:]), x.shape[0] == 1)


@cache
def _writes(name: str) -> bool:
    """Whether an operation of this name writes into its argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return marks_of_one(x)


def _moved(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *how, **named: operation(marks_of_one(x), *how, **named)


def _joined(parts: Sequence[Tensor], *how: Any, **named: Any) -> Tensor:
    return torch.cat([marks_of_one(part) for part in parts], *how, **named)


def _marks_of_both(x: Any, y: Any) -> Tensor:
    first, *second = [marks_of_one(operand) for operand in (x, y) if isinstance(operand, Tensor)]
    return first & second[0] if second else first


_MOVES: tuple[Callable[..., Any], ...] = (
    torch.flatten,
    torch.split,
    torch.unbind,
    torch.transpose,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.split,
    Tensor.unbind,
    Tensor.transpose,
    Tensor.__getitem__,
)
_MARKS: dict[Any, Callable[..., Any]] = {
    torch.cat: _joined,
    **{operation: _moved(operation) for operation in _MOVES},
    **dict.fromkeys(
        (
            Tensor.to,
            Tensor.float,
            Tensor.contiguous,
            torch.sigmoid,
            Tensor.sigmoid,
            F.silu,
            F.hardswish,
        ),
        _same,
    ),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _marks_of_both),
}
"""Operation -> the marks of its result. What moves columns moves their marks: it is done with a
batch of one.
"""
