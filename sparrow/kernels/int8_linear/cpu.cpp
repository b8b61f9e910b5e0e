// The int8 product on CPUs. reference.py beside this file is its definition, and cpp.py packs the weights.
//
// A tile of sums stays in registers while four inputs at a time are multiplied: 6 rows by 64 channels where registers
// are 512 bits wide. The sums are whole numbers, so every kind of processor and any number of threads gives the same
// bits.

#include "../cpu.h"

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12 about its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define UNROLLED _Pragma("GCC unroll 16")

namespace sparrow {
namespace {

constexpr int64_t kBlock = 16;             // channels that stand together in packed weights
constexpr int64_t kScratch = 64 << 10;     // bytes of codes that are made at a time
constexpr int64_t kUnit = 6;               // rows that threads share out; kRows divides it
constexpr int64_t kProducts = 64;          // of int8, in the time of one float of other work
constexpr int64_t kMostInputs = 1 << 16;   // 255 * 127 * kMostInputs fits into 31 bits
constexpr int32_t kNotFinite = INT32_MIN;  // the sums of a row with NaN or infinity; no other sum is as low
constexpr float kLeastScale = 0x1p-126f;   // the reciprocal of a smaller one may be infinite
constexpr float kRounder = 0x1.8p23f;      // its last bit is 1
constexpr int32_t kRounderBits = 0x4b400000;

struct Job {
  const float* x;                // [B, inputs]
  const int8_t* tiles;           // [blocks, padded / 4, kBlock, 4]
  const int32_t* weight_sums;    // [blocks * kBlock]
  const float *scales, *biases;  // the same; nullptr: the sums are the result
  const int32_t* plus;           // [U, outputs], or nullptr
  const int64_t* index;          // which of its rows each row adds, [B]
  void* out;                     // [B, outputs]
  int64_t inputs, outputs;
  int64_t padded, stride;  // inputs in whole fours, and bytes of a row of codes, which are more
  float scale;             // of x
  int32_t zero;
  bool is_dynamic, relu;
};

struct Row {
  float scale;  // NaN: all outputs are
  int32_t zero;
  const int32_t* plus;
};

template <class V, class T>
INLINE V load(const T* from, int64_t n) {  // n: how many numbers are there; the others are 0
  V v{};
  n >= static_cast<int64_t>(sizeof v / 4) ? __builtin_memcpy(&v, from, sizeof v) : __builtin_memcpy(&v, from, n * 4);
  return v;
}
template <class V, class T>
INLINE void store(T* to, const V& v, int64_t n) {
  n >= static_cast<int64_t>(sizeof v / 4) ? __builtin_memcpy(to, &v, sizeof v) : __builtin_memcpy(to, &v, n * 4);
}

#define VECTORS                                                 \
  typedef int32_t Ints __attribute__((vector_size(LANES * 4))); \
  typedef float Floats __attribute__((vector_size(LANES * 4))); \
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#define LANES 4
namespace portable {
VECTORS
struct Codes {
  int32_t at[4];
};
struct Weights {
  Ints at[4];
};
constexpr int kRows = 2, kVectors = 4;
INLINE Codes spread(int32_t four) { return {{four & 255, four >> 8 & 255, four >> 16 & 255, four >> 24 & 255}}; }
INLINE Weights weights(const int8_t* from) {
  const Ints w = load<Ints>(reinterpret_cast<const int32_t*>(from), LANES);
  return {{w << 24 >> 24, w << 16 >> 24, w << 8 >> 24, w >> 24}};
}
INLINE Ints dot(const Ints& sums, const Codes& x, const Weights& w) {
  return sums + w.at[0] * x.at[0] + w.at[1] * x.at[1] + w.at[2] * x.at[2] + w.at[3] * x.at[3];
}
#include "loops.h"
}  // namespace portable
#undef LANES

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define LANES 8
namespace avx2 {  // vpmaddubsw would multiply bytes, but its sums of two products end at 32,767
VECTORS
struct Codes {
  __m256i even, odd;
};
using Weights = Codes;
constexpr int kRows = 2, kVectors = 4;
INLINE Codes spread(int32_t four) {
  const __m256i x = _mm256_set1_epi32(four);
  return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)};
}
INLINE Weights weights(const int8_t* from) {
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
}
INLINE Ints dot(const Ints& sums, const Codes& x, const Weights& w) {
  return sums + (Ints)_mm256_madd_epi16(x.even, w.even) + (Ints)_mm256_madd_epi16(x.odd, w.odd);
}
#include "loops.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if __has_include(<avxvnniintrin.h>)  // compilers before GCC 11 and clang 12 lack it
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,avxvnni")
#endif
namespace avx_vnni {
VECTORS
using Codes = __m256i;
using Weights = __m256i;
constexpr int kRows = 3, kVectors = 4;
INLINE Codes spread(int32_t four) { return _mm256_set1_epi32(four); }
INLINE Weights weights(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
INLINE Ints dot(const Ints& sums, const Codes& x, const Weights& w) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, x, w);
}
#include "loops.h"
}  // namespace avx_vnni
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#define HAS_AVX_VNNI
#endif
#undef LANES

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif
#define LANES 16
namespace avx512_vnni {
VECTORS
using Codes = __m512i;
using Weights = __m512i;
constexpr int kRows = 6, kVectors = 4;
INLINE Codes spread(int32_t four) { return _mm512_set1_epi32(four); }
INLINE Weights weights(const int8_t* from) { return _mm512_loadu_si512(from); }
INLINE Ints dot(const Ints& sums, const Codes& x, const Weights& w) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, x, w);
}
#include "loops.h"
}  // namespace avx512_vnni
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LANES

