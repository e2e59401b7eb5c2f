// How many pages the rows that are held take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "segment/header.h"
#include "segment/layout.h"

namespace torchreplay {

// From the first page of the oldest row on, to the next page to be taken, `head`: also those between them of rows that
// are gone. Where writers wait for room, from the oldest page on that is needed. `rows`: absorbed so far. `m` has
// layout(), and at(slot), run1(slot) and owner1(page) as SegmentMemory has them. O(pages, or slots, of rows that are
// gone), whichever are fewer.
template <class Memory>
uint64_t pages_in_use(const Memory& m, const Header& h, uint64_t head, uint64_t rows) {
  if (h.sampler.makes_writers_wait())
    return head - std::min(head, __atomic_load_n(&h.page_needed_from, __ATOMIC_RELAXED));
  const uint64_t pages = m.layout().pages.count, capacity = m.layout().capacity;
  // Whether a row that is held begins at the page with this ticket.
  const auto begins = [&](uint64_t ticket) {
    const uint64_t owner1 = m.owner1(ticket % pages);
    return owner1 && owner1 <= capacity && m.at(owner1 - 1) && m.run1(owner1 - 1) == ticket + 1;
  };
  uint64_t ticket = head - std::min(head, pages), key = rows - std::min(rows, capacity);
  for (; ticket < head && key < rows; ticket++, key++) {
    if (begins(ticket)) return head - ticket;
    const uint64_t slot = key % capacity, run1 = m.run1(slot);
    if (m.at(slot) == key + 1 && run1) return std::min(head - (run1 - 1), pages);
  }
  return 0;
}

}  // namespace torchreplay
