// Driver of folds: see combine.h for the equation. Elements are cut into chunks that fit in L1; the whole schedule runs
// on one chunk before the next, so every input is read once and every output is written once.
#include "combine.h"

#include <algorithm>

#include "fpmode.h"

namespace tbik {

namespace {

constexpr int64_t kChunk = 1024;

template <class T>
struct Arithmetic;

template <>
struct Arithmetic<float> {
  static constexpr DType kType = DType::kFloat32;
  static auto add(const Loops& loops, bool round) { return round ? loops.add_wire : loops.add_f32; }
  static void round(const Loops& loops, float* x, int64_t n) { loops.finish_wire(x, n); }
  static auto store(const Loops& loops) { return loops.store_f32; }
};

// No schedule rounds an fp64 accumulator: fold() refuses it.
template <>
struct Arithmetic<double> {
  static constexpr DType kType = DType::kFloat64;
  static auto add(const Loops& loops, bool) { return loops.add_f64; }
  static void round(const Loops&, double*, int64_t) {}
  static auto store(const Loops& loops) { return loops.store_f64; }
};

// A root without division, bias or rounding: its last node goes straight into the result.
bool is_plain(const Schedule& program, int64_t divisor, const void* bias) {
  const auto rounds = [](const Step& step) { return step.round || step.kind == StepKind::kZero; };
  return divisor == 1 && bias == nullptr && program.outputs.size() == 1 && !program.steps.empty() &&
         program.steps.back().kind == StepKind::kAdd && program.steps.back().slot == 0 &&
         std::none_of(program.steps.begin(), program.steps.end(), rounds);
}

// As fold_range for such a root, fp32: a loaded value is converted where it is added.
void fold_plain(const std::vector<const void*>& inputs, DType dtype, int64_t begin, int64_t end,
                const Schedule& program, const FoldResult& out, const Loops& loops) {
  const FpIeeeScope ieee;
  const int64_t width = size_of(dtype);
  const auto input = [&](int64_t source, int64_t at) {
    return static_cast<const char*>(inputs[static_cast<size_t>(source)]) + at * width;
  };
  char* const to = static_cast<char*>(out.data);
  if (program.steps.size() == 3 && dtype == out.dtype) {  // two leaves: one pass, no memory of its own
    const Step& add = program.steps.back();
    const bool in_order = program.steps[0].slot == add.slot;
    const int64_t left = program.steps[in_order ? 0 : 1].source;
    const int64_t right = program.steps[in_order ? 1 : 0].source;
    loops.add_both(to + begin * width, input(left, begin), input(right, begin), dtype, end - begin);
    return;
  }
  struct Slot {
    const void* data = nullptr;
    bool raw = false;  // still of the input's type
  };
  const AlignedBuffer memory = aligned_buffer(program.num_slots * kChunk * static_cast<int64_t>(sizeof(float)));
  float* const own = static_cast<float*>(memory.get());
  std::vector<Slot> slots(static_cast<size_t>(program.num_slots));
  const auto widened = [&](size_t slot, int64_t n) {
    if (slots[slot].raw) {
      float* x = own + static_cast<int64_t>(slot) * kChunk;
      loops.cast(x, DType::kFloat32, slots[slot].data, dtype, n);
      slots[slot] = {x, false};
    }
    return static_cast<const float*>(slots[slot].data);
  };
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t n = std::min(kChunk, end - at);
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& step = program.steps[i];
      const size_t target = static_cast<size_t>(step.slot);
      const size_t source = static_cast<size_t>(step.source);
      if (step.kind == StepKind::kLoad) {
        slots[target] = {input(step.source, at), dtype != DType::kFloat32};
      } else if (i + 1 == program.steps.size()) {
        loops.add_to(to + at * size_of(out.dtype), out.dtype, widened(target, n), widened(source, n), n);
      } else {
        float* x = own + step.slot * kChunk;
        if (slots[target].raw && slots[source].raw) {
          loops.add_from(x, slots[target].data, slots[source].data, dtype, n);
        } else {
          const float* left = widened(target, n);
          loops.add_f32(x, left, widened(source, n), n);
        }
        slots[target] = {x, false};
      }
    }
  }
}

template <class T>
void fold_range(const std::vector<const void*>& inputs, DType dtype, int64_t begin, int64_t end, int64_t count,
                const Schedule& program, int64_t divisor, const T* bias, int64_t columns, const FoldResult& out,
                const Loops& loops) {
  using Op = Arithmetic<T>;
  const FpIeeeScope ieee;
  const AlignedBuffer memory = aligned_buffer(program.num_slots * kChunk * static_cast<int64_t>(sizeof(T)));
  T* own = static_cast<T*>(memory.get());
  std::vector<const T*> slots(static_cast<size_t>(program.num_slots));  // an input that needs no change is not copied
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t n = std::min(kChunk, end - at);
    for (const Step& step : program.steps) {
      const size_t target = static_cast<size_t>(step.slot);
      T* x = own + step.slot * kChunk;
      switch (step.kind) {
        case StepKind::kLoad: {
          const char* source = static_cast<const char*>(inputs[static_cast<size_t>(step.source)]) + at * size_of(dtype);
          if (dtype == Op::kType && !step.round) {
            slots[target] = reinterpret_cast<const T*>(source);
            break;
          }
          loops.cast(x, Op::kType, source, dtype, n);
          if (step.round) Op::round(loops, x, n);
          slots[target] = x;
          break;
        }
        case StepKind::kZero:
          std::fill(x, x + n, T(0));
          slots[target] = x;
          break;
        case StepKind::kAdd:
          Op::add(loops, step.round)(x, slots[target], slots[static_cast<size_t>(step.source)], n);
          slots[target] = x;
          break;
      }
    }
    for (size_t o = 0; o < program.outputs.size(); ++o) {
      char* dst = static_cast<char*>(out.data) + (static_cast<int64_t>(o) * count + at) * size_of(out.dtype);
      if (bias == nullptr) {
        Op::store(loops)(dst, out.dtype, slots[o], n, static_cast<T>(divisor), nullptr);
        continue;
      }
      for (int64_t i = 0; i < n;) {
        const int64_t column = (at + i) % columns;
        const int64_t run = std::min(n - i, columns - column);
        Op::store(loops)(dst + i * size_of(out.dtype), out.dtype, slots[o] + i, run, static_cast<T>(divisor),
                         bias + column);
        i += run;
      }
    }
  }
}

}  // namespace

void fold(const std::vector<const void*>& inputs, DType dtype, int64_t count, const Schedule& program, int64_t divisor,
          const void* bias, int64_t columns, const FoldResult& out, const Loops& loops, const ParallelFor& parallel) {
  require_narrowing("fold", dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, program, out.dtype);
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  const bool plain = is_plain(program, divisor, bias) &&
                     (dtype != DType::kFloat64 || (program.steps.size() == 3 && out.dtype == DType::kFloat64));
  parallel(chunks, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kChunk;
    const int64_t end = std::min(count, last * kChunk);
    if (plain) {
      fold_plain(inputs, dtype, begin, end, program, out, loops);
    } else if (dtype == DType::kFloat64) {
      fold_range<double>(inputs, dtype, begin, end, count, program, divisor, static_cast<const double*>(bias), columns,
                         out, loops);
    } else {
      fold_range<float>(inputs, dtype, begin, end, count, program, divisor, static_cast<const float*>(bias), columns,
                        out, loops);
    }
  });
}

}  // namespace tbik