[[maybe_unused]] bool has_avx_vnni() {  // compilers learnt its name late
  unsigned a = 0, b, c, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// -- the choice among them ------------------------------------------------------------------------------------------

struct Processor {
  const char* name;
  void (*multiply)(const Job&, int64_t, int64_t, int64_t, int64_t);
  bool here;  // whether this machine can run it
};

const std::vector<Processor>& processors() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const std::vector<Processor> all{
      {"avx512_vnni", avx512_vnni::multiply,
       __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
#if defined(HAS_AVX_VNNI)
      {"avx_vnni", avx_vnni::multiply, has_avx_vnni()},
#endif
      {"avx2", avx2::multiply, static_cast<bool>(__builtin_cpu_supports("avx2"))},
      {"portable", portable::multiply, true}};
#else
  static const std::vector<Processor> all{{"portable", portable::multiply, true}};
#endif
  return all;
}

const Processor* found(const std::string& name) {
  for (const Processor& p : processors())
    if (p.here && (name == "best" || name == p.name)) return &p;
  check(false, "processor: ", name, " cannot run here");
  return nullptr;
}

std::atomic<const Processor*> chosen{nullptr};

const Processor& processor() {
  if (!chosen) chosen = found("best");
  return *chosen.load();
}

// Name of the processor whose loops run; a name given chooses it, "best" the default.
std::string int8_processor(const std::string& name) {
  if (!name.empty()) chosen = found(name);
  return processor().name;
}

// -- the operators --------------------------------------------------------------------------------------------------

template <class T>
T* data(const Tensor& t, ScalarType type, int64_t dims, const char* name) {
  check(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), name, ": wrong dtype or shape");
  return static_cast<T*>(t.data_ptr());
}

