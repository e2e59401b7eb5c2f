// What a row's header says of its place in a stream, and its raw priority.
#pragma once

#include <cmath>

#include "segment/segment_memory.h"

namespace torchreplay {

struct RowFacts {
  uint64_t prev_key1 = 0;  // key + 1 of the stream's previous row, 0 for none
  uint64_t flags = 0;
  uint32_t step = 0;
  float priority = NAN;  // raw, NaN for none given
};

// Reads the header of the row that `word` names in `slot`; false when the row changed meanwhile.
inline bool read_facts(const SegmentMemory& m, uint64_t slot, uint64_t word, RowFacts& facts) {
  RowHeader& row = m.row(slot);
  const RowMeta meta = row.meta(m.layout().view.linked());
  facts = {meta.link >> 16, meta.link & 0xffff, meta.step, meta.link & kHasPriority ? meta.priority : NAN};
  return load_after_copy(row.word) == word;
}

// Whether nobody is to draw the item anchored at a slot's absorbed row. The mutex is held.
inline bool is_discarded(const SegmentMemory& m, uint64_t slot) {
  const Header& h = m.header();
  return h.discarded_below && m.at(slot) <= h.discarded_below &&
         m.row(slot).meta(m.layout().view.linked()).link & kDiscarded;
}

// Whether a row can have been written where it is: links lead to older rows, and steps count them. What others
// overwrite meanwhile is not looked at.
inline bool is_sound(const SegmentMemory& m, uint64_t slot) {
  const auto word_of = [&](uint64_t of) { return m.row(of).word.load(std::memory_order_acquire); };
  const uint64_t word = word_of(slot);
  RowFacts row, before;
  if (!slot_word::is_row(word) || !read_facts(m, slot, word, row)) return true;
  if (!(std::isnan(row.priority) || std::isfinite(row.priority))) return false;
  if (!m.layout().view.linked()) return true;
  if (row.flags > (kFirst | kEnds | kHasPriority | kDiscarded) || row.prev_key1 >= slot_word::key1(word)) return false;
  if (row.flags & kFirst) return row.step == 0;
  if (row.prev_key1 == 0 || row.step == 0) return false;
  const uint64_t from = m.slot_of(row.prev_key1 - 1), word_before = word_of(from);
  if (!slot_word::is_row(word_before) || slot_word::key1(word_before) != row.prev_key1) return true;  // it is gone
  if (!read_facts(m, from, word_before, before)) return true;
  return m.layout().view.step_after(before.step) == row.step && !(before.flags & kEnds);
}

}  // namespace torchreplay
