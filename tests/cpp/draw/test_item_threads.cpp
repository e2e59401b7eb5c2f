#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <random>
#include <thread>

#include "batches.h"
#include "invariants.h"
#include "segments.h"
#include "views.h"
#include "write/lanes.h"

BOOST_AUTO_TEST_SUITE(test_item_threads)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;

constexpr uint32_t kLanes = 3;
constexpr uint64_t kLarge = kOwnArrayBytes / 8;

// Where a row stands: what all its values say.
struct Place {
  uint16_t writer, lane;
  uint16_t episode, step;

  bool same_episode(const Place& other) const {
    return writer == other.writer && lane == other.lane && episode == other.episode;
  }
  bool operator==(const Place&) const = default;
};
static_assert(sizeof(Place) == 8);

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.fields = {{Element::kI64, 8}, {Element::kI64, 8 * kLarge}};
  return make_segment(plan);
}

// Steps a vector environment whose episodes end at random, `steps` times.
void explore(SegmentMemory& m, int id, int steps) {
  struct Rows {
    Lanes& lanes;
    RowMeta meta(uint64_t i) const { return lanes.meta(i, {}); }
    void commit(uint64_t i, uint64_t key) const { lanes.commit(i, key); }
  };
  std::mt19937 random(static_cast<unsigned>(id));
  Lanes lanes(kLanes, true, id % 2 ? Autoreset::kNextStep : Autoreset::kSameStep);
  Place place[kLanes];
  for (uint16_t i = 0; i < kLanes; i++) place[i] = {static_cast<uint16_t>(id), i, 0, 0};
  auto fill = [&](uint64_t i, uint64_t slot) {
    const StreamRow& row = lanes.rows()[i];
    Place& p = place[row.lane];
    p.episode += row.kind == StreamRow::Kind::kReset;
    p.step = row.kind == StreamRow::Kind::kReset ? 0 : p.step + 1;
    fill_row(m, slot, std::bit_cast<uint64_t>(p));
  };
  int64_t keys[2 * kLanes];
  const uint8_t terminated[kLanes] = {};
  uint8_t truncated[kLanes] = {};
  lanes.plan_reset(nullptr);
  for (int t = 0; t < steps; t++) {
    uint64_t written = 0;
    if (RingWriter(m, id).append(lanes.rows().size(), Rows{lanes}, keys, written, fill) != Append::kDone) break;
    for (uint8_t& flag : truncated) flag = !flag && random() % 6 == 0;  // the step after an end has no flag
    lanes.plan_steps(1, terminated, truncated, true, false);
  }
}

// The place that a row's values in the small and in the large field agree on; nothing when they do not.
std::optional<Place> place_of(const int64_t* small, const int64_t* large) {
  for (uint64_t i = 0; i < kLarge; i++)
    if (large[i] != *small) return {};
  return std::bit_cast<Place>(*small);
}

// An item's rows from both fields, as far as it has any.
std::vector<Place> places(const Items& b, size_t output, int i, uint32_t rows) {
  const auto* small = reinterpret_cast<const int64_t*>(b.values[output].data()) + static_cast<size_t>(i) * rows;
  const auto* large =
      reinterpret_cast<const int64_t*>(b.values[output + 1].data()) + static_cast<size_t>(i) * rows * kLarge;
  std::vector<Place> p;
  for (uint32_t k = 0; k < rows; k++) {
    const auto place = place_of(small + k, large + k * kLarge);
    if (!place) return {};
    p.push_back(*place);
  }
  return p;
}

using Check = std::function<bool(const Items&, int)>;

