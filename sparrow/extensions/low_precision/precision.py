"""Precisions in few bits by name, the recipes of sites, and how their products are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from sparrow.core.config import from_dict, read_toml, to_dict
from sparrow.core.errors import UserError, listed, suggest
from sparrow.extensions.low_precision.candidates import Candidate, candidates
from sparrow.extensions.low_precision.recipe import OPERANDS, Recipe, RecipeWay, is_exact_in_bf16
from sparrow.layers.precision import Precision, Weights
from sparrow.layers.precisions import bf16
from sparrow.layers.site import named_sites

# of torch, whose own products are native; other formats need a candidate for that
TYPES = ("fp32", "bf16")


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


class Recipes(NamedTuple):
    """The `Scheme` of recipes.

    recipe: of the sites that have none of their own, unless they are high; None leaves them as they
    are.
    between: the type of what stands between two products.
    passes: the formats of two operands, of all products.
    has_bf16: whether the device has units for bf16.
    units: candidates that compute products on the device, but for those of TYPES.
    """

    recipe: Recipe | None
    between: torch.dtype
    passes: frozenset[tuple[str, ...]]
    has_bf16: bool
    units: tuple[Candidate, ...]

    def way(self, own: Recipe | None, is_high: bool) -> RecipeWay | None:
        """Returns how a site computes, None for a plain product. own: the site's recipe."""
        recipe = own or (None if is_high else self.recipe)
        return None if recipe is None else RecipeWay(recipe, self.has_bf16, self.units)

    def formats(self) -> dict[str, list[str]]:
        """Returns which formats a device computes natively and which are emulated, by what."""
        has_bf16 = self.has_bf16 and self.between == torch.bfloat16
        names = sorted({*chain.from_iterable(self.passes)} - {"fp32"})
        native = {*chain.from_iterable(unit.FORMATS for unit in self.units)} - {"bf16"}
        native |= {"bf16"} if has_bf16 else set()
        emulated = [name for name in names if name not in native]
        narrow = {
            is_exact_in_bf16(pair) and has_bf16 for pair in self.passes if set(pair) & set(emulated)
        }
        by = [name for name, is_narrow in (("bf16", True), ("fp32", False)) if is_narrow in narrow]
        natively = [name for name in names if name not in emulated]
        return {"native": natively, "emulated": emulated, "by": by}

    def mixing(self, model: nn.Module) -> str:
        """Returns in words why a row's score depends on the rows that it is scored with, or "".

        It does where all activations of a site in a batch share a scale. The second operand is an
        activation too where a site has not the name of a weight.
        """
        mixed = []
        weights = dict(model.named_parameters()).keys()
        for name, site in named_sites(model).items():
            recipe = site.recipe or (None if site.high else self.recipe)
            activations = () if recipe is None else recipe.forward[: 1 if name in weights else 2]
            if any(OPERANDS[format].is_scaled_as_one for format in activations):
                mixed.append(name)
        if not mixed:
            return ""
        return (
            f"activations of {listed(mixed)} share a scale, so a row's score depends on the rows it"
            " is scored with"
        )


def scheme(precision: Precision, device: torch.device) -> Recipes:
    """Returns how a precision computes on a device."""
    recipe, between = MEMBERS[precision.name]
    recipes = [*([recipe] if recipe else []), *precision.sites.values()]
    passes = frozenset(chain.from_iterable(site_recipe.passes for site_recipe in recipes))
    pairs = {pair for pair in passes if not {*pair} <= {*TYPES}}
    pairs |= {pair[::-1] for pair in pairs}
    members = candidates().values() if pairs else ()
    units = tuple(unit for unit in members if unit.FORMATS in pairs and not unit.missing(device))
    return Recipes(recipe, between, passes, not bf16.missing(device), units)


def put_recipes(model: nn.Module, precision: Precision) -> None:
    """Let the sites of a model have the recipes that a precision has for them.

    Raises:
        UserError: for a pattern that names no site.
    """
    sites = named_sites(model)
    for pattern, recipe in precision.sites.items():
        matching = [site for name, site in sites.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise UserError(
                f"precision.sites: {pattern!r} names no product of"
                f" {type(model).__module__.rpartition('.')[2]}; it has"
                f" {', '.join(sites) or 'none'}"
            )
        for site in matching:
            site.recipe = recipe


def read_recipes(sites: Mapping[str, Any]) -> dict[str, Recipe]:
    """Returns the recipes of sites, which are plain data or recipes already. sites: pattern ->
    recipe.
    """
    return {
        pattern: from_dict(Recipe, recipe, f"sites.{pattern}") for pattern, recipe in sites.items()
    }


def recipe_file(path: Path) -> dict[str, Any]:
    """Returns what a recipe file says, as settings of a `Precision`.

    `default` is the precision of the sites that no pattern names, and the table `sites` has
    patterns. Each has a recipe or the name of a precision, whose recipe it is. `weights` is what
    dense weights are between steps.

    Raises:
        UserError: when it cannot be read.
    """
    settings = read_toml(path)
    default = settings.get("default", "fp32")
    sites = settings.get("sites", {})
    weights = settings.get("weights", "fp32")
    keys = ("default", "weights", "sites")
    if odd := [key for key in settings if key not in keys]:
        raise UserError(f"{path}: {odd[0]}: unknown key{suggest(odd[0], keys)}")
    if not isinstance(sites, dict):
        raise UserError(f"{path}: sites: expected a table, pattern = recipe, got {sites!r}")
    if weights not in get_args(Weights):
        raise UserError(f"{path}: weights: {weights!r} is none of {', '.join(get_args(Weights))}")
    _member(default, f"{path}: default")
    recipes = {}
    for pattern, value in sites.items():
        recipes[pattern] = to_dict(_recipe(value, f"{path}: sites.{pattern!r}"))
    return {"name": default, "sites": recipes, "weights": weights}


def is_recipe_of(path: Path, precision: Precision) -> bool:
    """Returns whether a recipe file says what a precision does."""
    try:
        stored = from_dict(Precision, recipe_file(path))
    except UserError:  # it is damaged
        return False
    return (stored.name, stored.sites) == (precision.name, precision.sites)


def _member(name: object, place: str) -> Member:
    if not isinstance(name, str) or name not in MEMBERS:
        raise UserError(f"{place}: there is no precision {name!r}{suggest(str(name), MEMBERS)}")
    return MEMBERS[name]


def _recipe(value: object, place: str) -> Recipe:
    """Returns the recipe that a file has for a site: passes of its own, or the name of a
    precision.
    """
    if not isinstance(value, dict):
        return _member(value, place).recipe or Recipe.of("fp32")
    passes = [pass_field.name for pass_field in fields(Recipe)]
    if (left := [name for name in passes if name not in value]) and value.keys() <= {*passes}:
        remedy = f"a recipe says all of {', '.join(passes)}, each as the formats of two operands"
        raise UserError(f"{place}: no {' and no '.join(left)}; {remedy}")
    return from_dict(Recipe, value, place)
