// A table's lookups grouped by row, so that each row's gradients can be summed by one thread, in order of occurrence.

#pragma once

#include "arguments.h"

#include <functional>
#include <vector>

namespace sparrow::embedding_bag {

// The memory of one thread, or of a table's team.
struct Workspace {
  Buffer<uint64_t> keys, other;
  Buffer<uint32_t> counters;
  Buffer<uint32_t> bag;
  Buffer<float> weights, scale, scratch;
  Buffer<const float*> by;
};

// One table's part of a batch.
struct Share {
  std::vector<const Feature*> features;
  std::vector<Source> sources;
  std::vector<int64_t> first;  // lookups before each feature's
  int64_t N = 0, bags = 0;
  bool mean = false, product = false;
  bool single = true;  // every bag has one lookup
};

std::vector<Share> shares_of(const Batch& batch, int64_t tables);

// Of each table, for `for_tables`.
std::vector<int64_t> costs_of(const std::vector<Share>& shares);

// One for each thread; the first is also that of the large tables, and has counters for a whole team.
std::vector<Workspace> workspaces(const std::vector<Share>& shares, int64_t threads, bool weighted, int64_t dim,
                                  bool own_keys);

// A table's lookups sorted by row, each thread of the team with rows of its own, on which it then calls
// then(thread, keys, begin, end). r: has its table, and gets what `Reduce` says of the gradients.
using Then = std::function<void(int64_t, const uint64_t*, int64_t, int64_t)>;
void sorted(const Batch& batch, const Share& share, int64_t rows, Workspace& space, int64_t team, Reduce& r,
            const Then& then);

}  // namespace sparrow::embedding_bag
