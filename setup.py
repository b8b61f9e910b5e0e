"""Builds the C++ kernels when torch and a compiler are at hand; everything else is in pyproject.toml."""

import glob
import sys

from setuptools import setup

LIBTORCH_STABLE = "0x020a000000000000"  # the stable ABI of torch 2.10: one build serves every later torch

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class OptionalBuild(BuildExtension):
        """A missing or failing compiler leaves the pure-Python package, which runs the reference kernels."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                print(f"sparrow: no C++ kernels ({error}); the reference kernels will run", file=sys.stderr)

    kernels = CppExtension(
        "sparrow.kernels._cpp",
        sorted(glob.glob("sparrow/kernels/*/cpu.cpp")),
        extra_compile_args=[
            "-O3",
            "-std=c++20",
            "-ffp-contract=off",
            f"-DTORCH_TARGET_VERSION={LIBTORCH_STABLE}",
            "-fvisibility=hidden",
        ],
        py_limited_api=True,
    )
    setup(
        ext_modules=[kernels],
        cmdclass={"build_ext": OptionalBuild},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
except ImportError:
    setup()
