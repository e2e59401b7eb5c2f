#include <boost/test/unit_test.hpp>
#include <map>

#include "tree_model.h"

BOOST_AUTO_TEST_SUITE(test_tree)

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_CASE(every_target_of_a_small_tree_finds_its_leaf_in_proportion) {
  on_every_instruction_set([](Simd simd) {
    Tree tree(40, simd);
    const std::vector<float> leaves = {0, 3, 0, 0, 1, 2, 0, 5};
    std::vector<int64_t> index = {32, 33, 34, 35, 36, 37, 38, 39};
    tree->set(index.data(), leaves.data(), 8);
    // 1100 targets, evenly spread, fall on the leaves in the exact proportion of their values.
    const int n = 1100;
    std::vector<uint64_t> target(n);
    std::vector<int64_t> found(n);
    std::vector<float> leaf(n);
    for (int k = 0; k < n; k++) target[k] = tree->total() / n * k + tree->total() / n / 2;
    tree->find(target.data(), n, found.data(), leaf.data());
    std::map<int64_t, int> hits;
    for (int64_t i : found) hits[i]++;
    BOOST_TEST((hits == std::map<int64_t, int>{{33, 300}, {36, 100}, {37, 200}, {39, 500}}));
  });
}

BOOST_AUTO_TEST_CASE(a_lone_positive_leaf_is_always_found) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {1, 16, 17, 128, 129, 2049, 70'000}) {
      Tree tree(capacity, simd);
      for (int64_t i : {int64_t{0}, capacity / 2, capacity - 1}) {
        const float one = 1, zero = 0;
        tree->set(&i, &one, 1);
        const uint64_t targets[] = {0, tree->total() / 2, tree->total() - 1};
        int64_t index[3];
        float leaf[3];
        tree->find(targets, 3, index, leaf);
        for (int k = 0; k < 3; k++) BOOST_TEST((index[k] == i && leaf[k] == 1));
        tree->set(&i, &zero, 1);
        BOOST_TEST(tree->total() == 0u);
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(of_duplicate_indices_the_last_one_wins) {
  on_every_instruction_set([](Simd simd) {
    Tree tree(20, simd);
    const int64_t index[] = {7, 7, 3, 7};
    const float leaf[] = {5, 0, 2, 1};
    tree->set(index, leaf, 4);
    BOOST_TEST(tree->leaf(7) == 1);
    BOOST_TEST(tree->total() == tree->quantize(1) + tree->quantize(2));
    BOOST_TEST(tree->count() == 2);
    BOOST_TEST(tree->min() == 1);
  });
}

BOOST_AUTO_TEST_CASE(the_minimum_returns_to_each_next_leaf_as_the_smallest_are_removed) {
  on_every_instruction_set([](Simd simd) {
    const int64_t capacity = 3000;
    Tree tree(capacity, simd);
    for (int64_t k = 0; k < capacity; k++) {
      const int64_t i = k * 7 % capacity;  // scattered: 7 and 3000 are coprime
      const float leaf = static_cast<float>(k + 1) / 1024;
      tree->set(&i, &leaf, 1);
    }
    for (int64_t k = 0; k < capacity; k++) {
      BOOST_TEST(tree->min() == static_cast<float>(k + 1) / 1024);
      const int64_t i = k * 7 % capacity;
      const float zero = 0;
      tree->set(&i, &zero, 1);
    }
    BOOST_TEST(tree->min() == kInfinity);
    BOOST_TEST(tree->count() == 0);
  });
}

BOOST_AUTO_TEST_CASE(the_maximum_returns_to_each_next_leaf_as_the_largest_are_removed) {
  on_every_instruction_set([](Simd simd) {
    const int64_t capacity = 3000;
    Tree tree(capacity, simd);
    BOOST_TEST(tree->max() == 0);
    for (int64_t k = 0; k < capacity; k++) {
      const int64_t i = k * 7 % capacity;  // scattered: 7 and 3000 are coprime
      const float leaf = static_cast<float>(k + 1) / 1024;
      tree->set(&i, &leaf, 1);
      BOOST_TEST(tree->max() == leaf);
    }
    for (int64_t k = capacity; k-- > 0;) {
      BOOST_TEST(tree->max() == static_cast<float>(k + 1) / 1024);
      const int64_t i = k * 7 % capacity;
      const float zero = 0;
      tree->set(&i, &zero, 1);
    }
    BOOST_TEST(tree->max() == 0);
  });
}

BOOST_AUTO_TEST_CASE(priorities_are_normal_numbers_and_nan_is_never_sampled) {
  using Float = std::numeric_limits<float>;
  Tree tree(1'000'000, Simd::kPortable);
  BOOST_TEST(tree->clamp(kNaN) == 0);
  BOOST_TEST(tree->clamp(-kNaN) == 0);
  BOOST_TEST(tree->clamp(0) == 0);
  BOOST_TEST(tree->clamp(-0.0f) == 0);
  BOOST_TEST(!std::signbit(tree->clamp(-0.0f)));
  BOOST_TEST(tree->clamp(-3) == 0);
  BOOST_TEST(tree->clamp(-kInfinity) == 0);
  BOOST_TEST(tree->clamp(Float::denorm_min()) == Float::min());
  BOOST_TEST(tree->clamp(std::nextafter(Float::min(), 0.0f)) == Float::min());
  for (float p : {Float::min(), 1e-12f, 8192.0f, 1e12f, Float::max()}) BOOST_TEST(tree->clamp(p) == p);
  BOOST_TEST(tree->clamp(kInfinity) == Float::max());
}

BOOST_AUTO_TEST_CASE(a_full_tree_of_the_largest_leaves_does_not_overflow) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {1, 16, 65'536, 65'537}) {
      Tree tree(capacity, simd);
      std::fill(tree->leaves(), tree->leaves() + capacity, kInfinity);
      tree->rebuild();
      BOOST_TEST(tree->total() == tree->quantize(std::numeric_limits<float>::max()) * capacity);
      BOOST_TEST(tree->total() < uint64_t{1} << 62);
      const uint64_t last = tree->total() - 1;
      int64_t index;
      float leaf;
      tree->find(&last, 1, &index, &leaf);
      BOOST_TEST(index == capacity - 1);
    }
  });
}

