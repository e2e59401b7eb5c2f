// Slots whose state could not be settled. Guarded by the segment's mutex.
#pragma once

#include <algorithm>
#include <bit>

#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

// One bit a slot, and a summary bit for every word, so that finding them costs O(pending).
class PendingSet {
 public:
  explicit PendingSet(const SegmentMemory& m)
      : words_(m.pending_words()),
        summary_(m.pending_summary()),
        count_(m.header().pending),
        n_((m.capacity() + 63) / 64) {}

  uint64_t size() const { return count_; }

  void assign(uint64_t slot, bool pending) {
    uint64_t& word = words_[slot / 64];
    const uint64_t bit = uint64_t{1} << slot % 64;
    if (static_cast<bool>(word & bit) == pending) return;
    word ^= bit;
    TORCHREPLAY_FAULT("pending.bit");
    count_ += pending ? 1 : -1;
    TORCHREPLAY_FAULT("pending.count");
    uint64_t& summary = summary_[slot / 4096];
    const uint64_t group = uint64_t{1} << slot / 64 % 64;
    summary = word ? summary | group : summary & ~group;
  }
  bool contains(uint64_t slot) const { return words_[slot / 64] >> slot % 64 & 1; }

  // Calls visit(slot) for every pending slot, ascending; visit may assign() the slot it is given.
  template <class Visit>
  void each(Visit&& visit) const {
    if (count_ == 0) return;
    for (uint64_t s = 0; s < (n_ + 63) / 64; s++)
      for (uint64_t groups = summary_[s]; groups; groups &= groups - 1) {
        const uint64_t w = s * 64 + static_cast<uint64_t>(std::countr_zero(groups));
        for (uint64_t bits = words_[w]; bits; bits &= bits - 1)
          visit(w * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
      }
  }

  // Restores count and summary, which a crash may have left half-written: both follow from the words. O(capacity).
  void recount() {
    uint64_t count = 0;
    for (uint64_t s = 0; s < (n_ + 63) / 64; s++) {
      uint64_t summary = 0;
      for (uint64_t w = s * 64; w < std::min(n_, s * 64 + 64); w++) {
        count += static_cast<uint64_t>(std::popcount(words_[w]));
        if (words_[w]) summary |= uint64_t{1} << w % 64;
      }
      summary_[s] = summary;
    }
    count_ = count;
  }

 private:
  uint64_t* words_;
  uint64_t* summary_;
  uint64_t& count_;
  uint64_t n_;
};

}  // namespace torchreplay
