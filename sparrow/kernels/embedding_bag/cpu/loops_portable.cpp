// The inner loops for any processor.

#include "processors.h"

#include <algorithm>

namespace sparrow::embedding_bag {
namespace {

#define LANES 4
namespace portable {
#include "loops.h"
}  // namespace portable

}  // namespace

const Loops* portable_loops() { return &portable::loops; }

}  // namespace sparrow::embedding_bag
