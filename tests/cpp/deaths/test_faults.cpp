// Learners and explorers that die at each fault point, with a real lock in a real process: a survivor must be able to
// repair what they leave.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>
#include <functional>
#include <map>

#include "batches.h"
#include "checkpoint/snapshot.h"
#include "children.h"
#include "draw/priority_updater.h"
#include "draw/rewriter.h"
#include "explorers.h"
#include "invariants.h"
#include "views.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_faults)

namespace {

constexpr uint64_t kCapacity = 24;

// A full ring, and after it rows to adopt, link, complete and evict, a lost ticket and a slot held busy.
std::unique_ptr<SegmentMemory> eventful(const View& view) {
  Plan plan;
  plan.capacity = kCapacity;
  plan.fields = {{Element::kI64, 8}, {Element::kI64, 24}, {Element::kI64, 2048}};
  plan.view = view;
  plan.sampler.initial = Initial::kMaxHeld;  // the tree keeps more then
  auto m = make_segment(plan);
  Explorer a(*m, 1), b(*m, 2);
  SteppedWriter slow(*m, 3);
  for (int i = 0; i < 2; i++) {
    a.episode(4);
    b.episode(5, kTruncated);
  }
  a.reset();
  settle(*m);
  a.step(0, 2.0F);
  slow.take_ticket();  // lost
  b.reset();
  slow.take_ticket();
  slow.seize();  // busy
  a.step(kTerminated, 3.0F);
  b.step();
  return m;
}

ItemPlan plan_of(const View& view) {
  ItemPlan plan;
  for (uint32_t field = 0; field < 3; field++) plan.outputs.push_back({Output::Kind::kAnchor, field, 0, 1, 0});
  plan.steps = view.span == View::kWholeEpisode ? 1 : std::max(1U, view.span);
  return plan;
}

using Body = std::function<void(SegmentMemory&)>;

// How often a process that runs `body` comes to each point.
std::map<std::string, uint64_t> rehearse(const View& view, const Body& body) {
  constexpr int kMost = 256;
  const Shared<std::array<uint64_t, kMost>> reached;
  auto each = [](auto&& visit) {
    int place = 0;
    fault::Point::each([&](fault::Point& point) { visit(point, place++); });
    if (place > kMost) throw std::runtime_error("more points than expected");
  };
  auto m = eventful(view);
  each([](fault::Point& point, int) { point.arm(0, false); });
  Child child([&] {
    body(*m);
    each([&](fault::Point& point, int place) { (*reached.operator->())[place] = point.reached(); });
  });
  BOOST_REQUIRE(child.wait() == 0);
  std::map<std::string, uint64_t> counts;
  each([&](fault::Point& point, int place) {
    if (const uint64_t count = (*reached.operator->())[place]) counts[point.name()] = count;
  });
  return counts;
}

// Lets a process die at every point that it comes to, every time, and looks at what the next one makes of it; `judge`
// at what is left of the rows before others go on.
uint64_t die_everywhere(const View& view, const Body& body, const Body& judge = [](SegmentMemory&) {}) {
  uint64_t deaths = 0;
  for (const auto& [point, count] : rehearse(view, body))
    for (uint64_t nth = 1; nth <= count; nth++) BOOST_TEST_CONTEXT(point << ", the " << nth << ". time") {
        auto m = eventful(view);
        Child child([&] {
          fault::arm(point, nth);
          body(*m);
        });
        BOOST_REQUIRE(child.wait() == fault::kExitStatus);
        deaths++;
        take_census(*m, false);
        for (int id = 1; id < 8; id++) BOOST_REQUIRE(!m->liveness().alive(id));
        settle(*m);
        std::string v = violation(*m);
        BOOST_REQUIRE_MESSAGE(v.empty(), v);
        judge(*m);
        // And then life goes on.
        reclaim(*m, 3);
        for (int i = 0; i < 5; i++) Explorer(*m, 4).episode(5);
        settle(*m);
        v = violation(*m);
        BOOST_REQUIRE_MESSAGE(v.empty(), v);
        for (uint64_t slot = 0; slot < kCapacity; slot++) BOOST_REQUIRE(!slot_word::is_busy(m->row(slot).word.load()));
      }
  return deaths;
}

const View kViews[] = {View{}, transitions(2, 3), sequences(2, 2, 1), across_episodes(3), whole_episodes()};

void learn(SegmentMemory& m) {
  const ItemPlan plan = plan_of(m.layout().view);
  Room room(m, plan, 4, 0);
  Shortage shortage;
  BatchSampler sampler(m, m.layout().view.linked() ? &plan : nullptr);
  if (sampler.sample(4, 0.4, {7, 0, 0}, room.pointers(), shortage) != Draw::kDone) _exit(1);
  const std::vector<double> td = {0.3, 1.0, 20.0, 0.1};
  if (PriorityUpdater(m).update(4, room.pointers().keys, td.data())) _exit(1);
}

// TD errors so large that the tree's grid does not hold them, and then so small that it is too coarse.
void learn_at_other_scales(SegmentMemory& m) {
  settle(m);
  std::vector<int64_t> keys;
  for (uint64_t slot = 0; slot < kCapacity; slot++)
    if (m.tree().leaf(static_cast<int64_t>(slot)) > 0) keys.push_back(static_cast<int64_t>(m.at(slot) - 1));
  for (double scale : {1e30, 1e-30}) {
    const std::vector<double> td(keys.size(), scale);
    if (PriorityUpdater(m).update(static_cast<int64_t>(keys.size()), keys.data(), td.data())) _exit(1);
  }
}

void explore(SegmentMemory& m) {
  const int id = join(m, Role::kWriter);
  const RowMeta meta[] = {{kFirst, 0, 0}, {kFirst, 0, 0}, {kFirst, 0, 0}, {kFirst, 0, 0}};
  int64_t keys[4];
  uint64_t written = 0;
  RingWriter(m, id).append(4, meta, keys, written, [&](uint64_t, uint64_t slot) { fill_row(m, slot, 1); });
  leave(m, id);
}

void clear(SegmentMemory& m) {
  SegmentLock lock(m);
  lock.clear();
}

std::vector<int64_t> keys_of_rows(const SegmentMemory& m) {
  std::vector<int64_t> keys;
  const RowSet rows = RowSet::committed(m);
  for (const auto& [key, row] : rows.rows()) keys.push_back(static_cast<int64_t>(key));
  return keys;
}

constexpr int64_t kNew = int64_t{77} << 40;

// Gives all values of each row another number, which names the row; two calls, of which the second is the last.
void rewrite(SegmentMemory& m) {
  const std::vector<int64_t> keys = keys_of_rows(m);
  for (int64_t round : {0, 1})
    (void)Rewriter(m).rewrite(static_cast<int64_t>(keys.size()), keys.data(), {0, 1, 2},
                              [&](int64_t i, size_t f, char* to) {
                                const int64_t pattern = kNew + 1000 * round + keys[i];
                                for (uint64_t at = 0; at < m.layout().fields[f].nbytes; at += 8)
                                  std::memcpy(to + at, &pattern, 8);
                              });
}

// Each row has one number in all its values: its old one, which is small, or a new one.
void require_old_or_new(SegmentMemory& m) {
  for (const int64_t key : keys_of_rows(m)) {
    const uint64_t slot = m.slot_of(static_cast<uint64_t>(key));
    std::set<int64_t> numbers;
    for (const Field& f : m.layout().fields)
      for (uint64_t at = 0; at < f.nbytes; at += 8) {
        int64_t number;
        std::memcpy(&number, m.value(f, slot) + at, 8);
        numbers.insert(number);
      }
    BOOST_REQUIRE_EQUAL(numbers.size(), 1U);
    const int64_t number = *numbers.begin();
    BOOST_REQUIRE(number < kNew || number == kNew + key || number == kNew + 1000 + key);
  }
}

void discard(SegmentMemory& m) {
  const std::vector<int64_t> keys = keys_of_rows(m);
  (void)Rewriter(m).discard(static_cast<int64_t>(keys.size()), keys.data());
}

// The episode under way of the explorer whose last row is the newest of the ring.
void end_episode(SegmentMemory& m) {
  settle(m);
  const int id = join(m, Role::kWriter);
  Explorer explorer(m, id);
  explorer.reset();
  for (int i = 0; i < 2; i++) explorer.step();
  {
    SegmentLock lock(m);
    lock.end_episode(explorer.stream.key1 - 1, 0);
  }
  leave(m, id);
}

}  // namespace

