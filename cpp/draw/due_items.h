// Draws without replacement: which items a batch takes of those that are due in an epoch.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "absorb/draw_counts.h"
#include "absorb/drawn_items.h"
#include "absorb/epochs.h"
#include "draw/draw_rules.h"
#include "draw/drawing.h"

namespace torchreplay {

// Draws a batch's items from those that are due, and begins epochs where its rules allow it. Runs under the segment's
// mutex.
class DueItems {
 public:
  DueItems(SegmentMemory& m, Drawing& drawing) : memory_(m), drawing_(drawing), epochs_(m), counts_(m) {}

  // The epoch that the last batch was of, by number.
  uint64_t epoch() const { return epoch_; }

  // Whether the last epoch has nothing left to draw, or the items no draws. An empty buffer may still get its first,
  // and so may one that was cleared.
  bool is_over(const DrawRules& rules) const {
    if (rules.last_epoch == kNever) return false;
    const Header& h = memory_.header();
    if (DrawCounts::are_kept(h) && h.inserted > h.limiter().cleared && memory_.tree().count() == 0) return true;
    if (epochs_.ended() < rules.last_epoch) return false;
    return epochs_.ended() > rules.last_epoch || (epochs_.due() == 0 && memory_.tree().count() > 0);
  }

  // How many items a draw of `n` can have.
  int most_of(int n, const DrawRules& rules) const {
    if (rules.last_epoch == kNever) return n;
    const uint64_t due = epochs_.due(), there = due ? due : static_cast<uint64_t>(memory_.tree().count());
    return there ? static_cast<int>(std::min<uint64_t>(n, there)) : n;
  }

  // Draws the items of drawing.todo. Where fewer are due than it needs and the rules let no other epoch begin, the
  // batch becomes shorter. Then all of it is to be copied.
  Draw find(int n, const DrawName& name, uint32_t round, const DrawRules& rules) {
    // What a budget leaves out of a batch is still due. So its batches end with epochs, too.
    const bool bounded = rules.last_epoch != kNever || drawing_.shuffles;
    const auto left = [&] { return epochs_.ended() > rules.last_epoch ? 0 : epochs_.due(); };
    if (round) give_back(drawing_.keys_of(drawing_.todo));  // of what could not be copied, what is there is due
    fresh_ = drawing_.todo;
    if (left() < fresh_.size()) {
      const bool empty = fresh_.size() == drawing_.items.size();  // no item of it is there yet
      if (!bounded && !rules.may_begin_epoch && empty) return Draw::kEpochEnds;
      if (bounded && empty && left() == 0) {
        if (epochs_.ended() >= rules.last_epoch) return Draw::kEpochOver;
        if (!rules.may_begin_epoch) return Draw::kEpochEnds;
        epochs_.begin();
        drawing_.begin(static_cast<size_t>(n));
        drawing_.fill_random(name, round);
        fresh_ = drawing_.todo;
      }
      if (bounded && left() < fresh_.size()) shorten(left());
    }
    uint64_t turn;
    philox_fill(name.seed, name.stream | uint64_t{round} << 32 | kTurns, name.step, &turn, 1);
    early_.clear();
    for (size_t from = 0; from < fresh_.size();) {
      if (epochs_.due() == 0 && early_.empty()) begin_within(from);
      if (epochs_.due() == 0) put_off_no_longer();
      const size_t many = std::min(fresh_.size() - from, static_cast<size_t>(epochs_.due()));
      take(from, many, turn);
      from += many;
    }
    put_off_no_longer();
    if (!fresh_.empty()) epoch_ = epochs_.ended();
    return Draw::kDone;
  }

  // Items of the epoch of the last batch are due again. The lock is held.
  void give_back(const std::vector<int64_t>& keys) { epochs_.give_back_keys(epoch_, keys); }

 private:
  // Marks the stream of random words that turns the strata.
  static constexpr uint64_t kTurns = uint64_t{1} << 46;

  // Only so many of fresh_ can be drawn: the others leave the batch.
  void shorten(uint64_t most) {
    if (fresh_.size() == drawing_.items.size()) {
      drawing_.begin(most);
      fresh_ = drawing_.todo;
      return;
    }
    std::vector<DrawnItem>& items = drawing_.items;
    size_t kept = 0, next = 0;
    std::vector<int> drawn;
    for (size_t i = 0; i < items.size(); i++) {
      const bool failed = next < fresh_.size() && fresh_[next] == static_cast<int>(i);
      if (failed && next++ >= most) continue;
      if (failed) drawn.push_back(static_cast<int>(kept));
      items[kept++] = items[i];
    }
    items.resize(kept);
    fresh_ = std::move(drawn);
    drawing_.todo = numbers_below(kept);
  }

  // Begins an epoch for a batch that the one before has not filled: its items come again only after all others.
  void begin_within(size_t drawn) {
    epochs_.begin();
    early_.clear();
    size_t next = 0;
    for (size_t i = 0; i < drawing_.items.size(); i++) {
      const bool fresh = next < fresh_.size() && fresh_[next] == static_cast<int>(i);
      if (fresh && next++ >= drawn) continue;
      const DrawnItem& item = drawing_.items[i];
      const auto slot = static_cast<int64_t>(item.slot);
      if (memory_.at(item.slot) == item.key1 && memory_.tree().leaf(slot) > 0) early_.push_back(slot);
    }
    std::ranges::sort(early_);
    early_.erase(std::ranges::unique(early_).begin(), early_.end());
    epochs_.take(early_.data(), static_cast<int>(early_.size()));
  }

  void put_off_no_longer() {
    epochs_.give_back(early_.data(), static_cast<int>(early_.size()));
    early_.clear();
  }

  // Draws `many` distinct due items for fresh_, from its place `from` on: one of each stratum of their ranks. The
  // strata are turned by `turn`, so that every due item is as likely as any other.
  void take(size_t from, size_t many, uint64_t turn) {
    __extension__ using Wide = unsigned __int128;
    const PriorityTree tree = memory_.tree();
    const uint64_t due = epochs_.due(), first = static_cast<uint64_t>(Wide{turn} * due >> 64);
    const Strata strata(due, many);
    if (drawing_.shuffles) drawing_.shuffle_strata(turn, 0, from, many);
    drawing_.target.resize(many);
    for (size_t k = 0; k < many; k++) {
      const uint64_t rank = first + strata.target(drawing_.stratum(k), drawing_.random[from + k]);
      drawing_.target[k] = epochs_.target(rank < due ? rank : rank - due);
    }
    drawing_.find(tree, &memory_.at(0));
    const auto items = static_cast<uint64_t>(tree.count());
    DrawnItems drawn(memory_);
    for (size_t k = 0; k < many; k++) {
      const auto slot = static_cast<uint64_t>(drawing_.index[k]);
      drawn.mark(slot);
      drawing_.items[fresh_[from + k]] = {slot, memory_.at(slot), 1, items, 1, tree.count(), drawing_.chance(from + k)};
    }
    epochs_.take(drawing_.index.data(), static_cast<int>(many));
    if (DrawCounts::are_kept(memory_.header())) counts_.take(drawing_.index);  // one draw is left of each that is due
  }

  SegmentMemory& memory_;
  Drawing& drawing_;
  Epochs epochs_;
  DrawCounts counts_;
  uint64_t epoch_ = 0;
  std::vector<int> fresh_;      // items that find() draws
  std::vector<int64_t> early_;  // slots of those of the epoch that ended in it
};

}  // namespace torchreplay
