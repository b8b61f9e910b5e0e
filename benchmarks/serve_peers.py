"""Other servers of models, beside `sparrow serve`: environments of their own, started for
`serve.py --cases peers`.

    python benchmarks/serve_peers.py --peers PEERS    # makes the environments, and starts each server once

Each gets the same requests, in raw columns, and has to return the right scores. FastAPI has what
people write: pandas for the columns, and a model of torch that runs operator by operator. MLServer,
KServe's server and Triton (of the wheel nvidia-pytriton, with its backend for Python) have the
model in onnxruntime, as `sparrow convert` writes it, and numpy and dictionaries for the columns.
"ours" in the place of these is Sparrow's encoder and scorer, so that only serving differs. Sparrow
is then read from this checkout, and torch is of the same version as here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from _peers.rank_requests import PROTOCOLS, asked, check
from _peers.rank_service import Server, ended, runner, wait
from _peers.rank_work import Work

from sparrow.apps.convert import convert
from sparrow.apps.convert.program import Program
from sparrow.apps.convert.write import _trace
from sparrow.serving import Scorer, load

SERVERS = Path(__file__).parent / "_peers" / "serving"
ROOT = Path(__file__).parents[1]
CLOSE = 2e-5  # how far scores may lie apart: onnxruntime multiplies in another order


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server.

    Args:
        packages: of its environment.
        protocol: of the requests that it gets, see `rank_requests.PROTOCOLS`.
        ready: the path that says whether it answers.
        kinds: what it may have inside, see `features.made`.
        start: environment's Python, folder for its files with `bundle` in it, port, workers ->
            command.
    """

    packages: tuple[str, ...]
    protocol: str
    ready: str
    kinds: tuple[str, ...]
    start: Callable[[Path, Path, int, int], list[str]]


def _fastapi(python: Path, place: Path, port: int, workers: int) -> list[str]:
    told = [
        str(python),
        "-m",
        "uvicorn",
        "fastapi_app:app",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return [*told, "--workers", str(workers), "--no-access-log", "--log-level", "warning"]


def _mlserver(python: Path, place: Path, port: int, workers: int) -> list[str]:
    # with one worker the model is in the server's own process, where tensors do not travel
    ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    settings = {
        "host": "127.0.0.1",
        "debug": False,
        "parallel_workers": workers if workers > 1 else 0,
        **ports,
    }
    (place / "settings.json").write_text(json.dumps(settings))
    (place / "model-settings.json").write_text(
        json.dumps({"name": "model", "implementation": "mlserver_model.Model"})
    )
    return [str(python.parent / "mlserver"), "start", str(place)]


def _kserve(python: Path, place: Path, port: int, workers: int) -> list[str]:
    told = [
        str(python),
        str(SERVERS / "kserve_server.py"),
        "--http_port",
        str(port),
        "--workers",
        str(workers),
    ]
    return [*told, "--enable_grpc", "false", "--enable_latency_logging", "false"]


def _triton(python: Path, place: Path, port: int, workers: int) -> list[str]:
    site = python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    server, version = site / "pytriton" / "tritonserver", place / "models" / "model" / "1"
    version.mkdir(parents=True)
    shutil.copyfile(SERVERS / "triton_model.py", version / "model.py")
    shutil.copytree(server / "backends", place / "backends")
    stub = (
        server
        / "python_backend_stubs"
        / f"3.{sys.version_info.minor}"
        / "triton_python_backend_stub"
    )
    (place / "backends" / "python" / stub.name).symlink_to(stub)
    columns = json.loads((place / "bundle" / "tensors.json").read_text())
    inputs = [
        f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ -1 ] }}'
        for name, kind in columns.items()
    ]
    (version.parent / "config.pbtxt").write_text(
        f'name: "model"\nbackend: "python"\nmax_batch_size: 0\ninput [ {", ".join(inputs)} ]\n'
        'output [ { name: "label" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        f"instance_group [ {{ kind: KIND_CPU count: {workers} }} ]\n"
    )
    told = [str(server / "bin" / "tritonserver"), f"--model-repository={place / 'models'}"]
    told += [
        f"--backend-directory={place / 'backends'}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
    ]
    return [
        *told,
        "--model-control-mode=explicit",
        "--load-model=model",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]


TORCH = f"torch=={torch.__version__}"  # as here: for "pandas" and "ours"
INSIDE = ("numpy", "onnxruntime", TORCH, "safetensors", "pyarrow")
READY = "/v2/models/model/ready"
PEERS = {
    "fastapi": Peer(
        packages=("fastapi", "uvicorn[standard]", "pandas", *INSIDE),
        protocol="json",
        ready="/ready",
        kinds=("pandas", "ours"),
        start=_fastapi,
    ),
    "mlserver": Peer(
        packages=("mlserver", *INSIDE),
        protocol="v2 json",
        ready=READY,
        kinds=("onnx", "ours"),
        start=_mlserver,
    ),
    "kserve": Peer(
        packages=("kserve", *INSIDE),
        protocol="v2 binary",
        ready=READY,
        kinds=("onnx", "ours"),
        start=_kserve,
    ),
    "triton": Peer(  # the wheel needs numpy 1
        packages=("nvidia-pytriton", "pyarrow<22", *INSIDE),
        protocol="v2 binary",
        ready=READY,
        kinds=("onnx", "ours"),
        start=_triton,
    ),
}


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def environment(peers: Path, name: str) -> Path:
    """Returns the Python of a server's environment, which is made when it is not there.

    Raises:
        RuntimeError: with pip's last lines, when something cannot be installed.
    """
    place = peers / name
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", *PEERS[name].packages]
        for command in ([sys.executable, "-m", "venv", str(place)], pip):
            made = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if made.returncode:
                raise RuntimeError(
                    "cannot be installed: " + " | ".join(made.stdout.splitlines()[-3:])
                )
        done.touch()
    return python


