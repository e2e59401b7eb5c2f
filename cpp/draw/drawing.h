// What a draw works on: the items of its batch, which of them are still to be drawn or copied, and its random words.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <ranges>
#include <utility>
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

  // Numbers of the items that are not in todo.
  std::vector<int> done() const {
    std::vector<int> numbers;
    std::ranges::set_difference(std::views::iota(0, static_cast<int>(items.size())), todo, std::back_inserter(numbers));
    return numbers;
  }

  // The keys of the items of these numbers.
  std::vector<int64_t> keys_of(const std::vector<int>& numbers) const {
    std::vector<int64_t> keys(numbers.size());
    std::ranges::transform(numbers, keys.begin(), [&](int i) { return items[i].key(); });
    return keys;
  }
  // And those of all from the `first` on.
  std::vector<int64_t> keys_from(size_t first) const {
    std::vector<int64_t> keys(items.size() - first);
    std::transform(items.begin() + static_cast<ptrdiff_t>(first), items.end(), keys.begin(),
                   std::mem_fn(&DrawnItem::key));
    return keys;
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

  // Whether the items come in an order drawn at random. A batch that ends where its budget does would hold those in the
  // last slots less often. Of `n` strata the k-th item is of number stratum(k).
  bool shuffles = false;
  void shuffle_strata(uint64_t seed, uint64_t stream, uint64_t step, size_t n) {
    random_.resize(n);
    philox_fill(seed, stream | kOrders, step, random_.data(), static_cast<int>(n));
    stratum_ = numbers_below(n);
    __extension__ using Wide = unsigned __int128;
    for (size_t k = n; k > 1; k--)  // Fisher and Yates 1938
      std::swap(stratum_[k - 1], stratum_[static_cast<size_t>(Wide{random_[k - 1]} * k >> 64)]);
  }
  void shuffle_nothing() { stratum_.clear(); }
  uint64_t stratum(size_t k) const { return stratum_.empty() ? k : static_cast<uint64_t>(stratum_[k]); }

  // Finds the leaves that hold the targets, `beside` as for PriorityTree::find().
  void find(const PriorityTree& tree, const uint64_t* beside) {
    index.resize(target.size());
    leaf.resize(target.size());
    tree.find(target.data(), static_cast<int>(target.size()), index.data(), leaf.data(), beside);
  }

 private:
  // Marks the stream of random words that items use for themselves.
  static constexpr uint64_t kChances = uint64_t{1} << 47;  // rounds lie below
  // And that of the words that shuffle strata.
  static constexpr uint64_t kOrders = uint64_t{1} << 45;

  const ItemPlan* plan_;
  std::vector<uint64_t> chance_;
  std::vector<int> stratum_;      // empty: as they are
  std::vector<uint64_t> random_;  // to shuffle them
};

}  // namespace torchreplay
