// Learners stopped between any two instructions while explorers go on.
#include <boost/test/unit_test.hpp>

#include "crowd.h"
#include "draw/batch_sampler.h"
#include "traced.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_linked_interleaving)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

std::unique_ptr<SegmentMemory> segment(uint64_t capacity, const View& view) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  return make_segment(plan);
}

// Learners of which some are killed, one after the other, while a crowd moves on, every `pace` instructions or so. In
// the end a learner at rest must find what all of them left in order.
class Race {
 public:
  Race(uint64_t capacity, const View& view, uint64_t pace, unsigned seed)
      : random_(seed), m_(segment(capacity, view)), crowd_(*m_, 3, seed), pace_(pace) {}

  void round() {
    for (uint64_t moves = random_() % (3 * m_->capacity()); moves > 0; moves--) crowd_.move();
    const uint64_t killed_at = random_() % 2 ? 1 + random_() % 4000 : 0;
    trace(killed_at);
    if (killed_at) trace(0);  // repairs, when there is something to repair
    settle(*m_);
    const std::string v = violation(*m_);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }

  uint64_t repairs() const { return m_->header().repairing.load(); }

 private:
  // A learner that absorbs, and dies at that instruction of those during which links are not settled; 0: it lives.
  void trace(uint64_t killed_at) {
    uint64_t instructions = 0, moves = random_() % 60;
    single_step([&] { settle(*m_); },
                [&] {
                  if (moves && random_() % pace_ == 0) {
                    crowd_.move();
                    moves--;
                  }
                  if (m_->header().dirty == Dirty::kClean) return Fate::kStep;
                  return ++instructions == killed_at ? Fate::kDie : Fate::kStep;
                });
  }

  std::mt19937_64 random_;
  std::unique_ptr<SegmentMemory> m_;
  Crowd crowd_;
  uint64_t pace_;
};

}  // namespace

BOOST_AUTO_TEST_CASE(no_row_committed_during_an_absorption_or_a_repair_is_lost_or_loses_its_place,
                     *kWhereTracingIsAllowed) {
  const View views[] = {transitions(1), transitions(2, 3), sequences(2, 2, 1), across_episodes(2), whole_episodes()};
  uint64_t repairs = 0;
  for (unsigned seed = 0; seed < std::size(views); seed++) BOOST_TEST_CONTEXT("seed " << seed) {
      Race race(5 + 3 * seed, views[seed], seed % 2 ? 12 : 60, seed);
      for (int i = 0; i < 2; i++) race.round();
      repairs += race.repairs();
    }
  BOOST_TEST(repairs > 0U);
}

BOOST_AUTO_TEST_SUITE_END()
