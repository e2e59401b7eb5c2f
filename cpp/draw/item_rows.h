// Finding the rows of drawn items, without a lock: backwards by the headers, forwards by links that are only hints.
#pragma once

#include "absorb/streams.h"
#include "draw/item_plan.h"
#include "draw/row_gather.h"

namespace torchreplay {

// A row as it was found.
struct RowAt {
  uint64_t slot = 0;
  uint64_t word = 0;
  uint64_t prev_key1 = 0;
  uint64_t flags = 0;
  uint32_t step = 0;
};

// Steps from row to row. What it returns holds as long as the row's word is unchanged.
class Walker {
 public:
  explicit Walker(SegmentMemory& m) : memory_(m), view_(m.layout().view) {}

  // The row with key + 1 = `key1` in `slot`; false when it is not there (any more).
  bool read(uint64_t slot, uint64_t key1, RowAt& row) const {
    RowHeader& header = memory_.row(slot);
    const uint64_t word = header.word.load(std::memory_order_acquire);
    return slot_word::is_row(word) && slot_word::key1(word) == key1 && take(header, slot, word, row);
  }

  // The row before `row` in its stream.
  bool back(const RowAt& row, RowAt& before) const {
    return row.prev_key1 && read(memory_.slot_of(row.prev_key1 - 1), row.prev_key1, before);
  }

  // Where the row before or after that in `slot` is likely to be: the link may belong to another row by now.
  uint64_t hint(uint64_t slot, std::atomic<uint32_t> Links::* link) const {
    const uint32_t slot1 = (memory_.links(slot).*link).load(std::memory_order_relaxed);
    return slot1 == 0 || slot1 > memory_.capacity() ? kNoSlot : slot1 - 1;
  }

  // The row after `row`, if it is in `slot`: it must name `row`.
  bool forward(const RowAt& row, uint64_t slot, RowAt& after) const {
    if (slot == kNoSlot) return false;
    RowHeader& header = memory_.row(slot);
    const uint64_t word = header.word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || !take(header, slot, word, after)) return false;
    return after.prev_key1 == slot_word::key1(row.word) && (view_.across || !(after.flags & kFirst));
  }

  bool ends(const RowAt& row) const { return !view_.across && (row.flags & kEnds); }

  // Whether the row before `row` is there, though it may be changing now.
  bool has_back(const RowAt& row) const {
    if (!row.prev_key1) return false;
    return slot_word::key1(memory_.row(memory_.slot_of(row.prev_key1 - 1)).word.load(std::memory_order_relaxed)) ==
           row.prev_key1;
  }

  bool unchanged(const RowAt& row) const { return load_after_copy(memory_.row(row.slot).word) == row.word; }

 private:
  static bool take(RowHeader& header, uint64_t slot, uint64_t word, RowAt& row) {
    const uint64_t link = header.link.load(std::memory_order_relaxed);
    row = {slot, word, link >> 16, link & 0xffff, header.step.load(std::memory_order_relaxed)};
    return load_after_copy(header.word) == word;
  }

  SegmentMemory& memory_;
  const View& view_;
};

// The rows of a block of items, by position: 0 is the anchor, steps(k) the item's end, start(k) its earliest frame.
class Paths {
 public:
  // Items whose rows are sought at a time: the cache misses of one step overlap.
  static constexpr int kBlock = 16;

  Paths(SegmentMemory& m, uint32_t steps)
      : memory_(m),
        walker_(m),
        most_steps_(static_cast<int>(steps)),
        history_(static_cast<int>(m.layout().view.history)),
        rows_(static_cast<size_t>(kBlock) * width()),
        hints_(rows_.size()),
        fetched_bytes_(std::clamp<uint64_t>(kFetchedBytes / width(), 1, m.layout().record_stride)) {}

  const Walker& walker() const { return walker_; }
  // -1: the item is not what was drawn.
  int steps(int k) const { return steps_[k]; }
  int start(int k) const { return start_[k]; }
  // The rows of item k from position start(k) to steps(k).
  const RowAt* rows(int k) const { return rows_.data() + place(k, 0); }

  // Follows the links of the block that starts at `first`, and fetches the rows that they lead to. Of the block after
  // that it fetches the links.
  void trace(const std::vector<DrawnItem>& items, const std::vector<int>& todo, int first) {
    const int count = static_cast<int>(todo.size());
    const int n = std::min(kBlock, count - first);
    for (int k = first + kBlock; k < std::min(first + 2 * kBlock, count); k++)
      __builtin_prefetch(&memory_.links(items[todo[k]].slot));
    for (int k = 0; k < n; k++) fetch(hints_[place(k, 0)] = items[todo[first + k]].slot);
    for (int position = 1; position <= most_steps_; position++)
      for (int k = 0; k < n; k++) follow(k, position, position - 1, &Links::next);
    for (int position = -1; position >= -history_; position--)
      for (int k = 0; k < n; k++) follow(k, position, position + 1, &Links::prev);
  }

  // Finds the rows of the block that was traced last.
  void resolve(const std::vector<DrawnItem>& items, const std::vector<int>& todo, int first, int n) {
    for (int k = 0; k < n; k++) {
      const DrawnItem& item = items[todo[first + k]];
      RowAt& anchor = rows_[place(k, 0)];
      anchor.slot = item.slot;
      start_[k] = reached_[k] = 0;
      const bool found = walker_.read(item.slot, item.key1, anchor) && look_back(k) && look_ahead(k);
      steps_[k] = found ? reached_[k] : -1;
    }
  }

