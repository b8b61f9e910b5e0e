// Columns of a matrix times small matrices, on CPUs. reference.py beside this file is the definition.
//
// Eight rows at a time share each vector of a weight. Rows are cut into kParts parts, and the sums over rows are taken
// part by part: any number of threads gives the same bits.

#include "../cpu.h"

#include <vector>

namespace sparrow {
namespace {

constexpr int64_t W = 16, kTogether = 8, kParts = 16;

typedef float Floats __attribute__((vector_size(W * 4)));

// The first `n` of W numbers at `from`; the others are 0.
INLINE Floats load(const float* from, int64_t n) {
  Floats v{};
  n >= W ? __builtin_memcpy(&v, from, sizeof v) : __builtin_memcpy(&v, from, n * 4);
  return v;
}
INLINE void store(float* to, const Floats& v, int64_t n) {
  n >= W ? __builtin_memcpy(to, &v, sizeof v) : __builtin_memcpy(to, &v, n * 4);
}

int64_t up(int64_t n) { return (n + W - 1) / W * W; }

struct Part {
  int64_t first, width, to, count;  // count: columns of the result
  bool adds;                        // to what an earlier part has left there
  int64_t number;                   // of the weight, or -1
  // weights with their rows filled up to whole vectors: [width][up(count)] and [count][up(width)]
  const float *by_input, *by_output;
  int64_t sums;  // where its gradient begins among those of a part of the rows
};

struct Rows {
  const float *x, *grad;
  float *out, *grad_x, *sums;
  int64_t inputs, outputs;  // columns
  const Part* parts;
  int64_t count;
};

#define UNROLL _Pragma("GCC unroll 8")

// Columns [c, c + chunks * W) of what `multiply` says.
template <int64_t rows, int64_t chunks>
INLINE void multiply_at(const float* x, int64_t stride, int64_t width, const float* matrix, int64_t padded, float* out,
                        int64_t out_stride, int64_t c, int64_t count, bool adds) {
  Floats sum[rows][chunks];
  UNROLL for (int64_t r = 0; r < rows; ++r) UNROLL for (int64_t k = 0; k < chunks; ++k) sum[r][k] =
      adds ? load(out + r * out_stride + c + k * W, count - c - k * W) : Floats{};
  for (int64_t j = 0; j < width; ++j) {
    Floats w[chunks];
    UNROLL for (int64_t k = 0; k < chunks; ++k) w[k] = load(matrix + j * padded + c + k * W, W);
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      const float each = x[r * stride + j];
      UNROLL for (int64_t k = 0; k < chunks; ++k) sum[r][k] += w[k] * each;
    }
  }
  UNROLL for (int64_t r = 0; r < rows; ++r) UNROLL for (int64_t k = 0; k < chunks; ++k)
      store(out + r * out_stride + c + k * W, sum[r][k], count - c - k * W);
}

// out [rows, count] = x [rows, width] * matrix [width][up(count)].
template <int64_t rows>
INLINE void multiply(const float* x, int64_t stride, int64_t width, const float* matrix, float* out, int64_t out_stride,
                     int64_t count, bool adds) {
  const int64_t padded = (count + W - 1) / W * W;
  int64_t c = 0;
  for (; c + W < count; c += 2 * W)
    multiply_at<rows, 2>(x, stride, width, matrix, padded, out, out_stride, c, count, adds);
  if (c < count) multiply_at<rows, 1>(x, stride, width, matrix, padded, out, out_stride, c, count, adds);
}

INLINE void move(const float* from, float* to, int64_t count, bool adds) {
  for (int64_t c = 0; c < count; c += W) {
    const int64_t n = count - c;
    store(to + c, adds ? load(to + c, n) + load(from + c, n) : load(from + c, n), n);
  }
}

FOR_PROCESSORS void forward(const Rows& a, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end;) {
    const int64_t rows = end - b >= kTogether ? kTogether : 1;
    for (int64_t i = 0; i < a.count; ++i) {
      const Part& p = a.parts[i];
      const float* x = a.x + b * a.inputs + p.first;
      float* out = a.out + b * a.outputs + p.to;
      if (p.number < 0) {
        for (int64_t r = 0; r < rows; ++r) move(x + r * a.inputs, out + r * a.outputs, p.count, p.adds);
      } else if (rows == kTogether) {
        multiply<kTogether>(x, a.inputs, p.width, p.by_input, out, a.outputs, p.count, p.adds);
      } else {
        multiply<1>(x, a.inputs, p.width, p.by_input, out, a.outputs, p.count, p.adds);
      }
    }
    b += rows;
  }
}

