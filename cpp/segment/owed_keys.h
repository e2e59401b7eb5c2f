// Items of a queue that this process holds for nobody, because the segment's lock did not come free to give them back.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torchreplay {

// Whoever of the process has the lock next gives them back. For any thread.
class OwedKeys {
 public:
  void add(const std::vector<int64_t>& keys) {
    const std::lock_guard guard(mutex_);
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    any_.store(!keys_.empty(), std::memory_order_relaxed);
  }

  std::vector<int64_t> take() {
    if (!any_.load(std::memory_order_relaxed)) return {};
    const std::lock_guard guard(mutex_);
    any_.store(false, std::memory_order_relaxed);
    return std::exchange(keys_, {});
  }

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<int64_t> keys_;
};

}  // namespace torchreplay
