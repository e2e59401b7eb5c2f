// The values of any length in a batch: which ones it has, and the memory that they are drawn into.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "draw/item_plan.h"
#include "system/blocks.h"

namespace torchreplay {

// Which values of any length a batch has. Outputs are those of the batch's plan that are ragged, in its order; of
// single rows all ragged fields.
struct RaggedPlan {
  // Rows of an item, from a position on.
  struct Window {
    Output::Kind kind;
    int32_t first;
    uint32_t count;
    uint32_t place;  // of the first among the rows of all windows
  };
  // Outputs of one group have values of the same lengths: their fields are like each other, and they show the same
  // rows.
  struct Group {
    uint32_t window;
    uint32_t length;  // the group of the fields
  };
  struct Values {
    uint32_t field;  // in Layout::ragged
    uint32_t group;
  };

  std::vector<Window> windows;
  std::vector<Group> groups;
  std::vector<Values> outputs;
  uint32_t width = 0;  // rows of all windows

  // `plan`: nullptr for single rows.
  static RaggedPlan of(const Layout& layout, const ItemPlan* plan) {
    RaggedPlan p;
    if (plan) {
      for (const Output& o : plan->outputs)
        if (o.is_ragged()) p.add(layout, static_cast<uint32_t>(o.ragged), o.kind, o.first, o.count);
    } else {
      for (uint32_t f = 0; f < layout.ragged.size(); f++) p.add(layout, f, Output::Kind::kAnchor, 0, 1);
    }
    return p;
  }

 private:
  void add(const Layout& layout, uint32_t field, Output::Kind kind, int32_t first, uint32_t count) {
    uint32_t w = 0, g = 0;
    while (w < windows.size() && !(windows[w].kind == kind && windows[w].first == first && windows[w].count == count))
      w++;
    if (w == windows.size()) windows.push_back({kind, first, count, std::exchange(width, width + count)});
    const uint32_t length = layout.ragged[field].group;
    while (g < groups.size() && !(groups[g].window == w && groups[g].length == length)) g++;
    if (g == groups.size()) groups.push_back({w, length});
    outputs.push_back({field, g});
  }
};

// The elements of one group are more than offsets can say.
struct TooManyElements : std::overflow_error {
  TooManyElements(uint32_t of, uint64_t n)
      : std::overflow_error("a batch would have " + std::to_string(n) +
                            " elements in a ragged field, and offsets hold " + std::to_string(kMost) +
                            ": draw fewer items, or give a budget"),
        group(of),
        elements(n) {}
  static constexpr uint64_t kMost = (uint64_t{1} << 31) - 1;
  uint32_t group;
  uint64_t elements;
};

// Where the values of any length of a batch go. Only a draw knows how much memory they take: it gets it.
class RaggedBatch {
 public:
  // Values of an output: all elements, one value after the other.
  struct Values {
    char* data = nullptr;
    int64_t elements = 0;
  };
  // Of a group: value i is the elements from offsets[i] to offsets[i + 1]. A batch of n items has n times as many
  // values as an item has rows; offsets are one more.
  struct Lengths {
    int32_t* offsets = nullptr;
    int64_t* lengths = nullptr;
    int64_t count = 0;
  };

  explicit RaggedBatch(const RaggedPlan& plan) : values(plan.outputs.size()), lengths(plan.groups.size()) {}
  ~RaggedBatch() {
    if (block_) block_->release();
  }
  RaggedBatch(const RaggedBatch&) = delete;

  // What the caller sets before a draw: most elements of the batch in each group, -1 for any number, empty for no
  // budget at all; and memory that is used where it is enough.
  std::vector<int64_t> budget;
  char* given = nullptr;
  uint64_t given_bytes = 0;

  // Bytes to which places are rounded up: as what CUDA gives memory, so that copies there are as well aligned.
  static constexpr uint64_t kApart = 256;

  // What a draw sets: of each output and each group of the plan.
  std::vector<Values> values;
  std::vector<Lengths> lengths;

  // The values, then offsets and lengths, lie here.
  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  bool is_given() const { return data_ && !block_; }

  // One more owner of that memory: it calls release() once. nullptr: the memory was given.
  Block* share() const {
    if (block_) block_->owners.fetch_add(1, std::memory_order_relaxed);
    return block_;
  }

  // For draws

  // Room for values of so many bytes and elements each. Returns the memory from before, which the caller releases once
  // it has moved from there what stays; nullptr if there is none. `again`: what is given holds values that stay.
  Block* allocate(const std::vector<uint64_t>& value_bytes, const std::vector<int64_t>& counts, bool again) {
    bytes_ = 0;
    const auto place = [this](uint64_t bytes) { return std::exchange(bytes_, bytes_ + round_up(bytes, kApart)); };
    std::vector<uint64_t> at;
    at.reserve(value_bytes.size() + 2 * counts.size());
    for (const uint64_t bytes : value_bytes) at.push_back(place(bytes));
    for (const int64_t count : counts) {
      at.push_back(place(sizeof(int32_t) * (static_cast<uint64_t>(count) + 1)));
      at.push_back(place(sizeof(int64_t) * static_cast<uint64_t>(count)));
    }
    const bool fits = given && !again && bytes_ <= given_bytes;
    Block* const fresh = fits ? nullptr : Block::make_alike(bytes_, 1);
    Block* const before = std::exchange(block_, fresh);  // a forked child that draws again has no block of the pool's
    data_ = fits ? given : fresh->data();
    size_t next = 0;
    for (Values& v : values) v.data = data_ + at[next++];
    for (size_t g = 0; g < lengths.size(); g++) {
      lengths[g] = {reinterpret_cast<int32_t*>(data_ + at[next]), reinterpret_cast<int64_t*>(data_ + at[next + 1]),
                    counts[g]};
      next += 2;
    }
    return before;
  }

 private:
  Block* block_ = nullptr;
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace torchreplay
