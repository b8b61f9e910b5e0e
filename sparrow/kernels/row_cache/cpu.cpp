// Which rows are in a set-associative cache, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cstdint>
#include <limits>
#include <vector>

namespace sparrow {
namespace {

constexpr int64_t kWays = 32;

template <class T>
T* data(const Tensor& tensor, ScalarType type, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with one dimension and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

struct Cache {
  int32_t* tags;
  int64_t frames, rows, multiplier, sets;
  Cache(const Tensor& tags_F, int64_t rows, int64_t multiplier)
      : tags(data<int32_t>(tags_F, ScalarType::Int, "tags_F")),
        frames(tags_F.numel()),
        rows(rows),
        multiplier(multiplier),
        sets(frames / kWays) {
    check(frames >= kWays && frames % kWays == 0, "tags_F: expected ", kWays, " frames a set");
    check(rows >= 1 && rows <= std::numeric_limits<int32_t>::max() && multiplier >= 1 && multiplier <= 2 * rows,
          "rows: expected less than 2**31, and a multiplier of about as many");
  }
  INLINE int64_t first_way(int64_t row) const { return row * multiplier % rows % sets * kWays; }
  // The row's frame, or -1.
  INLINE int64_t find(int64_t row) const {
    const int64_t first = first_way(row);
    const int32_t wanted = static_cast<int32_t>(row);
    int32_t way = -1;
    for (int32_t w = 0; w < kWays; ++w) way = tags[first + w] == wanted ? w : way;
    return way < 0 ? -1 : first + way;
  }
};

template <class Row>
FOR_PROCESSORS void slots(const Cache& cache, const Row* rows, int64_t begin, int64_t end, int64_t* to) {
  for (int64_t n = begin; n < end; ++n) {
    const int64_t frame = cache.find(rows[n]);
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
    parallel(team, [&](int64_t c) { slots(cache, from, N * c / team, N * (c + 1) / team, to); });
  });
  return slots_N;
}

// What admission knows of frames and rows.
struct Use {
  int32_t* stamps;
  uint8_t* counts;  // null: LRU
  int32_t batch, evictable;
  INLINE void count(int64_t row) const {
    if (counts) counts[row] += counts[row] < 255;
  }
};

// Stamps the rows [begin, end) that are in, and counts each once. Returns how many; those that are out go to `missing`.
template <class Row>
FOR_PROCESSORS int64_t stamp(const Cache& cache, const Use& use, const Row* rows, int64_t begin, int64_t end,
                             std::vector<int64_t>& missing) {
  int64_t hits = 0;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t frame = cache.find(rows[n]);
    if (frame < 0) {
      missing.push_back(rows[n]);
    } else if (__atomic_exchange_n(use.stamps + frame, use.batch, __ATOMIC_RELAXED) != use.batch) {
      use.count(rows[n]);  // no other thread was first
      ++hits;
    }
  }
  return hits;
}

// Where a row that is out shall enter, or -1.
INLINE int64_t way_for(const Cache& cache, const Use& use, int64_t row) {
  constexpr uint64_t kNone = ~uint64_t{0};
  const int64_t first = cache.first_way(row);
  uint64_t best = kNone;
  int64_t frame = -1;
  uint8_t least = 0;
  for (int64_t f = first; f < first + kWays; ++f) {
    const int32_t tag = cache.tags[f], stamp = use.stamps[f];
    if (tag < 0) return f;
    if (stamp > use.evictable) continue;
    const uint64_t key = static_cast<uint64_t>(stamp) << 32 | static_cast<uint32_t>(tag);
    const uint8_t count = use.counts ? use.counts[tag] : 0;
    if (frame >= 0 && (count > least || (count == least && key > best))) continue;
    best = key;
    least = count;
    frame = f;
  }
  return frame >= 0 && use.counts && use.counts[row] <= least ? -1 : frame;
}

std::vector<Tensor> row_cache_admit(Tensor tags_F, Tensor stamps_F, Tensor counts_R, const Tensor& rows_N, int64_t rows,
                                    int64_t multiplier, int64_t batch, int64_t evictable) {
  const Cache cache(tags_F, rows, multiplier);
  uint8_t* counts = counts_R.numel() ? data<uint8_t>(counts_R, ScalarType::Byte, "counts_R") : nullptr;
  check(stamps_F.numel() == cache.frames && (!counts || counts_R.numel() == rows),
        "stamps_F, counts_R: expected one for each frame, and for each row or none");
  check(batch > evictable && batch <= std::numeric_limits<int32_t>::max(), "batch: expected one after `evictable`");
  const Use use{data<int32_t>(stamps_F, ScalarType::Int, "stamps_F"), counts, static_cast<int32_t>(batch),
                static_cast<int32_t>(std::max<int64_t>(evictable, -1))};
  const int64_t N = rows_N.numel(), team = std::max<int64_t>(1, std::min(team_for(N * 16), N));
  std::vector<std::vector<int64_t>> missing(team), moves(team);
  std::vector<int64_t> hits(team), unique(team);
  with_rows(rows_N, rows, [&](const auto* from) {
    parallel(team, [&](int64_t c) { hits[c] = stamp(cache, use, from, N * c / team, N * (c + 1) / team, missing[c]); });
  });
  parallel(team, [&](int64_t c) {  // each with sets of its own
    const int64_t first = cache.sets * c / team * kWays, last = cache.sets * (c + 1) / team * kWays;
    std::vector<int64_t> mine;
    for (const auto& part : missing)
      for (int64_t row : part)
        if (team == 1 || (cache.first_way(row) >= first && cache.first_way(row) < last)) mine.push_back(row);
    std::sort(mine.begin(), mine.end());
    mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
    unique[c] = static_cast<int64_t>(mine.size());
    for (int64_t row : mine) use.count(row);
    for (int64_t row : mine) {
      const int64_t frame = way_for(cache, use, row);
      if (frame < 0) continue;
      moves[c].insert(moves[c].end(), {frame, row, cache.tags[frame]});
      cache.tags[frame] = static_cast<int32_t>(row);
      use.stamps[frame] = use.batch;
    }
  });
  int64_t total = 0, found[2] = {0, 0};
  for (int64_t c = 0; c < team; ++c) {
    total += static_cast<int64_t>(moves[c].size());
    found[0] += hits[c];
    found[1] += hits[c] + unique[c];
  }
  Tensor moves_L3 = empty({total / 3, 3}, ScalarType::Long), found_2 = empty({2}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(moves_L3.data_ptr());
  for (const auto& part : moves) to = std::copy(part.begin(), part.end(), to);
  std::copy(found, found + 2, static_cast<int64_t*>(found_2.data_ptr()));
  return {moves_L3, found_2};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_cache_slots(Tensor tags, Tensor rows, int total, int multiplier) -> Tensor");
  m.def(
      "row_cache_admit(Tensor(a!) tags, Tensor(b!) stamps, Tensor(c!) counts, Tensor rows, int total, int multiplier,"
      " int batch, int evictable) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("row_cache_slots", TORCH_BOX(&row_cache_slots));
  m.impl("row_cache_admit", TORCH_BOX(&row_cache_admit));
}

}  // namespace sparrow
