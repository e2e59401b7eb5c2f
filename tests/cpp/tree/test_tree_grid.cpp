// The grid on which a tree sums follows its leaves, at every scale.
#include <boost/test/unit_test.hpp>
#include <numeric>

#include "tree_model.h"

#if defined(TORCHREPLAY_X86)
#include <pmmintrin.h>
#endif

BOOST_AUTO_TEST_SUITE(test_tree_grid)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

void set_all(PriorityTree& tree, const std::vector<float>& leaves) {
  std::vector<int64_t> index(leaves.size());
  std::iota(index.begin(), index.end(), 0);
  tree.set(index.data(), leaves.data(), static_cast<int>(leaves.size()));
}

void set_one(PriorityTree& tree, int64_t index, float leaf) { tree.set(&index, &leaf, 1); }

// What 1000 targets find that lie evenly in the total.
std::vector<int64_t> found_in(const PriorityTree& tree) {
  std::vector<uint64_t> target(1000);
  for (uint64_t k = 0; k < 1000; k++) target[k] = tree.total() / 1000 * k + tree.total() / 2000;
  std::vector<int64_t> index(1000);
  std::vector<float> leaf(1000);
  tree.find(target.data(), 1000, index.data(), leaf.data());
  return index;
}

double share(const PriorityTree& tree, int64_t i) {
  return static_cast<double>(tree.quantize(tree.leaf(i))) / static_cast<double>(tree.total());
}

// What is found after each of many changes of leaves that are about 2^shift, times or divided by up to 2^20.
std::vector<int64_t> history(Tree& tree, int shift) {
  std::mt19937_64 random(3);
  std::vector<int64_t> found;
  const int64_t capacity = tree->capacity();
  for (int round = 0; round < 60; round++) {
    const int scale = shift + static_cast<int>(random() % 40) - 20;
    std::vector<int64_t> index(1 + random() % 700);
    std::vector<float> leaf(index.size()), was(index.size());
    for (size_t b = 0; b < index.size(); b++) {
      index[b] = static_cast<int64_t>(random() % static_cast<uint64_t>(capacity));
      leaf[b] = random() % 5 ? std::ldexp(std::uniform_real_distribution<float>(1e-3f, 1)(random), scale) : 0;
    }
    if (random() % 2) {
      tree->set(index.data(), leaf.data(), static_cast<int>(index.size()));
    } else {
      std::sort(index.begin(), index.end());
      index.erase(std::unique(index.begin(), index.end()), index.end());
      for (size_t b = 0; b < index.size(); b++) was[b] = tree->leaf(index[b]);
      tree->replace_sorted(index.data(), was.data(), leaf.data(), static_cast<int>(index.size()));
    }
    const std::vector<int64_t> now = found_in(tree.tree);
    found.insert(found.end(), now.begin(), now.end());
    found.push_back(static_cast<int64_t>(tree->total()));
  }
  return found;
}

}  // namespace

