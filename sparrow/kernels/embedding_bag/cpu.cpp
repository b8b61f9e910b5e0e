// The embedding-bag operators on CPUs, against torch's stable ABI. reference.py beside this file is their definition.
//
// Every parallel loop gives a bag or a row to one thread, and every sum runs in order of occurrence: any number of
// threads gives the same bits. Built with -ffp-contract=off: a fused multiply-add rounds once where the definition
// rounds twice. Slots and offsets are checked before they are used, so no loop reads or writes outside a table.

#include "../cpu.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#define PREFETCH(address) __builtin_prefetch(address)
#define PREFETCH_FAR(address) __builtin_prefetch(address, 0, 2)

namespace {

using torch::headeronly::ScalarType;
using sparrow::empty;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Floats from which a row is asked for into the second cache: the first has too few lines under way at a time (measured).
constexpr int64_t kFarLookup = 129, kFarUpdate = 128;
// Lookups between asking for a row and using it.
constexpr int64_t ahead_of(int64_t dim, bool far) {
  return far ? std::clamp<int64_t>(4096 / dim, 4, 32) : std::clamp<int64_t>(1024 / dim, 8, 16);
}
constexpr int64_t kMax = 1LL << 32;  // rows and lookups of a table are numbered in 32 bits while they are sorted
constexpr int64_t kFields = 3;       // the most state fields of a rule

constexpr int64_t kScratchRow(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t kScratch(int64_t dim) { return 4 * kScratchRow(dim); }

// -- what the inner loops are given ----------------------------------------------------------------------------------

enum RuleKind { kSgd, kRowwiseAdagrad, kAdagrad, kAdam, kRowwiseAdam };

struct Rule {
  RuleKind kind;
  float lr, l2, keep, clip_norm, max_norm;  // l2: decay added to gradients; keep: what decoupled decay leaves of a weight
  float eps;
  double beta1, beta2;
  int fields;            // of the state
  bool wide[kFields];    // a number per weight; otherwise one per row
};

struct Level {  // one storage of some of a table's rows
  int64_t first;  // its first slot
  float* weight;
  float* state[kFields];
  uint8_t* touched;
};

struct Table {
  int64_t rows, dim;
  Rule rule;
  const Level* levels;  // and one more, where the slots end

  INLINE const Level& level_of(int64_t slot) const {
    const Level* level = levels;
    while (slot >= level[1].first) ++level;
    return *level;
  }
};

struct Pool {
  const float* const* rows;
  int64_t count;
  const int64_t* offsets;
  int64_t bags;
  const float* weights;  // null: all 1
  bool mean;
  float* out;
  int64_t stride, dim;
  float* scratch;
};

struct Dots {
  const float* const* rows;
  int64_t count;
  const float* grad;
  float scale;
  float* out;
  int64_t dim;
  float* scratch;
};

// A lookup while it is sorted: its row, and in the low half its bag, or its place in the table's lookups if weighted.
INLINE int64_t row_of(uint64_t key) { return static_cast<int64_t>(key >> 32); }
INLINE uint32_t payload_of(uint64_t key) { return static_cast<uint32_t>(key); }

struct Source {  // the gradients of one feature's bags
  int64_t first;  // its first bag among the table's
  const float* grad;
  int64_t stride;
};

struct Reduce {
  const Table* table;
  const uint64_t* keys;
  int64_t begin, end;
  const Source* sources;
  int64_t features;       // of whom there are gradients: sources
  const uint32_t* bag;    // null: the payload is the bag
  const float* weights;   // null: all 1
  const float* scale;     // null: all 1
  float* out;             // with `rows`: write sums and row numbers; without: apply the rule
  int64_t* rows;
  float* scratch;

  INLINE uint32_t bag_of(uint64_t key) const { return bag ? bag[payload_of(key)] : payload_of(key); }
  INLINE const float* gradient(uint64_t key) const {
    const int64_t b = bag_of(key);
    const Source* source = sources;
    for (int64_t left = features; left > 1;) {  // halved without a branch: whose bag it is cannot be foretold
      const int64_t half = left / 2;
      source += b >= source[half].first ? half : 0;
      left -= half;
    }
    return source->grad + (b - source->first) * source->stride;
  }
};

struct Update {
  const Table* table;
  const int64_t* rows;
  const float* grad;
  int64_t begin, end;
  float* scratch;
};

struct Loops {
  void (*pool)(const Pool&);
  void (*copy)(const Pool&);
  void (*dots)(const Dots&);
  void (*reduce)(const Reduce&);
  void (*update)(const Update&);
};

// -- the inner loops, once for each kind of processor ----------------------------------------------------------------

namespace portable {
#include "loops.h"
}

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq")
#endif
namespace avx512 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

struct Processor {
  const char* name;
  const Loops* loops;
  bool here;  // whether this machine can run them
};

const std::vector<Processor>& processors() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const std::vector<Processor> all{
      {"avx512", &avx512::loops,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
      {"avx2", &avx2::loops, static_cast<bool>(__builtin_cpu_supports("avx2"))},
      {"portable", &portable::loops, true}};
#else
  static const std::vector<Processor> all{{"portable", &portable::loops, true}};
#endif
  return all;
}

const Processor* best() {
  return &*std::find_if(processors().begin(), processors().end(), [](const Processor& p) { return p.here; });
}

std::atomic<const Processor*> chosen{nullptr};

const Loops& loops() {
  if (!chosen) chosen = best();
  return *chosen.load()->loops;
}

// -- checks: std::invalid_argument arrives in Python as a ValueError -------------------------------------------------

template <class T>
T* data(const Tensor& tensor, ScalarType type, int64_t dim, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == dim && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with ", dim, " dimensions and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

// -- memory: taken before threads start, since what is thrown in one cannot be caught ---------------------------------

template <class T>
struct Buffer {  // uninitialised, aligned for vectors, keeps the largest size it was asked for
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> memory;
  int64_t size = 0;

  T* take(int64_t count) {
    if (count > size) {
      memory.reset();
      const size_t bytes = static_cast<size_t>(count) * sizeof(T);
      memory.reset(static_cast<T*>(sparrow::huge_pages(::operator new(bytes, std::align_val_t{64}), bytes)));
      size = count;
    }
    return memory.get();
  }
  T* get() const { return memory.get(); }
};

// -- sharing work among threads --------------------------------------------------------------------------------------

// The first index of each of `parts` runs of about equal cost.
std::vector<int64_t> split(const std::vector<int64_t>& costs, int64_t parts) {
  int64_t total = 0, sum = 0;
  for (int64_t cost : costs) total += cost;
  std::vector<int64_t> first{0};
  for (size_t i = 0; i < costs.size(); ++i) {
    while (static_cast<int64_t>(first.size()) < parts && sum + costs[i] / 2 >= total / parts * static_cast<int64_t>(first.size()))
      first.push_back(static_cast<int64_t>(i));
    sum += costs[i];
  }
  first.resize(parts + 1, static_cast<int64_t>(costs.size()));
  return first;
}

// Whether a table holds so much of the work that all threads should share it.
std::vector<bool> large(const std::vector<int64_t>& costs, int64_t threads) {
  int64_t total = 0;
  for (int64_t cost : costs) total += cost;
  std::vector<bool> found;
  for (int64_t cost : costs) found.push_back(threads > 1 && cost > total / threads / 2);
  return found;
}

// Calls f(table, worker, team): large tables one after the other, with all threads as their team and worker 0, the
// others each whole on one thread.
template <class F>
void for_tables(const std::vector<int64_t>& costs, int64_t threads, const F& f) {
  const std::vector<bool> shared = large(costs, threads);
  std::vector<int64_t> rest, rest_costs;
  for (int64_t t = 0; t < static_cast<int64_t>(costs.size()); ++t)
    if (shared[t]) {
      f(t, int64_t{0}, threads);
    } else {
      rest.push_back(t);
      rest_costs.push_back(costs[t]);
    }
  const auto first = split(rest_costs, threads);
  parallel(threads, [&](int64_t worker) {
    for (int64_t i = first[worker]; i < first[worker + 1]; ++i) f(rest[i], worker, int64_t{1});
  });
}

// -- arguments -------------------------------------------------------------------------------------------------------

Rule rule_of(const std::string& name, float lr, const double* numbers) {
  Rule rule{};
  const double decay = numbers[0];
  rule.lr = lr;
  rule.l2 = numbers[1] ? 0 : static_cast<float>(decay);
  rule.keep = numbers[1] ? 1 - lr * static_cast<float>(decay) : 1;
  rule.clip_norm = static_cast<float>(numbers[2]);
  rule.max_norm = static_cast<float>(numbers[3]);
  rule.eps = static_cast<float>(numbers[4]);
  rule.beta1 = numbers[5];
  rule.beta2 = numbers[6];
  struct Known {
    const char* name;
    RuleKind kind;
    int fields;
    bool wide[kFields];
  };
  static const Known known[] = {{"sgd", kSgd, 0, {}},
                                {"rowwise_adagrad", kRowwiseAdagrad, 1, {false}},
                                {"adagrad", kAdagrad, 1, {true}},
                                {"adam", kAdam, 3, {true, true, false}},
                                {"rowwise_adam", kRowwiseAdam, 3, {true, false, false}}};
  for (const Known& k : known)
    if (name == k.name) {
      rule.kind = k.kind;
      rule.fields = k.fields;
      std::copy(k.wide, k.wide + kFields, rule.wide);
      return rule;
    }
  check(false, "rule ", name, " has no C++ row function; use impl='reference'");
  return rule;
}

constexpr int64_t kNumbers = 7;  // per rule: what `kernels/rules` gives

struct Tables {
  std::vector<Table> tables;
  std::vector<Level> levels;
  std::vector<int64_t> counts;  // of levels

  // level_counts: storage levels of each table; weights: all levels of all tables
  Tables(const std::vector<Tensor>& weights, const std::vector<int64_t>& level_counts) : counts(level_counts) {
    levels.reserve(weights.size() + level_counts.size());
    size_t w = 0;
    for (int64_t count : level_counts) {
      check(count >= 1 && w + count <= weights.size(), "levels: they do not add up to the ", weights.size(), " weights");
      Table table{0, weights[w].dim() == 2 ? weights[w].size(1) : 0, {}, levels.data() + levels.size()};
      check(table.dim >= 1, "weight_RD: a row needs at least one column");
      for (int64_t l = 0; l < count; ++l, ++w) {
        levels.push_back({table.rows, data<float>(weights[w], ScalarType::Float, 2, "weight_RD"), {}, nullptr});
        check(weights[w].size(1) == table.dim, "weight_RD: the levels of a table differ in their columns");
        table.rows += weights[w].size(0);
      }
      check(table.rows <= kMax, "more than 2**32 rows in a table; use impl='reference'");
      levels.push_back({std::numeric_limits<int64_t>::max(), nullptr, {}, nullptr});
      tables.push_back(table);
    }
    check(w == weights.size(), "levels: they do not add up to the ", weights.size(), " weights");
  }

  void set_rules(const std::vector<std::string>& names, const Tensor& lr_T, const std::vector<double>& numbers,
                 const std::vector<Tensor>& state, const std::vector<Tensor>& touched) {
    const float* lr = data<float>(lr_T, ScalarType::Float, 1, "lr_T");
    check(names.size() == tables.size() && lr_T.numel() == static_cast<int64_t>(tables.size()) &&
              numbers.size() == kNumbers * tables.size(),
          "rules: expected a name, a learning rate and ", kNumbers, " numbers for each of ", tables.size(), " tables");
    size_t s = 0, w = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      Table& table = tables[t];
      table.rule = rule_of(names[t], lr[t], numbers.data() + kNumbers * t);
      Level* level = const_cast<Level*>(table.levels);
      for (Level* const last = level + counts[t]; level < last; ++level, ++w) {
        const int64_t rows = std::min(level[1].first, table.rows) - level->first;
        check(w < touched.size() && touched[w].numel() == rows, "touched_R: expected ", rows, " rows");
        level->touched = data<uint8_t>(touched[w], ScalarType::Byte, 1, "touched_R");
        for (int field = 0; field < table.rule.fields; ++field, ++s) {
          const bool wide = table.rule.wide[field];
          check(s < state.size() && state[s].numel() == rows * (wide ? table.dim : 1) && state[s].size(0) == rows, names[t], ": field ", field,
                " of the state does not have a number per ", wide ? "weight" : "row");
          level->state[field] = data<float>(state[s], ScalarType::Float, wide ? 2 : 1, "state");
        }
      }
    }
    check(s == state.size() && w == touched.size(), "rules: more state than they have fields");
  }

  int64_t count() const { return static_cast<int64_t>(tables.size()); }
  const Table& operator[](int64_t t) const { return tables[t]; }
};

enum Pooling { kSum, kMean, kNone };

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

  int64_t units() const { return pooling == kNone ? high - low : bags; }  // vectors before the inverse index
};

// table, pooling, key, inverse (-1: none), output, column: the order of `cpp.py`
constexpr int64_t kNumbersPerFeature = 6;

struct Batch {
  int64_t N;
  const int64_t* offsets;
  const float* weights;  // null: all 1
  const int32_t* slots32 = nullptr;
  const int64_t* slots64 = nullptr;
  std::vector<Feature> features;
  std::vector<int64_t> output_rows, output_columns;
  std::atomic<bool> bad_slots{false}, bad_offsets{false};

