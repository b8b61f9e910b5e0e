// The embedding-bag operator on CPUs, against torch's stable ABI. reference.py beside this file is its definition.
//
// Every parallel loop gives a bag or a row to one thread, and every sum runs in order of occurrence: any number of
// threads gives the same bits. Built with -ffp-contract=off: a fused multiply-add rounds once where the definition
// rounds twice. Slots are checked as they are copied, so no loop below reads outside a table.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// One build, many processors: the loader picks the variant. Elsewhere the compiler's default is all there is.
#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define INLINE inline
#define PREFETCH(address) ((void)(address))
#endif

// Runs a statement with `dim` in it; for usual dims the compiler knows the length of its loops.
#define FOR_DIM(D, STATEMENT)                                     \
  switch (D) {                                                    \
    case 8: { constexpr int64_t dim = 8; STATEMENT; break; }      \
    case 16: { constexpr int64_t dim = 16; STATEMENT; break; }    \
    case 32: { constexpr int64_t dim = 32; STATEMENT; break; }    \
    case 64: { constexpr int64_t dim = 64; STATEMENT; break; }    \
    case 128: { constexpr int64_t dim = 128; STATEMENT; break; }  \
    default: { const int64_t dim = D; STATEMENT; }                \
  }

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 16384;    // floats of work below which another thread costs more than it saves
constexpr int64_t kAhead = 8;        // lookups between asking for a row and using it
constexpr int64_t kLanes = 16;       // partial sums of a dot product: fixed, so that every processor gives the same bits
constexpr int64_t kMax = 1LL << 32;  // rows and lookups are numbered in 32 bits while they are sorted

// -- checks: std::invalid_argument arrives in Python as a ValueError -------------------------------------------------

template <class... Parts>
void check(bool fine, const Parts&... parts) {
  if (fine) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class T>
T* data(const Tensor& tensor, ScalarType type, int64_t dim, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == dim && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with ", dim, " dimensions and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

const float* numbers(const MaybeTensor& tensor, int64_t count, const char* name) {
  if (!tensor) return nullptr;
  check(tensor->numel() == count, name, ": expected ", count, " values, got ", tensor->numel());
  return data<float>(*tensor, ScalarType::Float, 1, name);
}

Tensor empty(std::vector<int64_t> sizes, ScalarType type) { return torch::stable::empty(sizes, type); }

template <class Slot>
void copy_slots(const Slot* slots, int64_t count, int64_t rows, uint32_t* out) {
  bool fine = true;
  for (int64_t n = 0; n < count; ++n) {
    fine &= static_cast<uint64_t>(slots[n]) < static_cast<uint64_t>(rows);
    out[n] = static_cast<uint32_t>(slots[n]);
  }
  for (int64_t n = 0; !fine && n < count; ++n)
    check(slots[n] >= 0 && slots[n] < rows, "slot ", slots[n], " at position ", n, " is outside [0, ", rows, ")");
}

struct Bags {
  int64_t N, B;
  std::vector<uint32_t> slots;
  const int64_t* offsets;
  const float* weights;  // null: all 1
  const float* scale;    // null: all 1

  Bags(const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N, const MaybeTensor& scale_B,
       int64_t rows)
      : N(slots_N.numel()), B(offsets_B1.numel() - 1), slots(N) {
    check(rows <= kMax && N < kMax, "more than 2**32 rows or lookups in one call; use impl='reference'");
    if (slots_N.scalar_type() == ScalarType::Int)
      copy_slots(data<int32_t>(slots_N, ScalarType::Int, 1, "slots_N"), N, rows, slots.data());
    else
      copy_slots(data<int64_t>(slots_N, ScalarType::Long, 1, "slots_N"), N, rows, slots.data());
    offsets = data<int64_t>(offsets_B1, ScalarType::Long, 1, "offsets_B1");
    bool fine = B >= 0 && offsets[0] == 0 && offsets[B] == N;
    for (int64_t b = 0; fine && b < B; ++b) fine = offsets[b] <= offsets[b + 1];
    check(fine, "offsets_B1 must go from 0 to the ", N, " slots and never fall");
    weights = numbers(weights_N, N, "weights_N");
    scale = numbers(scale_B, B, "scale_B");
  }
};

// -- sharing work among threads --------------------------------------------------------------------------------------

int64_t chunk_count(int64_t work) { return std::clamp<int64_t>(work / kGrain, 1, torch::stable::get_num_threads()); }

template <class F>
void parallel(int64_t chunks, const F& f) {
  if (chunks == 1) return f(0);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c);
  });
}

