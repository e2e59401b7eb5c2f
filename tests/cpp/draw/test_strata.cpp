#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "draw/strata.h"

BOOST_AUTO_TEST_SUITE(test_strata)

using torchreplay::draw_stratified;
using torchreplay::PriorityTree;
using torchreplay::Strata;

namespace {

constexpr uint64_t kLowest = 0, kHighest = ~uint64_t{0};

}  // namespace

BOOST_AUTO_TEST_CASE(the_parts_tile_the_total_without_gap_or_overlap) {
  for (uint64_t total : {uint64_t{7}, uint64_t{1000}, uint64_t{1} << 40, (uint64_t{1} << 63) - 1}) {
    for (int64_t n : {1, 2, 3, 7, 256, 1000}) {
      if (static_cast<uint64_t>(n) > total) continue;
      uint64_t next = 0;
      for (int64_t i = 0; i < n; i++) {
        BOOST_TEST(Strata(total, static_cast<uint64_t>(n)).target(static_cast<uint64_t>(i), kLowest) == next);
        next = Strata(total, static_cast<uint64_t>(n)).target(static_cast<uint64_t>(i), kHighest) + 1;
      }
      BOOST_TEST(next == total);
    }
  }
}

BOOST_AUTO_TEST_CASE(parts_differ_by_at_most_one_unit) {
  const uint64_t total = 1'000'003;
  const int64_t n = 256;
  for (int64_t i = 0; i < n; i++) {
    const uint64_t part = Strata(total, static_cast<uint64_t>(n)).target(static_cast<uint64_t>(i), kHighest) -
                          Strata(total, static_cast<uint64_t>(n)).target(static_cast<uint64_t>(i), kLowest) + 1;
    BOOST_TEST((part == total / n || part == total / n + 1));
  }
}

BOOST_AUTO_TEST_CASE(every_target_lies_below_the_total_even_with_more_items_than_units) {
  for (int64_t i = 0; i < 1000; i++)
    BOOST_TEST(Strata(3, static_cast<uint64_t>(1000)).target(static_cast<uint64_t>(i), kHighest) < 3u);
}

BOOST_AUTO_TEST_CASE(a_draw_is_a_function_of_seed_stream_and_step_and_finds_positive_leaves_only) {
  const int64_t capacity = 1000;
  const int n = 700;  // more than the tree descends at a time
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, PriorityTree::bytes(capacity)),
                                                           &std::free);
  PriorityTree tree(capacity, std::memset(memory.get(), 0, PriorityTree::bytes(capacity)));
  for (int64_t i = 0; i < capacity; i += 3) {
    const float leaf = static_cast<float>(i + 1);
    tree.set(&i, &leaf, 1);
  }
  auto draw = [&](uint64_t seed, uint64_t stream, uint64_t step) {
    std::vector<int64_t> index(n);
    std::vector<float> leaf(n);
    draw_stratified(tree, seed, stream, step, n, index.data(), leaf.data());
    for (int k = 0; k < n; k++) BOOST_TEST((index[k] % 3 == 0 && leaf[k] == static_cast<float>(index[k] + 1)));
    return index;
  };
  const auto first = draw(1, 2, 3);
  BOOST_TEST((draw(1, 2, 3) == first));
  BOOST_TEST((draw(2, 2, 3) != first));
  BOOST_TEST((draw(1, 3, 3) != first));
  BOOST_TEST((draw(1, 2, 4) != first));
}

BOOST_AUTO_TEST_SUITE_END()
