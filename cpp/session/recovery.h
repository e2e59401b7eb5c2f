// Rebuilding what is derived from the rows, after the mutex's owner died. Runs under the mutex.
#pragma once

#include <vector>

#include "absorb/epochs.h"
#include "segment/limiter.h"

namespace torchreplay {

// O(capacity): after a death in an absorption a look at the counts and sums, else one at every row. Idempotent: if the
// repairing process dies, the next one repeats it.
class Recovery {
 public:
  explicit Recovery(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        tree_(m.tree()),
        leaves_(tree_),
        initial_(header_, tree_, leaves_),
        drawn_(m),
        pending_(m),
        streams_(m),
        claims_(m),
        counts_(m),
        places_(m),
        pages_(m),
        versions_(m) {}

  // `grid`: of the leaves that are there, if another buffer had the same.
  void run(const PriorityTree::GridState* grid = nullptr) {
    alive();
    drops_ = is_queue() && !grid;
    TORCHREPLAY_FAULT("recover.begun");
    RowRewriter(memory_).finish();
    TORCHREPLAY_FAULT("recover.rewritten");
    if (is_queue()) {
      claims_.finish_going();
      places_.repair(header_.head.load(std::memory_order_acquire));
    }
    if (header_.dirty == Dirty::kSlots) {
      pending_.recount();
      tree_.rebuild_largest();
      TORCHREPLAY_FAULT("recover.recounted");
      Absorber(memory_).finish_interrupted();
      TORCHREPLAY_FAULT("recover.finished");
      count_rows();
    }
    if (header_.dirty == Dirty::kLinks) {
      const uint64_t head = header_.head.load(std::memory_order_acquire);
      read_slots(head);
      TORCHREPLAY_FAULT("recover.read");
      if (memory_.layout().view.linked()) {
        while (defer_rows()) {
        }
        TORCHREPLAY_FAULT("recover.deferred");
        each_slot([&](uint64_t slot) { streams_.clear(slot); });
        TORCHREPLAY_FAULT("recover.cleared");
        each_slot([&](uint64_t slot) { link(slot); });
      }
      TORCHREPLAY_FAULT("recover.linked");
      settle_leaves(head);
      TORCHREPLAY_FAULT("recover.settled");
      pending_.recount();
      TORCHREPLAY_FAULT("recover.counted");
      header_.absorbed = head;
      TORCHREPLAY_FAULT("recover.cursor");
    }
    Epochs(memory_).finish_begin();
    if (is_queue()) claims_.restore();
    if (counts_draws()) counts_.restore();
    versions_.rebuild(streams_);
    grid ? tree_.rebuild_in(*grid) : tree_.rebuild();
    TORCHREPLAY_FAULT("recover.summed");
    kill_fence();
    header_.dirty = Dirty::kClean;
    TORCHREPLAY_FAULT("recover.clean");
  }

  // Ends an import whose rows are all placed, or takes back those that are. Others may have written newer ones.
  void end_import() {
    alive();
    TORCHREPLAY_FAULT("import.ends");
    if (memory_.has_pages()) void_loaded_pages();
    if (header_.import_stage == ImportStage::kPlaced)
      take_over_import();
    else
      take_back_import();
    kill_fence();
    header_.importer = 0;
    TORCHREPLAY_FAULT("import.over");
  }

 private:
  void take_over_import() {
    header_.dirty = Dirty::kLinks;
    kill_fence();
    each_imported_slot([&](uint64_t slot) {
      const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
      const bool placed = slot_word::writer(word) == slot_word::kLoaded;
      if (!placed) tree_.leaves()[slot] = 0;
      kill_fence();
      memory_.at(slot) = placed ? slot_word::key1(word) : 0;
      if (!is_queue()) return;
      places_.begin_at_newest(slot, header_.import_head);
      if (tree_.leaf(static_cast<int64_t>(slot)) > 0) tree_.leaves()[slot] = places_.leaf(slot);
    });
    TORCHREPLAY_FAULT("import.seen");
    void_empty_slots(header_.import_head);
    const Counts& c = header_.imported;
    header_.set_largest_raw(std::max(header_.max_raw, c.max_raw));
    header_.sampled = c.sampled;
    header_.updated = c.updated;
    header_.stale_updates = c.stale_updates;
    header_.unready_updates = c.unready_updates;
    header_.evicted_unsampled = c.evicted_unsampled;
    header_.priority_change = c.priority_change;
    header_.dropped_items = c.dropped_items;
    header_.expired_items = c.expired_items;
    header_.evicted_by_pages = c.evicted_by_pages;
    header_.draws.store(c.draws, std::memory_order_relaxed);
    header_.redraws.store(c.redraws, std::memory_order_relaxed);
    header_.taken_ahead.store(c.taken_ahead, std::memory_order_relaxed);
    header_.missed.store(c.missed, std::memory_order_relaxed);
    header_.aged.store(c.aged, std::memory_order_relaxed);
    header_.ages.store(static_cast<uint64_t>(c.ages), std::memory_order_relaxed);
    header_.largest_age.store(c.largest_age, std::memory_order_relaxed);
    uint32_t streams = header_.streams.load(std::memory_order_relaxed);
    while (streams < c.streams && !header_.streams.compare_exchange_weak(streams, c.streams)) {
    }
    header_.seed = header_.import_seed;
    header_.discarded_below = header_.import_head;  // some of them may have been
    TORCHREPLAY_FAULT("import.counted");
    initial_.refresh();
    run(&c.grid);
    header_.inserted = std::max(c.inserted + items_of_others(), static_cast<uint64_t>(tree_.count()));
    header_.completed_at = header_.absorbed;
    header_.admission_begun = 0;
    LimiterConfig& limiter = header_.limiters[header_.limiter_index & 1];
    limiter.cleared = std::min(c.cleared, header_.inserted);
    if (header_.import_keeps_limiter) {
      limiter.inserted_before = std::min(c.inserted_before, header_.inserted);
      limiter.sampled_before = c.sampled_before;
    } else {
      change_limiter(header_, limiter);  // what was counted for another one says nothing about this one
    }
  }

  void take_back_import() {
    header_.dirty = Dirty::kTree;
    kill_fence();
    each_imported_slot([&](uint64_t slot) {
      std::atomic<uint64_t>& word = memory_.row(slot).word;
      uint64_t placed = word.load(std::memory_order_relaxed);
      if (slot_word::writer(placed) == slot_word::kLoaded)
        word.compare_exchange_strong(placed, 0, std::memory_order_acq_rel, std::memory_order_relaxed);
      TORCHREPLAY_FAULT("import.taken_back");
      tree_.leaves()[slot] = 0;
      kill_fence();
      drawn_.clear(slot);
    });
    // Its tickets, if they were issued, are spent. After this no row comes to lie below `end`, in any process.
    const uint64_t head = header_.head.load(std::memory_order_acquire), end = std::min(head, header_.import_head);
    void_empty_slots(end);
    TORCHREPLAY_FAULT("import.voided");
    if (is_row_below(end)) {
      header_.import_head = 0;  // they were others': no other import
    } else {
      header_.import_head = end;
      header_.absorbed = std::max(header_.absorbed, end);
      header_.completed_at = std::max(header_.completed_at, end);
    }
    run();
  }

  bool is_row_below(uint64_t end) {
    bool found = false;
    each_slot([&](uint64_t slot) {
      const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
      found |= (slot_word::is_busy(word) || slot_word::is_row(word)) && slot_word::key1(word) <= end;
    });
    return found;
  }

  // Slots that rows were imported into are marked as drawn, and hold nothing absorbed: their leaves wait to be.
  template <class Visit>
  void each_imported_slot(Visit&& visit) {
    each_slot([&](uint64_t slot) {
      if (drawn_.contains(slot)) visit(slot);
    });
  }

  // Items that can be drawn, without those that were imported.
  uint64_t items_of_others() {
    uint64_t n = 0;
    each_slot([&](uint64_t slot) {
      n += memory_.at(slot) > header_.import_head && tree_.leaf(static_cast<int64_t>(slot)) > 0;
    });
    return n;
  }

  // Nobody is going to write the rows of these tickets.
  void void_empty_slots(uint64_t head) {
    for (uint64_t slot = 0; slot < std::min(memory_.capacity(), head); slot++) {
      std::atomic<uint64_t>& word = memory_.row(slot).word;
      const uint64_t newest = head - 1 - (head - 1 - slot) % memory_.capacity();
      uint64_t was = word.load(std::memory_order_relaxed);
      if (slot_word::is_busy(was) || slot_word::is_row(was) || slot_word::key1(was) > newest) continue;
      word.compare_exchange_strong(was, slot_word::voided(newest), std::memory_order_relaxed);
    }
  }

  // Nobody is going to write these pages to their end.
  void void_loaded_pages() {
    for (uint64_t page = 0; page < memory_.layout().pages.count; page++) {
      std::atomic<uint64_t>& word = memory_.page_word(page);
      uint64_t was = word.load(std::memory_order_relaxed);
      if (!slot_word::is_busy(was) || slot_word::writer(was) != slot_word::kLoaded) continue;
      word.compare_exchange_strong(was, slot_word::voided(slot_word::key1(was) - 1), std::memory_order_acq_rel,
                                   std::memory_order_relaxed);
    }
  }

  // Waiters go on waiting while this counts.
  void alive() { header_.repairing.fetch_add(1, std::memory_order_relaxed); }

  template <class Visit>
  void each_slot(Visit&& visit) {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (slot % Absorber::kChunk == 0) alive();
      visit(slot);
    }
  }

