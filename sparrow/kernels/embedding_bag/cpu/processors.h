// The inner loops of the best kind of processor that this machine can be: AVX-512, AVX2 or any.

#pragma once

#include "loop_types.h"

namespace sparrow::embedding_bag {

// Those for one kind of processor.
const Loops* portable_loops();
#if defined(__x86_64__)
const Loops* avx2_loops();
const Loops* avx512_loops();
#endif

// Those of the best kind, unless the operator `processor` chose another.
const Loops& loops();

}  // namespace sparrow::embedding_bag
