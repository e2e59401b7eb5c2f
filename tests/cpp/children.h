// Child processes that do one thing, and what parent and child tell each other.
#pragma once

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

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