// Draws while two explorers turn the ring as fast as they can. The number of items that are not whole.
void play(const View& view, const ItemPlan& plan, const Check& whole) {
  for (uint64_t capacity : {40, 400}) {
    auto m = ring_of(capacity, view);
    std::atomic<int> exploring{2}, torn{0}, drawn{0};
    std::vector<std::thread> threads;
    for (int id : {1, 2})
      threads.emplace_back([&, id] {
        explore(*m, id, 6000);
        exploring--;
      });
    auto learn = [&](uint32_t stream) {
      constexpr int kBatch = 4;
      for (uint64_t step = 0; step < 4000; step++) {
        const bool last = exploring.load() == 0;
        const Items b = draw(*m, plan, kBatch, {7, stream, step});
        if (b.outcome == Draw::kDone) drawn += kBatch;
        for (int i = 0; i < kBatch && b.outcome == Draw::kDone; i++) torn += !whole(b, i);
        if (last) break;
      }
    };
    threads.emplace_back(learn, 1);
    learn(0);
    for (std::thread& t : threads) t.join();
    learn(2);
    BOOST_TEST(torn == 0);
    BOOST_TEST(drawn > 0);
    BOOST_TEST_MESSAGE(drawn << " items drawn, " << m->header().redraws.load() << " drawn again");
    settle(*m);
    BOOST_TEST(violation(*m) == "");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(n_step_transitions_never_tear_nor_mix_episodes) {
  const ItemPlan plan{
      {{Kind::kAnchor, 0, -3, 4}, {Kind::kAnchor, 1, -3, 4}, {Kind::kEnd, 0}, {Kind::kEnd, 1}, {Kind::kDiscount}},
      3,
      0.5};
  play(transitions(3, 4), plan, [](const Items& b, int i) {
    const auto stack = places(b, 0, i, 4), end = places(b, 2, i, 1);
    if (stack.empty() || end.empty()) return false;
    const Place& anchor = stack[3];
    for (int k = 0; k < 4; k++)
      if (!stack[k].same_episode(anchor) || stack[k].step != std::max(anchor.step - 3 + k, 0)) return false;
    const double steps = -std::log2(b.of<float>(4)[i]);  // every end truncates
    return end[0].same_episode(anchor) && end[0].step == anchor.step + steps;
  });
}

BOOST_AUTO_TEST_CASE(sequences_never_tear_nor_mix_episodes) {
  constexpr uint32_t kSteps = 5;
  const ItemPlan plan{
      {{Kind::kAnchor, 0, 0, kSteps + 1}, {Kind::kAnchor, 1, 0, kSteps + 1}, {Kind::kMask, 0, 0, kSteps}}, kSteps};
  play(sequences(4, 2, 1), plan, [](const Items& b, int i) {
    const auto rows = places(b, 0, i, kSteps + 1);
    if (rows.empty() || rows[0].step % 2) return false;
    for (uint32_t k = 1; k <= kSteps; k++) {
      const bool real = b.values[2][static_cast<size_t>(i) * kSteps + k - 1];
      if (real != (rows[k] != Place{}) || (k <= 2 && !real)) return false;
      if (real && (!rows[k].same_episode(rows[0]) || rows[k].step != rows[0].step + k)) return false;
    }
    return true;
  });
}

BOOST_AUTO_TEST_CASE(windows_across_episodes_never_tear_nor_skip_a_row) {
  constexpr uint32_t kSteps = 5;
  const ItemPlan plan{
      {{Kind::kAnchor, 0, 0, kSteps + 1}, {Kind::kAnchor, 1, 0, kSteps + 1}, {Kind::kFirst, 0, 0, kSteps}}, kSteps};
  play(across_episodes(kSteps), plan, [](const Items& b, int i) {
    const auto rows = places(b, 0, i, kSteps + 1);
    if (rows.empty()) return false;
    for (uint32_t k = 0; k < kSteps; k++) {
      const Place &now = rows[k], &after = rows[k + 1];
      if (static_cast<bool>(b.values[2][static_cast<size_t>(i) * kSteps + k]) != (now.step == 0)) return false;
      const bool next = after.same_episode(now) && after.step == now.step + 1;
      const bool reset =
          after.writer == now.writer && after.lane == now.lane && after.step == 0 && after.episode == now.episode + 1;
      if (!next && !reset) return false;
    }
    return true;
  });
}

BOOST_AUTO_TEST_CASE(goals_come_from_the_items_own_episode) {
  const ItemPlan plan{{{Kind::kAnchor, 0, 0, 2},
                       {Kind::kAnchor, 1, 0, 2},
                       {Kind::kGoal, 0, 0, 1, 0},
                       {Kind::kGoal, 1, 0, 1, 1},
                       {Kind::kRelabelled}},
                      1,
                      0.9,
                      Goal::kFuture,
                      0.8};
  play(whole_episodes(), plan, [](const Items& b, int i) {
    const auto rows = places(b, 0, i, 2), goal = places(b, 2, i, 1);
    if (rows.empty() || goal.empty() || !rows[1].same_episode(rows[0]) || rows[1].step != rows[0].step + 1)
      return false;
    return b.values[4][static_cast<size_t>(i)] ? goal[0].same_episode(rows[0]) && goal[0].step > rows[0].step
                                               : goal[0] == rows[0];
  });
}

BOOST_AUTO_TEST_SUITE_END()
