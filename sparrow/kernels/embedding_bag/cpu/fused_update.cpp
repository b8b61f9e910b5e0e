// `row_gradients` and `update_rows` in one: each row's gradient is summed in registers and goes through the rule from
// there.

#include "backward.h"
#include "processors.h"
#include "sorting.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

void fused_update(const std::vector<Tensor>& payload, const std::string& formats, const std::vector<int64_t>& levels,
                  const std::vector<int64_t>& dims, const std::vector<Tensor>& state,
                  const std::vector<Tensor>& touched, const std::vector<Tensor>& changed,
                  const std::vector<Tensor>& row_numbers, const std::vector<Tensor>& grads, const Tensor& slots_N,
                  const Tensor& offsets_B1, const MaybeTensor& weights_N, const std::vector<Tensor>& inverses,
                  const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
                  const std::vector<int64_t>& features, const std::vector<int64_t>& products, const std::string& rules,
                  const Tensor& lr_T, const Tensor& numbers, const Tensor& rounding, int64_t n) {
  Tables tables(payload, formats, levels, dims);
  tables.set_rules(rules, lr_T, numbers, state, touched, changed, row_numbers, rounding, n);
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, products, tables.all);
  const Backward backward(batch, grads, tables.all);
  const auto shares = shares_of(batch, tables.count());
  const int64_t dim = widest(tables.all);
  std::vector<Workspace> spaces = workspaces(shares, backward.threads, weights_N.has_value(), dim, true);
  const Loops& run = loops();
  for_tables(costs_of(shares), backward.threads, [&](int64_t t, int64_t worker, int64_t team) {
    if (!shares[t].N) return;
    Reduce r{};
    r.table = &tables[t];
    sorted(batch, shares[t], tables[t].rows, spaces[worker], team, r,
           [&](int64_t c, const uint64_t* keys, int64_t begin, int64_t end) {
             Reduce mine = r;
             mine.keys = keys;
             mine.begin = begin;
             mine.end = end;
             mine.scratch = spaces[worker].scratch.get() + c * kScratch(dim);
             run.reduce(mine);
           });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("fused_update(" TABLES ", Tensor[] grads, " BATCH ", " RULES ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("fused_update", TORCH_BOX(&fused_update)); }

}  // namespace sparrow::embedding_bag
