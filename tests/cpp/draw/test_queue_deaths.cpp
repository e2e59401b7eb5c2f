// Learners and writers of a queue that die at each fault point: no item is lost, and none that was committed comes
// again. So it is where rows have values of any length, which are never torn.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>
#include <set>

#include "children.h"
#include "draw/batch_sampler.h"
#include "invariants.h"
#include "ragged.h"
#include "segments.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_queue_deaths)

namespace {

constexpr int kRows = 40, kDrawn = 4;
constexpr uint64_t kCapacity = 8, kPages = 16;
constexpr uint32_t kMost = 30;  // elements of a value: a row takes up to a quarter of the pages

// How a queue is drawn from.
struct Way {
  uint64_t max_draws = 1;
  bool ragged = false, in_groups = false;
};

struct Journal {
  std::array<int, kRows> written, got, done;  // by number
};

std::unique_ptr<SegmentMemory> queue(Way way) {
  Plan plan = way.ragged ? ragged_plan(kCapacity, kPages * 64) : Plan{};
  plan.capacity = kCapacity;
  plan.view.claimed = 1;
  plan.sampler = {.queue = 1, .max_draws = way.max_draws};
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
    const auto number = static_cast<uint64_t>(i);
    RaggedFill values(m, number, 1, kMost);
    const auto fill = [&](uint64_t, uint64_t slot) { fill_row(m, slot, number); };
    RingWriter ring(m, id);
    const Append outcome =
        m.has_pages() ? ring.append(1, &meta, &key, written, values) : ring.append(1, &meta, &key, written, fill);
    if (outcome != Append::kDone) return false;
    j.written[static_cast<size_t>(i)]++;
    most--;
  }
  return true;
}

// Whether each item of a batch has the values that its number says.
bool are_whole(const SegmentMemory& m, const RaggedBatch& batch, const int64_t* numbers, int count) {
  const auto& fields = m.layout().ragged;
  for (size_t f = 0; f < fields.size(); f++)
    for (int k = 0; k < count; k++) {
      const std::vector<char> expected = RaggedValues(static_cast<uint64_t>(numbers[k]), kMost).of(fields[f], f);
      const int32_t* offsets = batch.lengths[fields[f].group].offsets;
      const char* from = batch.values[f].data + static_cast<uint64_t>(offsets[k]) * fields[f].nbytes;
      const char* to = batch.values[f].data + static_cast<uint64_t>(offsets[k + 1]) * fields[f].nbytes;
      if (!std::equal(expected.begin(), expected.end(), from, to)) return false;
    }
  return true;
}

// Draws a batch, of one item at least, and notes it. `held`: what came before, which is done then. False: there was
// none.
bool draw(SegmentMemory& m, BatchSampler& sampler, Way way, Journal& j, uint64_t step, std::vector<int64_t>& held,
          std::vector<int64_t>& values) {
  std::array<int64_t, kDrawn> keys{}, numbers{};
  std::array<float, kDrawn> weight{}, probability{};
  Shortage shortage;
  BatchPointers out{{reinterpret_cast<char*>(numbers.data())}, keys.data(), weight.data(), probability.data()};
  RaggedBatch ragged(RaggedPlan::of(m.layout(), nullptr));
  if (m.has_pages()) out.ragged = &ragged;
  GroupDraw groups{.size = 1, .groups = kDrawn, .last = true};
  const DrawRules rules{.at_least = 1, .done = &held, .groups = way.in_groups ? &groups : nullptr};
  const Draw outcome = sampler.sample(kDrawn, 0, {7, 0, step}, out, shortage, {}, rules);
  if (held.empty())
    for (const int64_t number : std::exchange(values, {})) j.done[static_cast<size_t>(number)]++;
  if (outcome != Draw::kDone) return false;
  if (m.has_pages() && !are_whole(m, ragged, numbers.data(), sampler.count())) throw std::runtime_error("torn values");
  for (int k = 0; k < sampler.count(); k++) {
    const auto at = static_cast<size_t>(k);
    j.got[static_cast<size_t>(numbers[at])]++;
    held.push_back(keys[at]);
    values.push_back(numbers[at]);
  }
  return true;
}

// Writes and draws in turn, as one process that does both.
void live(SegmentMemory& m, Way way, Journal& j, int turns) {
  const int id = join(m, Role::kWriter);
  BatchSampler sampler(m);
  std::vector<int64_t> held, values;
  for (int turn = 0; turn < turns; turn++) {
    write(m, id, j, 5);
    draw(m, sampler, way, j, static_cast<uint64_t>(turn), held, values);
  }
  const SegmentLock lock(m);
  Claims(m).commit(held, m.presence());
  for (const int64_t number : values) j.done[static_cast<size_t>(number)]++;
}

// Goes on beside others, or after them, until there is nothing to do, or for so many turns.
class Survivor {
 public:
  Survivor(SegmentMemory& m, Way way, Journal& j)
      : memory_(m), way_(way), journal_(j), id_(join(m, Role::kWriter)), sampler_(m) {}

  std::array<int, kRows> got{};  // by this one

  void go_on(int turns) {
    for (bool idle = false; turns-- > 0 && !idle;) {
      const std::array<int, kRows> before = journal_.got;
      idle = write(memory_, id_, journal_, kRows);
      take_census(memory_, false);
      {  // as a waiting writer does
        SegmentLock lock(memory_);
        lock.absorb();
        publish_limit(memory_);
      }
      idle &= !draw(memory_, sampler_, way_, journal_, 100 + step_++, held_, values_) && held_.empty();
      for (size_t i = 0; i < kRows; i++) got[i] += journal_.got[i] - before[i];
    }
  }

