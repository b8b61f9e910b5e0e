"""What the defaults load stays small: something is apart when it is not loaded, and by no other
sign.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SELDOM = """
    analysis/parts analysis/picture/page_parts analysis/scores cli/_budget cli/_calibration
    cli/_profile cli/_settings_help core/choices core/repeated distributed/disagreement
    embeddings/admission embeddings/columns embeddings/combined embeddings/compiled
    embeddings/moved_rows embeddings/outside_ids embeddings/overrides embeddings/settled
    extensions/blend/deep extensions/blend/forest extensions/blend/model extensions/blend/targets
    kernels/embedding_bag/single kernels/expand/__init__ kernels/flops kernels/rules/_regularized
    layers/across layers/packed layers/rounded layers/served metrics/groups metrics/intervals metrics/likelihood
    metrics/places models/_histories models/_user_columns models/_vectors numerics/rounding
    trained/calibrator_files trained/nonfinite_scores trained/optimizer_state training/earlier_run
    training/remedies training/restart training/table_sizes
"""  # what a dcnv2 run on a log without sessions does not need


@pytest.fixture(scope="module")
def loaded() -> dict[str, int]:
    """The files that the defaults load, below sparrow/, with their tokens."""
    sizes = (
        "{str(path.relative_to(tokens.PACKAGE)): tokens.of_file(path) for path in tokens.loaded()}"
    )
    program = f"import json, tokens; print(json.dumps({sizes}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "lint", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes_by_file: dict[str, int] = json.loads(done.stdout)
    return sizes_by_file


def test_what_the_defaults_load_is_under_its_cap(loaded: dict[str, int]) -> None:
    cap = tomllib.loads((ROOT / "lint" / "budgets.toml").read_text())["most"]["loaded"]
    assert 100_000 < sum(loaded.values()) <= cap


def test_what_few_need_is_not_loaded_by_the_defaults(loaded: dict[str, int]) -> None:
    seldom = {f"{name}.py" for name in SELDOM.split()}
    assert all((ROOT / "sparrow" / name).is_file() for name in seldom)
    assert {"extensions/blend/baseline.py", "extensions/blend/logistic.py"} <= loaded.keys()
    assert not seldom & loaded.keys()
