// Learners that die at each fault point of a draw without replacement: no item comes twice before others come once.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>
#include <numeric>

#include "children.h"
#include "draw/batch_sampler.h"
#include "invariants.h"
#include "segments.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_epoch_deaths)

namespace {

constexpr int kItems = 20, kDrawn = 8;

std::unique_ptr<SegmentMemory> filled() {
  Plan plan;
  plan.capacity = kItems;
  plan.sampler = {.epochs = 1};
  auto m = make_segment(plan);
  for (uint64_t i = 0; i < kItems; i++) append_row(*m, 1, i);
  settle(*m);
  return m;
}

// Draws three batches, the last of which takes some of the next epoch.
void draw(SegmentMemory& m, std::array<int, kItems>& got, uint64_t step, int batches, const DrawRules& rules = {}) {
  BatchSampler sampler(m);
  for (int i = 0; i < batches; i++) {
    std::array<int64_t, kDrawn> keys{}, values{};
    std::array<float, kDrawn> weight{}, probability{};
    Shortage shortage;
    const BatchPointers out{{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()};
    if (sampler.sample(kDrawn, 0, {7, 0, step + static_cast<uint64_t>(i)}, out, shortage, {}, rules) != Draw::kDone)
      return;
    for (int k = 0; k < sampler.count(); k++) got[static_cast<size_t>(keys[static_cast<size_t>(k)])]++;
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(who_dies_in_a_draw_without_replacement_makes_no_item_come_twice_before_others_came_once) {
  std::vector<const char*> points;
  fault::Point::each([&](fault::Point& point) { points.push_back(point.name()); });
  int deaths = 0;
  for (const char* point : points)
    for (uint64_t nth = 1;; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        auto m = filled();
        const Shared<std::array<int, kItems>> got;
        Child child([&] {
          fault::arm(point, nth);
          draw(*m, *got, 0, 3);
        });
        const bool died = child.wait() == fault::kExitStatus;
        settle(*m);
        BOOST_REQUIRE_EQUAL(violation(*m), "");
        const Epochs epochs(*m);
        BOOST_REQUIRE(epochs.ended() <= 1);
        std::array<int, kItems> left{};
        const auto due = static_cast<int>(epochs.due());
        draw(*m, left, 100, 10, {.last_epoch = epochs.ended()});
        int lost = 0;
        for (size_t i = 0; i < kItems; i++) {
          const int owed = static_cast<int>(epochs.ended()) + 1 - left[i] - (*got)[i];
          BOOST_REQUIRE(left[i] <= 1);
          BOOST_REQUIRE(owed >= 0);
          BOOST_REQUIRE(owed <= 2);
          lost += owed;
        }
        BOOST_REQUIRE_EQUAL(std::accumulate(left.begin(), left.end(), 0), due);
        BOOST_REQUIRE(lost <= 2 * kDrawn);
        if (!died) BOOST_REQUIRE_EQUAL(lost, 0);
        std::array<int, kItems> whole{};
        draw(*m, whole, 200, 10, {.last_epoch = epochs.ended() + 1});
        for (const int n : whole) BOOST_REQUIRE_EQUAL(n, 1);
        deaths += died;
        if (!died) break;
      }
  BOOST_TEST(deaths > 60);
}

BOOST_AUTO_TEST_SUITE_END()
