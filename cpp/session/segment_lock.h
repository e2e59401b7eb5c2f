// Holding the segment's mutex: waiting for it in slices, repairing what a dead owner left, absorbing what was written.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "absorb/admission.h"
#include "absorb/queue_room.h"
#include "segment/limiter.h"
#include "session/recovery.h"
#include "system/fault.h"
#include "system/futex.h"

namespace torchreplay {

// Thrown out of a wait when `interrupted` says so (Ctrl-C).
struct Interrupted {};
// Thrown out of a wait for the mutex when the buffer was stopped.
struct StoppedMeanwhile {};
// Thrown when the mutex did not come free in time. The text says who holds it.
struct LockTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Asked between slices of every wait. The Python binding points it at the signal check.
inline bool (*interrupted)() = [] { return false; };
// In a thread that no signal reaches: set when nobody wants any more what it does. It reports to nobody.
inline thread_local const std::atomic<bool>* unwanted = nullptr;
// Called every `report_every_ns` of a long wait for the mutex; true ends it as `interrupted` does. The Python binding
// points it at the log.
inline bool (*report_wait)(const std::string& text) = [](const std::string&) { return false; };
inline int64_t report_every_ns = 10'000'000'000;

inline constexpr int64_t kSliceNs = 50'000'000;  // waits wake up this often to look around

// How long to wait for the mutex. Holders need microseconds, but one that is stopped, or starved, needs as long as it
// likes. The deadline is looked at between slices: a late caller still gets one.
struct Patience {
  int64_t deadline = std::numeric_limits<int64_t>::max();  // monotonic, ns
  bool until_stopped = false;                              // the end of the buffer is the end of the wait
};

// While it lives, waits for the memory's lock handle no signals and report nothing.
class Undisturbed {
 public:
  Undisturbed() : before_(std::exchange(unwanted, &never_)) {}
  ~Undisturbed() { unwanted = before_; }
  Undisturbed(const Undisturbed&) = delete;

 private:
  static inline const std::atomic<bool> never_{false};
  const std::atomic<bool>* before_;
};

// The state letter of a process or thread from /proc; kEnded: there is none; kUnknown: who could tell? A process may be
// out of descriptors, or /proc not mounted.
inline constexpr char kEnded = 'X', kUnknown = '?';
inline char process_state(int pid) {
  char path[40], text[256];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return errno == ENOENT && access("/proc/self/stat", F_OK) == 0 ? kEnded : kUnknown;
  const ssize_t n = read(file.get(), text, sizeof text);
  if (n < 0) return errno == ESRCH ? kEnded : kUnknown;
  const std::string_view stat(text, static_cast<size_t>(n));
  const size_t close = stat.rfind(')');
  return close == stat.npos || close + 2 >= stat.size() ? kUnknown : stat[close + 2];
}

// Owns the mutex while it lives.
class SegmentLock {
 public:
  explicit SegmentLock(SegmentMemory& m, Patience patience = {})
      : memory_(m), header_(m.header()), patience_(patience) {
    lock();
  }
  ~SegmentLock() {
    if (!held_) return;
    TORCHREPLAY_FAULT("lock.over");
    held_ = false;
    header_.holder.store(0, std::memory_order_relaxed);
    header_.mutex.unlock();
    TORCHREPLAY_FAULT("lock.free");
  }
  SegmentLock(const SegmentLock&) = delete;

  // Waits until nobody holds it. Throws LockTimeout, which says who does, and StoppedMeanwhile.
  static void require_free(SegmentMemory& m, const Patience& patience) { const SegmentLock lock(m, patience); }

  void unlock() {
    held_ = false;
    header_.holder.store(0, std::memory_order_relaxed);
    header_.mutex.unlock();
    TORCHREPLAY_FAULT("lock.between");
  }

