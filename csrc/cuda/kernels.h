// The kernels of the peer-memory reductions, one file per element type (kernels_<type>.cu).
#pragma once

#include "call.h"

namespace tbik::peer {

inline constexpr int kThreads = 256;  // of a block; up to 255 registers each

using Kernel = void (*)(Call);

// ranks: see unrolled_ranks.
Kernel kernel_float32(int ranks);
Kernel kernel_float64(int ranks);
Kernel kernel_bfloat16(int ranks);
Kernel kernel_float16(int ranks);
Kernel kernel_int32();
Kernel kernel_int64();

}  // namespace tbik::peer