  template <class Dim>
  Batch(const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
        const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
        const std::vector<int64_t>& numbers, int64_t tables, const Dim& dim)
      : N(slots_N.numel()) {
    if (slots_N.scalar_type() == ScalarType::Int) slots32 = data<int32_t>(slots_N, ScalarType::Int, 1, "slots_N");
    else slots64 = data<int64_t>(slots_N, ScalarType::Long, 1, "slots_N");
    offsets = data<int64_t>(offsets_B1, ScalarType::Long, 1, "offsets_B1");
    check(!weights_N || weights_N->numel() == N, "weights_N: expected ", N, " values");
    weights = weights_N ? data<float>(*weights_N, ScalarType::Float, 1, "weights_N") : nullptr;
    const int64_t keys = static_cast<int64_t>(bags.size());
    check(static_cast<int64_t>(bounds.size()) == keys + 1, "bounds: expected one more than the ", keys, " keys");
    std::vector<int64_t> first{0};
    for (int64_t k = 0; k < keys; ++k) {
      check(bags[k] >= 0 && bounds[k] <= bounds[k + 1], "bags and bounds must not be negative or fall");
      check(bags[k] < offsets_B1.numel() - first[k], "offsets_B1 must go from 0 to the ", N,
            " slots and never fall, one for each of the bags and one more");
      first.push_back(first[k] + bags[k]);
    }
    check(first[keys] == offsets_B1.numel() - 1 && bounds[0] == 0 && bounds[keys] == N && offsets[0] == 0 &&
              offsets[first[keys]] == N,
          "offsets_B1 must go from 0 to the ", N, " slots and never fall");
    check(numbers.size() % kNumbersPerFeature == 0, "features: expected ", kNumbersPerFeature, " numbers for each");
    for (size_t i = 0; i < numbers.size(); i += kNumbersPerFeature) {
      const int64_t *n = numbers.data() + i, key = n[2];
      check(n[0] >= 0 && n[0] < tables && n[1] >= 0 && n[1] <= kNone && key >= 0 && key < keys && n[3] >= -1 &&
                n[3] < static_cast<int64_t>(inverses.size()) && (n[3] < 0 || n[1] != kNone) && n[4] >= 0 && n[5] >= 0,
            "features: feature ", i / kNumbersPerFeature, " names a table, key, inverse or output that is not there");
      Feature f{n[0], static_cast<Pooling>(n[1]), key, first[key], bags[key], bounds[key], bounds[key + 1]};
      check(f.pooling == kNone || (offsets[f.first] == f.low && offsets[f.first + f.bags] == f.high),
            "offsets_B1 must go from 0 to the ", N, " slots and never fall");
      f.samples = f.units();
      f.output = n[4];
      f.column = n[5];
      if (n[3] >= 0) {
        const Tensor& inverse = inverses[n[3]];
        f.shared = true;
        f.inverse = data<int64_t>(inverse, ScalarType::Long, 1, "inverse_B");
        f.samples = inverse.numel();
        bool fine = true;
        for (int64_t b = 0; b < f.samples; ++b) fine &= static_cast<uint64_t>(f.inverse[b]) < static_cast<uint64_t>(f.bags);
        check(fine, "inverse_B: an index is outside [0, ", f.bags, ")");
      }
      check(f.output <= outputs(), "output ", f.output, ": outputs must follow one another");
      if (f.output == outputs()) {
        output_rows.push_back(f.samples);
        output_columns.push_back(0);
      }
      check(output_rows[f.output] == f.samples, "output ", f.output, ": its features differ in their number of samples");
      check(f.column == output_columns[f.output], "output ", f.output, ": columns must follow one another");
      output_columns[f.output] += dim(f.table);
      features.push_back(f);
    }
  }

