// Stratified draws in proportion to priority.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "tree.h"

namespace torchreplay {

// Target of item `i` of `n` in a stratified draw from [0, total): uniform over the i-th of n equal parts, which lowers
// the variance of a batch (Schaul et al. 2016, appendix B.2.1). `random` is a uniform 64-bit word. The parts tile [0,
// total) and differ by at most one grid unit.
inline uint64_t stratified_target(uint64_t total, int64_t i, int64_t n, uint64_t random) {
  __extension__ using Wide = unsigned __int128;
  const auto low = static_cast<uint64_t>(Wide{total} * static_cast<uint64_t>(i) / static_cast<uint64_t>(n));
  const auto high = static_cast<uint64_t>(Wide{total} * static_cast<uint64_t>(i + 1) / static_cast<uint64_t>(n));
  return low + static_cast<uint64_t>(Wide{random} * (high - low) >> 64);
}

// Draws `n` leaves with replacement: draw number `step` of `stream`. Requires tree.total() > 0.
inline void draw_stratified(const PriorityTree& tree, uint64_t seed, uint64_t stream, uint64_t step, int n,
                            int64_t* index, float* leaf) {
  std::vector<uint64_t> words(static_cast<size_t>(n));
  philox_fill(seed, stream, step, words.data(), n);
  for (int i = 0; i < n; i++) words[i] = stratified_target(tree.total(), i, n, words[i]);
  tree.find(words.data(), n, index, leaf);
}

}  // namespace torchreplay
