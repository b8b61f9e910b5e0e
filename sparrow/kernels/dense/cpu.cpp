// The operators between two matrix products on CPUs. reference.py beside this file is their definition.
//
// Rows are shared out in blocks of kRows, and sums over rows are taken block by block: any number of threads gives the
// same bits.

#include "../cpu.h"
#include "../lanes.h"
#include "amx.h"

#include <cmath>
#include <tuple>
#include <vector>

namespace sparrow {
namespace {

constexpr int64_t kRows = 128;

// -- some rows of each operator --------------------------------------------------------------------------------------

struct Cross {
  const void *x0, *x, *product;
  const float* bias;
  void* out;
  int64_t width;
  bool past;
};

template <class T>
INLINE void cross_rows(const Cross& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < a.width; c += W) {
      const int64_t i = r * a.width + c, n = a.width - c < W ? a.width - c : W;
      const Floats y = load((const T*)a.product + i, n) + load(a.bias + c, n);
      store((T*)a.out + i, load((const T*)a.x + i, n) + load((const T*)a.x0 + i, n) * y, n, a.past);
    }
  fence(a.past);
}

struct CrossBackward {
  const void *grad, *x0, *product;
  const float* bias;
  void *grad_x0, *flowing;
  float* sums;  // [blocks, width]
  int64_t width;
  bool first, last, past;
};

template <class T>
INLINE void cross_backward_rows(const CrossBackward& a, float* sums, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < a.width; c += W) {
      const int64_t i = r * a.width + c, n = a.width - c < W ? a.width - c : W;
      const Floats g = load((const T*)a.grad + i, n), flowing = g * load((const T*)a.x0 + i, n);
      Floats to_x0 = g * (load((const T*)a.product + i, n) + load(a.bias + c, n));
      if (!a.last) to_x0 = load((const T*)a.grad_x0 + i, n) + to_x0;
      if (a.first) to_x0 = to_x0 + g;
      store((T*)a.grad_x0 + i, to_x0, n, a.past && a.last);
      store((T*)a.flowing + i, flowing, n, a.past);
      store(sums + c, load(sums + c, n) + flowing, n);
    }
  fence(a.past);
}

struct Relu {
  void* y;
  const float* bias;
  int64_t width;
};

template <class T>
INLINE void relu_rows(const Relu& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < a.width; c += W) {
      const int64_t i = r * a.width + c, n = a.width - c < W ? a.width - c : W;
      const Floats y = load((const T*)a.y + i, n) + load(a.bias + c, n);
      store((T*)a.y + i, (Floats)((Words)y & ~(Words)(y < 0)), n);
    }
}

struct ReluBackward {
  const void *grad, *y;
  void* flowing;
  int64_t width;
  bool past;
};

template <class T>
INLINE void relu_backward_rows(const ReluBackward& a, float* sums, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < a.width; c += W) {
      const int64_t i = r * a.width + c, n = a.width - c < W ? a.width - c : W;
      const Words dead = (Words)(load((const T*)a.y + i, n) <= 0);
      const Floats flowing = (Floats)((Words)load((const T*)a.grad + i, n) & ~dead);
      store((T*)a.flowing + i, flowing, n, a.past);
      store(sums + c, load(sums + c, n) + flowing, n);
    }
  fence(a.past);
}

struct Beside {
  const float *numbers, *weight, *rest;
  void *wide, *narrow;
  int64_t columns, dim, padded, others;
};

template <class T>
INLINE void beside_rows(const Beside& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* wide = (T*)a.wide + r * (a.columns * a.dim + a.others);
    T* narrow = (T*)a.narrow + r * (a.padded + a.others);
    const float *x = a.numbers + r * a.columns, *rest = a.rest + r * a.others;
    for (int64_t c = 0; c < a.columns; ++c)
      for (int64_t d = 0; d < a.dim; d += W) {
        const int64_t n = a.dim - d < W ? a.dim - d : W;
        store(wide + c * a.dim + d, load(a.weight + c * a.dim + d, n) * x[c], n);
      }
    for (int64_t c = 0; c < a.padded; c += W)
      store(narrow + c, c < a.columns ? load(x + c, a.columns - c < W ? a.columns - c : W) : Floats{}, W);
    for (int64_t c = 0; c < a.others; c += W) {
      const int64_t n = a.others - c < W ? a.others - c : W;
      const Floats v = load(rest + c, n);
      store(wide + a.columns * a.dim + c, v, n);
      store(narrow + a.padded + c, v, n);
    }
  }
}

struct BesideBackward {
  const void *grad_wide, *grad_narrow;
  const float* numbers;
  float* grad_rest;
  int64_t columns, dim, padded, others;
};

