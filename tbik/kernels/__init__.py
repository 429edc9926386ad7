"""CUDA kernels in Triton, one file per kernel; importing this package imports no triton.

A kernel file holds the jitted functions, how they are launched, and nothing about autograd: tbik.ops calls it for CUDA
tensors. Which pairs are added comes in from a schedule of tree.h (tbik.kernels.folding); tile tables go by
architecture and dtype, never by the number of rows (tbik.kernels.tiles). on_cuda.py gives them the names and arguments
of tbik._C; tbik.devices chooses between the two.

Not yet measured on a GPU. What is checked without one: values and bits in Triton's interpreter on the CPU
(tests/test_kernels_*.py), and what the compiler makes of every kernel for sm_80, sm_90 and sm_100
(bench/gpu_compile.py, bench/results/gpu_compile.md). Behind the operators: linear, norms, activations, soft-cap, rope,
attention, rows over the vocabulary, sums, dropout, embedding; and the fingerprint. Not: experts.
"""
