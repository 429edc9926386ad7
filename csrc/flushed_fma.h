// One step of an fp32 leaf chain with the flush rule of ORDER.md A2 written out (FTZ + DAZ of x86), for paths without
// hardware flush. Included after convert_loops.h, in the same namespace. No include guard on purpose; internal linkage.

namespace {

inline float flush_input(float x) { return (bits(x) & 0x7f800000u) == 0 ? as_f32(bits(x) & 0x80000000u) : x; }

// a, b, c already flushed.
inline float flushed_fma(float a, float b, float c) {
  const float r = std::fma(a, b, c);
  const uint32_t magnitude = bits(r) & 0x7fffffffu;
  if (magnitude > 0x00800000u || magnitude == 0) return r;
  bool tiny = magnitude < 0x00800000u;
  if (!tiny) {
    // |r| = 2^-126 after rounding: flushed only if the exact value was tiny before rounding at 24 bits.
    const bool a_smaller = (bits(a) & 0x7fffffffu) <= (bits(b) & 0x7fffffffu);
    const float small = a_smaller ? a : b;
    const float large = a_smaller ? b : a;
    const float s = std::fma(small * 0x1p64f, large, c * 0x1p64f);
    tiny = std::fabs(s) < 0x1p-62f;
  }
  return tiny ? as_f32(bits(r) & 0x80000000u) : r;
}

}  // namespace
