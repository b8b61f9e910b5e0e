"""Rows that are stored otherwise than the chunks they come from: `moved_rows.load_rows`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import Chunk, UserError
from sparrow.embeddings import Placement
from sparrow.embeddings import records as module
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.spec import Component, in_memory
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.stores.cached import ssd_of
from sparrow.kernels.formats import (
    RowFormat,
    bf16,
    fp16,
    fp32,
    int4,
    int8,
    mxfp4,
    mxfp6,
    mxfp8,
    mxint8,
    split_bf16,
)
from sparrow.kernels.philox import key_of
from sparrow.kernels.rules import adam, rowwise_adagrad
from sparrow.numerics.rounding import noise, to_bf16
from tests.embeddings.members.scattered import Scattered

ROWS, DIM, SEED = 50, 9, 3
FORMATS: dict[str, RowFormat] = {
    "fp32": fp32.Config(),
    "fp16": fp16.Config(),
    "bf16": bf16.Config(),
    "bf16, nearest": bf16.Config(rounding="nearest"),
    "split_bf16": split_bf16.Config(),
    "int8": int8.Config(),
    "int4": int4.Config(),
    "mxint8": mxint8.Config(),
    "mxfp8": mxfp8.Config(),
    "mxfp6": mxfp6.Config(),
    "mxfp4": mxfp4.Config(),
}
OLD = Component(name="t", rows=ROWS, dim=DIM, rule=adam.Config(), init_scale=1.0)


def random_noise(field: int, rows_U: Tensor, columns: tuple[int, int] = (0, DIM)) -> Tensor:
    return noise(key_of(SEED, "t"), field, rows_U, columns, 0)


def chunk_of(component: Component) -> Chunk:
    """The rows of a component that has learnt something."""
    held = RowRecords(component, SEED + 1)
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name in component.rule.fields(DIM):
        old = held.fields[name]
        state[name] = torch.rand(old.shape, generator=generator).to(old.dtype)
    touched = torch.randint(0, 2, (component.rows,), generator=generator).to(torch.uint8)
    held.store.write(slice(None), {**state, "touched": touched})
    (chunk,) = held.chunks(1 << 30)
    return chunk


def cut(chunk: Chunk, left: int, right: int) -> Chunk:
    fields = {name: t[:, left:right] if t.dim() == 2 else t for name, t in chunk.fields.items()}
    return replace(chunk, columns=(left, right), fields=fields)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(FORMATS, 2)])
def test_rows_are_decoded_and_encoded_again(
    one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows move, some go nowhere, and new ones stay as they began; more of them than are
    converted at a time.
    """
    monkeypatch.setattr(module, "BLOCK", 7)
    old, new = replace(OLD, format=FORMATS[one]), replace(OLD, format=FORMATS[other], rows=ROWS + 4)
    chunk, record, fresh = chunk_of(old), RowRecords(new, SEED), RowRecords(new, SEED)
    to_N = torch.randperm(ROWS + 4, generator=torch.Generator().manual_seed(1))[:ROWS]
    to_N[::5] = -1
    went_N = to_N >= 0
    assert record.load_rows(chunk, to_N, old) == int(went_N.sum()) * DIM
    values_UD = old.format.exact({n: chunk.fields[n] for n in old.format.fields(DIM)}, DIM)[went_N]
    rows_U = to_N[went_N]
    random_UD = random_noise(0, rows_U) if new.format.rounding == "stochastic" else None
    for name, tensor in new.format.encode(values_UD, random_UD).items():
        assert torch.equal(record.fields[name][rows_U], tensor)
    for name in (*new.rule.fields(DIM), "touched"):
        assert torch.equal(record.fields[name][rows_U], chunk.fields[name][went_N])
    others = torch.ones(ROWS + 4, dtype=torch.bool).index_fill_(0, rows_U, False)
    assert all(
        torch.equal(record.fields[n][others], fresh.fields[n][others]) for n in record.fields
    )


def test_state_in_bf16_and_back() -> None:
    """By its own random numbers for each field; what one number a row has is that of column 0."""
    narrow = replace(OLD, state="bf16")
    chunk, record = chunk_of(OLD), RowRecords(narrow, SEED)
    to_N = torch.arange(ROWS).flip(0)
    record.load_rows(chunk, to_N, OLD)
    for number, (name, field) in enumerate(OLD.rule.fields(DIM).items(), 1):
        old = chunk.fields[name].view(ROWS, -1)
        random = random_noise(number, to_N, (0, old.shape[1]))
        assert torch.equal(record.fields[name][to_N].view(ROWS, -1), to_bf16(old, random)), field
        assert not torch.equal(record.fields[name][to_N].view(ROWS, -1), old.bfloat16())
    assert torch.equal(record.fields["weight"][to_N], chunk.fields["weight"])
    (narrow_chunk,) = record.chunks(1 << 30)
    again = RowRecords(OLD, SEED)
    again.load_rows(narrow_chunk, to_N, narrow)
    assert all(
        torch.equal(again.fields[n], record.fields[n][to_N].to(again.fields[n].dtype))
        for n in again.fields
    )


