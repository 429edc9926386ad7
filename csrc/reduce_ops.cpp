// See reduce_ops.h for the equations. Elements are cut into chunks that stay in the first-level cache, and the whole
// schedule runs on one chunk before the next.
#include "reduce_ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "extrema.h"
#include "fpmode.h"

namespace tbik {

namespace {

constexpr int64_t kChunkBytes = 4096;

// The steps of `program` on values of T. source(i, at, n, buffer) gives n values of input i from `at` on.
template <class T, class Source, class Add, class Store>
void run_schedule(const Schedule& program, int64_t count, Source source, Add add, Store store) {
  constexpr int64_t kChunk = kChunkBytes / static_cast<int64_t>(sizeof(T));
  std::vector<T> memory(static_cast<size_t>(program.num_slots * kChunk));
  std::vector<const T*> slots(static_cast<size_t>(program.num_slots));
  for (int64_t at = 0; at < count; at += kChunk) {
    const int64_t n = std::min(kChunk, count - at);
    for (const Step& step : program.steps) {
      T* own = memory.data() + step.slot * kChunk;
      const size_t slot = static_cast<size_t>(step.slot);
      switch (step.kind) {
        case StepKind::kLoad:
          slots[slot] = source(static_cast<size_t>(step.source), at, n, own);
          break;
        case StepKind::kAdd:
          add(own, slots[slot], slots[static_cast<size_t>(step.source)], n);
          slots[slot] = own;
          break;
        case StepKind::kZero:
          throw std::invalid_argument("reduce: a collective's schedule has no empty leaf");
      }
    }
    for (size_t o = 0; o < program.outputs.size(); ++o) store(static_cast<int64_t>(o) * count + at, slots[o], n);
  }
}

template <class T>
void combine_integers(Op op, T* out, const T* left, const T* right, int64_t n) {
  using U = std::make_unsigned_t<T>;
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(f(left[i], right[i]));
  };
  switch (op) {
    case Op::kSum:
      return each([](T a, T b) { return static_cast<U>(static_cast<U>(a) + static_cast<U>(b)); });
    case Op::kProduct:
      // 64 bits: a product of two 16-bit values would overflow int.
      return each([](T a, T b) { return static_cast<U>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); });
    case Op::kMin:
      return each([](T a, T b) { return minimum(a, b); });
    case Op::kMax:
      return each([](T a, T b) { return maximum(a, b); });
    case Op::kBand:
      return each([](T a, T b) { return static_cast<U>(static_cast<U>(a) & static_cast<U>(b)); });
    case Op::kBor:
      return each([](T a, T b) { return static_cast<U>(static_cast<U>(a) | static_cast<U>(b)); });
    case Op::kBxor:
      return each([](T a, T b) { return static_cast<U>(static_cast<U>(a) ^ static_cast<U>(b)); });
    case Op::kAvg:
    case Op::kPremulSum:
      break;
  }
  throw std::invalid_argument(std::string("reduce: ") + name_of(op) + " of integers is not defined");
}

template <class T>
void reduce_integers(Op op, const std::vector<const void*>& inputs, int64_t count, const Schedule& program, void* out) {
  run_schedule<T>(
      program, count, [&](size_t input, int64_t at, int64_t, T*) { return static_cast<const T*>(inputs[input]) + at; },
      [&](T* own, const T* left, const T* right, int64_t n) { combine_integers(op, own, left, right, n); },
      [&](int64_t at, const T* x, int64_t n) {
        std::memcpy(static_cast<T*>(out) + at, x, static_cast<size_t>(n) * sizeof(T));
      });
}

// A bool is a byte that is 0 or not.
Op bool_op(Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kMax:
    case Op::kBor:
      return Op::kBor;
    case Op::kProduct:
    case Op::kMin:
    case Op::kBand:
      return Op::kBand;
    case Op::kBxor:
      return Op::kBxor;
    case Op::kAvg:
    case Op::kPremulSum:
      break;
  }
  throw std::invalid_argument(std::string("reduce: ") + name_of(op) + " of bool is not defined");
}

