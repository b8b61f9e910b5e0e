from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sparrow.kernels import Impl, missing, philox
from sparrow.kernels.philox.reference import philox as words_of

IMPLS: list[Impl] = ["reference"]
if not missing():
    IMPLS.append("cpp")
KEY = philox.key_of(0, "item")


def drawn(
    rows: int, dim: int, impl: Impl = "auto", key: int = KEY, row: int = 0, column: int = 0
) -> Tensor:
    out = torch.full((rows, dim), float("nan"))
    philox.uniform_(out, key, 1.0, row=row, column=column, impl=impl)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_words_are_those_of_its_authors(
    counter: tuple[int, ...], key: int, words: tuple[int, ...]
) -> None:
    """The known answers of Random123, kat_vectors, philox4x32-10."""
    found = words_of(tuple(torch.tensor([word]) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "first", [(0, 0), (1, 1), (3, 6), (2**32 - 2, 3), (2**40, 2**33 + 2), (2**62, 2**34 - 30)]
)
def test_a_part_has_the_numbers_of_the_whole(impl: Impl, first: tuple[int, int]) -> None:
    """Wherever it begins, also beyond 2**32 rows and columns; and an implementation has the
    reference's bits.
    """
    whole = drawn(7, 29, "reference", row=first[0], column=first[1])
    for (low, high), (left, right) in itertools.product(
        [(0, 7), (2, 3), (5, 5)], [(0, 29), (1, 4), (4, 8), (7, 28)]
    ):
        part = drawn(high - low, right - left, impl, row=first[0] + low, column=first[1] + left)
        assert torch.equal(part, whole[low:high, left:right])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dim", [4, 8, 12, 20, 32, 36, 128])
def test_rows_of_whole_counters_are_those_of_others(impl: Impl, dim: int) -> None:
    """They are made many at a time: at the ends of 32 bits of a row and of a group, and rows that
    are left over.
    """
    for row, column in ((0, 0), (2**32 - 19, 8), (2**40 + 3, 2**34 - 4 * dim)):
        whole = drawn(43, dim + 1, "reference", row=row, column=column)
        for low, high in ((0, 43), (1, 8), (5, 13), (3, 34)):
            assert torch.equal(
                drawn(high - low, dim, impl, row=row + low, column=column), whole[low:high, :dim]
            )


@pytest.mark.parametrize("dim", [1, 4, 6, 33])
def test_threads_and_blocks_do_not_matter(threads, dim: int) -> None:
    found = []
    for count in (1, 3):
        threads(count)
        found += [drawn(70_001, dim, impl) for impl in IMPLS]
    assert all(torch.equal(one, found[0]) for one in found)


def test_rows_that_lie_apart_are_filled() -> None:
    wide = torch.zeros(9, 8)
    philox.uniform_(wide[:, 2:5], KEY, 1.0)
    assert torch.equal(wide[:, 2:5], drawn(9, 3))
    assert not wide[:, :2].any() and not wide[:, 5:].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_lie_within_the_scale_and_reach_its_ends(impl: Impl) -> None:
    """The largest is below the scale whatever it rounds to; steps are 2**-23 of it."""
    for scale in (1.0, 0.3, 1e-4, 0.1 / 3):
        out = torch.empty(4096, 64)
        philox.uniform_(out, KEY, scale, impl=impl)
        bound = torch.tensor(scale)
        assert (out >= -bound).all() and (out < bound).all()
        assert out.min() < -0.9999 * bound and out.max() > 0.9999 * bound
    whole = drawn(4096, 64, impl).double() * 2**23
    assert torch.equal(whole, whole.round())
    # the last step counts
    assert (whole.long() & 1).double().mean() == pytest.approx(0.5, abs=5 * 0.5 / 512)


def test_numbers_are_uniform_and_independent() -> None:
    """Between columns, rows, tables, seeds and the halves of a row's counter; 5 standard errors are
    the bound.
    """
    plain = drawn(4096, 64)
    count = plain.numel()
    assert float(plain.double().mean()) == pytest.approx(0, abs=5 * (1 / 3 / count) ** 0.5)
    bins = torch.histc(plain, 256, -1, 1).double()
    chi = float(((bins - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
    others = {
        "next column": drawn(4096, 64, column=1),
        "next group": drawn(4096, 64, column=4),
        "next row": drawn(4096, 64, row=1),
        "row + 2**32": drawn(4096, 64, row=2**32),
        "another seed": drawn(4096, 64, key=philox.key_of(1, "item")),
        "another table": drawn(4096, 64, key=philox.key_of(0, "items")),
        "a key of one other bit": drawn(4096, 64, key=KEY ^ 1),
        "rows as columns": drawn(64, 4096).T,
    }
    for name, other in others.items():
        for one, two in ((plain, other), (plain.abs(), other.abs()), (plain**2, other**2)):
            a, b = one.double() - one.double().mean(), two.double() - two.double().mean()
            correlation = float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())
            assert abs(correlation) < 5 / count**0.5, name
    sums = torch.histc(plain.sum(1) / (64 / 3) ** 0.5, 16, -2, 2).double()  # of rows: nearly normal
    edges = torch.linspace(-2, 2, 17, dtype=torch.float64)
    want = 4096 * torch.special.ndtr(edges).diff()
    assert float(((sums - want) ** 2 / want).sum()) < 16 + 5 * 32**0.5


def test_seed_and_name_do_not_run_into_each_other() -> None:
    keys = {
        philox.key_of(seed, name) for seed in range(50) for name in ("", "1", " 1", "a", "b", "é")
    }
    assert len(keys) == 300
