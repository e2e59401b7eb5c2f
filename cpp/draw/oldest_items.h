// Draws from a queue: the oldest items that nobody has. The process that draws holds them from then on.
#pragma once

#include <algorithm>
#include <vector>

#include "absorb/drawn_items.h"
#include "absorb/queue_room.h"
#include "draw/draw_rules.h"
#include "draw/drawing.h"

namespace torchreplay {

// Runs under the segment's mutex. All leaves are 1 or 0. So the sum of those before a slot is the rank of its item, and
// the tree finds an item by its rank.
class OldestItems {
 public:
  OldestItems(SegmentMemory& m, Drawing& drawing)
      : memory_(m), header_(m.header()), tree_(m.tree()), drawing_(drawing), claims_(m) {}

  // Ends what came to its end meanwhile: what the caller is done with, what this process could not give back when it
  // wanted to, and what the dead held.
  void settle(const DrawRules& rules) {
    if (rules.done && !rules.done->empty()) {
      claims_.commit(*rules.done, memory_.presence());
      rules.done->clear();
    }
    claims_.release(memory_.owed().take(), memory_.presence());
    claims_.release_from_the_dead();
  }

  // Whether a batch of `n` would be too short, with the items that it has.
  bool lacks_items(int n, const DrawRules& rules) const { return missing(n, rules) > 0; }

  // Items that can be drawn. With a window those do not count that are too far ahead of one that is not complete.
  uint64_t available() const {
    const auto all = static_cast<uint64_t>(tree_.count());
    if (!header_.sampler.window || !all) return all;
    const uint64_t end = QueueRoom(memory_).settled_below() + header_.sampler.window;
    if (end >= header_.absorbed) return all;
    const uint64_t from = tree_.sum_before(static_cast<int64_t>(oldest_slot()));
    const uint64_t to = tree_.sum_before(static_cast<int64_t>(memory_.slot_of(end)));
    return (to >= from ? to - from : tree_.total() - from + to) / tree_.quantize(1);
  }

  // Items missing for that.
  uint64_t missing(int n, const DrawRules& rules) const {
    const uint64_t there = drawing_.items.size() + available(), wanted = least(n, rules);
    return wanted > there ? wanted - there : 0;
  }

  // Leaves out of the batch what could not be copied, and is gone.
  void drop_failed() {
    const uint32_t own = memory_.presence();
    std::erase_if(drawing_.items, [&](const DrawnItem& item) {
      const Claim claim = claims_.of(item.slot);
      return memory_.at(item.slot) != item.key1 || claim.holder() != own || claim.draws() == Claim::kMostDraws;
    });
  }

  // Takes the oldest into the batch, up to `n` in all. Then all of it is to be copied.
  void find(int n) {
    const size_t first = drawing_.items.size();
    const uint64_t many = std::min(static_cast<uint64_t>(n) - first, available());
    if (many) {
      const uint64_t unit = tree_.quantize(1), total = tree_.total();
      const uint64_t before = tree_.sum_before(static_cast<int64_t>(oldest_slot()));
      drawing_.target.resize(many);
      for (uint64_t rank = 0; rank < many; rank++) {
        const uint64_t target = before + rank * unit;
        drawing_.target[rank] = target < total ? target : target - total;
      }
      drawing_.find(tree_, &memory_.at(0));
      DrawnItems drawn(memory_);
      for (const int64_t index : drawing_.index) {
        const auto slot = static_cast<uint64_t>(index);
        drawn.mark(slot);
        drawing_.items.push_back({slot, memory_.at(slot), 1, 1, 1, 1, 0});
      }
      take();
    }
    drawing_.todo = numbers_below(drawing_.items.size());
  }

  // They are in their places again.
  void give_back(const std::vector<int64_t>& keys) { claims_.release(keys, memory_.presence()); }

 private:
  static uint64_t least(int n, const DrawRules& rules) {
    return static_cast<uint64_t>(rules.at_least ? rules.at_least : n);
  }

  // Where the oldest row lies that the ring can hold: from there on slots are in the order of their keys.
  uint64_t oldest_slot() const { return memory_.slot_of(header_.absorbed); }

  // Slots ascend from the oldest to the end of the ring, and again from its start.
  void take() {
    const std::vector<int64_t>& slots = drawing_.index;
    const auto start = std::ranges::is_sorted_until(slots);
    const auto first = static_cast<int>(start - slots.begin());
    claims_.take(slots.data(), first, memory_.presence());
    claims_.take(slots.data() + first, static_cast<int>(slots.size()) - first, memory_.presence());
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  Drawing& drawing_;
  Claims claims_;
};

}  // namespace torchreplay
