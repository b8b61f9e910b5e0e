"""What the products of a run look like while it trains: the distributions of their operands.

This is the probe of LoKA (arXiv 2605.10886). Activations themselves are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import override

from sparrow import checkpoint
from sparrow.checkpoint import Checkpoint
from sparrow.core import Batch
from sparrow.core.errors import UserError, first_line
from sparrow.core.files import replace_file
from sparrow.distributed import World, run_on_rank0
from sparrow.embeddings import Placement
from sparrow.embeddings.stores.folded import FoldedStore
from sparrow.extensions.low_precision import PROBE_FILE
from sparrow.extensions.low_precision.learned import BLOCK, MatrixNormal, Moments
from sparrow.extensions.low_precision.watch import Operands, watched
from sparrow.features.schema import Schema
from sparrow.layers.precision import computing
from sparrow.losses import binary_cross_entropy
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback

FILE = PROBE_FILE
FORMAT = "1"
EVERY = 100  # steps
FEWEST, ROWS = 32, 128  # of a product, that a snapshot takes
PARTS = ("x", "grad", "sizes", "weight")


@dataclass(kw_only=True, eq=False)
class Learned:
    """Of a product y = x W^T: the distributions of the rows of x and of dy, and of W.

    sizes: of the logarithm of |dy| of rows that are not 0. It varies far more than a normal
    distribution of dy has it. Of two activations rows are those of `flat`. Then of `weight` the
    shape alone counts.
    """

    x: Moments
    grad: Moments
    sizes: Moments
    weight: MatrixNormal

    @classmethod
    def empty(cls, shape: tuple[int, int], columns: tuple[int, int] | None = None) -> Learned:
        """Returns what is known before the first row. shape: of W, [out, in]. columns: of `flat`,
        by default those.
        """
        columns = columns or (shape[1], shape[0])
        return cls(
            x=Moments(columns[0]),
            grad=Moments(columns[1]),
            sizes=Moments(1),
            weight=MatrixNormal(shape),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of W, [out, in]."""
        return self.weight.mean.shape[0], self.weight.mean.shape[1]

    @property
    def columns(self) -> tuple[int, int]:
        """Of rows of x and of dy."""
        return len(self.x.mean), len(self.grad.mean)

    @property
    def has_examples(self) -> bool:
        """Whether it is of two activations."""
        return self.columns != self.shape[::-1]

    @property
    def error(self) -> float:
        """How far its covariances are likely to lie from those of all rows, the worse one, see
        `Moments.error`.
        """
        return max(self.x.error, self.grad.error)

    @property
    def is_finite(self) -> bool:
        """Whether all of its numbers are. Squares of numbers above 1e19 are not, in fp32."""
        parts = [getattr(self, name).tensors() for name in PARTS]
        tensors = chain.from_iterable(part.values() for part in parts)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