// sums [width][up(count)] += x^T grad, over `rows` rows.
template <int64_t rows>
INLINE void outer(const float* x, int64_t stride, const float* grad, int64_t grad_stride, const Part& p, float* sums) {
  const int64_t padded = (p.count + W - 1) / W * W;
  for (int64_t c = 0; c < p.count; c += W) {
    Floats g[rows];
    UNROLL for (int64_t r = 0; r < rows; ++r) g[r] = load(grad + r * grad_stride + c, p.count - c);
    for (int64_t j = 0; j < p.width; ++j) {
      Floats more = g[0] * x[j];
      UNROLL for (int64_t r = 1; r < rows; ++r) more += g[r] * x[r * stride + j];
      store(sums + j * padded + c, load(sums + j * padded + c, W) + more, W);
    }
  }
}

FOR_PROCESSORS void backward(const Rows& a, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end;) {
    const int64_t rows = end - b >= kTogether ? kTogether : 1;
    for (int64_t i = 0; i < a.count; ++i) {
      const Part& p = a.parts[i];
      const float *x = a.x + b * a.inputs + p.first, *grad = a.grad + b * a.outputs + p.to;
      float* grad_x = a.grad_x + b * a.inputs + p.first;
      if (p.number < 0) {
        for (int64_t r = 0; r < rows; ++r) move(grad + r * a.outputs, grad_x + r * a.inputs, p.width, false);
      } else if (rows == kTogether) {
        multiply<kTogether>(grad, a.outputs, p.count, p.by_output, grad_x, a.inputs, p.width, false);
        outer<kTogether>(x, a.inputs, grad, a.outputs, p, a.sums + p.sums);
      } else {
        multiply<1>(grad, a.outputs, p.count, p.by_output, grad_x, a.inputs, p.width, false);
        outer<1>(x, a.inputs, grad, a.outputs, p, a.sums + p.sums);
      }
    }
    b += rows;
  }
}

const float* matrix_of(const Tensor& t, const char* name) {
  check(t.scalar_type() == ScalarType::Float && t.dim() == 2 && t.is_contiguous(), name,
        ": expected a contiguous float32 matrix");
  return static_cast<const float*>(t.data_ptr());
}

// The parts of a call, and their weights filled up.
struct Parts {
  std::vector<Part> all;
  std::vector<float> filled;
  int64_t sums = 0;  // floats of all weights' gradients
  int64_t work = 0;  // multiplications a row

  Parts(const std::vector<Tensor>& weights, const std::vector<int64_t>& numbers, int64_t inputs, int64_t outputs) {
    check(numbers.size() % 4 == 0, "parts: expected four numbers for each");
    std::vector<bool> reached(outputs), used(weights.size()), taken(inputs);
    std::vector<int64_t> at;
    for (size_t i = 0; i < numbers.size(); i += 4) {
      Part p{numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 1], false, numbers[i + 3], nullptr, nullptr, sums};
      check(p.first >= 0 && p.width >= 1 && p.width <= inputs - p.first && p.number >= -1 &&
                p.number < static_cast<int64_t>(weights.size()),
            "parts: one names columns or a weight that are not there");
      if (p.number >= 0) {
        const float* weight = matrix_of(weights[p.number], "weights");
        check(weights[p.number].size(1) == p.width && weights[p.number].size(0) >= 1,
              "weights: expected as many columns as the part has that names one");
        used[p.number] = true;
        p.count = weights[p.number].size(0);
        const int64_t wide = up(p.count), narrow = up(p.width);
        at.push_back(static_cast<int64_t>(filled.size()));
        filled.resize(filled.size() + p.width * wide + p.count * narrow);
        float *by_input = filled.data() + at.back(), *by_output = by_input + p.width * wide;
        for (int64_t k = 0; k < p.count; ++k)
          for (int64_t j = 0; j < p.width; ++j)
            by_input[j * wide + k] = by_output[k * narrow + j] = weight[k * p.width + j];
        sums += p.width * wide;
        work += p.width * p.count;
      }
      check(p.to >= 0 && p.count <= outputs - p.to, "parts: one goes to columns that are not there");
      p.adds = reached[p.to];
      for (int64_t c = p.to; c < p.to + p.count; ++c) {
        check(reached[c] == p.adds, "parts: one goes to columns of which another has some");
        reached[c] = true;
      }
      for (int64_t c = p.first; c < p.first + p.width; ++c) {
        check(!taken[c], "parts: two take the same columns");
        taken[c] = true;
      }
      all.push_back(p);
    }
    for (bool is : reached) check(is, "parts: they do not reach all columns");
    for (bool is : taken) check(is, "parts: they do not take all columns");
    for (bool is : used) check(is, "weights: one is in no part");
    size_t next = 0;
    for (Part& p : all)
      if (p.number >= 0) {
        p.by_input = filled.data() + at[next++];
        p.by_output = p.by_input + p.width * up(p.count);
      }
  }
};

