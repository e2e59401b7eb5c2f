// Clocks, and times that processes of one machine compare.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>

namespace torchreplay {

inline int64_t monotonic_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

namespace detail {

inline constexpr int64_t kUnknownOffset = std::numeric_limits<int64_t>::min();
inline std::atomic<int64_t> time_offset{kUnknownOffset};

// The lines are "monotonic <seconds> <nanoseconds>" and the same of another clock. A system without time namespaces has
// no such file.
inline int64_t read_time_offset() {
  // A forked child may be in another namespace than its parent.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { time_offset = kUnknownOffset; });
  (void)registered;
  int64_t offset = 0;
  if (FILE* f = std::fopen("/proc/self/timens_offsets", "re")) {
    char clock[32], seconds[32], ns[32];
    while (std::fscanf(f, "%31s %31s %31s", clock, seconds, ns) == 3)
      if (std::strcmp(clock, "monotonic") == 0)
        offset = std::strtoll(seconds, nullptr, 10) * 1'000'000'000 + std::strtoll(ns, nullptr, 10);
    std::fclose(f);
  }
  time_offset.store(offset, std::memory_order_relaxed);
  return offset;
}

}  // namespace detail

// A monotonic time that all processes of this machine agree on: containers may have monotonic clocks with an offset,
// each its own (time namespaces). For times in shared memory.
inline int64_t machine_ns(clockid_t clock = CLOCK_MONOTONIC) {
  int64_t offset = detail::time_offset.load(std::memory_order_relaxed);
  if (offset == detail::kUnknownOffset) offset = detail::read_time_offset();
  return monotonic_ns(clock) - offset;
}

// The same in milliseconds, which come round after seven weeks.
inline uint32_t millis_of(int64_t ns) { return static_cast<uint32_t>(ns / 1'000'000); }
inline uint32_t millis() { return millis_of(machine_ns(CLOCK_MONOTONIC_COARSE)); }
// Others may have read the clock a little later than this process did.
inline uint32_t millis_since(uint32_t then, uint32_t now) {
  constexpr uint32_t kLater = 60'000;
  return now - then > 0U - kLater ? 0 : now - then;
}

}  // namespace torchreplay
