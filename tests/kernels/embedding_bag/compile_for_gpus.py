"""Compiles the kernels of every operator for a GPU that need not be here, as Triton does at their
first call.

python -m tests.kernels.embedding_bag.compile_for_gpus 90     # a compute capability; TRITON_INTERPRET must not be 1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sparrow.kernels.embedding_bag import Tables, triton
from sparrow.kernels.embedding_bag.gpu import entries, launch
from tests.kernels.embedding_bag.cases import RULES, SHAPES, Call, Shape, build
from tests.kernels.embedding_bag.test_formats import FORMATS


class Driver:
    """What Triton asks of the GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


made: set[Any] = set()
KERNELS = 9  # that the operators need for one table


def compile_only(
    program: Any, grid: Sequence[int], device: Any, *arguments: Any, **constants: Any
) -> None:
    """Takes the place of `launch`. A product and a sum that are rounded as one would not be the
    reference's.
    """
    if 0 in grid:
        return
    found = program.warmup(*arguments, grid=tuple(grid), **constants, **launch.OPTIONS)
    assert "fma.rn.f32" not in found.asm["ptx"], program.__name__
    assert "div.full" not in found.asm["ptx"], program.__name__
    made.add(found.hash)


def run(call: Call) -> None:
    """All operators but `row_gradients`, which would look at what they did."""
    call = call.copied()
    triton.lookup(call.tables, call.bags)
    triton.weight_gradients(call.tables, call.grads, call.bags)
    rows = [(torch.arange(table.rows), torch.zeros(table.rows, table.dim)) for table in call.tables]
    triton.update_rows(call.tables, rows, call.lr_T, 1)
    triton.fused_update(call.tables, call.grads, call.bags, call.lr_T, 1)
    triton._copy_rows(Tables(call.tables[:1]), torch.tensor([0]), torch.tensor([1]))
    triton.count_outside(call.bags.slots_N, call.bags.bounds, [1] * len(call.bags.bags))


def main() -> None:
    driver.set_active(Driver(int(sys.argv[1])))  # type: ignore[arg-type]
    triton.launch = entries.launch = compile_only  # type: ignore[attr-defined, assignment]
    for bags in (1, 41, 48):
        run(build(Shape(keys=([2] * bags,)), [128], RULES["sgd, plain"]))
        assert len(made) == KERNELS, "a batch of another length must not be compiled for"
    run(build(SHAPES["everything"], [128] * 3, RULES["sgd, plain"], dtype=torch.int32))
    for i, format in enumerate(FORMATS.values()):
        rule = [name for name in RULES if name.endswith("all")][i % 5]
        state = (torch.bfloat16, torch.float32)[i % 2]
        run(
            build(
                SHAPES["weighted mean"],
                [(5, 64)[i % 2]],
                RULES[rule],
                format=format,
                levels=2,
                state=state,
            )
        )
    print(f"{len(made)} kernels")


if __name__ == "__main__":
    main()