void run(Job& a, const Tensor& x, const Tensor& tiles, const Tensor& weight_sums) {
  a.x = data<const float>(x, ScalarType::Float, 2, "x");
  a.tiles = data<const int8_t>(tiles, ScalarType::Char, 4, "tiles");
  a.weight_sums = data<const int32_t>(weight_sums, ScalarType::Int, 1, "weight_sums");
  const int64_t rows = x.size(0), blocks = tiles.size(0);
  a.padded = tiles.size(1) * 4, a.stride = (a.padded + kBlock) / kBlock * kBlock;
  check(x.size(1) == a.inputs, "x: it does not have as many columns as the weight");
  check(a.inputs >= 0 && a.inputs <= kMostInputs && a.padded == (a.inputs + 3) / 4 * 4 && tiles.size(2) == kBlock &&
            tiles.size(3) == 4 && blocks == (a.outputs + kBlock - 1) / kBlock && weight_sums.size(0) == blocks * kBlock,
        "tiles: not packed for so many inputs and channels");
  check(a.is_dynamic || (a.scale >= kLeastScale && a.scale < __builtin_inff() && a.zero >= 0 && a.zero <= 255),
        "scale: expected a positive number; zero: 0 to 255");
  // Threads share the rows, or the channels if the rows are few; then each makes the codes of all rows.
  const auto multiply = processor().multiply;
  const int64_t team = team_for(rows * a.padded * a.outputs / kProducts);
  const int64_t unit = rows >= 8 * kUnit * team ? kUnit : kBlock * 4, all = unit == kUnit ? rows : blocks * kBlock;
  const int64_t units = (all + unit - 1) / unit;
  parallel(team, [&](int64_t c) {
    const int64_t begin = std::min(units * c / team * unit, all), end = std::min(units * (c + 1) / team * unit, all);
    unit == kUnit ? multiply(a, begin, end, 0, a.outputs) : multiply(a, 0, rows, begin, std::min(end, a.outputs));
  });
}

Tensor int8_linear(const Tensor& x, const Tensor& tiles, const Tensor& weight_sums, const Tensor& channels,
                   int64_t inputs, int64_t outputs, double scale, int64_t zero, bool relu,
                   const std::optional<Tensor>& plus, const std::optional<Tensor>& index) {
  Job a{};
  a.inputs = inputs, a.outputs = outputs, a.scale = static_cast<float>(scale), a.zero = static_cast<int32_t>(zero);
  a.is_dynamic = scale == 0, a.relu = relu;
  check(channels.size(0) == 2 && channels.size(1) == weight_sums.size(0), "channels: not packed for so many channels");
  a.scales = data<const float>(channels, ScalarType::Float, 2, "channels");
  a.biases = a.scales + channels.size(1);
  check(plus.has_value() == index.has_value(), "plus and index: both or none");
  if (plus) {
    a.plus = data<const int32_t>(*plus, ScalarType::Int, 2, "plus");
    a.index = data<const int64_t>(*index, ScalarType::Long, 1, "index");
    check(plus->size(1) == outputs && index->size(0) == x.size(0), "plus and index: they do not fit x and the weight");
    for (int64_t b = 0, shared = plus->size(0); b < x.size(0); ++b)
      check(a.index[b] >= 0 && a.index[b] < shared, "index: ", a.index[b], " of ", shared, " rows");
  }
  Tensor out = empty({x.size(0), outputs}, ScalarType::Float);
  a.out = out.data_ptr();
  run(a, x, tiles, weight_sums);
  return out;
}

Tensor int8_sums(const Tensor& x, const Tensor& tiles, const Tensor& weight_sums, int64_t inputs, int64_t outputs,
                 double scale, int64_t zero) {
  Job a{};
  a.inputs = inputs, a.outputs = outputs, a.scale = static_cast<float>(scale), a.zero = static_cast<int32_t>(zero);
  Tensor out = empty({x.size(0), outputs}, ScalarType::Int);
  a.out = out.data_ptr();
  run(a, x, tiles, weight_sums);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def(
      "int8_linear(Tensor x, Tensor tiles, Tensor weight_sums, Tensor channels, int inputs, int outputs, float scale, int zero,"
      " bool relu, Tensor? plus, Tensor? index) -> Tensor");
  m.def(
      "int8_sums(Tensor x, Tensor tiles, Tensor weight_sums, int inputs, int outputs, float scale, int zero) -> Tensor");
  m.def("int8_processor(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("int8_sums", TORCH_BOX(&int8_sums));
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) {
  m.impl("int8_processor", TORCH_BOX(&int8_processor));
}

}  // namespace sparrow
