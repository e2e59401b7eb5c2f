// Writers give way to learners that fall behind: a hint in shared memory, which orders time and nothing else.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "locking/robust_mutex.h"
#include "system/fault.h"
#include "system/futex.h"

namespace torchreplay {

// Where writers pause. Any value at any time is safe: a wrong one costs a wait that ends by itself. A pausing writer
// holds no ticket, slot or lock.
//
// Without it a learner collapses when explorers outrun it. A preempted learner needs several turns of the ring to
// absorb what was written. By then each row that it found is overwritten, and each redraw costs another turn.
class WriteGate {
 public:
  static constexpr uint64_t kOpen = std::numeric_limits<uint64_t>::max();
  static constexpr int64_t kMostPatienceNs = 20'000'000;

  // Call where nobody else is attached.
  void init() {
    ticket_.store(kOpen, std::memory_order_relaxed);
    patience_us_.store(static_cast<uint32_t>(kMostPatienceNs / 1000), std::memory_order_relaxed);
  }

  // True: the writer that would take ticket `head` pauses first. One load.
  bool is_shut(uint64_t head) const { return head >= ticket_.load(std::memory_order_relaxed); }
  uint64_t ticket() const { return ticket_.load(std::memory_order_relaxed); }

  // --- for writers ---

  // Sleeps until the gate opens, `stopped` is set, or for `ns`. Opens the gate where no learner has made progress for
  // as long as it asked for: one that died, was stopped or is late keeps nobody waiting.
  void pause(const std::atomic<uint64_t>& head, const std::atomic<uint32_t>& stopped, int64_t ns) {
    const int64_t end = monotonic_ns() + ns;
    int64_t since = end - ns;
    uint32_t progress = progress_.load(std::memory_order_relaxed);
    while (!stopped.load(std::memory_order_relaxed)) {
      const uint32_t seen = signal_.load(std::memory_order_acquire);
      sleepers_.store(1, std::memory_order_seq_cst);  // before the look at the ticket: see open_at()
      TORCHREPLAY_FAULT("gate.counted");
      uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
      if (head.load(std::memory_order_relaxed) < ticket) return;
      const int64_t now = monotonic_ns();
      if (now >= end) return;
      if (const uint32_t latest = progress_.load(std::memory_order_relaxed); latest != progress) {
        progress = latest;
        since = now;
      }
      const int64_t left = since + patience_ns() - now;
      if (left <= 0) {
        TORCHREPLAY_FAULT("gate.given_up");
        if (ticket_.compare_exchange_strong(ticket, kOpen)) wake();
        return;
      }
      futex_wait(signal_, seen, std::min(left, end - now));
      TORCHREPLAY_FAULT("gate.awake");
    }
  }

  // --- for learners ---

  void note_progress() { progress_.fetch_add(1, std::memory_order_relaxed); }

  // How long writers wait for the next progress, from now on.
  void set_patience(int64_t ns) {
    patience_us_.store(static_cast<uint32_t>(std::min(ns, kMostPatienceNs) / 1000), std::memory_order_relaxed);
  }

  // Lets writers go on up to `ticket`, which is further than before, and wakes those that pause.
  void open_at(uint64_t ticket) {
    ticket_.store(ticket, std::memory_order_seq_cst);
    TORCHREPLAY_FAULT("gate.opened");
    if (sleepers_.load(std::memory_order_seq_cst)) wake();
  }

  // Has writers pause at `ticket`.
  void shut_at(uint64_t ticket) { ticket_.store(ticket, std::memory_order_relaxed); }

 private:
  // Any process may have written any value.
  int64_t patience_ns() const {
    return std::min(int64_t{1000} * patience_us_.load(std::memory_order_relaxed), kMostPatienceNs);
  }

  void wake() {
    sleepers_.store(0, std::memory_order_relaxed);  // who goes back to sleep says so again
    futex_signal(signal_);
  }

  std::atomic<uint64_t> ticket_;
  std::atomic<uint32_t> signal_;       // futex
  std::atomic<uint32_t> sleepers_;     // 0: nobody sleeps. Not a count: the dead would stay in it.
  std::atomic<uint32_t> patience_us_;  // how long writers wait without progress
  std::atomic<uint32_t> progress_;     // changes while learners work
};

// When a process's learner shuts the gate, and when it opens it. Explorers and learner take turns, and only where
// explorers are ahead of the learner by more rows than they write in a turn. All times are of this process.
class LearnerPace {
 public:
  // A learner that was late counts as such for so long.
  static constexpr int64_t kLateNs = 1'000'000'000;

  LearnerPace(uint64_t capacity, uint64_t row_bytes)
      : least_(std::clamp<uint64_t>(std::min(capacity, kBurstBytes / row_bytes), kFewestRows, kBurstRows)),
        budget_(least_) {}

  // Tickets that writers may be ahead of what was absorbed.
  uint64_t budget() const {
    return std::min(budget_.load(std::memory_order_relaxed), most_.load(std::memory_order_relaxed));
  }

