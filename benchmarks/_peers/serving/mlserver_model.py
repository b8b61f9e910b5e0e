"""A model of MLServer. Started by `serve_peers.py`, with settings in files."""

from __future__ import annotations

from features import asked, made
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Model(MLModel):
    """Scores the rows of a request's tensors."""

    async def load(self) -> bool:
        """Read what is to be served."""
        self.rank = made()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Returns a tensor of scores."""
        scores = self.rank(*asked({one.name: one.data.root for one in payload.inputs}))
        output = ResponseOutput(
            name="label", datatype="FP32", shape=[len(scores)], data=scores.tolist()
        )
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[output])
