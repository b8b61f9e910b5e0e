// The inner loops, on plain pointers: loops_*.cpp include this file, each for a kind of processor, inside a nameless
// namespace and under that processor's compiler flags. Nothing of the standard library is used here: a function shared
// between the namespaces could be kept in the variant that this processor cannot run.
//
// Every sum runs in order of occurrence, so it has the same bits whatever the processor and the number of threads.
// Built with -ffp-contract=off: a fused multiply-add rounds once where the definition rounds twice.
//
// A row of D floats is K vectors of W lanes, the last one shifted back so that it ends with the row: where W does not
// divide D, some lanes stand in two vectors with the same value, and no loop has a remainder.

// LANES are as many floats as the processor handles at a time: 16 with AVX-512, 8 with AVX2, else 4. Vectors with more
// are two of half as many: the compiler would keep them in memory.

template <int W, bool wide = (W > LANES)>
struct VectorOf {
  typedef float type __attribute__((vector_size(W * 4)));
};
template <>
struct VectorOf<1, false> {
  typedef float type;
};
template <int W>
using V = typename VectorOf<W>::type;

#define OPERATOR(op)                                                                                                \
  friend INLINE Halves operator op(const Halves& a, const Halves& b) { return {a.low op b.low, a.high op b.high}; } \
  friend INLINE Halves operator op(const Halves& a, float b) { return {a.low op b, a.high op b}; }                  \
  friend INLINE Halves operator op(float a, const Halves& b) { return {a op b.low, a op b.high}; }                  \
  template <class Other>                                                                                            \
  INLINE Halves& operator op##=(const Other & b) {                                                                  \
    return *this = *this op b;                                                                                      \
  }

template <int W>
struct Halves {
  V<W / 2> low, high;
  OPERATOR(+)
  OPERATOR(-)
  OPERATOR(*)
  OPERATOR(/)
};
#undef OPERATOR

template <int W>
struct VectorOf<W, true> {
  typedef Halves<W> type;
};

