// Rows on their way from one segment to another: copied out in a block, and written again, linked with where the rows
// before them have gone.
#pragma once

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "segment/row_facts.h"
#include "write/ring_writer.h"

namespace torchreplay {

// Where the columns of n rows lie in a block: each field's values, then links, steps and priorities. Behind them lie
// the rows' values of any length, row after row, each row's as place_values() says. Runs of pages stay behind.
struct BlockLayout {
  BlockLayout(const Layout& layout, uint64_t n, uint64_t run_bytes = 0) {
    uint64_t end = 0;
    auto column = [&](uint64_t each) {
      const uint64_t start = round_up(end, kLine);
      end = start + each * n;
      return start;
    };
    for (size_t f = 0; f < layout.fields.size(); f++)
      values.push_back(column(layout.pages.are_there() && f == layout.pages.run_field ? 0 : layout.fields[f].nbytes));
    link = column(sizeof(uint64_t));
    step = column(sizeof(uint32_t));
    priority = column(sizeof(float));
    runs = round_up(end, kLine);
    bytes = runs + run_bytes;
  }
  std::vector<uint64_t> values;  // of each field
  uint64_t link, step, priority, runs, bytes;
};

// How many of the rows first, first + 1, ... < end are there, one after the other. O(result).
inline uint64_t run_length(SegmentMemory& m, uint64_t first, uint64_t end) {
  uint64_t key = first;
  for (; key < end; key++) {
    const uint64_t word = m.row(m.slot_of(key)).word.load(std::memory_order_acquire);
    if (!slot_word::is_row(word) || slot_word::key1(word) != key + 1) break;
  }
  return key - first;
}

// Whether the row is there that was announced under that key, with pages from run1 - 1 on (0: none), or would be gone
// by now. Who announced it is dead. A word that is void says only that nobody can see the row.
inline bool was_written(SegmentMemory& m, uint64_t key, uint64_t run1) {
  if (run_length(m, key, key + 1)) return true;  // before the heads: they move before a row goes
  const Header& h = m.header();
  if (h.head.load(std::memory_order_acquire) > key + m.capacity()) return true;
  return run1 && h.page_head.load(std::memory_order_acquire) > run1 - 1 + m.layout().pages.count;
}

// Rows that are there, and the bytes of their values that have any length.
struct RunSize {
  uint64_t rows = 0, bytes = 0, pages = 0;
  uint64_t first_page = 0;  // ticket; of the first row that has pages
};

// The same as run_length(), up to the row with which values have `most` bytes. O(rows).
inline RunSize measure_run(SegmentMemory& m, uint64_t first, uint64_t end, uint64_t most = kNoSize) {
  RunSize size{.rows = run_length(m, first, end)};
  if (!m.has_pages()) return size;
  std::vector<uint32_t> lengths(m.layout().pages.groups);
  for (uint64_t i = 0; i < size.rows; i++) {
    if (size.bytes >= most) return size.rows = i, size;
    Run run;
    if (!read_run(m, m.slot_of(first + i), run, lengths.data())) throw std::runtime_error("a row of the run is spoilt");
    if (run.pages && !size.pages) size.first_page = run.first;
    size.pages += run.pages;
    size.bytes += place_values(m.layout().ragged, lengths.data(), nullptr);
  }
  return size;
}

// Lets the one writer go on up to that ticket, and no further: from now on the limiter has no say. Rows from `cut` on
// keep their pages, and together with rows to come they have at most `window`, or a quarter of all. Returns the next
// ticket to be taken. O(rows from `cut` on).
inline uint64_t admit_up_to(SegmentMemory& m, uint64_t ticket, uint64_t cut = 0, uint64_t window = 0) {
  Header& h = m.header();
  h.admits_by_hand.store(1, std::memory_order_relaxed);
  if (m.has_pages()) {
    // Tickets before runs in flight, and these before rows: a run that no line speaks of any more has its row by then.
    uint64_t head = h.page_head.load(std::memory_order_acquire), oldest = head, in_flight = 0;
    for (int id = 1; id <= static_cast<int>(h.ids.load(std::memory_order_acquire)); id++) {
      const RunInFlight& line = m.run_in_flight(id);
      const uint64_t first1 = line.first1.load(std::memory_order_acquire);
      if (!first1) continue;
      oldest = std::min(oldest, first1 - 1);
      in_flight += line.pages.load(std::memory_order_relaxed);
    }
    const RunSize kept = measure_run(m, cut, cut + m.capacity());
    if (kept.pages) oldest = std::min(oldest, kept.first_page);
    const uint64_t count = m.layout().pages.count, used = in_flight + kept.pages;
    // Memory that was never used is not touched: the ring turns early where its beginning is free.
    const uint64_t turn = round_up(head, count);
    uint64_t expected = head;
    if (m.page_of(head) >= window && turn <= oldest + count &&
        h.page_head.compare_exchange_strong(expected, turn, std::memory_order_acq_rel))
      head = turn;
    h.page_limit.store(std::min(oldest + count, head + window - std::min(window, used)), std::memory_order_release);
  }
  h.ticket_limit.store(ticket, std::memory_order_release);
  return h.head.load(std::memory_order_relaxed);
}

// Copies rows that run_length() found, and that nobody can overwrite meanwhile, to `block`.
inline void copy_run(SegmentMemory& m, uint64_t first, uint64_t n, const BlockLayout& at, char* block) {
  const Layout& layout = m.layout();
  const auto& fields = layout.fields;
  const bool linked = layout.view.linked();
  auto* link = reinterpret_cast<uint64_t*>(block + at.link);
  auto* step = reinterpret_cast<uint32_t*>(block + at.step);
  auto* priority = reinterpret_cast<float*>(block + at.priority);
  std::vector<uint32_t> lengths(layout.pages.groups);
  char* values = block + at.runs;
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t slot = m.slot_of(first + i);
    for (size_t f = 0; f < fields.size(); f++)
      if (!m.has_pages() || f != layout.pages.run_field)
        copy_value(block + at.values[f] + i * fields[f].nbytes, m.value(fields[f], slot), fields[f].nbytes);
    const RowMeta meta = m.row(slot).meta(linked);
    link[i] = meta.link;
    step[i] = meta.step;
    priority[i] = meta.priority;
    Run run;
    if (!m.has_pages() || !read_run(m, slot, run, lengths.data()) || !run.pages) continue;
    const uint64_t bytes = place_values(layout.ragged, lengths.data(), nullptr);
    std::memcpy(values, m.page(m.page_of(run.first)), bytes);
    values += bytes;
  }
}

