"""The container file and the KServe manifest: what they say, and a service within the bounds that
they set.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow import cli
from sparrow.apps.service import run
from sparrow.apps.service.control import swap
from sparrow.cli import serve
from sparrow.serving import Scorer, load
from tests.apps.service.asking import Server
from tests.apps.service.test_batcher import assert_scored, request
from tests.test_wheel import BUILT

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parents[3]
IMAGE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
MANIFEST: dict[str, Any] = yaml.safe_load(
    (ROOT / "deploy" / "kserve.yaml").read_text(encoding="utf-8")
)
POD = MANIFEST["spec"]["predictor"]
(CONTAINER,) = POD["containers"]
ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.+)$", IMAGE, re.MULTILINE)[0])
PROBES = [
    CONTAINER[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")
]

# A namespace in which nothing but /mnt/tmp can be written to, by a user without a name and without
# capabilities.
# This Python is in /mnt too, because it may be in a folder that only root can read.
BOUNDS = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/models /mnt/python /mnt/tmp
mount --bind "$MODELS" /mnt/models
mount --bind "$PYTHON" /mnt/python
for place in $(cut -d' ' -f5 /proc/self/mountinfo); do mount -o remount,bind,ro "$place" 2>/dev/null || true; done
mount -t tmpfs -o mode=1777 tmpfs /mnt/tmp
export TMPDIR=/mnt/tmp LD_LIBRARY_PATH=/mnt/python/lib
exec setpriv --reuid UID --regid UID --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
""".replace("UID", str(POD["securityContext"]["runAsUser"]))
BOUND = ("unshare", "--mount", "sh", "-euc", BOUNDS, "sh")


def test_the_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        serve, "run", lambda model, deltas, **named: given.update(named, model=model)
    )
    assert ENTRYPOINT[0] == "sparrow" and "command" not in CONTAINER
    assert cli.main([*ENTRYPOINT[1:], *CONTAINER["args"]]) == 0
    place, mounts = (
        given["place"],
        [Path(mount["mountPath"]) for mount in CONTAINER["volumeMounts"]],
    )
    assert (place.host, place.admin_host) == ("0.0.0.0", "0.0.0.0")
    assert [port["containerPort"] for port in CONTAINER["ports"]] == [place.port, place.admin_port]
    assert re.findall(r"^EXPOSE (.+)$", IMAGE, re.MULTILINE) == [f"{place.port} {place.admin_port}"]
    assert [given["model"].parent, place.control.parent] == mounts
    assert POD["annotations"]["prometheus.io/port"] == str(place.admin_port)
    assert given["settings"].name == MANIFEST["metadata"]["name"]
    assert str(given["settings"].workers) == CONTAINER["resources"]["requests"]["cpu"]
    assert {probe["port"] for probe in PROBES} == {place.port, place.admin_port}


def test_it_may_do_little() -> None:
    pod, container = POD["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] is True and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert re.findall(r"^USER (.+)$", IMAGE, re.MULTILINE) == [
        f"{pod['runAsUser']}:{pod['runAsGroup']}"
    ]
    assert pod["runAsUser"] > 0
    assert (
        container["readOnlyRootFilesystem"] is True
        and container["allowPrivilegeEscalation"] is False
    )
    assert container["capabilities"] == {"drop": ["ALL"]} and "privileged" not in container
    assert {volume["name"]: volume.get("emptyDir") for volume in POD["volumes"]} == {
        "models": None,
        "tmp": {},
    }
    assert [mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]] == [True, False]
    assert POD["automountServiceAccountToken"] is False


def test_the_image_is_built_of_what_is_there() -> None:
    copied = {
        name
        for line in re.findall(r"^COPY (?!--)(.+) \S+$", IMAGE, re.MULTILINE)
        for name in line.split()
    }
    ignored = (ROOT / "deploy" / "Containerfile.dockerignore").read_text(encoding="utf-8")
    assert (
        copied == {*BUILT, "constraints.txt"} == set(re.findall(r"^!(.+)$", ignored, re.MULTILINE))
    )
    assert all((ROOT / name).exists() for name in copied)
    built, used = re.findall(r"^FROM python:(\S+)", IMAGE, re.MULTILINE)
    assert used == built.replace("-", "-slim-")  # one Python, one Debian