// Calls f(first bag, last bag) on ranges of equal cost, where a bag costs its lookups and one more.
template <class F>
void parallel_bags(const Bags& bags, int64_t dim, const F& f) {
  const int64_t chunks = chunk_count((bags.N + bags.B) * dim);
  auto first = [&](int64_t chunk) {
    const int64_t cost = (bags.N + bags.B) * chunk / chunks;
    int64_t low = 0, high = bags.B;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (bags.offsets[middle] + middle < cost) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  parallel(chunks, [&](int64_t c) { f(first(c), first(c + 1)); });
}

// -- lookups, grouped by row -----------------------------------------------------------------------------------------

INLINE int64_t row_of(uint64_t key) { return static_cast<int64_t>(key >> 32); }
INLINE int64_t position_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Least-significant-digit radix sort by row; it is stable, so a row's lookups stay in order of occurrence.
void sort_by_row(std::vector<uint64_t>& keys, int64_t rows) {
  const int bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(rows - 1, 1)));
  const int passes = (bits + 10) / 11, digit_bits = (bits + passes - 1) / passes;
  const int64_t N = static_cast<int64_t>(keys.size()), buckets = 1LL << digit_bits, chunks = chunk_count(N / 4);
  std::vector<uint64_t> other(keys.size());
  std::vector<int64_t> next(chunks * buckets);  // where a chunk puts its next key with a digit
  for (int shift = 32; shift < 32 + bits; shift += digit_bits) {
    std::fill(next.begin(), next.end(), 0);
    auto for_keys = [&](auto&& f) {  // f(key, number of its chunk's digit)
      parallel(chunks, [&](int64_t c) {
        const uint64_t* key = keys.data();
        int64_t* numbers = next.data() + c * buckets;
        const uint64_t mask = buckets - 1;
        for (int64_t i = N * c / chunks, end = N * (c + 1) / chunks; i < end; ++i) f(key[i], numbers[key[i] >> shift & mask]);
      });
    };
    for_keys([](uint64_t, int64_t& count) { ++count; });
    int64_t total = 0;
    for (int64_t digit = 0; digit < buckets; ++digit)
      for (int64_t c = 0; c < chunks; ++c) total += std::exchange(next[c * buckets + digit], total);
    for_keys([to = other.data()](uint64_t key, int64_t& place) { to[place++] = key; });
    keys.swap(other);
  }
}

struct Groups {
  std::vector<uint64_t> keys;   // (row, position) of every lookup, ascending
  std::vector<uint32_t> bag;    // position -> bag
  std::vector<int64_t> bounds;  // chunk -> its first key; no row lies in two chunks

  Groups(const Bags& bags, int64_t rows, int64_t dim) : keys(bags.N), bag(bags.N) {
    for (int64_t b = 0; b < bags.B; ++b)
      for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) {
        keys[n] = static_cast<uint64_t>(bags.slots[n]) << 32 | static_cast<uint64_t>(n);
        bag[n] = static_cast<uint32_t>(b);
      }
    const int64_t chunks = chunk_count(bags.N * dim);
    sort_by_row(keys, rows);
    bounds.push_back(0);
    for (int64_t c = 1; c <= chunks; ++c) {  // equal numbers of lookups, to the end of the row in which they end
      const int64_t i = bags.N * c / chunks;
      const auto row_end = i == 0 ? keys.begin() : std::upper_bound(keys.begin() + i, keys.end(), keys[i - 1] | 0xffffffffu);
      bounds.push_back(row_end - keys.begin());
    }
  }
  int64_t chunks() const { return static_cast<int64_t>(bounds.size()) - 1; }
};

// -- row rules: a function and a line in `apply` and in `Rule` each; kernels/rules/ holds the definitions -------------

