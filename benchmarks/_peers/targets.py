"""The line with which a benchmark ends for each of its targets, and the same for a machine."""

from __future__ import annotations

import json
import os


def print_target(claim: str, figure: object, goal: object, met: bool | None) -> None:
    """Print a target; where SPARROW_TARGETS names a file, add it there as a line of JSON.

    Args:
        claim: what is claimed, as it stands in the page of evidence.
        figure: what was measured, with its unit.
        goal: what was to be reached, with the same unit; None where no goal was stated.
        met: whether it is; None where nothing was measured or no goal was stated.
    """
    verdict = "" if met is None else "met" if met else "missed"
    aim = "no goal stated" if goal is None else f"goal {goal}"
    print(f"TARGET {claim}: {figure} ({aim}) {verdict}".rstrip(), flush=True)
    if place := os.environ.get("SPARROW_TARGETS"):
        fields = {"claim": claim, "figure": str(figure), "goal": str(goal or ""), "met": verdict}
        with open(place, "a") as file:
            file.write(json.dumps(fields) + "\n")