// The values of the rows of a block, for RingWriter::append.
class RelayedValues {
 public:
  // The block has `bytes` bytes. The first `start` rows are written already. Throws std::invalid_argument for lengths
  // that the block does not hold, or that no row may have.
  RelayedValues(SegmentMemory& m, const char* block, uint64_t bytes, uint64_t n, uint64_t start)
      : memory_(m), block_(block), at_(m.layout(), n), start_(start), lengths_(m.layout().pages.groups) {
    const auto refuse = [](const std::string& what) { throw std::invalid_argument("the block " + what); };
    const auto numbers = [](uint64_t has, uint64_t expected) {
      return std::to_string(has) + " bytes, expected " + std::to_string(expected);
    };
    if (bytes < at_.runs || (bytes != at_.runs && !m.has_pages()))
      refuse("of " + std::to_string(n) + " relayed rows has " + numbers(bytes, at_.runs));
    if (!m.has_pages()) return;
    const Layout& layout = m.layout();
    uint64_t end = at_.runs;
    for (uint64_t i = 0; i < n; i++) {
      uint64_t own = kNoSize;
      if (read_lengths(i)) own = place_values(layout.ragged, lengths_.data(), nullptr);
      if (own == kNoSize || own > layout.pages.most_of_row())
        refuse("has a row " + std::to_string(i) +
               " whose values take more than a quarter of ragged_bytes=" + std::to_string(layout.pages.given));
      if (own > bytes - end)
        refuse("says that row " + std::to_string(i) + " has " + numbers(own, bytes - end) + " at most");
      values_.push_back(block + end);
      end += own;
    }
    if (end != bytes) refuse("has values of " + numbers(bytes - at_.runs, end - at_.runs) + " by the rows' lengths");
    run_bytes_ = n > start ? end - static_cast<uint64_t>(values_[start] - block) : 0;
  }

  const BlockLayout& at() const { return at_; }
  // Of the rows that are to be written.
  uint64_t run_bytes() const { return run_bytes_; }

  void operator()(uint64_t row, uint64_t slot) const {
    const Layout& layout = memory_.layout();
    for (size_t f = 0; f < layout.fixed_fields(); f++) memory_.write(layout.fields[f], slot, value(f, start_ + row));
  }

  const uint32_t* lengths(uint64_t row) {
    read_lengths(start_ + row);
    return lengths_.data();
  }
  // After lengths(row).
  void run(uint64_t row, char* to) const {
    std::memcpy(to, values_[start_ + row], place_values(memory_.layout().ragged, lengths_.data(), nullptr));
  }

