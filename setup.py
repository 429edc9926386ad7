"""Builds tbik._C (kernels) and tbik._C_dist (process group). The rest of the package stands in pyproject.toml.

    pip install -e . --no-build-isolation          (torch is a build dependency: the one that is installed is used)
    python setup.py build_ext --inplace
    TBIK_USE_BUILT=1 pip install -e . ...          a second environment of this folder, with the same Python and torch

Compiler: $CXX, else c++; g++ >= 11 or clang >= 14. No per-file flags: instruction sets are chosen by pragmas inside
csrc/gemm_<isa>.cpp, so one binary runs on every x86-64 (and aarch64) and picks its path at run time.
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = Path("csrc")

# -fno-math-errno and -fno-trapping-math change no value: they drop errno and the order of exception flags, which nobody
# reads, and let selects be vectorised. The warnings are false positives inside g++'s own
# AVX-512 headers.
COMPILE = [
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]

# The process group's own module: c10d's classes are tied to one torch minor version, and a change in one of the two
# modules does not recompile the other. It gets the additions from tbik._C, as function pointers.
DIST = [
    "collective.cpp",
    "communicator.cpp",
    "movement.cpp",
    "process_group.cpp",
    "reduce_ops.cpp",
    "transport_mover.cpp",
    "transport_shm.cpp",
    "transport_tcp.cpp",
]


def extension(name, sources, headers):
    return CppExtension(
        name=name,
        sources=sorted(str(CSRC / source) for source in sources),
        depends=sorted(str(path) for path in CSRC.glob(headers)),
        include_dirs=[str(CSRC.resolve())],
        extra_compile_args=COMPILE,
        extra_link_args=["-fopenmp"],
    )


EXTENSIONS = [
    extension("tbik._C", [path.name for path in CSRC.glob("*.cpp") if path.name not in DIST], "*.h"),
    extension("tbik._C_dist", DIST, "*.h"),
]

setup(
    ext_modules=[] if os.environ.get("TBIK_USE_BUILT") == "1" else EXTENSIONS,
    cmdclass={"build_ext": BuildExtension},
)
