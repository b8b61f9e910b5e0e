"""A run: the loop, its schedule, its log and its checkpoints. It sees `model(batch)`, logits [B, T], only."""

from sparrow.training.loop import Trainer, train

__all__ = ["Trainer", "train"]
