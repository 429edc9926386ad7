// Row-wise kernels in plain C++, for any architecture. The text is csrc/rows_loops.h. deterministic, batch-invariant.
#include <cmath>
#include <cstdint>

#include "rows.h"

namespace tbik {
namespace portable {
namespace {
constexpr int kWidth = 4;
}

#include "rows_loops.h"

namespace {
const Rows kRows = make_rows("portable");
}
}  // namespace portable

const Rows* portable_rows() { return &portable::kRows; }

}  // namespace tbik
