#define BOOST_TEST_MODULE streams
#include <boost/test/unit_test.hpp>

#include "explorers.h"
#include "invariants.h"
#include "update.h"
#include "views.h"

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Keys = std::set<int64_t>;

// Leaves are raw priorities.
constexpr SamplerConfig kRaw{1, Normalize::kBuffer, 1, 0};

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = kRaw;
  return make_segment(plan);
}

// Keys of the items that can be drawn.
Keys drawable(SegmentMemory& m) {
  settle(m);
  BOOST_TEST(violation(m) == "");
  Keys keys;
  for (uint64_t s = 0; s < m.capacity(); s++)
    if (m.tree().leaf(static_cast<int64_t>(s)) > 0) keys.insert(static_cast<int64_t>(m.at(s)) - 1);
  return keys;
}

float leaf(const SegmentMemory& m, uint64_t key) { return m.tree().leaf(static_cast<int64_t>(m.slot_of(key))); }

void resync(SegmentMemory& m, uint64_t slot) {
  Locked lock(m);
  Absorber(m).resync(slot, m.header().head.load());
}

}  // namespace

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

// With a stack of 3 an item needs min(2, step) frames before its anchor.
BOOST_AUTO_TEST_CASE(a_stacked_item_goes_with_its_earliest_frame) {
  auto m = ring_of(6, transitions(1, 3));
  Explorer a(*m, 1);
  a.reset();
  for (int i = 1; i <= 5; i++) a.step();
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3, 4}));
  a.step();  // over row 0
  BOOST_TEST((drawable(*m) == Keys{3, 4, 5}));
  a.step();
  BOOST_TEST((drawable(*m) == Keys{4, 5, 6}));
  a.reset();  // over row 2
  a.step();
  BOOST_TEST((drawable(*m) == Keys{6, 8}));
}

BOOST_AUTO_TEST_CASE(a_stacked_anchor_of_which_a_frame_is_gone_never_becomes_drawable) {
  auto m = ring_of(4, transitions(2, 3));  // an item has up to five rows
  Explorer a(*m, 1);
  a.reset();
  for (int i = 0; i < 20; i++) {
    a.step();
    if (i > 1) BOOST_TEST((drawable(*m).contains(0) == (i == 2)));
    if (i > 2) BOOST_TEST((drawable(*m) == Keys{}));
  }
  a.step(kTerminated);
  BOOST_TEST((drawable(*m) == Keys{20}));  // rows 18 to 21
}

// Ticket 6 is lost before its slot is taken: row 0 outlives row 1.
BOOST_AUTO_TEST_CASE(an_item_whose_second_row_is_gone_is_not_drawable_while_its_anchor_lives_on) {
  auto m = ring_of(6, transitions(1));
  Explorer a(*m, 1), b(*m, 2);
  a.episode(1);  // rows 0, 1
  b.reset();
  b.step();  // 3
  a.reset();
  a.step();  // 5
  BOOST_TEST((drawable(*m) == Keys{0, 2, 4}));
  SteppedWriter dead(*m, 3);
  dead.take_ticket();
  // The record over row 1 names row 3: what is cleared follows from what was there before.
  b.step();  // 7
  BOOST_TEST(m->at(0) == 1U);
  BOOST_TEST((drawable(*m) == Keys{2, 3, 4}));
}

BOOST_AUTO_TEST_CASE(a_row_gone_from_the_middle_takes_every_item_over_it) {
  auto m = ring_of(10, transitions(3, 3));
  Explorer a(*m, 1);
  a.reset();
  for (int i = 1; i < 10; i++) a.step();
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3, 4, 5, 6}));
  SteppedWriter lost(*m, 2);
  for (int i = 0; i < 4; i++) lost.take_ticket();
  Explorer(*m, 3).reset();  // over row 4: in items 1 to 6
  BOOST_TEST((drawable(*m) == Keys{0}));
}

BOOST_AUTO_TEST_CASE(an_item_is_cleared_as_soon_as_one_of_its_slots_is_held_busy_or_void) {
  auto m = ring_of(5, transitions(2));
  Explorer a(*m, 1);
  a.reset();
  for (int i = 0; i < 4; i++) a.step();
  SteppedWriter dead(*m, 2);
  for (int i = 0; i < 3; i++) dead.take_ticket();
  dead.seize();  // slot 2
  BOOST_TEST((drawable(*m) == Keys{}));
  reclaim(*m, 2);
  BOOST_TEST((drawable(*m) == Keys{}));
  BOOST_TEST(m->header().rows == 4U);
}

