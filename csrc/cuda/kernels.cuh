// The device under csrc/cuda/peer_reduce.h: threads of a block, system-scope messages, the clock.
#pragma once

#include "kernels.h"
#include "peer_reduce.h"

namespace tbik::peer {

struct DeviceWorld {
  __device__ __forceinline__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ bool any(bool value) const { return __syncthreads_or(value ? 1 : 0) != 0; }

  __device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }
  __device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  }
  __device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  __device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) const {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
  }

  // True for the first who asks. On the way of an error only; no result depends on it.
  __device__ __forceinline__ bool claim(uint32_t* flag) const { return atomicCAS(flag, 0u, 1u) == 0; }

  __device__ __forceinline__ int64_t now_ns() const {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
  }
  __device__ __forceinline__ void pause() const { __nanosleep(64); }
};

template <class S, int kRanks>
__global__ void __launch_bounds__(kThreads, 1) peer_reduce_kernel(const __grid_constant__ Call call) {
  peer_reduce<S, kRanks>(call, DeviceWorld{});
}

template <class S>
Kernel kernel_of(int ranks) {
  switch (ranks) {
    case 2:
      return peer_reduce_kernel<S, 2>;
    case 4:
      return peer_reduce_kernel<S, 4>;
    case 8:
      return peer_reduce_kernel<S, 8>;
    default:
      return peer_reduce_kernel<S, 0>;
  }
}

}  // namespace tbik::peer