  int64_t outputs() const { return static_cast<int64_t>(output_rows.size()); }

  template <class F>  // f(slots) with their own type
  INLINE auto with_slots(const F& f) const {
    return slots32 ? f(slots32) : f(slots64);
  }

  // Whether the bags [begin, end) of a pooled feature lie within it, rising.
  bool rising(const Feature& f, int64_t begin, int64_t end) {
    if (f.pooling == kNone) return true;
    const int64_t* o = offsets + f.first;
    bool fine = true;
    for (int64_t b = begin; b < end; ++b) fine &= o[b] <= o[b + 1];
    fine = fine && o[begin] >= f.low && o[end] <= f.high;
    if (!fine) bad_offsets = true;
    return fine;
  }

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

  template <class Rows>
  void raise(const Rows& rows) const {
    check(!bad_offsets, "offsets_B1 must go from 0 to the ", N, " slots and never fall");
    for (size_t i = 0; bad_slots && i < features.size(); ++i)
      with_slots([&, &f = features[i]](const auto* slots) {
        for (int64_t n = f.low; n < f.high; ++n)
          check(slots[n] >= 0 && slots[n] < rows(f.table), "slot ", slots[n], " at position ", n - f.low, " of feature ", i,
                " is outside [0, ", rows(f.table), ") of table ", f.table);
      });
  }

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
          if (edge(features[i], k) < edge(features[i], k + 1)) f(worker, features[i], edge(features[i], k), edge(features[i], k + 1));
    });
  }

  int64_t work(const Tables& tables) const {
    int64_t floats = 0;
    for (const Feature& f : features) floats += (f.high - f.low + f.units()) * tables[f.table].dim;
    return floats;
  }
};

