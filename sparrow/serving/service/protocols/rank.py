"""`POST /rank`: JSON of a user and her candidates -> JSON of scores."""

from __future__ import annotations

import msgspec
import numpy as np

from sparrow.core.errors import UserError
from sparrow.serving.service.asked import Asked, Sources, Value, checked, decoded
from sparrow.serving.service.batcher import Answer
from sparrow.serving.service.limits import Limits

_LIKE = '{"user": {column: value}, "candidates": {column: [values]}}'
_encode = msgspec.json.Encoder().encode


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """What `/rank` reads.

    user: column -> value. candidates: column -> list of values, or a list of objects. top: so many candidates are
    returned, the best first. deadline_ms: see `Asked`.
    """

    candidates: dict[str, list[Value]] | list[dict[str, Value]]
    user: dict[str, Value] = {}
    top: int | None = None
    deadline_ms: float | None = None


_decode = msgspec.json.Decoder(Body).decode


def parsed(body: bytes, sources: Sources, limits: Limits) -> tuple[Asked, int | None]:
    """Returns a request, and how many candidates it wants.

    Args:
        body: JSON.
        sources, limits: see `checked`.

    Raises:
        UserError: for a body that is no such request.
        RefusedError: see `checked`.
    """
    made = decoded(_decode, body, _LIKE)
    if made.top is not None and made.top < 1:
        raise UserError(f"top: {made.top}; give 1 or more, or leave it out")
    columns = _turned(made.candidates) if isinstance(made.candidates, list) else made.candidates
    if made.candidates == []:  # no row says which columns there are
        columns = {name: [] for name in sources.read - made.user.keys()}
    return checked(made.user, columns, sources, limits, made.deadline_ms), made.top


def _turned(rows: list[dict[str, Value]]) -> dict[str, list[Value]]:
    """Returns rows as columns."""
    names = rows[0].keys() if rows else ()
    for number, row in enumerate(rows):
        if odd := row.keys() ^ names:
            raise UserError(f"candidates[{number}]: {min(odd)!r} is in one row and not in another; give null for none")
    return {name: [row[name] for row in rows] for name in names}


def written(asked: Asked, top: int | None, answer: Answer) -> bytes:
    """Returns JSON: version, scores by label, and what of the request was missing, unknown or ignored.

    With `top`, "candidates" says which ones the scores are of, ordered by the first label; of equal ones the earlier.
    """
    scores_NT, found = answer.scores_NT, {}
    if top is not None:
        order = np.argsort(-scores_NT[:, 0], kind="stable")[:top]
        scores_NT, found = scores_NT[order], {"candidates": order.tolist()}
    labels = answer.version.scorer.labels
    return _encode(
        {
            "version": answer.version.name,
            **found,
            "scores": dict(zip(labels, scores_NT.T.tolist(), strict=True)),
            "missing": answer.gaps.missing,
            "unknown": answer.gaps.unknown,
            "ignored": asked.ignored,
            **({} if answer.users is None else {"users": answer.users}),
        }
    )
