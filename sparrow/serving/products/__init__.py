"""Products of a served model in fewer bits. One file per format: file `x.py` has `encode` and
`Product`.

To add a format, add its file here and its name to `FORMATS`, narrowest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from sparrow.core.errors import UserError
from sparrow.layers.product import Instead, sites

FORMATS = ("int8", "bf16")
FILE = "products.safetensors"
Range = tuple[float, float]
"""The least and the largest input of a product that its codes can say."""


class ProductFormat(Protocol):
    """What the file of a format has."""

    def encode(self, weight_OI: Tensor, inputs: Range | None) -> dict[str, Tensor]:
        """Encode a weight in this format. Returns field -> tensor.

        Args:
            weight_OI: float32, fitted to its inputs (see `NumericEmbedding.fold`).
            inputs: their range, as calibration found it; None gives each row of inputs its own.
        """
        ...

    def Product(self, fields: Mapping[str, Tensor]) -> Instead:
        """Multiplies by an encoded weight."""
        ...

    def is_native(self) -> bool:
        """Returns whether this processor does such products faster than those of fp32."""
        ...


def format_of(name: str) -> ProductFormat:
    """Returns a format.

    Raises:
        UserError: when none has this name.
    """
    if name not in FORMATS:
        raise UserError(
            f"product format {name!r} is not known here; install a newer Sparrow, or export again"
        )
    module: Any = import_module(f"{__name__}.{name}")
    return cast(ProductFormat, module)


def name_fields(site: str, name: str, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the fields of a site under the names that they have in a file."""
    return {f"{site}/{name}/{field}": tensor for field, tensor in fields.items()}


def put(model: nn.Module, stored: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> None:
    """Let a model have dense weights, and products in the formats of a file. Their own weights are
    let go.

    Args:
        model: untrained, or trained.
        stored: what `name_fields` made, of all sites.
        dense: the other weights.

    Raises:
        UserError: when they are not those of this model.
    """
    encoded: dict[str, dict[str, Tensor]] = {}
    formats = {}
    for name, tensor in stored.items():
        site, format_name, field = name.rsplit("/", 2) if name.count("/") > 1 else (name, "", "")
        formats[site] = format_name
        encoded.setdefault(site, {})[field] = tensor
    known = sites(model)
    try:
        missing, unexpected = model.load_state_dict(dense, strict=False)
    except RuntimeError as error:
        raise UserError(
            f"not of this model ({str(error).splitlines()[-1].strip()}); export it again"
        ) from None
    if unexpected or set(missing) != formats.keys() or not formats.keys() <= known.keys():
        odd = [*unexpected, *(set(missing) ^ formats.keys()), *(formats.keys() - known.keys())]
        raise UserError(f"not of this model ({odd[0]!r} is of one alone); export it again")
    for site, fields in encoded.items():
        known[site].instead = format_of(formats[site]).Product(fields)
        layer, _, weight = site.rpartition(".")
        setattr(
            model.get_submodule(layer), weight, nn.Parameter(torch.empty(0), requires_grad=False)
        )


def join_inputs(parts: Sequence[Tensor]) -> Tensor:
    """Join the inputs of a product to one matrix, float32."""
    return (parts[0] if len(parts) == 1 else torch.cat([part.float() for part in parts], 1)).float()
