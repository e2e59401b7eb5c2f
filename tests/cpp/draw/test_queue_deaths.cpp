// Learners and writers of a queue that die at each fault point: no item is lost, and none that was committed comes
// again.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>

#include "children.h"
#include "draw/batch_sampler.h"
#include "invariants.h"
#include "segments.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_queue_deaths)

namespace {

constexpr int kRows = 40, kDrawn = 4;
constexpr uint64_t kCapacity = 8;

struct Journal {
  std::array<int, kRows> written, got, done;  // by number
};

std::unique_ptr<SegmentMemory> queue(uint64_t max_draws) {
  Plan plan;
  plan.capacity = kCapacity;
  plan.view.claimed = 1;
  plan.sampler = {.queue = 1, .max_draws = max_draws};
  auto m = make_segment(plan);
  m->header().ticket_limit.store(0);
  const SegmentLock lock(*m);
  publish_limit(*m);
  return m;
}

// Writes the numbers that are not noted, as far as there is room. False: there was none.
bool write(SegmentMemory& m, int id, Journal& j, int most) {
  for (int i = 0; i < kRows && most > 0; i++) {
    if (j.written[static_cast<size_t>(i)]) continue;
    const RowMeta meta;
    int64_t key;
    uint64_t written = 0;
    const auto fill = [&](uint64_t, uint64_t slot) { fill_row(m, slot, static_cast<uint64_t>(i)); };
    if (RingWriter(m, id).append(1, &meta, &key, written, fill) != Append::kDone) return false;
    j.written[static_cast<size_t>(i)]++;
    most--;
  }
  return true;
}

// Draws a batch, of one item at least, and notes it. `held`: what came before, which is done then. False: there was
// none.
bool draw(BatchSampler& sampler, bool in_groups, Journal& j, uint64_t step, std::vector<int64_t>& held,
          std::vector<int64_t>& values) {
  std::array<int64_t, kDrawn> keys{}, numbers{};
  std::array<float, kDrawn> weight{}, probability{};
  Shortage shortage;
  const BatchPointers out{{reinterpret_cast<char*>(numbers.data())}, keys.data(), weight.data(), probability.data()};
  GroupDraw groups{.size = 1, .groups = kDrawn, .last = true};
  const DrawRules rules{.at_least = 1, .done = &held, .groups = in_groups ? &groups : nullptr};
  const Draw outcome = sampler.sample(kDrawn, 0, {7, 0, step}, out, shortage, {}, rules);
  if (held.empty())
    for (const int64_t number : std::exchange(values, {})) j.done[static_cast<size_t>(number)]++;
  if (outcome != Draw::kDone) return false;
  for (int k = 0; k < sampler.count(); k++) {
    const auto at = static_cast<size_t>(k);
    j.got[static_cast<size_t>(numbers[at])]++;
    held.push_back(keys[at]);
    values.push_back(numbers[at]);
  }
  return true;
}

// Writes and draws in turn, as one process that does both.
void live(SegmentMemory& m, bool in_groups, Journal& j, int turns) {
  const int id = join(m, Role::kWriter);
  BatchSampler sampler(m);
  std::vector<int64_t> held, values;
  for (int turn = 0; turn < turns; turn++) {
    write(m, id, j, 5);
    draw(sampler, in_groups, j, static_cast<uint64_t>(turn), held, values);
  }
  const SegmentLock lock(m);
  Claims(m).commit(held, m.presence());
  for (const int64_t number : values) j.done[static_cast<size_t>(number)]++;
}

void check_death_at(const char* point, uint64_t nth, uint64_t max_draws, bool in_groups, int& deaths, bool& died) {
  auto m = queue(max_draws);
  const Shared<Journal> journal;
  Child child([&] {
    fault::arm(point, nth);
    live(*m, in_groups, *journal, 8);
  });
  died = child.wait() == fault::kExitStatus;
  deaths += died;
  const Journal before = *journal;
  Journal& j = *journal;
  const int id = join(*m, Role::kWriter);
  BatchSampler sampler(*m);
  std::vector<int64_t> held, values;
  std::array<int, kRows> later{};
  for (int turn = 0; turn < 20 * kRows; turn++) {
    const std::array<int, kRows> got = j.got;
    bool all = write(*m, id, j, kRows);
    {  // as a waiting writer does
      SegmentLock lock(*m);
      lock.absorb();
      publish_limit(*m);
    }
    all &= !draw(sampler, in_groups, j, 100 + static_cast<uint64_t>(turn), held, values) && held.empty();
    for (size_t i = 0; i < kRows; i++) later[i] += j.got[i] - got[i];
    if (all) break;
  }
  const auto most = static_cast<int>(max_draws);
  for (size_t i = 0; i < kRows; i++) BOOST_TEST_CONTEXT("row " << i) {
      const int copies = before.written[i] ? 1 : 2;  // one that was not noted may be there, too
      BOOST_REQUIRE(j.written[i] == 1);
      BOOST_REQUIRE(j.got[i] >= most);                            // nothing is lost
      BOOST_REQUIRE(later[i] <= copies * most - before.done[i]);  // what was committed does not come again
      if (!died) BOOST_REQUIRE(j.got[i] == most);
    }
  SegmentLock lock(*m);
  BOOST_REQUIRE_EQUAL(m->header().held, 0U);
  BOOST_REQUIRE_EQUAL(m->tree().count(), 0);
  BOOST_REQUIRE_EQUAL(m->header().ticket_limit.load(), m->header().head.load() + kCapacity);  // all room is free
}

// Draws groups of two of which no second member ever comes, and which are late at once.
void drop_all(SegmentMemory& m, uint64_t step) {
  BatchSampler sampler(m);
  std::array<int64_t, 2> keys{}, numbers{};
  std::array<float, 2> weight{}, probability{};
  Shortage shortage;
  const BatchPointers out{{reinterpret_cast<char*>(numbers.data())}, keys.data(), weight.data(), probability.data()};
  GroupDraw groups{.size = 2, .timeout_ms = 0};
  BOOST_REQUIRE(sampler.sample(2, 0, {7, 0, step}, out, shortage, {}, {.groups = &groups}) == Draw::kWait);
}

bool drops_after_death_at(const char* point, uint64_t nth) {
  auto m = queue(2);
  const Shared<Journal> journal;
  Child child([&] {
    fault::arm(point, nth);
    write(*m, join(*m, Role::kWriter), *journal, 5);
    drop_all(*m, 0);
  });
  const bool died = child.wait() == fault::kExitStatus;
  drop_all(*m, 1);
  const SegmentLock lock(*m);
  BOOST_REQUIRE_EQUAL(m->header().held, 0U);
  BOOST_REQUIRE_EQUAL(m->tree().count(), 0);
  BOOST_REQUIRE_EQUAL(m->header().ticket_limit.load(), m->header().head.load() + kCapacity);
  return died;
}

std::vector<const char*> all_points() {
  std::vector<const char*> points;
  fault::Point::each([&](fault::Point& point) { points.push_back(point.name()); });
  return points;
}

}  // namespace

BOOST_AUTO_TEST_CASE(who_dies_at_a_queue_loses_and_doubles_nothing) {
  struct Way {
    uint64_t max_draws;
    bool in_groups;
  };
  for (const auto& [max_draws, in_groups] : {Way{1, false}, Way{2, false}, Way{1, true}}) {
    int deaths = 0;
    for (const char* point : all_points())
      for (uint64_t nth = 1;; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time, " << max_draws) {
          bool died = false;
          check_death_at(point, nth, max_draws, in_groups, deaths, died);
          if (!died) break;
        }
    BOOST_TEST(deaths > 200);
    BOOST_TEST_MESSAGE(deaths << " deaths");
  }
}

BOOST_AUTO_TEST_CASE(a_late_group_is_dropped_by_who_comes_after_one_that_died_in_it) {
  int deaths = 0;
  for (const char* point : all_points())
    for (uint64_t nth = 1;; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        if (!drops_after_death_at(point, nth)) break;
        deaths++;
      }
  BOOST_TEST(deaths > 50);
}

BOOST_AUTO_TEST_SUITE_END()
