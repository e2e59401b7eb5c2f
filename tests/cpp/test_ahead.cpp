#define BOOST_TEST_MODULE ahead
#include <sys/wait.h>

#include <boost/test/unit_test.hpp>
#include <thread>

#include "ahead.h"
#include "segments.h"

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kBatch = 16;
constexpr int64_t kSecond = 1'000'000'000;

struct Drawn {
  std::vector<int64_t> keys = std::vector<int64_t>(kBatch), values = std::vector<int64_t>(kBatch);
  std::vector<float> weight = std::vector<float>(kBatch), probability = std::vector<float>(kBatch);

  BatchPointers pointers() {
    return {{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()};
  }
};

std::unique_ptr<SegmentMemory> buffer_of(size_t rows, Plan plan = {}) {
  plan.capacity = 64;
  auto m = make_segment(plan);
  for (size_t i = 0; i < rows; i++) append_row(*m, 1, 1000 + i, static_cast<float>(i * i % 37 + 1));
  return m;
}

// The batches drawn one by one, when they are wanted.
std::vector<Drawn> draw_in_turn(SegmentMemory& m, uint64_t n) {
  std::vector<Drawn> batches(n);
  BatchSampler sampler(m);
  for (uint64_t step = 0; step < n; step++) {
    Shortage shortage;
    BOOST_REQUIRE(sampler.sample(kBatch, 0.5, {7, 0, step}, batches[step].pointers(), shortage) == Draw::kDone);
  }
  return batches;
}

class Learner {
 public:
  explicit Learner(SegmentMemory& m) : ahead(m, nullptr, backlog) {}

  void order(int many = 1) {
    for (int i = 0; i < many; i++) {
      batches_.push_back(std::make_unique<Drawn>());
      ahead.order({kBatch, 0.5, {7, 0, step_++}, batches_.back()->pointers()});
    }
  }

  // The same, a step of a learner later than the last time: long enough for the thread to take feedback over.
  void order_later() {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    order();
  }

  bool settled() { return ahead.settled(ahead.claim(true)); }

  void settle() {
    const DrawAhead::Claim claim = ahead.claim(true);
    while (!ahead.settle(claim, kSecond)) {
    }
  }

  Draw take(int64_t ns = 20 * kSecond) { return ahead.take(ns, shortage); }

  // The batch ordered as number `i`.
  const Drawn& operator[](size_t i) const { return *batches_[i]; }

  Backlog backlog;
  std::optional<Shortage> shortage;

 private:
  std::vector<std::unique_ptr<Drawn>> batches_;
  uint64_t step_ = 0;

 public:
  DrawAhead ahead;  // goes first: its thread writes to the batches
};

}  // namespace

BOOST_AUTO_TEST_CASE(batches_come_in_order_and_are_those_of_a_sampler) {
  const auto expected = draw_in_turn(*buffer_of(50), 200);
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order(3);
  for (size_t i = 0; i < 200; i++) {
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    BOOST_TEST(learner[i].keys == expected[i].keys);
    BOOST_TEST(learner[i].values == expected[i].values);
    BOOST_TEST(learner[i].weight == expected[i].weight);
    if (i < 197) learner.order();
  }
  BOOST_TEST(m->header().sampled == 200U * kBatch);
  BOOST_TEST(learner.backlog.empty());
}

BOOST_AUTO_TEST_CASE(what_nobody_took_has_not_been_drawn) {
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order(5);
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  learner.ahead.close();
  BOOST_TEST(m->header().sampled == uint64_t{kBatch});
  BOOST_TEST(m->header().draws == 1U);
  BOOST_TEST(learner.backlog.empty());
  learner.order();
  BOOST_TEST((learner.take() == Draw::kDone), "it starts again");
}

BOOST_AUTO_TEST_CASE(settled_means_that_all_is_drawn) {
  auto m = buffer_of(50);
  Learner learner(*m);
  BOOST_TEST(learner.settled());
  learner.order(4);
  learner.settle();
  const std::vector<Order> drawn = learner.ahead.drawn();
  BOOST_REQUIRE(drawn.size() == 4U);
  for (uint64_t step = 0; step < 4; step++) BOOST_TEST(drawn[step].name.step == step);
}

BOOST_AUTO_TEST_CASE(finished_are_the_orders_that_are_drawn_and_not_taken) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  Learner learner(*m);
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
  Learner learner(*m);
  learner.order(4);
  bool settled = false;
  std::thread([&] { settled = learner.settled(); }).join();
  BOOST_TEST(settled);
}

