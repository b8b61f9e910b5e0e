// Reads and writes records in blocks of a file, beside their caller. reference.py beside this file is the definition.

#include "opened.h"

namespace sparrow {
namespace {

using namespace block_io;

// The engines are made when they are first needed and live with the process. Null: this one cannot run.
Engine* engine(bool is_ring) {
  static std::mutex mutex;
  static Engine* made[2] = {};
  const std::lock_guard<std::mutex> guard(mutex);
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
  check(it->second->process == getpid(), "block_io: opened before a fork; open the file in the new process");
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
  m.def("block_io_sync(int handle) -> Tensor");
  m.def("block_io_snapshot(int handle, Tensor(a!) places, Tensor(b!) generations) -> Tensor[]");
  m.def("block_io_map(int handle, Tensor(a!) places, Tensor(b!) generations) -> ()");
  m.def("block_io_use(int handle, Tensor places, bool is_kept) -> ()");
  m.def("block_io_counts(int handle) -> Tensor");
  m.def("block_io_mixed_sum(Tensor words, int first) -> int");
  m.def("block_io_close(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) {
  m.impl("block_io_open", TORCH_BOX(&block_io_open));
  m.impl("block_io_fetch", TORCH_BOX(&block_io_fetch));
  m.impl("block_io_wait", TORCH_BOX(&block_io_wait));
  m.impl("block_io_put", TORCH_BOX(&block_io_put));
  m.impl("block_io_sync", TORCH_BOX(&block_io_sync));
  m.impl("block_io_snapshot", TORCH_BOX(&block_io_snapshot));
  m.impl("block_io_map", TORCH_BOX(&block_io_map));
  m.impl("block_io_use", TORCH_BOX(&block_io_use));
  m.impl("block_io_counts", TORCH_BOX(&block_io_counts));
  m.impl("block_io_mixed_sum", TORCH_BOX(&block_io_mixed_sum));
  m.impl("block_io_close", TORCH_BOX(&block_io_close));
}

}  // namespace sparrow
