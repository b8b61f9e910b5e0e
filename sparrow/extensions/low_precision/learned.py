"""What the operands of a product look like: normal distributions that are learned while rows pass,
and drawn from.

Of activations and gradients a mean and a covariance between columns, of weights a matrix-normal
distribution (LoKA, arXiv 2605.10886). Covariances of more than BLOCK columns are kept in blocks
along the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

BLOCK = 4096  # columns
MOMENTUM = 0.99
LEAST = 1e-6  # of a covariance's mean variance: what is added to it before it is inverted


def spans(columns: int, block: int) -> list[slice]:
    """Returns the blocks into which columns are cut."""
    return [slice(first, min(first + block, columns)) for first in range(0, columns, block)]


class Moments:
    """Mean and covariance of rows that pass in parts (Welford 1962; Chan, Golub and LeVeque 1983).

    Args:
        columns: of a row.
        block: columns whose covariances are kept.
    """

    def __init__(self, columns: int, block: int = BLOCK) -> None:
        self.spans = spans(columns, block)
        self.count = 0
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self.scatter = [
            torch.zeros(span.stop - span.start, span.stop - span.start) for span in self.spans
        ]

    def update(self, x_RK: Tensor) -> None:
        """Take rows [R, columns] into account."""
        mean_K = x_RK.mean(0, dtype=torch.float64)
        rows = len(x_RK)
        if not rows:
            return
        total = self.count + rows
        apart_K = mean_K - self.mean
        # how far both means lie apart is one more row, so that each number of a covariance is
        # written once
        apart_1K = apart_K[None] * (self.count * rows / total) ** 0.5
        centred = torch.cat([x_RK - mean_K.float(), apart_1K.float()])
        for span, scatter in zip(self.spans, self.scatter, strict=True):
            part = centred[:, span]
            scatter.addmm_(part.t(), part)
        self.mean += apart_K * (rows / total)
        self.count = total

    def about(self, mean_K: Tensor) -> list[Tensor]:
        """Returns the sums of products of deviations from another mean, in blocks."""
        apart = (self.mean - mean_K) * self.count**0.5
        return [
            s + torch.outer(apart[at], apart[at]).float()
            for at, s in zip(self.spans, self.scatter, strict=True)
        ]

    @property
    def covariance(self) -> list[Tensor]:
        """Blocks of the covariance; zeros of fewer than two rows."""
        return [scatter / max(self.count - 1, 1) for scatter in self.scatter]

    @property
    def error(self) -> float:
        """How far the covariance is likely to lie from that of all rows, as a share of its norm.

        Of n normal rows with covariance C, the mean of |S - C|^2 is (|C|^2 + tr(C)^2) / (n - 1),
        and that of |S|^2 is larger than |C|^2 by as much. It is infinite where too few rows were
        seen to tell.
        """
        if self.count < 2:
            return math.inf
        rows = self.count - 1
        blocks = self.covariance
        trace = sum(float(block.trace()) ** 2 for block in blocks)
        norm = (
            (sum(float(block.square().sum()) for block in blocks) - trace / rows)
            * rows
            / self.count
        )
        if not trace:  # nothing varies
            return 0.0
        return math.sqrt((1 + trace / norm) / rows) if norm > 0 else math.inf

    def drawn(self, rows: int, random: torch.Generator) -> Tensor:
        """Returns rows [R, columns] drawn from the normal distribution with this mean and
        covariance.
        """
        factors = [factor(block) for block in self.covariance]
        parts = [torch.randn(rows, f.shape[1], generator=random) @ f.t() for f in factors]
        return torch.cat(parts, 1) + self.mean.float()

    def tensors(self) -> dict[str, Tensor]:
        """Returns what `from_tensors` reads."""
        blocks = {f"scatter{number}": block for number, block in enumerate(self.scatter)}
        return {"count": torch.tensor(self.count), "mean": self.mean, **blocks}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Moments:
        """Returns the moments that `tensors` has given. KeyError and ValueError for others."""
        mean = tensors["mean"]
        scatter = [tensors[f"scatter{i}"] for i in range(len(tensors) - 2)]
        columns = sum(len(block) for block in scatter)
        if mean.shape != (columns,) or any(
            block.dim() != 2 or block.shape[0] != block.shape[1] for block in scatter
        ):
            raise ValueError("blocks and mean do not fit each other")
        moments = cls(columns, len(scatter[0]) if scatter else BLOCK)
        moments.count = int(tensors["count"])
        moments.mean = mean
        moments.scatter = scatter
        return moments


class MatrixNormal:
    """W ~ MN(M, U, V): entries have the mean M and covariances U between rows, V between columns,
    so V kron U in all.

    Draws pass one by one. M is their mean. U and V are means of flip-flop steps, of which older
    ones count less (Dutilleul 1999; LoKA): U' = (W - M) V^-1 (W - M)^T / N and V' = (W - M)^T U^-1
    (W - M) / M. As only U kron V is known, the mean variance in U is 1. While few draws were seen,
    inverses are of covariances drawn to a multiple of the identity. That is for inverses alone, so
    rows and columns that never change have no variance.

    Args:
        shape: rows M and columns N.
        momentum: of the means of steps.
        block: rows, or columns, whose covariances are kept.
    """

    def __init__(
        self, shape: Sequence[int], momentum: float = MOMENTUM, block: int = BLOCK
    ) -> None:
        self.momentum = momentum
        self.spans = tuple(spans(size, block) for size in shape)
        self.mean = torch.zeros(*shape)
        self.draws = 0
        self.steps = 0
        self.rows, self.columns = map(_zero_blocks, self.spans)

    def update(self, w_MN: Tensor) -> None:
        """Take a draw [M, N] into account."""
        self.draws += 1
        self.mean += (w_MN - self.mean) / self.draws
        centred = (w_MN - self.mean).double()
        if not centred.any():
            return
        self.steps += 1
        share = (1 - self.momentum) / (1 - self.momentum**self.steps)
        row_steps = self._step(centred, self.columns, *self.spans)
        unit = sum(float(block.trace()) for block in row_steps) / len(centred)
        for covariance, new in zip(self.rows, row_steps, strict=True):
            covariance.lerp_(new / unit, share)
        column_steps = self._step(centred.t(), self.rows, *self.spans[::-1])
        for covariance, new in zip(self.columns, column_steps, strict=True):
            covariance.lerp_(new, share)

    def _step(
        self,
        centred: Tensor,
        known: Sequence[Tensor],
        own_spans: Sequence[slice],
        known_spans: Sequence[slice],
    ) -> list[Tensor]:
        """Returns W K^-1 W^T / N, in blocks of rows. known: K, the covariance between columns of W,
        in blocks.
        """
        sizes, size = centred.shape
        spread = max(LEAST, min(1.0, size / (sizes * self.steps**2)))
        steps = _zero_blocks(own_spans)
        for span, block in zip(known_spans, known, strict=True):
            variance = block.diagonal().mean()
            if variance > 0:
                near = block * (1 - spread)
                near.diagonal().add_(spread * variance)
            else:  # nothing is known of it yet
                near = torch.eye(len(block), dtype=torch.float64)
            half = torch.linalg.solve_triangular(
                torch.linalg.cholesky(near), centred[:, span].t(), upper=False
            )
            for at, out in zip(own_spans, steps, strict=True):
                part = half[:, at]
                out.addmm_(part.t(), part, alpha=1 / size)
        return steps

    def drawn(self, count: int, random: torch.Generator) -> Tensor:
        """Returns matrices [count, M, N]."""
        left = [factor(block) for block in self.rows]
        right = [factor(block) for block in self.columns]
        drawn_CMN = self.mean.expand(count, *self.mean.shape).clone()
        for at, a in zip(self.spans[0], left, strict=True):
            for to, b in zip(self.spans[1], right, strict=True):
                drawn_CMN[:, at, to] += (
                    a @ torch.randn(count, a.shape[1], b.shape[1], generator=random) @ b.t()
                )
        return drawn_CMN

    def tensors(self) -> dict[str, Tensor]:
        """Returns what `from_tensors` reads."""
        blocks = {f"rows{i}": block for i, block in enumerate(self.rows)}
        blocks |= {f"columns{i}": block for i, block in enumerate(self.columns)}
        return {"draws": torch.tensor([self.draws, self.steps]), "mean": self.mean, **blocks}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> MatrixNormal:
        """Returns the distribution that `tensors` has given. KeyError and ValueError for others."""
        mean = tensors["mean"]
        block = max(len(tensors["rows0"]), len(tensors["columns0"]))
        normal = cls(mean.shape, block=block)
        normal.mean = mean
        normal.draws, normal.steps = tensors["draws"].tolist()
        for name in ("rows", "columns"):
            zeros = getattr(normal, name)
            blocks = [tensors[f"{name}{i}"] for i in range(len(zeros))]
            if [block.shape for block in blocks] != [block.shape for block in zeros]:
                raise ValueError("blocks and mean do not fit each other")
            setattr(normal, name, blocks)
        return normal


def _zero_blocks(spans: Sequence[slice]) -> list[Tensor]:
    """Returns a square of zeros for each block of rows or columns, float64."""
    sizes = [span.stop - span.start for span in spans]
    return [torch.zeros(size, size, dtype=torch.float64) for size in sizes]


def factor(covariance_KK: Tensor) -> Tensor:
    """Returns F [K, r] with F F^T = a covariance of rank r. Columns without variance have rows of 0
    in it.

    It comes from eigenvalues: a Cholesky factor does not exist of covariances that are singular, as
    those of dead ReLUs, of columns of 0 and of few rows are. Eigenvalues that are 0 but for
    rounding are left out.
    """
    live = covariance_KK.diagonal() > 0
    values, vectors = torch.linalg.eigh(covariance_KK[live][:, live].double())
    least = torch.zeros(())
    if len(values):
        least = values.clamp(min=0).amax() * len(values) * torch.finfo(torch.float32).eps
    is_large = values > least
    factor_KR = torch.zeros(len(covariance_KK), int(is_large.sum()))
    factor_KR[live] = (vectors[:, is_large] * values[is_large].sqrt()).float()
    return factor_KR
