// Values of the peer-memory reductions, in packs of 16 bytes: the same text for nvcc and for the CPU, so that tests on
// the CPU run what a GPU runs.
//
//   node       left (+) right      fp32 (bf16, fp16, fp32), fp64, or integers modulo 2^bits
//   epilogue   cast(x * factor / divisor + bias), NaN canonical (ORDER.md A4, A7)
//
// Conversions are those of csrc/convert_loops.h. Flags: -fmad=false, -ffp-contract=off, no flush, IEEE division.
// Guarantee: deterministic, element-wise.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../extrema.h"
#include "../host_device.h"
#include "call.h"

namespace tbik::peer {

#include "../convert_loops.h"

inline constexpr int kPackBytes = 16;

struct alignas(kPackBytes) Pack {
  uint64_t halves[2];
};

// S: an element as it lies in memory. Acc: what nodes are.
template <class S>
struct Traits {
  using Acc = std::conditional_t<std::is_same_v<S, Bf16> || std::is_same_v<S, F16>, float, S>;
  static constexpr int kWidth = kPackBytes / static_cast<int>(sizeof(S));
};

template <class Acc, int kWidth>
struct Values {
  Acc v[kWidth];
};

template <class S>
using ValuesOf = Values<typename Traits<S>::Acc, Traits<S>::kWidth>;

template <class S>
TBIK_HOST_DEVICE ValuesOf<S> unpack(const Pack& pack) {
  S raw[Traits<S>::kWidth];
  memcpy(raw, &pack, sizeof pack);
  ValuesOf<S> values;
  TBIK_UNROLL
  for (int i = 0; i < Traits<S>::kWidth; ++i) {
    if constexpr (std::is_integral_v<S>) {
      values.v[i] = raw[i];
    } else {
      values.v[i] = widen(raw[i]);
    }
  }
  return values;
}

// The wire rounds to bfloat16 and removes -0 (ORDER.md A6); only fp32 nodes have one.
template <class Acc, int kWidth>
TBIK_HOST_DEVICE void round_wire(Values<Acc, kWidth>& x) {
  if constexpr (std::is_same_v<Acc, float>) {
    TBIK_UNROLL
    for (int i = 0; i < kWidth; ++i) x.v[i] = f32_of_bf16(bf16_of(x.v[i])) + 0.0f;
  }
}

template <class Acc>
TBIK_HOST_DEVICE Acc sum_of(Acc left, Acc right) {
  if constexpr (std::is_integral_v<Acc>) {
    using U = std::make_unsigned_t<Acc>;
    return static_cast<Acc>(static_cast<U>(left) + static_cast<U>(right));
  } else {
    return left + right;
  }
}

template <class Acc>
TBIK_HOST_DEVICE Acc product_of(Acc left, Acc right) {
  if constexpr (std::is_integral_v<Acc>) {
    using U = std::make_unsigned_t<Acc>;
    return static_cast<Acc>(static_cast<U>(left) * static_cast<U>(right));
  } else {
    return left * right;
  }
}

template <class Acc, int kWidth>
TBIK_HOST_DEVICE Values<Acc, kWidth> sum(const Values<Acc, kWidth>& left, const Values<Acc, kWidth>& right) {
  Values<Acc, kWidth> node;
  TBIK_UNROLL
  for (int i = 0; i < kWidth; ++i) node.v[i] = sum_of(left.v[i], right.v[i]);
  return node;
}

template <class Acc, int kWidth>
TBIK_HOST_DEVICE Values<Acc, kWidth> combine(Op op, const Values<Acc, kWidth>& left, const Values<Acc, kWidth>& right) {
  if (op == Op::kMin || op == Op::kMax || op == Op::kProduct) {
    Values<Acc, kWidth> node;
    TBIK_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const Acc a = left.v[i];
      const Acc b = right.v[i];
      node.v[i] = op == Op::kMin ? minimum(a, b) : op == Op::kMax ? maximum(a, b) : product_of(a, b);
    }
    return node;
  }
  return sum(left, right);
}

template <class Acc, int kWidth>
TBIK_HOST_DEVICE void scale(Values<Acc, kWidth>& x, double factor) {
  if constexpr (!std::is_integral_v<Acc>) {
    const Acc f = static_cast<Acc>(factor);
    TBIK_UNROLL
    for (int i = 0; i < kWidth; ++i) x.v[i] = x.v[i] * f;
  }
}

// x / divisor + bias; column: the bias' of x.v[0].
template <class Acc, int kWidth>
TBIK_HOST_DEVICE void finish(Values<Acc, kWidth>& x, int64_t divisor, const Acc* bias, int64_t column,
                             int64_t columns) {
  if constexpr (!std::is_integral_v<Acc>) {
    if (divisor != 1) {
      const Acc d = static_cast<Acc>(divisor);
      TBIK_UNROLL
      for (int i = 0; i < kWidth; ++i) x.v[i] = x.v[i] / d;
    }
    if (bias != nullptr) {
      TBIK_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        x.v[i] = x.v[i] + bias[column];
        column = column + 1 == columns ? 0 : column + 1;
      }
    }
    TBIK_UNROLL
    for (int i = 0; i < kWidth; ++i) x.v[i] = canonical(x.v[i]);
  }
}

// Whole packs where the address allows it, else element by element; `live` of the values are stored.
template <class To, class Acc, int kWidth>
TBIK_HOST_DEVICE void store_as(void* out, int64_t at, const Values<Acc, kWidth>& x, int live) {
  To raw[kWidth];
  TBIK_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (std::is_integral_v<Acc>) {
      raw[i] = x.v[i];
    } else {
      raw[i] = narrow<To>(x.v[i]);
    }
  }
  To* to = static_cast<To*>(out) + at;
  constexpr int kBytes = kWidth * static_cast<int>(sizeof(To));
  const uint64_t address = reinterpret_cast<uint64_t>(to);
  if (live == kWidth && address % (kBytes < kPackBytes ? kBytes : kPackBytes) == 0) {
    if constexpr (kBytes % kPackBytes == 0) {
      TBIK_UNROLL
      for (int i = 0; i < kBytes / kPackBytes; ++i) {
        Pack pack;
        memcpy(&pack, raw + i * (kPackBytes / static_cast<int>(sizeof(To))), kPackBytes);
        reinterpret_cast<Pack*>(to)[i] = pack;
      }
    } else {
      static_assert(kBytes == 8);
      uint64_t half;
      memcpy(&half, raw, 8);
      *reinterpret_cast<uint64_t*>(to) = half;
    }
    return;
  }
  TBIK_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    if (i < live) to[i] = raw[i];
  }
}

template <class Acc, int kWidth>
TBIK_HOST_DEVICE void store(void* out, Element element, int64_t at, const Values<Acc, kWidth>& x, int live) {
  if constexpr (std::is_integral_v<Acc>) {
    store_as<Acc>(out, at, x, live);
  } else if (element == Element::kFloat32) {
    store_as<float>(out, at, x, live);
  } else if constexpr (std::is_same_v<Acc, double>) {
    store_as<double>(out, at, x, live);
  } else if (element == Element::kBFloat16) {
    store_as<Bf16>(out, at, x, live);
  } else {
    store_as<F16>(out, at, x, live);
  }
}

TBIK_HOST_DEVICE int64_t bytes_of(Element element) {
  switch (element) {
    case Element::kFloat64:
    case Element::kInt64:
      return 8;
    case Element::kFloat32:
    case Element::kInt32:
      return 4;
    case Element::kBFloat16:
    case Element::kFloat16:
      return 2;
  }
  return 0;
}

}  // namespace tbik::peer