 private:
  const char* value(size_t field, uint64_t i) const {
    return block_ + at_.values[field] + i * memory_.layout().fields[field].nbytes;
  }

  // False for a length that no value has.
  bool read_lengths(uint64_t i) {
    bool good = true;
    for (uint32_t g = 0; g < lengths_.size(); g++) {
      std::memcpy(&lengths_[g], value(memory_.layout().pages.first_length() + g, i), sizeof lengths_[g]);
      good &= lengths_[g] <= kMaxLength;
    }
    return good;
  }

  SegmentMemory& memory_;
  const char* block_;
  BlockLayout at_;
  uint64_t start_, run_bytes_ = 0;
  std::vector<uint32_t> lengths_;    // of each group, of one row
  std::vector<const char*> values_;  // of each row
};

// The rows of a block, for RingWriter::append.
class RelayedRows {
 public:
  // `before`: of each row the key + 1 of the one before it in its stream (0: none), or -1 - i for row i of the block.
  // `keys`: where the rows' keys are kept, each from before its row is written: of a writer that was killed they say
  // which rows may be there. `runs`: the first page + 1 of the row announced last, for an even index in the block and
  // for an odd one. The first `start` rows are written already. Throws std::invalid_argument.
  RelayedRows(SegmentMemory& m, const BlockLayout& at, const char* block, uint64_t n, const int64_t* before,
              int64_t* keys, int64_t* runs, uint64_t start)
      : link_(reinterpret_cast<const uint64_t*>(block + at.link)),
        step_(reinterpret_cast<const uint32_t*>(block + at.step)),
        priority_(reinterpret_cast<const float*>(block + at.priority)),
        before_(before),
        keys_(keys),
        runs_(runs),
        start_(start) {
    for (uint64_t i = 0; i < n; i++) {
      const bool known =
          before[i] >= 0 ? static_cast<uint64_t>(before[i]) <= kMaxKeys : -1 - before[i] < static_cast<int64_t>(i);
      if (!known || (link_[i] & kFlags) > (kFirst | kEnds | kHasPriority))
        throw std::invalid_argument("row " + std::to_string(i) + " of the block is linked with nothing there can be");
      if (m.layout().view.linked() && !goes_on(m, i))
        throw std::invalid_argument("row " + std::to_string(i) + " of the block does not go on where its episode is");
    }
  }

  RowMeta meta(uint64_t row) const {
    const uint64_t i = start_ + row;
    const int64_t before = before_[i];
    const auto key1 = static_cast<uint64_t>(before >= 0 ? before : keys_[-1 - before] + 1);
    return {key1 << 16 | (link_[i] & kFlags), step_[i], priority_[i]};
  }
  void announce(uint64_t row, uint64_t key, const Run& run) const {
    const uint64_t i = start_ + row;
    // Of the row before, the key's and the run's places stay as they are.
    std::atomic_ref(runs_[i % 2]).store(run.pages ? static_cast<int64_t>(run.first + 1) : 0, std::memory_order_relaxed);
    kill_fence();
    std::atomic_ref(keys_[i]).store(static_cast<int64_t>(key), std::memory_order_release);
  }
  void commit(uint64_t, uint64_t) const {}

 private:
  static constexpr uint64_t kFlags = 0xffff;

  // Whether row i has the step that its place in the episode gives it: items are found by steps. A row before it that
  // is overwritten by now says nothing.
  bool goes_on(SegmentMemory& m, uint64_t i) const {
    if (link_[i] & kFirst) return step_[i] == 0;
    if (before_[i] < 0) return follows(m, link_[-1 - before_[i]], step_[-1 - before_[i]], i);
    if (before_[i] == 0 || step_[i] == 0) return false;
    const auto key1 = static_cast<uint64_t>(before_[i]);
    const uint64_t slot = m.slot_of(key1 - 1);
    const uint64_t word = m.row(slot).word.load(std::memory_order_acquire);
    RowFacts row;
    if (!slot_word::is_row(word) || slot_word::key1(word) != key1 || !read_facts(m, slot, word, row)) return true;
    return follows(m, row.flags, row.step, i);
  }

  bool follows(const SegmentMemory& m, uint64_t flags, uint32_t step, uint64_t i) const {
    return !(flags & kEnds) && step_[i] == m.layout().view.step_after(step);
  }

  const uint64_t* link_;
  const uint32_t* step_;
  const float* priority_;
  const int64_t* before_;
  int64_t* keys_;
  int64_t* runs_;
  uint64_t start_;
};

}  // namespace torchreplay
