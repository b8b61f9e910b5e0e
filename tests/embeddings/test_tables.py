from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Hashed, RowRecords, TableSpec
from sparrow.kernels import Impl, embedding_bag, missing
from sparrow.kernels.rules import (
    Regularization,
    RowRule,
    adagrad,
    adam,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
)

ROWS, DIM, BATCH = 11, 6, 9
built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
FEATURES = (
    Feature(name="candidate", table="item", pooling="sum"),
    Feature(name="history", table="item", pooling="mean"),
    Feature(name="sequence", table="item", pooling="none"),
    Feature(name="user", table="user", pooling="sum"),
)
RULES = {"sgd": sgd.Config(lr=0.3), "rowwise_adagrad": rowwise_adagrad.Config(lr=0.3, eps=1e-3)}


def make(mode: str = "fused", rule: str = "rowwise_adagrad", seed: int = 1) -> EmbeddingTables:
    specs = [
        TableSpec(name="item", dim=DIM, addressing=Direct(ROWS), rule=RULES[rule]),
        TableSpec(name="user", dim=3, addressing=Hashed(5), rule=RULES[rule]),
    ]
    return EmbeddingTables(specs, FEATURES, seed=seed, mode=mode)


def batch(seed: int, *, weighted: bool = False, size: int = BATCH) -> KeyedJagged:
    random = torch.Generator().manual_seed(seed)
    one = torch.ones(size, dtype=torch.int64)
    ragged = [torch.randint(0, 4, (size,), generator=random) for _ in range(2)]
    lengths = torch.cat([one, *ragged, one])
    count = int(lengths.sum())
    return KeyedJagged(
        keys=tuple(f.name for f in FEATURES),
        values_N=torch.randint(0, ROWS, (count,), generator=random),
        lengths=lengths,
        weights_N=torch.rand(count, generator=random) if weighted else None,
    )


def plain(weights: dict[str, Tensor], ids: KeyedJagged) -> dict[str, Tensor]:
    """What the lookups mean, said with torch's own operators."""
    out = {}
    for f in FEATURES:
        part = ids[f.name]
        slots = part.values_N if f.table == "item" else Hashed(5).rows_of(part.values_N)[0]
        rows = F.embedding(slots, weights[f.table])
        if part.weights_N is not None:
            rows = rows * part.weights_N[:, None]
        if f.pooling == "none":
            out[f.name] = rows
            continue
        owner = torch.arange(part.lengths_B.numel()).repeat_interleave(part.lengths_B)
        pooled = torch.zeros(part.lengths_B.numel(), rows.shape[1]).index_add(0, owner, rows)
        out[f.name] = (
            pooled / part.lengths_B.clamp(min=1)[:, None] if f.pooling == "mean" else pooled
        )
    return out


def tensors(out: dict[str, Tensor | Jagged]) -> dict[str, Tensor]:
    return {k: v.values_N if isinstance(v, Jagged) else v for k, v in out.items()}


def objective(out: dict[str, Tensor]) -> Tensor:
    """Any scalar with a gradient that differs everywhere."""
    return sum(
        ((v + 0.5) ** 3 * torch.linspace(0.5, 1.5, v.numel()).view_as(v)).sum()
        for v in out.values()
    )


def weights_of(tables: EmbeddingTables) -> dict[str, Tensor]:
    return {r.component.name: r.weight.clone() for r in tables.all_records()}


def equal(one: EmbeddingTables, two: EmbeddingTables) -> bool:
    pairs = zip(one.all_records(), two.all_records(), strict=True)
    return all(torch.equal(a.fields[n], b.fields[n]) for a, b in pairs for n in a.fields)


