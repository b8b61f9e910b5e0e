// The choice at run time among the inner loops, which loops_*.cpp compile for each kind of processor.
//
// Wheels are built on one machine and run on another, so the compiler's own flags stay those of any processor. Only
// what stands between the pragmas of those files uses wider vectors.

#include "processors.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

namespace sparrow::embedding_bag {
namespace {

struct Processor {
  const char* name;
  const Loops* loops;
  bool here;  // whether this machine can run them
};

const std::vector<Processor>& processors() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const std::vector<Processor> all{
      {"avx512", avx512_loops(),
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("f16c")},
      {"avx2", avx2_loops(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")},
      {"portable", portable_loops(), true}};
#else
  static const std::vector<Processor> all{{"portable", portable_loops(), true}};
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
