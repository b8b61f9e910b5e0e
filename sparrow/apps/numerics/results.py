"""What was found about the products of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.apps.fewer.parts import Rise
from sparrow.apps.numerics.dispatch import HIGH, MOST_MERE, Verdict
from sparrow.apps.numerics.measure import PASSES, Site
from sparrow.layers.precision import Precision
from sparrow.numerics.errors import Errors

# the widest first
SHOWN = ("bf16", "mx9", "mxint8", "mxfp8", "fp8", "fp8-rowwise", "mxfp6", "mx6", "mxfp4", "mx4")
REAL, LEARNED, SAMPLED, NORMAL = INPUTS = ("real", "learned", "learned, W too", "N(0, 1)")

Key = tuple[str, str, str, str]
"""(site, pass, inputs, precision)"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Numerics:
    """What `numerics` found.

    shown: the precision of tables. budget: how much NE may rise, as a share of it. sites: the
    products. errors: errors and QSNR. ne: of the first label, as the run is. rises: site ->
    precision -> what it alone does to NE. verdicts: of sites that may be told another precision.
    precision: what the recipe says. rise: by how much NE rises with it, on rows that have not
    chosen it; None where it is fp32. notes: on what this stands. unseen: sites that nobody watched.
    """

    run_dir: Path
    shown: str
    budget: float
    sites: Sequence[Site]
    errors: Mapping[Key, tuple[Errors, float]]
    ne: float
    rises: Mapping[str, Mapping[str, Rise]]
    verdicts: Mapping[str, Sequence[Verdict]]
    precision: Precision
    rise: Rise | None
    notes: Sequence[str]
    unseen: Sequence[str]

    def mere(self, site: str, pass_name: str, precision: str) -> float:
        """Returns the largest one of the errors under real and under learned inputs."""
        keys = [(site, pass_name, inputs, precision) for inputs in (REAL, LEARNED, SAMPLED)]
        values = [self.errors[key][0].mere for key in keys if key in self.errors]
        return math.nan if any(map(math.isnan, values)) else max(values)

    def narrowest(self, site: str) -> str:
        """Returns the precision of fewest bits in which no pass errs too much and NE is shown to
        keep to the budget.
        """
        for name in reversed(SHOWN):
            near = all(self.mere(site, pass_name, name) < MOST_MERE for pass_name in PASSES)
            if near and self.rises[site][name].upper <= self.budget:
                return name
        return HIGH

    def plain(self) -> dict[str, Any]:
        """Returns all of it as plain data."""
        rise = None if self.rise is None else {"value": self.rise.value, "upper": self.rise.upper}
        sites = [self._plain(site) for site in self.sites]
        return {
            "ne": self.ne,
            "budget": self.budget,
            "rise": rise,
            "notes": list(self.notes),
            "sites": sites,
        }

    def _plain(self, site: Site) -> dict[str, Any]:
        inputs: dict[str, dict[str, dict[str, Any]]] = {
            pass_name: {name: {} for name in INPUTS} for pass_name in PASSES
        }
        for (name, pass_name, source, precision), (error, decibels) in self.errors.items():
            if name == site.name:
                inputs[pass_name][source][precision] = {**error._asdict(), "qsnr": decibels}
        verdicts = [dataclasses.asdict(verdict) for verdict in self.verdicts.get(site.name, ())]
        return {
            "name": site.name,
            "high": site.high,
            "shape": list(site.shape),
            "flops": site.flops,
            "errors": inputs,
            "verdicts": dict(zip(PASSES, verdicts, strict=False)),
            "damage": {name: rise.plain() for name, rise in self.rises[site.name].items()},
            "narrowest": self.narrowest(site.name),
        }