BOOST_AUTO_TEST_CASE(leaves_times_any_power_of_two_have_the_same_sums_and_are_found_alike) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {5, 300, 20'000}) {
      Tree one(capacity, simd);
      const std::vector<int64_t> expected = history(one, 0);
      for (int shift : {-90, -33, -1, 1, 50, 100}) {
        Tree other(capacity, simd);
        BOOST_TEST((history(other, shift) == expected));
        BOOST_TEST(other->unit() == std::ldexp(one->unit(), shift));
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(among_a_million_leaves_one_of_2_to_the_minus_36_of_the_largest_keeps_its_proportion) {
  constexpr int64_t kCapacity = 1'000'000;
  Tree tree(kCapacity, best_simd());
  for (float scale : {1e-20f, 1.0f, 3e25f}) {
    std::vector<float> leaves(kCapacity, scale);
    for (int64_t i = 0; i < kCapacity; i += 2) leaves[i] *= 0x1p-36f * (1 + static_cast<float>(i % 1000) / 1000);
    set_all(tree.tree, leaves);
    const long double sum = std::accumulate(leaves.begin(), leaves.end(), 0.0L);
    double worst = 0;
    for (int64_t i = 0; i < kCapacity; i++)
      worst = std::max(worst, std::fabs(static_cast<double>(share(tree.tree, i) / (leaves[i] / sum) - 1)));
    BOOST_TEST(worst < 0.02);
  }
}

// Such as new rows, which come with the largest priority, among those that were learned from.
BOOST_AUTO_TEST_CASE(leaves_that_shrink_get_a_finer_grid_after_as_many_writes_as_there_are_leaves) {
  on_every_instruction_set([](Simd simd) {
    constexpr int64_t kCapacity = 1000;
    Tree tree(kCapacity, simd);
    set_all(tree.tree, std::vector<float>(kCapacity, 1));
    const double unit = tree->unit();
    for (int64_t i = 0; i < kCapacity - 1; i++) set_one(tree.tree, i, 1e-3f);
    BOOST_TEST(tree->unit() == unit);
    set_one(tree.tree, kCapacity - 1, 1e-3f);
    BOOST_TEST(tree->unit() < unit / 900);
    BOOST_TEST(tree->total() >= uint64_t{1} << 60);
  });
}

BOOST_AUTO_TEST_CASE(when_the_largest_leaf_of_all_goes_the_others_have_their_proportions_at_once) {
  on_every_instruction_set([](Simd simd) {
    Tree tree(1000, simd);
    set_one(tree.tree, 0, 3e38f);
    set_one(tree.tree, 1, 1e-10f);
    set_one(tree.tree, 2, 3e-10f);
    BOOST_TEST(tree->total() == tree->quantize(3e38f) + 2);
    set_one(tree.tree, 0, 0);
    BOOST_TEST(share(tree.tree, 1) == 0.25, boost::test_tools::tolerance(1e-6));
    const int64_t index[] = {1, 2};
    const float was[] = {1e-10f, 3e-10f}, now[] = {3e38f, 3e38f};
    tree->replace_sorted(index, was, now, 2);
    BOOST_TEST(share(tree.tree, 1) == 0.5);
  });
}

BOOST_AUTO_TEST_CASE(a_leaf_below_half_a_unit_is_found_beside_the_largest) {
  on_every_instruction_set([](Simd simd) {
    Tree tree(100, simd);
    std::vector<float> leaves(100, 1e-30f);
    leaves[50] = 1e30f;
    leaves[51] = 0;
    set_all(tree.tree, leaves);
    std::vector<uint64_t> target(100);
    std::iota(target.begin(), target.begin() + 50, 0);
    std::iota(target.begin() + 50, target.end(), tree->total() - 50);
    std::vector<int64_t> index(100), expected(100);
    std::iota(expected.begin(), expected.begin() + 50, 0);
    std::iota(expected.begin() + 52, expected.end(), 52);
    expected[50] = expected[51] = 50;
    std::vector<float> leaf(100);
    tree->find(target.data(), 100, index.data(), leaf.data());
    BOOST_TEST(index == expected, boost::test_tools::per_element());
  });
}

BOOST_AUTO_TEST_CASE(the_grid_of_a_tree_that_has_been_told_is_that_of_another_with_its_leaves) {
  Tree tree(1000, Simd::kPortable), copy(1000, Simd::kPortable), anew(1000, Simd::kPortable);
  std::vector<float> leaves(1000, 1e-4f);
  std::fill_n(leaves.begin(), 500, 1.0f);
  set_all(tree.tree, leaves);
  for (int64_t i = 0; i < 500; i++) set_one(tree.tree, i, 2e-4f);
  for (Tree* other : {&copy, &anew}) std::copy(tree->leaves(), tree->leaves() + 1000, (*other)->leaves());
  copy->rebuild_in(tree->grid_state());
  BOOST_TEST(std::memcmp(copy.memory.get(), tree.memory.get(), PriorityTree::bytes(1000)) == 0);
  anew->rebuild();
  BOOST_TEST(anew->unit() < tree->unit());
  for (int64_t top : {-5, 0, 3, 180, 250, 300}) {  // none that holds its leaves, or gives them units enough
    copy->rebuild_in({top, -1});
    BOOST_TEST(copy->unit() == anew->unit());
    BOOST_TEST(copy->grid_state().written == 0);
  }
}

// As after a death between the end of an outlier and the choice of a finer grid, or in a copy without it.
BOOST_AUTO_TEST_CASE(a_tree_rebuilt_without_its_outlier_has_the_proportions_of_the_leaves_that_are_left) {
  on_every_instruction_set([](Simd simd) {
    for (float outlier : {1e4f, 1e10f, 1e14f, 1e20f, 1e30f, 3e38f}) {
      Tree tree(1000, simd);
      std::vector<float> leaves(1000);
      std::iota(leaves.begin(), leaves.end(), 1.0f);
      for (float& leaf : leaves) leaf *= 1.001f;
      leaves[123] = outlier;
      set_all(tree.tree, leaves);
      tree->leaves()[123] = 0;
      tree->rebuild();
      const double sum = 1.001 * (500 * 1001 - 124);
      for (int64_t i = 0; i < 1000; i++)
        BOOST_TEST(share(tree.tree, i) == (i == 123 ? 0 : 1.001 * static_cast<double>(i + 1) / sum),
                   boost::test_tools::tolerance(1e-6));
    }
  });
}

BOOST_AUTO_TEST_CASE(a_tree_whose_outlier_is_gone_has_good_proportions_at_once_and_the_best_after_as_many_writes) {
  on_every_instruction_set([](Simd simd) {
    for (float outlier : {1e10f, 1e14f, 1e20f, 1e30f, 3e38f}) {
      Tree tree(1000, simd);
      std::vector<float> leaves(1000);
      std::iota(leaves.begin(), leaves.end(), 1.001f);
      leaves[123] = outlier;
      set_all(tree.tree, leaves);
      leaves[123] = 0;
      const double mean = std::accumulate(leaves.begin(), leaves.end(), 0.0) / 999;
      const auto worst = [&] {  // error of a probability, by the mean probability
        double error = 0;
        for (int64_t i = 0; i < 1000; i++)
          error = std::max(error, std::fabs(share(tree.tree, i) * 999 - leaves[i] / mean));
        return error;
      };
      set_one(tree.tree, 123, 0);
      BOOST_TEST(worst() < 0x1p-10);
      for (int64_t i = 0; i < 1000; i++) set_one(tree.tree, i, leaves[i]);
      BOOST_TEST(worst() < 1e-6);
    }
  });
}

#if defined(TORCHREPLAY_X86)
// As torch.set_flush_denormal(True) does, in one process of several.
BOOST_AUTO_TEST_CASE(a_thread_that_flushes_denormal_numbers_makes_the_same_tree) {
  on_every_instruction_set([](Simd simd) {
    const std::vector<float> odd = {1e-45f, 1e-39f, 1.1754942e-38f, 1.17549435e-38f, 2e-38f, -1e-40f, 0, kInfinity};
    for (size_t n : {odd.size() - 1, odd.size()}) {
      Tree one(n, simd), other(n, simd);
      const std::vector<float> leaves(odd.begin(), odd.begin() + n);
      set_all(one.tree, leaves);
      const unsigned before = _mm_getcsr();
      _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
      _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
      set_all(other.tree, leaves);
      other->rebuild();
      _mm_setcsr(before);
      BOOST_TEST(std::memcmp(one.memory.get(), other.memory.get(), PriorityTree::bytes(n)) == 0);
      BOOST_TEST(one->count() == static_cast<int64_t>(n == odd.size() ? 6 : 5));
    }
  });
}
#endif

BOOST_AUTO_TEST_SUITE_END()
