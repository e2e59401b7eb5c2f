#include <boost/test/unit_test.hpp>
#include <thread>

#include "caller.h"
#include "children.h"
#include "client/writer.h"
#include "explorers.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_writer)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// Without a draw it admits so many rows.
constexpr uint64_t kAdmitted = 4;
constexpr LimiterConfig kTight{.min_size = kAdmitted, .ratio = 1, .min_diff = 0, .max_diff = 4};

std::shared_ptr<Attachment> attachment(const Plan& plan = {}) {
  auto a = std::make_shared<Attachment>(make_segment(plan));
  a->refresh({});
  return a;
}

std::unique_ptr<Writer> writer_to(const std::shared_ptr<Attachment>& a) {
  return std::make_unique<Writer>(a, Lanes(1, false, Autoreset::kNextStep));
}

struct Rows {
  RowMeta meta(uint64_t) const { return {}; }
  void commit(uint64_t, uint64_t) const {}
};

// Writes `n` rows in one call; returns their keys.
std::vector<int64_t> write(Writer& writer, Wait& wait, uint64_t n = 1) {
  const Writer::Call call(writer);
  std::vector<int64_t> keys(n, -1);
  Rows rows;
  const auto fill = [&](uint64_t, uint64_t slot) { fill_row(writer.memory(), slot, 7); };
  writer.write(n, rows, keys.data(), fill, wait);
  return keys;
}

// Of a buffer whose learner draws little.
std::shared_ptr<Attachment> tight() {
  Plan plan;
  plan.limiter = kTight;
  plan.capacity = 64;
  const Caller caller;
  return attachment(plan);
}

// The next row has to wait.
std::unique_ptr<Writer> waiting_writer_to(const std::shared_ptr<Attachment>& a) {
  auto writer = writer_to(a);
  CountedWait wait;
  write(*writer, wait, kAdmitted);
  return writer;
}

// Another learner draws: writers may go on.
void make_room(Attachment& a, uint64_t draws) {
  SegmentLock lock(a.memory());
  a.memory().header().sampled += draws;
  publish_limit(a.memory());
}

}  // namespace

BOOST_AUTO_TEST_CASE(rows_are_written_and_counted_also_over_a_departure) {
  const Caller caller;
  const auto a = attachment();
  const auto writer = writer_to(a);
  BOOST_TEST(take_census(a->memory(), true).writers == 1, "it counts from the start");
  CountedWait wait;
  BOOST_TEST(write(*writer, wait, 3) == (std::vector<int64_t>{0, 1, 2}));
  writer->depart();
  BOOST_TEST(take_census(a->memory(), true).writers == 0);
  BOOST_TEST(writer->rows() == 3U);
  BOOST_TEST(write(*writer, wait) == std::vector<int64_t>{3});
  writer->close();
  BOOST_TEST(writer->rows() == 4U);
  BOOST_TEST(writer->closed());
  BOOST_CHECK_THROW(write(*writer, wait), std::invalid_argument);
  BOOST_TEST(wait.looks == 0);
}

BOOST_AUTO_TEST_CASE(a_wait_for_the_learner_looks_when_it_begins_and_once_a_slice) {
  const auto a = tight();
  constexpr int kSlices = 6;
  CountedWait wait;
  std::vector<int64_t> waited;
  wait.at_look = [&](Blocked why, int64_t ns) {
    BOOST_TEST((why == Blocked::kLimited));
    waited.push_back(ns);
    if (waited.size() == kSlices) make_room(*a, 1);
  };
  const Caller caller;
  const auto writer = waiting_writer_to(a);
  write(*writer, wait);
  BOOST_TEST(writer->rows() == kAdmitted + 1);
  BOOST_REQUIRE(waited.size() == size_t{kSlices});
  BOOST_TEST(waited[0] == 0);
  for (size_t i = 1; i < waited.size(); i++) BOOST_TEST(waited[i] >= static_cast<int64_t>(i) * kSliceNs);
}

// It would turn in a loop until it is admitted.
BOOST_AUTO_TEST_CASE(it_sleeps_again_when_another_one_has_used_up_what_a_draw_let_through) {
  const auto a = tight();
  const Caller caller;
  const auto writer = waiting_writer_to(a);
  CountedWait wait;
  wait.at_look = [&](Blocked, int64_t) {
    futex_signal(a->memory().header().room_signal);  // and nothing is admitted
    if (wait.looks == 4) throw GaveUp();
  };
  const int64_t start = monotonic_ns();
  BOOST_CHECK_THROW(write(*writer, wait), GaveUp);
  BOOST_TEST(monotonic_ns() - start >= 3 * kSliceNs);
}

BOOST_AUTO_TEST_CASE(who_waits_for_the_learner_wakes_when_it_has_drawn) {
  const auto a = tight();
  std::atomic<bool> waits{false};
  CountedWait wait;
  wait.at_look = [&](Blocked, int64_t) { waits = true; };
  std::thread explorer([&] {
    const Caller caller;
    const auto writer = writer_to(a);
    write(*writer, wait, 32 + kAdmitted);
  });
  while (!waits) std::this_thread::yield();
  for (int i = 0; i < 32; i++) {
    const Caller caller;
    make_room(*a, 1);
  }
  explorer.join();
  BOOST_TEST(a->head() == 32 + kAdmitted);
}

