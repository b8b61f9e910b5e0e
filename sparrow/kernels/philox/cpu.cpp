// Random numbers by place on CPUs, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cstdint>
#include <optional>

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#define HAS_AVX512
#endif

namespace sparrow {
namespace {

constexpr int64_t kLanes = 4, kGroups = 16;  // numbers of a counter, counters at a time

// Replaces kGroups counters, word by word, by their random words.
INLINE void philox(uint32_t (&c)[kLanes][kGroups], uint32_t low, uint32_t high) {
  for (int round = 0; round < 10; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u)
    for (int64_t j = 0; j < kGroups; ++j) {
      const uint64_t one = uint64_t{0xD2511F53} * c[0][j], other = uint64_t{0xCD9E8D57} * c[2][j];
      c[0][j] = static_cast<uint32_t>(other >> 32) ^ c[1][j] ^ low;
      c[1][j] = static_cast<uint32_t>(other);
      c[2][j] = static_cast<uint32_t>(one >> 32) ^ c[3][j] ^ high;
      c[3][j] = static_cast<uint32_t>(one);
    }
}

// Rows [begin, end) of out, of dim columns from `column` of the whole matrix on; row: that of out's first. those: the
// row of each in the whole, or null where they are neighbours.
FOR_PROCESSORS void fill(float* out, int64_t dim, uint64_t key, float step, int64_t row, const int64_t* those,
                         int64_t column, int64_t begin, int64_t end) {
  const int64_t first = column / kLanes, groups = (column + dim - 1) / kLanes + 1 - first;
  for (int64_t at = begin, group = 0; at < end;) {  // the next row, and its next group
    uint32_t c[kLanes][kGroups];
    int64_t rows[kGroups], columns[kGroups];
    for (int64_t j = 0; j < kGroups; ++j) {
      const uint64_t r = static_cast<uint64_t>(those ? those[std::min(at, end - 1)] : row + at);
      c[0][j] = static_cast<uint32_t>(r);
      c[1][j] = static_cast<uint32_t>(r >> 32);
      c[2][j] = static_cast<uint32_t>(first + group);
      c[3][j] = 0;
      rows[j] = at;
      columns[j] = (first + group) * kLanes - column;
      if (++group == groups) group = 0, ++at;
    }
    philox(c, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    float numbers[kGroups][kLanes];
    for (int64_t j = 0; j < kGroups; ++j)
      for (int64_t k = 0; k < kLanes; ++k)
        numbers[j][k] = static_cast<float>(static_cast<int32_t>(c[k][j] >> 8) - (1 << 23)) * step;
    for (int64_t j = 0; j < kGroups && rows[j] < end; ++j) {
      const int64_t from = std::max<int64_t>(columns[j], 0), to = std::min(columns[j] + kLanes, dim);
      float* here = out + rows[j] * dim;
      if (to - from == kLanes) __builtin_memcpy(here + from, numbers[j], sizeof numbers[j]);
      else
        for (int64_t d = from; d < to; ++d) here[d] = numbers[j][d - columns[j]];
    }
  }
}

#if defined(HAS_AVX512)

// Rows [begin, end) of out, which are 8 at least. They are neighbours, and begin and end with a counter: so the numbers
// of 8 counters in turn lie one after the other. A word is in the low half of 64 bits, since products take no more of
// them; what is above is anything. Returns the first row that is still to be filled.
__attribute__((target("avx512f"))) int64_t fill_wide(float* out, int64_t dim, uint64_t key, float step, int64_t row,
                                                     int64_t column, int64_t begin, int64_t end) {
  constexpr int64_t kWide = 8;
  const int64_t groups = dim / kLanes, count = (end - begin) / kWide * groups;
  int64_t first[2][kWide];  // of each lane its row and its group; even lanes hold counters 0 to 3, odd ones 4 to 7
  for (int64_t j = 0; j < kWide; ++j) {
    const int64_t lane = j < 4 ? 2 * j : 2 * j - 7;
    first[0][lane] = row + begin + j / groups;
    first[1][lane] = j % groups;
  }
  __m512i rows = _mm512_loadu_si512(first[0]), at = _mm512_loadu_si512(first[1]);
  const __m512i one = _mm512_set1_epi64(1), width = _mm512_set1_epi64(groups);
  const __m512i more_rows = _mm512_set1_epi64(kWide / groups), more = _mm512_set1_epi64(kWide % groups);
  const __m512i before = _mm512_set1_epi64(column / kLanes), middle = _mm512_set1_epi32(1 << 23);
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i lower = _mm512_set1_epi64(0xffffffff);
  const __m512 scale = _mm512_set1_ps(step);
  float* to = out + begin * dim;
  for (int64_t i = 0; i < count; ++i, to += kWide * kLanes) {
    __m512i a = rows, b = _mm512_srli_epi64(rows, 32), c = _mm512_add_epi64(before, at), d = _mm512_setzero_si512();
    uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u) {
      const __m512i x = _mm512_mul_epu32(a, m0), y = _mm512_mul_epu32(c, m1);
      a = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(y, 32), b), _mm512_set1_epi64(low));
      c = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(x, 32), d), _mm512_set1_epi64(high));
      b = y;
      d = x;
    }
    const __m512i ab = _mm512_or_si512(_mm512_and_si512(a, lower), _mm512_slli_epi64(b, 32));
    const __m512i cd = _mm512_or_si512(_mm512_and_si512(c, lower), _mm512_slli_epi64(d, 32));
    const __m512i words[2] = {_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd)};
    for (int half = 0; half < 2; ++half) {
      const __m512i whole = _mm512_sub_epi32(_mm512_srli_epi32(words[half], 8), middle);
      _mm512_storeu_ps(to + half * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale));
    }
    rows = _mm512_add_epi64(rows, more_rows);
    at = _mm512_add_epi64(at, more);
    const __mmask8 is_next = _mm512_cmp_epi64_mask(at, width, _MM_CMPINT_NLT);
    at = _mm512_mask_sub_epi64(at, is_next, at, width);
    rows = _mm512_mask_add_epi64(rows, is_next, rows, one);
  }
  return begin + (end - begin) / kWide * kWide;
}