template <int W>
INLINE V<W> load(const float* from) {
  if constexpr (W > LANES) {
    return {load<W / 2>(from), load<W / 2>(from + W / 2)};
  } else {
    V<W> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
}

template <int W>
INLINE void store(float* to, const V<W>& v) {
  if constexpr (W > LANES) {
    store<W / 2>(to, v.low);
    store<W / 2>(to + W / 2, v.high);
  } else {
    __builtin_memcpy(to, &v, sizeof v);
  }
}

// K = 0 (long or unusual rows): counted at run time, vectors in scratch instead of registers.
template <int W, int K>
struct Shape {
  const int64_t dim;
  INLINE int64_t count() const { return K ? K : (dim + W - 1) / W; }
  INLINE int64_t at(int64_t k) const { return k < count() - 1 ? k * W : dim - W; }
  // Lanes of the last vector that stand in the one before.
  INLINE int64_t repeated() const { return count() * W - dim; }
};

// For every vector of a row. All are unrolled where K says how many they are, and four at a time in long rows.
#define EACH(k, ...)                                                                    \
  do {                                                                                  \
    if constexpr (K > 0) {                                                              \
      _Pragma("GCC unroll 16") for (int64_t k = 0; k < K; ++k) { __VA_ARGS__; }         \
    } else if constexpr (W == 16) {                                                     \
      const int64_t each_count = shape.count();                                         \
      _Pragma("GCC unroll 4") for (int64_t k = 0; k < each_count; ++k) { __VA_ARGS__; } \
    } else {                                                                            \
      const int64_t each_count = shape.count();                                         \
      for (int64_t k = 0; k < each_count; ++k) {                                        \
        __VA_ARGS__;                                                                    \
      }                                                                                 \
    }                                                                                   \
  } while (false)

// A loop is a function of its own for each shape: in one with all of them the compiler keeps sums and counters in
// memory.
#define APART __attribute__((noinline))

// Asks for a row of fp32. Of a known length it takes no branch: one line more is cheaper where a row is not aligned.
template <int W, int K>
INLINE void prefetch_row(const Shape<W, K>& shape, const void* row) {
  const int64_t bytes = shape.dim * 4;
  if constexpr (K > 0) {
    const uint8_t* const begin = static_cast<const uint8_t*>(row);
    _Pragma("GCC unroll 16") for (int64_t line = 0; line < K * W * 4; line += 64) prefetch(begin + line);
    prefetch(begin + bytes - 1);
  } else {
    prefetch(row, bytes);
  }
}

template <int W, int K>
struct Vectors {
  V<W> v[K];
  INLINE explicit Vectors(float*) {}
  INLINE V<W>& operator[](int64_t k) { return v[k]; }
  INLINE const V<W>& operator[](int64_t k) const { return v[k]; }
};

template <int W>
struct Vectors<W, 0> {
  V<W>* const v;
  INLINE explicit Vectors(float* scratch) : v(reinterpret_cast<V<W>*>(scratch)) {}
  INLINE V<W>& operator[](int64_t k) { return v[k]; }
  INLINE const V<W>& operator[](int64_t k) const { return v[k]; }
};

template <int W>
struct Two {
  V<W / 2> low, high;
};

// The halves of a vector.
template <int W>
INLINE Two<W> halved(const V<W>& v) {
  if constexpr (W > LANES) return {v.low, v.high};
#if LANES >= 8  // without these the compiler goes through memory
  if constexpr (W == 8 && W <= LANES) {
    const __m256 all = reinterpret_cast<const __m256&>(v);
    return {(V<4>)_mm256_castps256_ps128(all), (V<4>)_mm256_extractf128_ps(all, 1)};
  }
#endif
#if LANES == 16
  if constexpr (W == 16) {
    const __m512 all = reinterpret_cast<const __m512&>(v);
    return {(V<8>)_mm512_castps512_ps256(all), (V<8>)_mm512_extractf32x8_ps(all, 1)};
  }
#endif
  if constexpr (W <= LANES) {
    float lanes[W];
    store<W>(lanes, v);
    return {load<W / 2>(lanes), load<W / 2>(lanes + W / 2)};
  }
}

// All lanes of a vector in one, by `f`, halves onto halves.
template <int W, class F>
INLINE float folded(const V<W>& v, const F& f) {
  if constexpr (W == 1) {
    return v;
  } else if constexpr (W == 4) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    const Two<W> two = halved<W>(v);
    return folded<W / 2>(f(two.low, two.high), f);
  }
}

template <int W>
INLINE float sum_of(const V<W>& v) {
  return folded<W>(v, [](const auto& a, const auto& b) { return a + b; });
}

// The sum of a[k] * b[k] over the row, in lanes: the same on every processor and at any number of threads.
template <int W, int K>
INLINE float dot(const Shape<W, K>& shape, const Vectors<W, K>& a, const Vectors<W, K>& b) {
  const int64_t last = shape.count() - 1;
  V<W> total = a[last] * b[last];
  if (const int64_t repeated = shape.repeated(); W > 1 && repeated > 0) {
    float lanes[W];
    store<W>(lanes, total);
    for (int64_t j = 0; j < W; ++j) lanes[j] = j < repeated ? 0.0f : lanes[j];
    total = load<W>(lanes);
  }
  EACH(k, if (k < last) total += a[k] * b[k]);
  return sum_of<W>(total);
}

template <int W, int K>
INLINE void read(const Shape<W, K>& shape, const float* from, Vectors<W, K>& to) {
  EACH(k, to[k] = load<W>(from + shape.at(k)));
}

template <int W, int K>
INLINE void write(const Shape<W, K>& shape, const Vectors<W, K>& from, float* to) {
  EACH(k, store<W>(to + shape.at(k), from[k]));
}

template <int W>
INLINE V<W> square_root(const V<W>& v) {
  float lanes[W];
  store<W>(lanes, v);
  for (int j = 0; j < W; ++j) lanes[j] = __builtin_sqrtf(lanes[j]);
  return load<W>(lanes);
}

#include "codecs.h"

// -- row rules: one function each; kernels/rules/ holds the definitions ----------------------------------------------

template <int W, int K>
struct Target {  // what a rule may change: the row's weights, in `w`, and its state
  const Shape<W, K>& shape;
  const Rule& rule;
  float* const* state;  // its fields
  int64_t row;          // within them
  Vectors<W, K>&g, &w;  // the gradient, and the weights
  float* scratch;       // of K = 0

