// Slots of rows that lie on two levels, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cstdint>
#include <vector>

namespace sparrow {
namespace {

// The place of the first row that is not less than this one, or the last place. No branch depends on what is compared,
// because nobody can foretell it; so the searches of several rows overlap.
INLINE int64_t place_of(const int64_t* rows, int64_t count, int64_t row) {
  const int64_t* at = rows;
  while (count > 1) {
    const int64_t half = count / 2;
    at += (at[half - 1] < row) * half;
    count -= half;
  }
  return at - rows;
}

template <class T>
void slots(const T* from, int64_t* to, int64_t begin, int64_t end, const int64_t* rows, int64_t count, int64_t below) {
  for (int64_t n = begin; n < end; ++n) {
    const int64_t row = from[n], at = count ? place_of(rows, count, row) : 0;
    to[n] = count && rows[at] == row ? below + at : row;
  }
}

Tensor row_levels_slots(const Tensor& rows_N, const std::vector<int64_t>& bounds, const std::vector<Tensor>& above,
                        const std::vector<int64_t>& below) {
  const int64_t N = rows_N.numel(), keys = static_cast<int64_t>(above.size());
  const bool is_wide = rows_N.scalar_type() == ScalarType::Long;
  check(is_wide || rows_N.scalar_type() == ScalarType::Int, "rows_N: expected int32 or int64");
  check(rows_N.is_contiguous() && static_cast<int64_t>(bounds.size()) == keys + 1 && bounds[0] == 0 &&
            bounds[keys] == N && static_cast<int64_t>(below.size()) == keys,
        "bounds, below: expected those of all keys");
  for (int64_t k = 0; k < keys; ++k) {
    check(above[k].scalar_type() == ScalarType::Long && above[k].is_contiguous() && bounds[k] <= bounds[k + 1],
          "above: expected contiguous int64, and bounds that ascend");
  }
  Tensor slots_N = empty({N}, ScalarType::Long);
  int64_t* const to = static_cast<int64_t*>(slots_N.data_ptr());
  const int64_t team = team_for(N * 16);
  parallel(team, [&](int64_t c) {
    for (int64_t k = 0; k < keys; ++k) {
      const int64_t begin = std::max(bounds[k], N * c / team), end = std::min(bounds[k + 1], N * (c + 1) / team);
      const int64_t* const rows = static_cast<const int64_t*>(above[k].data_ptr());
      if (is_wide)
        slots(static_cast<const int64_t*>(rows_N.data_ptr()), to, begin, end, rows, above[k].numel(), below[k]);
      else slots(static_cast<const int32_t*>(rows_N.data_ptr()), to, begin, end, rows, above[k].numel(), below[k]);
    }
  });
  return slots_N;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_levels_slots(Tensor rows, int[] bounds, Tensor[] above, int[] below) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("row_levels_slots", TORCH_BOX(&row_levels_slots)); }

}  // namespace sparrow
