#define BOOST_TEST_MODULE tree
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "tree.h"

using torchreplay::PriorityTree;
using torchreplay::Simd;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<Simd> simds() {
  return torchreplay::has_avx512() ? std::vector{Simd::kPortable, Simd::kAvx512} : std::vector{Simd::kPortable};
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

void check_equal(PriorityTree& tree, const Model& model) {
  BOOST_TEST(tree.total() == model.total());
  BOOST_TEST(tree.count() == model.count());
  BOOST_TEST(tree.min() == model.min());
  BOOST_TEST(std::equal(model.leaves.begin(), model.leaves.end(), tree.leaves()));
}

// Every boundary of small trees, random targets of large ones.
void check_finds(PriorityTree& tree, const Model& model, std::mt19937_64& random) {
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
float any_priority(std::mt19937_64& random) {
  const float odd[] = {0, 0, -1, kNaN, kInfinity, -kInfinity, 1e-30f, 1e-45f, 8192, 1e9f, 1, 1, 0.5f, 0.5f};
  if (random() % 3 == 0) return odd[random() % std::size(odd)];
  return std::pow(10.0f, std::uniform_real_distribution<float>(-6, 3)(random));
}

void set_some(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  const int64_t capacity = tree.capacity();
  const int n = 1 + static_cast<int>(random() % 300);
  std::vector<int64_t> index(n);
  std::vector<float> leaf(n);
  for (int b = 0; b < n; b++) {
    index[b] = static_cast<int64_t>(random() % capacity);
    leaf[b] = any_priority(random);
    model.leaves[index[b]] = model.stored(leaf[b]);
  }
  tree.set(index.data(), leaf.data(), n);
}

// As the absorber does it: some of the stored leaves are zeroed beforehand, while the sums still account for them.
void replace_some(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  const int64_t capacity = tree.capacity();
  const int64_t begin = static_cast<int64_t>(random() % capacity);
  const int64_t end = std::min<int64_t>(capacity, begin + 1 + static_cast<int64_t>(random() % 2000));
  const uint64_t gap = 1 + random() % 30;
  const bool removal = random() % 2 == 0;
  std::vector<int64_t> index;
  std::vector<float> was, now;
  for (int64_t i = begin; i < end; i += 1 + static_cast<int64_t>(random() % gap)) {
    index.push_back(i);
    was.push_back(model.leaves[i]);
    now.push_back(removal ? 0 : any_priority(random));
    model.leaves[i] = model.stored(now.back());
    if (random() % 2 == 0) tree.leaves()[i] = 0;
  }
  tree.replace_sorted(index.data(), was.data(), now.data(), static_cast<int>(index.size()));
}

void write_and_rebuild(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  for (int k = 0; k < 50; k++) {
    const int64_t i = static_cast<int64_t>(random() % tree.capacity());
    tree.leaves()[i] = any_priority(random);
    model.leaves[i] = model.stored(tree.leaves()[i]);
  }
  tree.rebuild();
}

}  // namespace

BOOST_AUTO_TEST_CASE(random_operations_agree_with_an_array) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {1, 2, 15, 16, 17, 127, 128, 129, 1023, 1025, 4097, 100'003}) {
      Tree tree(capacity, simd);
      Model model(capacity);
      std::mt19937_64 random(capacity);
      check_equal(tree.tree, model);
      for (int round = 0; round < (capacity > 10'000 ? 5 : 60); round++) {
        const auto kind = random() % 8;
        (kind == 0 ? write_and_rebuild : kind < 3 ? replace_some : set_some)(tree.tree, model, random);
        check_equal(tree.tree, model);
        check_finds(tree.tree, model, random);
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(the_total_is_exact_after_a_million_updates_over_nine_decades) {
  on_every_instruction_set([](Simd simd) {
    const int capacity = 50'000, batch = 250;
    Tree tree(capacity, simd);
    Model model(capacity);
    std::mt19937_64 random(3);
    std::uniform_real_distribution<float> exponent(-6, 3);
    std::vector<int64_t> index(batch);
    std::vector<float> leaf(batch);
    for (int round = 0; round < 1'000'000 / batch; round++) {
      for (int b = 0; b < batch; b++) {
        index[b] = static_cast<int64_t>(random() % capacity);
        leaf[b] = model.leaves[index[b]] = std::pow(10.0f, exponent(random));
      }
      tree->set(index.data(), leaf.data(), batch);
    }
    for (float& leaf_now : model.leaves) leaf_now = leaf_now > 0 ? model.stored(leaf_now) : 0;
    check_equal(tree.tree, model);
    check_finds(tree.tree, model, random);
  });
}

BOOST_AUTO_TEST_CASE(every_instruction_set_leaves_the_same_bytes) {
  for (int64_t capacity : {1, 17, 129, 5000}) {
    Tree a(capacity, Simd::kPortable), b(capacity, simds().back());
    for (Tree* tree : {&a, &b}) {
      Model model(capacity);
      std::mt19937_64 random(11);
      for (int round = 0; round < 30; round++) {
        set_some(tree->tree, model, random);
        replace_some(tree->tree, model, random);
      }
    }
    BOOST_TEST(std::memcmp(a.memory.get(), b.memory.get(), PriorityTree::bytes(capacity)) == 0);
  }
}

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

BOOST_AUTO_TEST_CASE(priorities_saturate_at_the_grid_and_nan_is_never_sampled) {
  Tree tree(1'000'000, Simd::kPortable);
  const float step = 0x1p-29f;  // 42 bits below 2^13 at a million leaves
  BOOST_TEST(tree->clamp(kNaN) == 0);
  BOOST_TEST(tree->clamp(0) == 0);
  BOOST_TEST(tree->clamp(-0.0f) == 0);
  BOOST_TEST(!std::signbit(tree->clamp(-0.0f)));
  BOOST_TEST(tree->clamp(-3) == 0);
  BOOST_TEST(tree->clamp(1e-45f) == step);
  BOOST_TEST(tree->clamp(step * 0.99f) == step);
  BOOST_TEST(tree->quantize(step) == 1u);
  BOOST_TEST(tree->clamp(8191.5f) == 8191.5f);
  BOOST_TEST(tree->clamp(8192) == PriorityTree::kMaxLeaf);
  BOOST_TEST(tree->clamp(kInfinity) == PriorityTree::kMaxLeaf);
  BOOST_TEST(PriorityTree::kMaxLeaf == std::nextafter(8192.0f, 0.0f));
  BOOST_TEST(tree->quantize(1) == uint64_t{1} << 29);
}

BOOST_AUTO_TEST_CASE(a_full_tree_of_the_largest_leaves_does_not_overflow) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {1, 16, 65'536, 65'537}) {
      Tree tree(capacity, simd);
      std::fill(tree->leaves(), tree->leaves() + capacity, kInfinity);
      tree->rebuild();
      BOOST_TEST(tree->total() == tree->quantize(PriorityTree::kMaxLeaf) * capacity);
      BOOST_TEST(tree->total() < uint64_t{1} << 63);
      const uint64_t last = tree->total() - 1;
      int64_t index;
      float leaf;
      tree->find(&last, 1, &index, &leaf);
      BOOST_TEST(index == capacity - 1);
    }
  });
}

BOOST_AUTO_TEST_CASE(rebuild_repairs_sums_minima_and_leaves_from_arbitrary_bytes) {
  const int64_t capacity = 5000;
  Tree tree(capacity, Simd::kPortable);
  Model model(capacity);
  std::mt19937_64 random(5);
  for (size_t k = 0; k < PriorityTree::bytes(capacity); k++) static_cast<uint8_t*>(tree.memory.get())[k] = random();
  for (int64_t i = 0; i < capacity; i++) model.leaves[i] = model.stored(tree->leaf(i));
  tree->rebuild();
  check_equal(tree.tree, model);
  check_finds(tree.tree, model, random);
  set_some(tree.tree, model, random);
  check_equal(tree.tree, model);
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
