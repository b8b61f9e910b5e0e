from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.parser import text_string_to_metric_families

from sparrow.apps.service.app import Service
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.scrape import LEAST, Scrape, psi, worker_registry
from sparrow.apps.service.served_log import ServedLog
from sparrow.apps.service.versions import Model
from sparrow.serving import Scorer, load
from tests.apps.service.asking import ask
from tests.apps.service.test_batcher import request

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "sparrow.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: bytes) -> Samples:
    """(name, sorted labels) -> value, as Prometheus understands the text."""
    families = text_string_to_metric_families(text.decode())
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def scraped(service: Service) -> Samples:
    """What is told now of a service that is one process."""
    if not hasattr(service, "scrape"):
        service.scrape = Scrape(service.metrics.registry)
        service.scrape.serves(
            **service.version.description, folder=service.version.scorer.folder.path
        )
    service.metrics.flush()
    return read(service.scrape.text())


def swap(service: Service, folder: Path) -> None:
    """As the supervisor does it."""
    scraped(service)
    service.versions.flip(Model((str(folder),)))
    service.metrics.flush()
    service.scrape.serves(**service.version.description, folder=folder)
    service.metrics.swaps.labels("done").inc()


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["sparrow_" + name, tuple(sorted(labels.items()))]


# -- the index -------------------------------------------------------------------------------------


def histogram(scores: Any) -> list[float]:
    found: list[float] = np.histogram(scores, 50, (0, 1))[0].tolist()
    return found


def test_the_index_of_the_same_and_of_shifted_scores() -> None:
    random = np.random.default_rng(0)
    training = histogram(random.beta(2, 20, 100_000))
    bins = (np.arange(50) + 0.5) / 50
    same = histogram(random.choice(bins, 10_000, p=np.array(training) / sum(training)))
    assert 0 <= psi(training, same) < 0.01
    assert psi(training, training) == pytest.approx(0, abs=1e-6)
    for shifted in (
        random.beta(4, 20, 10_000),
        random.beta(1, 40, 10_000),
        np.full(10_000, 0.99),
        np.zeros(10_000),
    ):
        assert psi(training, histogram(shifted)) > 0.25


def test_the_index_by_hand() -> None:
    """Ten bins of equal shares are the groups themselves."""
    p, q = [100.0] * 10, [190.0, 10.0, *[100.0] * 8]
    by_hand = sum(
        (b - a) * np.log(b / a) for a, b in zip([0.1] * 10, [0.19, 0.01, *[0.1] * 8], strict=True)
    )
    assert psi(p, q) == pytest.approx(by_hand, rel=0.05)  # half a score is added to each
    assert psi([100 * x for x in p], [100 * x for x in q]) == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize("training", [[0] * 50, [1000, *[0] * 49], [*[0] * 49, 1000]])
def test_the_index_of_odd_histograms_is_a_number(training: list[int]) -> None:
    for served in (training, [0] * 50, [20] * 50):
        assert np.isfinite(psi(training, served))
    assert psi(training, training) == pytest.approx(0, abs=1e-9)


# -- one process -----------------------------------------------------------------------------------


def test_what_a_scrape_computes(
    service: Service, scorer: Scorer, rows: list[dict[str, Any]], models: Path
) -> None:
    card = json.loads((scorer.folder.path / "card.json").read_text())["training"]
    ask(service, "/rank", request(rows, [0, 1]))
    first = scraped(service)
    assert (
        value(first, "training_share", kind="missing", column="num_0")
        == card["features"]["num_0"]["missing"]
        > 0
    )
    assert (
        value(first, "training_share", kind="unknown", column="cat_2")
        == card["features"]["cat_2"]["unknown"]
        > 0
    )
    assert not any("num_0:missing" in str(key) for key in first)
    assert np.isnan(value(first, "score_psi", label="label"))  # too few scores
    trained = [
        value(first, "training_scores", label="label", bin=f"{end / 50:g}") for end in range(1, 51)
    ]
    assert trained == card["scores"]["label"]

    many = request(rows, list(range(100)))
    many["candidates"] *= LEAST // 100
    got = ask(service, "/rank", many)
    again = scraped(service)
    scores = got.json["scores"]["label"]
    counted = [
        ("sparrow_scores_total", (("bin", f"{end / 50:g}"), ("label", "label")))
        for end in range(1, 51)
    ]
    served, counted = (
        [again.get(key, 0) for key in counted],
        [key for key in counted if key in again],
    )
    assert sum(served) == len(scores) + 2
    assert np.abs(np.array(served) - histogram(scores)).sum() == 2
    assert value(again, "score_psi", label="label") == pytest.approx(psi(trained, served))

    swap(service, models / "two")
    after = scraped(service)
    named = [dict(labels)["version"] for name, labels in after if name == "sparrow_version_info"]
    assert named == [load(models / "two").folder.digest]
    # what the old one scored does not count
    assert np.isnan(value(after, "score_psi", label="label"))
    assert {key: of for key, of in after.items() if key in counted} == {
        key: again[key] for key in counted
    }


