#include "kernels.cuh"

namespace tbik::peer {

Kernel kernel_float64(int ranks) { return kernel_of<double>(ranks); }

}  // namespace tbik::peer
