#include <boost/test/unit_test.hpp>
#include <map>
#include <numeric>

#include "batches.h"
#include "invariants.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_epochs)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

Plan plan_of(uint64_t capacity) {
  Plan plan;
  plan.capacity = capacity;
  plan.sampler = {.epochs = 1};
  return plan;
}

std::unique_ptr<SegmentMemory> filled(uint64_t rows, uint64_t capacity = 0) {
  auto m = make_segment(plan_of(capacity ? capacity : rows));
  for (uint64_t i = 0; i < rows; i++) append_row(*m, 1, i);
  return m;
}

// One learner, whose draws have names in turn.
class Drawer {
 public:
  explicit Drawer(SegmentMemory& m, uint64_t seed = 7) : sampler_(m), seed_(seed) {}

  // Keys, whose rows have the same values; sets `outcome`.
  std::vector<int64_t> draw(int n, const DrawRules& rules = {}) {
    std::vector<int64_t> keys(static_cast<size_t>(n)), values(keys.size());
    std::vector<float> weight(keys.size()), probability(keys.size());
    Shortage shortage;
    outcome =
        sampler_.sample(n, 0.5, {seed_, 0, step_++},
                        {{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()},
                        shortage, {}, rules);
    const int count = outcome == Draw::kDone ? sampler_.count() : 0;
    for (auto* of : {&keys, &values}) of->resize(static_cast<size_t>(count));
    BOOST_TEST(keys == values);
    for (int i = 0; i < count; i++) BOOST_TEST(weight[static_cast<size_t>(i)] == 1);
    return keys;
  }

  Draw outcome = Draw::kDone;

 private:
  BatchSampler sampler_;
  uint64_t seed_, step_ = 0;
};

size_t distinct(std::vector<int64_t> keys) {
  std::ranges::sort(keys);
  return static_cast<size_t>(std::ranges::unique(keys).begin() - keys.begin());
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_item_is_drawn_once_before_any_is_drawn_again) {
  for (const auto& [items, n] : {std::pair{1, 1}, {1, 3}, {7, 3}, {10, 32}, {100, 7}, {300, 299}, {1000, 256}}) {
    auto m = filled(static_cast<uint64_t>(items));
    Drawer drawer(*m);
    std::vector<int> drawn(static_cast<size_t>(items));
    for (int total = 0; total < 9 * items;) {
      const std::vector<int64_t> keys = drawer.draw(n);
      BOOST_REQUIRE_EQUAL(keys.size(), static_cast<size_t>(n));
      BOOST_TEST(distinct(keys) == static_cast<size_t>(std::min(n, items)));
      for (const int64_t key : keys) drawn[static_cast<size_t>(key)]++;
      total += n;
      const auto [least, most] = std::ranges::minmax(drawn);
      BOOST_TEST(least == total / items);
      BOOST_TEST(most == (total + items - 1) / items);
      BOOST_TEST(Epochs(*m).due() == static_cast<uint64_t>((items - total % items) % items));
    }
    BOOST_TEST(violation(*m) == "");
  }
}

BOOST_AUTO_TEST_CASE(each_item_is_as_likely_as_any_other_at_each_place_of_an_epoch) {
  constexpr int kItems = 7, kDraws = 6000;  // batches of 3, 3 and 1
  std::array<std::array<int, kItems>, 3> times{};
  for (int seed = 0; seed < kDraws; seed++) {
    auto m = filled(kItems);
    Drawer drawer(*m, static_cast<uint64_t>(seed));
    for (auto& of : times)
      for (const int64_t key : drawer.draw(3, {.last_epoch = 0})) of[static_cast<size_t>(key)]++;
  }
  for (size_t batch = 0; batch < 3; batch++) {
    const double p = (batch < 2 ? 3.0 : 1.0) / kItems, sigma = std::sqrt(kDraws * p * (1 - p));
    for (const int n : times[batch]) BOOST_TEST(std::abs(n - kDraws * p) < 5 * sigma, batch << ": " << n);
  }
}

BOOST_AUTO_TEST_CASE(an_item_that_comes_is_drawn_in_the_epoch_under_way) {
  auto m = filled(20, 100);
  Drawer drawer(*m);
  std::map<int64_t, int> drawn;
  const auto draw = [&](int n) {
    for (const int64_t key : drawer.draw(n, {.last_epoch = 0})) drawn[key]++;
  };
  draw(15);
  for (uint64_t i = 20; i < 30; i++) append_row(*m, 1, i);
  settle(*m);
  BOOST_TEST(Epochs(*m).due() == 15U);
  draw(15);
  BOOST_TEST(drawn.size() == 30U);
  for (uint64_t i = 30; i < 100; i++) append_row(*m, 1, i);
  draw(70);
  BOOST_TEST(drawn.size() == 100U);
  draw(1);
  BOOST_TEST((drawer.outcome == Draw::kEpochOver));
}

BOOST_AUTO_TEST_CASE(rows_that_take_the_place_of_others_are_due_and_those_are_not) {
  auto m = filled(10);
  Drawer drawer(*m);
  BOOST_TEST(drawer.draw(8, {.last_epoch = 0}).size() == 8U);
  for (uint64_t i = 10; i < 15; i++) append_row(*m, 1, i);
  std::vector<int64_t> left;
  for (;;) {
    const std::vector<int64_t> keys = drawer.draw(4, {.last_epoch = 0});
    if (drawer.outcome != Draw::kDone) break;
    left.insert(left.end(), keys.begin(), keys.end());
  }
  BOOST_TEST(distinct(left) == left.size());
  for (int64_t key = 10; key < 15; key++) BOOST_TEST(std::ranges::count(left, key) == 1);
  for (const int64_t key : left) BOOST_TEST(key >= 5);
}

BOOST_AUTO_TEST_CASE(with_a_last_epoch_batches_end_with_epochs_and_then_there_is_none) {
  auto m = filled(10);
  Drawer drawer(*m);
  std::vector<size_t> sizes;
  for (;;) {
    sizes.push_back(drawer.draw(4, {.last_epoch = 1}).size());
    if (drawer.outcome != Draw::kDone) break;
  }
  BOOST_TEST(sizes == (std::vector<size_t>{4, 4, 2, 4, 4, 2, 0}));
  BOOST_TEST((drawer.outcome == Draw::kEpochOver));
  const Header& h = m->header();
  BOOST_TEST(h.draws.load() == 6U);
  BOOST_TEST(h.sampled.load() == 20U);
  BOOST_TEST(drawer.draw(4).size() == 4U);  // others go on
  BOOST_TEST(drawer.draw(4, {.last_epoch = 1}).empty());
}

BOOST_AUTO_TEST_CASE(a_draw_that_may_begin_no_epoch_takes_what_is_due_and_changes_nothing_else) {
  auto m = filled(10);
  Drawer drawer(*m);
  BOOST_TEST(drawer.draw(8, {.may_begin_epoch = false}).size() == 8U);
  for (const uint64_t last : {kNever, uint64_t{1}}) {
    BOOST_TEST(drawer.draw(last == kNever ? 4 : 2, {.last_epoch = last, .may_begin_epoch = false}).size() ==
               (last == kNever ? 0U : 2U));
    if (last == kNever) BOOST_TEST((drawer.outcome == Draw::kEpochEnds));
  }
  BOOST_TEST(drawer.draw(4, {.last_epoch = 1, .may_begin_epoch = false}).empty());
  BOOST_TEST((drawer.outcome == Draw::kEpochEnds));
  BOOST_TEST(Epochs(*m).ended() == 0U);
  BOOST_TEST(m->header().draws.load() == 2U);
}

BOOST_AUTO_TEST_CASE(what_a_draw_has_taken_that_does_not_come_to_its_end_is_due) {
  auto m = filled(10);
  m->header().stopped.store(0);
  settle(*m);
  // A writer takes the slots of rows while they are copied, and never finishes: those cannot be drawn.
  std::vector<std::unique_ptr<SteppedWriter>> writers;
  for (int id = 2; id < 12; id++) {
    writers.push_back(std::make_unique<SteppedWriter>(*m, id));
    m->header().absorbed = writers.back()->take_ticket() + 1;
    if (id < 7) writers.back()->seize();
  }
  Drawer drawer(*m);
  std::vector<int64_t> keys;
  for (int i = 0; i < 5; i++)
    for (const int64_t key : drawer.draw(2, {.last_epoch = 0})) keys.push_back(key);
  std::ranges::sort(keys);
  BOOST_TEST(keys == (std::vector<int64_t>{5, 6, 7, 8, 9}));
}

BOOST_AUTO_TEST_CASE(keys_are_given_back_to_the_epoch_that_drew_them_and_to_no_other) {
  auto m = filled(10);
  Drawer drawer(*m);
  const std::vector<int64_t> keys = drawer.draw(4);
  Epochs epochs(*m);
  epochs.give_back_keys(1, keys);
  BOOST_TEST(epochs.due() == 6U);
  epochs.give_back_keys(0, keys);
  BOOST_TEST(epochs.due() == 10U);
  epochs.give_back_keys(0, keys);
  BOOST_TEST(epochs.due() == 10U);
  drawer.draw(4);
  m->header().epochs = 2;
  epochs.give_back_keys(0, drawer.draw(2));
  BOOST_TEST(epochs.due() == 4U);
}

BOOST_AUTO_TEST_SUITE_END()
