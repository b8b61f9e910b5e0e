// The frames of a set-associative cache: where a row is, and where it may enter. cpu.cpp beside this file admits
// batches.

#pragma once

#include "../cpu.h"

#include <cstdint>
#include <limits>

namespace sparrow::row_cache {

constexpr int64_t kWays = 32;

template <class T>
inline T* data(const Tensor& tensor, ScalarType type, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with one dimension and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

// A number for each way of a set, in vectors that processors have. Choices are made by masks: the compiler makes those
// of `?:` number by number.
constexpr int64_t kVectors = 4;
typedef int32_t Eight __attribute__((vector_size(32)));
struct Ways {
  Eight v[kVectors];
};
#define EACH(k) _Pragma("GCC unroll 4") for (int64_t k = 0; k < kVectors; ++k)

INLINE Ways load(const int32_t* from) {
  Ways w;
  __builtin_memcpy(&w, from, sizeof w);
  return w;
}

INLINE Eight chosen(const Eight& mask, const Eight& one, const Eight& other) { return (mask & one) | (~mask & other); }

// The least number of those that may be taken, by their masks; the most that there is where none may.
INLINE int32_t least(const Ways& of, const Ways& may) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  Eight most = Eight{} + kMost, found = most;
  EACH(k) {
    const Eight taken = chosen(may.v[k], of.v[k], most);
    found = chosen(taken < found, taken, found);
  }
  typedef int32_t Four __attribute__((vector_size(16)));
  Four halves[2];
  __builtin_memcpy(halves, &found, sizeof found);
  const Four mask = halves[0] < halves[1], half = (mask & halves[0]) | (~mask & halves[1]);
  return std::min(std::min(half[0], half[1]), std::min(half[2], half[3]));
}

// The way with a number that no other has, or -1.
INLINE int64_t way_of(const Ways& ways, int32_t number) {
  const Eight place{1, 2, 3, 4, 5, 6, 7, 8};
  Eight found{};
  EACH(k) found |= (ways.v[k] == number) & (place + static_cast<int32_t>(8 * k));
  int64_t lanes[4];
  __builtin_memcpy(lanes, &found, sizeof found);
  const int64_t both = lanes[0] | lanes[1] | lanes[2] | lanes[3];
  return ((both | both >> 32) & 0xff) - 1;
}

// Remainders of numbers below 2^63, without a division.
struct Divisor {
  uint64_t by, inverse;
  explicit Divisor(uint64_t by) : by(by), inverse(~uint64_t{0} / by) {}
  INLINE uint64_t remainder(uint64_t x) const {
    const uint64_t about = static_cast<uint64_t>(static_cast<unsigned __int128>(x) * inverse >> 64);
    const uint64_t rest = x - about * by;  // `about` is the quotient or one less
    return rest < by ? rest : rest - by;
  }
};

struct Cache {
  int32_t* tags;
  int64_t frames, rows, multiplier, sets,
      stride;  // the last: from the tags of a set to those of the next, and so of stamps
  Divisor all, of_sets;
  Cache(const Tensor& tags_F, int64_t rows, int64_t multiplier)
      : Cache(data<int32_t>(tags_F, ScalarType::Int, "tags_F"), tags_F.numel(), rows, multiplier, kWays) {}
  Cache(int32_t* tags, int64_t frames, int64_t rows, int64_t multiplier, int64_t stride)
      : tags(tags),
        frames(frames),
        rows(rows),
        multiplier(multiplier),
        sets(frames / kWays),
        stride(stride),
        all(std::max<int64_t>(rows, 1)),
        of_sets(std::max<int64_t>(sets, 1)) {
    check(frames >= kWays && frames % kWays == 0, "tags_F: expected ", kWays, " frames a set");
    check(rows >= 1 && rows <= std::numeric_limits<int32_t>::max() && multiplier >= 1 && multiplier <= 2 * rows,
          "rows: expected less than 2**31, and a multiplier of about as many");
  }
  INLINE int64_t set_of(int64_t row) const { return of_sets.remainder(all.remainder(row * multiplier)); }
  // The row's frame in a set, or -1.
  INLINE int64_t find(int64_t row, int64_t set) const {
    const int64_t way = way_of(load(tags + set * stride), static_cast<int32_t>(row));
    return way < 0 ? -1 : set * kWays + way;
  }
};

// What admission knows of frames and rows.
struct Use {
  int32_t* stamps;
  int32_t batch, evictable;
  uint8_t* counts = nullptr;  // null: the policy does not count
  int64_t most = 0;
  bool by_count = false, is_strict = false;  // see policies/
  INLINE void count(int64_t row) const {
    if (counts) counts[row] += counts[row] < most;
  }
};

// A set while rows enter it.
struct Set {
  int32_t *const tags, *const stamps;
  int64_t free;        // ways
  bool known = false;  // whether these two are
  int32_t least;       // the least rank of those that may leave
  Ways may;            // those of this rank that may leave

  INLINE Set(const Cache& cache, const Use& use, int64_t set)
      : tags(cache.tags + set * cache.stride), stamps(use.stamps + set * cache.stride), free(0) {
    for (int64_t way = 0; way < kWays; ++way) free += tags[way] < 0;
  }

  INLINE void look(const Use& use) {
    const Ways of = load(stamps);
    Ways ranks = of;
    if (use.by_count) {
      int32_t counts[kWays];
      for (int64_t way = 0; way < kWays; ++way) counts[way] = use.counts[tags[way]];
      ranks = load(counts);
    }
    EACH(k) may.v[k] = of.v[k] <= use.evictable;
    least = row_cache::least(ranks, may);
    EACH(k) may.v[k] &= ranks.v[k] == least;
    known = true;
  }

  // The way where a row that is out shall enter, or -1: of the least rank the least stamp, of those the least row.
  INLINE int64_t way_for(const Use& use, int64_t row) {
    if (free) return std::find(tags, tags + kWays, -1) - tags;
    if (!known) look(use);
    if (least == std::numeric_limits<int32_t>::max()) return -1;
    const Ways of = load(stamps), in = load(tags);
    const int32_t stamp = row_cache::least(of, may);
    Ways those;
    EACH(k) those.v[k] = may.v[k] & (of.v[k] == stamp);
    const int32_t leaves = row_cache::least(in, those);
    return use.is_strict && use.counts[row] <= use.counts[leaves] ? -1 : way_of(in, leaves);
  }

  INLINE void enter(const Use& use, int64_t way, int64_t row) {
    tags[way] = static_cast<int32_t>(row);
    stamps[way] = use.batch;
    free -= free > 0;
    known = false;
  }
};

#undef EACH

}  // namespace sparrow::row_cache