  void count_rows() {
    const uint64_t* at = &memory_.at(0);
    header_.rows =
        static_cast<uint64_t>(std::count_if(at, at + memory_.capacity(), [](uint64_t key1) { return key1; }));
  }

  // Which row every slot holds. A leaf survives only with the row that it belongs to.
  void read_slots(uint64_t head) {
    header_.rows = 0;
    if (memory_.has_pages()) pages_.restart();
    each_slot([&](uint64_t slot) {
      uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
      RowFacts facts;
      bool is_row = slot_word::is_row(word) && read_facts(memory_, slot, word, facts);
      if (is_row && memory_.has_pages() && !take_run(slot, word)) {
        word = memory_.row(slot).word.load(std::memory_order_acquire);
        is_row = false;
      }
      const uint64_t key1 = is_row ? slot_word::key1(word) : 0;
      uint64_t& at = memory_.at(slot);
      if (at != key1) {
        if (at) drop(slot);
        tree_.leaves()[slot] = 0;
        if (is_queue()) claims_.begin(slot, word);
        if (counts_draws()) counts_.begin(slot);
        kill_fence();
        at = key1;
      }
      header_.rows += key1 != 0;
      const uint64_t newest1 = slot < head ? head - (head - 1 - slot) % memory_.capacity() : 0;
      const bool kept = is_queue() && places_.kept1(slot) >= newest1;
      pending_.assign(slot, slot_word::is_busy(word) || (slot_word::is_row(word) && !is_row) ||
                                (slot_word::key1(word) < newest1 && !kept));
    });
  }