  // Writers need no more than so many rows for a turn of the ring: its values are longer than `capacity` suggests.
  void note_rows(uint64_t rows) { most_.store(std::max(rows, kFewestRows), std::memory_order_relaxed); }

  // A learner's call begins.
  void begin(WriteGate& gate) {
    gate.set_patience(WriteGate::kMostPatienceNs);
    gate.note_progress();
    if (!left_shut_.load(std::memory_order_relaxed)) return;
    if (gate.ticket() == WriteGate::kOpen) {
      late_.store(kLateCalls, std::memory_order_relaxed);
      late_until_.store(monotonic_ns() + kLateNs, std::memory_order_relaxed);
    } else {  // writers slept all the time: nothing but this learner's own work took it
      const int64_t gap = monotonic_ns() - ended_.load(std::memory_order_relaxed);
      const int64_t before = gap_.load(std::memory_order_relaxed);
      gap_.store(std::max(gap, before - before / 8), std::memory_order_relaxed);
    }
  }

  // Under the segment's lock, before rows are absorbed: writers that are far ahead wait for that.
  void hold(WriteGate& gate, uint64_t absorbed) const {
    if (gate.ticket() == WriteGate::kOpen) gate.shut_at(absorbed + budget());
  }

  // The call ends. `absorbed`: how far it has absorbed.
  void end(WriteGate& gate, uint64_t head, uint64_t absorbed) {
    const int64_t now = monotonic_ns();
    const uint64_t ticket = gate.ticket();
    const bool late = late_.load(std::memory_order_relaxed) > 0 && now < late_until_.load(std::memory_order_relaxed);
    bool shut = head >= ticket;
    if (!shut) {
      shut_since_.store(0, std::memory_order_relaxed);
      if (ticket != WriteGate::kOpen && absorbed + budget() > ticket) gate.open_at(absorbed + budget());
    } else {
      int64_t since = shut_since_.load(std::memory_order_relaxed);
      if (!since) {
        measure(now, head);
        shut_since_.store(since = now, std::memory_order_relaxed);
      }
      if (late || now - since >= kLearnersTurnNs) {
        gate.open_at(head + budget());
        opened_.store(now, std::memory_order_relaxed);
        opened_at_.store(head, std::memory_order_relaxed);
        shut_since_.store(0, std::memory_order_relaxed);
        shut = false;
      }
    }
    if (late) late_.fetch_sub(1, std::memory_order_relaxed);
    left_shut_.store(shut, std::memory_order_relaxed);
    ended_.store(now, std::memory_order_relaxed);
    const int64_t gap = gap_.load(std::memory_order_relaxed);
    gate.set_patience(late ? 0 : gap ? std::max(kLeastPatienceNs, 2 * gap) : WriteGate::kMostPatienceNs);
    gate.note_progress();
  }

 private:
  // A scheduler's slice, about: shorter turns are spent on waking and falling asleep.
  static constexpr int64_t kWritersTurnNs = 12'000'000;
  static constexpr int64_t kLearnersTurnNs = 4'000'000;
  static constexpr int64_t kLeastPatienceNs = 1'000'000;
  // A learner for which writers waited in vain is not waited for in as many calls, and for no longer than so. While all
  // writers run, one of low priority may need a second for each call.
  static constexpr int kLateCalls = 64;
  // What may be written in one go, if it is no more than a turn of the ring: an absorption of a millisecond.
  static constexpr uint64_t kBurstRows = 32768, kBurstBytes = uint64_t{64} << 20;
  static constexpr uint64_t kFewestRows = 64, kMostRows = uint64_t{1} << 20;

  // How much writers write in a turn, from what they wrote in their last.
  void measure(int64_t now, uint64_t head) {
    const int64_t elapsed = now - opened_.load(std::memory_order_relaxed);
    const auto rows = static_cast<double>(head - opened_at_.load(std::memory_order_relaxed));
    if (opened_.load(std::memory_order_relaxed) == 0 || elapsed <= 0) return;
    const double turn = rows * static_cast<double>(kWritersTurnNs) / static_cast<double>(elapsed);
    budget_.store(static_cast<uint64_t>(std::clamp(turn, double(least_), double(kMostRows))),
                  std::memory_order_relaxed);
  }

  const uint64_t least_;
  // Several threads of a process may draw. What they overwrite of each other's is a hint.
  std::atomic<uint64_t> budget_;
  std::atomic<uint64_t> most_{kMostRows};
  std::atomic<uint64_t> opened_at_{0};  // head when this learner opened the gate
  std::atomic<int64_t> opened_{0};      // when it did
  std::atomic<int64_t> shut_since_{0};  // when it first had absorbed all and found the gate shut; 0: it was not
  std::atomic<int64_t> ended_{0};       // the last call
  std::atomic<int64_t> gap_{0};         // between two calls; 0: not known yet
  std::atomic<int> late_{0};            // calls for which nobody waits
  std::atomic<int64_t> late_until_{0};  // but no longer
  std::atomic<bool> left_shut_{false};  // the last call did
};

}  // namespace torchreplay
