// Turning written rows into drawable items. Everything here runs under the segment's mutex.
#pragma once

#include "absorb/claims.h"
#include "absorb/dirty_scope.h"
#include "absorb/draw_counts.h"
#include "absorb/drawn_items.h"
#include "absorb/item_versions.h"
#include "absorb/leaf_changes.h"
#include "absorb/page_follower.h"
#include "absorb/pending_set.h"
#include "absorb/places.h"
#include "absorb/streams.h"
#include "segment/row_rewriter.h"

namespace torchreplay {

class Absorber {
 public:
  explicit Absorber(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        linked_(m.layout().view.linked()),
        is_queue_(Claims::are_kept(header_)),
        counts_draws_(DrawCounts::are_kept(header_)),
        has_pages_(m.has_pages()),
        versions_(m),
        keeps_more_(is_queue_ || counts_draws_ || has_pages_ || versions_.are_kept()),
        tree_(m.tree()),
        leaves_(tree_),
        initial_(header_, tree_, leaves_),
        drawn_(m),
        pending_(m),
        streams_(m),
        claims_(m),
        counts_(m),
        places_(m),
        pages_(m) {}

  // Most slots visited while the mutex is held in one piece.
  static constexpr uint64_t kChunk = 4096;

  // Rows whose words are fetched ahead: other processors have written them.
  static constexpr uint64_t kAhead = 8;

  // One bounded step of bringing slots up to date with the tickets below `head`. True: nothing is left to do. Pages
  // first: a row is there only where nobody has taken its pages again.
  bool step(uint64_t head) {
    head = std::max(head, header_.absorbed);  // another learner may have gone further between two steps
    if (header_.absorbed >= head && header_.pending == 0 && !(has_pages_ && pages_.lags())) return true;
    const DirtyScope dirty(header_, Dirty::kSlots);
    initial_.refresh();
    head_ = head;
    if (has_pages_ && !pages_.step()) return false;
    uint64_t& from = header_.absorbed;
    if (head > memory_.capacity()) from = std::max(from, head - memory_.capacity());
    kill_fence();
    if (from < head) {
      const uint64_t to = std::min(head, from + kChunk);
      keeps_more_ ? sync_all<true>(from, to) : sync_all<false>(from, to);
      TORCHREPLAY_FAULT("absorb.synced");
      leaves_.flush();
      TORCHREPLAY_FAULT("absorb.flushed");
      kill_fence();
      from = to;
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

  // One bounded step of taking the items away that are too old for the learner's version. True: none is left that is.
  // O(items that go), and nothing where none does.
  bool expire() {
    const int64_t oldest = versions_.judge();
    if (!versions_.has_older(oldest)) return true;
    const DirtyScope dirty(header_, Dirty::kTree);
    const uint64_t last = versions_.blocks();
    for (uint64_t n = 0; n < kChunk && expired_below_ < last; n += kVersionBlock) {
      expired_below_ = versions_.next_block(expired_below_, oldest);
      if (expired_below_ == last) break;
      versions_.expire_block(expired_below_++, oldest, tree_, [&](uint64_t anchor) { expire(anchor); });
    }
    leaves_.flush();
    TORCHREPLAY_FAULT("expire.flushed");
    if (expired_below_ < last) return false;
    expired_below_ = 0;  // others may have come meanwhile
    versions_.sum_up();
    return !versions_.has_older(oldest);
  }

  // Brings one slot up to date: what a failed draw does, so that it cannot fail for ever.
  void resync(uint64_t slot, uint64_t head) {
    if (slot >= head) return;
    const DirtyScope dirty(header_, Dirty::kSlots);
    initial_.refresh();
    head_ = head;
    pending_.assign(slot, true);
    TORCHREPLAY_FAULT("resync.marked");
    kill_fence();
    if (has_pages_) pages_.drop_spoilt(slot);
    sync_below(slot, head);
    TORCHREPLAY_FAULT("resync.synced");
    leaves_.flush();
  }

  // An item that cannot be found, though all its rows were brought up to date: nobody will ever draw it.
  void give_up(uint64_t anchor) {
    const DirtyScope dirty(header_, Dirty::kSlots);
    retire(anchor);
    leaves_.flush();
  }

  // Takes the rows away that lie in the slots [first, last), at most kChunk of them, and have keys below `end`.
  void clear(uint64_t first, uint64_t last, uint64_t end) {
    const DirtyScope dirty(header_, Dirty::kSlots);
    drops_ = false;  // nobody overwrites them
    head_ = header_.absorbed;
    for (uint64_t slot = first; slot < last; slot++) {
      std::atomic<uint64_t>& word = memory_.row(slot).word;
      uint64_t row = word.load(std::memory_order_acquire);
      if (!slot_word::is_row(row) || slot_word::key1(row) > end) continue;
      pending_.assign(slot, true);  // whoever repairs after a death finds it
      TORCHREPLAY_FAULT("clear.marked");
      kill_fence();
      // It fails where a writer overwrites the row now: then it goes as any other.
      word.compare_exchange_strong(row, slot_word::voided(slot_word::key1(row) - 1), std::memory_order_acq_rel,
                                   std::memory_order_relaxed);
      TORCHREPLAY_FAULT("clear.voided");
      sync_below(slot, head_);
    }
    drops_ = true;
    leaves_.flush();
  }

  // Gives the row with `key`, the last one of its stream, the end of its episode. Nothing happens if it is gone. Its
  // items that only waited for the end become drawable.
  void end_episode(uint64_t key, size_t truncated) {
    const uint64_t slot = memory_.slot_of(key);
    if (header_.importer) {  // whose end brings everything up to date
      mark_truncated(key, truncated);
      return;
    }
    const DirtyScope dirty(header_, Dirty::kSlots);
    initial_.refresh();
    head_ = header_.absorbed;
    pending_.assign(slot, true);
    TORCHREPLAY_FAULT("end.marked");
    kill_fence();
    RowFacts row;
    if (mark_truncated(key, truncated) && memory_.at(slot) && streams_.facts_of(slot, row))
      streams_.each_completed_by(slot, row,
                                 [&](uint64_t anchor, float priority) { complete(anchor, priority, kNoSlot); });
    sync_below(slot, head_);
    TORCHREPLAY_FAULT("end.synced");
    leaves_.flush();
  }

  // Brings to an end what an absorption was at when its process died. It had begun with one slot: one of the chunk that
  // starts at the cursor, or a pending one. Leaves counts and sums to be computed anew. O(chunk + pending).
  void finish_interrupted() {
    const uint64_t most = std::min(kChunk, memory_.capacity());
    head_ = header_.head.load(std::memory_order_acquire);
    auto each_touched = [&](auto&& visit) {
      for (uint64_t key = header_.absorbed; key < std::min(head_, header_.absorbed + most); key++)
        visit(memory_.slot_of(key));
      pending_.each(visit);
    };
    // Before any row: none may complete an item that was being cleared.
    each_touched([&](uint64_t slot) {
      uint64_t& at = memory_.at(slot);
      if (at && is_gone(at, memory_.row(slot).word.load(std::memory_order_acquire))) evict(slot, at);
    });
    each_touched([&](uint64_t slot) {
      RowFacts row;
      uint64_t before = kNoSlot;
      if (!memory_.at(slot)) return;
      // The row before may be gone by now, and a link to it would come to lead to another stream's row.
      if (linked_) streams_.drop_half_link(slot);
      if (!streams_.facts_of(slot, row)) return;
      if (streams_.waits_for_predecessor(row)) streams_.find_predecessor(row, before);
      connect(slot, row, before);
    });
  }

 private:
  // kMore: false where nothing is kept of rows and items that most segments do not keep. An absorption there takes a
  // fifth less without the questions.
  template <bool kMore>
  void sync_all(uint64_t from, uint64_t to) {
    for (uint64_t key = from, slot = memory_.slot_of(from); key < to; key++) {
      __builtin_prefetch(&memory_.row(slot + kAhead));
      sync<kMore>(slot, key);
      if (++slot == memory_.capacity()) slot = 0;
    }
  }

  void sync_below(uint64_t slot, uint64_t head) {
    if (slot < head) sync(slot, head - 1 - (head - 1 - slot) % memory_.capacity());
  }

  // `newest`: the newest ticket issued for this slot, below the head of this absorption.
  template <bool kMore = true>
  void sync(uint64_t slot, uint64_t newest) {
    RowHeader& row = memory_.row(slot);
    uint64_t& at = memory_.at(slot);
    const uint64_t word = row.word.load(std::memory_order_acquire);
    // In a queue no row stays that stands for an older ticket, since order is by key.
    const bool in_queue = kMore && is_queue_;
    const uint64_t stands1 = std::max(in_queue ? places_.kept1(slot) : 0, slot_word::key1(word));
    const bool passed = in_queue && stands1 < newest + 1;
    if (at && (passed || is_gone(at, word))) evict<kMore>(slot, at);
    bool pending = slot_word::is_busy(word) || stands1 < newest + 1;
    if (!at && slot_word::is_row(word) && !passed) pending |= !adopt<kMore>(slot, at, word);
    kill_fence();
    pending_.assign(slot, pending);
    TORCHREPLAY_FAULT("sync.done");
  }

  // False when the row is gone.
  bool mark_truncated(uint64_t key, size_t truncated) {
    RowRewriter row(memory_);
    row.choose({truncated});
    *row.value(truncated) = 1;
    const bool there = row.change(key, kTruncated);
    row.close();
    return there;
  }

  static bool is_gone(uint64_t at, uint64_t word) { return !slot_word::is_row(word) || slot_word::key1(word) != at; }

  // Leaves first, for the links lead to them; `at` last: a crash in between must never hand the old row's priority to
  // the new one. If it is found half done, it can be done again.
  template <bool kMore = true>
  void evict(uint64_t slot, uint64_t& at) {
    if (kMore && is_queue_) claims_.let_row_go(slot, at, drops_);
    retire<kMore>(slot);
    TORCHREPLAY_FAULT("evict.leaf");
    if (linked_) {
      streams_.each_item_with(slot, [&](uint64_t anchor) { retire<kMore>(anchor); });
      TORCHREPLAY_FAULT("evict.items");
      // In a queue the row before may stay for longer, and must not be taken for the last one there is.
      if (const uint64_t before = streams_.prev(slot); kMore && is_queue_ && before != kNoSlot)
        claims_.close_stream(before);
      kill_fence();
      streams_.unlink(slot);
    }
    TORCHREPLAY_FAULT("evict.unlinked");
    kill_fence();
    at = 0;
    TORCHREPLAY_FAULT("evict.at");
    if (kMore && is_queue_)
      claims_.end_row(slot);  // after `at`, or a death in between would make a done item new again
    if (kMore && counts_draws_) counts_.begin(slot);
    header_.rows--;
    TORCHREPLAY_FAULT("evict.rows");
  }

  // The item anchored at a slot, if there is one, can be drawn no more.
  template <bool kMore = true>
  void retire(uint64_t anchor) {
    const bool drawable = tree_.leaf(static_cast<int64_t>(anchor)) > 0;
    header_.evicted_unsampled += drawable && !drawn_.contains(anchor);
    if (kMore && is_queue_) {
      header_.dropped_items += drawable && drops_;
      claims_.end_item(anchor, drops_);
    }
    if (kMore && counts_draws_) counts_.end_item(anchor);
    leaves_.set(anchor, 0);
  }

  // The item anchored there, which can be drawn, is too old. Counted first: a death in between may count it twice, but
  // no item goes uncounted.
  void expire(uint64_t anchor) {
    header_.expired_items++;
    kill_fence();
    leaves_.set(anchor, 0);
    if (is_queue_) claims_.end_item(anchor);
    if (counts_draws_) counts_.end_item(anchor);
    TORCHREPLAY_FAULT("expire.item");
  }

  // False when the row has to wait: it is being overwritten right now, or comes before its predecessor, or its pages
  // were issued after this absorption has looked. One whose pages were issued again is no row any more.
  template <bool kMore>
  bool adopt(uint64_t slot, uint64_t& at, uint64_t word) {
    RowFacts row;
    if (!read_facts(memory_, slot, word, row)) return false;
    Run run;
    if (kMore && has_pages_) {
      const PageFollower::Fate fate = pages_.look(slot, word, run);
      adopted_ += fate == PageFollower::Fate::kGone;  // rows that wait for it may go on
      if (fate != PageFollower::Fate::kHeld) return fate == PageFollower::Fate::kGone;
    }
    uint64_t before = kNoSlot;
    if (streams_.waits_for_predecessor(row) && !streams_.find_predecessor(row, before)) {
      deferred_++;
      TORCHREPLAY_FAULT("adopt.deferred");
      return false;
    }
    TORCHREPLAY_FAULT("adopt.facts");
    if (kMore && is_queue_) claims_.begin(slot, word);
    if (kMore && counts_draws_) counts_.begin(slot);
    if (kMore && has_pages_) pages_.adopt(slot, run);
    kill_fence();
    at = slot_word::key1(word);
    TORCHREPLAY_FAULT("adopt.at");
    kill_fence();
    header_.rows++;
    TORCHREPLAY_FAULT("adopt.rows");
    adopted_++;
    connect<kMore>(slot, row, before);
    return true;
  }

  // Links an adopted row with its predecessor, and makes the items drawable that it completes. What is done already
  // stays.
  template <bool kMore = true>
  void connect(uint64_t slot, const RowFacts& row, uint64_t before) {
    if (!linked_) return complete<kMore>(slot, row.priority, slot);
    if (before != kNoSlot) join(before, slot, row);
    TORCHREPLAY_FAULT("adopt.linked");
    streams_.each_completed_by(slot, row,
                               [&](uint64_t anchor, float priority) { complete<kMore>(anchor, priority, slot); });
  }

  void join(uint64_t before, uint64_t slot, const RowFacts& row) {
    streams_.follows(row) ? streams_.link(before, slot) : claims_.close_stream(before);
  }

  // `last`: the slot of the row that makes the item complete; kNoSlot: none does.
  template <bool kMore = true>
  void complete(uint64_t anchor, float priority, uint64_t last) {
    if (tree_.leaf(static_cast<int64_t>(anchor)) > 0 || is_discarded(memory_, anchor)) return;
    if (kMore && is_queue_) {
      if (!claims_.of(anchor).is_untouched()) return;
      last == kNoSlot ? claims_.arrive(anchor) : claims_.arrive_with(anchor, last);
    }
    if (kMore && counts_draws_ && counts_.is_used_up(anchor)) return;
    drawn_.clear(anchor);
    if (kMore && versions_.are_kept()) versions_.set(anchor, streams_);
    leaves_.set(anchor, kMore && is_queue_ ? places_.leaf(anchor) : initial_.of(priority));
    TORCHREPLAY_FAULT("complete.leaf");
    header_.inserted++;
    TORCHREPLAY_FAULT("complete.counted");
    header_.completed_at = head_;
  }

  SegmentMemory& memory_;
  Header& header_;
  bool linked_, is_queue_, counts_draws_, has_pages_;
  ItemVersions versions_;
  bool keeps_more_;  // of rows or items, than most segments do
  PriorityTree tree_;
  LeafChanges leaves_;
  InitialLeaf initial_;
  DrawnItems drawn_;
  PendingSet pending_;
  Streams streams_;
  Claims claims_;
  DrawCounts counts_;
  Places places_;
  PageFollower pages_;
  uint64_t head_ = 0;  // of the running absorption
  uint64_t adopted_ = 0, deferred_ = 0;
  bool drops_ = true;           // items that go count as dropped
  uint64_t expired_below_ = 0;  // blocks of slots that hold nothing too old any more
};

}  // namespace torchreplay