// The addresses of the rows of lookups [begin, end), the first of them already asked for. False: one is outside.
bool find_rows(Batch& batch, const Table& table, int64_t begin, int64_t end, const float** rows) {
  if (!batch.within(begin, end, table.rows)) return false;
  batch.with_slots([&](const auto* slots) {
    const int64_t count = end - begin, dim = table.dim;
    slots += begin;
    if (table.levels[1].first >= table.rows) {
      const float* weight = table.levels[0].weight;
      for (int64_t n = 0; n < count; ++n) rows[n] = weight + slots[n] * dim;
    } else {
      for (int64_t n = 0; n < count; ++n) {
        const Level& level = table.level_of(slots[n]);
        rows[n] = level.weight + (slots[n] - level.first) * dim;
      }
    }
    for (int64_t n = 0; n < std::min(count, ahead_of(dim, dim >= kFarLookup)); ++n)
      for (int64_t d = 0; d < dim && d < 256; d += 16) PREFETCH(rows[n] + d);
  });
  return true;
}

// -- lookups, grouped by row -----------------------------------------------------------------------------------------

constexpr int kDigit = 11;               // the most bits that one pass of the sort looks at
constexpr int64_t kCounters = 3 << kDigit;  // for all passes: bits / digit bits * 2^digit is largest at 32 / 11
constexpr int64_t kSample = 512;         // lookups that decide which rows are whose

struct Digits {  // how the rows of a table are sorted: few passes for many keys, few counters for few
  int bits, each, passes;

  Digits(int64_t N, int64_t rows) : bits(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(rows - 1, 1)))) {
    const int most = std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(N))), 6, kDigit);
    passes = (bits + most - 1) / most;
    each = (bits + passes - 1) / passes;
  }
};

// Least-significant-digit radix sort by row; it is stable, so a row's lookups stay in order of occurrence. The sorted
// keys are in `keys` after an even number of passes, else in `other`.
void sort_by_row(uint64_t* keys, uint64_t* other, int64_t N, const Digits& digits, int64_t* counters) {
  const int64_t buckets = 1LL << digits.each;
  const uint64_t mask = buckets - 1;
  std::fill(counters, counters + buckets * digits.passes, 0);
  for (int64_t i = 0; i < N; ++i)
    for (int pass = 0; pass < digits.passes; ++pass) ++counters[pass * buckets + (keys[i] >> (32 + pass * digits.each) & mask)];
  for (int pass = 0; pass < digits.passes; ++pass) {
    int64_t *next = counters + pass * buckets, total = 0;
    for (int64_t digit = 0; digit < buckets; ++digit) total += std::exchange(next[digit], total);
    const int shift = 32 + pass * digits.each;
    for (int64_t i = 0; i < N; ++i) other[next[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, other);
  }
}

struct Workspace {  // of one thread, or of a table's team
  Buffer<uint64_t> keys, other;
  Buffer<int64_t> counters;
  Buffer<uint32_t> bag;
  Buffer<float> weights, scale, scratch;
};

struct Share {  // one table's part of a batch
  std::vector<const Feature*> features;
  std::vector<Source> sources;
  std::vector<int64_t> first;  // lookups before each feature's
  int64_t N = 0, bags = 0;
  bool mean = false;
};

std::vector<Share> shares_of(const Batch& batch, int64_t tables) {
  std::vector<Share> shares(tables);
  for (const Feature& f : batch.features) {
    Share& share = shares[f.table];
    share.features.push_back(&f);
    share.first.push_back(share.N);
    share.sources.push_back({share.bags, f.vectors, f.stride});
    share.N += f.high - f.low;
    share.bags += f.units();
    share.mean |= f.pooling == kMean;
  }
  for (const Share& share : shares)
    check(share.N < kMax && share.bags < kMax, "more than 2**32 lookups in a table; use impl='reference'");
  return shares;
}

// Calls emit(slot, payload, place) on a feature's lookups in bags [begin, end), in order, and writes what `Reduce` needs
// beside the keys. place: the lookup's number among the table's, `first` being that of the feature's first one.
template <class Emit>
INLINE void each_lookup(const Batch& batch, const Feature& f, int64_t first_bag, int64_t first, int64_t begin, int64_t end,
                        uint32_t* bag, float* weights, float* scale, const Emit& emit) {
  batch.with_slots([&](const auto* slots) {
    int64_t place = first + batch.lookup_of(f, begin) - f.low;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t from = batch.lookup_of(f, b), to = f.pooling == kNone ? from + 1 : batch.offsets[f.first + b + 1];
      const uint64_t number = static_cast<uint64_t>(first_bag + b);
      if (scale) scale[number] = f.pooling == kMean && to > from ? 1.0f / static_cast<float>(to - from) : 1.0f;
      for (int64_t n = from; n < to; ++n, ++place) {
        emit(static_cast<uint64_t>(slots[n]), bag ? static_cast<uint64_t>(place) : number, place);
        if (bag) {
          bag[place] = static_cast<uint32_t>(number);
          weights[place] = batch.weights[n];
        }
      }
    }
  });
}

