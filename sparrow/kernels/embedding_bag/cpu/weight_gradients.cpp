// The gradients of the lookups' weights: products of a bag's gradient and a row.

#include "backward.h"
#include "processors.h"

#include <utility>
#include <vector>

namespace sparrow::embedding_bag {
namespace {

Tensor weight_gradients(const std::vector<Tensor>& grads, const std::vector<Tensor>& payload,
                        const std::string& formats, const std::vector<int64_t>& levels,
                        const std::vector<int64_t>& dims, const Tensor& slots_N, const Tensor& offsets_B1,
                        const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags,
                        const std::vector<int64_t>& bounds, const std::vector<int64_t>& features) {
  const Tables tables(payload, formats, levels, dims);
  Batch batch(slots_N, offsets_B1, std::nullopt, inverses, bags, bounds, features, {}, tables.all);
  const Backward backward(batch, grads, tables.all);
  Tensor grad_N = empty({batch.N}, ScalarType::Float);
  float* out = static_cast<float*>(grad_N.data_ptr());
  std::fill(out, out + batch.N, 0.0f);  // of keys that no feature looks up
  std::vector<Buffer<const uint8_t*>> rows(backward.threads);
  std::vector<Buffer<float>> scratch(backward.threads);
  for (auto& s : scratch) s.take(kScratch(widest(tables.all)));
  auto ready = [&](int64_t longest) {
    for (auto& r : rows) r.take(longest);
  };
  const Loops& run = loops();
  std::vector<Feature> waiting = std::move(batch.features);
  while (!waiting.empty()) {  // in rounds: features with the same key add to the same gradients
    std::vector<Feature> later;
    std::vector<bool> met(bags.size());
    batch.features.clear();
    for (const Feature& f : waiting) {
      (met[f.key] ? later : batch.features).push_back(f);
      met[f.key] = true;
    }
    batch.for_blocks(backward.threads, ready, [&](int64_t worker, const Feature& f, int64_t begin, int64_t end) {
      const Table& table = tables[f.table];
      const int64_t from = batch.lookup_of(f, begin), to = batch.lookup_of(f, end);
      const uint8_t** found = rows[worker].get();
      find_rows(batch, table, from, to, found);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t n = batch.lookup_of(f, b), count = batch.lookup_of(f, b + 1) - n;
        const float scale = f.pooling == kMean && count > 1 ? 1.0f / static_cast<float>(count) : 1.0f;
        run.dots({places_of(table, found + n - from), count, f.vectors + b * f.stride, scale, out + n, table.dim,
                  scratch[worker].get()});
      }
    });
    waiting = std::move(later);
  }
  return grad_N;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("weight_gradients(Tensor[] grads, " PAYLOAD
        ", Tensor slots, Tensor offsets,"
        " Tensor[] inverses, int[] bags, int[] bounds, int[] features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("weight_gradients", TORCH_BOX(&weight_gradients)); }

}  // namespace sparrow::embedding_bag
