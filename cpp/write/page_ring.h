// Writing values of any length: lock-free, from any process. A row's values take a run of consecutive pages, filled
// before the row is written. A page still busy is skipped, never waited for.
#pragma once

#include <stdexcept>
#include <string>

#include "segment/run.h"
#include "system/fault.h"

namespace torchreplay {

// What was ours was taken from us. What lies there now was written beside us and may be torn, so it is voided. If it is
// not committed yet, its commit fails, and its writer writes it again.
inline void spoil(std::atomic<uint64_t>& word, uint64_t ticket) {
  uint64_t now = word.load(std::memory_order_relaxed);
  while (slot_word::key1(now) > ticket + 1 &&
         !word.compare_exchange_weak(now, slot_word::voided(slot_word::key1(now) - 1), std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
  }
}

// The pages of one writer's next row.
class PageRing {
 public:
  PageRing(SegmentMemory& memory, int id)
      : memory_(memory), id_(id), generation_(fork_generation.load(std::memory_order_relaxed)) {}
  // A forked child has a copy: the run is its parent's.
  ~PageRing() {
    if (said_ && generation_ == fork_generation.load(std::memory_order_relaxed)) forget();
  }
  PageRing(const PageRing&) = delete;

  enum class Taken {
    kRun,
    kLimited,  // the limit of a queue says wait
    kStalled,  // stopped writers have so many pages busy that no run fits between them: sleep and try again
    kSpent,    // every ticket there is was issued
  };

  // Takes a run of `n` pages, at most a quarter of all: all are busy then, and this writer's own. O(n), and the pages
  // that others have busy.
  Taken take(uint64_t n) {
    if (n > memory_.layout().pages.most())
      throw std::length_error("the values of a row need " + std::to_string(n) + " pages, and may have " +
                              std::to_string(memory_.layout().pages.most()));
    Header& h = memory_.header();
    lacking_ = 0;
    for (uint64_t attempt = 0; attempt < kAttempts; attempt++) {
      uint64_t head = h.page_head.load(std::memory_order_relaxed), first;
      do {
        const std::optional<uint64_t> room = find_room(memory_, head, n);
        if (!room) return give_up(Taken::kStalled);
        first = *room;
        if (first + n > h.page_limit.load(std::memory_order_acquire)) {
          if (first + n > kMaxKeys) return give_up(Taken::kSpent);
          lacking_ = n;
          ask_for_room();
          return give_up(Taken::kLimited);
        }
        say(first, n);
        // The line before the tickets: none of them is one that nobody speaks of.
      } while (
          !h.page_head.compare_exchange_weak(head, first + n, std::memory_order_acq_rel, std::memory_order_relaxed));
      TORCHREPLAY_FAULT("pages.ticket");
      if (seize(first, n)) {
        run_ = {first, n};
        std::atomic_thread_fence(std::memory_order_release);  // busy before any byte
        return Taken::kRun;
      }
      TORCHREPLAY_FAULT("pages.hole");
    }
    return give_up(Taken::kStalled);
  }

  // Takes a run whose tickets were issued to this writer already. False: others have its pages, or are at them.
  bool take_issued(const Run& run) {
    run_ = {};
    if (!seize(run.first, run.pages)) return false;
    run_ = run;
    std::atomic_thread_fence(std::memory_order_release);
    return true;
  }

  // Pages for which the last take() found no room; 0: it did not lack any.
  uint64_t lacking() const { return lacking_; }
  // Whether they have room now.
  bool has_room() const {
    return fits_below(memory_, memory_.header().page_limit.load(std::memory_order_acquire), lacking_);
  }
  // Whoever sets the limit next looks harder for room.
  void ask_for_room() const { memory_.header().pages_wanted.store(lacking_, std::memory_order_relaxed); }

  // The run that is taken; its bytes lie one after the other.
  const Run& run() const { return run_; }
  char* data() const { return memory_.page(memory_.page_of(run_.first)); }

  // What was copied is there for readers. False: others took this process for dead, or another process that they took
  // for dead has written there, and the run is given up.
  bool commit() {
    bool intact = true;
    for (uint64_t t = run_.first; t < run_.first + run_.pages; t++) {
      std::atomic<uint64_t>& word = memory_.page_word(memory_.page_of(t));
      uint64_t own = busy(t);
      const uint64_t next = intact ? slot_word::done(t, static_cast<uint64_t>(id_)) : slot_word::voided(t);
      if (!word.compare_exchange_strong(own, next, std::memory_order_release, std::memory_order_relaxed)) {
        spoil(word, t);
        intact = false;
      }
      TORCHREPLAY_FAULT("pages.done");
    }
    if (!intact) run_ = {};
    return intact;
  }

  // The row of the run is there, or will never be.
  void forget() {
    run_ = {};
    said_ = false;
    memory_.run_in_flight(id_).first1.store(0, std::memory_order_release);  // after the row's word
    TORCHREPLAY_FAULT("pages.forgotten");
  }

  // The id, and all that it names, is another's.
  void abandon() {
    run_ = {};
    said_ = false;
  }

 private:
  // Between a look at the pages and their taking others may be faster.
  static constexpr int kAttempts = 64;

  uint64_t busy(uint64_t ticket) const { return slot_word::busy(ticket, static_cast<uint64_t>(id_)); }

  Taken give_up(Taken why) {
    if (said_) forget();
    return why;
  }

  void say(uint64_t first, uint64_t n) {
    RunInFlight& line = memory_.run_in_flight(id_);
    said_ = true;
    line.pages.store(n, std::memory_order_relaxed);
    kill_fence();
    line.first1.store(first + 1, std::memory_order_release);  // after all of the run before
    TORCHREPLAY_FAULT("pages.said");
  }

  // False: a page was busy, or we were lapped; what was taken is void again.
  bool seize(uint64_t first, uint64_t n) const {
    for (uint64_t i = 0; i < n; i++) {
      std::atomic<uint64_t>& word = memory_.page_word(memory_.page_of(first + i));
      uint64_t was = word.load(std::memory_order_acquire);
      // acq_rel: the line is visible before the page is busy.
      if (slot_word::is_busy(was) || slot_word::key1(was) > first + i ||
          !word.compare_exchange_strong(was, busy(first + i), std::memory_order_acq_rel, std::memory_order_relaxed)) {
        give_back(first, i);
        return false;
      }
      TORCHREPLAY_FAULT("pages.busy");
    }
    return true;
  }

  void give_back(uint64_t first, uint64_t n) const {
    for (uint64_t t = first; t < first + n; t++) {
      uint64_t own = busy(t);
      memory_.page_word(memory_.page_of(t))
          .compare_exchange_strong(own, slot_word::voided(t), std::memory_order_acq_rel, std::memory_order_relaxed);
      TORCHREPLAY_FAULT("pages.voided");
    }
  }

  SegmentMemory& memory_;
  int id_;
  bool said_ = false;
  uint64_t generation_, lacking_ = 0;
  Run run_;
};

// Frees the pages that a dead participant left busy. The caller holds byte `id` of the lock table. Idempotent. O(pages
// of its run).
inline void reclaim_run(SegmentMemory& memory, int id) {
  if (!memory.has_pages()) return;
  RunInFlight& line = memory.run_in_flight(id);
  const uint64_t first1 = line.first1.load(std::memory_order_acquire);
  if (!first1) return;
  const uint64_t n = std::min(line.pages.load(std::memory_order_relaxed), memory.layout().pages.most());
  for (uint64_t t = first1 - 1; t < first1 - 1 + n; t++) {
    uint64_t busy = slot_word::busy(t, static_cast<uint64_t>(id));
    memory.page_word(memory.page_of(t))
        .compare_exchange_strong(busy, slot_word::voided(t), std::memory_order_acq_rel, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("reclaim.page");
  }
  line.first1.store(0, std::memory_order_release);
  TORCHREPLAY_FAULT("reclaim.run");
}

}  // namespace torchreplay
