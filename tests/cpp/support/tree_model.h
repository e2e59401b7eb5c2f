// A priority tree with memory of its own, and an array that it must agree with.
#pragma once

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "tree/priority_tree.h"

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

// A tree with memory of its own, which keeps its largest leaf.
struct Tree {
  static size_t bytes(int64_t capacity) { return PriorityTree::bytes(capacity, PriorityTree::Largest::kKept); }

  std::unique_ptr<void, decltype(&std::free)> memory;
  PriorityTree tree;

  Tree(int64_t capacity, Simd simd)
      : memory(std::aligned_alloc(64, bytes(capacity)), &std::free),
        tree(capacity, std::memset(memory.get(), 0, bytes(capacity)), simd, PriorityTree::Largest::kKept) {}
  PriorityTree* operator->() { return &tree; }
};

// The independent model: an array, and the grid as the documentation of the tree has it, in numbers of other types.
struct Model {
  std::vector<float> leaves;
  std::optional<int> unit;  // its exponent; none while no leaf has been positive
  int64_t written = 0;

  explicit Model(int64_t capacity) : leaves(capacity) {}

  static float stored(float p) {
    if (!(p > 0)) return 0;
    return std::clamp(p, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
  }

  // Sets leaves as `set` does, or `replace_sorted`, which does not count those of zero.
  void set(const std::vector<int64_t>& index, const std::vector<float>& leaf, bool count_zeros = true) {
    for (size_t from = 0; from < index.size(); from += 512) {
      const size_t to = std::min(index.size(), from + 512);
      bool holds = true;
      for (size_t b = from; b < to; b++) {
        leaves[index[b]] = stored(leaf[b]);
        holds = holds && is_held(stored(leaf[b]));
      }
      if (holds && exact_total() < std::ldexp(1.0L, 63)) continue;
      for (size_t b = to; b < index.size(); b++) leaves[index[b]] = stored(leaf[b]);
      return refit();
    }
    written += std::count_if(leaf.begin(), leaf.end(), [&](float p) { return count_zeros || p > 0; });
    const bool look = written >= static_cast<int64_t>(leaves.size());
    if (look) written = 0;
    if (exact_total() < std::ldexp(1.0L, 10) * count() || (look && is_coarse())) refit();
  }

  void rebuild() {
    bool holds = true;
    for (float& leaf : leaves) holds = is_held(leaf = stored(leaf)) && holds;
    if (!holds || exact_total() >= std::ldexp(1.0L, 63) || is_coarse()) unit = fit();
  }

  void refit() {
    for (float& leaf : leaves) leaf = stored(leaf);
    unit = fit();
    written = 0;
  }

  // The exponent of the smallest unit in which every leaf is below 2^51 and their sum below 2^62.
  std::optional<int> fit() const {
    long double sum = 0;
    float largest = 0;
    for (float leaf : leaves) {
      sum += leaf;
      largest = std::max(largest, leaf);
    }
    if (largest == 0) return std::nullopt;
    int e = -400;
    while (largest >= std::ldexp(1.0L, e + 51) || sum >= std::ldexp(1.0L, e + 62)) e++;
    return e;
  }

  bool is_coarse() const { return unit && (!fit() || *fit() < *unit); }

  bool is_held(float leaf) const { return leaf == 0 || (unit && leaf < std::ldexp(1.0L, *unit + 52)); }

  uint64_t units(float leaf) const {
    if (!(leaf > 0)) return 0;
    return static_cast<uint64_t>(std::max(1.0L, std::nearbyint(std::ldexp(static_cast<long double>(leaf), -*unit))));
  }

  long double exact_total() const {
    long double sum = 0;
    for (float leaf : leaves) sum += static_cast<long double>(units(leaf));
    return sum;
  }

  uint64_t total() const { return static_cast<uint64_t>(exact_total()); }

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

  float max() const { return *std::max_element(leaves.begin(), leaves.end()); }

  // The running sums, in units.
  std::vector<uint64_t> sums() const {
    std::vector<uint64_t> sums(leaves.size());
    std::transform_inclusive_scan(leaves.begin(), leaves.end(), sums.begin(), std::plus<>(),
                                  [&](float leaf) { return units(leaf); });
    return sums;
  }
};

inline void check_equal(PriorityTree& tree, const Model& model) {
  if (model.unit) BOOST_TEST(tree.unit() == std::pow(2.0, *model.unit));
  BOOST_TEST(tree.total() == model.total());
  BOOST_TEST(tree.count() == model.count());
  BOOST_TEST(tree.min() == model.min());
  BOOST_TEST(tree.max() == model.max());
  BOOST_TEST(std::equal(model.leaves.begin(), model.leaves.end(), tree.leaves()));
}

// Every boundary of small trees, random targets of large ones.
inline void check_finds(PriorityTree& tree, const Model& model, std::mt19937_64& random) {
  const std::vector<uint64_t> sums = model.sums();
  const uint64_t total = sums.back();
  if (total == 0) return;
  std::vector<uint64_t> targets = {0, total - 1};
  for (int k = 0; k < 40; k++) targets.push_back(random() % total);
  for (size_t i = 0; i < std::min<size_t>(sums.size(), 200); i++) {
    if (sums[i] > 0) targets.push_back(sums[i] - 1);
    if (sums[i] < total) targets.push_back(sums[i]);
  }
  const int n = static_cast<int>(targets.size());
  std::vector<int64_t> index(n);
  std::vector<float> leaf(n);
  tree.find(targets.data(), n, index.data(), leaf.data());
  bool right = true;
  for (int b = 0; b < n; b++) {
    const auto found = std::upper_bound(sums.begin(), sums.end(), targets[b]) - sums.begin();
    right &= index[b] == found && leaf[b] == model.leaves[index[b]] && leaf[b] > 0;
  }
  BOOST_TEST(right);
}

// Priorities that meet every case: nine decades of some scale, ties, zero, negative, NaN, infinite, and others that
// floats can hardly hold.
inline float any_priority(std::mt19937_64& random, float scale = 1) {
  const float odd[] = {0, 0, -1, kNaN, -kInfinity, scale, scale, scale / 2, scale / 2};
  const float odder[] = {kInfinity, 3e38f, 1e-45f, 1e-38f, 1e30f, 1e-30f};
  if (random() % 1000 == 0) return odder[random() % std::size(odder)];
  if (random() % 3 == 0) return odd[random() % std::size(odd)];
  return scale * std::pow(10.0f, std::uniform_real_distribution<float>(-6, 3)(random));
}

// Of all magnitudes, most often near 1.
inline float any_scale(std::mt19937_64& random) {
  const float scales[] = {1, 1, 1, 1e-30f, 1e-12f, 1e-6f, 1e4f, 1e12f, 1e30f};
  return scales[random() % std::size(scales)];
}

}  // namespace torchreplay::testing
