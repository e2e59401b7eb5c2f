#include <boost/test/unit_test.hpp>

#include "drawable.h"
#include "explorers.h"

BOOST_AUTO_TEST_SUITE(test_stream_gaps)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

void resync(SegmentMemory& m, uint64_t slot) {
  SegmentLock lock(m);
  Absorber(m).resync(slot, m.header().head.load());
}

}  // namespace

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

BOOST_AUTO_TEST_SUITE_END()
