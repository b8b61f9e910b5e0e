// Which rows are in a set-associative cache, with torch's stable ABI. reference.py beside this file is the definition.

#include "cache.h"

#include <array>
#include <cstdint>
#include <vector>

namespace sparrow {
namespace {

using namespace row_cache;

// Calls for what the set of a row that comes soon holds. Frames are gigabytes, so each is a wait for memory else.
constexpr int64_t kSoon = 12;
template <class Row>
INLINE void fetch_set(const Cache& cache, const Row* rows, int64_t n, int64_t end, const int32_t* of) {
  if (n + kSoon >= end) return;
  const int32_t* const at = of + cache.set_of(rows[n + kSoon]) * kWays;
  __builtin_prefetch(at);
  __builtin_prefetch(at + kWays / 2);
}

// Where the rows [begin, end) are. again: it is asked only for those that were out.
template <class Row>
FOR_PROCESSORS void slots(const Cache& cache, const Row* rows, int64_t begin, int64_t end, bool again, int64_t* to) {
  for (int64_t n = begin; n < end; ++n) {
    if (again && to[n] < cache.frames) continue;
    if (!again) fetch_set(cache, rows, n, end, cache.tags);
    const int64_t frame = cache.find(rows[n], cache.set_of(rows[n]));
    to[n] = frame < 0 ? cache.frames + rows[n] : frame;
  }
}

template <class Row>
bool within(const Row* rows, int64_t count, int64_t limit) {
  bool fine = true;
  for (int64_t n = 0; n < count; ++n) fine &= static_cast<uint64_t>(rows[n]) < static_cast<uint64_t>(limit);
  return fine;
}

// Calls f(rows) with their own type, when all are rows of the table.
template <class F>
void with_rows(const Tensor& rows_N, int64_t limit, const F& f) {
  auto checked = [&](const auto* rows) {
    check(within(rows, rows_N.numel(), limit), "rows_N: a row is outside [0, ", limit, ")");
    f(rows);
  };
  if (rows_N.scalar_type() == ScalarType::Int) checked(data<int32_t>(rows_N, ScalarType::Int, "rows_N"));
  else checked(data<int64_t>(rows_N, ScalarType::Long, "rows_N"));
}

Tensor row_cache_slots(const Tensor& tags_F, const Tensor& rows_N, int64_t rows, int64_t multiplier) {
  const Cache cache(tags_F, rows, multiplier);
  const int64_t N = rows_N.numel();
  Tensor slots_N = empty({N}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(slots_N.data_ptr());
  with_rows(rows_N, rows, [&](const auto* from) {
    const int64_t team = std::max<int64_t>(1, std::min(team_for(N * 8), N));
    parallel(team, [&](int64_t c) { slots(cache, from, N * c / team, N * (c + 1) / team, false, to); });
  });
  return slots_N;
}

// Stamps the rows [begin, end) that are in, and counts each once. Returns how many; those that are out go to `missing`,
// behind the number of their set, some of them more than once.
template <class Row>
FOR_PROCESSORS int64_t stamp(const Cache& cache, const Use& use, const Row* rows, const int64_t* slots, int64_t begin,
                             int64_t end, std::vector<uint64_t>& missing) {
  int64_t hits = 0;
  for (int64_t n = begin; n < end; ++n) {
    if (n + kSoon < end && slots[n + kSoon] < cache.frames) __builtin_prefetch(use.stamps + slots[n + kSoon], 1);
    if (slots[n] >= cache.frames) {
      missing.push_back(static_cast<uint64_t>(cache.set_of(rows[n])) << 32 | static_cast<uint32_t>(rows[n]));
      continue;
    }
    int32_t* const at = use.stamps + slots[n];
    if (__atomic_load_n(at, __ATOMIC_RELAXED) != use.batch &&
        __atomic_exchange_n(at, use.batch, __ATOMIC_RELAXED) != use.batch) {
      use.count(rows[n]);  // no other thread was first
      ++hits;
    }
  }
  return hits;
}

// For each row that enters the frame, the row, and the row that was there.
using Moves = std::array<std::vector<int64_t>, 3>;

// Returns the missing rows of some sets behind the numbers of their sets, ascending, once each. They are brought into
// as many parts of the sets as there are rows at most, and each part is sorted: so the time does not grow with the
// sets.
std::vector<uint64_t> ascending(const std::vector<std::vector<uint64_t>>& missing, uint64_t first, uint64_t last) {
  const auto each = [&](const auto& f) {
    for (const auto& part : missing)
      for (uint64_t key : part)
        if (key >> 32 >= first && key >> 32 < last) f(key);
  };
  uint64_t count = 0;
  each([&](uint64_t) { ++count; });
  if (!count) return {};
  int shift = 32;
  while ((last - first) >> (shift - 32) > count) ++shift;
  const auto part_of = [&](uint64_t key) { return (key - (first << 32)) >> shift; };
  std::vector<int64_t> ends((last - first - 1 >> (shift - 32)) + 2);
  each([&](uint64_t key) { ++ends[part_of(key) + 1]; });
  for (size_t part = 1; part < ends.size(); ++part) ends[part] += ends[part - 1];
  std::vector<uint64_t> keys(count);
  std::vector<int64_t> at(ends);
  each([&](uint64_t key) { keys[at[part_of(key)]++] = key; });
  for (size_t part = 1; part < ends.size(); ++part) std::sort(keys.begin() + ends[part - 1], keys.begin() + ends[part]);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

// Lets the missing rows of some sets in, each set's in ascending order. Returns how many different ones there are.
FOR_PROCESSORS int64_t enter(const Cache& cache, const Use& use, const std::vector<std::vector<uint64_t>>& missing,
                             uint64_t first, uint64_t last, Moves& moves) {
  const std::vector<uint64_t> keys = ascending(missing, first, last);
  for (auto& numbers : moves) numbers.reserve(keys.size());
  for (size_t n = 0; n < keys.size();) {
    const int64_t set = static_cast<int64_t>(keys[n] >> 32);
    if (n + 4 < keys.size()) {  // its successors' ways, which are four lines
      const int64_t soon = static_cast<int64_t>(keys[n + 4] >> 32) * kWays;
      __builtin_prefetch(use.stamps + soon);
      __builtin_prefetch(use.stamps + soon + kWays / 2);
    }
    Set ways(cache, use, set);
    const size_t begin = n;
    for (; n < keys.size() && static_cast<int64_t>(keys[n] >> 32) == set; ++n)
      use.count(static_cast<uint32_t>(keys[n]));
    for (size_t m = begin; m < n; ++m) {
      const int64_t row = static_cast<uint32_t>(keys[m]), way = ways.way_for(use, row);
      if (way < 0) continue;
      moves[0].push_back(set * kWays + way);
      moves[1].push_back(row);
      moves[2].push_back(ways.tags[way]);
      ways.enter(use, way, row);
    }
  }
  return static_cast<int64_t>(keys.size());
}

std::vector<Tensor> row_cache_admit(Tensor tags_F, Tensor stamps_F, Tensor counts_R, const Tensor& rows_N, int64_t rows,
                                    int64_t multiplier, int64_t batch, int64_t evictable, int64_t most, bool by_count,
                                    bool is_strict) {
  const Cache cache(tags_F, rows, multiplier);
  uint8_t* counts = counts_R.numel() ? data<uint8_t>(counts_R, ScalarType::Byte, "counts_R") : nullptr;
  check(stamps_F.numel() == cache.frames && (counts ? counts_R.numel() == rows : !by_count && !is_strict),
        "stamps_F, counts_R: expected one for each frame, and for each row or none");
  check(batch > evictable && batch <= std::numeric_limits<int32_t>::max(), "batch: expected one after `evictable`");
  const Use use{data<int32_t>(stamps_F, ScalarType::Int, "stamps_F"),
                static_cast<int32_t>(batch),
                static_cast<int32_t>(std::max<int64_t>(evictable, std::numeric_limits<int32_t>::min())),
                counts,
                most,
                by_count,
                is_strict};
  const int64_t N = rows_N.numel(), team = std::max<int64_t>(1, std::min(team_for(N * 16), N));
  std::vector<std::vector<uint64_t>> missing(team);
  std::vector<Moves> moves(team);
  std::vector<int64_t> hits(team), unique(team);
  Tensor slots_N = empty({N}, ScalarType::Long);
  int64_t* const places = static_cast<int64_t*>(slots_N.data_ptr());
  with_rows(rows_N, rows, [&](const auto* from) {
    parallel(team, [&](int64_t c) {  // in two loops: whether a row is in cannot be foretold
      const int64_t begin = N * c / team, end = N * (c + 1) / team;
      slots(cache, from, begin, end, false, places);
      hits[c] = stamp(cache, use, from, places, begin, end, missing[c]);
    });
  });
  parallel(team, [&](int64_t c) {  // each with sets of its own
    unique[c] = enter(cache, use, missing, cache.sets * c / team, cache.sets * (c + 1) / team, moves[c]);
  });
  with_rows(rows_N, rows, [&](const auto* from) {
    parallel(team, [&](int64_t c) { slots(cache, from, N * c / team, N * (c + 1) / team, true, places); });
  });
  int64_t total = 0, found[2] = {0, 0};
  for (int64_t c = 0; c < team; ++c) {
    total += static_cast<int64_t>(moves[c][0].size());
    found[0] += hits[c];
    found[1] += hits[c] + unique[c];
  }
  std::vector<Tensor> made;
  for (int64_t number = 0; number < 3; ++number) {
    made.push_back(empty({total}, ScalarType::Long));
    int64_t* to = static_cast<int64_t*>(made.back().data_ptr());
    for (const auto& part : moves) to = std::copy(part[number].begin(), part[number].end(), to);
  }
  made.push_back(slots_N);
  made.push_back(empty({2}, ScalarType::Long));
  std::copy(found, found + 2, static_cast<int64_t*>(made.back().data_ptr()));
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_cache_slots(Tensor tags, Tensor rows, int total, int multiplier) -> Tensor");
  m.def(
      "row_cache_admit(Tensor(a!) tags, Tensor(b!) stamps, Tensor(c!) counts, Tensor rows, int total, int multiplier,"
      " int batch, int evictable, int most, bool by_count, bool is_strict) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("row_cache_slots", TORCH_BOX(&row_cache_slots));
  m.impl("row_cache_admit", TORCH_BOX(&row_cache_admit));
}

}  // namespace sparrow