BOOST_AUTO_TEST_CASE(two_views_of_one_memory_are_one_tree) {
  Tree tree(100, Simd::kPortable);
  PriorityTree other(100, tree.memory.get(), simds().back());
  const int64_t index = 42;
  const float leaf = 0.25f;
  other.set(&index, &leaf, 1);
  BOOST_TEST(tree->leaf(42) == 0.25f);
  BOOST_TEST(tree->min() == 0.25f);
  BOOST_TEST(tree->count() == 1);
  BOOST_TEST(tree->total() == other.total());
}

BOOST_AUTO_TEST_CASE(a_bad_capacity_or_misaligned_memory_is_refused) {
  for (int64_t capacity : {int64_t{0}, int64_t{-1}, torchreplay::TreeShape::kMaxCapacity + 1}) {
    BOOST_CHECK_THROW(PriorityTree::bytes(capacity), std::invalid_argument);
  }
  alignas(64) char memory[1024] = {};
  BOOST_TEST(PriorityTree::bytes(16) <= sizeof memory);
  BOOST_CHECK_THROW(PriorityTree(16, memory + 4), std::invalid_argument);
  BOOST_CHECK_THROW(PriorityTree(16, nullptr), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(a_large_tree_takes_less_than_six_bytes_a_leaf) {
  BOOST_TEST(PriorityTree::bytes(1'000'000) < 6'000'000u);
  BOOST_TEST(PriorityTree::bytes(torchreplay::TreeShape::kMaxCapacity) <
             size_t{6} * torchreplay::TreeShape::kMaxCapacity);
}

BOOST_AUTO_TEST_SUITE_END()
