#include <boost/test/unit_test.hpp>
#include <chrono>
#include <functional>
#include <thread>

#include "children.h"
#include "reached.h"
#include "segment/liveness.h"
#include "segments.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_liveness)

namespace {

// What the calling thread does the next time that it has opened the lock table.
thread_local std::function<void()> once_opened;

void reach(std::string_view point) {
  if (point == "liveness.opened" && once_opened) std::exchange(once_opened, nullptr)();
}

// A child that joins a segment, leaves a slot busy and stays until it is killed.
class Explorer {
 public:
  explicit Explorer(SegmentMemory& m)
      : child_([&] {
          SteppedWriter writer(m, join(m, Role::kWriter));
          writer.take_ticket();
          writer.seize();
          joined_.open();
          sleep_for_ever();
        }) {
    joined_.wait();
  }
  Child& child() { return child_; }

 private:
  Gate joined_;
  Child child_;
};

// A second opener of the same segment in this process.
std::unique_ptr<SegmentMemory> attach(const SegmentMemory& m) {
  return open_segment(Descriptor::duplicate(m.fd()), kNonce);
}

uint64_t word_of(const SegmentMemory& m, uint64_t slot) { return m.row(slot).word.load(); }

}  // namespace

BOOST_AUTO_TEST_CASE(a_byte_is_taken_once_until_it_is_released) {
  auto m = make_segment();
  Liveness& l = m->liveness();
  BOOST_TEST(!l.alive(5));
  BOOST_TEST(l.take(5));
  BOOST_TEST(!l.take(5));  // not even by its own process
  BOOST_TEST(l.owns(5));
  BOOST_TEST(l.alive(5));
  BOOST_TEST(!l.alive(4));
  BOOST_TEST(!l.alive(6));
  l.release(5);
  l.release(5);
  BOOST_TEST(!l.owns(5));
  BOOST_TEST(!l.alive(5));
  BOOST_TEST(l.take(5));
}

BOOST_AUTO_TEST_CASE(two_attachments_of_one_process_see_each_other) {
  auto m = make_segment();
  auto other = attach(*m);
  BOOST_TEST(m->liveness().take(1));
  BOOST_TEST(other->liveness().alive(1));
  BOOST_TEST(!other->liveness().owns(1));
  BOOST_TEST(!other->liveness().take(1));
  m.reset();  // closing the attachment gives its bytes back
  BOOST_TEST(!other->liveness().alive(1));
}

BOOST_AUTO_TEST_CASE(a_stopped_process_is_alive_and_a_zombie_is_dead) {
  auto m = make_segment();
  Explorer explorer(*m);
  BOOST_TEST(m->liveness().alive(1));
  explorer.child().stop();
  BOOST_TEST(m->liveness().alive(1));
  BOOST_TEST(!m->liveness().take(1));
  explorer.child().make_zombie();
  BOOST_TEST(!m->liveness().alive(1));
  BOOST_TEST(m->liveness().take(1));
}

BOOST_AUTO_TEST_CASE(a_forked_child_owns_nothing_of_its_parents) {
  auto m = make_segment();
  const int id = join(*m, Role::kWriter);
  const uint64_t generation = fork_generation.load();
  Child child([&] {
    if (fork_generation.load() != generation + 1) _exit(10);
    if (m->liveness().owns(id)) _exit(11);
    if (!m->liveness().alive(id)) _exit(12);
    if (m->liveness().take(id)) _exit(13);
    if (join(*m, Role::kWriter) == id) _exit(14);
  });
  BOOST_TEST(child.wait() == 0);
  BOOST_TEST(fork_generation.load() == generation);
  BOOST_TEST(m->liveness().owns(id));
}

BOOST_AUTO_TEST_CASE(a_forked_child_that_lives_on_does_not_keep_its_parents_bytes) {
  auto m = make_segment();
  Gate forked, finish;
  Child parent([&] {
    join(*m, Role::kWriter);
    if (fork() == 0) {
      forked.open();
      finish.wait();
      _exit(0);
    }
    sleep_for_ever();
  });
  forked.wait();
  BOOST_TEST(m->liveness().alive(1));
  parent.kill_and_wait();
  BOOST_TEST(!m->liveness().alive(1));
  finish.open();
}

