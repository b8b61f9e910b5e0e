"""Builds the C++ kernels when torch and a compiler are at hand; everything else is in pyproject.toml."""

import glob
import sys
from typing import Any

from setuptools import setup

LIBTORCH_STABLE = "0x020b000000000000"  # the stable ABI of torch 2.11: one build serves every later torch
FLAGS = ["-O2", "-g0", "-std=c++20", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={LIBTORCH_STABLE}"]
FLAGS += ["-DPy_LIMITED_API=0x030b0000", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


def kernels() -> dict[str, Any]:
    """What setup() needs to build them; nothing without torch."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}

    class OptionalBuild(BuildExtension):
        """A missing or failing compiler leaves the pure-Python package, which runs the reference kernels."""

        def run(self) -> None:
            """Build, or say why not."""
            try:
                super().run()
            except Exception as error:
                print(f"sparrow: no C++ kernels ({error}); the reference kernels will run", file=sys.stderr)

    sources = sorted(glob.glob("sparrow/kernels/**/*.cpp", recursive=True))
    headers = sorted(glob.glob("sparrow/kernels/**/*.h", recursive=True))
    library = CppExtension(
        "sparrow.kernels._cpp", sources, depends=headers, extra_compile_args=FLAGS, py_limited_api=True
    )
    options = {"bdist_wheel": {"py_limited_api": "cp311"}}
    return {"ext_modules": [library], "cmdclass": {"build_ext": OptionalBuild}, "options": options}


setup(**kernels())
