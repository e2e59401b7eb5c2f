// Writing rows: lock-free, from any process. A ticket names a slot; a slot still busy is skipped, never waited for.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "segment/segment_memory.h"
#include "system/fault.h"
#include "system/futex.h"
#include "write/page_ring.h"

namespace torchreplay {

// Most tickets that a writer holds at once: what a kill can lose.
inline constexpr uint64_t kMaxChunk = 64;

// Rows of which the word is fetched ahead: each is a CAS, which waits for its line, and a large ring is in no cache.
inline constexpr uint64_t kAhead = 16;

enum class Append {
  kDone,     // every row is written
  kLimited,  // the limiter says wait
  kGated,    // a learner has fallen behind: pause at the gate
  kStalled,  // a whole turn of the ring is held by stopped writers: sleep and try again
  kSpent,    // every key there is was issued
  kLost,     // others take this process for dead: another process has its id
};

// One call's writes. Where the segment has ragged fields, a row whose writer had to wait keeps its pages meanwhile.
class RingWriter {
 public:
  // `gated`: the writer gives way to learners that fall behind.
  RingWriter(SegmentMemory& memory, int id, bool gated = false)
      : memory_(memory),
        entry_(memory.participant(id)),
        writer_(static_cast<uint64_t>(id)),
        queued_(memory.header().sampler.makes_writers_wait()),
        gated_(gated && !queued_),
        linked_(memory.layout().view.linked()),
        arrivals_(memory.header().sampler.queue && memory.layout().view.claimed ? memory.arrivals() : nullptr) {}

  // From now on it does not give way.
  void pass_gate() { gated_ = false; }

  // Whether the last row that was not written waits for pages, and not for a slot.
  bool lacks_pages() const { return lacking_ != nullptr; }

  // How many pages it needs then.
  uint64_t pages_wanted() const { return lacking_ ? lacking_->lacking() : 0; }

  // Whether there is room for it now, where the limit said wait.
  bool has_room() const {
    const Header& h = memory_.header();
    return lacking_ ? lacking_->has_room()
                    : h.head.load(std::memory_order_relaxed) < h.ticket_limit.load(std::memory_order_acquire);
  }
  // Whoever sets the limit next looks harder for room.
  void ask_for_room() const {
    if (lacking_) lacking_->ask_for_room();
  }

  // Writes up to `n` rows, `fill(row, slot)` copying the payload of row 0, 1, ... (it must not throw), and stores their
  // keys. Adds the number written to `written`. O(n) and the copies; no lock, no system call. Of ragged fields
  // `fill.lengths(row)` gives the lengths of each group, and `fill.run(row, to)` copies the values to where
  // place_values() says, counted from `to`; without the two all are of length 0.
  template <class Fill>
  Append append(uint64_t n, const RowMeta* meta, int64_t* keys, uint64_t& written, Fill&& fill) {
    return append(n, GivenRows{meta}, keys, written, fill);
  }

  // The same for rows that depend on the keys before them: rows.meta(i) is called when row i is about to be written,
  // rows.commit(i, key) when it is, and rows.announce(i, key, run), where there is one, before each attempt.
  template <class Rows, class Fill>
    requires(!std::is_pointer_v<std::remove_reference_t<Rows>>)
  Append append(uint64_t n, Rows&& rows, int64_t* keys, uint64_t& written, Fill&& fill) {
    const uint64_t before = written;
    const Append outcome =
        memory_.has_pages() ? append_ragged(n, rows, keys, written, fill) : append_fixed(n, rows, keys, written, fill);
    count(written - before);
    if (written > before) wake_learners(static_cast<uint64_t>(keys[written - 1]));
    return outcome;
  }

 private:
  struct GivenRows {
    const RowMeta* given;
    const RowMeta& meta(uint64_t row) const { return given[row]; }
    void commit(uint64_t, uint64_t) const {}
  };

  template <class Rows, class Fill>
  Append append_fixed(uint64_t n, Rows& rows, int64_t* keys, uint64_t& written, Fill& fill) {
    Header& h = memory_.header();
    const uint64_t capacity = memory_.capacity();
    const uint64_t chunk_limit = std::max<uint64_t>(1, std::min(kMaxChunk, capacity / 4));
    const uint64_t patience = std::max<uint64_t>(kMaxChunk, capacity);
    uint64_t holes = 0;
    while (written < n) {
      const uint64_t head = h.head.load(std::memory_order_relaxed);
      if (gated_ && h.gate.is_shut(head)) return Append::kGated;
      if (head >= h.ticket_limit.load(std::memory_order_relaxed))
        return head < kMaxKeys ? Append::kLimited : Append::kSpent;
      uint64_t chunk = std::min(n - written, chunk_limit), first = head;
      // Before the look at wake_at: a learner that waits says there what wakes it, and then looks at the head.
      if (!queued_)
        first = h.head.fetch_add(chunk, std::memory_order_seq_cst);
      else if (!take_within_limit(h, first, chunk))
        continue;
      announce(first, chunk);
      look_at_clock();
      for (uint64_t key = first; key < first + chunk; key++) {
        const uint64_t slot = memory_.slot_of(key);
        __builtin_prefetch(&memory_.row(slot + kAhead), 1);
        if constexpr (requires { rows.announce(written, key, Run{}); }) rows.announce(written, key, Run{});
        const Fate fate = write(key, slot, rows.meta(written), [&] { fill(written, slot); });
        if (fate == Fate::kLost) return Append::kLost;
        if (fate == Fate::kHole) {
          TORCHREPLAY_FAULT("append.hole");
          holes++;
          continue;
        }
        TORCHREPLAY_FAULT("append.done");
        rows.commit(written, key);
        keys[written++] = static_cast<int64_t>(key);
        TORCHREPLAY_FAULT("append.committed");
        holes = 0;
      }
      if (holes >= patience) return Append::kStalled;
    }
    return Append::kDone;
  }

