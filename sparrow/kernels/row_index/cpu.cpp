// Which id has which row, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace sparrow {
namespace {

constexpr int64_t kFree = -1, kShared = -2, kCounters = 4;
constexpr uint64_t kMost = (uint64_t{1} << 63) - 1;
constexpr uint64_t kOdd1 = 0x2127599BF4325C37, kOdd2 = 0x6A09E667F3BCC909;  // those of core/mixing.py
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr int64_t kAhead = 12;  // ids whose places are asked for before they are looked at

// The number by which odd ones are divided, modulo 2^64 (Newton).
constexpr uint64_t inverse(uint64_t odd) {
  uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x;
}

INLINE uint64_t mix63(uint64_t x) {
  x = (x ^ x >> 32) * kOdd1 & kMost;
  x = (x ^ x >> 29) * kOdd2 & kMost;
  return x ^ x >> 32;
}

INLINE uint64_t unmix63(uint64_t x) {
  x = (x ^ x >> 32) * inverse(kOdd2) & kMost;
  x = (x ^ x >> 29 ^ x >> 58) * inverse(kOdd1) & kMost;
  return x ^ x >> 32;
}

INLINE uint64_t splitmix64(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

template <class T>
T* data(const Tensor& tensor, ScalarType type, const char* name) {
  check(tensor.scalar_type() == type && tensor.is_contiguous(), name,
        ": expected a contiguous tensor of the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

// A place of the hash table. key: counted from the first bucket here; -1 for none. stamp: the last batch that used it.
struct Entry {
  int64_t key;
  int32_t row, stamp;
};

enum Kept { kHeap, kCursor, kOldest, kKept };  // of a bucket: see `Index`

struct Index {
  int64_t *ids, *times;
  float* counts;
  uint8_t* sightings;
  const int64_t* starts;
  Entry* table;
  double* worths;  // a bucket's heap: what its rows were worth when they were put there,
  int32_t* heap;   // and these rows, the least first
  int64_t* state;  // for each bucket: rows in its heap, 0 if it has none; no row below it is free; no time is before it
  int64_t rows, buckets, places, shift, first, after, lfu, ttl;
  uint64_t key;
  double half_life = 0, probability = 1;

  explicit Index(const std::vector<Tensor>& of) {
    check(of.size() == 10, "row_index: expected 10 tensors");
    ids = data<int64_t>(of[0], ScalarType::Long, "ids_R");
    times = data<int64_t>(of[1], ScalarType::Long, "times_R");
    counts = data<float>(of[2], ScalarType::Float, "counts_R");
    sightings = data<uint8_t>(of[3], ScalarType::Byte, "sightings_RC");
    starts = data<int64_t>(of[4], ScalarType::Long, "starts_B1");
    table = reinterpret_cast<Entry*>(data<int64_t>(of[5], ScalarType::Long, "table_T2"));
    worths = data<double>(of[6], ScalarType::Double, "worth_R");
    heap = data<int32_t>(of[7], ScalarType::Int, "heap_R");
    state = data<int64_t>(of[8], ScalarType::Long, "state_B3");
    const int64_t* const numbers = data<int64_t>(of[9], ScalarType::Long, "numbers");
    rows = of[0].numel();
    buckets = of[4].numel() - 1;
    places = of[5].numel() / 2;
    bool fine = buckets >= 0 && of[9].numel() == 6 && of[8].numel() == kKept * buckets && places > rows;
    for (int64_t t : {1, 2, 6, 7}) fine &= of[t].numel() == rows;
    fine &= of[3].numel() == kCounters * rows && rows < std::numeric_limits<int32_t>::max();
    for (int64_t b = 0; fine && b < buckets; ++b) fine &= starts[b] >= 0 && starts[b] < starts[b + 1];
    check(fine && (!buckets || starts[buckets] == rows), "row_index: the tensors do not fit together");
    shift = numbers[0], first = numbers[1], after = numbers[2], lfu = numbers[3], ttl = numbers[4];
    key = static_cast<uint64_t>(numbers[5]);
    check(shift >= 0 && shift <= 63, "row_index: a shift is outside [0, 63]");
  }

  INLINE int64_t bucket_of(int64_t key) const { return shift == 63 ? 0 : key >> shift; }
  INLINE uint64_t whole(int64_t key) const {  // counted from the first bucket of all
    return shift == 63 ? static_cast<uint64_t>(key)
                       : static_cast<uint64_t>(key) + (static_cast<uint64_t>(first) << shift);
  }
  INLINE int64_t key_of(int64_t row) const {
    const uint64_t all = mix63(static_cast<uint64_t>(ids[row]));
    return static_cast<int64_t>(shift == 63 ? all : all - (static_cast<uint64_t>(first) << shift));
  }
  INLINE int64_t home(int64_t key) const {
    return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(key)) * static_cast<uint64_t>(places)) >>
                                32);
  }
  INLINE int64_t next(int64_t at) const { return at + 1 == places ? 0 : at + 1; }
  INLINE int64_t own(int64_t b) const { return starts[b] + (first == 0 && b == 0 ? 2 : 1); }
  INLINE bool is_old(int64_t row, int64_t now) const { return ttl >= 0 && now - times[row] > ttl && ids[row] != 0; }
  INLINE int64_t& kept(int64_t b, Kept what) const { return state[kKept * b + what]; }

  // The entry of a key, or -1.
  INLINE int64_t find(int64_t key) const {
    for (int64_t at = home(key);; at = next(at)) {
      if (table[at].key == key) return at;
      if (table[at].key < 0) return -1;
    }
  }

  void insert(int64_t key, int64_t row, int64_t stamp) const {
    int64_t at = home(key);
    while (table[at].key >= 0) at = next(at);
    table[at] = {key, static_cast<int32_t>(row), static_cast<int32_t>(stamp)};
  }

  // Takes an entry out, and moves those behind it that would not be found any more.
  void erase(int64_t hole) const {
    for (int64_t at = next(hole); table[at].key >= 0; at = next(at)) {
      const int64_t from_home = at - home(table[at].key), from_hole = at - hole;
      if ((from_home < 0 ? from_home + places : from_home) >= (from_hole < 0 ? from_hole + places : from_hole)) {
        table[hole] = table[at];
        hole = at;
      }
    }
    table[hole].key = -1;
  }

  void free_row(int64_t b, int64_t row, int64_t entry) const {
    erase(entry);
    ids[row] = kFree;
    kept(b, kCursor) = std::min(kept(b, kCursor), row);
    kept(b, kHeap) = 0;
  }

  double worth(int64_t row) const {
    if (!lfu) return static_cast<double>(times[row]);
    return std::log2(static_cast<double>(counts[row])) +
           (half_life > 0 ? static_cast<double>(times[row]) / half_life : 0.0);
  }

  void use(int64_t row, int64_t now) const {
    const double count = counts[row];
    const double left =
        half_life > 0 ? count * std::pow(2.0, static_cast<double>(times[row] - now) / half_life) : count;
    counts[row] = static_cast<float>(1.0 + left);
    times[row] = now;
  }

  // -- the heap of a bucket -------------------------------------------------------------------------------------

  struct Heap {
    double* worths;
    int32_t* rows;
    int64_t& size;
    bool before(int64_t i, int64_t j) const {
      return worths[i] < worths[j] || (worths[i] == worths[j] && rows[i] < rows[j]);
    }
    void swap(int64_t i, int64_t j) const {
      std::swap(worths[i], worths[j]);
      std::swap(rows[i], rows[j]);
    }
    void sink(int64_t i) const {
      for (;;) {
        int64_t least = i;
        for (int64_t child = 2 * i + 1; child <= 2 * i + 2 && child < size; ++child)
          if (before(child, least)) least = child;
        if (least == i) return;
        swap(i, least);
        i = least;
      }
    }
    void push(double worth, int32_t row) const {
      int64_t i = size++;
      worths[i] = worth;
      rows[i] = row;
      for (; i && before(i, (i - 1) / 2); i = (i - 1) / 2) swap(i, (i - 1) / 2);
    }
    void pop() const {
      swap(0, --size);
      sink(0);
    }
  };

  Heap heap_of(int64_t b) const { return {worths + starts[b], heap + starts[b], kept(b, kHeap)}; }

  // The row of the id that gives way, or -1. The row leaves the heap.
  int64_t least(int64_t b, int64_t settled) const {
    const Heap of = heap_of(b);
    if (!of.size) {
      for (int64_t row = own(b); row < starts[b + 1]; ++row)
        if (ids[row] >= 0) {
          of.worths[of.size] = worth(row);
          of.rows[of.size++] = static_cast<int32_t>(row);
        }
      for (int64_t i = of.size / 2; i-- > 0;) of.sink(i);
    }
    std::vector<std::pair<double, int32_t>> in_use;
    int64_t found = -1;
    while (of.size && found < 0) {
      const int32_t row = of.rows[0];
      const double now = worth(row);
      if (now > of.worths[0]) {  // used since it was put here
        of.worths[0] = now;
        of.sink(0);
        continue;
      }
      of.pop();
      if (table[find(key_of(row))].stamp > settled) in_use.push_back({now, row});
      else found = row;
    }
    for (const auto& [worth, row] : in_use) of.push(worth, row);
    return found;
  }

  // The first free row of a bucket, or -1.
  int64_t free_in(int64_t b) const {
    int64_t& row = kept(b, kCursor);
    while (row < starts[b + 1] && ids[row] != kFree) ++row;
    return row < starts[b + 1] ? row : -1;
  }

  // Frees the rows of a bucket that are too old. Returns how many those were.
  int64_t sweep(int64_t b, int64_t now, int64_t settled) const {
    int64_t& oldest = kept(b, kOldest);
    if (ttl < 0 || (oldest != std::numeric_limits<int64_t>::min() && now - oldest <= ttl)) return 0;
    int64_t count = 0;
    oldest = now;
    for (int64_t row = own(b); row < starts[b + 1]; ++row) {
      if (ids[row] < 0) continue;
      if (is_old(row, now)) {
        const int64_t entry = find(key_of(row));
        if (table[entry].stamp <= settled) {
          free_row(b, row, entry);
          ++count;
          continue;
        }
      }
      oldest = std::min(oldest, times[row]);
    }
    return count;
  }

  // Whether a sighting of an id that has no row admits it.
  bool is_admitted(int64_t b, uint64_t all, int64_t batch) const {
    if (after > 1) {
      uint8_t* const counters = sightings + kCounters * starts[b];
      const int64_t rows_b = starts[b + 1] - starts[b], count = kCounters * rows_b;
      int64_t at[kCounters], seen = 255;
      for (int64_t j = 0; j < kCounters; ++j) {
        at[j] = static_cast<int64_t>((splitmix64(all + static_cast<uint64_t>(j + 1) * kGolden) >> 1 & (kMost >> 1)) %
                                     static_cast<uint64_t>(count));
        seen = std::min<int64_t>(seen, counters[at[j]]);
      }
      seen = std::min<int64_t>(seen + 1, 255);
      for (int64_t j = 0; j < kCounters; ++j)
        counters[at[j]] = std::max<uint8_t>(counters[at[j]], static_cast<uint8_t>(seen));
      float& since = counts[starts[b]];
      since += 1;
      if (static_cast<int64_t>(since) >= rows_b) {
        for (int64_t c = 0; c < count; ++c) counters[c] >>= 1;
        since = 0;
      }
      if (seen < after) return false;
    }
    if (probability == 1) return true;
    const uint64_t mixed = splitmix64(all ^ splitmix64(key + 2 * static_cast<uint64_t>(batch)));
    return static_cast<double>(mixed >> 11) * 0x1p-53 < probability;
  }
};

Tensor row_index_keys(const Tensor& ids_N) {
  const int64_t N = ids_N.numel();
  const int64_t* const from = data<int64_t>(ids_N, ScalarType::Long, "ids_N");
  Tensor keys_N = empty({N}, ScalarType::Long);
  int64_t* const to = static_cast<int64_t*>(keys_N.data_ptr());
  for (int64_t n = 0; n < N; ++n) to[n] = static_cast<int64_t>(mix63(static_cast<uint64_t>(from[n])));
  return keys_N;
}

void row_index_build(const std::vector<Tensor>& of) {
  const Index index(of);
  for (int64_t at = 0; at < index.places; ++at) index.table[at] = {-1, 0, 0};
  for (int64_t b = 0; b < index.buckets; ++b) {
    index.kept(b, kHeap) = 0;
    index.kept(b, kCursor) = index.own(b);
    index.kept(b, kOldest) = std::numeric_limits<int64_t>::min();
    for (int64_t row = index.starts[b]; row < index.starts[b + 1]; ++row) {
      if (index.ids[row] < 0) continue;
      const int64_t key = index.key_of(row);
      check(key >= 0 && index.bucket_of(key) == b, "row_index: an id is in a bucket that is not its own");
      check(index.find(key) < 0, "row_index: an id has two rows");
      index.insert(key, row, 0);
    }
  }
}

const int64_t* keys_in(const Index& index, const Tensor& keys_N) {
  const int64_t* const keys = data<int64_t>(keys_N, ScalarType::Long, "keys_N");
  bool fine = true;
  for (int64_t n = 0; n < keys_N.numel(); ++n) fine &= keys[n] >= 0 && index.bucket_of(keys[n]) < index.buckets;
  check(fine, "keys_N: a key is outside the buckets");
  return keys;
}

// The entries of keys [begin, end), or -1.
void entries(const Index& index, const int64_t* keys, int64_t begin, int64_t end, int64_t* at) {
  for (int64_t n = begin; n < end; ++n) {
    if (n + kAhead < end) __builtin_prefetch(index.table + index.home(keys[n + kAhead]));
    at[n] = index.find(keys[n]);
  }
}

Tensor row_index_find(const std::vector<Tensor>& of, const Tensor& keys_N, int64_t now) {
  const Index index(of);
  const int64_t* const keys = keys_in(index, keys_N);
  const int64_t N = keys_N.numel(), team = std::max<int64_t>(1, std::min(team_for(N * 16), N));
  Tensor rows_N = empty({N}, ScalarType::Long);
  int64_t* const rows = static_cast<int64_t*>(rows_N.data_ptr());
  parallel(team, [&](int64_t c) {
    const int64_t begin = N * c / team, end = N * (c + 1) / team;
    entries(index, keys, begin, end, rows);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = rows[n] < 0 ? -1 : index.table[rows[n]].row;
      rows[n] = row < 0 || index.is_old(row, now) ? index.starts[index.bucket_of(keys[n])] : row;
    }
  });
  return rows_N;
}

