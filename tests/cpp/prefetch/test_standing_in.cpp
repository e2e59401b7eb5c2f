#include <atomic>
#include <functional>

#include "prefetching_learner.h"
#include "reached.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_standing_in)

namespace {

using std::chrono::milliseconds;

// What the calling thread does the next time that it has drawn, and not copied.
thread_local std::function<void()> once_drawn;

void reach(std::string_view point) {
  if (point == "draw.drawn" && once_drawn) std::exchange(once_drawn, nullptr)();
}

// Orders, and takes, in steps of so many milliseconds: the drawing thread sleeps between them, and knows when to get
// up.
void take_steps(PrefetchingLearner& learner, int step, int many = 20) {
  for (int k = 0; k < many; k++) {
    learner.order();
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    std::this_thread::sleep_for(milliseconds(step));
  }
}

// Overwrites all rows, so that a draw that copies them afterwards must take the lock again.
void turn(SegmentMemory& m) {
  for (uint64_t i = 0; i < m.capacity(); i++) append_row(m, 1, 5000 + i, 1.0F);
}

// Another thread that holds the memory's lock.
class LockHolder {
 public:
  explicit LockHolder(SegmentMemory& m) : memory_(m) {}
  ~LockHolder() { let_go(); }

  void hold() {
    thread_ = std::thread([this] {
      const SegmentLock lock(memory_);
      held_ = true;
      while (!over_) std::this_thread::sleep_for(milliseconds(1));
    });
    while (!held_) std::this_thread::yield();
  }

  void let_go() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  SegmentMemory& memory_;
  std::thread thread_;
  std::atomic<bool> held_{false}, over_{false};
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_draw_that_one_begins_and_the_other_makes_counts_once) {
  const AtPoints calls(reach);
  auto m = buffer_of(64);
  uint64_t orders = 0;
  bool begun = false;
  for (int tries = 0; !begun; tries++) {
    BOOST_REQUIRE(tries < 100);
    PrefetchingLearner learner(*m);
    take_steps(learner, 2);
    orders += 20;
    LockHolder holder(*m);
    once_drawn = [&] {
      begun = true;
      turn(*m);
      holder.hold();
    };
    learner.order();
    orders++;
    Draw outcome = learner.take(20'000'000);
    holder.let_go();
    if (outcome != Draw::kDone) outcome = learner.take();
    BOOST_REQUIRE((outcome == Draw::kDone));
    once_drawn = nullptr;
    BOOST_TEST(m->header().draws == orders);
    BOOST_TEST(m->header().sampled == orders * kBatch);
  }
}

BOOST_AUTO_TEST_CASE(a_draw_that_throws_once_it_is_counted_has_not_happened) {
  const AtPoints calls(reach);
  auto m = buffer_of(64);
  Drawn batch;
  Shortage shortage;
  const auto draw = [&](const Patience& patience) {
    BatchSampler sampler(*m);  // nobody draws with it again
    return sampler.sample(kBatch, 0.5, {7, 0, 0}, batch.pointers(), shortage, patience);
  };
  const auto is_counted = [&](uint64_t draws) {
    BOOST_TEST(m->header().draws == draws);
    BOOST_TEST(m->header().sampled == draws * kBatch);
  };
  {
    LockHolder holder(*m);
    once_drawn = [&] {
      is_counted(1);
      turn(*m);
      holder.hold();
    };
    BOOST_CHECK_THROW(draw({.deadline = monotonic_ns() + 10'000'000}), LockTimeout);
    is_counted(0);
  }
  {
    LockHolder holder(*m);
    once_drawn = [&] {
      turn(*m);
      holder.hold();
    };
    const auto before = std::exchange(interrupted, [] { return true; });
    BOOST_CHECK_THROW(draw({}), Interrupted);
    interrupted = before;
    is_counted(0);
  }
  once_drawn = [] { throw std::bad_alloc(); };
  BOOST_CHECK_THROW(draw({}), std::bad_alloc);
  is_counted(0);
  BOOST_TEST((draw({}) == Draw::kDone));
  is_counted(1);
}

BOOST_AUTO_TEST_CASE(what_is_left_by_one_who_stood_in_wakes_a_thread_that_was_up_meanwhile) {
  const AtPoints calls(reach);
  auto m = buffer_of(64);
  constexpr int kStep = 4;
  for (int tries = 0, soon = 0; soon < 5; tries++) {
    BOOST_REQUIRE(tries < 100);
    PrefetchingLearner learner(*m);
    take_steps(learner, kStep);
    once_drawn = [] { std::this_thread::sleep_for(milliseconds(2)); };  // it gets up a millisecond after the order
    const int64_t ordered = monotonic_ns();
    learner.order(2);
    BOOST_REQUIRE(learner.take() == Draw::kDone);
    if (once_drawn) continue;  // the thread was up
    const auto since = [&] { return monotonic_ns() - ordered; };
    while (!learner.settled() && since() < 3'500'000) std::this_thread::yield();
    soon += learner.settled() && since() < 3'500'000;  // asleep, it would not be up before 1.25 steps
  }
}

BOOST_AUTO_TEST_CASE(whoever_settles_ends_in_time_however_much_there_is_to_do) {
  const AtPoints calls(reach);
  auto m = buffer_of(64);
  PrefetchingLearner learner(*m);
  take_steps(learner, 2);
  learner.order(20);
  int begun = 0;
  std::function<void()> slowly = [&] {
    begun++;
    std::this_thread::sleep_for(milliseconds(20));
    once_drawn = slowly;
  };
  once_drawn = slowly;
  (void)learner.ahead.settle(learner.ahead.settle_point(true), 30'000'000);
  once_drawn = nullptr;
  BOOST_TEST(begun <= 2);
  learner.settle();
}

BOOST_AUTO_TEST_SUITE_END()
