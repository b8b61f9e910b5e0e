"""Low precision: products and weights in few bits, layers that suit them, and a probe of what
products look like.

Apps and the command line may import it. It imports the library.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sparrow.core.extensions import Extension

PROBE_FILE = "probe.safetensors"  # in the folder of a run
PRECISIONS = (
    *("bf16-truncate", "fp8", "fp8-rowwise", "fp8-rowwise-gw", "mxfp8", "mxfp6", "mxfp4", "mxint8"),
    *("mx9", "mx6", "mx4", ".toml"),  # the last one: recipes of sites, such as a file NAME.toml has
)


def _is_probed(run: Any, options: Collection[str]) -> bool:
    return "probe" in options


def _applies(run: Any, options: Collection[str]) -> bool:
    """Also to a run whose precision is to be chosen, to one whose weights may come from one that
    kept them in few bits, and to one that was probed before.
    """
    if run.precision.name == "auto":
        return True
    has_weights = run.precision.weights != "fp32" or run.init_from is not None
    return has_weights or _is_probed(run, options) or Path(run.run_dir, PROBE_FILE).exists()


def _adapts(run: Any) -> bool:
    return bool(run.layers.changes or run.precision.sites or run.precision.weights != "fp32")


EXTENSION = Extension(
    members={"sparrow.layers.precisions": dict.fromkeys(PRECISIONS, "precision")},
    applies=_applies,
    files=(PROBE_FILE,),
    adapts=_adapts,
    plans=True,
)
