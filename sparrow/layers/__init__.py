"""The dense parts of models: linear layers, multilayer perceptrons, transformers, and the precision
they run in.

Importers name the file, so that a run loads what it uses.

Imports: distributed and below. Imported by: data, embeddings, interactions, optimizers and above.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["across", "rounded", "served"]

if TYPE_CHECKING:
    from sparrow.layers import across, rounded, served
else:
    __getattr__ = loaded_on_use(__name__, __all__)
