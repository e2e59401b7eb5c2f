// What a draw works on: the items of its batch, which of them are still to be drawn or copied, and its random words.
#pragma once

#include <limits>
#include <numeric>
#include <vector>

#include "draw/item_plan.h"
#include "draw/row_gather.h"
#include "draw/strata.h"

namespace torchreplay {

// Names a draw: the same (seed, stream, step) and the same contents of the buffer give the same batch.
struct DrawName {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint64_t step = 0;
  bool operator==(const DrawName&) const = default;
};

// The numbers below `n`.
inline std::vector<int> numbers_below(size_t n) {
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Its vectors keep their memory from draw to draw.
class Drawing {
 public:
  // `plan`: what a batch consists of; nullptr for one of single rows.
  explicit Drawing(const ItemPlan* plan) : plan_(plan) {}

  std::vector<DrawnItem> items;
  std::vector<int> todo;         // numbers of items, ascending
  std::vector<uint64_t> random;  // a word for each of todo

  // What the tree is asked for, and what it says.
  std::vector<uint64_t> target;
  std::vector<int64_t> index;
  std::vector<float> leaf;

  // A batch of `n` items, all to be drawn.
  void begin(size_t n) {
    items.resize(n);
    todo = numbers_below(n);
  }

  // Words for all of todo.
  void fill_random(const DrawName& name, uint32_t round) {
    random.resize(todo.size());
    philox_fill(name.seed, name.stream | uint64_t{round} << 32, name.step, random.data(),
                static_cast<int>(todo.size()));
    take_chances(name, round, static_cast<int>(todo.size()));
  }

  // Random words for `count` items' own use, where they have one.
  void take_chances(const DrawName& name, uint32_t round, int count) {
    if (!plan_ || !plan_->takes_chances()) return;
    chance_.resize(count);
    philox_fill(name.seed, name.stream | uint64_t{round} << 32 | kChances, name.step, chance_.data(), count);
  }
  void take_no_chances() { chance_.clear(); }
  // That of the k-th; `none` where they have none.
  uint64_t chance(size_t k, uint64_t none = 0) const { return chance_.empty() ? none : chance_[k]; }

  // Finds the leaves that hold the targets, `beside` as for PriorityTree::find().
  void find(const PriorityTree& tree, const uint64_t* beside) {
    index.resize(target.size());
    leaf.resize(target.size());
    tree.find(target.data(), static_cast<int>(target.size()), index.data(), leaf.data(), beside);
  }

 private:
  // Marks the stream of random words that items use for themselves.
  static constexpr uint64_t kChances = uint64_t{1} << 47;  // rounds lie below

  const ItemPlan* plan_;
  std::vector<uint64_t> chance_;
};

}  // namespace torchreplay
