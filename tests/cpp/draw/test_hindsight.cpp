#include <boost/test/unit_test.hpp>
#include <cmath>
#include <map>

#include "batches.h"
#include "explorers.h"
#include "invariants.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_hindsight)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;

constexpr int64_t kDesired = 1'000'000;

// Achieved is 100 times the episode plus the step; desired is the episode's number above a million.
enum : uint32_t { kAchieved, kGoal };

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = whole_episodes();
  plan.sampler = {};
  plan.fields = {{Element::kI64, 8}, {Element::kI64, 8}};
  return make_segment(plan);
}

void write_episode(SegmentMemory& m, Explorer& a, int64_t number, uint32_t steps) {
  for (uint32_t i = 0; i <= steps; i++) {
    auto fill = [&](uint64_t slot) {
      const int64_t achieved = 100 * number + i, desired = kDesired + number;
      copy_payload(m.value(m.layout().fields[kAchieved], slot), &achieved, 8);
      copy_payload(m.value(m.layout().fields[kGoal], slot), &desired, 8);
    };
    if (i == 0)
      a.reset(fill);
    else
      a.step(i == steps ? kTruncated : 0, {}, fill);
  }
}

// Outputs of the plan.
enum : size_t { kFrom, kWanted, kTo, kNextWanted, kIsRelabelled };

ItemPlan relabelling(Goal goal, double share) {
  return {{{Kind::kAnchor, kAchieved},
           {Kind::kGoal, kGoal, 0, 1, kAchieved},
           {Kind::kAnchor, kAchieved, 1},
           {Kind::kGoal, kGoal, 1, 1, kAchieved},
           {Kind::kRelabelled}},
          1,
          0.9,
          goal,
          share};
}

constexpr int kBatch = 64;

// Goals by the anchor's observation, over many batches; what every item must have is checked on the way.
std::map<int64_t, std::map<int64_t, int>> goals_of(SegmentMemory& m, const ItemPlan& plan, int batches) {
  std::map<int64_t, std::map<int64_t, int>> counts;
  for (int step = 0; step < batches; step++) {
    const Items b = draw(m, plan, kBatch, {7, 0, static_cast<uint64_t>(step)});
    BOOST_REQUIRE(b.outcome == Draw::kDone);
    const auto from = b.of<int64_t>(kFrom), to = b.of<int64_t>(kTo), goal = b.of<int64_t>(kWanted);
    const auto relabelled = b.of<uint8_t>(kIsRelabelled);
    BOOST_REQUIRE((goal == b.of<int64_t>(kNextWanted)));
    for (int i = 0; i < kBatch; i++) {
      BOOST_REQUIRE(to[i] == from[i] + 1);
      if (relabelled[i])
        counts[from[i]][goal[i]]++;
      else
        BOOST_REQUIRE(goal[i] == kDesired + from[i] / 100);
    }
  }
  return counts;
}

// Whether `counts` are uniform over the integers from `low` to `high`. Chi-square at 6 sigma of its normal
// approximation: a false alarm in about 10^6 tests of a few degrees of freedom; the seeds are fixed.
void check_uniform(const std::map<int64_t, int>& counts, int64_t low, int64_t high) {
  double n = 0, chi = 0;
  for (auto [goal, count] : counts) {
    BOOST_TEST(goal >= low);
    BOOST_TEST(goal <= high);
    n += count;
  }
  const double each = n / static_cast<double>(high - low + 1), freedom = std::max(1.0, static_cast<double>(high - low));
  BOOST_TEST(each > 20);
  for (int64_t goal = low; goal <= high; goal++) {
    const double count = counts.contains(goal) ? counts.at(goal) : 0;
    chi += (count - each) * (count - each) / each;
  }
  BOOST_TEST(chi < freedom + 6 * std::sqrt(2 * freedom) + 6);
}

}  // namespace

BOOST_AUTO_TEST_CASE(future_goals_are_uniform_among_the_rows_after_the_anchor) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 1);
  write_episode(*m, a, 2, 12);
  write_episode(*m, a, 3, 7);
  const auto goals = goals_of(*m, relabelling(Goal::kFuture, 1), 200);
  BOOST_TEST(goals.size() == 20U);
  for (const auto& [from, counts] : goals) {
    const int64_t end = from / 100 == 1 ? 101 : from / 100 == 2 ? 212 : 307;
    check_uniform(counts, from + 1, end);
  }
}

