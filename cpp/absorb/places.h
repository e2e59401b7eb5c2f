// Which ticket a row of a queue stands for: its own, or that of a later turn of the ring, for which it was kept. Runs
// under the segment's mutex.
#pragma once

#include "absorb/ranks.h"
#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

class Places {
 public:
  // Of an item that can be drawn. Slots of rows that were kept are not in the order of their keys. So their items have
  // a leaf by which they are told from others.
  static constexpr float kInOrder = Ranks::kOne, kKept = Ranks::kTiny;

  explicit Places(SegmentMemory& m) : memory_(m), turns_(m.turns()) {}

  bool is_kept(uint64_t slot) const { return turns_[slot] > 0; }
  float leaf(uint64_t slot) const { return is_kept(slot) ? kKept : kInOrder; }

  // The ticket + 1 that the row there stands for; 0: no row is there.
  uint64_t place1(uint64_t slot) const {
    const uint64_t at = memory_.at(slot);
    return at ? at + turns_[slot] * memory_.capacity() : 0;
  }

  // A row is there, and stands for its own ticket.
  void begin(uint64_t slot) { turns_[slot] = 0; }

  // It stays for another turn.
  void keep(uint64_t slot) { turns_[slot]++; }

  // After a death: tickets from `head` on are not issued, so no row stands for them. O(capacity).
  void repair(uint64_t head) {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++)
      if (turns_[slot] && place1(slot) > head) turns_[slot]--;
    TORCHREPLAY_FAULT("places.repaired");
  }

  // The row there stands for the newest ticket of its slot: nobody has that one.
  void begin_at_newest(uint64_t slot, uint64_t head) {
    const uint64_t newest1 = slot < head ? head - (head - 1 - slot) % memory_.capacity() : 0, at = memory_.at(slot);
    turns_[slot] = at && newest1 > at ? static_cast<uint32_t>((newest1 - at) / memory_.capacity()) : 0;
  }

 private:
  SegmentMemory& memory_;
  uint32_t* turns_;
};

}  // namespace torchreplay
