#include <boost/test/unit_test.hpp>
#include <map>
#include <random>
#include <set>

#include "absorb/absorber.h"
#include "draw/priority_updater.h"
#include "invariants.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_absorb)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

double leaf_formula(const SegmentMemory& m, double raw) {
  const SamplerConfig& c = m.header().sampler;
  return c.prioritized ? std::pow(raw + c.eps, c.alpha) : 1.0;
}

// Random interleavings of explorers that lag and die, absorptions and updates, and what must have come of them.
class Play {
 public:
  Play(uint64_t capacity, int writers, unsigned seed) : random_(seed) {
    Plan plan;
    plan.capacity = capacity;
    m_ = make_segment(plan);
    for (int w = 0; w < writers; w++) writers_.emplace_back(*m_, w + 1);
    states_.assign(writers, kIdle);
  }

  void step() {
    const auto w = random_() % writers_.size();
    switch (random_() % 16) {
      case 0:
        return absorb_and_check();
      case 1:
        return update_and_check();
      case 2:
        return die(w);
      case 3:
        return resync();
      default:
        return advance(w);
    }
  }

  void absorb_and_check() {
    const float before = m_->header().max_raw;
    settle(*m_);
    learn(before);
    const std::string v = violation(*m_);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
    BOOST_REQUIRE(m_->header().inserted == adopted_.size());
    BOOST_REQUIRE(m_->header().max_raw == max_raw_);
  }

  // Every writer finishes or dies, and its slot is freed.
  void quiesce() {
    for (size_t w = 0; w < writers_.size(); w++) {
      while (random_() % 2 && states_[w] != kIdle) advance(w);
      die(w);
      reclaim(*m_, static_cast<int>(w) + 1);
    }
    absorb_and_check();
    BOOST_REQUIRE(m_->header().rows == committed().size());
  }

 private:
  enum State { kIdle, kTicket, kBusy };

  void advance(size_t w) {
    if (states_[w] == kIdle) {
      writers_[w].take_ticket();
      states_[w] = kTicket;
    } else if (states_[w] == kTicket) {
      states_[w] = writers_[w].seize() ? kBusy : kIdle;
    } else {
      // Given priorities cover six decades; two rows in three have none.
      std::optional<float> given;
      if (random_() % 3 == 0) given = std::pow(10.0F, static_cast<float>(random_() % 600) / 100 - 4);
      given_[writers_[w].key()] = given;
      writers_[w].finish(given, writers_[w].key());
      states_[w] = kIdle;
    }
  }

  // A ticket lost before its slot was busy stays lost; a slot left busy is freed, now or later.
  void die(size_t w) {
    if (states_[w] == kBusy) reclaim(*m_, static_cast<int>(w) + 1);
    states_[w] = kIdle;
  }

  std::set<uint64_t> committed() const {
    std::set<uint64_t> keys;
    for (uint64_t s = 0; s < m_->capacity(); s++)
      if (const uint64_t word = m_->row(s).word.load(); slot_word::is_row(word)) keys.insert(word >> 16);
    return keys;
  }

  // Rows seen for the first time get their own priority, or the largest raw one: that before or after this absorption,
  // since the order within it is free. All other leaves are as they were.
  void learn(float max_before) {
    const PriorityTree tree = m_->tree();
    for (uint64_t s = 0; s < m_->capacity(); s++) {
      const uint64_t at = m_->at(s);
      if (at && !adopted_.contains(at - 1) && given_[at - 1]) max_raw_ = std::max(max_raw_, *given_[at - 1]);
    }
    for (uint64_t s = 0; s < m_->capacity(); s++) {
      const uint64_t at = m_->at(s);
      if (!at) continue;
      const float leaf = tree.leaf(static_cast<int64_t>(s));
      if (adopted_.insert(at - 1).second) {
        const auto given = given_[at - 1];
        const double low = leaf_formula(*m_, given ? *given : max_before);
        const double high = leaf_formula(*m_, given ? *given : max_raw_);
        BOOST_REQUIRE(leaf > low * (1 - 1e-5));
        BOOST_REQUIRE(leaf < high * (1 + 1e-5));
        leaves_[at - 1] = leaf;
      }
      if (leaf != leaves_[at - 1])
        BOOST_FAIL("the leaf of slot " << s << " has changed");  // most checks: Boost is slow
    }
  }

