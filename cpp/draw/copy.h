// Copies of long values: fetched ahead, and written past the caches into large batches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "segment/segment_memory.h"

namespace torchreplay {

// From here on a copy past the caches is faster. A smaller batch stays in them until the learner reads it.
inline constexpr uint64_t kStreamValueBytes = 6144;
inline constexpr uint64_t kStreamBatchBytes = uint64_t{8} << 20;

#if defined(TORCHREPLAY_X86) && !defined(TORCHREPLAY_RACEFREE)
inline bool can_stream(uint64_t value_bytes, uint64_t batch_bytes) {
  return value_bytes >= kStreamValueBytes && batch_bytes >= kStreamBatchBytes && best_simd() == Simd::kAvx512;
}

// Copies a value of `n` bytes, and brings the one of `next_n` bytes at `next` into the second-level cache meanwhile:
// its lines and translations would arrive too late otherwise, for rows lie at random. finish_stream() must follow.
TORCHREPLAY_AVX512 inline void stream_payload(char* to, const char* from, uint64_t n, const char* next,
                                              uint64_t next_n) {
  uint64_t at = std::min(n, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, at);
  for (; at + kLine <= std::min(n, next_n); at += kLine) {
    _mm_prefetch(next + at, _MM_HINT_T1);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
  for (; at + kLine <= n; at += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  std::memcpy(to + at, from + at, n - at);
}

// Streaming stores are ordered with nothing; after this every thread that is handed the batch sees them.
inline void finish_stream() { _mm_sfence(); }
#else
inline bool can_stream(uint64_t, uint64_t) { return false; }
inline void stream_payload(char*, const char*, uint64_t, const char*, uint64_t) {}
inline void finish_stream() {}
#endif

// Copies of long values, which lie apart from their rows, in the order in which they were added.
class LongCopies {
 public:
  // A value is fetched while the one so far before it is copied. A burst for a whole block of rows would wait for free
  // fill buffers, and much of it would have left the cache by the time of its copy.
  static constexpr int kAhead = 2;

  void clear() { copies_.clear(); }
  void add(char* to, const char* from, uint64_t bytes) { copies_.push_back({to, from, bytes}); }
  size_t size() const { return copies_.size(); }

  // Copies the first `n` values; those after them are only fetched. `batch_bytes`: of the whole batch.
  void run(size_t n, uint64_t batch_bytes) const {
    bool streamed = false;
    for (size_t i = 0; i < n; i++) {
      const auto& [to, from, bytes] = copies_[i];
      if (can_stream(bytes, batch_bytes)) {
        const Copy& next = following(i + 1);
        stream_payload(to, from, bytes, next.from, next.bytes);
        streamed = true;
      } else {
        const Copy& later = following(i + kAhead);
        const uint64_t fetched = std::min(later.bytes, kFetchedBytes);
        for (uint64_t byte = 0; byte < fetched; byte += kLine) __builtin_prefetch(later.from + byte);
        copy_payload(to, from, bytes);
      }
    }
    if (streamed) finish_stream();
  }

 private:
  static constexpr uint64_t kFetchedBytes = 512;  // the processor follows by itself from there

  struct Copy {
    char* to;
    const char* from;
    uint64_t bytes;
  };

  const Copy& following(size_t i) const { return copies_[std::min(i, copies_.size() - 1)]; }

  std::vector<Copy> copies_;
};

}  // namespace torchreplay
