// Holding the segment's mutex: waiting for it in slices, repairing what a dead owner left, absorbing what was written.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "fault.h"
#include "futex.h"
#include "limiter.h"
#include "recover.h"

namespace torchreplay {

// Thrown out of a wait when `interrupted` says so (Ctrl-C).
struct Interrupted {};
// Thrown when the mutex does not come free: its holder is stopped.
struct LockTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Asked between slices of every wait. The Python binding points it at the signal check.
inline bool (*interrupted)() = [] { return false; };

inline constexpr int64_t kSliceNs = 50'000'000;  // waits wake up this often to look around
inline constexpr int64_t kLockPatienceNs =
    20'000'000'000;  // holders need microseconds; one that takes this long is stopped

// The state letter of a process from /proc, or '?' when it is gone or not ours to see.
inline char process_state(int pid) {
  char path[40], text[256] = {};
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* f = std::fopen(path, "r");
  if (!f) return '?';
  const size_t n = std::fread(text, 1, sizeof text - 1, f);
  std::fclose(f);
  const size_t close = std::string(text, n).rfind(')');
  return close == std::string::npos || close + 2 >= n ? '?' : text[close + 2];
}

// Owns the mutex while it lives.
class Locked {
 public:
  explicit Locked(SegmentMemory& m) : memory_(m), header_(m.header()) { lock(); }
  ~Locked() {
    if (!held_) return;
    TORCHREPLAY_FAULT("lock.over");
    header_.mutex.unlock();
    TORCHREPLAY_FAULT("lock.free");
  }
  Locked(const Locked&) = delete;

  void unlock() {
    held_ = false;
    header_.mutex.unlock();
    TORCHREPLAY_FAULT("lock.between");
  }

  // Absorbs every row written before the call, letting others in between chunks. Returns the head absorbed to, which
  // may be a later one.
  uint64_t absorb() {
    const uint64_t head = header_.head.load(std::memory_order_acquire);
    Absorber absorber(memory_);
    while (!absorber.step(head)) {
      unlock();
      lock();
    }
    return header_.absorbed;
  }

 private:
  void lock() {
    int64_t waited = 0;
    uint32_t repairing = header_.repairing.load(std::memory_order_relaxed);
    for (;;) {
      const auto outcome = header_.mutex.lock_for(kSliceNs);
      if (outcome != RobustMutex::Outcome::kTimeout) {
        held_ = true;
        TORCHREPLAY_FAULT("lock.taken");
        header_.holder_pid.store(own_pid(), std::memory_order_relaxed);
        if (outcome == RobustMutex::Outcome::kOwnerDied) repair();
        return;
      }
      if (interrupted()) throw Interrupted{};
      const uint32_t now = header_.repairing.load(std::memory_order_relaxed);
      waited = now == repairing ? waited + kSliceNs : 0;
      repairing = now;
      if (waited >= kLockPatienceNs) throw_timeout();
    }
  }

  void repair() {
    if (header_.dirty != Dirty::kClean) Recovery(memory_).run();
    TORCHREPLAY_FAULT("lock.repaired");
    header_.mutex.mark_consistent();
    TORCHREPLAY_FAULT("lock.consistent");
  }

  [[noreturn]] void throw_timeout() const {
    const int pid = header_.holder_pid.load(std::memory_order_relaxed);
    throw LockTimeout("the lock of the replay buffer did not come free for " +
                      std::to_string(kLockPatienceNs / 1'000'000'000) + " s: it is held by process " +
                      std::to_string(pid) + ", whose state is '" + process_state(pid) +
                      "' (T: stopped, continue it with `kill -CONT`; ?: gone or not visible from here)");
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
  bool held_ = false;
};

// After a change of what learners drew or hold: tells writers how far they may go, and wakes those that wait.
inline void publish_limit(SegmentMemory& m) {
  Header& h = m.header();
  const uint64_t before = h.ticket_limit.load(std::memory_order_relaxed);
  Limiter(h).publish(h.absorbed, m.tree().count());
  TORCHREPLAY_FAULT("limit.published");
  if (h.ticket_limit.load(std::memory_order_relaxed) > before && h.room_waiters.load(std::memory_order_relaxed))
    futex_signal(h.room_signal);
}

}  // namespace torchreplay
