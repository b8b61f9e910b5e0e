"""Requests to rank candidates, as the protocols of services write them, and what their answers
say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from open_loop import Outcome, http

from sparrow.serving import Scorer

V2 = "/v2/models/model/infer"
LENGTHS = ":lengths"


class Asked(NamedTuple):
    """A user's columns, those of her candidates, and the scores that they have, float32 [N]."""

    user: Mapping[str, Any]
    candidates: Mapping[str, list[Any]]
    want_N: Any


class Told(NamedTuple):
    """What an answer says. version: of the model, empty where the protocol has none."""

    version: str
    scores_N: Any


class Protocol(NamedTuple):
    """request: a number and what is asked -> a whole request of HTTP. told: a body -> what it
    says.
    """

    request: Callable[[int, Asked], bytes]
    told: Callable[[bytes], Told]


def of_user(columns: Sequence[str]) -> set[str]:
    """Returns the columns that are the user's: half of those of a generated log."""
    found = {"user", "history"}
    for kind in ("num_", "cat_"):
        same = [name for name in columns if name.startswith(kind)]
        found |= set(same[: len(same) // 2])
    return found


def asked(scorer: Scorer, rows: Sequence[Mapping[str, Any]], size: int, count: int) -> list[Asked]:
    """Returns requests of `size` candidates, each with the scores that the scorer gives to it
    alone.
    """
    found, users = [], of_user(scorer.encoder.sources)
    for first in np.linspace(0, len(rows) - size, count).astype(int):
        user = {name: value for name, value in rows[first].items() if name in users}
        candidates = {
            name: [row[name] for row in rows[first : first + size]]
            for name in rows[0]
            if name not in users
        }
        found.append(Asked(user, candidates, scorer.rank(user, candidates)[:, 0]))
    return found


# -- protocols -------------------------------------------------------------------------------------


def _rank(number: int, one: Asked) -> bytes:
    return http("/rank", json.dumps({"user": one.user, "candidates": one.candidates}).encode())


def _told_rank(body: bytes) -> Told:
    told = json.loads(body)
    scores = told["scores"]
    return Told(
        told.get("version", ""), np.array(scores["label"] if isinstance(scores, dict) else scores)
    )


def _v2(is_binary: bool) -> Callable[[int, Asked], bytes]:
    def request(number: int, one: Asked) -> bytes:
        import tritonclient.http as triton

        inputs = []
        for name, values in tensors(
            {name: [value] for name, value in one.user.items()} | dict(one.candidates)
        ).items():
            kind = {"O": "BYTES", "i": "INT64", "f": "FP32"}[values.dtype.kind]
            inputs.append(triton.InferInput(name, values.shape, kind))
            inputs[-1].set_data_from_numpy(values, binary_data=is_binary)
        outputs = [triton.InferRequestedOutput("label", binary_data=is_binary)]
        make = triton.InferenceServerClient.generate_request_body  # a client's own bytes
        body, length = make(inputs, outputs=outputs, request_id=str(number))
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        return http(
            V2,
            body,
            headers | ({"Content-Type": "application/octet-stream"} if length is not None else {}),
        )

    return request


def tensors(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Returns columns as arrays of one axis. A column of lists is two, the values of all and their
    lengths.
    """
    found = {}
    for name, values in columns.items():
        if isinstance(values[0], list):
            found[name + LENGTHS] = np.array([len(one) for one in values])
            values = [value for one in values for value in one]
        array = np.array(values)
        found[name] = array.astype({"U": object, "f": np.float32, "i": np.int64}[array.dtype.kind])
    return found


def _told_v2(body: bytes) -> Told:
    told, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    (output,) = told["outputs"]
    scores = output["data"] if "data" in output else np.frombuffer(body[end:], np.float32)
    return Told(told.get("model_version") or "", np.array(scores).reshape(-1))


PROTOCOLS = {
    "json": Protocol(_rank, _told_rank),
    "v2 json": Protocol(_v2(is_binary=False), _told_v2),
    "v2 binary": Protocol(_v2(is_binary=True), _told_v2),
}


def apart(one: Asked, got: Told) -> float:
    """Returns how far the scores of an answer lie from those that are wanted, at most; infinite for
    another number.
    """
    return (
        float(np.abs(got.scores_N - one.want_N).max())
        if got.scores_N.shape == one.want_N.shape
        else np.inf
    )


def check(
    outcome: Outcome,
    wants: Mapping[str, Sequence[Asked]],
    told: Callable[[bytes], Told],
    close: float,
) -> None:
    """Compare every score. An answer's scores are to be those of the version that it names.

    Args:
        outcome: of a load.
        wants: version -> what was asked, in the order of the load's requests. The name "" is for
            any version.
        told: what an answer's body says.
        close: how far scores may lie apart.

    Raises:
        AssertionError: when one is wrong.
    """
    for which, body in outcome.answers:
        got = told(body)
        far = apart((wants[""] if "" in wants else wants[got.version])[which], got)
        assert far <= close, f"request {which}: scores lie {far} apart (version={got.version!r})"
