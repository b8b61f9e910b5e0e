"""The precision of a run: the recipes of its products, and the type of what stands between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparrow.core.config import from_dict, read_toml, to_dict
from sparrow.core.errors import UserError, suggest
from sparrow.core.repeated import plain
from sparrow.layers.candidates import Candidate, bf16, candidates
from sparrow.layers.recipe import OPERANDS, Recipe, Way, is_exact_in_bf16

Weights = Literal["fp32", "bf16", "bf16-stochastic", "split"]
AUTO, AUTO_FILE = "auto", "auto.toml"  # what it chose, in the run's folder
TYPES = ("fp32", "bf16")  # of torch, whose own products are native; other formats need a candidate for that


class Member(NamedTuple):
    """A precision that has a name.

    recipe: of all products but those that stay high (`Site.high`); None leaves them as they are.
    between: the type of what stands between two products.
    """

    recipe: Recipe | None
    between: torch.dtype = torch.bfloat16


MEMBERS = {
    "fp32": Member(None, torch.float32),
    "bf16": Member(Recipe.of("bf16")),
    # what is bf16 already has nothing to be cut off, so that between products it is fp32
    "bf16-truncate": Member(Recipe.of("bf16-truncate"), torch.float32),
    "fp8": Member(Recipe.of("fp8", gradient="fp8-e5m2")),
    "fp8-rowwise": Member(Recipe.of("fp8-rowwise")),
    "fp8-rowwise-gw": Member(Recipe.of("fp8-rowwise", weight_gradient="bf16")),
    "mxfp8": Member(Recipe.of("mxfp8")),
    "mxfp6": Member(Recipe.of("mxfp6")),
    "mxfp4": Member(Recipe.of("mxfp4")),
    "mxint8": Member(Recipe.of("mxint8")),
    "mx9": Member(Recipe.of("mx9")),
    "mx6": Member(Recipe.of("mx6")),
    "mx4": Member(Recipe.of("mx4")),
}


@dataclass(frozen=True)
class Precision:
    """In which formats matrix products are computed.

    name: fp32, bf16, bf16-truncate, fp8, fp8-rowwise, fp8-rowwise-gw, mxfp8, mxfp6, mxfp4, mxint8, mx9, mx6 or mx4, for
    all sites that `sites` does not name; or a recipe file, NAME.toml; or auto, which `sparrow train` replaces by a
    recipe for model and machine. See docs/precision.md. sites: pattern -> the recipe of the sites whose names match it,
    such as "cross.*"; of several patterns the last one counts. weights: what dense weights are between steps: "fp32";
    "bf16", rounded to the nearest, or "bf16-stochastic"; or "split", whose low halves the optimizer keeps.
    """

    name: str = "fp32"
    sites: dict[str, Recipe] = field(default_factory=dict)
    weights: Weights = "fp32"

    def __post_init__(self) -> None:
        if self.name not in MEMBERS and self.name != AUTO:
            remedy = f"{suggest(self.name, MEMBERS)}; or name a recipe file, NAME.toml"
            raise UserError(f"name: there is no precision {self.name!r}{remedy}")

    @property
    def is_plain(self) -> bool:
        """Whether it changes no product; "auto" is nothing yet."""
        return self.name in ("fp32", AUTO) and not self.sites

    @property
    def told(self) -> str:
        """It in words."""
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
            raise UserError(f"precision: {self.told}, and the run began in {then.told}; {remedy}")

    @property
    def recipes(self) -> list[Recipe]:
        """Those of all its sites."""
        own = MEMBERS[self.name].recipe
        return [*([own] if own else []), *self.sites.values()]

    @property
    def mixes_rows(self) -> bool:
        """Whether a row's score depends on the other rows of its batch, because activations have a scale together."""
        forward = [OPERANDS[recipe.forward[0]].format for recipe in self.recipes]
        return any(format is not None and format.block == "tensor" for format in forward)

    def units(self, device: torch.device) -> tuple[Candidate, ...]:
        """Returns the candidates that compute its products on a device, but for those of TYPES."""
        pairs = {pair for recipe in self.recipes for pair in recipe.passes if not {*pair} <= {*TYPES}}
        pairs |= {pair[::-1] for pair in pairs}
        every = candidates().values() if pairs else ()
        return tuple(one for one in every if one.FORMATS in pairs and not one.missing(device))


