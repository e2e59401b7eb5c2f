// Draws without replacement: in each epoch every item is drawn once before any is drawn again.
#pragma once

#include <vector>

#include "absorb/absorber.h"
#include "absorb/ranks.h"

namespace torchreplay {

// The leaves say which items are due in the epoch under way: those have a leaf of 1, the ones that it has drawn a tiny
// one. An item that comes is due at once. Runs under the segment's mutex.
class Epochs {
 public:
  static constexpr float kDue = Ranks::kOne, kDrawn = Ranks::kTiny;

  explicit Epochs(SegmentMemory& m) : memory_(m), header_(m.header()), tree_(m.tree()) {}

  static bool are_kept(const Header& h) { return h.sampler.epochs != 0; }

  // How many have ended.
  uint64_t ended() const { return header_.epochs / 2; }

  // Items that this one has not drawn.
  uint64_t due() const { return Ranks(tree_).count(); }

  // What finds the due leaf number `rank`, which is below due().
  uint64_t target(uint64_t rank) const { return Ranks(tree_).target(rank); }

  // They are drawn.
  void take(const int64_t* slots, int n) { set(slots, n, kDrawn); }

  // They are due, though this epoch has drawn them.
  void give_back(const int64_t* slots, int n) { set(slots, n, kDue); }

  // The same for those that are there. Nothing happens when `epoch`, by number, is over.
  void give_back_keys(uint64_t epoch, const std::vector<int64_t>& keys) {
    if (epoch != ended()) return;
    std::vector<int64_t> slots;
    for (const int64_t key : keys) {
      const uint64_t slot = memory_.slot_of(static_cast<uint64_t>(key));
      const auto index = static_cast<int64_t>(slot);
      if (memory_.at(slot) == static_cast<uint64_t>(key) + 1 && tree_.leaf(index) == kDrawn) slots.push_back(index);
    }
    give_back(slots.data(), static_cast<int>(slots.size()));
  }

  // Ends this one: all items are due. O(capacity).
  void begin() {
    const DirtyScope dirty(header_, Dirty::kEpoch);
    header_.epochs++;
    TORCHREPLAY_FAULT("epoch.begins");
    kill_fence();
    finish_begin();
  }

  // The rest of begin(), also after a death in it.
  void finish_begin() {
    if (header_.epochs % 2 == 0) return;
    float* leaves = tree_.leaves();
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++)
      if (leaves[slot] > 0) leaves[slot] = kDue;
    TORCHREPLAY_FAULT("epoch.due");
    tree_.rebuild();
    kill_fence();
    header_.epochs++;
    TORCHREPLAY_FAULT("epoch.begun");
  }

 private:
  void set(const int64_t* slots, int n, float leaf) {
    if (n == 0) return;
    leaves_.assign(static_cast<size_t>(n), leaf);
    const DirtyScope dirty(header_, Dirty::kTree);
    tree_.set(slots, leaves_.data(), n);
    TORCHREPLAY_FAULT("epoch.set");
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  std::vector<float> leaves_;
};

}  // namespace torchreplay
