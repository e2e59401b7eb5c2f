// TD errors that wait for their turn among the draws of a thread that draws ahead.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "update.h"

namespace torchreplay {

// |td[i]| for the item anchored at keys[i]: finite, and of keys that have been issued.
struct Feedback {
  std::vector<int64_t> keys;
  std::vector<double> td;
};

// What a process has ordered and not got yet, of all its threads that draw ahead.
struct Backlog {
  std::atomic<int> draws{0}, feedback{0};

  bool empty() const {
    return draws.load(std::memory_order_acquire) == 0 && feedback.load(std::memory_order_acquire) == 0;
  }
};

// First in, first out. All is done under its user's lock, but for the applying itself.
class FeedbackQueue {
 public:
  FeedbackQueue(SegmentMemory& m, Backlog& backlog) : updater_(m), backlog_(backlog) {}

  bool empty() const { return queue_.empty(); }
  // Whether someone is at it, without the lock.
  bool applying() const { return applying_; }
  // Whether the oldest is to be applied before the draw that comes after so many.
  bool due(uint64_t draws) const { return !queue_.empty() && queue_.front().after <= draws; }
  // TD errors that were ever pushed; how many of them are done with; and by how many `updated` rose because of those.
  uint64_t pushed() const { return pushed_; }
  uint64_t done() const { return done_; }
  uint64_t updated() const { return updated_; }

  // Takes over what belongs behind the first `after` draws.
  void push(uint64_t after, Feedback feedback) {
    pushed_ += feedback.keys.size();
    queue_.push_back({after, std::move(feedback)});
    backlog_.feedback.fetch_add(1, std::memory_order_relaxed);
  }

  // Applies the oldest, letting go of the lock meanwhile; nobody may be at it. What throws leaves it there.
  void apply_first(std::unique_lock<std::mutex>& lock) {
    const Feedback& first = queue_.front().feedback;  // places stay where they are
    const auto n = static_cast<int64_t>(first.keys.size());
    {
      const Unlocked here(lock, applying_);
      updater_.update(n, first.keys.data(), first.td.data());
    }
    done_ += static_cast<uint64_t>(n);
    updated_ += updater_.updated();
    queue_.pop_front();
    backlog_.feedback.fetch_sub(1, std::memory_order_release);
  }

 private:
  struct Entry {
    uint64_t after;
    Feedback feedback;
  };

  class Unlocked {
   public:
    Unlocked(std::unique_lock<std::mutex>& lock, bool& applying) : lock_(lock), applying_(applying) {
      applying_ = true;
      lock_.unlock();
    }
    ~Unlocked() {
      lock_.lock();
      applying_ = false;
    }
    Unlocked(const Unlocked&) = delete;

   private:
    std::unique_lock<std::mutex>& lock_;
    bool& applying_;
  };

  PriorityUpdater updater_;
  Backlog& backlog_;
  std::deque<Entry> queue_;
  uint64_t pushed_ = 0, done_ = 0, updated_ = 0;
  bool applying_ = false;
};

}  // namespace torchreplay
