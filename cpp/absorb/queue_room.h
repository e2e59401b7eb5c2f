// How far the writers of a queue may go: as far as no row is overwritten that an item still needs. Where others are
// not, nobody waits for a row of which nobody can say when it is done with. Somebody writes it or has its item, or its
// stream may go on. Such a row is kept for another turn of the ring: its slot's next ticket, which is the next one
// there is, is nobody's. Runs under the segment's mutex.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "absorb/absorber.h"
#include "absorb/streams.h"
#include "segment/run.h"

namespace torchreplay {

// Why a row is needed, or is not.
enum class Need : uint32_t {
  kNone,
  kToDraw,      // its item is still to be drawn
  kHeld,        // somebody has its item
  kUnfinished,  // its item may still be completed
  kUnwritten,   // it is being written, or may be
};

class QueueRoom {
 public:
  explicit QueueRoom(SegmentMemory& m)
      : memory_(m), header_(m.header()), view_(m.layout().view), tree_(m.tree()), claims_(m), places_(m), streams_(m) {}

  // The ticket up to which writers may go. O(rows that are needed no more since the last call, and steps of an item).
  // Where they have no room it looks harder: for writers that died, tickets that nobody has begun to write, and rows to
  // be kept. `starved`: a learner has too few items. Then rows of items that are to be drawn are kept, too.
  uint64_t limit(bool starved = false) {
    const bool hard =
        header_.head.load(std::memory_order_relaxed) >= header_.ticket_limit.load(std::memory_order_relaxed);
    uint64_t& from = header_.needed_from;
    if (header_.absorbed > memory_.capacity()) from = std::max(from, header_.absorbed - memory_.capacity());
    do advance(from, header_.absorbed, [&](uint64_t key) { return need_of(key, hard) == Need::kNone; });
    while (hard && keep_rows(starved));
    TORCHREPLAY_FAULT("room.needed");
    return from + memory_.capacity();
  }

  // The same in tickets of pages: no page is taken that a row has which an item needs. A run that a writer speaks of is
  // needed, too. Everything is absorbed. O(pages that are needed no more since the last call, and steps of an item).
  uint64_t page_limit() {
    const uint64_t count = memory_.layout().pages.count, wanted = header_.pages_wanted.load(std::memory_order_relaxed);
    uint64_t& from = header_.page_needed_from;
    const uint64_t end = std::min(header_.pages_settled, header_.followed);
    if (end > count) from = std::max(from, end - count);
    const bool hard = wanted && !fits_below(memory_, from + count, wanted);
    by_pages_ = true;
    advance(from, end, [&](uint64_t ticket) { return need_of_page(ticket, hard) == Need::kNone; });
    by_pages_ = false;
    TORCHREPLAY_FAULT("room.pages");
    if (wanted && fits_below(memory_, from + count, wanted)) header_.pages_wanted.store(0, std::memory_order_relaxed);
    return from + count;
  }

  // The key below which each row is in a complete item, or will never be in one.
  uint64_t settled_below() {
    uint64_t& below = header_.settled_below;
    below = std::max(below, header_.needed_from);
    if (header_.absorbed > memory_.capacity()) below = std::max(below, header_.absorbed - memory_.capacity());
    advance(below, header_.absorbed, [&](uint64_t key) {
      const Need need = need_of(key, true);
      return need == Need::kNone || need == Need::kToDraw || need == Need::kHeld;
    });
    return below;
  }

  // Streams that may go on. O(capacity).
  uint64_t open_streams() {
    uint64_t n = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++)
      n += view_.linked() && memory_.at(slot) && streams_.next(slot) == kNoSlot && !ends(slot) && goes_on(slot, true);
    return n;
  }

