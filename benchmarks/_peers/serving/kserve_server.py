"""KServe's model server for Python. Started by `serve_peers.py`; what it has of options is on the
command line.
"""

from __future__ import annotations

from typing import Any

import kserve
from features import asked, made
from kserve import InferOutput, InferRequest, InferResponse


class Model(kserve.Model):
    """Scores the rows of a request's tensors."""

    def load(self) -> bool:
        """Read what is to be served."""
        self.rank, self.ready = made(), True
        return self.ready

    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Returns a tensor of scores."""
        is_binary = any(one._raw_data is not None for one in payload.inputs)
        tensors = {one.name: one.as_numpy() if is_binary else one.data for one in payload.inputs}
        scores = self.rank(*asked(tensors))
        output = InferOutput(name="label", datatype="FP32", shape=[len(scores)])
        output.set_data_from_numpy(scores.astype("float32"), binary_data=is_binary)
        return InferResponse(response_id=payload.id, model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    model = Model("model")
    model.load()
    kserve.ModelServer().start([model])
