// Where the parts of a priority tree lie in its memory: a pure function of the capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "tree/tree_node.h"

namespace torchreplay {

// In order, and in cache lines: one line of totals, the leaves, the levels of sums and the levels of ranks, bottom up.
// The leaves are padded with zeros to whole blocks, so that every bottom node has all its lines. A tree that keeps its
// largest leaf too has the levels of ranks once more.
struct TreeShape {
  static constexpr size_t kLine = 64;
  static constexpr int kMaxLevels = 10;  // 2^31 leaves take 9 levels of sums and 7 of ranks
  static constexpr int64_t kMaxCapacity = int64_t{1} << 31;

  int sum_levels = 0, rank_levels = 0;
  int64_t leaf_lines;
  int64_t nodes[kMaxLevels];       // of each level of sums, a line each; the last has one
  int64_t ranks[kMaxLevels];       // of each level of ranks; the last has one
  int64_t rank_lines[kMaxLevels];  // that hold them
  size_t lines, all_rank_lines = 0;

  explicit TreeShape(int64_t capacity) {
    if (capacity < 1 || capacity > kMaxCapacity) {
      throw std::invalid_argument("tree capacity is " + std::to_string(capacity) + ", expected 1 to 2**31");
    }
    const int64_t blocks = ceil_div(capacity, tree_node::kBlockLeaves);
    leaf_lines = blocks * tree_node::kBlockLines;
    lines = 1 + static_cast<size_t>(leaf_lines);
    for (int64_t n = blocks;; n = ceil_div(n, tree_node::kSums)) {
      nodes[sum_levels++] = n;
      lines += static_cast<size_t>(n);
      if (n == 1) break;
    }
    for (int64_t n = blocks;; n = ceil_div(n, tree_node::kRanks)) {
      ranks[rank_levels] = n;
      rank_lines[rank_levels] = ceil_div(n, tree_node::kRanks);
      all_rank_lines += static_cast<size_t>(rank_lines[rank_levels++]);
      if (n == 1) break;
    }
    lines += all_rank_lines;
  }

 private:
  static int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
};

}  // namespace torchreplay
