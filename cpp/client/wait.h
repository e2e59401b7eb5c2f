// What waits of a process's clients need of the one who calls: its lock, and its reasons to give up.
#pragma once

#include <cstdint>

namespace torchreplay {

// The lock that a binding holds while it calls a client: it guards all clients of the process. `release` says what
// `take` needs to hold it again. Where nothing calls from several threads there is none.
struct CallerLock {
  void* (*release)() = [] { return static_cast<void*>(nullptr); };
  void (*take)(void*) = [](void*) {};
};
inline CallerLock caller_lock;

// While it lives other threads may call clients.
class Unlocked {
 public:
  Unlocked() : state_(caller_lock.release()) {}
  ~Unlocked() { caller_lock.take(state_); }
  Unlocked(const Unlocked&) = delete;

 private:
  void* state_;
};

// So many bytes are copied or looked through under the caller's lock at most: to let go of it takes as long.
inline constexpr uint64_t kUnlockedBytes = 64 << 10;

// What keeps a writer from going on.
enum class Blocked {
  kLimited,       // the learner has to draw first, as the limiter wants it
  kStalled,       // a whole turn of slots is held by stopped writers
  kPagesLimited,  // the learner has to be done with items first, whose values have the pages
  kPagesStalled,  // stopped writers have pages between which no run fits
  kNotAdmitted,   // as many items are begun as the learner comes to draw in time
};

// A writer's reasons to give up. A binding implements them. All is called under its lock, and throws to give up.
class Wait {
 public:
  virtual ~Wait() = default;

  // When a wait begins (`waited_ns` is 0), and about once a slice while it lasts.
  virtual void look(Blocked why, int64_t waited_ns) = 0;
  // About once a second of writing: is anybody there to draw what is written?
  virtual void look_around() = 0;
};

}  // namespace torchreplay
