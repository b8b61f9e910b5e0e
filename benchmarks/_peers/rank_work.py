"""The models that are served in benchmarks, the requests that they get, and what is asked of a
run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from _peers import products
from _peers.rank_requests import PROTOCOLS, Asked, check
from _peers.tiny import sized
from open_loop import Outcome
from scorer import MODELS as OTHERS

from sparrow import data
from sparrow.apps.bits.quantize import quantize
from sparrow.apps.generate import generate
from sparrow.embeddings import TableChoices
from sparrow.embeddings.choices import Override
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Data, Log, Loop, Run
from sparrow.training import train

MODELS: dict[str, tuple[Any, dict[str, int], float]] = {  # settings, the log's, limit in ms
    "dlrm": (OTHERS["dlrm (demo)"], {}, 10.0),
    "dcnv2": (products.CONFIG, {"numeric": 13, "categorical": 24}, 25.0),
}
SIZES, FORMATS = (1, 20, 100, 500), ("fp32", "int8")
GB_ROWS = 15_600_000  # of 16 numbers in fp32
KINDS = 40  # different requests
CLOSE, CLOSE_INT8 = 1e-6, 2e-2  # of int8, see sparrow.serving.scorer.CLOSE_ROUNDED


@dataclass(kw_only=True)
class Work:
    """What is measured, and where files are.

    Args:
        place: a folder.
        is_quick: fewer points and requests.
        options: of `sparrow serve`, for all cases.
        peers: where the environments of peers are, if they are to be measured.
        models, sizes, formats, protocols: those of the curves and of peers.
        limit_ms: of p99, in the place of that of each model.
        minutes: of swaps.
        gb: of tables that are swapped.
        peer_workers: what is tried for each peer; the best is taken.
        point_s: seconds that a point of a curve takes at most.
    """

    place: Path
    is_quick: bool
    options: dict[str, Any] = field(default_factory=dict)
    peers: Path | None = None
    models: tuple[str, ...] = tuple(MODELS)
    sizes: tuple[int, ...] = SIZES
    formats: tuple[str, ...] = FORMATS
    protocols: tuple[str, ...] = (*PROTOCOLS, "ids")
    limit_ms: float | None = None
    minutes: float = 5.0
    gb: float = 1.0
    peer_workers: tuple[int, ...] = (1, 2)
    point_s: float = math.inf

    def count(self, target: int = 10_000) -> int:
        """Requests of a load."""
        return max(target // 40, 300) if self.is_quick else target

    def counts(self, target: int) -> Callable[[float], int]:
        """Returns a rate -> requests of a point: at least 300, which p99 needs, and those of half a
        second.
        """
        return lambda rate: round(
            max(min(max(rate * self.point_s, 300), self.count(target)), rate / 2)
        )

    def limit(self, name: str) -> float:
        """What p99 of a model's requests is to keep to, in milliseconds."""
        return self.limit_ms or MODELS[name][2]

    @property
    def probe_s(self) -> float:
        """Seconds of a load that only looks for a rate."""
        return max(min(0.5 if self.is_quick else 3.0, self.point_s / 4), 0.5)

    @property
    def log(self) -> Path:
        """What services say."""
        return self.place / "log"

    def folder(self, name: str, format: str = "fp32", gb: float = 0.0, seed: int = 0) -> Path:
        """Returns a model folder, made when it is not there.

        Args:
            name: of the model.
            format: "fp32", or "int8" for rows and products.
            gb: of a table of users; as many rows as there are users where it is 0.
            seed: of its training.
        """
        settings, of_log, _ = MODELS[name]
        place = self.place / f"{name}-{gb:g}-{seed}"
        log, prepared = self.place / f"{name}.parquet", self.place / f"{name}-log"
        if not prepared.exists():
            generate(log, rows=sized(20_000, 600) if self.is_quick else 200_000, seed=7, **of_log)
            data.prepare([log], prepared)
        if not (place / "fp32").exists():
            rows = {"name": "hashed", "rows": int(gb * GB_ROWS)}
            tables = (
                TableChoices(overrides=(Override(names=("user",), addressing=rows),))
                if gb
                else TableChoices()
            )
            run = Run(
                run_dir=str(place / "run"),
                data=Data(path=str(prepared), batch_size=1024),
                model=settings,
                threads=1,
                seed=seed,
                tables=tables,
                loop=Loop(max_steps=10 if gb else 30),
                log=Log(tensorboard=False),
            )
            train(run, overwrite=True)
            export(place / "run", place / "fp32", [log])
        if not (place / format).exists():
            few = {"tables": "int8", "products": "int8", "rows": 1_000}
            quantize(place / "fp32", place / format, prepared, budget=math.inf, **few)
        return place / format

    def model(self, name: str, format: str = "fp32") -> tuple[Scorer, list[dict[str, Any]], Any]:
        """Returns a scorer, rows of its log as `rows` gives them, and the log."""
        scorer = load(self.folder(name, format))
        return scorer, self.rows(name), pq.read_table(self.place / f"{name}.parquet")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns rows of a log, each of another item, without missing values and without empty
        lists.
        """
        table = pq.read_table(self.place / f"{name}.parquet").drop_columns(
            ["session", "ts", "label", "true_p"]
        )
        rows = [
            row
            for row in table.drop_null().to_pylist()
            if all(value != [] for value in row.values())
        ]
        return list({row["item"]: row for row in rows}.values())[-5_000:]


def alone_ms(scorer: Scorer, some: list[Asked]) -> float:
    """The median milliseconds of the scorer alone, parsing not counted."""
    taken = []
    for one in some * 3:
        begun = time.perf_counter()
        scorer.rank(one.user, one.candidates)
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def checker(some: list[Asked], protocol: str, close: float) -> Callable[[Outcome], None]:
    """Returns what compares every score of an outcome."""
    return lambda outcome: check(outcome, {"": some}, PROTOCOLS[protocol].told, close)
