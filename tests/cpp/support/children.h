// Child processes that do one thing, and the messages between parent and child.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <system_error>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif

namespace torchreplay::testing {

// Lets one process wait for another: open() lets one wait() through, in any process that inherited the gate. False when
// nobody is left who could open it.
class Gate {
 public:
  Gate() {
    if (pipe(ends_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  }
  ~Gate() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Gate(const Gate&) = delete;

  void open() {
    if (write(ends_[1], "!", 1) != 1) _exit(3);
  }
  bool wait() {
    char c;
    return read(ends_[0], &c, 1) == 1;
  }

 private:
  int ends_[2];
};

// A value in memory that children share with their parent.
template <class T>
class Shared {
 public:
  Shared() : at_(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (at_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  }
  ~Shared() { munmap(at_, sizeof(T)); }
  Shared(const Shared&) = delete;

  T* operator->() const { return static_cast<T*>(at_); }
  T& operator*() const { return *static_cast<T*>(at_); }

 private:
  void* at_;
};

// A forked child that runs `body` and exits; killed at the latest when this object goes.
class Child {
 public:
  template <class Body>
  explicit Child(Body&& body) : pid_(fork()) {
    if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (pid_ == 0) {
      try {
        body();
      } catch (...) {
        _exit(2);
      }
      _exit(0);
    }
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;

  pid_t pid() const { return pid_; }

  void stop() {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }

  // Dead, but not yet waited for.
  void make_zombie() {
    kill(pid_, SIGKILL);
    siginfo_t info;
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

  void kill_and_wait() {
    kill(pid_, SIGKILL);
    wait();
  }

  // The exit status; -1 when a signal ended it.
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

// Does what programs do that become daemons: closes the descriptors that it does not know.
inline void close_all_descriptors() {
  constexpr int kAll = 1024;
  for (int fd = 3; fd < kAll; fd++) close(fd);
}

// The same, and then has other files under the same numbers.
inline void reuse_all_descriptors() {
  close_all_descriptors();
  for (int i = 0; i < 64; i++)
    if (memfd_create("another", 0) < 0) _exit(4);
}

// Runs `body` where the monotonic clock is so many seconds ahead, and returns its exit status; 77: nobody may have
// such.
template <class Body>
int run_with_clock_ahead(int64_t seconds, Body&& body) {
  Child outer([&] {
    if (unshare(CLONE_NEWTIME) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWTIME) != 0) _exit(77);
    FILE* offsets = std::fopen("/proc/self/timens_offsets", "w");
    if (!offsets || std::fprintf(offsets, "monotonic %ld 0", static_cast<long>(seconds)) < 0 ||
        std::fclose(offsets) != 0)
      _exit(77);
    Child inner(body);
    _exit(inner.wait());
  });
  return outer.wait();
}

// Runs `body` in a pid namespace of its own, whose first process it is, and returns its exit status; 77: as above.
template <class Body>
int run_in_own_pid_namespace(Body&& body) {
  Child outer([&] {
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) _exit(77);
    Child inner(body);
    _exit(inner.wait());
  });
  return outer.wait();
}

// Takes from the kernel what it would hand a dead thread's locks on by.
inline void lose_the_list_of_locks() {
  static robust_list_head empty{{&empty.list}, 0, nullptr};
  if (syscall(SYS_set_robust_list, &empty, sizeof empty) != 0) _exit(9);
}

// Sleeps until a signal ends the process.
[[noreturn]] inline void sleep_for_ever() {
  for (;;) pause();
}

}  // namespace torchreplay::testing
