// Reads and writes records in blocks of a file, beside their caller. reference.py beside this file is the definition.

#include "opened.h"

#include <cstdlib>

namespace sparrow {
namespace {

using namespace block_io;

// The engines are made when they are first needed and live with the process. Null: this one cannot run.
// The threads of a parent's engines are not in a fork of it, which makes its own.
Engine* engine(bool is_ring) {
  static std::mutex mutex;
  static Engine* made[2] = {};
  static pid_t process = getpid();
  const std::lock_guard<std::mutex> guard(mutex);
  if (process != getpid()) {
    process = getpid();
    made[0] = made[1] = nullptr;
  }
  Engine*& found = made[is_ring];
  if (found) return found;
  if (!is_ring) return found = new Threads;
#if defined(HAS_IO_URING)
  Ring* const ring = new Ring;
  if (ring->code() == 0) found = ring;  // else a few bytes are lost, once
#endif
  return found;
}

std::mutex all_mutex;
std::map<int64_t, std::unique_ptr<Open>>& all() {
  static auto* made = new std::map<int64_t, std::unique_ptr<Open>>;
  return *made;
}

}  // namespace

Open& block_io::opened(int64_t handle) {
  const std::lock_guard<std::mutex> guard(all_mutex);
  const auto it = all().find(handle);
  check(it != all().end(), "block_io: it is closed");
  check(it->second->process == getpid(),
        "opened before a fork; open the model, the run or the file in the new process");
  return *it->second;
}

namespace {

Tensor told(const Error& error) {
  Tensor made = empty({7}, ScalarType::Long);
  memcpy(made.data_ptr(), &error, sizeof error);
  return made;
}

// settings: as in cpp.py. Returns a handle, 0 when this way cannot run.
int64_t block_io_open(const Tensor& settings, const Tensor& places_K, const Tensor& generations_K, bool is_ring) {
  const int64_t* const s = data<int64_t>(settings, ScalarType::Long, "settings");
  const Shape shape{s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]};
  check(shape.block <= kMostBlock, "block: at most ", kMostBlock, " bytes");
  Engine* const by = engine(is_ring);
  if (by == nullptr) return 0;
  auto made = std::unique_ptr<Open>(new Open{
      by,
      is_ring,
      getpid(),
      {shape, std::vector<int64_t>(s + 9, s + settings.numel()), data<int32_t>(places_K, ScalarType::Int, "places_K"),
       data<int32_t>(generations_K, ScalarType::Int, "generations_K")}});
  {
    const std::lock_guard<std::mutex> guard(by->mutex);
    by->add(&made->store);
  }
  static int64_t handles = 0;
  const std::lock_guard<std::mutex> guard(all_mutex);
  all()[++handles] = std::move(made);
  return handles;
}

void check_rows(const int64_t* rows, int64_t count, int64_t limit) {
  bool fine = true;
  for (int64_t u = 0; u < count; ++u) fine &= static_cast<uint64_t>(rows[u]) < static_cast<uint64_t>(limit);
  check(fine, "block_io: a row is outside [0, ", limit, ")");
}

int64_t block_io_fetch(int64_t handle, const Tensor& rows_U, const std::vector<Tensor>& into, const Tensor& at_U,
                       const Tensor& never_U) {
  Open& open = opened(handle);
  const int64_t count = rows_U.numel();
  auto reading = std::make_unique<Reading>();
  reading->tensors = into;
  for (const Tensor& tensor : {rows_U, at_U, never_U}) reading->tensors.push_back(tensor);
  reading->into = fields_of(into, open.store);
  reading->rows = data<int64_t>(rows_U, ScalarType::Long, "rows_U");
  reading->at = data<int64_t>(at_U, ScalarType::Long, "at_U");
  reading->never = data<bool>(never_U, ScalarType::Bool, "never_U");
  reading->is_taken.resize(count);
  check(at_U.numel() == count && never_U.numel() == count, "block_io: expected a place for each row");
  check_rows(reading->rows, count, open.store.shape().rows);
  for (int64_t u = 1; u < count; ++u) check(reading->rows[u - 1] < reading->rows[u], "rows_U: not ascending");
  for (const Tensor& tensor : into) check_rows(reading->at, count, tensor.size(0));
  const std::lock_guard<std::mutex> guard(open.engine->mutex);
  open.store.fetch(reading.get(), count, open.engine->reads());
  open.engine->wake(reading->open);
  open.store.readings[++open.tickets] = std::move(reading);
  return open.tickets;
}

Tensor block_io_wait(int64_t handle, int64_t ticket) {
  Open& open = opened(handle);
  std::unique_ptr<Reading> reading;
  {
    std::unique_lock<std::mutex> lock(open.engine->mutex);
    const auto it = open.store.readings.find(ticket);
    check(it != open.store.readings.end(), "block_io: this fetch was waited for");
    reading = std::move(it->second);
    open.store.readings.erase(it);
    open.engine->changed.wait(lock, [&] { return reading->open == 0; });
  }
  return told(reading->error);
}

// Waits until something holds or a write fails, which is tried again now. Others that were begun before may fail still.
template <class F>
Error written(Open& open, std::unique_lock<std::mutex>& lock, const F& holds) {
  Store& store = open.store;
  if (holds()) return {};
  if (store.error.kind) open.engine->changed.wait(lock, [&] { return !store.is_writing(); });
  store.error = {};
  store.is_flushed = true;
  open.engine->wake(kDepth);
  open.engine->changed.wait(lock, [&] { return holds() || store.error.kind; });
  store.is_flushed = false;
  return holds() ? Error{} : store.error;
}

Tensor block_io_put(int64_t handle, const Tensor& rows_U, const std::vector<Tensor>& fields) {
  Open& open = opened(handle);
  const int64_t count = rows_U.numel();
  const int64_t* const rows = data<int64_t>(rows_U, ScalarType::Long, "rows_U");
  const std::vector<Field> from = fields_of(fields, open.store);
  for (const Tensor& tensor : fields) check(tensor.size(0) == count, "block_io: expected entries for each row");
  check_rows(rows, count, open.store.shape().rows);
  std::unique_lock<std::mutex> lock(open.engine->mutex);
  const Error error = written(open, lock, [&] { return open.store.has_room(count); });
  if (error.kind) return told(error);
  open.store.put(rows, from, count);
  if (open.store.is_due()) open.engine->wake(kDepth);
  return told({});
}

// A buffer that begins at a page.
struct Pages {
  explicit Pages(int64_t bytes) : to(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes))) {
    if (to == nullptr) throw std::bad_alloc();
  }
  ~Pages() { std::free(to); }
  uint8_t* const to;
};

