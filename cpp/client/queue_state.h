// What a queue holds, who holds it, and what keeps its writers waiting: of one moment.
#pragma once

#include <vector>

#include "client/attachment.h"
#include "client/queue_tables.h"

namespace torchreplay {

struct QueueState {
  uint64_t to_draw, held, head;
  uint64_t lacking;                 // items that a learner which waits needs beside those to be drawn
  uint64_t limit;                   // the ticket up to which writers may go
  OldestNeed oldest;                // what writers wait for
  std::vector<ItemHolder> holders;  // of held items
  uint64_t open_streams;            // that may go on; only if they are to be counted, which takes O(capacity)
  std::vector<int32_t> writers;     // the processes of those alive, one for each
  uint64_t waiting;                 // of the writers, for room
  uint64_t pages_wanted;            // by a writer that waits for them
  uint64_t page_limit, pages_in_use, page_bytes;
  uint64_t longest_run;  // pages of one row, of those that are there or wait; only if streams are to be counted
  bool admits;           // writers have to be admitted
  uint64_t may_write, may_admit;  // items that they may write; that may be admitted beyond
  uint64_t not_admitted;          // writers that wait for more than that
  bool has_other_publisher;       // somebody else than the calling thread publishes versions
  bool has_lost_publisher;        // another process did so last, and is gone

  // Throws LockTimeout: nobody who waits may depend on a holder of the lock that is stopped.
  static QueueState of(Attachment& attachment, bool count_streams) {
    SegmentMemory& m = attachment.memory();
    QueueState s{};
    s.read(m, count_streams);
    s.waiting = static_cast<uint64_t>(take_census(m, false).waiting);  // which forgets the dead
    has_participant(m, Role::kWriter, [&](const Participant& writer) {
      s.writers.push_back(writer.pid.load(std::memory_order_relaxed));
      s.not_admitted += s.admits && writer.waiting.load(std::memory_order_relaxed) > s.may_admit + 1;
      return false;
    });
    s.has_other_publisher = s.admits && attachment.has_other_publisher();
    s.has_lost_publisher = s.admits && attachment.has_lost_publisher();
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
    to_draw = static_cast<uint64_t>(m.tree().count()), held = h.held;
    lacking = h.demand - std::min(h.demand, h.inserted);
    head = h.head.load(std::memory_order_relaxed), limit = h.ticket_limit.load(std::memory_order_relaxed);
    const QueueTables tables(m.base(), m.layout());
    oldest = tables.oldest_need();
    holders = tables.holders();
    admits = Admission::is_kept(h);
    if (admits) {
      const Admission admission(m);
      may_admit = admission.room();
      may_write = admission.open();
    }
    open_streams = count_streams ? QueueRoom(m).open_streams() : 0;
    if (!m.has_pages()) return;
    pages_wanted = tables.pages_wanted(), pages_in_use = tables.pages_in_use();
    page_limit = h.page_limit.load(std::memory_order_relaxed), page_bytes = m.layout().pages.bytes;
    longest_run = count_streams ? tables.longest_run(m) : 0;
  }
};

}  // namespace torchreplay
