"""The Open Inference Protocol (V2) over HTTP, with the binary tensor data extension of Triton.

A tensor is a column of the log: [N] or [N, 1] values, one for each candidate, or one for all of
them. A column of lists or of vectors is two tensors: NAME with the values of all rows, and
NAME:lengths. NAME:null says which rows have no value.

Source: https://github.com/kserve/open-inference-protocol, and Triton's
`protocol/extension_binary_data.md`.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from sparrow.apps.service.batcher import Answer
from sparrow.apps.service.limits import Limits, RefusedError
from sparrow.apps.service.request import One, Request, Sources, check_request, decode_body
from sparrow.core.errors import UserError, suggest
from sparrow.features.types import is_list
from sparrow.serving.scorer import Scorer

LENGTHS = ":lengths"
NULL = ":null"
HEADER = b"inference-header-content-length"
NUMBERS = {
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"},
}
_PLAIN: dict[str, tuple[type, ...]] = {"BOOL": (bool,), "BYTES": (str,)}
_PLAIN |= {name: (int,) if "INT" in name else (int, float) for name in NUMBERS if name != "BOOL"}
_unpack = struct.Struct("<I").unpack_from


class Tensor(msgspec.Struct):
    """An input. data: its values, unless they are bytes."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, One] = {}
    data: list[One | list[One]] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, One] = {}


class _Body(msgspec.Struct):
    inputs: list[Tensor]
    id: str = ""
    outputs: list[_Output] = []
    parameters: dict[str, One] = {}


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


class Wanted(NamedTuple):
    """How an answer is to be written. id: of the request. outputs: label -> whether it is binary.
    binary: of others.
    """

    id: str
    outputs: dict[str, bool]
    binary: bool

    def select(self, labels: tuple[str, ...]) -> dict[str, bool]:
        """Choose the outputs of a model with these labels: all of them, unless some were named."""
        for name in self.outputs:
            if name not in labels:
                raise UserError(
                    f"output {name!r}: the model has no such label{suggest(name, labels)}"
                )
        return self.outputs or dict.fromkeys(labels, self.binary)


def metadata(scorer: Scorer, name: str, version: str) -> dict[str, Any]:
    """Returns the metadata of a model: its tensors. Numbers are as wide as they are in the log."""
    inputs = []
    for column, kind in scorer.encoder.kinds.items():
        datatype = _datatype(kind, scorer.raw_types.field(column).type)
        inputs.append({"name": column, "datatype": datatype, "shape": [-1]})
        if kind in ("list", "vector"):
            inputs.append({"name": column + LENGTHS, "datatype": "INT64", "shape": [-1]})
    outputs = [{"name": label, "datatype": "FP32", "shape": [-1]} for label in scorer.labels]
    return {
        "name": name,
        "versions": [version],
        "platform": "sparrow",
        "inputs": inputs,
        "outputs": outputs,
    }


def _datatype(kind: str, log_type: pa.DataType) -> str:
    """Returns the type of a column's tensor. kind: see `Encoder.kinds`. log_type: the type in the
    log.
    """
    inner = log_type.value_type if is_list(log_type) else log_type
    if pa.types.is_boolean(inner):
        return "BOOL"
    if kind not in ("number", "vector"):
        return "INT64" if kind == "integer" else "BYTES"
    narrow_bits = 32 if pa.types.is_floating(inner) else 16 if pa.types.is_integer(inner) else 0
    # no digit of the log is lost
    return "FP32" if narrow_bits and inner.bit_width <= narrow_bits else "FP64"


def parse_request(
    body: bytes, header: bytes | None, sources: Sources, limits: Limits
) -> tuple[Request, Wanted]:
    """Returns a request, and how its answer is to be written.

    Args:
        body: JSON, and after it the bytes of binary tensors.
        header: how long the JSON is, when there are such bytes.
        sources, limits: see `check_request`.

    Raises:
        UserError: for a body that is no such request.
        RefusedError: see `check_request`.
    """
    content, binary = _split_body(body, header)
    contents: list[bytes | None] = []
    at = 0
    for tensor in content.inputs:
        size = tensor.parameters.get("binary_data_size")
        if size is not None and (type(size) is not int or not 0 <= size <= len(binary) - at):
            raise UserError(
                f"input {tensor.name!r}: binary_data_size {size!r}, and {len(binary) - at} bytes"
                " are left"
            )
        contents.append(None if size is None else bytes(binary[at : at + size]))
        at += size or 0
    is_binary = content.parameters.get("binary_data_output") is True
    outputs = {
        output.name: output.parameters.get("binary_data", is_binary) is True
        for output in content.outputs
    }
    request = request_of_tensors(content.inputs, contents, content.parameters, sources, limits)
    if at != len(binary):
        raise UserError(
            f"body: {len(binary) - at} bytes after the last tensor; say whose they are or leave"
            " them out"
        )
    return request, Wanted(content.id, outputs, is_binary)