  INLINE Vectors<W, K> more(int64_t nth) const { return Vectors<W, K>(scratch + (2 + nth) * kScratchRow(shape.dim)); }
  INLINE float* wide(int64_t field) const { return state[field] + row * shape.dim; }
  INLINE float& narrow(int64_t field) const { return state[field][row]; }
};

template <int W, int K>
INLINE void sgd(const Target<W, K>& t) {
  const auto& shape = t.shape;
  EACH(k, t.w[k] -= t.rule.lr * t.g[k]);
}

template <int W, int K>
INLINE void rowwise_adagrad(const Target<W, K>& t) {
  const auto& shape = t.shape;
  const float sum = t.narrow(0) += dot(shape, t.g, t.g) / static_cast<float>(shape.dim);
  const float rate = t.rule.lr / (__builtin_sqrtf(sum) + t.rule.eps);
  EACH(k, t.w[k] -= rate * t.g[k]);
}

template <int W, int K>
INLINE void adagrad(const Target<W, K>& t) {
  const auto& shape = t.shape;
  Vectors<W, K> sum = t.more(0);
  read(shape, t.wide(0), sum);
  EACH(k, sum[k] += t.g[k] * t.g[k]);
  EACH(k, t.w[k] -= t.rule.lr / (square_root<W>(sum[k]) + t.rule.eps) * t.g[k]);
  write(shape, sum, t.wide(0));
}

// A moment of Adam's after another value.
template <class T>
INLINE T moment(const T& before, const T& value, double beta) {
  return before * static_cast<float>(beta) + value * static_cast<float>(1 - beta);
}

// Adam's first moment, and the factors that undo the bias of both.
template <int W, int K>
INLINE void first_moment(const Target<W, K>& t, Vectors<W, K>& m, float& step, float& root) {
  const auto& shape = t.shape;
  const double count = t.narrow(2) += 1;
  step = t.rule.lr / static_cast<float>(1 - __builtin_pow(t.rule.beta1, count));
  root = __builtin_sqrtf(static_cast<float>(1 - __builtin_pow(t.rule.beta2, count)));
  read(shape, t.wide(0), m);
  EACH(k, m[k] = moment(m[k], t.g[k], t.rule.beta1));
  write(shape, m, t.wide(0));
}

template <int W, int K>
INLINE void adam(const Target<W, K>& t) {
  const auto& shape = t.shape;
  float step, root;
  Vectors<W, K> m = t.more(0), v = t.more(1);
  first_moment(t, m, step, root);
  read(shape, t.wide(1), v);
  EACH(k, v[k] = moment<V<W>>(v[k], t.g[k] * t.g[k], t.rule.beta2));
  EACH(k, t.w[k] -= step * m[k] / (square_root<W>(v[k]) / root + t.rule.eps));
  write(shape, v, t.wide(1));
}

template <int W, int K>
INLINE void rowwise_adam(const Target<W, K>& t) {
  const auto& shape = t.shape;
  float step, root;
  Vectors<W, K> m = t.more(0);
  first_moment(t, m, step, root);
  const float mean = dot(shape, t.g, t.g) / static_cast<float>(shape.dim);
  const float v = t.narrow(1) = moment(t.narrow(1), mean, t.rule.beta2);
  const float rate = step / (__builtin_sqrtf(v) / root + t.rule.eps);
  EACH(k, t.w[k] -= rate * m[k]);
}

// v *= min(1, most / norm of v)
template <int W, int K>
INLINE void limit(const Shape<W, K>& shape, Vectors<W, K>& v, float most) {
  const float norm = __builtin_sqrtf(dot(shape, v, v));
  if (!(norm > most)) return;
  const float factor = most / norm;
  EACH(k, v[k] *= factor);
}

// A row that is not stored as fp32, in scratch memory: its values, and where the fields of its state are.
void unpack(const Level& level, const Rule& rule, int64_t row, int64_t dim, float* weight, float** state) {
  decode(level, row, dim, weight);
  for (int field = 0; field < rule.fields; ++field)
    state[field] = state_of(level, rule, field, row, dim, weight + (1 + field) * kScratchRow(dim));
}

