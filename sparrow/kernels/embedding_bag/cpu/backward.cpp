// What backward.h declares.

#include "backward.h"

#include <utility>

namespace sparrow::embedding_bag {
namespace {

constexpr int64_t kSmall = 1 << 16;  // floats

}  // namespace

Backward::Backward(Batch& batch, const std::vector<Tensor>& grads, const std::vector<Table>& tables) {
  check(static_cast<int64_t>(grads.size()) == batch.outputs(), "grads: expected ", batch.outputs(), " tensors, got ",
        grads.size());
  int64_t work = 0;
  for (Feature& f : batch.features) {
    const Tensor& grad = grads[f.output];
    check(grad.scalar_type() == ScalarType::Float && grad.dim() == 2 && grad.size(0) == batch.output_rows[f.output] &&
              grad.size(1) == batch.output_columns[f.output] &&
              (grad.stride(1) == 1 || grad.size(1) == 1 || grad.numel() == 0),
          "grads: expected float32 ", batch.output_rows[f.output], " x ", batch.output_columns[f.output],
          " with columns side by side");
    f.vectors = static_cast<float*>(grad.data_ptr()) + f.column;
    f.stride = grad.stride(0);
    work += (f.high - f.low) * tables[f.table].dim;
    if (f.by >= 0) factors_of(tables[f.table]), factors_of(tables[f.by]);
  }
  threads = team_for(work);
  batch.for_blocks(
      threads, [](int64_t) {},
      [&](int64_t, const Feature& f, int64_t begin, int64_t end) {
        if (!batch.rising(f, begin, end)) return;
        const int64_t from = batch.lookup_of(f, begin), to = batch.lookup_of(f, end), shift = f.by_low - f.low;
        batch.within(from, to, tables[f.table].rows);
        if (f.by >= 0) batch.within(from + shift, to + shift, tables[f.by].rows);
      });
  batch.raise(tables);
  summed.resize(batch.features.size());
  for (size_t i = 0; i < batch.features.size(); ++i)
    if (batch.features[i].shared) summed[i].take(batch.features[i].bags * tables[batch.features[i].table].dim);
  const int64_t workers = std::min<int64_t>(threads, batch.features.size());
  if (workers > 0)
    parallel(workers, [&](int64_t c) {
      for (size_t i = c; i < batch.features.size(); i += workers) {
        Feature& f = batch.features[i];
        if (!f.shared) continue;
        const int64_t D = tables[f.table].dim;
        float* sums = summed[i].get();
        std::fill(sums, sums + f.bags * D, 0.0f);
        for (int64_t b = 0; b < f.samples; ++b)
          for (int64_t d = 0; d < D; ++d) sums[f.inverse[b] * D + d] += f.vectors[b * f.stride + d];
        f.vectors = sums;
        f.stride = D;
      }
    });
  const auto multiply = [&](Feature& f, int64_t by) {
    f.by_rows = factors_of(tables[by]);
    f.by_is_small = tables[by].rows * tables[by].dim <= kSmall;
  };
  std::vector<Feature> wanted;
  for (const Feature& f : batch.features) {
    if (f.sides & 1) wanted.push_back(f);
    if (f.by < 0) continue;
    if (f.sides & 1) multiply(wanted.back(), f.by);
    if (!(f.sides & 2)) continue;
    Feature other = f;
    other.table = f.by;
    other.first = f.by_first;
    other.low = f.by_low;
    other.high = f.by_low + f.high - f.low;
    other.by_low = f.low;
    multiply(other, f.table);
    wanted.push_back(other);
  }
  batch.features = std::move(wanted);
}

}  // namespace sparrow::embedding_bag