  // Row by row, since nobody is to hold tickets while others copy long values: a run of pages, then its row.
  template <class Rows, class Fill>
  [[gnu::noinline]] Append append_ragged(uint64_t n, Rows& rows, int64_t* keys, uint64_t& written, Fill& fill) {
    Header& h = memory_.header();
    const uint64_t patience = std::max<uint64_t>(kMaxChunk, memory_.capacity());
    const std::vector<uint32_t> none(memory_.layout().pages.groups);
    PageRing& pages = pages_ ? *pages_ : pages_.emplace(memory_, static_cast<int>(writer_));
    for (uint64_t holes = 0; written < n;) {
      const uint64_t head = h.head.load(std::memory_order_relaxed);
      lacking_ = nullptr;
      if (gated_ && h.gate.is_shut(head)) return Append::kGated;
      if (head >= h.ticket_limit.load(std::memory_order_relaxed))
        return head < kMaxKeys ? Append::kLimited : Append::kSpent;
      const uint32_t* lengths = none.data();
      if constexpr (requires { fill.lengths(written); }) lengths = fill.lengths(written);
      if (const std::optional<Append> obstacle = fill_run(pages, written, lengths, fill)) return *obstacle;
      uint64_t key = head, one = 1;
      if (!queued_)
        key = h.head.fetch_add(1, std::memory_order_seq_cst);
      else if (!take_within_limit(h, key, one))
        continue;
      announce(key, 1);
      look_at_clock();
      const uint64_t slot = memory_.slot_of(key);
      if constexpr (requires { rows.announce(written, key, pages.run()); }) rows.announce(written, key, pages.run());
      const Fate fate = write(key, slot, rows.meta(written), [&] {
        fill(written, slot);
        describe_run(slot, pages.run(), lengths);
      });
      if (fate == Fate::kLost) {
        pages.abandon();
        return Append::kLost;
      }
      if (fate == Fate::kHole) {
        TORCHREPLAY_FAULT("pages.row_hole");
        if (++holes >= patience) return Append::kStalled;
        continue;
      }
      TORCHREPLAY_FAULT("pages.row_done");
      if (pages.run().pages) pages.forget();
      rows.commit(written, key);
      keys[written++] = static_cast<int64_t>(key);
      TORCHREPLAY_FAULT("pages.row_committed");
      holes = 0;
    }
    return Append::kDone;
  }

  // Ends with the row's values in a run of pages, unless they are there from before or take none.
  template <class Fill>
  std::optional<Append> fill_run(PageRing& pages, uint64_t row, const uint32_t* lengths, Fill& fill) {
    const Layout& layout = memory_.layout();
    const uint64_t n = pages_of(layout, place_values(layout.ragged, lengths, nullptr));
    while (n > 0 && pages.run().pages == 0) {
      switch (pages.take(n)) {
        case PageRing::Taken::kLimited:
          lacking_ = &pages;
          return Append::kLimited;
        case PageRing::Taken::kStalled:
          lacking_ = &pages;
          return Append::kStalled;
        case PageRing::Taken::kSpent:
          return Append::kSpent;
        case PageRing::Taken::kRun:
          break;
      }
      if constexpr (requires { fill.run(row, pages.data()); }) fill.run(row, pages.data());
      TORCHREPLAY_FAULT("pages.copied");
      if (!pages.commit() && !memory_.liveness().holds(static_cast<int>(writer_))) {
        pages.abandon();
        return Append::kLost;
      }
    }
    return {};
  }

  void describe_run(uint64_t slot, const Run& run, const uint32_t* lengths) const {
    __atomic_store_n(memory_.run1_of_row(slot), run.pages ? run.first + 1 : 0, __ATOMIC_RELAXED);
    for (uint32_t g = 0; g < memory_.layout().pages.groups; g++)
      __atomic_store_n(memory_.length_of_row(slot, g), lengths[g], __ATOMIC_RELAXED);
  }

