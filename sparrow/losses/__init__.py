"""Logits and labels -> a loss."""

from sparrow.losses.bce import binary_cross_entropy, judged, probabilities

__all__ = ["binary_cross_entropy", "judged", "probabilities"]