// Rows that cut a table's lookups into `team` parts of about equal number, from a sample.
std::vector<uint64_t> splitters(const Batch& batch, const Share& share, int64_t team) {
  std::vector<uint64_t> sample;
  for (const Feature* f : share.features)
    batch.with_slots([&](const auto* slots) {
      const int64_t count = f->high - f->low, step = std::max<int64_t>(1, share.N / kSample);
      for (int64_t n = 0; n < count; n += step) sample.push_back(static_cast<uint64_t>(slots[f->low + n]));
    });
  std::sort(sample.begin(), sample.end());
  std::vector<uint64_t> found;
  for (int64_t c = 1; c < team; ++c) found.push_back(sample[sample.size() * c / team]);
  return found;
}

// A table's lookups sorted by row, each thread of the team with rows of its own, on which it then calls
// then(thread, keys, begin, end).
template <class Then>
void sorted(const Batch& batch, const Share& share, int64_t rows, Workspace& space, int64_t team, Reduce& r, const Then& then) {
  uint64_t *keys = space.keys.get(), *other = space.other.get();
  uint32_t* bag = batch.weights ? space.bag.get() : nullptr;
  float *weights = batch.weights ? space.weights.get() : nullptr, *scale = share.mean ? space.scale.get() : nullptr;
  r.sources = share.sources.data();
  r.features = static_cast<int64_t>(share.sources.size());
  r.bag = bag;
  r.weights = weights;
  r.scale = scale;
  const Digits digits(share.N / team, rows);
  const int64_t S = static_cast<int64_t>(share.features.size());
  auto finish = [&](int64_t c, int64_t begin, int64_t end) {
    sort_by_row(keys + begin, other + begin, end - begin, digits, space.counters.get() + c * kCounters);
    then(c, digits.passes % 2 ? other : keys, begin, end);
  };
  const std::vector<int64_t>& first = share.first;
  if (team == 1) {
    for (int64_t s = 0; s < S; ++s)
      each_lookup(batch, *share.features[s], share.sources[s].first, first[s], 0, share.features[s]->units(), bag, weights, scale,
                  [keys](uint64_t slot, uint64_t payload, int64_t place) { keys[place] = slot << 32 | payload; });
    return finish(0, 0, share.N);
  }
  const auto cuts = splitters(batch, share, team);
  std::vector<int64_t> places(S * team * team);  // (feature, its part, owner): lookups, then where they go
  auto each_part = [&](int64_t c, int64_t s, bool write, const auto& emit) {
    const Feature& f = *share.features[s];
    each_lookup(batch, f, share.sources[s].first, first[s], f.units() * c / team, f.units() * (c + 1) / team,
                write ? bag : nullptr, weights, write ? scale : nullptr,
                [&](uint64_t slot, uint64_t payload, int64_t) {
                  int64_t owner = 0;
                  for (const uint64_t cut : cuts) owner += slot >= cut;
                  emit(owner, slot << 32 | payload);
                });
  };
  parallel(team, [&](int64_t c) {
    int64_t* count = space.counters.get() + c * kCounters;  // apart from the other threads'
    for (int64_t s = 0; s < S; ++s) {
      std::fill(count, count + team, 0);
      each_part(c, s, false, [count](int64_t owner, uint64_t) { ++count[owner]; });
      std::copy(count, count + team, places.begin() + (s * team + c) * team);
    }
  });
  std::vector<int64_t> edges{0};
  int64_t total = 0;
  for (int64_t owner = 0; owner < team; ++owner) {
    for (int64_t part = 0; part < S * team; ++part) total += std::exchange(places[part * team + owner], total);
    edges.push_back(total);
  }
  parallel(team, [&](int64_t c) {
    int64_t* next = space.counters.get() + c * kCounters;
    for (int64_t s = 0; s < S; ++s) {
      std::copy_n(places.begin() + (s * team + c) * team, team, next);
      each_part(c, s, true, [keys, next](int64_t owner, uint64_t key) { keys[next[owner]++] = key; });
    }
  });
  parallel(team, [&](int64_t c) { finish(c, edges[c], edges[c + 1]); });
}

// Everything a backward begins with: checks before anything is written, and the gradients of features that an inverse
// index shares, summed per stored row.
struct Backward {
  std::vector<Buffer<float>> summed;
  int64_t threads;

