// What a queue's tables say: who holds items, and what keeps writers from going on. With the segment's mutex, or
// without: then each number is whole, and they are read one after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "absorb/queue_room.h"
#include "segment/run.h"

namespace torchreplay {

// Why writers have no room: of the oldest row that is needed.
struct OldestNeed {
  Need need = Need::kNone;  // kNone: they have room
  int64_t key = -1;
  int32_t pid = 0;  // who holds its item, or writes its episode, or the row itself; 0: nobody does, or it is not known
  bool has_pages = false;  // it is its pages that writers wait for
};

class QueueTables {
 public:
  QueueTables(const char* base, const Layout& layout) : base_(base), layout_(layout), header_(of<Header>(0)) {}

  // Rows of items that are to be drawn, held or unfinished, and those that nobody has looked at yet. O(capacity).
  uint64_t in_use() const {
    const uint64_t head = header_.head.load(std::memory_order_relaxed), absorbed = load(header_.absorbed);
    const uint64_t capacity = layout_.capacity, from = load(header_.needed_from);
    std::vector<uint32_t> marks(capacity);
    uint64_t unseen = 0;
    // The newest first: then most items go on into rows that are marked.
    for (uint64_t key = head, end = std::max(from, head > capacity ? head - capacity : 0); key-- > end;) {
      const uint64_t slot = key % capacity;
      if (!at_of(slot) || place1_of(slot) != key + 1)
        unseen += key >= absorbed;
      else if (is_needed(slot))
        mark_item(slot, marks);
    }
    const auto marked = static_cast<uint64_t>(std::ranges::count_if(marks, [](uint32_t m) { return m != 0; }));
    return std::min(capacity, unseen + marked);
  }

  uint64_t held() const { return load(header_.held); }
  uint64_t dropped() const { return load(header_.dropped_items); }

  std::vector<ItemHolder> holders() const {
    std::vector<ItemHolder> found;
    const uint32_t n = std::min<uint32_t>(load(header_.holders), kMaxParticipants);
    for (uint32_t i = 0; i < n; i++) {
      const ItemHolder h = holder(i);
      if (h.items) found.push_back(h);
    }
    return found;
  }

  OldestNeed oldest_need() const {
    if (!header_.sampler.makes_writers_wait()) return {};
    if (header_.head.load(std::memory_order_relaxed) < header_.ticket_limit.load(std::memory_order_relaxed))
      return pages_wanted() ? oldest_need_of_pages() : OldestNeed{};
    const uint64_t key = load(header_.needed_from), slot = key % layout_.capacity, place1 = place1_of(slot);
    if (place1 > key + 1) return {};  // it is overwritten by now
    if (place1 < key + 1 || !at_of(slot)) return {Need::kUnwritten, static_cast<int64_t>(key), pid_of_writing(slot)};
    return need_of_row(slot);
  }

  // Pages that a writer waits for; 0: none does, or it has room by now.
  uint64_t pages_wanted() const { return layout_.pages.are_there() ? header_.pages_wanted.load() : 0; }

  // Pages from the oldest one on that is needed.
  uint64_t pages_in_use() const {
    const uint64_t head = header_.page_head.load(std::memory_order_relaxed), from = load(header_.page_needed_from);
    return head - std::min(head, from);
  }

  // Of the rows that are there, the most pages of one; at least what a writer waits for. O(capacity).
  uint64_t longest_run(const SegmentMemory& m) const {
    uint64_t longest = pages_wanted();
    std::vector<uint32_t> lengths(layout_.pages.groups);
    for (uint64_t slot = 0; slot < layout_.capacity; slot++)
      if (Run run; at_of(slot) && read_run(m, slot, run, lengths.data())) longest = std::max(longest, run.pages);
    return longest;
  }

  // Items that wait to be drawn, also those that nobody has looked at yet, and milliseconds since the one came that
  // waits longest. Those that have become too old since the last look count.
  struct Depth {
    uint64_t to_draw = 0;
    std::optional<uint32_t> oldest_age;
  };

