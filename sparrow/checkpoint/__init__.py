"""Saves and loads checkpoints. They do not depend on the number of ranks.

A checkpoint is a folder `step-N` that appears whole or not at all. It holds
`manifest.json` (format, step, identity of the model, state, and every file's size and checksum), one safetensors
file per part ("dense", "optimizer", ...) and per table chunk. Of a table on an SSD it holds a map of blocks and the
rows that are newer, see `blocks`; the blocks are in a file elsewhere. Nothing in it is ever executed.
"""

from sparrow.checkpoint.store import Checkpoint, Team, clean, clear, latest, load, mark_best, named, remove, save, steps

__all__ = ["Checkpoint", "Team", "clean", "clear", "latest", "load", "mark_best", "named", "remove", "save", "steps"]
