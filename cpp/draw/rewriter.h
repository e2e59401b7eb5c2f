// Giving rows that are there other values, and dropping items: by key, while others write and draw.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "draw/priority_updater.h"

namespace torchreplay {

// Each row has its old values or its new ones, over all fields of one call, in every batch and after every death.
// Others get the lock between parts of a call.
class Rewriter {
 public:
  explicit Rewriter(SegmentMemory& m) : memory_(m) {}

  // Rows that got what was asked for by the last call; the others are gone.
  uint64_t changed() const { return changed_; }

  // Sets `fields` of the rows with these keys, fill(i, field, to) giving the value of the i-th; it must not throw. Of
  // equal keys the last wins. Nothing is changed when a key was never issued: it is returned. O(n log n and the bytes).
  template <class Fill>
  std::optional<BadKey> rewrite(int64_t n, const int64_t* keys, const std::vector<size_t>& fields, Fill&& fill,
                                const Patience& patience = {}) {
    const auto change = [&](RowRewriter& rows, int64_t i) {
      for (size_t f : fields) fill(i, f, rows.value(f));
      TORCHREPLAY_FAULT("rewrite.filled");
      return rows.change(static_cast<uint64_t>(keys[i]));
    };
    return in_parts(n, keys, fields, patience, change, [] {});
  }

  // Nobody draws the items anchored at these keys any more; one that is not complete yet never will be. The rows stay
  // as parts of others until the ring comes round. Otherwise as rewrite().
  std::optional<BadKey> discard(int64_t n, const int64_t* keys, const Patience& patience = {}) {
    Header& h = memory_.header();
    PriorityTree tree = memory_.tree();
    LeafChanges leaves(tree);
    SegmentLock(memory_, patience).absorb();  // what is complete has been an item, whoever looked at it
    const auto change = [&](RowRewriter& rows, int64_t i) {
      const auto key = static_cast<uint64_t>(keys[i]);
      if (flags_of(key) & kDiscarded) return false;
      h.discarded_below = std::max(h.discarded_below, key + 1);
      kill_fence();
      if (!rows.change(key, kDiscarded)) return false;
      const uint64_t slot = memory_.slot_of(key);
      if (memory_.at(slot) == key + 1) leaves.set(slot, 0);
      TORCHREPLAY_FAULT("discard.leaf");
      return true;
    };
    return in_parts(n, keys, {}, patience, change, [&] { leaves.flush(); });
  }

  // The index of the first of these keys whose row begins an episode, and so has no step's values; -1: none does.
  int64_t first_without_step(int64_t n, const int64_t* keys) const {
    for (int64_t i = 0; i < n; i++)
      if (flags_of(static_cast<uint64_t>(keys[i])) & kFirst) return i;
    return -1;
  }

  // The keys of all rows there are of the episode that the row with `key` is of, oldest first; none when it is gone.
  // O(rows of the episode).
  std::vector<int64_t> episode_of(uint64_t key, const Patience& patience = {}) {
    std::vector<int64_t> keys;
    SegmentLock lock(memory_, patience);
    require_restored();
    lock.absorb();
    Streams streams(memory_);
    RowFacts row;
    uint64_t slot = memory_.slot_of(key);
    if (memory_.at(slot) != key + 1 || !streams.facts_of(slot, row)) return keys;
    const auto add = [&] {
      keys.push_back(static_cast<int64_t>(memory_.at(slot) - 1));
      if (keys.size() % Absorber::kChunk) return true;
      lock.let_others_in();
      return memory_.at(slot) == static_cast<uint64_t>(keys.back()) + 1;  // or it was overwritten meanwhile
    };
    const auto first = [&] { return !streams.facts_of(slot, row) || row.flags & kFirst; };
    while (add() && !first() && (slot = streams.prev(slot)) != kNoSlot) {
    }
    std::ranges::reverse(keys);
    slot = memory_.slot_of(key);
    if (memory_.at(slot) != key + 1) return keys;
    while ((slot = streams.next(slot)) != kNoSlot && !first() && add()) {
    }
    return keys;
  }

