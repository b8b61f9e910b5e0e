// Bags of slots on one table: the same operators as reference.py, for CPUs, against torch's stable ABI.
//
// Rows are summed by one thread each, in order of occurrence, without atomics: any number of threads gives the same
// bits. Built with -ffp-contract=off, so that products are rounded as the reference rounds them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
// one copy for each instruction set, chosen when the library is loaded
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_CPU
#endif

constexpr int64_t kAhead = 8;           // how many rows ahead of their use to ask memory for them
constexpr int64_t kGrainFloats = 1 << 15;  // least work worth another thread

INLINE void prefetch_row(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

struct Bags {
  const void* slots;
  bool wide;  // slots are int64, not int32
  const int64_t* offsets;
  const float* weights;  // may be null
  const float* scale;    // may be null
  int64_t values, bags;

  int64_t slot(int64_t n) const {
    return wide ? static_cast<const int64_t*>(slots)[n] : static_cast<const int32_t*>(slots)[n];
  }
};

void check_float(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous(), name, ": expected contiguous float32");
}

const float* floats(const std::optional<Tensor>& t, int64_t count, const char* name) {
  if (!t.has_value()) return nullptr;
  check_float(*t, name);
  STD_TORCH_CHECK(t->numel() == count, name, ": expected ", count, " values, got ", t->numel());
  return t->const_data_ptr<float>();
}

Bags make_bags(const Tensor& slots, const Tensor& offsets, const std::optional<Tensor>& weights,
               const std::optional<Tensor>& scale) {
  const bool wide = slots.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || slots.scalar_type() == ScalarType::Int, "slots: expected int32 or int64");
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Long && offsets.numel() > 0, "offsets: expected int64 [B + 1]");
  STD_TORCH_CHECK(slots.is_contiguous() && offsets.is_contiguous(), "slots, offsets: expected contiguous tensors");
  const int64_t values = slots.numel(), bags = offsets.numel() - 1;
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  bool fits = at[0] == 0 && at[bags] == values;
  for (int64_t b = 0; b < bags; ++b) fits &= at[b] <= at[b + 1];
  STD_TORCH_CHECK(fits, "offsets: they must rise from 0 to the number of slots, ", values);
  return {slots.const_data_ptr(), wide, at, floats(weights, values, "weights"), floats(scale, bags, "scale"), values, bags};
}

void check_slots(const Bags& bags, int64_t rows) {
  std::atomic<int64_t> first{bags.values};
  torch::stable::parallel_for(0, bags.values, kGrainFloats, [&](int64_t low, int64_t high) {
    for (int64_t n = low; n < high; ++n) {
      if (static_cast<uint64_t>(bags.slot(n)) >= static_cast<uint64_t>(rows)) {
        int64_t seen = first.load();
        while (n < seen && !first.compare_exchange_weak(seen, n)) {
        }
        return;
      }
    }
  });
  const int64_t n = first.load();
  STD_TORCH_CHECK(n == bags.values, "slot ", bags.slot(n), " at position ", n, " is outside [0, ", rows, ")");
}

int64_t grain(int64_t dim, int64_t values, int64_t items) {
  const int64_t floats_per_item = std::max<int64_t>(1, dim * std::max<int64_t>(1, values / std::max<int64_t>(1, items)));
  return std::max<int64_t>(1, kGrainFloats / floats_per_item);
}

// -- lookup --------------------------------------------------------------------------------------------------------

template <class Slot>
INLINE void lookup_dim(const float* table, const Bags& bags, float* out, int64_t low, int64_t high, const int64_t dim) {
  const Slot* slots = static_cast<const Slot*>(bags.slots);
  for (int64_t b = low; b < high; ++b) {
    float* sum = out + b * dim;
    for (int64_t d = 0; d < dim; ++d) sum[d] = 0.0f;
    for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) {
      if (n + kAhead < bags.values) prefetch_row(table + slots[n + kAhead] * dim, dim);
      const float* row = table + slots[n] * dim;
      const float weight = bags.weights ? bags.weights[n] : 1.0f;
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * row[d];
    }
    if (bags.scale)
      for (int64_t d = 0; d < dim; ++d) sum[d] *= bags.scale[b];
  }
}

// Dims that occur most get code of their own: the compiler knows the length of their loops.
#define FOR_DIM(CALL)                   \
  switch (dim) {                        \
    case 4: CALL(4); break;             \
    case 8: CALL(8); break;             \
    case 16: CALL(16); break;           \
    case 32: CALL(32); break;           \
    case 64: CALL(64); break;           \
    case 128: CALL(128); break;         \
    default: CALL(dim);                 \
  }

