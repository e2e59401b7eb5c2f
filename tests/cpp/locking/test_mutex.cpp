#include <boost/test/unit_test.hpp>
#include <thread>

#include "children.h"
#include "invariants.h"
#include "locking/robust_mutex.h"
#include "reached.h"
#include "segments.h"

using namespace torchreplay;
using namespace torchreplay::testing;
using Outcome = RobustMutex::Outcome;

BOOST_AUTO_TEST_SUITE(test_mutex)

namespace {

constexpr int64_t kSecond = 1'000'000'000;

thread_local int64_t released = 0;     // when this thread last let go of a segment's lock
thread_local int64_t longest_gap = 0;  // ns between letting go of it and having it again

Patience until(int64_t ns_from_now) { return {.deadline = monotonic_ns() + ns_from_now}; }

// What a wait for the lock throws, and "" when it gets it.
std::string timeout_of(SegmentMemory& m, const Patience& patience) {
  try {
    const SegmentLock lock(m, patience);
  } catch (const LockTimeout& e) {
    return e.what();
  }
  return "";
}

// A mutex that children share.
class SharedMutex {
 public:
  SharedMutex() : page_(map_shared(file_, kPage)) { mutex().init(); }
  ~SharedMutex() { munmap(page_, kPage); }
  SharedMutex(const SharedMutex&) = delete;
  RobustMutex& mutex() { return *reinterpret_cast<RobustMutex*>(page_); }

 private:
  Descriptor file_ = memory_file(kPage);
  char* page_;
};

// ThreadSanitizer's lock does not sleep, but tries again and again.
#ifdef TORCHREPLAY_RACEFREE
constexpr bool kSleeps = false;
#else
constexpr bool kSleeps = true;
#endif

// A thread that waits for a lock in `take`. Its constructor returns when the thread sleeps there.
class Waiter {
 public:
  template <class Take>
  explicit Waiter(Take take)
      : thread_([this, take] {
          id_ = static_cast<pid_t>(syscall(SYS_gettid));
          take();
          through_ = true;
        }) {
    while (id_ == 0 || (kSleeps && process_state(id_) != 'S' && !through_)) std::this_thread::yield();
  }
  bool through() const { return through_; }
  void join() { thread_.join(); }

 private:
  std::atomic<pid_t> id_{0};
  std::atomic<bool> through_{false};
  std::thread thread_;
};

// Holds the lock of a segment until it is killed.
class Holder {
 public:
  explicit Holder(SegmentMemory& m, Dirty dirty = Dirty::kClean)
      : child_([&] {
          const SegmentLock lock(m);
          m.header().dirty = dirty;
          held_.open();
          sleep_for_ever();
        }) {
    held_.wait();
  }
  Child& child() { return child_; }

