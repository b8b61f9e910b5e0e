"""Ranks, and how they send each other tensors. `sharding/` decides what is sent where.

Imports: kernels and below. Imported by: features, layers, losses, metrics and above.
"""

from sparrow.distributed.agreement import check_same, everywhere, run_on_rank0
from sparrow.distributed.begin import begin_lobby, begin_world
from sparrow.distributed.codecs import Codec
from sparrow.distributed.collectives import Meter, Pending
from sparrow.distributed.world import Grid, Lobby, World, leads

__all__ = [
    "Codec",
    "Grid",
    "Lobby",
    "Meter",
    "Pending",
    "World",
    "begin_lobby",
    "begin_world",
    "check_same",
    "everywhere",
    "leads",
    "run_on_rank0",
]
