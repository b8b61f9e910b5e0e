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
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.core.errors import UserError
from sparrow.core.files import whole
from sparrow.distributed import World
from sparrow.embeddings import stored_in
from sparrow.embeddings.stores.folded import FoldedStore
from sparrow.features.schema import Schema
from sparrow.layers import computing
from sparrow.layers.watch import Operands, watched
from sparrow.losses import binary_cross_entropy
from sparrow.numerics.learned import BLOCK, MatrixNormal, Moments
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.run import Run

FILE = "probe.safetensors"
FORMAT = "1"
NEED = "the probe"  # among what a run needs of memory
EVERY = 100  # steps
FEWEST, ROWS = 32, 128  # of a product, that a snapshot takes
PARTS = ("x", "grad", "sizes", "weight")


@dataclass(kw_only=True, eq=False)
class Learned:
    """Of a product y = x W^T: the distributions of the rows of x and of dy, and of W.

    sizes: of the logarithm of |dy| of rows that are not 0. It varies far more than a normal distribution of dy has it.
    Of two activations rows are those of `flat`. Then of `weight` the shape alone counts.
    """

    x: Moments
    grad: Moments
    sizes: Moments
    weight: MatrixNormal

    @classmethod
    def empty(cls, shape: tuple[int, int], columns: tuple[int, int] | None = None) -> Learned:
        """Returns what is known before the first row. shape: of W, [out, in]. columns: of `flat`, by default those."""
        columns = columns or (shape[1], shape[0])
        return cls(x=Moments(columns[0]), grad=Moments(columns[1]), sizes=Moments(1), weight=MatrixNormal(shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Of W, [out, in]."""
        return self.weight.mean.shape[0], self.weight.mean.shape[1]

    @property
    def columns(self) -> tuple[int, int]:
        """Of rows of x and of dy."""
        return len(self.x.mean), len(self.grad.mean)

    @property
    def of_examples(self) -> bool:
        """Whether it is of two activations."""
        return self.columns != self.shape[::-1]


def flat(of: Operands) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Returns the rows of x and of dy whose distributions are learnt, and the shape of W, [out, in].

    Of two activations a row has all that an example has: its x and then its W, unless they are the same; all of its dy.
    So numbers of an example depend on each other as they do in the log. Leading sizes of W are as if they were of out.
    """
    if not of.of_examples:
        return of.x, of.grad, (of.weight.shape[0], of.weight.shape[1])
    parts = [of.x] if of.weight is of.x else [of.x, of.weight]
    shape = (of.weight.shape[1:-1].numel(), of.weight.shape[-1])
    return torch.cat([part.flatten(1) for part in parts], 1), of.grad.flatten(1), shape


class Probe:
    """Learns the distributions of a run's operands, from some rows of every EVERY-th step.

    The run's weights do not depend on it: it draws no random numbers, and computes nothing that they depend on. Steps
    whose rows are not finite are left out. Nothing is learnt of products with several weights at once, and of two
    activations whose sizes differ between batches.

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
        self._varying: set[str] = set()  # sites whose sizes differ between batches, or are too large

    def at(self, step: int) -> AbstractContextManager[object]:
        """Returns a context for a step of training. step: its number, from 0."""
        if self._model is None or step % self._every != self._every - 1:
            return nullcontext()
        if (turn := step // self._every) != self._turn:  # else it is another part of an accumulated batch
            self._turn, self._weighed = turn, set()
        return watched(self._model, self.see, self._rows)

    def see(self, name: str, of: Operands) -> None:
        """Learn from some rows of a product. name: the site."""
        if name in self._varying or (of.weight.dim() != 2 and not of.of_examples):
            return
        x, grad, shape = flat(of)
        if not (x.isfinite().all() and grad.isfinite().all()):
            return
        columns = (x.shape[1], grad.shape[1])
        if of.of_examples and max(columns) > BLOCK:  # its covariances would take more memory than the model
            self._varying.add(name)
            return
        if name not in self.found:
            self.found[name] = Learned.empty(shape, columns)
        mine = self.found[name]
        if (mine.shape, mine.columns) != (shape, columns):
            self._varying.add(name)
            del self.found[name]
            return
        x, grad = x.cpu(), grad.cpu()
        mine.x.update(x)
        mine.grad.update(grad)
        sizes = torch.linalg.vector_norm(grad, dim=1)
        mine.sizes.update(sizes[sizes > 0].log()[:, None])
        each = -(-24 * max(mine.shape) // self._batch_size)
        is_due = self._world.rank == 0 and name not in self._weighed and self._turn % each == 0
        if is_due and not of.of_examples:
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
        sizes: dict[str, set[tuple[int, ...]]] = {}
        mine = {name: [*of.shape, *of.columns] for name, of in self.found.items()}
        for of_rank in self._world.gathered("probe", mine):
            for name, has in of_rank.items():
                sizes.setdefault(name, set()).add(tuple(has))
        merged = {}
        for name in sorted(name for name, of in sizes.items() if len(of) == 1):  # else it is as if it varied
            ((out, of_x, *columns),) = sizes[name]
            ours = self.found.get(name) or Learned.empty((out, of_x), (columns[0], columns[1]))
            x, grad, norms = (self._summed(of) for of in (ours.x, ours.grad, ours.sizes))
            merged[name] = Learned(x=x, grad=grad, sizes=norms, weight=ours.weight)
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


def bytes_of(run: Run, schema: Schema, batch: Batch) -> int:
    """Returns the bytes of memory that a probe of a run takes, with what it takes to write its file.

    It is found by a snapshot of the same model over tables of a few rows.

    Args:
        run: its settings.
        schema: of its log.
        batch: some rows.
    """
    with torch.random.fork_rng(devices=[]), within_memory("cpu"), stored_in(FoldedStore):
        model: Any = untrained(run, schema)
        for tables in tables_of(model):
            tables.mode = "off"
        part = batch.part(0, min(FEWEST, batch.batch_size))
        probe = Probe(model, part.batch_size, every=1)
        with probe.at(0), computing(run.precision, torch.device("cpu")):
            binary_cross_entropy(model(part), part).backward()
    sizes = [t.nbytes for of in probe.found.values() for name in PARTS for t in getattr(of, name).tensors().values()]
    return 3 * sum(sizes)  # safetensors has all of them twice while it writes


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
            x, grad, sizes = (Moments.of(of[part]) for part in ("x", "grad", "sizes"))
            learned = Learned(x=x, grad=grad, sizes=sizes, weight=MatrixNormal.of(of["weight"]))
            if learned.of_examples and (len(x.mean) % learned.shape[1] or len(x.mean) < learned.weight.mean.numel()):
                raise ValueError(f"{site}: sizes do not fit each other")
            found[site] = learned
        return found, int(about["step"])
    except (SafetensorError, ValueError, KeyError, IndexError, RuntimeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: damaged ({told}); delete it, or train again with --probe") from None
