// Rows copied out of a segment while others write to it.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "segment/run.h"
#include "session/segment_lock.h"

namespace torchreplay {

// n rows, column by column: everything that has to come back.
struct RowColumns {
  std::vector<char*> values;  // of each field whose values have one size; nullptr: they are not copied
  int64_t* key = nullptr;
  float* leaf = nullptr;  // 0: could not be drawn, nor could those whose links say so
  int64_t* link = nullptr;
  int32_t* step = nullptr;
  float* priority = nullptr;
  // Of values of any length: the lengths in each group, and the values of each field, one after the other.
  std::vector<uint32_t*> lengths;
  std::vector<char*> ragged;
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
    const uint64_t lost = Claims::are_kept(h) ? Claims(memory_).lost() : 0;  // nobody holds anything where it is loaded
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
                        limiter.cleared,
                        h.dropped_items + lost,
                        h.expired_items,
                        h.evicted_by_pages,
                        h.redraws.load(std::memory_order_relaxed),
                        h.taken_ahead.load(std::memory_order_relaxed),
                        h.missed.load(std::memory_order_relaxed),
                        h.aged.load(std::memory_order_relaxed),
                        bounded(static_cast<int64_t>(h.ages.load(std::memory_order_relaxed))),
                        bounded(h.largest_age.load(std::memory_order_relaxed))};
    return {counts, limiter};
  }

  // Copies the rows in slots [from, to), without those that are overwritten meanwhile, and returns how many. Every row
  // is exact; rows of different chunks are of different moments. Throws RowsRefused.
  uint64_t copy_out(uint64_t from, uint64_t to, const RowColumns& out) {
    uint64_t n = 0;
    for (uint64_t first = from; first < to; first += kChunk) {
      const uint64_t last = std::min(to, first + kChunk);
      look(first, last);
      for (uint64_t slot = first; slot < last; slot++)
        if (at_[slot - first] && copy_row(slot, at_[slot - first], out, n)) {
          if (!done_.empty()) out.link[n] |= done_[slot - first];
          out.leaf[n++] = leaf_[slot - first];
        }
    }
    return n;
  }

  // Rows that have a place together.
  struct Measured {
    uint64_t next = 0;  // the first slot that was not looked at, or whose row has no place
    uint64_t rows = 0;
    std::vector<uint64_t> elements;         // of each ragged field
    uint64_t bytes = 0, bytes_of_next = 0;  // of all these rows; of the one that has no place
  };

  // Finds the rows in slots [from, to) that take at most `room` bytes, of which `row_bytes` are those of a row beside
  // its values of any length. Throws RowsRefused.
  Measured measure(uint64_t from, uint64_t to, uint64_t row_bytes, uint64_t room) {
    const std::vector<RaggedField>& ragged = memory_.layout().ragged;
    Measured found{from, 0, std::vector<uint64_t>(ragged.size()), 0, 0};
    measured_.clear();
    while (found.next < to) {
      const uint64_t first = found.next, last = std::min(to, first + kChunk);
      look(first, last);
      for (; found.next < last; found.next++) {
        const uint64_t slot = found.next, key1 = at_[slot - first];
        Run run;
        if (!key1 || !find_run(slot, key1, run)) continue;
        uint64_t bytes = row_bytes;
        for (const RaggedField& f : ragged) bytes += lengths_[f.group] * f.nbytes;
        if (bytes > room - found.bytes || found.rows == kMostMeasured) {
          found.bytes_of_next = bytes;
          return found;
        }
        for (size_t f = 0; f < ragged.size(); f++) found.elements[f] += lengths_[ragged[f].group];
        found.bytes += bytes;
        found.rows++;
        measured_.push_back({slot, key1, leaf_[slot - first], done_.empty() ? 0 : done_[slot - first]});
      }
    }
    return found;
  }

  // Copies the rows that were measured, without those that went meanwhile. Returns how many; `elements` become those of
  // the rows that are there.
  uint64_t copy_measured(const RowColumns& out, std::vector<uint64_t>& elements) {
    const std::vector<uint64_t> most = std::exchange(elements, std::vector<uint64_t>(elements.size()));
    uint64_t n = 0;
    for (const MeasuredRow& row : measured_) {
      if (!copy_row(row.slot, row.key1, out, n) || !copy_run(row, out, n, most, elements)) continue;
      out.link[n] |= row.done;
      out.leaf[n++] = row.leaf;
    }
    return n;
  }

  // Whether the row with `key` is in a slot, with all its pages. To be asked after its values were read where they lie.
  bool is_whole(uint64_t slot, uint64_t key) {
    Run run;
    return find_run(slot, key + 1, run) && is_intact(memory_, run);
  }

  // Where the values of the row in a slot lie, and how long they are, of each group. False: there is none.
  bool find_run(uint64_t slot, Run& run, std::vector<uint32_t>& lengths) {
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || !find_run(slot, slot_word::key1(word), run)) return false;
    lengths = lengths_;
    return true;
  }

 private:
  static constexpr uint64_t kChunk = Absorber::kChunk;
  // Rows that are known at a time.
  static constexpr uint64_t kMostMeasured = 65536;

  struct MeasuredRow {
    uint64_t slot, key1;
    float leaf;
    int64_t done;
  };

  // Of the row with `key1`, also while its other fields are rewritten.
  bool find_run(uint64_t slot, uint64_t key1, Run& run) {
    const bool sound = !memory_.has_pages() || read_run(memory_, slot, run, lengths_.data());
    return sound && slot_word::key1(load_after_copy(memory_.row(slot).word)) == key1;
  }

  // Appends the values of a row to those that are there, `used` of each field, and `most` at most.
  bool copy_run(const MeasuredRow& row, const RowColumns& out, uint64_t n, const std::vector<uint64_t>& most,
                std::vector<uint64_t>& used) {
    const std::vector<RaggedField>& ragged = memory_.layout().ragged;
    Run run;
    if (!find_run(row.slot, row.key1, run)) return false;
    for (size_t f = 0; f < ragged.size(); f++)
      if (lengths_[ragged[f].group] > most[f] - used[f]) return false;
    if (run.pages) {
      offsets_.resize(ragged.size());
      place_values(ragged, lengths_.data(), offsets_.data());
      const char* from = memory_.page(memory_.page_of(run.first));
      for (size_t f = 0; f < ragged.size(); f++)
        copy_payload(out.ragged[f] + used[f] * ragged[f].nbytes, from + offsets_[f],
                     lengths_[ragged[f].group] * ragged[f].nbytes);
      if (!is_intact(memory_, run)) return false;
    }
    for (size_t f = 0; f < ragged.size(); f++) used[f] += lengths_[ragged[f].group];
    for (size_t g = 0; g < lengths_.size(); g++) out.lengths[g][n] = lengths_[g];
    return true;
  }

  bool linked() const { return memory_.layout().view.linked(); }

  static int64_t bounded(int64_t sum) { return std::clamp(sum, -Counts::kMaxSum, Counts::kMaxSum); }

  // Which rows the slots hold, and their leaves: of one moment.
  void look(uint64_t first, uint64_t last) {
    memory_.fetch(first, last);
    look_under_lock(first, last);
    TORCHREPLAY_FAULT("save.looked");
  }

  void look_under_lock(uint64_t first, uint64_t last) {
    SegmentLock lock(memory_);
    lock.absorb();
    publish_limit(memory_);
    require_restored();
    at_.assign(&memory_.at(first), &memory_.at(first) + (last - first));
    const float* leaves = memory_.tree().leaves();
    leaf_.assign(leaves + first, leaves + last);
    done_.clear();
    note_who_is_out(first, last);
    note_expired(first, last);
  }

  void note_who_is_out(uint64_t first, uint64_t last) {
    if (DrawCounts::are_kept(memory_.header())) return note_draws(first, last);
    if (!Claims::are_kept(memory_.header())) return;
    const Claims claims(memory_);
    done_.assign(last - first, 0);
    for (uint64_t slot = first; slot < last; slot++) {
      const Claim claim = claims.of(slot);
      float& leaf = leaf_[slot - first];
      if (claim.holder() && !claim.is_over()) leaf = 1;  // it comes again where it is loaded
      if (leaf > 0) leaf = 1 + static_cast<float>(claim.draws());
      if (leaf == 0 && !claim.is_untouched()) done_[slot - first] = kDiscarded;
    }
  }

  // What has gone for its age stays away, also where a loaded buffer has another bound, or none: it was counted. The
  // last row of an episode is left alone: where all are discarded, the episode is.
  void note_expired(uint64_t first, uint64_t last) {
    const ItemVersions versions(memory_);
    if (!versions.are_kept() || !memory_.header().sampler.max_age1) return;
    const Streams streams(memory_);
    const auto is_followed = [&](uint64_t slot) {
      RowFacts row;
      return streams.next(slot) != kNoSlot && streams.facts_of(slot, row) && !(row.flags & kEnds);
    };
    done_.resize(last - first);
    for (uint64_t slot = first; slot < last; slot++)
      if (at_[slot - first] && leaf_[slot - first] == 0 && (!linked() || is_followed(slot)) &&
          versions.is_too_old(slot, streams))
        done_[slot - first] |= kDiscarded;
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
    for (size_t f = 0; f < out.values.size(); f++)
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
  std::vector<int64_t> done_;  // where they are counted, or too old: flags of those that nobody is to draw
  std::vector<MeasuredRow> measured_;
  std::vector<uint32_t> lengths_ = std::vector<uint32_t>(memory_.layout().pages.groups);  // of the row looked at last
  std::vector<uint64_t> offsets_;
};

}  // namespace torchreplay
