// Numbers to a format's codes or values on CPUs. `sparrow/numerics` is the definition.
//
// x is [outer, length, inner]; blocks run along `length`. `along` is for inner = 1: a block is neighbours in memory,
// and its largest magnitude is found among the lanes of a vector. `across` is for the other axes: each lane is a block.

#include "../cpu.h"
#include "../lanes.h"

#include <string>
#include <tuple>

namespace sparrow {
namespace {

typedef int32_t Ints __attribute__((vector_size(W * 4)));

// What is known when the loops are compiled. kPlain: to nearest, powers of two, no shifts. kShifted: the same with
// shifts. kAny: nothing.
enum Mode { kPlain, kShifted, kAny };
enum Rounding { kNearest, kZero, kStochastic };

constexpr int32_t kInfinity = 0x7f800000, kSign = INT32_MIN;  // bits of fp32
constexpr int32_t kNanScale = 255, kLeast = -127;
constexpr int64_t kVectors = 64, kStrip = kVectors * W;  // columns of `across` at a time
constexpr int64_t kTurned = 256, kTurnedRows = 128;      // columns that are turned at a time, and rows at least

struct Job {
  const void* x;
  bool is_narrow, to_bf16;  // x, and values that leave: of bfloat16; else of float32
  int64_t outer, length, inner;
  int64_t block, pair;  // numbers that share a scale, and a shift
  int32_t most_shift;   // 0: there are no shifts
  int32_t shift_bits;
  int32_t mantissa, least, bits, largest_exponent, largest_code;  // of the element
  float largest;
  bool complement, ceil, fp32;
  int64_t rounding;
  int32_t most;  // the bits of the largest magnitude of the whole tensor; -1: each block has its own
  uint64_t key, number;
  void* out;
  bool past;
  void* scales;
  uint8_t* shifts;
  int64_t row_bytes, blocks, shift_bytes;  // of a row of codes, of scales, of shifts
};

template <Mode mode>
INLINE bool is_fp32(const Job& a) {
  return mode == kAny && a.fp32;
}
template <Mode mode>
INLINE bool has_shifts(const Job& a) {
  return mode == kShifted || (mode == kAny && a.most_shift);
}

// The numbers of x from the i-th on: a branch that is always the same costs less than loops for each type.
INLINE Floats numbers(const Job& a, const void* x, int64_t i, int64_t n) {
  return a.is_narrow ? load(static_cast<const bfloat16*>(x) + i, n) : load(static_cast<const float*>(x) + i, n);
}
INLINE void put_values(const Job& a, int64_t i, const Floats& v, int64_t n) {
  if (a.to_bf16) store(static_cast<bfloat16*>(a.out) + i, v, n, a.past);
  else store(static_cast<float*>(a.out) + i, v, n, a.past);
}

INLINE Ints greater(const Ints& a, const Ints& b) { return a > b ? a : b; }
INLINE Ints smaller(const Ints& a, const Ints& b) { return a < b ? a : b; }
INLINE Ints size_of(const Floats& x) { return (Ints)x & ~kSign; }

// The largest of each `group` of lanes, in all of them. group: a power of two up to W.
INLINE Ints among(Ints v, int64_t group) {
#define LARGER(...) v = greater(v, __builtin_shufflevector(v, v, __VA_ARGS__))
  if (group > 1) LARGER(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  if (group > 2) LARGER(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  if (group > 4) LARGER(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if (group > 8) LARGER(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#undef LARGER
  return v;
}

// 2 to the power of exponents from -127, whose power is a subnormal number, to 127.
INLINE Floats power(const Ints& exponent) {
  const Ints bits = (exponent + 127) << 23;
  return (Floats)(bits == 0 ? Ints{} + 0x00400000 : bits);
}

// The exponents of scales for numbers whose largest magnitude has the bits `most`.
INLINE Ints fitting(const Job& a, const Ints& most) {
  const Ints top = Ints{} + (-kLeast - a.largest_exponent);
  Ints e = smaller(greater((most >> 23) - (127 + a.largest_exponent), Ints{} + kLeast), top);
  if (a.ceil) e = smaller(e - (Ints)((Floats)most > power(e) * a.largest), top);
  return e;
}

// Of W blocks. A block that is not finite has NaN as `up`.
struct Scales {
  Ints exponent;    // of powers of two
  Floats up, down;  // value = element * up; element = x * down, or x / divisor for fp32
  Floats divisor;
  Ints finite;  // a mask
};

template <Mode mode>
INLINE Scales scales_of(const Job& a, const Ints& most) {
  Scales s;
  s.finite = most < kInfinity;
  if (is_fp32<mode>(a)) {
    const Floats scale = (Floats)most / a.largest, least = Floats{} + 0x1p-126f;
    s.divisor = s.up = most == 0 ? Floats{} + 1.0f : scale < least ? least : scale;
  } else {
    s.exponent = fitting(a, most);
    s.up = power(s.exponent), s.down = power(-s.exponent);
  }
  s.up = (Floats)(s.finite ? (Ints)s.up : Ints{} + 0x7fc00000);
  return s;
}

// Those of pairs within the blocks.
INLINE Scales shifted(const Job& a, const Scales& of_blocks, const Ints& most) {
  Scales s = of_blocks;
  s.exponent -= smaller(of_blocks.exponent - fitting(a, most), Ints{} + a.most_shift);
  s.down = power(-s.exponent);
  s.up = (Floats)(s.finite ? (Ints)power(s.exponent) : Ints{} + 0x7fc00000);
  return s;
}

INLINE uint64_t mixed(uint64_t x) {  // splitmix64: core/mixing.py
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

INLINE uint64_t row_key(const Job& a, int64_t row) {
  return a.rounding == kStochastic ? mixed(static_cast<uint64_t>(row) + mixed((a.number * 16) ^ a.key)) : 0;
}

// The random numbers of W columns: `noise` of numerics/rounding.py.
INLINE Words noise(uint64_t key, int64_t column) {
  constexpr Words kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Words x = (kLane + static_cast<uint32_t>(column)) * 0x9E3779B9u + static_cast<uint32_t>(key);
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = x ^ static_cast<uint32_t>(key >> 32);
  x = (x ^ x >> 15) * 0x735A2D97u;
  return x ^ x >> 15;
}

struct Element {
  Ints code;  // without its sign
  Floats value;
};

// `Element.codes` of numerics/elements.py.
template <Mode mode>
INLINE Element element(const Job& a, const Floats& y, uint64_t key, int64_t column) {
  const int32_t least = (a.least + 127) << 23;
  const Ints size = size_of(y), e = greater(size & kInfinity, Ints{} + least);
  const Floats steps = (Floats)size * (Floats)(((254 + a.mantissa) << 23) - e);
  Ints whole;
  Floats as_float;
  if (mode != kAny || a.rounding == kNearest) {
    const Floats sum = steps + 0x1p23f;  // which rounds to nearest, ties to even
    whole = (Ints)sum - 0x4b000000;
    as_float = sum - 0x1p23f;
  } else {
    whole = __builtin_convertvector(steps, Ints);
    if (a.rounding == kStochastic) {
      const Floats rest = (steps - __builtin_convertvector(whole, Floats)) * 0x1p31f;
      whole -= (Ints)(noise(key, column) >> 1) < __builtin_convertvector(rest, Ints);
    }
    as_float = __builtin_convertvector(whole, Floats);
  }
  const Floats value = as_float * (Floats)(e - (a.mantissa << 23)), most = Floats{} + a.largest;
  return {smaller(((e - least) >> (23 - a.mantissa)) + whole, Ints{} + a.largest_code), value < most ? value : most};
}

template <Mode mode>
INLINE Element rounded(const Job& a, const Floats& x, const Scales& s, uint64_t key, int64_t column) {
  return element<mode>(a, is_fp32<mode>(a) ? x / s.divisor : x * s.down, key, column);
}

INLINE Floats value_of(const Job& a, const Floats& x, const Element& e, const Scales& s) {
  const Floats value = e.value * s.up;
  return (Ints)x < 0 ? (a.complement ? 0.0f : -0.0f) - value : value;  // -0 only where there is one
}

INLINE Ints code_of(const Job& a, const Floats& x, const Element& e, const Scales& s) {
  const Ints negative = (Ints)x < 0, turn = negative & (a.complement ? -1 : 0);
  const int32_t sign = a.complement ? 0 : 1 << (a.bits - 1);
  const Ints code = ((e.code ^ turn) - turn) | (negative & sign);
  return code & ((1 << a.bits) - 1) & s.finite;
}

INLINE void put_scale(const Job& a, int64_t at, const Scales& s, int64_t lane) {
  if (a.fp32) static_cast<float*>(a.scales)[at] = s.up[lane];
  else static_cast<uint8_t*>(a.scales)[at] = s.finite[lane] ? s.exponent[lane] - kLeast : kNanScale;
}

INLINE void put_bytes(uint8_t* to, uint64_t word, int64_t count) {
  for (int64_t i = 0; i < count; ++i, word >>= 8) to[i] = static_cast<uint8_t>(word);
}

// Codes of `bits` bits one after the other, the low bits first. n: of W. end: of the row, behind which nothing is
// written. past: see `store`.
INLINE void put_codes(uint8_t* to, const uint8_t* end, const Ints& codes, int bits, int64_t n, bool past) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  typedef uint64_t Pairs __attribute__((vector_size(W * 4)));
  typedef float Quarter __attribute__((vector_size(W)));
  uint64_t words[2];
  if (bits == 8) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Halves), Bytes);  // faster in two steps
#if defined(__SSE2__)
    if (past && n == W) return __builtin_ia32_movntps(reinterpret_cast<float*>(to), (Quarter)bytes);
#endif
    __builtin_memcpy(words, &bytes, sizeof words);
  } else {
    const Pairs pairs = ((Pairs)codes | (Pairs)codes >> (32 - bits)) & ((1ull << 2 * bits) - 1);
    uint64_t at[W / 2];
    __builtin_memcpy(at, &pairs, sizeof at);
    for (int i = 0; i < 2; ++i)
      words[i] = at[4 * i] | at[4 * i + 1] << 2 * bits | at[4 * i + 2] << 4 * bits | at[4 * i + 3] << 6 * bits;
  }
  if (to + bits + 8 <= end) {  // what is written too much is written again
    __builtin_memcpy(to, &words[0], 8);
    __builtin_memcpy(to + bits, &words[1], 8);
    return;
  }
  const int64_t count = (n * bits + 7) / 8;
  put_bytes(to, words[0], std::min<int64_t>(count, bits));
  put_bytes(to + bits, words[1], std::max<int64_t>(count - bits, 0));
}

// -- blocks of neighbours --------------------------------------------------------------------------------------------

// Where rows are, that are rows `first` and on of the job, and which of their columns are asked for.
struct Rows {
  const void* x;
  int64_t stride, first, count, begin, end;
};

// W blocks of row r at most, from column `begin` to `end`. origin: of the row, in x. full: the blocks are whole
// vectors.
template <bool codes, Mode mode, bool full>
INLINE void along_blocks(const Job& a, const void* x, int64_t origin, int64_t r, int64_t begin, int64_t end,
                         uint64_t key) {
  const int64_t blocks = (end - begin + a.block - 1) / a.block;
  const auto lanes = [&](int64_t c, int64_t stop) { return full ? W : std::min(W, stop - c); };
  Ints most = Ints{} + a.most;
  if (a.most < 0) {
    alignas(64) int32_t each[W] = {};
    for (int64_t k = 0; k < blocks; ++k) {
      const int64_t first = begin + k * a.block, stop = full ? first + a.block : std::min(first + a.block, end);
      const auto largest = [&](const auto* row) __attribute__((always_inline)) {
        Ints found{};
        for (int64_t c = first; c < stop; c += W) found = greater(found, size_of(load(row + c, lanes(c, stop))));
        return among(found, W)[0];
      };
      each[k] = a.is_narrow ? largest(static_cast<const bfloat16*>(x) + origin)
                            : largest(static_cast<const float*>(x) + origin);
    }
    __builtin_memcpy(&most, each, sizeof most);
  }
  const Scales of_blocks = scales_of<mode>(a, most);
  if (codes && a.most < 0)
    for (int64_t k = 0; k < blocks; ++k) put_scale(a, r * a.blocks + begin / a.block + k, of_blocks, k);
  uint8_t* const row = static_cast<uint8_t*>(a.out) + r * a.row_bytes;
  for (int64_t k = 0; k < blocks; ++k) {
    const int64_t first = begin + k * a.block, stop = full ? first + a.block : std::min(first + a.block, end);
    const Scales of_block = {Ints{} + of_blocks.exponent[k], Floats{} + of_blocks.up[k], Floats{} + of_blocks.down[k],
                             Floats{} + of_blocks.divisor[k], Ints{} + of_blocks.finite[k]};
    uint64_t shifts = 0;
    for (int64_t c = first; c < stop; c += W) {
      const int64_t n = lanes(c, stop), at = r * a.length + c;
      const Floats number = numbers(a, x, origin + c, n);
      Scales s = of_block;
      if (has_shifts<mode>(a)) {
        s = shifted(a, of_block, among(size_of(number), a.pair));
        if (codes)
          for (int64_t i = 0; i < n; i += a.pair)
            shifts |= static_cast<uint64_t>((of_block.exponent[i] - s.exponent[i]) & s.finite[i])
                      << ((c - first + i) / a.pair * a.shift_bits);
      }
      const Element e = rounded<mode>(a, number, s, key, c);
      if (codes) put_codes(row + c * a.bits / 8, row + a.row_bytes, code_of(a, number, e, s), a.bits, n, a.past);
      else put_values(a, at, value_of(a, number, e, s), n);
    }
    if (codes && has_shifts<mode>(a)) {
      const int64_t at = first / a.pair * a.shift_bits / 8, bytes = a.block / a.pair * a.shift_bits / 8;
      put_bytes(a.shifts + r * a.shift_bytes + at, shifts, std::min(bytes, a.shift_bytes - at));
    }
  }
}

INLINE int64_t step_of(const Job& a) { return a.block >= a.length ? a.block : a.block * W; }

template <bool codes, Mode mode>
INLINE void along_rows(const Job& job, const Rows& rows) {
  const Job a = job;  // nobody else's: what is stored cannot change it
  const int64_t step = step_of(a);
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t r = rows.first + i, origin = i * rows.stride;
    const uint64_t key = row_key(a, r);
    int64_t begin = rows.begin;
    const int64_t whole = a.block % W ? begin : rows.end - (rows.end - begin) % a.block;
    for (; begin < whole; begin += step)
      along_blocks<codes, mode, true>(a, rows.x, origin, r, begin, std::min(begin + step, whole), key);
    for (begin = whole; begin < rows.end; begin += step)
      along_blocks<codes, mode, false>(a, rows.x, origin, r, begin, std::min(begin + step, rows.end), key);
  }
  fence(a.past);
}

// -- blocks of which each lane has one -------------------------------------------------------------------------------

// One block of rows, [rows, width] of columns. full: the columns are whole vectors.
template <Mode mode, bool full>
INLINE void across_block(const Job& a, int64_t o, int64_t block, int64_t first, int64_t width) {
  const int64_t begin = block * a.block, rows = std::min(a.block, a.length - begin);
  const int64_t origin = (o * a.length + begin) * a.inner + first, vectors = (width + W - 1) / W;
  const auto lanes = [&](int64_t v) { return full ? W : std::min(W, width - v * W); };
  const auto largest_of = [&](const auto* x, Ints* most, int64_t from, int64_t to) __attribute__((always_inline)) {
    for (int64_t v = 0; v < vectors; ++v) most[v] = Ints{};
    for (int64_t r = from; r < to; ++r)
      for (int64_t v = 0; v < vectors; ++v)
        most[v] = greater(most[v], size_of(load(x + r * a.inner + v * W, lanes(v))));
  };
  const auto largest = [&](Ints* most, int64_t from, int64_t to) __attribute__((always_inline)) {
    if (a.is_narrow) largest_of(static_cast<const bfloat16*>(a.x) + origin, most, from, to);
    else largest_of(static_cast<const float*>(a.x) + origin, most, from, to);
  };
  Ints most[kVectors];
  Scales of_block[kVectors], of_pair[kVectors];
  if (a.most < 0) largest(most, 0, rows);
  for (int64_t v = 0; v < vectors; ++v)
    of_block[v] = of_pair[v] = scales_of<mode>(a, a.most < 0 ? most[v] : Ints{} + a.most);
  for (int64_t r = 0; r < rows; ++r) {
    if (has_shifts<mode>(a) && r % a.pair == 0) {
      largest(most, r, std::min(r + a.pair, rows));
      for (int64_t v = 0; v < vectors; ++v) of_pair[v] = shifted(a, of_block[v], most[v]);
    }
    const uint64_t key = row_key(a, o * a.length + begin + r);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t at = origin + r * a.inner + v * W, n = lanes(v);
      const Floats number = numbers(a, a.x, at, n);
      const Element e = rounded<mode>(a, number, of_pair[v], key, first + v * W);
      put_values(a, at, value_of(a, number, e, of_pair[v]), n);
    }
  }
}

int64_t blocks_of(const Job& a) { return (a.length + a.block - 1) / a.block; }
int64_t strips_of(const Job& a, int64_t strip) { return (a.inner + strip - 1) / strip; }

template <Mode mode>
INLINE void across_rows(const Job& job, int64_t begin, int64_t end) {
  const Job a = job;
  const int64_t blocks = blocks_of(a), strips = strips_of(a, kStrip);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t o = u / blocks / strips, first = u / blocks % strips * kStrip;
    const int64_t width = std::min(kStrip, a.inner - first);
    width % W ? across_block<mode, false>(a, o, u % blocks, first, width)
              : across_block<mode, true>(a, o, u % blocks, first, width);
  }
  fence(a.past);
}

