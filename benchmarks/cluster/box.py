"""A cluster in a box: hosts are network namespaces of this machine, and so are the links between them.

    python benchmarks/cluster/box.py --hosts 4 --ranks 2 --mbit 1000 -- python job.py

Every host has a veth pair to a switch (a bridge in a namespace of its own) with a token bucket (tc tbf) at both ends,
and an address 10.77.0.1, 10.77.0.2, ...; ranks of one host talk over its loopback, which is as fast as the machine.
A rank may use an equal part of the machine's cores (CPU quota of cgroup v1, over periods of 10 ms), if it likes only
from when all have called `ready`: imports take a minute on an eighth of a small machine. Nothing has a latency of its
own beyond the queues: Debian's tc has no netem. TCP is Reno, which every kernel lets a namespace have (so near, Cubic
does the same). Needs Linux, root, iproute2, util-linux and cgroup v1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

GROUPS, FOLDERS = Path("/sys/fs/cgroup/cpu"), Path(tempfile.gettempdir())
PREFIX = "sparrow-box-"
PERIOD_US = 10_000
READY = "SPARROW_BOX_READY"
# enter the control group and the host's namespace; die with the box
ENTER = 'echo $$ > "$1/cgroup.procs" && exec ip netns exec "$2" setpriv --pdeathsig KILL "${@:3}"'


class Outcome(NamedTuple):
    """How a rank ended. code: its exit status, -9 of a killed one."""

    rank: int
    code: int
    out: str
    err: str


class Box:
    """`with Box(hosts=4, ranks_per_host=2, mbit=1000) as box: box.run(command)`; everything is gone behind it.

    mbit: of each host's link, either way. cores: of the machine that all ranks together may use, all of them unless
    told; parts: in how many equal ones they are cut, one for each rank unless told. What an earlier box that was
    killed has left is removed first. SystemExit with one line where the machine cannot do it.
    """

    def __init__(
        self, *, hosts: int, ranks_per_host: int, mbit: float, cores: float | None = None, parts: int | None = None
    ) -> None:
        self.hosts, self.ranks_per_host, self.mbit = hosts, ranks_per_host, mbit
        self.size = hosts * ranks_per_host
        self.cores_each = (cores or os.cpu_count() or 1) / (parts or self.size)
        self.name = f"{PREFIX}{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self.group, self._folder = GROUPS / self.name, FOLDERS / self.name
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port, self._free = 29500, False

    def __enter__(self) -> Box:
        require()
        remove_left()
        self._old = signal.signal(signal.SIGTERM, _exit)
        try:
            self._folder.mkdir()
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    # -- the network --------------------------------------------------------------------------------------------

    def _make(self) -> None:
        self.group.mkdir()
        for rank in range(self.size):
            group = self._group(rank)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        switch = self._space("switch")
        _do(f"ip netns add {switch}")
        _do(f"ip -n {switch} link add switch type bridge")
        _do(f"ip -n {switch} link set switch up")
        for host in range(self.hosts):
            space = self._space(host)
            _do(f"ip netns add {space}")
            _do(f"ip -n {switch} link add to{host} type veth peer name eth0 netns {space}")
            _do(f"ip -n {switch} link set to{host} master switch up")
            _do(f"ip -n {space} addr add {address(host)}/24 dev eth0")
            _do(f"ip -n {space} link set lo up")
            _do(f"ip -n {space} link set eth0 up")
            _do(f"ip netns exec {space} sh -c 'echo reno > /proc/sys/net/ipv4/tcp_congestion_control'")
        self.rate(self.mbit)

    def rate(self, mbit: float) -> None:
        """Make all links so fast; a quarter of a millisecond's bytes may go at once."""
        self.mbit = mbit
        burst = max(16_000, int(mbit * 1e6 / 8 * 0.25e-3))
        for host in range(self.hosts):
            for space, device in ((self._space(host), "eth0"), (self._space("switch"), f"to{host}")):
                bucket = f"tbf rate {int(mbit * 1000)}kbit burst {burst} latency 50ms"
                _do(f"tc -n {space} qdisc replace dev {device} root {bucket}")

    def cut(self, host: int) -> None:
        """Take a host's link down: what is sent to it is lost."""
        _do(f"ip -n {self._space('switch')} link set to{host} down")

    def mend(self, host: int) -> None:
        """Take it up again."""
        _do(f"ip -n {self._space('switch')} link set to{host} up")

    # -- ranks --------------------------------------------------------------------------------------------------

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600,
        begins_free: bool = False,
    ) -> list[Outcome]:  # fmt: skip
        """Start the command as every rank and wait for all; TimeoutError when one is still there after timeout_s."""
        self.start(command, env, begins_free)
        return self.wait(timeout_s)

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, begins_free: bool = False) -> None:
        """Start the command as every rank, with the variables that torchrun would set.

        begins_free: without quotas, until every rank has called `ready`, and somebody waits in `wait`.
        """
        assert all(process.poll() is not None for process in self._processes), "the last job is still there"
        self._processes, self._port, self._free = [], self._port + 1, begins_free
        for path in self._folder.glob("*ready"):
            path.unlink()
        self._quotas(not begins_free)
        for rank in range(self.size):
            host, local = divmod(rank, self.ranks_per_host)
            job = {
                "RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.ranks_per_host,
                "MASTER_ADDR": address(0), "MASTER_PORT": self._port, "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1, **({READY: self._folder} if begins_free else {}),
            }  # fmt: skip
            enter = ["bash", "-c", ENTER, "bash", str(self._group(rank)), self._space(host), *command]
            with open(self._file(rank, "out"), "wb") as out, open(self._file(rank, "err"), "wb") as err:
                self._processes.append(
                    subprocess.Popen(
                        enter, env={**os.environ, **{k: str(v) for k, v in job.items()}, **(env or {})},
                        stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                    )
                )  # fmt: skip

    def wait(self, timeout_s: float = 600) -> list[Outcome]:
        """Until every rank has ended, however it did; TimeoutError, and none is left."""
        end, late = time.monotonic() + timeout_s, []
        while self._free and time.monotonic() < end and all(process.poll() is None for process in self._processes):
            if len(list(self._folder.glob("*.ready"))) == self.size:
                self._quotas(True)
                (self._folder / "all-ready").touch()
                self._free = False
            time.sleep(0.01)
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                late.append(rank)
        if late:
            self._end()
            raise TimeoutError(f"box: ranks {late} were still there after {timeout_s:g} s")
        return [
            Outcome(
                rank, process.returncode, *(self._file(rank, f).read_text(errors="replace") for f in ("out", "err"))
            )
            for rank, process in enumerate(self._processes)
        ]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a rank a signal: SIGKILL, SIGSTOP, ..."""
        self._processes[rank].send_signal(number)  # it may not have entered its group yet
        _signal(self._group(rank), number)

    def kill_host(self, host: int) -> None:
        """Kill all of a host's ranks."""
        for local in range(self.ranks_per_host):
            self.kill(host * self.ranks_per_host + local)

    def _quotas(self, hold: bool) -> None:
        quota = max(1000, int(PERIOD_US * self.cores_each)) if hold else -1
        for rank in range(self.size):
            (self._group(rank) / "cpu.cfs_quota_us").write_text(str(quota))

    def _group(self, rank: int) -> Path:
        return self.group / str(rank)

    def _space(self, host: int | str) -> str:
        return f"{self.name}-{host}"

    def _file(self, rank: int, stream: str) -> Path:
        return self._folder / f"{rank}.{stream}"

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        _end(self.group)
        for process in self._processes:
            process.wait()

    def _remove(self) -> None:
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # a second one waits
        try:
            self._end()
            _drop(self.name)
        finally:
            signal.signal(signal.SIGTERM, self._old)
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def ready() -> None:
    """Called by a rank whose job `begins_free`: waits for the others, then quotas hold; elsewhere nothing."""
    if READY in os.environ:
        folder = Path(os.environ[READY])
        (folder / f"{os.environ['RANK']}.ready").touch()
        while not (folder / "all-ready").exists():
            time.sleep(0.01)


