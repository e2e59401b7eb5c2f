// Finding the rows of drawn items, without a lock: backwards by the headers, forwards by links that are only hints.
#pragma once

#include "gather.h"
#include "plan.h"
#include "streams.h"

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
    return slot_word::is_row(word) && slot_word::key1(word) == key1 && take(slot, word, row);
  }

  // The row before `row` in its stream.
  bool back(const RowAt& row, RowAt& before) const {
    return row.prev_key1 && read(memory_.slot_of(row.prev_key1 - 1), row.prev_key1, before);
  }

  // The row after `row`. The link may belong to another row by now: what it leads to must name `row`.
  bool forward(const RowAt& row, RowAt& after) const {
    const uint32_t slot1 = memory_.links(row.slot).next.load(std::memory_order_relaxed);
    if (slot1 == 0 || slot1 > memory_.capacity()) return false;
    const uint64_t word = memory_.row(slot1 - 1).word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || !take(slot1 - 1, word, after)) return false;
    return after.prev_key1 == slot_word::key1(row.word) && (view_.across || !(after.flags & kFirst));
  }

  bool ends(const RowAt& row) const { return !view_.across && (row.flags & kEnds); }

  bool unchanged(const RowAt& row) const { return load_after_copy(memory_.row(row.slot).word) == row.word; }

 private:
  bool take(uint64_t slot, uint64_t word, RowAt& row) const {
    RowFacts facts;
    if (!read_facts(memory_.row(slot), word, facts)) return false;
    row = {slot, word, facts.prev_key1, facts.flags, facts.step};
    return true;
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
        rows_(static_cast<size_t>(kBlock) * width()) {}

  const Walker& walker() const { return walker_; }
  // -1: the item is not what was drawn.
  int steps(int k) const { return steps_[k]; }
  int start(int k) const { return start_[k]; }
  const RowAt& row(int k, int position) const {
    return rows_[static_cast<size_t>(k) * width() + static_cast<size_t>(history_ + position)];
  }

  void resolve(const std::vector<DrawnItem>& items, const std::vector<int>& todo, int first, int n) {
    for (int k = 0; k < n; k++) {
      const DrawnItem& item = items[todo[first + k]];
      at(k, 0).slot = item.slot;
      start_[k] = reached_[k] = 0;
      steps_[k] = walker_.read(item.slot, item.key1, at(k, 0)) ? 0 : -1;
      open_[k] = steps_[k] == 0;
      if (steps_[k] == 0 && history_) look_back(k);
    }
    for (int step = 1; step <= most_steps_; step++)
      for (int k = 0; k < n; k++)
        if (open_[k]) advance(k, step);
  }

  // Item k cannot be copied.
  void discard(int k) { steps_[k] = -1; }

  // Whether every row of item k is still what it was.
  bool intact(int k) const {
    for (int position = start_[k]; position <= steps_[k]; position++)
      if (!walker_.unchanged(row(k, position))) return false;
    return steps_[k] >= 0;
  }

  // Every row that was found for item k, complete or not.
  template <class Visit>
  void each_row(int k, Visit&& visit) const {
    for (int position = start_[k]; position <= reached_[k]; position++) visit(row(k, position));
  }

  [[gnu::always_inline]] void prefetch(const std::vector<DrawnItem>& items, const std::vector<int>& todo,
                                       int first) const {
    for (int k = first; k < std::min<int>(first + kBlock, static_cast<int>(todo.size())); k++) {
      const uint64_t slot = items[todo[k]].slot;
      prefetch_row(memory_, slot);
      __builtin_prefetch(&memory_.links(slot));
    }
  }

 private:
  size_t width() const { return static_cast<size_t>(history_ + most_steps_ + 1); }
  RowAt& at(int k, int position) {
    return rows_[static_cast<size_t>(k) * width() + static_cast<size_t>(history_ + position)];
  }

  // As many frames before the anchor as items show, or as the episode has.
  void look_back(int k) {
    const int frames = static_cast<int>(std::min<uint32_t>(at(k, 0).step, static_cast<uint32_t>(history_)));
    while (start_[k] > -frames) {
      if (!walker_.back(at(k, start_[k]), at(k, start_[k] - 1))) {
        steps_[k] = -1;
        open_[k] = false;
        return;
      }
      start_[k]--;
    }
  }

  void advance(int k, int step) {
    RowAt& row = at(k, step);
    if (!walker_.forward(at(k, step - 1), row)) {
      steps_[k] = -1;
      open_[k] = false;
      return;
    }
    steps_[k] = reached_[k] = step;
    open_[k] = step < most_steps_ && !walker_.ends(row);
    if (!open_[k]) return;
    const uint32_t next1 = memory_.links(row.slot).next.load(std::memory_order_relaxed);
    if (next1 && next1 <= memory_.capacity()) {
      prefetch_row(memory_, next1 - 1);
      __builtin_prefetch(&memory_.links(next1 - 1));
    }
  }

  SegmentMemory& memory_;
  Walker walker_;
  int most_steps_, history_;
  std::vector<RowAt> rows_;
  int steps_[kBlock], start_[kBlock], reached_[kBlock];
  bool open_[kBlock];
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
      if (!collect(paths.row(k, 0))) {
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
      if (!walker_.forward(row, after)) return false;
      row = after;
      candidates_.push_back(row);
    } while (!walker_.ends(row));
    if (goal_ == Goal::kFinal) candidates_.erase(candidates_.begin(), candidates_.end() - 1);
    if (goal_ != Goal::kEpisode) return true;
    // What lies before may be overwritten already: the goals still held are as good.
    for (row = anchor; !(row.flags & kFirst);) {
      candidates_.push_back(row);
      RowAt before;
      if (!walker_.back(row, before)) break;
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