EVERY_CPU void lookup_range(const float* table, const Bags& bags, float* out, int64_t low, int64_t high, int64_t dim) {
#define CALL(D)                                                    \
  if (bags.wide) lookup_dim<int64_t>(table, bags, out, low, high, D); \
  else lookup_dim<int32_t>(table, bags, out, low, high, D)
  FOR_DIM(CALL)
#undef CALL
}

Tensor lookup(const Tensor& weight, const Tensor& slots, const Tensor& offsets, const std::optional<Tensor>& weights,
              const std::optional<Tensor>& scale) {
  check_float(weight, "weight");
  const Bags bags = make_bags(slots, offsets, weights, scale);
  const int64_t dim = weight.size(1);
  check_slots(bags, weight.size(0));
  Tensor out = torch::stable::new_empty(weight, {bags.bags, dim});
  const float* table = weight.const_data_ptr<float>();
  float* sums = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, bags.bags, grain(dim, bags.values, bags.bags), [&](int64_t low, int64_t high) {
    lookup_range(table, bags, sums, low, high, dim);
  });
  return out;
}

// -- gradients of rows ---------------------------------------------------------------------------------------------

// Lookups grouped by row: order[start[u] .. start[u + 1]) are the positions that look row[u] up, rising.
struct Groups {
  std::vector<uint32_t> order, bag;
  std::vector<int64_t> row, start;
};

constexpr int kDigit = 11;  // bits sorted by in one pass

Groups group(const Bags& bags, int64_t rows) {
  STD_TORCH_CHECK(bags.values < std::numeric_limits<uint32_t>::max(), "more than 2^32 lookups in one call; split the batch");
  const int64_t count = bags.values;
  Groups out;
  out.bag.resize(count);
  for (int64_t b = 0; b < bags.bags; ++b)
    for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) out.bag[n] = static_cast<uint32_t>(b);
  std::vector<uint64_t> key(count), key2(count);
  std::vector<uint32_t> order2(count);
  out.order.resize(count);
  std::iota(out.order.begin(), out.order.end(), 0);
  for (int64_t n = 0; n < count; ++n) key[n] = static_cast<uint64_t>(bags.slot(n));
  for (int shift = 0; shift < 64 && (static_cast<uint64_t>(rows - 1) >> shift) != 0; shift += kDigit) {
    int64_t place[(1 << kDigit) + 1] = {};
    constexpr uint64_t mask = (1 << kDigit) - 1;
    for (int64_t n = 0; n < count; ++n) ++place[((key[n] >> shift) & mask) + 1];
    for (int64_t i = 0; i < (1 << kDigit); ++i) place[i + 1] += place[i];
    for (int64_t n = 0; n < count; ++n) {  // stable: equal rows keep their order of occurrence
      const int64_t to = place[(key[n] >> shift) & mask]++;
      key2[to] = key[n];
      order2[to] = out.order[n];
    }
    key.swap(key2);
    out.order.swap(order2);
  }
  for (int64_t n = 0; n < count; ++n) {
    if (n == 0 || key[n] != key[n - 1]) {
      out.row.push_back(static_cast<int64_t>(key[n]));
      out.start.push_back(n);
    }
  }
  out.start.push_back(count);
  return out;
}

// Calls work(first row, last row) on ranges of about equal numbers of lookups: a hot row is as heavy as its lookups.
template <class Work>
void for_groups(const Groups& groups, int64_t dim, const Work& work) {
  const int64_t count = static_cast<int64_t>(groups.order.size());
  const int64_t least = std::max<int64_t>(1, kGrainFloats / dim);
  const int64_t pieces = std::clamp<int64_t>(count / least, 1, 4 * torch::stable::get_num_threads());
  auto first_row = [&](int64_t piece) {
    return std::lower_bound(groups.start.begin(), groups.start.end() - 1, count * piece / pieces) - groups.start.begin();
  };
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t low, int64_t high) { work(first_row(low), first_row(high)); });
}

INLINE void sum_group(const Bags& bags, const Groups& groups, const float* grad, int64_t u, float* sum, const int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) sum[d] = 0.0f;
  for (int64_t i = groups.start[u]; i < groups.start[u + 1]; ++i) {
    const int64_t n = groups.order[i];
    if (i + kAhead < static_cast<int64_t>(groups.order.size()))
      prefetch_row(grad + static_cast<int64_t>(groups.bag[groups.order[i + kAhead]]) * dim, dim);
    const int64_t b = groups.bag[n];
    const float* g = grad + b * dim;
    const float scale = bags.scale ? bags.scale[b] : 1.0f;
    const float weight = bags.weights ? bags.weights[n] : 1.0f;
    for (int64_t d = 0; d < dim; ++d) sum[d] += (g[d] * scale) * weight;
  }
}

EVERY_CPU void sum_groups(const Bags& bags, const Groups& groups, const float* grad, int64_t low, int64_t high, float* out,
                          int64_t dim) {
#define CALL(D) \
  for (int64_t u = low; u < high; ++u) sum_group(bags, groups, grad, u, out + u * D, D)
  FOR_DIM(CALL)
#undef CALL
}