def test_a_model_cannot_be_changed_from_outside(tmp_path: Path) -> None:
    with pytest.raises(run.UserError, match=r"--admin-host 0\.0\.0\.0: it lets others load models"):
        run.Place(admin_host="0.0.0.0", repository=tmp_path)
    assert run.Place(repository=tmp_path).admin_host == "127.0.0.1"


def test_the_models_of_kserve_take_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    kserve = pytest.importorskip("kserve", reason="needs kserve")
    kubernetes = pytest.importorskip("kubernetes.client")

    def made(kind: str, told: Any) -> Any:
        """An object of their models, of plain data."""
        if kind.startswith("list["):
            return [made(kind.removeprefix("list[").removesuffix("]"), one) for one in told]
        model = getattr(kserve, kind, None) or getattr(kubernetes, kind, None)
        if model is None:  # text, a number or a dict
            return told
        if hasattr(model, "from_dict"):
            found = model.from_dict(told)
            assert json.loads(found.to_json()) == told, kind  # it leaves out what it does not know
            return found
        names = {outside: inside for inside, outside in model.attribute_map.items()}
        assert set(told) <= set(names), kind
        return model(
            **{
                names[key]: made(model.openapi_types[names[key]], value)
                for key, value in told.items()
            }
        )

    made("V1beta1InferenceService", MANIFEST)
    for section, wrong in ((POD, "timeOut"), (CONTAINER["livenessProbe"]["httpGet"], "prot")):
        monkeypatch.setitem(section, wrong, 1)
        with pytest.raises(AssertionError):
            made("V1beta1InferenceService", MANIFEST)
        monkeypatch.delitem(section, wrong)


@pytest.mark.multi
def test_a_service_within_these_bounds(
    started: Callable[..., Server],
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (
        sys.platform != "linux"
        or os.geteuid()
        or not (shutil.which("unshare") and shutil.which("setpriv"))
    ):
        pytest.skip("needs root on Linux")
    models.chmod(0o755)
    for name, value in {
        "MODELS": models,
        "PYTHON": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }.items():
        monkeypatch.setenv(name, str(value))
    python = Path("/mnt/python") / Path(sys.executable).resolve().relative_to(sys.base_prefix)
    monkeypatch.setattr(sys, "executable", str(python))
    if subprocess.run(
        [*BOUND, sys.executable, "-c", "import sparrow"], capture_output=True
    ).returncode:
        pytest.skip("no namespaces here, or the packages are in a folder that only root can read")
    places = [
        "/written",
        "/tmp/written",
        "/dev/shm/written",
        "/mnt/models/written",
        str(ROOT / "written"),
    ]
    told = subprocess.run(
        [*BOUND, "touch", *places], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
    )
    assert told.stderr.count("Read-only file system") == len(places)
    here = [
        flag.replace("0.0.0.0", "127.0.0.1").replace("=/tmp/", "=/mnt/tmp/")
        for flag in CONTAINER["args"][1:]
    ]
    server = started(Path("/mnt/models/one"), *here, under=BOUND)
    one = request(rows, list(range(20))) | {"deadline_ms": 60_000}  # a busy machine is slow
    assert_scored(server.ask("/rank", one), scorer, one)
    for probe in PROBES:
        assert server.ask(probe["path"], admin=probe["port"] != 8080).status == 200, probe
    assert server.ask(POD["annotations"]["prometheus.io/path"], admin=True).status == 200
    control = Path(f"/proc/{server.process.pid}/root/mnt/tmp/control.sock")
    swap(control, Path("/mnt/models/two"))
    assert_scored(server.ask("/rank", one), load(models / "two"), one)
    code, said = server.end()
    assert code == 0 and said.count("\n") == 1 and "answers now" in said