def request_of_tensors(
    tensors: Sequence[Tensor],
    contents: Sequence[bytes | None],
    parameters: Mapping[str, Any],
    sources: Sources,
    limits: Limits,
    left_ms: float = math.inf,
) -> Request:
    """Returns a request of tensors.

    Args:
        tensors: the inputs.
        contents: the bytes of each that has no `data`.
        parameters: of the request. "timeout" is in microseconds.
        sources, limits: see `check_request`.
        left_ms: the caller's own deadline.

    Raises:
        UserError: for tensors that do not fit.
        RefusedError: see `check_request`.
    """
    if len(tensors) > 3 * limits.columns:  # with lengths and nulls
        raise RefusedError(
            413, f"inputs: {len(tensors)} of them, {3 * limits.columns} are allowed; leave some out"
        )
    columns: dict[str, list[Any]] = {}
    for tensor, data in zip(tensors, contents, strict=True):
        if tensor.name in columns:
            raise UserError(f"input {tensor.name!r}: is given twice; give it once")
        columns[tensor.name] = _from_data(tensor) if data is None else _from_bytes(tensor, data)
    columns = _with_nulls(_with_lists(columns))
    lengths = {len(values) for values in columns.values()}
    count = 0 if 0 in lengths else max(lengths, default=0)
    for name, values in columns.items():
        if len(values) not in (1, count):
            most = next(column for column in columns if len(columns[column]) == count)
            remedy = f"give as many, or {most + LENGTHS!r} too if that is a list"
            raise UserError(
                f"input {name!r}: {len(values)} values where {most!r} has {count}; {remedy}"
            )
    user = {name: values[0] for name, values in columns.items() if len(values) == 1 != count}
    rest = {name: values for name, values in columns.items() if name not in user}
    timeout = parameters.get("timeout")
    if timeout is not None and type(timeout) is not int:
        raise UserError(f"parameters.timeout: {timeout!r}; give microseconds")
    allowed = min(math.inf if timeout is None else timeout / 1e3, left_ms)
    return check_request(user, rest, sources, limits, None if allowed == math.inf else allowed)


def _split_body(body: bytes, header: bytes | None) -> tuple[_Body, memoryview]:
    """Returns the JSON of a body, and the bytes after it."""
    length = len(body)
    if header is not None:
        text = header.decode("latin-1")
        length = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not 0 <= length <= len(body):
            raise UserError(
                f"Inference-Header-Content-Length: {text!r} of a body of {len(body)} bytes;"
                " correct it"
            )
    view = memoryview(body)
    return (
        decode_body(_decode, view[:length], "what the Open Inference Protocol describes"),
        view[length:],
    )


# -- tensors ---------------------------------------------------------------------------------------


def _size(tensor: Tensor) -> int:
    """Returns how many values a tensor has."""
    if tensor.datatype not in _PLAIN:
        raise UserError(
            f"input {tensor.name!r}: datatype {tensor.datatype!r}{suggest(tensor.datatype, _PLAIN)}"
        )
    if (
        not 1 <= len(tensor.shape) <= 2
        or min(tensor.shape) < 0
        or tensor.shape[1:] not in ([], [1])
    ):
        raise UserError(f"input {tensor.name!r}: shape {tensor.shape}; give [N] or [N, 1]")
    return tensor.shape[0]


def _from_bytes(tensor: Tensor, data: bytes) -> list[Any]:
    size = _size(tensor)
    if tensor.data is not None:
        raise UserError(f"input {tensor.name!r}: has data and binary_data_size; give one of them")
    if tensor.datatype == "BYTES":
        return _texts(tensor, data, size)
    kind = np.dtype(NUMBERS[tensor.datatype])
    if len(data) != size * kind.itemsize:
        raise UserError(
            f"input {tensor.name!r}: {len(data)} bytes for {size} values of {tensor.datatype};"
            " correct the shape"
        )
    return _without_nan(np.frombuffer(data, kind))


