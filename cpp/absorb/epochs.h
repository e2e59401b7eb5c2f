// Draws without replacement: in each epoch every item is drawn once before any is drawn again.
#pragma once

#include <bit>
#include <vector>

#include "absorb/absorber.h"

namespace torchreplay {

// The leaves say which items are due in the epoch under way: those have a leaf of 1, the ones that it has drawn a tiny
// one. An item that comes is due at once. All tiny leaves together are less than 1. So the point (rank + 1) due leaves
// after the start, less one unit, lies in the due leaf number `rank`: tiny leaves before it move it by less than a due
// one. The tree, which finds proportionally, finds the rank. Runs under the segment's mutex.
class Epochs {
 public:
  // The tiny leaves of more items could add up to 1.
  static constexpr uint64_t kMostItems = uint64_t{1} << 30;
  static constexpr float kDue = 1, kDrawn = 0x1p-32f;

  explicit Epochs(SegmentMemory& m) : memory_(m), header_(m.header()), tree_(m.tree()) {}

  static bool are_kept(const Header& h) { return h.sampler.epochs != 0; }

  // How many have ended.
  uint64_t ended() const { return header_.epochs / 2; }

  // Items that this one has not drawn.
  uint64_t due() const {
    const uint64_t units = units_of_due();
    return units ? tree_.total() >> std::countr_zero(units) : 0;
  }

  // What finds the due leaf number `rank`, which is below due().
  uint64_t target(uint64_t rank) const { return (rank + 1) * units_of_due() - 1; }

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
  // 0: the tree's grid holds no such leaf, so there is none.
  uint64_t units_of_due() const {
    const bool held = tree_node::Grid::exponent(kDue) <= tree_.grid_state().top;
    return held ? tree_.quantize(kDue) : 0;
  }

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
