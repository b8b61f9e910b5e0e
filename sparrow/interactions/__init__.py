"""How features meet: cross layers, dot products, factorization machines."""

from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction
from sparrow.interactions.fm import FactorizationMachine

__all__ = ["CrossNet", "DotInteraction", "FactorizationMachine"]
