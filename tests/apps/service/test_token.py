from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.apps.service import token
from sparrow.apps.service.app import Service
from sparrow.core.errors import UserError
from tests.apps.service.asking import ask


def test_a_token_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, want in (
        (b"abc", b"abc"),
        (b"abc\n", b"abc"),
        (b"abc\r\n", b"abc"),
        (b"\xff\xe4", b"\xff\xe4"),
    ):
        path.write_bytes(content)
        assert token.read(path) == want
    for content in (b"", b"\n", b" abc", b"abc\n\n", b"abc\ndef", b"abc def"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="token: holds no token; write it there"):
            token.read(path)
    with pytest.raises(UserError, match=r"absent: cannot read the token \(No such file"):
        token.read(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot read the token"):
        token.read(tmp_path)


def test_callers_without_it_are_refused(service: Service) -> None:
    service.token = b"geheim"
    wrong = (
        None,
        "",
        "geheim",
        "Bearer",
        "Bearer ",
        "Bearer gehei",
        "Bearer geheim2",
        "Basic geheim",
        "Bearer g\xe4",
    )
    for given in wrong:
        headers = {} if given is None else {"Authorization": given}
        for path, body in (
            ("/rank", {}),
            ("/v2/models/model/infer", {}),
            ("/openapi.json", None),
            ("/v2", None),
        ):
            got = ask(service, path, body, headers)
            assert got.status == 401 and got.headers[b"www-authenticate"] == b"Bearer", (
                given,
                path,
            )
            assert "geheim" not in got.json["error"]
    for given in ("Bearer geheim", "bearer geheim", "Bearer  geheim "):
        assert ask(service, "/v2", None, {"Authorization": given}).status == 200
    for path in ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
        assert ask(service, path).status == 200
    service.token = "\u00e4".encode()
    assert ask(service, "/v2", None, {"Authorization": "Bearer \xc3\xa4"}).status == 200
