// Random numbers by place on CPUs, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cstdint>
#include <optional>

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
    fill(to, dim, static_cast<uint64_t>(key), step, row, those, column, rows * c / team, rows * (c + 1) / team);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("philox_uniform(Tensor(a!) out, int key, float scale, int row, int column, Tensor? rows=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("philox_uniform", TORCH_BOX(&uniform)); }

}  // namespace sparrow
