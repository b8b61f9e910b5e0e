"""A model as a program of plain tensors: lists are padded, and nothing but torch's own operators is
in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, Jagged
from sparrow.core.errors import UserError
from sparrow.embeddings import EmbeddingTables, Feature
from sparrow.embeddings.addressing.path import Paths
from sparrow.features.schema import Schema
from sparrow.layers.ids import MeanOfIds
from sparrow.layers.transformer import CausalTransformer
from sparrow.losses import probabilities
from sparrow.trained.build import tables_of, undo_sampling
from sparrow.trained.calibrators import Calibrator, calibrated

MASK, WEIGHTS = ":mask", ":weights"  # after the name of a list
RAW = ":ids"  # after the name of a column whose vectors and ids are both read


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a program is given under a name.

    type: "int64", "float32" or "bool". shape: a name for a size that may differ between calls, or a
    number.
    means: in words. feature: the column whose values these are.
    """

    type: str
    shape: tuple[str | int, ...]
    means: str
    feature: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded(Jagged):
    """Vectors of lists of one length L, [B * L, D], and the same as [B, L, D]. Where mask_BL is
    False they are 0.
    """

    values_BLD: Tensor
    mask_BL: Tensor

    def row_of_each(self) -> Tensor:
        """Returns the row of each value, int64 [N]."""
        size, longest = self.mask_BL.shape
        return torch.arange(size)[:, None].expand(size, longest).flatten()


@dataclass(frozen=True, eq=False)
class _Vectors:
    """What a batch has in the place of its ids: their vectors and, where a model reads both, ids
    and masks.
    """

    vectors: Mapping[str, Any]
    raw: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    keys = ()  # a batch that has none is not measured

    def expanded(self) -> _Vectors:
        """Returns itself: nothing in it is stored once for several rows."""
        return self

    def __getitem__(self, name: str) -> Jagged:
        """Returns the ids of a column that is no list."""
        ids_B, _ = self.raw[name]
        return Jagged(values_N=ids_B, offsets_B1=torch.arange(ids_B.shape[0] + 1))


class _Given(nn.Module):
    """Stands for `EmbeddingTables` where the vectors come with the batch."""

    def __init__(self, features: Sequence[Feature]) -> None:
        super().__init__()
        self.features = features

    def forward(self, ids: _Vectors) -> dict[str, Any]:
        return {feature.name: ids.vectors[feature.name] for feature in self.features}

    def pooled(self, ids: _Vectors) -> Tensor:
        return torch.cat(list(self(ids).values()), 1)


class _Reader(nn.Module):
    """Stands for a `CausalTransformer` where lists are padded."""

    def __init__(self, reader: CausalTransformer) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, listed: Padded) -> Tensor:
        return self.reader.padded(listed.values_BLD, listed.mask_BL.sum(1))


class _MeanOfPadded(nn.Module):
    """Stands for a `MeanOfIds` where lists are padded."""

    def __init__(self, mean: MeanOfIds) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, ids: _Vectors, weights_RT: Tensor) -> Tensor:
        pooled = []
        for (ids_B, mask_BL), rows, first in zip(
            ids.raw.values(), self.mean.rows, self.mean.firsts, strict=True
        ):
            if mask_BL is None:
                pooled.append(F.embedding(ids_B % rows + first, weights_RT))
                continue
            row_BL = torch.where(mask_BL, ids_B, 0) % rows + first
            sum_BT = (F.embedding(row_BL, weights_RT) * mask_BL[:, :, None]).sum(1)
            pooled.append(sum_BT / mask_BL.sum(1).clamp(min=1)[:, None])
        return torch.stack(pooled).sum(0)


