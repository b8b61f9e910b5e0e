// The operators' arguments: checked once, and unpacked into plain structs. `cpp.py` packs them.
//
// Slots and offsets are checked before they are used, so no loop reads or writes outside a table. What is refused
// throws std::invalid_argument, which arrives in Python as a ValueError.

#pragma once

#include "loop_types.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

// Parts of the operators' schemas. Names are joined by commas and numbers are in tensors where there are many: each
// entry of a list costs a call as much as a lookup.
#define BATCH                                                                                                      \
  "Tensor slots, Tensor offsets, Tensor? weights_n, Tensor[] inverses, int[] bags, int[] bounds, int[] features, " \
  "int[] products"
#define PAYLOAD "Tensor[] payload, str formats, int[] levels, int[] dims"
#define TABLES                                                                                              \
  "Tensor(a!)[] payload, str formats, int[] levels, int[] dims, Tensor(b!)[] state, Tensor(c!)[] touched, " \
  "Tensor(d!)[] changed, Tensor[] row_numbers"
#define RULES "str rules, Tensor lr, Tensor numbers, Tensor rounding, int n"

namespace sparrow::embedding_bag {

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kMax = 1LL << 32;  // rows and lookups of a table are numbered in 32 bits while they are sorted

template <class T>
T* data(const Tensor& tensor, ScalarType type, int64_t dim, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == dim && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with ", dim, " dimensions and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

// The tables of a call.
struct Tables {
  std::vector<Table> all;
  std::vector<Level> levels;
  std::vector<int64_t> counts;  // of levels

  // payload: the values of all levels of all tables, field by field; formats: of each level; level_counts, dims: of
  // each table
  Tables(const std::vector<Tensor>& payload, const std::string& formats, const std::vector<int64_t>& level_counts,
         const std::vector<int64_t>& dims);

  // changed, row_numbers: of each level, or empty; rounding: three numbers of each table, then one of each level; n: of
  // this update
  void set_rules(const std::string& rules, const Tensor& lr_T, const Tensor& numbers_T,
                 const std::vector<Tensor>& state, const std::vector<Tensor>& touched,
                 const std::vector<Tensor>& changed, const std::vector<Tensor>& row_numbers, const Tensor& rounding_T,
                 int64_t n);

  int64_t count() const { return static_cast<int64_t>(all.size()); }
  const Table& operator[](int64_t t) const { return all[t]; }
};

// The largest dim, or 1.
int64_t widest(const std::vector<Table>& tables);

enum Pooling { kSum, kMean, kNone };

// Which bags are looked up in which table, and where their vectors go.
struct Feature {
  int64_t table;
  Pooling pooling;
  int64_t key;
  int64_t first, bags;  // of the offsets
  int64_t low, high;    // of the slots
  bool shared = false;  // an inverse index says which bag each sample uses
  const int64_t* inverse = nullptr;
  int64_t samples;  // vectors that leave: bags, or lookups if unpooled, or what the inverse index makes of the bags
  int64_t output, column;
  float* vectors = nullptr;  // out: where they go; back: their gradients
  int64_t stride = 0;
  int64_t by = -1, by_first = 0, by_low = 0;  // of a product: the second table, its offsets and its slots
  const float* by_rows = nullptr;             // back: its rows
  bool by_is_small = false;                   // back: whether they fit into a cache
  int64_t weights_low = 0;                    // back: where the weights of its lookups begin
  int64_t sides = 1;                          // back: of whom there are gradients, 1: the table, 2: the second one

  int64_t units() const { return pooling == kNone ? high - low : bags; }  // vectors before the inverse index
};

// The slots of a call, and the features that look them up.
struct Batch {
  int64_t N;
  const int64_t* offsets;
  const float* weights;  // null: all 1
  const int32_t* slots32 = nullptr;
  const int64_t* slots64 = nullptr;
  std::vector<Feature> features;
  std::vector<int64_t> output_rows, output_columns;
  std::atomic<bool> bad_slots{false}, bad_offsets{false};

  // tables: their rows and dims are all that is looked at; products: see `Lookups` in arguments.py
  Batch(const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
        const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
        const std::vector<int64_t>& numbers, const std::vector<int64_t>& products, const std::vector<Table>& tables);

  int64_t outputs() const { return static_cast<int64_t>(output_rows.size()); }

  template <class F>  // f(slots) with their own type
  INLINE auto with_slots(const F& f) const {
    return slots32 ? f(slots32) : f(slots64);
  }

  // Whether the bags [begin, end) of a pooled feature lie within it, rising.
  bool rising(const Feature& f, int64_t begin, int64_t end);

  int64_t lookup_of(const Feature& f, int64_t unit) const {
    return f.pooling == kNone ? f.low + unit : offsets[f.first + unit];
  }

  // Whether slots [begin, end) lie in [0, rows).
  bool within(int64_t begin, int64_t end, int64_t rows) {
    return with_slots([&](const auto* slots) {
      bool fine = true;
      for (int64_t n = begin; n < end; ++n) fine &= static_cast<uint64_t>(slots[n]) < static_cast<uint64_t>(rows);
      if (!fine) bad_slots = true;
      return fine;
    });
  }

  // The error of what `rising` and `within` found wrong: it names the first slot that is outside.
  void raise(const std::vector<Table>& tables) const;

  // Calls f(worker, feature, begin, end) for blocks of every feature's units: near samples of all features together,
  // since they meet in the same rows of the output. `workers` threads share the lookups evenly.
  // First it calls ready(lookups in the longest block).
  template <class Ready, class F>
  void for_blocks(int64_t workers, const Ready& ready, const F& f) {
    int64_t blocks = 4 * workers;
    for (const Feature& feature : features)
      blocks = std::max({blocks, (feature.units() + 127) / 128, (feature.high - feature.low) / 2048});
    auto edge = [&](const Feature& feature, int64_t block) { return feature.units() * block / blocks; };
    std::vector<int64_t> costs(blocks);
    int64_t longest = 0;
    for (int64_t k = 0; k < blocks; ++k)
      for (const Feature& feature : features) {  // offsets are not checked yet
        const int64_t lookups = lookup_of(feature, edge(feature, k + 1)) - lookup_of(feature, edge(feature, k));
        longest = std::max(longest, std::clamp<int64_t>(lookups, 0, N));
        costs[k] += edge(feature, k + 1) - edge(feature, k) + std::clamp<int64_t>(lookups, 0, N);
      }
    const auto first = split(costs, workers);
    ready(longest);
    parallel(workers, [&](int64_t worker) {
      for (int64_t k = first[worker]; k < first[worker + 1]; ++k)
        for (size_t i = 0; i < features.size(); ++i)
          if (edge(features[i], k) < edge(features[i], k + 1))
            f(worker, features[i], edge(features[i], k), edge(features[i], k + 1));
    });
  }

  // Floats that a lookup reads and writes.
  int64_t work(const std::vector<Table>& tables) const;
};

// How the rows of a table are looked up, at such addresses.
Places places_of(const Table& table, const uint8_t* const* rows);

// The rows of a table of which products are made.
const float* factors_of(const Table& table);

// The addresses of the rows of lookups [begin, end), the first of them already asked for. False: one is outside.
bool find_rows(Batch& batch, const Table& table, int64_t begin, int64_t end, const uint8_t** rows);

}  // namespace sparrow::embedding_bag