  template <class Rows, class Dim>
  Backward(Batch& batch, const std::vector<Tensor>& grads, const Rows& rows, const Dim& dim) {
    check(static_cast<int64_t>(grads.size()) == batch.outputs(), "grads: expected ", batch.outputs(), " tensors, got ",
          grads.size());
    int64_t work = 0;
    for (Feature& f : batch.features) {
      const Tensor& grad = grads[f.output];
      check(grad.scalar_type() == ScalarType::Float && grad.dim() == 2 && grad.size(0) == batch.output_rows[f.output] &&
                grad.size(1) == batch.output_columns[f.output] && (grad.stride(1) == 1 || grad.size(1) == 1 || grad.numel() == 0),
            "grads: expected float32 ", batch.output_rows[f.output], " x ", batch.output_columns[f.output],
            " with columns side by side");
      f.vectors = static_cast<float*>(grad.data_ptr()) + f.column;
      f.stride = grad.stride(0);
      work += (f.high - f.low) * dim(f.table);
    }
    threads = team_for(work);
    batch.for_blocks(threads, [](int64_t) {}, [&](int64_t, const Feature& f, int64_t begin, int64_t end) {
      if (batch.rising(f, begin, end)) batch.within(batch.lookup_of(f, begin), batch.lookup_of(f, end), rows(f.table));
    });
    batch.raise(rows);
    summed.resize(batch.features.size());
    for (size_t i = 0; i < batch.features.size(); ++i)
      if (batch.features[i].shared) summed[i].take(batch.features[i].bags * dim(batch.features[i].table));
    const int64_t workers = std::min<int64_t>(threads, batch.features.size());
    if (workers > 0)
      parallel(workers, [&](int64_t c) {
        for (size_t i = c; i < batch.features.size(); i += workers) {
          Feature& f = batch.features[i];
          if (!f.shared) continue;
          const int64_t D = dim(f.table);
          float* sums = summed[i].get();
          std::fill(sums, sums + f.bags * D, 0.0f);
          for (int64_t b = 0; b < f.samples; ++b)
            for (int64_t d = 0; d < D; ++d) sums[f.inverse[b] * D + d] += f.vectors[b * f.stride + d];
          f.vectors = sums;
          f.stride = D;
        }
      });
  }
};

std::vector<int64_t> costs_of(const std::vector<Share>& shares) {
  std::vector<int64_t> costs;
  for (const Share& share : shares) costs.push_back(share.N);
  return costs;
}

// One for each thread; the first is also that of the large tables, and has counters for a whole team.
std::vector<Workspace> workspaces(const std::vector<Share>& shares, int64_t threads, bool weighted, int64_t dim, bool own_keys) {
  std::vector<Workspace> spaces(threads);
  const std::vector<bool> shared = large(costs_of(shares), threads);
  for (int64_t worker = 0; worker < threads; ++worker) {
    Workspace& space = spaces[worker];
    int64_t N = 0, bags = 0;
    for (size_t t = 0; t < shares.size(); ++t)
      if (worker == 0 || !shared[t]) {
        N = std::max(N, shares[t].N);
        bags = std::max(bags, shares[t].mean ? shares[t].bags : 0);
      }
    space.counters.take((worker == 0 ? threads : 1) * kCounters);
    space.scratch.take((worker == 0 ? threads : 1) * kScratch(dim));
    if (!own_keys) continue;
    space.keys.take(N);
    space.other.take(N);
    space.scale.take(bags);
    if (weighted) {
      space.bag.take(N);
      space.weights.take(N);
    }
  }
  return spaces;
}

// -- the operators ---------------------------------------------------------------------------------------------------

std::vector<Tensor> lookup(const std::vector<Tensor>& weights, const std::vector<int64_t>& levels, const Tensor& slots_N,
                           const Tensor& offsets_B1, const MaybeTensor& weights_N, const std::vector<Tensor>& inverses,
                           const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
                           const std::vector<int64_t>& features) {
  const Tables tables(weights, levels);
  auto dim = [&](int64_t t) { return tables[t].dim; };
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, tables.count(), dim);
  std::vector<Tensor> outputs;
  for (int64_t o = 0; o < batch.outputs(); ++o)
    outputs.push_back(empty({batch.output_rows[o], batch.output_columns[o]}, ScalarType::Float));
  std::vector<Buffer<float>> stored(batch.features.size());
  std::vector<Feature> leaving = batch.features;
  int64_t widest = 1;
  for (size_t i = 0; i < leaving.size(); ++i) {
    Feature& f = batch.features[i];
    leaving[i].vectors = f.vectors = static_cast<float*>(outputs[f.output].data_ptr()) + f.column;
    leaving[i].stride = f.stride = batch.output_columns[f.output];
    widest = std::max(widest, dim(f.table));
    if (f.shared) {
      f.stride = dim(f.table);
      f.vectors = stored[i].take(f.bags * f.stride);
    }
  }
  const int64_t threads = team_for(batch.work(tables));
  std::vector<Buffer<const float*>> rows(threads);
  std::vector<Buffer<float>> scratch(threads);
  for (auto& s : scratch) s.take(kScratch(widest));
  auto ready = [&](int64_t longest) {
    for (auto& r : rows) r.take(longest);
  };
  const Loops& run = loops();
  batch.for_blocks(threads, ready, [&](int64_t worker, const Feature& f, int64_t begin, int64_t end) {
    if (!batch.rising(f, begin, end)) return;
    const Table& table = tables[f.table];
    const int64_t from = batch.lookup_of(f, begin), to = batch.lookup_of(f, end);
    const float** found = rows[worker].get();
    if (!find_rows(batch, table, from, to, found)) return;
    const Pool p{found, to - from, batch.offsets + f.first + begin, end - begin,
                 batch.weights ? batch.weights + from : nullptr, f.pooling == kMean, f.vectors + begin * f.stride, f.stride,
                 table.dim, scratch[worker].get()};
    (f.pooling == kNone ? run.copy : run.pool)(p);
  });
  batch.raise([&](int64_t t) { return tables[t].rows; });
  for (size_t i = 0; i < leaving.size(); ++i)
    if (const Feature &f = batch.features[i], &to = leaving[i]; f.shared)
      parallel(team_for(f.samples * f.stride), [&, workers = team_for(f.samples * f.stride)](int64_t c) {
        for (int64_t b = f.samples * c / workers; b < f.samples * (c + 1) / workers; ++b)
          std::copy_n(f.vectors + f.inverse[b] * f.stride, f.stride, to.vectors + b * to.stride);
      });
  return outputs;
}

