// Slots of rows that lie on two levels, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cstdint>
#include <vector>

namespace sparrow {
namespace {

struct Word {
  uint64_t bits;
  int64_t before;
};

// Whether a row is above cannot be foretold, so no branch depends on it.
template <class T>
INLINE void slots(const T* from, int64_t* to, int64_t N, const Word* words, int64_t below) {
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = from[n];
    const Word word = words[row >> 6];
    const uint64_t bit = uint64_t{1} << (row & 63);
    const int64_t is_above = -static_cast<int64_t>(word.bits >> (row & 63) & 1);
    const int64_t slot = below + word.before + __builtin_popcountll(word.bits & (bit - 1));
    to[n] = (is_above & slot) | (~is_above & row);
  }
}

FOR_PROCESSORS void slots_of_wide(const int64_t* from, int64_t* to, int64_t N, const Word* words, int64_t below) {
  slots(from, to, N, words, below);
}

FOR_PROCESSORS void slots_of_narrow(const int32_t* from, int64_t* to, int64_t N, const Word* words, int64_t below) {
  slots(from, to, N, words, below);
}

// The words of all tables, and where those of a key's table begin: -1 for none.
struct Keys {
  const Word* words;
  int64_t count;
  const std::vector<int64_t>&bounds, &begins, &below;
};

template <class T, class F>
void slots_of_keys(const T* from, int64_t* to, int64_t begin, int64_t end, const Keys& keys, const F& slots_of) {
  for (size_t k = 0; k < keys.begins.size(); ++k) {
    const int64_t first = std::max(keys.bounds[k], begin), last = std::min(keys.bounds[k + 1], end);
    if (first >= last) continue;
    if (keys.begins[k] < 0) {
      std::copy(from + first, from + last, to + first);
      continue;
    }
    const auto [least, most] = std::minmax_element(from + first, from + last);
    check(*least >= 0 && keys.begins[k] + (*most >> 6) < keys.count, "rows_N: expected rows that are on the levels");
    slots_of(from + first, to + first, last - first, keys.words + keys.begins[k], keys.below[k]);
  }
}

Tensor row_levels_slots(const Tensor& rows_N, const std::vector<int64_t>& bounds, const Tensor& places_W2,
                        const std::vector<int64_t>& begins, const std::vector<int64_t>& below) {
  const int64_t N = rows_N.numel();
  const size_t count = begins.size();
  const bool is_wide = rows_N.scalar_type() == ScalarType::Long;
  check(is_wide || rows_N.scalar_type() == ScalarType::Int, "rows_N: expected int32 or int64");
  check(rows_N.is_contiguous() && below.size() == count && bounds.size() == count + 1 && bounds[0] == 0 &&
            bounds[count] == N && std::is_sorted(bounds.begin(), bounds.end()),
        "bounds, begins, below: expected those of all keys");
  check(places_W2.scalar_type() == ScalarType::Long && places_W2.is_contiguous() && places_W2.dim() == 2 &&
            places_W2.size(1) == 2,
        "places_W2: expected contiguous int64 [words, 2]");
  const Keys keys{static_cast<const Word*>(places_W2.data_ptr()), places_W2.size(0), bounds, begins, below};
  Tensor slots_N = empty({N}, ScalarType::Long);
  int64_t* const to = static_cast<int64_t*>(slots_N.data_ptr());
  const int64_t team = team_for(N * 16);
  parallel(team, [&](int64_t c) {
    const int64_t begin = N * c / team, end = N * (c + 1) / team;
    if (is_wide) slots_of_keys(static_cast<const int64_t*>(rows_N.data_ptr()), to, begin, end, keys, slots_of_wide);
    else slots_of_keys(static_cast<const int32_t*>(rows_N.data_ptr()), to, begin, end, keys, slots_of_narrow);
  });
  return slots_N;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_levels_slots(Tensor rows, int[] bounds, Tensor places, int[] begins, int[] below) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("row_levels_slots", TORCH_BOX(&row_levels_slots)); }

}  // namespace sparrow
