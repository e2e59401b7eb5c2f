// Stratified draws in proportion to priority.
#pragma once

#include <cstdint>
#include <vector>

#include "system/divisor.h"
#include "system/philox.h"
#include "tree/priority_tree.h"

namespace torchreplay {

// The n equal parts of [0, total) from which a batch of n draws one item each, which lowers its variance (Schaul et al.
// 2016, appendix B.2.1). The parts tile [0, total) and differ by at most one grid unit.
class Strata {
 public:
  // `n` is below 2^32.
  Strata(uint64_t total, uint64_t n) : by_n_(n), quotient_(total / n), rest_(total % n) {}

  // A uniform target in part `i`, from a uniform 64-bit word.
  uint64_t target(uint64_t i, uint64_t random) const {
    __extension__ using Wide = unsigned __int128;
    const uint64_t low = start(i);
    return low + static_cast<uint64_t>(Wide{random} * (start(i + 1) - low) >> 64);
  }

 private:
  // floor(i total / n), without a division of 128 bits.
  uint64_t start(uint64_t i) const { return i * quotient_ + by_n_.quotient(i * rest_); }

  Divisor by_n_;
  uint64_t quotient_, rest_;
};

// Draws `n` leaves with replacement: draw number `step` of `stream`. Requires tree.total() > 0.
inline void draw_stratified(const PriorityTree& tree, uint64_t seed, uint64_t stream, uint64_t step, int n,
                            int64_t* index, float* leaf) {
  std::vector<uint64_t> words(static_cast<size_t>(n));
  philox_fill(seed, stream, step, words.data(), n);
  const Strata strata(tree.total(), static_cast<uint64_t>(n));
  for (int i = 0; i < n; i++) words[i] = strata.target(static_cast<uint64_t>(i), words[i]);
  tree.find(words.data(), n, index, leaf);
}

}  // namespace torchreplay
