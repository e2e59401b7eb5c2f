// Feeding TD errors back to exactly the rows they were computed from.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "session/segment_lock.h"

namespace torchreplay {

struct BadKey {
  int64_t index, key;
  uint64_t issued;  // keys below this exist

  std::string expected() const {
    return issued ? "expected 0 to " + std::to_string(issued - 1) : "nothing was written to it yet";
  }
};

// The first of the keys that nobody was given.
inline std::optional<BadKey> unissued(const SegmentMemory& m, int64_t n, const int64_t* keys) {
  const uint64_t issued = m.header().head.load(std::memory_order_acquire);
  for (int64_t i = 0; i < n; i++)
    if (keys[i] < 0 || static_cast<uint64_t>(keys[i]) >= issued) return BadKey{i, keys[i], issued};
  return std::nullopt;
}

class PriorityUpdater {
 public:
  explicit PriorityUpdater(SegmentMemory& m) : memory_(m) {}

  // Applies |td[i]| to the item anchored at keys[i]. `td` must be finite. Drops and counts rows overwritten since
  // (stale) and items not complete (unready), and keeps those of items that are used up for a draw that goes back; of
  // equal keys the last wins.
  // Nothing is applied when a key was never issued: it is returned.
  std::optional<BadKey> update(int64_t n, const int64_t* keys, const double* td, const Patience& patience = {}) {
    if (const std::optional<BadKey> bad = unissued(memory_, n, keys)) return bad;
    LearnerTurn turn(memory_);
    updated_ = 0;
    find_slots(n, keys);
    index_.resize(n);
    leaf_.resize(n);
    leaves_of(memory_.header().sampler, td, n, leaf_.data());
    SegmentLock lock(memory_, patience);
    turn.absorb(lock);
    TORCHREPLAY_FAULT("update.absorbed");
    apply(n, keys, td);
    TORCHREPLAY_FAULT("update.applied");
    publish_limit(memory_);
    return std::nullopt;
  }

  // TD errors that the last update() applied.
  uint64_t updated() const { return updated_; }

 private:
  // Whether the slot has the row of that key, or gets it now; not after clear().
  bool is_under_way(uint64_t slot, uint64_t key) const {
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_relaxed);
    return slot_word::key1(word) == key + 1 && (slot_word::is_busy(word) || slot_word::is_row(word));
  }

  // Whether the item there was drawn as often as it may be. Then nobody draws it any more, unless a draw goes back.
  bool is_used_up(uint64_t slot, float leaf) {
    if (!DrawCounts::are_kept(memory_.header())) return false;
    DrawCounts counts(memory_);
    if (!counts.is_used_up(slot)) return false;
    if (memory_.header().sampler.prioritized) counts.keep_leaf(slot, leaf);
    return true;
  }

  // What is said of them arrives while the leaves are computed.
  [[gnu::always_inline]] void find_slots(int64_t n, const int64_t* keys) {
    const float* leaves = memory_.tree().leaves();
    slot_.resize(n);
    for (int64_t i = 0; i < n; i++) {
      slot_[i] = memory_.slot_of(static_cast<uint64_t>(keys[i]));
      __builtin_prefetch(&memory_.at(slot_[i]));
      __builtin_prefetch(leaves + slot_[i]);
    }
  }

  void apply(int64_t n, const int64_t* keys, const double* td) {
    Header& h = memory_.header();
    PriorityTree tree = memory_.tree();
    int64_t applied = 0;
    double change = 0;
    double max_raw = h.max_raw;
    for (int64_t i = 0; i < n; i++) {
      const auto key = static_cast<uint64_t>(keys[i]);
      const uint64_t slot = slot_[i], at = memory_.at(slot);
      if (const float was = tree.leaves()[slot]; at == key + 1 && was > 0) {
        const float now = tree.clamp(leaf_[i]);
        change += std::fabs(now - was);
        index_[applied] = static_cast<int64_t>(slot);
        leaf_[applied++] = now;
        max_raw = std::max(max_raw, std::fabs(td[i]));
      } else if (at == key + 1 && is_used_up(slot, tree.clamp(leaf_[i]))) {
        // It is no item, and not counted.
      } else if (at == key + 1 || is_under_way(slot, key)) {
        h.unready_updates++;
      } else {
        h.stale_updates++;
      }
    }
    if (!h.sampler.prioritized) return;
    const DirtyScope dirty(h, Dirty::kTree);
    const auto largest = static_cast<float>(std::min(max_raw, static_cast<double>(std::numeric_limits<float>::max())));
    h.set_largest_raw(std::max(h.max_raw, largest));
    TORCHREPLAY_FAULT("update.largest");
    kill_fence();
    tree.set(index_.data(), leaf_.data(), static_cast<int>(applied));
    TORCHREPLAY_FAULT("update.set");
    updated_ = static_cast<uint64_t>(applied);
    h.updated += updated_;
    h.priority_change += change;
  }

  SegmentMemory& memory_;
  std::vector<uint64_t> slot_;
  std::vector<int64_t> index_;
  std::vector<float> leaf_;
  uint64_t updated_ = 0;
};

}  // namespace torchreplay
