"""A run is continued from a checkpoint: with the choices that it began with, and in the state in
which it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparrow.checkpoint import Checkpoint
from sparrow.core.comparison import settings_differences
from sparrow.core.config import flatten, from_dict
from sparrow.trained.build import load_weights
from sparrow.trained.optimizer_state import read_optimizer
from sparrow.trained.run import Run
from sparrow.training.saver import set_random_state


def with_choices(run: Run, began: Mapping[str, Any], say: Callable[[str], None]) -> Run:
    """Returns `run` with the automatic choices that its beginning made.

    Args:
        run: the settings of now.
        began: what `run.toml` holds.
        say: is told what else changed.
    """
    run = dataclasses.replace(
        run, tables=dataclasses.replace(run.tables, sizes=began["tables"].get("sizes", {}))
    )
    run.precision.check_goes_on(began.get("precision", {}))
    old = flatten(began)
    loop = run.loop
    data = run.data
    if loop.update_mode == "auto":
        loop = dataclasses.replace(loop, update_mode=old["loop.update_mode"])
    shuffle = old["data.shuffle"] if data.shuffle is None else data.shuffle
    data = dataclasses.replace(
        data, batch_size=data.batch_size or old["data.batch_size"], shuffle=shuffle
    )
    if data.id_dropout is None:
        dropped = {
            name: share for name, share in old.items() if name.startswith("data.id_dropout.")
        }
        shares = {name.removeprefix("data.id_dropout."): share for name, share in dropped.items()}
        data = dataclasses.replace(data, id_dropout=shares)
    run = dataclasses.replace(run, threads=run.threads or old["threads"], loop=loop, data=data)
    for name, now, then in settings_differences(run, from_dict(Run, dict(began))):
        say(f"resumed with {name} = {now}, it was {then}")
    return run


def load(
    saved: Checkpoint, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Load weights, tables, the state of the dense optimizer and that of random numbers from a
    checkpoint.
    """
    load_weights(model, saved)
    read_optimizer(model, optimizer, saved)
    set_random_state(saved.part("random"), device)
