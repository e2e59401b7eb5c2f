#include <boost/test/unit_test.hpp>
#include <random>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "explorers.h"
#include "traced.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_recovery)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kWriter = 1, kSlow = 2;

// A ring with everything in it: settled rows, a lost ticket, a busy slot, a void one, rows not absorbed yet.
std::unique_ptr<SegmentMemory> eventful(uint64_t capacity = 12) {
  Plan plan;
  plan.capacity = capacity;
  auto m = make_segment(plan);
  auto append = [&](uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
      append_row(*m, kWriter, i, i % 2 ? std::optional(0.1F * static_cast<float>(i + 1)) : std::nullopt);
  };
  append(capacity);
  settle(*m);
  SteppedWriter slow(*m, kSlow);
  slow.take_ticket();  // lost
  append(2);
  slow.take_ticket();
  slow.seize();
  reclaim(*m, kSlow);  // void
  slow.take_ticket();
  slow.seize();  // busy
  append(3);
  return m;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_of_an_absorption_leaves_what_a_survivor_completes,
                     *kWhereTracingIsAllowed) {
  auto m = eventful();
  const std::vector<float> before = leaves_of(*m);
  const std::vector<uint64_t> at(&m->at(0), &m->at(0) + m->capacity());
  const uint64_t inserted = m->header().inserted;
  kill_everywhere(
      *m, [&] { settle(*m); },
      [&](SegmentMemory& survivor) {
        uint64_t adopted = 0;
        for (uint64_t s = 0; s < m->capacity(); s++) {
          const float leaf = survivor.tree().leaf(static_cast<int64_t>(s));
          if (survivor.at(s) == at[s] && leaf != before[s]) return "leaf of slot " + std::to_string(s);
          adopted += survivor.at(s) && survivor.at(s) != at[s];
        }
        // A kill between two stores miscounts one item at most.
        const uint64_t counted = survivor.header().inserted - inserted;
        if (counted + 1 >= adopted && counted <= adopted + 1) return std::string();
        return std::to_string(adopted) + " rows adopted, " + std::to_string(counted) + " counted as inserted";
      });
}

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_of_an_update_leaves_each_leaf_old_or_new,
                     *kWhereTracingIsAllowed) {
  auto m = eventful();
  settle(*m);
  const std::vector<float> before = leaves_of(*m);
  const std::vector<int64_t> keys = {3, 13, 4, 14, 13};
  const std::vector<double> td = {0.01, 30, 0.5, 0.7, 2};
  Image done(*m);
  done.refresh();
  PriorityUpdater(done.memory()).update(5, keys.data(), td.data());
  const std::vector<float> after = leaves_of(done.memory());
  const float between = leaf_of(m->header().sampler, 30);  // of the key given twice
  PriorityUpdater updater(*m);
  kill_everywhere(
      *m, [&] { updater.update(5, keys.data(), td.data()); },
      [&](SegmentMemory& survivor) {
        for (uint64_t s = 0; s < m->capacity(); s++) {
          const float leaf = survivor.tree().leaf(static_cast<int64_t>(s));
          if (leaf == before[s]) continue;
          if (leaf != after[s] && leaf != between) return "leaf of slot " + std::to_string(s);
          // The maximum is raised before the first leaf that needs it.
          if (survivor.header().max_raw != 30.0F) return std::string("largest raw priority");
        }
        return std::string();
      });
}

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_of_a_change_of_the_grid_leaves_each_leaf_old_or_new,
                     *kWhereTracingIsAllowed) {
  auto m = eventful();
  settle(*m);
  const std::vector<int64_t> keys = {3, 13, 4, 14};
  const std::vector<double> td = {1, 1e30, 1e29, 1e28};
  const std::vector<float> before = leaves_of(*m);
  const double unit = m->tree().unit();
  Image done(*m);
  done.refresh();
  PriorityUpdater(done.memory()).update(4, keys.data(), td.data());
  const std::vector<float> after = leaves_of(done.memory());
  BOOST_TEST(done.memory().tree().unit() > unit * 1e9);
  PriorityUpdater updater(*m);
  kill_everywhere(
      *m, [&] { updater.update(4, keys.data(), td.data()); },
      [&](SegmentMemory& survivor) {
        bool changed = false;
        for (uint64_t s = 0; s < m->capacity(); s++) {
          const float leaf = survivor.tree().leaf(static_cast<int64_t>(s));
          if (leaf != before[s] && leaf != after[s]) return "leaf of slot " + std::to_string(s);
          changed |= leaf != before[s] && leaf > 1e15F;
        }
        const double now = survivor.tree().unit();
        return std::string(now == (changed ? done.memory().tree().unit() : unit) ? "" : "grid");
      });
}

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_of_a_draw_leaves_a_buffer_that_can_be_drawn_from,
                     *kWhereTracingIsAllowed) {
  auto m = eventful();
  int64_t keys[8];
  float weight[8], probability[8];
  int64_t values[8];
  const BatchPointers out{{reinterpret_cast<char*>(values)}, keys, weight, probability};
  BatchSampler sampler(*m);
  Shortage shortage;
  kill_everywhere(
      *m, [&] { sampler.sample(8, 0.4, {7, 0, 0}, out, shortage); },
      [&](SegmentMemory& survivor) {
        const Draw outcome = BatchSampler(survivor).sample(8, 0.4, {7, 0, 0}, out, shortage);
        return std::string(outcome == Draw::kDone ? "" : "no draw");
      });
}