struct Composed {
  uint32_t block, generation, place;
};

// Writes blocks whose contents lie one after the other, those at neighbouring places at once. Returns errno, or 0.
int write_all(const Shape& shape, const std::vector<Composed>& of, const uint8_t* content) {
  for (size_t i = 0, end; i < of.size(); i = end) {
    for (end = i + 1; end < of.size() && of[end].place == of[end - 1].place + 1;) ++end;
    const int64_t from = i * shape.block, size = (end - i) * shape.block;
    for (int64_t done = 0; done < size;) {
      const int64_t more = pwrite(shape.fd, content + from + done, size - done, of[i].place * shape.block + done);
      if (more > 0) done += more;
      else if (more == 0 || errno != EINTR) return more ? errno : ENOSPC;
    }
  }
  return 0;
}

// Writes the records of neighbouring rows, from `first` on, as whole new blocks, in the thread that calls.
Tensor block_io_fill(int64_t handle, int64_t first, const std::vector<Tensor>& fields) {
  constexpr int64_t kTogether = 1 << 20;  // bytes of blocks that are written at a time
  Open& open = opened(handle);
  Store& store = open.store;
  const Shape& shape = store.shape();
  const std::vector<Field> from = fields_of(fields, store);
  const int64_t count = fields[0].size(0), last = first + count;
  for (const Tensor& tensor : fields) check(tensor.size(0) == count, "block_io: expected entries for each row");
  check(first >= 0 && last <= shape.rows && first % shape.per_block == 0 &&
            (last % shape.per_block == 0 || last == shape.rows),
        "block_io: expected the rows of whole blocks");
  const int64_t together = kTogether / shape.block, blocks = (last + shape.per_block - 1) / shape.per_block;
  const Pages pages(together * shape.block);
  for (int64_t block = first / shape.per_block; block < blocks;) {
    std::vector<Composed> made;
    for (; block < blocks && int64_t(made.size()) < together; ++block) {
      uint8_t* const content = pages.to + made.size() * shape.block;
      const uint32_t generation = store.compose(block, from, block * shape.per_block - first, content);
      if (generation) made.push_back({static_cast<uint32_t>(block), generation, 0});
    }
    Error error;
    {
      const std::lock_guard<std::mutex> guard(open.engine->mutex);
      for (Composed& of : made) check(store.is_new(of.block), "block_io: records of a block were put before");
      for (size_t i = 0; i < made.size() && !error.kind; ++i)
        if (const int code = store.take(&made[i].place)) error = {kWrite, code, made[i].block};
    }
    if (!error.kind)
      if (const int code = write_all(shape, made, pages.to)) error = {kWrite, code, made[0].block};
    const std::lock_guard<std::mutex> guard(open.engine->mutex);
    for (const Composed& of : made) {
      if (!error.kind) store.took(of.block, of.place, of.generation);
      else if (of.place) store.give_back(of.place);
    }
    if (error.kind) return told(error);
  }
  return told({});
}

