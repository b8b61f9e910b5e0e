// Lookups are sorted as keys of 64 bits: the row, and which lookup or bag it is. A team of threads first deals the keys
// out, so that each thread owns a range of rows, and then every thread sorts its own.

#include "sorting.h"

#include <bit>
#include <utility>

namespace sparrow::embedding_bag {
namespace {

constexpr int kDigit = 11;                 // the most bits that one pass of the sort looks at, where it has several
constexpr int kOnlyDigit = 16;             // the most bits that its only pass looks at
constexpr int64_t kSeveral = 3 << kDigit;  // counters of several passes: largest for 32 bits
constexpr int64_t kSample = 512;           // lookups that decide which rows are whose

// How the rows of a table are sorted: few passes for many keys, few counters for few. One pass is enough where each row
// has two keys on average, so that counters are fewer than keys.
struct Digits {
  int bits, each, passes;

  Digits(int64_t N, int64_t rows) : bits(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(rows - 1, 1)))) {
    const int most = rows <= N / 2 && bits <= kOnlyDigit
                         ? bits
                         : std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(N))), 6, kDigit);
    passes = (bits + most - 1) / most;
    each = (bits + passes - 1) / passes;
  }
};

// Counters that a sort of N keys takes at most.
int64_t counters_for(int64_t N) { return std::max(kSeveral, std::min(N, int64_t{1} << kOnlyDigit)); }

// Least-significant-digit radix sort by row; it is stable, so a row's lookups stay in order of occurrence. The sorted
// keys are in `keys` after an even number of passes, else in `other`.
// Not inlined: with it inside its caller `row_gradients` took 4 to 10 % longer (measured).
__attribute__((noinline)) void sort_by_row(uint64_t* keys, uint64_t* other, int64_t N, const Digits& digits,
                                           uint32_t* counters) {
  const int64_t buckets = 1LL << digits.each;
  const uint64_t mask = buckets - 1;
  std::fill(counters, counters + buckets * digits.passes, 0u);
  for (int64_t i = 0; i < N; ++i)
    for (int pass = 0; pass < digits.passes; ++pass)
      ++counters[pass * buckets + (keys[i] >> (32 + pass * digits.each) & mask)];
  for (int pass = 0; pass < digits.passes; ++pass) {
    uint32_t *next = counters + pass * buckets, total = 0;
    for (int64_t digit = 0; digit < buckets; ++digit) total += std::exchange(next[digit], total);
    const int shift = 32 + pass * digits.each;
    for (int64_t i = 0; i < N; ++i) other[next[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, other);
  }
}

// Calls emit(slot, payload, place) on a feature's lookups in bags [begin, end), in order, and writes what `Reduce`
// needs beside the keys. place: the lookup's number among the table's, `first` being that of the feature's first one.
template <class Emit>
INLINE void each_lookup(const Batch& batch, const Feature& f, int64_t first_bag, int64_t first, int64_t begin,
                        int64_t end, uint32_t* bag, float* weights, float* scale, const float** by, int64_t dim,
                        const Emit& emit) {
  batch.with_slots([&](const auto* slots) {
    int64_t place = first + batch.lookup_of(f, begin) - f.low;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t from = batch.lookup_of(f, b), to = f.pooling == kNone ? from + 1 : batch.offsets[f.first + b + 1];
      const uint64_t number = static_cast<uint64_t>(first_bag + b);
      if (scale) scale[number] = f.pooling == kMean && to > from ? 1.0f / static_cast<float>(to - from) : 1.0f;
      for (int64_t n = from; n < to; ++n, ++place) {
        emit(static_cast<uint64_t>(slots[n]), bag ? static_cast<uint64_t>(place) : number, place);
        if (bag) bag[place] = static_cast<uint32_t>(number);
        if (weights) weights[place] = batch.weights[n - f.low + f.weights_low];
        if (by) by[place] = f.by_rows ? f.by_rows + slots[n - f.low + f.by_low] * dim : nullptr;
      }
    }
  });
}

bool is_single(const Batch& batch, const Feature& f) {
  if (f.pooling == kNone) return true;
  bool single = f.high - f.low == f.bags;
  if (single)
    for (int64_t b = 0; b < f.bags; ++b) single &= batch.offsets[f.first + b + 1] - batch.offsets[f.first + b] == 1;
  return single;
}

// Rows that cut a table's lookups into `team` parts of about equal number, from a sample.
std::vector<uint64_t> splitters(const Batch& batch, const Share& share, int64_t team) {
  std::vector<uint64_t> sample;
  for (const Feature* f : share.features)
    batch.with_slots([&](const auto* slots) {
      const int64_t count = f->high - f->low, step = std::max<int64_t>(1, share.N / kSample);
      for (int64_t n = 0; n < count; n += step) sample.push_back(static_cast<uint64_t>(slots[f->low + n]));
    });
  std::sort(sample.begin(), sample.end());
  std::vector<uint64_t> found;
  for (int64_t c = 1; c < team; ++c) found.push_back(sample[sample.size() * c / team]);
  return found;
}

}  // namespace

std::vector<Share> shares_of(const Batch& batch, int64_t tables) {
  std::vector<Share> shares(tables);
  for (const Feature& f : batch.features) {
    Share& share = shares[f.table];
    share.features.push_back(&f);
    share.first.push_back(share.N);
    share.sources.push_back({share.bags, f.vectors, f.stride});
    share.N += f.high - f.low;
    share.bags += f.units();
    share.mean |= f.pooling == kMean;
    share.product |= f.by_rows != nullptr;
  }
  for (Share& share : shares)
    for (const Feature* f : share.features)
      if (batch.weights || share.product) share.single = share.single && is_single(batch, *f);
  for (const Share& share : shares)
    check(share.N < kMax && share.bags < kMax, "more than 2**32 lookups in a table; use impl='reference'");
  return shares;
}

