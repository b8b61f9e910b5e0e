"""Row records that are stored otherwise than the chunks they come from: `RowRecords.load_rows`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import Chunk, UserError
from sparrow.embeddings import records as module
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.spec import Component
from sparrow.kernels.formats import RowFormat, bf16, fp16, fp32, int4, int8, mxfp4, mxfp6, mxfp8, mxint8, split_bf16
from sparrow.kernels.philox import key_of
from sparrow.kernels.rules import adam, rowwise_adagrad
from sparrow.numerics.rounding import noise, to_bf16

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
def test_rows_are_decoded_and_encoded_again(one: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows move, some go nowhere, and new ones stay as they began; more of them than are converted at a time."""
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
    assert all(torch.equal(record.fields[n][others], fresh.fields[n][others]) for n in record.fields)


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
    assert all(torch.equal(again.fields[n], record.fields[n][to_N].to(again.fields[n].dtype)) for n in again.fields)


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
        assert torch.equal(part.fields[name], expected[:, 2:8] if field.across == "cut" else expected), name
    halves = replace(OLD, format=int8.Config())
    part.load_rows(chunk_of(halves), to_N, halves)  # rows with one scale become parts
    whole.load_rows(chunk_of(halves), to_N, halves)
    assert torch.equal(part.weight, whole.weight[10:40, 2:8])


def test_a_part_of_a_row_has_no_scale() -> None:
    record = RowRecords(replace(OLD, format=int8.Config()), SEED)
    with pytest.raises(
        UserError, match=r"weight is of a whole row, .* is cut by columns; choose a row format that can"
    ):
        record.load_rows(cut(chunk_of(OLD), 0, 5), torch.arange(ROWS), OLD)


def test_a_chunk_of_a_component_with_more_rows() -> None:
    few = replace(OLD, rows=8)
    record, chunk = RowRecords(few, SEED), chunk_of(OLD)
    to_N = torch.full((ROWS,), -1)
    to_N[40:48] = torch.arange(8)
    assert record.load_rows(chunk, to_N, OLD) == 8 * DIM
    assert torch.equal(record.weight, chunk.fields["weight"][40:48])


@pytest.mark.parametrize("of", [replace(OLD, format=fp16.Config()), replace(OLD, rule=rowwise_adagrad.Config())])
def test_a_chunk_that_is_not_what_it_is_said_to_be(of: Any) -> None:
    with pytest.raises(UserError, match=r"table 't': "):
        RowRecords(OLD, SEED).load_rows(chunk_of(OLD), torch.arange(ROWS), of)


@pytest.mark.parametrize("form", ["fp32", "bf16", "split_bf16"])
def test_parts_begin_with_what_the_whole_begins_with(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