class Lookups(nn.Module):
    """Ids -> the vectors of each feature: [B, D], or [B, L, D] for a list that the model reads id
    by id.

    Rows are decoded to fp32. Ids are looked up, combined and pooled in the order of their
    definition.

    Args:
        schema: of the log.
        tables: the model's.

    Raises:
        UserError: for a table that has no such program.
    """

    def __init__(self, schema: Schema, tables: EmbeddingTables) -> None:
        super().__init__()
        self.schema = schema
        self.features = tables.features
        self.specs = {spec.name: spec for spec in tables.specs}
        self.combines = {name: tables.combine_of(name) for name in self.specs}
        self.weights = nn.ParameterList()
        self.places: dict[str, int] = {}  # component -> which of the weights
        for name, spec in self.specs.items():
            assert spec.oov_row is None  # the transforms number unknown ids
            if spec.addressing.traits.policy:
                remedy = (
                    "use --to onnx-dense or torch, and look the vectors up yourself, or train with"
                    " fixed tables"
                )
                raise UserError(
                    f"table {name!r}: its ids come and go, and a file cannot follow them; {remedy}"
                )
            if isinstance(self.combines[name], Paths):
                remedy = "use --to onnx-dense or torch, or train with another addressing"
                raise UserError(
                    f"table {name!r}: a path's ids go through an MLP each, which ONNX has no loop"
                    f" for; {remedy}"
                )
            for component in spec.components:
                weight_RD = tables.record(component.name).weight.float()
                self.places[component.name] = len(self.weights)
                self.weights.append(nn.Parameter(weight_RD.contiguous(), requires_grad=False))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns feature -> vectors. inputs: see `inputs_of`."""
        vectors = {}
        for feature in self.features:
            ids = inputs[feature.name]
            mask_BL = inputs.get(feature.name + MASK)
            if mask_BL is None:
                vectors[feature.name] = self._rows(feature, ids)
                continue
            vectors_BLD = self._rows(feature, torch.where(mask_BL, ids, 0).flatten()).unflatten(
                0, ids.shape
            )
            share_BL = mask_BL.float() * inputs.get(feature.name + WEIGHTS, 1.0)
            vectors_BLD = vectors_BLD * share_BL[:, :, None]
            if feature.pooling == "none":
                vectors[feature.name] = vectors_BLD
                continue
            vectors[feature.name] = vectors_BLD.sum(1)
            if feature.pooling == "mean":  # by how many there are, whatever they weigh
                vectors[feature.name] = (
                    vectors[feature.name] * mask_BL.sum(1).clamp(min=1).reciprocal()[:, None]
                )
        return vectors

    def _rows(self, feature: Feature, ids_N: Tensor) -> Tensor:
        """Returns a vector for each id, [N, D]."""
        spec = self.specs[feature.table]
        vectors = []
        for component, rows_N in zip(spec.components, spec.addressing.rows_of(ids_N), strict=True):
            x_ND = F.embedding(rows_N.clamp(min=0), self.weights[self.places[component.name]])
            vectors.append(
                x_ND * (rows_N >= 0)[:, None] if spec.addressing.traits.is_partial else x_ND
            )
        combine = self.combines[spec.name]
        return vectors[0] if combine is None else combine(vectors, ids_N)


class Program(nn.Module):
    """Columns -> scores [B, T], probabilities of the whole log.

    Args:
        model: an exported model, whose tables and readers of lists and of ids are replaced in it.
        schema: of its log.
        calibrators: what its scores pass through last.
        with_tables: whether ids are looked up in it, or it is given their vectors.

    Raises:
        UserError: as `Lookups`.
    """

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        calibrators: Sequence[Calibrator] = (),
        *,
        with_tables: bool,
    ) -> None:
        super().__init__()
        self.schema = schema
        self.calibrators = calibrators
        (tables,) = tables_of(model)
        reads_ids = any(isinstance(module, MeanOfIds) for module in model.modules())
        self.inputs = inputs_of(schema, tables, with_tables, reads_ids)
        # the name of a column whose ids are read
        self.after = ("" if with_tables else RAW) if reads_ids else None
        self.lookups = Lookups(schema, tables) if with_tables else None
        self.model = model
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if child is tables:
                    setattr(module, name, _Given(tables.features))
                elif isinstance(child, CausalTransformer):
                    setattr(module, name, _Reader(child))
                elif isinstance(child, MeanOfIds):
                    setattr(module, name, _MeanOfPadded(child))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns float32 [B, T]. inputs: name -> tensor, see `inputs_of`."""
        vectors: Mapping[str, Any] = inputs if self.lookups is None else self.lookups(inputs)
        by_name = {name: vectors[name] for name in self.schema.sparse}
        for name, x in by_name.items():
            if x.ndim == 3:
                by_name[name] = _pad(x, inputs[name + MASK])
        rows = next(iter(inputs.values())).shape[0]
        numbers = [inputs[name] for name in self.schema.dense]
        columns = [x if x.ndim == 2 else x[:, None] for x in numbers]
        dense_BC = torch.cat(columns, 1) if columns else torch.zeros(rows, 0)
        names = () if self.after is None else self.schema.sparse
        raw = {name: (inputs[f"{name}{self.after}"], inputs.get(name + MASK)) for name in names}
        batch = Batch(dense_BC=dense_BC, ids=_Vectors(by_name, raw))  # type: ignore[arg-type]
        share_kept = self.schema.split.negatives

        def score(batch: Batch) -> Tensor:
            return undo_sampling(probabilities(self.model(batch)), share_kept)

        return calibrated(score, self.calibrators)(batch)