@pytest.mark.parametrize("other", ["fp16", "bf16", "split_bf16"])
def test_parts_by_columns_are_converted_as_the_whole_is(other: str) -> None:
    new = replace(OLD, format=FORMATS[other], state="bf16")
    chunk, whole = chunk_of(OLD), RowRecords(new, SEED)
    to_N = torch.arange(ROWS).flip(0)
    whole.load_rows(chunk, to_N, OLD)
    part = RowRecords(new, SEED, rows=(10, 40), columns=(2, 8))
    for left, right in ((0, 5), (5, 9)):
        part.load_rows(cut(chunk, left, right), to_N, OLD)
    for name, field in new.fields.items():
        expected = whole.fields[name][10:40]
        assert torch.equal(
            part.fields[name], expected[:, 2:8] if field.across == "cut" else expected
        ), name
    halves = replace(OLD, format=int8.Config())
    part.load_rows(chunk_of(halves), to_N, halves)  # rows with one scale become parts
    whole.load_rows(chunk_of(halves), to_N, halves)
    assert torch.equal(part.weight, whole.weight[10:40, 2:8])


def test_a_part_of_a_row_has_no_scale() -> None:
    record = RowRecords(replace(OLD, format=int8.Config()), SEED)
    with pytest.raises(
        UserError,
        match=r"weight is of a whole row, .* is cut by columns; choose a row format that can",
    ):
        record.load_rows(cut(chunk_of(OLD), 0, 5), torch.arange(ROWS), OLD)


CUTS = ((0, 100), (0, 64, 100), (0, 32, 96, 100))
MX = [name for name in FORMATS if name.startswith("mx")]


def placement_of(kind: str, folder: Path) -> Placement:
    """Where the rows of components are."""
    return Placement(store=Scattered) if kind == "scattered" else Placement(folder=folder)


@pytest.mark.parametrize("kind", ["memory", "scattered", "ssd"])
@pytest.mark.parametrize("name", MX)
def test_rows_in_blocks_fit_every_cut_between_them(name: str, kind: str, tmp_path: Path) -> None:
    """Parts are loaded from the whole and from other parts, and the whole from parts."""
    tier = ssd.Config(fraction=0.3) if kind == "ssd" else in_memory()
    component = replace(OLD, dim=100, format=FORMATS[name], tier=tier)
    placement = placement_of(kind, tmp_path)

    def loaded(chunks: list[Chunk], edges: tuple[int, ...]) -> list[Chunk]:
        found = []
        for columns in pairwise(edges):
            part = RowRecords(component, SEED, columns=columns, placement=placement)
            assert sum(map(part.load_chunk, chunks)) == ROWS * part.dim
            found += [chunk.copied() for chunk in part.chunks(1 << 30)]
            if ssd := ssd_of(part.store):
                ssd.close()
        return found

    want = chunk_of(replace(component, tier=in_memory()))
    for one, other in itertools.product(CUTS, CUTS) if kind == "memory" else [CUTS[1:]]:
        (found,) = loaded(loaded(loaded([want], one), other), CUTS[0])
        for field, values in want.fields.items():
            assert torch.equal(found.fields[field], values), (field, one, other)


@pytest.mark.parametrize("name", MX)
def test_parts_become_rows_in_blocks(name: str) -> None:
    """If they are cut between these, with the bits of the whole."""
    old = replace(OLD, dim=100)
    new, chunk, to_N = replace(old, format=FORMATS[name]), chunk_of(old), torch.arange(ROWS).flip(0)
    whole, again, parts = (
        RowRecords(new, SEED),
        RowRecords(new, SEED),
        RowRecords(new, SEED, columns=(32, 96)),
    )
    whole.load_rows(chunk, to_N, old)
    for left, right in pairwise(CUTS[2]):
        again.load_rows(cut(chunk, left, right), to_N, old)
        parts.load_rows(cut(chunk, left, right), to_N, old)
    assert all(torch.equal(again.fields[field], values) for field, values in whole.fields.items())
    assert torch.equal(parts.weight, whole.weight[:, 32:96])
    told = (
        "table 't': weight has blocks of 32 columns, not whole in 0:48, and the chunk or the table"
        " is cut by columns"
    )
    with pytest.raises(
        UserError, match=f"^{told}; choose a row format that can be cut, such as fp16$"
    ):
        again.load_rows(cut(chunk, 0, 48), to_N, old)
    with pytest.raises(
        UserError, match=f"^{told}; choose a row format that can be cut, such as fp16$"
    ):
        RowRecords(new, SEED, columns=(0, 48)).load_rows(chunk, to_N, old)