 private:
  Gate held_;
  Child child_;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_free_mutex_is_taken_and_a_held_one_times_out) {
  SharedMutex shared;
  BOOST_TEST((shared.mutex().lock_for(0) == Outcome::kLocked));
  std::thread([&] {
    const int64_t start = monotonic_ns();
    BOOST_TEST((shared.mutex().lock_for(3'000'000) == Outcome::kTimeout));
    BOOST_TEST(monotonic_ns() - start >= 3'000'000);
  }).join();
  shared.mutex().unlock();
  BOOST_TEST((shared.mutex().lock_for(0) == Outcome::kLocked));
  shared.mutex().unlock();
}

BOOST_AUTO_TEST_CASE(a_waiter_gets_the_mutex_when_it_is_unlocked) {
  SharedMutex shared;
  shared.mutex().lock_for(0);
  Outcome outcome{};
  Waiter waiter([&] {
    outcome = shared.mutex().lock_for(60 * kSecond);
    shared.mutex().unlock();
  });
  BOOST_TEST(!waiter.through());
  shared.mutex().unlock();
  waiter.join();
  BOOST_TEST((outcome == Outcome::kLocked));
}

BOOST_AUTO_TEST_CASE(the_death_of_a_holder_is_told_until_somebody_has_repaired) {
  SharedMutex shared;
  auto die_holding = [&] {
    BOOST_TEST(Child([&] {
                 shared.mutex().lock_for(60 * kSecond);
                 _exit(7);
               }).wait() == 7);
  };
  die_holding();
  die_holding();  // who was told, and died before it had repaired
  BOOST_TEST((shared.mutex().lock_for(0) == Outcome::kOwnerDied));
  shared.mutex().mark_consistent();
  shared.mutex().unlock();
  BOOST_TEST((shared.mutex().lock_for(0) == Outcome::kLocked));
  shared.mutex().unlock();
}

BOOST_AUTO_TEST_CASE(a_mutex_unlocked_without_repair_is_an_error_and_no_hang) {
  SharedMutex shared;
  Child([&] {
    shared.mutex().lock_for(0);
    _exit(0);
  }).wait();
  shared.mutex().lock_for(0);
  shared.mutex().unlock();
  BOOST_CHECK_THROW(shared.mutex().lock_for(0), std::system_error);
}

BOOST_AUTO_TEST_CASE(a_holder_killed_while_others_wait_lets_them_go_on) {
  auto m = make_segment();
  append_row(*m, 1);
  Holder holder(*m, Dirty::kLinks);
  Waiter waiter([&] { settle(*m); });
  BOOST_TEST(!waiter.through());
  holder.child().kill_and_wait();
  waiter.join();
  BOOST_TEST(m->header().repairing.load() > 0U);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_clean_death_needs_no_repair_and_leaves_the_lock_usable) {
  auto m = make_segment();
  {
    Holder holder(*m);
  }
  settle(*m);
  settle(*m);
  BOOST_TEST(m->header().repairing.load() == 0U);
}

BOOST_AUTO_TEST_CASE(the_holder_is_recorded_for_messages) {
  auto m = make_segment();
  Holder holder(*m);
  BOOST_TEST(m->header().holder_pid.load() == holder.child().pid());
}

BOOST_AUTO_TEST_CASE(a_wait_for_the_lock_can_be_interrupted) {
  auto m = make_segment();
  Holder holder(*m);
  interrupted = [] { return true; };
  BOOST_CHECK_THROW(SegmentLock lock(*m), Interrupted);
  interrupted = [] { return false; };
}

BOOST_AUTO_TEST_CASE(a_wait_for_a_stopped_holder_ends_at_its_own_deadline_and_names_it) {
  auto m = make_segment();
  Holder holder(*m);
  const std::string pid = std::to_string(holder.child().pid());
  BOOST_TEST(timeout_of(*m, until(0)).find("process " + pid + " holds it and is slow") != std::string::npos);
  holder.child().stop();
  const int64_t start = monotonic_ns();
  BOOST_TEST(timeout_of(*m, until(120'000'000)).find("process " + pid + " holds it and is stopped") !=
             std::string::npos);
  BOOST_TEST(monotonic_ns() - start >= 120'000'000);
  BOOST_TEST(m->header().mutex.holder() == static_cast<uint32_t>(holder.child().pid()));  // it still is
}

BOOST_AUTO_TEST_CASE(a_wait_without_a_deadline_reports_and_goes_on_until_the_holder_is_gone) {
  auto m = make_segment();
  Holder holder(*m);
  holder.child().stop();
  static std::atomic<int> reports{0};
  report_every_ns = 1;
  report_wait = [](const std::string& text) {
    reports += text.find("is stopped") != std::string::npos;
    return false;
  };
  std::thread waiter([&] { settle(*m); });
  while (reports.load() < 3) std::this_thread::yield();
  holder.child().kill_and_wait();
  waiter.join();
  report_wait = [](const std::string&) { return true; };
  Holder another(*m);
  BOOST_CHECK_THROW(SegmentLock lock(*m), Interrupted);
  report_wait = [](const std::string&) { return false; };
  report_every_ns = 10 * kSecond;
}

BOOST_AUTO_TEST_CASE(stopping_the_buffer_ends_the_waits_that_ask_for_it) {
  auto m = make_segment();
  Holder holder(*m);
  m->header().stopped.store(1);
  BOOST_CHECK_THROW(SegmentLock lock(*m, {.until_stopped = true}), StoppedMeanwhile);
  BOOST_TEST(timeout_of(*m, until(0)) != "");
}

BOOST_AUTO_TEST_CASE(a_lock_that_the_kernel_does_not_hand_on_is_taken_from_the_dead) {
  auto m = make_segment();
  append_row(*m, 1);
  Gate held;
  Child holder([&] {
    lose_the_list_of_locks();
    const SegmentLock lock(*m);
    m->header().dirty = Dirty::kLinks;
    held.open();
    sleep_for_ever();
  });
  held.wait();
  BOOST_TEST(timeout_of(*m, until(0)) != "");  // not from the living
  holder.kill_and_wait();
  BOOST_TEST((m->header().mutex.lock_for(1) == Outcome::kTimeout));  // nor does the kernel
  settle(*m);
  BOOST_TEST(m->header().repairing.load() > 0U);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_holder_whose_descriptors_others_have_closed_is_not_taken_for_dead) {
  auto m = make_segment();
  Gate held;
  Child holder([&] {
    const SegmentLock lock(*m);
    held.open();
    close_all_descriptors();
    sleep_for_ever();
  });
  held.wait();
  BOOST_TEST(timeout_of(*m, until(200'000'000)) != "");
  BOOST_TEST(m->header().mutex.holder() == static_cast<uint32_t>(holder.pid()));
}

BOOST_AUTO_TEST_CASE(a_forked_child_in_another_pid_namespace_does_not_get_the_lock) {
  auto m = make_segment();
  const int status = run_in_own_pid_namespace([&] {
    try {
      const SegmentLock lock(*m);
    } catch (const OtherNamespace&) {
      _exit(0);
    }
    _exit(11);
  });
  BOOST_TEST_REQUIRE(status != 77, "this system lets nobody make a pid namespace");
  BOOST_TEST(status == 0);
  BOOST_TEST(timeout_of(*m, until(0)) == "");
}

BOOST_AUTO_TEST_CASE(whoever_has_let_go_of_the_lock_is_not_taken_for_its_holder) {
  auto m = make_segment();
  Child([&] { settle(*m); }).wait();
  BOOST_TEST(m->header().holder.load() == 0U);
  BOOST_TEST(m->header().holder_pid.load() != 0);
}

BOOST_AUTO_TEST_CASE(a_process_is_seen_running_stopped_dead_and_gone) {
  Child child([] { sleep_for_ever(); });
  const pid_t pid = child.pid();
  // A fresh process may wait for a page: it comes to its sleep as soon as the machine lets it.
  while (process_state(pid) != 'S') BOOST_REQUIRE(std::string("RDS").find(process_state(pid)) != std::string::npos);
  child.stop();
  BOOST_TEST(process_state(pid) == 'T');
  child.make_zombie();
  BOOST_TEST(process_state(pid) == 'Z');
  child.wait();
  BOOST_TEST(process_state(pid) == kEnded);
}

BOOST_AUTO_TEST_CASE(threads_take_turns) {
  auto m = make_segment();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; i++) {
        const SegmentLock lock(*m);
        m->header().sampled++;
      }
    });
  for (std::thread& t : threads) t.join();
  BOOST_TEST(m->header().sampled == 8000U);
}

