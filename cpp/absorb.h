// Turning written rows into drawable items. Everything here runs under the segment's mutex.
#pragma once

#include <bit>
#include <cmath>

#include "memory.h"

namespace torchreplay {

// Keeps the compiler from moving stores across it: enough for a process that may be killed between any two of them.
inline void kill_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// (|priority| + eps)^alpha, the proportional variant of Schaul et al. 2016, section 3.3. Uniform sampling: 1. Never 0,
// which would mean that the item cannot be drawn: the tree rounds what is smaller than its grid up to one step.
inline float leaf_of(const SamplerConfig& c, double raw) {
  if (!c.prioritized) return 1.0f;
  const double base = std::min(std::fabs(raw) + c.eps, static_cast<double>(std::numeric_limits<float>::max()));
  const float leaf = std::pow(static_cast<float>(base), static_cast<float>(c.alpha));
  return std::max(leaf, std::numeric_limits<float>::min());
}

// Marks that derived state is being changed, so that whoever finds the owner dead knows what to rebuild.
class DirtyScope {
 public:
  DirtyScope(Header& h, Dirty what) : header_(h) {
    h.dirty = what;
    kill_fence();
  }
  ~DirtyScope() {
    kill_fence();
    header_.dirty = Dirty::kClean;
  }
  DirtyScope(const DirtyScope&) = delete;

 private:
  Header& header_;
};

// Slots whose state could not be settled: one bit each, and a summary bit for every word, so that finding them costs
// O(pending).
class PendingSet {
 public:
  explicit PendingSet(const SegmentMemory& m)
      : words_(m.pending_words()),
        summary_(m.pending_summary()),
        count_(m.header().pending),
        n_((m.capacity() + 63) / 64) {}

  void assign(uint64_t slot, bool pending) {
    uint64_t& word = words_[slot / 64];
    const uint64_t bit = uint64_t{1} << slot % 64;
    if (static_cast<bool>(word & bit) == pending) return;
    word ^= bit;
    count_ += pending ? 1 : -1;
    uint64_t& summary = summary_[slot / 4096];
    const uint64_t group = uint64_t{1} << slot / 64 % 64;
    summary = word ? summary | group : summary & ~group;
  }
  bool contains(uint64_t slot) const { return words_[slot / 64] >> slot % 64 & 1; }

  // Calls visit(slot) for every pending slot, ascending; visit may assign() the slot it is given.
  template <class Visit>
  void each(Visit&& visit) const {
    if (count_ == 0) return;
    for (uint64_t s = 0; s < (n_ + 63) / 64; s++)
      for (uint64_t groups = summary_[s]; groups; groups &= groups - 1) {
        const uint64_t w = s * 64 + static_cast<uint64_t>(std::countr_zero(groups));
        for (uint64_t bits = words_[w]; bits; bits &= bits - 1)
          visit(w * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
      }
  }

 private:
  uint64_t* words_;
  uint64_t* summary_;
  uint64_t& count_;
  uint64_t n_;
};

class Absorber {
 public:
  explicit Absorber(SegmentMemory& m) : memory_(m), header_(m.header()), tree_(m.tree()), pending_(m) {}

  // Most slots visited while the mutex is held in one piece.
  static constexpr uint64_t kChunk = 4096;

  // One bounded step of bringing slots up to date with the tickets below `head`. True: nothing is left to do.
  bool step(uint64_t head) {
    head = std::max(head, header_.absorbed);  // another learner may have gone further between two steps
    if (header_.absorbed >= head && header_.pending == 0) return true;
    const DirtyScope dirty(header_, Dirty::kLinks);
    default_leaf_ = leaf_of(header_.sampler, header_.max_raw);
    uint64_t from = header_.absorbed;
    if (head > memory_.capacity()) from = std::max(from, head - memory_.capacity());
    if (from < head) {
      const uint64_t to = std::min(head, from + kChunk);
      for (uint64_t key = from; key < to; key++) sync(memory_.slot_of(key), key);
      flush();
      header_.absorbed = to;
      if (to < head) return false;
    }
    pending_.each([&](uint64_t slot) {
      if (slot < head) sync(slot, head - 1 - (head - 1 - slot) % memory_.capacity());
    });
    flush();
    return true;
  }

  // Brings one slot up to date: what a failed draw does, so that it cannot fail for ever.
  void resync(uint64_t slot, uint64_t head) {
    const DirtyScope dirty(header_, Dirty::kLinks);
    default_leaf_ = leaf_of(header_.sampler, header_.max_raw);
    sync(slot, head - 1 - (head - 1 - slot) % memory_.capacity());
    flush();
  }

  // Rebuilds everything derived after its owner died. O(capacity). Idempotent: the death of whoever repairs repeats it.
  void recover() {
    header_.repairing.fetch_add(1, std::memory_order_relaxed);
    if (header_.dirty == Dirty::kLinks) recover_slots();
    tree_.rebuild();
    kill_fence();
    header_.dirty = Dirty::kClean;
  }

