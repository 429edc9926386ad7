// Row-wise kernels in plain C++, for any architecture. The text is csrc/rows_loops.h. deterministic, batch-invariant.
#include <cmath>
#include <cstdint>

#include "rows.h"

namespace tbik {
namespace portable {
namespace {
constexpr int kWidth = 4;
}

#include "convert_loops.h"
#include "flushed_fma.h"

namespace {
inline float fma_flushed(float a, float b, float c) { return flushed_fma(flush_input(a), flush_input(b), c); }
}  // namespace

#include "rows_loops.h"

namespace {
const Rows kRows = make_rows("portable", false);
}
}  // namespace portable

const Rows* portable_rows() { return &portable::kRows; }

}  // namespace tbik
