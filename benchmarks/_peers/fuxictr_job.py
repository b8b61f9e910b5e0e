"""A model of FuxiCTR's zoo on `click_log`'s files, run by the Python that FuxiCTR is installed in.
Not for import.

    PYTHON fuxictr_job.py SPEC.json    # {"checkout": DIR, "version": "git" | "wheel", "log": folder, "work": folder,
                                       #  "stage": "prepare" | "train" | "all", "workers", "seed", "epochs",
                                       #  "batch_size", "dim", "source": of its class, in model_zoo, "settings": its own
                                       #  ones, "out": JSON to write}

The steps are those of its run_expid.py, with the settings of its templates. "git" is the checkout's
own package; "wheel" is the installed package with the checkout's class, which the wheel lacks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def parameters(spec: dict) -> dict:
    """What run_expid.py would read from its two YAML files."""
    from click_log import CATEGORICAL, NUMERIC

    log = Path(spec["log"])
    return {
        # dataset_config.yaml
        "dataset_id": spec["version"],
        "data_root": spec["work"],
        "data_format": "csv",
        "train_data": str(log / "train.csv"),
        "valid_data": str(log / "valid.csv"),
        "test_data": str(log / "test.csv"),
        "min_categr_count": 1,
        "feature_cols": [
            {"name": NUMERIC, "active": True, "dtype": "float", "type": "numeric", "fill_na": 0},
            {
                "name": CATEGORICAL,
                "active": True,
                "dtype": "str",
                "type": "categorical",
                "fill_na": "",
            },
        ],
        "label_col": {"name": "label", "dtype": "float"},
        # model_config.yaml: Base, then the model's template with the sizes of this comparison
        "model_root": os.path.join(spec["work"], "checkpoints"),
        "num_workers": spec["workers"],
        "verbose": 1,
        "early_stop_patience": 2,
        "pickle_feature_encoder": True,
        "save_best_only": True,
        "eval_steps": None,
        "debug_mode": False,
        "group_id": None,
        "use_features": None,
        "feature_specs": None,
        "feature_config": None,
        "model": Path(spec["source"]).stem,
        "model_id": f"{spec['version']}_{spec['seed']}_{spec['workers']}",
        "loss": "binary_crossentropy",
        "metrics": ["logloss", "AUC"],
        "task": "binary_classification",
        "optimizer": "adam",
        "learning_rate": 1.0e-3,
        "embedding_regularizer": 0,
        "net_regularizer": 0,
        "batch_size": spec["batch_size"],
        "embedding_dim": spec["dim"],
        "net_dropout": 0,
        "batch_norm": False,
        "epochs": spec["epochs"],
        "shuffle": True,
        "seed": spec["seed"],
        "monitor": {"AUC": 1, "logloss": -1},
        "monitor_mode": "max",
        "gpu": -1,
        **spec["settings"],
    }


def model_class(spec: dict) -> type:
    """The class of the file's name, from the checkout with both versions."""
    import importlib.util

    file = Path(spec["checkout"]) / "model_zoo" / spec["source"]
    found = importlib.util.spec_from_file_location("fuxictr_model", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, file.stem)


def main() -> None:
    """The stages asked for; what was measured goes to `out`."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["version"] == "git":
        sys.path.insert(0, spec["checkout"])
    import gc
    import logging

    import fuxictr
    import torch
    from fuxictr.features import FeatureMap
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.pytorch.torch_utils import seed_everything
    from step_times import StepTimes
    from torch.utils.flop_counter import FlopCounterMode

    logging.basicConfig(level=logging.INFO)
    given = parameters(spec)
    seed_everything(seed=given["seed"])
    folder = os.path.join(given["data_root"], given["dataset_id"])
    given["train_data"], given["valid_data"], given["test_data"] = build_dataset(
        FeatureProcessor(**given), **given
    )
    result: dict = {"package": str(Path(fuxictr.__file__).parent)}
    if spec["stage"] != "prepare":
        features = FeatureMap(given["dataset_id"], folder)
        features.load(os.path.join(folder, "feature_map.json"), given)
        os.makedirs(os.path.join(given["model_root"], given["dataset_id"]), exist_ok=True)
        model = model_class(spec)(features, **given)
        result["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        loader = RankDataLoader(features, stage="train", **given)
        train, valid = loader.make_iterator() if hasattr(loader, "make_iterator") else loader
        steps = StepTimes()
        begin = time.perf_counter()
        model.fit(train, validation_data=valid, **given)
        result |= {"seconds": time.perf_counter() - begin, "steps": steps.times}
        del train, valid
        gc.collect()
        test = RankDataLoader(features, stage="test", **given)
        test = test.make_iterator() if hasattr(test, "make_iterator") else test
        scores = model.evaluate(test)
        batch = next(iter(test))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(batch)
        result["flop"] = counter.get_total_flops() / len(batch["label"])
        result["test"] = {"auc": scores["AUC"], "logloss": scores["logloss"]}
    Path(spec["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