def flat(operands: Operands) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Returns the rows of x and of dy whose distributions are learnt, and the shape of W, [out,
    in].

    Of two activations a row has all that an example has: its x and then its W, unless they are the
    same; all of its dy. So numbers of an example depend on each other as they do in the log.
    Leading sizes of W are as if they were of out.
    """
    if not operands.has_examples:
        return operands.x, operands.grad, (operands.weight.shape[0], operands.weight.shape[1])
    parts = [operands.x] if operands.weight is operands.x else [operands.x, operands.weight]
    shape = (operands.weight.shape[1:-1].numel(), operands.weight.shape[-1])
    return torch.cat([part.flatten(1) for part in parts], 1), operands.grad.flatten(1), shape


class Probe(Callback):
    """Learns the distributions of a run's operands, from some rows of every EVERY-th step.

    The run's weights do not depend on it: it draws no random numbers, and computes nothing that
    they depend on. Steps whose rows are not finite are left out. Nothing is learnt of products with
    several weights at once, of two activations whose sizes differ between batches, and of numbers
    whose squares are not finite.

    A snapshot takes a 32nd of a batch, between FEWEST and ROWS rows. One of W costs as much as some
    hundred rows, so of wide products in small batches only some snapshots take it.

    Args:
        model: None switches it off.
        batch_size: examples of a step.
        world: the ranks, each of which looks at rows of its own share.
        interval: steps between two snapshots.
        rows: of a product, that a snapshot takes at most.
        folder: the run's. What is learnt goes to probe.safetensors there.
        say: tells a person.
    """

    def __init__(
        self,
        model: nn.Module | None,
        batch_size: int,
        world: World | None = None,
        interval: int = EVERY,
        rows: int = 0,
        *,
        folder: Path = Path(),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder = folder
        self._say = say
        self.learned: dict[str, Learned] = {}
        # of its file, which checkpoints keep: so it is known as that of this run
        self.digest: str | None = None
        self._model = model
        self._world = world or World()
        self._interval = interval
        self._batch_size = batch_size
        self._rows = rows or max(1, min(ROWS, max(FEWEST, batch_size // 32)) // self._world.size)
        self._turn = 0
        self._written = -1
        self._weighed: set[str] = set()  # in this snapshot
        # sites whose sizes differ between batches, or are too large
        self._varying: set[str] = set()

    @override
    def stage(self, name: str) -> AbstractContextManager[object]:
        """Looks at the batches of some steps."""
        return self.at(self._world.step) if name == "batch" else nullcontext()

    def at(self, step: int) -> AbstractContextManager[object]:
        """Returns a context for a step of training. step: its number, from 0."""
        if self._model is None or step % self._interval != self._interval - 1:
            return nullcontext()
        # else it is another part of an accumulated batch
        if (turn := step // self._interval) != self._turn:
            self._turn = turn
            self._weighed = set()
        return watched(self._model, self.see, self._rows)

    def see(self, name: str, operands: Operands) -> None:
        """Learn from some rows of a product. name: the site."""
        if name in self._varying or (operands.weight.dim() != 2 and not operands.has_examples):
            return
        x, grad, shape = flat(operands)
        if not (x.isfinite().all() and grad.isfinite().all()):
            return
        columns = (x.shape[1], grad.shape[1])
        # its covariances would take more memory than the model
        if operands.has_examples and max(columns) > BLOCK:
            self._varying.add(name)
            return
        if name not in self.learned:
            self.learned[name] = Learned.empty(shape, columns)
        learned = self.learned[name]
        if (learned.shape, learned.columns) != (shape, columns):
            self._varying.add(name)
            del self.learned[name]
            return
        x = x.cpu()
        grad = grad.cpu()
        learned.x.update(x)
        learned.grad.update(grad)
        sizes = torch.linalg.vector_norm(grad, dim=1)
        learned.sizes.update(sizes[sizes > 0].log()[:, None])
        turns_a_weight = -(-24 * max(learned.shape) // self._batch_size)
        is_due = name not in self._weighed and self._turn % turns_a_weight == 0
        takes_weight = self._world.rank == 0 and is_due and not operands.has_examples
        if takes_weight and bool(operands.weight.isfinite().all()):
            self._weighed.add(name)
            learned.weight.update(operands.weight.cpu())

    @override
    def before_save(self, step: int) -> dict[str, Any]:
        """Writes what all ranks together have learnt, unless it was written. The checkpoint keeps
        the file's digest.
        """
        if self._model is not None and step != self._written:
            self._written = step
            learned = self.merged()
            if self._world.rank == 0:
                save(self._folder / FILE, learned, step)
                self.digest = _digest(self._folder / FILE)
        return {"probe": self.digest}

    def merged(self) -> dict[str, Learned]:
        """Returns what all ranks together have learnt that is finite. W is rank 0's, which all
        have.
        """
        return {name: learned for name, learned in self._sum().items() if learned.is_finite}

    def _sum(self) -> dict[str, Learned]:
        if self._world.size == 1:
            return self.learned
        sizes: dict[str, set[tuple[int, ...]]] = {}
        local_sizes = {
            name: [*learned.shape, *learned.columns] for name, learned in self.learned.items()
        }
        for rank_sizes in self._world.gathered("probe", local_sizes):
            for name, has in rank_sizes.items():
                sizes.setdefault(name, set()).add(tuple(has))
        merged = {}
        for name in sorted(sizes):
            if len(sizes[name]) > 1:  # a site whose sizes vary between ranks
                continue
            ((out, in_, *columns),) = sizes[name]
            local = self.learned.get(name) or Learned.empty((out, in_), (columns[0], columns[1]))
            merged[name] = Learned(
                x=self._summed(local.x),
                grad=self._summed(local.grad),
                sizes=self._summed(local.sizes),
                weight=local.weight,
            )
        return merged

    def _summed(self, moments: Moments) -> Moments:
        total = Moments(len(moments.mean))
        count_1 = torch.tensor([float(moments.count)], dtype=torch.float64)
        sums = torch.cat([count_1, moments.mean * moments.count])
        self._world.all_sum("probe", sums)
        total.count = int(sums[0])
        total.mean = sums[1:] / sums[0].clamp(min=1)
        total.scatter = [self._world.all_sum("probe", block) for block in moments.about(total.mean)]
        return total

    @override
    def load(self, saved: Checkpoint) -> None:
        """Go on from what the run had learnt when it wrote the checkpoint, unless the file is
        another one.
        """
        digest = self.digest = saved.state.get("probe")  # none of a run that had no probe
        if self._model is None or digest is None:
            return
        file = self._folder / FILE

        def look() -> bool:  # the ranks' rows are together in it, so rank 0 alone has them
            is_whole = file.exists() and _digest(file) == digest
            learned, written = load(file) if is_whole else ({}, None)
            if written != saved.step:
                self._say("probe: its file is not that of the checkpoint, so it begins anew")
                return False
            self.learned = learned
            return True

        if run_on_rank0(self._world, "the probe's file", look):
            self._written = saved.step


def bytes_of(run: Run, schema: Schema, batch: Batch) -> int:
    """Returns the bytes of memory that a probe of a run takes, with what it takes to write its
    file.

    It is found by a snapshot of the same model over tables of a few rows.

    Args:
        run: its settings.
        schema: of its log.
        batch: some rows.
    """
    with torch.random.fork_rng(devices=[]), within_memory("cpu"):
        model: Any = untrained(run, schema, Placement(store=FoldedStore))
        for tables in tables_of(model):
            tables.mode = "off"
        part = batch.part(0, min(FEWEST, batch.batch_size))
        probe = Probe(model, part.batch_size, interval=1)
        with probe.at(0), computing(run.precision, torch.device("cpu")):
            binary_cross_entropy(model(part), part).backward()
    size = 0
    for learned in probe.learned.values():
        for name in PARTS:
            size += sum(tensor.nbytes for tensor in getattr(learned, name).tensors().values())
    return 3 * size  # safetensors has all of them twice while it writes


def save(path: Path, learned_of: Mapping[str, Learned], step: int) -> None:
    """Write distributions as safetensors. learned_of: site -> what is known of it."""
    tensors = {}
    for site, learned in learned_of.items():
        for part in PARTS:
            for name, tensor in getattr(learned, part).tensors().items():
                tensors[f"{site}/{part}/{name}"] = tensor.contiguous()
    with replace_file(path) as partial:
        partial.write_bytes(safetensors.torch.save(tensors, {"format": FORMAT, "step": str(step)}))


def load_of_run(run_dir: Path) -> tuple[dict[str, Learned], int | None]:
    """Returns what the probe of a run has learnt, and after how many steps; None where it has no
    file.

    Raises:
        UserError: when the file is damaged, or another one than checkpoints of this run have.
    """
    file = run_dir / FILE
    directory = run_dir / "checkpoints"
    if not file.exists():
        return {}, None
    digests = set()
    for step in checkpoint.steps(directory):
        with suppress(UserError):  # another checkpoint than a damaged one may have it
            digests.add(checkpoint.load(directory, step).state.get("probe"))
    if _digest(file) not in digests:
        why = "changed since the run wrote it with a checkpoint, or another run's"
        raise UserError(f"{file}: {why}; delete it, or train again with --probe")
    return load(file)


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load(path: Path) -> tuple[dict[str, Learned], int]:
    """Returns site -> what is known of it, and after how many steps it was written. Nothing in the
    file is executed.

    Raises:
        UserError: when it is damaged, has numbers that are not finite, or is of another format.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
        parts: dict[str, dict[str, dict[str, Any]]] = {}
        for name, tensor in tensors.items():
            site, part, key = name.rsplit("/", 2)
            parts.setdefault(site, {}).setdefault(part, {})[key] = tensor
        learned_of = {}
        for site, tensors_of in parts.items():
            x = Moments.from_tensors(tensors_of["x"])
            grad = Moments.from_tensors(tensors_of["grad"])
            sizes = Moments.from_tensors(tensors_of["sizes"])
            weight = MatrixNormal.from_tensors(tensors_of["weight"])
            learned = Learned(x=x, grad=grad, sizes=sizes, weight=weight)
            if learned.has_examples and (
                len(x.mean) % learned.shape[1] or len(x.mean) < learned.weight.mean.numel()
            ):
                raise ValueError(f"{site}: sizes do not fit each other")
            if not learned.is_finite or min(x.count, grad.count, sizes.count) < 0:
                raise ValueError(f"{site}: numbers that are not finite, or fewer rows than 0")
            learned_of[site] = learned
        return learned_of, int(about["step"])
    except (SafetensorError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise UserError(
            f"{path}: damaged ({first_line(error)}); delete it, or train again with --probe"
        ) from None
