"""Products of int8 beside other int8 products and fp32: layers of one shape, and the products of a
DCNv2.

    python benchmarks/int8_linear.py              # under three minutes
    python benchmarks/int8_linear.py --threads 2
    python benchmarks/int8_linear.py --quick      # under a minute, the same checks

Sides: `F.linear` in fp32; `torch._int_mm`, and oneDNN's product of torch's quantised linear layers;
onnxruntime's dynamic int8 with a scale for each channel; ours with static scales and with those of
each row. Ours and onnxruntime's quantise x, multiply and add the bias. `_int_mm` and oneDNN "alone"
are given the codes: the product, oneDNN's with bias. "Whole" adds what is missing, in torch's
operators. The whole numbers are compared before anything is timed.

DCNv2 is three cross layers of 624 and, beside them, 512 and 256 hidden units. Its last product, of
one output, is fp32 on all sides. Sides take turns of some milliseconds. Printed are medians in
microseconds, and the median ratio of neighbouring turns to ours with static scales, with quartiles:
above 1 ours is faster. One thread is timed by the processor's time, which does not count when other
programs run. With more threads a turn is one call, by the clock, and what is printed of a side is
its fastest turn: a thread that waits for a core holds up the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers.tiny import sized
from _peers.turns import TURN_S, turns
from embedding_bag import target
from row_formats import processor
from torch import Tensor
from torch.nn import functional as F

from sparrow.core.memory import keep_freed_memory
from sparrow.kernels import dense, missing
from sparrow.kernels.int8_linear import Static, linear, packed, quantised, sums

SHAPES = ((1, 624, 624), (100, 624, 624), (500, 624, 624), (500, 624, 512))
WIDTH, DEEP, CROSSES = 624, (512, 256), 3
STACKS = (1, 100, 500)  # rows
PORTABLE_MACS = 1 << 24  # a processor without vector products takes too long for more
Ways = dict[str, Callable[[], Any]]


# -- one layer -------------------------------------------------------------------------------------


@dataclass
class Layer:
    """A layer of numbers that were drawn, and the codes of static activations."""

    x_BI: Tensor
    weight_OI: Tensor
    bias_O: Tensor
    static: Static

    @classmethod
    def drawn(cls, rows: int, inputs: int, outputs: int) -> Layer:
        """Activations that are cut at 4 standard deviations, a weight and a bias."""
        random = torch.Generator().manual_seed(1)
        x_BI, weight_OI = (
            torch.randn(rows, inputs, generator=random),
            torch.randn(outputs, inputs, generator=random),
        )
        return cls(
            x_BI,
            weight_OI / math.sqrt(inputs),
            torch.randn(outputs, generator=random),
            Static.of(-4.0, 4.0),
        )

    def codes(self, less: int = 0) -> Tensor:
        """Of x, whole numbers of 0 to 255 [B, I], less a number."""
        steps_BI = self.x_BI * (1 / torch.tensor(self.static.scale))
        return steps_BI.round_().add_(self.static.zero - less).clamp_(-less, 255 - less)


def layer_ways(layer: Layer) -> Ways:
    """What is timed of a layer; all whole numbers have been compared."""
    weight = quantised(layer.weight_OI)
    product, static = packed(weight, layer.bias_O), layer.static
    codes_BI, weight_OI = layer.codes().to(torch.uint8), weight.codes_OI
    expected = ((codes_BI.double() - static.zero) @ weight_OI.double().t()).int()
    kinds = ("avx512_vnni", "avx_vnni", "avx2", "portable")
    for name in kinds[: None if expected.numel() * weight_OI.shape[1] < PORTABLE_MACS else 3]:
        try:
            torch.ops.sparrow.int8_processor(name)
        except ValueError:
            continue
        assert torch.equal(sums(layer.x_BI, product, static), expected), name
    torch.ops.sparrow.int8_processor("best")
    ways: Ways = {
        "ours static": lambda: linear(layer.x_BI, product, static),
        "ours by row": lambda: linear(layer.x_BI, product),
        "fp32": lambda: F.linear(layer.x_BI, layer.weight_OI, layer.bias_O),
    }
    floats_BO = expected.float() * (static.scale * weight.scale_O) + layer.bias_O
    assert torch.allclose(ways["ours static"](), floats_BO, rtol=1e-5, atol=1e-5)
    if len(codes_BI) > 16:  # of which `_int_mm` has none
        signed_BI = (codes_BI.int() - 128).to(torch.int8)
        moved_O = (128 - static.zero) * weight_OI.sum(1, dtype=torch.int32)
        assert torch.equal(torch._int_mm(signed_BI, weight_OI.t()) + moved_O, expected)
        ways["_int_mm alone"] = lambda: torch._int_mm(signed_BI, weight_OI.t())
        factor_O = static.scale * weight.scale_O

        def whole() -> Tensor:
            sums_BO = torch._int_mm(layer.codes(128).to(torch.int8), weight_OI.t()).add_(moved_O)
            return torch.addcmul(layer.bias_O, sums_BO, factor_O)

        assert torch.allclose(whole(), floats_BO, rtol=1e-5, atol=1e-5)
        ways["_int_mm whole"] = whole
    zeros_O = torch.zeros(len(weight_OI), dtype=torch.int64)
    theirs = torch.ops.onednn.qlinear_prepack(weight_OI, codes_BI.shape)
    pointwise = torch.ops.onednn.qlinear_pointwise.default

    def onednn(codes_BI: Tensor) -> Tensor:
        out_BO: Tensor = pointwise(
            codes_BI,
            static.scale,
            static.zero,
            theirs,
            weight.scale_O,
            zeros_O,
            layer.bias_O,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return out_BO

    ways["oneDNN alone"] = lambda: onednn(codes_BI)
    ways["oneDNN whole"] = lambda: onednn(layer.codes().to(torch.uint8))
    assert all(
        torch.allclose(ways[f"oneDNN {what}"](), floats_BO, rtol=1e-4, atol=1e-4)
        for what in ("alone", "whole")
    )
    return ways


# -- the products of a DCNv2 -----------------------------------------------------------------------


def stack_weights() -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the cross layers, of the hidden ones, and of the last."""
    random = torch.Generator().manual_seed(2)
    deep = [*zip((WIDTH, *DEEP), DEEP, strict=False)]
    shapes = [(WIDTH, WIDTH)] * CROSSES + deep + [(WIDTH + DEEP[-1], 1)]
    return [
        (torch.randn(o, i, generator=random) / math.sqrt(i), torch.randn(o, generator=random) * 0.1)
        for i, o in shapes
    ]


