// Items of a queue, or draws of items that have so many, which this process holds for nobody: the segment's lock did
// not come free to give them back.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "segment/liveness.h"

namespace torchreplay {

// Whoever of the process has the lock next gives them back; not a forked child, which owes nothing. For any thread.
class OwedKeys {
 public:
  void add(const std::vector<int64_t>& keys) {
    const std::lock_guard guard(mutex_);
    if (!are_own()) keys_.clear();
    generation_ = fork_generation.load(std::memory_order_relaxed);
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    any_.store(!keys_.empty(), std::memory_order_relaxed);
  }

  std::vector<int64_t> take() {
    if (!any_.load(std::memory_order_relaxed)) return {};
    const std::lock_guard guard(mutex_);
    any_.store(false, std::memory_order_relaxed);
    std::vector<int64_t> keys = std::exchange(keys_, {});
    if (!are_own()) keys.clear();
    return keys;
  }

 private:
  bool are_own() const { return generation_ == fork_generation.load(std::memory_order_relaxed); }

  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<int64_t> keys_;
  uint64_t generation_ = 0;
};

}  // namespace torchreplay
