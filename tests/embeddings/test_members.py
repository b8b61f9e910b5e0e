"""Each choice of a table with a second member, through all that knows tables: nothing of it may
know only the first.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import checkpoint, data
from sparrow.apps.generate import generate
from sparrow.apps.report import report
from sparrow.core import Jagged, KeyedJagged, UserError
from sparrow.core.config import to_dict
from sparrow.embeddings import (
    ON_CPU,
    Component,
    Direct,
    EmbeddingTables,
    Feature,
    Hashed,
    Numbering,
    Placement,
    TableChoices,
    TableSpec,
    addressing,
)
from sparrow.embeddings.addressing import (
    coprime,
    cut,
    learned,
    mixed_dimension,
    path,
    quotient_remainder,
)
from sparrow.embeddings.addressing.mixed_dimension import MixedDimension
from sparrow.embeddings.choices import Override
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.spec import Cache
from sparrow.embeddings.stores import MemoryStore
from sparrow.embeddings.tiers import memory
from sparrow.extensions.dynamic_ids import addressing as dynamic
from sparrow.extensions.dynamic_ids.addressing import Dynamic
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.features.transforms import Transforms
from sparrow.kernels import Impl, missing, row_index
from sparrow.kernels.formats import (
    Field,
    Rounding,
    bf16,
    fp16,
    fp32,
    int4,
    int8,
    mxfp4,
    mxfp8,
    split_bf16,
)
from sparrow.kernels.rules import adam, rowwise_adagrad, sgd
from sparrow.models import dlrm
from sparrow.optimizers import adam as dense_adam
from sparrow.trained.build import tables_of
from sparrow.trained.run import Checkpoints, Data, Log, Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, preflight, train
from tests.embeddings.members import quotient
from tests.embeddings.members.awaited import Awaited, Kept, Transit
from tests.embeddings.members.scattered import Scattered

ROWS, DIM = 23, 6
IMPLS: list[Any] = [
    "reference",
    pytest.param("cpp", marks=pytest.mark.skipif(bool(missing()), reason=missing())),
]
MODES = ("fused", "deferred", "off")
RULES = {
    "sgd": sgd.Config(lr=0.5),
    "rowwise_adagrad": rowwise_adagrad.Config(lr=0.3),
    "adam": adam.Config(lr=0.1),
}
SCATTERED = Placement(store=Scattered)
NEAREST = fp16.Config(rounding="nearest")
FEATURES = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean"),
            Feature(name="c", table="t", pooling="none"), Feature(name="d", table="u")]  # fmt: skip


def batch(seed: int, weighted: bool = False, high: int = ROWS) -> KeyedJagged:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * 8,), generator=random)
    count = int(lengths.sum())
    weights_N = torch.rand(count, generator=random) if weighted else None
    values_N = torch.randint(0, high, (count,), generator=random)
    return KeyedJagged(
        keys=("a", "b", "c", "d"), values_N=values_N, lengths=lengths, weights_N=weights_N
    )


def loss_of(found: dict[str, Tensor | Jagged]) -> Tensor:
    flat = [v.values_N if isinstance(v, Jagged) else v for v in found.values()]
    return torch.stack(
        [((v + 0.5) ** 3 * torch.linspace(0.5, 1.5, v.numel()).view_as(v)).sum() for v in flat]
    ).sum()


def make(
    mode: str, rule: str, impl: Impl = "auto", placement: Placement = ON_CPU, **choices: Any
) -> EmbeddingTables:
    of = {"rule": RULES[rule], **choices}
    specs = [TableSpec(name="t", dim=DIM, **{"addressing": Direct(ROWS), **of}),
             TableSpec(name="u", dim=3, addressing=Direct(ROWS), rule=RULES[rule])]  # fmt: skip
    return EmbeddingTables(specs, FEATURES, seed=1, mode=mode, impl=impl, placement=placement)  # type: ignore[arg-type]


def steps(
    tables: EmbeddingTables,
    count: int = 3,
    extra: Callable[[EmbeddingTables], None] = lambda tables: None,
) -> list[Tensor]:
    """Train some steps, an accumulated one among them; each step's loss."""
    found = []
    for step in range(count):
        for part in range(2 if tables.mode == "deferred" else 1):
            loss = loss_of(tables(batch(10 * step + part, weighted=step == 1)))
            loss.backward()
            found.append(loss.detach())
        extra(tables)
        tables.update()
    return found


# -- a store whose slots differ from rows ----------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(MODES, RULES)))
def test_a_store_changes_no_bit(mode: str, rule: str, impl: Impl) -> None:
    plain = make(mode, rule, impl)
    scattered = make(mode, rule, impl, SCATTERED)
    norms: list[list[float]] = []

    def norm(tables: EmbeddingTables) -> None:
        found = tables.gradients()
        norms.append([float(g.grad_UD.norm()) for g in found.values()])
        assert all(bool((g.rows_U.diff() > 0).all()) for g in found.values()), (
            "gradients are not in row order"
        )

    assert torch.equal(
        torch.stack(steps(plain, extra=norm)), torch.stack(steps(scattered, extra=norm))
    )
    assert norms[:3] == norms[3:]
    for one, other in zip(plain.all_records(), scattered.all_records(), strict=True):
        assert one.fields.keys() == other.fields.keys()
        for name in one.fields:
            assert torch.equal(one.fields[name], other.fields[name]), name


