// Row records that enter a table's frames, and those that leave them.

#include "arguments.h"
#include "processors.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

void replace_rows(const std::vector<Tensor>& payload, const std::string& formats, const std::vector<int64_t>& levels,
                  const std::vector<int64_t>& dims, const std::vector<Tensor>& state,
                  const std::vector<Tensor>& touched, const std::vector<Tensor>& changed,
                  const std::vector<Tensor>& row_numbers, const Tensor& frames_L, const Tensor& rows_L,
                  const Tensor& old_L, const std::string& rules, const Tensor& lr_T, const Tensor& numbers,
                  const Tensor& rounding, int64_t n) {
  Tables tables(payload, formats, levels, dims);
  tables.set_rules(rules, lr_T, numbers, state, touched, changed, row_numbers, rounding, n);
  check(tables.count() == 1 && tables[0].levels[0].changed, "replace_rows: expected one table with frames");
  const int64_t L = frames_L.numel(), R = tables[0].rows, dim = tables[0].dim, F = tables[0].levels[1].first;
  std::vector<int64_t> slots[2];
  const int64_t* const frames = data<int64_t>(frames_L, ScalarType::Long, 1, "frames_L");
  const Tensor* const beneath[2] = {&rows_L, &old_L};
  for (int64_t side = 0; side < 2; ++side) {
    const int64_t* const from = data<int64_t>(*beneath[side], ScalarType::Long, 1, side ? "old_L" : "rows_L");
    check(beneath[side]->numel() == L, "rows_L, old_L: expected ", L, " rows");
    slots[side].assign(from, from + L);
  }
  bool fine = true;
  for (int64_t l = 0; l < L; ++l) {
    int64_t &row = slots[0][l], &old = slots[1][l];
    fine &= frames[l] >= 0 && frames[l] < F && row >= 0 && row < R - F && old >= -1 && old < R - F;
    row += F;
    old += old < 0 ? 0 : F;
  }
  check(fine, "replace_rows: a frame is outside [0, ", F, "), or a row outside [0, ", R - F, ")");
  const int64_t team = std::max<int64_t>(1, std::min(team_for(2 * L * dim), L));
  Buffer<float> scratch;
  scratch.take(team * kScratch(dim));
  const Loops& run = loops();
  parallel(team, [&](int64_t c) {
    run.replace({&tables[0], frames, slots[0].data(), slots[1].data(), L * c / team, L * (c + 1) / team,
                 scratch.get() + c * kScratch(dim)});
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("replace_rows(" TABLES ", Tensor frames, Tensor rows, Tensor old, " RULES ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("replace_rows", TORCH_BOX(&replace_rows)); }

}  // namespace sparrow::embedding_bag