@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_is_plain_torch(weighted: bool) -> None:
    tables, ids = make(), batch(3, weighted=weighted)
    got, want = tensors(tables(ids)), plain(weights_of(tables), ids)
    assert list(got) == [f.name for f in FEATURES]
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(["fused", "deferred"], RULES)))
def test_update_is_the_rule_on_whole_gradients(mode: str, rule: str) -> None:
    tables, config = make(mode, rule), RULES[rule]
    sums = {name: torch.zeros(w.shape[0]) for name, w in weights_of(tables).items()}
    for step in range(3):
        ids = batch(step, weighted=step == 1)
        leaves = {k: w.requires_grad_() for k, w in weights_of(tables).items()}
        objective(plain(leaves, ids)).backward()
        objective(tensors(tables(ids))).backward()
        tables.update()
        for name, w in leaves.items():
            g = w.grad
            sums[name] += g.square().mean(1)
            divisor = (
                sums[name].sqrt() + config.eps
                if rule == "rowwise_adagrad"
                else torch.ones(w.shape[0])
            )
            want = w.detach() - config.lr * g / divisor[:, None]
            torch.testing.assert_close(tables.record(name).weight, want, rtol=2e-5, atol=2e-6)


def test_fused_and_deferred_agree_bitwise() -> None:
    fused, deferred = make("fused"), make("deferred")
    for step in range(3):
        for tables in (fused, deferred):
            objective(tensors(tables(batch(step, weighted=True)))).backward()
            tables.update()
    assert equal(fused, deferred)


