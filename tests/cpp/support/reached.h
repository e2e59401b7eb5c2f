// What a test does at the fault points of the code under test. A folder's program includes this first: the core's
// headers must find the macro.
#pragma once
#include <atomic>
#include <string_view>

#define TORCHREPLAY_FAULT(name) ::torchreplay::testing::reach(name)

namespace torchreplay::testing {

using AtPoint = void (*)(std::string_view point);

// What each thread calls at each point, if anything.
inline std::atomic<AtPoint> at_point = nullptr;

inline void reach(std::string_view point) {
  if (const AtPoint call = at_point.load(std::memory_order_relaxed)) call(point);
}

// Has `call` called at fault points, as long as it is there.
class AtPoints {
 public:
  explicit AtPoints(AtPoint call) { at_point = call; }
  ~AtPoints() { at_point = nullptr; }
  AtPoints(const AtPoints&) = delete;
};

}  // namespace torchreplay::testing
