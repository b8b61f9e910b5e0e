"""Ranks, and how they send each other tensors. `sharding/` decides what is sent where."""

from sparrow.distributed.agreement import check_same, everywhere, said
from sparrow.distributed.codecs import Codec
from sparrow.distributed.collectives import Meter, Pending
from sparrow.distributed.world import Lobby, World, leads

__all__ = ["Codec", "Lobby", "Meter", "Pending", "World", "check_same", "everywhere", "leads", "said"]
