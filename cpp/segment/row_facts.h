// What a row's header says of its place in a stream, and its raw priority.
#pragma once

#include <cmath>

#include "segment/memory.h"

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

}  // namespace torchreplay
