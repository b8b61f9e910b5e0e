// Pooled rows: blocks of near samples over all features, each on one thread, so that the output's pages stay known.

#include "arguments.h"
#include "processors.h"

#include <vector>

namespace sparrow::embedding_bag {
namespace {

std::vector<Tensor> lookup(const std::vector<Tensor>& payload, const std::string& formats,
                           const std::vector<int64_t>& levels, const std::vector<int64_t>& dims, const Tensor& slots_N,
                           const Tensor& offsets_B1, const MaybeTensor& weights_N, const std::vector<Tensor>& inverses,
                           const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
                           const std::vector<int64_t>& features, const std::vector<int64_t>& products) {
  const Tables tables(payload, formats, levels, dims);
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, products, tables.all);
  for (const Feature& f : batch.features)
    if (f.by >= 0) factors_of(tables[f.table]), factors_of(tables[f.by]);
  std::vector<Tensor> outputs;
  for (int64_t o = 0; o < batch.outputs(); ++o)
    outputs.push_back(empty({batch.output_rows[o], batch.output_columns[o]}, ScalarType::Float));
  std::vector<Buffer<float>> stored(batch.features.size());
  std::vector<Feature> leaving = batch.features;
  for (size_t i = 0; i < leaving.size(); ++i) {
    Feature& f = batch.features[i];
    leaving[i].vectors = f.vectors = static_cast<float*>(outputs[f.output].data_ptr()) + f.column;
    leaving[i].stride = f.stride = batch.output_columns[f.output];
    if (f.shared) {
      f.stride = tables[f.table].dim;
      f.vectors = stored[i].take(f.bags * f.stride);
    }
  }
  const int64_t threads = team_for(batch.work(tables.all));
  std::vector<Buffer<const uint8_t*>> rows(threads), factors(threads);
  std::vector<Buffer<float>> scratch(threads);
  for (auto& s : scratch) s.take(kScratch(widest(tables.all)));
  auto ready = [&](int64_t longest) {
    for (auto& r : rows) r.take(longest);
    if (!products.empty())
      for (auto& r : factors) r.take(longest);
  };
  const Loops& run = loops();
  batch.for_blocks(threads, ready, [&](int64_t worker, const Feature& f, int64_t begin, int64_t end) {
    if (!batch.rising(f, begin, end)) return;
    const Table& table = tables[f.table];
    const int64_t from = batch.lookup_of(f, begin), to = batch.lookup_of(f, end);
    const uint8_t** found = rows[worker].get();
    if (!find_rows(batch, table, from, to, found)) return;
    const uint8_t** by = nullptr;
    if (f.by >= 0) {
      const int64_t shift = f.by_low - f.low;
      by = factors[worker].get();
      if (!find_rows(batch, tables[f.by], from + shift, to + shift, by)) return;
    }
    const Pool p{places_of(table, found),
                 to - from,
                 batch.offsets + f.first + begin,
                 end - begin,
                 batch.weights ? batch.weights + from : nullptr,
                 f.pooling == kMean,
                 f.vectors + begin * f.stride,
                 f.stride,
                 table.dim,
                 scratch[worker].get(),
                 by};
    if (by) run.product(p, f.pooling == kNone);
    else (f.pooling == kNone ? run.copy : run.pool)(p);
  });
  batch.raise(tables.all);
  for (size_t i = 0; i < leaving.size(); ++i)
    if (const Feature &f = batch.features[i], &to = leaving[i]; f.shared)
      parallel(team_for(f.samples * f.stride), [&, workers = team_for(f.samples * f.stride)](int64_t c) {
        for (int64_t b = f.samples * c / workers; b < f.samples * (c + 1) / workers; ++b)
          std::copy_n(f.vectors + f.inverse[b] * f.stride, f.stride, to.vectors + b * to.stride);
      });
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) { m.def("lookup(" PAYLOAD ", " BATCH ") -> Tensor[]"); }

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("lookup", TORCH_BOX(&lookup)); }

}  // namespace sparrow::embedding_bag
