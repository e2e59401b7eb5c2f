// Following the tickets of pages, as absorbing follows those of rows: a row goes when its first page is issued again.
// Tickets are issued in order, so no other page of its run is issued again before. Everything here runs under the
// segment's mutex.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "absorb/pending_set.h"
#include "segment/run.h"

namespace torchreplay {

class PageFollower {
 public:
  explicit PageFollower(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        pending_(m),
        count_(m.layout().pages.count),
        lengths_(m.layout().pages.groups) {}

  // Most pages visited while the mutex is held in one piece.
  static constexpr uint64_t kChunk = 65536;

  // Whether pages were issued that nobody has followed.
  bool lags() const { return header_.followed < header_.page_head.load(std::memory_order_acquire); }

  // Makes the words of rows void whose first pages were issued again, and marks their slots pending: from then on they
  // are as any rows that are gone. One bounded step of that. True: all pages are followed that were issued before the
  // call. `followed` moves last: what a death leaves half done is done again.
  bool step() {
    const uint64_t head = header_.page_head.load(std::memory_order_acquire);
    uint64_t from = header_.followed;
    if (head - std::min(head, from) > count_) from = head - count_;
    const uint64_t to = std::min(head, from + kChunk);
    for (uint64_t ticket = from; ticket < to; ticket++) {
      uint32_t& owner1 = memory_.owner1(memory_.page_of(ticket));
      if (!owner1) continue;
      release(owner1 - 1, ticket);
      kill_fence();
      owner1 = 0;
      TORCHREPLAY_FAULT("follow.page");
    }
    kill_fence();
    header_.followed = std::max(header_.followed, to);
    TORCHREPLAY_FAULT("follow.cursor");
    return to == head;
  }

  // What has become of the pages of a row.
  enum class Fate {
    kHeld,
    kUnknown,  // they were issued after the last look at the tickets of pages, or the row changes right now
    kGone,     // the first of them was issued again, or they are none that a writer takes
  };

  // Of the row that `word` names in `slot`. What is gone is voided.
  Fate look(uint64_t slot, uint64_t word, Run& run) {
    const bool sound = read_run(memory_, slot, run, lengths_.data());
    if (load_after_copy(memory_.row(slot).word) != word) return Fate::kUnknown;
    if (sound && run.pages == 0) return Fate::kHeld;
    if (sound && run.first >= header_.followed) return Fate::kUnknown;
    if (sound && run.first + count_ >= header_.followed) return Fate::kHeld;
    return void_row(slot, word) ? Fate::kGone : Fate::kUnknown;
  }

  // The row in `slot` is about to be absorbed.
  void adopt(uint64_t slot, const Run& run) const {
    memory_.run1(slot) = run.pages ? run.first + 1 : 0;
    TORCHREPLAY_FAULT("follow.run");
    if (run.pages) memory_.owner1(memory_.page_of(run.first)) = static_cast<uint32_t>(slot + 1);
    TORCHREPLAY_FAULT("follow.owner");
  }

  // Voids the row in `slot`, which could not be drawn, if it has not its pages any more. Following has done so unless a
  // writer that was taken for dead has spoilt them.
  void drop_spoilt(uint64_t slot) {
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    Run run;
    if (!slot_word::is_row(word)) return;
    const bool sound = read_run(memory_, slot, run, lengths_.data());
    if (load_after_copy(memory_.row(slot).word) != word || (sound && is_intact(memory_, run))) return;
    void_row(slot, word);
  }

  // Nothing is absorbed any more.
  void restart() {
    header_.followed = header_.page_head.load(std::memory_order_acquire);
    std::memset(&memory_.owner1(0), 0, count_ * sizeof(uint32_t));
  }

 private:
  // The page of `ticket` was issued again, where the row in `slot` began.
  void release(uint64_t slot, uint64_t ticket) {
    const uint64_t at = memory_.at(slot), run1 = memory_.run1(slot);
    if (!at || !run1 || memory_.page_of(run1 - 1) != memory_.page_of(ticket) || run1 - 1 + count_ > ticket) return;
    pending_.assign(slot, true);  // whoever repairs after a death finds it
    TORCHREPLAY_FAULT("follow.marked");
    kill_fence();
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    // It fails where a writer overwrites the row now: then it goes as any other.
    if (slot_word::is_row(word) && slot_word::key1(word) == at) void_row(slot, word);
  }

  bool void_row(uint64_t slot, uint64_t word) {
    const bool done = memory_.row(slot).word.compare_exchange_strong(
        word, slot_word::voided(slot_word::key1(word) - 1), std::memory_order_acq_rel, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("follow.voided");
    header_.evicted_by_pages += done;
    return done;
  }

  SegmentMemory& memory_;
  Header& header_;
  PendingSet pending_;
  uint64_t count_;
  std::vector<uint32_t> lengths_;
};

}  // namespace torchreplay
