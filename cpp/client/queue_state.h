// What a queue holds, who holds it, and what keeps its writers waiting: of one moment.
#pragma once

#include <optional>
#include <vector>

#include "client/attachment.h"

namespace torchreplay {

// The slot of the oldest item that can be drawn. The lock is held, and all is absorbed.
inline std::optional<uint64_t> oldest_of_queue(SegmentMemory& m) {
  const PriorityTree tree = m.tree();
  if (!Claims::are_kept(m.header()) || tree.count() == 0) return {};
  const uint64_t before = tree.sum_before(static_cast<int64_t>(m.slot_of(m.header().absorbed)));
  const uint64_t target = before < tree.total() ? before : 0;
  int64_t slot;
  float leaf;
  tree.find(&target, 1, &slot, &leaf);
  return static_cast<uint64_t>(slot);
}

struct QueueState {
  uint64_t to_draw, held, dropped, head;
  uint64_t limit;                   // the ticket up to which writers may go
  Need need;                        // why the oldest row that is needed is so
  int64_t needed_key;               // its key; -1: none is needed
  int64_t oldest_key;               // of the items that are to be drawn; -1: there is none
  uint64_t oldest_age_ms;           // since that came
  std::vector<ItemHolder> holders;  // of held items
  uint64_t open_streams;            // that may go on; only if they are to be counted, which takes O(capacity)
  uint64_t writers, waiting;        // alive; and of them those that wait for room

  // Throws LockTimeout: nobody who waits may depend on a holder of the lock that is stopped.
  static QueueState of(Attachment& attachment, bool count_streams) {
    SegmentMemory& m = attachment.memory();
    QueueState s{};
    s.read(m, count_streams);
    const Census census = take_census(m, false);
    s.writers = static_cast<uint64_t>(census.writers);
    s.waiting = static_cast<uint64_t>(census.waiting);
    return s;
  }

 private:
  void read(SegmentMemory& m, bool count_streams) {
    const Unlocked others;
    SegmentLock lock(m, {.deadline = monotonic_ns() + kSettleNs});
    lock.absorb();
    Claims claims(m);
    claims.release_from_the_dead();
    publish_limit(m);
    const Header& h = m.header();
    to_draw = static_cast<uint64_t>(m.tree().count()), held = h.held, dropped = h.dropped_items;
    head = h.head.load(std::memory_order_relaxed), limit = h.ticket_limit.load(std::memory_order_relaxed);
    QueueRoom room(m);
    need = room.oldest_need();
    needed_key = need == Need::kNone ? -1 : static_cast<int64_t>(h.needed_from);
    holders = claims.holders();
    open_streams = count_streams ? room.open_streams() : 0;
    const std::optional<uint64_t> oldest = oldest_of_queue(m);
    oldest_key = oldest ? static_cast<int64_t>(m.at(*oldest)) - 1 : -1;
    oldest_age_ms = oldest ? claims.age(*oldest) : 0;
  }
};

}  // namespace torchreplay
