// How the tables of a call are shared among threads, and the memory that each thread works in.
//
// Every parallel loop gives a bag or a row to one thread, so any number of threads gives the same bits.

#pragma once

#include "../../cpu.h"

#include <memory>
#include <new>
#include <vector>

namespace sparrow::embedding_bag {

// Memory of one thread: uninitialised, aligned for vectors; it keeps the largest size that it was asked for. It is
// taken before threads start, since what is thrown in one cannot be caught.
template <class T>
struct Buffer {
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> memory;
  int64_t size = 0;

  T* take(int64_t count) {
    if (count > size) {
      memory.reset();
      const size_t bytes = static_cast<size_t>(count) * sizeof(T);
      memory.reset(static_cast<T*>(huge_pages(::operator new(bytes, std::align_val_t{64}), bytes)));
      size = count;
    }
    return memory.get();
  }
  T* get() const { return memory.get(); }
};

// The first index of each of `parts` runs of about equal cost.
inline std::vector<int64_t> split(const std::vector<int64_t>& costs, int64_t parts) {
  int64_t total = 0, sum = 0;
  for (int64_t cost : costs) total += cost;
  std::vector<int64_t> first{0};
  for (size_t i = 0; i < costs.size(); ++i) {
    while (static_cast<int64_t>(first.size()) < parts &&
           sum + costs[i] / 2 >= total / parts * static_cast<int64_t>(first.size()))
      first.push_back(static_cast<int64_t>(i));
    sum += costs[i];
  }
  first.resize(parts + 1, static_cast<int64_t>(costs.size()));
  return first;
}

// Whether a table holds so much of the work that all threads should share it.
inline std::vector<bool> large(const std::vector<int64_t>& costs, int64_t threads) {
  int64_t total = 0;
  for (int64_t cost : costs) total += cost;
  std::vector<bool> found;
  for (int64_t cost : costs) found.push_back(threads > 1 && cost > total / threads / 2);
  return found;
}

// Calls f(table, worker, team): large tables one after the other, with all threads as their team and worker 0, the
// others each whole on one thread.
template <class F>
void for_tables(const std::vector<int64_t>& costs, int64_t threads, const F& f) {
  const std::vector<bool> shared = large(costs, threads);
  std::vector<int64_t> rest, rest_costs;
  for (int64_t t = 0; t < static_cast<int64_t>(costs.size()); ++t)
    if (shared[t]) {
      f(t, int64_t{0}, threads);
    } else {
      rest.push_back(t);
      rest_costs.push_back(costs[t]);
    }
  const auto first = split(rest_costs, threads);
  parallel(threads, [&](int64_t worker) {
    for (int64_t i = first[worker]; i < first[worker + 1]; ++i) f(rest[i], worker, int64_t{1});
  });
}

}  // namespace sparrow::embedding_bag
