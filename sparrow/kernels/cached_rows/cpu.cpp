// Rows of blocks on a disk, some of which are in memory. reference.py beside this file is the definition.

#include "../block_io/opened.h"
#include "../row_cache/cache.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>

namespace sparrow {
namespace {

using block_io::Error, block_io::Field, block_io::Op, block_io::Open, block_io::Reading;
using row_cache::Cache, row_cache::Use, row_cache::kWays;

constexpr int64_t kLine = 16;  // words that a processor reads at a time
constexpr int64_t kHead = 32;  // words before the first set

// What a table counts, for Python to read.
enum Count { kBatch, kHits, kMisses, kWaited };  // the last in nanoseconds

// Before the sets of a cache. Processes may share both.
struct Head {
  pthread_mutex_t mutex;  // of all that follows
  int64_t batch;          // the number of the last call
};
static_assert(sizeof(Head) <= kHead * sizeof(int32_t));

// A set's tags, stamps and records lie together: most of a hit is spent on finding a page.
struct Cached {
  int64_t blocks;  // their handle
  Head* head;
  Cache cache;
  int32_t* stamps;
  uint8_t* records;
  int64_t record_bytes;
  int64_t* counts;
  int64_t last;                 // the highest number of a call
  std::vector<Tensor> tensors;  // that the pointers are of

  INLINE uint8_t* record(int64_t frame) const {
    return records + frame / kWays * cache.stride * int64_t(sizeof(int32_t)) + frame % kWays * record_bytes;
  }
  void forget() {
    for (int64_t set = 0; set < cache.sets; ++set) std::fill_n(cache.tags + set * cache.stride, kWays, -1);
    forget_uses();
  }
  void forget_uses() {
    for (int64_t set = 0; set < cache.sets; ++set) std::fill_n(stamps + set * cache.stride, kWays, 0);
    head->batch = 0;
  }
};

// Holds a cache. If a process was killed while it held it, a record may be half written: then all rows are forgotten.
class Lock {
 public:
  explicit Lock(Cached& of) : mutex_(&of.head->mutex) {
    int code = pthread_mutex_trylock(mutex_);
    if (code == EBUSY) {
      const auto begun = std::chrono::steady_clock::now();
      code = pthread_mutex_lock(mutex_);
      waited_ = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun).count();
    }
#if defined(__linux__)
    if (code == EOWNERDEAD) {
      of.forget();
      code = pthread_mutex_consistent(mutex_);
    }
#endif
    check(code == 0, "cached_rows: the cache cannot be locked");
    of.counts[kWaited] += waited_;
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { pthread_mutex_unlock(mutex_); }