BOOST_AUTO_TEST_CASE(who_dies_while_it_clears_the_buffer_leaves_one_that_a_survivor_puts_in_order) {
  for (const View& view : kViews) BOOST_TEST(die_everywhere(view, clear) > 60U);
}

BOOST_AUTO_TEST_CASE(a_writer_that_dies_while_it_ends_an_episode_leaves_a_buffer_that_a_survivor_puts_in_order) {
  for (const View& view : {kViews[1], kViews[2], kViews[4]}) BOOST_TEST(die_everywhere(view, end_episode) > 60U);
}

BOOST_AUTO_TEST_CASE(who_dies_while_it_rewrites_rows_leaves_each_with_its_old_values_or_its_new_ones) {
  for (const View& view : kViews) BOOST_TEST(die_everywhere(view, rewrite, require_old_or_new) > 200U);
}

BOOST_AUTO_TEST_CASE(who_dies_while_it_discards_items_leaves_each_drawable_or_discarded_for_good) {
  for (const View& view : kViews) BOOST_TEST(die_everywhere(view, discard) > 100U);
}

BOOST_AUTO_TEST_CASE(a_learner_that_dies_at_any_point_leaves_a_buffer_that_a_survivor_puts_in_order) {
  for (const View& view : kViews) BOOST_TEST(die_everywhere(view, learn) > 80U);
}

