// Explorers that write episodes row by row, and may lag or die between any two steps of it.
#pragma once

#include "segments.h"

namespace torchreplay::testing {

// How far a stream has come, and what its next rows say about their place in it.
struct Stream {
  uint64_t key1 = 0;  // key + 1 of its last row
  uint32_t step = 0;
  bool running = false;  // an episode has begun and not ended

  RowMeta reset() const { return {key1 << 16 | kFirst, 0, 0}; }
  RowMeta next(uint64_t flags = 0, std::optional<float> priority = {}) const {
    const RowMeta given = meta_of(priority);
    return {key1 << 16 | flags | given.link, step + 1, given.priority};
  }
  void wrote(uint64_t key, const RowMeta& meta) {
    key1 = key + 1;
    step = meta.step;
    running = !(meta.link & kEnds);
  }
};

// Writes a whole row at a time. Values are patterns that count the explorer's rows, unless `fill` copies others.
class Explorer {
 public:
  using Fill = std::function<void(uint64_t slot)>;

  Explorer(SegmentMemory& m, int id) : memory_(m), writer_(m, id), rows_(static_cast<uint64_t>(id) << 32) {}

  Stream stream;

  uint64_t reset(const Fill& fill = {}) { return write(stream.reset(), fill); }
  uint64_t step(uint64_t flags = 0, std::optional<float> priority = {}, const Fill& fill = {}) {
    return write(stream.next(flags, priority), fill);
  }

  // A reset and `steps` steps, of which the last has `flags`. Returns their keys.
  std::vector<uint64_t> episode(uint32_t steps, uint64_t flags = kTerminated) {
    std::vector<uint64_t> keys = {reset()};
    for (uint32_t i = 1; i <= steps; i++) keys.push_back(step(i == steps ? flags : 0));
    return keys;
  }

  uint64_t write(const RowMeta& meta, const Fill& fill = {}) {
    do {
      writer_.take_ticket();
    } while (!writer_.seize());
    finish(meta, fill);
    return writer_.key();
  }

  // The steps of a write, for those who stop in between.
  SteppedWriter& writer() { return writer_; }
  void finish(const RowMeta& meta, const Fill& fill = {}) {
    const uint64_t pattern = rows_++;
    writer_.finish(meta, [&](uint64_t slot) { fill ? fill(slot) : fill_row(memory_, slot, pattern); });
    stream.wrote(writer_.key(), meta);
  }

 private:
  SegmentMemory& memory_;
  SteppedWriter writer_;
  uint64_t rows_;
};

}  // namespace torchreplay::testing
