"""The matrix products of every model, written out from its paper and settings, and not from its
code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparrow.core import Batch
from sparrow.core.config import Family
from sparrow.features.schema import Schema


class Work(NamedTuple):
    """Products. forward: their floating-point operations. backward: times as many for their
    gradients: 2 of a product whose inputs have a gradient, 1 of one that reads the log.
    """

    forward: float
    backward: float = 2


def flops(config: Any, schema: Schema, batch: Batch) -> int:
    """Returns the floating-point operations that score a batch."""
    return round(sum(work.forward for work in products(config, schema, batch, False)))


def flops_of_training(config: Any, schema: Schema, batch: Batch) -> int:
    """Returns the floating-point operations of a step of training, without the optimizer's."""
    every = products(config, schema, batch, True)
    return round(sum(work.forward * (1 + work.backward) for work in every))


def products(config: Any, schema: Schema, batch: Batch, is_training: bool) -> list[Work]:
    """Returns those of a batch. is_training: whether of its training."""
    name = Family("sparrow.models").name_of(config)
    found = list(FAMILIES[name](config, _Log(schema, batch, is_training)))
    for listed in getattr(getattr(config, "history", None), "lists", ()):
        table = str(schema.columns[listed].table)
        found += _transformer(config, _width(name, config, schema, table), batch, listed)
    return found


class _Log:
    """Facts of a log and a batch. numbers: numeric columns. vectors: their widths. ids: id
    columns.
    """

    def __init__(self, schema: Schema, batch: Batch, is_training: bool) -> None:
        kinds = [schema.columns[name] for name in schema.dense]
        self.vectors = [column.width for column in kinds if column.kind == "vector"]
        self.numbers = len(kinds) - len(self.vectors)
        self.dense = self.numbers + sum(self.vectors)
        self.ids = len(schema.sparse)
        self.features = self.numbers + len(self.vectors) + self.ids
        self.rows, self.labels = batch.batch_size, len(schema.labels)
        self.is_training, self.schema, self.batch = is_training, schema, batch

    def narrow(self, dim: int) -> int:
        """Numbers as they are, filled up to a multiple of 16, beside vectors."""
        return self.numbers + -self.numbers % 16 + dim * (len(self.vectors) + self.ids)

    def embed(self, dim: int) -> list[Work]:
        """Vector columns, each times a matrix."""
        return [_product(self.rows, width, dim, 1) for width in self.vectors]


def _product(rows: int, inputs: int, outputs: int, backward: float = 2) -> Work:
    return Work(2 * rows * inputs * outputs, backward)


def _mlp(rows: int, *sizes: int, first: float = 2) -> list[Work]:
    pairs = list(itertools.pairwise(sizes))
    return [_product(rows, *pair, first if i == 0 else 2) for i, pair in enumerate(pairs)]


def _attention(rows: int, length: int, size: int) -> Work:
    """Scores and mixture; torch's kernel computes the scores again for the four gradients."""
    return Work(2 * _product(rows * length, size, length).forward, 5 / 2)


def _width(name: str, config: Any, schema: Schema, table: str) -> int:
    """The numbers of an id's vector."""
    if name in ("fm", "deepfm"):
        return len(schema.labels) * (int(config.dim) + 1)
    return int(config.dim) * int(getattr(config, "several", {}).get(table, 1))


