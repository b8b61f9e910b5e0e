"""Tables whose vectors are made of those of components, such as quotients and remainders or bases
that are projected.

`EmbeddingTables` looks the components up as features of their own, and `CombinedTables` says which
and joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Jagged, KeyedJagged, UserError
from sparrow.embeddings.columns import Columns
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.kernels.expand import expand, sum_rows


class CombinedTables:
    """What features look up in components of tables, and how that becomes the features' vectors.

    combines: table -> its `Combine`. parts: feature -> what it looks up, one for each component.
    partial: those of components that lack rows of some ids. columns: for pooled vectors, all in one
    call.

    Args:
        features: of all tables.
        specs: feature -> its table.
        combines: for the tables that have one.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        specs: Mapping[str, TableSpec],
        combines: Mapping[str, Any],
    ) -> None:
        self.combines = dict(combines)
        self._specs = specs
        self.parts = {feature.name: self._parts_of(feature) for feature in features}
        partial = [name for name, spec in specs.items() if spec.addressing.traits.is_partial]
        self.partial: set[str] = set()
        for name in partial:
            self.partial |= {part.name for part in self.parts[name]}
        products = {name for name, parts in self.parts.items() if any(part.times for part in parts)}
        self.columns = Columns(features, specs, self.combines, products)

    def widen(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool) -> KeyedJagged:
        """Returns the batch with each key once for each component of its table, and rows in the
        place of ids.

        Args:
            ids: the batch.
            rows_N: the rows of its ids, those of a key in one component after those in another.
            multiply: whether the components' vectors arrive multiplied, see `Feature.times`.
        """
        assert ids.lengths is not None and ids.rows is not None
        lengths_of = dict(zip(ids.keys, ids.lengths.split(list(ids.rows)), strict=True))
        bounds_of = dict(zip(ids.keys, pairwise(ids.bounds), strict=True))
        names_of = {key: self._names(key) for key in ids.keys}
        keys: list[str] = []
        for key, names in names_of.items():
            keys += [key] * len(names)
        weights_N = None
        if ids.weights_N is not None:
            weights = [
                self._weights(ids.weights_N[slice(*bounds_of[key])], key, multiply) for key in keys
            ]
            weights_N = torch.cat([ids.weights_N[:0], *weights])
        lengths = torch.cat([lengths_of[key] for key in keys])
        counts = [bounds_of[key][1] - bounds_of[key][0] for key in keys]
        inverse_B = {
            tuple(chain.from_iterable(names_of[key] for key in group)): index_B
            for group, index_B in ids.inverse_B.items()
        }
        return KeyedJagged(
            keys=tuple(chain.from_iterable(names_of.values())),
            values_N=rows_N,
            lengths=lengths,
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            weights_N=weights_N,
            inverse_B=inverse_B,
            rows=tuple(ids.stored(key) for key in keys),
            time=ids.time,
            _bounds=tuple(accumulate(counts, initial=0)),  # what is known is not measured again
        )

    def drop_absent(
        self, wide: KeyedJagged, rows_N: Tensor
    ) -> tuple[KeyedJagged, Tensor, dict[str, Tensor]]:
        """Returns wide ids and rows without the ids that have no row, and `Handle.places`."""
        assert wide.offsets is not None and wide.lengths is not None
        has_N = rows_N >= 0
        before_N1 = torch.cat([has_N.new_zeros(1, dtype=torch.int64), has_N.cumsum(0)])
        bounds = zip(wide.keys, pairwise(wide.bounds), strict=True)
        places = {
            key: has_N[slice(*bound)].nonzero().squeeze(1)
            for key, bound in bounds
            if key in self.partial
        }
        present = KeyedJagged(
            keys=wide.keys,
            values_N=wide.values_N[has_N],
            lengths=before_N1[wide.offsets].diff(),
            weights_N=None if wide.weights_N is None else wide.weights_N[has_N],
            inverse_B=wide.inverse_B,
            rows=wide.rows,
            time=wide.time,
        )
        return present, rows_N[has_N], places

    def join(
        self,
        feature: Feature,
        component_vectors: dict[str, Tensor | Jagged],
        batch: KeyedJagged,
        places: dict[str, Tensor],
    ) -> Tensor | Jagged:
        """Returns the vectors of a feature.

        Args:
            feature: whose they are.
            component_vectors: those of components, by the names of `parts`.
            batch: the ids.
            places: see `Handle`.
        """
        spec = self._specs[feature.name]
        names = self._names(feature.name)
        if spec.name not in self.combines:
            return component_vectors[feature.name]
        if names[-1] not in component_vectors:  # both were multiplied
            return component_vectors[names[0]]
        combine = self.combines[spec.name]
        parts = [component_vectors[name] for name in names]
        ids = batch[feature.name]
        if not isinstance(parts[0], Jagged):
            pooled_BD = combine(parts, None)
            if spec.addressing.traits.is_partial and feature.pooling == "mean":
                shares_B = ids.lengths_B.clamp(min=1).reciprocal()
                pooled_BD = (
                    pooled_BD
                    * (shares_B if ids.inverse_B is None else shares_B[ids.inverse_B])[:, None]
                )
            return pooled_BD
        vectors = [part.values_N for part in parts]  # type: ignore[union-attr]
        if spec.addressing.traits.is_partial:
            count = len(ids.values_N)
            vectors = [
                sum_rows(x_ND, places[name], count)
                for name, x_ND in zip(names, vectors, strict=True)
            ]
        values_ND = combine(vectors, _replace_outside(ids.values_N.long(), spec))
        if ids.weights_N is not None and not combine.is_linear:
            values_ND = values_ND * ids.weights_N[:, None]
        if feature.pooling == "none":
            return Jagged(
                values_N=values_ND,
                offsets_B1=ids.offsets_B1,
                inverse_B=ids.inverse_B,
                host=ids.host,
            )
        lengths_B = ids.lengths_B
        bags = torch.arange(len(lengths_B), device=lengths_B.device)
        bag_N = bags.repeat_interleave(lengths_B, output_size=len(values_ND))
        pooled_BD = sum_rows(values_ND, bag_N, len(lengths_B))
        if feature.pooling == "mean":
            # as the kernels do
            pooled_BD = pooled_BD * lengths_B.clamp(min=1).reciprocal()[:, None]
        return pooled_BD if ids.inverse_B is None else expand(pooled_BD, ids.inverse_B)

    def _parts_of(self, feature: Feature) -> list[Feature]:
        spec = self._specs[feature.name]
        if spec.name not in self.combines:
            return [replace(feature, table=spec.components[0].name)]
        parts = []
        for name, component in zip(
            (part.name for part in spec.addressing.components(spec.dim)),
            spec.components,
            strict=True,
        ):
            full_name = f"{feature.name}.{name}" if name else feature.name
            parts.append(
                Feature(name=full_name, table=component.name, pooling=self._pooling(feature, spec))
            )
        if self.combines[spec.name].is_product and len(parts) == 2:
            parts[0] = replace(parts[0], times=(parts[1].name, feature.pooling))
        return parts

    def _pooling(self, feature: Feature, spec: TableSpec) -> Any:
        """How vectors of components are pooled before they are combined."""
        if not self.combines[spec.name].is_linear:
            return "none"
        # the number of ids of a sample that have a row is not the number of its ids
        return (
            "sum"
            if spec.addressing.traits.is_partial and feature.pooling == "mean"
            else feature.pooling
        )

    def _names(self, key: str) -> list[str]:
        return [part.name for part in self.parts[key]] if key in self.parts else [key]

    def _weights(self, weights_N: Tensor, key: str, multiply: bool) -> Tensor:
        """Returns the weights of a key, or ones where vectors are weighted after they are
        combined.
        """
        combine = self.combines.get(self._specs[key].name) if key in self._specs else None
        is_late = combine is not None and not combine.is_linear
        is_multiplied = multiply and any(part.times for part in self.parts.get(key, ()))
        return torch.ones_like(weights_N) if is_late and not is_multiplied else weights_N


def stack(vectors: Mapping[str, Tensor | Jagged]) -> Tensor:
    """Returns the vectors of all features side by side, [B, sum of dims].

    Raises:
        UserError: when a feature is not pooled, or has another number of samples than the others.
    """
    pooled = [x for x in vectors.values() if not isinstance(x, Jagged)]
    if len(pooled) < len(vectors) or len({len(x) for x in pooled}) > 1:
        raise UserError(
            "pooled: the features differ in samples, or one is not pooled; look them up by name"
        )
    return torch.cat(pooled, 1)


def _replace_outside(ids_N: Tensor, spec: TableSpec) -> Tensor:
    """Returns the ids with `oov_row` in the place of those that the table does not hold."""
    count = spec.addressing.ids
    return (
        ids_N
        if count is None
        else torch.where((ids_N < 0) | (ids_N >= count), spec.oov_row or 0, ids_N)
    )