void reduce_bools(Op op, const std::vector<const void*>& inputs, int64_t count, const Schedule& program, void* out) {
  const Op bits = bool_op(op);
  run_schedule<uint8_t>(
      program, count,
      [&](size_t input, int64_t at, int64_t n, uint8_t* own) {
        const uint8_t* x = static_cast<const uint8_t*>(inputs[input]) + at;
        for (int64_t i = 0; i < n; ++i) own[i] = x[i] != 0;
        return static_cast<const uint8_t*>(own);
      },
      [&](uint8_t* own, const uint8_t* l, const uint8_t* r, int64_t n) { combine_integers(bits, own, l, r, n); },
      [&](int64_t at, const uint8_t* x, int64_t n) {
        std::memcpy(static_cast<uint8_t*>(out) + at, x, static_cast<size_t>(n));
      });
}

DType dtype_of(Element element) {
  switch (element) {
    case Element::kFloat32:
      return DType::kFloat32;
    case Element::kFloat64:
      return DType::kFloat64;
    case Element::kBFloat16:
      return DType::kBFloat16;
    case Element::kFloat16:
      return DType::kFloat16;
    case Element::kInt8:
    case Element::kUInt8:
    case Element::kInt16:
    case Element::kInt32:
    case Element::kInt64:
    case Element::kBool:
      break;
  }
  throw std::invalid_argument(std::string("reduce: ") + name_of(element) + " is no floating-point type");
}

template <class T>
void reduce_floats(const Rule& rule, const std::vector<const void*>& inputs, DType dtype, int64_t count,
                   const Schedule& program, void* out, const Loops& loops, const std::vector<double>* leaf_factors) {
  constexpr DType kOwn = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;
  const FpIeeeScope ieee;
  const bool at_root = rule.op == Op::kPremulSum && program.is_root && !rule.factor_at_leaf;
  const T factor = static_cast<T>(rule.factor);
  const DType result = program.is_root ? dtype_of(rule.element) : kOwn;
  std::vector<T> scaled(static_cast<size_t>(kChunkBytes) / sizeof(T));
  run_schedule<T>(
      program, count,
      [&](size_t input, int64_t at, int64_t n, T* own) {
        const char* x = static_cast<const char*>(inputs[input]) + at * size_of(dtype);
        if (leaf_factors == nullptr && dtype == kOwn) return reinterpret_cast<const T*>(x);
        loops.cast(own, kOwn, x, dtype, n);
        if (leaf_factors != nullptr) {
          const T f = static_cast<T>((*leaf_factors)[input]);
          for (int64_t i = 0; i < n; ++i) own[i] = own[i] * f;
        }
        return static_cast<const T*>(own);
      },
      [&](T* own, const T* left, const T* right, int64_t n) {
        switch (rule.op) {
          case Op::kProduct:
            for (int64_t i = 0; i < n; ++i) own[i] = left[i] * right[i];
            return;
          case Op::kMin:
            for (int64_t i = 0; i < n; ++i) own[i] = minimum(left[i], right[i]);
            return;
          case Op::kMax:
            for (int64_t i = 0; i < n; ++i) own[i] = maximum(left[i], right[i]);
            return;
          case Op::kSum:
          case Op::kAvg:
          case Op::kPremulSum:
            if constexpr (std::is_same_v<T, float>) {
              loops.add_f32(own, left, right, n);
            } else {
              loops.add_f64(own, left, right, n);
            }
            return;
          case Op::kBand:
          case Op::kBor:
          case Op::kBxor:
            break;
        }
        throw std::invalid_argument(std::string("reduce: ") + name_of(rule.op) + " of floats is not defined");
      },
      [&](int64_t at, const T* x, int64_t n) {
        char* to = static_cast<char*>(out) + at * size_of(result);
        if (at_root) {
          for (int64_t i = 0; i < n; ++i) scaled[static_cast<size_t>(i)] = x[i] * factor;
          x = scaled.data();
        }
        const T divisor = program.is_root ? static_cast<T>(rule.divisor) : T(1);
        if constexpr (std::is_same_v<T, float>) {
          loops.store_f32(to, result, x, n, divisor, nullptr);
        } else {
          loops.store_f64(to, result, x, n, divisor, nullptr);
        }
      });
}

void serial(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}

}  // namespace