// The same row, back to where it is stored.
void pack(const Level& level, const Rule& rule, const Rounding& rounding, int64_t row, int64_t dim, float* weight) {
  encode(level, row, dim, rounding, weight, weight + 4 * kScratchRow(dim));
  if (!level.narrow) return;
  for (int field = 0; field < rule.fields; ++field)
    encode_state(level, rule, rounding, field, row, dim, weight + (1 + field) * kScratchRow(dim));
}

// The rule on a row. simple: what it is of tables that are so.
template <bool simple, int W, int K>
INLINE void apply(const Shape<W, K>& shape, const Table& table, int64_t slot, Vectors<W, K>& g, float* scratch) {
  const Rule& rule = table.rule;
  const Level& level = simple ? *table.levels : table.level_of(slot);
  const int64_t row = simple ? slot : slot - level.first;
  level.touched[row] = 1;
  if (!(dot(shape, g, g) <= __FLT_MAX__)) return;  // an infinite sum of squares would end the row's learning for good
  const bool is_plain = simple || level.is_plain();
  float* weight = reinterpret_cast<float*>(level.row(row));
  float* unpacked[kFields];
  if (!is_plain) {
    weight = scratch + 4 * kScratchRow(shape.dim);
    unpack(level, rule, row, shape.dim, weight, unpacked);
  }
  Vectors<W, K> w(scratch + kScratchRow(shape.dim));
  read(shape, weight, w);
  if (rule.clip_norm > 0) limit(shape, g, rule.clip_norm);
  if (rule.l2 > 0)
    EACH(k, g[k] += rule.l2 * w[k]);
  if (rule.keep != 1)
    EACH(k, w[k] *= rule.keep);
  const Target<W, K> target{shape, rule, is_plain ? level.state : unpacked, is_plain ? row : 0, g, w, scratch};
  switch (rule.kind) {
    case kSgd: sgd(target); break;
    case kRowwiseAdagrad: rowwise_adagrad(target); break;
    case kAdagrad: adagrad(target); break;
    case kAdam: adam(target); break;
    case kRowwiseAdam: rowwise_adam(target); break;
  }
  if (rule.max_norm > 0) limit(shape, w, rule.max_norm);
  write(shape, w, weight);
  if (!simple && level.changed) level.changed[row] = static_cast<int32_t>(table.rounding.n);
  if (!is_plain) pack(level, rule, table.rounding, row, shape.dim, weight);
}

// Whether the rule of such rows is a part of the loop. Of longer rows a call costs little, and their code is long.
template <int W, int K>
constexpr bool is_inline = K > 0 && K <= 8 && K* W <= 16 * LANES;

// The same, out of line. It is handed the gradient at the begin of `scratch`, vector by vector, as K = 0 has it there.
template <int W, int K>
APART void apply_apart(const Shape<W, K>& shape, const Table& table, int64_t slot, float* scratch) {
  Vectors<W, K> g(scratch);
  if constexpr (K > 0)
    EACH(k, g[k] = load<W>(scratch + k * W));
  apply<false>(shape, table, slot, g, scratch);
}

template <int W, int K>
INLINE void apply_apart(const Shape<W, K>& shape, const Table& table, int64_t slot, const Vectors<W, K>& g,
                        float* scratch) {
  if constexpr (K > 0)
    EACH(k, store<W>(scratch + k * W, g[k]));
  apply_apart(shape, table, slot, scratch);
}

template <bool simple = false>
INLINE void prefetch_target(const Table& table, int64_t slot) {
  const Level& level = simple ? *table.levels : table.level_of(slot);
  const int64_t row = simple ? slot : slot - level.first;
  prefetch(level.row(row), level.bytes);
  prefetch(level.touched + row);
  if (!simple && level.low) prefetch(level.low + row * table.dim * 2, table.dim * 2);
  for (int field = 0; field < table.rule.fields; ++field) {
    const uint8_t* const state = reinterpret_cast<const uint8_t*>(level.state[field]);
    const int64_t bytes = !simple && level.narrow ? 2 : 4, wide = bytes * table.dim;
    table.rule.wide[field] ? prefetch(state + row * wide, wide) : prefetch(state + row * bytes);
  }
  if (!simple && level.changed) prefetch(level.changed + row);
}

