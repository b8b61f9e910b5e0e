"""What the compiler makes of the inner loops: a partial sum that goes to the stack at every lookup
costs a third of the time.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "sparrow" / "kernels"
FLAGS = ["-O2", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Loops over rows of fp32. W lanes, K vectors; K = 0 is a row that is too long for registers. Sums of
# gradients that are multiplied by rows, and rows of less than 16 columns, are left out: with AVX2
# these do store some.
SHAPE = re.compile(r"\b(pool_shape<.*Fp32|reduce_shape<true, false), (\d+), (\d+)>")
ROOM = 8  # sums in registers where there are 16 of these, as in AVX2: a row loop needs the others
STORE = re.compile(r"vmov\w+\s+%[xyz]mm\d+,-?(0x)?[0-9a-f]*\(%r[sb]p")
ADD = re.compile(r"v(add|fmadd)\w*ps\s")
OF_ROWS = re.compile("call|sqrt|div|vxorp")  # what begins a sum, or uses it
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)\b")

Instruction = tuple[int, str]


def disassembled(source: str, folder: Path) -> dict[str, list[Instruction]]:
    """Function -> its instructions, by address."""
    from torch.utils.cpp_extension import include_paths

    obj = folder / "loops.o"
    includes = [f"-I{path}" for path in include_paths()]
    file = KERNELS / "embedding_bag" / "cpu" / source
    subprocess.run(["g++", *FLAGS, *includes, "-c", file, "-o", obj], check=True)
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", obj]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if name := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            instructions = functions.setdefault(name[1], [])
        elif found := re.match(r"\s+([0-9a-f]+):\t(.*)", line):
            instructions.append((int(found[1], 16), found[2]))
    return functions


def innermost(instructions: list[Instruction]) -> Iterator[list[str]]:
    """The loops that add and have none that does within them: what stands between a jump back and
    where it leads.
    """
    at = {address: i for i, (address, _) in enumerate(instructions)}
    adds = [i for i, (_, text) in enumerate(instructions) if ADD.match(text)]
    jumps = ((i, JUMP.match(text)) for i, (_, text) in enumerate(instructions))
    ends = ((at.get(int(jump[1], 16)), i) for i, jump in jumps if jump)
    loops = [
        (begin, end)
        for begin, end in ends
        if begin is not None and any(begin <= add <= end for add in adds)
    ]
    for begin, end in loops:
        inside = [loop for loop in loops if begin <= loop[0] and loop[1] <= end]
        if len(inside) == 1:
            yield [text for _, text in instructions[begin : end + 1]]


def test_a_loop_on_the_stack_is_found() -> None:
    text = ["vaddps %ymm0,%ymm1,%ymm1", "vmovaps %ymm1,-0x20(%rsp)", "jne    0"]
    (loop,) = innermost(list(enumerate(text)))
    assert any(map(STORE.match, loop))
    assert not list(innermost([(0, "vaddps %ymm0,%ymm1,%ymm1"), (1, "ret")]))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["loops_avx512.cpp", "loops_avx2.cpp"])
def test_no_sum_of_a_loop_is_stored(source: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or not (shutil.which("g++") and shutil.which("objdump")):
        pytest.skip("needs g++ and objdump on x86-64")
    lanes = 16 if "512" in source else 8
    stored = []
    looked_at = set()
    for name, instructions in disassembled(source, tmp_path).items():
        shape = SHAPE.search(name)
        if not shape:
            continue
        width, count = int(shape[2]), int(shape[3])
        if not count or width < 16 or count * width > 16 * min(8, ROOM * lanes // 16):
            continue
        for loop in innermost(instructions):
            if any(map(OF_ROWS.search, loop)):
                continue
            looked_at.add((shape[1].partition("_")[0], width, count))
            if any(map(STORE.match, loop)):
                stored.append(name)
    vectors = range(1, 1 + min(7, ROOM * lanes // 16))
    assert {(loop, 16, k) for loop in ("pool", "reduce") for k in vectors} <= looked_at
    assert not stored
