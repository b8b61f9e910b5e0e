"""Ids that training takes for unknown, so that the row of unknown ids learns for those that are to
come.

Whether an id is dropped is a hash of the run's seed, the table, the step's place in the training
and the id: all occurrences in a step agree, whatever rank looks them up and whether equal rows are
looked up once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from sparrow.core import Batch, UserError
from sparrow.core.errors import suggest
from sparrow.data.batches.dataset import Dataset
from sparrow.features.encodings import FIRST, UNKNOWN
from sparrow.features.hashing import hash_ids, mix
from sparrow.features.schema import Schema
from sparrow.features.transforms import is_numbered

LEAST = 0.01  # a smaller share is not worth it
MOST = 0.5  # with a larger one known ids would suffer


def default_shares(dataset: Dataset) -> dict[str, float]:
    """Returns column -> share of its known ids to drop, so that as many are unknown in training as
    in valid.

    Columns with a share of 0 are left out. Where valid is later than training it has new ids, and
    shares are large. Where rows were drawn at random, shares are 0. Where whole groups were drawn,
    the new ids are those that do not occur outside of their group.
    """
    shares = {}
    unknown = dataset.manifest["unknown_ids"]
    for name, (bad, ids) in unknown["valid"].items():
        bad_train, ids_train = unknown["train"][name]
        if ids and bad_train < ids_train:
            share = 1 - (1 - bad / ids) / (1 - bad_train / ids_train)
            shares[name] = round(min(share, MOST), 3)
    return {name: share for name, share in shares.items() if share >= LEAST}


class Dropout:
    """Makes batches of training in which some known ids are unknown.

    An id that is dropped in one column is so in all columns of its table with the same share or a
    larger one.

    Args:
        shares: column -> which share of its ids to drop, 0 to 1.
        schema: of the log.
        seed: the run's.

    Raises:
        UserError: for a column whose table has no row for unknown ids.
    """

    def __init__(self, schema: Schema, shares: Mapping[str, float], seed: int) -> None:
        known = [
            name for name in schema.sparse if is_numbered(schema, str(schema.columns[name].table))
        ]
        self._shares: dict[str, tuple[float, int]] = {}
        for name, share in shares.items():
            if name not in known:
                remedy = f"no column whose table has a row for unknown ids{suggest(name, known)}"
                raise UserError(f"data.id_dropout.{name}: {remedy}; leave it out")
            if share:
                table = int(hash_ids(pa.array([schema.columns[name].table]))[0])
                self._shares[name] = share, _mixed(seed % (1 << 63), table)

    def __call__(self, batch: Batch, epoch: int, number: int) -> Batch:
        """Returns the batch of an epoch's step `number` as it is to be trained on."""
        if not self._shares:
            return batch
        ids = batch.ids
        values_N = ids.values_N.clone()
        for k, feature in enumerate(ids.keys):
            if feature in self._shares:
                share, key = self._shares[feature]
                column_N = values_N[ids.bounds[k] : ids.bounds[k + 1]]
                key = _mixed(key, (epoch << 40) + number)
                drawn_N = mix(np.uint64(key) ^ column_N.numpy().astype(np.uint64)) / 2.0**64
                column_N[(column_N >= FIRST) & torch.from_numpy(drawn_N < share)] = UNKNOWN
        return replace(batch, ids=replace(ids, values_N=values_N))


def _mixed(*numbers: int) -> int:
    """A number of 64 bits that depends on all of these."""
    z = np.zeros(1, np.uint64)
    for number in numbers:
        z = mix(z ^ np.uint64(number))
    return int(z[0])