std::vector<Tensor> row_gradients(const std::vector<Tensor>& grads, const std::vector<int64_t>& sizes, const Tensor& slots_N,
                                  const Tensor& offsets_B1, const MaybeTensor& weights_N,
                                  const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags,
                                  const std::vector<int64_t>& bounds, const std::vector<int64_t>& features) {
  const int64_t T = static_cast<int64_t>(sizes.size()) / 2;
  auto rows = [&](int64_t t) { return sizes[2 * t]; };
  auto dim = [&](int64_t t) { return sizes[2 * t + 1]; };
  bool fine = sizes.size() % 2 == 0;
  for (int64_t t = 0; t < T; ++t) fine = fine && rows(t) >= 0 && rows(t) <= kMax && dim(t) >= 1;
  check(fine, "sizes: expected rows (up to 2**32; for more use impl='reference') and dim of every table");
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, T, dim);
  const Backward backward(batch, grads, rows, dim);
  const auto shares = shares_of(batch, T);
  std::vector<Workspace> spaces = workspaces(shares, backward.threads, false, 1, false);  // for sorting
  std::vector<Workspace> kept(T);
  int64_t widest = 1;
  for (int64_t t = 0; t < T; ++t) {
    widest = std::max(widest, dim(t));
    kept[t].keys.take(shares[t].N);
    kept[t].other.take(shares[t].N);
    if (weights_N) {
      kept[t].bag.take(shares[t].N);
      kept[t].weights.take(shares[t].N);
    }
    if (shares[t].mean) kept[t].scale.take(shares[t].bags);
  }
  struct Part {  // of a table: its keys, and how many rows they hold
    const uint64_t* keys;
    int64_t begin, end, unique;
  };
  std::vector<Reduce> reduces(T);
  std::vector<Table> tables(T);
  std::vector<std::vector<Part>> parts(T, std::vector<Part>(backward.threads));
  for_tables(costs_of(shares), backward.threads, [&](int64_t t, int64_t worker, int64_t team) {
    std::swap(kept[t].counters, spaces[worker].counters);
    sorted(batch, shares[t], rows(t), kept[t], team, reduces[t], [&](int64_t c, const uint64_t* keys, int64_t begin, int64_t end) {
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
    tables[t].dim = dim(t);
    found.push_back(empty({unique}, ScalarType::Long));
    found.push_back(empty({unique, dim(t)}, ScalarType::Float));
    reduces[t].table = &tables[t];
    reduces[t].rows = static_cast<int64_t*>(found[2 * t].data_ptr());
    reduces[t].out = static_cast<float*>(found[2 * t + 1].data_ptr());
  }
  const int64_t scratch_size = kScratch(widest);
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

Tensor weight_gradients(const std::vector<Tensor>& grads, const std::vector<Tensor>& weights,
                        const std::vector<int64_t>& levels, const Tensor& slots_N, const Tensor& offsets_B1,
                        const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags,
                        const std::vector<int64_t>& bounds, const std::vector<int64_t>& features) {
  const Tables tables(weights, levels);
  auto dim = [&](int64_t t) { return tables[t].dim; };
  Batch batch(slots_N, offsets_B1, std::nullopt, inverses, bags, bounds, features, tables.count(), dim);
  const Backward backward(batch, grads, [&](int64_t t) { return tables[t].rows; }, dim);
  Tensor grad_N = empty({batch.N}, ScalarType::Float);
  float* out = static_cast<float*>(grad_N.data_ptr());
  std::fill(out, out + batch.N, 0.0f);  // of keys that no feature looks up
  int64_t widest = 1;
  for (const Feature& f : batch.features) widest = std::max(widest, dim(f.table));
  std::vector<Buffer<const float*>> rows(backward.threads);
  std::vector<Buffer<float>> scratch(backward.threads);
  for (auto& s : scratch) s.take(kScratch(widest));
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
      const float** found = rows[worker].get();
      find_rows(batch, table, from, to, found);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t n = batch.lookup_of(f, b), count = batch.lookup_of(f, b + 1) - n;
        const float scale = f.pooling == kMean && count > 1 ? 1.0f / static_cast<float>(count) : 1.0f;
        run.dots({found + n - from, count, f.vectors + b * f.stride, scale, out + n, table.dim, scratch[worker].get()});
      }
    });
    waiting = std::move(later);
  }
  return grad_N;
}

void update_rows(const std::vector<Tensor>& weights, const std::vector<Tensor>& state, const std::vector<Tensor>& touched,
                 const std::vector<int64_t>& levels, const std::vector<Tensor>& rows, const std::vector<Tensor>& grads,
                 const std::vector<std::string>& rules, const Tensor& lr_T, const std::vector<double>& numbers) {
  Tables tables(weights, levels);
  tables.set_rules(rules, lr_T, numbers, state, touched);
  check(rows.size() == grads.size() && static_cast<int64_t>(rows.size()) == tables.count(), "rows_U: expected one per table");
  std::vector<Update> updates;
  std::vector<int64_t> costs;
  int64_t work = 0, widest = 1;
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
    widest = std::max(widest, D);
  }
  const int64_t threads = team_for(work), scratch_size = kScratch(widest);
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