// -- codes of such blocks: they are turned first, since the codes of a block are neighbours ---------------------------

// Swaps lane i of vector j with lane j of vector i.
INLINE void turn(Floats* v) {
#define SWAP(step, ...)                                               \
  for (int i = 0; i < W; ++i)                                         \
    if (!(i & step)) {                                                \
      const Floats low = v[i], high = v[i + step];                    \
      v[i] = __builtin_shufflevector(low, high, __VA_ARGS__);         \
      v[i + step] = __builtin_shufflevector(high, low, OTHER_##step); \
    }
#define OTHER_8 24, 25, 26, 27, 28, 29, 30, 31, 8, 9, 10, 11, 12, 13, 14, 15
#define OTHER_4 20, 21, 22, 23, 4, 5, 6, 7, 28, 29, 30, 31, 12, 13, 14, 15
#define OTHER_2 18, 19, 2, 3, 22, 23, 6, 7, 26, 27, 10, 11, 30, 31, 14, 15
#define OTHER_1 17, 1, 19, 3, 21, 5, 23, 7, 25, 9, 27, 11, 29, 13, 31, 15
  SWAP(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
  SWAP(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
  SWAP(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
  SWAP(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef SWAP
}

#define FOR_MODES(a, loops, ...)                                     \
  if (a.fp32 || a.rounding != kNearest) loops(kAny)(a, __VA_ARGS__); \
  else if (a.most_shift) loops(kShifted)(a, __VA_ARGS__);            \
  else loops(kPlain)(a, __VA_ARGS__);
#define VALUES(mode) along_rows<false, mode>
#define CODES(mode) along_rows<true, mode>
#define ACROSS(mode) across_rows<mode>

FOR_PROCESSORS void values_along(const Job& a, const Rows& rows){FOR_MODES(a, VALUES, rows)}
FOR_PROCESSORS void codes_along(const Job& a, const Rows& rows){FOR_MODES(a, CODES, rows)}
FOR_PROCESSORS void values_across(const Job& a, int64_t begin, int64_t end) {
  FOR_MODES(a, ACROSS, begin, end)
}

template <class T>
INLINE void turn_rows(const Job& a, int64_t origin, int64_t rows, int64_t width, float* tile, int64_t stride) {
  const T* const x = static_cast<const T*>(a.x) + origin;
  for (int64_t r = 0; r < rows; r += W)
    for (int64_t c = 0; c < width; c += W) {
      for (int64_t i = W; i < 2 * W; ++i) __builtin_prefetch(x + std::min(r + i, rows - 1) * a.inner + c);
      Floats v[W];
      for (int64_t i = 0; i < W; ++i) v[i] = load(x + std::min(r + i, rows - 1) * a.inner + c, std::min(W, width - c));
      turn(v);
      for (int64_t i = 0; i < W; ++i) store(tile + (c + i) * stride + r, v[i], W);
    }
}

// Numbers of x from the `origin`-th on, [rows, width], turned.
FOR_PROCESSORS void turn_tile(const Job& a, int64_t origin, int64_t rows, int64_t width, float* tile, int64_t stride) {
  a.is_narrow ? turn_rows<bfloat16>(a, origin, rows, width, tile, stride)
              : turn_rows<float>(a, origin, rows, width, tile, stride);
}

template <void (*along)(const Job&, const Rows&)>
void rows_of(const Job& a, int64_t begin, int64_t end) {
  const char* const x = static_cast<const char*>(a.x) + begin * a.length * (a.is_narrow ? 2 : 4);
  along(a, {x, a.length, begin, end - begin, 0, a.length});
}

void codes_across(const Job& a, int64_t begin, int64_t end) {
  Job turned = a;
  turned.is_narrow = false;
  const int64_t step = (kTurnedRows + a.block - 1) / a.block * a.block;
  const int64_t stride = (step + W - 1) / W * W + W, strips = strips_of(a, kTurned);
  std::vector<float> tile(kTurned * stride);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t o = u / strips, first = u % strips * kTurned, width = std::min(kTurned, a.inner - first);
    for (int64_t b = 0; b < a.length; b += step) {
      const int64_t rows = std::min(step, a.length - b);
      turn_tile(a, (o * a.length + b) * a.inner + first, rows, width, tile.data(), stride);
      codes_along(turned, {tile.data() - b, stride, o * a.inner + first, width, b, b + rows});
    }
  }
}

template <class T>
INLINE int32_t largest_of(const void* x, int64_t begin, int64_t end) {
  Ints most{};
  for (int64_t i = begin; i < end; i += W)
    most = greater(most, size_of(load(static_cast<const T*>(x) + i, std::min(W, end - i))));
  return among(most, W)[0];
}

FOR_PROCESSORS int32_t largest(const void* x, bool is_narrow, int64_t begin, int64_t end) {
  return is_narrow ? largest_of<bfloat16>(x, begin, end) : largest_of<float>(x, begin, end);
}

int32_t largest(const Tensor& x, bool is_narrow) {
  const int64_t team = team_for(x.numel());
  std::vector<int32_t> found(team);
  parallel(team, [&](int64_t c) {
    found[c] = largest(x.data_ptr(), is_narrow, x.numel() * c / team, x.numel() * (c + 1) / team);
  });
  return *std::max_element(found.begin(), found.end());
}

// -- the operators ---------------------------------------------------------------------------------------------------

enum FormatAt {
  kMantissa,
  kLeastAt,
  kBits,
  kLargestExponent,
  kLargestCode,
  kComplement,
  kBlock,
  kPair,
  kShiftBits,
  kCeil,
  kFp32Scale,
  kFormatNumbers
};
constexpr int64_t kRow = 0, kTensor = -1;  // kBlock of formats with a scale for each row, and for the tensor

Job job_of(const Tensor& x, const std::vector<int64_t>& shape, const std::vector<int64_t>& format,
           double largest_number, int64_t rounding, int64_t key, int64_t number) {
  check(x.is_contiguous() && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
        "x: expected a contiguous tensor of float32 or bfloat16");
  check(shape.size() == 3 && shape[0] * shape[1] * shape[2] == x.numel(), "shape: it does not fit x");
  check(format.size() == kFormatNumbers && rounding >= kNearest && rounding <= kStochastic, "format or rounding");
  Job a{};
  a.x = x.data_ptr();
  a.is_narrow = x.scalar_type() == ScalarType::BFloat16;
  a.outer = shape[0], a.length = shape[1], a.inner = shape[2];
  a.mantissa = format[kMantissa], a.least = format[kLeastAt], a.bits = format[kBits];
  a.largest_exponent = format[kLargestExponent], a.largest_code = format[kLargestCode];
  a.complement = format[kComplement], a.pair = format[kPair], a.shift_bits = format[kShiftBits];
  a.most_shift = (1 << a.shift_bits) - 1;
  a.ceil = format[kCeil], a.fp32 = format[kFp32Scale];
  a.largest = static_cast<float>(largest_number);
  a.rounding = rounding, a.key = key, a.number = number;
  const bool is_whole = format[kBlock] <= 0;
  a.block = is_whole ? std::max(a.length, W) : format[kBlock];
  a.most = -1;
  check(a.mantissa >= 0 && a.mantissa <= 10 && a.least >= -14 && a.largest_exponent <= 15, "element: too wide");
  check(a.block >= W, "block: expected ", W, " numbers at least");
  check(!a.most_shift || (!is_whole && a.shift_bits <= 3 && a.pair >= 1 && a.pair <= W &&
                          (a.pair & (a.pair - 1)) == 0 && a.block % a.pair == 0),
        "pair: expected a power of two up to ", W, " that divides the block");
  if (format[kBlock] == kTensor) a.most = largest(x, a.is_narrow);
  return a;
}

using Work = void (*)(const Job&, int64_t, int64_t);

void run(const Job& a, int64_t units, Work work) {
  if (a.outer * a.length * a.inner == 0) return;
  const int64_t team = std::min(team_for(a.outer * a.length * a.inner), units);
  parallel(team, [&](int64_t c) { work(a, units * c / team, units * (c + 1) / team); });
}

// Whether vectors of a row begin at multiples of W.
bool is_aligned(const Job& a) { return a.block % W == 0 || a.block >= a.length; }

Tensor quantise_values(const Tensor& x, const std::vector<int64_t>& shape, const std::vector<int64_t>& format,
                       double largest_number, int64_t rounding, int64_t key, int64_t number, bool to_bf16) {
  Job a = job_of(x, shape, format, largest_number, rounding, key, number);
  Tensor out = empty(shape, to_bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  a.out = out.data_ptr();
  a.past = (a.inner > 1 || is_aligned(a)) && past_caches(out);
  a.to_bf16 = to_bf16;
  if (a.inner == 1) run(a, a.outer, rows_of<values_along>);
  else run(a, a.outer * strips_of(a, kStrip) * blocks_of(a), values_across);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> quantise_codes(const Tensor& x, const std::vector<int64_t>& shape,
                                                  const std::vector<int64_t>& format, double largest_number,
                                                  int64_t rounding, int64_t key, int64_t number) {
  Job a = job_of(x, shape, format, largest_number, rounding, key, number);
  const bool is_tensor = format[kBlock] == kTensor;
  check(a.inner == 1 || rounding != kStochastic, "rounding: codes of other axes than the last are not stochastic");
  check(a.bits <= 8 && (a.block % 8 == 0 || format[kBlock] <= 0), "block: codes are packed in groups of 8");
  check(!a.most_shift || (a.block / a.pair * a.shift_bits % 8 == 0 && a.block / a.pair * a.shift_bits <= 64),
        "shifts: expected whole bytes for a block, 8 at most");
  const int64_t rows = a.outer * a.inner;
  a.row_bytes = (a.length * a.bits + 7) / 8;
  a.blocks = blocks_of(a);
  a.shift_bytes = a.most_shift ? ((a.length + a.pair - 1) / a.pair * a.shift_bits + 7) / 8 : 0;
  Tensor codes = empty({rows, a.row_bytes}, ScalarType::Byte);
  Tensor scales =
      torch::stable::empty(is_tensor ? std::vector<int64_t>{1, x.numel() > 0} : std::vector<int64_t>{rows, a.blocks},
                           a.fp32 ? ScalarType::Float : ScalarType::Byte);
  Tensor shifts = torch::stable::empty({rows, a.shift_bytes}, ScalarType::Byte);
  a.out = codes.data_ptr(), a.scales = scales.data_ptr(), a.shifts = static_cast<uint8_t*>(shifts.data_ptr());
  if (is_tensor && x.numel()) put_scale(a, 0, scales_of<kAny>(a, Ints{} + a.most), 0);
  a.past = is_aligned(a) && past_caches(codes);
  if (a.inner == 1) run(a, a.outer, rows_of<codes_along>);
  else run(a, a.outer * strips_of(a, kTurned), codes_across);
  return {codes, scales, shifts};
}

// The values of codes of `bits` bits, packed, under scales that are powers of two: [rows, length]. numbers: those of
// all codes. Rows of codes and scales may lie apart.
Tensor quantise_decode(const Tensor& codes, const Tensor& scales, const Tensor& numbers, int64_t length, int64_t block,
                       int64_t bits) {
  for (const Tensor& of : {codes, scales})
    check(of.scalar_type() == ScalarType::Byte && of.dim() == 2 && (of.stride(1) == 1 || of.size(1) <= 1),
          "codes and scales: expected rows of bytes");
  const int64_t rows = codes.size(0), blocks = block > 0 ? (length + block - 1) / block : 0;
  check(bits >= 1 && bits <= 8 && block > 0 && block % 8 == 0, "block: codes are packed in groups of 8");
  check(codes.size(1) == (length * bits + 7) / 8 && scales.size(0) == rows && scales.size(1) == blocks,
        "codes or scales: not as many as the numbers have");
  check(numbers.is_contiguous() && numbers.scalar_type() == ScalarType::Float && numbers.numel() == 1 << bits,
        "numbers: expected one for each code");
  Tensor out = empty({rows, length}, ScalarType::Float);
  const float* const number = static_cast<const float*>(numbers.data_ptr());
  const uint64_t mask = (1u << bits) - 1;
  const int64_t bytes = codes.size(1), team = std::min(team_for(rows * length), std::max<int64_t>(rows, 1));
  parallel(team, [&](int64_t c) {
    for (int64_t r = rows * c / team; r < rows * (c + 1) / team; ++r) {
      const uint8_t* const from = static_cast<const uint8_t*>(codes.data_ptr()) + r * codes.stride(0);
      const uint8_t* const of_blocks = static_cast<const uint8_t*>(scales.data_ptr()) + r * scales.stride(0);
      float* const to = static_cast<float*>(out.data_ptr()) + r * length;
      for (int64_t i = 0, at = 0; i < length; i += 8, at += bits) {
        const int32_t byte = of_blocks[i / block];
        const int32_t scale = byte << 23 | (byte == 0 || byte == kNanScale ? 0x00400000 : 0);
        float up;
        __builtin_memcpy(&up, &scale, sizeof up);
        uint64_t word = 0;
        if (at + 8 <= bytes) __builtin_memcpy(&word, from + at, 8);
        else __builtin_memcpy(&word, from + at, std::min(bits, bytes - at));
        for (int64_t j = 0, n = std::min<int64_t>(8, length - i); j < n; ++j)
          to[i + j] = number[word >> j * bits & mask] * up;
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def(
      "quantise_values(Tensor x, int[] shape, int[] format, float largest, int rounding, int key, int number,"
      " bool to_bf16) -> Tensor");
  m.def(
      "quantise_codes(Tensor x, int[] shape, int[] format, float largest, int rounding, int key, int number)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("quantise_decode(Tensor codes, Tensor scales, Tensor numbers, int length, int block, int bits) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("quantise_values", TORCH_BOX(&quantise_values));
  m.impl("quantise_codes", TORCH_BOX(&quantise_codes));
  m.impl("quantise_decode", TORCH_BOX(&quantise_decode));
}

}  // namespace sparrow