  // O(rows from the oldest that is needed on), and of those that nobody has looked at the steps of their items.
  Depth depth() const {
    const uint64_t absorbed = load(header_.absorbed), capacity = layout_.capacity;
    const uint64_t head = std::max(absorbed, header_.head.load(std::memory_order_acquire));
    const bool may_be_gone = !header_.sampler.makes_writers_wait();
    const uint32_t now = millis();
    Depth depth;
    const auto add = [&](uint64_t last) {
      depth.to_draw++;
      const uint32_t age = millis_since(load((&of<uint32_t>(layout_.arrivals))[last]), now);
      depth.oldest_age = std::max(depth.oldest_age.value_or(0), age);
    };
    uint64_t key = std::max(load(header_.needed_from), absorbed > capacity ? absorbed - capacity : 0);
    for (; key < absorbed; key++) {
      const uint64_t slot = key % capacity;
      if (leaf(slot) > 0 && (!may_be_gone || is_whole(slot))) add(slot);
    }
    if (header_.importer.load(std::memory_order_relaxed)) return depth;  // nothing that comes counts before its end
    const auto look = [&](uint64_t slot, uint64_t newest) {
      if (is_unseen(slot, newest)) each_completed_by(slot, [&] { add(slot); });
    };
    each_pending([&](uint64_t slot) {
      if (slot < absorbed) look(slot, absorbed - 1 - (absorbed - 1 - slot) % capacity);
    });
    for (key = std::max(absorbed, head > capacity ? head - capacity : 0); key < head; key++) look(key % capacity, key);
    return depth;
  }

 private:
  // Whether the row of that key + 1 is in the slot, and has its pages.
  bool is_there(uint64_t slot, uint64_t key1) const {
    const uint64_t word = word_of(slot);
    if (!slot_word::is_row(word) || slot_word::key1(word) != key1) return false;
    const Pages& pages = layout_.pages;
    if (!pages.are_there()) return true;
    const Field& run = layout_.fields[pages.run_field];
    const uint64_t run1 = load(of<uint64_t>(run.offset + slot * run.stride));
    return !run1 || run1 - 1 + pages.count >= header_.page_head.load(std::memory_order_relaxed);
  }

  // Whether the slot has a row that nobody has absorbed, and that whoever absorbs finds. `newest`: of its tickets.
  bool is_unseen(uint64_t slot, uint64_t newest) const {
    const uint64_t key1 = slot_word::key1(word_of(slot));
    const bool passed = std::max(load((&of<uint64_t>(layout_.kept))[slot]), key1) < newest + 1;
    return key1 <= newest + 1 && !passed && at_of(slot) != key1 && is_there(slot, key1);
  }

  // Whether an item that could be drawn at the last look has all its rows.
  bool is_whole(uint64_t anchor) const {
    std::optional<uint64_t> row = anchor;
    for (uint32_t k = 0; row && k <= layout_.view.span; k++, row = next(*row)) {
      if (!is_there(*row, at_of(*row))) return false;
      if (!layout_.view.across && k > 0 && meta(*row).link & kEnds) break;
    }
    row = prev(anchor);
    for (uint32_t k = 0; row && k < layout_.view.history; k++, row = prev(*row))
      if (!is_there(*row, at_of(*row))) return false;
    return true;
  }

  // Calls visit() for each item that the row completes, as Streams does, which has the rows' links: by what rows say
  // themselves.
  template <class Visit>
  void each_completed_by(uint64_t slot, const Visit& visit) const {
    const View& view = layout_.view;
    const auto add = [&](uint64_t anchor) {
      if (!(meta(anchor).link & kDiscarded)) visit();
    };
    if (!view.linked()) return add(slot);
    const RowMeta row = meta(slot);
    const bool ends = !view.across && (row.link & kEnds);
    const auto is_anchor = [&](uint64_t step) { return view.across || step % view.stride == 0; };
    if (!ends && !view.across && (row.step < view.span || !is_anchor(row.step - view.span))) return;
    const std::vector<uint64_t> path = rows_before(slot, uint64_t{view.span} + view.history);
    for (uint64_t k = ends ? view.min_steps : view.span; k <= std::min<uint64_t>(view.span, path.size()); k++) {
      const uint64_t frames = view.across ? 0 : std::min<uint64_t>(row.step - k, view.history);
      if (is_anchor(row.step - k) && path.size() >= k + frames) add(path[k - 1]);
    }
  }

