// Copies of long values into large batches: written past the caches, read one value ahead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "segment/layout.h"
#include "system/simd.h"

namespace torchreplay {

// From here on a copy past the caches is faster. A smaller batch stays in them until the learner reads it.
inline constexpr uint64_t kStreamValueBytes = 6144;
inline constexpr uint64_t kStreamBatchBytes = uint64_t{8} << 20;

#if defined(TORCHREPLAY_X86) && !defined(TORCHREPLAY_RACEFREE)
inline bool can_stream(uint64_t value_bytes, uint64_t batch_bytes) {
  return value_bytes >= kStreamValueBytes && batch_bytes >= kStreamBatchBytes && best_simd() == Simd::kAvx512;
}

// Copies a value of `n` bytes, and brings the equally long one at `next` into the second-level cache meanwhile: its
// lines and translations would arrive too late otherwise, for rows lie at random. finish_stream() must follow.
TORCHREPLAY_AVX512 inline void stream_payload(char* to, const char* from, const char* next, uint64_t n) {
  uint64_t at = std::min(n, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, at);
  for (; at + kLine <= n; at += kLine) {
    _mm_prefetch(next + at, _MM_HINT_T1);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
  std::memcpy(to + at, from + at, n - at);
}

// Streaming stores are ordered with nothing; after this every thread that is handed the batch sees them.
inline void finish_stream() { _mm_sfence(); }
#else
inline bool can_stream(uint64_t, uint64_t) { return false; }
inline void stream_payload(char*, const char*, const char*, uint64_t) {}
inline void finish_stream() {}
#endif

}  // namespace torchreplay