def eager(weights: Sequence[tuple[Tensor, Tensor]], x0_BI: Tensor) -> Tensor:
    """Fp32, as a model in torch computes it."""
    x, hidden = x0_BI, x0_BI
    for weight, bias in weights[:CROSSES]:
        x = torch.addcmul(x, x0_BI, F.linear(x, weight, bias))
    for weight, bias in weights[CROSSES:-1]:
        hidden = F.relu(F.linear(hidden, weight, bias))
    return F.linear(torch.cat([x, hidden], 1), *weights[-1])


class Ours:
    """The same in int8; static scales are those of the given rows."""

    def __init__(
        self, weights: Sequence[tuple[Tensor, Tensor]], x0_BI: Tensor, is_static: bool
    ) -> None:
        self.crosses = [(packed(quantised(weight)), bias) for weight, bias in weights[:CROSSES]]
        self.deep = [packed(quantised(weight), bias) for weight, bias in weights[CROSSES:-1]]
        self.last = weights[-1]
        self.statics: list[Static | None] = [None] * (len(weights) - 1)
        if is_static:
            found: list[Static] = []
            self(x0_BI, found)
            self.statics = [*found]

    def __call__(self, x0_BI: Tensor, ranges: list[Static] | None = None) -> Tensor:
        """Returns the logits; `ranges` gets the range of each product's x."""
        x, hidden, statics = x0_BI, x0_BI, iter(self.statics)
        for product, bias in self.crosses:
            _note(ranges, x)
            x = dense.cross(x0_BI, x, linear(x, product, next(statics)), bias)
        for product in self.deep:
            _note(ranges, hidden)
            hidden = linear(hidden, product, next(statics), relu=True)
        return F.linear(torch.cat([x, hidden], 1), *self.last)


def _note(ranges: list[Static] | None, x: Tensor) -> None:
    if ranges is not None:
        ranges.append(Static.of(x.min().item(), x.max().item()))


