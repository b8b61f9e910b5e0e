"""Reads of a file that a test answers, when it wants and with as many bytes as it wants."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import queue
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparrow.kernels.block_io import Blocks


@contextmanager
def fed(blocks: Blocks) -> Iterator[Callable[[bytes], None]]:
    """A pipe in the place of the file of some blocks: a read waits for bytes, and takes what is
    there.

    It gives a function that writes some bytes, and waits until they are read. The file ends with
    the context. It is for io_uring alone: `pread` refuses a pipe.
    """
    end, mine = os.pipe()
    os.dup2(end, blocks.file.fd)
    os.close(end)

    def feed(content: bytes) -> None:
        os.write(mine, content)
        late = time.monotonic() + 20
        while fcntl.ioctl(mine, termios.FIONREAD, bytes(4)) != bytes(4):
            assert time.monotonic() < late, "nobody reads"
            time.sleep(0.001)

    try:
        yield feed
    finally:
        os.close(mine)


NUMBERS = {"x86_64": (317, 17), "aarch64": (277, 67)}  # of the system calls `seccomp` and `pread64`
RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND


CANNOT = 77  # the exit status of a process that may not answer its reads


def run_answered(program: str, path: Path) -> None:
    """Run a program that calls `listen` in a process of its own, with a path as its argument."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=100
    )
    if done.returncode == CANNOT:
        pytest.skip("seccomp lets nobody answer")
    assert done.returncode == 0, done.stderr


@dataclass
class Asked:
    """A `pread` that waits: of which file, how many bytes, and from where in it."""

    listener: int
    id: int
    fd: int
    to: int
    count: int
    at: int

    def answer(self, content: bytes) -> None:
        """End it with these bytes."""
        ctypes.memmove(self.to, content, len(content))
        fcntl.ioctl(self.listener, SEND, struct.pack("=QqiI", self.id, len(content), 0, 0))


def listen(path: str, hear: Callable[[Asked], None]) -> None:
    """Have each `pread` of a file answered by `hear`, in the threads that this one starts from now
    on, and in itself.

    By seccomp (Linux 5.5), which is not taken back. Where that cannot be had, the process ends with
    `CANNOT`.
    """
    found: queue.Queue[int] = queue.Queue()
    args = (os.path.realpath(path), hear, found)
    threading.Thread(target=_listen, args=args, daemon=True).start()  # its own reads go through
    seccomp, pread = NUMBERS[platform.machine()]
    lines = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, pread),
        (0x06, 0, 0, 0x7FC00000),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    memory = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(
        struct.pack("=H6xQ", len(lines), ctypes.addressof(memory))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or (listener := libc.syscall(seccomp, 1, 8, program)) < 0:
        sys.exit(CANNOT)
    found.put(listener)


def _listen(path: str, hear: Callable[[Asked], None], found: queue.Queue[int]) -> None:
    listener = found.get()
    while True:
        request = bytearray(80)
        fcntl.ioctl(listener, RECEIVE, request)
        id, *_, fd, to, count, at, _, _ = struct.unpack("=QIIiIQ6Q", request)
        if os.readlink(f"/proc/self/fd/{fd}") == path:
            hear(Asked(listener, id, fd, to, count, at))
        else:  # the system does it
            fcntl.ioctl(listener, SEND, struct.pack("=QqiI", id, 0, 0, 1))