BOOST_AUTO_TEST_CASE(a_shortage_is_told_once_and_ends_with_the_rows) {
  Plan plan;
  plan.limiter.min_size = 60;
  auto m = buffer_of(50, plan);
  Learner learner(*m);
  learner.order(2);
  BOOST_REQUIRE(learner.take() == Draw::kWait);
  BOOST_REQUIRE(learner.shortage.has_value());
  BOOST_TEST(learner.shortage->inserted == 50U);
  BOOST_TEST(learner.shortage->needed == 60U);
  BOOST_TEST(learner.ahead.settle(learner.ahead.claim(true), kSecond), "it waits for rows that have not come");
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
  Learner learner(*m);
  learner.order();
  while (!learner.shortage) learner.take();
  BOOST_TEST(m->header().demand == 60U);
  learner.ahead.close();
  BOOST_TEST(m->header().demand == 0U);
}

BOOST_AUTO_TEST_CASE(a_stopped_buffer_gives_no_more_batches) {
  auto m = buffer_of(50);
  m->header().stopped.store(1);
  Learner learner(*m);
  learner.order(2);
  BOOST_TEST((learner.take() == Draw::kStopped));
  BOOST_TEST((learner.take() == Draw::kStopped));
}

BOOST_AUTO_TEST_CASE(closing_waits_for_no_lock) {
  auto m = buffer_of(50);
  std::optional<Locked> held(*m);
  std::thread([&] {
    Learner learner(*m);
    learner.order(2);
    const int64_t start = monotonic_ns();
    learner.ahead.close();
    BOOST_TEST(monotonic_ns() - start < 10 * kSecond);
    BOOST_TEST(learner.backlog.empty());
  }).join();
}

BOOST_AUTO_TEST_CASE(missed_updates_are_those_between_draw_and_taking) {
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order();
  learner.settle();
  m->header().updated += 5;
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  BOOST_TEST(learner.ahead.missed_updates() == 5U);
}

// TD errors for batch `k`, that differ much.
Feedback feedback_to(const Drawn& batch, uint64_t k) {
  Feedback feedback{batch.keys, {}};
  for (size_t i = 0; i < batch.keys.size(); i++) feedback.td.push_back(static_cast<double>((k + 3) * (i + 1) % 101));
  return feedback;
}

void apply_to(SegmentMemory& m, const Feedback& f) {
  PriorityUpdater(m).update(static_cast<int64_t>(f.keys.size()), f.keys.data(), f.td.data());
}

// Every slot's leaf.
std::vector<float> leaves(SegmentMemory& m) {
  const float* first = m.tree().leaves();
  return {first, first + m.capacity()};
}

BOOST_AUTO_TEST_CASE(what_is_handed_over_has_its_turn_among_the_draws) {
  constexpr size_t kAhead = 3, kSteps = 100;
  auto reference = buffer_of(50);
  std::vector<Drawn> expected(kSteps + kAhead);
  BatchSampler sampler(*reference);
  const auto draw = [&](size_t step) {
    Shortage shortage;
    BOOST_REQUIRE(sampler.sample(kBatch, 0.5, {7, 0, step}, expected[step].pointers(), shortage) == Draw::kDone);
  };
  for (size_t k = 0; k < kAhead; k++) draw(k);
  for (size_t k = 0; k < kSteps; k++) {
    apply_to(*reference, feedback_to(expected[k], k));
    draw(k + kAhead);
  }

  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order(kAhead);
  size_t handed_over = 0;
  for (size_t k = 0; k < kSteps; k++) {
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    BOOST_TEST(learner[k].keys == expected[k].keys);
    BOOST_TEST(learner[k].probability == expected[k].probability);
    Feedback feedback = feedback_to(learner[k], k);
    if (learner.ahead.hand_over(feedback)) {
      handed_over++;
    } else {
      learner.settle();
      apply_to(*m, feedback);
    }
    learner.order_later();
  }
  learner.settle();
  BOOST_TEST(learner.backlog.empty());
  BOOST_TEST(leaves(*m) == leaves(*reference));
  BOOST_TEST(handed_over > kSteps / 2);
}