#endif

void uniform(Tensor out, int64_t key, double scale, int64_t row, int64_t column, const std::optional<Tensor>& rows_R) {
  check(out.scalar_type() == ScalarType::Float && out.dim() == 2 && out.is_contiguous(),
        "out_RD: expected contiguous float32 [R, D]");
  check(row >= 0 && column >= 0, "row and column must not be negative");
  const int64_t rows = out.size(0), dim = out.size(1);
  const int64_t* those = nullptr;
  if (rows_R) {
    check(rows_R->scalar_type() == ScalarType::Long && rows_R->is_contiguous() && rows_R->numel() == rows,
          "rows_R: expected contiguous int64 [R]");
    those = static_cast<const int64_t*>(rows_R->data_ptr());
  }
  if (!rows || !dim) return;
  const int64_t team = std::min(team_for(rows * dim), rows);
  const float step = static_cast<float>(scale * 0x1p-23);
  float* to = static_cast<float*>(out.data_ptr());
  parallel(team, [&](int64_t c) {
    int64_t begin = rows * c / team, end = rows * (c + 1) / team;
#if defined(HAS_AVX512)
    static const bool is_wide = __builtin_cpu_supports("avx512f");
    if (is_wide && !those && dim % kLanes == 0 && column % kLanes == 0)
      begin = fill_wide(to, dim, static_cast<uint64_t>(key), step, row, column, begin, end);
#endif
    fill(to, dim, static_cast<uint64_t>(key), step, row, those, column, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("philox_uniform(Tensor(a!) out, int key, float scale, int row, int column, Tensor? rows=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("philox_uniform", TORCH_BOX(&uniform)); }

}  // namespace sparrow
