// Which ticket a row of a queue stands for: its own, or that of a later turn of the ring, for which its slot was kept.
// Runs under the segment's mutex.
#pragma once

#include <algorithm>

#include "absorb/ranks.h"
#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

class Places {
 public:
  // Of an item that can be drawn. Slots that were kept are not in the order of their rows' keys. So their items have a
  // leaf by which they are told from others.
  static constexpr float kInOrder = Ranks::kOne, kKept = Ranks::kTiny;

  explicit Places(SegmentMemory& m) : memory_(m), kept_(m.kept()) {}

  // The newest ticket + 1 that the slot was kept for. It says nothing about a row with a later key.
  uint64_t kept1(uint64_t slot) const { return kept_[slot]; }

  // The ticket + 1 that the row stands for that is there, or the one that is being written; 0: there is none.
  uint64_t place1(uint64_t slot) const {
    if (const uint64_t at = memory_.at(slot)) return std::max(kept_[slot], at);
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    return slot_word::is_busy(word) || slot_word::is_row(word) ? std::max(kept_[slot], slot_word::key1(word)) : 0;
  }

  // Of the row that is there.
  bool is_kept(uint64_t slot) const { return kept_[slot] > memory_.at(slot); }
  float leaf(uint64_t slot) const { return is_kept(slot) ? kKept : kInOrder; }

  // Nobody gets the ticket, which is the slot's next one.
  void keep(uint64_t ticket) { kept_[memory_.slot_of(ticket)] = ticket + 1; }

  // After a death: tickets from `head` on are not issued, so no slot was kept for them. O(capacity).
  void repair(uint64_t head) {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++)
      if (kept_[slot] > head) kept_[slot] -= std::min(kept_[slot], memory_.capacity());
    TORCHREPLAY_FAULT("places.repaired");
  }

  // The row there stands for the newest ticket of its slot: nobody has that one. One that is not absorbed stands for
  // what it did: it was kept while it was written, or is passed.
  void begin_at_newest(uint64_t slot, uint64_t head) {
    if (memory_.at(slot) && slot < head) kept_[slot] = head - (head - 1 - slot) % memory_.capacity();
  }

 private:
  SegmentMemory& memory_;
  uint64_t* kept_;
};

}  // namespace torchreplay
