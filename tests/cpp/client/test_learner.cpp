#include <boost/test/unit_test.hpp>
#include <thread>

#include "caller.h"
#include "children.h"
#include "client/learner.h"
#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_learner)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// That of the process which made the segment.
std::unique_ptr<Learner> owner_of(size_t rows, const Plan& plan = {}) {
  auto learner = std::make_unique<Learner>(std::make_shared<Attachment>(buffer_of(rows, plan)));
  learner->own();
  return learner;
}

DrawResult draw(Learner& learner, Drawn& batch, const Patience& patience = {}) {
  return learner.draw(kBatch, 0.5, patience, batch.pointers(), 1);
}

}  // namespace

BOOST_AUTO_TEST_CASE(batches_are_those_of_a_sampler_draw_by_draw) {
  const auto expected = draw_in_turn(*buffer_of(50), 20);
  const Caller caller;
  const auto learner = owner_of(50);
  for (uint64_t step = 0; step < 20; step++) {
    BOOST_TEST(learner->step() == step);
    Drawn batch;
    BOOST_REQUIRE(draw(*learner, batch).outcome == Draw::kDone);
    BOOST_TEST(batch.keys == expected[step].keys);
    BOOST_TEST(batch.weight == expected[step].weight);
  }
  BOOST_TEST(learner->attachment().draws() == 20U);
}

BOOST_AUTO_TEST_CASE(each_draw_of_several_threads_has_a_name_of_its_own) {
  constexpr int kThreads = 4, kEach = 50;
  const auto expected = draw_in_turn(*buffer_of(50), kThreads * kEach);
  const auto learner = [] {
    const Caller caller;
    return owner_of(50);
  }();
  std::vector<std::vector<int64_t>> drawn;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; i++) {
        Drawn batch;
        const Caller caller;
        if (draw(*learner, batch).outcome == Draw::kDone) drawn.push_back(batch.keys);
      }
    });
  for (std::thread& t : threads) t.join();
  std::vector<std::vector<int64_t>> wanted;
  wanted.reserve(expected.size());
  for (const Drawn& batch : expected) wanted.push_back(batch.keys);
  std::ranges::sort(drawn);
  std::ranges::sort(wanted);
  BOOST_TEST((drawn == wanted));
  const Caller caller;
  BOOST_TEST(learner->step() == uint64_t{kThreads * kEach});
}

BOOST_AUTO_TEST_CASE(a_draw_that_ends_in_an_error_has_not_happened) {
  const auto expected = draw_in_turn(*buffer_of(50), 2);
  const auto learner = [] {
    const Caller caller;
    return owner_of(50);
  }();
  Drawn batch;
  {
    const Caller caller;
    BOOST_REQUIRE(draw(*learner, batch).outcome == Draw::kDone);
  }
  Gate held, over;
  std::thread holder([&] {
    const SegmentLock lock(learner->attachment().memory());
    held.open();
    over.wait();
  });
  held.wait();
  {
    const Caller caller;
    BOOST_CHECK_THROW(draw(*learner, batch, {.deadline = 0}), LockTimeout);
    BOOST_TEST(learner->step() == 1U);
  }
  over.open();
  holder.join();
  const Caller caller;
  BOOST_TEST(learner->attachment().draws() == 1U);
  BOOST_TEST(learner->attachment().memory().header().sampled == uint64_t{kBatch});
  BOOST_REQUIRE(draw(*learner, batch).outcome == Draw::kDone);
  BOOST_TEST(batch.keys == expected[1].keys);
}

BOOST_AUTO_TEST_CASE(a_draw_without_a_batch_says_which_signal_it_saw) {
  Plan plan;
  plan.limiter.min_size = 5;
  const Caller caller;
  const auto learner = owner_of(4, plan);
  Attachment& a = learner->attachment();
  Drawn batch;
  const DrawResult result = draw(*learner, batch);
  BOOST_REQUIRE((result.outcome == Draw::kWait));
  BOOST_TEST(result.shortage.inserted == 4U);
  BOOST_TEST(result.shortage.needed == 5U);
  BOOST_TEST(learner->step() == 0U, "it has not happened");
  append_row(a.memory(), 1);
  const int64_t start = monotonic_ns();
  a.wait_for_rows(result.shortage.seen, 20 * kSecond);
  BOOST_TEST(monotonic_ns() - start < 10 * kSecond, "it sleeps although rows have come since");
  BOOST_TEST((draw(*learner, batch).outcome == Draw::kDone));
}

