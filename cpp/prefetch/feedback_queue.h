// TD errors that wait for their turn among the draws of a thread that draws ahead.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "draw/priority_updater.h"

namespace torchreplay {

// |td[i]| for the item anchored at keys[i]: finite, and of keys that have been issued.
struct Feedback {
  // Memory for so many serves again: to get it anew takes a learner, whose caches hold other things, microseconds.
  static constexpr size_t kKept = 1 << 16;

  std::vector<int64_t> keys;
  std::vector<double> td;
};

// What a process has ordered and not got yet, of all its threads that draw ahead.
struct Outstanding {
  std::atomic<int> draws{0}, feedback{0};

  bool empty() const {
    return draws.load(std::memory_order_acquire) == 0 && feedback.load(std::memory_order_acquire) == 0;
  }
};

// First in, first out. All is done under its user's lock, except the applying itself.
class FeedbackQueue {
 public:
  FeedbackQueue(SegmentMemory& m, Outstanding& outstanding) : updater_(m), outstanding_(outstanding) {
    idle_.reserve(4);
  }
  ~FeedbackQueue() { outstanding_.feedback.fetch_sub(static_cast<int>(queue_.size()), std::memory_order_relaxed); }
  FeedbackQueue(const FeedbackQueue&) = delete;

  bool empty() const { return queue_.empty(); }
  // Whether someone is at it, without the lock.
  bool applying() const { return applying_; }
  // Whether the oldest is to be applied before the draw that comes after so many.
  bool due(uint64_t draws) const { return !queue_.empty() && queue_.front().after <= draws; }
  // How often something was pushed, and how many of these are done with.
  uint64_t pushed() const { return pushed_; }
  uint64_t done() const { return pushed_ - queue_.size(); }
  // TD errors in the queue, and those out of it that were applied.
  uint64_t waiting() const { return waiting_; }
  uint64_t updated() const { return updated_; }

  // Takes over what belongs behind the first `after` draws, and leaves the memory of one that is done with for it.
  void push(uint64_t after, Feedback& feedback) {
    const size_t n = feedback.keys.size();
    queue_.push_back({after, std::move(feedback)});
    pushed_++;
    waiting_ += n;
    feedback = {};
    if (!idle_.empty()) {
      feedback = std::move(idle_.back());
      idle_.pop_back();
    }
    outstanding_.feedback.fetch_add(1, std::memory_order_relaxed);
  }

  // Applies the oldest, letting go of the lock meanwhile; nobody may be at it. What throws leaves it there.
  void apply_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    const Feedback& first = queue_.front().feedback;  // places stay where they are
    {
      const Unlocked here(lock, applying_);
      updater_.update(static_cast<int64_t>(first.keys.size()), first.keys.data(), first.td.data(), patience);
    }
    updated_ += updater_.updated();
    pop();
  }

  // Gives up the oldest; returns how many TD errors are lost.
  uint64_t drop_first() {
    const uint64_t lost = queue_.front().feedback.keys.size();
    pop();
    return lost;
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

  void pop() {
    Feedback& first = queue_.front().feedback;
    waiting_ -= first.keys.size();
    if (first.keys.capacity() <= Feedback::kKept && idle_.size() < idle_.capacity()) idle_.push_back(std::move(first));
    queue_.pop_front();
    outstanding_.feedback.fetch_sub(1, std::memory_order_release);
  }

  PriorityUpdater updater_;
  Outstanding& outstanding_;
  std::deque<Entry> queue_;
  std::vector<Feedback> idle_;  // as many as are kept: it does not grow
  uint64_t pushed_ = 0, waiting_ = 0, updated_ = 0;
  bool applying_ = false;
};

}  // namespace torchreplay