// -- loops over bags and rows ----------------------------------------------------------------------------------------

template <class Reader, int W, int K>
APART void pool_shape(const Pool& p, const Shape<W, K>& shape) {
  const int64_t ahead = ahead_of(p.at.bytes);
  const uint8_t* const* row = p.at.rows;
  const uint8_t* const* const end = p.at.rows + p.count;
  for (int64_t b = 0; b < p.bags; ++b) {
    Vectors<W, K> sum(p.scratch);
    EACH(k, sum[k] = V<W>{});
    const int64_t length = p.offsets[b + 1] - p.offsets[b];
    const auto each_row = [&](const auto& add) __attribute__((always_inline)) {
      for (const uint8_t* const* const last = row + length; row < last; ++row) {
        if (row + ahead < end) {
          if constexpr (__is_same(Reader, Fp32)) prefetch_row(shape, row[ahead]);
          else prefetch(address_of(row[ahead]), p.at.bytes);
        }
        add(Reader(*row, shape.dim));
      }
    };
    // A loop each: in one for both the compiler reads a whole row before it asks for weights, and sums have no room.
    if (p.weights) {
      each_row([&](const Reader& reader) __attribute__((always_inline)) {
        const float weight = p.weights[row - p.at.rows];
        EACH(k, sum[k] += values<W>(reader, shape.at(k)) * weight);
      });
    } else {
      each_row([&](const Reader& reader)
                   __attribute__((always_inline)) { EACH(k, sum[k] += values<W>(reader, shape.at(k))); });
    }
    if (p.mean && length > 1) {
      const float scale = 1.0f / static_cast<float>(length);
      EACH(k, sum[k] *= scale);
    }
    write(shape, sum, p.out + b * p.stride);
  }
}

template <class Reader, int W, int K>
APART void copy_shape(const Pool& p, const Shape<W, K>& shape) {
  const int64_t ahead = ahead_of(p.at.bytes);
  for (int64_t n = 0; n < p.count; ++n) {
    if (n + ahead < p.count) prefetch(address_of(p.at.rows[n + ahead]), p.at.bytes);
    const uint8_t* const row = p.at.rows[n];
    const float weight = p.weights ? p.weights[n] : 1.0f;
    float* const out = p.out + n * p.stride;
    if (Reader::is_fp32 || !is_frame(row)) {
      const Reader reader(row, shape.dim);
      EACH(k, store<W>(out + shape.at(k), values<W>(reader, shape.at(k)) * weight));
    } else {
      const Fp32 reader(address_of(row), shape.dim);
      EACH(k, store<W>(out + shape.at(k), values<W>(reader, shape.at(k)) * weight));
    }
  }
}

// Bags of products of fp32 rows, or each product as a bag of its own.
template <bool is_unpooled, int W, int K>
APART void product_shape(const Pool& p, const Shape<W, K>& shape) {
  const int64_t ahead = ahead_of(p.at.bytes), bags = is_unpooled ? p.count : p.bags;
  for (int64_t b = 0, n = 0; b < bags; ++b) {
    Vectors<W, K> sum(p.scratch);
    EACH(k, sum[k] = V<W>{});
    const int64_t length = is_unpooled ? 1 : p.offsets[b + 1] - p.offsets[b];
    for (const int64_t last = n + length; n < last; ++n) {
      if (n + ahead < p.count) {
        prefetch_row(shape, p.at.rows[n + ahead]);
        prefetch_row(shape, p.by[n + ahead]);
      }
      const float* const row = reinterpret_cast<const float*>(p.at.rows[n]);
      const float* const by = reinterpret_cast<const float*>(p.by[n]);
      const float weight = p.weights ? p.weights[n] : 1.0f;
      EACH(k, sum[k] += load<W>(row + shape.at(k)) * load<W>(by + shape.at(k)) * weight);
    }
    if (p.mean && length > 1) {
      const float scale = 1.0f / static_cast<float>(length);
      EACH(k, sum[k] *= scale);
    }
    write(shape, sum, p.out + b * p.stride);
  }
}