 private:
  pthread_mutex_t* mutex_;
  int64_t waited_ = 0;
};

std::mutex all_mutex;
std::map<int64_t, std::shared_ptr<Cached>>& all() {
  static auto* made = new std::map<int64_t, std::shared_ptr<Cached>>;
  return *made;
}

template <class T>
T* data(const Tensor& tensor, ScalarType type, const char* name) {
  return block_io::data<T>(tensor, type, name);
}

// memory: int32, a head and then the words of each set. settings: rows, multiplier, the highest number of a call, sets,
// and whether nothing was written there yet.
int64_t cached_rows_open(int64_t blocks, Tensor memory_W, Tensor counts_4, const std::vector<int64_t>& settings) {
  const Open& open = block_io::opened(blocks);
  check(memory_W.dim() == 1 && memory_W.is_contiguous() && memory_W.scalar_type() == ScalarType::Int &&
            settings.size() == 5 && settings[3] > 0 && (memory_W.numel() - kHead) % settings[3] == 0 &&
            counts_4.numel() == 4,
        "cached_rows: expected int32 for a head and sets, four counts and five settings");
  Head* const head = static_cast<Head*>(memory_W.data_ptr());
  int32_t* const words = static_cast<int32_t*>(memory_W.data_ptr()) + kHead;
  const Cache cache(words, settings[3] * kWays, settings[0], settings[1], (memory_W.numel() - kHead) / settings[3]);
  check(4 * cache.stride >= kWays * (8 + open.store.record_bytes()) && cache.rows == open.store.shape().rows,
        "cached_rows: expected room for the records of a set, and the rows of the blocks");
  auto made = std::shared_ptr<Cached>(new Cached{blocks,
                                                 head,
                                                 cache,
                                                 words + kWays,
                                                 reinterpret_cast<uint8_t*>(words + 2 * kWays),
                                                 open.store.record_bytes(),
                                                 data<int64_t>(counts_4, ScalarType::Long, "counts_4"),
                                                 settings[2],
                                                 {memory_W, counts_4}});
  if (settings[4]) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
#if defined(__linux__)
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
#endif
    pthread_mutex_init(&head->mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    made->forget();
  }
  static int64_t handles = 0;
  const std::lock_guard<std::mutex> guard(all_mutex);
  all()[++handles] = std::move(made);
  return handles;
}

void cached_rows_close(int64_t handle) {
  const std::lock_guard<std::mutex> guard(all_mutex);
  all().erase(handle);
}

// The lookups of a call in one table.
struct Part {
  std::shared_ptr<Cached> of;
  Open* open;
  const int64_t* rows;
  int64_t count;
  std::vector<Field> into;
  int64_t batch;
  std::vector<std::pair<int64_t, int64_t>> missing;  // (row, lookup), ascending
  std::vector<int64_t> missing_rows, at;             // each row once, and the first lookup of it
  std::unique_ptr<bool[]> never;
  Reading reading;
};

void zero(const Part& part, int64_t n) {
  for (const Field& field : part.into) memset(field.to + n * field.bytes, 0, field.bytes);
}

// Gives a record to a lookup.
INLINE void give(const Part& part, int64_t n, const uint8_t* record) {
  for (const Field& field : part.into) {
    memcpy(field.to + n * field.bytes, record, field.bytes);
    record += field.bytes;
  }
}

// Takes the record that a lookup has.
INLINE void take(const Part& part, int64_t n, uint8_t* record) {
  for (const Field& field : part.into) {
    memcpy(record, field.to + n * field.bytes, field.bytes);
    record += field.bytes;
  }
}

// Copies what is in memory, and finds what is not. Sets and records are read once before they are needed, in loops
// without branches: so a processor awaits many of them at a time. Prefetches took three times as long as these loads.
void probe(Part& part) {
  Cached& of = *part.of;
  const int64_t N = part.count;
  std::vector<int64_t> sets(N), frames(N);
  int32_t touched = 0;
  for (int64_t n = 0; n < N; ++n) {
    const bool is_row = static_cast<uint64_t>(part.rows[n]) < static_cast<uint64_t>(of.cache.rows);
    sets[n] = is_row ? of.cache.set_of(part.rows[n]) : -1;
  }
  for (int64_t n = 0; n < N; ++n) {
    const int32_t* const set = of.cache.tags + std::max<int64_t>(sets[n], 0) * of.cache.stride;
    for (int64_t word = 0; word < 2 * kWays; word += kLine) touched += __atomic_load_n(set + word, __ATOMIC_RELAXED);
  }
  const Lock lock(of);
  if (of.head->batch >= of.last) of.forget_uses();  // which rows were used last is forgotten
  part.batch = of.counts[kBatch] = ++of.head->batch;
  for (int64_t n = 0; n < N; ++n) {
    frames[n] = sets[n] < 0 ? -1 : of.cache.find(part.rows[n], sets[n]);
    if (frames[n] >= 0) {
      of.stamps[sets[n] * of.cache.stride + frames[n] % kWays] = static_cast<int32_t>(part.batch);
      ++of.counts[kHits];
    } else if (sets[n] >= 0) {
      part.missing.emplace_back(part.rows[n], n);
    } else {
      zero(part, n);
    }
  }
  of.counts[kMisses] += part.missing.size();
  for (int64_t n = 0; n < N; ++n) touched += *of.record(std::max<int64_t>(frames[n], 0));
  asm volatile("" ::"r"(touched));  // else the compiler would leave these reads out
  for (int64_t n = 0; n < N; ++n)
    if (frames[n] >= 0) give(part, n, of.record(frames[n]));
}

// Prepares the reads of what is missing.
void ask(Part& part, std::deque<Op>* reads) {
  std::sort(part.missing.begin(), part.missing.end());
  for (const auto& [row, n] : part.missing)
    if (part.missing_rows.empty() || part.missing_rows.back() != row) {
      part.missing_rows.push_back(row);
      part.at.push_back(n);
    }
  const size_t count = part.missing_rows.size();
  part.never = std::make_unique<bool[]>(count);
  part.reading.into = part.into;
  part.reading.rows = part.missing_rows.data();
  part.reading.at = part.at.data();
  part.reading.never = part.never.get();
  part.reading.is_taken.resize(count);
  part.open->store.fetch(&part.reading, count, reads);
}

// Gives what was read to all its lookups, and lets each row enter that finds a free frame or one that was used before.
void enter(Part& part) {
  Cached& of = *part.of;
  for (size_t u = 0; u < part.at.size(); ++u)
    if (part.never[u]) zero(part, part.at[u]);
  size_t u = 0;
  for (const auto& [row, n] : part.missing) {
    while (part.missing_rows[u] != row) ++u;
    if (n == part.at[u]) continue;
    for (const Field& field : part.into)
      memcpy(field.to + n * field.bytes, field.to + part.at[u] * field.bytes, field.bytes);
  }
  const Lock lock(of);
  const Use use{of.stamps, static_cast<int32_t>(part.batch), static_cast<int32_t>(part.batch - 1)};
  for (u = 0; u < part.at.size(); ++u) {
    const int64_t row = part.missing_rows[u], set = of.cache.set_of(row);
    if (of.cache.find(row, set) >= 0) continue;  // another thread was first
    row_cache::Set ways(of.cache, use, set);
    const int64_t way = ways.way_for(use, row);
    if (way < 0) continue;
    take(part, part.at[u], of.record(set * kWays + way));
    ways.enter(use, way, row);
  }
}

#if defined(HAS_IO_URING)

// Reads for the thread that waits: it has a ring of its own, so no other thread has to be woken.
class Reader {
 public:
  static constexpr int64_t kDepth = 128;  // reads under way: those of a request are submitted at once

