// Where the values of any length of rows that are to be placed will lie.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "segment/run.h"

namespace torchreplay {

// Runs for rows in the order of their keys, whatever the order in which they come: as if they had been written one
// after the other. So the oldest are the first to leave. Of more than the pages hold, the newest have a place.
class RunPlan {
 public:
  // `n` rows are to come, with these lengths of each group, from a ring of `had` bytes. Returns what to say where the
  // values of one need a larger ring than this; empty: none does. Throws std::invalid_argument for a row whose values
  // no writer wrote: they take more than a quarter of the bytes that the ring had.
  std::string expect(const Layout& layout, uint64_t n, const int64_t* keys, const std::vector<const uint32_t*>& lengths,
                     uint64_t had) {
    std::vector<uint32_t> of_row(lengths.size());
    rows_.reserve(rows_.size() + n);
    for (uint64_t i = 0; i < n; i++) {
      for (size_t g = 0; g < lengths.size(); g++) of_row[g] = lengths[g][i];
      const uint64_t bytes = checked_bytes(layout, keys[i], of_row, had);
      if (bytes > layout.pages.most_of_row())
        return told(keys[i], of_row) + ", which take " + std::to_string(bytes) + " bytes, and may take at most " +
               std::to_string(layout.pages.most_of_row()) +
               ", a quarter of ragged_bytes=" + std::to_string(layout.pages.given) +
               ". Choose ragged_bytes=" + std::to_string(4 * bytes) + " or more";
      rows_.push_back({keys[i], 0, static_cast<uint32_t>(pages_of(layout, bytes))});
    }
    return {};
  }

  // Has the run of the first row that stays begin at ticket `head`, if need be at the start of the ring. Returns the
  // ticket after the last run. O(n log n) for n rows.
  uint64_t arrange(const SegmentMemory& m, uint64_t head) {
    std::ranges::sort(rows_, {}, &Row::key);
    std::vector<bool> taken(m.capacity());
    for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
      row->stays = row->key >= 0 && !taken[m.slot_of(static_cast<uint64_t>(row->key))];
      if (row->stays) taken[m.slot_of(static_cast<uint64_t>(row->key))] = true;
    }
    for (Row& row : rows_) {
      if (!row.stays || row.pages == 0) continue;
      row.first = start_of_run(m, head, row.pages);
      head = row.first + row.pages;
    }
    left_out_.clear();
    for (Row& row : rows_) {
      if (!row.stays || row.pages == 0 || row.first + m.layout().pages.count >= head) continue;
      row.stays = false;
      left_out_.push_back(row.key);
    }
    return head;
  }

  // The run of a row of so many pages; nothing: it has no place. Throws std::invalid_argument for a row that was not to
  // come. O(log n).
  std::optional<Run> find(int64_t key, uint64_t pages) const {
    const auto row = std::ranges::lower_bound(rows_, key, {}, &Row::key);
    if (row == rows_.end() || row->key != key || row->pages != pages)
      throw std::invalid_argument("the row with key " + std::to_string(key) +
                                  " has other lengths than it had: the files were changed while they were read");
    return row->stays ? std::optional<Run>({row->first, pages}) : std::nullopt;
  }

  // Rows for whose values there are too few pages, in the order of their keys.
  const std::vector<int64_t>& left_out() const { return left_out_; }

  bool empty() const { return rows_.empty(); }

 private:
  struct Row {
    int64_t key;
    uint64_t first;
    uint32_t pages;
    bool stays = false;  // false: a newer row has its slot, or its pages
  };

  static uint64_t checked_bytes(const Layout& layout, int64_t key, const std::vector<uint32_t>& lengths, uint64_t had) {
    const bool sound = std::ranges::all_of(lengths, [](uint32_t length) { return length <= kMaxLength; });
    const uint64_t bytes = sound ? place_values(layout.ragged, lengths.data(), nullptr) : kNoSize;
    if (bytes != kNoSize && bytes <= round_up(had / 4, 8)) return bytes;
    throw std::invalid_argument(told(key, lengths) + ", and those of a row took at most " + std::to_string(had / 4) +
                                " bytes, a quarter of the ragged_bytes=" + std::to_string(had) + " that it was in");
  }

  static std::string told(int64_t key, const std::vector<uint32_t>& lengths) {
    std::string told;
    for (const uint32_t length : lengths) told += (told.empty() ? "" : ", ") + std::to_string(length);
    return "the row with key " + std::to_string(key) + " has values of length " + told;
  }

  std::vector<Row> rows_;
  std::vector<int64_t> left_out_;
};

}  // namespace torchreplay
