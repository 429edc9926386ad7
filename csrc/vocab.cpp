// Drivers of the vocabulary operators: rows over threads, leaves over blocks. See vocab.h for the equations.
#include "vocab.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "fpmode.h"

namespace tbik {

namespace {

constexpr int64_t kElementsPerTask = 1 << 14;  // less is not worth another thread

// body(begin, end) on rows, in IEEE mode, in tasks that are worth a thread.
template <class Body>
void over_rows(int64_t rows, int64_t columns, const ParallelFor& parallel, const Body& body) {
  if (rows == 0) return;
  const int64_t group = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
  const auto range = [&](int64_t first, int64_t last) {
    const FpIeeeScope ieee;
    body(first * group, std::min(rows, last * group));
  };
  const int64_t tasks = (rows + group - 1) / group;
  if (tasks == 1) return range(0, 1);
  parallel(tasks, range);
}

// RowInput as contiguous memory: in place where they are, else copied one at a time.
class RowReader {
 public:
  explicit RowReader(const RowInput& x) : x_(x), size_(size_of(x.dtype)) {
    if (x_.stride_column != 1 && x_.columns > 1) copy_ = aligned_buffer(x_.columns * size_);
  }

  const char* row(int64_t r) {
    const char* source = static_cast<const char*>(x_.data) + r * x_.stride_row * size_;
    if (copy_ == nullptr) return source;
    char* dst = static_cast<char*>(copy_.get());
    for (int64_t j = 0; j < x_.columns; ++j) {
      std::memcpy(dst + j * size_, source + j * x_.stride_column * size_, static_cast<size_t>(size_));
    }
    return dst;
  }

 private:
  RowInput x_;
  int64_t size_;
  AlignedBuffer copy_;
};

// The row sum from its blocks: one instance per thread.
class BlockSums {
 public:
  explicit BlockSums(const RowOrder& order)
      : order_(order),
        blocks_(static_cast<size_t>(std::max<int64_t>(1, order.program.num_inputs))),
        slots_(static_cast<size_t>(std::max(1, order.program.num_slots))) {}

  // fill(sums, begin, end): the blocks of the leaf of columns [begin, end). out[c * stride] = output c.
  template <class Fill>
  void run(const Fill& fill, float* out, int64_t stride) {
    float* sums = blocks_.data();
    for (size_t leaf = 0; leaf + 1 < order_.cuts.size(); ++leaf) {
      const int64_t begin = order_.cuts[leaf];
      const int64_t end = order_.cuts[leaf + 1];
      if (begin == end) continue;
      fill(sums, begin, end);
      sums += (end - begin + kSumBlock - 1) / kSumBlock;
    }
    for (const Step& step : order_.program.steps) {
      float& slot = slots_[static_cast<size_t>(step.slot)];
      const size_t source = static_cast<size_t>(step.source);
      switch (step.kind) {
        case StepKind::kLoad:
          slot = blocks_[source];
          break;
        case StepKind::kZero:
          slot = 0.0f;
          break;
        case StepKind::kAdd:
          slot = slot + slots_[source];
          break;
      }
    }
    for (int64_t c = 0; c < order_.outputs(); ++c) out[c * stride] = slots_[static_cast<size_t>(c)];
  }

 private:
  const RowOrder& order_;
  std::vector<float> blocks_;
  std::vector<float> slots_;
};

class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(aligned_buffer(std::max<int64_t>(1, floats) * 4)) {}
  float* get() const { return static_cast<float*>(memory_.get()); }

 private:
  AlignedBuffer memory_;
};

// lse of one whole row.
float log_sum_exp_of(const char* row, const RowInput& x, BlockSums& sums, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  const float m = table.max(row, x.columns);
  float s = 0.0f;
  float lse = 0.0f;
  sums.run([&](float* out, int64_t lo, int64_t hi) { table.exp_sums(out, row + lo * size, hi - lo, m, nullptr); }, &s,
           1);
  context.loops.finish_log_sum_exp(&m, &s, &lse, 1);
  return lse;
}

}  // namespace

