// How many pages the rows that are held take.
#pragma once

#include <algorithm>

#include "segment/segment_memory.h"

namespace torchreplay {

// From the first page of the oldest row on, to the next page to be taken: also those between them of rows that are
// gone. Where writers wait for room, from the oldest page on that is needed. Under the mutex. O(pages, or slots, of
// rows that are gone), whichever are fewer.
inline uint64_t pages_in_use(const SegmentMemory& m) {
  const Header& h = m.header();
  const uint64_t pages = m.layout().pages.count, head = h.page_head.load(std::memory_order_acquire);
  if (h.sampler.makes_writers_wait()) return head - std::min(head, h.page_needed_from);
  const uint64_t rows = h.absorbed, capacity = m.capacity();
  // Whether a row that is held begins at the page with this ticket.
  const auto begins = [&](uint64_t ticket) {
    const uint64_t owner1 = m.owner1(m.page_of(ticket));
    return owner1 && m.at(owner1 - 1) && m.run1(owner1 - 1) == ticket + 1;
  };
  uint64_t ticket = head - std::min(head, pages), key = rows - std::min(rows, capacity);
  for (; ticket < head && key < rows; ticket++, key++) {
    if (begins(ticket)) return head - ticket;
    const uint64_t slot = m.slot_of(key), run1 = m.run1(slot);
    if (m.at(slot) == key + 1 && run1) return std::min(head - (run1 - 1), pages);
  }
  return 0;
}

}  // namespace torchreplay
