// Which id has which row, with torch's stable ABI. reference.py beside this file is the definition.

#include "../cpu.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace sparrow {
namespace {

constexpr int64_t kFree = -1, kShared = -2, kCounters = 4;
constexpr uint64_t kMost = (uint64_t{1} << 63) - 1;
constexpr uint64_t kOdd1 = 0x2127599BF4325C37, kOdd2 = 0x6A09E667F3BCC909;  // those of core/mixing.py
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr int64_t kAhead = 24;  // ids whose places are asked for before they are looked at

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

// A row and what it is worth; the one that gives way first is the least.
struct Ranked {
  double worth;
  int64_t row;
  bool operator<(const Ranked& other) const { return worth < other.worth || (worth == other.worth && row < other.row); }
  bool operator>(const Ranked& other) const { return other < *this; }
};

// What is kept of a bucket.
enum Kept {
  kHeap,       // rows in its heap
  kCursor,     // no row before it is free
  kOldest,     // no row was last used before
  kLastWorth,  // with kLastRow the largest that the heap was made with: rows above it are not in it
  kLastRow,
  kKept
};

// The rows of a bucket that may give way, least worth first. Made only when its heap holds nothing but rows in use.
struct Rest {
  int64_t bucket = -1;
  size_t next = 0;
  std::vector<Ranked> rows;
};

struct Index {
  int64_t *ids, *times;
  float* counts;
  uint8_t* sightings;
  const int64_t* starts;
  Entry* table;
  Ranked* heaps;   // of each bucket some rows that may give way, as they were worth when they were put there
  int64_t* state;  // see `Kept`
  int64_t rows, buckets, places, shift, first, after, lfu, ttl;
  uint64_t key;
  double half_life = 0, probability = 1;
  std::vector<int64_t> freed;  // rows