BOOST_AUTO_TEST_CASE(a_fork_in_the_middle_of_a_probe_leaves_the_child_able_to_probe) {
  auto m = make_segment();
  std::atomic<bool> over{false};
  std::thread prober([&] {
    while (!over.load()) m->liveness().alive(3);
  });
  for (int i = 0; i < 50; i++) {
    Child child([&] { _exit(m->liveness().take(3) ? 0 : 1); });
    BOOST_TEST(child.wait() == 0);
  }
  over = true;
  prober.join();
}

BOOST_AUTO_TEST_CASE(a_fork_while_the_lock_table_is_being_opened_leaves_the_child_no_lock_of_its_parents) {
  const AtPoints calls(reach);
  auto m = make_segment();
  auto other = attach(*m);
  Gate started;
  std::atomic<pid_t> child{0};
  std::thread forker;
  once_opened = [&] {
    forker = std::thread([&] {
      const pid_t forked = fork();
      if (forked == 0) {
        started.open();
        sleep_for_ever();
      }
      child = forked;
    });
    // Long for a fork that waits for nothing; one that waits goes on when the table is open.
    for (int i = 0; i < 500 && child == 0; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  BOOST_TEST(m->liveness().take(1));
  forker.join();
  started.wait();
  m->liveness().forget();  // as this process's death would
  BOOST_TEST(!other->liveness().alive(1));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

BOOST_AUTO_TEST_CASE(a_process_whose_descriptors_others_have_closed_is_told_and_touches_no_file_of_theirs) {
  auto m = make_segment();
  Child child([&] {
    join(*m, Role::kWriter);
    reuse_all_descriptors();
    Liveness& l = m->liveness();
    const auto refused = [](const auto& call) {
      try {
        call();
      } catch (const DescriptorLost&) {
        return true;
      }
      return false;
    };
    if (l.holds(1)) _exit(10);
    if (!refused([&] { l.require_own(); }) || !refused([&] { l.take(2); }) || !refused([&] { l.alive(1); })) _exit(11);
    if (!refused([&] { take_census(*m, false); }) || !refused([&] { m->fd(); })) _exit(12);
    leave(*m, 1);
    if (m->participant(1).role.load() == 0) _exit(13);  // it may be another's by now
    m.reset();
    for (int fd = 3; fd < 3 + 64; fd++) {
      struct flock any{};
      any.l_type = F_WRLCK;
      const Descriptor again(open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR));
      if (again.get() < 0 || fcntl(again.get(), F_OFD_GETLK, &any) != 0 || any.l_type != F_UNLCK) _exit(14);
    }
  });
  BOOST_TEST(child.wait() == 0);
}

BOOST_AUTO_TEST_CASE(a_forked_child_whose_descriptors_others_have_closed_takes_no_lock_on_theirs) {
  auto m = make_segment();
  Child child([&] {
    reuse_all_descriptors();
    try {
      join(*m, Role::kWriter);
    } catch (const DescriptorLost&) {
      _exit(0);
    }
  });
  BOOST_TEST(child.wait() == 0);
}

BOOST_AUTO_TEST_CASE(an_attachment_made_after_that_keeps_its_descriptors_when_the_one_before_goes) {
  auto m = make_segment();
  const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(m->fd());
  Child child([&] {
    join(*m, Role::kWriter);
    close_all_descriptors();
    auto again = open_segment(Descriptor(open(path.c_str(), O_RDWR)), kNonce);
    if (!again->liveness().take(2)) _exit(10);
    m.reset();
    if (!again->liveness().holds(2) || again->fd() < 0) _exit(11);
  });
  BOOST_TEST(child.wait() == 0);
}

BOOST_AUTO_TEST_CASE(every_attachment_is_present_under_a_number_of_its_own_until_its_process_dies) {
  auto m = make_segment();
  auto other = attach(*m);
  std::atomic<uint32_t>& last = m->header().presences;
  BOOST_TEST(m->liveness().presence(last) == 1U);
  BOOST_TEST(m->liveness().presence(last) == 1U);
  BOOST_TEST(other->liveness().presence(last) == 2U);
  BOOST_TEST(other->liveness().present(1));
  Gate joined;
  Child child([&] {
    if (m->liveness().presence(last) != 3) _exit(1);  // not its parent's
    joined.open();
    sleep_for_ever();
  });
  BOOST_REQUIRE(joined.wait());
  child.stop();
  BOOST_TEST(m->liveness().present(3));
  child.make_zombie();
  BOOST_TEST(!m->liveness().present(3));
  BOOST_TEST(!m->liveness().present(4));
}

BOOST_AUTO_TEST_CASE(joining_takes_the_lowest_free_id_and_leaving_frees_it) {
  auto m = make_segment();
  BOOST_TEST(join(*m, Role::kWriter) == 1);  // 0 means void
  BOOST_TEST(join(*m, Role::kLearner) == 2);
  leave(*m, 1);
  BOOST_TEST(m->header().last_departure.load() > 0);
  BOOST_TEST(join(*m, Role::kSupervisor) == 1);
  BOOST_TEST(m->participant(1).role.load() == static_cast<uint32_t>(Role::kSupervisor));
  BOOST_TEST(m->participant(1).pid.load() == getpid());
}

BOOST_AUTO_TEST_CASE(an_id_is_reused_only_after_its_last_holders_slots_are_freed) {
  auto m = make_segment();
  Explorer explorer(*m);
  BOOST_TEST(word_of(*m, 0) == slot_word::busy(0, 1));
  BOOST_TEST(join(*m, Role::kWriter) == 2);
  BOOST_TEST(word_of(*m, 0) == slot_word::busy(0, 1));
  explorer.child().kill_and_wait();
  BOOST_TEST(join(*m, Role::kWriter) == 1);
  BOOST_TEST(word_of(*m, 0) == slot_word::voided(0));
  BOOST_TEST(m->header().last_departure.load() > 0);
}

BOOST_AUTO_TEST_CASE(when_every_id_is_taken_joining_is_an_error) {
  auto m = make_segment();
  for (int id = 1; id < kMaxParticipants; id++) BOOST_REQUIRE(join(*m, Role::kWriter) == id);
  BOOST_CHECK_THROW(join(*m, Role::kWriter), NoFreeId);
  leave(*m, 77);
  BOOST_TEST(join(*m, Role::kWriter) == 77);
}

BOOST_AUTO_TEST_CASE(processes_that_join_at_once_get_different_ids) {
  auto m = make_segment();
  Gate start, joined;
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < 8; i++)
    children.push_back(std::make_unique<Child>([&] {
      start.wait();
      const int id = join(*m, Role::kWriter);
      m->participant(id).rows.fetch_add(1);
      joined.open();
      sleep_for_ever();
    }));
  for (int i = 0; i < 8; i++) start.open();
  for (int i = 0; i < 8; i++) joined.wait();
  for (int id = 1; id <= 8; id++) BOOST_TEST(m->participant(id).rows.load() == 1U);
}

BOOST_AUTO_TEST_CASE(the_census_counts_the_living_by_role) {
  auto m = make_segment();
  Explorer explorer(*m);
  const int own = join(*m, Role::kWriter);
  join(*m, Role::kLearner);
  m->participant(own).last_write.store(12345);
  const Census c = take_census(*m, false);
  BOOST_TEST(c.writers == 2);
  BOOST_TEST(c.learners == 1);
  BOOST_TEST(c.supervisors == 0);
  join(*m, Role::kOwner);
  BOOST_TEST(take_census(*m, false).owners == 1);
  BOOST_TEST(take_census(*m, false).others_owning == 0);  // which is this process
  BOOST_TEST(c.others_writing == 1);  // the explorer; an unused writer of ours counts only when asked
  BOOST_TEST(take_census(*m, true).others_writing == 2);
  BOOST_TEST(c.last_write == 12345);
}

BOOST_AUTO_TEST_CASE(the_census_knows_the_last_write_of_those_whose_places_others_took) {
  auto m = make_segment();
  const auto write_at = [&](int64_t when) {
    const int id = join(*m, Role::kWriter);
    BOOST_TEST(id == 1);
    m->participant(id).last_write.store(when);
    leave(*m, id);
    BOOST_TEST(take_census(*m, false).last_write == 300);
  };
  write_at(300);
  write_at(200);
  BOOST_TEST(join(*m, Role::kLearner) == 1);
  BOOST_TEST(take_census(*m, false).last_write == 300);
}

BOOST_AUTO_TEST_CASE(a_writer_that_another_thread_used_counts_as_anothers) {
  auto m = make_segment();
  const int id = join(*m, Role::kWriter);
  m->participant(id).thread.store(static_cast<uint64_t>(pthread_self()));
  BOOST_TEST(take_census(*m, true).others_writing == 0);
  std::thread([&] { BOOST_TEST(take_census(*m, false).others_writing == 1); }).join();
  m->participant(id).waiting.store(1);
  BOOST_TEST(take_census(*m, false).waiting == 1);
}

BOOST_AUTO_TEST_CASE(the_census_frees_what_the_dead_left_and_nothing_of_the_stopped) {
  auto m = make_segment();
  Explorer dead(*m), stopped(*m);
  stopped.child().stop();
  dead.child().kill_and_wait();
  const Census c = take_census(*m, false);
  BOOST_TEST(c.writers == 1);
  BOOST_TEST(word_of(*m, 0) == slot_word::voided(0));
  BOOST_TEST(word_of(*m, 1) == slot_word::busy(1, 2));
  BOOST_TEST(m->participant(1).role.load() == 0U);
  BOOST_TEST(m->header().last_departure.load() > 0);
  BOOST_TEST(!m->liveness().alive(1));
}

BOOST_AUTO_TEST_CASE(the_dead_are_looked_for_ten_times_a_second_at_most) {
  auto m = make_segment();
  Header& h = m->header();
  reclaim_dead(*m);
  const int64_t first = h.last_census.load();
  BOOST_TEST(first > 0);
  Explorer dead(*m);
  dead.child().kill_and_wait();
  h.last_census.store(monotonic_ns() + 3'600'000'000'000);  // "just now", however long this takes
  reclaim_dead(*m);
  BOOST_TEST(word_of(*m, 0) == slot_word::busy(0, 1));
  h.last_census.store(first - 1'000'000'000);
  reclaim_dead(*m);
  BOOST_TEST(word_of(*m, 0) == slot_word::voided(0));
}

BOOST_AUTO_TEST_CASE(the_dead_are_looked_for_whatever_clock_those_have_who_looked_before) {
  for (const int64_t ahead : {int64_t{86400}, -monotonic_ns() / 2'000'000'000}) {
    auto m = make_segment();
    const int64_t before = machine_ns();
    const int status = run_with_clock_ahead(ahead, [&] {
      const int64_t own = monotonic_ns() - before;
      if (own > -1'000'000'000 && own < 3600'000'000'000) _exit(10);  // it is another clock
      reclaim_dead(*m);
      join(*m, Role::kWriter);
      leave(*m, 1);
    });
    BOOST_TEST_REQUIRE(status != 77, "this system lets nobody make a time namespace");
    BOOST_TEST_REQUIRE(status == 0);
    const int64_t left = m->header().last_departure.load();
    BOOST_TEST((before <= left && left <= machine_ns()));
    Explorer dead(*m);
    dead.child().kill_and_wait();
    BOOST_TEST(word_of(*m, 0) == slot_word::busy(0, 1));
    while (machine_ns(CLOCK_MONOTONIC_COARSE) - before < 200'000'000)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    reclaim_dead(*m);
    BOOST_TEST(word_of(*m, 0) == slot_word::voided(0));
  }
}

BOOST_AUTO_TEST_SUITE_END()
