"""What the model and the dense optimizer of a run are by its settings of layers, sites and
weights.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from sparrow.extensions.low_precision.few_bits import keep_in_few_bits
from sparrow.extensions.low_precision.layers import put_layers
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.trained.run import Run


def adapt_model(model: nn.Module, run: Run) -> None:
    """Let the layers and the products of a model be as settings say.

    Raises:
        UserError: for settings that say something of what the model has not.
    """
    put_layers(model, run.layers)
    put_recipes(model, run.precision)


def adapt_optimizer(optimizer: Optimizer, run: Run) -> None:
    """Let the dense weights be between steps as settings say."""
    keep_in_few_bits(optimizer, run.precision.weights, run.seed)