def address(host: int) -> str:
    """A host's address."""
    return f"10.77.0.{host + 1}"


def require() -> None:
    """SystemExit with one line when this machine has no room for a box."""
    lacking = [name for name in ("ip", "tc", "setpriv", "bash") if not shutil.which(name)]
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("box: needs Linux and root, for network namespaces and control groups; run it as root")
    if lacking:
        sys.exit(f"box: no {' nor '.join(lacking)} on this machine; install iproute2, util-linux and bash")
    if not (GROUPS / "cpu.cfs_quota_us").exists() and not (GROUPS / "cgroup.procs").exists():
        sys.exit(f"box: no cgroup v1 `cpu` controller at {GROUPS}; mount one there")


def remove_left() -> None:
    """Remove what boxes whose process is gone have left."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split("\n")
    names = [line.split()[0] for line in spaces if line] + [
        path.name for folder in (GROUPS, FOLDERS) for path in folder.glob(f"{PREFIX}*")
    ]
    for name in sorted({"-".join(n.split("-")[:4]) for n in names if n.startswith(PREFIX)}):
        if not Path(f"/proc/{name.split('-')[2]}").exists():
            _end(GROUPS / name)
            _drop(name)


def _drop(name: str) -> None:
    """Namespaces, control groups and files of a box; a namespace takes its links along."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split("\n")
    for space in [line.split()[0] for line in spaces if line.startswith(f"{name}-")]:
        subprocess.run(["ip", "netns", "del", space], check=False)
    for group in [*(GROUPS / name).glob("*/"), GROUPS / name]:
        if group.exists():
            group.rmdir()
    shutil.rmtree(FOLDERS / name, ignore_errors=True)


def _end(group: Path) -> None:
    """Kill whatever is in a box's control groups, and wait until it is gone."""
    end = time.monotonic() + 30
    while sum(_signal(one, signal.SIGKILL) for one in [group, *group.glob("*/")]) and time.monotonic() < end:
        time.sleep(0.02)


def _signal(group: Path, number: signal.Signals) -> int:
    """Send all processes of a group a signal; how many there were."""
    pids = (group / "cgroup.procs").read_text().split() if group.exists() else []
    for pid in pids:
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(int(pid), number)
    return len(pids)


def _do(command: str) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip() or done.returncode}")


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run a command as every rank of a box; ends with the first status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host (1)")
    parser.add_argument("--mbit", type=float, default=1000, help="of each host's link (1000)")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    asked = parser.parse_args()
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    with Box(hosts=asked.hosts, ranks_per_host=asked.ranks, mbit=asked.mbit) as box:
        found = box.run(command, timeout_s=asked.timeout_s)
    for one in found:
        print(f"rank {one.rank} ended with {one.code}\n{one.out}{one.err}", end="")
    sys.exit(next((abs(one.code) for one in found if one.code), 0))


if __name__ == "__main__":
    main()
