// Streams as absorbers see them: rows linked in time, and which items they complete. Runs under the segment's mutex.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "segment/row_facts.h"
#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

inline constexpr uint64_t kNoSlot = std::numeric_limits<uint64_t>::max();

class Streams {
 public:
  explicit Streams(SegmentMemory& m)
      : memory_(m), view_(m.layout().view), ends_others_(view_.linked() && m.header().sampler.queue) {}

  uint64_t next(uint64_t slot) const { return slot_at(memory_.links(slot).next); }
  uint64_t prev(uint64_t slot) const { return slot_at(memory_.links(slot).prev); }

  void clear(uint64_t slot) const {
    memory_.links(slot).prev.store(0, std::memory_order_relaxed);
    memory_.links(slot).next.store(0, std::memory_order_relaxed);
  }

  // Whether items may hold both the row and its predecessor.
  bool follows(const RowFacts& row) const { return row.prev_key1 && (view_.across || !(row.flags & kFirst)); }

  // Whether a row has to wait for its predecessor: to be linked with it, or, in a queue, to say that nothing follows
  // it.
  bool waits_for_predecessor(const RowFacts& row) const {
    return view_.linked() && (follows(row) || (ends_others_ && row.prev_key1));
  }

  // Finds the slot of the row's predecessor; kNoSlot when that is gone, for then the row has none. False when it is
  // there but not absorbed yet: the row has to wait for it.
  bool find_predecessor(const RowFacts& row, uint64_t& before) const {
    before = kNoSlot;
    const uint64_t slot = memory_.slot_of(row.prev_key1 - 1);
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || slot_word::key1(word) != row.prev_key1) return true;
    if (memory_.at(slot) != row.prev_key1) return false;
    before = slot;
    return true;
  }

  // Links `slot` behind `before`, unless another row claims that place already: of two processes with one writer's
  // state, which must not be, only the first continues the stream.
  void link(uint64_t before, uint64_t slot) const {
    if (next(before) != kNoSlot) return;
    memory_.links(slot).prev.store(static_cast<uint32_t>(before + 1), std::memory_order_relaxed);
    kill_fence();
    TORCHREPLAY_FAULT("link.prev");
    memory_.links(before).next.store(static_cast<uint32_t>(slot + 1), std::memory_order_relaxed);
    TORCHREPLAY_FAULT("link.next");
  }

  // Takes back what a death in link() left: a row that says where the one before it is, and is not known there.
  void drop_half_link(uint64_t slot) const {
    const uint64_t before = prev(slot);
    if (before != kNoSlot && next(before) != slot) memory_.links(slot).prev.store(0, std::memory_order_relaxed);
  }

  // The slot's own links go last: after a death they lead the repair back to its neighbours.
  void unlink(uint64_t slot) const {
    const uint64_t before = prev(slot), after = next(slot);
    if (before != kNoSlot) memory_.links(before).next.store(0, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("unlink.before");
    if (after != kNoSlot) memory_.links(after).prev.store(0, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("unlink.after");
    kill_fence();
    clear(slot);
  }

  // Calls visit(slot) for every anchor whose item may hold the row in `slot`, itself excepted.
  template <class Visit>
  void each_item_with(uint64_t slot, Visit&& visit) const {
    uint64_t at = slot;
    for (uint32_t k = 0; k < view_.span && (at = prev(at)) != kNoSlot; k++) visit(at);
    at = slot;
    for (uint32_t k = 0; k < view_.history && (at = next(at)) != kNoSlot; k++) visit(at);
  }

  // Calls visit(anchor, priority) for every item that the row just linked in `slot` makes complete; NaN: no priority
  // was given. O(span + history) when it may complete one.
  template <class Visit>
  void each_completed_by(uint64_t slot, const RowFacts& row, Visit&& visit) {
    const bool ends = !view_.across && (row.flags & kEnds);
    if (!ends && !completes_whole_item(row.step)) return;
    walk_back(slot);
    const uint64_t before = path_.size();  // rows held before this one
    for (uint64_t k = ends ? view_.min_steps : view_.span; k <= std::min<uint64_t>(view_.span, before); k++) {
      const uint64_t frames = view_.across ? 0 : std::min<uint64_t>(row.step - k, view_.history);
      if (!is_anchor(row.step - k) || before < k + frames) continue;
      visit(path_[k - 1], view_.priority_steps ? largest_priority(path_[k - 1]) : row.priority);
    }
  }

  // The header of the row absorbed in `slot`; false when it is no longer that row.
  bool facts_of(uint64_t slot, RowFacts& facts) const {
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    return slot_word::is_row(word) && slot_word::key1(word) == memory_.at(slot) &&
           read_facts(memory_, slot, word, facts);
  }

  bool is_anchor(uint64_t step) const { return view_.across || step % view_.stride == 0; }

 private:
  static uint64_t slot_at(const std::atomic<uint32_t>& link) {
    const uint32_t slot1 = link.load(std::memory_order_relaxed);
    return slot1 ? slot1 - 1 : kNoSlot;
  }

  bool completes_whole_item(uint32_t step) const {
    return view_.across || (step >= view_.span && is_anchor(step - view_.span));
  }

  // Collects the rows before `slot`, nearest first, as far as items reach.
  void walk_back(uint64_t slot) {
    path_.clear();
    const uint64_t reach = uint64_t{view_.span} + view_.history;
    for (uint64_t at = slot; path_.size() < reach && (at = prev(at)) != kNoSlot;) path_.push_back(at);
  }

  // The largest priority given with the first steps of the item anchored at `slot`; NaN: none was.
  float largest_priority(uint64_t slot) const {
    float largest = NAN;
    for (uint32_t k = 0; k < view_.priority_steps && (slot = next(slot)) != kNoSlot; k++) {
      RowFacts row;
      if (facts_of(slot, row)) largest = std::fmax(largest, row.priority);
      if (!view_.across && (row.flags & kEnds)) break;
    }
    return largest;
  }

  SegmentMemory& memory_;
  const View& view_;
  bool ends_others_;
  std::vector<uint64_t> path_;
};

}  // namespace torchreplay
