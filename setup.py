"""Builds the C++ kernels when torch and a compiler are at hand; everything else is in
pyproject.toml.
"""

import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import setup

# the stable ABI of torch 2.11: one build serves every later torch
LIBTORCH_STABLE = "0x020b000000000000"
FLAGS = [
    "-O2",
    "-g0",
    "-std=c++20",
    "-fvisibility=hidden",
    f"-DTORCH_TARGET_VERSION={LIBTORCH_STABLE}",
]
FLAGS += [
    "-DPy_LIMITED_API=0x030b0000",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]
LINK = ["-Wl,-s"] if sys.platform == "linux" else []  # no names of what is hidden
WHY_NOT = "_not_built.txt"  # beside the library that was not built; `kernels.missing` reads it


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """The lines that programs print meanwhile, which are printed afterwards."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(1), os.dup(2)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            print("\n".join(lines))


def kernels() -> dict[str, Any]:
    """What setup() needs to build them; nothing without torch."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}

    class OptionalBuild(BuildExtension):
        """A missing or failing compiler leaves the pure-Python package, which runs the reference
        kernels.
        """

        def run(self) -> None:
            """Build, or say why not, here and where the library would be."""
            built = Path(self.get_ext_fullpath(library.name))
            why_not = built.parent / WHY_NOT
            why_not.unlink(missing_ok=True)
            lines: list[str] = []
            try:
                with printed() as lines:
                    super().run()
            except Exception as error:
                reasons = [line for line in lines if "error" in line.lower()] + [str(error)]
                reason = reasons[0].strip()
                built.unlink(missing_ok=True)  # of other sources
                built.parent.mkdir(parents=True, exist_ok=True)
                why_not.write_text(reason + "\n")
                print(
                    f"sparrow: no C++ kernels ({reason}); the reference kernels will run",
                    file=sys.stderr,
                )

    sources = sorted(glob.glob("sparrow/kernels/**/*.cpp", recursive=True))
    headers = sorted(glob.glob("sparrow/kernels/**/*.h", recursive=True))
    library = CppExtension(
        "sparrow.kernels._cpp",
        sources,
        depends=headers,
        extra_compile_args=FLAGS,
        extra_link_args=LINK,
        py_limited_api=True,
    )
    options = {"bdist_wheel": {"py_limited_api": "cp311"}}
    return {"ext_modules": [library], "cmdclass": {"build_ext": OptionalBuild}, "options": options}


setup(**kernels())
