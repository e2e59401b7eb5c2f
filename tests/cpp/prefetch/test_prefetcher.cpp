#include <sys/wait.h>

#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_prefetcher)

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_CASE(batches_come_in_order_and_are_those_of_a_sampler) {
  const auto expected = draw_in_turn(*buffer_of(50), 200);
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order(3);
  for (size_t i = 0; i < 200; i++) {
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    BOOST_TEST(learner[i].keys == expected[i].keys);
    BOOST_TEST(learner[i].values == expected[i].values);
    BOOST_TEST(learner[i].weight == expected[i].weight);
    if (i < 197) learner.order();
  }
  BOOST_TEST(m->header().sampled == 200U * kBatch);
  BOOST_TEST(learner.outstanding.empty());
}

BOOST_AUTO_TEST_CASE(what_nobody_took_has_not_been_drawn) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order(5);
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  learner.ahead.close();
  BOOST_TEST(m->header().sampled == uint64_t{kBatch});
  BOOST_TEST(m->header().draws == 1U);
  BOOST_TEST(learner.outstanding.empty());
  learner.order();
  BOOST_TEST((learner.take() == Draw::kDone), "it starts again");
}

BOOST_AUTO_TEST_CASE(settled_means_that_all_is_drawn) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  BOOST_TEST(learner.settled());
  learner.order(4);
  learner.settle();
  const std::vector<Order> drawn = learner.ahead.drawn();
  BOOST_REQUIRE(drawn.size() == 4U);
  for (uint64_t step = 0; step < 4; step++) BOOST_TEST(drawn[step].name.step == step);
}

BOOST_AUTO_TEST_CASE(what_a_batch_was_drawn_from_is_told_as_its_draw_found_it) {
  Plan plan;
  plan.sampler = {.prioritized = 1, .alpha = 1, .eps = 0};
  auto m = buffer_of(10, plan);
  PrefetchingLearner learner(*m);
  learner.order(2);
  learner.settle();
  const std::vector<Order> drawn = learner.ahead.drawn();
  append_row(*m, 1, 2000, 0.25F);
  learner.order();
  double total = 0;
  for (size_t i = 0; i < 10; i++) total += static_cast<double>(i * i % 37 + 1);
  for (size_t i = 0; i < 3; i++) {
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    const DrawnFrom& from = learner.ahead.drawn_from();
    BOOST_TEST(from.drawable == (i < 2 ? 10 : 11));
    BOOST_TEST(from.total == (i < 2 ? total : total + 0.25));
    BOOST_TEST(from.smallest == (i < 2 ? 1 : 0.25));
    BOOST_TEST(from.beta == 0.5);
    if (i < 2) BOOST_TEST(drawn[i].drawn_from.total == total);
  }
}

BOOST_AUTO_TEST_CASE(finished_are_the_orders_that_are_drawn_and_not_taken) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  PrefetchingLearner learner(*m);
  BOOST_TEST(learner.ahead.finished() == 0U);
  learner.order(3);
  BOOST_REQUIRE(learner.take(kSecond / 1000) == Draw::kWait);
  BOOST_TEST(learner.ahead.finished() == 0U, "they wait for items");
  for (size_t i = 50; i < 60; i++) append_row(*m, 1, 1000 + i, 1);
  for (size_t left = 3; left > 0; left--) {
    do learner.settle();
    while (learner.ahead.drawn().size() < left);
    BOOST_TEST(learner.ahead.finished() == left);
    BOOST_REQUIRE(learner.take() == Draw::kDone);
  }
  BOOST_TEST(learner.ahead.finished() == 0U);
}

BOOST_AUTO_TEST_CASE(another_thread_waits_for_nothing_that_it_did_not_order) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  PrefetchingLearner learner(*m);
  learner.order(4);
  bool settled = false;
  std::thread([&] { settled = learner.settled(); }).join();
  BOOST_TEST(settled);
}

BOOST_AUTO_TEST_CASE(a_shortage_is_told_once_and_ends_with_the_rows) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  PrefetchingLearner learner(*m);
  learner.order(2);
  BOOST_REQUIRE(learner.take() == Draw::kWait);
  BOOST_REQUIRE(learner.shortage.has_value());
  BOOST_TEST(learner.shortage->inserted == 50U);
  BOOST_TEST(learner.shortage->needed == 60U);
  BOOST_TEST(learner.ahead.settle(learner.ahead.settle_point(true), kSecond), "it waits for rows that have not come");
  for (uint64_t i = 50; i < 60; i++) append_row(*m, 1, 1000 + i, 1.0F);
  Draw outcome;
  while ((outcome = learner.take()) == Draw::kWait) {
  }
  BOOST_TEST((outcome == Draw::kDone));
  BOOST_TEST(m->header().sample_wait.total_ns() > 0U);
}

BOOST_AUTO_TEST_CASE(a_demand_goes_with_the_learner) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  PrefetchingLearner learner(*m);
  learner.order();
  while (!learner.shortage) learner.take();
  BOOST_TEST(m->header().demand == 60U);
  learner.ahead.close();
  BOOST_TEST(m->header().demand == 0U);
}

BOOST_AUTO_TEST_CASE(a_stopped_buffer_gives_no_more_batches) {
  auto m = buffer_of(50);
  m->header().stopped.store(1);
  PrefetchingLearner learner(*m);
  learner.order(2);
  BOOST_TEST((learner.take() == Draw::kStopped));
  BOOST_TEST((learner.take() == Draw::kStopped));
}

BOOST_AUTO_TEST_CASE(closing_waits_for_no_lock) {
  auto m = buffer_of(50);
  std::optional<SegmentLock> held(*m);
  std::thread([&] {
    PrefetchingLearner learner(*m);
    learner.order(2);
    const int64_t start = monotonic_ns();
    learner.ahead.close();
    BOOST_TEST(monotonic_ns() - start < 10 * kSecond);
    BOOST_TEST(learner.outstanding.empty());
  }).join();
}

BOOST_AUTO_TEST_CASE(missed_updates_are_those_between_draw_and_taking) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order();
  learner.settle();
  m->header().updated += 5;
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  BOOST_TEST(learner.ahead.missed_updates() == 5U);
}

BOOST_AUTO_TEST_CASE(a_forked_child_knows_that_the_thread_is_not_there) {
  auto m = buffer_of(50);
  PrefetchingLearner learner(*m);
  learner.order(3);
  BOOST_TEST(learner.ahead.here());
  const pid_t child = fork();
  if (child == 0) _exit(learner.ahead.here() ? 1 : 0);
  int status = 1;
  BOOST_REQUIRE(waitpid(child, &status, 0) == child);
  BOOST_TEST(status == 0);
  BOOST_TEST((learner.take() == Draw::kDone));
}

BOOST_AUTO_TEST_SUITE_END()
