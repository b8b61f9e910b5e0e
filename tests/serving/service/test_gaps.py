from __future__ import annotations

from typing import Any

from sparrow.serving.service.app import Service
from tests.serving.service.asking import counted, together
from tests.serving.service.test_batcher import OF_USER, request


def test_what_is_missing_or_unknown_is_named(service: Service, rows: list[dict[str, Any]]) -> None:
    """Of each request in a batch. A user's values count once."""
    plain = {"item": rows[0]["item"], "cat_1": "c1_0", "cat_2": "c2_0", "num_0": 0.5, "num_2": 0.5, "tags": ["tag_1"]}
    user = {"user": rows[0]["user"], "history": [3], "num_1": 1.0, "cat_0": "c0_0"}
    full = {"user": user, "candidates": [plain] * 3}
    odd = {
        "user": user | {"history": [], "num_1": None, "cat_0": "nobody knows this"},
        "candidates": [plain, plain | {"item": None, "cat_1": "nor this", "num_0": None, "tags": None}, plain],
    }
    whole = request(rows, [0], ())
    got = together(service, [("/rank", one) for one in (whole, full, odd, full, odd)])
    clean, other = got[1].json, got[2].json
    assert clean["missing"] == got[3].json["missing"] == {}
    assert other["missing"] == got[4].json["missing"] == {
        "history": 1, "num_1": 1, "item": 1, "num_0": 1, "tags": 1
    }  # fmt: skip
    assert other["unknown"]["cat_0"] == other["unknown"]["cat_1"] == 1
    assert other["unknown"].keys() - {"cat_0", "cat_1"} == clean["unknown"].keys() - {"cat_0", "cat_1"}
    text = counted(service)
    assert 'sparrow_odd_values_total{column="item",kind="missing"} 2.0' in text and OF_USER
