#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace benchmarks {

/// The textbook sum tree that most prioritized buffers use: a binary heap of doubles, one query at a time.
///
/// It is the yardstick for the priority tree: cpprb's trees have this shape and cannot be called alone from Python.
class BinaryTree {
 public:
  explicit BinaryTree(int64_t capacity)
      : leaves_(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(capacity)))), sums_(2 * leaves_, 0.0) {}

  double total() const { return sums_[1]; }

  /// Returns the leaf where the running sum passes `target`. O(log n).
  int64_t find(double target) const {
    int64_t node = 1;
    while (node < leaves_) {
      node *= 2;
      if (target >= sums_[node]) {
        target -= sums_[node];
        ++node;
      }
    }
    return node - leaves_;
  }

  /// Sets a leaf and recomputes its ancestors. O(log n).
  void set(int64_t index, float leaf) {
    int64_t node = leaves_ + index;
    sums_[node] = static_cast<double>(leaf);
    for (node /= 2; node > 0; node /= 2) sums_[node] = sums_[2 * node] + sums_[2 * node + 1];
  }

 private:
  int64_t leaves_;
  std::vector<double> sums_;  // sums_[1] is the root, sums_[leaves_ + i] leaf i
};

}  // namespace benchmarks
