"""Saves and loads checkpoints. They do not depend on the number of ranks.

A checkpoint is a folder `step-N` that appears whole or not at all. It holds
`manifest.json` (format, step, identity of the model, state, and every file's size and checksum),
one safetensors file per part ("dense", "optimizer", ...) and per table chunk. A table on an SSD has
its blocks in a file elsewhere: the checkpoint holds a map of them and the rows that are newer.
Nothing in it is ever executed.

Imports: data, embeddings, interactions, optimizers and below. Imported by: trained and above.
"""

from sparrow.checkpoint.store import (
    Checkpoint,
    Team,
    clean,
    clear,
    latest,
    load,
    named,
    remove,
    save,
    steps,
    update_state,
)

__all__ = [
    "Checkpoint",
    "Team",
    "clean",
    "clear",
    "latest",
    "load",
    "named",
    "remove",
    "save",
    "steps",
    "update_state",
]
