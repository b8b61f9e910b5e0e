"""One wheel serves every Python from 3.11 on, and the sdist has all that it takes to build it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0")
# what a build reads of a checkout
BUILT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "sparrow")
LOADED = (
    "import sparrow, sparrow.kernels; print(sparrow.__file__); print(sparrow.kernels.missing() or"
    " 'loaded')"
)
NO_REGISTRY = r"(?i)no matching distribution found|connection|timed? ?out|name resolution|proxy"


def run(command: list[str | Path], cwd: Path, **environment: str) -> str:
    """What a command prints; it must end well."""
    env = {**os.environ, **environment}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


def interpreter(version: str) -> str:
    """The path of such a Python, on PATH or known to uv; the test is skipped where there is
    none.
    """
    found = [shutil.which(f"python{version}")]
    if uv := shutil.which("uv"):
        found.append(
            subprocess.run(
                [uv, "python", "find", version], capture_output=True, text=True
            ).stdout.strip()
        )
    for path in filter(None, found):
        # a shim may find nothing to start
        said = subprocess.run([path, "--version"], capture_output=True, text=True)
        if said.stdout.startswith(f"Python {version}."):
            return path
    pytest.skip(f"no Python {version} here, neither on PATH nor known to uv")


def environment(directory: Path, version: str, package: Path, torch: str = TORCHES[-1]) -> Path:
    """The bin folder of a new environment in which `pip install PACKAGE[cli,serve]` was the only
    step, with this torch.
    """
    run([interpreter(version), "-m", "venv", directory], ROOT)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = directory / "constraints.txt"
    others = [line for line in pinned if not line.startswith("torch==")]
    constraints.write_text("\n".join([*others, f"torch=={torch}"]))
    pip = [directory / "bin" / "python", "-m", "pip", "install", "--quiet"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*pip, "--constraint", constraints, f"{package}[cli,serve]"],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
    )
    errors = [
        line for line in done.stderr.splitlines() if line.startswith("ERROR")
    ] or done.stderr.splitlines()[-3:]
    if done.returncode and re.search(NO_REGISTRY, " ".join(errors)):
        pytest.skip(f"no package registry: {errors[-1]}")
    assert done.returncode == 0, done.stderr
    return directory / "bin"


def check_it_works(bin: Path, scratch: Path, kernels: str) -> None:
    """Generate, prepare, train, evaluate and serve, where no compiler is to be found."""
    where, said = run([bin / "python", "-I", "-c", LOADED], scratch, PATH=str(bin)).splitlines()
    assert Path(where).is_relative_to(bin.parent), "another sparrow was imported"
    assert said == kernels
    run([bin / "sparrow", "generate", "log.parquet", "--rows", "5000"], scratch, PATH=str(bin))
    run([bin / "sparrow", "prepare", "log.parquet", "--out", "data"], scratch, PATH=str(bin))
    steps = ["--loop.max_steps", "5", "--run_dir", "run"]
    run([bin / "sparrow", "train", "data", *steps], scratch, PATH=str(bin))
    assert "step 5" in run(
        [bin / "sparrow", "evaluate", "run", "--split", "test"], scratch, PATH=str(bin)
    )
    run([bin / "sparrow", "export", "run", "model", "--log", "log.parquet"], scratch, PATH=str(bin))
    command = [bin / "sparrow", "serve", "model", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(command, cwd=scratch, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            address = re.findall(r"127\.0\.0\.1:\d+", service.stdout.readline())[0]
            example = urlopen(f"http://{address}/example/0").read()
            scores = json.loads(urlopen(f"http://{address}/rank", example).read())
        finally:
            service.terminate()
    assert scores, example


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout without what was built in it."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    program = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run([sys.executable, "-c", program], source)
    (path,) = (source / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that the sdist builds, with torch and a compiler at hand."""
    if not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
        pytest.skip("no C++ compiler here")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    run([*pip, "--wheel-dir", sdist.parent, sdist], sdist.parent)
    (path,) = sdist.parent.glob("*.whl")
    if not shutil.which("auditwheel"):
        return path
    repair = ["auditwheel", "repair", "--exclude", "libtorch*", "--exclude", "libc10*"]
    run([*repair, "--wheel-dir", sdist.parent / "many", path], sdist.parent)
    (path,) = (sdist.parent / "many").glob("*-manylinux_*.whl")
    return path


def test_the_sdist_has_every_source_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    sources = {
        p.relative_to(ROOT).as_posix()
        for kind in ("py", "cpp", "h")
        for p in ROOT.glob(f"sparrow/**/*.{kind}")
    }
    assert len([name for name in sources if name.endswith(".cpp")]) > 1
    assert (
        sources | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "sparrow/py.typed"}
        <= inside
    )
    assert not [name for name in inside if name.endswith((".so", ".pyc"))]


def test_one_wheel_is_for_all_pythons(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    inside = zipfile.ZipFile(wheel).namelist()
    assert [name for name in inside if name.endswith(".so")] == ["sparrow/kernels/_cpp.abi3.so"]
    assert [name for name in inside if name.endswith("LICENSE")]


@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works(version: str, torch: str, wheel: Path, tmp_path: Path) -> None:
    check_it_works(environment(tmp_path / "venv", version, wheel, torch), tmp_path, "loaded")


def test_the_sdist_works_on_the_reference(sdist: Path, tmp_path: Path) -> None:
    # no torch where pip builds it, so no kernels
    bin = environment(tmp_path / "venv", PYTHONS[0], sdist)
    check_it_works(bin, tmp_path, "the compiled kernels are not built")