BOOST_AUTO_TEST_CASE(a_repairer_killed_at_any_instruction_leaves_what_the_next_one_repairs, *kWhereTracingIsAllowed) {
  auto m = eventful();
  settle(*m);
  append_row(*m, kWriter);
  // As left by an owner killed after it evicted two rows and adopted one, with half-written sums and bits.
  m->tree().leaves()[1] = 0;
  m->tree().leaves()[5] = 0;
  m->at(5) = 0;
  std::memset(m->base() + m->layout().tree, 0x5a, 16);
  m->pending_words()[0] ^= 0x31;
  m->pending_summary()[0] = 0;
  m->header().pending = 77;
  m->header().rows = 1;
  m->header().dirty = Dirty::kLinks;
  kill_everywhere(*m, [&] { Recovery(*m).run(); }, [](SegmentMemory&) { return std::string(); });
}

// Every half-done state of a slot that the order of stores allows, at random and all at once.
BOOST_AUTO_TEST_CASE(any_half_done_state_is_repaired_to_what_the_words_say_and_twice_is_as_good_as_once) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; round++) {
    auto m = eventful(3 + random() % 90);
    if (random() % 2) settle(*m);
    const std::vector<float> before = leaves_of(*m);
    std::vector<char> untouched(m->capacity(), 1);
    for (uint64_t s = 0; s < m->capacity(); s++) {
      const uint64_t word = m->row(s).word.load();
      const uint64_t done = slot_word::is_row(word) ? word >> 16 : 0;
      const int state = static_cast<int>(random() % 5);
      untouched[s] = state > 2 && m->at(s) == done;
      if (state <= 2) m->tree().leaves()[s] = 0;  // evicted: leaf first ...
      if (state == 1) m->at(s) = 0;               // ... then at ...
      if (state == 2 && done) m->at(s) = done;    // ... and the new row adopted, its leaf not yet set
    }
    for (uint64_t w = 0; w < (m->capacity() + 63) / 64; w++)
      m->pending_words()[w] =
          random() & (m->capacity() >= 64 * w + 64 ? ~uint64_t{0} : (1ULL << m->capacity() % 64) - 1);
    m->pending_summary()[0] = random() % 4;
    m->header().pending = random();
    m->header().rows = random();
    m->header().absorbed = random() % (m->header().head.load() + 1);
    std::memset(m->base() + m->layout().tree, static_cast<int>(random() % 256), 12);  // total and part of the count
    m->header().dirty = Dirty::kLinks;
    Recovery(*m).run();
    BOOST_REQUIRE(violation(*m) == "");
    const std::vector<float> repaired = leaves_of(*m);
    for (uint64_t s = 0; s < m->capacity(); s++)
      if (untouched[s] && m->at(s)) BOOST_REQUIRE(repaired[s] == before[s]);
    m->header().dirty = Dirty::kLinks;
    Recovery(*m).run();
    BOOST_REQUIRE(violation(*m) == "");
    BOOST_REQUIRE(leaves_of(*m) == repaired);
  }
}

BOOST_AUTO_TEST_CASE(rows_adopted_by_a_repair_count_as_inserted) {
  auto m = make_segment();
  for (int i = 0; i < 5; i++) append_row(*m, kWriter);
  m->header().dirty = Dirty::kLinks;  // the owner died before it adopted the first row
  Recovery(*m).run();
  BOOST_TEST(m->header().rows == 5U);
  BOOST_TEST(m->header().inserted == 5U);
}