  // False when the row's pages are gone, and the row with them, or nobody knows yet.
  bool take_run(uint64_t slot, uint64_t word) {
    Run run;
    if (pages_.look(slot, word, run) != PageFollower::Fate::kHeld) return false;
    pages_.adopt(slot, run);
    return true;
  }

  // Takes back rows whose predecessor was committed after its slot was read, since writers go on. They wait for it, as
  // in an absorption, or it would never be linked. True when there were any: those behind them must wait too.
  bool defer_rows() {
    bool deferred = false;
    each_slot([&](uint64_t slot) {
      uint64_t& at = memory_.at(slot);
      uint64_t before;
      RowFacts row;
      if (!at || !streams_.facts_of(slot, row) || !streams_.waits_for_predecessor(row) ||
          streams_.find_predecessor(row, before))
        return;
      tree_.leaves()[slot] = 0;
      kill_fence();
      at = 0;
      header_.rows--;
      pending_.assign(slot, true);
      deferred = true;
    });
    return deferred;
  }

  void link(uint64_t slot) {
    RowFacts row;
    if (!memory_.at(slot) || !streams_.facts_of(slot, row) || !streams_.waits_for_predecessor(row)) return;
    const uint64_t before = memory_.slot_of(row.prev_key1 - 1);
    if (memory_.at(before) != row.prev_key1) return;
    streams_.follows(row) ? streams_.link(before, slot) : claims_.close_stream(before);
  }

  // An item has a leaf exactly when it is complete. One that already had keeps it; any other gets its initial one.
  void settle_leaves(uint64_t head) {
    std::vector<bool> complete(memory_.capacity());
    uint64_t without_leaf = 0;
    each_item([&](uint64_t anchor, float) {
      if (is_discarded(memory_, anchor) || (is_queue() && !is_drawable(anchor))) return;
      if (counts_draws() && counts_.is_used_up(anchor)) return;
      // One that has gone for its age does not come back.
      const bool has_leaf = tree_.leaf(static_cast<int64_t>(anchor)) > 0;
      if (!has_leaf && versions_.is_too_old(anchor, streams_)) return;
      complete[anchor] = true;
      without_leaf += !has_leaf;
    });
    each_slot([&](uint64_t slot) {
      if (complete[slot]) return;
      drop(slot);
      tree_.leaves()[slot] = 0;
    });
    if (!without_leaf) return;
    tree_.rebuild_largest();  // from which new items may start
    each_item([&](uint64_t anchor, float priority) {
      const auto index = static_cast<int64_t>(anchor);
      if (!complete[anchor] || tree_.leaf(index) > 0) return;
      drawn_.clear(anchor);
      if (is_queue()) claims_.arrive(anchor);
      leaves_.set(anchor, is_queue() ? places_.leaf(anchor) : initial_.of(priority));
      header_.inserted++;
      header_.completed_at = head;
    });
  }

  // The item anchored there lacks a row. If it could be drawn, rows of it were overwritten, and nobody saw it.
  void drop(uint64_t anchor) { header_.dropped_items += drops_ && tree_.leaf(static_cast<int64_t>(anchor)) > 0; }

  bool is_queue() const { return Claims::are_kept(header_); }
  bool counts_draws() const { return DrawCounts::are_kept(header_); }

  // Whether a complete item of a queue is one that somebody may get.
  bool is_drawable(uint64_t anchor) const {
    const Claim claim = claims_.of(anchor);
    return !claim.holder() && claim.draws() < header_.sampler.max_draws;
  }

  // Calls visit(anchor, priority) for every complete item; NaN: none was given.
  template <class Visit>
  void each_item(Visit&& visit) {
    each_slot([&](uint64_t slot) {
      RowFacts row;
      if (!memory_.at(slot) || !streams_.facts_of(slot, row)) return;
      if (memory_.layout().view.linked())
        streams_.each_completed_by(slot, row, visit);
      else
        visit(slot, row.priority);
    });
  }

  SegmentMemory& memory_;
  Header& header_;
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
  ItemVersions versions_;
  bool drops_ = false;  // items of which rows have gone since they were seen count as dropped
};

}  // namespace torchreplay
