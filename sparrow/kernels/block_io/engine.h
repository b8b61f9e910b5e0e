// Who reads and writes: one engine for all stores of a process, over io_uring or over threads.

#pragma once

#include "store.h"

#include <sys/mman.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)  // Linux 5.6
#define HAS_IO_URING
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
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

  // Returns whether the op is to be done again, with another result: as a write, or after an interruption.
  bool finish(Op* op, uint8_t* buffer, const Error& found) {
    if (found.code == EINTR || found.code == EAGAIN) return true;
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

inline int64_t transfer(const Op& op, uint8_t* buffer) {
  const Shape& of = op.store->shape();
  const int64_t bytes = op.count * of.block, at = op.place * of.block;
  const int64_t done = op.is_write ? pwrite(of.fd, buffer, bytes, at) : pread(of.fd, buffer, bytes, at);
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
        found = op.store->work(op, buffer, transfer(op, buffer));
        lock.lock();
      } while (finish(&op, buffer, found));
    }
  }
};

#if defined(HAS_IO_URING)

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
  int code_ = 0, ring_ = -1, event_ = -1;
  bool is_asleep_ = false;
  uint64_t event_value_ = 0;
  Op ops_[kDepth];
  unsigned *sq_tail_, *sq_mask_, *sq_array_, *cq_head_, *cq_tail_, *cq_mask_;
  io_uring_sqe* sqes_;
  io_uring_cqe* cqes_;
  unsigned added_ = 0;

  int open() {
    io_uring_params params;
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0u}) {
      memset(&params, 0, sizeof params);
      params.flags = flags;  // fewer interruptions, from Linux 6.1
      ring_ = syscall(__NR_io_uring_setup, 2 * kDepth, &params);
      if (ring_ >= 0) break;
    }
    if (ring_ < 0) return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_RW_CUR_POS)) return ENOSYS;
    const size_t bytes = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                          params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    uint8_t* rings = mapped<uint8_t>(bytes, IORING_OFF_SQ_RING);
    sqes_ = mapped<io_uring_sqe>(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    event_ = eventfd(0, EFD_CLOEXEC);
    if (rings == nullptr || sqes_ == nullptr || event_ < 0) return errno;
    const auto at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings + offset); };
    sq_tail_ = at(params.sq_off.tail), sq_mask_ = at(params.sq_off.ring_mask), sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head), cq_tail_ = at(params.cq_off.tail), cq_mask_ = at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings + params.cq_off.cqes);
    return 0;
  }

  template <class T>
  T* mapped(size_t bytes, int64_t offset) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, offset);
    return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
  }

  void add_entry(uint8_t code, int64_t fd, void* buffer, int64_t bytes, int64_t at, uint64_t user_data) {
    const unsigned tail = *sq_tail_, index = tail & *sq_mask_;
    memset(&sqes_[index], 0, sizeof(io_uring_sqe));
    sqes_[index].opcode = code;
    sqes_[index].fd = fd;
    sqes_[index].addr = reinterpret_cast<uint64_t>(buffer);
    sqes_[index].len = bytes;
    sqes_[index].off = at;
    sqes_[index].user_data = user_data;
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++added_;
  }
  uint8_t* buffer(int64_t slot) { return buffers_ + slot * kMostBlock; }
  void begin(int64_t slot) {
    const Op& op = ops_[slot];
    const Shape& of = op.store->shape();
    add_entry(op.is_write ? IORING_OP_WRITE : IORING_OP_READ, of.fd, buffer(slot), op.count * of.block,
              op.place * of.block, slot);
  }
  void listen() { add_entry(IORING_OP_READ, event_, &event_value_, sizeof event_value_, 0, kEvent); }

  // Submits what was added, waits until at least one is done, and returns (slot, result) of those that are.
  void reap(std::vector<std::pair<int64_t, int64_t>>* done) {
    for (;;) {
      const int sent = syscall(__NR_io_uring_enter, ring_, added_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (sent > 0) added_ -= sent;
      unsigned head = *cq_head_;
      const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
      for (; head != tail; ++head) {
        const io_uring_cqe& entry = cqes_[head & *cq_mask_];
        done->emplace_back(entry.user_data, entry.res);
      }
      __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
      if (!done->empty()) return;
    }
  }

  void run() {
    std::vector<int64_t> free;
    for (int64_t slot = kDepth; slot-- > 0;) {
      free.push_back(slot);
    }
    std::vector<std::pair<int64_t, int64_t>> done;
    std::vector<Error> found;
    listen();
    for (;;) {
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
      reap(&done);
    }
  }
};

#endif

}  // namespace sparrow::block_io