 private:
  SegmentMemory& memory_;
  Way way_;
  Journal& journal_;
  int id_;
  BatchSampler sampler_;
  uint64_t step_ = 0;
  std::vector<int64_t> held_, values_;
};

// Nothing is held or to be drawn, and all room is free.
void check_end(SegmentMemory& m) {
  SegmentLock lock(m);
  lock.absorb();
  publish_limit(m);
  BOOST_REQUIRE_EQUAL(m.header().held, 0U);
  BOOST_REQUIRE_EQUAL(m.tree().count(), 0);
  BOOST_REQUIRE_EQUAL(m.header().ticket_limit.load(), m.header().head.load() + kCapacity);
  if (!m.has_pages()) return;
  BOOST_REQUIRE_EQUAL(m.header().page_limit.load(), m.header().page_head.load() + kPages);
  BOOST_REQUIRE_EQUAL(busy_pages(m), 0U);
}

void check_death_at(const char* point, uint64_t nth, Way way, int& deaths, bool& died) {
  auto m = queue(way);
  const Shared<Journal> journal;
  Child child([&] {
    fault::arm(point, nth);
    live(*m, way, *journal, 8);
  });
  const int status = child.wait();
  BOOST_REQUIRE((status == 0 || status == fault::kExitStatus));
  died = status == fault::kExitStatus;
  deaths += died;
  const Journal before = *journal;
  Journal& j = *journal;
  Survivor survivor(*m, way, j);
  survivor.go_on(20 * kRows);
  const auto most = static_cast<int>(way.max_draws);
  for (size_t i = 0; i < kRows; i++) BOOST_TEST_CONTEXT("row " << i) {
      const int copies = before.written[i] ? 1 : 2;  // one that was not noted may be there, too
      BOOST_REQUIRE(j.written[i] == 1);
      BOOST_REQUIRE(j.got[i] >= most);                                   // nothing is lost
      BOOST_REQUIRE(survivor.got[i] <= copies * most - before.done[i]);  // what was committed does not come again
      if (!died) BOOST_REQUIRE(j.got[i] == most);
    }
  std::set<int> again;  // of the batch that the dead held, as far as it knew
  for (size_t i = 0; i < kRows; i++)
    if (before.written[i] && before.got[i] && !before.done[i]) again.insert(survivor.got[i]);
  BOOST_REQUIRE((most > 1 || again.size() <= 1));  // all of it comes again, or nothing
  check_end(*m);
}

// One that writes and draws is stopped there, and goes on when another has come as far as it can beside it.
bool is_stopped_at(const char* point, uint64_t nth) {
  auto m = queue({1, true});
  const Shared<Journal> journal;
  Child child([&] {
    fault::arm(point, nth, true);
    live(*m, {1, true}, *journal, 8);
  });
  int status = 0;
  waitpid(child.pid(), &status, WUNTRACED);
  if (!WIFSTOPPED(status)) return false;
  Survivor survivor(*m, {1, true}, *journal);
  survivor.go_on(4 * kRows);
  kill(child.pid(), SIGCONT);
  BOOST_REQUIRE(child.wait() == 0);
  survivor.go_on(20 * kRows);
  for (size_t i = 0; i < kRows; i++) BOOST_TEST_CONTEXT("row " << i) {
      BOOST_REQUIRE(journal->written[i] >= 1);
      BOOST_REQUIRE(journal->got[i] == journal->written[i]);  // the one that it was at others may have written, too
    }
  check_end(*m);
  return true;
}

std::vector<const char*> all_points() {
  std::vector<const char*> points;
  fault::Point::each([&](fault::Point& point) { points.push_back(point.name()); });
  return points;
}

void check_every_death(Way way, int least) {
  int deaths = 0;
  for (const char* point : all_points())
    for (uint64_t nth = 1;; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time, " << way.max_draws) {
        bool died = false;
        check_death_at(point, nth, way, deaths, died);
        if (!died) break;
      }
  BOOST_TEST(deaths > least);
  BOOST_TEST_MESSAGE(deaths << " deaths");
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
  auto m = queue({2});
  const Shared<Journal> journal;
  Child child([&] {
    fault::arm(point, nth);
    write(*m, join(*m, Role::kWriter), *journal, 5);
    drop_all(*m, 0);
  });
  const bool died = child.wait() == fault::kExitStatus;
  drop_all(*m, 1);
  Survivor survivor(*m, {2}, *journal);
  survivor.go_on(20 * kRows);
  check_end(*m);
  return died;
}

}  // namespace

BOOST_AUTO_TEST_CASE(who_dies_at_a_queue_loses_and_doubles_nothing) {
  for (const uint64_t max_draws : {1, 2}) check_every_death({max_draws}, 200);
}

BOOST_AUTO_TEST_CASE(who_dies_at_a_queue_of_rows_of_any_length_loses_and_doubles_and_tears_nothing) {
  for (const bool in_groups : {false, true}) check_every_death({1, true, in_groups}, 300);
}

BOOST_AUTO_TEST_CASE(
    a_writer_of_a_queue_that_is_stopped_between_its_pages_and_its_row_loses_nothing_of_its_own_or_others) {
  int stops = 0;
  for (const char* point : {"pages.said", "pages.ticket", "pages.busy", "pages.copied", "pages.done", "append.ticket",
                            "append.in_flight", "append.busy", "append.copied", "pages.row_done", "pages.forgotten"})
    for (uint64_t nth = 1;; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        if (!is_stopped_at(point, nth)) break;
        stops++;
      }
  BOOST_TEST(stops > 100);
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