// decoded: rows that are not of fp32 are decoded first.
template <bool decoded, int W, int K>
APART void dot_shape(const Dots& d, const Shape<W, K>& shape) {
  Vectors<W, K> a(d.scratch), b(d.scratch + kScratchRow(shape.dim));
  float* const values = d.scratch + 2 * kScratchRow(shape.dim);
  const Decoder decode = decoder_of(d.at.format);
  const int64_t ahead = ahead_of(d.at.bytes);
  for (int64_t n = 0; n < d.count; ++n) {
    if (n + ahead < d.count) prefetch(address_of(d.at.rows[n + ahead]), d.at.bytes);
    const uint8_t* const row = d.at.rows[n];
    if (decoded && !is_frame(row)) {
      decode(row, shape.dim, values);
      read(shape, values, a);
    } else {
      read(shape, reinterpret_cast<const float*>(address_of(row)), a);
    }
    read(shape, d.grad, b);
    d.out[n] += dot(shape, a, b) * d.scale;
  }
}

struct Factors {  // of a gradient, one after the other
  float scale, weight;
};

// Sum the gradients of each row that has a key in [begin, end), in order of occurrence, and apply the rule or write
// the sum and the row's number one after the other.
template <bool simple, bool product, int W, int K>
APART void reduce_shape(const Reduce& r, const Shape<W, K>& shape) {
  const uint64_t* keys = r.keys;
  const int64_t end = r.end, ahead = ahead_of(shape.dim * 4);
  float* out = r.out;
  int64_t* rows = r.rows;
  Vectors<W, K> sum(r.scratch);
  const auto ask = [&](int64_t i) __attribute__((always_inline)) {
    if (i >= end) return;
    prefetch_row(shape, r.gradient(keys[i]));
    if (product && !r.by_is_small) prefetch_row(shape, r.by[payload_of(keys[i])]);
    if (!rows && (i == r.begin || row_of(keys[i]) != row_of(keys[i - 1])))
      prefetch_target<simple>(*r.table, row_of(keys[i]));
  };
  for (int64_t i = r.begin; i < r.begin + ahead; ++i) ask(i);
  for (int64_t i = r.begin; i < end;) {
    const int64_t row = row_of(keys[i]);
    EACH(k, sum[k] = V<W>{});
    const auto each_gradient = [&](const auto& add) __attribute__((always_inline)) {
      for (; i < end && row_of(keys[i]) == row; ++i) {
        ask(i + ahead);
        add(r.gradient(keys[i]));
      }
    };
    const auto factors = [&]() __attribute__((always_inline)) {
      const float scale = r.scale ? r.scale[r.bag_of(keys[i])] : 1.0f;
      return Factors{scale, r.weights ? r.weights[payload_of(keys[i])] : 1.0f};
    };
    if (product) {
      each_gradient([&](const float* from) __attribute__((always_inline)) {
        const Factors f = factors();
        if (const float* const by = r.by[payload_of(keys[i])])
          EACH(k, sum[k] += load<W>(from + shape.at(k)) * f.scale * f.weight * load<W>(by + shape.at(k)));
        else
          EACH(k, sum[k] += load<W>(from + shape.at(k)) * f.scale * f.weight);
      });
    } else if (r.scale || r.weights) {
      each_gradient([&](const float* from) __attribute__((always_inline)) {
        const Factors f = factors();
        EACH(k, sum[k] += load<W>(from + shape.at(k)) * f.scale * f.weight);
      });
    } else {
      each_gradient([&](const float* from)
                        __attribute__((always_inline)) { EACH(k, sum[k] += load<W>(from + shape.at(k))); });
    }
    if (rows) {
      *rows++ = row;
      write(shape, sum, out);
      out += shape.dim;
    } else {
      if constexpr (!product && is_inline<W, K>) apply<simple>(shape, *r.table, row, sum, r.scratch);
      else apply_apart(shape, *r.table, row, sum, r.scratch);
    }
  }
}

template <bool simple, int W, int K>
INLINE void plain_sums(const Reduce& r, const Shape<W, K>& shape) {
  reduce_shape<simple, false>(r, shape);
}
template <bool simple, int W, int K>
INLINE void product_sums(const Reduce& r, const Shape<W, K>& shape) {
  reduce_shape<simple, true>(r, shape);
}

