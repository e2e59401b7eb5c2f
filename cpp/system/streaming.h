// Stores past the caches, for values that go into memory much larger than these. An ordinary copy reads each line of
// the memory first, and puts out of the caches what the process needs next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "system/simd.h"

namespace torchreplay {

// From here on it is faster. For a shorter value the wait for its last stores takes as long as they save, and a smaller
// array is in the caches when it is read. What the system says of its caches is not to be relied on in a virtual
// machine.
inline constexpr uint64_t kStreamedBytes = 16384;
inline constexpr uint64_t kStreamedArrayBytes = uint64_t{64} << 20;

#if defined(TORCHREPLAY_X86) && !defined(TORCHREPLAY_RACEFREE)
inline bool can_stream_into(uint64_t array_bytes, uint64_t value_bytes) {
  return value_bytes >= kStreamedBytes && array_bytes >= kStreamedArrayBytes;
}

// Copies `n` bytes with instructions that each x86-64 processor has. Such stores keep no order, but none passes a
// locked instruction before them, or the fence at the end.
inline void stream_value(char* to, const char* from, uint64_t n) {
  constexpr uint64_t kStep = 64;
  uint64_t at = std::min(n, -reinterpret_cast<uintptr_t>(to) % kStep);
  std::memcpy(to, from, at);
  for (; at + kStep <= n; at += kStep)
    for (uint64_t part = at; part < at + kStep; part += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part)));
  std::memcpy(to + at, from + at, n - at);
  _mm_sfence();
}
#else
inline bool can_stream_into(uint64_t, uint64_t) { return false; }
inline void stream_value(char*, const char*, uint64_t) {}
#endif

}  // namespace torchreplay
