// A binding of the tests' own: what calls clients from several threads, and gives up waits.
#pragma once

#include <functional>
#include <mutex>

#include "client/wait.h"

namespace torchreplay::testing {

inline std::mutex callers;

// The thread that has it may call clients. Those let go of it while they wait.
class Caller {
 public:
  Caller() : lock_(callers) {
    caller_lock = {[] {
                     callers.unlock();
                     return static_cast<void*>(nullptr);
                   },
                   [](void*) { callers.lock(); }};
  }

 private:
  std::lock_guard<std::mutex> lock_;
};

struct GaveUp {};

// Counts its looks, and does what a test wants at each.
class CountedWait : public Wait {
 public:
  std::function<void(Blocked why, int64_t waited_ns)> at_look = [](Blocked, int64_t) {};
  int looks = 0, rounds = 0;

  void look(Blocked why, int64_t waited_ns) override {
    looks++;
    at_look(why, waited_ns);
  }
  void look_around() override { rounds++; }
};

}  // namespace torchreplay::testing
