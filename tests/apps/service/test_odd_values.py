from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.odd_values import count_odd_values, count_read_values
from sparrow.apps.service.request import Request
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Versions
from sparrow.features.schema import Column
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.apps.service.asking import ask, counted, together
from tests.apps.service.test_batcher import OF_USER, request
from tests.data.preparation.coarse import days_of, file_of
from tests.runs import small_run


def test_what_is_missing_or_unknown_is_named(service: Service, rows: list[dict[str, Any]]) -> None:
    """Of each request in a batch. A user's values count once."""
    plain = {
        "item": rows[0]["item"],
        "cat_1": "c1_0",
        "cat_2": "c2_0",
        "num_0": 0.5,
        "num_2": 0.5,
        "tags": ["tag_1"],
    }
    user = {"user": rows[0]["user"], "history": [3], "num_1": 1.0, "cat_0": "c0_0"}
    full = {"user": user, "candidates": [plain] * 3}
    odd = {
        "user": user | {"history": [], "num_1": None, "cat_0": "nobody knows this"},
        "candidates": [
            plain,
            plain | {"item": None, "cat_1": "nor this", "num_0": None, "tags": None},
            plain,
        ],
    }
    whole = request(rows, [0], ())
    got = together(service, [("/rank", one) for one in (whole, full, odd, full, odd)])
    clean, other = got[1].json, got[2].json
    assert clean["missing"] == got[3].json["missing"] == {}
    assert other["missing"] == got[4].json["missing"] == {
        "history": 1, "num_1": 1, "item": 1, "num_0": 1, "tags": 1
    }  # fmt: skip
    assert other["unknown"]["cat_0"] == other["unknown"]["cat_1"] == 1
    assert other["unknown"].keys() - {"cat_0", "cat_1"} == clean["unknown"].keys() - {
        "cat_0",
        "cat_1",
    }
    text = counted(service)
    assert 'sparrow_odd_values_total{column="item",kind="missing"} 2.0' in text and OF_USER


def test_times_far_from_trainings_are_counted(tmp_path: Path) -> None:
    """A user's one and candidates' ones, however they are written, in the answer and in what
    Prometheus reads.
    """
    log = file_of(days_of(2000, 14), tmp_path / "log.parquet")
    data.prepare([log], tmp_path / "data")
    train(small_run(tmp_path / "data", tmp_path / "run", loop=Loop(max_steps=2)))
    export(tmp_path / "run", tmp_path / "model", [log])
    service = Service(Versions(load(tmp_path / "model")), Limits(deadline_ms=60_000), Settings())
    row = {"user_id": 3, "item_id": 4, "price": 0.5}
    try:
        near = ["2026-03-04T10:00:00", 1_772_600_000, "2027-01-01", None, "NA"]
        far = ["1970-01-01", 1_772_600, "2262-01-01T00:00:00Z", 0]
        asked = [
            {"user": {}, "candidates": [row | {"ts": ts} for ts in near + far]},
            {"user": {"ts": far[0]}, "candidates": [row, row]},
            {"user": {"ts": near[0]}, "candidates": [row]},
        ]
        answers = [ask(service, "/rank", one).json for one in asked]
        assert [answer["far"] for answer in answers] == [{"ts": 4}, {"ts": 1}, {}]
        assert answers[0]["missing"] == {"ts": 2}
        text = counted(service)
        assert 'sparrow_odd_values_total{column="ts",kind="far"} 5.0' in text
        assert 'sparrow_read_values_total{column="ts",kind="far"} 11.0' in text
        wrong = ask(service, "/rank", {"user": {"ts": "noon"}, "candidates": [row]})
        assert (
            wrong.status == 400 and "column 'ts', row 0: 'noon' is no time" in wrong.body.decode()
        )
        schema = service.version.scorer.schema
        # does not say when it was
        older = replace(schema, columns=schema.columns | {"ts": Column(kind="time")})
        crossed = service.version.scorer.crossed([({"ts": far[0]}, [row])])
        asked_ = Request(
            user={"ts": far[0]}, candidates={name: [value] for name, value in row.items()}, count=1
        )
        assert count_odd_values(older, crossed, [asked_])[0].far == {} and (
            "far",
            "ts",
        ) not in count_read_values(older, crossed)
    finally:
        service.batcher.close()
