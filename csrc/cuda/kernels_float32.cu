#include "kernels.cuh"

namespace tbik::peer {

Kernel kernel_float32(int ranks) { return kernel_of<float>(ranks); }

}  // namespace tbik::peer
