// Rows of a checkpoint, placed into an empty segment that others may be attached to. All of them become its rows, or
// none: nobody sees them before the end, and of an import that does not come to it nothing stays.
#pragma once

#include <stdexcept>

#include "snapshot.h"

namespace torchreplay {

// There are rows already, or others that want to be the first. The message says in which way.
struct ImportRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Import {
 public:
  explicit Import(SegmentMemory& m) : memory_(m), header_(m.header()) {}

  // From now on nothing is absorbed. Throws ImportRefused.
  void begin() {
    Locked lock(memory_);
    if (header_.head.load(std::memory_order_relaxed))
      throw ImportRefused("the buffer holds rows already: restore a new one, before its explorers start");
    if (header_.importer) throw ImportRefused("the buffer is being restored already");
    header_.import_head = 0;
    kill_fence();
    header_.importer = own_presence();
    TORCHREPLAY_FAULT("import.begun");
  }

  // Places rows that Snapshot::copy_out() gave. Where two claim one slot the newer stays. Keys are below kMaxKeys.
  // Throws ImportRefused when somebody has written rows since begin().
  void place(uint64_t n, const RowColumns& rows) {
    require_begun();
    DrawnItems drawn(memory_);
    uint64_t mapped = 0;  // of the rows
    for (uint64_t i = 0; i < n; i++) {
      const auto key = static_cast<uint64_t>(rows.key[i]);
      const uint64_t slot = memory_.slot_of(key);
      if (i == mapped) {
        do mapped++;
        while (mapped < n && memory_.slot_of(static_cast<uint64_t>(rows.key[mapped])) == slot + (mapped - i));
        memory_.map_for_writing(slot, slot + (mapped - i));
        if (header_.head.load(std::memory_order_relaxed)) throw_beaten();
      }
      if (memory_.at(slot) > key) continue;
      memory_.at(slot) = key + 1;  // first: who takes rows back looks there
      drawn.mark(slot);            // for all that is known here
      kill_fence();
      if (!write(key, slot, i, rows)) throw_beaten();
      memory_.tree().leaves()[slot] = rows.leaf[i];
      TORCHREPLAY_FAULT("import.row");
    }
  }

  // Makes a buffer of the rows that were placed: links, sums, and the counters that were saved. `limiter`: another one
  // than they are of. Throws ImportRefused when somebody has written rows since begin().
  void finish(const Counters& c, const LimiterConfig* limiter = nullptr) {
    require_begun();
    Locked lock(memory_);
    Header& h = header_;
    const uint64_t head = std::max(c.head, newest_key1());
    h.max_raw = c.max_raw;
    h.inserted = c.inserted;
    h.sampled = c.sampled;
    h.limiters[h.limiter_index & 1].inserted_before = c.inserted_before;
    h.limiters[h.limiter_index & 1].sampled_before = c.sampled_before;
    h.updated = c.updated;
    h.stale_updates = c.stale_updates;
    h.unready_updates = c.unready_updates;
    h.evicted_unsampled = c.evicted_unsampled;
    h.priority_change = c.priority_change;
    h.draws.store(c.draws, std::memory_order_relaxed);
    h.streams.store(std::max(1u, c.streams), std::memory_order_relaxed);
    if (limiter) change_limiter(h, *limiter);  // what was counted for the other one says nothing about this one
    TORCHREPLAY_FAULT("import.counted");
    h.import_head = head;
    kill_fence();
    TORCHREPLAY_FAULT("import.announced");
    // From here on it is finished by whoever locks next, if not by us.
    uint64_t none = 0;
    const bool first = h.head.compare_exchange_strong(none, head, std::memory_order_acq_rel);
    TORCHREPLAY_FAULT("import.issued");
    if (!first) {
      h.import_head = 0;
      throw_beaten();
    }
    Recovery(memory_).end_import();
    publish_limit(memory_);
  }

  // Takes back what was placed, unless finish() came to its end.
  void abandon() {
    Locked lock(memory_);
    if (header_.importer != own_presence()) return;
    Recovery(memory_).end_import();
    publish_limit(memory_);
  }

 private:
  [[noreturn]] static void throw_beaten() {
    throw ImportRefused(
        "explorers have written to the buffer while it was being restored: restore it before they start");
  }

  uint32_t own_presence() const { return memory_.liveness().presence(header_.presences); }

  void require_begun() const {
    if (header_.importer != own_presence()) throw std::logic_error("no import has begun");
  }

  // As a writer does, for there may be others. False when one was there.
  bool write(uint64_t key, uint64_t slot, uint64_t i, const RowColumns& rows) const {
    RowHeader& row = memory_.row(slot);
    uint64_t word = row.word.load(std::memory_order_relaxed);
    if (word && slot_word::writer(word) != slot_word::kLoaded) return false;
    if (!row.word.compare_exchange_strong(word, slot_word::busy(key, slot_word::kLoaded), std::memory_order_acq_rel,
                                          std::memory_order_relaxed))
      return false;
    TORCHREPLAY_FAULT("import.busy");
    std::atomic_thread_fence(std::memory_order_release);
    const auto& fields = memory_.layout().fields;
    for (size_t f = 0; f < fields.size(); f++)
      std::memcpy(memory_.value(fields[f], slot), rows.values[f] + i * fields[f].nbytes, fields[f].nbytes);
    row.set({static_cast<uint64_t>(rows.link[i]), static_cast<uint32_t>(rows.step[i]), rows.priority[i]},
            memory_.layout().view.linked());
    row.word.store(slot_word::done(key, slot_word::kLoaded), std::memory_order_release);
    return true;
  }

  uint64_t newest_key1() const {
    uint64_t newest = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) newest = std::max(newest, memory_.at(slot));
    return newest;
  }

  SegmentMemory& memory_;
  Header& header_;
};

}  // namespace torchreplay
