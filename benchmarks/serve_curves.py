"""Latency over load, and candidates a second within a limit; for `serve.py --cases curves`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from _peers.rank_requests import PROTOCOLS, Asked, asked
from _peers.rank_service import LEAST, Server, fastest, runner, same, sparrow
from _peers.rank_work import CLOSE, CLOSE_INT8, KINDS, Work, alone_ms, checker
from open_loop import Outcome
from serve_lookups import IDS, items

from sparrow.serving import Scorer
from sparrow.trained.scorer import restore

RESULTS = Path(__file__).parent / "results"
SHARES = {"json": (0.25, 0.5, 0.75, 0.9)}
SHARES_OF_OTHERS = (0.5,)
HEAD = (
    f"{'model':5} {'format':6} {'candidates':>10} {'protocol':9} {'load':>4} {'requests/s':>10}"
    f" {'requests':>8} {'p50 ms':>7} {'p99 ms':>7} {'p99.9':>7} {'candidates/s':>12}  generator"
    " late, core"
)


class Curve(NamedTuple):
    """What was measured of one size of requests in one protocol.

    best: requests a second within the limit, 0 for none. points: requests a second, and what became
    of them.
    """

    name: str
    format: str
    size: int
    protocol: str
    best: float
    points: list[tuple[float, Outcome]]


def curves(work: Work) -> None:
    """Measure all, then print candidates a second within the limits, and draw latency over load."""
    found: list[Curve] = []
    for name in work.models:
        for format in work.formats:
            scorer, rows, _ = work.model(name, format)
            requests = {size: asked(scorer, rows, size, KINDS) for size in work.sizes}
            first = work.folder(name).parent / "run"
            for size, some in requests.items():
                told = agree(scorer, some, None if scorer.is_rounded else first)
                print(
                    f"{name} {format} 1 x {size}: scorer alone {alone_ms(scorer, some):.2f} ms;"
                    f" {told}",
                    flush=True,
                )
            print(HEAD)
            for is_ids in (False, True):
                if protocols := [one for one in work.protocols if (one == "ids") == is_ids]:
                    of_items = items(work, name) if is_ids else {}
                    with sparrow(
                        scorer.folder.path, work.log, **work.options, **of_items
                    ) as server:
                        for size, some in requests.items():
                            rate = 500 / alone_ms(scorer, some)
                            for protocol in protocols:
                                made = Curve(name, format, size, protocol, 0.0, [])
                                try:
                                    found.append(curve(work, server, made, (scorer, some), rate))
                                    rate = found[-1].best or rate
                                except AssertionError as error:
                                    print(
                                        f"FAILED {name} {format} 1 x {size} {protocol}: {error}",
                                        flush=True,
                                    )
    tell(work, found)
    if not work.is_quick and any(one.best and one.protocol == "json" for one in found):
        print(
            "drawn:"
            f" {draw(work, found, RESULTS / f'{datetime.date.today()}-serve_curves.png').name}",
            flush=True,
        )


def agree(scorer: Scorer, some: Sequence[Asked], run: Path | None) -> str:
    """Compare what is wanted of the service with the scores of the same rows in one batch, and with
    those of a run.

    Args:
        scorer: it gave what is wanted.
        some: requests.
        run: directory of the trained model, which is scored as `sparrow evaluate` does it.

    Returns:
        How far they lie apart.

    Raises:
        AssertionError: when that is too far.
    """
    rows = [
        {**one.user, **{name: values[at] for name, values in one.candidates.items()}}
        for one in some
        for at in range(len(one.want_N))
    ]
    want_N = np.concatenate([one.want_N for one in some])
    others = {"in one batch": scorer.score(rows)[:, 0]}
    if run is not None:
        others["of the run"] = restore(run, which="last", device="cpu").score_rows(
            pa.Table.from_pylist(rows)
        )[:, 0]
    apart = {of: float(np.abs(other_N - want_N).max()) for of, other_N in others.items()}
    most = CLOSE_INT8 if scorer.is_rounded else CLOSE
    assert max(apart.values()) <= most, f"scores lie {apart} apart"
    return f"{len(rows)} scores differ from those " + ", ".join(
        f"{of} by {far:.1e}" for of, far in apart.items()
    )


def curve(
    work: Work, server: Server, made: Curve, of: tuple[Scorer, list[Asked]], first: float
) -> Curve:
    """Measure one curve, and print a line for each of its rates. first: the rate to begin with."""
    scorer, some = of
    protocol = made.protocol
    told = "json" if protocol == "ids" else protocol
    sends = (PROTOCOLS | {"ids": IDS})[protocol]
    close = CLOSE_INT8 if scorer.is_rounded else CLOSE
    far, light = same(server.port, some, sends)
    assert far <= close, f"scores lie {far} apart"
    run = runner(server.port, some, sends, checker(some, told, close))
    target = 100_000 if protocol == "json" and not scorer.is_rounded else 10_000
    step = 2.0 if protocol == "json" else 1.25
    rate, best = fastest(
        run, work.limit(made.name), first, work.counts(target), work.probe_s, step, light
    )
    made.points.append((rate or LEAST, best))
    print(f"each of {len(some)} requests, alone: scores differ from the scorer's by {far:.1e}")
    print(line(made, "100%" if rate else "none", made.points[-1]), flush=True)
    for share in SHARES.get(protocol, SHARES_OF_OTHERS) if rate else ():
        made.points.append((share * rate, run(share * rate, work.counts(10_000)(share * rate))))
        print(line(made, f"{share:.0%}", made.points[-1]), flush=True)
    return made._replace(best=rate)


def line(of: Curve, load: str, point: tuple[float, Outcome]) -> str:
    """Returns a line of the table. A load at which the generator was late says nothing of the
    service.
    """
    rate, outcome = point
    many = len(outcome.ms)
    p50, p99, p999 = np.percentile(outcome.ms, [50, 99, 99.9]) if many else [np.nan] * 3
    rare = f"{p999:7.2f}" if many >= 1_000 else f"{'-':>7}"
    late = outcome.late_ms
    return (
        f"{of.name:5} {of.format:6} {of.size:10} {of.protocol:9} {load:>4} {rate:10,.0f}"
        f" {len(outcome.status):8,} {p50:7.2f} {p99:7.2f} {rare}"
        f" {of.size * many / outcome.seconds:12,.0f}  {late:.2f} ms, {outcome.core:.2f}"
        + (f"; {outcome.counts()}" if outcome.counts() else "")
        + ("; too late, no figure of the service" if late > p99 / 4 else "")
    )


def tell(work: Work, found: Sequence[Curve]) -> None:
    """Print candidates a second within the limits, a line for each model and protocol."""
    print(
        "\ncandidates/s with p99 within the limit; 0 where no rate of 10 requests/s and more"
        " holds it"
    )
    print(
        f"{'model':5} {'limit':>6} {'format':6} {'protocol':9}"
        + "".join(f"{f'1 x {s}':>10}" for s in work.sizes)
    )
    best = {(one.name, one.format, one.protocol, one.size): one.best * one.size for one in found}
    for name, format, protocol in dict.fromkeys(key[:3] for key in best):
        each = "".join(
            f"{best.get((name, format, protocol, size), math.nan):10,.0f}" for size in work.sizes
        )
        print(f"{name:5} {work.limit(name):3g} ms {format:6} {protocol:9}{each}")


def draw(work: Work, found: Sequence[Curve], out: Path) -> Path:
    """Draw p50 (dashed) and p99 over candidates a second: a panel for each model and format, a
    colour for each size.

    Lines are of JSON. Of another protocol, the rate that holds the limit is a point.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((one.name, one.format) for one in found))
    colors = {size: f"C{number}" for number, size in enumerate(work.sizes)}
    markers = {"json": "o", "v2 json": "s", "v2 binary": "^", "ids": "D"}
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.4 * len(panels), 4.6), squeeze=False, sharey=True
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for one in found:
            if (one.name, one.format) == panel and one.best:
                points = sorted(one.points)[:: 1 if one.protocol == "json" else -len(one.points)]
                loads = [one.size * rate for rate, _ in points]
                for percent, style in (
                    ((50, "--"), (99, "-")) if one.protocol == "json" else ((99, "none"),)
                ):
                    each = [float(np.percentile(outcome.ms, percent)) for _, outcome in points]
                    axis.plot(
                        loads,
                        each,
                        linestyle=style,
                        marker=markers[one.protocol],
                        markersize=4,
                        color=colors[one.size],
                    )
        axis.axhline(work.limit(panel[0]), color="gray", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", yscale="log", title=f"{panel[0]}, {panel[1]}", xlabel="candidates/s")
        axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes[0][0].set_ylabel("ms from due to answered")
    line = pyplot.Line2D
    entries = [line([], [], color=color, label=f"1 x {size}") for size, color in colors.items()]
    entries += [
        line([], [], color="gray", linestyle=s, label=n) for s, n in (("--", "p50"), ("-", "p99"))
    ]
    entries += [line([], [], color="gray", linestyle=":", label="limit of p99")]
    shown = [protocol for protocol in markers if protocol in work.protocols]
    entries += [
        line([], [], color="gray", marker=markers[p], linestyle="none", label=p) for p in shown
    ]
    axes[0][-1].legend(handles=entries, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
    return out
