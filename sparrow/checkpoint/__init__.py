"""Named chunks <-> disk, independent of world size: the contract between training and serving.

A checkpoint is a folder `step-N` that appears whole or not at all:
`manifest.json` (format, step, identity of the model, state, and every file's size and SHA-256), one safetensors
file per part ("dense", "optimizer", ...) and per table chunk. Nothing in it is ever executed.
"""

from sparrow.checkpoint.store import Checkpoint, Team, clean, clear, latest, load, mark_best, remove, save, steps

__all__ = ["Checkpoint", "Team", "clean", "clear", "latest", "load", "mark_best", "remove", "save", "steps"]
