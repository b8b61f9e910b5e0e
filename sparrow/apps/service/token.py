"""The bearer token that callers have to send (RFC 6750)."""

from __future__ import annotations

import hmac
from pathlib import Path

from sparrow.apps.service.limits import RefusedError
from sparrow.core.errors import UserError


def read(path: str | Path) -> bytes:
    """Returns the token in a file, which is its content without the last end of line.

    Raises:
        UserError: when the file cannot be read, or holds no token.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the token ({error.strerror}); give a file that holds it"
        ) from None
    token = content.removesuffix(b"\n").removesuffix(b"\r")
    if token.split() != [token]:
        raise UserError(f"{path}: holds no token; write it there, in one line without spaces")
    return token


def check(header: bytes, token: bytes | None) -> None:
    """Refuse a caller who has not sent the token, in a time that does not tell how much of it was
    right.

    Args:
        header: the header `Authorization`.
        token: what is to be in it; None for nothing.

    Raises:
        RefusedError: for anything else.
    """
    scheme, _, sent = header.partition(b" ")
    if token is not None and not (
        scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token)
    ):
        raise RefusedError(401, "Authorization: not the token of this service; send `Bearer TOKEN`")