  // Absorbs every row written before the call, letting others in between chunks. What is too old for the learner's
  // policy version goes. Returns the head absorbed to, which may be a later one. With the `pace` of a learner writers
  // wait meanwhile. Those that lost patience while it was preempted do so again.
  uint64_t absorb(LearnerPace* pace = nullptr) {
    if (header_.importer) return header_.absorbed;  // what others write waits until the import has ended
    const auto hold = [&] {
      if (pace) pace->hold(header_.gate, header_.absorbed);
    };
    hold();
    const bool limits_pages = memory_.has_pages() && header_.sampler.makes_writers_wait();
    // Before the rows: the row of a run of which nobody speaks any more is among them.
    const uint64_t unwritten = limits_pages ? unwritten_from(memory_) : 0;
    TORCHREPLAY_FAULT("absorb.looked");
    const uint64_t head = header_.head.load(std::memory_order_acquire);
    Absorber absorber(memory_);
    while (!absorber.step(head)) {
      let_others_in();
      hold();
    }
    header_.pages_settled = std::max(header_.pages_settled, unwritten);
    while (!absorber.expire()) {
      let_others_in();
      hold();
    }
    // Where pages are taken again, the rows there are those of a turn.
    if (pace && memory_.has_pages() && header_.followed > memory_.layout().pages.count) pace->note_rows(header_.rows);
    return header_.absorbed;
  }

  // Takes every row away that was written before the call, letting others in between chunks. Rows under way may stay.
  // Then the largest priority and the limiter are those of a new buffer. A death in between leaves the older rows gone,
  // the others there. O(capacity).
  void clear() {
    if (header_.importer) throw std::runtime_error("the replay buffer is being restored: clear it when that is over");
    const uint64_t end = absorb();
    Absorber absorber(memory_);
    for (uint64_t slot = 0; slot < memory_.capacity(); slot += Absorber::kChunk) {
      if (slot) let_others_in();
      absorber.clear(slot, std::min(memory_.capacity(), slot + Absorber::kChunk), end);
    }
    header_.set_largest_raw(1);
    restart_limiter(header_, static_cast<uint64_t>(memory_.tree().count()));
    header_.admission_begun = 0;  // whoever holds an item that has gone gives nothing back
    TORCHREPLAY_FAULT("clear.over");
  }

  // Ends, as a truncation, the episode whose last row has `key`: the row gets the flag, and its field `truncated`
  // becomes true. Items become drawable that only waited for the end. Nothing happens when the row is gone.
  void end_episode(uint64_t key, size_t truncated) {
    absorb();
    Absorber(memory_).end_episode(key, truncated);
  }

  // Between two parts of a longer work.
  void let_others_in() {
    header_.gate.note_progress();
    const bool wanted = header_.mutex.wanted();
    unlock();
    if (wanted) header_.mutex.let_others_in();
    lock();
  }

 private:
  void lock() {
    // Before the mutex is taken: what can fail must not fail with it.
    const uint64_t presence = memory_.presence();
    RobustMutex::Outcome outcome = header_.mutex.lock_for(kSliceNs);
    if (outcome == RobustMutex::Outcome::kTimeout) outcome = wait();
    held_ = true;
    TORCHREPLAY_FAULT("lock.taken");
    header_.holder.store(presence << 32 | header_.mutex.holder(), std::memory_order_relaxed);
    header_.holder_pid.store(own_pid(), std::memory_order_relaxed);
    const bool died = outcome == RobustMutex::Outcome::kOwnerDied;
    if (died || header_.dirty != Dirty::kClean || header_.importer) repair(died);
  }