 private:
  // Keeps the rows at the cursor that wait long, if a row comes after them that is not needed. Their places are written
  // before the head moves: places beyond it are taken back after a death. Writers have no ticket below the limit left,
  // so the head is nobody else's.
  bool keep_rows(bool starved) {
    const uint64_t from = header_.needed_from;
    uint64_t head = header_.head.load(std::memory_order_acquire), end = from;
    if (head != from + memory_.capacity()) return false;
    Need need = Need::kNone;
    while (end < header_.absorbed && may_keep(need = need_of(end, true), starved)) end++;
    if (end == from || end == header_.absorbed || need != Need::kNone) return false;
    const DirtyScope dirty(header_, Dirty::kTree);
    for (uint64_t key = from; key < end; key++) {
      places_.keep(key + memory_.capacity());
      TORCHREPLAY_FAULT("room.kept");
    }
    kill_fence();
    if (!header_.head.compare_exchange_strong(head, head + (end - from), std::memory_order_seq_cst)) {
      places_.repair(head);
      return false;
    }
    TORCHREPLAY_FAULT("room.head");
    std::vector<int64_t> to_draw;
    for (; header_.needed_from < end; header_.needed_from++) {
      const auto slot = static_cast<int64_t>(memory_.slot_of(header_.needed_from));
      if (tree_.leaf(slot) > 0) to_draw.push_back(slot);
    }
    const std::vector<float> leaves(to_draw.size(), Places::kKept);
    if (!to_draw.empty()) tree_.set(to_draw.data(), leaves.data(), static_cast<int>(to_draw.size()));
    TORCHREPLAY_FAULT("room.all_kept");
    return true;
  }

  // Items do not overtake unfinished ones further than a window.
  bool may_keep(Need need, bool starved) const {
    if (need == Need::kUnfinished || need == Need::kUnwritten) return !header_.sampler.window;
    return need == Need::kHeld || (need == Need::kToDraw && starved);
  }

  // Goes on from ticket to ticket below `end` while `passes` says so. A writer may have completed an item, left, and
  // died since the last absorption. So a death counts only when all has been absorbed after it was seen.
  template <class Passes>
  void advance(uint64_t& ticket, const uint64_t& end, const Passes& passes) {
    for (;;) {
      while (ticket < end && passes(ticket)) ticket++;
      if (!seen_dead_) return;
      TORCHREPLAY_FAULT("room.seen_dead");
      const uint64_t head = header_.head.load(std::memory_order_acquire);
      Absorber absorber(memory_);
      while (!absorber.step(head)) {
      }
      while (!absorber.expire()) {  // what has come may be too old
      }
      confirmed_dead_ = std::exchange(seen_dead_, 0);
    }
  }

  Need need_of(uint64_t key, bool hard) {
    const uint64_t slot = memory_.slot_of(key), place1 = places_.place1(slot);
    if (place1 == key + 1) return memory_.at(slot) ? need_of_row(slot, hard) : Need::kUnwritten;
    if (place1 > key + 1) return Need::kNone;
    std::atomic<uint64_t>& row = memory_.row(slot).word;
    uint64_t word = row.load(std::memory_order_acquire);
    if (slot_word::key1(word) > key + 1) return Need::kNone;
    if (slot_word::key1(word) == key + 1)
      return slot_word::is_busy(word) || slot_word::is_row(word) ? Need::kUnwritten : Need::kNone;
    // Its writer has not taken the slot, or died before. If the slot is void that one takes another ticket.
    if (!hard || slot_word::is_busy(word)) return Need::kUnwritten;
    TORCHREPLAY_FAULT("room.unwritten");
    return row.compare_exchange_strong(word, slot_word::voided(key), std::memory_order_acq_rel,
                                       std::memory_order_relaxed)
               ? Need::kNone
               : Need::kUnwritten;
  }

  // Of the row whose run begins there, if one does.
  Need need_of_page(uint64_t ticket, bool hard) {
    const uint64_t owner1 = memory_.owner1(memory_.page_of(ticket));
    const bool begins = owner1 && memory_.at(owner1 - 1) && memory_.run1(owner1 - 1) == ticket + 1;
    return begins ? need_of_row(owner1 - 1, hard) : Need::kNone;
  }

