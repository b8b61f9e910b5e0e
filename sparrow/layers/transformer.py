from __future__ import annotations

import torch
from torch import Tensor, nn

from sparrow.core import Jagged
from sparrow.core.errors import UserError, require
from sparrow.kernels.expand import expand
from sparrow.layers.attention import attention
from sparrow.layers.mlp import MLP, Linear
from sparrow.layers.precision import to_compute


class CausalTransformer(nn.Module):
    """Pre-norm decoder blocks over sequences of any length.

    Every product is over the N vectors that there are, [N, dim]; only attention pads. Positions are counted from the
    end, and their vectors are learned.

    Args:
        dim: size of a vector.
        layers: how many blocks.
        heads: of each attention; they must divide dim.
        longest: how many of the last vectors of a sequence are used.

    Raises:
        UserError: when heads do not divide dim.
    """

    def __init__(self, dim: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        require(least=1, layers=layers, heads=heads, longest=longest)
        if dim % heads:
            raise UserError(f"heads: {heads} do not divide dim {dim}; take a divisor")
        self.longest = longest
        self.position = nn.Parameter(torch.randn(longest, dim) * dim**-0.5)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, listed: Jagged) -> Tensor:
        """Returns the output of each sequence's last vector, [rows, dim]; zeros for an empty sequence.

        listed: the vectors of all sequences [N, dim], and where each sequence begins.
        """
        values_ND, offsets_B1 = listed.values_N, listed.offsets_B1
        on_host_B = listed.on_host.lengths_B.clamp(max=self.longest)
        size, total, filled = len(on_host_B), int(on_host_B.sum()), int((on_host_B > 0).sum())
        most = max(int(on_host_B.max()) if size else 0, 1)
        lengths_B = offsets_B1.diff().clamp(max=self.longest)
        ends_B = lengths_B.cumsum(0)
        row_N = torch.arange(size, device=lengths_B.device).repeat_interleave(lengths_B, output_size=total)
        from_end_N = ends_B[row_N] - 1 - torch.arange(len(row_N), device=row_N.device)
        values_ND = values_ND[offsets_B1[1:][row_N] - 1 - from_end_N]
        place_N = row_N * most + lengths_B[row_N] - 1 - from_end_N
        x = values_ND + expand(self.position, from_end_N)
        for block in self.blocks:
            x = block(x, place_N, size, most)
        some = lengths_B.nonzero_static(size=filled)[:, 0]
        last = self.norm(x[ends_B[some] - 1])
        return last.new_zeros(size, last.shape[1]).index_copy(0, some, last)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) with a hidden layer of 4 dim."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        # no bias: softmax ignores a bias of the keys, and Adam would follow its rounding errors
        self.qkv = Linear(dim, 3 * dim, bias=False)
        self.out = Linear(dim, dim)
        self.up = MLP(dim, [4 * dim])
        self.down = Linear(4 * dim, dim)

    def forward(self, x: Tensor, place_N: Tensor, size: int, most: int) -> Tensor:
        """Returns [N, dim]. x: [N, dim], each at place_N of [size * most]; no vector sees the padding after its row."""
        dim = x.shape[1]
        qkv = to_compute(self.qkv(self.norm_attention(x)))
        padded = qkv.new_zeros(size * most, 3 * dim).index_copy(0, place_N, qkv)
        q, k, v = padded.view(size, most, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = attention(q, k, v, causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size * most, dim)[place_N])
        return x + self.down(self.up(self.norm_mlp(x)))
