"""The page in headless Chromium, on a server."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sparrow.serving import Scorer

pytest.importorskip("starlette", reason="needs the extra [serve]")
pytest.importorskip("playwright", reason="needs playwright, of the extra [dev]")

import uvicorn
from playwright.sync_api import sync_playwright

from sparrow.apps.service.app import Service, app
from sparrow.apps.service.limits import Limits
from tests.apps.service.test_batcher import request
from tests.apps.service.test_explain import two_labels

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium is installed, such as Debian's package"
    ),
]
HOSTILE = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'
assert two_labels  # a fixture


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        # a container's root has none
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def at() -> Iterator[Callable[[Service], str]]:
    """Serves at an address."""
    running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def at(service: Service) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app(service), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.append((server, thread, listening))
        return f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield at
    for server, thread, listening in running:
        server.should_exit = True
        thread.join()
        listening.close()


class Page:
    """The page in a window."""

    def __init__(self, browser: Any, address: str, **window: Any) -> None:
        self.address, self.asked, self.errors = address, list[str](), list[str]()
        self.tab = browser.new_page(**window)
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.goto(address)

    def score(self, asked: Any) -> None:
        self.tab.fill("#request", asked if isinstance(asked, str) else json.dumps(asked))
        self.tab.click("#rank")
        self.settled()

    def settled(self) -> None:
        self.tab.wait_for_selector("body[aria-busy=false]", timeout=60_000)

    def texts(self, selector: str) -> list[str]:
        return list(self.tab.locator(selector).all_inner_texts())

    def error(self) -> str:
        return str(self.tab.inner_text("#error")) if self.tab.is_visible("#error") else ""

    def marks(self) -> dict[str, list[str]]:
        """What is marked in each feature."""
        rows = self.tab.locator("#features tbody tr").all()
        return {
            row.locator("th").inner_text(): row.locator(".mark").all_inner_texts() for row in rows
        }


@pytest.fixture
def opened(browser: Any, at: Callable[[Service], str]) -> Iterator[Callable[..., Page]]:
    """Opens the page of a service. At its end nothing has gone wrong in it, or gone elsewhere."""
    pages: list[Page] = []

    def opened(service: Service, **window: Any) -> Page:
        pages.append(Page(browser, at(service), **window))
        return pages[-1]

    yield opened
    for page in pages:
        page.tab.close()
        assert (
            page.errors == []
            and [url for url in page.asked if not url.startswith(page.address)] == []
        )


def test_an_example_is_loaded_ranked_and_explained(
    opened: Callable[..., Page], service: Service, scorer: Scorer
) -> None:
    page, rows = opened(service), scorer.golden_rows()[1][100:108]
    page.tab.fill("#row", "100")
    page.tab.click("#take")
    page.tab.wait_for_selector("#features tbody tr")
    page.settled()
    order = np.argsort(-scorer.score(rows)[:, 0], kind="stable").tolist()
    assert page.texts("#ranked tbody button") == list(map(str, order)) and not page.error()
    scores = list(map(float, page.texts("#ranked tbody .score")))
    assert np.abs(np.array(scores) - scorer.score(rows)[order, 0]).max() <= 1e-4
    third = order[2]
    page.tab.click("#ranked tbody tr:nth-child(3) button")
    page.settled()
    assert page.texts("#which")[0].startswith(f"Candidate {third}: label ")
    assert page.texts("#ranked tr[aria-current] button") == [str(third)]
    names = page.texts("#features tbody th")
    without = {name: float(scorer.score([rows[third] | {name: None}])[0, 0]) for name in names}
    for name, text in zip(names, page.texts("#features td.number"), strict=True):
        assert abs(float(text) - without[name]) <= 1e-4, name
    changes = [abs(without[name] - float(scorer.score([rows[third]])[0, 0])) for name in names]
    assert (
        np.all(np.diff(changes) <= 1e-6)
        and f"With {names[0]} missing the score would be" in page.texts("#most")[0]
    )


def test_what_is_odd_is_marked(
    opened: Callable[..., Page], serve: Callable[..., Service], two_labels: Scorer
) -> None:
    row = {
        "id": 7,
        "x": 0.0,
        "price": 1.0,
        "seen": "i1 i2",
        "weighted": [1, 2],
        "w": [1, 2],
        "age": 0.5,
    }
    odd = {
        "id": 10**9,
        "x": None,
        "price": 1e9,
        "seen": "",
        "weighted": [1, 2, 3, 10**9, 5],
        "w": [1, 2, 3, 4, 5],
    }
    page = opened(serve(of=two_labels))
    page.score(
        {"user": {"age": None}, "candidates": {name: [row[name], odd[name]] for name in odd}}
    )
    page.tab.click("#ranked tbody tr[data-candidate='1'] button")
    page.settled()
    (clipped,) = page.marks().pop("price")
    low, high = two_labels.schema.columns["price"].low, two_labels.schema.columns["price"].high
    assert clipped == f"clipped to {low:.6g} … {high:.6g}"
    assert page.marks() | {"price": []} == {
        "id": ["unknown"], "x": ["missing"], "price": [], "seen": ["missing"],
        "weighted": ["1 of 3 unknown", "the first 2 cut off"], "age": ["missing"],
    }  # fmt: skip
    page.tab.click("#ranked tbody tr[data-candidate='0'] button")
    page.settled()
    assert {name: marks for name, marks in page.marks().items() if marks} == {"age": ["missing"]}


def test_a_label_is_chosen(
    opened: Callable[..., Page], serve: Callable[..., Service], two_labels: Scorer
) -> None:
    page, rows = opened(serve(of=two_labels)), two_labels.golden_rows()[1][:20]
    page.score({"candidates": rows, "top": 12})
    assert page.texts("#label option") == list(two_labels.labels)
    scores = two_labels.score(rows)
    top = np.argsort(-scores[:, 0], kind="stable")[:12]
    for label in (1, 0):
        page.tab.select_option("#label", two_labels.labels[label])
        found = list(map(int, page.texts("#ranked tbody button")))
        assert set(found) == set(top.tolist()) and np.all(np.diff(scores[found, label]) <= 1e-6)
        assert f": {two_labels.labels[label]} " in page.texts("#which")[0]


def test_values_are_text_whatever_they_say(
    opened: Callable[..., Page], serve: Callable[..., Service], rows: list[dict[str, Any]]
) -> None:
    page, one = opened(serve(Limits(deadline_ms=60_000, extra="ignore"))), request(rows, [0, 1])
    long = {"cat_1": HOSTILE, "tags": [HOSTILE, "tag " * 3_000], HOSTILE: "x"}
    page.score(
        {
            "user": one["user"] | {"cat_0": HOSTILE, "tags": [HOSTILE] * 9},
            "candidates": [
                {name: value for name, value in (row | long).items() if name not in one["user"]}
                for row in one["candidates"]
            ],
        }
    )
    assert not page.error() and HOSTILE in page.texts("#found")[0]
    assert page.texts("#features tr:has(th:text-is('cat_1')) td")[0].strip() == HOSTILE
    page.score(HOSTILE)
    assert page.error().startswith("400: body: ")
    assert page.tab.locator("main img, main script").count() == 0
    page.tab.evaluate(
        "html => { document.querySelector('main').innerHTML += html; }", HOSTILE
    )  # what the header forbids
    page.tab.wait_for_timeout(200)
    assert page.tab.evaluate("window.hit") is None
    outside = "fetch('http://127.0.0.2/').then(() => 'sent', error => String(error))"
    assert "Failed to fetch" in page.tab.evaluate(outside)


def test_errors_are_shown_as_they_are(
    opened: Callable[..., Page], serve: Callable[..., Service], rows: list[dict[str, Any]]
) -> None:
    service = serve()
    page, one = opened(service), request(rows, [0, 1])
    for asked in ("", "no json", {"user": {}, "candidates": [{"itme": 1}]}, one | {"top": 0}):
        page.score(asked)
        assert page.error().startswith("400: ") and not page.tab.is_visible("#ranked")
    assert page.error() == "400: top: 0; give 1 or more, or leave it out"
    page.score({"user": {}, "candidates": {name: [] for name in rows[0]}})
    assert not page.error() and page.texts("#found") == ["There are no candidates."]
    page.tab.fill("#row", "999")
    page.tab.click("#take")
    page.settled()
    assert page.error() == "404: row 999: 256 are kept with the model; the first one is 0"
    page.score(one)
    assert not page.error() and page.tab.is_visible("#features")
    page.tab.context.set_offline(True)
    page.score(one)
    assert page.error() == "The service does not answer. Is it still running?"


def test_a_token_is_sent_and_asked_for(
    opened: Callable[..., Page], service: Service, rows: list[dict[str, Any]]
) -> None:
    page, seen = opened(service), []

    def answered(route: Any) -> None:
        seen.append(route.request.headers.get("authorization"))
        if seen[-1] == "Bearer s3cret":
            route.continue_()
        else:
            route.fulfill(status=401, content_type="application/json", body='{"error": "no token"}')

    page.tab.route("**/rank", answered)
    page.score(request(rows, [0, 1]))
    assert page.error() == "401: no token" and page.tab.is_visible("#token")
    page.tab.fill("#token", "s3cret")
    page.score(request(rows, [0, 1]))
    assert not page.error() and seen == [None, "Bearer s3cret"]
    assert (
        page.tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")
        == 0
    )


def test_large_integers_keep_their_digits(
    opened: Callable[..., Page], service: Service, rows: list[dict[str, Any]]
) -> None:
    page, one = opened(service), request(rows, [0, 1])
    one["candidates"][0]["item"] = 2**53 + 1
    page.score(one)
    page.tab.click("#ranked tbody tr[data-candidate='0'] button")
    page.settled()
    assert page.texts("#features tr:has(th:text-is('item')) td")[0].strip() == str(2**53 + 1)


CONTRAST = """() => {
  const channel = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * channel(x / 255), 0);
  const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), e.tagName + '.' + e.className]);
  }
  return found;
}"""


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1200),
        ("dark", 320),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("light", 320), ("dark", 1200))),
    ],
)
def test_it_is_readable_and_fits(
    scheme: str,
    width: int,
    opened: Callable[..., Page],
    service: Service,
    rows: list[dict[str, Any]],
) -> None:
    """Contrast is that of WCAG 2, level AA: 4.5."""
    page = opened(service, color_scheme=scheme, viewport={"width": width, "height": 700})
    one = request(rows, [0, 1])
    one["user"] |= {"cat_0": "x" * 500, "history": list(range(300))}
    page.score(one | {"candidates": [row | {"item": None} for row in one["candidates"]]})
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert page.tab.locator("#features .mark").count() and page.tab.locator(".up").count()
    found = page.tab.evaluate(CONTRAST)
    assert len(found) > 50 and min(found)[0] >= 4.5, min(found)
    page.score("")
    assert min(page.tab.evaluate(CONTRAST))[0] >= 4.5
