// Where the values of a row lie that have any length: in a run of consecutive pages.
#pragma once

#include <algorithm>
#include <optional>

#include "segment/segment_memory.h"

namespace torchreplay {

struct Run {
  uint64_t first = 0;  // page ticket
  uint64_t pages = 0;  // 0: the row has none

  bool operator==(const Run&) const = default;
};

// Pages that so many bytes take.
inline uint64_t pages_of(const Layout& layout, uint64_t bytes) {
  const Pages& pages = layout.pages;
  return bytes / pages.bytes + (bytes % pages.bytes != 0);
}

// The ticket at which a run of `n` pages begins, when `head` is the next one: no run goes over the end of the ring.
inline uint64_t start_of_run(const SegmentMemory& m, uint64_t head, uint64_t n) {
  const uint64_t count = m.layout().pages.count, page = m.page_of(head);
  return page + n > count ? head + (count - page) : head;
}

// The first ticket from `head` on of a run of `n` pages that neither meets a busy page nor goes over the end of the
// ring. Tickets before it are skipped. Nothing: there is none in a whole turn. O(n), and the pages that others have
// busy.
inline std::optional<uint64_t> find_room(const SegmentMemory& m, uint64_t head, uint64_t n) {
  uint64_t first = start_of_run(m, head, n);
  for (uint64_t i = 0; i < n;) {
    const uint64_t page = m.page_of(first) + i++;
    if (!slot_word::is_busy(m.page_word(page).load(std::memory_order_relaxed))) continue;
    first = start_of_run(m, first + i, n);
    i = 0;
    if (first - head >= m.layout().pages.count) return {};
  }
  return first;
}

// Whether a run of `n` pages, the next one to be taken, lies below the limit.
inline bool fits_below(const SegmentMemory& m, uint64_t limit, uint64_t n) {
  const auto first = find_room(m, m.header().page_head.load(std::memory_order_acquire), n);
  return first && *first + n <= limit;
}

// The page ticket below which each run is of a row that is written, or of none: no writer speaks of one. A writer says
// its run before it takes the tickets, so the head comes first. O(participants ever at one time).
inline uint64_t unwritten_from(SegmentMemory& m) {
  uint64_t from = m.header().page_head.load(std::memory_order_acquire);
  const uint32_t ids = std::min<uint32_t>(m.header().ids.load(std::memory_order_acquire), kMaxParticipants - 1);
  for (uint32_t id = 1; id <= ids; id++)
    if (const uint64_t first1 = m.run_in_flight(static_cast<int>(id)).first1.load(std::memory_order_acquire))
      from = std::min(from, first1 - 1);
  return from;
}

// Reads the run and the lengths of the row in a slot, which may change meanwhile. The caller then looks whether the
// row's word is the same. False for what no writer writes: shared memory and files may hold anything, and nobody is to
// read past an end.
inline bool read_run(const SegmentMemory& m, uint64_t slot, Run& run, uint32_t* lengths) {
  const Layout& layout = m.layout();
  const Pages& pages = layout.pages;
  for (uint32_t g = 0; g < pages.groups; g++) {
    lengths[g] = __atomic_load_n(m.length_of_row(slot, g), __ATOMIC_RELAXED);
    if (lengths[g] > kMaxLength) return false;
  }
  const uint64_t run1 = __atomic_load_n(m.run1_of_row(slot), __ATOMIC_RELAXED);
  const uint64_t bytes = place_values(layout.ragged, lengths, nullptr);
  run = {};
  if (run1 == 0 || bytes == 0) return run1 == 0 && bytes == 0;
  if (bytes == kNoSize) return false;
  run = {run1 - 1, pages_of(layout, bytes)};
  if (run.pages > pages.most() || m.page_of(run.first) + run.pages > pages.count) return false;
  const uint64_t head = m.header().page_head.load(std::memory_order_relaxed);
  return run.first < head && run.pages <= head - run.first;
}

// Whether a run has its pages still. To be called after its values were copied.
inline bool is_intact(const SegmentMemory& m, const Run& run) {
  std::atomic_thread_fence(std::memory_order_acquire);
  uint64_t bad = 0;
  const uint64_t page = m.page_of(run.first);
  for (uint64_t i = 0; i < run.pages; i++) {
    const uint64_t word = m.page_word(page + i).load(std::memory_order_relaxed);
    bad |= uint64_t{!slot_word::is_row(word)} | (slot_word::key1(word) ^ (run.first + i + 1));
  }
  return !bad;
}

}  // namespace torchreplay