def with_recipe(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a run with what a recipe file says in the place of its name, if they name one.

    folder: from where it is named.

    Raises:
        UserError: when it cannot be read.
    """
    name = data.get("precision")
    name = name.get("name") if isinstance(name, dict) else name
    if not isinstance(name, str) or not name.endswith(".toml"):
        return data
    given = data["precision"] if isinstance(data["precision"], dict) else {}
    found = recipe_file(folder / name)
    weights = given.get("weights", found["weights"])
    return {**data, "precision": {**given, **found, "weights": weights}}


def recipe_file(path: Path) -> dict[str, Any]:
    """Returns what a recipe file says, as settings of a `Precision`.

    `default` is the precision of the sites that no pattern names, and the table `sites` has patterns. Each has a recipe
    or the name of a precision, whose recipe it is. `weights` is what dense weights are between steps.

    Raises:
        UserError: when it cannot be read.
    """
    found = read_toml(path)
    default, sites, weights = found.get("default", "fp32"), found.get("sites", {}), found.get("weights", "fp32")
    keys = ("default", "weights", "sites")
    if odd := [key for key in found if key not in keys]:
        raise UserError(f"{path}: {odd[0]}: unknown key{suggest(odd[0], keys)}")
    if not isinstance(sites, dict):
        raise UserError(f"{path}: sites: expected a table, pattern = recipe, got {sites!r}")
    if weights not in get_args(Weights):
        raise UserError(f"{path}: weights: {weights!r} is none of {', '.join(get_args(Weights))}")
    _member(default, f"{path}: default")
    recipes = {of: to_dict(_recipe(sites[of], f"{path}: sites.{of!r}")) for of in sites}
    return {"name": default, "sites": recipes, "weights": weights}


def is_recipe_of(path: Path, precision: Precision) -> bool:
    """Returns whether there is a recipe file that says what a precision does."""
    try:
        found = from_dict(Precision, recipe_file(path))
    except UserError:  # there is none, or it is damaged
        return False
    return (found.name, found.sites) == (precision.name, precision.sites)


def _member(name: object, place: str) -> Member:
    if not isinstance(name, str) or name not in MEMBERS:
        raise UserError(f"{place}: there is no precision {name!r}{suggest(str(name), MEMBERS)}")
    return MEMBERS[name]


def _recipe(of: object, place: str) -> Recipe:
    """Returns the recipe that a file has for a site: passes of its own, or the name of a precision."""
    if not isinstance(of, dict):
        return _member(of, place).recipe or Recipe.of("fp32")
    passes = [of_field.name for of_field in fields(Recipe)]
    if (left := [name for name in passes if name not in of]) and of.keys() <= {*passes}:
        remedy = f"a recipe says all of {', '.join(passes)}, each as the formats of two operands"
        raise UserError(f"{place}: no {' and no '.join(left)}; {remedy}")
    return from_dict(Recipe, of, place)


class _Here(threading.local):
    """What holds on this thread within `computing`. Of thread-local values `torch.compile` knows what they are."""

    is_on = False
    between = torch.float32
    has_bf16 = False
    units: tuple[Candidate, ...] = ()
    recipe: Recipe | None = None


_here = _Here()


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which matrix products run in `precision`. Weights, the last product and the loss stay fp32.

    The recipes of its `sites` are the model's, see `put_recipes`; without this context they count for nothing.
    """
    return nullcontext() if precision.is_plain and not _here.is_on else _computing(precision, device)


@contextmanager
def _computing(precision: Precision, device: torch.device) -> Iterator[None]:
    before = (_here.is_on, _here.between, _here.has_bf16, _here.units, _here.recipe)
    recipe, between = MEMBERS[precision.name]
    _here.is_on, _here.between, _here.recipe = not precision.is_plain, between, recipe
    _here.has_bf16, _here.units = not lacks_bf16(device), precision.units(device)
    try:
        yield
    finally:
        _here.is_on, _here.between, _here.has_bf16, _here.units, _here.recipe = before


def way(own: Recipe | None, is_high: bool) -> Way | None:
    """Returns how a site computes here; None as it always did: in the type of its operands.

    Args:
        own: the recipe that the site was told.
        is_high: whether it ignores the recipe of all others.
    """
    if not _here.is_on:
        return None
    recipe = own or (None if is_high else _here.recipe)
    return None if recipe is None else Way(recipe, _here.has_bf16, _here.units)


def lacks_bf16(device: torch.device) -> bool:
    """Returns whether bf16 is slower than fp32 there: on processors without units for it."""
    return bool(bf16.missing(device))


def computed(precision: Precision, device: torch.device) -> dict[str, Any]:
    """Returns a precision, the formats that a device multiplies by itself ("native"), and those it emulates.

    The latter are "emulated", by products in the types of "by". fp32 is left out.
    """
    pairs = {pair for recipe in precision.recipes for pair in recipe.passes}
    has_bf16 = not lacks_bf16(device) and MEMBERS[precision.name].between == torch.bfloat16
    names = sorted({name for pair in pairs for name in pair} - {"fp32"})
    is_native = {**{name: True for one in precision.units(device) for name in one.FORMATS}, "bf16": has_bf16}
    emulated = [name for name in names if not is_native.get(name)]
    narrow = {is_exact_in_bf16(pair) and has_bf16 for pair in pairs if set(pair) & set(emulated)}
    by = [name for name, is_narrow in (("bf16", True), ("fp32", False)) if is_narrow in narrow]
    natively = [name for name in names if name not in emulated]
    told = {"name": precision.name, "weights": precision.weights}
    return {**told, "native": natively, "emulated": emulated, "by": by}


def native(precision: Precision, device: torch.device) -> str | None:
    """Returns what `computed` does in words; None of fp32."""
    if precision.is_plain:
        return None
    found = computed(precision, device)
    sizes = " where its units take the sizes, else emulated"
    words = [f"{name}: native" + ("" if name == "bf16" else sizes) for name in found["native"]]
    if emulated := ", ".join(found["emulated"]):
        by = " and ".join(found["by"])
        words.append(f"{emulated}: emulated by products in {by}, so times say nothing about it")
    if lacks_bf16(device):
        words.append("this processor has no bf16 units")
    if precision.mixes_rows:
        words.append("activations share a scale, so a row's score depends on the rows it is scored with")
    return "; ".join(words)


def to_compute(x: Tensor) -> Tensor:
    """Returns x in the type of what stands between two products, so that it is as narrow as they are."""
    whole = plain(x)
    dtype = compute_dtype(whole)
    return x if whole.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the type of what stands between two products, of which x is one."""
    return _here.between if _here.is_on else x.dtype
