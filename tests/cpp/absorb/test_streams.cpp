#include <boost/test/unit_test.hpp>

#include "drawable.h"
#include "explorers.h"

BOOST_AUTO_TEST_SUITE(test_streams)

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_CASE(an_n_step_transition_is_drawable_once_its_last_row_is_there) {
  auto m = ring_of(16, transitions(3));
  Explorer a(*m, 1);
  a.reset();
  a.step();
  a.step();
  BOOST_TEST((drawable(*m) == Keys{}));
  a.step();  // key 3
  BOOST_TEST((drawable(*m) == Keys{0}));
  a.step();
  BOOST_TEST((drawable(*m) == Keys{0, 1}));
  BOOST_TEST(m->header().inserted == 2U);
}

BOOST_AUTO_TEST_CASE(an_end_of_either_kind_completes_every_nearer_anchor_but_is_none_itself) {
  for (uint64_t end : {kTerminated, kTruncated, kTerminated | kTruncated}) {
    auto m = ring_of(16, transitions(3));
    Explorer(*m, 1).episode(5, end);
    BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3, 4}));
    BOOST_TEST(m->header().inserted == 5U);
  }
}

BOOST_AUTO_TEST_CASE(a_reset_without_an_end_leaves_the_last_anchors_undrawable) {
  auto m = ring_of(16, transitions(3));
  Explorer a(*m, 1);
  a.episode(5, 0);
  a.episode(2);  // keys 6 to 8
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 6, 7}));
}

BOOST_AUTO_TEST_CASE(an_episode_shorter_than_the_return_is_drawable_when_it_ends) {
  auto m = ring_of(16, transitions(5));
  Explorer a(*m, 1);
  a.episode(1);
  BOOST_TEST((drawable(*m) == Keys{0}));
  a.episode(4);
  BOOST_TEST((drawable(*m) == Keys{0, 2, 3, 4, 5}));
}

BOOST_AUTO_TEST_CASE(resets_in_a_row_make_no_item) {
  auto m = ring_of(16, transitions(1));
  Explorer a(*m, 1);
  for (int i = 0; i < 3; i++) a.reset();
  a.step();
  BOOST_TEST((drawable(*m) == Keys{2}));
}

BOOST_AUTO_TEST_CASE(interleaved_streams_do_not_share_items) {
  auto m = ring_of(16, transitions(2));
  Explorer a(*m, 1), b(*m, 2);
  a.reset();  // 0
  b.reset();
  a.step();  // 2
  b.step(kTerminated);
  BOOST_TEST((drawable(*m) == Keys{1}));
  a.step();  // 4
  b.reset();
  b.step();  // 6
  a.step(kTruncated);
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 4}));
}

// T = 4, of which 1 burns in; anchors at steps 0, 2, 4, 6.
BOOST_AUTO_TEST_CASE(sequences_start_at_multiples_of_the_stride_and_need_a_step_after_the_burn_in) {
  auto m = ring_of(32, sequences(3, 2, 1));
  Explorer a(*m, 1);
  a.reset();
  for (int i = 1; i <= 6; i++) a.step();
  BOOST_TEST((drawable(*m) == Keys{0, 2}));
  a.step(kTerminated);  // step 7: 4 has three steps, 6 has one
  BOOST_TEST((drawable(*m) == Keys{0, 2, 4}));
  a.episode(2);  // keys 8 to 10: two steps from step 0
  BOOST_TEST((drawable(*m) == Keys{0, 2, 4, 8}));
  a.episode(1);
  BOOST_TEST((drawable(*m) == Keys{0, 2, 4, 8}));
}

BOOST_AUTO_TEST_CASE(windows_across_episodes_start_everywhere_and_wait_for_all_their_rows) {
  auto m = ring_of(32, across_episodes(3));
  Explorer a(*m, 1);
  a.episode(2);
  BOOST_TEST((drawable(*m) == Keys{}));
  a.episode(2);  // keys 3 to 5
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2}));
  a.reset();
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3}));
}

BOOST_AUTO_TEST_CASE(items_of_whole_episodes_wait_for_the_end) {
  auto m = ring_of(32, whole_episodes());
  Explorer a(*m, 1);
  a.reset();
  for (int i = 0; i < 6; i++) a.step();
  BOOST_TEST((drawable(*m) == Keys{}));
  a.step(kTruncated);
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3, 4, 5, 6}));
  a.episode(4, 0);
  a.reset();
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3, 4, 5, 6}));
}

BOOST_AUTO_TEST_CASE(the_end_of_an_episode_longer_than_the_ring_completes_what_is_left_of_it) {
  auto m = ring_of(8, whole_episodes());
  Explorer(*m, 1).episode(19);  // rows 12 to 19 are there
  BOOST_TEST((drawable(*m) == Keys{12, 13, 14, 15, 16, 17, 18}));
}

BOOST_AUTO_TEST_SUITE_END()
