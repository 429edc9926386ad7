// Oracle of tbik/ORDER.md, from that page alone; commands: vectors/README.md. A double holds every format exactly.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

enum { NONE, BF16, FP16, FP32, FP64, CUTS = 0, STEP, REDUCE, EPILOGUE, LINEAR, AMX };  // formats, commands
static const int BITS[] = {0, 16, 16, 32, 64}, FRACTION[] = {0, 7, 10, 23, 52}, EMIN[] = {0, -126, -14, -126, -1022};
static int acc, wire, size[2][128];  // formats of the current command; the node of cover c that starts at leaf lo has
static double value[2][128];         // size[c][lo] leaves (0: there is none) and is worth value[c][lo]

static uint64_t infinity(int f) { return (UINT64_C(1) << (BITS[f] - 1)) - (UINT64_C(1) << FRACTION[f]); }
static uint64_t encode(double x, int f) {  // one rounding, ties to even; NaN becomes the canonical NaN
  uint64_t sign = (uint64_t)!!signbit(x) << (BITS[f] - 1);
  if (isnan(x)) return infinity(f) | UINT64_C(1) << (FRACTION[f] - 1);
  if (isinf(x)) return sign | infinity(f);
  int e = ilogb(x) < EMIN[f] ? EMIN[f] : ilogb(x);  // a carry out of the significand raises the exponent field
  uint64_t m = (uint64_t)nearbyint(ldexp(fabs(x), FRACTION[f] - e)) + ((uint64_t)(e - EMIN[f]) << FRACTION[f]);
  return sign | (m < infinity(f) ? m : infinity(f));
}
static double decode(uint64_t bits, int f) {
  uint64_t hidden = UINT64_C(1) << FRACTION[f], m = bits & ~(UINT64_C(1) << (BITS[f] - 1)), e = m / hidden;
  double x = ldexp((double)(m % hidden + (e ? hidden : 0)), EMIN[f] - FRACTION[f] + (int)(e ? e - 1 : 0));
  return copysign(m < infinity(f) ? x : m > infinity(f) ? NAN : INFINITY, bits == m ? 1 : -1);
}
static void print(double x, int f) { isnan(x) ? printf("nan ") : printf("%" PRIx64 " ", encode(x, f)); }
static float daz(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static float flushed_fma(float a, float b, float c) {  // A2
  float r = fmaf(a = daz(a), b = daz(b), c = daz(c)), small = fabsf(a) < fabsf(b) ? a : b, big = small == a ? b : a;
  if (fabsf(r) == 0x1p-126f && fabsf(fmaf(small * 0x1p64f, big, c * 0x1p64f)) < 0x1p-62f) return copysignf(0, r);
  return daz(r);
}
static double chain(const double* a, const double* b, int lo, int hi, int way) {  // 0 no flush, 1: A1, 2: A14
  double sum = 0, half[2] = {0, 0};
  for (int k = lo; k < hi; k++) {
    double* s = way == 2 ? &half[(k - lo) % 2] : &sum;
    *s = acc == FP64 ? fma(a[k], b[k], *s) : (way ? flushed_fma : fmaf)((float)a[k], (float)b[k], (float)*s);
    if (way < 2 || ((k - lo) % 32 < 31 && k < hi - 1)) continue;
    sum = daz((float)sum + daz((float)half[0] + (float)half[1])), half[0] = half[1] = 0;
  }
  return sum + 0.0;
}
static double add(double x, double y) { return acc == FP64 ? x + y : (double)((float)x + (float)y); }  // A4
static double on_wire(double x) { return wire ? decode(encode(x, wire), wire) + 0.0 : x; }             // A6
static double node(const double* leaf, int lo, int hi, int show) {  // T2; shows lo,mid,hi after both children
  if (hi - lo == 1) return on_wire(leaf[lo]);
  int mid = lo + (1 << ilogb(hi - lo - 1));
  double left = node(leaf, lo, mid, show), right = node(leaf, mid, hi, show);
  if (show) printf("%d,%d,%d ", lo, mid, hi);
  return on_wire(add(left, right));
}
static int cut(int K, int L, int i) {  // T1; i = -1 gives q
  int q = 64;
  while (q > 1 && (K % (q * (L & -L)) || K / q < L)) q /= 2;
  return i < 0 ? q : (int)(q * ((int64_t)(K / q) * i / L));
}
static void insert(int c, int lo, int n, double x) {  // T4
  for (int other; size[c][other = lo ^ n] == n; lo &= ~n, n *= 2, size[c][other] = 0)
    x = on_wire(other < lo ? add(value[c][other], x) : add(x, value[c][other]));
  size[c][lo] = n, value[c][lo] = x;
}
static void reduce(const double* leaf, int L, int world) {  // T3, T5; the covers meet in descending rank order
  for (int rank = world; rank-- > 0; printf("/ ")) {
    for (int i = L * rank / world; i < L * (rank + 1) / world; i++) insert(1, i, 1, on_wire(leaf[i]));
    for (int i = 0; i < L; size[1][i++] = 0) {
      if (size[1][i]) printf("%d,%d,", ilogb(size[1][i]), i / size[1][i]), print(value[1][i], acc);
      if (size[1][i]) insert(0, i, size[1][i], value[1][i]);
    }
  }
  int i = L - (L & -L);
  double root = value[0][i];
  for (size[0][i] = 0; i-- > 0; size[0][i] = 0)
    if (size[0][i]) root = on_wire(add(value[0][i], root));
  if (encode(node(leaf, 0, L, 1), acc) == encode(root, acc)) print(root, acc);  // T2 and T5 agree, else no root
}
static uint64_t epilogue(double x, int world, const double* bias, int out) {  // A7
  if (world) x = acc == FP64 ? x / world : (double)((float)x / (float)world);
  return encode(bias ? add(x, *bias) : x, out);
}
static void read_values(double* v, int f, int n) {
  for (uint64_t bits, i = 0; i < (uint64_t)n && scanf("%" SCNx64, &bits) == 1; i++) v[i] = decode(bits, f);
}
int main(void) {
  int kind, in, narrow, out, bias, L, M, N, K;
  for (; scanf("%d%d%d%d%d%d%d%d%d", &kind, &in, &narrow, &out, &bias, &L, &M, &N, &K) == 9; puts("")) {
    static double x[4096], w[4096], b[64], leaf[64];
    read_values(x, in, M * K), read_values(w, in, N * K), read_values(b, bias, bias ? N : 0);
    acc = in == FP64 ? FP64 : FP32, wire = narrow;
    for (int i = -1; kind == CUTS && i <= L; i++) printf("%d ", cut(K, L, i));
    if (kind == STEP) print(flushed_fma((float)x[0], (float)x[1], (float)x[2]), FP32);
    if (kind == REDUCE) reduce(x, K, L);
    if (kind == EPILOGUE) printf("%" PRIx64, epilogue(x[0], L, bias ? b : NULL, out));
    for (int i = 0; kind >= LINEAR && i < 3 * M * N; i++) {  // y, flat (one leaf), gradual (A1, no flush)
      int run = i / (M * N), m = i / N % M, n = i % N, leaves = run == 1 ? 1 : L;
      for (int l = 0; l < leaves; l++)
        leaf[l] = chain(x + m * K, w + n * K, cut(K, leaves, l), cut(K, leaves, l + 1), run < 2 ? kind - 3 : 0);
      printf("%" PRIx64 " ", epilogue(node(leaf, 0, leaves, 0), 0, bias ? b + n : NULL, out));
    }
  }
}