 private:
  // `newest`: the newest ticket issued for this slot, below the head of this absorption.
  void sync(uint64_t slot, uint64_t newest) {
    RowHeader& row = memory_.row(slot);
    uint64_t& at = memory_.at(slot);
    const uint64_t word = row.word.load(std::memory_order_acquire);
    const float was = tree_.leaf(static_cast<int64_t>(slot));
    float now = was;
    if (at && (slot_word::is_busy(word) || slot_word::key1(word) != at)) {
      evict(slot, at);
      now = 0;
    }
    bool pending = slot_word::is_busy(word) || slot_word::key1(word) < newest + 1;
    if (!at && slot_word::is_row(word)) {
      float priority;
      if (read_priority(row, word, priority))
        now = adopt(at, word, priority);
      else
        pending = true;  // being overwritten right now: its new row will settle the slot
    }
    pending_.assign(slot, pending);
    if (now != was || tree_.leaf(static_cast<int64_t>(slot)) != was) replace(slot, was, now);
  }

  // Leaf first, `at` last: a crash in between must never hand the old row's priority to the new one.
  void evict(uint64_t slot, uint64_t& at) {
    tree_.leaves()[slot] = 0;
    kill_fence();
    at = 0;
    header_.rows--;
  }

  // Reads the raw priority (NaN: none given) of a row whose word was `word`; false when the row changed meanwhile.
  static bool read_priority(RowHeader& row, uint64_t word, float& priority) {
    priority =
        row.link.load(std::memory_order_relaxed) & kHasPriority ? row.priority.load(std::memory_order_relaxed) : NAN;
    return load_after_copy(row.word) == word;
  }

  float adopt(uint64_t& at, uint64_t word, float priority) {
    at = slot_word::key1(word);
    header_.rows++;
    header_.inserted++;
    return initial_leaf(priority);
  }

  float initial_leaf(float priority) {
    if (std::isnan(priority)) return tree_.clamp(default_leaf_);
    if (priority > header_.max_raw) {
      header_.max_raw = priority;
      default_leaf_ = leaf_of(header_.sampler, header_.max_raw);
    }
    return tree_.clamp(leaf_of(header_.sampler, priority));
  }

  // Collects leaf changes in ascending runs, which the tree takes much faster than single ones.
  void replace(uint64_t slot, float was, float now) {
    const auto index = static_cast<int64_t>(slot);
    if (changes_ == kChanges || (changes_ && index_[changes_ - 1] >= index)) flush();
    index_[changes_] = index;
    was_[changes_] = was;
    now_[changes_++] = now;
  }

  void flush() {
    if (changes_) tree_.replace_sorted(index_, was_, now_, changes_);
    changes_ = 0;
  }

  void recover_slots() {
    const uint64_t head = header_.head.load(std::memory_order_acquire);
    default_leaf_ = leaf_of(header_.sampler, header_.max_raw);
    header_.rows = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (slot % kChunk == 0) header_.repairing.fetch_add(1, std::memory_order_relaxed);
      RowHeader& row = memory_.row(slot);
      const uint64_t word = row.word.load(std::memory_order_acquire);
      float priority = NAN;
      const bool is_row = slot_word::is_row(word) && read_priority(row, word, priority);
      const uint64_t key1 = is_row ? slot_word::key1(word) : 0;
      uint64_t& at = memory_.at(slot);
      if (at != key1) {
        tree_.leaves()[slot] = 0;
        kill_fence();
        at = key1;
        header_.inserted += key1 != 0;
      }
      const uint64_t newest1 = slot < head ? head - (head - 1 - slot) % memory_.capacity() : 0;
      pending_.assign(
          slot, slot_word::is_busy(word) || (slot_word::is_row(word) && !is_row) || slot_word::key1(word) < newest1);
      header_.rows += at != 0;
      if (at && tree_.leaves()[slot] == 0) tree_.leaves()[slot] = initial_leaf(priority);
    }
    recount_pending();
    header_.absorbed = head;
  }

  // The count and the summary may be half-written: both follow from the words.
  void recount_pending() {
    const uint64_t words = (memory_.capacity() + 63) / 64;
    uint64_t count = 0;
    for (uint64_t s = 0; s < (words + 63) / 64; s++) {
      uint64_t summary = 0;
      for (uint64_t w = s * 64; w < std::min(words, s * 64 + 64); w++) {
        count += static_cast<uint64_t>(std::popcount(memory_.pending_words()[w]));
        if (memory_.pending_words()[w]) summary |= uint64_t{1} << w % 64;
      }
      memory_.pending_summary()[s] = summary;
    }
    header_.pending = count;
  }

  static constexpr int kChanges = 512;
  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  PendingSet pending_;
  float default_leaf_ = 0;
  int changes_ = 0;
  int64_t index_[kChanges];
  float was_[kChanges];
  float now_[kChanges];
};

}  // namespace torchreplay
