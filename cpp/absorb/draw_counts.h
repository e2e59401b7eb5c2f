// How often each item was handed out, where it leaves after so many draws. Runs under the segment's mutex.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "absorb/dirty_scope.h"
#include "absorb/item_versions.h"
#include "absorb/leaf_changes.h"
#include "segment/row_facts.h"
#include "segment/segment_memory.h"

namespace torchreplay {

// An item that is used up has a leaf of 0, as one that is not complete has. Its word keeps the leaf that it had: a draw
// that did not happen brings it back. A queue counts in its claims.
class DrawCounts {
 public:
  static constexpr uint64_t kMost = 0xffff;

  explicit DrawCounts(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        tree_(m.tree()),
        versions_(m),
        words_(m.claims()),
        most_(header_.sampler.max_draws) {}

  static bool are_kept(const Header& h) { return h.sampler.max_draws != 0 && !h.sampler.queue; }

  uint64_t draws(uint64_t slot) const { return words_[slot] & kMost; }
  bool is_used_up(uint64_t slot) const { return draws(slot) >= most_; }

  // The leaf that comes back with a draw of an item that is used up; 0: none does.
  float kept_leaf(uint64_t slot) const {
    return PriorityTree::clamp(std::bit_cast<float>(static_cast<uint32_t>(words_[slot] >> 32)));
  }

  // Of an item that is used up, where one comes back with a draw: then it is that one.
  void keep_leaf(uint64_t slot, float leaf) {
    if (kept_leaf(slot) > 0) words_[slot] = word_of(most_, leaf);
  }

  // Whether `n` draws are left. O(1) where as many items are, else O(capacity).
  bool has_left(uint64_t n) const { return missing(n) == 0; }

  // How many of `n` draws are not left.
  uint64_t missing(uint64_t n) const {
    if (static_cast<uint64_t>(tree_.count()) >= n) return 0;
    uint64_t left = 0;
    for (uint64_t slot = 0; slot < memory_.capacity() && left < n; slot++)
      if (tree_.leaf(static_cast<int64_t>(slot)) > 0) left += most_ - std::min(most_, draws(slot));
    return n - std::min(n, left);
  }

  // For those who absorb rows. Their changes of leaves are their own.

  // A row is there whose item was never drawn, or is there no more.
  void begin(uint64_t slot) { words_[slot] = 0; }

  // The item anchored there lacks a row from now on: no draw that is taken back brings it back.
  void end_item(uint64_t slot) { words_[slot] = most_; }

  // Its item was drawn so often before, and has that leaf, or had it.
  void set_draws(uint64_t slot, uint64_t n, float leaf) { words_[slot] = word_of(std::min(n, most_), leaf); }

  // Counts a draw of the items found in these slots, in their order. Returns the places of those that were used up
  // before: these are to be found anew, elsewhere.
  std::vector<int> take(const std::vector<int64_t>& slots) {
    std::vector<int> refused;
    gone_.clear();
    const DirtyScope dirty(header_, Dirty::kTree);
    for (size_t k = 0; k < slots.size(); k++) {
      uint64_t& word = words_[slots[k]];
      const uint64_t n = (word & kMost) + 1;
      if (n > most_) {
        refused.push_back(static_cast<int>(k));
        continue;
      }
      word = word_of(n, tree_.leaf(slots[k]));
      TORCHREPLAY_FAULT("counts.counted");
      if (n == most_) gone_.push_back(slots[k]);
    }
    const std::vector<float> none(gone_.size(), 0.0f);
    if (!gone_.empty()) tree_.set(gone_.data(), none.data(), static_cast<int>(gone_.size()));
    TORCHREPLAY_FAULT("counts.taken");
    return refused;
  }

  // Draws of these items that did not happen. Nothing comes of those that are gone. The leaf first: after a death
  // between the two the item still is used up.
  void give_back(const std::vector<int64_t>& keys) {
    LeafChanges leaves(tree_);
    const DirtyScope dirty(header_, Dirty::kTree);
    for (const int64_t key : keys) {
      const uint64_t slot = slot_of(key), n = draws(slot);
      if (!is_there(key) || n == 0) continue;
      const float leaf = kept_leaf(slot);
      if (n == most_ && !(leaf > 0)) continue;  // it ended
      if (n == most_ && !is_discarded(memory_, slot)) {
        leaves.set(slot, header_.sampler.prioritized ? leaf : 1);
        versions_.note(slot);
      }
      kill_fence();
      words_[slot] = n - 1;
      TORCHREPLAY_FAULT("counts.uncounted");
    }
    leaves.flush();
    TORCHREPLAY_FAULT("counts.given_back");
  }

  // How often each item was drawn; 0 of those that are gone.
  std::vector<int64_t> draws_of(const std::vector<int64_t>& keys) const {
    std::vector<int64_t> draws(keys.size());
    std::ranges::transform(keys, draws.begin(), [this](int64_t key) {
      return is_there(key) ? static_cast<int64_t>(this->draws(slot_of(key))) : 0;
    });
    return draws;
  }

  // These items were drawn so often at the least. So it is the same to do that twice.
  void raise(const std::vector<int64_t>& keys, const std::vector<int64_t>& draws) {
    LeafChanges leaves(tree_);
    const DirtyScope dirty(header_, Dirty::kTree);
    for (size_t k = 0; k < keys.size(); k++) {
      if (!is_there(keys[k])) continue;
      const uint64_t slot = slot_of(keys[k]),
                     n = std::min(most_, static_cast<uint64_t>(std::max<int64_t>(draws[k], 0)));
      if (this->draws(slot) >= n) continue;
      words_[slot] = word_of(n, tree_.leaf(static_cast<int64_t>(slot)));
      if (n == most_) leaves.set(slot, 0);
    }
    leaves.flush();
  }

  // Leaves that follow from the counts, after a death in the midst. Sums are left to be computed. O(capacity).
  void restore() {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (!memory_.at(slot)) words_[slot] = 0;
      if (is_used_up(slot)) tree_.leaves()[slot] = 0;
    }
    TORCHREPLAY_FAULT("counts.restored");
  }

 private:
  uint64_t slot_of(int64_t key) const { return memory_.slot_of(static_cast<uint64_t>(key)); }
  bool is_there(int64_t key) const { return memory_.at(slot_of(key)) == static_cast<uint64_t>(key) + 1; }

  // One store: the leaf is kept as soon as the item is used up.
  uint64_t word_of(uint64_t n, float leaf) const {
    return n < most_ ? n : n | uint64_t{std::bit_cast<uint32_t>(leaf)} << 32;
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  ItemVersions versions_;
  uint64_t* words_;  // the leaf << 32 | draws
  uint64_t most_;
  std::vector<int64_t> gone_;  // slots of items that a draw uses up
};

}  // namespace torchreplay
