"""Builds tbik._C (kernels), tbik._C_dist (process group) and, where nvcc is, tbik/_C_cuda.so (peer memory).

The rest of the package stands in pyproject.toml.

    pip install -e . --no-build-isolation          (torch is a build dependency: the one that is installed is used)
    python setup.py build_ext --inplace
    TBIK_USE_BUILT=1 pip install -e . ...          a second environment of this folder, with the same Python and torch

TBIK_CUDA: auto (default) builds _C_cuda.so where nvcc is found and torch has CUDA, and goes on without it where that
fails; 1 builds it with any torch (it does not use torch) and fails where it cannot; 0 leaves it out. nvcc: that of
$CUDA_HOME, else of the PATH.

Compiler: $CXX, else c++; g++ >= 11 or clang >= 14. No per-file flags: instruction sets are chosen by pragmas inside
csrc/gemm_<isa>.cpp, so one binary runs on every x86-64 (and aarch64) and picks its path at run time.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
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
    extension(
        "tbik._C",
        [path.name for path in CSRC.glob("*.cpp") if path.name not in DIST] + ["cuda/shim_host.cpp"],
        "**/*.h",
    ),
    extension("tbik._C_dist", DIST, "*.h"),
]


def cuda_builder():
    spec = importlib.util.spec_from_file_location("cuda_build", CSRC / "cuda" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Build(BuildExtension):
    """torch's, and then the library that nvcc makes."""

    def run(self):
        super().run()
        asked = os.environ.get("TBIK_CUDA", "auto")
        if asked not in ("0", "1", "auto"):
            sys.exit(f"TBIK_CUDA: expected 0, 1 or auto, got {asked!r}")
        builder = cuda_builder()
        nvcc = builder.find_nvcc()
        if asked == "0" or (asked == "auto" and (nvcc is None or torch.version.cuda is None)):
            return
        if nvcc is None:
            sys.exit("TBIK_CUDA=1: no nvcc in $CUDA_HOME/bin or on the PATH")
        library = Path(self.get_ext_fullpath("tbik._C")).with_name("_C_cuda.so")
        jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1
        try:
            builder.build(nvcc, library, Path(self.build_temp) / "cuda", jobs)
        except (OSError, subprocess.CalledProcessError) as error:
            if asked == "1":
                sys.exit(f"TBIK_CUDA=1: {error}")
            print(f"tbik is built without peer memory on CUDA devices (TBIK_CUDA=auto): {error}", file=sys.stderr)


setup(
    ext_modules=[] if os.environ.get("TBIK_USE_BUILT") == "1" else EXTENSIONS,
    cmdclass={"build_ext": Build},
)