BOOST_AUTO_TEST_CASE(a_wait_that_gives_up_ends_the_call_and_the_writer_goes_on) {
  const auto a = tight();
  const Caller caller;
  const auto writer = waiting_writer_to(a);
  CountedWait wait;
  wait.at_look = [](Blocked, int64_t) { throw GaveUp(); };
  BOOST_CHECK_THROW(write(*writer, wait), GaveUp);
  BOOST_TEST(writer->rows() == kAdmitted, "nothing is written");
  BOOST_TEST(!writer->in_use());
  make_room(*a, 4);
  write(*writer, wait, 4);
  BOOST_TEST(writer->rows() == kAdmitted + 4);
}

BOOST_AUTO_TEST_CASE(another_thread_is_refused_while_a_call_waits) {
  const auto a = tight();
  const auto writer = [&] {
    const Caller caller;
    return waiting_writer_to(a);
  }();
  std::atomic<bool> waits{false};
  CountedWait wait, other;
  wait.at_look = [&](Blocked, int64_t) { waits = true; };
  std::thread explorer([&] {
    const Caller caller;
    write(*writer, wait);
  });
  while (!waits) std::this_thread::yield();
  {
    const Caller caller;
    BOOST_TEST(writer->in_use());
    BOOST_CHECK_THROW(write(*writer, other), std::runtime_error);
    BOOST_CHECK_THROW(writer->close(), std::runtime_error);
    make_room(*a, 1);
  }
  explorer.join();
  const Caller caller;
  BOOST_TEST(writer->rows() == kAdmitted + 1);
}

BOOST_AUTO_TEST_CASE(a_child_that_is_forked_out_of_a_waiting_call_does_not_go_on_with_it) {
  const auto a = tight();
  const Caller caller;
  const auto writer = waiting_writer_to(a);
  CountedWait wait;
  pid_t child = -1;
  wait.at_look = [&](Blocked, int64_t) {
    child = fork();
    if (child > 0) throw GaveUp();
    make_room(*a, 1);
  };
  int status = 1;
  try {
    write(*writer, wait);
  } catch (const GaveUp&) {
    waitpid(child, &status, 0);
  } catch (const std::runtime_error&) {
    _exit(0);
  } catch (...) {
  }
  if (child == 0) _exit(3);
  BOOST_TEST(status == 0);
  BOOST_TEST(writer->rows() == kAdmitted);
  BOOST_TEST(a->head() == kAdmitted);
}

BOOST_AUTO_TEST_CASE(a_stalled_call_goes_on_when_a_slot_comes_free) {
  Plan plan;
  plan.capacity = 4;
  const Caller caller;
  const auto a = attachment(plan);
  const Membership others(a, Role::kWriter);
  std::vector<SteppedWriter> slow;
  const int id = join(a->memory(), Role::kWriter);  // alive, and as good as stopped
  for (int i = 0; i < 4; i++) {
    slow.emplace_back(a->memory(), id);
    slow.back().take_ticket();
    BOOST_REQUIRE(slow.back().seize());
  }
  const auto writer = writer_to(a);
  CountedWait wait;
  std::vector<int64_t> waited;
  wait.at_look = [&](Blocked why, int64_t ns) {
    BOOST_TEST((why == Blocked::kStalled));
    waited.push_back(ns);
    if (waited.size() == 3)
      for (SteppedWriter& w : slow) w.finish();
  };
  write(*writer, wait);
  BOOST_TEST(writer->rows() == 1U);
  BOOST_REQUIRE(waited.size() == 3U);
  BOOST_TEST(waited[0] == 0);
  BOOST_TEST(waited[2] >= 2 * kSliceNs);
}

BOOST_AUTO_TEST_CASE(a_learner_that_is_stopped_with_the_lock_holds_no_look_up) {
  const auto a = tight();
  const auto writer = [&] {
    const Caller caller;
    return waiting_writer_to(a);
  }();
  Gate held;
  Child learner([&] {
    const SegmentLock lock(a->memory());
    held.open();
    sleep_for_ever();
  });
  held.wait();
  const Caller caller;
  CountedWait wait;
  wait.at_look = [&](Blocked, int64_t waited) {
    if (waited > 4 * kSliceNs) throw GaveUp();
  };
  BOOST_CHECK_THROW(write(*writer, wait), GaveUp);
  BOOST_TEST(wait.looks >= 3);
}

BOOST_AUTO_TEST_CASE(episodes_belong_to_the_thread_that_wrote_them) {
  Plan plan;
  plan.view = View{.span = 1, .min_steps = 1};
  const Caller caller;
  const auto a = attachment(plan);
  Writer writer(a, Lanes(2, true, Autoreset::kDisabled, plan.view));
  CountedWait wait;
  int64_t keys[2] = {-1, -1};
  const auto fill = [&](uint64_t, uint64_t slot) { fill_row(writer.memory(), slot, 7); };
  const auto no_priority = [](const StreamRow&) { return RowMeta{}; };
  {
    const Writer::Call call(writer);
    const uint8_t first_lane[] = {1, 0};
    writer.lanes().plan_reset(first_lane);
    writer.write_planned(keys, 100, no_priority, fill, wait);
  }
  BOOST_TEST(keys[0] == 100, "the first key, and so many more");
  BOOST_TEST(keys[1] == -1);
  BOOST_TEST(!writer.is_elsewhere());
  bool elsewhere = false, others_lane = true;
  std::thread([&] {
    elsewhere = writer.is_elsewhere();
    const uint8_t but[] = {1, 0};
    others_lane = writer.is_elsewhere(but);
  }).join();
  BOOST_TEST(elsewhere);
  BOOST_TEST(!others_lane, "which begins anew");
}

BOOST_AUTO_TEST_SUITE_END()
