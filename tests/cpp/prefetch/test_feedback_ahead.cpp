#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_feedback_ahead)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// What they are when the first batch has been fed back.
std::vector<float> leaves_after_one_feedback() {
  auto m = buffer_of(50);
  apply_to(*m, feedback_to(draw_in_turn(*m, 1)[0], 0));
  return leaves(*m);
}

// One batch has been drawn, and there is one more order; its feedback is with the thread.
void hand_one_over(PrefetchingLearner& learner) {
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  learner.order();
  Feedback feedback = feedback_to(learner[0], 0);
  BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
}

}  // namespace

BOOST_AUTO_TEST_CASE(what_is_queued_has_its_turn_among_the_draws) {
  constexpr size_t kAhead = 3, kSteps = 100;
  auto reference = buffer_of(50);
  const std::vector<Drawn> expected = learn_in_turn(*reference, kSteps, kAhead, true);

  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order(kAhead);
  size_t queued = 0;
  for (size_t k = 0; k < kSteps; k++) {
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    BOOST_TEST(learner[k].keys == expected[k].keys);
    BOOST_TEST(learner[k].probability == expected[k].probability);
    Feedback feedback = feedback_to(learner[k], k);
    if (learner.ahead.enqueue_feedback(feedback)) {
      queued++;
    } else {
      learner.settle();
      apply_to(*m, feedback);
    }
    learner.order();
  }
  learner.settle();
  BOOST_TEST(learner.outstanding.empty());
  BOOST_TEST(leaves(*m) == leaves(*reference));
  BOOST_TEST(queued > kSteps / 2);
}

BOOST_AUTO_TEST_CASE(any_thread_that_settles_finds_what_was_queued_applied) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  hand_one_over(learner);
  std::thread([&] {
    learner.settle();
    BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  }).join();
}

BOOST_AUTO_TEST_CASE(closing_applies_what_was_queued) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  hand_one_over(learner);
  learner.ahead.close();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  BOOST_TEST(learner.outstanding.empty());
}

BOOST_AUTO_TEST_CASE(what_was_queued_is_dropped_and_counted_when_the_lock_does_not_come_free) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  const std::vector<float> before = leaves(*m);
  {
    const SegmentLock held(*m);
    learner.order();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    std::thread([&] {
      const auto never = std::exchange(interrupted, [] { return true; });
      learner.ahead.close();
      interrupted = never;
    }).join();
  }
  BOOST_TEST(learner.outstanding.empty());
  BOOST_TEST(leaves(*m) == before);
  BOOST_TEST(m->header().stale_updates == uint64_t{kBatch});
}

BOOST_AUTO_TEST_CASE(whoever_settles_waits_for_what_was_there_and_for_nothing_later) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  hand_one_over(learner);
  const SettlePoint first = learner.ahead.settle_point(true);
  learner.settle();
  {
    const SegmentLock held(*m);
    learner.order();
    Feedback feedback = feedback_to(learner[0], 1);
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    std::thread([&] {
      BOOST_TEST(learner.ahead.settled({first.feedback, false}));
      BOOST_TEST(!learner.settled());
      BOOST_TEST(!learner.ahead.settle(learner.ahead.settle_point(false), kSecond / 100));
    }).join();
  }
  learner.settle();
  BOOST_TEST(learner.outstanding.empty());
}

BOOST_AUTO_TEST_CASE(a_thread_that_cannot_draw_on_applies_what_was_queued_before) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  {
    const SegmentLock held(*m);  // so that the draw does not know yet that it cannot be made
    learner.order();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    m->header().stopped.store(1);
  }
  learner.settle();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
}

BOOST_AUTO_TEST_CASE(what_was_queued_does_not_wait_for_rows_with_a_draw) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  {
    std::optional<SegmentLock> held;
    learner.order();
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    held.emplace(*m);  // so that the draw does not know yet that it has to wait
    change_limiter(m->header(), {.min_size = 60});
    learner.order();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
  }
  learner.settle();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  BOOST_TEST((learner.take(kSecond / 1000) == Draw::kWait));
  Feedback feedback = feedback_to(learner[0], 1);
  BOOST_TEST(!learner.ahead.enqueue_feedback(feedback));
}

BOOST_AUTO_TEST_CASE(missed_updates_are_also_those_that_were_queued) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  hand_one_over(learner);
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  BOOST_TEST(learner.ahead.missed_updates() == uint64_t{kBatch});
}

BOOST_AUTO_TEST_SUITE_END()