template <bool simple, int W, int K>
APART void update_shape(const Update& u, const Shape<W, K>& shape) {
  Vectors<W, K> grad(u.scratch);
  const int64_t ahead = ahead_of(shape.dim * 4);
  const auto ask = [&](int64_t i) __attribute__((always_inline)) {
    if (i < u.end) prefetch_target<simple>(*u.table, u.rows[i]);
  };
  for (int64_t i = u.begin; i < u.begin + ahead; ++i) ask(i);
  for (int64_t i = u.begin; i < u.end; ++i) {
    ask(i + ahead);
    read(shape, u.grad + i * shape.dim, grad);
    if constexpr (simple && is_inline<W, K>) apply<true>(shape, *u.table, u.rows[i], grad, u.scratch);
    else apply_apart(shape, *u.table, u.rows[i], grad, u.scratch);
  }
}

// Calls F on the shape of a row with `dim` floats.
#define FOR_SHAPE(F, arguments, dim)                                                           \
  switch (dim < 4 ? dim : dim < 8 ? 4 : dim < 16 ? 5 : 5 + (dim + 15) / 16) {                  \
    case 1: return F(arguments, Shape<1, 1>{dim});                                             \
    case 2: return F(arguments, Shape<1, 2>{dim});                                             \
    case 3: return F(arguments, Shape<1, 3>{dim});                                             \
    case 4: return dim == 4 ? F(arguments, Shape<4, 1>{dim}) : F(arguments, Shape<4, 2>{dim}); \
    case 5: return dim == 8 ? F(arguments, Shape<8, 1>{dim}) : F(arguments, Shape<8, 2>{dim}); \
    case 6: return F(arguments, Shape<16, 1>{dim});                                            \
    case 7: return F(arguments, Shape<16, 2>{dim});                                            \
    case 8: return F(arguments, Shape<16, 3>{dim});                                            \
    case 9: return F(arguments, Shape<16, 4>{dim});                                            \
    case 10: return F(arguments, Shape<16, 5>{dim});                                           \
    case 11: return F(arguments, Shape<16, 6>{dim});                                           \
    case 12: return F(arguments, Shape<16, 7>{dim});                                           \
    case 13: return F(arguments, Shape<16, 8>{dim});                                           \
    case 21: return F(arguments, Shape<16, 16>{dim});                                          \
    default: return F(arguments, Shape<16, 0>{dim});                                           \
  }

// The same for rows in fewer bits, with fewer shapes, since there are many formats.
#define FOR_FEW_SHAPES(F, arguments, dim)             \
  switch (dim) {                                      \
    case 16: return F(arguments, Shape<16, 1>{dim});  \
    case 32: return F(arguments, Shape<16, 2>{dim});  \
    case 64: return F(arguments, Shape<16, 4>{dim});  \
    case 128: return F(arguments, Shape<16, 8>{dim}); \
    default: FOR_FEWEST_SHAPES(F, arguments, dim)     \
  }
#define FOR_FEWEST_SHAPES(F, arguments, dim)               \
  {                                                        \
    if (dim >= 16) return F(arguments, Shape<16, 0>{dim}); \
    if (dim >= 8) return F(arguments, Shape<8, 0>{dim});   \
    if (dim >= 4) return F(arguments, Shape<4, 0>{dim});   \
    return F(arguments, Shape<1, 0>{dim});                 \
  }

// Calls F for the format of rows that are not of fp32.
#define FOR_FORMAT(F, arguments)                \
  switch (arguments.at.format) {                \
    case kFp32: break;                          \
    case kFp16: return F<Fp16>(arguments);      \
    case kBf16:                                 \
    case kSplitBf16: return F<Bf16>(arguments); \
    case kInt8: return F<Int8>(arguments);      \
    case kInt4: return F<Int4>(arguments);      \
    case kMxint8: return F<Mxint8>(arguments);  \
    case kMxfp8: return F<Mxfp8>(arguments);    \
    case kMxfp6: return F<Mxfp6>(arguments);    \
    case kMxfp4: return F<Mxfp4>(arguments);    \
  }

