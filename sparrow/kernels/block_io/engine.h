// Who reads and writes: one engine for all stores of a process, over io_uring or over threads.

#pragma once

#include "ring.h"
#include "store.h"

#include <sys/mman.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#if defined(HAS_IO_URING)
#include <sys/eventfd.h>
#endif

namespace sparrow::block_io {

constexpr int64_t kDepth = 32;  // reads and writes under way

class Engine {
 public:
  std::mutex mutex;
  std::condition_variable changed;  // a read is done, there is room in a queue, or a write failed

  virtual ~Engine() = default;
  virtual void wake(int64_t blocks) = 0;  // there may be so many to do; called with the lock

  void add(Store* store) { stores_.push_back(store); }
  std::deque<Op>* reads() { return &reads_; }

  // Forgets a store, once nothing of it is under way.
  void remove(Store* store, std::unique_lock<std::mutex>& lock) {
    std::erase_if(reads_, [&](const Op& op) { return op.store == store; });
    std::erase(stores_, store);
    changed.wait(lock, [&] { return store->under_way == 0; });
  }

 protected:
  // Gives the next thing to do, in op. While reads wait, writes have at most half of what is under way.
  bool next(Op* op, uint8_t* buffer) {
    for (size_t tried = 0; (2 * writes_ < kDepth || reads_.empty()) && tried < stores_.size(); ++tried) {
      Store* store = stores_[turn_++ % stores_.size()];
      if (!store->is_due()) continue;
      if (store->next_write(op, buffer)) {
        ++writes_;
        ++store->under_way;
        return true;
      }
      if (store->error.kind) changed.notify_all();  // the file cannot grow
    }
    if (reads_.empty()) return false;
    *op = reads_.front();
    reads_.pop_front();
    ++op->store->under_way;
    return true;
  }

  // Returns whether the op goes on, as a write.
  bool finish(Op* op, uint8_t* buffer, const Error& found) {
    Store* store = op->store;
    if (store->finish(op, buffer, found)) return true;
    writes_ -= op->reading == nullptr;
    --store->under_way;
    if (op->reading == nullptr || op->reading->open == 0 || store->under_way == 0) changed.notify_all();
    return false;
  }

  uint8_t* buffers_of(int64_t count) {
    void* memory = mmap(nullptr, count * kMostBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t*>(memory);
  }

 private:
  std::vector<Store*> stores_;
  std::deque<Op> reads_;  // that were not begun
  int64_t writes_ = 0;
  size_t turn_ = 0;
};

// What is left of an op: how many bytes, and where they begin in the file.
inline int64_t left(const Op& op) { return op.count * op.store->shape().block - op.done; }
inline int64_t begin_of(const Op& op) { return op.place * op.store->shape().block + op.done; }

// Takes how many bytes were read or written, or -errno. Returns whether the rest is to be done: the system may do less
// than it is asked, or be interrupted. Nothing more comes after an error, and where the file ends (0).
inline bool goes_on(Op* op, int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return true;
  op->done += std::max<int64_t>(result, 0);
  return result > 0 && left(*op) > 0;
}

inline int64_t transfer(const Op& op, uint8_t* buffer) {
  const int fd = op.store->shape().fd;
  uint8_t* const from = buffer + op.done;
  const int64_t done = op.is_write ? pwrite(fd, from, left(op), begin_of(op)) : pread(fd, from, left(op), begin_of(op));
  return done < 0 ? -errno : done;
}

class Threads final : public Engine {
 public:
  Threads() : buffers_(buffers_of(kDepth)) {
    for (int64_t t = 0; t < kDepth; ++t) std::thread([this, t] { run(t); }).detach();  // they live with the process
  }
  void wake(int64_t blocks) override {
    for (int64_t t = 0; t < std::min(blocks, kDepth); ++t) todo_.notify_one();
  }

 private:
  uint8_t* buffers_;
  std::condition_variable todo_;

  void run(int64_t thread) {
    Op op;
    uint8_t* const buffer = buffers_ + thread * kMostBlock;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      todo_.wait(lock, [&] { return next(&op, buffer); });
      Error found;
      do {
        lock.unlock();
        int64_t result = transfer(op, buffer);
        while (goes_on(&op, result)) result = transfer(op, buffer);
        found = op.store->work(op, buffer, result);
        lock.lock();
      } while (finish(&op, buffer, found));
    }
  }
};

#if defined(HAS_IO_URING)

// Adds what is left of an op to a ring.
inline void add_left(Uring* ring, const Op& op, uint8_t* buffer, uint64_t slot) {
  const uint8_t code = op.is_write ? IORING_OP_WRITE : IORING_OP_READ;
  ring->add(code, op.store->shape().fd, buffer + op.done, left(op), begin_of(op), slot);
}

// One thread owns the ring. Others wake it through an event that it always reads from.
class Ring final : public Engine {
 public:
  Ring() : buffers_(buffers_of(kDepth)) {
    std::promise<int> begun;
    std::thread([this, &begun] {
      const int code = open();
      begun.set_value(code);
      if (code == 0) run();
    }).detach();
    code_ = begun.get_future().get();
  }
  int code() const { return code_; }  // errno; 0: it can be used
  void wake(int64_t blocks) override {
    if (blocks == 0 || !is_asleep_) return;
    is_asleep_ = false;
    const uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
  }

 private:
  static constexpr uint64_t kEvent = kDepth;  // user_data of the read of the event; others have their slot
  uint8_t* buffers_;
  int code_ = 0, event_ = -1;
  Uring ring_;
  bool is_asleep_ = false;
  uint64_t event_value_ = 0;
  Op ops_[kDepth];

  int open() {
    event_ = eventfd(0, EFD_CLOEXEC);
    return event_ < 0 ? errno : ring_.open(2 * kDepth);
  }
  uint8_t* buffer(int64_t slot) { return buffers_ + slot * kMostBlock; }
  void begin(int64_t slot) { add_left(&ring_, ops_[slot], buffer(slot), slot); }
  void listen() { ring_.add(IORING_OP_READ, event_, &event_value_, sizeof event_value_, 0, kEvent); }

  void run() {
    std::vector<int64_t> free;
    for (int64_t slot = kDepth; slot-- > 0;) {
      free.push_back(slot);
    }
    std::vector<std::pair<int64_t, int64_t>> done;
    std::vector<Error> found;
    listen();
    for (;;) {
      std::erase_if(done, [&](const auto& of) {
        const auto [slot, result] = of;
        if (slot == kEvent || !goes_on(&ops_[slot], result)) return false;
        begin(slot);
        return true;
      });
      found.clear();
      for (const auto& [slot, result] : done)
        found.push_back(slot == kEvent ? Error{} : ops_[slot].store->work(ops_[slot], buffer(slot), result));
      std::unique_lock<std::mutex> lock(mutex);
      for (size_t i = 0; i < done.size(); ++i) {
        const int64_t slot = done[i].first;
        if (slot == kEvent) listen();
        else if (finish(&ops_[slot], buffer(slot), found[i])) begin(slot);
        else free.push_back(slot);
      }
      while (!free.empty() && next(&ops_[free.back()], buffer(free.back()))) {
        begin(free.back());
        free.pop_back();
      }
      is_asleep_ = !free.empty();
      lock.unlock();
      done.clear();
      ring_.reap(1, &done);
    }
  }
};

#endif

}  // namespace sparrow::block_io
