"""What torch.compile must know of the operators."""

from __future__ import annotations

import pytest
import torch

from sparrow.kernels import embedding_bag
from tests.kernels.embedding_bag.cases import OPS, RULES, SHAPES, build, built, raw


@built
@pytest.mark.parametrize("op", OPS)
def test_torchs_own_checks(op: str) -> None:
    for shape in ("everything", "several tables"):
        call = build(SHAPES[shape], [3, 16, 5], RULES["adam, all"], levels=2, dtype=torch.int32)
        args = raw(call)[op]
        torch.library.opcheck(
            getattr(torch.ops.sparrow, op).default,
            args,
            test_utils=("test_schema", "test_faketensor"),
        )


@built
def test_compiles_without_a_graph_break() -> None:
    call = build(SHAPES["everything"], [3, 16, 5], RULES["sgd, plain"])
    args = raw(call)["lookup"]
    doubled = torch.compile(
        lambda *tensors: [out * 2 for out in torch.ops.sparrow.lookup(*tensors)],
        fullgraph=True,
        backend="aot_eager",
    )
    for out, expected in zip(
        doubled(*args), embedding_bag.lookup(call.tables, call.bags), strict=True
    ):
        assert torch.equal(out, expected * 2)