std::vector<Tensor> row_index_admit(const std::vector<Tensor>& of, const Tensor& keys_N, int64_t now, int64_t batch,
                                    int64_t settled, double half_life, double probability) {
  Index index(of);
  index.half_life = half_life;
  index.probability = probability;
  check(batch > settled && batch <= std::numeric_limits<int32_t>::max(), "batch: expected one after `settled`");
  const int64_t* const keys = keys_in(index, keys_N);
  const int64_t N = keys_N.numel(), team = std::max<int64_t>(1, std::min(team_for(N * 16), N));
  Tensor rows_N = empty({N}, ScalarType::Long);
  int64_t* const rows = static_cast<int64_t*>(rows_N.data_ptr());
  parallel(team, [&](int64_t c) { entries(index, keys, N * c / team, N * (c + 1) / team, rows); });
  int64_t live = 0, hits = 0, admitted = 0, evicted = 0, expired = 0, waiting = 0, crowded = 0;
  std::vector<std::pair<int64_t, int64_t>> others;  // keys that have no row, and where they are
  for (int64_t n = 0; n < N; ++n) {
    if (n + kAhead < N && rows[n + kAhead] >= 0) {
      const int64_t row = index.table[rows[n + kAhead]].row;
      __builtin_prefetch(index.times + row, 1);
      __builtin_prefetch(index.counts + row, 1);
    }
    Entry* const entry = rows[n] < 0 ? nullptr : index.table + rows[n];
    if (entry && entry->stamp != batch) {
      if (entry->stamp <= settled && index.is_old(entry->row, now)) {
        others.push_back({keys[n], n});
        continue;
      }
      index.use(entry->row, now);
      entry->stamp = static_cast<int32_t>(batch);
      ++hits;
    }
    if (entry) {
      rows[n] = entry->row;
      ++live;
    } else {
      others.push_back({keys[n], n});
    }
  }
  std::sort(others.begin(), others.end());
  std::vector<int64_t> begun, of_ids;
  int64_t full = -1;  // a bucket all of whose rows are in use
  for (size_t i = 0; i < others.size();) {
    const int64_t key = others[i].first, b = index.bucket_of(key);
    const uint64_t all = index.whole(key);
    if (const int64_t entry = index.find(key); entry >= 0) {
      index.free_row(b, index.table[entry].row, entry);
      ++expired;
      full = -1;
    }
    int64_t row = -1;
    if (!index.is_admitted(b, all, batch)) {
      ++waiting;
    } else {
      row = index.free_in(b);
      if (row < 0 && b != full) {
        const int64_t old = index.sweep(b, now, settled);
        expired += old;
        row = old ? index.free_in(b) : index.least(b, settled);
        if (row < 0) full = b;
        if (row >= 0 && !old) {
          index.erase(index.find(index.key_of(row)));
          ++evicted;
        }
      }
      if (row < 0) {
        ++crowded;
      } else {
        ++admitted;
        const int64_t id = static_cast<int64_t>(unmix63(all));
        index.ids[row] = id;
        index.times[row] = now;
        index.counts[row] = 1;
        index.insert(key, row, batch);
        if (index.kept(b, kHeap)) index.heap_of(b).push(index.worth(row), static_cast<int32_t>(row));
        begun.push_back(row);
        of_ids.push_back(id);
      }
    }
    for (; i < others.size() && others[i].first == key; ++i) {
      rows[others[i].second] = row < 0 ? index.starts[b] : row;
      live += row >= 0;
    }
  }
  std::vector<Tensor> made{rows_N};
  std::vector<int64_t> told{live, hits, admitted, evicted, expired, waiting, crowded};
  for (const std::vector<int64_t>* numbers : {&begun, &of_ids, &told}) {
    made.push_back(empty({static_cast<int64_t>(numbers->size())}, ScalarType::Long));
    std::copy(numbers->begin(), numbers->end(), static_cast<int64_t*>(made.back().data_ptr()));
  }
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_index_keys(Tensor ids) -> Tensor");
  m.def("row_index_build(Tensor(a!)[] of) -> ()");
  m.def("row_index_find(Tensor[] of, Tensor keys, int now) -> Tensor");
  m.def(
      "row_index_admit(Tensor(a!)[] of, Tensor keys, int now, int batch, int settled, float half_life, float probability)"
      " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("row_index_keys", TORCH_BOX(&row_index_keys));
  m.impl("row_index_build", TORCH_BOX(&row_index_build));
  m.impl("row_index_find", TORCH_BOX(&row_index_find));
  m.impl("row_index_admit", TORCH_BOX(&row_index_admit));
}

}  // namespace sparrow