def test_shares_have_their_denominators(service: Service, rows: list[dict[str, Any]]) -> None:
    """A user's value counts once. Of a list each id counts."""
    plain = {
        "item": 3,
        "cat_1": "c1_0",
        "cat_2": "c2_0",
        "num_0": 0.5,
        "num_2": 0.5,
        "tags": ["tag_1"],
    }
    user = {"user": 7, "history": [3, 4, 10**12], "num_1": None, "cat_0": None}
    odd = plain | {"item": None, "tags": ["tag_1", "who knows"], "num_0": None}
    ask(service, "/rank", {"user": user, "candidates": [plain, odd, plain | {"tags": []}]})
    found = scraped(service)
    for kind, column, count, of in (
        ("missing", "item", 1, 3),
        ("missing", "num_0", 1, 3),
        ("missing", "num_1", 1, 1),
        ("missing", "cat_0", 1, 1),
        ("missing", "tags", 1, 3),
        ("unknown", "tags", 1, 3),
        ("unknown", "history", 1, 3),
    ):
        assert value(found, "odd_values_total", kind=kind, column=column) == count, column
        assert value(found, "read_values_total", kind=kind, column=column) == of, column
    odd_ones = [labels for name, labels in found if name == "sparrow_odd_values_total"]
    assert all(("sparrow_read_values_total", labels) in found for labels in odd_ones)


def test_a_folder_that_has_gone_tells_nothing_of_training(tmp_path: Path) -> None:
    scrape = Scrape(Metrics().registry)
    assert b"version_info" not in scrape.text()
    scrape.serves("v", "dlrm", 2, tmp_path)
    found = read(scrape.text())
    assert value(found, "version_info", version="v", model="dlrm", step="2") == 1
    assert not [name for name, _ in found if "training" in name or "psi" in name]


def test_labels_are_never_of_a_request(service: Service, rows: list[dict[str, Any]]) -> None:
    """Whatever comes, there are no more series."""

    def ask_all(word: str) -> None:
        one = request(rows, [0, 1])
        ask(
            service,
            "/rank",
            one | {"user": one["user"] | {"cat_0": word}},
            {"X-Request-Id": word, "traceparent": word},
        )
        ask(service, "/rank", one | {"user": one["user"] | {word: 1}})
        for path in (f"/{word}", f"/v2/models/{word}", f"/v2/models/model/versions/{word}/infer"):
            ask(service, path)
            ask(
                service,
                path,
                {"inputs": [{"name": word, "datatype": word, "shape": [1], "data": [word]}]},
            )

    ask_all("first")
    before = scraped(service).keys()
    for number in range(5):
        ask_all(f"other{number}")
    after = scraped(service).keys()
    assert {key for key in after - before if "scores" not in key[0]} == set()
    assert len({key for key in after if key[0] == "sparrow_scores_total"}) <= 50


# -- several processes -----------------------------------------------------------------------------

WORKER = """
import os, sys
import numpy as np
from sparrow.apps.service.metrics import Metrics
os.fork()
metrics = Metrics()
metrics.queue.set(3)
metrics.requests.labels("/rank", "200").inc(10)
metrics.stages["read"].observe(0.01)
metrics.odd.add({("missing", "item"): 2})
metrics.read.add({("missing", "item"): 8})
metrics.count_scores(("label",), [np.full((600, 1), 0.03, np.float32), np.array([[1.0]], np.float32)])
metrics.flush()
os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write to this pipe
sys.stdin.read()
"""


