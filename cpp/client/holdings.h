// The items of a queue that a process has got, and is not done with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "draw/batch_sampler.h"
#include "segment/liveness.h"

namespace torchreplay {

// Batches that were drawn ahead, and not handed out, do not count. Who asks for batches one after the other is a loop.
// Guarded by the caller's lock. A forked child has nothing of its parent's.
class Holdings {
 public:
  explicit Holdings(const SegmentMemory& m) : memory_(m) {}

  // A loop with a number of its own.
  uint64_t new_loop() { return ++loops_made_; }

  // A loop got them. 0: none did that would be done with them when it asks for more.
  void add(const int64_t* keys, int n, uint64_t loop) {
    follow_fork();
    key1_.resize(memory_.capacity());
    for (int i = 0; i < n; i++) {
      uint64_t& key1 = key1_[slot_of(keys[i])];
      const uint64_t added = static_cast<uint64_t>(keys[i]) + 1;
      count_ += key1 == 0;
      if (key1 != 0 && key1 != added) overwritten_.insert(static_cast<int64_t>(std::min(key1, added)) - 1);
      key1 = std::max(key1, added);
    }
    for (; overwritten_.size() > memory_.capacity(); forgotten_++) overwritten_.erase(overwritten_.begin());
    order_.insert(order_.end(), keys, keys + n);
    if (loop) loops_[loop].assign(keys, keys + n);
    if (order_.size() > 2 * count_ + kSlack) order_ = in_slots();
  }

  // What the loop got last, which it holds no longer. As soon as others may draw these items again, it is too late to
  // forget them.
  std::vector<int64_t> end_batch(uint64_t loop) {
    follow_fork();
    const auto found = loops_.find(loop);
    if (found == loops_.end()) return {};
    std::vector<int64_t> keys = std::exchange(found->second, {});
    loops_.erase(found);
    drop(keys);
    return keys;
  }

  // What the loop got last is held by hand from now on.
  void keep_batch(uint64_t loop) { loops_.erase(loop); }

  // Items in batches that other loops got last.
  uint64_t in_other_loops(uint64_t loop) {
    follow_fork();
    uint64_t n = 0;
    for (const auto& [number, keys] : loops_)
      if (number != loop) n += keys.size();
    return n;
  }

  bool contains(int64_t key) const { return lies_here(key) || overwritten_.contains(key); }

  // The index of the first key that is not held.
  std::optional<size_t> first_missing(const std::vector<int64_t>& keys) {
    follow_fork();
    for (size_t i = 0; i < keys.size(); i++)
      if (!contains(keys[i])) return i;
    return {};
  }

  // They are ended by hand. Another loop may get them from now on, so they are no more in the batch of the one before.
  void remove(const std::vector<int64_t>& keys) {
    drop(keys);
    for (auto& [loop, last] : loops_) std::erase_if(last, [&](int64_t key) { return !contains(key); });
  }

  // How many are held whose keys are not known any more. They are none from now on.
  uint64_t take_forgotten() {
    follow_fork();
    return std::exchange(forgotten_, 0);
  }
  void add_forgotten(uint64_t n) { forgotten_ += n; }

  // Those that were overwritten, and the others in the order in which they were got, each once. O(their number).
  std::vector<int64_t> all() {
    follow_fork();
    std::vector<int64_t> keys = in_slots();
    keys.insert(keys.begin(), overwritten_.begin(), overwritten_.end());
    return keys;
  }

 private:
  static constexpr size_t kSlack = 1 << 16;

  void drop(const std::vector<int64_t>& keys) {
    for (const int64_t key : keys) {
      if (!lies_here(key)) {
        overwritten_.erase(key);
        continue;
      }
      key1_[slot_of(key)] = 0;
      count_--;
    }
    if (count_ == 0) order_.clear();
  }

  bool lies_here(int64_t key) const {
    return !key1_.empty() && key >= 0 && key1_[slot_of(key)] == static_cast<uint64_t>(key) + 1;
  }

  std::vector<int64_t> in_slots() {
    std::vector<int64_t> keys;
    std::copy_if(order_.begin(), order_.end(), std::back_inserter(keys),
                 [&](int64_t key) { return lies_here(key) && std::exchange(key1_[slot_of(key)], 0) != 0; });
    for (const int64_t key : keys) key1_[slot_of(key)] = static_cast<uint64_t>(key) + 1;
    return keys;
  }

  uint64_t slot_of(int64_t key) const { return memory_.slot_of(static_cast<uint64_t>(key)); }

  void follow_fork() {
    if (std::exchange(generation_, fork_generation.load(std::memory_order_relaxed)) == fork_generation.load()) return;
    count_ = forgotten_ = 0;
    order_.clear();
    overwritten_.clear();
    loops_.clear();
    std::ranges::fill(key1_, 0);
  }

  const SegmentMemory& memory_;
  uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  std::vector<uint64_t> key1_;     // of each slot: key + 1 of the item there that is held; 0: none is
  std::vector<int64_t> order_;     // and some that are held no longer
  std::set<int64_t> overwritten_;  // in slots of which this process holds a newer item; at most as many as slots
  uint64_t count_ = 0, forgotten_ = 0;
  std::map<uint64_t, std::vector<int64_t>> loops_;
  uint64_t loops_made_ = 0;
};

}  // namespace torchreplay