template <class Reader>
void pool_rows(const Pool& p) {
  if (p.at.mixed) {
    if constexpr (Reader::is_long) FOR_FEWEST_SHAPES(pool_shape<Mixed<Reader>>, p, p.dim)
    else FOR_FEW_SHAPES(pool_shape<Mixed<Reader>>, p, p.dim)
  }
  FOR_FEW_SHAPES(pool_shape<Reader>, p, p.dim)
}
template <class Reader>
void copy_rows(const Pool& p) {
  if constexpr (Reader::is_long) FOR_FEWEST_SHAPES(copy_shape<Reader>, p, p.dim)
  else FOR_FEW_SHAPES(copy_shape<Reader>, p, p.dim)
}

void pool(const Pool& p) {
  FOR_FORMAT(pool_rows, p)
  FOR_SHAPE(pool_shape<Fp32>, p, p.dim)
}
void copy(const Pool& p) {
  FOR_FORMAT(copy_rows, p)
  FOR_SHAPE(copy_shape<Fp32>, p, p.dim)
}
void dots(const Dots& d) {
  if (d.at.format != kFp32) FOR_FEW_SHAPES(dot_shape<true>, d, d.dim)
  FOR_SHAPE(dot_shape<false>, d, d.dim)
}
void product(const Pool& p, bool is_unpooled) {
  if (is_unpooled) FOR_SHAPE(product_shape<true>, p, p.dim)
  FOR_SHAPE(product_shape<false>, p, p.dim)
}
void reduce(const Reduce& r) {
  if (r.by) FOR_SHAPE(product_sums<false>, r, r.table->dim)
  if (r.table->is_simple()) FOR_SHAPE(plain_sums<true>, r, r.table->dim)
  FOR_FEW_SHAPES(plain_sums<false>, r, r.table->dim)
}
void update(const Update& u) {
  if (u.table->is_simple()) FOR_SHAPE(update_shape<true>, u, u.table->dim)
  FOR_FEW_SHAPES(update_shape<false>, u, u.table->dim)
}

// Copies a row from slot to slot, in the format of each; what is rounded takes the number of the row's last update.
void move_row(const Table& table, int64_t from_slot, int64_t to_slot, float* scratch) {
  const int64_t dim = table.dim;
  const Level &from = table.level_of(from_slot), &to = table.level_of(to_slot);
  const int64_t source = from_slot - from.first, target = to_slot - to.first;
  Rounding rounding = table.rounding;
  rounding.n = from.changed ? from.changed[source] : 0;
  if (to.format == kFp32) {
    decode(from, source, dim, reinterpret_cast<float*>(to.row(target)));
  } else {
    const bool is_fp32 = from.format == kFp32;
    if (!is_fp32) decode(from, source, dim, scratch);
    const float* const values = is_fp32 ? reinterpret_cast<const float*>(from.row(source)) : scratch;
    encode(to, target, dim, rounding, values, scratch + kScratchRow(dim));
  }
  for (int field = 0; field < table.rule.fields; ++field) {
    const float* const values = state_of(from, table.rule, field, source, dim, scratch);
    const int64_t count = table.rule.wide[field] ? dim : 1;
    if (to.narrow) encode_state(to, table.rule, rounding, field, target, dim, values);
    else __builtin_memcpy(to.state[field] + target * count, values, count * 4);
  }
  to.touched[target] = from.touched[source];
  if (to.changed) to.changed[target] = 0;
}

void replace(const Replace& r) {
  constexpr int64_t kAhead = 8;
  const Level& frames = *r.table->levels;
  for (int64_t i = r.begin; i < r.end; ++i) {
    if (i + kAhead < r.end) {
      prefetch_target(*r.table, r.frames[i + kAhead]);
      prefetch_target(*r.table, r.rows[i + kAhead]);
      if (r.old[i + kAhead] >= 0) prefetch_target(*r.table, r.old[i + kAhead]);
    }
    if (r.old[i] >= 0 && frames.changed[r.frames[i]] > 0) move_row(*r.table, r.frames[i], r.old[i], r.scratch);
    move_row(*r.table, r.rows[i], r.frames[i], r.scratch);
  }
}

const Loops loops{pool, copy, product, dots, reduce, update, replace};
#undef EACH
#undef FOR_SHAPE
#undef FOR_FORMAT
#undef FOR_FEW_SHAPES
#undef FOR_FEWEST_SHAPES
#undef APART