const char* name_of(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "float32";
    case Element::kFloat64:
      return "float64";
    case Element::kBFloat16:
      return "bfloat16";
    case Element::kFloat16:
      return "float16";
    case Element::kInt8:
      return "int8";
    case Element::kUInt8:
      return "uint8";
    case Element::kInt16:
      return "int16";
    case Element::kInt32:
      return "int32";
    case Element::kInt64:
      return "int64";
    case Element::kBool:
      return "bool";
  }
  return "?";
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kSum:
      return "sum";
    case Op::kAvg:
      return "avg";
    case Op::kProduct:
      return "product";
    case Op::kMin:
      return "min";
    case Op::kMax:
      return "max";
    case Op::kBand:
      return "band";
    case Op::kBor:
      return "bor";
    case Op::kBxor:
      return "bxor";
    case Op::kPremulSum:
      return "premul_sum";
  }
  return "?";
}

int64_t size_of(Element element) {
  switch (element) {
    case Element::kFloat64:
    case Element::kInt64:
      return 8;
    case Element::kFloat32:
    case Element::kInt32:
      return 4;
    case Element::kBFloat16:
    case Element::kFloat16:
    case Element::kInt16:
      return 2;
    case Element::kInt8:
    case Element::kUInt8:
    case Element::kBool:
      return 1;
  }
  return 0;
}

bool is_float(Element element) {
  return element == Element::kFloat32 || element == Element::kFloat64 || element == Element::kBFloat16 ||
         element == Element::kFloat16;
}

Element accumulation_of(Element element) {
  return element == Element::kBFloat16 || element == Element::kFloat16 ? Element::kFloat32 : element;
}

std::string refusal_of(Op op, Element element) {
  const bool averages = op == Op::kAvg || op == Op::kPremulSum;
  const bool bitwise = op == Op::kBand || op == Op::kBor || op == Op::kBxor;
  if (is_float(element) && bitwise) {
    return std::string(name_of(op)) + " of " + name_of(element) + " is not defined; view the tensor as integers";
  }
  if (!is_float(element) && averages) {
    return std::string(name_of(op)) + " of " + name_of(element) +
           " is not defined; use sum, or convert to float32 first";
  }
  return "";
}

void reduce(const Rule& rule, const std::vector<const void*>& inputs, bool from_elements, int64_t count,
            const Schedule& program, void* out, const Combine& combine, const std::vector<double>* leaf_factors) {
  const std::string refusal = refusal_of(rule.op, rule.element);
  if (!refusal.empty()) throw std::invalid_argument("reduce: " + refusal);
  if (is_float(rule.element)) {
    const DType dtype = dtype_of(from_elements ? rule.element : accumulation_of(rule.element));
    const bool wide = rule.element == Element::kFloat64;
    if (rule.op == Op::kSum || rule.op == Op::kAvg) {
      const DType result = program.is_root ? dtype_of(rule.element) : dtype_of(accumulation_of(rule.element));
      combine.fold_values(inputs, dtype, count, program, program.is_root ? rule.divisor : 1, nullptr, 0, {out, result},
                          *combine.loops, serial);
      return;
    }
    const std::vector<double>* factors = rule.factor_at_leaf && from_elements ? leaf_factors : nullptr;
    if (wide) {
      reduce_floats<double>(rule, inputs, dtype, count, program, out, *combine.loops, factors);
    } else {
      reduce_floats<float>(rule, inputs, dtype, count, program, out, *combine.loops, factors);
    }
    return;
  }
  switch (rule.element) {
    case Element::kInt8:
      return reduce_integers<int8_t>(rule.op, inputs, count, program, out);
    case Element::kUInt8:
      return reduce_integers<uint8_t>(rule.op, inputs, count, program, out);
    case Element::kInt16:
      return reduce_integers<int16_t>(rule.op, inputs, count, program, out);
    case Element::kInt32:
      return reduce_integers<int32_t>(rule.op, inputs, count, program, out);
    case Element::kInt64:
      return reduce_integers<int64_t>(rule.op, inputs, count, program, out);
    case Element::kBool:
      return reduce_bools(rule.op, inputs, count, program, out);
    case Element::kFloat32:
    case Element::kFloat64:
    case Element::kBFloat16:
    case Element::kFloat16:
      return;
  }
}

}  // namespace tbik
