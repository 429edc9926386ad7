// What a compiler for the CPU and nvcc both read: no arithmetic, no types.
#pragma once

#if defined(__CUDACC__)
#define TBIK_HOST_DEVICE __host__ __device__ __forceinline__
#define TBIK_UNROLL _Pragma("unroll")
#else
#define TBIK_HOST_DEVICE inline
#define TBIK_UNROLL
#endif
