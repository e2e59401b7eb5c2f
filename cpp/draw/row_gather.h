// Copying drawn rows out of the ring, without a lock: a row's word must name the row drawn before and after the copy.
#pragma once

#include <vector>

#include "draw/copy.h"
#include "draw/ragged_batch.h"
#include "segment/row_rewriter.h"

namespace torchreplay {

// What was drawn: the row in `slot` must still be this one.
struct DrawnItem {
  uint64_t slot, key1;
  uint64_t mass, total, min_mass;
  int64_t drawable;
  uint64_t chance;      // a random word of the item's own
  int64_t version = 0;  // the policy that it came about by, where rows say so

  int64_t key() const { return static_cast<int64_t>(key1) - 1; }
};

// Where a batch goes: `values[o]` receives n values of output o, one after the other. Those of ragged outputs are not
// looked at.
struct BatchPointers {
  std::vector<char*> values;
  int64_t* keys = nullptr;
  float* weight = nullptr;
  float* probability = nullptr;
  uint64_t bytes = 0;             // of all values together
  RaggedBatch* ragged = nullptr;  // where the values of any length go; nullptr: nobody wants them
  int64_t* age = nullptr;         // where rows have a policy version
};

// Items that are single rows.
class RowGather {
 public:
  explicit RowGather(SegmentMemory& m) : memory_(m) {}

  // Copies the items whose numbers are in `todo`, and leaves in it those that were not, or no longer, what was drawn.
  void gather(const std::vector<DrawnItem>& items, std::vector<int>& todo, const BatchPointers& out) {
    const int count = static_cast<int>(todo.size());
    items_ = items.data();
    todo_ = todo.data();
    count_ = count;
    int failed = 0;
    prefetch(0, count);
    for (int first = 0; first < count; first += kBlock) {
      prefetch(first + kBlock, count);
      failed = gather_block(first, std::min(kBlock, count - first), failed, out);
    }
    todo.resize(failed);
  }

  // Leaves in `todo` the items that are not what was drawn any more, or may have been rewritten.
  void keep_touched(const std::vector<DrawnItem>& items, std::vector<int>& todo, const RewriteWatch& watch) const {
    std::erase_if(todo, [&](int i) {
      const uint64_t word = memory_.row(items[i].slot).word.load(std::memory_order_acquire);
      return slot_word::is_row(word) && slot_word::key1(word) == items[i].key1 && !watch.touches(word);
    });
  }

 private:
  // Rows copied at a time: their lines arrive while the block before is copied.
  static constexpr int kBlock = 16;

  int gather_block(int first, int n, int failed, const BatchPointers& out) {
    const auto& fields = memory_.layout().fields;
    uint64_t word[kBlock];
    for (int k = 0; k < n; k++) {
      const DrawnItem& item = items_[todo_[first + k]];
      word[k] = memory_.row(item.slot).word.load(std::memory_order_acquire);
      if (!slot_word::is_row(word[k]) || slot_word::key1(word[k]) != item.key1) word[k] = 0;
    }
    for (size_t f = 0; f < memory_.layout().fixed_fields(); f++)
      if (!fields[f].own_array) copy_field(fields[f], out.values[f], first, n);
    copy_long(first, n, out);
    for (int k = 0; k < n; k++) {
      const int i = todo_[first + k];
      const bool intact = word[k] && load_after_copy(memory_.row(items_[i].slot).word) == word[k];
      if (!intact) todo_[failed++] = i;
    }
    return failed;
  }

  void copy_field(const Field& field, char* to, int first, int n) const {
    with_size(field.nbytes, [&](auto bytes) {
      for (int k = first; k < first + n; k++)
        copy_payload(to + todo_[k] * bytes, memory_.value(field, items_[todo_[k]].slot), bytes);
    });
  }

  void copy_long(int first, int n, const BatchPointers& out) {
    copies_.clear();
    add_long(first, n, out);
    const size_t here = copies_.size();
    add_long(first + n, std::min(LongCopies::kAhead, count_ - first - n), out);
    copies_.run(here, out.bytes);
  }

  void add_long(int first, int n, const BatchPointers& out) {
    for (size_t f = 0; f < memory_.layout().fixed_fields(); f++) {
      const Field& field = memory_.layout().fields[f];
      if (!field.own_array) continue;
      for (int k = first; k < first + n; k++)
        copies_.add(out.values[f] + todo_[k] * field.nbytes, memory_.value(field, items_[todo_[k]].slot), field.nbytes);
    }
  }

  // Fetches records. Always inlined: gcc takes a function that only prefetches for one without effects, and drops calls
  // of it.
  [[gnu::always_inline]] void prefetch(int first, int count) const {
    constexpr uint64_t kFetchedBytes = 512;
    const uint64_t bytes = std::min(memory_.layout().record_stride, kFetchedBytes);
    for (int k = first; k < std::min(first + kBlock, count); k++) {
      const char* record = reinterpret_cast<const char*>(&memory_.row(items_[todo_[k]].slot));
      for (uint64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(record + byte);
    }
  }

  SegmentMemory& memory_;
  const DrawnItem* items_ = nullptr;
  int* todo_ = nullptr;
  int count_ = 0;
  LongCopies copies_;
};

}  // namespace torchreplay