const float* check_grad(const Tensor& grad, const Bags& bags) {
  check_float(grad, "grad");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == bags.bags, "grad: expected one row for each of ", bags.bags, " bags");
  return grad.const_data_ptr<float>();
}

std::tuple<Tensor, Tensor> row_gradients(const Tensor& grad, const Tensor& slots, const Tensor& offsets,
                                         const std::optional<Tensor>& weights, const std::optional<Tensor>& scale,
                                         int64_t num_rows) {
  const Bags bags = make_bags(slots, offsets, weights, scale);
  const float* g = check_grad(grad, bags);
  const int64_t dim = grad.size(1);
  check_slots(bags, num_rows);
  const Groups groups = group(bags, num_rows);
  const int64_t unique = static_cast<int64_t>(groups.row.size());
  Tensor rows = torch::stable::new_empty(offsets, {unique});
  Tensor sums = torch::stable::new_empty(grad, {unique, dim});
  std::copy(groups.row.begin(), groups.row.end(), rows.mutable_data_ptr<int64_t>());
  float* out = sums.mutable_data_ptr<float>();
  for_groups(groups, dim, [&](int64_t low, int64_t high) { sum_groups(bags, groups, g, low, high, out, dim); });
  return {rows, sums};
}

// -- gradients of per-lookup weights -------------------------------------------------------------------------------

EVERY_CPU void dot_range(const float* table, const Bags& bags, const float* grad, float* out, int64_t low, int64_t high,
                         int64_t dim) {
  for (int64_t b = low; b < high; ++b) {
    const float* g = grad + b * dim;
    for (int64_t n = bags.offsets[b]; n < bags.offsets[b + 1]; ++n) {
      const float* row = table + bags.slot(n) * dim;
      float dot = 0.0f;
      for (int64_t d = 0; d < dim; ++d) dot += g[d] * row[d];
      out[n] = bags.scale ? bags.scale[b] * dot : dot;
    }
  }
}

Tensor weight_gradients(const Tensor& grad, const Tensor& weight, const Tensor& slots, const Tensor& offsets,
                        const std::optional<Tensor>& scale) {
  check_float(weight, "weight");
  const Bags bags = make_bags(slots, offsets, std::nullopt, scale);
  const float* g = check_grad(grad, bags);
  const int64_t dim = weight.size(1);
  check_slots(bags, weight.size(0));
  Tensor out = torch::stable::new_empty(grad, {bags.values});
  const float* table = weight.const_data_ptr<float>();
  float* dots = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, bags.bags, grain(dim, bags.values, bags.bags), [&](int64_t low, int64_t high) {
    dot_range(table, bags, g, dots, low, high, dim);
  });
  return out;
}

// -- rules: how a row learns from its whole gradient; a new one is a struct and a line in with_rule -------------------

struct Sgd {
  float lr;
  INLINE void operator()(float* row, const float* g, int64_t, const int64_t dim) const {
    for (int64_t d = 0; d < dim; ++d) row[d] -= lr * g[d];
  }
};

struct RowWiseAdaGrad {
  float lr, eps;
  float* sum;
  INLINE void operator()(float* row, const float* g, int64_t r, const int64_t dim) const {
    float lanes[16] = {};  // sixteen sums, so that the compiler may vectorise without reordering any
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16)
      for (int64_t i = 0; i < 16; ++i) lanes[i] += g[d + i] * g[d + i];
    for (int64_t i = 0; d < dim; ++d, ++i) lanes[i] += g[d] * g[d];
    float squares = 0.0f;
    for (float lane : lanes) squares += lane;
    sum[r] += squares / static_cast<float>(dim);
    const float step = lr / (std::sqrt(sum[r]) + eps);
    for (int64_t e = 0; e < dim; ++e) row[e] -= step * g[e];
  }
};

struct Target {
  float* weight;
  uint8_t* touched;
  int64_t rows, dim;
  std::vector<float*> state;
};

Target make_target(Tensor& weight, std::vector<Tensor>& state, Tensor& touched) {
  check_float(weight, "weight");
  STD_TORCH_CHECK(touched.scalar_type() == ScalarType::Byte && touched.numel() == weight.size(0), "touched: expected uint8 [R]");
  Target to{weight.mutable_data_ptr<float>(), touched.mutable_data_ptr<uint8_t>(), weight.size(0), weight.size(1), {}};
  for (Tensor& field : state) {
    check_float(field, "state");
    to.state.push_back(field.mutable_data_ptr<float>());
  }
  return to;
}