Tensor block_io_known(int64_t handle, int64_t first, int64_t last) {
  Open& open = opened(handle);
  check(first >= 0 && last <= open.store.shape().rows, "block_io: a row is outside the table");
  std::vector<int64_t> rows;
  {
    const std::lock_guard<std::mutex> guard(open.engine->mutex);
    open.store.known(first, last, &rows);
  }
  Tensor rows_U = empty({int64_t(rows.size())}, ScalarType::Long);
  std::copy(rows.begin(), rows.end(), static_cast<int64_t*>(rows_U.data_ptr()));
  return rows_U;
}

Tensor synced(Open& open) {
#if defined(__linux__)
  const int code = fdatasync(open.store.shape().fd) ? errno : 0;
#else
  const int code = fcntl(open.store.shape().fd, F_FULLFSYNC) ? errno : 0;
#endif
  return told(code ? Error{kSync, code} : Error{});
}

Tensor block_io_sync(int64_t handle) {
  Open& open = opened(handle);
  {
    std::unique_lock<std::mutex> lock(open.engine->mutex);
    const Error error = written(open, lock, [&] { return open.store.is_empty(); });
    if (error.kind) return told(error);
  }
  return synced(open);
}

// Returns what syncing told, the rows that wait, and their records. The map is kept.
std::vector<Tensor> block_io_snapshot(int64_t handle, const Tensor& places_K, const Tensor& generations_K) {
  Open& open = opened(handle);
  int32_t* const places = data<int32_t>(places_K, ScalarType::Int, "places_K");
  std::vector<int64_t> rows;
  std::vector<uint8_t> records;
  {
    const std::lock_guard<std::mutex> guard(open.engine->mutex);
    open.store.map(places, data<int32_t>(generations_K, ScalarType::Int, "generations_K"));
    open.store.use(places, places_K.numel(), true);
    open.store.waiting(&rows, &records);
  }
  const int64_t count = rows.size();
  Tensor rows_U = empty({count}, ScalarType::Long);
  Tensor records_UB = torch::stable::empty({count, open.store.record_bytes()}, ScalarType::Byte);
  std::copy(rows.begin(), rows.end(), static_cast<int64_t*>(rows_U.data_ptr()));
  std::copy(records.begin(), records.end(), static_cast<uint8_t*>(records_UB.data_ptr()));
  return {synced(open), rows_U, records_UB};
}

void block_io_map(int64_t handle, const Tensor& places_K, const Tensor& generations_K) {
  Open& open = opened(handle);
  const std::lock_guard<std::mutex> guard(open.engine->mutex);
  open.store.map(data<int32_t>(places_K, ScalarType::Int, "places_K"),
                 data<int32_t>(generations_K, ScalarType::Int, "generations_K"));
}

void block_io_use(int64_t handle, const Tensor& places_K, bool is_kept) {
  Open& open = opened(handle);
  const int32_t* const places = data<int32_t>(places_K, ScalarType::Int, "places_K");
  const std::lock_guard<std::mutex> guard(open.engine->mutex);
  open.store.use(places, places_K.numel(), is_kept);
}

Tensor block_io_counts(int64_t handle) {
  Open& open = opened(handle);
  const std::lock_guard<std::mutex> guard(open.engine->mutex);
  Tensor made = empty({3}, ScalarType::Long);
  const int64_t counts[3] = {open.store.blocks_read, open.store.blocks_written, open.store.rows_from_queue};
  memcpy(made.data_ptr(), counts, sizeof counts);
  return made;
}

