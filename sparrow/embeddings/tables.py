"""`EmbeddingTables`: ids -> rows of components -> vectors -> one vector an id, or a bag of ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.batch import split_at
from sparrow.core.errors import suggest
from sparrow.embeddings.autograd import Mapper
from sparrow.embeddings.columns import Columns
from sparrow.embeddings.components import ComponentTables, Mode, Passed
from sparrow.embeddings.records import RowGradients, RowRecords
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.embeddings.stores import Saved
from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.expand import expand, sum_rows
from sparrow.kernels.philox import key_of


@dataclass(eq=False)
class Handle:
    """A batch made ready for lookup. Its table rows stay where they are until `release`.

    Args:
        ids: the batch.
        inner: what the components made of it.
        places: feature of a component that lacks rows of some ids -> int64, which of the feature's ids it has.
        multiply: whether the components' vectors arrive multiplied, see `Feature.times`.
    """

    ids: KeyedJagged
    inner: Any
    places: dict[str, Tensor] = field(default_factory=dict)
    multiply: bool = False


class EmbeddingTables(nn.Module):
    """Embedding tables and the features that look into them.

    A table's addressing says which rows of its components an id uses, and how their vectors become one. The components
    are looked up, and learn, in `components`, which may be on many ranks (`sparrow.sharding`). Calling the module does
    prepare, lookup and release.

    Args:
        specs: the tables.
        features: who looks into which table.
        seed: of the first values of the table rows, see `RowRecords`.
        mode: how gradients reach the table rows, see `ComponentTables`.
        impl: see `sparrow.kernels`.

    Raises:
        UserError: for tables or features that do not fit together.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        mode: Mode = "fused",
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        names = [spec.name for spec in specs]
        components = [component for spec in specs for component in spec.components]
        _no_name_twice("table", names, [component.name for component in components])
        for feature in features:
            if feature.table not in names:
                raise UserError(f"feature {feature.name!r}: no table {feature.table!r}{suggest(feature.table, names)}")
        self.specs = tuple(specs)
        self.features = tuple(features)
        self.seed = seed
        self._spec_of = {feature.name: specs[names.index(feature.table)] for feature in features}
        made = {}
        for spec in specs:  # first weights depend on seed and table alone, and move nobody else's
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key_of(seed, spec.name) >> 1)
                made[spec.name] = spec.addressing.combine(spec.dim)
        self._combined = [name for name in names if made[name] is not None]
        self.combines = nn.ModuleList(module for module in made.values() if module is not None)
        self._parts = {feature.name: self._parts_of(feature) for feature in features}
        parts = [part for of_feature in self._parts.values() for part in of_feature]
        _no_name_twice("feature", [feature.name for feature in features], [part.name for part in parts])
        records = [RowRecords(component, seed) for component in components]
        self.components: Any = ComponentTables(records, parts, mode=mode, impl=impl)
        self._outside: dict[str, Tensor | int] = {}  # feature -> ids outside its table so far
        self._specs = [self._spec_of[feature.name] for feature in features]
        self._limits = [-1 if spec.addressing.ids is None else spec.addressing.ids for spec in self._specs]
        partial = [name for name, spec in self._spec_of.items() if spec.addressing.traits.is_partial]
        self._partial = {part.name for name in partial for part in self._parts[name]}
        products = {name for name, of in self._parts.items() if any(part.times for part in of)}
        self._columns = Columns(
            features, self._spec_of, dict(zip(self._combined, self.combines, strict=True)), products
        )
        self._is_identity = all(spec.addressing.traits.is_identity for spec in self._specs)
        self._keys: dict[tuple[str, ...], list[int]] = {}
        self._begin()

    def _begin(self) -> None:
        """What a copy must have anew."""
        self._mapper = Mapper(self)
        self._ready: dict[KeyedJagged, Handle] = {}  # batches that were made ready for a later call

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_mapper", "_ready")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def prepare(self, ids: KeyedJagged) -> Handle:
        """Returns a handle of the batch, whose ids are mapped to rows, and begins to get these rows.

        It may run some batches ahead of the lookup.

        Raises:
            UserError: names table, feature, position and value of an id that its table does not hold.
        """
        multiply = self.components.multiplies(ids)
        rows_N = self._mapper(ids.values_N, ids.bounds, self._numbers(ids.keys))
        wide = self._wide(ids, rows_N, multiply)
        places: dict[str, Tensor] = {}
        if self._partial:
            wide, rows_N, places = self._present(wide, rows_N)
        return Handle(ids, self.components.prepare(wide, rows_N, multiply), places, multiply)

    def prefetch(self, ids: KeyedJagged) -> None:
        """Do `prepare` for a later call with the same ids, once. It begins to read rows that are on an SSD."""
        if self.features and ids not in self._ready:
            self._ready[ids] = handle = self.prepare(ids)
            self.components.prefetch(handle.inner)

    def begin(self, ids: KeyedJagged) -> None:
        """Begin to look a batch up before the model asks for it.

        Vectors travel while the model computes something else.
        """
        if self.features:
            self._ready[ids] = handle = self._handle(ids)
            self.components.begin(handle.inner)

    def lookup(self, handle: Handle) -> dict[str, Tensor | Jagged]:
        """Returns feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with pooling "none"."""
        found = self.components.lookup(handle.inner)
        if not self._combined:
            return found
        return {feature.name: self._joined(feature, found, handle) for feature in self.features}

    def pooled(self, ids: KeyedJagged) -> Tensor:
        """Returns all features' vectors side by side, [B, sum of dims], in the features' order.

        Where it can, it does not copy them.

        Raises:
            UserError: when a feature is not pooled, or has another number of samples than the others.
        """
        handle = self._handle(ids)
        if not self._combined or self._columns.fits(handle.multiply):
            whole: Tensor = self.components.pooled(handle.inner)
            whole = self._columns(whole, self.impl) if self._combined else whole
        else:
            found = self.lookup(handle)
            vectors = [v for v in found.values() if not isinstance(v, Jagged)]
            if len(vectors) < len(found) or len({len(v) for v in vectors}) > 1:
                raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
            whole = torch.cat(vectors, 1)
        self.release(handle)
        return whole

    @property
    def widths(self) -> list[int]:
        """D of each feature, in their order."""
        return [spec.dim for spec in self._specs]

    def release(self, handle: Handle) -> None:
        """Let go of the batch's rows."""
        self.components.release(handle.inner)

    def update(self) -> None:
        """Apply the gradients that were collected in "deferred" mode. In the other modes there is nothing to do."""
        self.components.update()

    def forward(self, ids: KeyedJagged) -> dict[str, Tensor | Jagged]:
        """Returns what `lookup` does, of a batch that is prepared before and released after it."""
        handle = self._handle(ids)
        out = self.lookup(handle)
        self.release(handle)
        return out

    def get_extra_state(self) -> Tensor:
        """Returns what a state_dict has beside the weights: how many updates there were, and `Passed`, int64 [4]."""
        return torch.tensor([self.components.updates, *self.components.passed])

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` returned."""
        self.components.updates, *passed = state.tolist()
        self.components.passed = Passed(*passed)  # none in checkpoints from before there was one

    # -- what the components do ---------------------------------------------------------------------------------

    def gradients(self) -> dict[str, RowGradients]:
        """Returns what `ComponentTables.gradients` does."""
        return self.components.gradients()

    def discard(self) -> None:
        """Forget the collected gradients."""
        self.components.discard()

    def scale_lr(self, factor: float) -> None:
        """Set the learning rate of every component to its rule's times `factor`, as a schedule says."""
        self.components.scale_lr(factor)

    @property
    def mode(self) -> Mode:
        """How gradients reach the table rows. It may be changed between steps."""
        return self.components.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.components.mode = mode

    @property
    def impl(self) -> Impl:
        """Which implementation computes, see `sparrow.kernels`."""
        return self.components.impl

    @impl.setter
    def impl(self, impl: Impl) -> None:
        self.components.impl = impl

    def all_records(self) -> Iterator[RowRecords]:
        """Returns the rows of every component that are here."""
        return self.components.all_records()

    def record(self, name: str) -> RowRecords:
        """Returns the rows of a component.

        Raises:
            UserError: when there is no such component, or when its rows may be on many ranks.
        """
        return self.components.record(name)

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """Returns the row records that this process has to save, in chunks of at most about `max_bytes`."""
        return self.components.chunks(max_bytes)

    def saved(self) -> Iterator[Chunk | Saved]:
        """Returns what `chunks` does, but blocks of files on an SSD in their place, if they have names."""
        return self.components.saved()

    def load_chunk(self, chunk: Chunk) -> None:
        """Overwrite the table rows and dimensions of the chunk.

        Raises:
            UserError: when table, range or fields do not fit.
        """
        self.record(chunk.table).load_chunk(chunk)
        self.changed()

    def changed(self) -> None:
        """Call it after rows were written from outside, so that a backward through older rows is noticed."""
        self.components.changed()

    def rows_of(self, ids: KeyedJagged, feature: str) -> dict[str, Tensor]:
        """Returns component -> the rows int64 [N] that the ids of a feature use; of ids that come and go, as of now."""
        spec, values_N = self._spec_of[feature], ids[feature].values_N
        legal_N = self._legal(values_N, (0, len(values_N)), self._numbers((feature,)))
        rows = spec.addressing.rows_of(legal_N.long())
        found = {component.name: rows_N for component, rows_N in zip(spec.components, rows, strict=True)}
        if policy := spec.addressing.traits.policy:
            now = self.components.passed.by(policy)
            return {name: self.record(name).rows_of(keys_N, now) for name, keys_N in found.items()}
        return found

    def combine_of(self, table: str) -> Any:
        """Returns the `Combine` of a table, or None where there is nothing to combine."""
        spec = next((spec for spec in self.specs if spec.name == table and table in self._combined), None)
        return None if spec is None else self._combine(spec)

    # -- ids that a table does not hold -------------------------------------------------------------------------

    def oov_counts(self) -> dict[str, int]:
        """Returns feature -> ids sent to its table's `oov_row` so far, for features whose table has one."""
        names = [name for name, spec in self._spec_of.items() if spec.oov_row is not None]
        return {name: int(self._outside.get(name, 0)) for name in names}

    def raise_bad_ids(self) -> None:
        """Raise the errors that `prepare` noticed on a GPU, where asking at once would stall it.

        Call it at a synchronisation.

        Raises:
            UserError: when a feature had ids that its table does not hold.
        """
        for name, spec in self._spec_of.items():
            if spec.oov_row is None and int(count := self._outside.pop(name, 0)):
                raise UserError(f"{_place(name, spec)}: {int(count)} ids are outside {_range(spec)}")

    # -- inside -------------------------------------------------------------------------------------------------

    def _handle(self, ids: KeyedJagged) -> Handle:
        if torch.compiler.is_compiling():
            return self.prepare(ids)
        return self._ready.pop(ids, None) or self.prepare(ids)

    def _parts_of(self, feature: Feature) -> list[Feature]:
        """What a feature looks up, one for each component of its table."""
        spec = self._spec_of[feature.name]
        if spec.name not in self._combined:
            return [replace(feature, table=spec.components[0].name)]
        names = [part.name for part in spec.addressing.components(spec.dim)]
        parts = [
            Feature(
                name=f"{feature.name}.{name}" if name else feature.name,
                table=component.name,
                pooling=self._pooling(feature, spec),
            )
            for name, component in zip(names, spec.components, strict=True)
        ]
        if self._combine(spec).is_product and len(parts) == 2:
            parts[0] = replace(parts[0], times=(parts[1].name, feature.pooling))
        return parts

    def _pooling(self, feature: Feature, spec: TableSpec) -> Any:
        """How vectors of components are pooled before they are combined."""
        if not self._combine(spec).is_linear:
            return "none"
        # the number of ids of a sample that have a row is not the number of its ids
        return "sum" if spec.addressing.traits.is_partial and feature.pooling == "mean" else feature.pooling

    def _present(self, wide: KeyedJagged, rows_N: Tensor) -> tuple[KeyedJagged, Tensor, dict[str, Tensor]]:
        """Returns wide ids and rows without the ids that have no row, and `Handle.places`."""
        assert wide.offsets is not None and wide.lengths is not None
        has_N = rows_N >= 0
        before_N1 = torch.cat([has_N.new_zeros(1, dtype=torch.int64), has_N.cumsum(0)])
        parts = zip(wide.keys, pairwise(wide.bounds), strict=True)
        places = {key: has_N[slice(*at)].nonzero().squeeze(1) for key, at in parts if key in self._partial}
        left = KeyedJagged(
            keys=wide.keys,
            values_N=wide.values_N[has_N],
            lengths=before_N1[wide.offsets].diff(),
            weights_N=None if wide.weights_N is None else wide.weights_N[has_N],
            inverse_B=wide.inverse_B,
            rows=wide.rows,
            time=wide.time,
        )
        return left, rows_N[has_N], places

    def _combine(self, spec: TableSpec) -> Any:
        return self.combines[self._combined.index(spec.name)]

    def _wide(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool) -> KeyedJagged:
        """The batch with each key once for each component of its table, and rows in the place of ids."""
        if not self._combined:
            return ids
        assert ids.lengths is not None and ids.rows is not None
        lengths_of = dict(zip(ids.keys, ids.lengths.split(list(ids.rows)), strict=True))
        bounds_of = dict(zip(ids.keys, pairwise(ids.bounds), strict=True))
        names = {key: self._names(key) for key in ids.keys}
        origin = {name: key for key, made in names.items() for name in made}
        weights_N = None
        if ids.weights_N is not None:
            weights = [self._weights(ids.weights_N[slice(*bounds_of[key])], key, multiply) for key in origin.values()]
            weights_N = torch.cat([ids.weights_N[:0], *weights])
        groups = {tuple(n for key in group for n in names[key]): at_B for group, at_B in ids.inverse_B.items()}
        lengths = torch.cat([lengths_of[key] for key in origin.values()])
        counts = [high - low for low, high in (bounds_of[key] for key in origin.values())]
        return KeyedJagged(
            keys=tuple(origin),
            values_N=rows_N,
            lengths=lengths,
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            weights_N=weights_N,
            inverse_B=groups,
            rows=tuple(ids.stored(key) for key in origin.values()),
            time=ids.time,
            _bounds=tuple(accumulate(counts, initial=0)),  # what is known is not measured again
        )

    def _names(self, key: str) -> list[str]:
        return [part.name for part in self._parts[key]] if key in self._parts else [key]

    def _weights(self, weights_N: Tensor, key: str, multiply: bool) -> Tensor:
        """Returns the weights of a key, or ones where vectors are weighted after they are combined."""
        spec = self._spec_of.get(key)
        is_late = spec is not None and spec.name in self._combined and not self._combine(spec).is_linear
        is_multiplied = multiply and any(part.times for part in self._parts.get(key, ()))
        return torch.ones_like(weights_N) if is_late and not is_multiplied else weights_N

    def _joined(self, feature: Feature, found: dict[str, Tensor | Jagged], handle: Handle) -> Tensor | Jagged:
        """Returns a feature's vectors, made of those that its components found."""
        spec, names = self._spec_of[feature.name], self._names(feature.name)
        if spec.name not in self._combined:
            return found[feature.name]
        if names[-1] not in found:  # both were multiplied
            return found[names[0]]
        combine = self._combine(spec)
        parts = [found[name] for name in names]
        of = handle.ids[feature.name]
        if not isinstance(parts[0], Jagged):
            pooled_BD = combine(parts, None)
            if spec.addressing.traits.is_partial and feature.pooling == "mean":
                shares_B = of.lengths_B.clamp(min=1).reciprocal()
                pooled_BD = pooled_BD * (shares_B if of.inverse_B is None else shares_B[of.inverse_B])[:, None]
            return pooled_BD
        vectors = [part.values_N for part in parts]  # type: ignore[union-attr]
        if spec.addressing.traits.is_partial:
            ids = len(of.values_N)
            vectors = [sum_rows(x_ND, handle.places[name], ids) for name, x_ND in zip(names, vectors, strict=True)]
        values_ND = combine(vectors, _within(of.values_N.long(), spec))
        if of.weights_N is not None and not combine.is_linear:
            values_ND = values_ND * of.weights_N[:, None]
        if feature.pooling == "none":
            return Jagged(values_N=values_ND, offsets_B1=of.offsets_B1, inverse_B=of.inverse_B, host=of.host)
        lengths_B = of.lengths_B
        count = torch.arange(len(lengths_B), device=lengths_B.device)
        bag_N = count.repeat_interleave(lengths_B, output_size=len(values_ND))
        pooled_BD = sum_rows(values_ND, bag_N, len(lengths_B))
        if feature.pooling == "mean":
            pooled_BD = pooled_BD * lengths_B.clamp(min=1).reciprocal()[:, None]  # as the kernels do
        return pooled_BD if of.inverse_B is None else expand(pooled_BD, of.inverse_B)

    def _numbers(self, keys: tuple[str, ...]) -> list[int]:
        """Returns for each key the number of its feature, or -1."""
        if torch.compiler.is_compiling():  # what a compiled program asks for must not change
            return self._make_numbers(keys)
        if keys not in self._keys:
            self._keys[keys] = self._make_numbers(keys)
        return self._keys[keys]

    def _make_numbers(self, keys: tuple[str, ...]) -> list[int]:
        numbers = {feature.name: number for number, feature in enumerate(self.features)}
        return [numbers.get(key, -1) for key in keys]

    def map_ids(self, values_N: Tensor, bounds: Sequence[int], keys: Sequence[int]) -> Tensor:
        """Returns the rows of a batch's ids, those of a key in one component of its table after those in another.

        Args:
            values_N: the ids [N], key by key.
            bounds: where the ids of each key begin, and where the last ones end.
            keys: the number of each key's feature, or -1 where nobody looks it up.

        Raises:
            UserError: for an id that its table does not hold, if the table has no `oov_row`.
        """
        values_N = self._legal(values_N, bounds, keys)
        if self._is_identity:
            return values_N
        rows: list[Tensor] = []
        for key, part_N in zip(keys, split_at(values_N.long(), bounds), strict=True):
            spec = self._spec_at(key)
            rows += [part_N] if spec is None else spec.addressing.rows_of(part_N)
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def shape_of_rows(self, ids: torch.dtype, bounds: Sequence[int], keys: Sequence[int]) -> tuple[int, torch.dtype]:
        """Returns the length and the type of what `map_ids` returns, for ids of a type. bounds, keys: as there."""
        specs = [self._spec_at(key) for key in keys]
        parts = [1 if spec is None else len(spec.components) for spec in specs]
        count = sum(n * (high - low) for n, (low, high) in zip(parts, pairwise(bounds), strict=True))
        return count, ids if self._is_identity else torch.int64

    def _spec_at(self, key: int) -> TableSpec | None:
        return self._specs[key] if key >= 0 else None

    def _legal(self, values_N: Tensor, bounds: Sequence[int], keys: Sequence[int]) -> Tensor:
        """The ids, with each table's `oov_row` in the place of those that it does not hold."""
        limits = [self._limits[key] if key >= 0 else -1 for key in keys]
        counts_K = embedding_bag.count_outside(values_N, bounds, limits, impl=self.impl)
        if not values_N.is_cuda and not counts_K.any():
            return values_N
        given_N, values_N = values_N, values_N.clone()
        for k, key in enumerate(keys):
            spec = self._spec_at(key)
            part_N = values_N[bounds[k] : bounds[k + 1]]
            if spec is None or limits[k] < 0 or (not part_N.is_cuda and not counts_K[k]):
                continue
            name, bad_N = self.features[keys[k]].name, (part_N < 0) | (part_N >= limits[k])
            if spec.oov_row is None and not part_N.is_cuda:
                position = int(bad_N.nonzero()[0])
                value = f"id {int(given_N[bounds[k] + position])} at position {position}"
                remedy = "give the table more rows, hashed addressing or an oov_row"
                if spec.addressing.traits.policy:
                    remedy = "ids are numbers of 63 bits"
                raise UserError(f"{_place(name, spec)}: {value} is outside {_range(spec)}; {remedy}")
            part_N.masked_fill_(bad_N, spec.oov_row or 0)
            self._outside[name] = self._outside.get(name, 0) + counts_K[k]
        return values_N


def _no_name_twice(kind: str, *lists: list[str]) -> None:
    for names in lists:
        if len(set(names)) != len(names):
            raise UserError(f"{kind}s {names}: a name occurs twice; name each once")


def _within(ids_N: Tensor, spec: TableSpec) -> Tensor:
    """Returns the ids with `oov_row` in the place of those that the table does not hold."""
    count = spec.addressing.ids
    return ids_N if count is None else torch.where((ids_N < 0) | (ids_N >= count), spec.oov_row or 0, ids_N)


def _place(feature: str, spec: TableSpec) -> str:
    return f"table {spec.name!r}, feature {feature!r}"


def _range(spec: TableSpec) -> str:
    return f"[0, {spec.addressing.ids})"