  // Waits for as long as the holder needs, looking around between slices.
  RobustMutex::Outcome wait() {
    const int64_t start = monotonic_ns() - kSliceNs;
    int64_t report_at = start + report_every_ns;
    uint32_t repairing = header_.repairing.load(std::memory_order_relaxed);
    for (;;) {
      if (unwanted ? unwanted->load(std::memory_order_relaxed) : interrupted()) throw Interrupted{};
      if (patience_.until_stopped && header_.stopped.load(std::memory_order_acquire)) throw StoppedMeanwhile{};
      const int64_t now = monotonic_ns();
      const bool repaired = std::exchange(repairing, header_.repairing.load(std::memory_order_relaxed)) != repairing;
      if (now >= patience_.deadline) throw LockTimeout(reason(now - start, repaired));
      if (now >= report_at) {
        report_at = now + report_every_ns;
        if (!unwanted && report_wait(reason(now - start, repaired))) throw Interrupted{};
      }
      release_from_the_dead();
      const auto outcome = header_.mutex.lock_for(kSliceNs);
      if (outcome != RobustMutex::Outcome::kTimeout) return outcome;
    }
  }

  // The kernel hands the lock of a dead thread on, unless the thread's list of locks was lost. A process gives its lock
  // bytes back after that list was gone through: if its byte is free and the mutex still its own, nobody will come. One
  // that lives has lost its bytes when somebody closed its descriptors.
  void release_from_the_dead() {
    const uint32_t thread = header_.mutex.holder();
    const uint64_t holder = header_.holder.load(std::memory_order_acquire);
    if (!holder || static_cast<uint32_t>(holder) != thread || memory_.liveness().present(holder >> 32)) return;
    const char state = process_state(static_cast<int>(thread));
    if (state == kEnded || state == 'Z') header_.mutex.give_up_for(thread);
  }

  // After the death of the owner, or an exception that it threw halfway through a change; and during an import, whose
  // end repairs all.
  void repair(bool died) {
    try {
      const uint32_t importer = header_.importer;
      if (importer && !memory_.liveness().present(importer))
        Recovery(memory_).end_import();
      else if (!importer && header_.dirty != Dirty::kClean)
        Recovery(memory_).run();
    } catch (...) {  // the memory stays dirty, for the next one
      if (died) header_.mutex.mark_consistent();
      unlock();
      throw;
    }
    TORCHREPLAY_FAULT("lock.repaired");
    if (died) header_.mutex.mark_consistent();
    TORCHREPLAY_FAULT("lock.consistent");
  }

  std::string reason(int64_t waited_ns, bool repairing) const {
    const std::string pid = std::to_string(header_.holder_pid.load(std::memory_order_relaxed));
    const char state = process_state(header_.holder_pid.load(std::memory_order_relaxed));
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%.1f", static_cast<double>(waited_ns) * 1e-9);
    return "the lock of " + memory_.called() + " has not come free for " + seconds + " s: process " + pid +
           (repairing                      ? " holds it and repairs what a dead process left"
            : state == 'T' || state == 't' ? " holds it and is stopped; continue it with `kill -CONT " + pid + "`"
            : state == kEnded || state == kUnknown
                ? " holds it and is not visible from here"
                : " holds it and is slow (its state is " + std::string(1, state) + ")");
  }

  // getpid() is a system call; this costs it once a process.
  static int own_pid() {
    static std::atomic<uint64_t> generation{kNever};
    static std::atomic<int> pid{0};
    const uint64_t now = fork_generation.load(std::memory_order_relaxed);
    if (generation.load(std::memory_order_acquire) != now) {
      pid.store(getpid(), std::memory_order_relaxed);
      generation.store(now, std::memory_order_release);
    }
    return pid.load(std::memory_order_relaxed);
  }

