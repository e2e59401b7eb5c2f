// Draws from a queue by groups: items whose rows have the same value of one field. Nobody holds a part of a group.
#pragma once

#include <algorithm>
#include <vector>

#include "absorb/claims.h"
#include "draw/draw_rules.h"

namespace torchreplay {

// Runs under the segment's mutex. Members are in the order of their keys. With `size` of them a group is whole, and the
// next one begins a group of the same value. Groups come in the order of their last members.
class WholeGroups {
 public:
  explicit WholeGroups(SegmentMemory& m) : memory_(m), tree_(m.tree()), claims_(m) {}

  // Finds the groups of the items that can be drawn and have keys below `end`, and ends those that have waited too long
  // for too few members. O(capacity + items log items).
  void look(GroupDraw& rules, uint64_t end) {
    collect(rules, end);
    ready_.clear();
    lacking_.clear();
    std::vector<int64_t> late;
    for (size_t from = 0, to; from < members_.size(); from = to) {
      to = from + 1;
      while (to < members_.size() && to - from < static_cast<size_t>(rules.size) &&
             members_[to].id == members_[from].id)
        to++;
      sort_out(rules, {from, static_cast<int>(to - from), members_[to - 1].key1}, late);
    }
    std::ranges::sort(ready_, {}, &Group::last);
    drop(rules, late);
  }

  // Items missing for a batch, at the least.
  uint64_t missing(const GroupDraw& rules) {
    const size_t wanted = static_cast<size_t>(rules.last ? 1 : rules.groups);
    if (ready_.size() >= wanted) return 0;
    const size_t groups = wanted - ready_.size(), begun = std::min(groups, lacking_.size());
    std::ranges::partial_sort(lacking_, lacking_.begin() + static_cast<ptrdiff_t>(begun));
    uint64_t n = (groups - begun) * static_cast<uint64_t>(rules.size);
    for (size_t i = 0; i < begun; i++) n += static_cast<uint64_t>(lacking_[i]);
    return n;
  }

  // The slots of the groups of a batch, one group after the other. Says in `rules` how many members each has.
  std::vector<int64_t> take(GroupDraw& rules) {
    std::vector<int64_t> slots;
    rules.sizes.clear();
    for (size_t g = 0; g < std::min(ready_.size(), static_cast<size_t>(rules.groups)); g++) {
      rules.sizes.push_back(ready_[g].count);
      for (int i = 0; i < ready_[g].count; i++)
        slots.push_back(static_cast<int64_t>(members_[ready_[g].first + static_cast<size_t>(i)].slot));
    }
    return slots;
  }

 private:
  struct Member {
    int64_t id;
    uint64_t key1, slot;
    auto operator<=>(const Member&) const = default;
  };
  struct Group {
    size_t first;  // of its members
    int count;
    uint64_t last;  // key + 1 of the last one
  };

  void collect(const GroupDraw& rules, uint64_t end) {
    const Field& field = memory_.layout().fields[rules.field];
    members_.clear();
    auto left = static_cast<uint64_t>(tree_.count());
    for (uint64_t slot = 0; left && slot < memory_.capacity(); slot++) {
      if (!(tree_.leaf(static_cast<int64_t>(slot)) > 0)) continue;
      left--;
      if (memory_.at(slot) > end) continue;
      Member member{0, memory_.at(slot), slot};
      copy_value(&member.id, memory_.value(field, slot), sizeof member.id);
      members_.push_back(member);
    }
    std::ranges::sort(members_);
  }

  // Whether a group comes next, waits, or is late: then its members' slots are added to `late`.
  void sort_out(GroupDraw& rules, const Group& group, std::vector<int64_t>& late) {
    const bool enough = rules.min_size && group.count >= rules.min_size, is_late = waited_long(rules, group);
    if (group.count == rules.size || (enough && (is_late || rules.last))) return ready_.push_back(group);
    if (!is_late) return lacking_.push_back(rules.size - group.count);
    rules.dropped++;
    for (int i = 0; i < group.count; i++)
      late.push_back(static_cast<int64_t>(members_[group.first + static_cast<size_t>(i)].slot));
  }

  bool waited_long(const GroupDraw& rules, const Group& group) const {
    if (rules.timeout_ms < 0) return false;
    for (int i = 0; i < group.count; i++)
      if (claims_.age(members_[group.first + static_cast<size_t>(i)].slot) >= rules.timeout_ms) return true;
    return false;
  }

  void drop(GroupDraw& rules, std::vector<int64_t>& late) {
    if (late.empty()) return;
    std::ranges::sort(late);
    claims_.drop(late, memory_.presence());
    rules.dropped_items += late.size();
  }

  SegmentMemory& memory_;
  PriorityTree tree_;
  Claims claims_;
  std::vector<Member> members_;  // of equal values together, in the order of their keys
  std::vector<Group> ready_;
  std::vector<int> lacking_;  // members that each of the others lacks
};

}  // namespace torchreplay
