// Shows libFuzzer which blocks of a module a call reaches. Compiled with -fsanitize-coverage=trace-pc, GCC calls a
// function in each of them; libFuzzer, made for another compiler, wants an array of counters instead.
#include <cstddef>
#include <cstdint>

// libFuzzer's; without it the address sanitizer's, which do nothing.
extern "C" void __sanitizer_cov_8bit_counters_init(uint8_t* begin, uint8_t* end);
extern "C" void __sanitizer_cov_pcs_init(const uintptr_t* begin, const uintptr_t* end);

namespace {

constexpr size_t kCounters = 1 << 16;
uint8_t counters[kCounters];

// A program counter and flags for each counter. Blocks may share a counter, so it stands for itself.
struct Block {
  uintptr_t pc, flags;
} blocks[kCounters];

[[gnu::constructor]] void register_counters() {
  for (size_t i = 0; i < kCounters; i++) blocks[i] = {reinterpret_cast<uintptr_t>(counters + i) + 1, 1};
  __sanitizer_cov_8bit_counters_init(counters, counters + kCounters);
  __sanitizer_cov_pcs_init(&blocks[0].pc, &blocks[0].pc + 2 * kCounters);
}

}  // namespace

// Hidden, so that it is found before libFuzzer's own, which does nothing.
extern "C" [[gnu::visibility("hidden")]] void __sanitizer_cov_trace_pc() {
  const auto pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  counters[pc * 0x9e3779b97f4a7c15 >> 48]++;  // the top 16 bits spread best
}

// Comparisons of floating point, which libFuzzer knows nothing of.
extern "C" void __sanitizer_cov_trace_cmpf(float, float) {}
extern "C" void __sanitizer_cov_trace_cmpd(double, double) {}
