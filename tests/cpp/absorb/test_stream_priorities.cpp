#include <boost/test/unit_test.hpp>

#include "draw/priority_updater.h"
#include "drawable.h"
#include "explorers.h"

BOOST_AUTO_TEST_SUITE(test_stream_priorities)

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_CASE(a_step_gives_its_priority_to_the_items_that_it_completes) {
  auto m = ring_of(16, transitions(3));
  Explorer a(*m, 1);
  a.reset();
  for (float p : {10.0F, 20.0F, 30.0F, 40.0F}) a.step(0, p);
  a.step(kTerminated, 50.0F);
  settle(*m);
  const float expected[] = {30, 40, 50, 50, 50, 0};
  for (uint64_t key = 0; key < 6; key++) BOOST_TEST(leaf(*m, key) == expected[key]);
  BOOST_TEST(m->header().max_raw == 50.0F);  // 10 and 20 complete nothing
}

BOOST_AUTO_TEST_CASE(a_priority_that_completes_no_item_leaves_the_largest_as_it_is) {
  auto m = ring_of(16, transitions(2));
  Explorer a(*m, 1);
  a.reset();
  a.step(0, 100.0F);
  settle(*m);
  BOOST_TEST(m->header().max_raw == 1.0F);
  a.step();
  settle(*m);
  BOOST_TEST(leaf(*m, 0) == 1.0F);
}

BOOST_AUTO_TEST_CASE(a_sequence_gets_the_largest_priority_of_its_own_steps) {
  auto m = ring_of(32, sequences(3, 3));
  Explorer a(*m, 1);
  a.reset();
  for (std::optional<float> p : {std::optional(2.0F), {5.0F}, {}, {4.0F}, {3.0F}, {}, {}, {}, {}}) a.step(0, p);
  a.step(kTerminated, 0.5F);  // step 10
  settle(*m);
  BOOST_TEST(leaf(*m, 0) == 5.0F);
  BOOST_TEST(leaf(*m, 3) == 4.0F);
  BOOST_TEST(leaf(*m, 6) == 5.0F);  // none given: the largest one seen
  BOOST_TEST(leaf(*m, 9) == 0.5F);
}

BOOST_AUTO_TEST_CASE(a_window_across_episodes_gets_the_largest_priority_of_all_its_steps) {
  auto m = ring_of(32, across_episodes(3));
  Explorer a(*m, 1);
  a.reset();
  a.step(kTerminated, 2.0F);
  a.reset();
  a.step(0, 3.0F);  // key 3
  a.step(0, 1.5F);
  settle(*m);
  BOOST_TEST(leaf(*m, 0) == 3.0F);
  BOOST_TEST(leaf(*m, 1) == 3.0F);
}

BOOST_AUTO_TEST_CASE(a_transition_of_a_whole_episode_gets_the_priority_of_its_own_step) {
  auto m = ring_of(16, whole_episodes());
  Explorer a(*m, 1);
  a.reset();
  for (float p : {3.0F, 2.0F}) a.step(0, p);
  a.step(kTerminated, 7.0F);
  settle(*m);
  const float expected[] = {3, 2, 7, 0};
  for (uint64_t key = 0; key < 4; key++) BOOST_TEST(leaf(*m, key) == expected[key]);
}

BOOST_AUTO_TEST_CASE(td_errors_reach_complete_items_only) {
  auto m = ring_of(6, transitions(1, 2));
  Explorer a(*m, 1);
  a.reset();
  for (int i = 0; i < 5; i++) a.step();  // rows 0 to 5
  settle(*m);
  SteppedWriter lost(*m, 2);
  for (int i = 0; i < 3; i++) lost.take_ticket();
  lost.seize();  // slot 2: a frame of item 3, an anchor, the end of item 1
  const int64_t keys[] = {0, 1, 2, 3, 4, 5};
  const double td[] = {2, 3, 4, 5, 6, 7};
  PriorityUpdater(*m).update(6, keys, td);
  BOOST_TEST((drawable(*m) == Keys{0, 4}));
  BOOST_TEST(leaf(*m, 0) == 2.0F);
  BOOST_TEST(leaf(*m, 4) == 6.0F);
  BOOST_TEST(m->header().updated == 2U);
  BOOST_TEST(m->header().unready_updates == 3U);  // 1, 3 and 5: their rows are there
  BOOST_TEST(m->header().stale_updates == 1U);
  BOOST_TEST(m->header().max_raw == 6.0F);  // a dropped TD error does not raise the maximum
}

BOOST_AUTO_TEST_CASE(an_evicted_item_counts_as_inserted_once) {
  auto m = ring_of(5, transitions(2));
  Explorer a(*m, 1);
  a.reset();
  for (uint64_t i = 1; i <= 40; i++) {
    a.step();
    settle(*m);
    BOOST_TEST(m->header().inserted == (i > 1 ? i - 1 : 0));
    BOOST_TEST(m->tree().count() == static_cast<int64_t>(std::min<uint64_t>(i > 1 ? i - 1 : 0, 3)));
  }
}

BOOST_AUTO_TEST_SUITE_END()