static void reach(std::string_view point) {
  if (point == "lock.between") released = monotonic_ns();
  if (point == "lock.taken" && released) longest_gap = std::max(longest_gap, monotonic_ns() - released);
}

// Between two chunks whoever sleeps gets the lock, or had 200 us for it: a busy machine may give it no processor.
BOOST_AUTO_TEST_CASE(who_absorbs_much_lets_those_in_who_sleep_until_the_lock_comes_free) {
  const AtPoints calls(reach);
  constexpr int64_t kGivenNs = 200'000;
  Plan plan;
  plan.capacity = 2 * Absorber::kChunk;
  for (int trial = 0; trial < 20 && kSleeps; trial++) {
    auto m = make_segment(plan);
    for (uint64_t i = 0; i < plan.capacity; i++) append_row(*m, 1);
    std::atomic<bool> entered{false};
    std::optional<SegmentLock> lock(*m);
    Waiter waiter([&] {
      const SegmentLock other(*m);
      entered = true;
    });
    while (!m->header().mutex.wanted()) std::this_thread::yield();
    released = longest_gap = 0;
    lock->absorb();
    BOOST_TEST((entered || longest_gap >= kGivenNs));
    lock.reset();
    waiter.join();
  }
}

BOOST_AUTO_TEST_SUITE_END()
