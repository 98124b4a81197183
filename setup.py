"""Builds the loops over shared memory, where there is a compiler for them; everything works without, slower."""

import sys

from setuptools import Extension, setup

KERNELS = Extension(
    "samestep.comm.shm._kernels",
    ["src/samestep/comm/shm/_kernels.c"],
    # Nothing may be contracted or reordered: sums have the bits that torch's have.
    extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fno-fast-math"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[KERNELS] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if sys.platform == "linux" else {},
)
