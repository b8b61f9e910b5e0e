"""What the products of a run look like while it trains: the distributions of their operands.

This is the probe of LoKA (arXiv 2605.10886). Activations themselves are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from sparrow.core.errors import UserError
from sparrow.core.files import whole
from sparrow.distributed import World
from sparrow.layers.watch import Operands, watched
from sparrow.numerics.learned import MatrixNormal, Moments

FILE = "probe.safetensors"
FORMAT = "1"
EVERY = 100  # steps
FEWEST, ROWS = 32, 128  # of a product, that a snapshot takes
PARTS = ("x", "grad", "sizes", "weight")


@dataclass(kw_only=True, eq=False)
class Learned:
    """Of a product y = x W^T: the distributions of the rows of x and of dy, and of W.

    sizes: of the logarithm of |dy| of rows that are not 0. It varies far more than a normal distribution of dy has it.
    """

    x: Moments
    grad: Moments
    sizes: Moments
    weight: MatrixNormal

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> Learned:
        """Returns what is known before the first row. shape: of W, [out, in]."""
        return cls(x=Moments(shape[1]), grad=Moments(shape[0]), sizes=Moments(1), weight=MatrixNormal(shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Of W, [out, in]."""
        return self.weight.mean.shape[0], self.weight.mean.shape[1]


class Probe:
    """Learns the distributions of a run's operands, from some rows of every EVERY-th step.

    The run's weights do not depend on it: it draws no random numbers, and computes nothing that they depend on. Steps
    whose rows are not finite are left out. Of products of two activations, and of several weights at once, nothing is
    learnt.

    A snapshot takes a 32nd of a batch, between FEWEST and ROWS rows. One of W costs as much as some hundred rows,
    so of wide products in small batches only some snapshots take it.

    Args:
        model: None switches it off.
        batch_size: examples of a step.
        world: the ranks, each of which looks at rows of its own share.
        every: steps between two snapshots.
        rows: of a product, that a snapshot takes at most.
    """

    def __init__(
        self, model: nn.Module | None, batch_size: int, world: World | None = None, every: int = EVERY, rows: int = 0
    ) -> None:
        self.found: dict[str, Learned] = {}
        self._model, self._world, self._every = model, world or World(), every
        self._batch_size = batch_size
        self._rows = rows or max(1, min(ROWS, max(FEWEST, batch_size // 32)) // self._world.size)
        self._turn, self._written = 0, -1
        self._weighed: set[str] = set()  # in this snapshot

    def at(self, step: int) -> AbstractContextManager[object]:
        """Returns a context for a step of training. step: its number, from 0."""
        if self._model is None or step % self._every != self._every - 1:
            return nullcontext()
        self._turn, self._weighed = step // self._every, set()
        return watched(self._model, self.see, self._rows)

    def see(self, name: str, of: Operands) -> None:
        """Learn from some rows of a product. name: the site."""
        if of.weight.dim() != 2 or not (of.x.isfinite().all() and of.grad.isfinite().all()):
            return
        if name not in self.found:
            self.found[name] = Learned.empty((of.weight.shape[0], of.weight.shape[1]))
        mine = self.found[name]
        mine.x.update(of.x.cpu())
        mine.grad.update(of.grad.cpu())
        sizes = torch.linalg.vector_norm(of.grad.cpu(), dim=1)
        mine.sizes.update(sizes[sizes > 0].log()[:, None])
        each = -(-24 * max(mine.shape) // self._batch_size)
        if self._world.rank == 0 and name not in self._weighed and self._turn % each == 0:
            self._weighed.add(name)
            mine.weight.update(of.weight.cpu())

    def save(self, folder: Path, step: int) -> None:
        """Write what all ranks together have learnt to `folder`/probe.safetensors. All ranks call it.

        Args:
            folder: the run's.
            step: how many steps the run has made. Nothing is done where this was written already.
        """
        if self._model is None or step == self._written:
            return
        self._written = step
        found = self._merged()
        if self._world.rank == 0:
            save(folder / FILE, found, step)

    def _merged(self) -> dict[str, Learned]:
        """Returns what all ranks together have learnt. W is rank 0's, which all have."""
        if self._world.size == 1:
            return self.found
        shapes: dict[str, tuple[int, int]] = {}
        for of_rank in self._world.gathered("probe", {name: of.shape for name, of in self.found.items()}):
            shapes |= {name: (int(out), int(of_x)) for name, (out, of_x) in of_rank.items()}
        merged = {}
        for name in sorted(shapes):
            mine = self.found.get(name) or Learned.empty(shapes[name])
            x, grad, sizes = (self._summed(of) for of in (mine.x, mine.grad, mine.sizes))
            merged[name] = Learned(x=x, grad=grad, sizes=sizes, weight=mine.weight)
        return merged

    def _summed(self, mine: Moments) -> Moments:
        found = Moments(len(mine.mean))
        sums = torch.cat([torch.tensor([float(mine.count)], dtype=torch.float64), mine.mean * mine.count])
        self._world.all_sum("probe", sums)
        found.count, found.mean = int(sums[0]), sums[1:] / sums[0].clamp(min=1)
        found.scatter = [self._world.all_sum("probe", block) for block in mine.about(found.mean)]
        return found

    def load(self, folder: Path, step: int, say: Callable[[str], None]) -> None:
        """Go on from what a run had learnt when it wrote a checkpoint.

        Args:
            folder: the run's.
            step: of the checkpoint.
            say: is told when the file is of another step; then the probe begins anew.

        Raises:
            UserError: when it is damaged.
        """
        if self._model is None or not (folder / FILE).exists():
            return
        found, self._written = load(folder / FILE)
        if self._written != step:
            say("probe: its file is of another step than the checkpoint, so it begins anew")
        elif self._world.rank == 0:  # the ranks' rows are together in it
            self.found = found


def save(path: Path, found: Mapping[str, Learned], step: int) -> None:
    """Write distributions as safetensors. found: site -> what is known of it."""
    tensors = {
        f"{site}/{part}/{name}": tensor.contiguous()
        for site, learned in found.items()
        for part in PARTS
        for name, tensor in getattr(learned, part).tensors().items()
    }
    with whole(path) as partial:
        partial.write_bytes(safetensors.torch.save(tensors, {"format": FORMAT, "step": str(step)}))


def load(path: Path) -> tuple[dict[str, Learned], int]:
    """Returns site -> what is known of it, and after how many steps it was written. Nothing in the file is executed.

    Raises:
        UserError: when it is damaged, or of another format.
    """
    try:
        with safe_open(path, "pt") as file:
            about, names = file.metadata() or {}, list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
        parts: dict[str, dict[str, dict[str, Any]]] = {}
        for name, tensor in tensors.items():
            site, part, key = name.rsplit("/", 2)
            parts.setdefault(site, {}).setdefault(part, {})[key] = tensor
        found = {}
        for site, of in parts.items():
            x, grad = Moments.of(of["x"]), Moments.of(of["grad"])
            sizes, weight = Moments.of(of["sizes"]), MatrixNormal.of(of["weight"])
            learned = Learned(x=x, grad=grad, sizes=sizes, weight=weight)
            if learned.shape != (len(grad.mean), len(x.mean)):
                raise ValueError(f"{site}: sizes do not fit each other")
            found[site] = learned
        return found, int(about["step"])
    except (SafetensorError, ValueError, KeyError, IndexError, RuntimeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: damaged ({told}); delete it, or train again with --probe") from None