# -- the model for them ----------------------------------------------------------------------------


def bundle(scorer: Scorer, log: pa.Table, folder: Path) -> Path:
    """Write what peers read: the model as ONNX and as a program of torch, and what is to be done
    with columns.

    Args:
        scorer: of a folder in fp32.
        log: rows, whose values are known to the peers' vocabularies.
        folder: is made.
    """
    folder.mkdir(parents=True)
    convert(scorer.folder.path, folder / "onnx")
    (folder / "model").symlink_to(scorer.folder.path.resolve())
    copy = load(scorer.folder.path)
    torch.export.save(
        _trace(Program(copy.model, copy.schema, with_tables=True).eval()), folder / "program.pt2"
    )
    columns, tensors = {}, {}
    for name, kind in scorer.encoder.kinds.items():
        if kind == "number":
            of = scorer.schema.columns[name]
            columns[name] = {
                "kind": "number",
                **{n: getattr(of, n) for n in ("transform", "mean", "std", "low", "high")},
            }
        else:
            columns[name] = {
                "kind": "list" if kind == "list" else "id",
                **vocabulary(scorer, log, name, kind),
            }
        values = log[name].combine_chunks()
        if kind == "list":
            tensors[name + ":lengths"], values = "INT64", values.flatten()
        is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        tensors[name] = (
            "STRING" if is_text else "INT64" if pa.types.is_integer(values.type) else "FP32"
        )
    (folder / "features.json").write_text(json.dumps(columns))
    (folder / "tensors.json").write_text(json.dumps(tensors))
    return folder


def vocabulary(scorer: Scorer, log: pa.Table, name: str, kind: str) -> dict[str, Any]:
    """Returns the values that a log has of a column, the id of each, and the id of what nobody
    knows.
    """
    values = log[name].combine_chunks()
    distinct = (values.flatten() if kind == "list" else values).drop_null().unique().to_pylist()
    nobody = -1 if isinstance(distinct[0], int) else "nobody knows this"
    rows: dict[str, list[Any]] = {
        column: [None] * (len(distinct) + 1) for column in scorer.encoder.sources
    }
    rows[name] = [[value] if kind == "list" else value for value in (*distinct, nobody)]
    *ids, unknown = scorer.encoder.batch(rows).ids[name].values_N.tolist()
    return {"values": distinct, "ids": ids, "unknown": unknown}


# -- servers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(name: str, kind: str, folder: Path, peers: Path, workers: int = 1) -> Iterator[Server]:
    """Start a peer.

    Args:
        name: of the peer.
        kind: what it has inside.
        folder: of `bundle`.
        peers: where environments are.
        workers: how many processes or instances answer.

    Raises:
        RuntimeError: when it cannot be installed or does not start.
    """
    peer, python, port = PEERS[name], environment(peers, name), free_port()
    site = next((python.parents[1] / "lib").glob("python3.*/site-packages"))
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        told = {"PEER_FOLDER": str(folder), "PEER_KIND": kind, "OMP_NUM_THREADS": "1"}
        told["PYTHONPATH"] = os.pathsep.join(map(str, (SERVERS, ROOT, site)))
        if name == "triton":  # its stub embeds the Python whose library it finds
            libraries = (
                str(sysconfig.get_config_var("LIBDIR")),
                str(site / "nvidia_pytriton.libs"),
            )
            told |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "PYTHONHOME": sys.base_prefix}
        told["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        (place / "bundle").symlink_to(folder.resolve())
        command, log = peer.start(python, place, port, workers), place / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | told, cwd=place
            )
        with ended(process):
            wait(f"http://127.0.0.1:{port}{peer.ready}", process, log, 90)
            yield Server(process=process, port=port, files=place)


def versions(peers: Path, name: str) -> str:
    """Returns what is installed of a peer, in words."""
    wanted = dict.fromkeys(re.findall(r"^[\w-]+", package)[0] for package in PEERS[name].packages)
    code = (
        "import sys; from importlib.metadata import version\nfor n in sys.argv[1:]: print(n,"
        " version(n))"
    )
    done = subprocess.run(
        [str(environment(peers, name)), "-c", code, *wanted],
        capture_output=True,
        text=True,
        check=True,
    )
    return ", ".join(done.stdout.split("\n")[:-1])


def main() -> None:
    """Make the environments, start each server with a small model, and compare its scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="a folder for their environments")
    parser.add_argument("names", nargs="*", default=list(PEERS), help="which of them")
    arguments = parser.parse_args()
    peers = arguments.peers.resolve()
    with tempfile.TemporaryDirectory() as made:
        work = Work(place=Path(made), is_quick=True)
        scorer, rows, log = work.model("dlrm")
        folder = bundle(scorer, log, Path(made) / "bundle")
        for name in arguments.names:
            for kind in PEERS[name].kinds:
                try:
                    with started(name, kind, folder, peers) as server:
                        some = asked(scorer, rows, 20, 10)
                        protocol = PROTOCOLS[PEERS[name].protocol]
                        run = runner(server.port, some, protocol, lambda _: None)
                        found = run(50.0, 50)
                        check(found, {"": some}, protocol.told, CLOSE)
                        print(
                            f"{name}, {kind}: {found.counts() or 'right'}, median"
                            f" {np.median(found.ms):.2f} ms"
                        )
                except (RuntimeError, AssertionError) as error:
                    print(f"{name}, {kind}: {error}")
            print(f"{name}: {versions(peers, name)}")


if __name__ == "__main__":
    main()