void fused_update(const std::vector<Tensor>& weights, const std::vector<Tensor>& state, const std::vector<Tensor>& touched,
                  const std::vector<int64_t>& levels, const std::vector<Tensor>& grads, const Tensor& slots_N,
                  const Tensor& offsets_B1, const MaybeTensor& weights_N, const std::vector<Tensor>& inverses,
                  const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds, const std::vector<int64_t>& features,
                  const std::vector<std::string>& rules, const Tensor& lr_T, const std::vector<double>& numbers) {
  Tables tables(weights, levels);
  tables.set_rules(rules, lr_T, numbers, state, touched);
  auto dim = [&](int64_t t) { return tables[t].dim; };
  Batch batch(slots_N, offsets_B1, weights_N, inverses, bags, bounds, features, tables.count(), dim);
  const Backward backward(batch, grads, [&](int64_t t) { return tables[t].rows; }, dim);
  const auto shares = shares_of(batch, tables.count());
  int64_t widest = 1;
  for (const Table& table : tables.tables) widest = std::max(widest, table.dim);
  std::vector<Workspace> spaces = workspaces(shares, backward.threads, weights_N.has_value(), widest, true);
  const Loops& run = loops();
  for_tables(costs_of(shares), backward.threads, [&](int64_t t, int64_t worker, int64_t team) {
    if (!shares[t].N) return;
    Reduce r{};
    r.table = &tables[t];
    sorted(batch, shares[t], tables[t].rows, spaces[worker], team, r, [&](int64_t c, const uint64_t* keys, int64_t begin, int64_t end) {
      Reduce mine = r;
      mine.keys = keys;
      mine.begin = begin;
      mine.end = end;
      mine.scratch = spaces[worker].scratch.get() + c * kScratch(widest);
      run.reduce(mine);
    });
  });
}

// How many slots of each key lie outside [0, rows of its table); rows: -1 for a key that is not looked at.
Tensor count_outside(const Tensor& slots_N, const std::vector<int64_t>& bounds, const std::vector<int64_t>& rows) {
  const int64_t keys = static_cast<int64_t>(rows.size()), N = slots_N.numel();
  check(static_cast<int64_t>(bounds.size()) == keys + 1 && bounds[0] == 0 && bounds[keys] == N &&
            std::is_sorted(bounds.begin(), bounds.end()),
        "bounds: expected ", keys + 1, " rising numbers from 0 to ", N);
  const bool narrow = slots_N.scalar_type() == ScalarType::Int;
  const void* slots = narrow ? static_cast<const void*>(data<int32_t>(slots_N, ScalarType::Int, 1, "slots_N"))
                             : static_cast<const void*>(data<int64_t>(slots_N, ScalarType::Long, 1, "slots_N"));
  Tensor counts_K = empty({keys}, ScalarType::Long);
  int64_t* counts = static_cast<int64_t*>(counts_K.data_ptr());
  std::fill(counts, counts + keys, 0);
  const int64_t team = team_for(N / 4);
  std::vector<int64_t> found(team * keys, 0);
  auto count = [&](const auto* all) {
    parallel(team, [&](int64_t c) {
      for (int64_t k = 0; k < keys; ++k) {
        if (rows[k] < 0) continue;
        const uint64_t limit = static_cast<uint64_t>(rows[k]);
        int64_t outside = 0;
        for (int64_t n = std::max(bounds[k], N * c / team), end = std::min(bounds[k + 1], N * (c + 1) / team); n < end; ++n)
          outside += static_cast<uint64_t>(all[n]) >= limit;
        found[c * keys + k] = outside;
      }
    });
  };
  if (narrow) count(static_cast<const int32_t*>(slots));
  else count(static_cast<const int64_t*>(slots));
  for (int64_t c = 0; c < team; ++c)
    for (int64_t k = 0; k < keys; ++k) counts[k] += found[c * keys + k];
  return counts_K;
}

// Name of the processor whose loops run; a name given chooses it, "best" the default.
std::string processor(const std::string& name) {
  if (name == "best") {
    chosen = best();
  } else if (!name.empty()) {
    const auto& all = processors();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Processor& p) { return p.here && name == p.name; });
    check(found != all.end(), "processor: ", name, " cannot run here");
    chosen = &*found;
  }
  loops();
  return chosen.load()->name;
}

}  // namespace

#define BATCH "Tensor slots, Tensor offsets, Tensor? weights_n, Tensor[] inverses, int[] bags, int[] bounds, int[] features"
#define TABLES "Tensor(a!)[] weights, Tensor(b!)[] state, Tensor(c!)[] touched, int[] levels"
#define RULES "str[] rules, Tensor lr, float[] numbers"

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("lookup(Tensor[] weights, int[] levels, " BATCH ") -> Tensor[]");
  m.def("row_gradients(Tensor[] grads, int[] sizes, " BATCH ") -> Tensor[]");
  m.def(
      "weight_gradients(Tensor[] grads, Tensor[] weights, int[] levels, Tensor slots, Tensor offsets, Tensor[] inverses,"
      " int[] bags, int[] bounds, int[] features) -> Tensor");
  m.def("update_rows(" TABLES ", Tensor[] rows, Tensor[] grads, " RULES ") -> ()");
  m.def("fused_update(" TABLES ", Tensor[] grads, " BATCH ", " RULES ") -> ()");
  m.def("count_outside(Tensor slots, int[] bounds, int[] rows) -> Tensor");
  m.def("processor(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("lookup", TORCH_BOX(&lookup));
  m.impl("row_gradients", TORCH_BOX(&row_gradients));
  m.impl("weight_gradients", TORCH_BOX(&weight_gradients));
  m.impl("update_rows", TORCH_BOX(&update_rows));
  m.impl("fused_update", TORCH_BOX(&fused_update));
  m.impl("count_outside", TORCH_BOX(&count_outside));
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) { m.impl("processor", TORCH_BOX(&processor)); }
