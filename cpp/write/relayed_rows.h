// Rows on their way from one segment to another: copied out in a block, and written again, linked with where the rows
// before them have gone.
#pragma once

#include <atomic>
#include <vector>

#include "segment/row_facts.h"
#include "write/ring_writer.h"

namespace torchreplay {

// Where the columns of n rows lie in a block: each field's values, then links, steps and priorities.
struct BlockLayout {
  BlockLayout(const Layout& layout, uint64_t n) {
    uint64_t end = 0;
    auto column = [&](uint64_t each) {
      const uint64_t start = round_up(end, kLine);
      end = start + each * n;
      return start;
    };
    for (const Field& f : layout.fields) values.push_back(column(f.nbytes));
    link = column(sizeof(uint64_t));
    step = column(sizeof(uint32_t));
    priority = column(sizeof(float));
    bytes = round_up(end, kLine);
  }
  std::vector<uint64_t> values;  // of each field
  uint64_t link, step, priority, bytes;
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

// Lets writers go on up to that ticket, and no further: from now on the limiter has no say. Returns the next one to be
// taken.
inline uint64_t admit_up_to(SegmentMemory& m, uint64_t ticket) {
  m.header().admits_by_hand.store(1, std::memory_order_relaxed);
  m.header().ticket_limit.store(ticket, std::memory_order_relaxed);
  return m.header().head.load(std::memory_order_relaxed);
}

// Copies rows that run_length() found, and that nobody can overwrite meanwhile, to `block`.
inline void copy_run(SegmentMemory& m, uint64_t first, uint64_t n, const BlockLayout& at, char* block) {
  const auto& fields = m.layout().fields;
  const bool linked = m.layout().view.linked();
  auto* link = reinterpret_cast<uint64_t*>(block + at.link);
  auto* step = reinterpret_cast<uint32_t*>(block + at.step);
  auto* priority = reinterpret_cast<float*>(block + at.priority);
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t slot = m.slot_of(first + i);
    for (size_t f = 0; f < fields.size(); f++)
      copy_value(block + at.values[f] + i * fields[f].nbytes, m.value(fields[f], slot), fields[f].nbytes);
    const RowMeta meta = m.row(slot).meta(linked);
    link[i] = meta.link;
    step[i] = meta.step;
    priority[i] = meta.priority;
  }
}

// The rows of a block, for RingWriter::append.
class RelayedRows {
 public:
  // `before`: of each row the key + 1 of the one before it in its stream (0: none), or -1 - i for row i of the block.
  // `keys`: where the rows' keys are kept, each from before its row is written: of a writer that was killed they say
  // which rows may be there. The first `start` rows are written already. Throws std::invalid_argument.
  RelayedRows(SegmentMemory& m, const BlockLayout& at, const char* block, uint64_t n, const int64_t* before,
              int64_t* keys, uint64_t start)
      : link_(reinterpret_cast<const uint64_t*>(block + at.link)),
        step_(reinterpret_cast<const uint32_t*>(block + at.step)),
        priority_(reinterpret_cast<const float*>(block + at.priority)),
        before_(before),
        keys_(keys),
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
  void announce(uint64_t row, uint64_t key) const {
    std::atomic_ref(keys_[start_ + row]).store(static_cast<int64_t>(key), std::memory_order_release);
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
  uint64_t start_;
};

}  // namespace torchreplay
