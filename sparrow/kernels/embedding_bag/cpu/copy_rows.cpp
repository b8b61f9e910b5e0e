// Row records that are copied between the levels of a table, in the format of each.

#include "arguments.h"
#include "processors.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

void copy_rows(const std::vector<Tensor>& payload, const std::vector<std::string>& formats,
               const std::vector<int64_t>& levels, const std::vector<int64_t>& dims, const std::vector<Tensor>& state,
               const std::vector<Tensor>& touched, const std::vector<Tensor>& changed, const Tensor& from_U,
               const Tensor& to_U, const std::vector<std::string>& rules, const Tensor& lr_T,
               const std::vector<double>& numbers, const std::vector<int64_t>& rounding, int64_t n) {
  Tables tables(payload, formats, levels, dims);
  tables.set_rules(rules, lr_T, numbers, state, touched, changed, rounding, n);
  check(tables.count() == 1, "copy_rows: expected one table");
  const int64_t U = from_U.numel(), R = tables[0].rows, dim = tables[0].dim;
  const int64_t* from = data<int64_t>(from_U, ScalarType::Long, 1, "from_U");
  const int64_t* to = data<int64_t>(to_U, ScalarType::Long, 1, "to_U");
  check(to_U.numel() == U, "to_U: expected ", U, " slots");
  bool fine = true;
  for (int64_t u = 0; u < U; ++u) fine &= from[u] >= 0 && from[u] < R && to[u] >= 0 && to[u] < R;
  check(fine, "from_U, to_U: a slot is outside [0, ", R, ")");
  const int64_t team = std::max<int64_t>(1, std::min(team_for(U * dim), U));
  Buffer<float> scratch;
  scratch.take(team * kScratch(dim));
  const Loops& run = loops();
  parallel(team, [&](int64_t c) {
    run.move({&tables[0], from, to, U * c / team, U * (c + 1) / team, scratch.get() + c * kScratch(dim)});
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("copy_rows(" TABLES ", Tensor from_slots, Tensor to_slots, " RULES ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("copy_rows", TORCH_BOX(&copy_rows)); }

}  // namespace sparrow::embedding_bag
