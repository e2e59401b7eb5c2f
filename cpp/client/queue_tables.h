// What a queue's tables say: who holds items, and what keeps writers from going on. With the segment's mutex, or
// without: then each number is whole, and they are read one after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "absorb/queue_room.h"

namespace torchreplay {

// Why writers have no room: of the oldest row that is needed.
struct OldestNeed {
  Need need = Need::kNone;  // kNone: they have room
  int64_t key = -1;
  int32_t pid = 0;  // who holds its item, or writes its episode, or the row itself; 0: nobody does, or it is not known
};

class QueueTables {
 public:
  QueueTables(const char* base, const Layout& layout) : base_(base), layout_(layout), header_(of<Header>(0)) {}

  // Rows from the oldest that is needed to the newest.
  uint64_t used() const {
    const uint64_t head = header_.head.load(std::memory_order_relaxed), from = load(header_.needed_from);
    return head > from ? std::min(layout_.capacity, head - from) : 0;
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
    if (!header_.sampler.makes_writers_wait() ||
        header_.head.load(std::memory_order_relaxed) < header_.ticket_limit.load(std::memory_order_relaxed))
      return {};
    const uint64_t key = load(header_.needed_from), slot = key % layout_.capacity, place1 = place1_of(slot);
    if (place1 > key + 1) return {};  // it is overwritten by now
    if (place1 < key + 1 || !at_of(slot)) return {Need::kUnwritten, static_cast<int64_t>(key), pid_of_writing(slot)};
    const auto signed_key = static_cast<int64_t>(at_of(slot)) - 1;
    std::optional<uint64_t> row = slot;
    for (uint32_t k = 0; row && k <= layout_.view.history; k++, row = next(*row)) {
      if (leaf(*row) > 0) return {Need::kToDraw, signed_key, 0};
      if (const uint32_t holder = claim(*row).holder()) return {Need::kHeld, signed_key, pid_of_holder(holder)};
    }
    return {Need::kUnfinished, signed_key, pid_of_episode(slot)};
  }

  // Milliseconds since the item came that waits longest to be drawn. O(rows from the oldest that is needed on).
  std::optional<uint32_t> oldest_age() const {
    const uint64_t absorbed = load(header_.absorbed), capacity = layout_.capacity;
    uint64_t key = std::max(load(header_.needed_from), absorbed > capacity ? absorbed - capacity : 0);
    const uint32_t now = Claims::millis();
    std::optional<uint32_t> oldest;
    for (; key < absorbed; key++)
      if (leaf(key % capacity) > 0) {
        const uint32_t age = now - load((&of<uint32_t>(layout_.arrivals))[key % capacity]);
        oldest = std::max(oldest.value_or(0), age);
      }
    return oldest;
  }

 private:
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
    return {load(h.presence), load(h.pid), load(h.items)};
  }
  std::optional<uint64_t> next(uint64_t slot) const {
    if (!layout_.view.linked()) return {};
    const uint32_t next1 = (&of<Links>(layout_.links))[slot].next.load(std::memory_order_relaxed);
    return next1 ? std::optional<uint64_t>(next1 - 1) : std::nullopt;
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