  // Item k cannot be copied.
  void discard(int k) { steps_[k] = -1; }

  // Whether every row of item k is still what it was.
  bool intact(int k) const {
    const RowAt* row = rows(k);
    for (int position = start_[k]; position <= steps_[k]; position++)
      if (!walker_.unchanged(row[position])) return false;
    return steps_[k] >= 0;
  }

  // Every row that was found for item k, complete or not.
  template <class Visit>
  void each_row(int k, Visit&& visit) const {
    for (int position = start_[k]; position <= reached_[k]; position++) visit(rows(k)[position]);
  }

 private:
  // Of one item's rows: what is fetched of a block stays in the first-level cache.
  static constexpr uint64_t kFetchedBytes = 1024;

  size_t width() const { return static_cast<size_t>(history_) + static_cast<size_t>(most_steps_) + 1; }
  size_t place(int k, int position) const {
    return static_cast<size_t>(k) * width() + static_cast<size_t>(history_ + position);
  }

  [[gnu::always_inline]] void fetch(uint64_t slot) const {
    const char* record = reinterpret_cast<const char*>(&memory_.row(slot));
    for (uint64_t byte = 0; byte < fetched_bytes_; byte += kLine) __builtin_prefetch(record + byte);
  }

  [[gnu::always_inline]] void follow(int k, int position, int from, std::atomic<uint32_t> Links::* link) {
    const uint64_t slot = hints_[place(k, from)];
    const uint64_t hint = hints_[place(k, position)] = slot == kNoSlot ? kNoSlot : walker_.hint(slot, link);
    if (hint == kNoSlot) return;
    fetch(hint);
    __builtin_prefetch(&memory_.links(hint));
  }

  // As many frames before the anchor as items show, or as the episode has.
  bool look_back(int k) {
    RowAt* rows = &rows_[place(k, 0)];
    const int frames = static_cast<int>(std::min<uint32_t>(rows->step, static_cast<uint32_t>(history_)));
    for (int position = 0; position > -frames; start_[k] = --position)
      if (!walker_.back(rows[position], rows[position - 1])) return false;
    return true;
  }

  bool look_ahead(int k) {
    RowAt* rows = &rows_[place(k, 0)];
    const uint64_t* hints = &hints_[place(k, 0)];
    for (int position = 1; position <= most_steps_; position++) {
      if (!walker_.forward(rows[position - 1], hints[position], rows[position])) return false;
      reached_[k] = position;
      if (walker_.ends(rows[position])) break;
    }
    return true;
  }

  SegmentMemory& memory_;
  Walker walker_;
  int most_steps_, history_;
  std::vector<RowAt> rows_;
  std::vector<uint64_t> hints_;  // where the rows of the block traced last are likely to be
  uint64_t fetched_bytes_;       // of every record
  int steps_[kBlock], start_[kBlock], reached_[kBlock];
};

// Hindsight: which items get another goal, and from which row of their episode (Andrychowicz et al. 2017, section 4.5).
class Goals {
 public:
  Goals(SegmentMemory& m, Goal goal, double share) : walker_(m), goal_(goal), share_(share) {}

  bool relabelled(int k) const { return goal_ != Goal::kNone && chosen_[k].word; }
  const RowAt& row(int k) const { return chosen_[k]; }
  bool intact(int k) const { return !relabelled(k) || walker_.unchanged(chosen_[k]); }

  void choose(const std::vector<DrawnItem>& items, const std::vector<int>& todo, int first, int n, Paths& paths) {
    if (goal_ == Goal::kNone) return;
    for (int k = 0; k < n; k++) {
      const uint64_t chance = items[todo[first + k]].chance;
      chosen_[k] = {};
      if (paths.steps(k) < 0 || chance == std::numeric_limits<uint64_t>::max() ||
          static_cast<double>(chance >> 32) * 0x1p-32 >= share_)
        continue;
      if (!collect(*paths.rows(k))) {
        paths.discard(k);
        continue;
      }
      chosen_[k] = candidates_[(chance & 0xffffffff) * candidates_.size() >> 32];
    }
  }

 private:
  // The rows that may give a goal. False when the episode's end cannot be found: the item is being overwritten.
  bool collect(const RowAt& anchor) {
    candidates_.clear();
    RowAt row = anchor;
    do {
      RowAt after;
      if (!walker_.forward(row, walker_.hint(row.slot, &Links::next), after)) return false;
      row = after;
      candidates_.push_back(row);
    } while (!walker_.ends(row));
    if (goal_ == Goal::kFinal) candidates_.erase(candidates_.begin(), candidates_.end() - 1);
    if (goal_ != Goal::kEpisode) return true;
    // What lies before may be overwritten already: the goals still held are as good.
    for (row = anchor; !(row.flags & kFirst);) {
      candidates_.push_back(row);
      RowAt before;
      if (!walker_.back(row, before)) {
        if (walker_.has_back(row)) return false;  // it is being rewritten, or was cleared
        break;
      }
      row = before;
    }
    return true;
  }

  Walker walker_;
  Goal goal_;
  double share_;
  RowAt chosen_[Paths::kBlock];
  std::vector<RowAt> candidates_;
};

}  // namespace torchreplay
