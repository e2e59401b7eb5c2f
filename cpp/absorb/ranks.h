// The ranks of leaves of 1 among tiny ones.
#pragma once

#include <bit>

#include "tree/priority_tree.h"

namespace torchreplay {

// Of at most 2^30 leaves all tiny ones together are less than 1. So the point (rank + 1) leaves of 1 after the start,
// less one unit, lies in the leaf of 1 number `rank`: tiny leaves before it move it by less than one of 1. The tree,
// which finds proportionally, finds the rank.
class Ranks {
 public:
  static constexpr float kOne = 1, kTiny = 0x1p-32f;

  explicit Ranks(const PriorityTree& tree) : tree_(tree), shift_(shift()) {}

  // Leaves of 1.
  uint64_t count() const { return shift_ < 0 ? 0 : tree_.total() >> shift_; }
  // Those before that slot. O(log capacity).
  uint64_t before(uint64_t slot) const {
    return shift_ < 0 ? 0 : tree_.sum_before(static_cast<int64_t>(slot)) >> shift_;
  }
  // Tiny ones.
  uint64_t tiny() const { return static_cast<uint64_t>(tree_.count()) - count(); }

  // What finds the leaf of 1 number `rank`, which is below count().
  uint64_t target(uint64_t rank) const { return ((rank + 1) << shift_) - 1; }

 private:
  // Of the units of a leaf of 1. -1: the tree's grid holds no such leaf, so there is none.
  int shift() const {
    const bool held = tree_node::Grid::exponent(kOne) <= tree_.grid_state().top;
    return held ? std::countr_zero(tree_.quantize(kOne)) : -1;
  }

  const PriorityTree& tree_;
  int shift_;
};

}  // namespace torchreplay
