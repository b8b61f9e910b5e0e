"""The limit of open files, in processes of their own: lowered, it cannot be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparrow.distributed.limits import need

CHILD = """
import os, resource, sys
from sparrow.core import UserError
from sparrow.distributed import limits

def apart(soft, hard, work):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        work()
        print(*resource.getrlimit(resource.RLIMIT_NOFILE), sep=" of ", flush=True)
        os._exit(0)
    os.wait()

def allow():
    try:
        limits.allow(512)
    except UserError as error:
        print(error, flush=True)

for soft, hard in ((256, 5000), (4000, 5000), (256, 1024)):
    apart(soft, hard, allow)
for group in ("0", "1"):
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": group}
    apart(200, 5000, lambda: apart(200, 5000, allow))
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()


def test_it_is_raised_to_the_need_and_no_further(said: list[str]) -> None:
    assert said[:2] == [f"{need(512)} of 5000", "4000 of 5000"]


def test_ranks_on_gpus_have_more_groups() -> None:
    """Six more: each of three lanes among all ranks, and within and between hosts."""
    assert need(512, on_gpus=True) - need(512) == 6 * 512


def test_one_line_where_it_may_not_be_raised(said: list[str]) -> None:
    assert said[2].startswith(
        f"512 ranks need {need(512)} open files in a process, and 1024 are allowed; raise the"
    )
    assert said[3] == "256 of 1024"


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lets a process raise another's limit"
)
def test_torchruns_is_raised_where_it_holds_the_store(said: list[str]) -> None:
    """A rank's, then that of the process that started it."""
    assert said[4:] == [
        f"{need(512)} of 5000",
        f"{need(512)} of 5000",
        f"{need(512)} of 5000",
        "200 of 5000",
    ]
