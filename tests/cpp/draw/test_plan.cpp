#include <boost/test/unit_test.hpp>
#include <limits>

#include "draw/item_plan.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_plan)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;

constexpr uint32_t kObs = 0, kReward = 1, kCount = 2, kGoalA = 3, kGoalB = 4;

// Transitions of 3 steps with a stack of 4.
Layout layout() {
  return make_layout(
      16, {{Element::kU8, 100}, {Element::kF32, 8}, {Element::kI64, 8}, {Element::kF32, 12}, {Element::kF32, 12}},
      transitions(3, 4), 0);
}

ItemPlan plan_of(const Output& output) { return {{output}, 3}; }

bool accepts(const ItemPlan& plan) {
  try {
    plan.check(layout());
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

}  // namespace

BOOST_AUTO_TEST_CASE(plans_that_views_make_are_accepted) {
  const ItemPlan plan{{{Kind::kAnchor, kObs, -3, 4},
                       {Kind::kAnchor, kCount, 1},
                       {Kind::kAnchor, kObs, 0, 4},
                       {Kind::kEnd, kObs, -3, 4},
                       {Kind::kEnd, kCount},
                       {Kind::kReturn, kReward},
                       {Kind::kDiscount},
                       {Kind::kMask, 0, 0, 3},
                       {Kind::kFirst, 0, 0, 3},
                       {Kind::kRelabelled},
                       {Kind::kGoal, kGoalA, 1, 1, kGoalB}},
                      3,
                      0.9,
                      Goal::kFuture,
                      0.8};
  BOOST_TEST(accepts(plan));
}

BOOST_AUTO_TEST_CASE(the_steps_of_an_item_are_at_least_one_and_at_most_the_views) {
  for (uint32_t steps : {1U, 3U}) BOOST_TEST(accepts({{}, steps}));
  for (uint32_t steps : {0U, 4U, ~0U}) BOOST_TEST(!accepts({{}, steps}));
}

BOOST_AUTO_TEST_CASE(items_of_whole_episodes_still_have_a_bound_of_steps) {
  const Layout whole = make_layout(16, {{Element::kU8, 1}}, whole_episodes(), 0);
  BOOST_CHECK_NO_THROW((ItemPlan{{}, 1}.check(whole)));
  BOOST_CHECK_THROW((ItemPlan{{}, (1 << 20) + 1}.check(whole)), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(rows_that_are_not_linked_make_no_items) {
  const Layout rows = make_layout(16, {{Element::kU8, 1}}, View{}, 0);
  BOOST_CHECK_THROW((ItemPlan{{}, 1}.check(rows)), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(shares_goals_and_discounts_are_numbers_in_range) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  for (double share : {0.0, 0.5, 1.0}) BOOST_TEST(accepts({{}, 3, 1, Goal::kFinal, share}));
  for (double share : {-0.1, 1.1, kNan, kInf}) BOOST_TEST(!accepts({{}, 3, 1, Goal::kFinal, share}));
  for (uint32_t goal : {4U, 77U}) BOOST_TEST(!accepts({{}, 3, 1, static_cast<Goal>(goal), 0.5}));
  for (double gamma : {kNan, kInf, -kInf}) BOOST_TEST(!accepts({{}, 3, gamma}));
}

BOOST_AUTO_TEST_CASE(unknown_kinds_and_fields_are_refused) {
  for (uint32_t kind : {8U, ~0U}) BOOST_TEST(!accepts(plan_of({static_cast<Kind>(kind)})));
  for (Kind kind : {Kind::kAnchor, Kind::kEnd, Kind::kReturn, Kind::kGoal})
    for (uint32_t field : {5U, ~0U}) BOOST_TEST(!accepts(plan_of({kind, field})));
  BOOST_TEST(!accepts(plan_of({Kind::kGoal, kGoalA, 0, 1, 5})));
}

BOOST_AUTO_TEST_CASE(rows_are_counted_within_reason) {
  for (Kind kind : {Kind::kAnchor, Kind::kEnd, Kind::kMask, Kind::kFirst}) {
    for (uint32_t count : {1U, 4U, 1U << 20}) BOOST_TEST(accepts(plan_of({kind, kObs, 0, count})));
    for (uint32_t count : {0U, (1U << 20) + 1, ~0U}) BOOST_TEST(!accepts(plan_of({kind, kObs, 0, count})));
    BOOST_TEST(!accepts(plan_of({kind, kObs, (1 << 20) + 1})));
    BOOST_TEST(!accepts(plan_of({kind, kObs, std::numeric_limits<int32_t>::max()})));
  }
}

// More would be given room in the batch, and never written.
BOOST_AUTO_TEST_CASE(what_an_item_has_one_of_is_not_asked_for_twice) {
  for (Kind kind : {Kind::kReturn, Kind::kDiscount, Kind::kRelabelled, Kind::kGoal}) {
    BOOST_TEST(accepts(plan_of({kind, kReward, 0, 1, kReward})));
    for (uint32_t count : {0U, 2U}) BOOST_TEST(!accepts(plan_of({kind, kReward, 0, count, kReward})));
  }
}

BOOST_AUTO_TEST_CASE(positions_before_the_anchor_reach_as_far_as_the_views_frames) {
  for (Kind kind : {Kind::kAnchor, Kind::kEnd}) {
    BOOST_TEST(accepts(plan_of({kind, kObs, -3})));
    BOOST_TEST(!accepts(plan_of({kind, kObs, -4})));
    BOOST_TEST(!accepts(plan_of({kind, kObs, std::numeric_limits<int32_t>::min()})));
  }
}

BOOST_AUTO_TEST_CASE(masks_firsts_and_goals_do_not_reach_before_the_anchor) {
  for (Kind kind : {Kind::kMask, Kind::kFirst, Kind::kGoal})
    BOOST_TEST(!accepts(plan_of({kind, kGoalA, -1, 1, kGoalB})));
}

BOOST_AUTO_TEST_CASE(a_step_is_discounted_by_a_floating_scalar) {
  const Layout l = make_layout(
      16, {{Element::kF16, 2}, {Element::kF64, 8}, {Element::kF32, 8}, {Element::kI64, 8}, {Element::kBool, 1}},
      transitions(3), 0);
  auto discounted_by = [](int32_t field) { return ItemPlan{{}, 3, 1, Goal::kNone, 0, field}; };
  for (int32_t field : {-1, 0, 1}) BOOST_CHECK_NO_THROW(discounted_by(field).check(l));
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  for (int32_t field : {2, 3, 4, 5, kMost}) BOOST_CHECK_THROW(discounted_by(field).check(l), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(returns_are_of_floating_fields) { BOOST_TEST(!accepts(plan_of({Kind::kReturn, kCount}))); }

BOOST_AUTO_TEST_CASE(a_goal_is_replaced_by_one_of_its_own_type) {
  BOOST_TEST(accepts(plan_of({Kind::kGoal, kGoalA, 0, 1, kGoalB})));
  BOOST_TEST(!accepts(plan_of({Kind::kGoal, kGoalA, 0, 1, kReward})));  // of fewer bytes
  BOOST_TEST(!accepts(plan_of({Kind::kGoal, kReward, 0, 1, kCount})));  // of another element
}

BOOST_AUTO_TEST_CASE(an_item_takes_the_bytes_of_all_its_rows) {
  const ItemPlan plan{{{Kind::kAnchor, kObs, -3, 4},
                       {Kind::kReturn, kReward},
                       {Kind::kDiscount},
                       {Kind::kMask, 0, 0, 3},
                       {Kind::kRelabelled},
                       {Kind::kGoal, kGoalA, 0, 1, kGoalB}},
                      3};
  const uint64_t bytes[] = {400, 8, 4, 3, 1, 12};
  for (size_t o = 0; o < std::size(bytes); o++) BOOST_TEST(plan.item_bytes(o, layout()) == bytes[o]);
}

BOOST_AUTO_TEST_SUITE_END()
