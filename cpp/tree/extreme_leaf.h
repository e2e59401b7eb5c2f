// The smallest positive leaf of a priority tree, or the largest, kept exactly as leaves change.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tree/tree_node.h"
#include "tree/tree_shape.h"

namespace torchreplay {

// A 16-ary hierarchy over the blocks of leaves: no leaf below an entry has a greater rank, so comes before it in this
// `Order`. Entries rise with leaves at once, and fall when somebody asks: he looks at the block that the top speaks of,
// until one still has that leaf. So a leaf that falls costs nothing at once, and later a look at its block at most. A
// view, like the tree that it is a part of.
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

  // Order::kNone when no leaf is positive. Amortised O(log capacity).
  template <class Node>
  float leaf() const {
    for (;;) {
      const uint32_t rank = ranks_[levels_ - 1][0];
      if (rank == 0) return Order::kNone;
      int64_t block = 0;
      for (int l = levels_ - 1; l-- > 0;) {
        block *= tree_node::kRanks;
        block += Node::find(ranks_[l] + block, rank);
      }
      const uint32_t now = Node::template greatest_of<Order>(leaves_ + block * tree_node::kBlockLeaves);
      if (now == rank) return Order::leaf_of(rank);
      lower<Node>(block, now);
    }
  }

  // A leaf of that index is `now`.
  void raise(int64_t i, float now) { raise_entry(i / tree_node::kBlockLeaves, Order::rank_of(now)); }

  // Leaves of that line changed.
  template <class Node>
  void raise_line(int64_t line) {
    if (levels_ == 0) return;
    const uint32_t rank = Node::template greatest_of<Order, tree_node::kLeaves>(leaves_ + line * tree_node::kLeaves);
    raise_entry(line / tree_node::kBlockLines, rank);
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
  void raise_entry(int64_t entry, uint32_t rank) {
    for (int l = 0; l < levels_ && ranks_[l][entry] < rank; l++, entry /= tree_node::kRanks) ranks_[l][entry] = rank;
  }

  // The first of the leaves of that block has the rank `now`.
  template <class Node>
  void lower(int64_t block, uint32_t now) const {
    ranks_[0][block] = now;
    for (int l = 1; l < levels_; l++) {
      block /= tree_node::kRanks;
      ranks_[l][block] = Node::greatest(ranks_[l - 1] + block * tree_node::kRanks);
    }
  }

  int levels_ = 0;
  const float* leaves_ = nullptr;
  uint32_t* ranks_[TreeShape::kMaxLevels] = {};
};

using SmallestLeaf = ExtremeLeaf<tree_node::Downwards>;
using LargestLeaf = ExtremeLeaf<tree_node::Upwards>;

}  // namespace torchreplay