  void update_and_check() {
    Header& h = m_->header();
    const uint64_t head = h.head.load();
    if (head == 0) return;
    absorb_and_check();
    std::vector<int64_t> keys;
    std::vector<double> td;
    const uint64_t recent = std::min(head, 3 * m_->capacity());
    for (uint64_t i = random_() % 6; i > 0; i--) {
      keys.push_back(static_cast<int64_t>(head - 1 - random_() % recent));
      td.push_back(std::pow(10.0, static_cast<double>(random_() % 600) / 100 - 4) * (random_() % 2 ? 1 : -1));
    }
    const uint64_t applied = h.updated, stale = h.stale_updates, unready = h.unready_updates;
    uint64_t expected = 0;
    for (size_t i = 0; i < keys.size(); i++) {
      const auto key = static_cast<uint64_t>(keys[i]);
      if (m_->at(m_->slot_of(key)) != key + 1) continue;
      expected++;
      leaves_[key] = m_->tree().clamp(static_cast<float>(leaf_formula(*m_, std::fabs(td[i]))));
      max_raw_ = std::max(max_raw_, static_cast<float>(std::fabs(td[i])));
    }
    BOOST_REQUIRE(!PriorityUpdater(*m_).update(static_cast<int64_t>(keys.size()), keys.data(), td.data()));
    BOOST_REQUIRE(h.updated - applied == expected);
    BOOST_REQUIRE(h.stale_updates - stale + h.unready_updates - unready == keys.size() - expected);
    for (int64_t key : keys)  // single and double precision differ in the last bits
      if (const uint64_t slot = m_->slot_of(static_cast<uint64_t>(key));
          m_->at(slot) == static_cast<uint64_t>(key) + 1) {
        const float leaf = m_->tree().leaf(static_cast<int64_t>(slot));
        BOOST_REQUIRE(std::fabs(leaf / leaves_[static_cast<uint64_t>(key)] - 1) < 1e-5);
        leaves_[static_cast<uint64_t>(key)] = leaf;
      }
    absorb_and_check();
  }

  // What a failed draw does to a slot keeps everything else as it was.
  void resync() {
    const uint64_t head = m_->header().head.load(), slot = random_() % m_->capacity();
    if (slot >= head) return;
    const float before = m_->header().max_raw;
    {
      SegmentLock lock(*m_);
      Absorber(*m_).resync(slot, head);
    }
    learn(before);
    const PriorityTree tree = m_->tree();
    const std::string v = slot_violation(*m_, tree, slot, newest_tickets(*m_)[slot], RowSet::committed(*m_));
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
    const std::string t = tree_violation(tree);
    BOOST_REQUIRE_MESSAGE(t.empty(), t);
  }

  std::mt19937_64 random_;
  std::unique_ptr<SegmentMemory> m_;
  std::vector<SteppedWriter> writers_;
  std::vector<State> states_;
  std::map<uint64_t, std::optional<float>> given_;
  std::set<uint64_t> adopted_;
  std::map<uint64_t, float> leaves_;  // of the rows in the buffer
  float max_raw_ = 1;
};

void play(uint64_t capacity, int writers, int steps, unsigned seed) {
  BOOST_TEST_CONTEXT("capacity " << capacity << " writers " << writers << " seed " << seed) {
    Play game(capacity, writers, seed);
    for (int i = 0; i < steps; i++) game.step();
    game.quiesce();
  }
}

// The key of the row that can be drawn from a slot, -1 for none.
int64_t drawable(SegmentMemory& m, uint64_t slot) {
  return m.tree().leaf(static_cast<int64_t>(slot)) > 0 ? static_cast<int64_t>(m.at(slot)) - 1 : -1;
}

std::unique_ptr<SegmentMemory> filled(uint64_t capacity, uint64_t rows) {
  Plan plan;
  plan.capacity = capacity;
  auto m = make_segment(plan);
  for (uint64_t i = 0; i < rows; i++) append_row(*m, 1, i);
  return m;
}

}  // namespace

