#include <boost/test/unit_test.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "system/blocks.h"

BOOST_AUTO_TEST_SUITE(test_blocks)

using namespace torchreplay;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Takes blocks of these sizes, all at a time, and gives them back.
void use(BlockPool& pool, const std::vector<size_t>& sizes) {
  std::vector<void*> blocks;
  for (const size_t bytes : sizes) {
    blocks.push_back(pool.take(bytes));
    std::memset(blocks.back(), 1, 64);
  }
  for (size_t i = 0; i < sizes.size(); i++) pool.give(blocks[i], sizes[i]);
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_error_for_want_of_memory_says_how_much_was_asked_for) {
  BOOST_TEST(NoMemory(3 * kMiB / 2).what() == std::string("1.50 MiB of memory were asked for, and cannot be had"));
}

BOOST_AUTO_TEST_CASE(a_block_given_back_is_the_next_one_of_its_size) {
  BlockPool pool;
  void* first = pool.take(kMiB);
  pool.give(first, kMiB);
  BOOST_TEST(pool.kept_bytes() == kMiB);
  void* other = pool.take(2 * kMiB);
  BOOST_TEST(other != first);
  BOOST_TEST(pool.take(kMiB) == first);
  BOOST_TEST(pool.kept_bytes() == 0);
  std::free(first);
  std::free(other);
}

BOOST_AUTO_TEST_CASE(no_more_than_eight_blocks_of_a_size_are_kept) {
  BlockPool pool;
  use(pool, std::vector<size_t>(20, kMiB));
  BOOST_TEST(pool.kept_bytes() == 8 * kMiB);
}

BOOST_AUTO_TEST_CASE(what_is_kept_stays_within_the_bound) {
  BlockPool pool;
  use(pool, std::vector<size_t>(7, 60 * kMiB));
  BOOST_TEST(pool.kept_bytes() == 240 * kMiB);
  use(pool, {BlockPool::kKeepBytes + 64});
  BOOST_TEST(pool.kept_bytes() == 240 * kMiB);
}

// Episodes of other lengths each have keys of another size, which nobody asks for again.
BOOST_AUTO_TEST_CASE(sizes_that_are_not_asked_for_any_more_make_room_for_those_that_are) {
  BlockPool pool;
  for (size_t i = 0; i < 3000; i++) use(pool, {kMiB + 64 * i});
  BOOST_TEST(pool.kept_bytes() > 250 * kMiB);
  BOOST_TEST(pool.kept_bytes() <= BlockPool::kKeepBytes);
  const std::vector<size_t> batches(3, 80 * kMiB);
  use(pool, batches);
  BOOST_TEST(pool.kept_bytes() >= 240 * kMiB);
  std::vector<void*> taken;
  for (const size_t bytes : batches) taken.push_back(pool.take(bytes));
  BOOST_TEST(pool.kept_bytes() <= 16 * kMiB);
  for (void* block : taken) pool.give(block, 80 * kMiB);
}

BOOST_AUTO_TEST_CASE(of_sizes_in_use_together_that_do_not_fit_some_blocks_stay) {
  BlockPool pool;
  for (int i = 0; i < 10; i++) use(pool, {60 * kMiB, 61 * kMiB, 60 * kMiB, 61 * kMiB, 60 * kMiB, 61 * kMiB});
  BOOST_TEST(pool.kept_bytes() >= 240 * kMiB);
}

BOOST_AUTO_TEST_SUITE_END()