def test_gradients_of_several_batches_are_merged_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all tables: a GPU is waited for in each."""
    merged, calls = make("deferred"), []
    for seed in (1, 2):
        objective(tensors(merged(batch(seed)))).backward()
    operator = embedding_bag.row_gradients
    monkeypatch.setattr(
        embedding_bag, "row_gradients", lambda *a, **k: calls.append(1) or operator(*a, **k)
    )
    assert set(merged.gradients()) == {"item", "user"} and len(calls) == 1
    apart = [make("deferred") for _ in range(2)]
    for seed, tables in zip((1, 2), apart, strict=True):
        objective(tensors(tables(batch(seed)))).backward()
    for name, found in merged.gradients().items():
        total = torch.zeros(int(found.rows_U.max()) + 1, found.grad_UD.shape[1])
        for tables in apart:
            total.index_add_(0, tables.gradients()[name].rows_U, tables.gradients()[name].grad_UD)
        assert torch.equal(found.grad_UD, total[found.rows_U])


def test_touched_are_the_rows_looked_up() -> None:
    tables, ids = make(), batch(0)
    objective(tensors(tables(ids))).backward()
    item = torch.cat([ids[f.name].values_N for f in FEATURES if f.table == "item"])
    assert (
        tables.record("item").fields["touched"].nonzero()[:, 0].tolist() == item.unique().tolist()
    )


def test_off_trains_nothing_but_lets_weights_learn() -> None:
    tables, before, ids = make("off"), make("off"), batch(1, weighted=True)
    ids.weights_N.requires_grad_()
    objective(tensors(tables(ids))).backward()
    tables.update()
    assert equal(tables, before)
    assert ids.weights_N.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", ["fused", "deferred", "off"])
def test_gradient_of_the_weights(mode: str) -> None:
    tables, ids = make(mode), batch(2, weighted=True)
    ids.weights_N.requires_grad_()
    (want,) = torch.autograd.grad(objective(plain(weights_of(tables), ids)), ids.weights_N)
    (got,) = torch.autograd.grad(objective(tensors(tables(ids))), ids.weights_N)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_accumulated_halves_are_the_whole() -> None:
    whole, halves = make("deferred"), make("deferred")
    first, second = batch(1), batch(2)
    both = [objective(tensors(whole(ids))) for ids in (first, second)]
    sum(both).backward()
    for ids in (first, second):
        objective(tensors(halves(ids))).backward()
    for tables in (whole, halves):
        tables.update()
    for a, b in zip(whole.all_records(), halves.all_records(), strict=True):
        torch.testing.assert_close(a.weight, b.weight)


def test_discarded_gradients_change_nothing() -> None:
    tables, before = make("deferred"), make("deferred")
    objective(tensors(tables(batch(1)))).backward()
    assert set(tables.gradients()) == {"item", "user"}
    tables.discard()
    tables.update()
    assert equal(tables, before)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_deduplicated_is_expanded(pooling: str) -> None:
    spec = TableSpec(name="item", dim=4, addressing=Direct(ROWS))
    one, two = (
        EmbeddingTables([spec], [Feature(name="h", table="item", pooling=pooling)])
        for _ in range(2)
    )
    ids = KeyedJagged(
        keys=("h",),
        values_N=torch.tensor([1, 2, 3, 3]),
        lengths=torch.tensor([2, 0, 2]),
        inverse_B={("h",): torch.tensor([2, 0, 0, 1, 2])},
    )
    a, b = one(ids)["h"], two(ids.expanded())["h"]
    assert torch.equal(a, b)
    for out in (a, b):
        objective({"h": out}).backward()
    torch.testing.assert_close(one.record("item").weight, two.record("item").weight)


def test_two_lookups_in_a_fused_step_are_refused() -> None:
    tables = make("fused")
    first, second = tables(batch(1)), tables(batch(2))
    objective(tensors(first)).backward()
    with pytest.raises(RuntimeError, match="look up once per step"):
        objective(tensors(second)).backward()


@pytest.mark.parametrize("value", [-1, ROWS, 2**62])
def test_id_out_of_range_names_the_place(value: int) -> None:
    tables, ids = make(), batch(1)
    position = ids["history"].values_N.numel() - 1
    ids["history"].values_N[position] = value
    with pytest.raises(
        UserError, match=f"table 'item', feature 'history': id {value} at position {position} "
    ):
        tables(ids)


def test_an_empty_batch() -> None:
    tables, before, ids = make(), make(), batch(1, size=0)
    out = tensors(tables(ids))
    assert out["history"].shape == (0, DIM)
    sum(v.sum() for v in out.values()).backward()
    assert equal(tables, before)


@pytest.mark.parametrize("max_bytes", [1, 200, 1 << 20])
def test_chunks_carry_whole_rows(max_bytes: int) -> None:
    one, two = make(seed=1), make(seed=2)
    objective(tensors(one(batch(1)))).backward()
    assert not equal(one, two)
    for chunk in one.chunks(max_bytes):
        two.load_chunk(chunk)
    assert equal(one, two)


def test_a_chunk_that_does_not_fit() -> None:
    tables = make()
    chunk = next(iter(tables.chunks()))
    with pytest.raises(UserError, match="no table 'itme'; did you mean 'item'"):
        tables.load_chunk(
            Chunk(table="itme", rows=chunk.rows, columns=chunk.columns, fields=chunk.fields)
        )
    with pytest.raises(UserError, match="fields"):
        tables.load_chunk(
            Chunk(
                table="item",
                rows=chunk.rows,
                columns=chunk.columns,
                fields={"weight": chunk.fields["weight"]},
            )
        )


def test_lifecycle_by_hand() -> None:
    tables = make("off")
    handle = tables.prepare(batch(1))
    one, two = tables.lookup(handle), tables(batch(1))
    assert torch.equal(one["history"], two["history"])
    tables.release(handle)
    with pytest.raises(UserError, match="released"):
        tables.lookup(handle)


def test_schedule_scales_the_rule() -> None:
    tables, before = make(rule="sgd"), make(rule="sgd")
    tables.scale_lr(0.0)
    objective(tensors(tables(batch(1)))).backward()
    assert torch.equal(tables.record("item").weight, before.record("item").weight)


def test_initial_rows_depend_on_name_and_seed_only() -> None:
    spec = TableSpec(name="item", dim=DIM, addressing=Direct(ROWS), rule=RULES["rowwise_adagrad"])
    alone = EmbeddingTables([spec], [], seed=1)
    assert torch.equal(alone.record("item").weight, make(seed=1).record("item").weight)
    assert float(alone.record("item").weight.abs().max()) <= ROWS**-0.5


def test_parts_that_do_not_fit() -> None:
    spec = TableSpec(name="item", dim=4, addressing=Direct(3))
    with pytest.raises(UserError, match="no table 'itme'; did you mean 'item'"):
        EmbeddingTables([spec], [Feature(name="h", table="itme")])
    with pytest.raises(UserError, match="is there twice; name each once"):
        EmbeddingTables([spec, spec], [])
    with pytest.raises(UserError, match="'fussed' is not one of"):
        make("fussed")
    with pytest.raises(UserError, match="dim: 0 is out of range"):
        TableSpec(name="x", dim=0, addressing=Direct(3))


# -- ids outside, samples that differ --------------------------------------------------------------


def test_ids_outside_go_to_the_oov_row_and_are_counted() -> None:
    spec = TableSpec(name="item", dim=4, addressing=Direct(ROWS), oov_row=2)
    features = [Feature(name="a", table="item"), Feature(name="b", table="item")]
    tables, known = (EmbeddingTables([spec], features, mode="fused") for _ in range(2))
    for _ in range(2):
        ids = KeyedJagged.from_lists({"a": [[1, -5], [ROWS]], "b": [[3], [2**40]]})
        mapped = KeyedJagged.from_lists({"a": [[1, 2], [2]], "b": [[3], [2]]})
        for t, batch in ((tables, ids), (known, mapped)):
            objective(tensors(t(batch))).backward()
    assert ids["a"].values_N.tolist() == [1, -5, ROWS], "the batch itself was changed"
    assert equal(tables, known)
    assert tables.oov_counts() == {"a": 4, "b": 2}
    assert known.oov_counts() == {"a": 0, "b": 0}
    with pytest.raises(UserError, match="oov_row: 11 is out of range"):
        TableSpec(name="item", dim=4, addressing=Direct(ROWS), oov_row=ROWS)


def test_features_with_different_numbers_of_samples() -> None:
    spec = TableSpec(name="item", dim=4, addressing=Direct(ROWS))
    features = [Feature(name="a", table="item"), Feature(name="b", table="item", pooling="mean")]
    tables = EmbeddingTables([spec], features, mode="off")
    ids = KeyedJagged(
        keys=("a", "b"),
        values_N=torch.tensor([1, 2, 3, 3]),
        lengths=torch.tensor([1, 0, 1, 2]),
        rows=(3, 1),
    )
    out, weight = tables(ids), tables.record("item").weight
    assert torch.equal(out["a"], torch.stack([weight[1], torch.zeros(4), weight[2]]))
    assert torch.equal(out["b"], weight[3:4])
    with pytest.raises(UserError, match="differ in samples"):
        tables.pooled(ids)


def test_pooled_is_every_feature_side_by_side() -> None:
    spec = [TableSpec(name=n, dim=d, addressing=Direct(ROWS)) for n, d in (("x", 3), ("y", 5))]
    features = [
        Feature(name="a", table="y"),
        Feature(name="b", table="x", pooling="mean"),
        Feature(name="c", table="y"),
    ]
    tables = EmbeddingTables(spec, features, mode="off")
    ids = KeyedJagged.from_lists(
        {"c": [[1], [2, 3]], "other": [[99], []], "a": [[4], []], "b": [[5, 6], [7]]}
    )
    assert torch.equal(tables.pooled(ids), torch.cat(list(tables(ids).values()), 1))
    with pytest.raises(UserError, match="no feature 'a'"):
        tables(KeyedJagged.from_lists({"b": [[1]], "c": [[1]]}))


def test_a_copy_learns_by_itself() -> None:
    tables = make("fused")
    tables(batch(1))
    twin, before = copy.deepcopy(tables), weights_of(tables)
    objective(tensors(twin(batch(1)))).backward()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(tables).items())
    objective(tensors(tables(batch(1)))).backward()
    assert equal(tables, twin)


# -- gradients by differences, and compiled programs -----------------------------------------------


class Rows(torch.autograd.Function):
    """Rows -> vectors, differentiated by the gradients that "deferred" mode hands out."""

    @staticmethod
    def forward(ctx, weight_RD: Tensor, tables: EmbeddingTables, ids: KeyedJagged) -> Tensor:
        tables.record("item").weight.copy_(weight_RD)
        with torch.enable_grad():
            ctx.out, ctx.tables = (
                torch.cat([v.flatten() for v in tensors(tables(ids)).values()]),
                tables,
            )
        return ctx.out.detach().clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.tables.discard()
        ctx.out.backward(grad, retain_graph=True)
        found = ctx.tables.gradients()["item"]
        weight_RD = torch.zeros_like(ctx.tables.record("item").weight)
        return weight_RD.index_copy(0, found.rows_U, found.grad_UD), None, None


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck_in_deferred(weighted: bool) -> None:
    tables = make("deferred").double()
    tables.impl = "reference"  # C++ has float32 only, and has the reference's bits: tests/kernels
    ids = batch(4, weighted=weighted)
    if weighted:
        ids = KeyedJagged(
            keys=ids.keys,
            values_N=ids.values_N,
            lengths=ids.lengths,
            weights_N=ids.weights_N.double(),
        )
    weight_RD = tables.record("item").weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(Rows.apply, (weight_RD, tables, ids))
    if weighted:
        weights_N = ids.weights_N.clone().requires_grad_()

        def of_weights(weights_N: Tensor) -> Tensor:
            again = KeyedJagged(
                keys=ids.keys, values_N=ids.values_N, lengths=ids.lengths, weights_N=weights_N
            )
            return torch.cat([v.flatten() for v in tensors(tables(again)).values()])

        assert torch.autograd.gradcheck(of_weights, (weights_N,))


@pytest.mark.parametrize(
    ("mode", "impl"),
    [
        ("off", "reference"),
        *(
            pytest.param(mode, "cpp", marks=pytest.mark.skipif(bool(missing()), reason=missing()))
            for mode in ("fused", "deferred")
        ),
    ],
)
def test_compiled_without_a_graph_break(mode: str, impl: Impl) -> None:
    plain_tables, compiled_tables = (make(mode) for _ in range(2))

    def loss(tables: EmbeddingTables, ids: KeyedJagged) -> Tensor:
        return objective(tensors(tables(ids)))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for step in range(4):
            grads = []
            for tables, run in ((plain_tables, loss), (compiled_tables, compiled)):
                tables.impl = impl
                tables.scale_lr(1 / (step + 1))  # a schedule
                ids = batch(step, weighted=True, size=BATCH + step)
                ids.weights_N.requires_grad_()
                run(tables, ids).backward()
                tables.update()
                grads.append(ids.weights_N.grad)
            torch.testing.assert_close(*grads)
    assert equal(plain_tables, compiled_tables)
    assert mode == "off" or not equal(compiled_tables, make(mode))
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_a_schedule_does_not_recompile(mode: str) -> None:
    tables, ids = make(mode), batch(1)
    compiled = torch.compile(
        lambda: objective(tensors(tables(ids))), fullgraph=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            tables.scale_lr(1 / (step + 1))
            compiled().backward()
            tables.update()
    torch.compiler.reset()


def test_bad_ids_and_stale_rows_in_a_compiled_program() -> None:
    tables = make("fused")
    compiled = torch.compile(
        lambda ids: objective(tensors(tables(ids))), fullgraph=True, backend="aot_eager"
    )
    bad = batch(1)
    bad["history"].values_N[0] = ROWS
    with pytest.raises(UserError, match=f"feature 'history': id {ROWS} at position 0"):
        compiled(bad)
    first, second = compiled(batch(1)), compiled(batch(1))
    first.backward()
    with pytest.raises(RuntimeError, match="look up once per step"):
        second.backward()
    torch.compiler.reset()


def test_state_of_adam_travels_in_chunks() -> None:
    spec = TableSpec(name="item", dim=3, addressing=Direct(70_000), rule=adam.Config())
    one, two = (EmbeddingTables([spec], [Feature(name="h", table="item")], seed=s) for s in (1, 2))
    ids = KeyedJagged.from_lists({"h": [[0, 69_999], [65_536]]})
    for _ in range(2):
        objective(tensors(one(ids))).backward()
    for chunk in one.chunks(1 << 20):
        two.load_chunk(chunk)
    assert equal(one, two)
    assert set(one.record("item").fields) == {"weight", "first", "second", "updates", "touched"}
    assert one.record("item").fields["updates"].sum() == 6


@pytest.mark.parametrize("rule", [adam.Config(), rowwise_adagrad.Config()])
def test_column_parts_become_whole_rows_in_any_order(rule: RowRule) -> None:
    """Parts of different widths are cut into chunks of different rows; a rule's number of a row is
    their mean.
    """
    spec = TableSpec(name="item", dim=10, addressing=Direct(100), rule=rule)
    whole = EmbeddingTables([spec], [Feature(name="h", table="item")], seed=1)
    objective(
        tensors(whole(KeyedJagged.from_lists({"h": [list(range(0, 100, 3))] * 3})))
    ).backward()
    want, chunks = whole.record("item").fields, []
    want.get("updates", want["touched"]).fill_(29)
    for columns in ((0, 2), (2, 5), (5, 7), (7, 10)):
        part = RowRecords(*spec.components, 0, None, columns)
        for name, values in part.fields.items():
            values.copy_(want[name][:, slice(*columns)] if values.dim() > 1 else want[name])
        chunks += part.chunks(300)
    random.Random(0).shuffle(chunks)
    again = EmbeddingTables([spec], [], seed=2)
    assert sum(again.record("item").load_chunk(chunk) for chunk in chunks) == 1000
    assert all(
        torch.equal(values, want[name]) for name, values in again.record("item").fields.items()
    )
    for chunk in chunks:  # each part's own number: its first column
        for name, values in chunk.fields.items():
            if values.dim() == 1 and name != "touched":
                values.fill_(chunk.columns[0])
        again.record("item").load_chunk(chunk)
    for name, values in again.record("item").fields.items():
        if values.dim() == 1 and name != "touched":
            torch.testing.assert_close(
                values.float(), torch.full((100,), (0 * 2 + 2 * 3 + 5 * 2 + 7 * 3) / 10)
            )


def test_a_part_begins_as_in_the_whole_table() -> None:
    """Of any rows and columns, in any table of this name and seed and of no other."""
    spec = TableSpec(name="item", dim=10, addressing=Direct(100))
    whole = RowRecords(*spec.components, 7)
    for rows, columns in (
        ((0, 100), (3, 10)),
        ((37, 41), (0, 10)),
        ((99, 100), (9, 10)),
        ((5, 5), (0, 3)),
    ):
        part = RowRecords(*spec.components, 7, rows, columns)
        assert torch.equal(part.weight, whole.weight[slice(*rows), slice(*columns)])
    assert not torch.equal(RowRecords(*spec.components, 8).weight, whole.weight)
    assert not torch.equal(
        RowRecords(*replace(spec, name="user").components, 7).weight, whole.weight
    )


def test_a_part_draws_its_own_numbers_alone() -> None:
    """The last rows of a table that no machine could hold: whoever drew those before would not come
    to an end.
    """
    spec = TableSpec(name="item", dim=64, addressing=Direct(1 << 40), init_scale=1.0)
    part = RowRecords(*spec.components, 7, ((1 << 40) - 5, 1 << 40), (62, 64))
    again = RowRecords(*spec.components, 7, ((1 << 40) - 9, (1 << 40) - 2), (61, 63))
    assert torch.equal(part.weight[:3, :1], again.weight[4:, 1:])
    assert part.weight.flatten().unique().numel() == 10


# -- random programs -------------------------------------------------------------------------------

POOLINGS = st.sampled_from(["sum", "mean", "none"])
MEMBERS = (sgd, rowwise_adagrad, adagrad, adam, rowwise_adam)


@st.composite
def programs(
    draw: st.DrawFn,
) -> tuple[list[TableSpec], list[Feature], list[tuple[str, int, bool, bool]]]:
    """Tables, features, and steps: (mode, seed of the batch, weighted, deduplicated)."""
    specs = []
    for t in range(draw(st.integers(1, 3))):
        extra = Regularization(
            weight_decay=draw(st.sampled_from([0.0, 0.1])),
            decay=draw(st.sampled_from(["l2", "decoupled"])),
            clip_norm=draw(st.sampled_from([0.0, 0.5])),
            max_norm=draw(st.sampled_from([0.0, 0.5])),
        )
        rows = draw(st.integers(1, 30))
        addressing = Hashed(rows, seed=t) if draw(st.booleans()) else Direct(rows)
        oov_row = draw(st.integers(0, rows - 1))
        rule = draw(st.sampled_from(MEMBERS)).Config(lr=0.1, regularization=extra)
        dim = draw(st.sampled_from([1, 3, 8, 17, 64]))
        specs.append(
            TableSpec(name=f"t{t}", dim=dim, addressing=addressing, rule=rule, oov_row=oov_row)
        )
    features = [
        Feature(name=f"f{f}", table=draw(st.sampled_from(specs)).name, pooling=draw(POOLINGS))
        for f in range(draw(st.integers(1, 4)))
    ]
    step = st.tuples(
        st.sampled_from(["fused", "deferred", "accumulate", "discard", "off"]),
        st.integers(0, 999),
        st.booleans(),
        st.booleans(),
    )
    return specs, features, draw(st.lists(step, min_size=1, max_size=5))


def random_ids(features: list[Feature], seed: int, weighted: bool, shared: bool) -> KeyedJagged:
    """Any lengths, ids outside every table among them, and features that store fewer rows than
    samples.
    """
    g = torch.Generator().manual_seed(seed)
    # enough for two threads
    samples = int(torch.randint(0, 7, (), generator=g)) * (500 if seed % 7 == 0 else 1)
    names = [f.name for f in features]
    stored = dict.fromkeys(names, samples)
    inverse: dict[tuple[str, ...], Tensor] = {}
    if shared:
        stored[names[0]] = 3
        inverse[names[0],] = torch.randint(0, 3, (samples,), generator=g)
    lengths = torch.randint(0, 5, (sum(stored.values()),), generator=g)
    count = int(lengths.sum())
    return KeyedJagged(
        keys=tuple(names),
        lengths=lengths,
        inverse_B=inverse,
        values_N=torch.randint(
            -3, 40, (count,), generator=g, dtype=(torch.int64, torch.int32)[seed % 2]
        ),
        weights_N=torch.randn(count, generator=g) if weighted else None,
        rows=tuple(stored.values()),
    )


@built
@settings(max_examples=60, derandomize=True)
@given(programs())
def test_random_programs_have_the_reference_s_result(program) -> None:
    specs, features, steps = program
    both = [EmbeddingTables(specs, features, seed=3, impl=impl) for impl in ("cpp", "reference")]
    for mode, seed, weighted, shared in steps:
        found = []
        for tables in both:
            tables.mode = mode if mode in ("fused", "off") else "deferred"
            out, weights = [], []
            for part in range(2 if mode == "accumulate" else 1):
                ids = random_ids(features, seed + part, weighted, shared)
                if weighted:
                    ids.weights_N.requires_grad_()
                    weights.append(ids.weights_N)
                handle = tables.prepare(ids)
                out.append(tensors(tables.lookup(handle)))
                objective(out[-1]).backward()
                tables.release(handle)
            if mode == "discard":
                tables.discard()
            tables.update()
            found.append(
                (
                    out,
                    [w.grad for w in weights],
                    [r.fields for r in tables.all_records()],
                    tables.oov_counts(),
                )
            )
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
