from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import get_args

import pytest

from sparrow.core import UserError
from sparrow.extensions.calibration import isotonic, logistic
from sparrow.trained import calibrator_files, calibrators
from sparrow.trained.calibrators import FAMILY, KINDS, Calibrator

TWO: tuple[Calibrator, ...] = (
    logistic.Config(slope=0.5, intercept=-0.25),
    isotonic.Config(scores=(0.0, 0.5), probabilities=(0.1, 0.9)),
)
TEXT = """labels = [
  { name = "logistic", slope = 0.5, intercept = -0.25 },
  { name = "isotonic", scores = [0.0, 0.5], probabilities = [0.1, 0.9] },
]
"""


def test_a_run_can_ask_for_each_member_and_for_none() -> None:
    assert sorted(get_args(KINDS)) == sorted(["none", *FAMILY.names()])


def test_a_folder_of_earlier_versions_is_read(tmp_path: Path) -> None:
    """What is written is what they wrote."""
    (tmp_path / calibrators.FILE).write_text(TEXT)
    assert calibrator_files.load(tmp_path) == TWO
    calibrator_files.save(TWO, tmp_path)
    header = "# What scores pass through, for each label.\n"
    assert (tmp_path / calibrators.FILE).read_text() == header + TEXT


def test_a_checkpoint_of_earlier_versions_is_read(tmp_path: Path) -> None:
    labels = [
        {"name": "logistic", "slope": 0.5, "intercept": -0.25},
        {"name": "isotonic", "scores": [0.0, 0.5], "probabilities": [0.1, 0.9]},
    ]
    settings = {"checkpoint": "c", "log": "l", "labels": labels}
    seal = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    (tmp_path / calibrators.FOLDER).mkdir()
    file = tmp_path / calibrators.FOLDER / "step-000000003.toml"
    file.write_text(f'sha256 = "{seal}"\ncheckpoint = "c"\nlog = "l"\n\n{TEXT}')
    assert calibrator_files.load_of_step(tmp_path, 3, checkpoint="c", kind="none") == (TWO, "l")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for text, why in (
        ('labels = [{ name = "cubic" }]', r"labels\[0\].name: there is no 'cubic'"),
        ("labels = [{ slope = 1.0 }]", r"labels\[0\].name: missing"),
        ("labels = 3", "labels: expected a list, got 3"),
        ('labels = [{ name = "logistic", slope = "steep" }]', r"labels\[0\].slope"),
        (
            'labels = [{ name = "isotonic", scores = [1.0, 0.0], probabilities = [0.0, 1.0] }]',
            "rise",
        ),
        (
            'labels = [{ name = "isotonic", scores = [1.0], probabilities = [0.0, 1.0] }]',
            "other lengths",
        ),
    ):
        (tmp_path / calibrators.FILE).write_text(text)
        with pytest.raises(
            UserError, match=f"{calibrators.FILE}: .*{why}.*fit the calibrators again"
        ):
            calibrator_files.load(tmp_path)
