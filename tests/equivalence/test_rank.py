"""rank = score of the crossed rows, for every model: with any columns of users, of one user or of
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow.core import Batch, repeated
from sparrow.core.repeated import Repeated
from sparrow.extensions.blend import model as blend
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms
from sparrow.layers.packed import PackedWeight
from sparrow.losses import probabilities
from sparrow.models import Offset, autoint, din, finalmlp, fm, logistic
from sparrow.serving.requests import Encoder
from tests.models.test_models import MODELS, build, named

CLOSE = 1e-6  # products of other shapes sum in another order
SCHEMA = Schema(
    columns={
        "age": Column(kind="numeric", transform="standard", mean=40.0, std=10.0),
        "income": Column(kind="numeric", transform="log", mean=1.0, std=2.0),
        "price": Column(kind="numeric", transform="none"),
        "item": Column(kind="categorical", table="item"),
        "user": Column(kind="categorical", table="user"),
        "history": Column(kind="list", table="item", pooling="mean"),
        "likes": Column(kind="list", table="user", weights="how", pooling="sum"),
        "click": Column(kind="label"),
    },
    encodings={"item": Encoding(kind="hash", rows=20), "user": Encoding(kind="hash", rows=30)},
    groups={"both": ("user", "history")},  # of the log, beside those that a request makes
)
TRANSFORMS = Transforms(schema=SCHEMA, vocabularies={})
ALL = ("age", "income", "price", "item", "user", "history", "likes", "how")
OF_USER = {
    "none": (),
    "one number": ("age",),
    "one id": ("user",),
    "a weighted list": ("likes", "how"),
    "her columns": ("age", "income", "user", "history", "likes", "how"),
    "all": ALL,
}
WITHOUT_PRODUCTS = logistic.Config | fm.Config  # of inputs: their sums have no weights


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)

    def ids() -> list[str]:
        return [f"i{i}" for i in random.integers(0, 30, random.integers(0, 5))]

    found = []
    for _ in range(count):
        likes = ids()
        numbers = {
            "age": random.normal(40, 10),
            "income": random.exponential(),
            "price": random.normal(),
        }
        single = {"item": f"i{random.integers(30)}", "user": f"u{random.integers(50)}"}
        found.append(
            numbers
            | single
            | {
                "history": ids(),
                "likes": likes,
                "how": [random.random() for _ in likes],
            }
        )
    return found


def asked(
    of_user: Sequence[str], counts: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Users, and their candidates one after the other."""
    users = [{name: row[name] for name in of_user} for row in rows(len(counts), seed=1)]
    own = rows(sum(counts), seed=2)
    return users, [{name: row[name] for name in ALL if name not in of_user} for row in own]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products share what they can, however small they are."""
    monkeypatch.setattr(repeated, "LEAST", 1)
    monkeypatch.setattr(repeated, "COPYING", 0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The multiply-adds of each product."""
    found: list[int] = []
    was = PackedWeight.__call__

    def call(self: PackedWeight, x: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
        found.append(x.shape[0] * self.weight.numel())
        return was(self, x, bias, relu=relu)

    monkeypatch.setattr(PackedWeight, "__call__", call)
    return found


def served(config: Any) -> Offset:
    """A model as it is served, with weights that are not 0."""
    model = Offset(build(config, SCHEMA), SCHEMA).eval().requires_grad_(False)
    torch.manual_seed(1)
    for weight in model.parameters():
        if not weight.any():
            weight.normal_(std=0.1)
    return model


@torch.inference_mode()
def scores(model: Offset, batch: Batch) -> Tensor:
    found = probabilities(model(batch))
    assert type(found) is Tensor  # what a batch knows of itself does not leave the model
    return found


def assert_ranks(model: Offset, of_user: Sequence[str], counts: Sequence[int]) -> None:
    users, own = asked(of_user, counts)
    user_B = np.repeat(np.arange(len(users)), counts)
    encoder = Encoder(TRANSFORMS)
    crossed = encoder.batch([users[u] | row for u, row in zip(user_B, own, strict=True)])
    found = scores(model, encoder.crossed(users, own, user_B))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, scores(model, crossed), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("of_user", OF_USER.values(), ids=OF_USER)
@pytest.mark.parametrize("config", MODELS, ids=named)
def test_ranked_is_scored(config: Any, of_user: Sequence[str], always: None) -> None:
    model = served(config)
    for counts in ([12], [1], [0], [5, 1, 9, 0], [0, 0]):
        assert_ranks(model, of_user, counts)


# members of a blend scale what they share, each in its own way
@pytest.mark.parametrize(
    "config", [c for c in MODELS if not isinstance(c, blend.Config)], ids=named
)
def test_products_of_what_is_shared_run_once(config: Any, always: None, counted: list[int]) -> None:
    """Of 40 rows of two users. All products of all inputs, when all of them are the users'."""
    model, done = served(config), {}
    for name in ("her columns", "all"):
        for way in (False, True):
            users, own = asked(OF_USER[name], [20, 20])
            user_B = np.repeat(np.arange(2), 20)
            batch = Encoder(TRANSFORMS).crossed(users, own, user_B)
            if not way:
                # which nobody knows anything of
                batch = Batch(dense_BC=batch.dense_BC.clone(), ids=batch.ids)
            counted.clear()
            scores(model, batch)
            done[name, way] = sum(counted)
    if isinstance(config, WITHOUT_PRODUCTS) or (
        isinstance(config, autoint.Config) and not config.deep
    ):
        return
    assert done["her columns", True] < done["her columns", False]
    assert done["all", True] < done["her columns", True] or isinstance(
        config, din.Config
    )  # whose weights depend on both


def test_a_whole_mlp_of_users_runs_once(always: None, counted: list[int]) -> None:
    """And a gate on what is known of them."""
    config = finalmlp.Config(dim=4, first=(16,), second=(8,), gates=(8, 7), first_context=("user",))
    users, own = asked(OF_USER["one id"], [20, 20])
    scores(served(config), Encoder(TRANSFORMS).crossed(users, own, np.repeat(np.arange(2), 20)))
    assert {2 * 4 * 8, 2 * 8 * 7} <= set(counted)


def test_a_row_is_scored_the_same_beside_strangers(always: None) -> None:
    """Alone, among others of its user, and stacked with those of other users."""
    model, encoder = served(MODELS[3]), Encoder(TRANSFORMS)
    users, own = asked(OF_USER["her columns"], [30, 40])
    user_B = np.repeat(np.arange(2), [30, 40])
    together = scores(model, encoder.crossed(users, own, user_B))
    of_first = scores(model, encoder.crossed(users[:1], own[:30], user_B[:30]))
    alone = scores(model, encoder.crossed(users[:1], own[7:8], user_B[:1]))
    torch.testing.assert_close(together[:30], of_first, rtol=0, atol=CLOSE)
    torch.testing.assert_close(together[7:8], alone, rtol=0, atol=CLOSE)


def test_where_little_is_saved_nothing_is_done(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "COPYING", 0)
    users, own = asked(OF_USER["her columns"], [20])
    batch = Encoder(TRANSFORMS).crossed(users, own, np.zeros(20, np.int64))
    assert isinstance(batch.dense_BC, Repeated)
    scores(served(MODELS[3]), batch)
    assert all(count % 20 == 0 for count in counted)
    assert batch.dense_BC.users.saved > 0  # and it is known what it would have been
