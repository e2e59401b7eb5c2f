// Rows copied out of a segment while others write to it, and placed into a new one.
#pragma once

#include <vector>

#include "session.h"

namespace torchreplay {

// n rows, column by column: everything that has to come back.
struct RowColumns {
  std::vector<char*> values;  // of each field
  int64_t* key = nullptr;
  float* leaf = nullptr;  // 0: could not be drawn
  int64_t* link = nullptr;
  int32_t* step = nullptr;
  float* priority = nullptr;
};

// What a segment has counted.
struct Counters {
  uint64_t head = 0, inserted = 0, sampled = 0, updated = 0, stale_updates = 0, unready_updates = 0, draws = 0,
           evicted_unsampled = 0;
  uint32_t streams = 1;
  float max_raw = 1;
  double priority_change = 0;
  uint64_t inserted_before = 0, sampled_before = 0;  // the limiter was set
};

class Snapshot {
 public:
  explicit Snapshot(SegmentMemory& m) : memory_(m) {}

  Counters counters() const {
    const Header& h = memory_.header();
    Locked lock(memory_);
    lock.absorb();
    publish_limit(memory_);
    return {h.head.load(std::memory_order_acquire),
            h.inserted,
            h.sampled,
            h.updated,
            h.stale_updates,
            h.unready_updates,
            h.draws.load(std::memory_order_relaxed),
            h.evicted_unsampled,
            h.streams.load(std::memory_order_relaxed),
            h.max_raw,
            h.priority_change,
            h.limiter().inserted_before,
            h.limiter().sampled_before};
  }

  // Copies the rows in slots [from, to), without those that are overwritten meanwhile, and returns how many. Every row
  // is exact; rows of different chunks are of different moments.
  uint64_t copy_out(uint64_t from, uint64_t to, const RowColumns& out) {
    uint64_t n = 0;
    for (uint64_t first = from; first < to; first += kChunk) {
      const uint64_t last = std::min(to, first + kChunk);
      memory_.fetch(first, last);
      look(first, last);
      TORCHREPLAY_FAULT("save.looked");
      for (uint64_t slot = first; slot < last; slot++)
        if (at_[slot - first] && copy_row(slot, at_[slot - first], out, n)) out.leaf[n++] = leaf_[slot - first];
    }
    return n;
  }

  // Places rows that copy_out() gave. Where two claim one slot the newer stays. Nobody else may use the segment, and
  // finish() or take_back() must follow. Keys are below 2^47.
  void copy_in(uint64_t n, const RowColumns& rows) {
    const auto& fields = memory_.layout().fields;
    DrawnItems drawn(memory_);
    uint64_t mapped = 0;  // of the rows
    for (uint64_t i = 0; i < n; i++) {
      const auto key = static_cast<uint64_t>(rows.key[i]);
      const uint64_t slot = memory_.slot_of(key);
      if (i == mapped) {
        do mapped++;
        while (mapped < n && memory_.slot_of(static_cast<uint64_t>(rows.key[mapped])) == slot + (mapped - i));
        memory_.map_for_writing(slot, slot + (mapped - i));
      }
      RowHeader& row = memory_.row(slot);
      if (slot_word::key1(row.word.load(std::memory_order_relaxed)) > key) continue;
      for (size_t f = 0; f < fields.size(); f++)
        std::memcpy(memory_.value(fields[f], slot), rows.values[f] + i * fields[f].nbytes, fields[f].nbytes);
      row.set({static_cast<uint64_t>(rows.link[i]), static_cast<uint32_t>(rows.step[i]), rows.priority[i]}, linked());
      row.word.store(slot_word::done(key, slot_word::kLoaded), std::memory_order_relaxed);
      memory_.at(slot) = key + 1;
      drawn.mark(slot);  // for all that is known here
      memory_.tree().leaves()[slot] = rows.leaf[i];
    }
  }

  // Takes back what copy_in() placed, where finish() did not follow: the segment holds no rows, as before.
  void take_back() {
    if (memory_.header().head.load(std::memory_order_relaxed)) return;
    DrawnItems drawn(memory_);
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (!memory_.at(slot)) continue;
      memory_.row(slot).word.store(0, std::memory_order_relaxed);
      memory_.at(slot) = 0;
      drawn.clear(slot);
      memory_.tree().leaves()[slot] = 0;
    }
  }

  // Makes the rows placed a buffer: links, sums, and the counters that were saved. `limiter`: another one than they are
  // of.
  void finish(const Counters& c, const LimiterConfig* limiter = nullptr) {
    Header& h = memory_.header();
    Locked lock(memory_);
    h.dirty = Dirty::kLinks;
    const uint64_t head = std::max(c.head, newest_key1());
    h.head.store(head, std::memory_order_relaxed);
    give_up_empty_slots(head);
    h.max_raw = c.max_raw;
    Recovery(memory_).run();
    h.inserted = std::max(c.inserted, static_cast<uint64_t>(memory_.tree().count()));
    h.completed_at = h.absorbed;
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
    publish_limit(memory_);
  }

 private:
  static constexpr uint64_t kChunk = Absorber::kChunk;

  bool linked() const { return memory_.layout().view.linked(); }

  // Which rows the slots hold, and their leaves: of one moment.
  void look(uint64_t first, uint64_t last) {
    Locked lock(memory_);
    lock.absorb();
    publish_limit(memory_);
    at_.assign(&memory_.at(first), &memory_.at(first) + (last - first));
    const float* leaves = memory_.tree().leaves();
    leaf_.assign(leaves + first, leaves + last);
  }

  bool copy_row(uint64_t slot, uint64_t key1, const RowColumns& out, uint64_t n) const {
    RowHeader& row = memory_.row(slot);
    const uint64_t word = row.word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || slot_word::key1(word) != key1) return false;
    const auto& fields = memory_.layout().fields;
    for (size_t f = 0; f < fields.size(); f++)
      copy_value(out.values[f] + n * fields[f].nbytes, memory_.value(fields[f], slot), fields[f].nbytes);
    out.key[n] = static_cast<int64_t>(key1) - 1;
    const RowMeta meta = row.meta(linked());
    out.link[n] = static_cast<int64_t>(meta.link);
    out.step[n] = static_cast<int32_t>(meta.step);
    out.priority[n] = meta.priority;
    return load_after_copy(row.word) == word;
  }

  // The tickets of slots without a row are lost: nobody is going to write them.
  void give_up_empty_slots(uint64_t head) const {
    for (uint64_t slot = 0; slot < std::min(memory_.capacity(), head); slot++)
      if (!memory_.at(slot))
        memory_.row(slot).word.store(slot_word::voided(head - 1 - (head - 1 - slot) % memory_.capacity()),
                                     std::memory_order_relaxed);
  }

  uint64_t newest_key1() const {
    uint64_t newest = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) newest = std::max(newest, memory_.at(slot));
    return newest;
  }

  SegmentMemory& memory_;
  std::vector<uint64_t> at_;
  std::vector<float> leaf_;
};

}  // namespace torchreplay
