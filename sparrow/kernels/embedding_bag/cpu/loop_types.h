// What the inner loops of loops.h are given: plain pointers and numbers. Whoever calls a loop has checked them, so a
// loop checks nothing.

#pragma once

#include "../../cpu.h"

namespace sparrow::embedding_bag {

// Lookups between asking for a row and using it.
INLINE constexpr int64_t ahead_of(int64_t bytes) {
  const int64_t rows = 16384 / bytes;
  return rows < 4 ? 4 : rows < 32 ? rows : 32;
}

// Asks for a cache line into the second cache: the first has too few lines under way at a time (measured).
INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// The same for the cache lines of a row, at most 4096 bytes of them.
INLINE void prefetch(const void* row, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(row), end = begin + (bytes < 4096 ? bytes : 4096);
  for (uintptr_t line = begin & ~uintptr_t{63}; line < end; line += 64) prefetch(reinterpret_cast<const void*>(line));
}

// Floats of scratch memory: for a row in whole vectors, and for the rows that a loop needs at most: four of its own,
// then the values, the state and the codes of a row that is not stored as fp32.
constexpr int64_t kScratchRow(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t kScratch(int64_t dim) { return 9 * kScratchRow(dim); }

enum Format { kFp32, kFp16, kBf16, kSplitBf16, kInt8, kInt4, kMxint8, kMxfp8, kMxfp6, kMxfp4 };

enum RuleKind { kSgd, kRowwiseAdagrad, kAdagrad, kAdam, kRowwiseAdam };
constexpr int64_t kFields = 3;  // the most state fields of a rule
constexpr int64_t kBlock = 32;  // columns of an MX row that share a scale

struct Rule {
  RuleKind kind;
  float lr, clip_norm, max_norm, eps;
  float l2;    // decay added to gradients
  float keep;  // what decoupled decay leaves of a weight
  double beta1, beta2;
  int fields;          // of the state
  bool wide[kFields];  // a number per weight; otherwise one per row
};

// What the random numbers of stochastic rounding depend on. row, column: of the component, with which the part begins.
struct Rounding {
  int64_t key, row, column, n;
};

// One storage of some of a table's rows.
struct Level {
  int64_t first;  // its first slot
  Format format;
  bool stochastic;  // how rows are rounded; else to nearest
  bool ceil;        // of MX formats: no scale cuts off a number
  uint8_t* rows;
  int64_t bytes;          // of a row in `rows`
  uint8_t* low;           // the low halves of kSplitBf16
  float* state[kFields];  // of bf16 where `narrow`
  bool narrow;
  uint8_t* touched;
  int32_t* changed;        // null, or for each row the number of the last update that changed it
  const int32_t* numbers;  // null, or which of the table's rows each is

  INLINE int64_t number(int64_t r) const { return numbers ? numbers[r] : r; }
  INLINE uint8_t* row(int64_t r) const { return rows + r * bytes; }
  INLINE bool is_plain() const { return format == kFp32 && !narrow; }
};

struct Table {
  int64_t rows, dim;
  Rule rule;
  Rounding rounding;
  const Level* levels;  // and one more, where the slots end

  // Whether slots are rows, all of fp32, and nobody asks when they changed; or there are no rows, only their numbers.
  INLINE bool is_simple() const {
    return !levels || (levels[1].first >= rows && levels->is_plain() && !levels->changed);
  }
  INLINE const Level& level_of(int64_t slot) const {
    const Level* level = levels;
    while (slot >= level[1].first) ++level;
    return *level;
  }
};

// Where the rows of lookups are. Where `mixed`, an address with the bit kFrame is that of a row of fp32.
struct Places {
  Format format;
  bool mixed;
  int64_t bytes;  // of a row
  const uint8_t* const* rows;
};
constexpr uintptr_t kFrame = uintptr_t{1} << (sizeof(uintptr_t) * 8 - 2);  // no address has it
INLINE const uint8_t* address_of(const uint8_t* row) {
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(row) & ~kFrame);
}

// Lookups of some bags of a feature, whose rows are found.
struct Pool {
  Places at;
  int64_t count;
  const int64_t* offsets;
  int64_t bags;
  const float* weights;  // null: all 1
  bool mean;
  float* out;
  int64_t stride, dim;
  float* scratch;
  const uint8_t* const* by;  // of `product`: the rows, of fp32 like the others, that multiply them
};

// Lookups of one bag, whose weights want their gradients.
struct Dots {
  Places at;
  int64_t count;
  const float* grad;
  float scale;
  float* out;
  int64_t dim;
  float* scratch;
};

// A lookup while it is sorted: its row, and in the low half its bag, or its place in the table's lookups if weighted.
INLINE int64_t row_of(uint64_t key) { return static_cast<int64_t>(key >> 32); }
INLINE uint32_t payload_of(uint64_t key) { return static_cast<uint32_t>(key); }

// The gradients of one feature's bags.
struct Source {
  int64_t first;  // its first bag among the table's
  const float* grad;
  int64_t stride;
};

// Sorted lookups of a table, whose gradients are to be summed per row.
struct Reduce {
  const Table* table;
  const uint64_t* keys;
  int64_t begin, end;
  const Source* sources;
  int64_t features;        // of whom there are gradients: sources
  const uint32_t* bag;     // null: the payload is the bag
  const float* weights;    // null: all 1
  const float* scale;      // null: all 1
  const float* const* by;  // null, or for each lookup of the table the row that multiplies its gradient, or null
  bool by_is_small;        // these rows are few: they are near without being asked for
  float* out;              // with `rows`: write sums and row numbers; without: apply the rule
  int64_t* rows;
  float* scratch;

  INLINE uint32_t bag_of(uint64_t key) const { return bag ? bag[payload_of(key)] : payload_of(key); }
  INLINE const float* gradient(uint64_t key) const {
    const int64_t b = bag_of(key);
    const Source* source = sources;
    for (int64_t left = features; left > 1;) {  // halved without a branch: whose bag it is cannot be foretold
      const int64_t half = left / 2;
      source += b >= source[half].first ? half : 0;
      left -= half;
    }
    return source->grad + (b - source->first) * source->stride;
  }
};

// Rows of a table, and their summed gradients.
struct Update {
  const Table* table;
  const int64_t* rows;
  const float* grad;
  int64_t begin, end;
  float* scratch;
};

// Rows of a table that enter frames, which are its first level, and those that leave them. All are slots.
struct Replace {
  const Table* table;
  const int64_t *frames, *rows, *old;  // old: -1 where a frame was free
  int64_t begin, end;
  float* scratch;
};

// The loops of one kind of processor.
struct Loops {
  void (*pool)(const Pool&);
  void (*copy)(const Pool&);
  void (*product)(const Pool&, bool is_unpooled);
  void (*dots)(const Dots&);
  void (*reduce)(const Reduce&);
  void (*update)(const Update&);
  void (*replace)(const Replace&);
};

}  // namespace sparrow::embedding_bag
