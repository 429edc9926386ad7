#include "kernels.cuh"

namespace tbik::peer {

Kernel kernel_float16(int ranks) { return kernel_of<F16>(ranks); }

}  // namespace tbik::peer
