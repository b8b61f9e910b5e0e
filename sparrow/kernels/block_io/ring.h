// io_uring by its system calls: users lack liburing.

#pragma once

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
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

#if defined(HAS_IO_URING)

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace sparrow::block_io {

// A ring of one thread: the one that opens it.
class Uring {
 public:
  Uring() = default;
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;
  ~Uring() {
    if (rings_) munmap(rings_, bytes_);
    if (sqes_) munmap(sqes_, sqe_bytes_);
    if (ring_ >= 0) close(ring_);
  }

  // Returns errno, 0 if so many can be under way.
  int open(unsigned entries) {
    io_uring_params params;
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0u}) {
      memset(&params, 0, sizeof params);
      params.flags = flags;  // fewer interruptions, from Linux 6.1
      ring_ = syscall(__NR_io_uring_setup, entries, &params);
      if (ring_ >= 0) break;
    }
    if (ring_ < 0) return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_RW_CUR_POS)) return ENOSYS;
    bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                              params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = mapped<uint8_t>(bytes_, IORING_OFF_SQ_RING);
    sqes_ = mapped<io_uring_sqe>(sqe_bytes_, IORING_OFF_SQES);
    if (rings_ == nullptr || sqes_ == nullptr) return errno;
    const auto at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_tail_ = at(params.sq_off.tail), sq_mask_ = at(params.sq_off.ring_mask), sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head), cq_tail_ = at(params.cq_off.tail), cq_mask_ = at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    return 0;
  }

  void add(uint8_t code, int64_t fd, void* buffer, int64_t bytes, int64_t at, uint64_t user_data) {
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

  // Submits what was added, waits until so many are done, and returns (user_data, result) of all that are.
  void reap(unsigned least, std::vector<std::pair<int64_t, int64_t>>* done) {
    for (;;) {
      const int sent = syscall(__NR_io_uring_enter, ring_, added_, least, IORING_ENTER_GETEVENTS, nullptr, 0);
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

 private:
  int ring_ = -1;
  unsigned *sq_tail_, *sq_mask_, *sq_array_, *cq_head_, *cq_tail_, *cq_mask_;
  uint8_t* rings_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_;
  size_t bytes_ = 0, sqe_bytes_ = 0;
  unsigned added_ = 0;

  template <class T>
  T* mapped(size_t bytes, int64_t offset) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, offset);
    return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
  }
};

}  // namespace sparrow::block_io

#endif