@pytest.mark.parametrize("name", MX)
def test_frames_become_rows_in_blocks(name: str) -> None:
    """Of a cache over the whole into parts, and of caches over parts into the whole: the same
    bits.
    """
    component = replace(OLD, dim=100, format=FORMATS[name])
    rows_U, exact = torch.tensor([3, 7, 20, 49]), RowRecords(component.in_frames, SEED + 2).fields
    numbers = {"row": rows_U, "changed": torch.tensor([0, 5, 9, 2]), "batch": torch.tensor(9)}

    def frames(columns: tuple[int, int]) -> Chunk:
        of = component.in_frames.fields
        fields = {field: of[field].part(exact[field][rows_U], slice(*columns), 100) for field in of}
        return Chunk(
            table="t", rows=(0, ROWS), columns=columns, fields=fields | numbers, is_cache=True
        )

    whole, again, before = (RowRecords(component, SEED) for _ in range(3))
    whole.load_chunk(frames((0, 100)))
    for columns in pairwise(CUTS[2]):
        part = RowRecords(component, SEED, columns=columns)
        part.load_chunk(frames((0, 100)))
        for field, of in component.fields.items():
            assert torch.equal(
                part.fields[field], of.part(whole.fields[field], slice(*columns), 100)
            ), field
        again.load_chunk(frames(columns))
    assert all(torch.equal(again.fields[field], values) for field, values in whole.fields.items())
    is_new_R = (whole.fields["weight"] != before.fields["weight"]).any(1)
    assert is_new_R.nonzero()[:, 0].tolist() == [7, 20, 49]
    told = (
        "table 't': weight has blocks of 32 columns, not whole in 0:48, and the cache that is"
        " loaded is cut"
    )
    with pytest.raises(
        UserError, match=f"^{told} by columns; choose a row format that can be cut, such as fp16$"
    ):
        again.load_chunk(frames((0, 48)))


def test_a_chunk_of_a_component_with_more_rows() -> None:
    few = replace(OLD, rows=8)
    record, chunk = RowRecords(few, SEED), chunk_of(OLD)
    to_N = torch.full((ROWS,), -1)
    to_N[40:48] = torch.arange(8)
    assert record.load_rows(chunk, to_N, OLD) == 8 * DIM
    assert torch.equal(record.weight, chunk.fields["weight"][40:48])


@pytest.mark.parametrize(
    "of", [replace(OLD, format=fp16.Config()), replace(OLD, rule=rowwise_adagrad.Config())]
)
def test_a_chunk_that_is_not_what_it_is_said_to_be(of: Any) -> None:
    with pytest.raises(UserError, match=r"table 't': "):
        RowRecords(OLD, SEED).load_rows(chunk_of(OLD), torch.arange(ROWS), of)


@pytest.mark.parametrize("form", ["fp32", "bf16", "split_bf16"])
def test_parts_begin_with_what_the_whole_begins_with(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are given their values; the others stay as they began."""
    monkeypatch.setattr(module, "BLOCK", 3)
    component = replace(OLD, format=FORMATS[form])
    rows_N = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))[: ROWS // 2]
    values_ND = torch.randn(len(rows_N), DIM, generator=torch.Generator().manual_seed(3))
    whole, fresh = RowRecords(component, SEED), RowRecords(component, SEED)
    whole.begin_with(rows_N, values_ND)
    assert torch.allclose(whole.weight[rows_N], values_ND, rtol=1e-2)
    others = sorted(set(range(ROWS)) - set(rows_N.tolist()))
    for name, tensor in whole.fields.items():
        assert torch.equal(tensor[others], fresh.fields[name][others]), name
    for rows, columns in (((2, ROWS - 3), (0, DIM)), ((0, ROWS), (1, DIM)), ((1, 4), (0, 2))):
        part = RowRecords(component, SEED, rows, columns)
        part.begin_with(rows_N, values_ND)
        assert torch.equal(part.weight, whole.weight[slice(*rows), slice(*columns)])