BOOST_AUTO_TEST_CASE(after_any_interleaving_exactly_the_committed_rows_are_drawable) {
  for (unsigned seed = 0; seed < 60; seed++) {
    const uint64_t capacities[] = {1, 2, 3, 4, 5, 8, 17, 64, 70};
    play(capacities[seed % std::size(capacities)], 1 + static_cast<int>(seed % 5), 4000, seed);
  }
}

BOOST_AUTO_TEST_CASE(the_same_holds_when_there_are_more_laggards_than_slots) { play(3, 9, 20'000, 1); }

BOOST_AUTO_TEST_CASE(the_same_holds_over_several_words_of_pending_bits) { play(9000, 8, 3000, 2); }

BOOST_AUTO_TEST_CASE(a_row_that_lags_is_absorbed_when_it_is_done_without_any_new_ticket) {
  auto m = filled(8, 3);
  SteppedWriter slow(*m, 2);
  slow.take_ticket();
  append_row(*m, 1);
  settle(*m);  // skips the unresolved ticket instead of waiting for it
  BOOST_TEST(m->header().rows == 4U);
  BOOST_TEST(slow.seize());
  settle(*m);
  BOOST_TEST(drawable(*m, 3) == -1);
  slow.finish();
  settle(*m);
  BOOST_TEST(drawable(*m, 3) == 3);
  BOOST_TEST(m->header().pending == 0U);
}

BOOST_AUTO_TEST_CASE(the_old_row_of_a_skipped_slot_stays_drawable_and_the_next_turn_settles_the_slot) {
  auto m = filled(4, 4);
  SteppedWriter slow(*m, 2);
  slow.take_ticket();  // key 4, slot 0: lost before it is taken
  settle(*m);
  BOOST_TEST(drawable(*m, 0) == 0);
  BOOST_TEST(m->header().pending == 1U);
  for (int i = 0; i < 4; i++) append_row(*m, 1);  // keys 5 to 8
  settle(*m);
  BOOST_TEST(drawable(*m, 0) == 8);
  BOOST_TEST(m->header().pending == 0U);
}

BOOST_AUTO_TEST_CASE(a_slot_held_busy_is_not_drawable_and_a_freed_one_is_settled) {
  auto m = filled(4, 4);
  SteppedWriter dead(*m, 2);
  dead.take_ticket();
  dead.seize();
  settle(*m);
  BOOST_TEST(drawable(*m, 0) == -1);
  BOOST_TEST(m->header().pending == 1U);
  reclaim(*m, 2);
  settle(*m);
  BOOST_TEST(drawable(*m, 0) == -1);
  BOOST_TEST(m->header().pending == 0U);
  BOOST_TEST(m->header().rows == 3U);
}

BOOST_AUTO_TEST_CASE(many_turns_between_two_absorptions_count_each_row_once_and_cost_one_turn) {
  auto m = filled(10, 4);
  settle(*m);
  for (int i = 0; i < 1000; i++) append_row(*m, 1);
  settle(*m);
  BOOST_TEST(violation(*m) == "");
  BOOST_TEST(m->header().inserted == 4U + 10U);  // the others were overwritten unseen
}

BOOST_AUTO_TEST_CASE(long_absorptions_go_in_bounded_steps_also_across_the_seam) {
  auto m = filled(10'000, 7000);
  BOOST_TEST(!Absorber(*m).step(7000));
  BOOST_TEST(m->header().absorbed == Absorber::kChunk);
  settle(*m);
  BOOST_TEST(violation(*m) == "");
  for (int i = 0; i < 9500; i++) append_row(*m, 1);  // keys 7000 to 16499 end in slot 6499
  settle(*m);
  BOOST_TEST(violation(*m) == "");
  BOOST_TEST(m->header().rows == 10'000U);
}

BOOST_AUTO_TEST_CASE(a_learner_that_absorbs_to_an_older_head_keeps_what_a_newer_one_left_pending) {
  auto m = filled(4, 4);
  SteppedWriter slow(*m, 2);
  slow.take_ticket();  // key 4
  settle(*m);
  Absorber(*m).step(4);  // began before the ticket, and went on after the other's absorption
  slow.seize();
  slow.finish();
  settle(*m);
  BOOST_TEST(drawable(*m, 0) == 4);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(rows_without_a_priority_get_the_largest_raw_one_seen) {
  Plan plan;
  plan.sampler = {1, Normalize::kBuffer, 0.5, 0};
  auto m = make_segment(plan);
  append_row(*m, 1);
  append_row(*m, 1, 0, 0.25F);
  append_row(*m, 1, 0, 16.0F);
  append_row(*m, 1);
  settle(*m);
  const float expected[] = {1, 0.5, 4, 4};
  for (int i = 0; i < 4; i++) BOOST_TEST(m->tree().leaf(i) == expected[i]);
  BOOST_TEST(m->header().max_raw == 16.0F);
}

// A full ring of leaves 7, 2, 5: what takes the slot of 7 starts from 5, and so does what takes that of 2.
BOOST_AUTO_TEST_CASE(rows_without_a_priority_may_get_the_largest_of_those_held_when_they_come) {
  Plan plan;
  plan.capacity = 3;
  plan.sampler = {1, Normalize::kBuffer, 1, 0, Initial::kMaxHeld, 1};
  auto m = make_segment(plan);
  append_row(*m, 1);
  settle(*m);
  BOOST_TEST(m->tree().leaf(0) == 1);  // of none held
  append_row(*m, 1, 0, 2.0F);
  append_row(*m, 1, 0, 5.0F);
  settle(*m);
  int64_t key = 0;
  double td = 1e4;
  PriorityUpdater(*m).update(1, &key, &td);
  td = 7;
  PriorityUpdater(*m).update(1, &key, &td);
  for (int i = 0; i < 2; i++) append_row(*m, 1);
  settle(*m);
  const float fives[] = {5, 5, 5};
  for (int i = 0; i < 3; i++) BOOST_TEST(m->tree().leaf(i) == fives[i]);
  // In one absorption: the 9 of slot 2 raises what comes into slot 0.
  append_row(*m, 1, 0, 9.0F);
  append_row(*m, 1);
  append_row(*m, 1, 0, 3.0F);
  settle(*m);
  const float expected[] = {9, 3, 9};
  for (int i = 0; i < 3; i++) BOOST_TEST(m->tree().leaf(i) == expected[i]);
  BOOST_TEST(m->header().max_raw == 1e4F);  // which counts for nothing
  SegmentLock(*m).clear();
  append_row(*m, 1);
  settle(*m);
  BOOST_TEST(m->tree().max() == 1);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(rows_without_a_priority_may_get_a_number) {
  Plan plan;
  plan.sampler = {1, Normalize::kBuffer, 0.5, 0, Initial::kNumber, 4};
  auto m = make_segment(plan);
  append_row(*m, 1, 0, 100.0F);
  append_row(*m, 1);
  settle(*m);
  BOOST_TEST(m->tree().leaf(0) == 10.0F);
  BOOST_TEST(m->tree().leaf(1) == 2.0F);
}

// 0^0.5 is 0, and 0.1^60 is below the smallest float: such rows are rare, not lost.
BOOST_AUTO_TEST_CASE(a_priority_too_small_for_a_float_still_gets_a_leaf) {
  for (auto [alpha, eps] : {std::pair{0.5, 0.0}, std::pair{60.0, 0.1}}) {
    Plan plan;
    plan.sampler = {1, Normalize::kBuffer, alpha, eps};
    auto m = make_segment(plan);
    append_row(*m, 1, 0, 0.0F);
    settle(*m);
    BOOST_TEST(drawable(*m, 0) == 0);
    const int64_t key = 0;
    const double td = 0;
    PriorityUpdater(*m).update(1, &key, &td);
    BOOST_TEST(drawable(*m, 0) == 0);
  }
}

BOOST_AUTO_TEST_CASE(under_uniform_sampling_every_row_has_leaf_1) {
  Plan plan;
  plan.sampler = {};
  auto m = make_segment(plan);
  append_row(*m, 1);
  append_row(*m, 1, 0, 100.0F);
  settle(*m);
  BOOST_TEST(m->tree().leaf(0) == 1.0F);
  BOOST_TEST(m->tree().leaf(1) == 1.0F);
}

BOOST_AUTO_TEST_SUITE_END()
