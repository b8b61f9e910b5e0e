// The sums of the leaves that rows fall into, on CPUs. reference.py beside this file is the definition.
//
// A row walks down a tree alone and stops at its leaf. Eight rows walk together, so that one waits for memory while the
// others go on.

#include "../cpu.h"

namespace sparrow {
namespace {

constexpr int64_t kTogether = 8;

struct Node {
  double threshold;
  int32_t input, left, right, set;
};

struct Forest {
  std::vector<Node> nodes;
  const float* values;
  const uint8_t* sets;
  const int64_t* roots;
  int64_t trees, tasks, inputs, width, depth;
};

template <class T>
const T* data_of(const Tensor& t, ScalarType type, int64_t dims, const char* name) {
  check(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), name, ": of another type or shape");
  return static_cast<const T*>(t.data_ptr());
}

Forest read(const std::vector<Tensor>& of, int64_t inputs, int64_t depth) {
  check(of.size() == 8, "trees: expected eight tensors");
  const int64_t count = of[0].numel(), sets = of[6].size(0);
  for (size_t i : {1, 2, 3, 5}) check(of[i].numel() == count, "trees: nodes differ in number");
  check(of[4].size(0) == count && count < (int64_t{1} << 31), "trees: nodes differ in number");
  const auto *input = data_of<int64_t>(of[0], ScalarType::Long, 1, "input"),
             *left = data_of<int64_t>(of[2], ScalarType::Long, 1, "left"),
             *right = data_of<int64_t>(of[3], ScalarType::Long, 1, "right"),
             *set = data_of<int64_t>(of[5], ScalarType::Long, 1, "set");
  const auto* threshold = data_of<double>(of[1], ScalarType::Double, 1, "threshold");
  Forest f{};
  f.values = data_of<float>(of[4], ScalarType::Float, 2, "value");
  f.sets = data_of<uint8_t>(of[6], ScalarType::Byte, 2, "sets");
  f.roots = data_of<int64_t>(of[7], ScalarType::Long, 1, "root");
  f.trees = of[7].numel();
  f.tasks = of[4].size(1);
  f.inputs = inputs;
  f.width = of[6].size(1);
  f.depth = depth;
  const auto is_node = [&](int64_t at) { return at >= 0 && at < count; };
  for (int64_t g = 0; g < f.trees; ++g) check(is_node(f.roots[g]), "root: names a node that is not there");
  f.nodes.reserve(count);
  for (int64_t m = 0; m < count; ++m) {
    check(is_node(left[m]) && is_node(right[m]), "node ", m, ": leads to a node that is not there");
    check(input[m] >= 0 && input[m] < inputs, "node ", m, ": reads an input that is not there");
    check(set[m] >= -1 && set[m] < sets, "node ", m, ": has a set that is not there");
    f.nodes.push_back({threshold[m], static_cast<int32_t>(input[m]), static_cast<int32_t>(left[m]),
                       static_cast<int32_t>(right[m]), static_cast<int32_t>(set[m])});
  }
  return f;
}

bool is_member(const Forest& f, int32_t set, double x) {
  const double last = static_cast<double>(f.width - 1);
  const int64_t id = x > 0 ? static_cast<int64_t>(std::min(x, last)) : 0;  // of NaN 0
  return f.sets[set * f.width + id] > 0;
}

// Adds to sums [rows, T] what the trees give for rows whose inputs begin at x.
template <int64_t rows>
void add(const Forest& f, const double* x, double* sums) {
  for (int64_t g = 0; g < f.trees; ++g) {
    int32_t at[rows];
    std::fill_n(at, rows, static_cast<int32_t>(f.roots[g]));
    bool moved = true;
    for (int64_t d = 0; d < f.depth && moved; ++d) {
      moved = false;
      for (int64_t r = 0; r < rows; ++r) {
        const Node& node = f.nodes[at[r]];
        const double value = x[r * f.inputs + node.input];
        const bool is_left = node.set < 0 ? value <= node.threshold : is_member(f, node.set, value);
        const int32_t next = is_left ? node.left : node.right;
        moved |= next != at[r];
        at[r] = next;
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t < f.tasks; ++t) sums[r * f.tasks + t] += f.values[at[r] * f.tasks + t];
  }
}

Tensor sum_of_leaves(const std::vector<Tensor>& trees, const Tensor& inputs, int64_t depth) {
  const double* x = data_of<double>(inputs, ScalarType::Double, 2, "inputs");
  const Forest f = read(trees, inputs.size(1), depth);
  const int64_t B = inputs.size(0);
  Tensor out = empty({B, f.tasks}, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  std::vector<double> sums(B * f.tasks);
  const int64_t team = team_for(B * f.trees * depth);
  parallel(team, [&](int64_t c) {
    int64_t b = B * c / team;
    const int64_t end = B * (c + 1) / team;
    for (; b + kTogether <= end; b += kTogether) add<kTogether>(f, x + b * f.inputs, sums.data() + b * f.tasks);
    for (; b < end; ++b) add<1>(f, x + b * f.inputs, sums.data() + b * f.tasks);
  });
  for (int64_t i = 0; i < B * f.tasks; ++i) to[i] = static_cast<float>(sums[i]);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("sum_of_leaves(Tensor[] trees, Tensor inputs, int depth) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) { m.impl("sum_of_leaves", TORCH_BOX(&sum_of_leaves)); }

}  // namespace sparrow
