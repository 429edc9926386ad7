#include "kernels.cuh"

namespace tbik::peer {

Kernel kernel_int32() { return peer_reduce_kernel<int32_t, 0>; }
Kernel kernel_int64() { return peer_reduce_kernel<int64_t, 0>; }

}  // namespace tbik::peer