Tensor project(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<int64_t>& numbers,
               int64_t columns) {
  Rows a{};
  a.x = matrix_of(x, "x");
  check(columns >= 0, "columns: negative");
  const Parts parts(weights, numbers, x.size(1), columns);
  Tensor out = empty({x.size(0), columns}, ScalarType::Float);
  a.out = static_cast<float*>(out.data_ptr());
  a.inputs = x.size(1);
  a.outputs = columns;
  a.parts = parts.all.data();
  a.count = static_cast<int64_t>(parts.all.size());
  const int64_t B = x.size(0), team = team_for(B * (parts.work + columns));
  // cut as backward does: a row alone and one of four are summed alike, but whole groups are faster
  parallel(team, [&](int64_t c) {
    forward(a, B * c / team / kTogether * kTogether, c + 1 < team ? B * (c + 1) / team / kTogether * kTogether : B);
  });
  return out;
}

std::vector<Tensor> project_backward(const Tensor& grad, const Tensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<int64_t>& numbers) {
  Rows a{};
  a.x = matrix_of(x, "x");
  a.grad = matrix_of(grad, "grad");
  check(grad.size(0) == x.size(0), "grad: expected as many rows as x has");
  const Parts parts(weights, numbers, x.size(1), grad.size(1));
  const int64_t B = x.size(0);
  std::vector<Tensor> found{empty({B, x.size(1)}, ScalarType::Float)};
  a.grad_x = static_cast<float*>(found[0].data_ptr());
  a.inputs = x.size(1);
  a.outputs = grad.size(1);
  a.parts = parts.all.data();
  a.count = static_cast<int64_t>(parts.all.size());
  std::vector<float> sums(kParts * parts.sums);
  const int64_t team = std::min(team_for(2 * B * (parts.work + a.outputs)), kParts);
  const auto edge = [&](int64_t part) { return part < kParts ? B * part / kParts / kTogether * kTogether : B; };
  parallel(team, [&](int64_t c) {
    for (int64_t part = kParts * c / team; part < kParts * (c + 1) / team; ++part) {
      Rows mine = a;
      mine.sums = sums.data() + part * parts.sums;
      backward(mine, edge(part), edge(part + 1));
    }
  });
  for (const Tensor& weight : weights) {
    found.push_back(empty({weight.size(0), weight.size(1)}, ScalarType::Float));
    std::fill_n(static_cast<float*>(found.back().data_ptr()), weight.numel(), 0.0f);
  }
  for (const Part& p : parts.all) {
    if (p.number < 0) continue;
    float* out = static_cast<float*>(found[1 + p.number].data_ptr());
    for (int64_t k = 0; k < p.count; ++k)
      for (int64_t j = 0; j < p.width; ++j) {
        float sum = 0;
        for (int64_t part = 0; part < kParts; ++part) sum += sums[part * parts.sums + p.sums + j * up(p.count) + k];
        out[k * p.width + j] += sum;  // several parts may have a weight
      }
  }
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("project(Tensor x, Tensor[] weights, int[] parts, int columns) -> Tensor");
  m.def("project_backward(Tensor grad, Tensor x, Tensor[] weights, int[] parts) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("project", TORCH_BOX(&project));
  m.impl("project_backward", TORCH_BOX(&project_backward));
}

}  // namespace sparrow
