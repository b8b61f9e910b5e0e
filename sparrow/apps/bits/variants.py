"""Models that differ from a served one in the formats of their tables and products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

import torch
from torch import Tensor

from sparrow.analysis.judge import Judge
from sparrow.apps.bits.calibrate import ProductStats
from sparrow.apps.fewer.parts import Choice, Part
from sparrow.core import Batch
from sparrow.core.config import Family
from sparrow.core.errors import UserError
from sparrow.embeddings.choices import Override
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.mapped import LeveledRows
from sparrow.kernels.formats import RowFormat, converted, fp16, fp32, int4, int8
from sparrow.metrics.intervals import Estimate
from sparrow.serving import Scorer
from sparrow.serving.products import FORMATS, format_of, name_fields
from sparrow.serving.rows import tensors_of, write_rows
from sparrow.serving.scorer import DENSE, assemble, table_file, weights
from sparrow.trained.build import scoring, tables_of
from sparrow.trained.calibrators import calibrated
from sparrow.trained.run import Run

EXACT = "fp32"
Inputs = Literal["calibrated", "of-each-row"]
TABLES: dict[str, RowFormat] = {  # how rows are converted, narrowest first
    "int4": int4.Config(rounding="nearest", search="greedy"),
    "int8": int8.Config(rounding="nearest"),
    "fp16": fp16.Config(rounding="nearest"),
}
FIRST = 1 << 16  # rows by which the error of a format is told


class Variants:
    """Makes models of other formats from one in fp32.

    Args:
        scorer: the model.
        stats: what its products do, see `observe`.
        place: a folder for converted rows.
        row_formats: name -> how rows are converted to this format, narrowest first.
        inputs: whether those of a product have the range that was calibrated, or each row one of
            its own.
    """

    def __init__(
        self,
        scorer: Scorer,
        stats: Mapping[str, ProductStats],
        place: Path,
        row_formats: Mapping[str, RowFormat] = MappingProxyType(TABLES),
        inputs: Inputs = "calibrated",
    ) -> None:
        self.scorer = scorer
        self.stats = stats
        self._place = place
        self._row_formats = dict(row_formats)
        self._inputs = inputs
        self._dense = weights(scorer.folder, DENSE)
        self._encoded: dict[tuple[str, str], dict[str, Tensor]] = {}
        specs = [spec for tables in tables_of(scorer.model) for spec in tables.specs]
        self._tables = {spec.name: spec.components for spec in specs}
        self._formats: dict[str, RowFormat] = {}
        for components in self._tables.values():
            self._formats |= {component.name: component.format for component in components}

    def parts(self, tables: str, products: str) -> list[Part]:
        """Returns the parts of the model that can have fewer bits, and would take fewer bytes.

        Tables that are not in fp32 stay as they are, and so do those whose ids come and go. A
        format in which a row would not be finite is not tried, whether or not rows of a log meet
        it.

        Args:
            tables: the narrowest format of rows.
            products: the narrowest format of products.
        """
        parts = []
        formats = _from(tables, list(self._row_formats))
        for name, components in self._tables.items():
            plain = all(isinstance(c.format, fp32.Config) and not c.policy for c in components)
            steps = []
            for format in formats if plain else ():
                is_smaller = all(self._row(c, format) < self._row(c, EXACT) for c in components)
                if is_smaller and all(self._holds(c, format) for c in components):
                    steps.append(format)
            if steps:
                parts.append(Part(kind="table", name=name, steps=(*steps, EXACT)))
        native = [name for name in _from(products, list(FORMATS)) if format_of(name).is_native()]
        for site in self.stats if native else ():
            parts.append(Part(kind="product", name=site, steps=(*native, EXACT)))
        return parts

    def score(self, choice: Choice) -> Callable[[Batch], Tensor]:
        """Returns the scores of the model with some formats."""
        score = scoring(self.model(choice), self.scorer.run, self.scorer.schema)
        return torch.inference_mode()(calibrated(score, self.scorer.calibrators))

    def ne(self, judge: Judge, choice: Choice) -> list[Estimate]:
        """Returns NE of a choice for each label."""
        return judge.ne_of(self.score(choice))

    def model(self, choice: Choice) -> Any:
        """Returns the model with some formats."""
        dense, few_bits = self.stored(choice)
        return assemble(
            self.run(choice),
            self.scorer.schema,
            self.rows,
            dense,
            few_bits,
            self.scorer.folder.path,
        )

    def stored(self, choice: Choice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the dense weights that stay, and the products in other formats, see
        `products.put`.
        """
        dense = dict(self._dense)
        few_bits = dict[str, Tensor]()
        for part, name in choice.items():
            if part.kind == "product" and name != EXACT:
                del dense[part.name]
                few_bits |= name_fields(part.name, name, self.encoded(part.name, name))
        return dense, few_bits

    def encoded(self, site: str, name: str) -> dict[str, Tensor]:
        """Returns the fields of a product in a format. They are made once."""
        if (site, name) not in self._encoded:
            stats = self.stats[site]
            range_ = stats.range if self._inputs == "calibrated" else None
            self._encoded[site, name] = format_of(name).encode(stats.weight_OI, range_)
        return self._encoded[site, name]

    def run(self, choice: Choice) -> Run:
        """Returns the settings of the model with some formats."""
        tables = self.scorer.run.tables
        names_by_format: dict[str, list[str]] = {}
        for part, name in choice.items():
            if part.kind == "table" and name != EXACT:
                names_by_format.setdefault(name, []).append(part.name)
        overrides = [
            Override(names=tuple(sorted(names)), format={"name": name, "rounding": "nearest"})
            for name, names in sorted(names_by_format.items())
        ]
        return replace(
            self.scorer.run, tables=replace(tables, overrides=(*tables.overrides, *overrides))
        )

    def rows(self, component: Component) -> LeveledRows:
        """Returns a component's rows in its format, mapped."""
        return LeveledRows(fields=tensors_of(self.file(component)))

    def file(self, component: Component) -> Path:
        """Returns the file with a component's rows in its format. They are converted once."""
        before = self.scorer.folder.path / table_file(component.name)
        if self._formats[component.name] == component.format:
            return before
        name = Family("sparrow.kernels.formats").name_of(component.format)
        path = self._place / quote(f"{name} {component.name}", safe="")
        if not path.exists():
            rows = LeveledRows(
                fields=converted(tensors_of(before)["weight"], self._row_formats[name])
            )
            with path.open("wb") as file:
                write_rows(file, rows)
        return path

    def error(self, part: Part, name: str) -> float:
        """Returns the relative error of a table's values in a format, |w' - w| / |w|, of its first
        rows.
        """
        wrong = total = 0.0
        for component in self._tables[part.name]:
            weight_RD = self.rows(component).fields["weight"][:FIRST]
            format = self._row_formats[name]
            wrong += float(
                (format.decode(format.encode(weight_RD, None), component.dim) - weight_RD)
                .square()
                .sum()
            )
            total += float(weight_RD.square().sum())
        return (wrong / total) ** 0.5 if total else 0.0

    def shape(self, part: Part) -> list[int]:
        """Returns the outputs and inputs of a product, or the rows and columns of a table's
        components together.
        """
        if part.kind == "product":
            return list(self.stats[part.name].weight_OI.shape)
        components = self._tables[part.name]
        return [
            sum(component.rows for component in components),
            max(component.dim for component in components),
        ]

    def bytes_of(self, part: Part, name: str) -> int:
        """Returns the bytes of a part in a format."""
        if part.kind == "product":
            if name == EXACT:
                return self._dense[part.name].nbytes
            return sum(tensor.nbytes for tensor in self.encoded(part.name, name).values())
        return sum(c.rows * self._row(c, name) for c in self._tables[part.name])

    def _holds(self, component: Component, name: str) -> bool:
        """Returns whether rows of a component in fp32 stay finite in a format: those with the most
        extreme numbers.
        """
        weight_RD = tensors_of(self.scorer.folder.path / table_file(component.name))["weight"]
        low_R = weight_RD.amin(1)
        high_R = weight_RD.amax(1)
        rows_3 = torch.stack([low_R.argmin(), high_R.argmax(), (high_R - low_R).argmax()])
        format = self._row_formats[name]
        return bool(
            format.decode(format.encode(weight_RD[rows_3], None), component.dim).isfinite().all()
        )

    def _row(self, component: Component, name: str) -> int:
        """Returns the bytes of the values of a row in a format."""
        if name == EXACT:
            return component.dim * 4
        fields = self._row_formats[name].fields(component.dim)
        return sum(field.bytes_row for field in fields.values())


def _from(narrowest: str, formats: list[str]) -> list[str]:
    """Returns a format and the wider ones; none for "fp32"."""
    if narrowest == EXACT:
        return []
    if narrowest not in formats:
        raise UserError(
            f"{narrowest!r} is no format here; choose one of {', '.join((*formats, EXACT))}"
        )
    return formats[formats.index(narrowest) :]