  // The keys of the rows of the items anchored at these keys: `width` for each, from the anchor on, -1 where there is
  // no row. O(n times width).
  void rows_of(int64_t n, const int64_t* keys, int64_t width, int64_t* rows, const Patience& patience = {}) {
    std::fill_n(rows, n * width, -1);
    SegmentLock lock(memory_, patience);
    lock.absorb();
    const Streams streams(memory_);
    const bool across = memory_.layout().view.across;
    for (int64_t i = 0; i < n; i++, rows += width) {
      if (i && i % static_cast<int64_t>(Absorber::kChunk) == 0) lock.let_others_in();
      uint64_t slot = keys[i] < 0 ? kNoSlot : memory_.slot_of(static_cast<uint64_t>(keys[i]));
      if (slot == kNoSlot || memory_.at(slot) != static_cast<uint64_t>(keys[i]) + 1) continue;
      RowFacts row;
      for (int64_t k = 0; k < width && slot != kNoSlot && streams.facts_of(slot, row); k++) {
        rows[k] = static_cast<int64_t>(memory_.at(slot)) - 1;
        slot = k && !across && (row.flags & kEnds) ? kNoSlot : width > 1 ? streams.next(slot) : kNoSlot;
      }
    }
  }

 private:
  // What is done while the lock is held in one piece.
  static constexpr uint64_t kPartBytes = uint64_t{64} << 10, kPartRows = 256;
  static constexpr size_t kAhead = 4;  // rows fetched before they are changed

  // What the row's header says for good; 0 where it is gone.
  uint64_t flags_of(uint64_t key) const {
    RowHeader& row = memory_.row(memory_.slot_of(key));
    const auto is_there = [&](uint64_t word) { return slot_word::is_row(word) && slot_word::key1(word) == key + 1; };
    if (!is_there(row.word.load(std::memory_order_acquire))) return 0;
    const uint64_t link = row.meta(memory_.layout().view.linked()).link;
    return is_there(load_after_copy(row.word)) ? link & 0xffff : 0;
  }

  void require_restored() const {
    if (memory_.header().importer)
      throw std::runtime_error("the replay buffer is being restored: change its rows when that is over");
  }

  // Calls change(rows, i) for each key, and end() before the lock is let go of.
  template <class Change, class End>
  std::optional<BadKey> in_parts(int64_t n, const int64_t* keys, const std::vector<size_t>& fields,
                                 const Patience& patience, Change&& change, End&& end) {
    changed_ = 0;
    if (const std::optional<BadKey> bad = unissued(memory_, n, keys)) return bad;
    take_last_of_each(n, keys);
    uint64_t bytes = kPartBytes / kPartRows;
    for (size_t f : fields) bytes += memory_.layout().fields[f].nbytes;
    const size_t most = std::max<uint64_t>(1, kPartBytes / bytes);
    SegmentLock lock(memory_, patience);
    for (size_t from = 0; from < todo_.size(); from += most) {
      if (from) lock.let_others_in();
      require_restored();
      const DirtyScope dirty(memory_.header(), Dirty::kRow);
      RowRewriter rows(memory_);
      rows.choose(fields);
      for (size_t k = from; k < std::min(todo_.size(), from + most); k++) {
        if (k + kAhead < todo_.size()) fetch(fields, keys[todo_[k + kAhead]]);
        changed_ += change(rows, todo_[k]);
        rows.close();
      }
      end();
    }
    publish_limit(memory_);
    return std::nullopt;
  }

  // The places of the keys, in the order of the keys; of equal ones the last.
  void take_last_of_each(int64_t n, const int64_t* keys) {
    todo_.resize(static_cast<size_t>(n));
    std::iota(todo_.begin(), todo_.end(), 0);
    std::ranges::sort(todo_, [&](int64_t a, int64_t b) { return keys[a] != keys[b] ? keys[a] < keys[b] : a > b; });
    const auto same = std::ranges::unique(todo_, [&](int64_t a, int64_t b) { return keys[a] == keys[b]; });
    todo_.erase(same.begin(), same.end());
  }

  // Fetches what will be written.
  [[gnu::always_inline]] void fetch(const std::vector<size_t>& fields, int64_t key) const {
    constexpr uint64_t kFetchedBytes = 512;  // of a value; the processor follows by itself from there
    const uint64_t slot = memory_.slot_of(static_cast<uint64_t>(key));
    __builtin_prefetch(&memory_.row(slot), 1);
    for (size_t f : fields) {
      const Field& field = memory_.layout().fields[f];
      for (uint64_t byte = 0; byte < std::min(field.nbytes, kFetchedBytes); byte += kLine)
        __builtin_prefetch(memory_.value(field, slot) + byte, 1);
    }
  }

  SegmentMemory& memory_;
  std::vector<int64_t> todo_;
  uint64_t changed_ = 0;
};

}  // namespace torchreplay
