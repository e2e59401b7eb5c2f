// The smallest positive leaf of a priority tree, or the largest, kept exactly as leaves change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "tree/tree_node.h"
#include "tree/tree_shape.h"

namespace torchreplay {

// A 16-ary hierarchy over the blocks of leaves: each entry is the greatest rank, so the first of the positive leaves in
// this `Order`, below it. A view, like the tree that it is a part of.
template <class Order>
class ExtremeLeaf {
 public:
  ExtremeLeaf() = default;  // keeps nothing

  // `memory`: that of the levels of ranks.
  ExtremeLeaf(const TreeShape& shape, const float* leaves, char* memory) : levels_(shape.rank_levels), leaves_(leaves) {
    for (int l = 0; l < levels_; memory += shape.rank_lines[l++] * int64_t{TreeShape::kLine}) {
      ranks_[l] = reinterpret_cast<uint32_t*>(memory);
    }
  }

  bool is_kept() const { return levels_ != 0; }

  // Order::kNone when no leaf is positive. O(1).
  float leaf() const {
    const uint32_t rank = ranks_[levels_ - 1][0];
    return rank == 0 ? Order::kNone : Order::leaf_of(rank);
  }

  // Leaf `i` changed from `was` to `now`, its new value. O(1) unless it was the first of its block. New items have the
  // same leaf, and lie side by side: so another one in its line is often as large, and the block stays as it is.
  template <class Node>
  void change(int64_t i, float was, float now) {
    const int64_t block = i / tree_node::kBlockLeaves;
    const uint32_t before = ranks_[0][block], rank = Order::rank_of(now);
    if (rank > before) {
      ranks_[0][block] = rank;
      carry<Node>(block, before, rank);
    } else if (rank < before && Order::rank_of(was) == before &&
               !Node::has(leaves_ + (i & -int64_t{tree_node::kLeaves}), was)) {
      refresh<Node>(block);
    }
  }

  // Leaves of a block changed.
  template <class Node>
  void refresh(int64_t block) {
    const uint32_t now = Node::template greatest_of<Order>(leaves_ + block * tree_node::kBlockLeaves);
    const uint32_t before = std::exchange(ranks_[0][block], now);
    if (now != before) carry<Node>(block, before, now);
  }

  // All leaves changed. O(capacity).
  template <class Node>
  void rebuild(const TreeShape& shape) {
    for (int l = 0; l < levels_; l++) {
      for (int64_t i = 0; i < shape.ranks[l]; i++) {
        ranks_[l][i] = l == 0 ? Node::template greatest_of<Order>(leaves_ + i * tree_node::kBlockLeaves)
                              : Node::greatest(ranks_[l - 1] + i * tree_node::kRanks);
      }
      std::fill(ranks_[l] + shape.ranks[l], ranks_[l] + shape.rank_lines[l] * tree_node::kRanks, 0U);
    }
  }

 private:
  // Entry `child` of the lowest level changed from `was` to `now`: carries that up until a level stays as it is. One
  // `was` serves all levels: where the fall of an entry is carried on, it was the top, and so equal to it.
  template <class Node>
  void carry(int64_t child, uint32_t was, uint32_t now) {
    for (int l = 1; l < levels_; l++) {
      child /= tree_node::kRanks;
      const uint32_t before = ranks_[l][child];
      if (now < before) {
        if (was < before) return;
        now = Node::greatest(ranks_[l - 1] + child * tree_node::kRanks);
      }
      if (now == before) return;
      ranks_[l][child] = now;
    }
  }

  int levels_ = 0;
  const float* leaves_ = nullptr;
  uint32_t* ranks_[TreeShape::kMaxLevels] = {};
};

using SmallestLeaf = ExtremeLeaf<tree_node::Downwards>;
using LargestLeaf = ExtremeLeaf<tree_node::Upwards>;

}  // namespace torchreplay
