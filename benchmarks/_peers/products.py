"""The dense part of DCNv2 as a plain stack of torch's layers, and as ONNX: what it costs to
multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged
from sparrow.core.repeated import Repeated, Users
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.models import dcnv2

NUMBERS, IDS, DIM = 13, 26, 16
CONFIG = dcnv2.Config(dim=DIM, cross_layers=3, deep=(400, 400, 400))
# every second column
OF_USER = [c % 2 == 0 for c in range(NUMBERS)], [c % 2 == 0 for c in range(IDS)]


class Given(nn.Module):
    """In the place of a model's lookups: vectors that were looked up."""

    def __init__(self, ids_BX: Tensor) -> None:
        super().__init__()
        self.ids_BX = ids_BX

    def forward(self, batch: Batch) -> Tensor:
        """Returns them."""
        return self.ids_BX


def model() -> dcnv2.DCNv2:
    """DCNv2 of `vs_fuxictr.py`, as it is served."""
    columns = {f"n{c}": Column(kind="numeric") for c in range(NUMBERS)}
    columns |= {f"i{c}": Column(kind="categorical", table=f"i{c}") for c in range(IDS)}
    schema = Schema(columns=columns, encodings={f"i{c}": Encoding(rows=10) for c in range(IDS)})
    torch.manual_seed(0)
    found = CONFIG.build(schema, TableChoices()).eval().requires_grad_(False)
    assert isinstance(found, dcnv2.DCNv2)
    for bias in found.cross.biases:
        nn.init.normal_(bias, std=0.1)
    return found


def inputs(rows: int, users: int) -> tuple[Tensor, Tensor, Users]:
    """Numbers and vectors of ids of rows, of which half of the columns are those of users with as
    many rows each.
    """
    random = np.random.default_rng(rows)
    dense_BC = torch.from_numpy(random.normal(size=(rows, NUMBERS)).astype(np.float32))
    ids_BX = torch.from_numpy(random.normal(size=(rows, IDS * DIM)).astype(np.float32)) / 4
    whose = Users.of(np.arange(rows) * users // rows, users)
    numbers, ids = (torch.tensor(of) for of in OF_USER)
    for x, shared in ((dense_BC, numbers), (ids_BX, ids.repeat_interleave(DIM))):
        x[:, shared] = x[:, shared][whose.sample_U][whose.inverse_B]
    return dense_BC, ids_BX, whose


def ours(
    of: dcnv2.DCNv2, dense_BC: Tensor, ids_BX: Tensor, whose: Users | None
) -> Callable[[], Tensor]:
    """Our model's products. whose: if products may share what is the users'."""
    if whose is not None:
        numbers, ids = (torch.tensor(of) for of in OF_USER)
        dense_BC = Repeated.of(dense_BC, whose, numbers[None])
        ids_BX = Repeated.of(ids_BX, whose, ids.repeat_interleave(DIM)[None])
    batch = Batch(dense_BC=dense_BC, ids=KeyedJagged.from_lists({}))

    def run() -> Tensor:
        of.ids = Given(ids_BX)
        found: Tensor = of(batch)
        return found

    return run


def multiply_adds(of: dcnv2.DCNv2) -> tuple[tuple[int, int], int]:
    """Returns those of a row, without and with folded vectors of numbers; and those for users'
    columns, with them.
    """
    wide = sum(
        weight.numel()
        for name, weight in of.named_parameters()
        if "weight" in name and "numeric" not in name
    )
    # outputs of the products that read the inputs
    firsts = of.cross.weights[0].shape[0] + CONFIG.deep[0]
    numbers, ids = (sum(columns) for columns in OF_USER)
    return (wide, wide - firsts * (DIM - 1) * NUMBERS), firsts * (numbers + DIM * ids)


class Plain(nn.Module):
    """The same function as its paper writes it: vectors of numbers beside those of ids, `F.linear`,
    torch's layers.
    """

    def __init__(self, of: dcnv2.DCNv2) -> None:
        super().__init__()
        self.of = of

    def forward(self, dense_BC: Tensor, ids_BX: Tensor) -> Tensor:
        """Returns logits."""
        assert self.of.numeric is not None
        x0 = torch.cat([(dense_BC[:, :, None] * self.of.numeric.weight_CD).flatten(1), ids_BX], 1)
        x = deep = x0
        for weight, bias in zip(self.of.cross.weights, self.of.cross.biases, strict=True):
            x = x0 * F.linear(x, weight, bias) + x
        for layer in self.of.deep.layers:
            deep = F.linear(deep, layer.weight, layer.bias).relu()  # type: ignore[arg-type]
        return F.linear(torch.cat([x, deep], 1), self.of.head.weight, self.of.head.bias)


def in_onnxruntime(of: dcnv2.DCNv2, threads: int) -> Callable[[Tensor, Tensor], Callable[[], Any]]:
    """Returns what makes a run of `Plain` in onnxruntime of its inputs; raises ImportError without
    it.

    Nodes are written by hand: one Gemm for each layer, as an exporter with all its optimisations
    would leave them.
    """
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights = [], []

    def constant(name: str, value: Tensor) -> str:
        weights.append(numpy_helper.from_array(value.numpy().copy(), name))
        return name

    def node(kind: str, inputs: list[str], output: str, **how: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **how))
        return output

    assert of.numeric is not None
    weights.append(numpy_helper.from_array(np.array([0, NUMBERS, 1], np.int64), "column"))
    weights.append(numpy_helper.from_array(np.array([0, NUMBERS * DIM], np.int64), "wide"))
    column = node("Reshape", ["numbers", "column"], "numbers_1")
    vectors = node("Mul", [column, constant("vectors", of.numeric.weight_CD)], "scaled")
    x0 = node("Concat", [node("Reshape", [vectors, "wide"], "flat"), "ids"], "x0", axis=1)
    x = deep = x0
    for i, (weight, bias) in enumerate(zip(of.cross.weights, of.cross.biases, strict=True)):
        y = node(
            "Gemm", [x, constant(f"cw{i}", weight), constant(f"cb{i}", bias)], f"c{i}", transB=1
        )
        x = node("Add", [node("Mul", [x0, y], f"m{i}"), x], f"x{i + 1}")
    for i, layer in enumerate(of.deep.layers):
        y = node(
            "Gemm",
            [deep, constant(f"dw{i}", layer.weight), constant(f"db{i}", layer.bias)],
            f"d{i}",
            transB=1,
        )  # type: ignore[arg-type]
        deep = node("Relu", [y], f"r{i}")
    both = node("Concat", [x, deep], "both", axis=1)
    assert of.head.bias is not None
    node(
        "Gemm",
        [both, constant("hw", of.head.weight), constant("hb", of.head.bias)],
        "logits",
        transB=1,
    )
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", size])
        for name, size in (("numbers", NUMBERS), ("ids", IDS * DIM))
    ]
    made = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 1])
    graph = helper.make_graph(nodes, "dcnv2", given, [made], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # it would take the others' turns
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def of_inputs(dense_BC: Tensor, ids_BX: Tensor) -> Callable[[], Any]:
        fed = {"numbers": dense_BC.numpy(), "ids": ids_BX.numpy()}
        return lambda: session.run(None, fed)[0]

    return of_inputs
