"""vectors -> representation: how features meet."""

from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction

__all__ = ["CrossNet", "DotInteraction"]
