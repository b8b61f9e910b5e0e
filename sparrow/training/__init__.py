"""A run: the loop, its schedule, its log and its checkpoints. It sees `model(batch)`, logits [B,
T], only.

Imports: trained and below. Imported by: extensions and above.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use
from sparrow.training.loop import Trainer, train

__all__ = ["Trainer", "earlier_run", "remedies", "restart", "table_sizes", "train"]

if TYPE_CHECKING:
    from sparrow.training import earlier_run, remedies, restart, table_sizes
else:
    __getattr__ = loaded_on_use(__name__, __all__)
