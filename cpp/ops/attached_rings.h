// The segments that this process has attached for the operators, found by their nonce.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "draw/item_plan.h"
#include "session/segment_file.h"
#include "write/participants.h"

namespace torchreplay::ops {

// A mapped segment, and this process's place in it as a learner.
class AttachedRing {
 public:
  AttachedRing(std::unique_ptr<SegmentMemory> memory, ItemPlan plan)
      : memory_(std::move(memory)), plan_(std::move(plan)) {
    if (memory_->layout().view.linked()) plan_.check(memory_->layout());
  }
  ~AttachedRing() {
    try {
      if (learner_ != 0 && generation_ == fork_generation.load(std::memory_order_relaxed)) leave(*memory_, learner_);
    } catch (const std::exception&) {  // the place goes with the process
    }
    leave_saying_so([this] { release_segment(std::move(memory_)); });
  }
  AttachedRing(const AttachedRing&) = delete;

  SegmentMemory& memory() const { return *memory_; }
  // What a batch consists of; nullptr for one of single rows.
  const ItemPlan* plan() const { return memory_->layout().view.linked() ? &plan_ : nullptr; }

  // Registers this process as a learner: once, and once more in a forked child.
  void become_learner() {
    const uint64_t now = fork_generation.load(std::memory_order_relaxed);
    if (learner_ == 0 || generation_ != now) {
      learner_ = join(*memory_, Role::kLearner);
      generation_ = now;
    }
    memory_->participant(learner_).thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
  }
  // It got a batch of `n` items.
  void note_draw(int n) { torchreplay::note_draw(memory_->participant(learner_), n); }

 private:
  std::unique_ptr<SegmentMemory> memory_;
  ItemPlan plan_;
  int learner_ = 0;
  uint64_t generation_ = 0;
};

class AttachedRings {
 public:
  static AttachedRings& of_process() {
    static auto* rings = new AttachedRings;  // never destroyed: atfork handlers outlive static destructors
    return *rings;
  }

  // Counts one more user of the segment `nonce`, which `fd` is a descriptor of. Throws NotASegment or
  // std::system_error.
  std::shared_ptr<AttachedRing> attach(int fd, int64_t nonce, ItemPlan plan) {
    auto ring = std::make_shared<AttachedRing>(open_segment(Descriptor::duplicate(fd), static_cast<uint64_t>(nonce)),
                                               std::move(plan));
    const std::lock_guard guard(mutex_);
    Entry& entry = entries_.try_emplace(nonce, Entry{ring, 0}).first->second;
    entry.users++;
    return entry.ring;
  }

  // One user less; the last one detaches. False when there was none.
  bool detach(int64_t nonce) {
    std::shared_ptr<AttachedRing> last;  // released after the lock
    const std::lock_guard guard(mutex_);
    const auto found = entries_.find(nonce);
    if (found == entries_.end()) return false;
    if (--found->second.users == 0) {
      last = std::move(found->second.ring);
      entries_.erase(found);
    }
    return true;
  }

  // Null when the segment is not attached. Its memory stays as long as the result, even if another thread detaches
  // meanwhile.
  std::shared_ptr<AttachedRing> find(int64_t nonce) {
    const std::lock_guard guard(mutex_);
    const auto found = entries_.find(nonce);
    return found == entries_.end() ? nullptr : found->second.ring;
  }

  void become_learner(AttachedRing& ring) {
    const std::lock_guard guard(mutex_);
    ring.become_learner();
  }

 private:
  struct Entry {
    std::shared_ptr<AttachedRing> ring;
    int users;
  };

  // A fork while another thread holds the mutex would leave it locked in the child for ever. Liveness has such locks
  // too, which are taken with this one held: a fork must not take them in the other order.
  AttachedRings() {
    Liveness::handle_forks();
    pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                   [] { of_process().mutex_.unlock(); });
  }

  std::mutex mutex_;
  std::map<int64_t, Entry> entries_;
};

}  // namespace torchreplay::ops