template <class T>
INLINE void beside_backward_rows(const BesideBackward& a, float* sums, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* wide = (const T*)a.grad_wide + r * (a.columns * a.dim + a.others);
    const T* narrow = (const T*)a.grad_narrow + r * (a.padded + a.others);
    for (int64_t c = 0; c < a.columns; ++c)
      for (int64_t d = 0; d < a.dim; d += W) {
        const int64_t i = c * a.dim + d, n = a.dim - d < W ? a.dim - d : W;
        store(sums + i, load(sums + i, n) + load(wide + i, n) * a.numbers[r * a.columns + c], n);
      }
    for (int64_t c = 0; c < a.others; c += W) {
      const int64_t n = a.others - c < W ? a.others - c : W;
      const Floats v = load(wide + a.columns * a.dim + c, n) + load(narrow + a.padded + c, n);
      store(a.grad_rest + r * a.others + c, v, n);
    }
  }
}

#define IN_BOTH_TYPES(name, Arguments)                                                    \
  FOR_PROCESSORS void name(const Arguments& a, bool narrow, int64_t begin, int64_t end) { \
    narrow ? name##_rows<bfloat16>(a, begin, end) : name##_rows<float>(a, begin, end);    \
  }
#define IN_BOTH_TYPES_WITH_SUMS(name, Arguments)                                                       \
  FOR_PROCESSORS void name(const Arguments& a, bool narrow, float* sums, int64_t begin, int64_t end) { \
    narrow ? name##_rows<bfloat16>(a, sums, begin, end) : name##_rows<float>(a, sums, begin, end);     \
  }
IN_BOTH_TYPES(cross, Cross)
IN_BOTH_TYPES(relu, Relu)
IN_BOTH_TYPES_WITH_SUMS(cross_backward, CrossBackward)
IN_BOTH_TYPES_WITH_SUMS(relu_backward, ReluBackward)
IN_BOTH_TYPES(beside, Beside)
IN_BOTH_TYPES_WITH_SUMS(beside_backward, BesideBackward)

FOR_PROCESSORS void narrowed(const float* from, bfloat16* to, int64_t n) {
  for (int64_t c = 0; c < n; c += W) store(to + c, load(from + c, W), n - c < W ? n - c : W);  // `from` is padded
}

// -- the operators ---------------------------------------------------------------------------------------------------

// Returns whether `like` is bfloat16, not float32, and checks that all matrices are like it: [B, width].
bool is_narrow(const Tensor& like, std::initializer_list<const Tensor*> all, const Tensor* bias) {
  const bool narrow = like.scalar_type() == ScalarType::BFloat16;
  check(like.dim() == 2 && (narrow || like.scalar_type() == ScalarType::Float),
        "expected matrices of float32 or bfloat16");
  for (const Tensor* t : all)
    check(t->scalar_type() == like.scalar_type() && t->dim() == 2 && t->is_contiguous() && t->size(0) == like.size(0) &&
              t->size(1) == like.size(1),
          "expected contiguous matrices of one shape and dtype");
  if (bias)
    check(bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->is_contiguous() &&
              bias->size(0) == like.size(1),
          "bias: expected a contiguous float32 vector, as long as a row");
  return narrow;
}

Tensor matrix(int64_t rows, int64_t columns, bool narrow) {
  return empty({rows, columns}, narrow ? ScalarType::BFloat16 : ScalarType::Float);
}

Tensor like(const Tensor& t) { return empty({t.size(0), t.size(1)}, t.scalar_type()); }

// Calls f(block, begin, end) for every block of rows.
template <class F>
void over_rows(const Tensor& t, const F& f) {
  const int64_t rows = t.size(0), blocks = (rows + kRows - 1) / kRows;
  const int64_t team = std::clamp<int64_t>(team_for(t.numel()), 1, std::max<int64_t>(blocks, 1));
  parallel(team, [&](int64_t c) {
    for (int64_t b = blocks * c / team; b < blocks * (c + 1) / team; ++b)
      f(b, b * kRows, std::min(rows, (b + 1) * kRows));
  });
}

// The same with `width` sums over all rows: f(its block's sums, begin, end).
template <class F>
Tensor summed_over_rows(const Tensor& t, int64_t width, const F& f) {
  const int64_t blocks = (t.size(0) + kRows - 1) / kRows;
  std::vector<float> parts(blocks * width);
  over_rows(t, [&](int64_t b, int64_t begin, int64_t end) { f(parts.data() + b * width, begin, end); });
  Tensor out = empty({width}, ScalarType::Float);
  float* sums = static_cast<float*>(out.data_ptr());
  std::fill_n(sums, width, 0.0f);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t c = 0; c < width; ++c) sums[c] += parts[b * width + c];
  return out;
}