  // Items need rows before their anchor, too, as far as `history` says; the last rows of a stream may be such of one
  // that is to come. And rows behind it: those are needed anyhow as long as the anchor lies at the cursor or beyond it,
  // where one that was kept does not lie. Among pages no row lies there that has none.
  Need need_of_row(uint64_t slot, bool hard) {
    Need need = need_of_anchor(slot, hard);
    uint64_t at = slot;
    for (uint32_t k = 0; need == Need::kNone && k < view_.history; k++) {
      const uint64_t next = streams_.next(at);
      if (next == kNoSlot) {
        if (!ends(at) && goes_on(at, hard)) need = Need::kUnfinished;
        break;
      }
      need = need_of_anchor(at = next, hard);
    }
    at = slot;
    for (uint32_t k = 0; need == Need::kNone && k < view_.span && (at = streams_.prev(at)) != kNoSlot; k++) {
      if (by_pages_ ? memory_.run1(at) != 0 : !places_.is_kept(at)) break;
      need = need_of_anchor(at, hard);
    }
    return need;
  }

  Need need_of_anchor(uint64_t slot, bool hard) {
    if (tree_.leaf(static_cast<int64_t>(slot)) > 0) return Need::kToDraw;
    const Claim claim = claims_.of(slot);
    if (claim.holder()) return Need::kHeld;
    return claim.draws() == 0 && view_.linked() && may_be_completed(slot, hard) ? Need::kUnfinished : Need::kNone;
  }

  bool may_be_completed(uint64_t slot, bool hard) {
    const uint64_t key = memory_.at(slot) - 1;
    RowFacts row;
    if (!streams_.facts_of(slot, row) || !streams_.is_anchor(row.step) || is_discarded(memory_, slot)) return false;
    uint64_t last = slot;
    uint32_t steps = 0;
    if (!by_pages_ && header_.unfinished_key == key &&
        memory_.at(header_.unfinished_last) == header_.unfinished_last_key1) {
      last = header_.unfinished_last;  // as far as the last look came
      steps = header_.unfinished_steps;
    }
    for (;; steps++) {
      if (ends(last)) return false;
      const uint64_t next = streams_.next(last);
      if (next == kNoSlot || steps == view_.span) break;
      last = next;
    }
    if (!by_pages_) {  // whose cursor looks at that row again
      header_.unfinished_key = key;
      header_.unfinished_last = last;
      header_.unfinished_last_key1 = memory_.at(last);
      header_.unfinished_steps = steps;
    }
    return steps < view_.span && goes_on(last, hard);
  }

  bool ends(uint64_t slot) {
    RowFacts row;
    return !view_.across && streams_.facts_of(slot, row) && (row.flags & kEnds);
  }

  // Whether the stream may go on after its last row.
  bool goes_on(uint64_t last, bool hard) {
    const Claim claim = claims_.of(last);
    if (claim.closed() || !claim.writer()) return false;
    if (!hard) return true;
    const Participant& writer = memory_.participant(static_cast<int>(claim.writer()));
    const bool lives = memory_.at(last) > writer.since.load(std::memory_order_relaxed) &&
                       memory_.liveness().alive(static_cast<int>(claim.writer()));
    if (lives || memory_.at(last) == confirmed_dead_) return lives;
    seen_dead_ = memory_.at(last);
    return true;
  }

  SegmentMemory& memory_;
  Header& header_;
  const View& view_;
  PriorityTree tree_;
  Claims claims_;
  Places places_;
  Streams streams_;
  bool by_pages_ = false;  // asked in the order of pages
  // Key + 1 of the last row of a stream whose writer was found to be dead; and of one whose death counts.
  uint64_t seen_dead_ = 0, confirmed_dead_ = 0;
};

}  // namespace torchreplay