BOOST_AUTO_TEST_CASE(a_learner_that_dies_in_a_change_of_the_grid_leaves_a_buffer_that_a_survivor_puts_in_order) {
  auto m = eventful(View{});
  const double unit = m->tree().unit();
  learn_at_other_scales(*m);
  BOOST_TEST(m->tree().unit() < unit / 1000);
  BOOST_TEST(rehearse(View{}, learn_at_other_scales)["tree.outgrown"] == 1U);
  BOOST_TEST(rehearse(View{}, learn_at_other_scales)["tree.grid"] > 1U);
  for (const View& view : kViews) BOOST_TEST(die_everywhere(view, learn_at_other_scales) > 80U);
}

BOOST_AUTO_TEST_CASE(an_explorer_that_dies_at_any_point_leaves_a_buffer_that_a_survivor_puts_in_order) {
  for (const View& view : {kViews[0], kViews[1]}) BOOST_TEST(die_everywhere(view, explore) > 30U);
}

BOOST_AUTO_TEST_CASE(a_survivor_that_dies_while_it_repairs_leaves_a_buffer_that_the_next_one_puts_in_order) {
  for (const View& view : kViews)
    for (const char* first : {"evict.leaf", "adopt.at", "complete.leaf", "tree.totals", "lock.over"})
      BOOST_TEST(die_everywhere(view, [&](SegmentMemory& m) {
                   Child dead([&] {
                     fault::arm(first);
                     learn(m);
                   });
                   if (dead.wait() != fault::kExitStatus) _exit(1);
                   settle(m);
                 }) > 10U);
}

// A full ring whose largest leaf is that of the slot overwritten next.
BOOST_AUTO_TEST_CASE(who_dies_while_it_absorbs_a_row_does_not_hand_it_the_priority_of_the_one_it_overwrites) {
  auto ring = [] {
    Plan plan;
    plan.capacity = 4;
    plan.sampler = {1, Normalize::kBuffer, 1, 0, Initial::kMaxHeld, 1};
    auto m = make_segment(plan);
    for (float priority : {100.0F, 2.0F, 5.0F, 3.0F}) append_row(*m, 1, 0, priority);
    settle(*m);
    append_row(*m, 1);
    return m;
  };
  int deaths = 0;
  std::vector<const char*> points;
  fault::Point::each([&](fault::Point& point) { points.push_back(point.name()); });
  for (const char* point : points)
    for (uint64_t nth = 1;; nth++) {
      auto m = ring();
      Child child([&] {
        fault::arm(point, nth);
        settle(*m);
      });
      const bool died = child.wait() == fault::kExitStatus;
      settle(*m);
      BOOST_TEST(m->tree().leaf(0) == 5.0F, m->tree().leaf(0) << " after a death at " << point << " " << nth);
      BOOST_TEST(violation(*m) == "");
      if (!died) break;
      deaths++;
    }
  BOOST_TEST(deaths > 20);
}

