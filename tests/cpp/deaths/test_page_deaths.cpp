// Writers of values of any length and learners that die or stop at each fault point: nothing is torn, lost or leaked.
#define TORCHREPLAY_FAULTS
#include <array>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <map>

#include "checkpoint/import.h"
#include "children.h"
#include "invariants.h"
#include "ragged.h"
#include "views.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_page_deaths)

namespace {

constexpr uint64_t kCapacity = 14, kPages = 32, kRows = 5;
constexpr uint32_t kMost = 60;  // 420 bytes in all, 7 pages

// A ring that has turned, with rows to adopt and to evict, and a writer that lags.
std::unique_ptr<SegmentMemory> eventful() {
  auto m = make_segment(ragged_plan(kCapacity, kPages * 64));
  if (m->layout().pages.bytes != 64) throw std::runtime_error("pages of another size than expected");
  append_ragged(*m, 1, 12, 100, kMost);
  settle(*m);
  SteppedRun slow(*m, 2, 200, kMost);
  for (int i = 0; i < 4; i++) slow.advance();  // busy
  append_ragged(*m, 1, 4, 112, kMost);
  return m;
}

// What a child has written, as far as it has been told.
struct Told {
  std::array<int64_t, kRows> keys;
  uint64_t written = 0;
};

using Body = std::function<void(SegmentMemory&, Told&)>;

void write_rows(SegmentMemory& m, Told& told) {
  const int id = join(m, Role::kWriter);
  const std::vector<RowMeta> meta(kRows);
  RaggedFill fill(m, 300, kRows, kMost);
  told.keys.fill(-1);
  if (RingWriter(m, id).append(kRows, meta.data(), told.keys.data(), told.written, fill) != Append::kDone) _exit(1);
  leave(m, id);
}

void absorb(SegmentMemory& m, Told&) { settle(m); }

void repair_all(SegmentMemory& m, Told&) {
  m.header().dirty = Dirty::kLinks;
  settle(m);
}

// The one that lagged dies, and others take its id and its pages.
void clean_up(SegmentMemory& m, Told&) {
  m.participant(2).role = static_cast<uint32_t>(Role::kWriter);
  m.header().ids = 4;
  take_census(m, false);
  settle(m);
}

// How often a process that runs `body` comes to each point.
std::map<std::string, uint64_t> rehearse(const Body& body) {
  constexpr int kMost = 256;
  const Shared<std::array<uint64_t, kMost>> reached;
  const Shared<Told> told;
  auto m = eventful();
  Child child([&] {
    fault::Point::each([](fault::Point& point) { point.arm(0, false); });
    body(*m, *told);
    int place = 0;
    fault::Point::each([&](fault::Point& point) { (*reached)[place++] = point.reached(); });
  });
  BOOST_REQUIRE(child.wait() == 0);
  std::map<std::string, uint64_t> counts;
  int place = 0;
  fault::Point::each([&](fault::Point& point) {
    if (const uint64_t count = (*reached)[place++]) counts[point.name()] = count;
  });
  BOOST_REQUIRE(place <= kMost);
  return counts;
}

// Absorbs, and looks at every row that can be drawn.
void check(SegmentMemory& m) {
  settle(m);
  const std::string v = violation(m);
  BOOST_REQUIRE_MESSAGE(v.empty(), v);
  for (uint64_t slot = 0; slot < kCapacity; slot++) {
    uint64_t number = 0, key = 0;
    if (!m.at(slot)) continue;
    BOOST_REQUIRE((look_at(m, slot, kMost, number, &key) == Found::kWhole));
    BOOST_REQUIRE(m.at(slot) == key + 1);
    BOOST_REQUIRE(m.tree().leaf(static_cast<int64_t>(slot)) > 0);
  }
}

// Each row whose key a writer was told is there, unless its slot or its first page was taken again.
void check_told(SegmentMemory& m, const Told& told) {
  for (int64_t key : told.keys) {
    if (key < 0) continue;
    const uint64_t slot = m.slot_of(static_cast<uint64_t>(key)), word = m.row(slot).word.load();
    if (slot_word::key1(word) > static_cast<uint64_t>(key) + 1) continue;
    Run run;
    uint32_t lengths[2];
    BOOST_REQUIRE(slot_word::key1(word) == static_cast<uint64_t>(key) + 1);
    BOOST_REQUIRE(read_run(m, slot, run, lengths));
    const bool lost = has_lost_its_first_page(m, run);
    BOOST_REQUIRE((m.at(slot) == static_cast<uint64_t>(key) + 1) == !lost);
  }
}

// Nobody is there any more: all is free.
void check_end(SegmentMemory& m) {
  for (int id = 1; id < 8; id++) {
    BOOST_REQUIRE(m.liveness().take(id));
    reclaim(m, id);
    m.liveness().release(id);
    BOOST_REQUIRE(m.run_in_flight(id).first1.load() == 0U);
  }
  BOOST_REQUIRE(busy_pages(m) == 0U);
  check(m);
  for (uint64_t slot = 0; slot < kCapacity; slot++) BOOST_REQUIRE(!slot_word::is_busy(m.row(slot).word.load()));
}

// Two turns of both rings by somebody who knows of nothing.
void go_on(SegmentMemory& m) {
  for (uint64_t i = 0; i < 6; i++) {
    const Appended rows = append_ragged(m, 6, 4, 400 + 4 * i, kMost);
    BOOST_REQUIRE((rows.outcome == Append::kDone));
    if (i % 2) check(m);
  }
}

uint64_t die_everywhere(const Body& body) {
  uint64_t deaths = 0;
  for (const auto& [point, count] : rehearse(body))
    for (uint64_t nth = 1; nth <= count; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        const Shared<Told> told;
        told->keys.fill(-1);
        auto m = eventful();
        Child child([&] {
          fault::arm(point, nth);
          body(*m, *told);
        });
        BOOST_REQUIRE(child.wait() == fault::kExitStatus);
        deaths++;
        check(*m);
        check_told(*m, *told);
        go_on(*m);  // before anybody looks for the dead
        take_census(*m, false);
        go_on(*m);
        check_end(*m);
      }
  return deaths;
}

// The rows of a buffer, as a checkpoint has them.
class SavedRows {
 public:
  explicit SavedRows(SegmentMemory& m) : key(kCapacity), leaf(kCapacity), link(kCapacity), step(kCapacity) {
    Snapshot snapshot(m);
    Snapshot::Measured found = snapshot.measure(0, kCapacity, 0, uint64_t{1} << 30);
    number.resize(kCapacity);
    priority.resize(kCapacity);
    columns.values = {reinterpret_cast<char*>(number.data())};
    columns.key = key.data();
    columns.leaf = leaf.data();
    columns.link = link.data();
    columns.step = step.data();
    columns.priority = priority.data();
    for (size_t f = 0; f < values.size(); f++) {
      values[f].resize(found.elements[f] * m.layout().ragged[f].nbytes);
      columns.ragged.push_back(values[f].data());
    }
    for (auto& group : lengths) {
      group.resize(kCapacity);
      columns.lengths.push_back(group.data());
    }
    n = snapshot.copy_measured(columns, found.elements);
    std::tie(counts, limiter) = snapshot.counts();
  }

