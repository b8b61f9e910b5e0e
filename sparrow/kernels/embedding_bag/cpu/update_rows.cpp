// Rules applied to rows whose summed gradients are given.

#include "arguments.h"
#include "processors.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

void update_rows(const std::vector<Tensor>& payload, const std::string& formats, const std::vector<int64_t>& levels,
                 const std::vector<int64_t>& dims, const std::vector<Tensor>& state, const std::vector<Tensor>& touched,
                 const std::vector<Tensor>& changed, const std::vector<Tensor>& row_numbers,
                 const std::vector<Tensor>& rows, const std::vector<Tensor>& grads, const std::string& rules,
                 const Tensor& lr_T, const Tensor& numbers, const Tensor& rounding, int64_t n) {
  Tables tables(payload, formats, levels, dims);
  tables.set_rules(rules, lr_T, numbers, state, touched, changed, row_numbers, rounding, n);
  check(rows.size() == grads.size() && static_cast<int64_t>(rows.size()) == tables.count(),
        "rows_U: expected one per table");
  std::vector<Update> updates;
  std::vector<int64_t> costs;
  int64_t work = 0;
  for (int64_t t = 0; t < tables.count(); ++t) {
    const int64_t U = rows[t].numel(), R = tables[t].rows, D = tables[t].dim;
    const int64_t* row = data<int64_t>(rows[t], ScalarType::Long, 1, "rows_U");
    const float* grad = data<float>(grads[t], ScalarType::Float, 2, "grad_UD");
    check(grads[t].size(0) == U && grads[t].size(1) == D, "grad_UD: expected ", U, " x ", D);
    bool fine = U == 0 || (row[0] >= 0 && row[U - 1] < R);
    for (int64_t u = 1; u < U; ++u) fine &= row[u - 1] < row[u];  // a row named twice would be a race
    check(fine, "rows_U must ascend within [0, ", R, ")");
    updates.push_back({&tables[t], row, grad, 0, U, nullptr});
    costs.push_back(U * D);
    work += U * D;
  }
  const int64_t threads = team_for(work), scratch_size = kScratch(widest(tables.all));
  Buffer<float> scratch;
  scratch.take(threads * scratch_size);
  const Loops& run = loops();
  for_tables(costs, threads, [&](int64_t t, int64_t worker, int64_t team) {
    parallel(team, [&](int64_t c) {
      Update mine = updates[t];
      mine.begin = updates[t].end * c / team;
      mine.end = updates[t].end * (c + 1) / team;
      mine.scratch = scratch.get() + (worker + c) * scratch_size;
      run.update(mine);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("update_rows(" TABLES ", Tensor[] rows, Tensor[] grads, " RULES ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("update_rows", TORCH_BOX(&update_rows)); }

}  // namespace sparrow::embedding_bag
