// The inner loops for processors with AVX2.

#include "processors.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>

namespace sparrow::embedding_bag {
namespace {

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define LANES 8
namespace avx2 {
#include "loops.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

}  // namespace

const Loops* avx2_loops() { return &avx2::loops; }

}  // namespace sparrow::embedding_bag
#endif