RowOrder::RowOrder(const LeafRun& run, int64_t columns) {
  if (run.lo < 0 || run.lo > run.hi || run.hi > run.leaves) {
    throw std::invalid_argument("vocab: expected 0 <= lo <= hi <= leaves, got lo=" + std::to_string(run.lo) +
                                ", hi=" + std::to_string(run.hi) + ", leaves=" + std::to_string(run.leaves));
  }
  if (run.to_root && (run.lo != 0 || run.hi != run.leaves)) {
    throw std::invalid_argument("vocab: the root needs all leaves");
  }
  const std::vector<int64_t> all = tbik::cuts(run.length, run.leaves);
  std::vector<int64_t> blocks;
  cuts.push_back(0);
  for (int64_t i = run.lo; i < run.hi; ++i) {
    const int64_t length = all[static_cast<size_t>(i) + 1] - all[static_cast<size_t>(i)];
    blocks.push_back((length + kSumBlock - 1) / kSumBlock);
    cuts.push_back(cuts.back() + length);
  }
  if (cuts.back() != columns) {
    throw std::invalid_argument("vocab: leaves [" + std::to_string(run.lo) + ", " + std::to_string(run.hi) +
                                ") of a vocabulary of " + std::to_string(run.length) + " have " +
                                std::to_string(cuts.back()) + " columns, got " + std::to_string(columns));
  }
  program = leaf_schedule(blocks, run.lo, run.to_root ? std::optional<int64_t>(run.leaves) : std::nullopt);
}

void row_max(const RowInput& x, float* m_M, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    for (int64_t r = begin; r < end; ++r) m_M[r] = table.max(reader.row(r), x.columns);
  });
}

void row_sums(const RowInput& x, const float* m_M, const RowOrder& order, float* sums_CM, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    BlockSums sums(order);
    for (int64_t r = begin; r < end; ++r) {
      const char* row = reader.row(r);
      sums.run(
          [&](float* out, int64_t lo, int64_t hi) {
            if (m_M == nullptr) return table.sums(out, row + lo * size, hi - lo);
            table.exp_sums(out, row + lo * size, hi - lo, m_M[r], nullptr);
          },
          sums_CM + r, x.rows);
    }
  });
}

void finish_log_sum_exp(const float* m, const float* s, float* lse, int64_t n, const VocabContext& context) {
  const FpIeeeScope ieee;
  context.loops.finish_log_sum_exp(m, s, lse, n);
}

void log_sum_exp(const RowInput& x, const RowOrder& order, float* lse_M, const VocabContext& context) {
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    BlockSums sums(order);
    for (int64_t r = begin; r < end; ++r) lse_M[r] = log_sum_exp_of(reader.row(r), x, sums, context);
  });
}

void softmax(const RowInput& x, const RowOrder& order, float* m_M, float* s_M, void* p_MV,
             const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  const bool in_place = x.dtype == DType::kFloat32;
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    BlockSums sums(order);
    const Scratch scratch(in_place ? 0 : x.columns);
    for (int64_t r = begin; r < end; ++r) {
      const char* row = reader.row(r);
      char* p = static_cast<char*>(p_MV) + r * x.columns * size;
      float* e = in_place ? reinterpret_cast<float*>(p) : scratch.get();
      const float m = m_M[r] = table.max(row, x.columns);
      sums.run([&](float* out, int64_t lo, int64_t hi) { table.exp_sums(out, row + lo * size, hi - lo, m, e + lo); },
               s_M + r, 1);
      table.divide(p, e, x.columns, s_M[r]);
    }
  });
}

void softmax_of(const RowInput& x, const float* m_M, const float* s_M, void* p_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    for (int64_t r = begin; r < end; ++r) {
      const char* row = reader.row(r);
      char* p = static_cast<char*>(p_MV) + r * x.columns * size;
      float wide[kSumBlock];  // in pieces that stay in L1
      for (int64_t at = 0; at < x.columns; at += kSumBlock) {
        const int64_t n = std::min(kSumBlock, x.columns - at);
        table.softmax_p(wide, row + at * size, n, m_M[r], s_M[r]);
        table.divide(p + at * size, wide, n, 1.0f);
      }
    }
  });
}

