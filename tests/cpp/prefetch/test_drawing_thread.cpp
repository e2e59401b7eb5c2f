#include <sys/resource.h>

#include <atomic>

#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_drawing_thread)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// How often the calling thread has gone to sleep.
long sleeps() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

using Clock = std::chrono::steady_clock;

// Takes a step, and gives feedback, as often as it takes until the last 20 steps were about as long: then the drawing
// thread knows when to expect the next order, and sleeps meanwhile. Returns until when it does, unless it is woken.
Clock::time_point take_steps(PrefetchingLearner& learner) {
  constexpr auto kStep = std::chrono::milliseconds(3);
  learner.order(2);
  for (int in_a_row = 0, k = 0;; k++) {
    BOOST_REQUIRE(k < 100'000);
    const auto began = Clock::now();
    learner.order();
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    Feedback feedback = feedback_to(learner[0], static_cast<uint64_t>(k));
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    std::this_thread::sleep_for(kStep / 2);
    const bool asleep = learner.settled();  // before long
    std::this_thread::sleep_for(kStep / 2);
    const auto took = Clock::now() - began;
    in_a_row = took < 2 * kStep ? in_a_row + 1 : 0;  // or the processor was another's meanwhile
    if (in_a_row >= 20 && asleep && took < kStep + kStep / 10) return began + kStep + kStep / 5;
  }
}

// Returns when the thread has done all that it has to do, without asking it to.
void wait_for_the_thread(PrefetchingLearner& learner) {
  for (int waited = 0; !learner.settled(); waited++) {
    BOOST_REQUIRE(waited < 10'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Another thread waits for what was queued, and the memory's lock is held: that one works, and not the drawing
// thread, which sleeps.
std::thread one_that_waits(PrefetchingLearner& learner) {
  std::thread waiting([&] { (void)learner.ahead.settle(learner.ahead.settle_point(false), kSecond); });
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  return waiting;
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_order_does_not_wake_the_thread_which_wakes_by_itself) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  bool known = false;
  for (int tries = 0; !known; tries++) {
    BOOST_REQUIRE(tries < 1000);
    const auto asleep_until = take_steps(learner);
    learner.order();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const bool woken = learner.settled();
    if (Clock::now() > asleep_until) continue;
    BOOST_TEST(!woken);
    known = true;
  }
  wait_for_the_thread(learner);
}

BOOST_AUTO_TEST_CASE(whoever_waits_does_the_work_while_the_thread_sleeps) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  for (int known = 0, tries = 0; known < 10; tries++) {
    BOOST_REQUIRE(tries < 1000);
    const auto asleep_until = take_steps(learner);
    const long before = sleeps();
    learner.order();
    Feedback feedback{{0, 1}, {0.5, 0.25}};
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    learner.settle();
    const bool slept = sleeps() != before;
    BOOST_TEST(learner.outstanding.empty());
    if (Clock::now() > asleep_until) continue;
    BOOST_TEST(!slept);
    known++;
  }
}

BOOST_AUTO_TEST_CASE(several_threads_that_wait_leave_the_batches_what_they_are) {
  constexpr size_t kAhead = 2, kSteps = 300;
  auto reference = buffer_of(50);
  const std::vector<Drawn> expected = learn_in_turn(*reference, kSteps, kAhead, false);

  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  std::atomic<bool> over{false};
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; i++)
    waiting.emplace_back([&] {
      while (!over) {
        const SettlePoint point = learner.ahead.settle_point(false);
        while (!learner.ahead.settle(point, kSecond)) {
        }
      }
    });
  learner.order(kAhead);
  for (size_t k = 0; k < kSteps; k++) {
    learner.order();
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    BOOST_TEST(learner[k].keys == expected[k].keys);
    BOOST_TEST(learner[k].probability == expected[k].probability);
    Feedback feedback = feedback_to(learner[k], k);
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    if (k % 7 == 0) learner.settle();
    if (k % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  learner.settle();
  over = true;
  for (auto& thread : waiting) thread.join();
  BOOST_TEST(learner.outstanding.empty());
  BOOST_TEST(leaves(*m) == leaves(*reference));
  BOOST_TEST(m->header().sampled == (kSteps + kAhead) * kBatch);
}

BOOST_AUTO_TEST_CASE(an_iteration_ends_after_those_who_work_for_it) {
  auto m = buffer_of(50);
  for (int round = 0; round < 5; round++) {
    PrefetchingLearner learner(*m);
    take_steps(learner);
    learner.settle();
    const uint64_t updated = m->header().updated;
    {
      auto held = std::make_unique<SegmentLock>(*m);
      learner.order();
      Feedback feedback{{0, 1, 2}, {1, 2, 3}};
      BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
      std::thread waiting = one_that_waits(learner);
      std::thread closing([&] { learner.ahead.close(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      held.reset();
      waiting.join();
      closing.join();
    }
    BOOST_TEST(learner.outstanding.empty());
    BOOST_TEST(m->header().updated == updated + 3);
    BOOST_TEST(m->header().sampled % kBatch == 0U);
    BOOST_TEST(m->header().sampled == m->header().draws * kBatch);
  }
}

BOOST_AUTO_TEST_CASE(what_is_ordered_while_another_works_in_its_place_wakes_the_thread) {
  auto m = buffer_of(50);
  for (int round = 0; round < 5; round++) {
    PrefetchingLearner learner(*m);
    take_steps(learner);
    learner.settle();
    auto held = std::make_unique<SegmentLock>(*m);
    learner.order();
    Feedback feedback{{0, 1, 2}, {1, 2, 3}};
    BOOST_REQUIRE(learner.ahead.enqueue_feedback(feedback));
    std::thread waiting = one_that_waits(learner);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the thread has been up, and expects nothing
    learner.order();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    held.reset();
    waiting.join();
    wait_for_the_thread(learner);
  }
}

BOOST_AUTO_TEST_CASE(whoever_works_in_place_of_the_thread_leaves_a_shortage_to_it) {
  auto m = buffer_of(50);
  change_limiter(m->header(), {.min_size = 60});
  PrefetchingLearner learner(*m);
  learner.order();
  BOOST_TEST((learner.take(kSecond / 1000) == Draw::kWait));
  learner.settle();  // it is known that it waits
  for (size_t i = 50; i < 60; i++) append_row(*m, 1, 1000 + i, 1.0F);
  Draw outcome = Draw::kWait;
  for (int told = 0; told < 10 && outcome == Draw::kWait; told++) outcome = learner.take();  // each shortage, at once
  BOOST_TEST((outcome == Draw::kDone));
}

BOOST_AUTO_TEST_SUITE_END()