template <class Work>
void with_rule(const std::string& rule, const Target& to, const Tensor& lr_tensor, double eps, const Work& work) {
  check_float(lr_tensor, "lr");
  const float lr = *lr_tensor.const_data_ptr<float>();
  const size_t fields = to.state.size();
  if (rule == "sgd" && fields == 0) return work(Sgd{lr});
  if (rule == "rowwise_adagrad" && fields == 1) return work(RowWiseAdaGrad{lr, static_cast<float>(eps), to.state[0]});
  STD_TORCH_CHECK(false, "rule: no C++ code for '", rule, "' with ", fields, " state fields");
}

// Where a row's gradient comes from: handed in, or summed on the spot.
struct Given {
  const float* grad;
  INLINE const float* operator()(int64_t u, float*, const int64_t dim) const { return grad + u * dim; }
};

struct Summed {
  const Bags& bags;
  const Groups& groups;
  const float* grad;
  INLINE const float* operator()(int64_t u, float* scratch, const int64_t dim) const {
    sum_group(bags, groups, grad, u, scratch, dim);
    return scratch;
  }
};

template <class Rule, class Source>
INLINE void update_range(const Target& to, const int64_t* rows, int64_t low, int64_t high, const Rule& rule,
                         const Source& source) {
  const int64_t dim = to.dim;
  std::vector<float> scratch(dim);
#define CALL(D)                                                                          \
  for (int64_t u = low; u < high; ++u) {                                                 \
    if (u + 2 < high) prefetch_row(to.weight + rows[u + 2] * D, D);                      \
    rule(to.weight + rows[u] * D, source(u, scratch.data(), D), rows[u], D);             \
    to.touched[rows[u]] = 1;                                                             \
  }
  FOR_DIM(CALL)
#undef CALL
}

#define UPDATE(RULE, SOURCE)                                                                              \
  EVERY_CPU void update(const Target& to, const int64_t* rows, int64_t low, int64_t high, const RULE& rule, \
                        const SOURCE& source) {                                                           \
    update_range(to, rows, low, high, rule, source);                                                      \
  }
UPDATE(Sgd, Given)
UPDATE(Sgd, Summed)
UPDATE(RowWiseAdaGrad, Given)
UPDATE(RowWiseAdaGrad, Summed)
#undef UPDATE

void update_rows(Tensor weight, std::vector<Tensor> state, Tensor touched, const Tensor& rows, const Tensor& grad,
                 std::string rule, const Tensor& lr, double eps) {
  const Target to = make_target(weight, state, touched);
  check_float(grad, "grad");
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous(), "rows: expected contiguous int64");
  STD_TORCH_CHECK(grad.numel() == rows.numel() * to.dim, "grad: expected [U, D] for ", rows.numel(), " rows");
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t u = 0; u < rows.numel(); ++u) {
    const bool fits = row[u] >= 0 && row[u] < to.rows && (u == 0 || row[u - 1] < row[u]);
    STD_TORCH_CHECK(fits, "rows: ", row[u], " at position ", u, " is outside [0, ", to.rows, ") or not above the one before");
  }
  const Given source{grad.const_data_ptr<float>()};
  with_rule(rule, to, lr, eps, [&](const auto& r) {
    torch::stable::parallel_for(0, rows.numel(), grain(to.dim, 1, 1), [&](int64_t low, int64_t high) {
      update(to, row, low, high, r, source);
    });
  });
}

void fused_update(Tensor weight, std::vector<Tensor> state, Tensor touched, const Tensor& grad, const Tensor& slots,
                  const Tensor& offsets, const std::optional<Tensor>& weights, const std::optional<Tensor>& scale,
                  std::string rule, const Tensor& lr, double eps) {
  const Target to = make_target(weight, state, touched);
  const Bags bags = make_bags(slots, offsets, weights, scale);
  const float* g = check_grad(grad, bags);
  STD_TORCH_CHECK(grad.size(1) == to.dim, "grad: dim ", grad.size(1), " for a table of dim ", to.dim);
  check_slots(bags, to.rows);
  const Groups groups = group(bags, to.rows);
  const Summed source{bags, groups, g};
  with_rule(rule, to, lr, eps, [&](const auto& r) {
    for_groups(groups, to.dim, [&](int64_t low, int64_t high) { update(to, groups.row.data(), low, high, r, source); });
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
      " Tensor lr, float eps) -> ()");
  m.def(
      "fused_update(Tensor(a!) weight, Tensor(b!)[] state, Tensor(c!) touched, Tensor grad, Tensor slots,"
      " Tensor offsets, Tensor? weights, Tensor? scale, str rule, Tensor lr, float eps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("lookup", TORCH_BOX(&lookup));
  m.impl("row_gradients", TORCH_BOX(&row_gradients));
  m.impl("weight_gradients", TORCH_BOX(&weight_gradients));
  m.impl("update_rows", TORCH_BOX(&update_rows));
  m.impl("fused_update", TORCH_BOX(&fused_update));
}
