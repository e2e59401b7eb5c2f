// Keys and steps that no test reaches by counting: what happens near 2^31, 2^32 and 2^47 is what happens elsewhere.
#include <boost/test/unit_test.hpp>

#include "batches.h"
#include "crowd.h"
#include "draw/priority_updater.h"
#include "invariants.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_counters)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr uint64_t kCapacity = 32;
constexpr uint64_t kBoundaries[] = {uint64_t{1} << 31, uint64_t{1} << 32, kMaxKeys};
constexpr uint64_t kBefore = 8 * kCapacity;  // keys that are issued below a boundary

// A segment all of whose tickets below `start` were lost.
std::unique_ptr<SegmentMemory> started_at(uint64_t start, const View& view = {}) {
  Plan plan;
  plan.capacity = kCapacity;
  plan.view = view;
  auto m = make_segment(plan);
  m->header().head.store(start);
  return m;
}

ItemPlan plan_of(const View& view) {
  ItemPlan plan;
  plan.outputs = {{Output::Kind::kAnchor, 0, 0, 1, 0}};
  plan.steps = view.span == View::kWholeEpisode ? 1 : view.span;
  return plan;
}

// Everything that follows from a history, with keys counted from `start`.
struct Outcome {
  std::vector<int64_t> drawn;
  std::vector<float> leaves, weights;
  std::vector<std::pair<uint32_t, uint32_t>> links;
  uint64_t inserted, updated, stale, head;
  bool operator==(const Outcome&) const = default;
};

// Explorers write, lag and die, a learner draws and updates, until the ring has turned `turns` times.
Outcome live(SegmentMemory& m, uint64_t start, uint64_t turns) {
  const View& view = m.layout().view;
  Crowd crowd(m, 3, 1);
  Outcome o{};
  for (uint64_t step = 0; m.header().head.load() < start + turns * kCapacity; step++) {
    for (int i = 0; i < 20; i++) crowd.move();
    settle(m);
    if (m.tree().count() == 0) continue;
    const Items items = draw(m, plan_of(view), 8, {7, 0, step});
    BOOST_REQUIRE((items.outcome == Draw::kDone));
    std::vector<double> td(8);
    for (int i = 0; i < 8; i++) td[i] = static_cast<double>((step * 8 + i) % 13) / 4;
    BOOST_REQUIRE(!PriorityUpdater(m).update(8, items.keys.data(), td.data()));
    for (int64_t key : items.keys) o.drawn.push_back(key - static_cast<int64_t>(start));
    o.weights.insert(o.weights.end(), items.weight.begin(), items.weight.end());
    const std::string v = violation(m);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }
  for (uint64_t s = 0; s < kCapacity; s++) {
    o.leaves.push_back(m.tree().leaf(static_cast<int64_t>(s)));
    o.links.emplace_back(m.links(s).prev.load(), m.links(s).next.load());
  }
  const Header& h = m.header();
  o.inserted = h.inserted, o.updated = h.updated, o.stale = h.stale_updates, o.head = h.head.load() - start;
  return o;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_history_does_not_depend_on_the_key_that_it_starts_with) {
  for (const View& view : {transitions(2, 3), sequences(2, 2, 1), across_episodes(3), whole_episodes()}) {
    constexpr uint64_t kStart = 4 * kCapacity;
    const Outcome expected = live(*started_at(kStart, view), kStart, 16);
    BOOST_TEST(expected.inserted > 0U);
    BOOST_TEST(expected.updated > 100U);
    for (uint64_t boundary : kBoundaries) {
      const uint64_t start = boundary - kBefore;
      BOOST_TEST((live(*started_at(start, view), start, 16) == expected), "at " << boundary);
    }
  }
}

// A stream whose episode has no end, written twice: with steps that come to the end of 32 bits, and with small ones
// that have the same remainder.
BOOST_AUTO_TEST_CASE(an_episode_goes_on_when_its_steps_have_filled_32_bits) {
  constexpr uint64_t kFull = uint64_t{1} << 32;
  for (const View& view : {transitions(2, 3), sequences(4, 3, 2), sequences(2, 7), transitions(1)}) {
    const uint64_t start = kFull - 40, base = 1000 * view.stride + start % view.stride;
    auto large = started_at(kCapacity, view), small = started_at(kCapacity, view);
    RowMeta a{kFirst, static_cast<uint32_t>(start), 0}, b{kFirst, static_cast<uint32_t>(base), 0};
    for (uint64_t row = 1; row < 80; row++) {
      Explorer(*large, 1).write(a);
      const uint64_t key = Explorer(*small, 1).write(b);
      settle(*large);
      settle(*small);
      for (int64_t s = 0; s < static_cast<int64_t>(kCapacity); s++)
        BOOST_REQUIRE_MESSAGE((large->tree().leaf(s) > 0) == (small->tree().leaf(s) > 0), "row " << row);
      a = {(key + 1) << 16, view.step_after(a.step), 0};
      b = {(key + 1) << 16, static_cast<uint32_t>(base + row), 0};
      BOOST_REQUIRE(a.step >= uint32_t{1} << 31);
    }
    BOOST_TEST(small->tree().count() > 0);
    std::vector<int64_t> keys;
    for (uint64_t s = 0; s < kCapacity; s++)
      if (small->at(s)) keys.push_back(static_cast<int64_t>(small->at(s)) - 1);
    const Items expected = gather(*small, plan_of(view), keys), found = gather(*large, plan_of(view), keys);
    BOOST_TEST(found.keys == expected.keys, boost::test_tools::per_element());
    BOOST_TEST(found.keys.size() == static_cast<size_t>(small->tree().count()));
  }
}

BOOST_AUTO_TEST_CASE(an_ordinary_step_is_followed_by_the_next) {
  for (uint32_t step : {0U, 1U, (1U << 31) - 1, 1U << 31, ~0U - 1})
    BOOST_TEST(transitions(1).step_after(step) == step + 1);
}

BOOST_AUTO_TEST_CASE(when_all_keys_are_issued_writers_are_told_and_what_is_there_can_be_drawn) {
  for (double ratio : {0.0, 1.0}) {
    auto m = started_at(kMaxKeys - 3);
    m->header().limiters[0] = {1, ratio, -1e18, 1e18};
    settle(*m);
    publish_limit(*m);
    for (uint64_t i = 0; i < 3; i++) BOOST_TEST(append_row(*m, 1, i) == kMaxKeys - 3 + i);
    const RowMeta meta;
    int64_t key = -1;
    uint64_t written = 0;
    auto fill = [](uint64_t, uint64_t) { BOOST_ERROR("a row was written"); };
    BOOST_TEST((RingWriter(*m, 1).append(1, &meta, &key, written, fill) == Append::kSpent));
    BOOST_TEST(written == 0U);
    settle(*m);
    BOOST_TEST(violation(*m) == "");
    BOOST_TEST(m->tree().count() == 3);
  }
}

// Those who look at the limit at the same time all take tickets beyond it.
BOOST_AUTO_TEST_CASE(keys_just_beyond_the_last_are_as_good_as_any) {
  const uint64_t last = kMaxKeys + kMaxParticipants * kMaxChunk;
  BOOST_TEST(slot_word::key1(slot_word::busy(last, kMaxParticipants)) == last + 1);
  BOOST_TEST(((last + 1) << 16) >> 16 == last + 1);
}

BOOST_AUTO_TEST_SUITE_END()
