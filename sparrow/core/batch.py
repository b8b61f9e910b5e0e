"""The records a click travels in: `KeyedJagged` (sparse ids), `Jagged` (one feature of it),
`Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sparrow.core.errors import UserError, suggest

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Jagged:
    """One feature: row i holds `values_N[offsets_B1[i]:offsets_B1[i + 1]]`; sample b uses row
    `inverse_B[b]`.

    Args:
        values_N: ids [N], or vectors [N, D] after an unpooled lookup.
        offsets_B1: int64 [rows + 1], from 0 to N.
        weights_N: float [N], or None.
        inverse_B: int64 [B], or None when sample b uses row b.
        host: the feature of the batch that was copied to this device. Sizes are read from it,
            because the host would have to wait for a GPU.
    """

    values_N: Tensor
    offsets_B1: Tensor
    weights_N: Tensor | None = None
    inverse_B: Tensor | None = None
    host: Jagged | None = None

    @property
    def on_host(self) -> Jagged:
        """`host`, or this where there is none."""
        return self if self.host is None else self.host

    @property
    def lengths_B(self) -> Tensor:
        """Values per stored row, int64 [rows]."""
        return self.offsets_B1.diff()

    def row_of_each(self) -> Tensor:
        """Returns the row of each value, int64 [N]."""
        lengths_B = self.lengths_B
        row_B = torch.arange(len(lengths_B), device=lengths_B.device)
        return row_B.repeat_interleave(lengths_B, output_size=len(self.values_N))

    def expanded(self) -> Jagged:
        """Returns the same feature with one row per sample and no inverse index (RecD's jagged
        index select).
        """
        if self.inverse_B is None:
            return self
        index_N, offsets_B1 = self.places()
        weights_N = None if self.weights_N is None else self.weights_N[index_N]
        return Jagged(values_N=self.values_N[index_N], offsets_B1=offsets_B1, weights_N=weights_N)

    def places(self) -> tuple[Tensor, Tensor]:
        """Returns which value each of the expanded values is, int64 [N], and the offsets of the
        samples' rows [B + 1].

        It is for a feature with an inverse index.
        """
        assert self.inverse_B is not None
        lengths_B = self.lengths_B[self.inverse_B]
        offsets_B1 = _offsets(lengths_B)
        start_B = self.offsets_B1[:-1][self.inverse_B] - offsets_B1[:-1]
        host = self.on_host
        total = int(host.lengths_B[host.inverse_B].sum())
        spread_N = start_B.repeat_interleave(lengths_B, output_size=total)
        return torch.arange(total, device=start_B.device) + spread_N, offsets_B1


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedJagged:
    """Sparse features of a batch, like torchrec's KeyedJaggedTensor: ragged lists of ids, key by
    key.

    Rows of a feature group are stored once (RecD's IKJT, arXiv 2211.05239, section 4). Stored rows
    that no sample uses are dropped, because a table must not update their ids.

    Args:
        keys: F feature names.
        values_N: int32 or int64 ids [N], key by key.
        lengths: values per row [sum of rows]. Give either lengths or offsets.
        offsets: where each row begins [sum of rows + 1].
        weights_N: float [N], or None.
        inverse_B: feature group -> int64 [B], which stored row of the group each sample uses. A key
            in no group has one row per sample.
        rows: rows stored per key. It is needed only when groups store different numbers of rows.
        host: the batch that was copied to this device, see `Jagged`.
        time: of the last of the samples, for tables whose rows come and go by the log's time.

    Raises:
        UserError: when the parts do not fit together.

    Example:
        Two samples; the first has clicked on items 4 and 7, the second on none.

        >>> import torch
        >>> from sparrow import KeyedJagged
        >>> ids = KeyedJagged(
        ...     keys=("clicked",), values_N=torch.tensor([4, 7]), lengths=torch.tensor([2, 0])
        ... )
        >>> ids.batch_size
        2
    """

    keys: tuple[str, ...]
    values_N: Tensor
    lengths: Tensor | None = None
    offsets: Tensor | None = None
    weights_N: Tensor | None = None
    inverse_B: Mapping[tuple[str, ...], Tensor] = field(default_factory=dict)
    rows: tuple[int, ...] | None = None
    host: KeyedJagged | None = None
    time: int | None = None
    # where each key's values begin, on the host: computed once, kept by to()
    _bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.offsets is None) and not self._bounds:
            raise UserError("KeyedJagged: give either lengths or offsets")
        if len(set(self.keys)) != len(self.keys):
            raise UserError(
                f"KeyedJagged.keys: {self.keys} repeats a name; name every feature once"
            )
        if self.values_N.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"KeyedJagged.values_N: ids are {self.values_N.dtype}; convert them to int64 or"
                " int32"
            )
        if self.weights_N is not None and self.weights_N.shape != self.values_N.shape:
            raise UserError(
                f"KeyedJagged.weights_N: {tuple(self.weights_N.shape)} weights for"
                f" {tuple(self.values_N.shape)} ids; give one weight per id"
            )
        for group in self.inverse_B:
            for key in group:
                if key not in self.keys:
                    raise UserError(
                        f"KeyedJagged.inverse_B: no feature {key!r}{suggest(key, self.keys)}"
                    )
        if not self._bounds:
            self._measure()

    def _measure(self) -> None:
        offsets = self.offsets if self.lengths is None else _offsets(self.lengths)
        assert offsets is not None
        offsets = offsets.long()
        count = offsets.numel() - 1
        rows = self.rows
        if rows is None:
            if self.keys and count % len(self.keys):
                raise UserError(
                    f"KeyedJagged.lengths: {count} rows do not divide among {len(self.keys)} keys;"
                    " give rows"
                )
            rows = (count // max(len(self.keys), 1),) * len(self.keys)
        if len(rows) != len(self.keys) or sum(rows) != count:
            raise UserError(
                f"KeyedJagged.rows: {rows} does not add up to {count} rows over {len(self.keys)}"
                " keys"
            )
        ends = torch.tensor([0, *rows]).cumsum(0)
        bounds = tuple(offsets.cpu()[ends].tolist()) if count else (0,) * (len(self.keys) + 1)
        if (
            bounds[0] != 0
            or bounds[-1] != self.values_N.numel()
            or bool((offsets.diff() < 0).any())
        ):
            raise UserError(
                f"KeyedJagged.lengths: they run from {bounds[0]} to {bounds[-1]} where"
                f" {self.values_N.numel()} ids are given, or fall in between; every length must be"
                " >= 0 and they must add up to the ids"
            )
        for name, value in (
            ("offsets", offsets),
            ("lengths", offsets.diff()),
            ("rows", rows),
            ("_bounds", bounds),
        ):
            object.__setattr__(self, name, value)
        # a list: every group is checked
        unused = [self._has_unused(group) for group in self.inverse_B]
        if any(unused):
            used = self.part(0)
            for name in (
                "values_N",
                "lengths",
                "offsets",
                "weights_N",
                "inverse_B",
                "rows",
                "_bounds",
            ):
                object.__setattr__(self, name, getattr(used, name))

    def _has_unused(self, group: tuple[str, ...]) -> bool:
        """Whether the group stores a row that no sample uses; UserError where its rows and index do
        not fit.
        """
        inverse_B = self.inverse_B[group]
        stored = {key: self.stored(key) for key in group}
        rows = min(stored.values(), default=0)
        if any(count > rows for count in stored.values()):
            raise UserError(
                f"KeyedJagged.rows: group {group} stores {stored}; its features share one inverse"
                " index"
            )
        if inverse_B.numel() and not 0 <= int(inverse_B.min()) <= int(inverse_B.max()) < rows:
            raise UserError(
                f"KeyedJagged.inverse_B: group {group} uses rows beyond its {rows}; they count"
                " from 0"
            )
        return bool((inverse_B.bincount(minlength=rows) == 0).any())

    def _group_size(self, key: str, rows: int) -> int:
        inverse = self._inverse(key)
        return rows if inverse is None else inverse.numel()

    def _inverse(self, key: str) -> Tensor | None:
        return next((inverse for group, inverse in self.inverse_B.items() if key in group), None)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each key's values begin, and where the last one's end."""
        return self._bounds

    def samples(self, key: str) -> int:
        """Returns how many samples a key has: its stored rows, or the length of its group's inverse
        index.
        """
        assert self.rows is not None
        if key not in self.keys:
            raise UserError(f"KeyedJagged: no feature {key!r}{suggest(key, self.keys)}")
        return self._group_size(key, self.rows[self.keys.index(key)])

    def stored(self, key: str) -> int:
        """Returns how many rows are stored for a key."""
        assert self.rows is not None
        return self.rows[self.keys.index(key)]

    @property
    def batch_size(self) -> int:
        """B, the number of samples (not of stored rows); UserError when the features differ in
        it.
        """
        assert self.rows is not None
        sizes = set(self.rows)
        if self.inverse_B:
            sizes = {self._group_size(key, n) for key, n in zip(self.keys, self.rows, strict=True)}
        if len(sizes) > 1:
            raise UserError(
                "KeyedJagged.inverse_B: groups and features differ in their number of samples"
            )
        return next(iter(sizes), 0)

    def __getitem__(self, key: str) -> Jagged:
        if key not in self.keys:
            raise UserError(f"KeyedJagged: no feature {key!r}{suggest(key, self.keys)}")
        assert self.rows is not None and self.offsets is not None
        k = self.keys.index(key)
        first = sum(self.rows[:k])
        last = sum(self.rows[: k + 1])
        low = self._bounds[k]
        high = self._bounds[k + 1]
        return Jagged(
            values_N=self.values_N[low:high],
            offsets_B1=self.offsets[first : last + 1] - low,
            weights_N=None if self.weights_N is None else self.weights_N[low:high],
            inverse_B=self._inverse(key),
            host=None if self.host is None else self.host[key],
        )

    def expanded(self) -> KeyedJagged:
        """Returns the same batch with one row per sample for every key and no inverse index."""
        if not self.inverse_B:
            return self
        parts = [self[key].expanded() for key in self.keys]
        return KeyedJagged(
            keys=self.keys,
            values_N=torch.cat([p.values_N for p in parts]),
            lengths=torch.cat([p.lengths_B for p in parts]),
            weights_N=None if self.weights_N is None else torch.cat([p.weights_N for p in parts]),  # type: ignore[misc]
            time=self.time,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJagged:
        """Returns a copy on `device`. It keeps the metadata that is on the host, so nothing is
        measured twice.
        """
        moved = self.map_tensors(lambda t: t.to(device, non_blocking=non_blocking))
        return replace(moved, host=_host_of_copy(self, self.values_N, moved.values_N))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> KeyedJagged:
        """Returns the same batch with other copies of its tensors."""
        assert self.lengths is not None and self.offsets is not None
        return replace(
            self,
            values_N=change(self.values_N),
            lengths=change(self.lengths),
            offsets=change(self.offsets),
            weights_N=None if self.weights_N is None else change(self.weights_N),
            inverse_B={group: change(inverse) for group, inverse in self.inverse_B.items()},
        )

    def part(self, low: int, high: int | None = None) -> KeyedJagged:
        """Returns some of the samples. Of a group's stored rows it keeps those that they use, in
        order.

        Args:
            low: the first sample.
            high: the sample after the last one; by default that of each key's end.
        """
        assert self.lengths is not None and self.offsets is not None and self.rows is not None
        firsts = torch.tensor([0, *self.rows]).cumsum(0)[:-1].tolist()
        inverse: dict[tuple[str, ...], Tensor] = {}
        group_rows: dict[str, Tensor] = {}
        for group, inverse_B in self.inverse_B.items():
            rows_U, inverse[group] = inverse_B[low:high].unique(return_inverse=True)
            group_rows.update(dict.fromkeys(group, rows_U))
        ends = [
            (0, 0) if key in group_rows else (low, self.stored(key) if high is None else high)
            for key in self.keys
        ]
        spans = [
            (first + begin, first + end) for first, (begin, end) in zip(firsts, ends, strict=True)
        ]
        at = torch.tensor(spans, dtype=torch.int64, device=self.offsets.device).view(-1, 2)
        spots = self.offsets[at].tolist()
        values = [self.values_N[:0]]
        lengths = [self.lengths[:0]]
        weights = [self.values_N[:0].float()]
        for key, span, (begin, end) in zip(self.keys, spans, spots, strict=True):
            if key in group_rows:
                chosen = replace(self[key], inverse_B=group_rows[key]).expanded()
                values.append(chosen.values_N)
                lengths.append(chosen.lengths_B)
                weights += [] if chosen.weights_N is None else [chosen.weights_N]
            else:
                values.append(self.values_N[begin:end])
                lengths.append(self.lengths[slice(*span)])
                weights += [] if self.weights_N is None else [self.weights_N[begin:end]]
        return KeyedJagged(
            keys=self.keys,
            values_N=torch.cat(values),
            lengths=torch.cat(lengths),
            weights_N=None if self.weights_N is None else torch.cat(weights),
            inverse_B=inverse,
            rows=tuple(len(part) for part in lengths[1:]),
            time=self.time,
        )

    @classmethod
    def from_lists(cls, lists: Mapping[str, Sequence[Sequence[int]]]) -> KeyedJagged:
        """Returns a batch made from Python lists, for examples and tests. lists: feature -> the ids
        of each sample.
        """
        rows = list(chain.from_iterable(lists.values()))
        return cls(
            keys=tuple(lists),
            values_N=torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        )

    def to_torchrec(self) -> KeyedJaggedTensor:
        """Returns the expanded batch as a torchrec KeyedJaggedTensor; torchrec must be
        installed.
        """
        from torchrec import KeyedJaggedTensor

        flat = self.expanded()
        return KeyedJaggedTensor(
            keys=list(flat.keys), values=flat.values_N, lengths=flat.lengths, weights=flat.weights_N
        )

    @classmethod
    def from_torchrec(cls, kjt: KeyedJaggedTensor) -> KeyedJagged:
        """Returns the same batch as `kjt` from torchrec; its inverse indices become one group per
        key.
        """
        inverse: dict[tuple[str, ...], Tensor] = {}
        indices: Any = kjt.inverse_indices_or_none()
        if indices is not None:
            inverse = {(key,): row for key, row in zip(indices[0], indices[1], strict=True)}
        return cls(
            keys=tuple(kjt.keys()),
            values_N=kjt.values(),
            lengths=kjt.lengths(),
            weights_N=kjt.weights_or_none(),
            inverse_B=inverse,
            rows=tuple(kjt.stride_per_key()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a model is given: B samples.

    Args:
        dense_BC: numeric features, float32 [B, C]; C may be 0. It is a `Repeated` where models may
            make use of what a user's samples share: these of the numbers, and the ids of the groups
            with its `inverse_B`.
        ids: sparse features.
        labels_BT: in 0..1, float32 [B, T], NaN where one is missing; None when predicting.
        weights_B: sample weights, float32 [B]; None for ones.
        session_B: the group that GAUC ranks within, int64 [B]; None without groups.
        row_B: a number of each row that no other row of the training has, int64 [B], from which
            dropout draws; or None.
        host: the batch that was copied to this device, see `Jagged`.

    Raises:
        UserError: when the parts differ in their number of samples.

    Example:
        >>> import torch
        >>> from sparrow import Batch, KeyedJagged
        >>> ids = KeyedJagged(
        ...     keys=("user",), values_N=torch.tensor([3, 5]), lengths=torch.tensor([1, 1])
        ... )
        >>> labels_BT = torch.tensor([[0.0], [1.0]])
        >>> batch = Batch(dense_BC=torch.zeros(2, 4), ids=ids, labels_BT=labels_BT)
        >>> batch.batch_size, batch.mass
        (2, 2.0)
    """

    dense_BC: Tensor
    ids: KeyedJagged
    labels_BT: Tensor | None = None
    weights_B: Tensor | None = None
    session_B: Tensor | None = None
    row_B: Tensor | None = None
    host: Batch | None = None

    def __post_init__(self) -> None:
        size = self.dense_BC.shape[0]
        sizes = {
            "labels_BT": self.labels_BT,
            "weights_B": self.weights_B,
            "session_B": self.session_B,
        }
        sizes |= {"row_B": self.row_B}
        for name, tensor in sizes.items():
            if tensor is not None and tensor.shape[0] != size:
                raise UserError(
                    f"Batch.{name}: {tensor.shape[0]} samples where dense_BC has {size}; cut them"
                    " alike"
                )
        if self.ids.keys and self.ids.batch_size != size:
            raise UserError(
                f"Batch.ids: {self.ids.batch_size} samples where dense_BC has {size}; cut them"
                " alike"
            )

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        return self.dense_BC.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        sizes: list[int] = []

        def count(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        self.map_tensors(count)
        return sum(sizes)

    @property
    def mass(self) -> float:
        """The sum of the sample weights; without weights each sample counts 1."""
        weights_B = self.on_host.weights_B
        return float(self.batch_size if weights_B is None else weights_B.sum(dtype=torch.float64))

    @property
    def on_host(self) -> Batch:
        """`host`, or this where there is none."""
        return self if self.host is None else self.host

    def part(self, low: int, high: int) -> Batch:
        """Returns the samples from `low` to before `high`."""

        def cut(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[low:high]

        return Batch(
            dense_BC=self.dense_BC[low:high],
            ids=self.ids.part(low, high),
            labels_BT=cut(self.labels_BT),
            weights_B=cut(self.weights_B),
            session_B=cut(self.session_B),
            row_B=cut(self.row_B),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Returns a copy on `device`. non_blocking: do not wait for it; what is copied should be in
        pinned memory.
        """
        moved = self.map_tensors(lambda t: t.to(device, non_blocking=non_blocking))
        ids = replace(moved.ids, host=_host_of_copy(self.ids, self.dense_BC, moved.dense_BC))
        return replace(moved, ids=ids, host=_host_of_copy(self, self.dense_BC, moved.dense_BC))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the same samples with other copies of their tensors."""

        def changed(t: Tensor | None) -> Tensor | None:
            return None if t is None else change(t)

        return replace(
            self,
            dense_BC=change(self.dense_BC),
            ids=self.ids.map_tensors(change),
            labels_BT=changed(self.labels_BT),
            weights_B=changed(self.weights_B),
            session_B=changed(self.session_B),
            row_B=changed(self.row_B),
        )


T = TypeVar("T", KeyedJagged, Batch)


def split_at(values_N: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Returns the values of each key, as views. bounds: where those of each key begin, and where
    the last ones end.
    """
    if len(bounds) == 2:
        return [values_N]
    return list(values_N.split([high - low for low, high in pairwise(bounds)]))


def _host_of_copy(copied: T, before: Tensor, after: Tensor) -> T | None:
    """Returns what `host` is of a copy. before, after: a tensor of what is copied and of the
    copy.
    """
    if after.device.type == "cpu":
        return None
    return copied if before.device.type == "cpu" else copied.host


def _offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
