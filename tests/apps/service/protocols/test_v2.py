from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.apps.service.app import Service
from sparrow.apps.service.protocols import v2
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from tests.apps.service.asking import Got, ask, listening
from tests.apps.service.test_batcher import CLOSE

INFER = "/v2/models/model/infer"
LENGTH = "Inference-Header-Content-Length"
USER = ("user", "history", "num_1")


def tensors(
    scorer: Scorer, rows: list[dict[str, Any]], of_user: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Rows as arrays by column, as a client has them. The user's have one row."""
    found: dict[str, Any] = {}
    for name, kind in scorer.encoder.kinds.items():
        values = [row[name] for row in (rows[:1] if name in of_user else rows)]
        if kind == "list":
            lists = [value or [] for value in values]
            flat = [one for value in lists for one in value]
            texts = any(isinstance(one, str) for one in flat)
            found[name] = np.array(flat, object if texts else np.int64)
            found[name + ":lengths"] = np.array([len(value) for value in lists], np.int64)
        elif kind == "number":
            found[name] = np.array(
                [np.nan if value is None else value for value in values], np.float32
            )
        elif kind == "integer":
            found[name] = np.array(values, np.int64)
        else:
            found[name] = np.array([value or "" for value in values], object)
    return found


def shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the user of the first one. V2 has no word for a missing text, so that is an empty
    one.
    """
    texts = {"cat_0", "cat_1", "cat_2"}
    return [
        {n: rows[0][n] if n in USER else row[n] or "" if n in texts else row[n] for n in row}
        for row in rows
    ]


def type_of(array: Any) -> str:
    return {"O": "BYTES", "i": "INT64", "f": "FP32", "b": "BOOL"}[array.dtype.kind]


def as_json(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "name": name,
                "datatype": type_of(a),
                "shape": list(a.shape),
                "data": [x if x == x else 0.5 for x in a.tolist()],
            }
            for name, a in arrays.items()
        ]
    }


def with_bytes(arrays: dict[str, Any], change: Any = None) -> tuple[bytes, int]:
    """A body with the arrays as bytes, and how long its JSON is."""
    told: dict[str, Any] = {"inputs": [], "parameters": {"binary_data_output": True}}
    parts = []
    for name, a in arrays.items():
        texts = [str(text).encode() for text in a.tolist()]
        data = (
            b"".join(struct.pack("<I", len(t)) + t for t in texts)
            if a.dtype == object
            else a.tobytes()
        )
        one = {"name": name, "datatype": type_of(a), "shape": list(a.shape)}
        told["inputs"].append(one | {"parameters": {"binary_data_size": len(data)}})
        parts.append(data)
    if change:
        change(told, parts)
    head = json.dumps(told).encode()
    return head + b"".join(parts), len(head)


def scores_of(got: Got) -> Any:
    """The binary scores of an answer."""
    assert got.status == 200, got.body
    length = int(got.headers[LENGTH.lower().encode()])
    (output,) = json.loads(got.body[:length])["outputs"]
    assert (
        output["parameters"]["binary_data_size"] == len(got.body) - length
        and output["datatype"] == "FP32"
    )
    return np.frombuffer(got.body[length:], "<f4")


def test_json_and_bytes(service: Service, scorer: Scorer, rows: list[dict[str, Any]]) -> None:
    some = [row for row in rows if row["num_0"] is not None][:20]
    arrays = tensors(scorer, some)
    want = scorer.score(
        [
            row
            | {
                "cat_0": row["cat_0"] or "",
                "cat_1": row["cat_1"] or "",
                "cat_2": row["cat_2"] or "",
            }
            for row in some
        ]
    )
    body, length = with_bytes(arrays)
    assert (
        np.abs(scores_of(ask(service, INFER, body, {LENGTH: length})) - want[:, 0]).max() <= CLOSE
    )
    arrays = {
        name: np.nan_to_num(a, nan=0.5) if a.dtype.kind == "f" else a for name, a in arrays.items()
    }
    got = ask(service, INFER, as_json(arrays) | {"id": "seven"}).json
    assert (
        got["id"] == "seven"
        and got["model_name"] == "model"
        and got["model_version"] == scorer.folder.digest
    )
    body, length = with_bytes(arrays)
    want = scores_of(ask(service, INFER, body, {LENGTH: length}))
    assert np.abs(np.array(got["outputs"][0]["data"]) - want).max() <= CLOSE
    path = f"/v2/models/model/versions/{scorer.folder.digest}/infer"
    assert ask(service, path, as_json(arrays)).json["outputs"] == got["outputs"]


def test_a_tensor_of_one_row_is_of_the_user(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    some = shared(rows[:9])
    body, length = with_bytes(tensors(scorer, some, USER))
    assert (
        np.abs(
            scores_of(ask(service, INFER, body, {LENGTH: length})) - scorer.score(some)[:, 0]
        ).max()
        <= CLOSE
    )


@pytest.mark.parametrize("of_user", [(), USER])
def test_a_request_without_candidates_has_no_scores(
    of_user: tuple[str, ...], service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    """Also beside the columns of a user, who has one row."""
    row = rows[0] | {"num_1": 0.5}
    arrays = tensors(scorer, [row], of_user)
    keep = {*of_user, *(name + v2.LENGTHS for name in of_user)}
    arrays = {name: a if name in keep else a[:0] for name, a in arrays.items()}
    (output,) = ask(service, INFER, as_json(arrays)).json["outputs"]
    assert output["shape"] == [0] and output["data"] == []
    body, length = with_bytes(arrays)
    got = ask(service, INFER, body, {LENGTH: length})
    assert len(scores_of(got)) == 0 and b'"shape":[0]' in got.body


def test_other_models_and_few_bits(
    serve: Callable[..., Service], other: Scorer, rows: list[dict[str, Any]]
) -> None:
    """Through /rank and V2 they have the scores that the scorer gives to the same request."""
    service, some = serve(of=other), shared(rows[:9])
    user = {name: some[0][name] for name in USER}
    candidates = [{name: value for name, value in row.items() if name not in USER} for row in some]
    want = other.rank(user, candidates)[:, 0]
    assert np.ptp(want) > 1e-3
    got = ask(service, "/rank", {"user": user, "candidates": candidates}).json
    assert np.abs(np.array(got["scores"]["label"]) - want).max() <= CLOSE
    body, length = with_bytes(tensors(other, some, USER))
    assert np.abs(scores_of(ask(service, INFER, body, {LENGTH: length})) - want).max() <= CLOSE


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    """The service behind a socket of this machine."""
    with listening(service) as port:
        yield f"127.0.0.1:{port}"


def test_the_public_client_works_as_it_is(
    address: str, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    http = pytest.importorskip("tritonclient.http")
    some = [
        row | {name: row[name] or "" for name in ("cat_0", "cat_1", "cat_2")} for row in rows[:30]
    ]
    client = http.InferenceServerClient(address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
    told = client.get_model_metadata("model")
    assert told["versions"] == [scorer.folder.digest] and not client.is_model_ready("other")
    # its folder
    assert client.is_model_ready("one") and client.get_model_metadata("one")["name"] == "one"
    assert {one["datatype"] for one in told["inputs"]} == {"INT64", "FP32", "FP64", "BYTES"}
    arrays, inputs = tensors(scorer, some), []
    assert {one["name"] for one in told["inputs"]} == arrays.keys()
    for name, array in arrays.items():
        inputs.append(http.InferInput(name, list(array.shape), type_of(array)))
        inputs[-1].set_data_from_numpy(array)
    found = client.infer("model", inputs)
    want = scorer.score(some)[:, 0]
    assert np.abs(found.as_numpy("label") - want).max() <= CLOSE
    assert found.get_response()["model_version"] == scorer.folder.digest
    plain = client.infer(
        "model", inputs, outputs=[http.InferRequestedOutput("label", binary_data=False)]
    )
    assert np.abs(plain.as_numpy("label") - want).max() <= CLOSE
    with pytest.raises(Exception, match="no column 'num_2'"):
        client.infer("model", inputs[:-1])
    client.close()


@pytest.mark.parametrize(
    ("kind", "of", "datatype"),
    [
        *(("number", of, "FP32") for of in (pa.float16(), pa.float32(), pa.int8(), pa.uint16())),
        *(
            ("number", of, "FP64")
            for of in (pa.float64(), pa.int32(), pa.uint64(), pa.string(), pa.decimal128(9, 2))
        ),
        *(("vector", pa.list_(of), "FP32") for of in (pa.float32(), pa.int16())),
        *(
            ("vector", of, "FP64")
            for of in (pa.large_list(pa.float64()), pa.list_(pa.decimal128(9, 2)), pa.string())
        ),
        *(
            ("id", of, "BYTES")
            for of in (pa.int64(), pa.string(), pa.timestamp("us"), pa.decimal128(38, 0))
        ),
        *((kind, pa.bool_(), "BOOL") for kind in ("number", "id")),
        *(("integer", pa.int32(), "INT64"), ("list", pa.list_(pa.int64()), "BYTES")),
    ],
)
def test_metadata_gives_the_width_of_the_log(kind: str, of: pa.DataType, datatype: str) -> None:
    assert v2._datatype(kind, of) == datatype


def test_nulls(service: Service, scorer: Scorer, rows: list[dict[str, Any]]) -> None:
    """A tensor NAME:null takes values away: a text, an id, a number, a list, one of the user."""
    some = [
        {n: row[n] or "" if n.startswith("cat") else row[n] for n in row} | {"num_0": 1.0}
        for row in rows[:9]
    ]
    arrays, want = tensors(scorer, some, USER), [dict(row) for row in some]
    for row in want:
        row |= {name: some[0][name] for name in USER}
    for name, at in (("cat_0", 3), ("item", 4), ("num_0", 5), ("tags", 6)):
        arrays[f"{name}:null"] = np.arange(9) == at
        want[at][name] = None
    arrays["user:null"] = np.array([True])
    want = [row | {"user": None} for row in want]
    body, length = with_bytes(arrays)
    got = ask(service, INFER, body, {LENGTH: length})
    assert np.abs(scores_of(got) - scorer.score(want)[:, 0]).max() <= CLOSE
    assert np.abs(scores_of(got) - scorer.score(some)[:, 0]).max() > 1e-5
    for change, says in (
        (
            {"cat_0:null": np.zeros(8, bool)},
            "input 'cat_0:null': 8 values; give a BOOL for each of 9 rows of 'cat_0'",
        ),
        ({"cat_0:null": np.zeros(9, np.int64)}, "input 'cat_0:null': 9 values; give a BOOL"),
        (
            {"new:null": np.zeros(9, bool)},
            "input 'new:null': 9 values; give a BOOL for each of 0 rows of 'new'",
        ),
    ):
        body, length = with_bytes(arrays | change)
        got = ask(service, INFER, body, {LENGTH: length})
        assert got.status == 400 and says in got.json["error"], got.json


@pytest.mark.parametrize(
    "texts",
    [[], [""], ["", "\0", "a\0b"], ["\u00e4\U0001f426", "x" * 70_000], ["1"] * 300],
    ids=repr,
)
def test_texts_as_bytes(texts: list[str]) -> None:
    data = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    one = v2.Tensor("a", "BYTES", [len(texts)])
    assert v2._from_bytes(one, data) == texts
    for size in {len(texts) - 1, len(texts) + 1} - {-1}:
        with pytest.raises(UserError, match="each after its length; correct them"):
            v2._from_bytes(v2.Tensor("a", "BYTES", [size]), data)
    if data:
        with pytest.raises(UserError, match="each after its length; correct them"):
            v2._from_bytes(one, data[:-1])


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, 5, 3])
def test_lengths_of_texts_that_lie(length: int) -> None:
    data = struct.pack("<I", length) + b"\x03\0\0\0" + struct.pack("<I", 3) + b"abc"
    with pytest.raises(
        UserError, match="15 bytes are not 3 texts, each after its length; correct them"
    ):
        v2._from_bytes(v2.Tensor("a", "BYTES", [3]), data)


def put(key: str, value: Any, number: int = 0) -> Any:
    return lambda told, parts: told["inputs"][number].__setitem__(key, value)


def size(value: Any) -> Any:
    return lambda told, parts: told["inputs"][0]["parameters"].__setitem__(
        "binary_data_size", value
    )


MISTAKES = {
    "a size that lies": (size(7), "input 'user': 7 bytes for 5 values of INT64"),
    "a negative size": (size(-8), "input 'user': binary_data_size -8, and"),
    "a huge size": (size(2**70), "input 'user': binary_data_size 1180591620717411303424"),
    "a size that is no number": (size("40"), "input 'user': binary_data_size '40', and"),
    "a negative shape": (put("shape", [-5]), "input 'user': shape [-5]; give [N] or [N, 1]"),
    "a huge shape": (put("shape", [2**62, 8]), "shape [4611686018427387904, 8]"),
    "no shape": (put("shape", []), "shape []; give [N]"),
    "another shape": (put("shape", [6]), "input 'user': 40 bytes for 6 values"),
    "another type": (put("datatype", "INT32"), "input 'user': 40 bytes for 5 values of INT32"),
    "no type": (put("datatype", "INT65"), "input 'user': datatype 'INT65'; did you mean 'INT64'?"),
    "texts that are none": (put("datatype", "BYTES"), "input 'user': 40 bytes are not 5 texts"),
    "twice": (put("name", "item"), "input 'item': is given twice"),
    "an unknown column": (
        put("name", "usr"),
        "no column 'user'; give null where there is no value",
    ),
    "bytes left over": (
        lambda told, parts: parts.append(b"12"),
        "body: 2 bytes after the last tensor",
    ),
    "bytes that lack": (lambda told, parts: parts.pop(), "bytes are left"),
    "data as well": (put("data", [1] * 5), "input 'user': has data and binary_data_size"),
    "lists that do not add up": (put("shape", [4], 2), "input 'history'"),
    "a list without its lengths": (
        lambda told, parts: (told["inputs"].pop(3), parts.pop(3)),
        "'history:lengths' too",
    ),
    "an unknown output": (
        lambda told, _: told.update(outputs=[{"name": "x"}]),
        "output 'x': the model has no such",
    ),
    "a bad timeout": (
        lambda told, _: told["parameters"].update(timeout="x"),
        "parameters.timeout: 'x'; give micro",
    ),
    "inputs that are none": (lambda told, parts: told.update(inputs={}), "body: Expected `array`"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bodies_that_are_no_request(
    name: str, service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    change, says = MISTAKES[name]
    some = [row | {"history": [1, 2]} for row in rows[:5]]
    body, length = with_bytes(tensors(scorer, some), change)
    got = ask(service, INFER, body, {LENGTH: length})
    assert got.status == 400 and says in got.json["error"] and "\n" not in got.json["error"]


@pytest.mark.parametrize("length", [-1, 10**30, "x", "", "+5", "\u00b2"])
def test_headers_that_lie(
    length: Any, service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    body, _ = with_bytes(tensors(scorer, rows[:5]))
    got = ask(service, INFER, body, {LENGTH: length})
    assert got.status == 400 and "Inference-Header-Content-Length" in got.json["error"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": [1, 2]}, "2 values where its shape says 5"),
        ({"data": [[1, 2]] * 5}, "data is neither 5 values nor 5 lists of one"),
        ({"data": [1.5] * 5}, "1.5 is no INT64"),
        ({"data": [True] * 5}, "True is no INT64"),
        ({"data": [None] * 5}, "None is no INT64"),
        ({"data": [2**70] * 5}, "is no INT64|out of the range of INT64|body: "),
        ({"data": "12345"}, "body: Expected `array | null`"),
        ({"data": None}, "no data; give a list"),
        ({"data": [1] * 5, "datatype": "INT8", "shape": [5, 2]}, "shape"),
        ({"data": [300] * 5, "datatype": "UINT8"}, "a value is out of the range of UINT8"),
    ],
)
def test_data_that_does_not_fit(
    change: Any, says: str, service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    import re

    body = as_json(tensors(scorer, rows[:5]))
    body["inputs"][0] |= change
    got = ask(service, INFER, body)
    assert got.status == 400 and re.search(says, got.json["error"]), got.json


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=6)), min_size=1, max_size=4),
    shift=st.integers(-3, 3),
)
def test_any_bytes_are_scored_or_a_mistake_of_the_user(
    cuts: Any, shift: int, service: Service, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    body, length = with_bytes(tensors(scorer, rows[:3]))
    for at, put in cuts:
        at %= len(body)
        body = body[:at] + put + body[at + len(put) :]
    got = ask(service, INFER, body, {LENGTH: length + (shift if abs(shift) == 3 else 0)})
    assert got.status in (200, 400), got.body
