#include "kernels.cuh"

namespace tbik::peer {

Kernel kernel_bfloat16(int ranks) { return kernel_of<Bf16>(ranks); }

}  // namespace tbik::peer