std::vector<int64_t> costs_of(const std::vector<Share>& shares) {
  std::vector<int64_t> costs;
  for (const Share& share : shares) costs.push_back(share.N);
  return costs;
}

std::vector<Workspace> workspaces(const std::vector<Share>& shares, int64_t threads, bool weighted, int64_t dim,
                                  bool own_keys) {
  std::vector<Workspace> spaces(threads);
  const std::vector<bool> shared = large(costs_of(shares), threads);
  for (int64_t worker = 0; worker < threads; ++worker) {
    Workspace& space = spaces[worker];
    int64_t N = 0, bags = 0, products = 0;
    for (size_t t = 0; t < shares.size(); ++t)
      if (worker == 0 || !shared[t]) {
        N = std::max(N, shares[t].N);
        bags = std::max(bags, shares[t].mean ? shares[t].bags : 0);
        products = std::max(products, shares[t].product ? shares[t].N : 0);
      }
    space.counters.take((worker == 0 ? threads : 1) * counters_for(N));
    space.scratch.take((worker == 0 ? threads : 1) * kScratch(dim));
    if (!own_keys) continue;
    space.keys.take(N);
    space.other.take(N);
    space.scale.take(bags);
    space.by.take(products);
    space.bag.take(weighted ? N : products);
    if (weighted) space.weights.take(N);
  }
  return spaces;
}

void sorted(const Batch& batch, const Share& share, int64_t rows, Workspace& space, int64_t team, Reduce& r,
            const Then& then) {
  uint64_t *keys = space.keys.get(), *other = space.other.get();
  uint32_t* bag = (batch.weights || share.product) && !share.single ? space.bag.get() : nullptr;
  const float** by = share.product ? space.by.get() : nullptr;
  const int64_t dim = r.table->dim;
  float *weights = batch.weights ? space.weights.get() : nullptr, *scale = share.mean ? space.scale.get() : nullptr;
  r.sources = share.sources.data();
  r.features = static_cast<int64_t>(share.sources.size());
  r.bag = bag;
  r.weights = weights;
  r.scale = scale;
  r.by = by;
  r.by_is_small = true;
  for (const Feature* f : share.features) r.by_is_small = r.by_is_small && f->by_is_small;
  const Digits digits(share.N / team, rows);
  const int64_t counters_each = counters_for(share.N);  // so far apart are those of the team's threads
  const int64_t S = static_cast<int64_t>(share.features.size());
  auto finish = [&](int64_t c, int64_t begin, int64_t end) {
    sort_by_row(keys + begin, other + begin, end - begin, digits, space.counters.get() + c * counters_each);
    then(c, digits.passes % 2 ? other : keys, begin, end);
  };
  const std::vector<int64_t>& first = share.first;
  if (team == 1) {
    for (int64_t s = 0; s < S; ++s)
      each_lookup(batch, *share.features[s], share.sources[s].first, first[s], 0, share.features[s]->units(), bag,
                  weights, scale, by, dim,
                  [keys](uint64_t slot, uint64_t payload, int64_t place) { keys[place] = slot << 32 | payload; });
    return finish(0, 0, share.N);
  }
  const auto cuts = splitters(batch, share, team);
  std::vector<int64_t> places(S * team * team);  // (feature, its part, owner): lookups, then where they go
  auto each_part = [&](int64_t c, int64_t s, bool write, const auto& emit) {
    const Feature& f = *share.features[s];
    each_lookup(batch, f, share.sources[s].first, first[s], f.units() * c / team, f.units() * (c + 1) / team,
                write ? bag : nullptr, write ? weights : nullptr, write ? scale : nullptr, write ? by : nullptr, dim,
                [&](uint64_t slot, uint64_t payload, int64_t) {
                  int64_t owner = 0;
                  for (const uint64_t cut : cuts) owner += slot >= cut;
                  emit(owner, slot << 32 | payload);
                });
  };
  // Each thread counts, in its part of each feature, how many lookups go to which owner.
  parallel(team, [&](int64_t c) {
    uint32_t* count = space.counters.get() + c * counters_each;  // apart from the other threads'
    for (int64_t s = 0; s < S; ++s) {
      std::fill(count, count + team, 0u);
      each_part(c, s, false, [count](int64_t owner, uint64_t) { ++count[owner]; });
      std::copy(count, count + team, places.begin() + (s * team + c) * team);
    }
  });
  // Owner by owner, and for each in order of occurrence, every count gives way to the place of its first lookup.
  std::vector<int64_t> edges{0};
  int64_t total = 0;
  for (int64_t owner = 0; owner < team; ++owner) {
    for (int64_t part = 0; part < S * team; ++part) total += std::exchange(places[part * team + owner], total);
    edges.push_back(total);
  }
  // The same threads go over the same parts again and put the keys there.
  parallel(team, [&](int64_t c) {
    uint32_t* next = space.counters.get() + c * counters_each;
    for (int64_t s = 0; s < S; ++s) {
      std::copy_n(places.begin() + (s * team + c) * team, team, next);
      each_part(c, s, true, [keys, next](int64_t owner, uint64_t key) { keys[next[owner]++] = key; });
    }
  });
  parallel(team, [&](int64_t c) { finish(c, edges[c], edges[c + 1]); });
}

}  // namespace sparrow::embedding_bag
