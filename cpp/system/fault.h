// Places at which tests let a process die or stop. They are there in builds with -DTORCHREPLAY_FAULTS only; in all
// others TORCHREPLAY_FAULT(name) is nothing, or what a test has defined.
#pragma once

#if defined(TORCHREPLAY_FAULT)
#elif !defined(TORCHREPLAY_FAULTS)
#define TORCHREPLAY_FAULT(name) static_cast<void>(0)
#else
#define TORCHREPLAY_FAULT(name) ::torchreplay::fault::point<name>.reach()

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace torchreplay::fault {

inline constexpr int kExitStatus = 86;  // of a process that died at a point

class Point {
 public:
  explicit Point(const char* name) : name_(name), next_(first_) { first_ = this; }

  const char* name() const { return name_; }
  uint64_t reached() const { return reached_.load(); }

  // All points of the program; points of code that is never called are among them.
  template <class Visit>
  static void each(Visit&& visit) {
    for (Point* p = first_; p; p = p->next_) visit(*p);
  }

  // Counts from now on; the `nth` time that the process comes here it exits at once, or stops until SIGCONT comes.
  void arm(uint64_t nth, bool stop) {
    reached_ = 0;
    stop_ = stop;
    nth_ = nth;
  }

  void reach() {
    if (reached_.fetch_add(1) + 1 != nth_) return;
    if (!stop_) _exit(kExitStatus);
    raise(SIGSTOP);
  }

 private:
  static inline Point* first_ = nullptr;

  const char* name_;
  Point* next_;
  std::atomic<uint64_t> reached_{0};
  std::atomic<uint64_t> nth_{0};  // 0: not armed
  std::atomic<bool> stop_{false};
};

template <size_t n>
struct Name {
  consteval Name(const char (&name)[n]) { std::copy_n(name, n, text); }
  char text[n];
};

// One for each name, made when the program is loaded.
template <Name name>
inline Point point{name.text};

// Throws std::invalid_argument when there is no such point.
inline void arm(const std::string& name, uint64_t nth = 1, bool stop = false) {
  Point* found = nullptr;
  Point::each([&](Point& p) { found = name == p.name() ? &p : found; });
  if (!found) throw std::invalid_argument("there is no fault point '" + name + "'");
  found->arm(nth, stop);
}

}  // namespace torchreplay::fault

#endif
