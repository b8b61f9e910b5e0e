// What every operator on CPUs needs: torch's stable ABI, errors, memory, and how work is shared among threads.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <vector>

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#error "the kernels need GCC or clang"
#endif

// The same function compiled for each kind of processor; the system picks when the library is loaded.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_PROCESSORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_PROCESSORS
#endif

namespace sparrow {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPage = 4096, kHuge = 2 << 20;

// Asks for large memory in pages of 2 MiB where the system can: a page fault and an address translation for each 4 KiB
// cost more than the work on them.
inline void* huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (bytes >= (4 << 20)) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return memory;
}

// Memory of large tensors that are made and freed in every step. malloc would cut it up for small tensors, grow, and
// let the system clear new pages. Here a freed block is used again whole, by the next tensor of about its size. A block
// that is a little too small is freed when a larger one is made. Else sizes that grow step by step would pile up.
class Blocks {
 public:
  void* take(int64_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    ++now_;
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    auto found = free_.lower_bound(bytes);
    if (found == free_.end() || found->first > bytes + bytes / 4) {
      if (found != free_.begin() && std::prev(found)->first >= bytes - bytes / 4) let_go(std::prev(found));
      forget_old();
      void* block = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED) throw std::bad_alloc();
      void* start = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + kHuge - 1) / kHuge * kHuge);
      huge_pages(start, bytes / kHuge * kHuge);  // not the end: most of its page would never be used
      made_[start] = {block, bytes};
      return start;
    }
    void* block = found->second.memory;
    free_.erase(found);
    return block;
  }

  void forget_all() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (Place it = free_.begin(); it != free_.end();) it = let_go(it);
  }

  void give_back(void* block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int64_t bytes = made_.at(block).bytes;
    free_.insert(free_.lower_bound(bytes), {bytes, {block, now_}});  // the next to be taken: others may grow old
  }

 private:
  static constexpr int64_t kUnit = 1 << 16, kPatience = 512;  // bytes; takes after which an unused block is let go
  struct Made {
    void* memory;  // what the system gave, kHuge more than bytes
    int64_t bytes;
  };
  struct Free {
    void* memory;
    int64_t since;
  };
  using Place = std::multimap<int64_t, Free>::iterator;
  std::mutex mutex_;
  std::multimap<int64_t, Free> free_;
  std::map<void*, Made> made_;
  int64_t now_ = 0;

  Place let_go(Place it) {
    const Made made = made_.at(it->second.memory);
    munmap(made.memory, made.bytes + kHuge);
    made_.erase(it->second.memory);
    return free_.erase(it);
  }

  void forget_old() {
    Place it = free_.begin();
    while (it != free_.end()) it = now_ - it->second.since < kPatience ? std::next(it) : let_go(it);
  }
};

inline Blocks& blocks() {
  static Blocks* all = new Blocks;  // never destroyed: tensors may outlive everything else
  return *all;
}

// An uninitialised tensor on the CPU.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  int64_t bytes = type == ScalarType::Long                               ? 8
                  : type == ScalarType::Float || type == ScalarType::Int ? 4
                  : type == ScalarType::Byte                             ? 1
                                                                         : 2;
  bool impossible = false;
  for (int64_t size : sizes) impossible |= size < 0 || __builtin_mul_overflow(bytes, size, &bytes);
  if (impossible || bytes < (1 << 20)) return torch::stable::empty(sizes, type);  // which says what is wrong
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return torch::stable::from_blob(blocks().take(bytes), sizes, strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), type,
                                  [](void* block) { blocks().give_back(block); });
}

constexpr int64_t kGrain = 65536;  // floats of work below which another thread costs more than it saves
constexpr int64_t kMostThreads = 1024;

// std::invalid_argument arrives in Python as a ValueError.
template <class... Parts>
void check(bool fine, const Parts&... parts) {
  if (fine) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Returns how many threads should share so much work, in floats.
inline int64_t team_for(int64_t work) {
  return std::clamp<int64_t>(work / kGrain, 1, std::min<int64_t>(torch::stable::get_num_threads(), kMostThreads));
}

// Calls f(0) to f(chunks - 1), on a thread each.
template <class F>
void parallel(int64_t chunks, const F& f) {
  if (chunks == 1) return f(0);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c);
  });
}

}  // namespace sparrow