def onnx_file(weights: Sequence[tuple[Tensor, Tensor]], path: Path) -> None:
    """Write the same products as a graph of ONNX."""
    import onnx
    from onnx import helper, numpy_helper

    nodes, constants = [], []

    def linear_node(i: int, x: str) -> str:
        for kind, value in (("w", weights[i][0].t()), ("b", weights[i][1])):
            constants.append(numpy_helper.from_array(value.contiguous().numpy(), f"{kind}{i}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"p{i}"], name=f"product{i}"))
        nodes.append(helper.make_node("Add", [f"p{i}", f"b{i}"], [f"y{i}"]))
        return f"y{i}"

    x, hidden = "x0", "x0"
    for i in range(CROSSES):
        nodes.append(helper.make_node("Mul", ["x0", linear_node(i, x)], [f"m{i}"]))
        nodes.append(helper.make_node("Add", [x, f"m{i}"], [f"x{i + 1}"]))
        x = f"x{i + 1}"
    for i in range(CROSSES, len(weights) - 1):
        nodes.append(helper.make_node("Relu", [linear_node(i, hidden)], [f"h{i}"]))
        hidden = f"h{i}"
    nodes.append(helper.make_node("Concat", [x, hidden], ["all"], axis=1))
    out = linear_node(len(weights) - 1, "all")
    kind = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x0", kind, ["B", WIDTH])]
    graph = helper.make_graph(
        nodes, "dcnv2", inputs, [helper.make_tensor_value_info(out, kind, ["B", 1])], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def onnx_ways(
    weights: Sequence[tuple[Tensor, Tensor]], x0_BI: Tensor, folder: Path, threads: int
) -> Ways:
    """Onnxruntime's fp32 and its dynamic int8; empty with a reason where it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
        print("onnxruntime is left out: `pip install onnx onnxruntime`")
        return {}
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx_file(weights, folder / "fp32.onnx")
    last = f"product{len(weights) - 1}"
    quantize_dynamic(
        folder / "fp32.onnx", folder / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8,
        nodes_to_exclude=[last],
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    ways: Ways = {}
    for name in ("fp32", "int8"):
        session = onnxruntime.InferenceSession(
            folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"]
        )
        feed = {"x0": x0_BI.numpy()}
        ways[f"onnxruntime {name}"] = lambda session=session, feed=feed: session.run(None, feed)[0]
    return ways


def stack_ways(rows: int, folder: Path, threads: int) -> Ways:
    """What is timed of the DCNv2's products; results are compared."""
    weights, x0_BI = (
        stack_weights(),
        torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)),
    )
    static, by_row = Ours(weights, x0_BI, True), Ours(weights, x0_BI, False)
    ways: Ways = {
        "ours static": lambda: static(x0_BI),
        "ours by row": lambda: by_row(x0_BI),
        "fp32": lambda: eager(weights, x0_BI),
        **onnx_ways(weights, x0_BI, folder, threads),
    }
    expected = np.asarray(ways["fp32"]())
    for name, way in ways.items():
        error = float(np.linalg.norm(np.asarray(way()) - expected) / np.linalg.norm(expected))
        assert error < (1e-4 if "fp32" in name else 0.1), (name, error)
        print(f"  {rows} rows, {name}: relative error of the logits {error:.4f}")
    return ways


# -- timing ----------------------------------------------------------------------------------------


def measured(what: str, ways: Ways, seconds: float, threads: int) -> dict[str, float]:
    """Print a point; returns the median ratio of each side to ours with static scales."""
    clock, turn_s = (time.thread_time, TURN_S) if threads == 1 else (time.perf_counter, 0.0)
    taken = turns(ways, seconds, clock, turn_s)
    found = {}
    for name, times in taken.items():
        ratios = [theirs / ours for theirs, ours in zip(times, taken["ours static"], strict=True)]
        low, found[name], high = np.percentile(ratios, [25, 50, 75])
        if threads > 1:
            found[name] = min(times) / min(taken["ours static"])
        told = f"({low:.2f}-{high:.2f})" if threads == 1 else ""
        one = statistics.median(times) if threads == 1 else min(times)
        print(f"{what:<17} {name:<17} {one:9,.1f}  {found[name]:6.2f} {told}")
    return found


def main() -> None:
    """Measure, and say which goals are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less time a point, the same checks")
    parser.add_argument("--threads", type=int, default=1, help="of every side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a program that serves does at its start
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    seconds = sized(2.0, 0.0) if options.quick else 20.0
    print(
        f"{processor()}, {torch.ops.sparrow.int8_processor('best')} products; torch"
        f" {torch.__version__}, {options.threads} threads; microseconds, and times ours static"
        " (quartiles)"
    )
    layers, stacks = {}, {}
    with torch.inference_mode():
        for rows, inputs, outputs in SHAPES:
            ways = layer_ways(Layer.drawn(rows, inputs, outputs))
            what = f"{rows} x {inputs} x {outputs}"
            layers[rows, inputs, outputs] = measured(what, ways, seconds, options.threads)
        with tempfile.TemporaryDirectory() as folder:
            for rows in STACKS:
                ways = stack_ways(rows, Path(folder), options.threads)
                stacks[rows] = measured(f"DCNv2, {rows} rows", ways, seconds, options.threads)
    print()
    large, stack, nothing = layers[500, 624, 624], stacks[500], math.nan
    for name in ("_int_mm whole", "oneDNN whole"):
        target(f"{name} over ours, 500 x 624 x 624", large[name], 1.0)
    target("fp32 over ours by row, DCNv2, 500 rows", stack["fp32"] / stack["ours by row"], 3.0)
    target(
        "onnxruntime int8 over ours by row, DCNv2, 500 rows",
        stack.get("onnxruntime int8", nothing) / stack["ours by row"],
        1.4,
    )


if __name__ == "__main__":
    main()
