from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import sparrow.kernels.flops  # noqa: F401  # the formulas of all operators
from sparrow.kernels import missing
from sparrow.trained.run import Loop
from sparrow.training import profiling, train
from tests.runs import small_run


def test_profile_says_where_a_steps_time_goes(prepared: Path, tmp_path: Path) -> None:
    train(
        small_run(prepared, tmp_path / "run", loop=Loop(epochs=2, max_steps=26)),
        options={"profile"},
    )
    found = profiling.read(tmp_path / "run")
    assert found is not None
    parts = {row["part"]: row["ms_per_step"] for row in found["parts"]}
    assert {"load", "forward", "backward", "dense optimizer", "table update"} <= set(parts)
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)
    assert parts["forward"] > 0
    assert "matrix products" in {row["part"] for row in found["kinds"]}
    trace = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))
    assert any(event.get("name") == "sparrow part: backward" for event in trace["traceEvents"])
    assert found["steps"] == profiling.STEPS


def test_products_are_what_has_a_count_of_operations() -> None:
    """So time in an operator of ours is not taken for that of tables."""
    foreign = ("conv", "flex", "aten._flash", "aten._efficient")  # which no model here calls
    products = [
        str(operator).replace(".", "::")
        for operator in flop_registry
        if not any(part in str(operator) for part in foreign)
    ]
    assert len(products) > 10
    assert {profiling.kind_of(name) for name in products} == {"matrix products"}
    if missing():
        pytest.skip(f"{missing()}: run `make setup`")
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("sparrow::")}
    others = ours - {*products, "sparrow::int8_processor"}
    assert "sparrow::weight_gradients" in others
    assert "matrix products" not in {profiling.kind_of(name) for name in others}
    for name in ("sparrow::cross", "sparrow::relu_backward", "sparrow::beside_backward"):
        assert profiling.kind_of(name) == "between products"
    assert profiling.kind_of("sparrow::fused_update") == "embedding update"