def test_slots_of_no_row_are_left_alone() -> None:
    tables = make("fused", "adam", placement=SCATTERED)
    steps(tables)
    for record in tables.all_records():
        store: Any = record.store
        spare = {name: tensor[record.rows // 2 :] for name, tensor in store.fields[0].items()}
        assert all(bool((tensor == 77).all()) for tensor in spare.values())


def test_rows_travel_between_stores() -> None:
    scattered, empty = (make("fused", "adam", placement=SCATTERED) for _ in range(2))
    steps(scattered)
    plain = make("off", "adam")
    for chunk in scattered.chunks(200):
        plain.load_chunk(chunk)
    for chunk in plain.chunks(300):
        empty.load_chunk(chunk)
    for tables in (plain, empty):
        for one, other in zip(scattered.all_records(), tables.all_records(), strict=True):
            assert all(torch.equal(one.fields[name], other.fields[name]) for name in one.fields)


# -- a store whose rows are elsewhere --------------------------------------------------------------


def test_a_store_hears_of_coming_batches() -> None:
    """Beside one in plain memory, which waits for nothing."""
    stores = Placement(
        store=lambda component, *part: (Awaited if component.name == "t" else MemoryStore)(
            component, *part
        )
    )
    tables = make("fused", "sgd", placement=stores)
    transit: Any = tables.parts[0].transit
    assert isinstance(transit, Transit) and list(transit.stores) == [0]
    tables.prefetch(batch(0))
    loss_of(tables(batch(0))).backward()
    with torch.no_grad():
        tables.eval()(batch(1))
    assert [word for word in transit.told if word != "give up"] == [
        "fetch",
        "begin",
        "settle",
        "land",
    ]
    assert make("fused", "sgd").parts[0].transit is None


def test_rows_that_stay_where_they_lie_become_those_of_a_table_that_begins_alike() -> None:
    def record(**settings: Any) -> RowRecords:
        component = Component(name="t", rows=ROWS, dim=DIM, **settings)
        return RowRecords(component, seed=3, rows=(5, ROWS), placement=Placement(store=Awaited))

    saved: Any = list(record(init_scale=0.5).saved())
    assert (
        [type(part) for part in saved] == [Kept]
        and saved[0].rows == (5, ROWS)
        and saved[0].columns == (0, DIM)
    )
    for settings, fits in (({"init_scale": 0.5}, True), ({"init_scale": 0.25}, False)):
        heir = record(**settings)
        store: Any = heir.store
        assert heir.go_on(saved[0], learns=False) == fits
        assert store.adopted == ((saved[0], False) if fits else None)
    assert not RowRecords(
        Component(name="t", rows=ROWS, dim=DIM, init_scale=0.5), seed=3, rows=(5, ROWS)
    ).go_on(saved[0])


# -- a row format ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(MODES, RULES)))
def test_fp16_rows_are_fp32_rows_rounded_at_each_update(mode: str, rule: str) -> None:
    half, whole = make(mode, rule, "reference", format=NEAREST), make(mode, rule, "reference")
    assert {record.fields["weight"].dtype for record in half.all_records()} == {
        torch.float16,
        torch.float32,
    }

    def rounded() -> None:
        weight = whole.record("t").weight
        weight.copy_(weight.half().float())

    rounded()
    for step in range(3):
        losses = []
        for tables in (half, whole):
            losses.append(loss_of(tables(batch(step))))
            losses[-1].backward()
            tables.update()
        assert torch.equal(*losses)
        rounded()
    for one, other in zip(half.all_records(), whole.all_records(), strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(one.fields[n], other.fields[n]) for n in one.fields if n != "weight")
    assert mode == "off" or not torch.equal(
        half.record("t").weight, make("off", rule, format=NEAREST).record("t").weight
    )


def test_gradients_are_fp32_whatever_the_rows_are() -> None:
    tables = make("deferred", "sgd", format=fp16.Config())
    none = KeyedJagged(
        keys=("a", "b", "c", "d"),
        values_N=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(4, dtype=torch.int64),
    )
    loss_of(tables(none)).backward()
    for gradients in tables.gradients().values():
        assert gradients.grad_UD.dtype == torch.float32 and len(gradients.rows_U) == 0
    tables.update()
    steps(tables, extra=lambda t: None)
    loss_of(tables(batch(0))).backward()
    assert all(g.grad_UD.dtype == torch.float32 for g in tables.gradients().values())


def test_cpp_refuses_a_format_that_it_does_not_know() -> None:
    tables = make("fused", "sgd", "cpp" if not missing() else "auto", format=Scaled())
    if missing():
        pytest.skip(missing())
    with pytest.raises(UserError, match="impl: 'cpp', but a table's row format"):
        tables(batch(0))


def test_bytes_are_those_of_the_format() -> None:
    half, whole = (
        Component(name="t", rows=10, dim=8, format=f) for f in (fp16.Config(), fp32.Config())
    )
    assert (half.bytes_values, whole.bytes_values) == (160, 320)
    assert (half.bytes_row, whole.bytes_row) == (16 + 4 + 1, 32 + 4 + 1)


class Scaled:
    """Rows of one byte a column and a scale of the whole row: what must not be averaged over column
    parts.
    """

    rounding: Rounding = "nearest"

    def cpp(self) -> None:
        """No codec."""

    def fields(self, dim: int) -> dict[str, Field]:
        return {
            "code": Field(width=dim, dtype=torch.int8, across="cut"),
            "scale": Field(across="whole"),
        }

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        scale_U = values_UD.abs().amax(1).clamp(min=1e-12) / 127
        return {"code": (values_UD / scale_U[:, None]).round().to(torch.int8), "scale": scale_U}

    def decode(self, fields: Any, dim: int) -> Tensor:
        found: Tensor = fields["code"] * fields["scale"][:, None]
        return found

    exact = decode


def test_a_scale_of_a_whole_row_is_never_averaged() -> None:
    component = Component(name="t", rows=9, dim=8, format=Scaled(), init_scale=1.0)
    component.check_columns((0, 8))
    with pytest.raises(
        UserError,
        match="table 't' is cut by columns, and 'scale' is of a whole row; cut it by rows",
    ):
        component.check_columns((0, 4))
    whole, again = RowRecords(component, 1), RowRecords(component, 2)
    (chunk,) = whole.chunks(1 << 20)
    left = replace(
        chunk, columns=(0, 4), fields={**chunk.fields, "code": chunk.fields["code"][:, :4]}
    )
    with pytest.raises(UserError, match="scale is of a whole row"):
        again.load_chunk(left)
    parts = [
        replace(chunk, rows=(a, b), fields={n: t[a:b] for n, t in chunk.fields.items()})
        for a, b in ((0, 4), (4, 9))
    ]
    assert sum(map(again.load_chunk, parts)) == 72
    assert all(torch.equal(whole.fields[name], again.fields[name]) for name in whole.fields)
    assert (
        float(
            (whole.weight - RowRecords(replace(component, format=fp32.Config()), 1).weight)
            .abs()
            .max()
        )
        < 1 / 127
    )


def test_a_chunk_of_another_format_is_refused() -> None:
    half, whole = make("off", "sgd", format=fp16.Config()), make("off", "sgd")
    with pytest.raises(
        UserError, match=r"table 't': weight is torch.float16 where torch.float32 is kept"
    ):
        whole.load_chunk(next(half.chunks()))


# -- an addressing of two components ---------------------------------------------------------------


def each_product(leaves: dict[str, Tensor], ids_N: Tensor, tables: EmbeddingTables) -> Tensor:
    gain_D = tables.combines[0].gain_D.detach()  # type: ignore[operator, union-attr]
    return leaves["t.quotient"][ids_N // 4] * leaves["t.remainder"][ids_N % 4] * gain_D  # type: ignore[no-any-return]


def each_path(leaves: dict[str, Tensor], ids_N: Tensor, tables: EmbeddingTables) -> Tensor:
    of: Any = tables.combines[0]
    x_ND, k_N = leaves["t"][ids_N % 7], ids_N // 7
    h_NH = (torch.einsum("nhd,nd->nh", of.into_KHD[k_N], x_ND) + of.bias_KH[k_N]).relu()
    return x_ND + torch.einsum("ndh,nh->nd", of.out_KDH[k_N], h_NH)


def each_block(leaves: dict[str, Tensor], ids_N: Tensor, tables: EmbeddingTables) -> Tensor:
    of: Any = tables.combines[0].blocks  # type: ignore[union-attr]
    whole_RD = torch.cat([block(leaves[f"t.block{i}"]) for i, block in enumerate(of)])
    return whole_RD[ids_N]


Each = Callable[[dict[str, Tensor], Tensor, EmbeddingTables], Tensor]
NUMBERED = Numbering(ROWS)
MAP = learned.Map(torch.arange(ROWS, dtype=torch.int32) * 5 % 7, 7, 2, 0, "")
# an addressing, and the vector of each id of its table in plain torch
MEMBERS: dict[str, tuple[Any, Each]] = {
    "a dense gain": (quotient.Quotient(ROWS, 4), each_product),
    "hashed": (Hashed(7), lambda w, i, t: w["t"][Hashed(7).rows_of(i)[0]]),
    "cut": (cut.Config(rows=6).build(NUMBERED), lambda w, i, t: w["t"][i.clamp(max=5)]),
    "path": (path.Config(rows=7, hidden=3).build(NUMBERED), each_path),
    "projection": (
        MixedDimension(ROWS, (2,)),
        lambda w, i, t: w["t"][i] @ t.combines[0].blocks[0].weight.T,  # type: ignore[operator, index, union-attr]
    ),
    "projected hashes": (
        MixedDimension(7, (2,), is_hashed=True),
        lambda w, i, t: w["t"][Hashed(7).rows_of(i)[0]] @ t.combines[0].blocks[0].weight.T,  # type: ignore
    ),
    "blocks": (MixedDimension(ROWS, (DIM, 3, 1), (4, 11)), each_block),
    "mult": (
        quotient_remainder.Config(sizes=(6, 4)).build(NUMBERED),
        lambda w, i, t: w["t.remainder"][i % 6] * w["t.quotient"][i // 6],
    ),
    "add": (
        quotient_remainder.Config(sizes=(6, 4), operation="add").build(NUMBERED),
        lambda w, i, t: w["t.remainder"][i % 6] + w["t.quotient"][i // 6],
    ),
    "concat": (
        quotient_remainder.Config(sizes=(6, 4), operation="concat").build(NUMBERED),
        lambda w, i, t: torch.cat([w["t.remainder"][i % 6], w["t.quotient"][i // 6]], 1),
    ),
    "features": (
        quotient_remainder.Config(sizes=(6, 4), operation="features").build(NUMBERED),
        lambda w, i, t: torch.cat([w["t.remainder"][i % 6], w["t.quotient"][i // 6]], 1),
    ),
    "learned": (learned.Learned(ROWS, "", MAP), lambda w, i, t: w["t"][MAP.row_S.long()[i]]),
    "three digits": (
        quotient_remainder.Config(sizes=(4, 3, 2)).build(NUMBERED),
        lambda w, i, t: w["t.digit0"][i % 4] * w["t.digit1"][i // 4 % 3] * w["t.digit2"][i // 12],
    ),
    "coprime": (
        coprime.Config(sizes=(6, 5)).build(NUMBERED),
        lambda w, i, t: w["t.mod6"][i % 6] * w["t.mod5"][i % 5],
    ),
    "three coprime beside each other": (
        coprime.Config(sizes=(2, 3, 5), operation="concat").build(NUMBERED),
        lambda w, i, t: torch.cat([w["t.mod2"][i % 2], w["t.mod3"][i % 3], w["t.mod5"][i % 5]], 1),
    ),
}


def plain_vectors(tables: EmbeddingTables, ids: KeyedJagged, each: Each) -> dict[str, Tensor]:
    """The definition: the components' weights as leaves, combined for each id and pooled, in plain
    torch.
    """
    leaves = {
        r.component.name: r.weight.detach().clone().requires_grad_() for r in tables.all_records()
    }
    found = dict(leaves)
    for feature in FEATURES:
        of = ids[feature.name]
        each_ND = (
            leaves["u"][of.values_N] if feature.table == "u" else each(leaves, of.values_N, tables)
        )
        if of.weights_N is not None:
            each_ND = each_ND * of.weights_N[:, None]
        if feature.pooling == "none":
            found[feature.name] = each_ND
            continue
        lengths_B = of.lengths_B
        bag_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
        pooled_BD = torch.zeros(len(lengths_B), each_ND.shape[1]).index_add(0, bag_N, each_ND)
        found[feature.name] = (
            pooled_BD / lengths_B.clamp(min=1)[:, None] if feature.pooling == "mean" else pooled_BD
        )
    return found


@pytest.mark.parametrize(
    ("member", "mode", "weighted"),
    list(itertools.product(MEMBERS, ["fused", "deferred"], [False, True])),
)
def test_an_addressing_is_its_definition(member: str, mode: str, weighted: bool) -> None:
    addressing, each = MEMBERS[member]
    tables = make(mode, "sgd", addressing=addressing)
    tables.scale_lr(0.02)
    for weight in tables.parameters():  # those that begin at 0 would say nothing
        weight.data += torch.linspace(-1, 1, weight.numel()).view_as(weight)
    for step in range(3):
        ids = batch(step, weighted)
        tables.zero_grad()
        want = plain_vectors(tables, ids, each)
        loss_of({f.name: want[f.name] for f in FEATURES}).backward()
        grads = [weight.grad for weight in tables.parameters()]
        tables.zero_grad()
        got = tables(ids)
        for feature in FEATURES:
            v = got[feature.name]
            torch.testing.assert_close(
                v.values_N if isinstance(v, Jagged) else v, want[feature.name]
            )
        loss_of(got).backward()
        tables.update()
        for record in tables.all_records():
            leaf = want[record.component.name]
            torch.testing.assert_close(
                record.weight, (leaf - 0.01 * leaf.grad).detach(), rtol=2e-5, atol=2e-6
            )
        if list(tables.parameters()) and member != "a dense gain":
            for weight, grad in zip(tables.parameters(), grads, strict=True):
                torch.testing.assert_close(weight.grad, grad)
        for weight in tables.parameters():
            assert weight.grad is not None and weight.grad.abs().sum() > 0, (
                "a dense weight of `combine` has no gradient"
            )


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(("mode", "weighted"), list(itertools.product(MODES, [False, True])))
def test_products_in_the_lookup_are_those_in_torch(mode: str, weighted: bool) -> None:
    one, other = (make(mode, "rowwise_adagrad", addressing=MEMBERS["mult"][0]) for _ in range(2))
    other.exchange._can_multiply = False  # type: ignore[attr-defined]
    for step in range(3):
        ids = batch(step, weighted)
        assert one.exchange.multiplies(ids) and not other.exchange.multiplies(ids)
        got, want = one(ids), other(ids)
        for name in want:
            a, b = (v.values_N if isinstance(v, Jagged) else v for v in (got[name], want[name]))
            torch.testing.assert_close(a, b)
        loss_of(got).backward()
        loss_of(want).backward()
        one.update()
        other.update()
    for a, b in zip(one.all_records(), other.all_records(), strict=True):
        torch.testing.assert_close(a.weight, b.weight)
        assert bool(a.fields["touched"].any()) == (mode != "off")


def test_when_products_are_left_to_torch() -> None:
    learn = replace(
        batch(0, weighted=True), weights_N=torch.rand(len(batch(0).values_N)).requires_grad_()
    )
    tables = make("fused", "sgd", addressing=MEMBERS["mult"][0])
    assert not tables.exchange.multiplies(learn)  # weights that learn
    for choices in (
        {"format": fp16.Config()},
        {"format": int8.Config(), "cache": Cache(fraction=0.5)},
    ):
        assert not make(
            "fused", "sgd", addressing=MEMBERS["mult"][0], **choices
        ).exchange.multiplies(batch(0))
    assert not make("fused", "sgd", addressing=MEMBERS["three digits"][0]).exchange.multiplies(
        batch(0)
    )
    scattered = make("fused", "sgd", placement=SCATTERED, addressing=MEMBERS["mult"][0])
    assert not scattered.exchange.multiplies(batch(0))


@pytest.mark.parametrize("member", ["mult", "add", "three digits", "coprime"])
def test_a_table_begins_as_that_of_its_first_component(member: str) -> None:
    tables = make("off", "sgd", addressing=MEMBERS[member][0])
    first = next(iter(tables.all_records()))
    found, ids = tables(batch(0)), batch(0)["c"].values_N
    assert torch.equal(found["c"].values_N, first.weight[ids % first.rows])  # type: ignore[union-attr]


@pytest.mark.parametrize("member", ["mult", "add"])
def test_with_the_others_frozen_it_is_the_table_of_remainders(member: str) -> None:
    """Bitwise, trained by AdaGrad: its small tables stay at the identity of their operation."""
    made = make("fused", "rowwise_adagrad", addressing=MEMBERS[member][0])
    plain = make("fused", "rowwise_adagrad", addressing=Direct(6))
    plain.record("t").weight.copy_(made.record("t.remainder").weight)
    small = made.record("t.quotient")
    kept = {name: tensor.clone() for name, tensor in small.fields.items()}
    for step in range(4):
        ids = batch(step)
        is_t_N = torch.arange(len(ids.values_N)) < ids.bounds[3]
        remainders = replace(ids, values_N=torch.where(is_t_N, ids.values_N % 6, ids.values_N))
        one, other = made(ids), plain(remainders)
        for name in one:
            a, b = (v.values_N if isinstance(v, Jagged) else v for v in (one[name], other[name]))
            assert torch.equal(a, b)
        loss_of(one).backward()
        loss_of(other).backward()
        for name, tensor in kept.items():
            small.fields[name].copy_(tensor)
        made.changed()
    for name, tensor in plain.record("t").fields.items():
        assert torch.equal(made.record("t.remainder").fields[name], tensor)


def test_dense_weights_of_an_addressing_depend_on_seed_and_table_alone() -> None:
    made = []
    for torch_seed in (1, 2):
        torch.manual_seed(torch_seed)
        before = torch.random.get_rng_state()
        made.append(make("off", "sgd", addressing=MEMBERS["path"][0]))
        assert torch.equal(torch.random.get_rng_state(), before)
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(one, other)
    another = EmbeddingTables(made[0].specs, FEATURES, seed=2)
    assert not torch.equal(next(another.parameters()), next(made[0].parameters()))


@pytest.mark.parametrize(
    "addressing", [quotient.Quotient(ROWS, 4), MixedDimension(ROWS, (DIM, 3, 1), (4, 11))]
)
def test_dedup_groups_of_two_components(addressing: Any) -> None:
    tables = make("off", "sgd", addressing=addressing)
    whole = batch(3)
    inverse_B = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 3])
    other = batch(4)
    lengths = {
        k: whole[k].lengths_B if k in ("a", "b", "c") else torch.ones(11, dtype=torch.int64)
        for k in "abcd"
    }
    values = {k: whole[k].values_N if k in ("a", "b", "c") else other.values_N[:11] for k in "abcd"}
    ids = KeyedJagged(
        keys=("a", "b", "c", "d"),
        values_N=torch.cat(list(values.values())),
        lengths=torch.cat(list(lengths.values())),
        inverse_B={("a", "b", "c"): inverse_B},
        rows=(8, 8, 8, 11),
    )
    got, want = tables(ids), tables(ids.expanded())
    for name in "abd":
        assert torch.equal(got[name], want[name])  # type: ignore[arg-type]
    assert torch.equal(got["c"].expanded().values_N, want["c"].values_N)  # type: ignore[union-attr]


@pytest.mark.parametrize("member", MEMBERS)
def test_weights_of_ids_learn_with_every_addressing(member: str) -> None:
    addressing, each = MEMBERS[member]
    tables, found = make("deferred", "sgd", addressing=addressing), []
    for weight in tables.parameters():
        weight.data += torch.linspace(-1, 1, weight.numel()).view_as(weight)
    for vectors in (tables, lambda ids: plain_vectors(tables, ids, each)):
        weights_N = torch.linspace(-1, 2, len(batch(0).values_N)).requires_grad_()
        out = vectors(replace(batch(0), weights_N=weights_N))
        loss_of({f.name: out[f.name] for f in FEATURES}).backward()
        found.append(weights_N.grad)
    torch.testing.assert_close(*found)


# and how far apart two roundings of nearly equal numbers may be
STORED: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-5),
    "state in bf16": ({"state": "bf16"}, 2e-2),
    "split_bf16": ({"format": split_bf16.Config()}, 1e-5),
    "int8": ({"format": int8.Config(rounding="nearest")}, 3e-2),
    "int4": ({"format": int4.Config(rounding="nearest")}, 0.5),
    "mxfp8": ({"format": mxfp8.Config(rounding="nearest")}, 0.2),
    "fp16 with a cache": ({"format": NEAREST, "cache": Cache(fraction=1.0)}, 1e-5),
}


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize(("member", "stored"), list(itertools.product(MEMBERS, STORED)))
def test_every_addressing_with_every_format_and_rule_learns_from_groups(
    member: str, stored: str, rule: str
) -> None:
    """A dedup group trains as its expanded rows do."""
    choices, apart = STORED[stored]
    addressing = MEMBERS[member][0]
    one, other = (make("fused", rule, addressing=addressing, **choices) for _ in range(2))
    begun = {record.component.name: record.weight.clone() for record in one.all_records()}
    for step in range(3):
        whole, lone = batch(step), batch(10 + step)
        lengths = {k: whole[k].lengths_B for k in "abc"} | {"d": torch.ones(11, dtype=torch.int64)}
        values = {k: whole[k].values_N for k in "abc"} | {"d": lone.values_N[:11]}
        ids = KeyedJagged(
            keys=("a", "b", "c", "d"), values_N=torch.cat(list(values.values())),
            lengths=torch.cat(list(lengths.values())), rows=(8, 8, 8, 11),
            inverse_B={("a", "b", "c"): torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 3])},
        )  # fmt: skip
        for tables, given in ((one, ids), (other, ids.expanded())):
            found: Any = tables(given)
            c: Any = found["c"] if found["c"].inverse_B is None else found["c"].expanded()
            sum((v**2).sum() for v in (found["a"], found["b"], c.values_N, found["d"])).backward()
            tables.zero_grad()
    for a, b in zip(one.all_records(), other.all_records(), strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=apart)
        assert torch.equal(a.fields["touched"], b.fields["touched"])
        assert bool((a.weight != begun[a.component.name]).any())


def test_an_id_that_is_outside_is_told_and_counted_once() -> None:
    features = [Feature(name="a", table="t")]
    spec = TableSpec(name="t", dim=4, addressing=quotient.Quotient(ROWS, 4))
    ids = KeyedJagged.from_lists({"a": [[1, ROWS]]})
    with pytest.raises(
        UserError,
        match=rf"table 't', feature 'a': id {ROWS} at position 1 is outside \[0, {ROWS}\)",
    ):
        EmbeddingTables([spec], features)(ids)
    tables = EmbeddingTables([replace(spec, oov_row=5)], features)
    assert torch.equal(tables(ids)["a"], tables(KeyedJagged.from_lists({"a": [[1, 5]]}))["a"])  # type: ignore[arg-type]
    assert tables.oov_counts() == {"a": 1}


def test_names_that_meet_are_refused() -> None:
    two = TableSpec(name="t", dim=4, addressing=quotient.Quotient(ROWS, 4))
    other, more = (
        TableSpec(name=name, dim=4, addressing=Direct(3)) for name in ("t.quotient", "u")
    )
    told = (
        r"^table 't\.quotient': a part of table 't' has the name 't\.quotient' too; rename one of"
        r" the columns$"
    )
    for specs in ([two, more, other], [other, more, two]):
        with pytest.raises(UserError, match=told):
            EmbeddingTables(specs, [])
    features = [
        Feature(name="a.quotient", table="u"),
        Feature(name="b", table="u"),
        Feature(name="a", table="t"),
    ]
    told = (
        r"^feature 'a\.quotient': a part of feature 'a' has the name 'a\.quotient' too; rename one"
        r" of the columns$"
    )
    with pytest.raises(UserError, match=told):
        EmbeddingTables([two, more], features)
    with pytest.raises(UserError, match=r"^table 'u': is there twice; name each once$"):
        EmbeddingTables([more, two, more], [])
    with pytest.raises(UserError, match=r"^feature 'b': is there twice; name each once$"):
        EmbeddingTables([more], [features[1], features[1]])


# where a program breaks in two, torch asks for it
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:.*lru_cache")
@pytest.mark.parametrize(
    "how",
    [
        *("product", "cut", "projection", "learned"),
        *(
            pytest.param(h, marks=pytest.mark.slow)
            for h in ("sum", "mult", "blocks", "path", "hashed")
        ),
    ],
)
def test_two_components_in_a_compiled_program(how: Any) -> None:
    addressing = MEMBERS[how][0] if how in MEMBERS else quotient.Quotient(ROWS, 4, how)
    plain, compiled = (make("fused", "sgd", addressing=addressing) for _ in range(2))
    run = torch.compile(lambda ids: loss_of(compiled(ids)), backend="aot_eager")
    for step in range(2):
        for loss in (loss_of(plain(batch(step))), run(batch(step))):
            loss.backward()
    for one, other in zip(plain.all_records(), compiled.all_records(), strict=True):
        torch.testing.assert_close(one.weight, other.weight)
    torch.compiler.reset()


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family of addressings has the one of this folder."""
    monkeypatch.setattr(addressing, "__path__", [*addressing.__path__, *quotient_folder()])


def quotient_folder() -> list[str]:
    return [str(Path(quotient.__file__).parent)]


QUOTIENT = {"name": "quotient", "parts": 3}
CHOICES: dict[str, Callable[[], TableChoices]] = {
    "fp16": lambda: TableChoices(format=fp16.Config()),
    "bf16 and its state": lambda: TableChoices(format=bf16.Config(), state="bf16"),
    "split_bf16": lambda: TableChoices(format=split_bf16.Config(), rule=adam.Config(lr=0.01)),
    "int8": lambda: TableChoices(format=int8.Config()),
    "int8 and a cache": lambda: TableChoices(
        format=int8.Config(), cache=Cache(fraction=0.2, policy="lfu")
    ),
    "int4 and its state": lambda: TableChoices(
        format=int4.Config(), rule=adam.Config(lr=0.01), state="bf16"
    ),
    "mxfp4 and a cache": lambda: TableChoices(
        format=mxfp4.Config(), cache=Cache(fraction=0.2), state="bf16"
    ),
    "quotient and remainder": lambda: TableChoices(
        addressing=quotient_remainder.Config(fold=True, collisions=3),
        format=int8.Config(),
        state="bf16",
    ),
    "coprime": lambda: TableChoices(addressing=coprime.Config(operation="add", parts=3)),
    "paths": lambda: TableChoices(addressing=path.Config(hidden=4)),
    "cut": lambda: TableChoices(
        overrides=(Override(names=("cat_2",), addressing={"name": "cut", "fraction": 0.3}),)
    ),
    "mixed dimensions": lambda: TableChoices(
        addressing=mixed_dimension.Config(alpha=0.5, budget=0.4)
    ),
    "blocks": lambda: TableChoices(
        overrides=(
            Override(
                names=("cat_2",), addressing={"name": "mixed_dimension", "alpha": 0.9, "blocks": 3}
            ),
        )
    ),
    "features": lambda: TableChoices(
        overrides=(
            Override(
                names=("cat_2",), addressing={"name": "quotient_remainder", "operation": "features"}
            ),
        )
    ),
    "ids that come and go": lambda: TableChoices(
        addressing=dynamic.Config(rows=90, bucket=30, after=2),
        rule=adam.Config(lr=0.01),
        format=fp16.Config(),
    ),
    "dynamic with a cache": lambda: TableChoices(
        addressing=dynamic.Config(rows=90, evict="lfu", ttl=3000),
        format=int8.Config(),
        cache=Cache(fraction=0.3),
    ),
    "two components": lambda: TableChoices(
        overrides=(Override(names=("item", "cat_0"), addressing=QUOTIENT),)
    ),
    "some tables": lambda: TableChoices(
        overrides=(
            Override(
                names=("item", "user"), format={"name": "fp16"}, rule={"name": "adam", "lr": 0.01}
            ),
            Override(where="rows > 40 and rows < 500", init_scale=0.5),
            Override(names=("item",), where="rows <= 43", addressing=QUOTIENT),
        )
    ),
}
# choices of which each table of a run has one, in the order of TABLES; and those that a run makes
# for all of its tables
TABLES = ("user", "item", "tags", "cat_0", "cat_1", "cat_2")
TOGETHER = (
    ("int8 and a cache", "quotient and remainder", "fp16", "coprime", "bf16 and its state", "cut"),
    (
        "ids that come and go",
        "mxfp4 and a cache",
        "split_bf16",
        "paths",
        "int4 and its state",
        "blocks",
    ),
    (
        "dynamic with a cache",
        "int8",
        "mixed dimensions",
        "features",
        "fp16",
        "quotient and remainder",
    ),
)
ALONE = ("int8 and a cache", "ids that come and go")
APART = ("two components", "some tables")  # which have overrides of their own
EACH_CHOICE = [
    *(
        pytest.param((name,), marks=() if name in ALONE else pytest.mark.slow)
        for name in CHOICES
        if name not in APART
    ),
    *(pytest.param(names) for names in TOGETHER),
]


def chosen(names: tuple[str, ...]) -> TableChoices:
    """One choice for all tables, or one for each."""
    if len(names) == 1:
        return CHOICES[names[0]]()
    overrides, plain = [], to_dict(TableChoices())
    for table, name in zip(TABLES, names, strict=True):
        choices = CHOICES[name]()
        if choices.overrides:
            overrides.append(replace(choices.overrides[0], names=(table,)))
        else:
            changes = {part: of for part, of in to_dict(choices).items() if of != plain.get(part)}
            overrides.append(Override(names=(table,), **changes))
    return TableChoices(overrides=tuple(overrides))


def run_of(prepared: Path, run_dir: Path, choices: TableChoices, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "data": Data(path=str(prepared), batch_size=256),
        "model": dlrm.Config(dim=8, bottom=(8,), top=(8,)),
        "loop": Loop(max_steps=8),
        "checkpoint": Checkpoints(every=4),
        "log": Log(tensorboard=False),
        "threads": 1,
    }
    return Run(run_dir=str(run_dir), tables=choices, **{**settings, **changes})


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_a_dynamic_table_in_a_compiled_program(mode: str) -> None:
    """Ids come and go there as in the same program uncompiled."""
    live = Dynamic(row_index.Policy(capacity=9, evict="lfu", half_life=30.0, ttl=60))
    plain, compiled = (make(mode, "sgd", addressing=live) for _ in range(2))
    run = torch.compile(lambda ids: loss_of(compiled(ids)), backend="aot_eager")
    for step in range(6):
        ids = batch(step)
        want, got = loss_of(plain(ids)), run(ids)
        assert torch.equal(want, got)
        want.backward()
        got.backward()
        plain.update()
        compiled.update()
    assert (
        plain.record("t").id_counts == compiled.record("t").id_counts
        and plain.record("t").id_counts["evicted"] > 0
    )
    for one, other in zip(plain.all_records(), compiled.all_records(), strict=True):
        assert all(torch.equal(one.fields[name], other.fields[name]) for name in one.fields)
    torch.compiler.reset()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(MODES, RULES)))
def test_with_room_for_all_ids_a_dynamic_table_is_one_with_a_row_for_each(
    mode: str, rule: str, impl: Impl
) -> None:
    """Also where batches are accumulated, ids weighted, and two features look into the table."""
    live = Dynamic(row_index.Policy(capacity=ROWS))
    one, other = (
        make(mode, rule, impl, addressing=a, init_scale=0.3) for a in (live, Direct(ROWS))
    )
    if mode == "off":  # nobody gets a row
        one.mode, other.mode = "fused", "fused"
        steps(one), steps(other)
        one.mode, other.mode = "off", "off"
    assert torch.equal(torch.stack(steps(one)), torch.stack(steps(other)))
    assert one.record("t").id_counts["admitted"] == ROWS - 1
    rows = one.rows_of(KeyedJagged.from_lists({"a": [list(range(ROWS))]}), "a")["t"]
    for name, want in other.record("t").fields.items():
        if name != "touched":
            assert torch.equal(one.record("t").fields[name][rows], want), name


def one_id(id: int) -> KeyedJagged:
    return KeyedJagged.from_lists({"a": [[id]], "b": [[]], "c": [[]], "d": [[]]})


def test_gradients_go_to_the_rows_that_were_looked_up() -> None:
    """Also where a later lookup, before backward, gave the id a row of its own."""
    tables = make("deferred", "sgd", addressing=Dynamic(row_index.Policy(capacity=10, after=2)))
    first, second = tables(one_id(5))["a"], tables(one_id(5))["a"]
    first.sum().backward()  # type: ignore[union-attr]
    assert tables.gradients()["t"].rows_U.tolist() == [0]
    second.sum().backward()  # type: ignore[union-attr]
    assert tables.gradients()["t"].rows_U.tolist() == [0, 2]


def test_rows_in_use_stay_when_a_model_is_moved_to_where_it_is() -> None:
    tables = make("deferred", "sgd", addressing=Dynamic(row_index.Policy(capacity=1)))
    tables(one_id(5))["a"].sum().backward()  # type: ignore[union-attr]
    tables.to("cpu")
    tables(one_id(6))
    assert (
        tables.record("t").fields["id"].tolist() == [-2, 0, 5]
        and tables.record("t").id_counts["crowded"] == 1
    )


def test_first_values_are_those_of_the_id_whatever_the_row() -> None:
    """In formats that round stochastically too."""
    found = []
    for before in ([], [3, 9]):
        policy = row_index.Policy(capacity=10)
        tables = make(
            "fused", "sgd", addressing=Dynamic(policy), format=int8.Config(), init_scale=0.5
        )
        for id in [*before, 77]:
            tables(one_id(id))
        record = tables.record("t")
        (row,) = (record.fields["id"] == 77).nonzero()[:, 0].tolist()
        found.append((row, record.weight[row].clone()))
    (row, one), (its, other) = found
    assert row != its and torch.equal(one, other)


def test_rows_that_nobody_has_any_more_are_touched() -> None:
    """Else who is told of changed rows alone would take them for those of their last ids."""
    tables = make("fused", "sgd", addressing=Dynamic(row_index.Policy(capacity=2, ttl=2)))
    for id in (3, 9, 0, 0, 0):
        tables(one_id(id))["a"].sum().backward()  # type: ignore[union-attr]
    record = tables.record("t")
    record.fields["touched"].zero_()
    tables(one_id(77))
    assert record.fields["id"].tolist() == [-2, 0, 77, -1]
    assert record.fields["touched"].tolist() == [0, 0, 1, 1]


def test_a_copy_of_a_dynamic_table_goes_on_by_itself() -> None:
    tables = make("fused", "adam", addressing=Dynamic(row_index.Policy(capacity=10)))
    steps(tables)
    for other in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        before = tables.record("t").fields["id"].clone()
        assert torch.equal(
            torch.stack(steps(other, 5)), torch.stack(steps(copy.deepcopy(tables), 5))
        )
        assert torch.equal(before, tables.record("t").fields["id"])
        assert not torch.equal(before, other.record("t").fields["id"])


def test_a_negative_id_of_a_dynamic_table_is_told() -> None:
    tables = make("fused", "sgd", addressing=Dynamic(row_index.Policy(capacity=10)))
    with pytest.raises(
        UserError, match="table 't', feature 'a': id -1 at position 1 is outside .* 63 bits"
    ):
        tables(KeyedJagged.from_lists({"a": [[3, -1]], "b": [[]], "c": [[]], "d": [[]]}))


@pytest.mark.parametrize(
    "names", [*EACH_CHOICE, *((name,) for name in (*APART, "another store"))], ids=", ".join
)
def test_a_whole_run(
    names: tuple[str, ...],
    prepared: Path,
    tmp_path: Path,
    members: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preflight to the byte, training, a checkpoint, resuming, a restored model, a warm start, a
    report.
    """
    other_store = names == ("another store",)
    choices = TableChoices() if other_store else chosen(names)
    monkeypatch.syspath_prepend(quotient_folder()[0])
    with monkeypatch.context() as patch:
        if other_store:
            patch.setattr(memory.Config, "store", lambda tier, *of: Scattered(*of[:3]))
        run = run_of(prepared, tmp_path / "run", choices)
        trainer = Trainer(run)
        records = [record for one in trainer.job.tables for record in one.all_records()]
        held = sum(t.nbytes for r in records for t in r.fields.values())
        held += sum(
            t.nbytes
            for r in records
            if isinstance(r.store, CachedStore)
            for t in r.store.buffers(recurse=False)
        )
        held += sum(r.component.policy.index_bytes(r.rows) for r in records if r.component.policy)
        resolved = preflight.resolved(run, data.open(prepared))
        assert preflight.estimate(resolved, data.open(prepared)).host["tables"] == held
        results = trainer.fit()
        found = restore(tmp_path / "run")
        for one, other in zip(trainer.job.tables, tables_of(found.model), strict=True):
            for mine, its in zip(one.all_records(), other.all_records(), strict=True):
                assert all(torch.equal(mine.fields[n], its.fields[n]) for n in mine.fields)
                assert mine.component == its.component
        half = replace(run, run_dir=str(tmp_path / "half"), loop=Loop(max_steps=8))
        stopped = Trainer(half)
        take = stopped.course.take_step

        def stop(*arguments: Any) -> Any:
            if stopped.progress.step == 4:
                stopped.stop.receive(15, None)
            return take(*arguments)

        stopped.course.take_step = stop  # type: ignore[method-assign, assignment]
        stopped.fit()
        assert train(half, resume=True)["valid"] == results["valid"]
        warm = train(run_of(prepared, tmp_path / "warm", choices, init_from=str(tmp_path / "run")))
        assert warm["progressive"][0]["ne"] < results["progressive"][0]["ne"]
        assert report(tmp_path / "run", rows=0).read_text().count("</table>") > 3
        saved = checkpoint.load(tmp_path / "run" / "checkpoints", results["step"])
        rows = {chunk.table: chunk.rows[1] for chunk in saved.chunks()}
    assert rows == {
        c.name: c.rows for one in trainer.job.tables for spec in one.specs for c in spec.components
    }
    if other_store:
        plain = train(run_of(prepared, tmp_path / "plain", choices))
        assert plain["valid"] == results["valid"]


def test_a_choice_that_a_run_did_not_make_is_told(prepared: Path, tmp_path: Path) -> None:
    made = TableChoices(format=fp16.Config())
    train(run_of(prepared, tmp_path / "run", made))
    others = {
        "format": (TableChoices(), "'fp16'", "'fp32'"),
        "state": (replace(made, state="bf16"), "'fp32'", "'bf16'"),
        "cache.fraction": (replace(made, cache=Cache(fraction=0.2)), "0.0", "0.2"),
    }
    for setting, (choices, then, name) in others.items():
        told = (
            rf"tables\.\w+\.{setting} is {then} there and {name} here; restore the setting or begin"
            r" another run_dir"
        )
        with pytest.raises(
            UserError, match=rf"{told} with --init_from .*run, which converts table rows$"
        ) as error:
            train(run_of(prepared, tmp_path / "run", choices), resume=True)
        assert "\n" not in str(error.value)
        train(run_of(prepared, tmp_path / name, choices, init_from=str(tmp_path / "run")))


def test_a_table_that_nobody_holds_is_freed_at_once() -> None:
    gc.disable()
    try:
        tables = make("fused", "sgd")
        loss = loss_of(tables(batch(0)))
        rows = weakref.ref(tables.record("t"))
        del tables
        assert rows() is not None, "the rows must live until backward"
        loss.backward()
        del loss
        assert rows() is None
    finally:
        gc.enable()


def test_batches_that_nobody_looks_up_are_not_kept() -> None:
    tables = EmbeddingTables([], [])
    ids = KeyedJagged(
        keys=(),
        values_N=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int64),
    )
    tables.prefetch(ids)
    tables.begin(ids)
    assert not tables._ready


def test_pooled_of_features_that_differ_in_samples() -> None:
    tables = make("off", "sgd", addressing=quotient.Quotient(ROWS, 4))
    with pytest.raises(
        UserError, match="pooled: the features differ in samples, or one is not pooled"
    ):
        tables.pooled(batch(0))


def test_rows_that_would_meet_are_not_moved(prepared: Path, tmp_path: Path) -> None:
    train(run_of(prepared, tmp_path / "run", TableChoices()))
    few = TableChoices(
        overrides=(Override(names=("item",), addressing={"name": "hashed", "rows": 6}),)
    )
    with pytest.raises(
        UserError,
        match=r"init_from: rows of table 'item' are shared by ids that have other rows now",
    ):
        train(run_of(prepared, tmp_path / "warm", few, init_from=str(tmp_path / "run")))
    monkey = TableChoices(overrides=(Override(names=("item",), init_scale=0.1),))
    train(run_of(prepared, tmp_path / "same", monkey, init_from=str(tmp_path / "run")))


def test_two_components_in_the_place_of_one_are_refused(
    prepared: Path, tmp_path: Path, members: None
) -> None:
    train(run_of(prepared, tmp_path / "run", TableChoices()))
    two = TableChoices(overrides=(Override(names=("item",), addressing=QUOTIENT),))
    with pytest.raises(
        UserError, match=r"table 'item' is addressed otherwise than in the run before"
    ):
        train(run_of(prepared, tmp_path / "warm", two, init_from=str(tmp_path / "run")))
    with pytest.raises(UserError, match=r"checkpoint of another model: tables\.item\.addressing"):
        train(run_of(prepared, tmp_path / "run", two), resume=True)


def test_two_components_of_a_log_with_new_ids_begin_with_the_rows_of_the_old_ids(
    tmp_path: Path, members: None
) -> None:
    """A grown vocabulary has more quotients; the quotient and the remainder of an old id stay what
    they were.
    """
    for day, users in (("one", 40), ("two", 90)):
        generate(tmp_path / f"{day}.parquet", rows=4000, users=users, items=30, seed=users)
    data.prepare([tmp_path / "one.parquet"], tmp_path / "one")
    data.prepare(
        [tmp_path / "two.parquet"],
        tmp_path / "two",
        schema=Transforms.load(tmp_path / "one"),
        grow=True,
    )
    choices = TableChoices(overrides=(Override(names=("user",), addressing=QUOTIENT),))
    still = {"dense": dense_adam.Config(lr=0.0), "loop": Loop(max_steps=1)}
    first = Trainer(run_of(tmp_path / "one", tmp_path / "first", choices))
    first.fit()
    frozen = replace(choices, rule=sgd.Config(lr=0.0))
    with pytest.raises(UserError, match="has rule rowwise_adagrad for table"):
        train(
            run_of(
                tmp_path / "two",
                tmp_path / "other",
                frozen,
                init_from=str(tmp_path / "first"),
                **still,
            )
        )
    frozen = replace(choices, rule=replace(choices.rule, lr=0.0))
    second = Trainer(
        run_of(
            tmp_path / "two",
            tmp_path / "second",
            frozen,
            init_from=str(tmp_path / "first"),
            **still,
        )
    )
    second.fit()
    mine, its = first.job.tables[0], second.job.tables[0]
    for part in ("user.quotient", "user.remainder"):
        old, new = mine.record(part).weight, its.record(part).weight
        assert torch.equal(new[: len(old)], old)
    assert its.record("user.quotient").rows > mine.record("user.quotient").rows