@pytest.mark.multi
def test_workers_are_joined_and_a_dead_one_keeps_its_counters(
    tmp_path: Path, scorer: Scorer
) -> None:
    both = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        text=True,
        start_new_session=True,
    )
    try:
        assert both.stdout is not None
        pids = [int(both.stdout.readline()) for _ in range(2)]
        scrape = Scrape(worker_registry(tmp_path))
        found = read(scrape.text())
        assert value(found, "requests_total", route="/rank", status="200") == 20
        assert value(found, "queue_requests") == 6
        assert value(found, "stage_seconds_count", stage="read") == 2
        assert value(found, "stage_seconds_bucket", stage="read", le="0.005") == 0
        assert value(found, "odd_values_total", kind="missing", column="item") == 4
        assert value(found, "read_values_total", kind="missing", column="item") == 16
        assert value(found, "scores_total", label="label", bin="0.04") == 1200
        assert value(found, "scores_total", label="label", bin="1") == 2
        scrape.serves("v", "dlrm", 2, scorer.folder.path)
        assert np.isnan(value(read(scrape.text()), "score_psi", label="label"))

        os.kill(pids[0], signal.SIGKILL)
        mark_process_dead(pids[0], str(tmp_path))
        found = read(scrape.text())
        assert value(found, "queue_requests") == 3
        assert value(found, "requests_total", route="/rank", status="200") == 20
        assert value(found, "version_info", version="v", model="dlrm", step="2") == 1
    finally:
        os.killpg(both.pid, signal.SIGKILL)
        both.communicate()


# -- the dashboard ---------------------------------------------------------------------------------

WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "offset",
    "bool",
    "and",
    "or",
    "unless",
}


def names(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels of a query."""
    labels: set[str] = set()

    def of_labels(found: re.Match[str]) -> str:
        labels.update(re.findall(r"(\w+)\s*(?=[=!,)]|$)", found[1]))
        return " "

    plain = re.sub(r'"[^"]*"', '""', expression)
    plain = re.sub(r"\[[^\]]*\]", "", plain)
    plain = re.sub(r"\{([^}]*)\}", of_labels, plain)
    plain = re.sub(
        r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*\))", of_labels, plain
    )
    metrics = set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", plain)) - WORDS
    return metrics, labels


def test_names_of_a_query() -> None:
    query = (
        'sum by (le, stage) (rate(a_bucket{kind="x", b!~"y z"}[5m])) / ignoring(c) d_total offset'
        " 5m > 0.5"
    )
    assert names(query.replace(" offset 5m", "")) == (
        {"a_bucket", "d_total"},
        {"le", "stage", "kind", "b", "c"},
    )


def test_the_dashboard_asks_for_what_is_there(
    service: Service, rows: list[dict[str, Any]], models: Path, tmp_path: Path
) -> None:
    service.served = ServedLog(tmp_path, 1.0, service.metrics)
    ask(service, "/rank", request(rows, list(range(50))))
    swap(service, models / "two")
    service.served.close()
    service.metrics.lookups.labels("items", "found").inc()  # as a service with stores does
    service.metrics.lookup_s.labels("users").observe(1e-3)
    there: dict[str, set[str]] = {}
    for name, labels in scraped(service):
        there.setdefault(name, set()).update(dict(labels))
    told = set()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for panel in panels:
        for target in panel["targets"]:
            metrics, labels = names(target["expr"])
            labels |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert metrics, panel["title"]
            for metric in metrics:
                assert metric in there, f"{panel['title']}: {metric}"
                assert labels <= there[metric], (
                    f"{panel['title']}: {labels - there[metric]} of {metric}"
                )
            told |= metrics
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {
        name for name in there if not name.endswith(("_created", "_bucket", "_sum", "_count"))
    } <= told
    page = (DASHBOARD.parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page.partition("### What it tells")[2].partition("\n\nShares")[0]
    named = {
        f"sparrow_{name}"
        for row in re.findall(r"^\| (`.*?`) \|", table, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert {
        re.sub("_(bucket|sum|count)$", "", name) for name in there if not name.endswith("_created")
    } == named