BOOST_AUTO_TEST_CASE(a_stopped_buffer_ends_a_draw) {
  const Caller caller;
  const auto learner = owner_of(50);
  learner->attachment().stop();
  Drawn batch;
  BOOST_TEST((draw(*learner, batch, {.until_stopped = true}).outcome == Draw::kStopped));
  BOOST_TEST(learner->step() == 0U);
}

BOOST_AUTO_TEST_CASE(others_can_close_it_while_threads_draw_and_feed_back) {
  const auto learner = [] {
    const Caller caller;
    return owner_of(50);
  }();
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; t++)
    threads.emplace_back([&] {
      Drawn batch;
      try {
        for (uint64_t i = 0;; i++) {
          const Caller caller;
          draw(*learner, batch);
          Feedback feedback = feedback_to(batch, i);
          learner->update(learner->require_open(), feedback);
        }
      } catch (const std::runtime_error& e) {
        if (std::string(e.what()) == "the replay buffer is closed") ended++;
      }
    });
  for (;;) {
    const Caller caller;
    if (learner->step() > 100) break;
  }
  {
    const Caller caller;
    learner->close();
  }
  for (std::thread& t : threads) t.join();
  BOOST_TEST(ended == 3);
}

BOOST_AUTO_TEST_CASE(who_departs_draws_on_where_it_was) {
  const auto expected = draw_in_turn(*buffer_of(50), 3);
  const Caller caller;
  const auto learner = owner_of(50);
  Drawn batch;
  draw(*learner, batch);
  learner->depart(0);
  BOOST_TEST(!learner->held());
  BOOST_TEST(learner->position().step == 1U);
  for (uint64_t step = 1; step < 3; step++) {
    BOOST_REQUIRE(draw(*learner, batch).outcome == Draw::kDone);
    BOOST_TEST(batch.keys == expected[step].keys);
  }
}

BOOST_AUTO_TEST_CASE(a_forked_child_draws_in_a_stream_of_its_own) {
  const auto expected = draw_in_turn(*buffer_of(50), 2);
  const Caller caller;
  const auto learner = owner_of(50);
  Drawn batch;
  draw(*learner, batch);
  const Shared<std::array<uint64_t, 3>> seen;
  {
    Child child([&] {
      (*seen)[0] = learner->owns();
      (*seen)[1] = learner->stream();
      (*seen)[2] = learner->step();
      Drawn other;
      if (draw(*learner, other).outcome != Draw::kDone || other.keys == expected[1].keys) _exit(1);
    });
    BOOST_REQUIRE(child.wait() == 0);
  }
  BOOST_TEST((*seen)[0] == 0U);
  BOOST_TEST((*seen)[1] > 0U);
  BOOST_TEST((*seen)[2] == 0U);
  BOOST_REQUIRE(draw(*learner, batch).outcome == Draw::kDone);
  BOOST_TEST(batch.keys == expected[1].keys);
}

BOOST_AUTO_TEST_CASE(feedback_with_a_key_that_was_never_issued_changes_nothing) {
  const Caller caller;
  const auto learner = owner_of(50);
  learner->attachment().refresh({});
  const auto before = leaves(learner->attachment().memory());
  Feedback feedback{{3, 50}, {100, 100}};
  const std::optional<BadKey> bad = learner->update(learner->require_open(), feedback);
  BOOST_REQUIRE(bad.has_value());
  BOOST_TEST(bad->index == 1);
  BOOST_TEST(leaves(learner->attachment().memory()) == before);
}

BOOST_AUTO_TEST_SUITE_END()