void softmax_dots(const RowInput& dp, const RowInput& x, const float* m_M, const float* s_M, const RowOrder& order,
                  float* dots_CM, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    RowReader dp_reader(dp);
    BlockSums sums(order);
    const Scratch p(x.columns);
    for (int64_t r = begin; r < end; ++r) {
      const char* dp_row = dp_reader.row(r);
      table.softmax_p(p.get(), reader.row(r), x.columns, m_M[r], s_M[r]);
      sums.run([&](float* out, int64_t lo, int64_t hi) { table.dots(out, p.get() + lo, dp_row + lo * size, hi - lo); },
               dots_CM + r, x.rows);
    }
  });
}

void softmax_dx(const RowInput& dp, const RowInput& x, const float* m_M, const float* s_M, const float* d_M,
                const RowOrder& order, void* dx_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    RowReader dp_reader(dp);
    BlockSums sums(order);
    const Scratch p(x.columns);
    for (int64_t r = begin; r < end; ++r) {
      const char* dp_row = dp_reader.row(r);
      table.softmax_p(p.get(), reader.row(r), x.columns, m_M[r], s_M[r]);
      float d = 0.0f;
      if (d_M != nullptr) {
        d = d_M[r];
      } else {
        sums.run(
            [&](float* out, int64_t lo, int64_t hi) { table.dots(out, p.get() + lo, dp_row + lo * size, hi - lo); }, &d,
            1);
      }
      table.softmax_dx(static_cast<char*>(dx_MV) + r * x.columns * size, p.get(), dp_row, x.columns, d);
    }
  });
}

void log_softmax(const RowInput& x, const RowOrder& order, float* lse_M, void* y_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    BlockSums sums(order);
    for (int64_t r = begin; r < end; ++r) {
      const char* row = reader.row(r);
      lse_M[r] = log_sum_exp_of(row, x, sums, context);
      table.subtract(static_cast<char*>(y_MV) + r * x.columns * size, row, x.columns, lse_M[r]);
    }
  });
}

void log_softmax_of(const RowInput& x, const float* lse_M, void* y_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    for (int64_t r = begin; r < end; ++r) {
      table.subtract(static_cast<char*>(y_MV) + r * x.columns * size, reader.row(r), x.columns, lse_M[r]);
    }
  });
}

void log_softmax_dx(const RowInput& dy, const RowInput& x, const float* lse_M, const float* total_M,
                    const RowOrder& order, void* dx_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    RowReader dy_reader(dy);
    BlockSums sums(order);
    for (int64_t r = begin; r < end; ++r) {
      const char* dy_row = dy_reader.row(r);
      float total = 0.0f;
      if (total_M != nullptr) {
        total = total_M[r];
      } else {
        sums.run([&](float* out, int64_t lo, int64_t hi) { table.sums(out, dy_row + lo * size, hi - lo); }, &total, 1);
      }
      table.log_softmax_dx(static_cast<char*>(dx_MV) + r * x.columns * size, dy_row, reader.row(r), x.columns, lse_M[r],
                           total);
    }
  });
}

void cross_entropy_losses(const float* lse_M, const float* picked_M, const int64_t* targets_M, int64_t ignore_index,
                          float* loss_M, int64_t rows, const VocabContext& context) {
  const FpIeeeScope ieee;
  context.loops.losses(loss_M, lse_M, picked_M, targets_M, ignore_index, rows);
}

void pick(const RowInput& x, const int64_t* ids_Mn, int64_t n, int64_t first, float* picked_Mn,
          const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  const FpIeeeScope ieee;
  for (int64_t r = 0; r < x.rows; ++r) {
    const char* row = static_cast<const char*>(x.data) + r * x.stride_row * size;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = ids_Mn[r * n + i] - first;
      picked_Mn[r * n + i] = j < 0 || j >= x.columns ? -0.0f : table.value_at(row, j * x.stride_column);
    }
  }
}

void cross_entropy_dx(const float* g_M, const RowInput& x, const int64_t* targets_M, const float* lse_M, int64_t first,
                      int64_t ignore_index, void* dx_MV, const VocabContext& context) {
  const VocabTable& table = context.loops.of(x.dtype);
  const int64_t size = size_of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    for (int64_t r = begin; r < end; ++r) {
      char* dx = static_cast<char*>(dx_MV) + r * x.columns * size;
      if (targets_M[r] == ignore_index) {
        std::memset(dx, 0, static_cast<size_t>(x.columns * size));
        continue;
      }
      const char* row = reader.row(r);
      table.cross_entropy_dx(dx, row, x.columns, lse_M[r], g_M[r]);
      const int64_t j = targets_M[r] - first;
      if (j >= 0 && j < x.columns) table.cross_entropy_hit(dx + j * size, row + j * size, lse_M[r], g_M[r]);
    }
  });
}

