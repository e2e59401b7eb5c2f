// Draws from a queue: the oldest items that nobody has. The process that draws holds them from then on.
#pragma once

#include <algorithm>
#include <vector>

#include "absorb/admission.h"
#include "absorb/drawn_items.h"
#include "absorb/queue_room.h"
#include "draw/draw_rules.h"
#include "draw/drawing.h"
#include "draw/whole_groups.h"

namespace torchreplay {

// Runs under the segment's mutex. Leaves are 1, and the tree finds an item by its rank. Those of items that were kept
// for another turn are tiny: these come first, by their keys.
class OldestItems {
 public:
  OldestItems(SegmentMemory& m, Drawing& drawing)
      : memory_(m), header_(m.header()), tree_(m.tree()), drawing_(drawing), claims_(m), groups_(m) {}

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
  bool lacks_items(int n, const DrawRules& rules) { return missing(n, rules) > 0; }

  // Finds the groups that there are, where whole groups are drawn.
  void look(const DrawRules& rules) {
    if (rules.groups) groups_.look(*rules.groups, end());
  }

  // Items that can be drawn. With a window those do not count that are too far ahead of one that is not complete.
  uint64_t available() const {
    const auto all = static_cast<uint64_t>(tree_.count());
    if (!header_.sampler.window || !all) return all;
    const uint64_t end = this->end();
    if (end >= header_.absorbed) return all;
    const Ranks ranks(tree_);
    const uint64_t from = ranks.before(oldest_slot(memory_)), to = ranks.before(memory_.slot_of(end));
    return ranks.tiny() + (to >= from ? to - from : ranks.count() - from + to);
  }

  // Items missing for that.
  uint64_t missing(int n, const DrawRules& rules) {
    if (rules.groups) return groups_.missing(*rules.groups);
    const uint64_t there = drawing_.items.size() + available(), wanted = least(n, rules);
    return wanted > there ? wanted - there : 0;
  }

  // Leaves out of the batch what could not be copied, and is gone: nobody got that. Groups are drawn anew.
  void drop_failed(const DrawRules& rules) {
    const uint32_t own = memory_.presence();
    const auto is_mine = [&](const DrawnItem& item) {
      const Claim claim = claims_.of(item.slot);
      return memory_.at(item.slot) == item.key1 && claim.holder() == own && !claim.is_over();
    };
    const auto first =
        rules.groups ? drawing_.items.begin() : std::ranges::stable_partition(drawing_.items, is_mine).begin();
    give_back(drawing_.keys_from(static_cast<size_t>(first - drawing_.items.begin())));
    drawing_.items.erase(first, drawing_.items.end());
  }

  // Takes the oldest into the batch, up to `n` in all. Then all of it is to be copied.
  void find(int n, const DrawRules& rules) {
    const size_t first = drawing_.items.size();
    // What stands in a group was looked at by now: nothing may be absorbed in between.
    const uint64_t wanted = static_cast<uint64_t>(n) - first,
                   many = rules.groups ? wanted : std::min(wanted, available());
    if (many) {
      if (rules.groups)
        drawing_.index = groups_.take(*rules.groups);
      else
        find_in_order(many);
      if (Admission::is_kept(header_)) Admission(memory_).begin();
      DrawnItems drawn(memory_);
      for (const int64_t index : drawing_.index) {
        drawn.mark(static_cast<uint64_t>(index));
        drawing_.items.push_back(item_in(index));
      }
      std::ranges::sort(drawing_.index);
      claims_.take(drawing_.index.data(), static_cast<int>(drawing_.index.size()), memory_.presence());
    }
    drawing_.todo = numbers_below(drawing_.items.size());
  }

  // Those of the batch and the oldest that can be drawn, up to `n` in all, as find() would have them. None is taken.
  std::vector<DrawnItem> look_ahead(int n) {
    std::vector<DrawnItem> items = drawing_.items;
    if (const uint64_t many = std::min(static_cast<uint64_t>(n) - items.size(), available())) {
      find_in_order(many);
      std::ranges::transform(drawing_.index, std::back_inserter(items), [&](int64_t index) { return item_in(index); });
    }
    return items;
  }

  // They are in their places again.
  void give_back(const std::vector<int64_t>& keys) { claims_.release(keys, memory_.presence()); }

  // The slot of the oldest item that can be drawn; it is there.
  static uint64_t oldest(SegmentMemory& m, const PriorityTree& tree) {
    if (const auto kept = kept_items(m, tree, 1); !kept.empty()) return static_cast<uint64_t>(kept.front());
    const Ranks ranks(tree);
    const uint64_t before = ranks.before(oldest_slot(m)), target = ranks.target(before < ranks.count() ? before : 0);
    int64_t slot;
    float leaf;
    tree.find(&target, 1, &slot, &leaf);
    return static_cast<uint64_t>(slot);
  }

 private:
  // Items with this key and later ones are too far ahead.
  uint64_t end() const {
    return header_.sampler.window ? QueueRoom(memory_).settled_below() + header_.sampler.window : kNever;
  }

  static uint64_t least(int n, const DrawRules& rules) {
    return static_cast<uint64_t>(rules.at_least ? rules.at_least : n);
  }

  // Where the oldest row lies that was not kept: from there on slots of such rows are in the order of their keys.
  static uint64_t oldest_slot(const SegmentMemory& m) { return m.slot_of(m.header().absorbed); }

  // Slots of items that were kept, of the lowest keys, ascending; at most so many. O(capacity), but O(1) if there are
  // none.
  static std::vector<int64_t> kept_items(const SegmentMemory& m, const PriorityTree& tree, uint64_t most) {
    std::vector<int64_t> slots;
    if (const uint64_t tiny = Ranks(tree).tiny()) {
      slots.reserve(tiny);
      for (uint64_t slot = 0; slot < m.capacity(); slot++)
        if (tree.leaf(static_cast<int64_t>(slot)) == Places::kKept) slots.push_back(static_cast<int64_t>(slot));
      std::ranges::sort(slots, {}, [&](int64_t slot) { return m.at(static_cast<uint64_t>(slot)); });
      if (slots.size() > most) slots.resize(most);
    }
    return slots;
  }

  DrawnItem item_in(int64_t index) const {
    const auto slot = static_cast<uint64_t>(index);
    return {slot, memory_.at(slot), 1, 1, 1, 1, 0};
  }

  // Fills drawing.index with the slots of the oldest `n`; so many can be drawn.
  void find_in_order(uint64_t n) {
    const std::vector<int64_t> kept = kept_items(memory_, tree_, n);
    find_by_rank(n - kept.size());
    drawing_.index.insert(drawing_.index.begin(), kept.begin(), kept.end());
  }

  // The same of those that were not kept.
  void find_by_rank(uint64_t n) {
    const Ranks ranks(tree_);
    drawing_.target.resize(n);
    if (n == 0) return drawing_.index.clear();
    const uint64_t before = ranks.before(oldest_slot(memory_)), all = ranks.count();
    for (uint64_t k = 0; k < n; k++)
      drawing_.target[k] = ranks.target(before + k < all ? before + k : before + k - all);
    drawing_.find(tree_, &memory_.at(0));
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  Drawing& drawing_;
  Claims claims_;
  WholeGroups groups_;
};

}  // namespace torchreplay
