"""The precision of a run: how its products are computed, and the type of what stands between
them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparrow.core.config import from_dict
from sparrow.core.errors import UserError, suggest
from sparrow.core.plain import plain
from sparrow.layers.precisions import PRECISIONS, RECIPES, Scheme, Way

Weights = Literal["fp32", "bf16", "bf16-stochastic", "split"]
AUTO, AUTO_FILE = "auto", "auto.toml"  # what it chose, in the run's folder
PLAIN = ("fp32", AUTO)  # without recipes of sites, these change no product


def precision_names() -> list[str]:
    """Returns the precisions that have a name, sorted."""
    return sorted({"fp32", *PRECISIONS.names()} - {RECIPES})


@dataclass(frozen=True)
class Precision:
    """In which formats matrix products are computed.

    name: fp32, bf16, bf16-truncate, fp8, fp8-rowwise, fp8-rowwise-gw, mxfp8, mxfp6, mxfp4, mxint8,
    mx9, mx6 or mx4, for all sites that `sites` does not name; or a recipe file, NAME.toml; or auto,
    which `sparrow train` replaces by a recipe for model and machine. See docs/precision.md. sites:
    pattern -> the recipe of the sites whose names match it, such as "cross.*"; of several patterns
    the last one counts. weights: what dense weights are between steps: "fp32"; "bf16", rounded to
    the nearest, or "bf16-stochastic"; or "split", whose low halves the optimizer keeps.
    """

    name: str = "fp32"
    sites: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = "fp32"

    def __post_init__(self) -> None:
        if self.name not in PLAIN and self.name not in (names := precision_names()):
            remedy = f"{suggest(self.name, names)}; or name a recipe file, NAME.toml"
            raise UserError(f"name: there is no precision {self.name!r}{remedy}")
        if self.sites:
            object.__setattr__(self, "sites", PRECISIONS.module(RECIPES).read_recipes(self.sites))

    def __eq__(self, other: object) -> bool:
        """Whether each site has the same recipe: the order of patterns says which of several
        counts.
        """
        if not isinstance(other, Precision):
            return NotImplemented
        return (
            self.name == other.name
            and self.weights == other.weights
            and list(self.sites.items()) == list(other.sites.items())
        )

    @property
    def is_plain(self) -> bool:
        """Whether it changes no product; "auto" is nothing yet."""
        return self.name in PLAIN and not self.sites

    def scheme(self, device: torch.device) -> Scheme | None:
        """Returns how products are computed on a device; None where they are computed as they
        stand.
        """
        if self.is_plain:
            return None
        member = PRECISIONS.module(RECIPES if self.sites else self.name)
        scheme: Scheme = member.scheme(self, device)
        return scheme

    @property
    def in_words(self) -> str:
        """Its name, sites and weights in words."""
        sites = f" with {len(self.sites)} patterns of sites" if self.sites else ""
        return f"{self.name}{sites}, weights {self.weights}"

    def check_goes_on(self, began: dict[str, Any] | str) -> None:
        """Check that a run goes on in the precision in which it began, as its settings say.

        Raises:
            UserError: when it does not.
        """
        then = from_dict(Precision, began, "precision")
        if self != then:
            remedy = "leave --precision out, or begin again with --overwrite"
            began_in = then.in_words
            if self.in_words == began_in:
                began_in = "others, or in another order"
            raise UserError(
                f"precision: {self.in_words}, and the run began in {began_in}; {remedy}"
            )


def with_recipe(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a run with what a recipe file says in the place of its name, if they
    name one.

    folder: from where it is named.

    Raises:
        UserError: when it cannot be read.
    """
    name = data.get("precision")
    name = name.get("name") if isinstance(name, dict) else name
    if not isinstance(name, str) or not name.endswith(".toml"):
        return data
    settings = data["precision"] if isinstance(data["precision"], dict) else {}
    recipe = PRECISIONS.module(RECIPES).recipe_file(folder / name)
    weights = settings.get("weights", recipe["weights"])
    return {**data, "precision": {**settings, **recipe, "weights": weights}}


def is_recipe_of(path: Path, precision: Precision) -> bool:
    """Returns whether there is a recipe file that says what a precision does."""
    return path.exists() and PRECISIONS.module(RECIPES).is_recipe_of(path, precision)


class _Thread(threading.local):
    """What holds on this thread within `computing`. Of thread-local values `torch.compile` knows
    what they are.
    """

    scheme: Scheme | None = None


_thread = _Thread()


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which matrix products run in `precision`. Weights, the last product and
    the loss stay fp32.

    The recipes of its `sites` are the model's; without this context they count for nothing.
    """
    if precision.is_plain and _thread.scheme is None:
        return nullcontext()
    return _computing(precision, device)


@contextmanager
def _computing(precision: Precision, device: torch.device) -> Iterator[None]:
    before = _thread.scheme
    _thread.scheme = precision.scheme(device)
    try:
        yield
    finally:
        _thread.scheme = before


def way(own: Any, is_high: bool) -> Way | None:
    """Returns how a site computes here; None as it always did: in the type of its operands.

    Args:
        own: the recipe that the site was told.
        is_high: whether it ignores the recipe of all others.
    """
    return None if _thread.scheme is None else _thread.scheme.way(own, is_high)


def mixing(model: nn.Module, precision: Precision) -> str:
    """Returns which sites make a row's score depend on the rows beside it, in words; "" if none
    does.

    model: of a run, whose sites have their recipes.
    """
    scheme = precision.scheme(torch.device("cpu"))
    return "" if scheme is None else scheme.mixing(model)


def computed(precision: Precision, device: torch.device) -> dict[str, Any]:
    """Returns a precision in words, and the formats that a device multiplies by itself or not:
    `Scheme.formats`.
    """
    scheme = precision.scheme(device)
    formats = {"native": [], "emulated": [], "by": []} if scheme is None else scheme.formats()
    return {"name": precision.name, "weights": precision.weights, **formats}


def native(precision: Precision, device: torch.device) -> str | None:
    """Returns in words which formats a device multiplies by itself; None of fp32."""
    if precision.is_plain:
        return None
    description = computed(precision, device)
    sizes = " where its units take the sizes, else emulated"
    words = [
        f"{name}: native" + ("" if name == "bf16" else sizes) for name in description["native"]
    ]
    if emulated := ", ".join(description["emulated"]):
        by = " and ".join(description["by"])
        words.append(f"{emulated}: emulated by products in {by}, so times say nothing about it")
    if PRECISIONS.module("bf16").missing(device):
        words.append("this processor has no bf16 units")
    return "; ".join(words)


def to_compute(x: Tensor) -> Tensor:
    """Returns x in the type of what stands between two products, so that it is as narrow as they
    are.
    """
    plain_x = plain(x)
    dtype = compute_dtype(plain_x)
    return x if plain_x.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of what stands between two products, of which x is one."""
    return x.dtype if _thread.scheme is None else _thread.scheme.between
