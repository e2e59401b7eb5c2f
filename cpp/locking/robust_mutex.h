// The one lock of a segment: a robust, process-shared mutex. It reports to its next owner when the last one died
// holding it.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <system_error>

#include "system/clock.h"

namespace torchreplay {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Thrown where threads of another pid namespace have the lock.
struct OtherNamespace : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The number of this process's pid namespace: of no other one as long as a process of it lives. 0: the system has none.
inline uint64_t pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

class RobustMutex {
 public:
  enum class Outcome { kLocked, kOwnerDied, kTimeout };

  // Call once, in the process that creates the segment; again when nobody uses it any more.
  void init() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mutex_, &attributes);
    pthread_mutexattr_destroy(&attributes);
    pid_namespace_ = pid_namespace();
  }

  // Throws OtherNamespace unless this process may lock it. The kernel knows holders by their thread ids, which each pid
  // namespace counts anew. A waiter that dies with the number of the holder would have it taken for dead.
  void require_same_namespace() const {
    if (pid_namespace_ == pid_namespace()) return;
    throw OtherNamespace(
        "this shared memory is used by processes of another pid namespace (another container): run all of them in one, "
        "such as that of `docker run --pid=container:NAME`, or of a Kubernetes pod with `shareProcessNamespace: true`; "
        "a file can be opened anywhere when they have ended");
  }

  // Waits at most `ns`. After kOwnerDied the caller holds the lock and must repair, then call mark_consistent().
  Outcome lock_for(int64_t ns) {
    // Holders need microseconds: spinning this long beats a sleep. 64 tries were the fastest of those measured.
    constexpr int kSpins = 64;
    int r = EBUSY;
    for (int i = 0; i < kSpins && r == EBUSY; i++) {
      r = pthread_mutex_trylock(&mutex_);
      if (r == EBUSY) cpu_relax();
    }
    if (r == EBUSY) {
      // The monotonic clock: a jump of the wall clock must not stretch or cut the wait.
      const int64_t until = monotonic_ns() + ns;
      const timespec deadline{until / 1'000'000'000, until % 1'000'000'000};
      r = pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &deadline);
    }
    if (r == 0) return Outcome::kLocked;
    if (r == EOWNERDEAD) return Outcome::kOwnerDied;
    if (r == ETIMEDOUT) return Outcome::kTimeout;
    throw std::system_error(r, std::generic_category(), "the lock of the replay segment is unusable");
  }

  void mark_consistent() { pthread_mutex_consistent(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

  // Whether anybody may sleep until it comes free. Of its owners.
  bool wanted() { return word().load(std::memory_order_relaxed) & FUTEX_WAITERS; }

  // After unlock(), before another lock() soon: lets a sleeping waiter have it first. The one that the unlocking woke
  // comes too late otherwise, again and again. Gives up where nobody takes it: that one may have died.
  void let_others_in() {
    constexpr int64_t kWakingNs = 200'000;
    constexpr int kSpins = 64;
    const int64_t until = monotonic_ns() + kWakingNs;
    do {
      for (int i = 0; i < kSpins; i++) {
        if (holder()) return;
        cpu_relax();
      }
      sched_yield();
    } while (monotonic_ns() < until);
  }

  // Id of the thread that holds it; 0: nobody.
  uint32_t holder() { return word().load(std::memory_order_acquire) & FUTEX_TID_MASK; }

  // Does what the kernel does when thread `tid` dies: if it held the lock, the next owner gets kOwnerDied. The caller
  // knows that it is dead, or can no longer reach the memory.
  void give_up_for(uint32_t tid) {
    uint32_t seen = word().load(std::memory_order_acquire);
    while ((seen & FUTEX_TID_MASK) == tid) {
      if (!word().compare_exchange_weak(seen, (seen & FUTEX_WAITERS) | FUTEX_OWNER_DIED)) continue;
      syscall(SYS_futex, &mutex_.__data.__lock, FUTEX_WAKE, 1, nullptr, nullptr, 0);
      return;
    }
  }

 private:
  // Where the kernel looks for the thread id of a robust futex's holder (its "robust futex ABI").
  std::atomic_ref<uint32_t> word() {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(&mutex_.__data.__lock));
  }

  pthread_mutex_t mutex_;
  uint64_t pid_namespace_;  // of its owners
};

}  // namespace torchreplay