def _transformer(config: Any, dim: int, batch: Batch, listed: str) -> list[Work]:
    """A causal transformer over the last ids of each list that is stored, at least a place each."""
    history = config.history
    lengths = [min(length, history.longest) for length in batch.ids[listed].lengths_B.tolist()]
    rows, most = sum(lengths), max(1, *lengths)  # attention pads to the longest
    layer = [
        _product(rows, dim, 3 * dim),
        _attention(len(lengths) * history.heads, most, dim // history.heads),
        _product(rows, dim, dim),
        *_mlp(rows, dim, 4 * dim, dim),
    ]
    return layer * int(history.layers)


# -- the families ----------------------------------------------------------------------------------


def _logistic(config: Any, log: _Log) -> list[Work]:
    return []


def _dlrm(c: Any, log: _Log) -> list[Work]:
    vectors = log.ids + bool(log.dense)
    pairs = vectors * (vectors - 1) // 2 + (c.dim if log.dense else 0)
    bottom = _mlp(log.rows, log.dense, *c.bottom, c.dim, first=1) if log.dense else []
    # G X is the gradient of both factors of X X^T
    dots = Work(log.rows * _product(vectors, c.dim, vectors).forward, 1)
    return [*bottom, dots, *_mlp(log.rows, pairs, *c.top, log.labels)]


def _dcnv2(c: Any, log: _Log) -> list[Work]:
    found: list[Work] = []
    if c.bottom:
        found += _mlp(log.rows, log.dense, *c.bottom, first=1)
        width = narrow = c.bottom[-1] + c.dim * log.ids
    elif c.embed_dense:
        found += log.embed(c.dim)
        width, narrow = c.dim * log.features, log.narrow(c.dim)
    else:
        width = narrow = log.dense + c.dim * log.ids
    for inputs in (narrow, *[width] * (c.cross_layers - 1)):
        found += _mlp(log.rows, inputs, *([] if c.rank is None else [c.rank]), width)
    is_stacked = c.structure == "stacked"
    found += _mlp(log.rows, width if is_stacked else narrow, *c.deep)
    deep = c.deep[-1] if c.deep else width
    return [*found, _product(log.rows, deep + (0 if is_stacked else width), log.labels)]


def _fm(c: Any, log: _Log) -> list[Work]:
    return log.embed(log.labels * (c.dim + 1))  # the pairs are sums of squares


def _deepfm(c: Any, log: _Log) -> list[Work]:
    mlp = _mlp(log.rows, log.features * log.labels * c.dim, *c.deep, log.labels)
    return [*_fm(c, log), *mlp]


def _masknet(c: Any, log: _Log) -> list[Work]:
    found, features = log.embed(c.dim), c.dim * log.features
    is_serial = c.structure == "serial"
    for block in range(c.blocks):
        inputs = c.width if is_serial and block else features
        found += _mlp(log.rows, features, max(1, round(inputs * c.reduction)), inputs)
        found += _mlp(log.rows, inputs, c.width)
    return found + _mlp(log.rows, c.width * (1 if is_serial else c.blocks), *c.deep, log.labels)


def _gdcn(c: Any, log: _Log) -> list[Work]:
    features = c.dim * log.features
    layers = [_product(log.rows, features, features)] * (2 * c.layers)
    deep = c.deep[-1] if c.deep else features
    out = deep + (features if c.structure == "parallel" else 0)
    mlp = _mlp(log.rows, features, *c.deep)
    return [*log.embed(c.dim), *layers, *mlp, _product(log.rows, out, log.labels)]


def _finalmlp(c: Any, log: _Log) -> list[Work]:
    found, features = log.embed(c.dim), c.dim * log.features
    for named in (c.first_context, c.second_context) if c.gates else ():
        # a learned context is one row for all examples
        rows = log.rows if named else 1
        found += _mlp(rows, c.dim * max(len(named), 1), *c.gates, features)
    found += _mlp(log.rows, features, *c.first) + _mlp(log.rows, features, *c.second)
    first, second = c.first[-1], c.second[-1]
    found.append(_product(log.rows, first + second, log.labels))
    fused = _product(log.rows, first // c.heads, log.labels * second // c.heads)
    return found + [fused] * c.heads


def _autoint(c: Any, log: _Log) -> list[Work]:
    found, size = log.embed(c.dim), c.dim
    for _ in range(c.layers):
        found.append(_product(log.rows * log.features, size, 4 * c.width))
        found.append(_attention(log.rows * c.heads, log.features, c.width // c.heads))
        size = c.width
    found += _mlp(log.rows, log.features * c.dim, *c.deep)
    out = log.features * c.width + (c.deep[-1] if c.deep else 0)
    return [*found, _product(log.rows, out, log.labels)]


def _din(c: Any, log: _Log) -> list[Work]:
    found = log.embed(c.dim)
    for name in log.schema.sparse:
        if log.schema.columns[name].kind == "list":
            ids = int(log.batch.ids[name].expanded().lengths_B.sum())
            found += _mlp(ids, 4 * c.dim, *c.attention, 1)
    first = log.narrow(c.dim) if c.deep else c.dim * log.features
    return found + _mlp(log.rows, first, *c.deep, log.labels)


def _ple(c: Any, log: _Log) -> list[Work]:
    return _experts(c, log, c.shared, c.own, c.levels)


def _mmoe(c: Any, log: _Log) -> list[Work]:
    return _experts(c, log, c.experts, 0, 1)


def _experts(c: Any, log: _Log, shared: int, own: int, levels: int) -> list[Work]:
    found, size = log.embed(c.dim), c.dim * log.features
    for level in range(levels):
        found += _mlp(log.rows, size, *c.expert) * (log.labels * own + shared)
        found += [_product(log.rows, size, own + shared)] * log.labels
        if level < levels - 1:
            found.append(_product(log.rows, size, log.labels * own + shared))
        size = c.expert[-1] if c.expert else size
    return found + _mlp(log.rows, size, *c.tower, 1) * log.labels


def _wukong(c: Any, log: _Log) -> list[Work]:
    tables = [str(log.schema.columns[name].table) for name in log.schema.sparse]
    n = bool(log.dense) + sum(c.several.get(table, 1) for table in tables)
    found = _mlp(log.rows, log.dense, *c.bottom, c.dim, first=1) if log.dense else []
    wide = c.n_f + c.n_l
    for _ in range(c.layers):
        # sums of vectors: the linear block, what the FM block projects, the residual
        projected = c.k if c.projection == "linear" else c.compressed
        sums = c.n_l + projected + (wide if n != wide else 0)
        found.append(_product(log.rows * c.dim, n, sums))
        if c.projection == "attentive":
            hidden = c.compressed * c.dim
            found += _mlp(log.rows, hidden, hidden, n * c.k)
            found.append(_product(log.rows * c.dim, n, c.k))  # X^T Y
        found.append(_product(log.rows * n, c.dim, c.k))  # X (X^T Y)
        found += _mlp(log.rows, n * c.k, *c.mlp, c.n_f * c.dim)
        n = wide
    return found + _mlp(log.rows, n * c.dim, *c.top, log.labels)


def _blend(c: Any, log: _Log) -> list[Work]:
    """Members; scores have the lines of the logistic regression too."""
    ranges = _product(log.rows, c.ranges, c.number_dim, 1)
    width = c.dim * log.ids + c.number_dim * log.numbers + log.dense
    sizes = [width, *c.deep]
    found = [ranges] * log.numbers
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        found.append(_product(log.rows * (c.members if layer else 1), inputs, outputs))
    found += [_product(log.rows, sizes[-1], log.labels)] * c.members
    lines = [] if log.is_training else [_product(log.rows, log.numbers, log.labels)]
    return found + lines


FAMILIES: dict[str, Callable[[Any, _Log], Sequence[Work]]] = {
    "autoint": _autoint,
    "blend": _blend,
    "dcnv2": _dcnv2,
    "deepfm": _deepfm,
    "din": _din,
    "dlrm": _dlrm,
    "finalmlp": _finalmlp,
    "fm": _fm,
    "gdcn": _gdcn,
    "logistic": _logistic,
    "masknet": _masknet,
    "mmoe": _mmoe,
    "ple": _ple,
    "wukong": _wukong,
}
