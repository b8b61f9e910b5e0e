"""`EmbeddingTables`: ids -> rows of components -> vectors -> one vector an id, or a bag of ids.

An `Exchange` brings the vectors of the components: from this process, or from many ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparrow import embeddings
from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.batch import split_at
from sparrow.core.errors import suggest
from sparrow.embeddings.autograd import Mapper
from sparrow.embeddings.components import MODES, ComponentTables, Mode, Passed
from sparrow.embeddings.exchange import Exchange, LocalExchange
from sparrow.embeddings.records import RowGradients, RowRecords
from sparrow.embeddings.spec import ON_CPU, Component, Feature, Placement, TableSpec
from sparrow.embeddings.stores import External
from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.philox import key_of

if TYPE_CHECKING:
    from sparrow.embeddings.combined import CombinedTables


@dataclass(eq=False)
class Handle:
    """A batch made ready for lookup. Its table rows stay where they are until `release`.

    Args:
        ids: the batch.
        inner: what the exchange made of it.
        places: feature of a component that lacks rows of some ids -> int64, which of the feature's
            ids it has.
        multiply: whether the components' vectors arrive multiplied, see `Feature.times`.
    """

    ids: KeyedJagged
    inner: Any
    places: dict[str, Tensor] = field(default_factory=dict)
    multiply: bool = False


class EmbeddingTables(nn.Module):
    """Embedding tables and the features that look into them.

    A table's addressing says which rows of its components an id uses, and how their vectors become
    one. The vectors of components come through `exchange`, which may be one of many ranks
    (`sparrow.sharding`). `parts` are the rows that are on this process. Calling the module does
    prepare, lookup and release.

    Args:
        specs: the tables.
        features: who looks into which table.
        seed: of the first values of the table rows, see `RowRecords`.
        mode: how gradients reach the table rows, see `ComponentTables`.
        impl: see `sparrow.kernels`.
        placement: where the rows are kept.

    Raises:
        UserError: for tables or features that do not fit together, or that cannot be kept there.

    Example:
        >>> import torch
        >>> from sparrow import EmbeddingTables, Feature, KeyedJagged, TableSpec
        >>> from sparrow.embeddings.addressing import direct
        >>> spec = TableSpec(name="item", dim=4, addressing=direct.Direct(10))
        >>> tables = EmbeddingTables([spec], [Feature(name="clicked", table="item", pooling="sum")])
        >>> ids = KeyedJagged(
        ...     keys=("clicked",), values_N=torch.tensor([4, 7]), lengths=torch.tensor([2, 0])
        ... )
        >>> tables(ids)["clicked"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        mode: Mode = "fused",
        impl: Impl = "auto",
        placement: Placement = ON_CPU,
    ) -> None:
        super().__init__()
        names = [spec.name for spec in specs]
        components: list[Component] = []
        component_owners: list[tuple[str, str]] = []
        for spec in specs:
            components += spec.components
            component_owners += [(component.name, spec.name) for component in spec.components]
        _require_names_once("table", names, component_owners)
        for feature in features:
            if feature.table not in names:
                raise UserError(
                    f"feature {feature.name!r}: no table"
                    f" {feature.table!r}{suggest(feature.table, names)}"
                )
        self.specs = tuple(specs)
        self.features = tuple(features)
        self.seed = seed
        self._spec_of = {feature.name: specs[names.index(feature.table)] for feature in features}
        combines = _combining_modules(specs, seed)
        self.combines = nn.ModuleList(combines.values())
        self._combined: CombinedTables | None = None
        parts = {
            f.name: [replace(f, table=self._spec_of[f.name].components[0].name)] for f in features
        }
        if combines:
            self._combined = embeddings.combined.CombinedTables(features, self._spec_of, combines)
            parts = self._combined.parts
        owners: list[tuple[str, str]] = []
        lookups: list[Feature] = []
        for name, feature_parts in parts.items():
            owners += [(part.name, name) for part in feature_parts]
            lookups += feature_parts
        _require_names_once("feature", [feature.name for feature in features], owners)
        records = [RowRecords(component, seed, placement=placement) for component in components]
        self._mode = mode
        self._impl = impl
        self.use(LocalExchange(ComponentTables(records), lookups))
        self._outside: dict[str, Tensor | int] = {}  # feature -> ids outside its table so far
        self._specs = [self._spec_of[feature.name] for feature in features]
        self._limits = [
            -1 if spec.addressing.ids is None else spec.addressing.ids for spec in self._specs
        ]
        self._is_identity = all(spec.addressing.traits.is_identity for spec in self._specs)
        self._keys: dict[tuple[str, ...], list[int]] = {}
        self._begin()

    def use(self, exchange: Exchange) -> None:
        """Get vectors through an exchange from now on. Its rows are in the place of those
        before.
        """
        self.exchange = exchange
        self.parts = nn.ModuleList(exchange.parts)
        self._are_shared = False  # whether rows that every rank has got the gradients of all
        self.mode, self.impl = self._mode, self._impl

    def _begin(self) -> None:
        """What a copy must have anew."""
        self._mapper = Mapper(self)
        self._ready: dict[KeyedJagged, Handle] = {}  # batches that were made ready for a later call

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_mapper", "_ready")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    # -- the lifecycle -----------------------------------------------------------------------------

    def prepare(self, ids: KeyedJagged) -> Handle:
        """Returns a handle of the batch, whose ids are mapped to rows, and begins to get these
        rows.

        It may run some batches ahead of the lookup.

        Raises:
            UserError: names table, feature, position and value of an id that its table does not
                hold.
        """
        multiply = self.exchange.multiplies(ids)
        rows_N = self._mapper(ids.values_N, ids.bounds, self._numbers(ids.keys))
        wide = ids
        places: dict[str, Tensor] = {}
        if self._combined is not None:
            wide = self._combined.widen(ids, rows_N, multiply)
            if self._combined.partial:
                wide, rows_N, places = self._combined.drop_absent(wide, rows_N)
        return Handle(ids, self.exchange.prepare(wide, rows_N, multiply), places, multiply)

    def prefetch(self, ids: KeyedJagged) -> None:
        """Do `prepare` for a later call with the same ids, once. It begins to read rows that are on
        an SSD.
        """
        if self.features and ids not in self._ready:
            self._ready[ids] = handle = self.prepare(ids)
            self.exchange.prefetch(handle.inner)

    def begin(self, ids: KeyedJagged) -> None:
        """Begin to look a batch up before the model asks for it.

        Vectors travel while the model computes something else.
        """
        if self.features:
            self._ready[ids] = handle = self._handle(ids)
            self.exchange.begin(handle.inner)

    def lookup(self, handle: Handle) -> dict[str, Tensor | Jagged]:
        """Returns feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with
        pooling "none".
        """
        vectors = self.exchange.lookup(handle.inner)
        if self._combined is None:
            return vectors
        join = self._combined.join
        return {
            feature.name: join(feature, vectors, handle.ids, handle.places)
            for feature in self.features
        }

    def pooled(self, ids: KeyedJagged) -> Tensor:
        """Returns all features' vectors side by side, [B, sum of dims], in the features' order.

        Where it can, it does not copy them.

        Raises:
            UserError: when a feature is not pooled, or has another number of samples than the
                others.
        """
        handle = self._handle(ids)
        if self._combined is None:
            vectors_BD = self.exchange.pooled(handle.inner)
        elif self._combined.columns.fits(handle.multiply):
            vectors_BD = self._combined.columns(self.exchange.pooled(handle.inner), self.impl)
        else:
            vectors_BD = embeddings.combined.stack(self.lookup(handle))
        self.release(handle)
        return vectors_BD

    @property
    def widths(self) -> list[int]:
        """D of each feature, in their order."""
        return [spec.dim for spec in self._specs]

    def release(self, handle: Handle) -> None:
        """Let go of the batch's rows."""
        self.exchange.release(handle.inner)

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients that were collected: all in "deferred" mode, in "fused" mode those of
        copied tables.
        """
        self._share_gradients()
        for part in self.exchange.parts:
            part.update()
        self._are_shared = False

    def forward(self, ids: KeyedJagged) -> dict[str, Tensor | Jagged]:
        """Prepares a batch, looks it up and releases it. Returns its vectors, see `lookup`."""
        handle = self._handle(ids)
        out = self.lookup(handle)
        self.release(handle)
        return out

    def get_extra_state(self) -> Tensor:
        """Returns what a state_dict has beside the weights: how many updates there were, and
        `Passed`, int64 [4].
        """
        parts = self.exchange.parts  # copied tables are last, and count the updates of all ranks
        return torch.tensor([parts[-1].updates, *parts[0].passed])

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` returned."""
        updates, *passed = state.tolist()
        for part in self.exchange.parts:
            part.updates = updates
            part.passed = Passed(*passed)  # none in checkpoints from before there was one

    # -- how rows learn ----------------------------------------------------------------------------

    def gradients(self) -> dict[str, RowGradients]:
        """Returns component -> exact unique-row gradients of the rows that are here, to read or
        scale.

        They are those since the last `update` or `discard`. Those of copied tables agree on all
        ranks.
        """
        self._share_gradients()
        gradients: dict[str, RowGradients] = {}
        for part in self.exchange.parts:
            gradients |= part.gradients()
        return gradients

    def discard(self) -> None:
        """Forget the collected gradients."""
        for part in self.exchange.parts:
            part.discard()
        self._are_shared = False

    def scale_lr(self, factor: float) -> None:
        """Set the learning rate of every component to its rule's times `factor`, as a schedule
        says.
        """
        for part in self.exchange.parts:
            rates = [record.component.rule.lr * factor for record in part.all_records()]
            part.lr_T.copy_(torch.tensor(rates))

    @property
    def mode(self) -> Mode:
        """How gradients reach the table rows. It may be changed between steps. Copied tables learn
        in `update`.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in MODES:
            raise UserError(f"mode: {mode!r} is not one of {', '.join(map(repr, MODES))}")
        self._mode = mode
        self._are_shared = False
        for part in self.exchange.parts:
            part.mode = "deferred" if part.is_copied and mode == "fused" else mode

    @property
    def impl(self) -> Impl:
        """Which implementation computes, see `sparrow.kernels`."""
        return self._impl

    @impl.setter
    def impl(self, impl: Impl) -> None:
        self._impl = impl
        for part in self.exchange.parts:
            part.impl = impl

    def _share_gradients(self) -> None:
        if not self._are_shared and self.mode != "off":
            self._are_shared = True
            self.exchange.share_gradients()

    # -- rows in and out ---------------------------------------------------------------------------

    @property
    def components(self) -> list[Component]:
        """The components of all tables, in their order."""
        return list(chain.from_iterable(spec.components for spec in self.specs))

    def all_records(self) -> Iterator[RowRecords]:
        """Returns the rows of every component that are here."""
        for part in self.exchange.parts:
            yield from part.all_records()

    def record(self, name: str) -> RowRecords:
        """Returns the rows of a component.

        Raises:
            UserError: when there is no such component, or when its rows may be on many ranks.
        """
        if self.exchange.is_sharded:
            raise UserError(f"table {name!r} is sharded; its rows here are among `all_records`")
        records = {record.component.name: record for record in self.all_records()}
        if name not in records:
            raise UserError(f"no table {name!r}{suggest(name, list(records))}")
        return records[name]

    def _saved_records(self) -> list[RowRecords]:
        return list(chain.from_iterable(part.all_records() for part in self.exchange.saved_parts))

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """Returns the row records that this process has to save, in chunks of at most about
        `max_bytes`.

        The tensors are views.
        """
        for record in self._saved_records():
            yield from record.chunks(max_bytes)

    def saved(self) -> Iterator[Chunk | External]:
        """Returns the row records as a checkpoint has them, see `RowRecords.saved`. What takes
        longest comes first.

        These are blocks of files on an SSD, if they have names.
        """
        for record in sorted(
            self._saved_records(), key=lambda record: record.store.transit is None
        ):
            yield from record.saved()

    def load_chunk(self, chunk: Chunk) -> None:
        """Overwrite the table rows and dimensions of the chunk.

        Raises:
            UserError: when table, range or fields do not fit.
        """
        self.record(chunk.table).load_chunk(chunk)
        self.changed()

    def changed(self) -> None:
        """Call it after rows were written from outside, so that a backward through older rows is
        noticed.
        """
        for part in self.exchange.parts:
            part.changed()

    def rows_of(self, ids: KeyedJagged, feature: str) -> dict[str, Tensor]:
        """Returns component -> the rows int64 [N] that the ids of a feature use; of ids that come
        and go, as of now.
        """
        spec = self._spec_of[feature]
        values_N = ids[feature].values_N
        legal_N = self._legal(values_N, (0, len(values_N)), self._numbers((feature,)))
        rows = spec.addressing.rows_of(legal_N.long())
        table_rows = {
            component.name: rows_N for component, rows_N in zip(spec.components, rows, strict=True)
        }
        if policy := spec.addressing.traits.policy:
            now = self.exchange.parts[0].passed.by(policy)
            return {
                name: self.record(name).rows_of(keys_N, now) for name, keys_N in table_rows.items()
            }
        return table_rows

    def combine_of(self, table: str) -> Any:
        """Returns the `Combine` of a table, or None where there is nothing to combine."""
        return None if self._combined is None else self._combined.combines.get(table)

    # -- ids that a table does not hold ------------------------------------------------------------

    def oov_counts(self) -> dict[str, int]:
        """Returns feature -> ids sent to its table's `oov_row` so far, for features whose table has
        one.
        """
        names = [name for name, spec in self._spec_of.items() if spec.oov_row is not None]
        return {name: int(self._outside.get(name, 0)) for name in names}

    def raise_bad_ids(self) -> None:
        """Raise the errors that `prepare` noticed on a GPU, where asking at once would stall it.

        Call it at a synchronisation.

        Raises:
            UserError: when a feature had ids that its table does not hold.
        """
        if self._outside:
            embeddings.outside_ids.require_none(self._spec_of, self._outside)

    # -- inside ------------------------------------------------------------------------------------

    def _handle(self, ids: KeyedJagged) -> Handle:
        if torch.compiler.is_compiling():
            return self.prepare(ids)
        return self._ready.pop(ids, None) or self.prepare(ids)

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
        """Returns the rows of a batch's ids, those of a key in one component of its table after
        those in another.

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

    def shape_of_rows(
        self, ids: torch.dtype, bounds: Sequence[int], keys: Sequence[int]
    ) -> tuple[int, torch.dtype]:
        """Returns the length and the type of what `map_ids` returns, for ids of a type. bounds,
        keys: as there.
        """
        specs = [self._spec_at(key) for key in keys]
        parts = [1 if spec is None else len(spec.components) for spec in specs]
        count = sum(
            n * (high - low) for n, (low, high) in zip(parts, pairwise(bounds), strict=True)
        )
        return count, ids if self._is_identity else torch.int64

    def _spec_at(self, key: int) -> TableSpec | None:
        return self._specs[key] if key >= 0 else None

    def _legal(self, values_N: Tensor, bounds: Sequence[int], keys: Sequence[int]) -> Tensor:
        """The ids, with each table's `oov_row` in the place of those that it does not hold."""
        limits = [self._limits[key] if key >= 0 else -1 for key in keys]
        counts_K = embedding_bag.count_outside(values_N, bounds, limits, impl=self.impl)
        if not values_N.is_cuda and not counts_K.any():
            return values_N
        specs = [(self.features[key].name, self._specs[key]) if key >= 0 else None for key in keys]
        values_N, counts = embeddings.outside_ids.replace_ids(values_N, bounds, specs, counts_K)
        for name, count in counts.items():
            self._outside[name] = self._outside.get(name, 0) + count
        return values_N


def _require_names_once(kind: str, names: list[str], parts: list[tuple[str, str]]) -> None:
    """Check names of features or tables, and those of their parts. parts: the name of each and
    whose it is.

    Raises:
        UserError: names both who have a name.
    """
    names_so_far: set[str] = set()
    owners: dict[str, str] = {}
    for name in names:
        if name in names_so_far:
            raise UserError(f"{kind} {name!r}: is there twice; name each once")
        names_so_far.add(name)
    for part, owner in parts:
        if (earlier := owners.setdefault(part, owner)) != owner:
            table, cut = sorted((earlier, owner), key=lambda name: name != part)
            raise UserError(
                f"{kind} {table!r}: a part of {kind} {cut!r} has the name {part!r} too; rename one"
                " of the columns"
            )


def _combining_modules(specs: Sequence[TableSpec], seed: int) -> dict[str, nn.Module]:
    """Returns table -> what makes one vector of those of its components, where it has several.

    First weights depend on seed and table alone, and move nobody else's.
    """
    combines: dict[str, nn.Module] = {}
    for spec in specs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_of(seed, spec.name) >> 1)
            combine = spec.addressing.combine(spec.dim)
        if combine is not None:
            combines[spec.name] = combine
    return combines