BOOST_AUTO_TEST_CASE(learners_of_short_steps_apply_their_feedback_themselves) {
  auto m = buffer_of(50);
  Learner learner(*m);
  constexpr int64_t kShort = 150'000;
  constexpr int kMany = 40;  // so that those before hardly count
  int64_t began = 0;
  for (int in_a_row = 0, k = 0; in_a_row < kMany; k++) {
    BOOST_REQUIRE(k < 100'000);
    const int64_t now = monotonic_ns();
    learner.order();
    in_a_row = monotonic_ns() - began < kShort ? in_a_row + 1 : 0;  // or the processor was another's meanwhile
    began = now;
    BOOST_REQUIRE(learner.take() == Draw::kDone);
  }
  Feedback feedback = feedback_to(learner[0], 0);
  BOOST_TEST(!learner.ahead.hand_over(feedback));
  BOOST_TEST(feedback.keys == learner[0].keys);
}

// What they are when the first batch has been fed back.
std::vector<float> leaves_after_one_feedback() {
  auto m = buffer_of(50);
  apply_to(*m, feedback_to(draw_in_turn(*m, 1)[0], 0));
  return leaves(*m);
}

// One batch has been drawn, and there is one more order; its feedback is with the thread.
void hand_one_over(Learner& learner) {
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  learner.order_later();
  Feedback feedback = feedback_to(learner[0], 0);
  BOOST_REQUIRE(learner.ahead.hand_over(feedback));
}

BOOST_AUTO_TEST_CASE(any_thread_that_settles_finds_what_was_handed_over_applied) {
  auto m = buffer_of(50);
  Learner learner(*m);
  hand_one_over(learner);
  std::thread([&] {
    learner.settle();
    BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  }).join();
}

BOOST_AUTO_TEST_CASE(closing_applies_what_was_handed_over) {
  auto m = buffer_of(50);
  Learner learner(*m);
  hand_one_over(learner);
  learner.ahead.close();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  BOOST_TEST(learner.backlog.empty());
}

BOOST_AUTO_TEST_CASE(what_was_handed_over_is_dropped_and_counted_when_the_lock_does_not_come_free) {
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  const std::vector<float> before = leaves(*m);
  {
    const Locked held(*m);
    learner.order_later();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.hand_over(feedback));
    std::thread([&] {
      const auto never = std::exchange(interrupted, [] { return true; });
      learner.ahead.close();
      interrupted = never;
    }).join();
  }
  BOOST_TEST(learner.backlog.empty());
  BOOST_TEST(leaves(*m) == before);
  BOOST_TEST(m->header().stale_updates == uint64_t{kBatch});
}

BOOST_AUTO_TEST_CASE(whoever_settles_waits_for_what_was_there_and_for_nothing_later) {
  auto m = buffer_of(50);
  Learner learner(*m);
  hand_one_over(learner);
  const DrawAhead::Claim first = learner.ahead.claim(true);
  learner.settle();
  {
    const Locked held(*m);
    learner.order_later();
    Feedback feedback = feedback_to(learner[0], 1);
    BOOST_REQUIRE(learner.ahead.hand_over(feedback));
    std::thread([&] {
      BOOST_TEST(learner.ahead.settled({first.feedback, false}));
      BOOST_TEST(!learner.settled());
      BOOST_TEST(!learner.ahead.settle(learner.ahead.claim(false), kSecond / 100));
    }).join();
  }
  learner.settle();
  BOOST_TEST(learner.backlog.empty());
}

BOOST_AUTO_TEST_CASE(a_thread_that_cannot_draw_on_applies_what_was_handed_over_before) {
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order();
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  {
    const Locked held(*m);  // so that the draw does not know yet that it cannot be made
    learner.order_later();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.hand_over(feedback));
    m->header().stopped.store(1);
  }
  learner.settle();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
}

BOOST_AUTO_TEST_CASE(what_was_handed_over_does_not_wait_for_rows_with_a_draw) {
  auto m = buffer_of(50);
  Learner learner(*m);
  {
    std::optional<Locked> held;
    learner.order();
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    held.emplace(*m);  // so that the draw does not know yet that it has to wait
    change_limiter(m->header(), {.min_size = 60});
    learner.order_later();
    Feedback feedback = feedback_to(learner[0], 0);
    BOOST_REQUIRE(learner.ahead.hand_over(feedback));
  }
  learner.settle();
  BOOST_TEST(leaves(*m) == leaves_after_one_feedback());
  BOOST_TEST((learner.take(kSecond / 1000) == Draw::kWait));
  Feedback feedback = feedback_to(learner[0], 1);
  BOOST_TEST(!learner.ahead.hand_over(feedback));
}

BOOST_AUTO_TEST_CASE(missed_updates_are_also_those_that_were_handed_over) {
  auto m = buffer_of(50);
  Learner learner(*m);
  hand_one_over(learner);
  BOOST_REQUIRE(learner.take() == Draw::kDone);
  BOOST_TEST(learner.ahead.missed_updates() == uint64_t{kBatch});
}

BOOST_AUTO_TEST_CASE(a_forked_child_knows_that_the_thread_is_not_there) {
  auto m = buffer_of(50);
  Learner learner(*m);
  learner.order(3);
  BOOST_TEST(learner.ahead.here());
  const pid_t child = fork();
  if (child == 0) _exit(learner.ahead.here() ? 1 : 0);
  int status = 1;
  BOOST_REQUIRE(waitpid(child, &status, 0) == child);
  BOOST_TEST(status == 0);
  BOOST_TEST((learner.take() == Draw::kDone));
}
