"""What transformers over lists and several labels do to quality.

    python benchmarks/models_lists.py --data FOLDER_OF_REAL_SETS --globo GLOBO_REQUESTS.parquet
    --cells DIR
    python benchmarks/models_lists.py --quick   # a made log, one seed

Lists: Globo, one session in five, sessions side by side and looked up once
(`recipes/globo_sessions.schema.toml`): every row is predicted before it is trained on, the last
fifth counts. Settings of `recipes/globo.toml`; lists pooled, or each read by a transformer of two
layers and two heads. Labels: ML-100k, four stars or more and five stars, all defaults, the test
part; "alone" is a model for each label. What is done is kept in --cells. One thread a run, as many
at once as there are cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from _peers.cells import cells
from _peers.stats import paired, spread
from _peers.streams import RECIPES, stream

from sparrow import data
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.metrics import evaluate
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train

LISTS = ["last_click", "session_clicks", "user_history"]
READERS = ("dlrm", "dcnv2")
LABELS = {"four": 4.0, "five": 5.0}
SHARERS = ("dcnv2", "deepfm", "mmoe", "ple")


def streamed(log: Path, model: str, lists: list[str], seed: int) -> dict[str, float]:
    """A stream's last fifth."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "data.path": str(log),
            "run_dir": folder,
            "seed": seed,
            "threads": 1,
            "log.tensorboard": False,
        }
        changes |= {"model.name": model, "schedule.warmup_steps": 100, "data.shuffle": False}
        changes |= {"model.history.lists": lists} if lists else {}
        last: dict[str, float] = train(Run.load(RECIPES / "globo.toml", changes))["progressive"][-1]
        return {name: last[name] for name in ("auc", "ne")}


def held_out(log: Path, model: str, seed: int) -> dict[str, float]:
    """Label -> AUC of the test part."""
    dataset = data.open(log)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run_dir": folder,
            "model.name": model,
            "seed": seed,
            "threads": 1,
            "log.tensorboard": False,
        }
        train(Run.of(str(log), settings))
        scores = restore(folder).scores
        names = enumerate(dataset.schema.labels)
        return {
            name: evaluate(scores, dataset.loader(4096, split="test"), label=i)["auc"]
            for i, name in names
        }


def movielens(file: Path, out: Path, labels: list[str]) -> Path:
    """ML-100k with these labels."""
    stars = {
        name: Column(kind="label", source="rating:float", threshold=LABELS[name]) for name in labels
    }
    ids = {
        "user": Column(kind="categorical", source="user_id:token", table="user"),
        "movie": Column(kind="categorical", source="item_id:token", table="movie"),
    }
    split = Split(by="ratio", valid=0.1, test=0.1)
    schema = Schema(
        columns=stars | ids, encodings={"user": Encoding(), "movie": Encoding()}, split=split
    )
    return data.prepare([file], out, schema=schema, overwrite=True).out


def lists(log: Path, kept: Path, seeds: range, read: list[str]) -> None:
    """Pooled and read by transformers, a model after the other."""
    forms = {"pooled": [], "transformers": read}
    jobs = {f"{m}-{f}-{s}": (log, m, forms[f], s) for s in seeds for m in READERS for f in forms}
    found = cells(kept, streamed, jobs)
    print(f"\nlists: {len(seeds)} seeds, mean and standard deviation")
    print(f"{'model':<8}{'lists':<14}{'AUC':>20}{'NE':>20}")
    for model in READERS:
        each = {form: [found[f"{model}-{form}-{seed}"] for seed in seeds] for form in forms}
        for form, runs in each.items():
            print(
                f"{model:<8}{form:<14}"
                + "".join(f"{spread([one[m] for one in runs]):>20}" for m in ("auc", "ne"))
            )
        gain, error = paired(
            *([one["auc"] for one in each[form]] for form in ("transformers", "pooled"))
        )
        print(
            f"{model}: transformers change AUC by {gain:+.4f}, standard error of paired seeds"
            f" {error:.4f}"
        )


def labels(logs: dict[str, Path], kept: Path, seeds: range) -> None:
    """A model of both labels, and one of each."""
    jobs: dict[str, tuple[Any, ...]] = {
        f"{m}-both-{s}": (logs["both"], m, s) for s in seeds for m in SHARERS
    }
    jobs |= {
        f"{m}-{name}-{s}": (logs[name], m, s) for s in seeds for m in SHARERS[:2] for name in LABELS
    }
    found = cells(kept, held_out, jobs)
    print(f"\nlabels: {len(seeds)} seeds, AUC, mean and standard deviation")
    print(f"{'model':<16}" + "".join(f"{name:>20}" for name in LABELS))
    for model, both in [(m, True) for m in SHARERS] + [(m, False) for m in SHARERS[:2]]:
        runs = {
            name: [found[f"{model}-{'both' if both else name}-{s}"][name] for s in seeds]
            for name in LABELS
        }
        print(
            f"{model + ('' if both else ' alone'):<16}"
            + "".join(f"{spread(runs[name]):>20}" for name in LABELS)
        )


def main() -> None:
    """Lists, then labels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with ml_100k")
    parser.add_argument("--globo", type=Path, help="the request log that globo_requests.py makes")
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--quick", action="store_true", help="a made log, one seed")
    asked = parser.parse_args()
    if not asked.globo and not asked.data and not asked.quick:
        parser.error("give --globo, --data or --quick")
    seeds = range(1 if asked.quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        kept = asked.cells if asked.cells and not asked.quick else Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        if asked.quick:
            lists(stream(kept, None), kept, seeds, ["history"])
        elif asked.globo:
            lists(stream(kept, asked.globo, "globo_sessions.schema.toml"), kept, seeds, LISTS)
        if asked.data:
            file = asked.data / "ml_100k" / "ml-100k.inter"
            each = {"both": list(LABELS), **{name: [name] for name in LABELS}}
            labels(
                {name: movielens(file, kept / name, of) for name, of in each.items()}, kept, seeds
            )


if __name__ == "__main__":
    main()
