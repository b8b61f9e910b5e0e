"""A store whose rows are on their way when a batch asks for them, and stay where they lie in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores import External, InTransit, MemoryStore
from sparrow.kernels.embedding_bag import Bags


@dataclass(frozen=True)
class Kept:
    """What a checkpoint would have of the rows."""

    component: Component
    seed: int
    rows: tuple[int, int]
    columns: tuple[int, int]


class Transit:
    """Writes down what it is told."""

    def __init__(self, stores: Mapping[int, Any]) -> None:
        self.stores = stores
        self.told: list[str] = []

    def fetch(self, bags: Bags) -> None:
        self.told.append("fetch")

    def begin(self, bags: Bags) -> None:
        self.told.append("begin")

    def give_up(self, bags: Bags) -> None:
        self.told.append("give up")

    def settle(self) -> None:
        self.told.append("settle")

    def land(self) -> None:
        self.told.append("land")


class Awaited(MemoryStore):
    """Plain memory, which says that its rows may be out."""

    adopted: tuple[Any, bool] | None = None

    @property
    @override
    def transit(self) -> Callable[[Mapping[int, Any]], InTransit] | None:
        return Transit

    def give_back(self) -> None:
        """Nothing was borrowed."""

    @override
    def external(
        self, seed: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> External | None:
        kept: Any = Kept(self.component, seed, rows, columns)
        return kept  # type: ignore[no-any-return]

    @override
    def adopt(self, part: External, learns: bool) -> bool:
        self.adopted = part, learns
        return True