  // Between ticket and CAS, so that "busy with my id" implies "inside my range": reclaiming needs no sweep.
  void announce(uint64_t first, uint64_t n) {
    TORCHREPLAY_FAULT("append.ticket");
    entry_.first.store(first, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("append.first");
    entry_.count.store(static_cast<uint16_t>(n), std::memory_order_relaxed);
    TORCHREPLAY_FAULT("append.in_flight");
  }

  // A learner that waits says which ticket should wake it.
  void wake_learners(uint64_t key) {
    Header& h = memory_.header();
    if (key < h.wake_at.load(std::memory_order_seq_cst)) return;
    TORCHREPLAY_FAULT("append.wakes");
    h.wake_at.store(kNever, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("append.woke_nobody");
    futex_signal(h.rows_signal);
  }

  void count(uint64_t rows) {
    if (!rows) return;
    entry_.rows.store(entry_.rows.load(std::memory_order_relaxed) + rows, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("append.counted");
    if (!arrivals_) now_ = machine_ns(CLOCK_MONOTONIC_COARSE);
    entry_.last_write.store(now_, std::memory_order_relaxed);
  }

  // In a queue each row says when it came: its item may wait for long before a learner looks.
  void look_at_clock() {
    if (!arrivals_) return;
    now_ = machine_ns(CLOCK_MONOTONIC_COARSE);
    arrival_ = millis_of(now_);
  }

  // In a queue each ticket below the limit is of a slot that no item needs, and none beyond it may be taken. Takes
  // those from `first` on, fewer than `chunk` where the limit says so. False: another writer was faster.
  static bool take_within_limit(Header& h, uint64_t& first, uint64_t& chunk) {
    const uint64_t limit = h.ticket_limit.load(std::memory_order_acquire);
    if (first >= limit) return false;
    chunk = std::min(chunk, limit - first);
    return h.head.compare_exchange_strong(first, first + chunk, std::memory_order_seq_cst);
  }

  // What became of a ticket.
  enum class Fate { kRow, kHole, kLost };

  template <class Copy>
  Fate write(uint64_t key, uint64_t slot, const RowMeta& meta, Copy&& copy) {
    RowHeader& row = memory_.row(slot);
    uint64_t word = row.word.load(std::memory_order_acquire);
    if (slot_word::is_busy(word) || slot_word::key1(word) > key)
      return Fate::kHole;  // a lagging or dead writer, or we were lapped
    // acq_rel: the entry above is visible before the slot is busy.
    if (!row.word.compare_exchange_strong(word, slot_word::busy(key, writer_), std::memory_order_acq_rel,
                                          std::memory_order_relaxed))
      return Fate::kHole;
    TORCHREPLAY_FAULT("append.busy");
    std::atomic_thread_fence(std::memory_order_release);  // busy before any byte of the payload
    row.set(meta, linked_);
    if (arrivals_) __atomic_store_n(&arrivals_[slot], arrival_, __ATOMIC_RELAXED);
    TORCHREPLAY_FAULT("append.header");
    copy();
    TORCHREPLAY_FAULT("append.copied");
    uint64_t own = slot_word::busy(key, writer_);
    if (row.word.compare_exchange_strong(own, slot_word::done(key, writer_), std::memory_order_release,
                                         std::memory_order_relaxed))
      return Fate::kRow;
    spoil(row.word, key);
    return memory_.liveness().holds(static_cast<int>(writer_)) ? Fate::kHole : Fate::kLost;
  }

  SegmentMemory& memory_;
  Participant& entry_;
  uint64_t writer_;
  std::optional<PageRing> pages_;      // made when it is first needed: most segments have none
  const PageRing* lacking_ = nullptr;  // where the last row that was not written waits for pages
  bool queued_;                        // it waits for learners
  bool gated_;
  bool linked_;
  uint32_t* arrivals_;    // of a queue: when each row came, in milliseconds
  int64_t now_ = 0;       // at the last look at the clock
  uint32_t arrival_ = 0;  // the same in milliseconds
};

// Frees the slots and the pages that a dead participant left busy. The caller holds byte `id` of the lock table, so
// nobody can be using it. Idempotent: a reclaimer that dies is no problem. O(tickets in flight).
inline void reclaim(SegmentMemory& memory, int id) {
  Participant& entry = memory.participant(id);
  const uint64_t first = entry.first.load(std::memory_order_acquire);
  const uint64_t count = std::min<uint64_t>(entry.count.load(std::memory_order_relaxed), kMaxChunk);
  for (uint64_t key = first; key < first + count; key++) {
    uint64_t busy = slot_word::busy(key, static_cast<uint64_t>(id));
    memory.row(memory.slot_of(key))
        .word.compare_exchange_strong(busy, slot_word::voided(key), std::memory_order_acq_rel,
                                      std::memory_order_relaxed);
    TORCHREPLAY_FAULT("reclaim.slot");
  }
  entry.count.store(0, std::memory_order_relaxed);
  entry.admitted.store(0, std::memory_order_relaxed);
  TORCHREPLAY_FAULT("reclaim.admitted");
  reclaim_run(memory, id);
  TORCHREPLAY_FAULT("reclaim.done");
}

}  // namespace torchreplay
