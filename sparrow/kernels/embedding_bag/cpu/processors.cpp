// The inner loops, compiled once for each kind of processor, and the choice among them at run time.
//
// Wheels are built on one machine and run on another, so the compiler's own flags stay those of any processor and only
// what stands between the pragmas uses wider vectors.

#include "processors.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparrow::embedding_bag {
namespace {

#define LANES 4
namespace portable {
#include "loops.h"
}
#undef LANES

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define LANES 8
namespace avx2 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,f16c")
#endif
#undef LANES
#define LANES 16
namespace avx512 {
#include "loops.h"
}
#undef LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

struct Processor {
  const char* name;
  const Loops* loops;
  bool here;  // whether this machine can run them
};

const std::vector<Processor>& processors() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const std::vector<Processor> all{
      {"avx512", &avx512::loops,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("f16c")},
      {"avx2", &avx2::loops, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")},
      {"portable", &portable::loops, true}};
#else
  static const std::vector<Processor> all{{"portable", &portable::loops, true}};
#endif
  return all;
}

const Processor* best() {
  return &*std::find_if(processors().begin(), processors().end(), [](const Processor& p) { return p.here; });
}

std::atomic<const Processor*> chosen{nullptr};

// Name of the processor whose loops run; a name given chooses it, "best" the default.
std::string processor(const std::string& name) {
  if (name == "best") {
    chosen = best();
  } else if (!name.empty()) {
    const auto& all = processors();
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const Processor& p) { return p.here && name == p.name; });
    check(found != all.end(), "processor: ", name, " cannot run here");
    chosen = &*found;
  }
  loops();
  return chosen.load()->name;
}

}  // namespace

const Loops& loops() {
  if (!chosen) chosen = best();
  return *chosen.load()->loops;
}

STABLE_TORCH_LIBRARY_FRAGMENT(sparrow, m) { m.def("processor(str name) -> str"); }

STABLE_TORCH_LIBRARY_IMPL(sparrow, CompositeExplicitAutograd, m) { m.impl("processor", TORCH_BOX(&processor)); }

}  // namespace sparrow::embedding_bag
