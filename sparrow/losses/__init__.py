"""logits, labels -> scalar."""

from sparrow.losses.bce import binary_cross_entropy, judged

__all__ = ["binary_cross_entropy", "judged"]
