// Rows copied out of a segment while others write to it.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "session/segment_lock.h"

namespace torchreplay {

// n rows, column by column: everything that has to come back.
struct RowColumns {
  std::vector<char*> values;  // of each field; nullptr: they are not copied
  int64_t* key = nullptr;
  float* leaf = nullptr;  // 0: could not be drawn, nor could those whose links say so
  int64_t* link = nullptr;
  int32_t* step = nullptr;
  float* priority = nullptr;
};

// Rows cannot be copied, or imported, now. The message says why.
struct RowsRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Snapshot {
 public:
  explicit Snapshot(SegmentMemory& m) : memory_(m) {}

  // The counters, and the limiter that they are of. Throws RowsRefused.
  std::pair<Counts, LimiterConfig> counts() const {
    const Header& h = memory_.header();
    SegmentLock lock(memory_);
    require_restored();
    lock.absorb();
    publish_limit(memory_);
    const LimiterConfig& limiter = h.limiter();
    const Counts counts{h.head.load(std::memory_order_acquire),
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
                        limiter.inserted_before,
                        limiter.sampled_before,
                        memory_.tree().grid_state(),
                        limiter.cleared};
    return {counts, limiter};
  }

  // Copies the rows in slots [from, to), without those that are overwritten meanwhile, and returns how many. Every row
  // is exact; rows of different chunks are of different moments. Throws RowsRefused.
  uint64_t copy_out(uint64_t from, uint64_t to, const RowColumns& out) {
    uint64_t n = 0;
    for (uint64_t first = from; first < to; first += kChunk) {
      const uint64_t last = std::min(to, first + kChunk);
      memory_.fetch(first, last);
      look(first, last);
      TORCHREPLAY_FAULT("save.looked");
      for (uint64_t slot = first; slot < last; slot++)
        if (at_[slot - first] && copy_row(slot, at_[slot - first], out, n)) {
          if (!done_.empty()) out.link[n] |= done_[slot - first];
          out.leaf[n++] = leaf_[slot - first];
        }
    }
    return n;
  }

 private:
  static constexpr uint64_t kChunk = Absorber::kChunk;

  bool linked() const { return memory_.layout().view.linked(); }

  // Which rows the slots hold, and their leaves: of one moment.
  void look(uint64_t first, uint64_t last) {
    SegmentLock lock(memory_);
    lock.absorb();
    publish_limit(memory_);
    require_restored();
    at_.assign(&memory_.at(first), &memory_.at(first) + (last - first));
    const float* leaves = memory_.tree().leaves();
    leaf_.assign(leaves + first, leaves + last);
    if (DrawCounts::are_kept(memory_.header())) return note_draws(first, last);
    if (!Claims::are_kept(memory_.header())) return;
    const Claims claims(memory_);
    done_.assign(last - first, 0);
    for (uint64_t slot = first; slot < last; slot++) {
      const Claim claim = claims.of(slot);
      float& leaf = leaf_[slot - first];
      if (claim.holder() && claim.draws() != Claim::kMostDraws) leaf = 1;  // it comes again where it is loaded
      if (leaf > 0) leaf = 1 + static_cast<float>(claim.draws());
      if (leaf == 0 && !claim.is_untouched()) done_[slot - first] = kDiscarded;
    }
  }

  // Where leaves are no priorities, those of other items say how often they were drawn, too.
  void note_draws(uint64_t first, uint64_t last) {
    const DrawCounts counts(memory_);
    const SamplerConfig& sampler = memory_.header().sampler;
    done_.assign(last - first, 0);
    for (uint64_t slot = first; slot < last; slot++) {
      float& leaf = leaf_[slot - first];
      if (!counts.is_used_up(slot)) {
        if (!sampler.prioritized) leaf *= 1 + static_cast<float>(counts.draws(slot));
        continue;
      }
      if (!is_discarded(memory_, slot)) leaf = counts.kept_leaf(slot);
      done_[slot - first] = leaf > 0 ? kDiscarded | kUsedUp : kDiscarded;
    }
  }

  void require_restored() const {
    if (memory_.header().importer) throw RowsRefused("the buffer is being restored: save it when that is over");
  }

  // False when the row is gone. One that is rewritten meanwhile is copied again under the lock, where nobody does that.
  bool copy_row(uint64_t slot, uint64_t key1, const RowColumns& out, uint64_t n) const {
    const RewriteWatch watch(memory_.header());
    const bool copied = copy_values(slot, key1, out, n);
    if (!watch.any() || (copied && !watch.touches(memory_.row(slot).word.load(std::memory_order_relaxed))))
      return copied;
    const SegmentLock lock(memory_);
    return copy_values(slot, key1, out, n);
  }

  bool copy_values(uint64_t slot, uint64_t key1, const RowColumns& out, uint64_t n) const {
    RowHeader& row = memory_.row(slot);
    const uint64_t word = row.word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || slot_word::key1(word) != key1) return false;
    const auto& fields = memory_.layout().fields;
    for (size_t f = 0; f < fields.size(); f++)
      if (out.values[f])
        copy_value(out.values[f] + n * fields[f].nbytes, memory_.value(fields[f], slot), fields[f].nbytes);
    out.key[n] = static_cast<int64_t>(key1) - 1;
    const RowMeta meta = row.meta(linked());
    out.link[n] = static_cast<int64_t>(meta.link);
    out.step[n] = static_cast<int32_t>(meta.step);
    out.priority[n] = meta.priority;
    return load_after_copy(row.word) == word;
  }

  SegmentMemory& memory_;
  std::vector<uint64_t> at_;
  std::vector<float> leaf_;    // where draws are counted and no priorities: 1 and how often it was drawn
  std::vector<int64_t> done_;  // where they are counted: flags of those that nobody is to draw
};

}  // namespace torchreplay
