// By which policy each item came about, where rows say so. Runs under the segment's mutex.
#pragma once

#include <algorithm>
#include <limits>

#include "absorb/streams.h"
#include "segment/segment_memory.h"

namespace torchreplay {

// Versions that one lies before another; as many as 64 bits hold, where they are made up.
inline int64_t versions_behind(int64_t version, int64_t older) {
  int64_t behind;
  if (!__builtin_sub_overflow(version, older, &behind)) return behind;
  return older < 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
}

// Items that are too old for the learner are found by bounds: one for each block of slots, and one for all. So it takes
// no time where none is too old, and is proportional to what goes where some are. Bounds may be too low, never too
// high.
class ItemVersions {
 public:
  explicit ItemVersions(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        view_(m.layout().view),
        field_(view_.version1 ? &m.layout().fields[view_.version1 - 1] : nullptr) {}

  bool are_kept() const { return field_ != nullptr; }

  int64_t of(uint64_t anchor) const { return memory_.version(anchor); }

  // The item anchored there is complete, and can be drawn. O(steps).
  void set(uint64_t anchor, const Streams& streams) {
    memory_.version(anchor) = oldest_of_rows(anchor, streams);
    note(anchor);
  }

  // Whether the item anchored there is too old to be drawn. O(steps).
  bool is_too_old(uint64_t anchor, const Streams& streams) const {
    const uint64_t max_age1 = header_.sampler.max_age1;
    if (!are_kept() || !max_age1) return false;
    const int64_t now = header_.policy_version.load(std::memory_order_acquire);
    return versions_behind(now, oldest_of_rows(anchor, streams)) > static_cast<int64_t>(max_age1 - 1);
  }

  // The item anchored there can be drawn again.
  void note(uint64_t anchor) {
    if (!are_kept()) return;
    const int64_t version = of(anchor);
    int64_t& bound = memory_.version_bound(anchor / kVersionBlock);
    bound = std::min(bound, version);
    header_.oldest_version = std::min(header_.oldest_version, version);
  }

  // Sees the learner's version. Returns the oldest that an item may have that is drawn now.
  int64_t judge() {
    header_.judged_version = header_.policy_version.load(std::memory_order_acquire);
    const uint64_t max_age1 = header_.sampler.max_age1;
    return max_age1 ? header_.judged_version - static_cast<int64_t>(max_age1 - 1) : kNone;
  }

  // Whether an item may be older than that.
  bool has_older(int64_t oldest) const { return are_kept() && header_.oldest_version < oldest; }

  // The first block from `block` on that may hold one that is older; the number of blocks: none does.
  uint64_t next_block(uint64_t block, int64_t oldest) const {
    while (block < blocks() && memory_.version_bound(block) >= oldest) block++;
    return block;
  }
  uint64_t blocks() const { return (memory_.capacity() + kVersionBlock - 1) / kVersionBlock; }

  // Calls expire(slot) for each item of the block that can be drawn and is older, and sets the bound anew.
  template <class Expire>
  void expire_block(uint64_t block, int64_t oldest, const PriorityTree& tree, const Expire& expire) {
    const uint64_t first = block * kVersionBlock, last = std::min(memory_.capacity(), first + kVersionBlock);
    int64_t bound = kYoungest;
    for (uint64_t slot = first; slot < last; slot++) {
      if (tree.leaf(static_cast<int64_t>(slot)) == 0) continue;
      if (of(slot) < oldest)
        expire(slot);
      else
        bound = std::min(bound, of(slot));
    }
    memory_.version_bound(block) = bound;
  }

  // Sets the bound of all anew. O(blocks).
  void sum_up() {
    int64_t bound = kYoungest;
    for (uint64_t block = 0; block < blocks(); block++) bound = std::min(bound, memory_.version_bound(block));
    header_.oldest_version = bound;
  }

  // All that follows from the rows that are there. O(capacity and the steps of items).
  void rebuild(const Streams& streams) {
    if (!are_kept()) return;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++)
      if (memory_.at(slot)) set(slot, streams);
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min(), kYoungest = std::numeric_limits<int64_t>::max();

  // Rows that begin an episode have no step that a policy took.
  int64_t oldest_of_rows(uint64_t anchor, const Streams& streams) const {
    if (!view_.linked()) return of_row(anchor);
    int64_t oldest = kYoungest;
    uint64_t at = anchor;
    for (uint32_t k = 0; k < view_.span && (at = streams.next(at)) != kNoSlot; k++) {
      RowFacts row;
      if (!streams.facts_of(at, row)) break;  // it is being overwritten, and the item will go
      if (!(row.flags & kFirst)) oldest = std::min(oldest, of_row(at));
      if (!view_.across && (row.flags & kEnds)) break;
    }
    return oldest == kYoungest ? of_row(anchor) : oldest;
  }

  int64_t of_row(uint64_t slot) const {
    int64_t version;
    copy_payload(&version, memory_.value(*field_, slot), sizeof version);
    return version;
  }

  SegmentMemory& memory_;
  Header& header_;
  const View& view_;
  const Field* field_;  // nullptr: rows do not say
};

}  // namespace torchreplay
