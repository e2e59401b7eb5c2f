#include <boost/test/unit_test.hpp>
#include <thread>

#include "caller.h"
#include "children.h"
#include "client/prefetch_stream.h"
#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_prefetch_stream)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

struct BatchMemory {
  std::unique_ptr<Drawn> batch = std::make_unique<Drawn>();
  void point(BatchPointers& out) const { out = batch->pointers(); }
};

using Stream = PrefetchStream<BatchMemory>;

std::shared_ptr<Learner> owner_of(size_t rows, const Plan& plan = {}) {
  auto learner = std::make_shared<Learner>(std::make_shared<Attachment>(buffer_of(rows, plan)));
  learner->own();
  return learner;
}

std::vector<int64_t> next(Stream& stream) {
  for (;;) {
    auto taken = stream.take(20 * kSecond);
    if (taken.outcome == Draw::kDone) return taken.memory->batch->keys;
    if (taken.outcome != Draw::kWait) return {};
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(batches_are_those_that_the_learner_would_draw_itself) {
  const auto expected = draw_in_turn(*buffer_of(50), 30);
  const Caller caller;
  const auto learner = owner_of(50);
  Stream stream(learner, kBatch);
  for (int i = 0; i < 3; i++) stream.order(0.5, {}, 1);
  for (size_t i = 0; i < 30; i++) {
    BOOST_TEST(next(stream) == expected[i].keys);
    BOOST_TEST(learner->step() == i + 1, "what is ordered and not taken does not count");
    if (i < 27) stream.order(0.5, {}, 1);
  }
}

BOOST_AUTO_TEST_CASE(what_nobody_took_has_not_been_drawn) {
  const auto expected = draw_in_turn(*buffer_of(50), 3);
  const Caller caller;
  const auto learner = owner_of(50);
  {
    Stream stream(learner, kBatch);
    for (int i = 0; i < 4; i++) stream.order(0.5, {}, 1);
    BOOST_TEST(next(stream) == expected[0].keys);
    BOOST_TEST(next(stream) == expected[1].keys);
  }
  BOOST_TEST(learner->attachment().draws() == 2U);
  Drawn batch;
  BOOST_REQUIRE(learner->draw(kBatch, 0.5, {}, batch.pointers(), 1).outcome == Draw::kDone);
  BOOST_TEST(batch.keys == expected[2].keys);
}

BOOST_AUTO_TEST_CASE(a_draw_of_the_learner_in_between_keeps_its_name_when_the_stream_closes) {
  const Caller caller;
  const auto learner = owner_of(50);
  Drawn batch;
  {
    Stream stream(learner, kBatch);
    stream.order(0.5, {}, 1);
    BOOST_REQUIRE(learner->draw(kBatch, 0.5, {}, batch.pointers(), 1).outcome == Draw::kDone);
  }
  BOOST_TEST(learner->step() == 2U);
}

BOOST_AUTO_TEST_CASE(no_name_is_given_twice_whatever_was_drawn_between_what_a_stream_ordered) {
  const Caller caller;
  const auto learner = owner_of(1000);
  Drawn first, second;
  std::vector<int64_t> theirs;
  {
    Stream stream(learner, kBatch), other(learner, kBatch);
    stream.order(0.5, {}, 1);
    BOOST_REQUIRE(learner->draw(kBatch, 0.5, {}, first.pointers(), 1).outcome == Draw::kDone);
    stream.order(0.5, {}, 1);
    other.order(0.5, {}, 1);
    stream.order(0.5, {}, 1);
    stream.close();
    theirs = next(other);
  }
  for (int i = 0; i < 6; i++) {
    BOOST_REQUIRE(learner->draw(kBatch, 0.5, {}, second.pointers(), 1).outcome == Draw::kDone);
    BOOST_TEST(second.keys != first.keys);
    BOOST_TEST(second.keys != theirs);
  }
}

BOOST_AUTO_TEST_CASE(another_thread_is_refused_while_one_waits_for_a_batch) {
  Plan plan;
  plan.limiter.min_size = 60;
  const auto learner = [&] {
    const Caller caller;
    return owner_of(50, plan);
  }();
  auto stream = [&] {
    const Caller caller;
    auto made = std::make_unique<Stream>(learner, kBatch);
    made->order(0.5, {}, 1);
    made->take(0);
    return made;
  }();
  std::atomic<bool> waits{false};
  Draw outcome = Draw::kStopped;
  std::thread waiting([&] {
    const Caller caller;
    waits = true;
    for (outcome = Draw::kWait; outcome == Draw::kWait;) outcome = stream->take(20 * kSecond).outcome;
  });
  while (!waits) std::this_thread::yield();
  int refused = 0;
  {
    const Caller caller;  // it has let go of the lock: it waits
    for (const auto& call : std::vector<std::function<void()>>{[&] { stream->order(0.5, {}, 1); },
                                                               [&] { stream->take(0); }, [&] { stream->close(); }}) {
      try {
        call();
      } catch (const std::runtime_error&) {
        refused++;
      }
    }
    for (int i = 0; i < 10; i++) append_row(learner->attachment().memory(), 1);
  }
  waiting.join();
  BOOST_TEST(refused == 3);
  BOOST_TEST((outcome == Draw::kDone));
  const Caller caller;
  stream.reset();
}

BOOST_AUTO_TEST_CASE(in_a_forked_child_all_is_ordered_again_and_the_parent_goes_on) {
  const auto expected = draw_in_turn(*buffer_of(50), 3);
  const Caller caller;
  const auto learner = owner_of(50);
  Stream stream(learner, kBatch);
  for (int i = 0; i < 3; i++) stream.order(0.5, {}, 1);
  BOOST_TEST(next(stream) == expected[0].keys);
  {
    Child child([&] {
      const auto first = next(stream), second = next(stream);
      if (first.empty() || second.empty() || first == second || first == expected[1].keys) _exit(1);
      if (learner->step() != 2) _exit(3);
      stream.close();
    });
    BOOST_REQUIRE(child.wait() == 0);
  }
  BOOST_TEST(next(stream) == expected[1].keys);
  BOOST_TEST(next(stream) == expected[2].keys);
}

BOOST_AUTO_TEST_CASE(feedback_and_draws_come_in_the_order_of_the_calls) {
  for (const bool feedback_first : {true, false}) {
    auto m = buffer_of(50);
    const auto expected = learn_in_turn(*m, 20, 2, feedback_first);
    const Caller caller;
    const auto learner = owner_of(50);
    Stream stream(learner, kBatch);
    stream.order(0.5, {}, 1);
    stream.order(0.5, {}, 1);
    for (size_t k = 0; k < 20; k++) {
      BOOST_REQUIRE(next(stream) == expected[k].keys);
      Feedback feedback = feedback_to(expected[k], k);
      if (!feedback_first) stream.order(0.5, {}, 1);
      BOOST_REQUIRE(!learner->update(learner->require_open(), feedback));
      if (feedback_first) stream.order(0.5, {}, 1);
    }
    learner->attachment().settle();
    BOOST_TEST(leaves(learner->attachment().memory()) == leaves(*m));
  }
}

BOOST_AUTO_TEST_SUITE_END()