void top_k(const RowInput& x, const int64_t* ids_MV, int64_t first, int64_t k, float* values_Mk, int64_t* ids_Mk,
           const VocabContext& context) {
  struct Entry {
    int32_t key;
    float value;
    int64_t id;
  };
  // Whether a stands before b.
  const auto before = [](const Entry& a, const Entry& b) { return a.key != b.key ? a.key > b.key : a.id < b.id; };
  const VocabTable& table = context.loops.of(x.dtype);
  over_rows(x.rows, x.columns, context.parallel, [&](int64_t begin, int64_t end) {
    RowReader reader(x);
    std::vector<Entry> kept;  // a heap whose front is the last of the kept
    kept.reserve(static_cast<size_t>(std::min(k, x.columns)) + 1);
    for (int64_t r = begin; r < end; ++r) {
      const char* row = reader.row(r);
      kept.clear();
      // A key below every value's: the first k entries all enter.
      int32_t above = std::numeric_limits<int32_t>::min();
      for (int64_t j = 0; k > 0 && j < x.columns; ++j) {
        const bool full = static_cast<int64_t>(kept.size()) == k;
        // Without ids the columns ascend, so an equal key comes too late; with ids an equal key may enter.
        const int32_t limit =
            full && ids_MV != nullptr && above > std::numeric_limits<int32_t>::min() ? above - 1 : above;
        j = table.first_above(row, j, x.columns, full ? limit : std::numeric_limits<int32_t>::min());
        if (j == x.columns) break;
        const float value = table.value_at(row, j);
        const Entry entry{context.loops.key_of(value),
                          std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value,
                          ids_MV == nullptr ? first + j : ids_MV[r * x.columns + j]};
        if (entry.id < 0) continue;
        if (full) {
          if (!before(entry, kept.front())) continue;
          std::pop_heap(kept.begin(), kept.end(), before);
          kept.back() = entry;
        } else {
          kept.push_back(entry);
        }
        std::push_heap(kept.begin(), kept.end(), before);
        above = kept.front().key;
      }
      std::sort_heap(kept.begin(), kept.end(), before);
      for (int64_t i = 0; i < k; ++i) {
        const bool found = i < static_cast<int64_t>(kept.size());
        values_Mk[r * k + i] = found ? kept[static_cast<size_t>(i)].value : -std::numeric_limits<float>::infinity();
        ids_Mk[r * k + i] = found ? kept[static_cast<size_t>(i)].id : -1;
      }
    }
  });
}

namespace {

// A2 for a factor of one: the sum of two fp32 numbers below 2^-126 is exact, so flushing it is all there is to do.
inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

}  // namespace

void token_sums(const float* loss_T, const std::vector<int64_t>& offsets, float* sums_B) {
  const FpIeeeScope ieee;
  for (size_t sample = 0; sample + 1 < offsets.size(); ++sample) {
    const int64_t begin = offsets[sample];
    const int64_t end = offsets[sample + 1];
    const int64_t count = (end - begin + kSumBlock - 1) / kSumBlock;
    if (count == 0) {
      sums_B[sample] = 0.0f;
      continue;
    }
    std::vector<float> blocks(static_cast<size_t>(count));
    for (int64_t b = 0; b < count; ++b) {
      float acc = 0.0f;
      for (int64_t t = begin + b * kSumBlock; t < std::min(end, begin + (b + 1) * kSumBlock); ++t) {
        acc = flushed(flushed(loss_T[t]) + acc);
      }
      blocks[static_cast<size_t>(b)] = acc + 0.0f;
    }
    const Schedule program = schedule(leaf_nodes(0, count), count);
    std::vector<float> slots(static_cast<size_t>(program.num_slots));
    for (const Step& step : program.steps) {
      float& slot = slots[static_cast<size_t>(step.slot)];
      slot = step.kind == StepKind::kLoad ? blocks[static_cast<size_t>(step.source)]
                                          : slot + slots[static_cast<size_t>(step.source)];
    }
    sums_B[sample] = slots[0];
  }
}

}  // namespace tbik