  // That of this thread; null where there is none to be had.
  static Reader* of_thread() {
    thread_local std::unique_ptr<Reader> found;
    if (!found || found->process_ != getpid()) found.reset(new Reader);
    return found->code_ ? nullptr : found.get();
  }
  ~Reader() {
    if (buffers_ != MAP_FAILED) munmap(buffers_, kDepth * block_io::kMostBlock);
  }

  // Does all of them, and gives what was found in each.
  void read(std::deque<Op>* ops, std::vector<Error>* found) {
    found->assign(ops->size(), {});
    free_.clear();
    for (int64_t slot = kDepth; slot-- > 0;) free_.push_back(slot);
    size_t begun = 0, ended = 0;
    while (ended < ops->size()) {
      for (; !free_.empty() && begun < ops->size(); ++begun) {
        of_slot_[free_.back()] = begun;
        begin((*ops)[begun], free_.back());
        free_.pop_back();
      }
      done_.clear();
      ring_.reap((begun - ended + 3) / 4, &done_);  // while some are checked, the others come
      for (const auto& [slot, result] : done_) {
        Op& op = (*ops)[of_slot_[slot]];
        if (goes_on(&op, result)) {
          begin(op, slot);
          continue;
        }
        (*found)[of_slot_[slot]] = op.store->work(op, buffer(slot), result);
        free_.push_back(slot);
        ++ended;
      }
    }
  }

 private:
  pid_t process_ = getpid();
  block_io::Uring ring_;
  void* buffers_ = MAP_FAILED;
  int code_;
  size_t of_slot_[kDepth];
  std::vector<int64_t> free_;
  std::vector<std::pair<int64_t, int64_t>> done_;

