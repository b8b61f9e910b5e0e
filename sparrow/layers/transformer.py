from __future__ import annotations

import torch
from torch import Tensor, nn

from sparrow.core import Jagged
from sparrow.core.errors import UserError, require
from sparrow.kernels.expand import expand
from sparrow.layers.attention import Attention
from sparrow.layers.mlp import MLP, Linear
from sparrow.layers.norm import LayerNorm
from sparrow.layers.precision import to_compute


class CausalTransformer(nn.Module):
    """Pre-norm decoder blocks over sequences of any length.

    Every product is over the N vectors that there are, [N, dim]; only attention pads. Positions are
    counted from the end, and their vectors are learned.

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
        self.norm = LayerNorm(dim)

    def forward(self, listed: Jagged) -> Tensor:
        """Returns the output of each sequence's last vector, [rows, dim]; zeros for an empty
        sequence.

        listed: the vectors of all sequences [N, dim], and where each sequence begins.
        """
        values_ND = listed.values_N
        offsets_B1 = listed.offsets_B1
        on_host_B = listed.on_host.lengths_B.clamp(max=self.longest)
        size = len(on_host_B)
        total = int(on_host_B.sum())
        filled = int((on_host_B > 0).sum())
        most = max(int(on_host_B.max()) if size else 0, 1)
        lengths_B = offsets_B1.diff().clamp(max=self.longest)
        ends_B = lengths_B.cumsum(0)
        row_N = torch.arange(size, device=lengths_B.device).repeat_interleave(
            lengths_B, output_size=total
        )
        from_end_N = ends_B[row_N] - 1 - torch.arange(len(row_N), device=row_N.device)
        values_ND = values_ND[offsets_B1[1:][row_N] - 1 - from_end_N]
        place_N = row_N * most + lengths_B[row_N] - 1 - from_end_N
        x = values_ND + expand(self.position, from_end_N)
        for block in self.blocks:
            x = block(x, place_N, size, most)
        filled_rows = lengths_B.nonzero_static(size=filled)[:, 0]
        last = self.norm(x[ends_B[filled_rows] - 1])
        return last.new_zeros(size, last.shape[1]).index_copy(0, filled_rows, last)

    def padded(self, values_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        """Returns the output of the last vector of sequences of one length L, [B, D], of which the
        first `lengths_B` vectors count; zeros for an empty one.

        All shapes are known from those of the inputs, as programs in other formats need it. It
        computes with `longest` vectors of each sequence, however few it has.

        Args:
            values_BLD: the vectors, L >= 1.
            lengths_B: int64, 0 to L.
        """
        size = values_BLD.shape[0]
        most = self.longest
        # the last ones end each row
        at_BW = lengths_B[:, None] - most + torch.arange(most, device=lengths_B.device)
        is_vector_BW = at_BW >= 0
        places_BWD = at_BW.clamp(min=0)[:, :, None].expand(-1, -1, values_BLD.shape[2])
        x = (values_BLD.gather(1, places_BWD) + self.position.flip(0)).flatten(0, 1)
        # what is not there sees itself, because a softmax over nothing is no number
        earlier_WW = torch.ones(most, most, dtype=torch.bool, device=x.device).tril()
        itself_WW = torch.eye(most, dtype=torch.bool, device=x.device)
        mask_B1WW = ((is_vector_BW[:, None] & earlier_WW) | itself_WW)[:, None]
        for block in self.blocks:
            x = block(x, None, size, most, mask_B1WW)
        last_BD = self.norm(x.unflatten(0, (size, most))[:, -1])
        return torch.where(lengths_B[:, None] > 0, last_BD, 0)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) with a hidden layer of 4 dim."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = LayerNorm(dim)
        self.norm_mlp = LayerNorm(dim)
        # no bias: softmax ignores a bias of the keys, and Adam would follow its rounding errors
        self.qkv = Linear(dim, 3 * dim, bias=False)
        self.attention = Attention()
        self.out = Linear(dim, dim)
        self.up = MLP(dim, [4 * dim])
        self.down = Linear(4 * dim, dim)

    def forward(
        self, x: Tensor, place_N: Tensor | None, size: int, most: int, mask: Tensor | None = None
    ) -> Tensor:
        """Returns [N, dim].

        Args:
            x: [N, dim], each at place_N of [size * most]; all places where that is None.
            place_N: no vector sees the padding after its row.
            size, most: rows, and places of each.
            mask: what each place sees, bool [size, 1, most, most], instead of itself and those
                before it.
        """
        dim = x.shape[1]
        qkv = to_compute(self.qkv(self.norm_attention(x)))
        if place_N is not None:
            qkv = qkv.new_zeros(size * most, 3 * dim).index_copy(0, place_N, qkv)
        q, k, v = qkv.view(size, most, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.attention(q, k, v, causal=mask is None, mask=mask)
        mixed = mixed.transpose(1, 2).reshape(size * most, dim)
        x = x + self.out(mixed if place_N is None else mixed[place_N])
        return x + self.down(self.up(self.norm_mlp(x)))