BOOST_AUTO_TEST_CASE(the_final_goal_is_that_of_the_last_row) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 9);
  write_episode(*m, a, 2, 4);
  for (const auto& [from, counts] : goals_of(*m, relabelling(Goal::kFinal, 1), 20)) {
    BOOST_TEST(counts.size() == 1U);
    BOOST_TEST(counts.begin()->first == (from / 100 == 1 ? 109 : 204));
  }
}

BOOST_AUTO_TEST_CASE(goals_of_the_episode_are_uniform_among_its_steps) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 10);
  write_episode(*m, a, 2, 3);
  const auto goals = goals_of(*m, relabelling(Goal::kEpisode, 1), 150);
  BOOST_TEST(goals.size() == 13U);
  for (const auto& [from, counts] : goals) check_uniform(counts, from / 100 * 100 + 1, from / 100 == 1 ? 110 : 203);
}

BOOST_AUTO_TEST_CASE(of_an_episode_that_is_being_overwritten_the_steps_still_held_give_goals) {
  auto m = ring_of(12);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 15);  // steps 4 to 15 are held
  const auto goals = goals_of(*m, relabelling(Goal::kEpisode, 1), 100);
  BOOST_TEST(goals.size() == 11U);
  for (const auto& [from, counts] : goals) check_uniform(counts, 104, 115);
}

// 6,400 items: the bound is 5 sigma of the binomial distribution, a false alarm in about 10^6 runs.
BOOST_AUTO_TEST_CASE(the_share_of_items_is_relabelled) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 20);
  for (double share : {0.0, 0.1, 0.8, 1.0}) {
    int relabelled = 0;
    for (const auto& [from, counts] : goals_of(*m, relabelling(Goal::kFuture, share), 100))
      for (auto [goal, count] : counts) relabelled += count;
    const double n = 100.0 * kBatch;
    BOOST_TEST(std::fabs(relabelled - share * n) <= 5 * std::sqrt(share * (1 - share) * n));
  }
}

BOOST_AUTO_TEST_CASE(items_asked_for_by_key_are_as_recorded) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 20);
  const ItemPlan plan = relabelling(Goal::kFuture, 1);
  const Items b = gather(*m, plan, {3, 4});
  BOOST_TEST(b.of<int64_t>(kWanted) == (std::vector<int64_t>{kDesired + 1, kDesired + 1}),
             boost::test_tools::per_element());
  BOOST_TEST(b.of<uint8_t>(kIsRelabelled) == (std::vector<uint8_t>{0, 0}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(the_same_draw_has_the_same_goals_and_the_goals_do_not_follow_the_anchors) {
  auto m = ring_of(64);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 40);
  const ItemPlan plan = relabelling(Goal::kFuture, 0.8), other = relabelling(Goal::kFinal, 0.8);
  const Items first = draw(*m, plan, kBatch), again = draw(*m, plan, kBatch), final_goals = draw(*m, other, kBatch);
  BOOST_TEST((first.values == again.values));
  BOOST_TEST(first.keys == final_goals.keys, boost::test_tools::per_element());
  BOOST_TEST((first.of<int64_t>(kWanted) != draw(*m, plan, kBatch, {7, 0, 1}).of<int64_t>(kWanted)));
}

BOOST_AUTO_TEST_CASE(an_item_whose_episodes_end_cannot_be_found_is_not_copied) {
  auto m = ring_of(16);
  Explorer a(*m, 1);
  write_episode(*m, a, 1, 6);
  settle(*m);
  const ItemPlan plan = relabelling(Goal::kFuture, 1);
  const std::vector<DrawnItem> items = {{1, 2, 1, 6, 1, 6, 0}, {4, 5, 1, 6, 1, 6, 0}};
  SteppedWriter(*m, 2).take_ticket();
  m->row(3).word.store(slot_word::busy(19, 2));  // behind the first item's rows, before the second's
  Room room(*m, plan, 2, 0);
  std::vector<int> todo = {0, 1};
  ItemGather(*m, plan).gather(items, todo, room.pointers());
  BOOST_TEST(todo == std::vector<int>{0}, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
