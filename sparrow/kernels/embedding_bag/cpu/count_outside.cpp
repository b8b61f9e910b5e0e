// How many slots of each key lie outside [0, rows of its table); rows: -1 for a key that is not looked at.

#include "arguments.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

Tensor count_outside(const Tensor& slots_N, const std::vector<int64_t>& bounds, const std::vector<int64_t>& rows) {
  const int64_t keys = static_cast<int64_t>(rows.size()), N = slots_N.numel();
  check(static_cast<int64_t>(bounds.size()) == keys + 1 && bounds[0] == 0 && bounds[keys] == N &&
            std::is_sorted(bounds.begin(), bounds.end()),
        "bounds: expected ", keys + 1, " rising numbers from 0 to ", N);
  const bool narrow = slots_N.scalar_type() == ScalarType::Int;
  const void* slots = narrow ? static_cast<const void*>(data<int32_t>(slots_N, ScalarType::Int, 1, "slots_N"))
                             : static_cast<const void*>(data<int64_t>(slots_N, ScalarType::Long, 1, "slots_N"));
  Tensor counts_K = empty({keys}, ScalarType::Long);
  int64_t* counts = static_cast<int64_t*>(counts_K.data_ptr());
  std::fill(counts, counts + keys, 0);
  const int64_t team = team_for(N / 4);
  std::vector<int64_t> found(team * keys, 0);
  auto count = [&](const auto* all) {
    parallel(team, [&](int64_t c) {
      for (int64_t k = 0; k < keys; ++k) {
        if (rows[k] < 0) continue;
        const uint64_t limit = static_cast<uint64_t>(rows[k]);
        const int64_t begin = std::max(bounds[k], N * c / team), end = std::min(bounds[k + 1], N * (c + 1) / team);
        int64_t outside = 0;
        for (int64_t n = begin; n < end; ++n) outside += static_cast<uint64_t>(all[n]) >= limit;
        found[c * keys + k] = outside;
      }
    });
  };
  if (narrow) count(static_cast<const int32_t*>(slots));
  else count(static_cast<const int64_t*>(slots));
  for (int64_t c = 0; c < team; ++c)
    for (int64_t k = 0; k < keys; ++k) counts[k] += found[c * keys + k];
  return counts_K;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) { m.def("count_outside(Tensor slots, int[] bounds, int[] rows) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("count_outside", TORCH_BOX(&count_outside)); }

}  // namespace sparrow::embedding_bag
