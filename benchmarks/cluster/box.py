"""A cluster in a box: hosts are network namespaces of this machine, and so are the links between
them.

    python benchmarks/cluster/box.py --hosts 4 --ranks 2 --mbit 1000 --latency-us 50 -- python
    job.py

Every host has a veth pair to a switch (a bridge in a namespace of its own) with a token bucket (tc
tbf) at both ends, and an address 10.77.0.1, 10.77.0.2, ...; ranks of one host talk over its
loopback, which is as fast as the machine.
A rank may use an equal part of the machine's cores (CPU quota of cgroup v1, over periods of 10 ms),
if it likes only from when all have called `ready`: imports take a minute on an eighth of a small
machine. Links are measured before every job, since what they are set to is not always what they
give. Latency is that of a relay in the switch's place (relay.c, which takes CPU time of its own),
as not every kernel has netem. TCP is Reno, which every kernel lets a namespace have (so near, Cubic
does the same). Needs Linux, root, iproute2, util-linux and cgroup v1; for latency a C compiler and
/dev/net/tun.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, TypeVar

T = TypeVar("T")
GROUPS, FOLDERS = Path("/sys/fs/cgroup/cpu"), Path(tempfile.gettempdir())
PREFIX = "sparrow-box-"
PERIOD_US = 10_000
READY = "SPARROW_BOX_READY"
# of the kernel's headers
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 1, 0x1000
# enter the control group and the host's namespace; die with the box
ENTER = 'echo $$ > "$1/cgroup.procs" && exec ip netns exec "$2" setpriv --pdeathsig KILL "${@:3}"'


class Outcome(NamedTuple):
    """How a rank ended. code: its exit status, -9 of a killed one."""

    rank: int
    code: int
    out: str
    err: str


class Link(NamedTuple):
    """What a host's link gives. mbit: sent to the next host, as its payload; us: there and back."""

    mbit: float
    us: float