BOOST_AUTO_TEST_CASE(rows_given_no_priority_get_the_largest_again_and_given_ones_their_own) {
  Plan plan;
  plan.sampler = {1, Normalize::kBuffer, 1, 0};
  auto m = make_segment(plan);
  append_row(*m, kWriter);
  append_row(*m, kWriter, 0, 0.25F);
  settle(*m);
  m->header().max_raw = 3;
  m->tree().leaves()[0] = m->tree().leaves()[1] = 0;
  m->header().dirty = Dirty::kLinks;
  Recovery(*m).run();
  BOOST_TEST(m->tree().leaf(0) == 3.0F);
  BOOST_TEST(m->tree().leaf(1) == 0.25F);
}

// Key 2 is incomplete: its leaf goes, and says nothing of what new items start from.
BOOST_AUTO_TEST_CASE(rows_given_no_priority_get_the_largest_of_the_items_that_are_left) {
  Plan plan;
  plan.view = transitions(1);
  plan.sampler = {1, Normalize::kBuffer, 1, 0, Initial::kMaxHeld, 1};
  auto m = make_segment(plan);
  Explorer explorer(*m, 1);
  explorer.reset();
  for (int i = 0; i < 3; i++) explorer.step();
  settle(*m);
  float* leaves = m->tree().leaves();
  leaves[0] = 0;
  leaves[1] = 5;
  leaves[3] = 50;
  m->header().dirty = Dirty::kLinks;
  Recovery(*m).run();
  BOOST_TEST(m->tree().leaf(0) == 5.0F);
  BOOST_TEST(m->tree().leaf(3) == 0.0F);
  BOOST_TEST(m->tree().max() == 5.0F);
}

BOOST_AUTO_TEST_CASE(an_owner_killed_in_the_tree_alone_leaves_its_leaves_and_sums_are_rebuilt) {
  auto m = eventful();
  settle(*m);
  m->tree().leaves()[0] = 0.125F;
  m->header().dirty = Dirty::kTree;
  const std::vector<float> leaves = leaves_of(*m);
  Recovery(*m).run();
  BOOST_TEST(violation(*m) == "");
  BOOST_TEST(leaves_of(*m) == leaves, boost::test_tools::per_element());
}

// Such as memory that ran out.
BOOST_AUTO_TEST_CASE(what_an_exception_left_half_done_is_repaired_by_who_locks_next) {
  struct Failure {};
  auto m = eventful();
  settle(*m);
  const std::vector<float> before = leaves_of(*m);
  const auto fail_in_the_tree = [&] {
    const SegmentLock lock(*m);
    const DirtyScope dirty(m->header(), Dirty::kTree);
    m->tree().leaves()[0] = 0.125F;
    throw Failure();
  };
  BOOST_CHECK_THROW(fail_in_the_tree(), Failure);
  BOOST_TEST(violation(*m) != "");
  settle(*m);
  BOOST_TEST(violation(*m) == "");
  BOOST_TEST((m->header().dirty == Dirty::kClean));
  std::vector<float> expected = before;
  expected[0] = 0.125F;
  BOOST_TEST(leaves_of(*m) == expected, boost::test_tools::per_element());
}

// The child is killed while it works as hard as it can, so that most kills fall into the locked part.
BOOST_AUTO_TEST_CASE(learners_sigkilled_at_random_instants_leave_a_buffer_that_works) {
  Plan plan;
  plan.capacity = 300;
  auto m = make_segment(plan);
  Header& h = m->header();
  std::mt19937_64 random(1);
  uint64_t repairs = 0;
  // A few in a hundred kills, and on some machines fewer, fall where something is left to repair.
  for (int kills = 0; kills < 150 || (repairs == 0 && kills < 10'000); kills++) {
    Child learner([&] {
      std::vector<int64_t> keys(32), values(32);
      std::vector<float> weight(32), probability(32);
      std::vector<double> td(32, 0.3);
      const BatchPointers out{{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()};
      BatchSampler sampler(*m);
      Shortage shortage;
      for (uint64_t step = 0;; step++) {
        for (int i = 0; i < 7; i++) append_row(*m, kSlow, step);
        if (sampler.sample(32, 0.4, {7, 1, step}, out, shortage) != Draw::kDone) _exit(4);
        if (PriorityUpdater(*m).update(32, keys.data(), td.data())) _exit(5);
      }
    });
    const uint64_t until = h.sampled + 32 * (1 + random() % 40);
    while (h.sampled.load(std::memory_order_relaxed) < until) sched_yield();
    learner.kill_and_wait();
    reclaim(*m, kSlow);
    const uint32_t before = h.repairing.load();
    settle(*m);
    repairs += h.repairing.load() != before;
    const std::string v = violation(*m);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }
  BOOST_TEST(repairs > 0U);
}

BOOST_AUTO_TEST_SUITE_END()
