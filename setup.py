"""Build the C++ core of the CPU samplers, which pyproject.toml cannot declare.

The core is optional: without a compiler the installation continues, and `fsbench list` reports
what is missing. The core selects its instruction set when it is loaded, so no flag names a CPU.
"""

import sys

from setuptools import Extension, find_packages, setup

CORE = "fsbench/simple/csrc"

setup(
    # fsbench/kernels and fsbench/baselines are links to the folders next to fsbench/.
    packages=find_packages(include=["fsbench", "fsbench.*"]),
    ext_modules=[
        Extension(
            "fsbench.simple._native",
            [f"{CORE}/native.cpp"],
            depends=[
                f"{CORE}/{name}.h"
                for name in ["blocks", "decide", "lanes", "penalties", "philox", "ring", "select"]
            ],
            language="c++",
            # gnu++17: with plain c++17 some compilers do not fuse multiply and add.
            extra_compile_args=["-std=gnu++17", "-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
    if sys.platform != "win32"
    else [],
)