// A failed draw brings up to date slots that no chunk of an absorption comes to.
BOOST_AUTO_TEST_CASE(
    a_learner_that_dies_with_a_slot_far_from_the_cursor_leaves_a_buffer_that_a_survivor_puts_in_order) {
  for (const char* point : {"resync.marked", "evict.leaf", "unlink.before", "evict.at", "adopt.at", "link.prev",
                            "adopt.linked", "complete.leaf"}) {
    Plan plan;
    plan.capacity = 2 * Absorber::kChunk;
    plan.view = transitions(1);
    auto m = make_segment(plan);
    auto turn = [&](Explorer explorer) {
      for (uint64_t row = 0; row < m->capacity(); row++) row % 9 ? explorer.step() : explorer.reset();
    };
    turn(Explorer(*m, 1));
    settle(*m);
    turn(Explorer(*m, 2));
    Child child([&] {
      const SegmentLock lock(*m);
      Absorber absorber(*m);
      const uint64_t head = m->header().head.load(), slot = 9 * 600;  // an episode starts there
      absorber.resync(slot, head);
      fault::arm(point);
      absorber.resync(slot + 1, head);
    });
    BOOST_TEST(child.wait() == fault::kExitStatus, point);
    settle(*m);
    const std::string v = violation(*m);
    BOOST_TEST(v.empty(), v << " after a death at " << point);
  }
}

// Nobody repairs for nearly a turn of the ring: the row before is gone then, and its slot far from the cursor.
BOOST_AUTO_TEST_CASE(a_row_half_linked_by_a_dead_learner_is_not_linked_to_what_comes_to_lie_where_its_predecessor_was) {
  constexpr uint64_t kBetween = 10;  // rows between the two
  for (const char* point : {"adopt.at", "link.prev", "link.next", "adopt.linked"}) {
    Plan plan;
    plan.capacity = 2 * Absorber::kChunk;
    plan.view = transitions(2, 2);
    auto m = make_segment(plan);
    Explorer slow(*m, 1), fast(*m, 2);
    slow.reset();
    fast.reset();
    for (uint64_t i = 1; i < kBetween; i++) fast.step();
    settle(*m);
    slow.step();
    Child learner([&] {
      fault::arm(point);
      settle(*m);
    });
    BOOST_TEST(learner.wait() == fault::kExitStatus, point);
    while (m->header().head.load() < m->capacity() + kBetween / 2) fast.step();
    settle(*m);
    std::string v = violation(*m);
    BOOST_TEST(v.empty(), v << " after a death at " << point);
    slow.step();  // what it completes, if anything, is not the other's item
    settle(*m);
    v = violation(*m);
    BOOST_TEST(v.empty(), v << " later, after a death at " << point);
  }
}

BOOST_AUTO_TEST_CASE(a_point_counts_from_the_moment_it_is_armed) {
  fault::Point& point = fault::point<"test.point">;
  auto pass = [] { TORCHREPLAY_FAULT("test.point"); };
  pass();
  Child child([&] {
    fault::arm("test.point", 3);
    pass();
    pass();
    if (point.reached() != 2) _exit(1);
    pass();
  });
  BOOST_TEST(child.wait() == fault::kExitStatus);
  BOOST_TEST(point.reached() == 1U);
  BOOST_CHECK_THROW(fault::arm("no.such.point"), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(a_process_that_stops_at_a_point_goes_on_from_there) {
  Child child([] {
    fault::arm("test.stop", 1, true);
    TORCHREPLAY_FAULT("test.stop");
    _exit(7);
  });
  int status = 0;
  waitpid(child.pid(), &status, WUNTRACED);
  BOOST_TEST(WIFSTOPPED(status));
  kill(child.pid(), SIGCONT);
  BOOST_TEST(child.wait() == 7);
}

BOOST_AUTO_TEST_SUITE_END()
