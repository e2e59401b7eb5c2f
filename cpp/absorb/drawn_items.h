// Which items were drawn since they became drawable. Guarded by the segment's mutex.
#pragma once

#include "segment/segment_memory.h"

namespace torchreplay {

// One bit for the slot of each item's anchor: small enough to stay in a learner's caches. It says something about
// drawable items only.
class DrawnItems {
 public:
  explicit DrawnItems(const SegmentMemory& m) : words_(m.drawn_words()) {}

  void mark(uint64_t slot) { words_[slot / 64] |= bit(slot); }
  void clear(uint64_t slot) { words_[slot / 64] &= ~bit(slot); }
  bool contains(uint64_t slot) const { return words_[slot / 64] & bit(slot); }

 private:
  static constexpr uint64_t bit(uint64_t slot) { return uint64_t{1} << slot % 64; }

  uint64_t* words_;
};

}  // namespace torchreplay
