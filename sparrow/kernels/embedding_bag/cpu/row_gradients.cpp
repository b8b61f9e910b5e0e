// The rows that a batch uses and the sum of each one's gradients. The rows are counted first, so that every thread
// knows where its own go.

#include "backward.h"
#include "processors.h"
#include "sorting.h"

#include <utility>
#include <vector>

namespace sparrow::embedding_bag {
namespace {

// payload and what follows: as of `lookup`, where products are made; else empty
std::vector<Tensor> row_gradients(const std::vector<Tensor>& grads, const std::vector<int64_t>& sizes,
                                  const std::vector<Tensor>& payload, const std::string& formats,
                                  const std::vector<int64_t>& levels, const std::vector<int64_t>& dims,
                                  const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
                                  const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags,
                                  const std::vector<int64_t>& bounds, const std::vector<int64_t>& features,
                                  const std::vector<int64_t>& products) {
  const int64_t T = static_cast<int64_t>(sizes.size()) / 2;
  bool fine = sizes.size() % 2 == 0;
  std::vector<Table> tables(T);
  for (int64_t t = 0; t < T; ++t) {
    tables[t].rows = sizes[2 * t];
    tables[t].dim = sizes[2 * t + 1];
    fine = fine && tables[t].rows >= 0 && tables[t].rows <= kMax && tables[t].dim >= 1;
  }
  check(fine, "sizes: expected rows (up to 2**32; for more use impl='reference') and dim of every table");
  const Tables stored(payload, formats, levels, dims);
  check(stored.count() == (products.empty() && payload.empty() ? 0 : T), "payload: expected the rows of ", T,
        " tables");
  for (int64_t t = 0; t < stored.count(); ++t)
    check(stored[t].rows == tables[t].rows && stored[t].dim == tables[t].dim, "sizes: not those of the payload");
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, products, tables);
  const Backward backward(batch, grads, products.empty() ? tables : stored.all);
  const auto shares = shares_of(batch, T);
  std::vector<Workspace> spaces = workspaces(shares, backward.threads, false, 1, false);  // for sorting
  std::vector<Workspace> kept(T);
  for (int64_t t = 0; t < T; ++t) {
    kept[t].keys.take(shares[t].N);
    kept[t].other.take(shares[t].N);
    if (weights_N) kept[t].weights.take(shares[t].N);
    if (weights_N || shares[t].product) kept[t].bag.take(shares[t].N);
    if (shares[t].product) kept[t].by.take(shares[t].N);
    if (shares[t].mean) kept[t].scale.take(shares[t].bags);
  }
  struct Part {  // of a table: its keys, and how many rows they hold
    const uint64_t* keys;
    int64_t begin, end, unique;
  };
  std::vector<Reduce> reduces(T);
  std::vector<std::vector<Part>> parts(T, std::vector<Part>(backward.threads));
  for_tables(costs_of(shares), backward.threads, [&](int64_t t, int64_t worker, int64_t team) {
    std::swap(kept[t].counters, spaces[worker].counters);
    reduces[t].table = &tables[t];
    sorted(batch, shares[t], tables[t].rows, kept[t], team, reduces[t],
           [&](int64_t c, const uint64_t* keys, int64_t begin, int64_t end) {
             int64_t unique = 0;
             for (int64_t i = begin; i < end; ++i) unique += i == begin || row_of(keys[i]) != row_of(keys[i - 1]);
             parts[t][c] = {keys, begin, end, unique};
           });
    std::swap(kept[t].counters, spaces[worker].counters);
  });
  std::vector<Tensor> found;
  for (int64_t t = 0; t < T; ++t) {
    int64_t unique = 0;
    for (const Part& part : parts[t]) unique += part.unique;
    found.push_back(empty({unique}, ScalarType::Long));
    found.push_back(empty({unique, tables[t].dim}, ScalarType::Float));
    reduces[t].rows = static_cast<int64_t*>(found[2 * t].data_ptr());
    reduces[t].out = static_cast<float*>(found[2 * t + 1].data_ptr());
  }
  const int64_t scratch_size = kScratch(widest(tables));
  Buffer<float> scratch;
  scratch.take(backward.threads * scratch_size);
  const Loops& run = loops();
  for_tables(costs_of(shares), backward.threads, [&](int64_t t, int64_t worker, int64_t team) {
    parallel(team, [&](int64_t c) {
      Reduce mine = reduces[t];
      for (int64_t before = 0; before < c; ++before) {
        mine.rows += parts[t][before].unique;
        mine.out += parts[t][before].unique * tables[t].dim;
      }
      mine.keys = parts[t][c].keys;
      mine.begin = parts[t][c].begin;
      mine.end = parts[t][c].end;
      mine.scratch = scratch.get() + (worker + c) * scratch_size;
      run.reduce(mine);
    });
  });
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_gradients(Tensor[] grads, int[] sizes, " PAYLOAD ", " BATCH ") -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("row_gradients", TORCH_BOX(&row_gradients)); }

}  // namespace sparrow::embedding_bag
