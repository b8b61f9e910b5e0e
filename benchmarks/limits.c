/* What this machine can do at most: plain loops that a benchmark's share of the limit refers to. Built by limits.py. */
#include <stdint.h>
#include <string.h>

/* Reads the rows of `dim` floats that `slots` names and gives back a sum, so that no read can be left out. */
float gather(const float* rows, int64_t dim, const int64_t* slots, int64_t count) {
  float lanes[16] = {0}, sum = 0;
  for (int64_t n = 0; n < count; ++n) {
    if (n + 16 < count) {
      const float* ahead = rows + slots[n + 16] * dim;
      for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(ahead + d);
    }
    const float* row = rows + slots[n] * dim;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16)
      for (int j = 0; j < 16; ++j) lanes[j] += row[d + j];
    for (; d < dim; ++d) lanes[d % 16] += row[d];
  }
  for (int j = 0; j < 16; ++j) sum += lanes[j];
  return sum;
}

void copy(char* to, const char* from, int64_t bytes) { memcpy(to, from, bytes); }