class Box:
    """`with Box(hosts=4, ranks_per_host=2, mbit=1000) as box: box.run(command)`; everything is gone
    behind it.

    mbit: of each host's link, either way. latency_us: of each packet between hosts, one way. links:
    of each host, as measured before the last job. cores: of the machine that all ranks together may
    use, all of them unless told; parts: in how many equal ones they are cut, one for each rank
    unless told. What an earlier box that was killed has left is removed first. SystemExit with one
    line where the machine cannot do it.
    """

    def __init__(
        self,
        *,
        hosts: int,
        ranks_per_host: int,
        mbit: float,
        latency_us: float = 0,
        cores: float | None = None,
        parts: int | None = None,
    ) -> None:
        self.hosts, self.ranks_per_host, self.mbit, self.latency_us = (
            hosts,
            ranks_per_host,
            mbit,
            latency_us,
        )
        self.links: list[Link] = []
        self.size = hosts * ranks_per_host
        self.cores_each = (cores or os.cpu_count() or 1) / (parts or self.size)
        self.name = f"{PREFIX}{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self.group, self._folder = GROUPS / self.name, FOLDERS / self.name
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port, self._free = 29500, False
        self._tuns: list[int] = []
        self._cut: set[int] = set()
        self._relay: subprocess.Popen[bytes] | None = None

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._remove()

    # -- the network -------------------------------------------------------------------------------

    def _make(self) -> None:
        self.group.mkdir()
        for rank in range(self.size):
            group = self._group(rank)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        switch = self._space("switch")
        if self.latency_us:
            _do(f"cc -O2 -o {self._folder / 'relay'} {Path(__file__).with_name('relay.c')}")
        else:
            _do(f"ip netns add {switch}")
            _do(f"ip -n {switch} link add switch type bridge")
            _do(f"ip -n {switch} link set switch up")
        for host in range(self.hosts):
            space = self._space(host)
            _do(f"ip netns add {space}")
            if self.latency_us:
                self._tuns.append(_inside(space, _tun))
                _do(f"ip -n {space} link set eth0 mtu 9000")  # fewer packets for the relay
            else:
                _do(f"ip -n {switch} link add to{host} type veth peer name eth0 netns {space}")
                _do(f"ip -n {switch} link set to{host} master switch up")
            _do(f"ip -n {space} addr add {address(host)}/24 dev eth0")
            _do(f"ip -n {space} link set lo up")
            _do(f"ip -n {space} link set eth0 up")
            _do(
                f"ip netns exec {space} sh -c 'echo reno >"
                " /proc/sys/net/ipv4/tcp_congestion_control'"
            )
        self.rate(self.mbit)

    def rate(self, mbit: float) -> None:
        """Make all links so fast; a quarter of a millisecond's bytes may go at once.

        TCP's segments, of up to 64 KiB, are made smaller than that: a bucket that cannot hold one
        cuts it up and loses a fifth of the rate.
        """
        self.mbit = mbit
        burst = max(16_000, int(mbit * 1e6 / 8 * 0.25e-3))
        for host in range(self.hosts):
            ends = [(self._space(host), "eth0")] + [(self._space("switch"), f"to{host}")] * (
                not self.latency_us
            )
            for space, device in ends:
                bucket = f"tbf rate {int(mbit * 1000)}kbit burst {burst} latency 50ms"
                _do(f"tc -n {space} qdisc replace dev {device} root {bucket}")
            if not self.latency_us:
                _do(
                    f"ip -n {self._space(host)} link set eth0 gso_max_size"
                    f" {min(65_536, max(8_000, burst // 2))}"
                )
        self._restart_relay()

    def cut(self, host: int) -> None:
        """Take a host's link down: what is sent to it is lost."""
        self._cut.add(host)
        self._link(host, "down")

    def mend(self, host: int) -> None:
        """Take it up again."""
        self._cut.discard(host)
        self._link(host, "up")

    def _link(self, host: int, state: str) -> None:
        if self.latency_us:
            self._restart_relay()
        else:
            _do(f"ip -n {self._space('switch')} link set to{host} {state}")

    def _restart_relay(self) -> None:
        """A relay that knows today's rate and which links are cut."""
        if not self.latency_us:
            return
        self._end_relay()
        fds = [-1 if host in self._cut else fd for host, fd in enumerate(self._tuns)]
        self._relay = subprocess.Popen(
            [str(self._folder / "relay"), str(self.latency_us), str(self.mbit), *map(str, fds)],
            pass_fds=self._tuns,
        )

    def _end_relay(self) -> None:
        if self._relay:
            self._relay.kill()
            self._relay.wait()

    def measured(self, seconds: float = 0.3) -> list[Link]:
        """What each host's link to the next host gives, without quotas and one after the other."""
        found = []
        for host in range(self.hosts if self.hosts > 1 else 0):
            other = (host + 1) % self.hosts
            with (
                _inside(
                    self._space(other),
                    lambda other=other: socket.create_server((address(other), 5001)),
                ) as door,
                _inside(
                    self._space(host),
                    lambda other=other: socket.create_connection((address(other), 5001), timeout=2),
                ) as ours,
                door.accept()[0] as theirs,
            ):
                found.append(
                    Link(us=_round_trip_us(ours, theirs), mbit=_mbit(ours, theirs, seconds))
                )
        return found

    # -- ranks -------------------------------------------------------------------------------------

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600,
        begins_free: bool = False,
    ) -> list[Outcome]:  # fmt: skip
        """Start the command as every rank and wait for all; TimeoutError when one is still there
        after timeout_s.
        """
        self.start(command, env, begins_free)
        return self.wait(timeout_s)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        begins_free: bool = False,
    ) -> None:
        """Start the command as every rank, with the variables that torchrun would set.

        begins_free: without quotas, until every rank has called `ready`, and somebody waits in
        `wait`.
        """
        assert all(process.poll() is not None for process in self._processes), (
            "the last job is still there"
        )
        self._processes, self._port, self._free = [], self._port + 1, begins_free
        for path in self._folder.glob("*ready"):
            path.unlink()
        self._quotas(not begins_free)
        self.links = self.measured()
        for rank in range(self.size):
            host, local = divmod(rank, self.ranks_per_host)
            job = {
                "RANK": rank,
                "WORLD_SIZE": self.size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": self.ranks_per_host,
                "MASTER_ADDR": address(0),
                "MASTER_PORT": self._port,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1,
                **({READY: self._folder} if begins_free else {}),
            }
            enter = [
                "bash",
                "-c",
                ENTER,
                "bash",
                str(self._group(rank)),
                self._space(host),
                *command,
            ]
            with (
                open(self._file(rank, "out"), "wb") as out,
                open(self._file(rank, "err"), "wb") as err,
            ):
                self._processes.append(
                    subprocess.Popen(
                        enter,
                        env={**os.environ, **{k: str(v) for k, v in job.items()}, **(env or {})},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )

    def wait(self, timeout_s: float = 600) -> list[Outcome]:
        """Until every rank has ended, however it did; TimeoutError, and none is left."""
        end, late = time.monotonic() + timeout_s, []
        while (
            self._free
            and time.monotonic() < end
            and all(process.poll() is None for process in self._processes)
        ):
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
                rank,
                process.returncode,
                *(self._file(rank, f).read_text(errors="replace") for f in ("out", "err")),
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
        # a second one waits
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._end()
            self._end_relay()
            for fd in self._tuns:
                os.close(fd)
            _drop(self.name)
        finally:
            signal.signal(signal.SIGTERM, self._old)
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def told(links: Sequence[Link], mbit: float) -> str:
    """One line of what links give, for people."""
    if not links:
        return "one host, no link"
    low, high, us = min(links).mbit, max(links).mbit, statistics.median(link.us for link in links)
    return (
        f"links set to {mbit:,g} Mbit/s give {low:,.0f} to {high:,.0f}, there and back {us:,.0f} us"
    )


def _inside(space: str, call: Callable[[], T]) -> T:
    """What a call gives in a network namespace: sockets and devices stay where they were made."""

    def run() -> T:
        with open(f"/run/netns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"{space}: cannot enter")
        return call()

    # a thread of its own, as the others stay where they are
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(run).result()


def _tun() -> int:
    """A device eth0 whose packets a file gives and takes."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return fd


def _mbit(ours: socket.socket, theirs: socket.socket, seconds: float) -> float:
    """What arrives while one end sends as much as it can, the queues' first contents left out."""
    arrived: list[tuple[float, int]] = []

    def take() -> None:
        block, total = bytearray(1 << 20), 0
        while count := theirs.recv_into(block):
            total += count
            arrived.append((time.perf_counter(), total))

    thread = threading.Thread(target=take)
    thread.start()
    block, end = bytes(1 << 16), time.perf_counter() + seconds
    while time.perf_counter() < end:
        ours.sendall(block)
    ours.shutdown(socket.SHUT_WR)
    thread.join()
    (begin, before), (last, total) = arrived[len(arrived) // 4], arrived[-1]
    return (total - before) * 8 / (last - begin) / 1e6 if last > begin else 0.0


def _round_trip_us(ours: socket.socket, theirs: socket.socket) -> float:
    each = []
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        begin = time.perf_counter()
        ours.sendall(b"a")
        theirs.recv(1)
        theirs.sendall(b"b")
        ours.recv(1)
        each.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(each)


def ready() -> None:
    """Called by a rank whose job `begins_free`: waits for the others, then quotas hold; elsewhere
    nothing.
    """
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
        sys.exit(
            "box: needs Linux and root, for network namespaces and control groups; run it as root"
        )
    if lacking:
        sys.exit(
            f"box: no {' nor '.join(lacking)} on this machine; install iproute2, util-linux and"
            " bash"
        )
    if not (GROUPS / "cpu.cfs_quota_us").exists() and not (GROUPS / "cgroup.procs").exists():
        sys.exit(f"box: no cgroup v1 `cpu` controller at {GROUPS}; mount one there")


def remove_left() -> None:
    """Remove what boxes whose process is gone have left."""
    spaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    names = [line.split()[0] for line in spaces if line] + [
        path.name for folder in (GROUPS, FOLDERS) for path in folder.glob(f"{PREFIX}*")
    ]
    for name in sorted({"-".join(n.split("-")[:4]) for n in names if n.startswith(PREFIX)}):
        if not Path(f"/proc/{name.split('-')[2]}").exists():
            _end(GROUPS / name)
            _drop(name)


def _drop(name: str) -> None:
    """Namespaces, control groups and files of a box; a namespace takes its links along."""
    spaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for space in [line.split()[0] for line in spaces if line.startswith(f"{name}-")]:
        subprocess.run(["ip", "netns", "del", space], check=False)
    for group in [*(GROUPS / name).glob("*/"), GROUPS / name]:
        if group.exists():
            group.rmdir()
    shutil.rmtree(FOLDERS / name, ignore_errors=True)


def _end(group: Path) -> None:
    """Kill whatever is in a box's control groups, and wait until it is gone."""
    end = time.monotonic() + 30
    while (
        sum(_signal(one, signal.SIGKILL) for one in [group, *group.glob("*/")])
        and time.monotonic() < end
    ):
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host (1)")
    parser.add_argument("--mbit", type=float, default=1000, help="of each host's link (1000)")
    parser.add_argument(
        "--latency-us", type=float, default=0, help="of each packet between hosts, one way (0)"
    )
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    asked = parser.parse_args()
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    with Box(
        hosts=asked.hosts, ranks_per_host=asked.ranks, mbit=asked.mbit, latency_us=asked.latency_us
    ) as box:
        found = box.run(command, timeout_s=asked.timeout_s)
        print(told(box.links, box.mbit))
    for one in found:
        print(f"rank {one.rank} ended with {one.code}\n{one.out}{one.err}", end="")
    sys.exit(next((abs(one.code) for one in found if one.code), 0))


if __name__ == "__main__":
    main()
