// Turning written rows into drawable items. Everything here runs under the segment's mutex.
#pragma once

#include "leaves.h"
#include "pending.h"
#include "streams.h"

namespace torchreplay {

// Keeps the compiler from moving stores across it: enough for a process that may be killed between any two of them.
inline void kill_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Marks that derived state is being changed, so that whoever finds the owner dead knows what to rebuild.
class DirtyScope {
 public:
  DirtyScope(Header& h, Dirty what) : header_(h) {
    h.dirty = what;
    kill_fence();
    TORCHREPLAY_FAULT("dirty.set");
  }
  ~DirtyScope() {
    TORCHREPLAY_FAULT("dirty.over");
    kill_fence();
    header_.dirty = Dirty::kClean;
    TORCHREPLAY_FAULT("dirty.clean");
  }
  DirtyScope(const DirtyScope&) = delete;

 private:
  Header& header_;
};

class Absorber {
 public:
  explicit Absorber(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        linked_(m.layout().view.linked()),
        tree_(m.tree()),
        leaves_(tree_),
        initial_(header_, tree_),
        pending_(m),
        streams_(m) {}

  // Most slots visited while the mutex is held in one piece.
  static constexpr uint64_t kChunk = 4096;

  // One bounded step of bringing slots up to date with the tickets below `head`. True: nothing is left to do.
  bool step(uint64_t head) {
    head = std::max(head, header_.absorbed);  // another learner may have gone further between two steps
    if (header_.absorbed >= head && header_.pending == 0) return true;
    const DirtyScope dirty(header_, Dirty::kLinks);
    initial_.refresh();
    head_ = head;
    uint64_t from = header_.absorbed;
    if (head > memory_.capacity()) from = std::max(from, head - memory_.capacity());
    if (from < head) {
      const uint64_t to = std::min(head, from + kChunk);
      for (uint64_t key = from; key < to; key++) sync(memory_.slot_of(key), key);
      TORCHREPLAY_FAULT("absorb.synced");
      leaves_.flush();
      TORCHREPLAY_FAULT("absorb.flushed");
      header_.absorbed = to;
      TORCHREPLAY_FAULT("absorb.cursor");
      if (to < head) return false;
    }
    // A row waits for its predecessor, which may lie further on: once that is absorbed, the next pass takes the row.
    do {
      adopted_ = deferred_ = 0;
      pending_.each([&](uint64_t slot) { sync_below(slot, head); });
      TORCHREPLAY_FAULT("absorb.pass");
    } while (adopted_ && deferred_);
    leaves_.flush();
    return true;
  }

  // Brings one slot up to date: what a failed draw does, so that it cannot fail for ever.
  void resync(uint64_t slot, uint64_t head) {
    const DirtyScope dirty(header_, Dirty::kLinks);
    initial_.refresh();
    head_ = head;
    sync_below(slot, head);
    TORCHREPLAY_FAULT("resync.synced");
    leaves_.flush();
  }

 private:
  void sync_below(uint64_t slot, uint64_t head) {
    if (slot < head) sync(slot, head - 1 - (head - 1 - slot) % memory_.capacity());
  }

  // `newest`: the newest ticket issued for this slot, below the head of this absorption.
  void sync(uint64_t slot, uint64_t newest) {
    RowHeader& row = memory_.row(slot);
    uint64_t& at = memory_.at(slot);
    const uint64_t word = row.word.load(std::memory_order_acquire);
    if (at && (slot_word::is_busy(word) || slot_word::key1(word) != at)) evict(slot, at);
    bool pending = slot_word::is_busy(word) || slot_word::key1(word) < newest + 1;
    if (!at && slot_word::is_row(word)) pending |= !adopt(slot, at, word);
    pending_.assign(slot, pending);
    TORCHREPLAY_FAULT("sync.done");
  }

  // Leaves first, `at` last: a crash in between must never hand the old row's priority to the new one.
  void evict(uint64_t slot, uint64_t& at) {
    leaves_.set(slot, 0);
    TORCHREPLAY_FAULT("evict.leaf");
    if (linked_) {
      streams_.each_item_with(slot, [&](uint64_t anchor) { leaves_.set(anchor, 0); });
      TORCHREPLAY_FAULT("evict.items");
      streams_.unlink(slot);
    }
    TORCHREPLAY_FAULT("evict.unlinked");
    kill_fence();
    at = 0;
    TORCHREPLAY_FAULT("evict.at");
    header_.rows--;
    TORCHREPLAY_FAULT("evict.rows");
  }

  // False when the row has to wait: it is being overwritten right now, or comes before its predecessor.
  bool adopt(uint64_t slot, uint64_t& at, uint64_t word) {
    RowFacts row;
    if (!read_facts(memory_.row(slot), word, row)) return false;
    uint64_t before = kNoSlot;
    if (linked_ && streams_.follows(row) && !streams_.find_predecessor(row, before)) {
      deferred_++;
      TORCHREPLAY_FAULT("adopt.deferred");
      return false;
    }
    TORCHREPLAY_FAULT("adopt.facts");
    at = slot_word::key1(word);
    TORCHREPLAY_FAULT("adopt.at");
    header_.rows++;
    TORCHREPLAY_FAULT("adopt.rows");
    adopted_++;
    if (!linked_) {
      complete(slot, row.priority);
      return true;
    }
    if (before != kNoSlot) streams_.link(before, slot);
    TORCHREPLAY_FAULT("adopt.linked");
    streams_.each_completed_by(slot, row, [&](uint64_t anchor, float priority) { complete(anchor, priority); });
    return true;
  }

  void complete(uint64_t anchor, float priority) {
    leaves_.set(anchor, initial_.of(priority));
    TORCHREPLAY_FAULT("complete.leaf");
    header_.inserted++;
    TORCHREPLAY_FAULT("complete.counted");
    header_.completed_at = head_;
  }

  SegmentMemory& memory_;
  Header& header_;
  bool linked_;
  PriorityTree tree_;
  LeafChanges leaves_;
  InitialLeaf initial_;
  PendingSet pending_;
  Streams streams_;
  uint64_t head_ = 0;  // of the running absorption
  uint64_t adopted_ = 0, deferred_ = 0;
};

}  // namespace torchreplay