  // Slots of the rows before one of the same stream, nearest first, as far as items reach; at most so many.
  std::vector<uint64_t> rows_before(uint64_t slot, uint64_t most) const {
    std::vector<uint64_t> path;
    for (RowMeta row = meta(slot); path.size() < std::min(most, layout_.capacity); row = meta(slot)) {
      const uint64_t key1 = row.link >> 16;
      if (!key1 || (!layout_.view.across && row.link & kFirst)) break;
      slot = (key1 - 1) % layout_.capacity;
      if (!is_there(slot, key1)) break;
      path.push_back(slot);
    }
    return path;
  }

  template <class Visit>
  void each_pending(const Visit& visit) const {
    if (load(header_.pending) == 0) return;
    for (uint64_t w = 0; w < (layout_.capacity + 63) / 64; w++)
      for (uint64_t bits = load((&of<uint64_t>(layout_.pending))[w]); bits; bits &= bits - 1)
        visit(w * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
  }

  template <class T>
  const T& of(uint64_t offset) const {
    return *reinterpret_cast<const T*>(base_ + offset);
  }
  template <class T>
  static T load(const T& from) {
    return __atomic_load_n(&from, __ATOMIC_RELAXED);
  }

  uint64_t at_of(uint64_t slot) const { return load((&of<uint64_t>(layout_.at))[slot]); }
  // As Places::place1().
  uint64_t place1_of(uint64_t slot) const {
    const uint64_t at = at_of(slot);
    const uint64_t word = word_of(slot), kept1 = load((&of<uint64_t>(layout_.kept))[slot]);
    if (!at && !slot_word::is_busy(word) && !slot_word::is_row(word)) return 0;
    return std::max(kept1, at ? at : slot_word::key1(word));
  }
  Claim claim(uint64_t slot) const { return {load((&of<uint64_t>(layout_.claims))[slot])}; }
  float leaf(uint64_t slot) const {
    return std::bit_cast<float>(load((&of<uint32_t>(layout_.tree + PriorityTree::kLeavesOffset))[slot]));
  }
  ItemHolder holder(uint32_t i) const {
    const ItemHolder& h = (&of<ItemHolder>(layout_.holders))[i];
    return {load(h.presence), load(h.pid), load(h.items), load(h.lost)};
  }
  std::optional<uint64_t> next(uint64_t slot) const { return linked(slot, &Links::next); }
  std::optional<uint64_t> prev(uint64_t slot) const { return linked(slot, &Links::prev); }
  std::optional<uint64_t> linked(uint64_t slot, std::atomic<uint32_t> Links::* side) const {
    if (!layout_.view.linked()) return {};
    const uint32_t slot1 = ((&of<Links>(layout_.links))[slot].*side).load(std::memory_order_relaxed);
    return slot1 && slot1 <= layout_.capacity ? std::optional<uint64_t>(slot1 - 1) : std::nullopt;
  }

  RowMeta meta(uint64_t slot) const {
    return of<RowHeader>(layout_.records + slot * layout_.record_stride).meta(layout_.view.linked());
  }

  OldestNeed need_of_row(uint64_t slot) const {
    const auto key = static_cast<int64_t>(at_of(slot)) - 1;
    std::optional<uint64_t> row = slot;
    for (uint32_t k = 0; row && k <= layout_.view.history; k++, row = next(*row))
      if (const OldestNeed need = need_of_item(*row, key); need.need != Need::kNone) return need;
    row = prev(slot);
    for (uint32_t k = 0; row && k < layout_.view.span; k++, row = prev(*row))
      if (const OldestNeed need = need_of_item(*row, key); need.need != Need::kNone) return need;
    return {Need::kUnfinished, key, pid_of_episode(slot)};
  }
  OldestNeed need_of_item(uint64_t anchor, int64_t key) const {
    if (leaf(anchor) > 0) return {Need::kToDraw, key, 0};
    if (const uint32_t holder = claim(anchor).holder()) return {Need::kHeld, key, pid_of_holder(holder)};
    return {};
  }

  // Of the row whose pages are the oldest that are needed, or of the run of one that is still to be written.
  OldestNeed oldest_need_of_pages() const {
    const Pages& pages = layout_.pages;
    const uint64_t from = load(header_.page_needed_from);
    const uint32_t owner1 = load((&of<uint32_t>(pages.owners))[from % pages.count]);
    OldestNeed found{Need::kUnwritten, -1, 0};
    if (owner1 && owner1 <= layout_.capacity && load((&of<uint64_t>(pages.runs))[owner1 - 1]) == from + 1)
      found = need_of_row(owner1 - 1);
    for (uint64_t id = 1, ids = header_.ids.load(); found.need == Need::kUnwritten && id <= ids; id++)
      if ((&of<RunInFlight>(pages.in_flight))[id].first1.load() == from + 1)
        found.pid = of<Participant>(layout_.participants + id * kParticipantBytes).pid.load();
    found.has_pages = true;
    return found;
  }

  bool is_needed(uint64_t anchor) const {
    return leaf(anchor) > 0 || claim(anchor).holder() || (claim(anchor).draws() == 0 && may_be_completed(anchor));
  }

  // As QueueRoom says of writers that live.
  bool may_be_completed(uint64_t anchor) const {
    const View& view = layout_.view;
    const RowMeta row = meta(anchor);
    if (!view.linked() || row.link & kDiscarded || (!view.across && row.step % view.stride)) return false;
    uint64_t last = anchor;
    for (uint32_t steps = 0; steps < view.span; steps++) {
      if (!view.across && meta(last).link & kEnds) return false;
      const std::optional<uint64_t> after = next(last);
      if (!after) return !claim(last).closed() && claim(last).writer();
      last = *after;
    }
    return false;
  }

  // Marks the rows of an item: with how many steps it has from there on, and one. What is marked with as many is so up
  // to its end.
  void mark_item(uint64_t anchor, std::vector<uint32_t>& marks) const {
    const View& view = layout_.view;
    std::optional<uint64_t> row = anchor;
    for (uint32_t left1 = view.span + 1; row && left1 > marks[*row]; left1--, row = next(*row)) marks[*row] = left1;
    row = prev(anchor);
    for (uint32_t k = 0; row && k < view.history; k++, row = prev(*row)) marks[*row] = std::max(marks[*row], 1u);
  }

  int32_t pid_of_holder(uint32_t presence) const {
    for (const ItemHolder& h : holders())
      if (h.presence == presence) return h.pid;
    return 0;
  }

  // The pid of the writer with that id, unless another has taken the id since the row of that key + 1 was written.
  int32_t pid_of_writer(uint64_t id, uint64_t key1) const {
    if (!id || id >= kMaxParticipants) return 0;
    const auto& writer = of<Participant>(layout_.participants + id * kParticipantBytes);
    return key1 > writer.since.load(std::memory_order_relaxed) ? writer.pid.load(std::memory_order_relaxed) : 0;
  }

  // Of the episode that the row is in: as far as the last look came who had the lock.
  int32_t pid_of_episode(uint64_t slot) const {
    const uint64_t last = load(header_.unfinished_last);
    if (last < layout_.capacity && at_of(last) == load(header_.unfinished_last_key1)) slot = last;
    return pid_of_writer(claim(slot).writer(), at_of(slot));
  }

  uint64_t word_of(uint64_t slot) const {
    return of<RowHeader>(layout_.records + slot * layout_.record_stride).word.load();
  }

  int32_t pid_of_writing(uint64_t slot) const {
    const uint64_t word = word_of(slot);
    return slot_word::is_busy(word) ? pid_of_writer(slot_word::writer(word), slot_word::key1(word)) : 0;
  }

  const char* base_;
  const Layout& layout_;
  const Header& header_;
};

}  // namespace torchreplay