int64_t block_io_mixed_sum(const Tensor& words, int64_t first) {
  const int64_t* const from = data<int64_t>(words, ScalarType::Long, "words");
  return mixed_sum(reinterpret_cast<const uint64_t*>(from), first, words.numel());
}

// `joined` of layout.py. What was copied is in the processor's cache when it is summed.
int64_t block_io_joined(const Tensor& into, const std::vector<Tensor>& parts, int64_t first) {
  constexpr int64_t kStep = 64 << 10;  // bytes
  uint8_t* const to = data<uint8_t>(into, ScalarType::Byte, "into");
  const uint64_t* const words = reinterpret_cast<const uint64_t*>(to);
  int64_t length = 0, summed = 0;
  uint64_t sum = 0;
  const auto sum_until = [&](int64_t word) {
    sum += mixed_sum(words + summed, first + summed, word - summed);
    summed = word;
  };
  for (const Tensor& part : parts) {
    const uint8_t* const from = data<uint8_t>(part, ScalarType::Byte, "parts");
    check(length + part.numel() <= into.numel(), "into: the parts are longer");
    for (int64_t at = 0; at < part.numel(); at += kStep) {
      const int64_t size = std::min(kStep, part.numel() - at);
      memcpy(to + length, from + at, size);
      length += size;
      sum_until(length / 8);
    }
  }
  check(into.numel() % 8 == 0, "into: expected whole words");
  memset(to + length, 0, into.numel() - length);
  sum_until((length + 7) / 8);
  return sum;
}

void block_io_close(int64_t handle) {
  std::unique_ptr<Open> open;
  {
    const std::lock_guard<std::mutex> guard(all_mutex);
    const auto it = all().find(handle);
    if (it == all().end()) return;
    open = std::move(it->second);
    all().erase(it);
  }
  if (open->process != getpid()) return static_cast<void>(open.release());  // its engine is not in this process
  std::unique_lock<std::mutex> lock(open->engine->mutex);
  open->engine->remove(&open->store, lock);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) {
  m.def("block_io_open(Tensor settings, Tensor places, Tensor generations, bool is_ring) -> int");
  m.def("block_io_fetch(int handle, Tensor rows, Tensor(a!)[] into, Tensor at, Tensor(b!) never) -> int");
  m.def("block_io_wait(int handle, int ticket) -> Tensor");
  m.def("block_io_put(int handle, Tensor rows, Tensor[] fields) -> Tensor");
  m.def("block_io_fill(int handle, int first, Tensor[] fields) -> Tensor");
  m.def("block_io_known(int handle, int first, int last) -> Tensor");
  m.def("block_io_sync(int handle) -> Tensor");
  m.def("block_io_snapshot(int handle, Tensor(a!) places, Tensor(b!) generations) -> Tensor[]");
  m.def("block_io_map(int handle, Tensor(a!) places, Tensor(b!) generations) -> ()");
  m.def("block_io_use(int handle, Tensor places, bool is_kept) -> ()");
  m.def("block_io_counts(int handle) -> Tensor");
  m.def("block_io_mixed_sum(Tensor words, int first) -> int");
  m.def("block_io_joined(Tensor(a!) into, Tensor[] parts, int first) -> int");
  m.def("block_io_close(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) {
  m.impl("block_io_open", TORCH_BOX(&block_io_open));
  m.impl("block_io_fetch", TORCH_BOX(&block_io_fetch));
  m.impl("block_io_wait", TORCH_BOX(&block_io_wait));
  m.impl("block_io_put", TORCH_BOX(&block_io_put));
  m.impl("block_io_fill", TORCH_BOX(&block_io_fill));
  m.impl("block_io_known", TORCH_BOX(&block_io_known));
  m.impl("block_io_sync", TORCH_BOX(&block_io_sync));
  m.impl("block_io_snapshot", TORCH_BOX(&block_io_snapshot));
  m.impl("block_io_map", TORCH_BOX(&block_io_map));
  m.impl("block_io_use", TORCH_BOX(&block_io_use));
  m.impl("block_io_counts", TORCH_BOX(&block_io_counts));
  m.impl("block_io_mixed_sum", TORCH_BOX(&block_io_mixed_sum));
  m.impl("block_io_joined", TORCH_BOX(&block_io_joined));
  m.impl("block_io_close", TORCH_BOX(&block_io_close));
}

}  // namespace sparrow