  void restore(SegmentMemory& m) const {
    RunPlan plan;
    (void)plan.expect(m.layout(), n, key.data(), {lengths[0].data(), lengths[1].data()},
                      m.layout().pages.count * m.layout().pages.bytes);
    Import import(m, counts.head, std::move(plan));
    import.place(n, columns);
    import.finish(counts, limiter, 0);
  }

  uint64_t rows() const { return n; }

 private:
  std::vector<int64_t> key;
  std::vector<float> leaf;
  std::vector<int64_t> link;
  std::vector<int32_t> step;
  std::vector<uint64_t> number;
  std::vector<float> priority;
  std::array<std::vector<char>, 3> values;
  std::array<std::vector<uint32_t>, 2> lengths;
  RowColumns columns;
  uint64_t n = 0;
  Counts counts{};
  LimiterConfig limiter;
};

}  // namespace

BOOST_AUTO_TEST_CASE(of_a_restore_that_dies_anywhere_all_rows_are_there_or_none_and_no_page_is_kept) {
  const auto source = eventful();
  const SavedRows saved(*source);
  BOOST_REQUIRE(saved.rows() > 3U);
  const auto empty = [] { return make_segment(ragged_plan(kCapacity, kPages * 64)); };
  const auto points = rehearse([&](SegmentMemory&, Told&) { saved.restore(*empty()); });
  for (const char* point : {"import.pages", "import.row", "import.placed", "pages.busy", "pages.done"})
    BOOST_TEST(points.contains(point), point);
  uint64_t none = 0, all = 0;
  for (const auto& [point, count] : points)
    for (uint64_t nth = 1; nth <= count; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        auto m = empty();
        Child child([&] {
          fault::arm(point, nth);
          saved.restore(*m);
        });
        const int status = child.wait();
        BOOST_REQUIRE((status == fault::kExitStatus || status == 0));  // 0: only making the segment came there
        check(*m);
        BOOST_REQUIRE((m->header().rows == 0U || m->header().rows == saved.rows()));
        m->header().rows ? all++ : none++;
        BOOST_REQUIRE(busy_pages(*m) == 0U);
        if (m->header().rows == 0) saved.restore(*m);
        check(*m);
        BOOST_REQUIRE(m->header().rows == saved.rows());
        go_on(*m);
        check_end(*m);
      }
  BOOST_TEST(none > 50U);
  BOOST_TEST(all > 10U);
}

