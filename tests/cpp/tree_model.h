// A priority tree with memory of its own, and an array that it must agree with.
#pragma once

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tree.h"

namespace torchreplay::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline std::vector<Simd> simds() {
  return has_avx512() ? std::vector{Simd::kPortable, Simd::kAvx512} : std::vector{Simd::kPortable};
}

// Runs a test on the portable tree and on the fastest one.
template <class Test>
void on_every_instruction_set(Test test) {
  for (Simd simd : simds()) {
    BOOST_TEST_CONTEXT((simd == Simd::kAvx512 ? "avx512" : "portable")) { test(simd); }
  }
}

// A tree with memory of its own.
struct Tree {
  std::unique_ptr<void, decltype(&std::free)> memory;
  PriorityTree tree;

  Tree(int64_t capacity, Simd simd)
      : memory(std::aligned_alloc(64, PriorityTree::bytes(capacity)), &std::free),
        tree(capacity, std::memset(memory.get(), 0, PriorityTree::bytes(capacity)), simd) {}
  PriorityTree* operator->() { return &tree; }
};

// The independent model: an array, written from the documented numbers alone.
struct Model {
  std::vector<float> leaves;
  double steps;  // in 1.0

  explicit Model(int64_t capacity) : leaves(capacity) {
    int bits = 62;
    for (int64_t c = capacity - 1; c > 0; c /= 2) bits--;
    steps = std::pow(2.0, std::min(51, bits) - 13);
  }

  float stored(float p) const {
    if (!(p > 0)) return 0;
    if (p < 1 / steps) return static_cast<float>(1 / steps);
    return p < 8192 ? p : std::nextafter(8192.0f, 0.0f);
  }

  uint64_t units(float leaf) const { return static_cast<uint64_t>(std::nearbyint(leaf * steps)); }

  uint64_t total() const {
    uint64_t sum = 0;
    for (float leaf : leaves) sum += units(leaf);
    return sum;
  }

  int64_t count() const {
    return std::count_if(leaves.begin(), leaves.end(), [](float leaf) { return leaf > 0; });
  }

  float min() const {
    float least = kInfinity;
    for (float leaf : leaves) {
      if (leaf > 0) least = std::min(least, leaf);
    }
    return least;
  }

  int64_t find(uint64_t target) const {
    for (size_t i = 0;; i++) {
      if (target < units(leaves[i])) return static_cast<int64_t>(i);
      target -= units(leaves[i]);
    }
  }
};

inline void check_equal(PriorityTree& tree, const Model& model) {
  BOOST_TEST(tree.total() == model.total());
  BOOST_TEST(tree.count() == model.count());
  BOOST_TEST(tree.min() == model.min());
  BOOST_TEST(std::equal(model.leaves.begin(), model.leaves.end(), tree.leaves()));
}

// Every boundary of small trees, random targets of large ones.
inline void check_finds(PriorityTree& tree, const Model& model, std::mt19937_64& random) {
  if (model.total() == 0) return;
  std::vector<uint64_t> targets = {0, model.total() - 1};
  for (int k = 0; k < 40; k++) targets.push_back(random() % model.total());
  uint64_t sum = 0;
  for (size_t i = 0; i < std::min<size_t>(model.leaves.size(), 200); i++) {
    sum += model.units(model.leaves[i]);
    if (sum > 0) targets.push_back(sum - 1);
    if (sum < model.total()) targets.push_back(sum);
  }
  const int n = static_cast<int>(targets.size());
  std::vector<int64_t> index(n);
  std::vector<float> leaf(n);
  tree.find(targets.data(), n, index.data(), leaf.data());
  bool right = true;
  for (int b = 0; b < n; b++) {
    right &= index[b] == model.find(targets[b]) && leaf[b] == model.leaves[index[b]] && leaf[b] > 0;
  }
  BOOST_TEST(right);
}

// Priorities that meet every case: nine decades, ties, zero, negative, NaN, infinite, below the grid, above it.
inline float any_priority(std::mt19937_64& random) {
  const float odd[] = {0, 0, -1, kNaN, kInfinity, -kInfinity, 1e-30f, 1e-45f, 8192, 1e9f, 1, 1, 0.5f, 0.5f};
  if (random() % 3 == 0) return odd[random() % std::size(odd)];
  return std::pow(10.0f, std::uniform_real_distribution<float>(-6, 3)(random));
}

}  // namespace torchreplay::testing