INLINE float dot(const float* a, const float* b, const int64_t dim) {
  float lanes[kLanes] = {}, sum = 0;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += a[d + j] * b[d + j];
  for (int64_t j = 0; d + j < dim; ++j) lanes[j] += a[d + j] * b[d + j];
  for (int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

struct Rule {
  enum Kind { sgd, rowwise_adagrad } kind;
  float lr, eps = 0;
  float* weight;
  float* sum = nullptr;
  uint8_t* touched;
  int64_t R, D;

  // numbers: what the rule's `cpp()` gives beside its name.
  Rule(const Tensor& weight_RD, const std::vector<Tensor>& state, const Tensor& touched_R, const std::string& name,
       const Tensor& lr_1, const std::vector<double>& numbers)
      : weight(data<float>(weight_RD, ScalarType::Float, 2, "weight_RD")),
        touched(data<uint8_t>(touched_R, ScalarType::Byte, 1, "touched_R")),
        R(weight_RD.size(0)),
        D(weight_RD.size(1)) {
    check(touched_R.numel() == R, "touched_R: expected ", R, " rows, got ", touched_R.numel());
    check(lr_1.numel() == 1, "lr: expected one number, got ", lr_1.numel());
    lr = *data<float>(lr_1, ScalarType::Float, lr_1.dim(), "lr");
    if (name == "sgd") {
      kind = sgd;
    } else {
      check(name == "rowwise_adagrad", "rule ", name, " has no C++ row function; use impl='reference'");
      check(state.size() == 1 && state[0].numel() == R && numbers.size() == 1, name, ": expected eps and sum [R]");
      kind = rowwise_adagrad;
      sum = data<float>(state[0], ScalarType::Float, 1, "sum");
      eps = static_cast<float>(numbers[0]);
    }
  }
};

INLINE void step(float* __restrict row, const float* __restrict grad, float rate, const int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) row[d] -= rate * grad[d];
}

INLINE void rowwise_adagrad(const Rule& rule, int64_t row, const float* grad, const int64_t dim) {
  const float sum = rule.sum[row] += dot(grad, grad, dim) / static_cast<float>(dim);
  step(rule.weight + row * dim, grad, rule.lr / (std::sqrt(sum) + rule.eps), dim);
}

INLINE void apply(const Rule& rule, int64_t row, const float* grad, const int64_t dim) {
  switch (rule.kind) {
    case Rule::sgd: step(rule.weight + row * dim, grad, rule.lr, dim); break;
    case Rule::rowwise_adagrad: rowwise_adagrad(rule, row, grad, dim); break;
  }
  rule.touched[row] = 1;
}

// -- inner loops: `dim` is often a constant, and CLONES hold one variant for each kind of processor ------------------

INLINE void prefetch_row(const float* row, const int64_t dim) {
  for (int64_t d = 0; d < dim && d < 128; d += 16) PREFETCH(row + d);
}

INLINE void prefetch_target(const Rule& rule, int64_t row, const int64_t dim) {
  prefetch_row(rule.weight + row * dim, dim);
  PREFETCH(rule.touched + row);
  if (rule.sum) PREFETCH(rule.sum + row);
}

INLINE void clear(float* sum, const int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) sum[d] = 0;
}

INLINE void pool_dim(const Bags& bags, const float* weight, float* out, int64_t begin, int64_t end, const int64_t dim) {
  const uint32_t* slots = bags.slots.data();
  for (int64_t b = begin; b < end; ++b) {
    float* __restrict sum = out + b * dim;
    clear(sum, dim);
    for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) {
      if (n + kAhead < bags.N) prefetch_row(weight + slots[n + kAhead] * dim, dim);
      const float* __restrict row = weight + slots[n] * dim;
      const float factor = bags.weights ? bags.weights[n] : 1.0f;
      for (int64_t d = 0; d < dim; ++d) sum[d] += row[d] * factor;
    }
    if (bags.scale)
      for (int64_t d = 0; d < dim; ++d) sum[d] *= bags.scale[b];
  }
}

CLONES void pool(const Bags& bags, const float* weight, float* out, int64_t begin, int64_t end, int64_t D) {
  FOR_DIM(D, pool_dim(bags, weight, out, begin, end, dim))
}

CLONES void dot_rows(const Bags& bags, const float* grad, const float* weight, float* out, int64_t begin, int64_t end,
                     int64_t D) {
  const uint32_t* slots = bags.slots.data();
  for (int64_t b = begin; b < end; ++b)
    for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) {
      if (n + kAhead < bags.N) prefetch_row(weight + slots[n + kAhead] * D, D);
      out[n] = dot(grad + b * D, weight + slots[n] * D, D) * (bags.scale ? bags.scale[b] : 1.0f);
    }
}