  SegmentMemory& memory_;
  Header& header_;
  Patience patience_;
  bool held_ = false;
};

// After so many rows the ring is overwritten; of pages as far as rows are as long as those that are there, and until
// one is there, as long as they may be.
inline uint64_t rows_of_a_turn(const SegmentMemory& m) {
  const Header& h = m.header();
  if (!m.has_pages()) return m.capacity();
  const uint64_t pages = m.layout().pages.count, used = std::min(h.followed, pages);
  if (h.rows == 0) return std::min(m.capacity(), pages / m.layout().pages.most());
  return used ? std::clamp<uint64_t>(h.rows * pages / used, 1, m.capacity()) : m.capacity();
}

// Wakes writers that wait for room, or to be admitted. What they wait for is changed before.
inline void wake_writers(Header& h) {
  // A writer says that it waits, and then looks.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (h.room_waiters.load(std::memory_order_relaxed) && h.room_waiters.exchange(0)) futex_signal(h.room_signal);
}

// After a change of what learners drew or hold: shows writers how far they may go, and wakes those that wait.
// `starved`: a learner waits for items of a queue.
inline void publish_limit(SegmentMemory& m, bool starved = false) {
  Header& h = m.header();
  if (h.admits_by_hand.load(std::memory_order_relaxed)) return;
  const uint64_t before = h.ticket_limit.load(std::memory_order_relaxed),
                 pages_before = h.page_limit.load(std::memory_order_relaxed);
  if (h.sampler.makes_writers_wait()) {
    // While rows are restored nobody knows which are needed.
    if (!h.importer) {
      QueueRoom room(m);
      h.ticket_limit.store(std::min(kMaxKeys, room.limit(starved)), std::memory_order_relaxed);
      if (m.has_pages()) h.page_limit.store(std::min(kMaxKeys, room.page_limit()), std::memory_order_release);
    }
  } else {
    // Half a turn, and what two writers may add to it. While rows are restored nobody looks.
    const uint64_t unseen = h.importer ? kMaxKeys : std::max<uint64_t>(1, rows_of_a_turn(m) / 2);
    Limiter(h).publish(h.absorbed, unseen, m.tree().count());
  }
  TORCHREPLAY_FAULT("limit.published");
  const bool more = h.ticket_limit.load(std::memory_order_relaxed) > before ||
                    h.page_limit.load(std::memory_order_relaxed) > pages_before;
  if (more || (Admission::is_kept(h) && h.room_waiters.load(std::memory_order_relaxed) && Admission(m).room()))
    wake_writers(h);
}

// Sleeps until the limit admits more, at most `ns`. `seen`: room_signal when the caller last looked at it. `has_room()`
// looks again.
template <class HasRoom>
void wait_for_room(Header& h, uint32_t seen, int64_t ns, const HasRoom& has_room) {
  const int64_t start = monotonic_ns();
  TORCHREPLAY_FAULT("room.waiting");
  h.room_waiters.store(1, std::memory_order_seq_cst);  // before the last look at the limit: see publish_limit()
  TORCHREPLAY_FAULT("room.counted");
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!has_room()) futex_wait(h.room_signal, seen, ns);
  TORCHREPLAY_FAULT("room.awake");
  h.insert_wait.add(monotonic_ns() - start, machine_ns());
}

inline void wait_for_room(Header& h, uint32_t seen, int64_t ns) {
  wait_for_room(h, seen, ns, [&] {
    return h.head.load(std::memory_order_relaxed) < h.ticket_limit.load(std::memory_order_relaxed);
  });
}

// A learner's call, from its start to its end: writers that are far ahead give way to it.
class LearnerTurn {
 public:
  explicit LearnerTurn(SegmentMemory& m) : header_(m.header()), pace_(m.pace()) { pace_.begin(header_.gate); }
  ~LearnerTurn() { pace_.end(header_.gate, header_.head.load(std::memory_order_relaxed), absorbed_); }
  LearnerTurn(const LearnerTurn&) = delete;

  // SegmentLock::absorb(), which writers do not outrun.
  void absorb(SegmentLock& lock) {
    lock.absorb(&pace_);
    absorbed_ = header_.absorbed;
  }

  // Writers lap what the learner copies, though they are no turn ahead of it: they pause after the rows that they are
  // at.
  void hold_writers() { header_.gate.shut_at(header_.head.load(std::memory_order_relaxed)); }

  // The learner needs rows: nobody waits for it.
  void wait_for_rows() { header_.gate.open_at(WriteGate::kOpen); }

 private:
  Header& header_;
  LearnerPace& pace_;
  uint64_t absorbed_ = 0;
};

}  // namespace torchreplay
