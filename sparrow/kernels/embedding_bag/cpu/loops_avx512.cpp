// The inner loops for processors with AVX-512.

#include "processors.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>

namespace sparrow::embedding_bag {
namespace {

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,f16c")
#endif
#define LANES 16
namespace avx512 {
#include "loops.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

}  // namespace

const Loops* avx512_loops() { return &avx512::loops; }

}  // namespace sparrow::embedding_bag
#endif
