"""Calibration: a model's scores pass last through what makes them right on average.

Apps and the command line may import it. It imports the library.
"""

from sparrow.core.extensions import Extension

EXTENSION = Extension(
    members={"sparrow.trained.calibrators": {"logistic": "logistic", "isotonic": "isotonic"}},
    settings=True,
    earlier_names={"calibrate": "method"},
    plans=True,
)