  explicit Index(const std::vector<Tensor>& of) {
    check(of.size() == 9, "row_index: expected 9 tensors");
    ids = data<int64_t>(of[0], ScalarType::Long, "ids_R");
    times = data<int64_t>(of[1], ScalarType::Long, "times_R");
    counts = data<float>(of[2], ScalarType::Float, "counts_R");
    sightings = data<uint8_t>(of[3], ScalarType::Byte, "sightings_RC");
    starts = data<int64_t>(of[4], ScalarType::Long, "starts_B1");
    table = reinterpret_cast<Entry*>(data<int64_t>(of[5], ScalarType::Long, "table_T2"));
    heaps = reinterpret_cast<Ranked*>(data<int64_t>(of[6], ScalarType::Long, "heaps_H2"));
    state = data<int64_t>(of[7], ScalarType::Long, "state_B5");
    const int64_t* const numbers = data<int64_t>(of[8], ScalarType::Long, "numbers");
    rows = of[0].numel();
    buckets = of[4].numel() - 1;
    places = of[5].numel() / 2;
    bool fine = buckets >= 0 && of[8].numel() == 6 && of[7].numel() == kKept * buckets && places > rows;
    for (int64_t t : {1, 2}) fine &= of[t].numel() == rows;
    fine &= of[3].numel() == kCounters * rows && of[6].numel() / 2 >= heap_begin(buckets, rows) &&
            rows < std::numeric_limits<int32_t>::max();
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

  void free_row(int64_t b, int64_t row, int64_t entry) {
    erase(entry);
    ids[row] = kFree;
    freed.push_back(row);
    kept(b, kCursor) = std::min(kept(b, kCursor), row);
  }

  double worth(int64_t row) const {
    if (!lfu) return static_cast<double>(times[row]);
    return std::log2(static_cast<double>(counts[row])) +
           (half_life > 0 ? static_cast<double>(times[row]) / half_life : 0.0);
  }

  INLINE void use(int64_t row, int64_t now) const {
    if (lfu) {
      const double count = counts[row];
      const double left =
          half_life > 0 ? count * std::pow(2.0, static_cast<double>(times[row] - now) / half_life) : count;
      counts[row] = static_cast<float>(1.0 + left);
    }
    times[row] = now;
  }

  // -- who gives way --------------------------------------------------------------------------------------------

  // A bucket's heap has room for an eighth of its rows and some.
  static int64_t heap_begin(int64_t b, int64_t start) { return start / 8 + 33 * b; }
  INLINE Ranked* heap_of(int64_t b) const { return heaps + heap_begin(b, starts[b]); }
  INLINE Ranked ranked(int64_t row) const { return {worth(row), row}; }
  INLINE Ranked last_of(int64_t b) const {
    Ranked last{0, kept(b, kLastRow)};
    __builtin_memcpy(&last.worth, &kept(b, kLastWorth), sizeof last.worth);
    return last;
  }

  void push(int64_t b, const Ranked& it) const {
    Ranked* const heap = heap_of(b);
    heap[kept(b, kHeap)++] = it;
    std::push_heap(heap, heap + kept(b, kHeap), std::greater<Ranked>());
  }

  // Makes the heap anew, of the rows that are worth least. Rows only grow in worth, so that no other is worth less than
  // its last one until one is put into the bucket.
  void scan(int64_t b) const {
    static thread_local std::vector<Ranked> all;
    all.clear();
    for (int64_t row = own(b); row < starts[b + 1]; ++row)
      if (ids[row] >= 0) all.push_back(ranked(row));
    const size_t count = std::min<size_t>(all.size(), (starts[b + 1] - starts[b]) / 16 + 16);
    Ranked last{std::numeric_limits<double>::infinity(), std::numeric_limits<int64_t>::max()};
    if (count < all.size()) {
      std::nth_element(all.begin(), all.begin() + (count - 1), all.end());
      last = all[count - 1];
    }
    std::sort(all.begin(), all.begin() + count);
    std::copy(all.begin(), all.begin() + count, heap_of(b));
    kept(b, kHeap) = count;
    __builtin_memcpy(&kept(b, kLastWorth), &last.worth, sizeof last.worth);
    kept(b, kLastRow) = last.row;
  }

  // The entry of the id that gives way, of those in the heap, or -1. It leaves the heap.
  int64_t from_heap(int64_t b, int64_t settled) const {
    Ranked* const heap = heap_of(b);
    int64_t& size = kept(b, kHeap);
    const Ranked last = last_of(b);
    std::vector<Ranked> in_use;
    int64_t found = -1;
    while (size && found < 0) {
      const Ranked top = heap[0];
      std::pop_heap(heap, heap + size, std::greater<Ranked>());
      --size;
      if (size) {  // it is probably the next
        __builtin_prefetch(ids + heap[0].row);
        __builtin_prefetch(times + heap[0].row);
      }
      if (ids[top.row] < 0) continue;
      const Ranked now = ranked(top.row);
      if (now < top || last < now) continue;  // its row was given away, or it was used: others come before it
      if (top < now) {
        push(b, now);
        continue;
      }
      const int64_t entry = find(key_of(top.row));
      if (table[entry].stamp > settled) in_use.push_back(now);
      else found = entry;
    }
    for (const Ranked& it : in_use) push(b, it);
    return found;
  }

  // The entry of the id that gives way, or -1.
  int64_t least(int64_t b, int64_t settled, Rest& rest) const {
    if (rest.bucket != b) {
      int64_t found = kept(b, kHeap) ? from_heap(b, settled) : -1;
      if (found < 0) {
        scan(b);
        found = from_heap(b, settled);
      }
      if (found >= 0) return found;
      rest = {b, 0, {}};
      for (int64_t row = own(b); row < starts[b + 1]; ++row)
        if (ids[row] >= 0 && table[find(key_of(row))].stamp <= settled) rest.rows.push_back(ranked(row));
      std::sort(rest.rows.begin(), rest.rows.end());
      kept(b, kHeap) = 0;
    }
    while (rest.next < rest.rows.size()) {
      const int64_t row = rest.rows[rest.next++].row, entry = ids[row] < 0 ? -1 : find(key_of(row));
      if (entry >= 0 && table[entry].stamp <= settled) return entry;  // the row may have been given away since
    }
    return -1;
  }

  // Hears that a row was given to an id.
  void entered(int64_t b, int64_t row) const {
    if (!kept(b, kHeap)) return;
    const Ranked it = ranked(row);
    if (last_of(b) < it) return;
    if (kept(b, kHeap) < heap_begin(b + 1, starts[b + 1]) - heap_begin(b, starts[b])) push(b, it);
    else kept(b, kHeap) = 0;
  }

  // The first free row of a bucket, or -1.
  int64_t free_in(int64_t b) const {
    int64_t& row = kept(b, kCursor);
    while (row < starts[b + 1] && ids[row] != kFree) ++row;
    return row < starts[b + 1] ? row : -1;
  }

  // Frees the rows of a bucket that are too old. Returns how many those were.
  int64_t sweep(int64_t b, int64_t now, int64_t settled) {
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

int64_t team_of(int64_t ids) { return std::max<int64_t>(1, std::min(team_for(ids * 32), ids)); }

const int64_t* keys_in(const Index& index, const Tensor& keys_N) {
  const int64_t* const keys = data<int64_t>(keys_N, ScalarType::Long, "keys_N");
  const int64_t N = keys_N.numel();
  bool fine = true;
  for (int64_t n = 0; n < N; ++n) fine &= keys[n] >= 0 && index.bucket_of(keys[n]) < index.buckets;
  check(fine, "keys_N: a key is outside the buckets");
  return keys;
}

// Asks for the time of a key's row, whose place was asked for before.
INLINE void ask_times(const Index& index, int64_t key) {
  const Entry& soon = index.table[index.home(key)];
  if (soon.key != key) return;
  __builtin_prefetch(index.times + soon.row, 1);
  if (index.lfu) __builtin_prefetch(index.counts + soon.row, 1);
}

Tensor row_index_find(const std::vector<Tensor>& of, const Tensor& keys_N, int64_t now) {
  const Index index(of);
  const int64_t* const keys = keys_in(index, keys_N);
  const int64_t N = keys_N.numel(), team = team_of(N);
  Tensor rows_N = empty({N}, ScalarType::Long);
  int64_t* const rows = static_cast<int64_t*>(rows_N.data_ptr());
  parallel(team, [&](int64_t c) {
    const int64_t end = N * (c + 1) / team;
    for (int64_t n = N * c / team; n < end; ++n) {
      if (n + kAhead < end) __builtin_prefetch(index.table + index.home(keys[n + kAhead]));
      const int64_t at = index.find(keys[n]), row = at < 0 ? -1 : index.table[at].row;
      rows[n] = row < 0 || index.is_old(row, now) ? index.starts[index.bucket_of(keys[n])] : row;
    }
  });
  return rows_N;
}

// What a thread has done: which keys were its own, their rows, how many of those were live, and of how many ids; and
// the keys without a row, with where they are.
struct Found {
  std::vector<int64_t> at, rows;
  int64_t live = 0, hits = 0;
  std::vector<std::pair<int64_t, int64_t>> others;
};

// Uses the rows of the keys that are a thread's own: equal keys have the same thread. A key whose row is too old gets
// the number of its entry, one without a row -1.
void use_rows(const Index& index, const int64_t* keys, int64_t N, int64_t thread, int64_t team, int64_t now,
              int32_t batch, int64_t settled, Found& found) {
  found.at.resize(N);
  int64_t count = 0;
  for (int64_t n = 0; n < N; ++n) {
    found.at[count] = n;
    count += (keys[n] & 0xFFFF) * team >> 16 == thread;
  }
  found.rows.resize(count);
  const int64_t* const at = found.at.data();
  for (int64_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) __builtin_prefetch(index.table + index.home(keys[at[i + 2 * kAhead]]), 1);
    if (i + kAhead < count) ask_times(index, keys[at[i + kAhead]]);
    const int64_t key = keys[at[i]], place = index.find(key);
    Entry* const entry = place < 0 ? nullptr : index.table + place;
    if (!entry || (entry->stamp <= settled && entry->stamp != batch && index.is_old(entry->row, now))) {
      found.rows[i] = place;
      found.others.push_back({key, at[i]});
      continue;
    }
    if (entry->stamp != batch) {
      index.use(entry->row, now);
      entry->stamp = batch;
      ++found.hits;
    }
    found.rows[i] = entry->row;
    ++found.live;
  }
}

std::vector<Tensor> row_index_admit(const std::vector<Tensor>& of, const Tensor& keys_N, int64_t now, int64_t batch,
                                    int64_t settled, double half_life, double probability) {
  Index index(of);
  index.half_life = half_life;
  index.probability = probability;
  check(batch > settled && batch <= std::numeric_limits<int32_t>::max(), "batch: expected one after `settled`");
  const int64_t* const keys = keys_in(index, keys_N);
  const int64_t N = keys_N.numel(), team = team_of(N);
  Tensor rows_N = empty({N}, ScalarType::Long);
  int64_t* const rows = static_cast<int64_t*>(rows_N.data_ptr());
  std::vector<Found> founds(team);
  parallel(team,
           [&](int64_t c) { use_rows(index, keys, N, c, team, now, static_cast<int32_t>(batch), settled, founds[c]); });
  int64_t live = 0, hits = 0, admitted = 0, evicted = 0, expired = 0, waiting = 0, crowded = 0;
  std::vector<std::pair<int64_t, int64_t>> others;
  for (const Found& found : founds) {
    live += found.live, hits += found.hits;
    for (size_t i = 0; i < found.rows.size(); ++i) rows[found.at[i]] = found.rows[i];
    others.insert(others.end(), found.others.begin(), found.others.end());
  }
  std::sort(others.begin(), others.end());
  std::vector<int64_t> begun, of_ids;
  Rest rest;
  for (size_t i = 0; i < others.size();) {
    const int64_t key = others[i].first, b = index.bucket_of(key);
    const uint64_t all = index.whole(key);
    const bool had_row = rows[others[i].second] >= 0;  // which is too old, and may be swept by now
    if (const int64_t entry = had_row ? index.find(key) : -1; entry >= 0) {
      index.free_row(b, index.table[entry].row, entry);
      ++expired;
    }
    int64_t row = -1;
    if (!index.is_admitted(b, all, batch)) {
      ++waiting;
    } else {
      row = index.free_in(b);
      if (row < 0) {
        const int64_t old = index.sweep(b, now, settled);
        expired += old;
        row = old ? index.free_in(b) : -1;
      }
      if (row < 0)
        if (const int64_t entry = index.least(b, settled, rest); entry >= 0) {
          row = index.table[entry].row;
          index.erase(entry);
          ++evicted;
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
        index.entered(b, row);
        begun.push_back(row);
        of_ids.push_back(id);
      }
    }
    for (; i < others.size() && others[i].first == key; ++i) {
      rows[others[i].second] = row < 0 ? index.starts[b] : row;
      live += row >= 0;
    }
  }
  const std::vector<int64_t> told{N, live, hits, admitted, evicted, expired, waiting, crowded};
  const std::vector<const std::vector<int64_t>*> parts{&told, &begun, &of_ids, &index.freed};
  int64_t size = 0;
  for (const auto* part : parts) size += static_cast<int64_t>(part->size());
  Tensor changes = empty({size}, ScalarType::Long);  // in one tensor, since each costs about a microsecond
  int64_t* to = static_cast<int64_t*>(changes.data_ptr());
  for (const auto* part : parts) to = std::copy(part->begin(), part->end(), to);
  return {rows_N, changes};
}

int64_t row_bytes(const Tensor& tensor) {
  int64_t bytes = tensor.element_size();
  for (int64_t d = 1; d < tensor.dim(); ++d) bytes *= tensor.size(d);
  return bytes;
}

void row_index_write(const std::vector<Tensor>& fields, const std::vector<Tensor>& values, const Tensor& rows_L) {
  check(fields.size() == values.size(), "row_index_write: expected values for each field");
  const int64_t* const rows = data<int64_t>(rows_L, ScalarType::Long, "rows_L");
  const int64_t L = rows_L.numel();
  for (size_t f = 0; f < fields.size(); ++f) {
    const Tensor &to = fields[f], &from = values[f];
    const int64_t bytes = row_bytes(to);
    check(to.is_contiguous() && from.is_contiguous() && to.scalar_type() == from.scalar_type() &&
              row_bytes(from) == bytes && (from.size(0) == L || from.size(0) == 1),
          "row_index_write: values do not fit their field");
    bool fine = true;
    for (int64_t l = 0; l < L; ++l) fine &= rows[l] >= 0 && rows[l] < to.size(0);
    check(fine, "row_index_write: a row is outside its field");
    char* const there = static_cast<char*>(to.data_ptr());
    const char* const here = static_cast<const char*>(from.data_ptr());
    const int64_t step = from.size(0) == L ? bytes : 0;
    for (int64_t l = 0; l < L; ++l) {
      if (l + kAhead < L)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(there + rows[l + kAhead] * bytes + b, 1);
      std::copy_n(here + l * step, bytes, there + rows[l] * bytes);
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("row_index_write(Tensor(a!)[] fields, Tensor[] values, Tensor rows) -> ()");
  m.def("row_index_keys(Tensor ids) -> Tensor");
  m.def("row_index_build(Tensor(a!)[] of) -> ()");
  m.def("row_index_find(Tensor[] of, Tensor keys, int now) -> Tensor");
  m.def(
      "row_index_admit(Tensor(a!)[] of, Tensor keys, int now, int batch, int settled, float half_life, float probability)"
      " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CPU, m) {
  m.impl("row_index_write", TORCH_BOX(&row_index_write));
  m.impl("row_index_keys", TORCH_BOX(&row_index_keys));
  m.impl("row_index_build", TORCH_BOX(&row_index_build));
  m.impl("row_index_find", TORCH_BOX(&row_index_find));
  m.impl("row_index_admit", TORCH_BOX(&row_index_admit));
}

}  // namespace sparrow
