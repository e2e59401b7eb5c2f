// Which items can be drawn, worked out from the headers of the rows in memory and nothing else.
#pragma once

#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "segment/segment_memory.h"

namespace torchreplay::testing {

// What a row's header said when it was looked at, or when it was written.
struct HeldRow {
  uint64_t prev_key1 = 0;
  uint64_t flags = 0;
  uint32_t step = 0;
  std::optional<float> priority;
  bool discarded = false;  // nobody is to draw the item anchored there

  HeldRow() = default;
  HeldRow(uint64_t link, uint32_t row_step, float given) : prev_key1(link >> 16), flags(link & 0xffff), step(row_step) {
    if (link & kHasPriority) priority = given;
  }
  bool is_first() const { return flags & kFirst; }
  bool ends() const { return flags & (kTerminated | kTruncated); }
};

// A set of rows, and the items that it holds completely under a view.
class RowSet {
 public:
  explicit RowSet(const View& view) : view_(view) {}

  // The rows that are committed at the moment.
  static RowSet committed(const SegmentMemory& m) {
    RowSet rows(m.layout().view);
    for (uint64_t slot = 0; slot < m.capacity(); slot++) {
      const RowHeader& row = m.row(slot);
      const uint64_t word = row.word.load();
      if (word % 2 != 0 || word % 65536 == 0) continue;
      const uint64_t link = m.layout().view.span ? row.link.load() : 0;
      HeldRow held(link, row.step.load(), row.priority.load());
      held.discarded = m.layout().view.span ? link & 16 : row.priority.load() == -INFINITY;
      rows.add((word >> 16) - 1, held);
    }
    return rows;
  }

  void add(uint64_t key, const HeldRow& row) {
    rows_[key] = row;
    if (follows(row)) next_[row.prev_key1 - 1] = key;
  }
  const std::map<uint64_t, HeldRow>& rows() const { return rows_; }

  // Whether items may hold both the row and the one before it.
  bool follows(const HeldRow& row) const { return row.prev_key1 != 0 && (view_.across || !row.is_first()); }

  // Keys of the rows of the item anchored at `key`, from its earliest frame to its end; nothing when one is missing, or
  // when the view has no item there.
  std::optional<std::vector<uint64_t>> item(uint64_t key) const {
    if (!rows_.contains(key) || rows_.at(key).discarded) return {};
    if (view_.span == 0) return std::vector{key};
    if (!view_.across && rows_.at(key).step % view_.stride != 0) return {};
    std::vector<uint64_t> keys = {key};
    if (!add_frames(keys)) return {};
    uint32_t steps = 0;
    for (uint64_t at = key; steps < view_.span;) {
      const auto after = next_.find(at);
      if (after == next_.end()) return {};
      keys.push_back(at = after->second);
      steps++;
      if (!view_.across && rows_.at(at).ends()) return steps >= view_.min_steps ? std::optional(keys) : std::nullopt;
    }
    return keys;
  }

  std::set<uint64_t> items() const {
    std::set<uint64_t> anchors;
    for (const auto& [key, row] : rows_)
      if (item(key)) anchors.insert(key);
    return anchors;
  }

  // The priority that the complete item anchored at `key` was given; nothing: none.
  std::optional<float> priority(uint64_t key) const {
    const std::vector<uint64_t> keys = *item(key);
    if (view_.priority_steps == 0) return rows_.at(keys.back()).priority;
    std::optional<float> largest;
    size_t at = static_cast<size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin());
    for (uint32_t step = 1; step <= view_.priority_steps && ++at < keys.size(); step++)
      if (const auto given = rows_.at(keys[at]).priority; given && (!largest || *given > *largest)) largest = given;
    return largest;
  }

 private:
  // As many frames before keys[0] as the view wants and the episode has. False: one is missing.
  bool add_frames(std::vector<uint64_t>& keys) const {
    const uint32_t wanted = view_.across ? 0 : std::min(view_.history, rows_.at(keys[0]).step);
    for (uint32_t frame = 0; frame < wanted; frame++) {
      const uint64_t before1 = rows_.at(keys[0]).prev_key1;
      if (before1 == 0 || !rows_.contains(before1 - 1)) return false;
      keys.insert(keys.begin(), before1 - 1);
    }
    return true;
  }

  View view_;
  std::map<uint64_t, HeldRow> rows_;
  std::map<uint64_t, uint64_t> next_;
};

}  // namespace torchreplay::testing
