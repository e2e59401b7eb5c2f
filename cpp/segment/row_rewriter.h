// Changing rows where they lie, beside readers that take no lock: values of fields, and what the header says for good.
#pragma once

#include <vector>

#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

// Changes rows while its owner holds the mutex. What a row gets is written down first; the one who repairs after a
// death finishes it. Meanwhile the row's word is busy: readers see no row, and writers take another slot.
class RowRewriter {
 public:
  explicit RowRewriter(SegmentMemory& m)
      : memory_(m), header_(m.header()), fields_(m.layout().fields), exceptions_(std::uncaught_exceptions()) {
    uint64_t at = sizeof(RewriteRecord) + round_up(fields_.size(), sizeof(uint64_t));
    for (const Field& f : fields_) {
      value_.push_back(m.rewrite_record() + at);
      at += round_up(f.nbytes, sizeof(uint64_t));
    }
    header_.rewrites.store(hold() * 2 - 1, std::memory_order_relaxed);  // of a death it says the same again
    std::atomic_thread_fence(std::memory_order_release);                // before any change
    TORCHREPLAY_FAULT("rewrite.begun");
  }
  ~RowRewriter() {
    if (std::uncaught_exceptions() == exceptions_) end();
  }
  RowRewriter(const RowRewriter&) = delete;

  // Which fields change, for all rows to come.
  void choose(const std::vector<size_t>& fields) {
    for (size_t f = 0; f < fields_.size(); f++) chosen()[f] = 0;
    for (size_t f : fields) chosen()[f] = 1;
  }

  // Where the next row's value of field `f` goes.
  char* value(size_t f) { return value_[f]; }

  // The row with `key` gets the values of the fields chosen, and `flags`. False: it is gone. O(bytes).
  bool change(uint64_t key, uint64_t flags = 0) {
    std::atomic<uint64_t>& at = memory_.row(memory_.slot_of(key)).word;
    uint64_t word = at.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || slot_word::key1(word) != key + 1) return false;
    record().flags = flags;
    kill_fence();
    record().key1 = key + 1;
    TORCHREPLAY_FAULT("rewrite.recorded");
    const uint64_t stamp = slot_word::kFirstStamp + hold() % slot_word::kStamps;
    if (!at.compare_exchange_strong(word, slot_word::busy(key, stamp), std::memory_order_acq_rel,
                                    std::memory_order_relaxed)) {
      close();
      return false;  // a writer was faster
    }
    TORCHREPLAY_FAULT("rewrite.busy");
    return apply();
  }

  // What follows from the row's change is done as well: the leaf of an item that is discarded.
  void close() {
    kill_fence();
    record().key1 = 0;
    TORCHREPLAY_FAULT("rewrite.closed");
  }

  // Brings a change to its end whose owner died. The sums of the tree are left to be computed anew.
  void finish() {
    const uint64_t key1 = record().key1;
    if (!key1) return;
    apply();
    const uint64_t slot = memory_.slot_of(key1 - 1), word = memory_.row(slot).word.load(std::memory_order_acquire);
    const bool there = slot_word::is_row(word) && slot_word::key1(word) == key1;
    if (there && memory_.row(slot).meta(linked()).link & kDiscarded && memory_.at(slot) == key1)
      memory_.tree().leaves()[slot] = 0;
    close();
  }

 private:
  RewriteRecord& record() const { return *reinterpret_cast<RewriteRecord*>(memory_.rewrite_record()); }
  char* chosen() const { return memory_.rewrite_record() + sizeof(RewriteRecord); }
  bool linked() const { return memory_.layout().view.linked(); }
  // The number of this hold of the mutex.
  uint64_t hold() const { return header_.rewrites.load(std::memory_order_relaxed) / 2 + 1; }

  // After the last word.
  void end() {
    header_.rewrites.store(hold() * 2, std::memory_order_release);
    TORCHREPLAY_FAULT("rewrite.ended");
  }

  // False when the row is not, or no longer, this one's to change. Idempotent.
  bool apply() {
    const uint64_t key1 = record().key1, slot = memory_.slot_of(key1 - 1);
    RowHeader& row = memory_.row(slot);
    uint64_t word = row.word.load(std::memory_order_relaxed);
    if (!slot_word::is_busy(word) || !slot_word::is_stamped(word) || slot_word::key1(word) != key1) return false;
    std::atomic_thread_fence(std::memory_order_release);  // busy before any byte
    for (size_t f = 0; f < fields_.size(); f++) {
      if (!chosen()[f]) continue;
      copy_value(memory_.value(fields_[f], slot), value_[f], fields_[f].nbytes);
      TORCHREPLAY_FAULT("rewrite.field");
    }
    if (record().flags) row.add(record().flags, linked());
    TORCHREPLAY_FAULT("rewrite.copied");
    // It fails where a writer that was taken for dead has spoilt the row.
    const bool done = row.word.compare_exchange_strong(word, word & ~slot_word::kBusy, std::memory_order_release,
                                                       std::memory_order_relaxed);
    TORCHREPLAY_FAULT("rewrite.done");
    return done;
  }

  SegmentMemory& memory_;
  Header& header_;
  const std::vector<Field>& fields_;
  int exceptions_;
  std::vector<char*> value_;  // of each field, in the record
};

// For readers: whether rows that they copied were rewritten since it was made. It is not enough that a row's word is
// the same before and after the copy. The row may have been rewritten often meanwhile, and a batch may hold it twice.
class RewriteWatch {
 public:
  explicit RewriteWatch(const Header& h) : header_(&h), since_(h.rewrites.load(std::memory_order_acquire)) {}

  // Whether any row may have been.
  bool any() const { return now() != since_ || since_ % 2; }

  // Whether the row of this word, which was read after the copy, may have been.
  bool touches(uint64_t word) const {
    if (!slot_word::is_stamped(word)) return false;
    const uint64_t first = since_ / 2 + 1, holds = (now() + 1) / 2 - since_ / 2;
    const uint64_t stamp = slot_word::writer(word) - slot_word::kFirstStamp;
    return holds >= slot_word::kStamps ||
           (stamp + slot_word::kStamps - first % slot_word::kStamps) % slot_word::kStamps < holds;
  }

 private:
  uint64_t now() const {
    std::atomic_thread_fence(std::memory_order_acquire);  // after what was copied
    return header_->rewrites.load(std::memory_order_relaxed);
  }

  const Header* header_;
  uint64_t since_;
};

}  // namespace torchreplay
