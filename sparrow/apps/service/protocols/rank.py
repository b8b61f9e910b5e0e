"""`POST /rank`: JSON of a user and her candidates -> JSON of scores."""

from __future__ import annotations

import msgspec
import numpy as np

from sparrow.apps.service.batcher import Answer
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.request import Request, Sources, Value, check_request, decode_body
from sparrow.core.errors import UserError

_LIKE = '{"user": {column: value}, "candidates": {column: [values]}}'
_encode = msgspec.json.Encoder().encode


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """What `/rank` reads.

    user: column -> value. candidates: column -> list of values, or a list of objects. top: so many
    candidates are returned, the best first. deadline_ms: see `Request`.
    """

    candidates: dict[str, list[Value]] | list[dict[str, Value]]
    user: dict[str, Value] = {}
    top: int | None = None
    deadline_ms: float | None = None


_decode = msgspec.json.Decoder(Body).decode


def parse_request(body: bytes, sources: Sources, limits: Limits) -> tuple[Request, int | None]:
    """Returns a request, and how many candidates it wants.

    Args:
        body: JSON.
        sources, limits: see `check_request`.

    Raises:
        UserError: for a body that is no such request.
        RefusedError: see `check_request`.
    """
    content = decode_body(_decode, body, _LIKE)
    if content.top is not None and content.top < 1:
        raise UserError(f"top: {content.top}; give 1 or more, or leave it out")
    columns = (
        _turn(content.candidates) if isinstance(content.candidates, list) else content.candidates
    )
    if content.candidates == []:  # no row says which columns there are
        columns = {name: [] for name in sources.read - content.user.keys()}
    return check_request(content.user, columns, sources, limits, content.deadline_ms), content.top


def _turn(rows: list[dict[str, Value]]) -> dict[str, list[Value]]:
    """Returns rows as columns."""
    names = rows[0].keys() if rows else ()
    for number, row in enumerate(rows):
        if odd := row.keys() ^ names:
            raise UserError(
                f"candidates[{number}]: {min(odd)!r} is in one row and not in another; give null"
                " for none"
            )
    return {name: [row[name] for row in rows] for name in names}


def format_answer(request: Request, top: int | None, answer: Answer) -> bytes:
    """Returns JSON: version, scores by label, and what of the request was missing, unknown or
    ignored.

    With `top`, "candidates" says which ones the scores are of, ordered by the first label; of equal
    ones the earlier.
    """
    scores_NT = answer.scores_NT
    chosen = {}
    if top is not None:
        order = np.argsort(-scores_NT[:, 0], kind="stable")[:top]
        scores_NT = scores_NT[order]
        chosen = {"candidates": order.tolist()}
    labels = answer.version.scorer.labels
    return _encode(
        {
            "version": answer.version.name,
            **chosen,
            "scores": dict(zip(labels, scores_NT.T.tolist(), strict=True)),
            "missing": answer.odd_values.missing,
            "unknown": answer.odd_values.unknown,
            "far": answer.odd_values.far,
            "ignored": request.ignored,
            **({} if answer.users is None else {"users": answer.users}),
        }
    )
