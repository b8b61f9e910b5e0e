"""A model of Triton's backend for Python. `serve_peers.py` puts it into a model repository."""

from __future__ import annotations

import os
import sys
from typing import Any

import triton_python_backend_utils as triton

# of which the backend itself takes the last folder alone
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
from features import asked, made  # noqa: E402


class TritonPythonModel:
    """Scores the rows of requests' tensors."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read what is to be served."""
        self.rank = made()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns a tensor of scores for each request."""
        found = []
        for request in requests:
            tensors = {one.name(): one.as_numpy() for one in request.inputs()}
            scores = self.rank(*asked(tensors)).astype("float32")
            found.append(triton.InferenceResponse([triton.Tensor("label", scores)]))
        return found