// Sum the gradients of each row that has a key in [begin, end). With a rule, `sums` is one row of scratch, which goes
// through the rule at once; without, the sums and the rows' numbers are written one after the other.
INLINE void reduce_dim(const Bags& bags, const Groups& groups, const float* grad, int64_t begin, int64_t end, float* sums,
                       int64_t* rows, const Rule* rule, const int64_t dim) {
  const uint64_t* keys = groups.keys.data();
  const uint32_t* bag = groups.bag.data();
  for (int64_t i = begin; i < end;) {
    const int64_t row = row_of(keys[i]);
    float* __restrict sum = sums;
    clear(sum, dim);
    for (; i < end && row_of(keys[i]) == row; ++i) {
      if (i + kAhead < end) {
        prefetch_row(grad + bag[position_of(keys[i + kAhead])] * dim, dim);
        if (rule) prefetch_target(*rule, row_of(keys[i + kAhead]), dim);
      }
      const int64_t n = position_of(keys[i]), b = bag[n];
      const float scale = bags.scale ? bags.scale[b] : 1.0f, factor = bags.weights ? bags.weights[n] : 1.0f;
      const float* __restrict from = grad + b * dim;
      for (int64_t d = 0; d < dim; ++d) sum[d] += from[d] * scale * factor;
    }
    if (rule) {
      apply(*rule, row, sums, dim);
    } else {
      *rows++ = row;
      sums += dim;
    }
  }
}

CLONES void reduce(const Bags& bags, const Groups& groups, const float* grad, int64_t begin, int64_t end, float* sums,
                   int64_t* rows, const Rule* rule, int64_t D) {
  FOR_DIM(D, reduce_dim(bags, groups, grad, begin, end, sums, rows, rule, dim))
}

CLONES void apply_rows(const Rule& rule, const int64_t* rows, const float* grad, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; ++u) {
    if (u + kAhead < end) prefetch_target(rule, rows[u + kAhead], rule.D);
    apply(rule, rows[u], grad + u * rule.D, rule.D);
  }
}

// -- the operators ---------------------------------------------------------------------------------------------------

const float* gradients(const Tensor& grad_BD, const Bags& bags, int64_t dim) {
  const float* grad = data<float>(grad_BD, ScalarType::Float, 2, "grad_BD");
  check(grad_BD.size(0) == bags.B && grad_BD.size(1) == dim, "grad_BD: expected ", bags.B, " x ", dim);
  return grad;
}

Tensor lookup(const Tensor& weight_RD, const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
              const MaybeTensor& scale_B) {
  const float* weight = data<float>(weight_RD, ScalarType::Float, 2, "weight_RD");
  const Bags bags(slots_N, offsets_B1, weights_N, scale_B, weight_RD.size(0));
  const int64_t D = weight_RD.size(1);
  Tensor out_BD = empty({bags.B, D}, ScalarType::Float);
  float* out = static_cast<float*>(out_BD.data_ptr());
  parallel_bags(bags, D, [&](int64_t begin, int64_t end) { pool(bags, weight, out, begin, end, D); });
  return out_BD;
}

std::tuple<Tensor, Tensor> row_gradients(const Tensor& grad_BD, const Tensor& slots_N, const Tensor& offsets_B1,
                                         const MaybeTensor& weights_N, const MaybeTensor& scale_B, int64_t num_rows) {
  const Bags bags(slots_N, offsets_B1, weights_N, scale_B, num_rows);
  const int64_t D = grad_BD.size(1);
  const float* grad = gradients(grad_BD, bags, D);
  const Groups groups(bags, num_rows, D);
  std::vector<int64_t> first{0};  // chunk -> how many rows lie before it
  for (int64_t c = 0; c < groups.chunks(); ++c) {
    int64_t count = first[c];
    for (int64_t i = groups.bounds[c]; i < groups.bounds[c + 1]; ++i)
      count += i == 0 || row_of(groups.keys[i]) != row_of(groups.keys[i - 1]);
    first.push_back(count);
  }
  Tensor rows_U = empty({first.back()}, ScalarType::Long), grad_UD = empty({first.back(), D}, ScalarType::Float);
  int64_t* rows = static_cast<int64_t*>(rows_U.data_ptr());
  float* sums = static_cast<float*>(grad_UD.data_ptr());
  parallel(groups.chunks(), [&](int64_t c) {
    reduce(bags, groups, grad, groups.bounds[c], groups.bounds[c + 1], sums + first[c] * D, rows + first[c], nullptr, D);
  });
  return {rows_U, grad_UD};
}

