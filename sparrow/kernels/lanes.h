// W numbers at a time, float32 or bfloat16 in memory and float32 in registers. The compiler makes of them what a kind
// of processor has.

#pragma once

#include "cpu.h"

namespace sparrow {

constexpr int64_t W = 16;
constexpr int64_t kPast = 8 << 20;  // bytes of a tensor that caches do not hold until it is read again

typedef float Floats __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));
struct bfloat16 {
  uint16_t bits;
};

// The first `n` of W numbers at `from`; the others are 0.
INLINE Floats load(const float* from, int64_t n) {
  Floats v{};
  n == W ? __builtin_memcpy(&v, from, sizeof v) : __builtin_memcpy(&v, from, n * 4);
  return v;
}
INLINE Floats load(const bfloat16* from, int64_t n) {
  Halves h{};
  n == W ? __builtin_memcpy(&h, from, sizeof h) : __builtin_memcpy(&h, from, n * 2);
  return (Floats)(__builtin_convertvector(h, Words) << 16);
}
INLINE void store(float* to, const Floats& v, int64_t n) {
  n == W ? __builtin_memcpy(to, &v, sizeof v) : __builtin_memcpy(to, &v, n * 4);
}
INLINE void store(bfloat16* to, const Floats& v, int64_t n) {  // to the nearest, ties to even; NaN stays one
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (Words)(v != v);
  const Halves h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
  n == W ? __builtin_memcpy(to, &h, sizeof h) : __builtin_memcpy(to, &h, n * 2);
}

// Stores past the caches, for matrices that are too large to stay there until they are read again. A plain store first
// reads what it overwrites.
template <class T>
INLINE void store(T* to, const Floats& v, int64_t n, bool past) {
#if defined(__SSE2__)
  if (past && n == W) {
    alignas(64) T whole[W];
    store(whole, v, W);
    typedef float Quarter __attribute__((vector_size(16)));
    for (size_t i = 0; i < sizeof whole; i += 16) {
      Quarter quarter;
      __builtin_memcpy(&quarter, reinterpret_cast<const char*>(whole) + i, 16);
      __builtin_ia32_movntps(reinterpret_cast<float*>(reinterpret_cast<char*>(to) + i), quarter);
    }
    return;
  }
#endif
  store(to, v, n);
}

// Whether stores into a tensor can and should go past the caches; a fence must follow them.
inline bool past_caches(const Tensor& to) {
  const ScalarType type = to.scalar_type();
  const int64_t number = type == ScalarType::Float ? 4 : type == ScalarType::Byte ? 1 : 2;
  const int64_t row = to.size(to.dim() - 1) * number;
  return to.numel() * number >= kPast && row % 16 == 0 && reinterpret_cast<uintptr_t>(to.data_ptr()) % 16 == 0;
}

INLINE void fence(bool past) {
#if defined(__SSE2__)
  if (past) __builtin_ia32_sfence();
#endif
}

}  // namespace sparrow
