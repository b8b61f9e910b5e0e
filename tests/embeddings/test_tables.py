from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Hashed, TableSpec
from sparrow.kernels.rules import rowwise_adagrad, sgd

ROWS, DIM, BATCH = 11, 6, 9
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
        slots = part.values_N if f.table == "item" else Hashed(5).slots(part.values_N)
        rows = F.embedding(slots, weights[f.table])
        if part.weights_N is not None:
            rows = rows * part.weights_N[:, None]
        if f.pooling == "none":
            out[f.name] = rows
            continue
        owner = torch.arange(part.lengths_B.numel()).repeat_interleave(part.lengths_B)
        pooled = torch.zeros(part.lengths_B.numel(), rows.shape[1]).index_add(0, owner, rows)
        out[f.name] = pooled / part.lengths_B.clamp(min=1)[:, None] if f.pooling == "mean" else pooled
    return out


def tensors(out: dict[str, Tensor | Jagged]) -> dict[str, Tensor]:
    return {k: v.values_N if isinstance(v, Jagged) else v for k, v in out.items()}


def objective(out: dict[str, Tensor]) -> Tensor:
    """Any scalar with a gradient that differs everywhere."""
    return sum(((v + 0.5) ** 3 * torch.linspace(0.5, 1.5, v.numel()).view_as(v)).sum() for v in out.values())


def weights_of(tables: EmbeddingTables) -> dict[str, Tensor]:
    return {r.spec.name: r.weight.clone() for r in tables.all_records()}


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
            divisor = sums[name].sqrt() + config.eps if rule == "rowwise_adagrad" else torch.ones(w.shape[0])
            want = w.detach() - config.lr * g / divisor[:, None]
            torch.testing.assert_close(tables.record(name).weight, want, rtol=2e-5, atol=2e-6)


def test_fused_and_deferred_agree_bitwise() -> None:
    fused, deferred = make("fused"), make("deferred")
    for step in range(3):
        for tables in (fused, deferred):
            objective(tensors(tables(batch(step, weighted=True)))).backward()
            tables.update()
    assert equal(fused, deferred)


def test_touched_are_the_rows_looked_up() -> None:
    tables, ids = make(), batch(0)
    objective(tensors(tables(ids))).backward()
    item = torch.cat([ids[f.name].values_N for f in FEATURES if f.table == "item"])
    assert tables.record("item").touched.nonzero()[:, 0].tolist() == item.unique().tolist()


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
    one, two = (EmbeddingTables([spec], [Feature(name="h", table="item", pooling=pooling)]) for _ in range(2))
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
    with pytest.raises(UserError, match=f"table 'item', feature 'history': id {value} at position {position} "):
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
        tables.load_chunk(Chunk(table="itme", rows=chunk.rows, columns=chunk.columns, fields=chunk.fields))
    with pytest.raises(UserError, match="fields"):
        tables.load_chunk(
            Chunk(table="item", rows=chunk.rows, columns=chunk.columns, fields={"weight": chunk.fields["weight"]})
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
    with pytest.raises(UserError, match="occurs twice"):
        EmbeddingTables([spec, spec], [])
    with pytest.raises(UserError, match="'fussed' is not one of"):
        make("fussed")
    with pytest.raises(UserError, match="dim: 0 is out of range"):
        TableSpec(name="x", dim=0, addressing=Direct(3))
