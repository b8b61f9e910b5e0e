"""The tables on a GPU against the tables on the CPU."""

from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.embeddings import EmbeddingTables
from tests.embeddings.test_tables import batch, make, objective, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["fused", "deferred"])
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad"])
def test_learns_as_on_the_cpu(mode: str, rule: str) -> None:
    cpu, gpu = make(mode, rule), make(mode, rule).to("cuda")
    for step in range(3):
        ids = batch(step, weighted=True)
        one, two = tensors(cpu(ids)), tensors(gpu(ids.to("cuda")))
        for name in one:
            torch.testing.assert_close(one[name], two[name].cpu())
        objective(one).backward()
        objective({k: v.cpu() for k, v in two.items()}).backward()
        cpu.update()
        gpu.update()
    for a, b in zip(cpu.all_records(), gpu.all_records(), strict=True):
        for name in a.fields:
            torch.testing.assert_close(a.fields[name], b.fields[name].cpu(), rtol=1e-4, atol=1e-5)


def test_a_bad_id_is_raised_at_the_next_synchronisation() -> None:
    gpu: EmbeddingTables = make().to("cuda")
    ids = batch(1)
    ids["history"].values_N[0] = 99
    gpu(ids.to("cuda"))
    with pytest.raises(UserError, match="table 'item', feature 'history': 1 ids are outside"):
        gpu.raise_bad_ids()
    gpu.raise_bad_ids()
