"""A run: config, loop, schedules, run log, report. Training sees `model(batch)`, logits [B, T], only."""

from sparrow.training.fitting import Fitted, fit
from sparrow.training.loop import Trainer, train
from sparrow.training.predict import predict
from sparrow.training.restore import Restored, check_schema, restore
from sparrow.training.run import Checkpoints, Data, Log, Loop, Run, Schedule

__all__ = [
    "Checkpoints",
    "Data",
    "Fitted",
    "Log",
    "Loop",
    "Restored",
    "Run",
    "Schedule",
    "Trainer",
    "check_schema",
    "fit",
    "predict",
    "restore",
    "train",
]