  Reader() : code_(ring_.open(kDepth)) {
    buffers_ = mmap(nullptr, kDepth * block_io::kMostBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffers_ == MAP_FAILED) code_ = ENOMEM;
  }
  uint8_t* buffer(int64_t slot) { return static_cast<uint8_t*>(buffers_) + slot * block_io::kMostBlock; }
  void begin(const Op& op, int64_t slot) { add_left(&ring_, op, buffer(slot), slot); }
};

#endif

// Reads what parts miss, all at the same time.
void read(std::vector<Part>& parts) {
  std::deque<Op> own;
  std::vector<Part*> others;
  block_io::Engine* ring = nullptr;
  bool has_ring = false;
#if defined(HAS_IO_URING)
  Reader* reader = nullptr;
  for (const Part& part : parts) has_ring |= part.open->is_ring && !part.missing.empty();
  if (has_ring) has_ring = (reader = Reader::of_thread()) != nullptr;
#endif
  for (Part& part : parts) {
    if (part.missing.empty()) continue;
    block_io::Engine& engine = *part.open->engine;
    const bool is_own = has_ring && part.open->is_ring;
    const std::lock_guard<std::mutex> guard(engine.mutex);
    ask(part, is_own ? &own : engine.reads());
    if (is_own) {
      ring = &engine;
      continue;
    }
    engine.wake(part.reading.open);
    others.push_back(&part);
  }
#if defined(HAS_IO_URING)
  if (!own.empty()) {
    std::vector<Error> found;
    reader->read(&own, &found);
    const std::lock_guard<std::mutex> guard(ring->mutex);
    for (size_t i = 0; i < own.size(); ++i) own[i].store->finish(&own[i], nullptr, found[i]);
  }
#endif
  for (Part* part : others) {
    std::unique_lock<std::mutex> lock(part->open->engine->mutex);
    part->open->engine->changed.wait(lock, [&] { return part->reading.open == 0; });
  }
}

// Returns what went wrong in each table, see block_io.
Tensor cached_rows_get(const std::vector<int64_t>& handles, const std::vector<Tensor>& rows,
                       const std::vector<Tensor>& into) {
  std::vector<Part> parts(handles.size());
  check(rows.size() == handles.size(), "cached_rows: expected rows for each table");
  size_t field = 0;
  for (size_t t = 0; t < parts.size(); ++t) {
    Part& part = parts[t];
    {
      const std::lock_guard<std::mutex> guard(all_mutex);
      const auto it = all().find(handles[t]);
      check(it != all().end(), "cached_rows: it is closed");
      part.of = it->second;
    }
    part.open = &block_io::opened(part.of->blocks);
    part.rows = data<int64_t>(rows[t], ScalarType::Long, "rows");
    part.count = rows[t].numel();
    const size_t end = field + part.open->store.fields().size();
    check(end <= into.size(), "cached_rows: expected a tensor for each field");
    part.into = block_io::fields_of({into.begin() + field, into.begin() + end}, part.open->store);
    for (; field < end; ++field) check(into[field].size(0) == part.count, "into: expected an entry for each row");
  }
  for (Part& part : parts) probe(part);
  read(parts);
  Tensor told = empty({static_cast<int64_t>(parts.size()), 7}, ScalarType::Long);
  Error* const errors = static_cast<Error*>(told.data_ptr());
  for (size_t t = 0; t < parts.size(); ++t) {
    errors[t] = parts[t].reading.error;
    if (!errors[t].kind && !parts[t].missing.empty()) enter(parts[t]);
  }
  return told;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("cached_rows_open(int blocks, Tensor(a!) memory, Tensor(b!) counts, int[] settings) -> int");
  m.def("cached_rows_close(int handle) -> ()");
  m.def("cached_rows_get(int[] handles, Tensor[] rows, Tensor(a!)[] into) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) {
  m.impl("cached_rows_open", TORCH_BOX(&cached_rows_open));
  m.impl("cached_rows_close", TORCH_BOX(&cached_rows_close));
  m.impl("cached_rows_get", TORCH_BOX(&cached_rows_get));
}

}  // namespace sparrow
