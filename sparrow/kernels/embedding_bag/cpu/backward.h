// Everything a backward begins with: checks before anything is written, and the gradients of features that an inverse
// index shares, summed per stored row. Of a product it makes a feature for each table that wants gradients.

#pragma once

#include "arguments.h"

#include <vector>

namespace sparrow::embedding_bag {

struct Backward {
  std::vector<Buffer<float>> summed;
  int64_t threads;

  // grads: of `lookup`'s outputs; it writes where each feature's are into the batch
  Backward(Batch& batch, const std::vector<Tensor>& grads, const std::vector<Table>& tables);
};

}  // namespace sparrow::embedding_bag
