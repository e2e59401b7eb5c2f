// The segments that this process has attached for the operators, found by their nonce.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "client/membership.h"

namespace torchreplay::ops {

// A mapped segment, and this process's place in it as a learner.
struct AttachedRing {
  AttachedRing(std::unique_ptr<SegmentMemory> memory, ItemPlan plan)
      : segment(std::make_shared<Attachment>(std::move(memory))), learner(segment, Role::kLearner) {
    if (segment->linked()) segment->set_plan(std::move(plan));
  }

  std::shared_ptr<Attachment> segment;
  Membership learner;
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
    auto memory = open_segment(Descriptor::duplicate(fd), static_cast<uint64_t>(nonce));
    if (memory->has_pages()) throw NotASegment("the buffer has ragged fields, which the operators do not take");
    auto ring = std::make_shared<AttachedRing>(std::move(memory), std::move(plan));
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

  // Registers this process as a learner: once, and once more in a forked child. Returns its entry.
  Participant& become_learner(AttachedRing& ring) {
    const std::lock_guard guard(mutex_);
    ring.learner.act();
    return ring.segment->memory().participant(ring.learner.held());
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
