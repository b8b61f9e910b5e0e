"""Raw log -> prepared log."""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["cuts", "earlier", "sessions", "split_key", "time_order", "weights"]

if TYPE_CHECKING:
    from sparrow.data.preparation import cuts, earlier, sessions, split_key, time_order, weights
else:
    __getattr__ = loaded_on_use(__name__, __all__)
