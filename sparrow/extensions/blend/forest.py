"""Boosted trees of LightGBM, as tensors that any device evaluates without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.kernels.trees import Trees, sum_of_leaves
from sparrow.metrics import labelled

WIDEST = 1024  # ids of a column that splits may sort into two sets
_SETTINGS = {"objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "min_data_in_leaf": 30}
_SETTINGS |= {"cat_smooth": 20, "verbose": -1, "deterministic": True, "force_row_wise": True}
_SETTINGS |= {"bagging_fraction": 0.7, "bagging_freq": 1}
_FORESTS = 2  # of other rows and columns each, of which the mean counts
_COLUMNS = 8  # that a tree sees at least, where it sees half of them
_PATIENCE = 20


def available() -> bool:
    """Whether trees can be grown here."""
    try:
        import lightgbm  # noqa: F401
    except (ImportError, OSError):  # OSError: its OpenMP library is missing
        return False
    return True


class Forest(nn.Module):
    """logit_t = the sum of the values of the leaves that an example falls into. It begins without
    trees.

    Its nodes are those of `sparrow.kernels.trees.Trees`.

    Args:
        sets: the inputs that are ids below `WIDEST` in no order. All others are numbers, or ids in
            an order.
        tasks: T.
    """

    FIELDS = Trees._fields

    input_M: Tensor
    threshold_M: Tensor
    left_M: Tensor
    right_M: Tensor
    value_MT: Tensor
    set_M: Tensor
    sets_SW: Tensor
    root_G: Tensor

    def __init__(self, sets: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.sets = list(sets)
        self.tasks = tasks
        self.depth = 0
        none = torch.zeros(0, dtype=torch.long)
        for name in self.FIELDS:
            self.register_buffer(name, none)
        self.value_MT = torch.zeros(0, tasks)
        self.threshold_M = torch.zeros(0, dtype=torch.float64)
        self.sets_SW = torch.zeros(0, WIDEST, dtype=torch.uint8)

    def forward(self, inputs_BX: Tensor) -> Tensor:
        """Returns logits [B, T]. inputs_BX: float64."""
        if not len(self.root_G):
            return inputs_BX.new_zeros(len(inputs_BX), self.tasks, dtype=torch.float32)
        trees = Trees(*(self.get_buffer(name) for name in self.FIELDS))
        return sum_of_leaves(trees, inputs_BX, self.depth)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes in as many nodes as were saved."""
        for name in self.FIELDS:
            if prefix + name in state:
                setattr(self, name, torch.empty_like(state[prefix + name]))
        super()._load_from_state_dict(state, prefix, *rest)
        self.depth = self._deepest()

    def _deepest(self) -> int:
        depth = 0
        at = self.root_G
        while len(at):
            below = torch.cat([self.left_M[at], self.right_M[at]])
            at = below[torch.cat([at, at]) != below].unique()
            depth += len(at) > 0
            if depth > len(self.left_M):
                raise ValueError("its trees run in a circle")
        return depth

    def fit(
        self,
        parts: tuple[Batch, Batch],
        inputs: tuple[Tensor, Tensor],
        offsets: tuple[Tensor, Tensor],
        trees: int,
        seed: int,
        threads: int,
    ) -> None:
        """Grow two forests for each label, each of as many trees as are best for the valid rows.

        Args:
            parts: training rows and valid ones, with labels and weights.
            inputs: [N, X] of each.
            offsets: are added to the logits of each.
            trees: of a forest, at most.
            seed: of what is drawn.
            threads: how many grow them.
        """
        import lightgbm

        nodes: list[tuple[Any, ...]] = []
        sets: list[list[int]] = []
        roots = []
        share = min(max(0.5, _COLUMNS / inputs[0].shape[1]), 1.0)
        settings = {**_SETTINGS, "feature_fraction": share, "num_threads": threads}
        # "binary" takes each label above 0 for 1
        share_settings = {**settings, "objective": "cross_entropy"}
        for task in range(self.tasks):
            datasets: list[Any] = []
            known = [_labelled_rows(part, task, x) for part, x in zip(parts, inputs, strict=True)]
            if not all(len(labels_N) for labels_N, *_ in known):
                continue  # nothing tells how many trees are best
            for (labels_N, x_NX, weights_N), offset_T in zip(known, offsets, strict=True):
                base = np.full(len(x_NX), float(offset_T[task]))
                datasets.append(
                    lightgbm.Dataset(
                        x_NX.numpy(),
                        labels_N.contiguous().numpy(),
                        weight=None if weights_N is None else weights_N.numpy(),
                        init_score=base,
                        categorical_feature=self.sets,
                        reference=datasets[0] if datasets else None,
                    )
                )
            is_share = any(bool(((y_N > 0) & (y_N < 1)).any()) for y_N, *_ in known)
            for forest in range(_FORESTS):
                forest_settings = dict(share_settings if is_share else settings)
                forest_settings["seed"] = _FORESTS * seed + forest
                booster = lightgbm.train(
                    forest_settings,
                    datasets[0],
                    trees,
                    valid_sets=[datasets[1]],
                    callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
                )
                for tree in booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]:
                    roots.append(len(nodes))
                    _write(tree["tree_structure"], task, nodes, sets)
        self._take(nodes, sets, roots)

    def _take(self, nodes: list[tuple[Any, ...]], sets: list[list[int]], roots: list[int]) -> None:
        """Make tensors of nodes (input, threshold, left, right, set, task, value)."""
        columns = [list(column) for column in zip(*nodes, strict=True)] or [[]] * 7
        integers = [torch.tensor(columns[i], dtype=torch.long) for i in (0, 2, 3, 4, 5)]
        self.input_M, self.left_M, self.right_M, self.set_M, task_M = integers
        self.threshold_M = torch.tensor(columns[1], dtype=torch.float64)
        value_M1 = torch.tensor(columns[6], dtype=torch.float32)[:, None]
        self.value_MT = torch.zeros(len(nodes), self.tasks).scatter_(1, task_M[:, None], value_M1)
        self.sets_SW = torch.zeros(len(sets), WIDEST, dtype=torch.uint8)
        for row, members in zip(self.sets_SW, sets, strict=True):
            row[members] = 1
        self.root_G = torch.tensor(roots, dtype=torch.long)
        self.depth = self._deepest()


def _labelled_rows(
    part: Batch, task: int, inputs_NX: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns labels, inputs and weights of the rows of a part that have a label."""
    assert part.labels_BT is not None
    labels_N, x_NX, weights_N = labelled(part.labels_BT[:, task], inputs_NX, part.weights_B)
    return labels_N, x_NX, weights_N


def _write(
    node: dict[str, Any], task: int, nodes: list[tuple[Any, ...]], sets: list[list[int]]
) -> int:
    """Appends a node of LightGBM's dump and all below it. Returns its number."""
    number = len(nodes)
    nodes.append(())
    if "split_feature" not in node:
        nodes[number] = 0, 0.0, number, number, -1, task, node["leaf_value"] / _FORESTS
        return number
    threshold = node["threshold"]
    set_number = -1
    if node["decision_type"] == "==":
        # "3||17" is the set of 3 and 17
        set_number = len(sets)
        sets.append([int(member) for member in str(threshold).split("||")])
        threshold = 0.0
    left, right = (_write(node[side], task, nodes, sets) for side in ("left_child", "right_child"))
    nodes[number] = node["split_feature"], float(threshold), left, right, set_number, task, 0.0
    return number
