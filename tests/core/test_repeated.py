"""What is known of a tensor is true after every operation, or nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core.plain import plain
from sparrow.core.repeated import Columns, Repeated, Users
from sparrow.layers.numeric import NumericEmbedding

USER_B = np.array([0, 0, 2, 2, 2, 0, 4])
SHARED = [[True, False, True, True, False, False]]


def users() -> Users:
    return Users.of(USER_B, 5)


def matrix(seed: int = 0, marks: list[list[bool]] = SHARED, whose: Users | None = None) -> Repeated:
    whose = whose or users()
    x_BD, marks_1D = (
        torch.randn(7, 6, generator=torch.Generator().manual_seed(seed)),
        torch.tensor(marks),
    )
    first_BD = x_BD[whose.sample_U][whose.inverse_B]
    return Repeated.of(torch.where(marks_1D, first_BD, x_BD), whose, marks_1D)


def assert_true(x: Repeated) -> None:
    """What is marked is equal in all samples of a user."""
    samples = [
        d for d in range(x.whole.dim()) if x.marks.shape[d] == 1 and x.whole.shape[d] == len(USER_B)
    ]
    assert len(samples) == 1
    whole = x.whole.movedim(samples[0], 0)
    of_user = whole[x.users.sample_U][x.users.inverse_B]
    assert ((whole == of_user) | ~x.marks.movedim(samples[0], 0)).all()


KEPT: dict[
    str, tuple[Callable[[Any], Any], int]
] = {  # what it does, and how many numbers of a sample are known after it
    "to a type": (lambda x: x.to(torch.float64), 3),
    "to its own type": (lambda x: x.to(torch.float32), 3),
    "float": (lambda x: x.double().float().to(torch.float64), 0),
    "contiguous": (lambda x: x.contiguous(), 3),
    "vectors": (lambda x: x.unflatten(1, (3, 2)), 3),
    "and back": (lambda x: x.unflatten(1, (3, 2)).flatten(1), 3),
    "a part": (lambda x: x[:, 2:], 2),
    "no part": (lambda x: x[:, :0], 0),
    "chosen": (lambda x: x[:, torch.tensor([3, 3, 0, 1])], 3),
    "parts of vectors": (lambda x: x.unflatten(1, (3, 2))[..., :-1].flatten(1), 2),
    "one": (lambda x: x.unflatten(1, (3, 2)).unbind(1)[1], 2),
    "some": (lambda x: x.split([2, 4], 1)[1], 2),
    "beside itself": (lambda x: torch.cat([x, x], 1), 6),
    "beside others": (lambda x: torch.cat([torch.ones(7, 2), x], 1), 3),
    "samples second": (lambda x: x.unflatten(1, (3, 2)).transpose(0, 1).contiguous(), 3),
    "times a number": (lambda x: 2 * x * 3.0, 3),
    "times a row": (lambda x: x * torch.arange(6.0)[None], 3),
    "times another": (
        lambda x: x * matrix(1, [[True, True, True, False, False, False]], x.users),
        2,
    ),
    "times what is not known": (lambda x: x * torch.arange(42.0).view(7, 6), 0),
    "sigmoid": (lambda x: torch.sigmoid(x), 3),
    "swish": (lambda x: F.silu(x), 3),
    "hard-swish": (lambda x: F.hardswish(x), 3),
}


@pytest.mark.parametrize("name", KEPT)
def test_operations_that_keep_it(name: str) -> None:
    operation, known = KEPT[name]
    x = matrix()
    found = operation(x)
    if name != "times another":
        assert torch.equal(plain(found), operation(x.whole))
    if isinstance(found, Repeated):
        assert_true(found)
        assert int(found.marks.sum()) == known
    else:
        assert known == 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x @ torch.ones(6, 2),
        lambda x: x.t() @ torch.ones(7, 2),
        lambda x: x.flip(0),
        lambda x: x[torch.arange(6, -1, -1)],
        lambda x: x[torch.zeros(7, dtype=torch.int64)],
        lambda x: x[1:],
        lambda x: x[2],
        lambda x: x[x[:, 0] > 0],
        lambda x: x.unflatten(1, (3, 2)).flatten(0, 1),
        lambda x: (
            x.unflatten(0, (7, 1)).unflatten(0, (1, 7)).flatten(0, 1).transpose(1, 2)[:, :, 0] + 0
        ),
        lambda x: x.cumsum(0),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: x.unbind(0)[0],
        lambda x: x.split(1)[0],
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, matrix()], 1),  # of another batch
        lambda x: torch.cat([x, torch.empty(0, 6)]),
        lambda x: torch.mul(x, other=2.0),  # only arguments by position are followed
        lambda x: torch.stack([x, x], 1),
        lambda x: x.clone(),
    ],
)
def test_every_other_operation_gives_a_plain_tensor(operation: Callable[[Tensor], Tensor]) -> None:
    found = operation(matrix())
    assert type(found) is Tensor
    assert torch.equal(found, operation(matrix().whole))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(torch.randn(7, 6)),
        lambda x: x.__setitem__((slice(None), 0), torch.randn(7)),
        lambda x: x.__iadd__(torch.randn(7, 6)),
        lambda x: torch.mul(torch.randn(7, 6), torch.randn(7, 6), out=x),
        lambda x: x.unflatten(1, (3, 2)).flatten(1).mul_(torch.randn(7, 6)),
        lambda x: x.unbind(1)[0].normal_(),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True),
    ],
)
def test_who_writes_into_it_or_into_a_view_ends_its_knowledge(
    write: Callable[[Tensor], Any],
) -> None:
    x = matrix()
    view = x.unflatten(1, (3, 2))
    write(x)
    assert_true(x)
    assert not x.marks[:, 0].any()
    if isinstance(view, Repeated):
        assert_true(view)


def test_halves() -> None:
    x = matrix()
    shared_US, own_BO = x.halves()
    columns = Columns.of(x.key())
    assert columns.shared_S.tolist() == [0, 2, 3] and columns.own_O.tolist() == [1, 4, 5]
    whole = torch.empty(7, 6)
    whole[:, columns.shared_S], whole[:, columns.own_O] = shared_US[x.users.inverse_B], own_BO
    assert torch.equal(whole, x.whole)
    assert x.halves()[1] is own_BO


@pytest.mark.parametrize(
    "part", [slice(1, 2), slice(2, 3), slice(0, 6)], ids=["own", "shared", "all"]
)
def test_halves_are_of_the_tensor_as_it_is_now(part: slice) -> None:
    """Whoever writes into a view writes into the tensor."""
    x = matrix()
    x.halves()
    x[:, part].normal_()
    shared_US, own_BO = x.halves()
    columns = Columns.of(x.key())
    assert torch.equal(shared_US[x.users.inverse_B], x.whole[:, columns.shared_S])
    assert torch.equal(own_BO, x.whole[:, columns.own_O])


def test_spread() -> None:
    x = Repeated.spread(torch.randn(5, 3), users())
    assert x.marks.all()
    assert_true(x)


@torch.no_grad()
def test_scaled_vectors_of_numbers() -> None:
    """Both forms, beside what is known and what is not."""
    numeric, numbers = NumericEmbedding(6, 2), matrix()
    for rest, known in ((matrix(1, [[True] * 6], numbers.users), 6), (torch.randn(7, 6), 0)):
        for found, times in zip(numeric(numbers, rest), (2, 1), strict=True):
            assert isinstance(found, Repeated)
            assert_true(found)
            # columns of 0
            assert int(found.marks.sum()) == 3 * times + known + (10 if times == 1 else 0)