Tensor weight_gradients(const Tensor& grad_BD, const Tensor& weight_RD, const Tensor& slots_N, const Tensor& offsets_B1,
                        const MaybeTensor& scale_B) {
  const float* weight = data<float>(weight_RD, ScalarType::Float, 2, "weight_RD");
  const Bags bags(slots_N, offsets_B1, std::nullopt, scale_B, weight_RD.size(0));
  const int64_t D = weight_RD.size(1);
  const float* grad = gradients(grad_BD, bags, D);
  Tensor grad_N = empty({bags.N}, ScalarType::Float);
  float* out = static_cast<float*>(grad_N.data_ptr());
  parallel_bags(bags, D, [&](int64_t begin, int64_t end) { dot_rows(bags, grad, weight, out, begin, end, D); });
  return grad_N;
}

void update_rows(const Tensor& weight_RD, const std::vector<Tensor>& state, const Tensor& touched_R, const Tensor& rows_U,
                 const Tensor& grad_UD, const std::string& name, const Tensor& lr, const std::vector<double>& numbers) {
  const Rule rule(weight_RD, state, touched_R, name, lr, numbers);
  const int64_t* rows = data<int64_t>(rows_U, ScalarType::Long, 1, "rows_U");
  const float* grad = data<float>(grad_UD, ScalarType::Float, 2, "grad_UD");
  const int64_t U = rows_U.numel();
  check(grad_UD.size(0) == U && grad_UD.size(1) == rule.D, "grad_UD: expected ", U, " x ", rule.D);
  for (int64_t u = 0; u < U; ++u)  // a row named twice would be a race
    if (rows[u] < 0 || rows[u] >= rule.R || (u > 0 && rows[u] <= rows[u - 1]))
      check(false, "rows_U must ascend within [0, ", rule.R, "); got ", rows[u], " at position ", u);
  const int64_t chunks = chunk_count(U * rule.D);
  parallel(chunks, [&](int64_t c) { apply_rows(rule, rows, grad, U * c / chunks, U * (c + 1) / chunks); });
}

void fused_update(const Tensor& weight_RD, const std::vector<Tensor>& state, const Tensor& touched_R,
                  const Tensor& grad_BD, const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
                  const MaybeTensor& scale_B, const std::string& name, const Tensor& lr,
                  const std::vector<double>& numbers) {
  const Rule rule(weight_RD, state, touched_R, name, lr, numbers);
  const Bags bags(slots_N, offsets_B1, weights_N, scale_B, rule.R);
  const float* grad = gradients(grad_BD, bags, rule.D);
  const Groups groups(bags, rule.R, rule.D);
  const int64_t apart = rule.D + kLanes;  // scratch rows on cache lines of their own
  std::vector<float> scratch(groups.chunks() * apart);  // here: a failing allocation must not throw in a thread
  parallel(groups.chunks(), [&](int64_t c) {
    reduce(bags, groups, grad, groups.bounds[c], groups.bounds[c + 1], scratch.data() + c * apart, nullptr, &rule, rule.D);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("lookup(Tensor weight, Tensor slots, Tensor offsets, Tensor? weights, Tensor? scale) -> Tensor");
  m.def(
      "row_gradients(Tensor grad, Tensor slots, Tensor offsets, Tensor? weights, Tensor? scale, int num_rows)"
      " -> (Tensor, Tensor)");
  m.def("weight_gradients(Tensor grad, Tensor weight, Tensor slots, Tensor offsets, Tensor? scale) -> Tensor");
  m.def(
      "update_rows(Tensor(a!) weight, Tensor(b!)[] state, Tensor(c!) touched, Tensor rows, Tensor grad, str rule,"
      " Tensor lr, float[] numbers) -> ()");
  m.def(
      "fused_update(Tensor(a!) weight, Tensor(b!)[] state, Tensor(c!) touched, Tensor grad, Tensor slots,"
      " Tensor offsets, Tensor? weights, Tensor? scale, str rule, Tensor lr, float[] numbers) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("lookup", TORCH_BOX(&lookup));
  m.impl("row_gradients", TORCH_BOX(&row_gradients));
  m.impl("weight_gradients", TORCH_BOX(&weight_gradients));
  m.impl("update_rows", TORCH_BOX(&update_rows));
  m.impl("fused_update", TORCH_BOX(&fused_update));
}