BOOST_AUTO_TEST_CASE(a_row_whose_predecessor_is_not_absorbed_yet_waits_for_it) {
  auto m = ring_of(8, transitions(1));
  Explorer a(*m, 1);
  a.reset();
  a.step();
  resync(*m, 1);
  BOOST_TEST(m->at(1) == 0U);
  BOOST_TEST(PendingSet(*m).contains(1));
  BOOST_TEST((drawable(*m) == Keys{0}));
}

// Row 7 lies in the last slot and its successors in the first ones, which every pass visits before.
BOOST_AUTO_TEST_CASE(a_late_row_and_its_successors_are_absorbed_together_across_the_seam) {
  auto m = ring_of(8, transitions(2));
  Explorer a(*m, 1), b(*m, 2);
  a.reset();
  for (int i = 0; i < 5; i++) a.step();
  b.reset();  // 6
  b.writer().take_ticket();
  b.writer().seize();  // 7
  BOOST_TEST((drawable(*m) == Keys{0, 1, 2, 3}));
  b.finish(b.stream.next());
  b.step();  // 8, over row 0
  b.step(kTerminated);
  settle(*m);  // once
  BOOST_TEST(m->header().pending == 0U);
  BOOST_TEST((drawable(*m) == Keys{2, 3, 6, 7, 8}));
}

BOOST_AUTO_TEST_CASE(a_row_that_lags_completes_its_items_without_any_new_ticket) {
  auto m = ring_of(8, transitions(1));
  Explorer slow(*m, 1), other(*m, 2);
  slow.reset();
  slow.writer().take_ticket();  // 1
  other.episode(1);
  BOOST_TEST((drawable(*m) == Keys{2}));  // skips the unresolved ticket instead of waiting for it
  BOOST_TEST(slow.writer().seize());
  slow.finish(slow.stream.next());
  BOOST_TEST((drawable(*m) == Keys{0, 2}));
}

BOOST_AUTO_TEST_CASE(the_old_item_of_a_skipped_slot_goes_when_the_slot_is_taken_by_a_later_turn) {
  auto m = ring_of(4, transitions(1));
  Explorer a(*m, 1), b(*m, 3);
  a.episode(1);
  a.episode(1);
  SteppedWriter lost(*m, 2);
  lost.take_ticket();  // 4
  lost.take_ticket();  // 5
  BOOST_TEST((drawable(*m) == Keys{0, 2}));
  b.episode(1);  // 6, 7
  BOOST_TEST((drawable(*m) == Keys{0, 6}));
  b.episode(1);  // 8, 9
  BOOST_TEST((drawable(*m) == Keys{6, 8}));
}

BOOST_AUTO_TEST_CASE(a_row_whose_predecessor_is_gone_starts_over) {
  auto m = ring_of(4, transitions(1));
  Explorer a(*m, 1), b(*m, 2);
  a.reset();                             // 0
  b.reset();                             // 1
  for (int i = 0; i < 4; i++) b.step();  // 2 to 5, over row 0
  a.step();                              // 6
  a.step();                              // 7
  BOOST_TEST((drawable(*m) == Keys{4, 6}));
}

// Two processes with one writer's state, which must not be.
BOOST_AUTO_TEST_CASE(of_two_rows_that_name_one_predecessor_the_first_goes_on_from_it) {
  auto m = ring_of(8, transitions(2));
  Explorer a(*m, 1);
  a.reset();
  Explorer twin = a;
  a.step();     // 1
  twin.step();  // 2, names row 0 too
  a.step();     // 3
  twin.step();  // 4, names row 2
  twin.step();
  settle(*m);
  for (uint64_t key = 0; key < 6; key++) BOOST_TEST((leaf(*m, key) > 0) == (key == 0 || key == 2));
  BOOST_TEST(m->links(0).next.load() == 2U);  // slot 1
  BOOST_TEST(m->links(2).prev.load() == 0U);
}

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