Tensor cross_op(const Tensor& x0, const Tensor& x, const Tensor& product, const Tensor& bias) {
  const bool narrow = is_narrow(x0, {&x0, &x, &product}, &bias);
  Tensor out = like(x0);
  const Cross a{x0.data_ptr(),  x.data_ptr(), product.data_ptr(), static_cast<const float*>(bias.data_ptr()),
                out.data_ptr(), x0.size(1),   past_caches(out)};
  over_rows(x0, [&](int64_t, int64_t begin, int64_t end) { cross(a, narrow, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor> cross_backward_op(const Tensor& grad, const Tensor& x0, const Tensor& product,
                                             const Tensor& bias, const Tensor& grad_x0, bool first, bool last) {
  const bool narrow = is_narrow(x0, {&grad, &x0, &product, &grad_x0}, &bias);
  Tensor flowing = like(x0);
  const CrossBackward a{grad.data_ptr(),
                        x0.data_ptr(),
                        product.data_ptr(),
                        static_cast<const float*>(bias.data_ptr()),
                        grad_x0.data_ptr(),
                        flowing.data_ptr(),
                        nullptr,
                        x0.size(1),
                        first,
                        last,
                        past_caches(flowing) && past_caches(grad_x0)};
  Tensor sums = summed_over_rows(
      x0, x0.size(1), [&](float* part, int64_t begin, int64_t end) { cross_backward(a, narrow, part, begin, end); });
  return {flowing, sums};
}

void relu_op(const Tensor& y, const Tensor& bias) {
  const bool narrow = is_narrow(y, {&y}, &bias);
  const Relu a{y.data_ptr(), static_cast<const float*>(bias.data_ptr()), y.size(1)};
  over_rows(y, [&](int64_t, int64_t begin, int64_t end) { relu(a, narrow, begin, end); });
}

std::tuple<Tensor, Tensor> relu_backward_op(const Tensor& grad, const Tensor& y) {
  const bool narrow = is_narrow(y, {&grad, &y}, nullptr);
  Tensor flowing = like(y);
  const ReluBackward a{grad.data_ptr(), y.data_ptr(), flowing.data_ptr(), y.size(1), past_caches(flowing)};
  Tensor sums = summed_over_rows(
      y, y.size(1), [&](float* part, int64_t begin, int64_t end) { relu_backward(a, narrow, part, begin, end); });
  return {flowing, sums};
}

int64_t padded(int64_t columns) { return (columns + W - 1) / W * W; }

std::tuple<Tensor, Tensor> beside_op(const Tensor& numbers, const Tensor& weight, const Tensor& rest, bool narrow) {
  for (const Tensor* t : {&numbers, &weight, &rest})
    check(t->scalar_type() == ScalarType::Float && t->dim() == 2 && t->is_contiguous(),
          "expected contiguous float32 matrices");
  const int64_t rows = numbers.size(0), columns = numbers.size(1), dim = weight.size(1), others = rest.size(1);
  check(weight.size(0) == columns && rest.size(0) == rows, "numbers [B, C], weight [C, D] and rest [B, R] do not fit");
  Tensor wide = matrix(rows, columns * dim + others, narrow), thin = matrix(rows, padded(columns) + others, narrow);
  const Beside a{static_cast<const float*>(numbers.data_ptr()),
                 static_cast<const float*>(weight.data_ptr()),
                 static_cast<const float*>(rest.data_ptr()),
                 wide.data_ptr(),
                 thin.data_ptr(),
                 columns,
                 dim,
                 padded(columns),
                 others};
  over_rows(wide, [&](int64_t, int64_t begin, int64_t end) { beside(a, narrow, begin, end); });
  return {wide, thin};
}

std::tuple<Tensor, Tensor> beside_backward_op(const Tensor& grad_wide, const Tensor& grad_narrow, const Tensor& numbers,
                                              int64_t dim) {
  const bool narrow = is_narrow(grad_wide, {&grad_wide}, nullptr);
  is_narrow(grad_narrow, {&grad_narrow}, nullptr);
  check(numbers.dim() == 2 && dim >= 0, "numbers: expected a matrix; dim: at least 0");
  const int64_t rows = numbers.size(0), columns = numbers.size(1);
  check(columns == 0 || dim <= grad_wide.size(1) / columns, "gradients and numbers do not fit");  // nor overflow
  const int64_t others = grad_wide.size(1) - columns * dim;
  check(numbers.scalar_type() == ScalarType::Float && numbers.is_contiguous() && grad_wide.size(0) == rows &&
            grad_narrow.size(0) == rows && grad_narrow.scalar_type() == grad_wide.scalar_type() &&
            grad_narrow.size(1) == padded(columns) + others,
        "gradients and numbers do not fit");
  Tensor grad_rest = matrix(rows, others, false);
  const BesideBackward a{grad_wide.data_ptr(),
                         grad_narrow.data_ptr(),
                         static_cast<const float*>(numbers.data_ptr()),
                         static_cast<float*>(grad_rest.data_ptr()),
                         columns,
                         dim,
                         padded(columns),
                         others};
  Tensor sums = summed_over_rows(grad_wide, columns * dim, [&](float* part, int64_t begin, int64_t end) {
    beside_backward(a, narrow, part, begin, end);
  });
  return {sums, grad_rest};
}

bool has_amx() { return amx::available(); }

Tensor weight_gradient_op(const Tensor& grad, const Tensor& x) {
  check(has_amx(), "this processor has no AMX");
  for (const Tensor* t : {&grad, &x})
    check(t->scalar_type() == ScalarType::BFloat16 && t->dim() == 2 && t->is_contiguous() && t->size(0) == x.size(0),
          "expected contiguous bfloat16 matrices of as many rows");
  const int64_t rows = x.size(0), columns = grad.size(1), width = x.size(1);
  Tensor out = matrix(columns, width, true);
  // A grid of parts, near a square: each part packs its own columns of both matrices.
  const int64_t team = team_for(rows * columns * width / kRows);
  int64_t across = static_cast<int64_t>(std::sqrt(static_cast<double>(team)));
  while (team % across) --across;
  const int64_t down = team / across;
  const auto cut = [](int64_t all, int64_t part, int64_t parts) {  // between whole tiles
    return std::min(amx::up(all) / 32 * part / parts * 32, all);
  };
  parallel(team, [&](int64_t part) {
    const int64_t i = part / across, j = part % across;
    const int64_t a0 = cut(columns, i, down), a1 = cut(columns, i + 1, down);
    const int64_t b0 = cut(width, j, across), b1 = cut(width, j + 1, across);
    const int64_t stride = amx::up(b1 - b0);
    if (a0 == a1 || b0 == b1) return;
    const int64_t sums_bytes = amx::up(a1 - a0) * stride * 4;
    char* block = static_cast<char*>(blocks().take(sums_bytes + amx::scratch_bytes(a1 - a0, b1 - b0)));
    float* sums = reinterpret_cast<float*>(block);
    __builtin_memset(sums, 0, sums_bytes);
    amx::add_product(static_cast<const uint16_t*>(grad.data_ptr()) + a0, columns, a1 - a0,
                     static_cast<const uint16_t*>(x.data_ptr()) + b0, width, b1 - b0, rows, sums, block + sums_bytes);
    for (int64_t r = a0; r < a1; ++r)
      narrowed(sums + (r - a0) * stride, static_cast<bfloat16*>(out.data_ptr()) + r * width + b0, b1 - b0);
    blocks().give_back(block);
  });
  return out;
}

void let_go() { blocks().forget_all(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("matrix(int rows, int columns, bool narrow) -> Tensor");
  m.def("let_go() -> ()");
  m.def("has_amx() -> bool");
  m.def("weight_gradient(Tensor grad, Tensor x) -> Tensor");
  m.def("cross(Tensor x0, Tensor x, Tensor product, Tensor bias) -> Tensor");
  m.def(
      "cross_backward(Tensor grad, Tensor x0, Tensor product, Tensor bias, Tensor(a!) grad_x0, bool first, bool last)"
      " -> (Tensor, Tensor)");
  m.def("bias_relu(Tensor(a!) y, Tensor bias) -> ()");
  m.def("beside(Tensor numbers, Tensor weight, Tensor rest, bool narrow) -> (Tensor, Tensor)");
  m.def("beside_backward(Tensor grad_wide, Tensor grad_narrow, Tensor numbers, int dim) -> (Tensor, Tensor)");
  m.def("relu_backward(Tensor grad, Tensor y) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("cross", TORCH_BOX(&cross_op));
  m.impl("cross_backward", TORCH_BOX(&cross_backward_op));
  m.impl("bias_relu", TORCH_BOX(&relu_op));
  m.impl("beside", TORCH_BOX(&beside_op));
  m.impl("beside_backward", TORCH_BOX(&beside_backward_op));
  m.impl("relu_backward", TORCH_BOX(&relu_backward_op));
  m.impl("weight_gradient", TORCH_BOX(&weight_gradient_op));
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) {
  m.impl("matrix", TORCH_BOX(&matrix));
  m.impl("let_go", TORCH_BOX(&let_go));
  m.impl("has_amx", TORCH_BOX(&has_amx));
}

}  // namespace sparrow