def _pad(vectors_BLD: Tensor, mask_BL: Tensor) -> Padded:
    size, longest = mask_BL.shape
    values_BLD = vectors_BLD * mask_BL[:, :, None]
    return Padded(
        values_N=values_BLD.flatten(0, 1),
        offsets_B1=torch.arange(size + 1) * longest,
        values_BLD=values_BLD,
        mask_BL=mask_BL,
    )


def inputs_of(
    schema: Schema, tables: EmbeddingTables, with_tables: bool, reads_ids: bool = False
) -> dict[str, Input]:
    """Returns name -> what a program of a log's columns is given: numbers first, then ids or their
    vectors.

    reads_ids: whether a model that is given vectors reads the ids too.
    """
    inputs = {}
    for name in schema.dense:
        is_vector = schema.columns[name].kind == "vector"
        shape = ("rows", schema.columns[name].width) if is_vector else ("rows",)
        means = "vector of the column" if is_vector else "number"
        inputs[name] = Input(type="float32", shape=shape, means=means, feature=name)
    specs = {spec.name: spec for spec in tables.specs}
    for feature in tables.features:
        name = feature.name
        spec = specs[feature.table]
        is_list = schema.columns[feature.name].kind == "list"
        lists = ("rows", f"longest {name}")
        count = spec.addressing.ids
        ids = "ids, hashes of 63 bits" if count is None else f"ids, 0 <= id < {count}"
        if with_tables:
            inputs[name] = Input(
                type="int64", shape=lists if is_list else ("rows",), means=ids, feature=name
            )
        elif feature.pooling == "none":
            inputs[name] = Input(
                type="float32", shape=(*lists, spec.dim), means="vectors of ids", feature=name
            )
        else:
            means = f"{feature.pooling} of the vectors of ids" if is_list else "vector of the id"
            inputs[name] = Input(
                type="float32", shape=("rows", spec.dim), means=means, feature=name
            )
        if reads_ids and not with_tables:
            inputs[name + RAW] = Input(
                type="int64", shape=lists if is_list else ("rows",), means=ids, feature=name
            )
        if is_list and (with_tables or feature.pooling == "none" or reads_ids):
            means = "which are not padding; they come first"
            inputs[name + MASK] = Input(type="bool", shape=lists, means=means, feature=name)
        if is_list and with_tables and schema.columns[name].weights:
            inputs[name + WEIGHTS] = Input(
                type="float32", shape=lists, means="weights of the ids", feature=name
            )
    return inputs