def _texts(tensor: Tensor, data: bytes, size: int) -> list[Any]:
    """Returns texts, each of which comes after its length in four bytes."""
    texts: list[Any] = []
    at = 0
    try:
        for _ in range(size):
            (length,) = _unpack(data, at)
            start = at + 4
            at = at + 4 + length
            texts.append(data[start:at].decode())
    except UnicodeDecodeError as error:
        raise UserError(f"input {tensor.name!r}, value {len(texts)}: {error}; send UTF-8") from None
    except struct.error:  # a length led beyond the end
        at = -1
    if at != len(data):
        raise UserError(
            f"input {tensor.name!r}: {len(data)} bytes are not {size} texts, each after its length;"
            " correct them"
        )
    return texts


def _from_data(tensor: Tensor) -> list[Any]:
    size = _size(tensor)
    if tensor.data is None:
        raise UserError(f"input {tensor.name!r}: no data; give a list, or binary_data_size")
    data: list[Any] = tensor.data
    if any(isinstance(value, list) for value in data):  # [N, 1] may be nested
        if not all(isinstance(value, list) and len(value) == 1 for value in data):
            raise UserError(
                f"input {tensor.name!r}: data is neither {size} values nor {size} lists of one;"
                " correct it"
            )
        data = [value for (value,) in data]
    if len(data) != size:
        raise UserError(
            f"input {tensor.name!r}: {len(data)} values where its shape says {size}; correct one of"
            " them"
        )
    types = _PLAIN[tensor.datatype]
    for value in data:
        if type(value) not in types:
            raise UserError(
                f"input {tensor.name!r}: {value!r} is no {tensor.datatype}; correct the value or"
                " the datatype"
            )
    if tensor.datatype == "BYTES":
        return data
    try:
        with np.errstate(over="ignore"):
            return _without_nan(np.array(data, NUMBERS[tensor.datatype]))
    except OverflowError:
        raise UserError(
            f"input {tensor.name!r}: a value is out of the range of {tensor.datatype}"
        ) from None


def _without_nan(values_N: Any) -> list[Any]:
    """Returns Python's values, with None for NaN, which stands for a missing number."""
    values: list[Any] = values_N.tolist()
    if values_N.dtype.kind == "f" and np.isnan(values_N).any():
        values = [None if math.isnan(value) else value for value in values]
    return values


def _with_lists(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns columns, with a list for each row where lengths are given."""
    rows = {}
    for name, values in columns.items():
        lengths = columns.get(name + LENGTHS)
        if name.endswith(LENGTHS):
            if name.removesuffix(LENGTHS) not in columns:
                raise UserError(
                    f"input {name!r}: there is no input {name.removesuffix(LENGTHS)!r}; give its"
                    " values"
                )
            continue
        if lengths is not None:
            if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(values):
                raise UserError(
                    f"input {name + LENGTHS!r}: does not add up to the {len(values)} values of"
                    f" {name!r}"
                )
            ends = list(itertools.accumulate(lengths))
            values = [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        rows[name] = values
    return rows


def _with_nulls(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns columns, with None in the rows that are said to have no value."""
    for name in [name for name in columns if name.endswith(NULL)]:
        nulls = columns.pop(name)
        column = name.removesuffix(NULL)
        values = columns.get(column, [])
        if len(nulls) != len(values) or not all(type(null) is bool for null in nulls):
            raise UserError(
                f"input {name!r}: {len(nulls)} values; give a BOOL for each of {len(values)} rows"
                f" of {column!r}"
            )
        columns[column] = [
            None if is_null else value for value, is_null in zip(values, nulls, strict=True)
        ]
    return columns


# -- answers ---------------------------------------------------------------------------------------


def format_answer(name: str, wanted: Wanted, answer: Answer) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and how long its JSON is when tensors come after it.

    Raises:
        UserError: for an output that the model does not have.
    """
    outputs = []
    binary = []
    labels = answer.version.scorer.labels
    for label, is_binary in wanted.select(labels).items():
        scores_N = answer.scores_NT[:, labels.index(label)].astype("<f4")
        output: dict[str, Any] = {"name": label, "datatype": "FP32", "shape": [len(scores_N)]}
        if is_binary:
            binary.append(scores_N.tobytes())
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = scores_N.tolist()
        outputs.append(output)
    content: dict[str, Any] = {
        "model_name": name,
        "model_version": answer.version.name,
        "outputs": outputs,
    }
    if wanted.id:
        content["id"] = wanted.id
    odd = zip(answer.odd_values._fields, answer.odd_values, strict=True)
    content["parameters"] = {kind: sum(counts.values()) for kind, counts in odd}
    content["parameters"] |= {} if answer.users is None else {"users": answer.users}
    body = _encode(content)
    return (body, None) if not binary else (b"".join((body, *binary)), len(body))