BOOST_AUTO_TEST_CASE(a_writer_that_dies_anywhere_leaves_whole_rows_and_no_page_that_cannot_be_taken) {
  const auto points = rehearse(write_rows);
  for (const char* point :
       {"pages.said", "pages.ticket", "pages.busy", "pages.copied", "pages.done", "pages.forgotten"})
    BOOST_TEST(points.contains(point), point);
  BOOST_TEST(die_everywhere(write_rows) > 100U);
}

BOOST_AUTO_TEST_CASE(a_learner_that_dies_anywhere_while_it_absorbs_rows_and_pages_is_repaired) {
  const auto points = rehearse(absorb);
  for (const char* point :
       {"follow.page", "follow.cursor", "follow.marked", "follow.voided", "follow.run", "follow.owner"})
    BOOST_TEST(points.contains(point), point);
  BOOST_TEST(die_everywhere(absorb) > 50U);
}

BOOST_AUTO_TEST_CASE(whoever_repairs_everything_and_dies_anywhere_is_repaired) {
  BOOST_TEST(die_everywhere(repair_all) > 10U);
}

BOOST_AUTO_TEST_CASE(whoever_frees_the_pages_of_the_dead_and_dies_anywhere_leaves_the_rest_to_the_next) {
  const auto points = rehearse(clean_up);
  for (const char* point : {"reclaim.page", "reclaim.run"}) BOOST_TEST(points.contains(point), point);
  BOOST_TEST(die_everywhere(clean_up) > 20U);
}

BOOST_AUTO_TEST_CASE(a_writer_that_is_stopped_anywhere_keeps_nobody_waiting_and_goes_on_with_whole_rows) {
  uint64_t stops = 0;
  for (const auto& [point, count] : rehearse(write_rows))
    for (uint64_t nth = 1; nth <= count; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        const Shared<Told> told;
        auto m = eventful();
        Child child([&] {
          fault::arm(point, nth, true);
          write_rows(*m, *told);
        });
        int status = 0;
        waitpid(child.pid(), &status, WUNTRACED);
        BOOST_REQUIRE(WIFSTOPPED(status));
        stops++;
        go_on(*m);
        take_census(*m, false);  // it lives: nobody takes anything from it
        go_on(*m);
        kill(child.pid(), SIGCONT);
        BOOST_REQUIRE(child.wait() == 0);
        BOOST_REQUIRE(told->written == kRows);
        check(*m);
        check_told(*m, *told);
        go_on(*m);
        check_end(*m);
      }
  BOOST_TEST(stops > 100U);
}

BOOST_AUTO_TEST_SUITE_END()
