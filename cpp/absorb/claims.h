// Who holds which items of a queue, and how often each was handed out. Runs under the segment's mutex.
#pragma once

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "absorb/admission.h"
#include "absorb/dirty_scope.h"
#include "absorb/item_versions.h"
#include "absorb/places.h"
#include "segment/row_facts.h"
#include "segment/segment_memory.h"
#include "system/clock.h"

namespace torchreplay {

// What is known of the row in a slot, in one word: each change is one store.
struct Claim {
  static constexpr uint64_t kMostDraws = 0xffff, kLost = 0xfffe;
  static constexpr uint64_t kEnding = uint64_t{1} << 30;

  uint64_t word = 0;  // holder << 32 | closed << 31 | ending << 30 | writer << 16 | draws

  // Of a row whose word is that. Who wrote it is not known any more when it was rewritten or loaded: 0.
  static Claim of_row(uint64_t row) {
    const uint64_t writer = slot_word::writer(row);
    return {writer < kMaxParticipants ? writer << 16 : 0};
  }

  // The presence of the process that has its item; 0: nobody has.
  uint32_t holder() const { return static_cast<uint32_t>(word >> 32); }
  // That are done. kMostDraws: there will be none. Of an item that is held: kLost, if it lacks a row.
  uint64_t draws() const { return word & kMostDraws; }
  uint64_t writer() const { return word >> 16 & 0x3fff; }
  bool closed() const { return word >> 31 & 1; }  // its stream does not go on after it
  bool ending() const { return word & kEnding; }  // its holder is done with it, if it is the one that the header names

  bool is_untouched() const { return holder() == 0 && draws() == 0; }
  // It was whole when its holder got it. It is dropped, unless that one commits it.
  bool is_lost() const { return holder() != 0 && draws() == kLost; }
  // Nobody gets it again, whatever its holder does.
  bool is_over() const { return draws() == kMostDraws || is_lost(); }

  Claim held_by(uint32_t presence) const { return {(word & 0xffffffff) | uint64_t{presence} << 32}; }
  Claim free() const { return {word & 0xffffffff & ~kEnding}; }
  Claim with_draws(uint64_t n) const { return {(word & ~kMostDraws) | n}; }
  Claim closing() const { return {word | uint64_t{1} << 31}; }
  Claim with_ending(bool is) const { return {is ? word | kEnding : word & ~kEnding}; }
};
static_assert(kMaxParticipants <= 1 << 14);

// A process that holds items. An entry with none, of which it has lost none, is free.
struct ItemHolder {
  uint32_t presence;
  int32_t pid;
  uint64_t items;  // that are there
  uint64_t lost;   // whose rows have gone: which these are it knows itself

  bool is_free() const { return items == 0 && lost == 0; }
};
static_assert(sizeof(ItemHolder) == kHolderBytes);

// An item that somebody holds, or that was handed out as often as it may be, has a leaf of 0, as one that is not
// complete has. A holder's death is seen by its presence, whose lock comes free. Then its items are in their places
// again. Those that lack a row by then are dropped, and count so once. Keys that a process commits or releases, and
// that are not there, are taken for such.
class Claims {
 public:
  explicit Claims(SegmentMemory& m)
      : memory_(m),
        header_(m.header()),
        tree_(m.tree()),
        places_(m),
        versions_(m),
        words_(m.claims()),
        holders_(holders_of(m)) {}

  static bool are_kept(const Header& h) { return h.sampler.queue != 0; }

  Claim of(uint64_t slot) const { return {words_[slot]}; }

  // For those who absorb rows. Their changes of leaves, and what follows from them, are their own.

  // A row is there, whose word is that.
  void begin(uint64_t slot, uint64_t row) { words_[slot] = Claim::of_row(row).word; }

  // Its item, which is to be drawn, was so often.
  void set_draws(uint64_t slot, uint64_t n) { words_[slot] = of(slot).with_draws(n).word; }

  // The item anchored there comes now.
  void arrive(uint64_t slot) { note_arrival(slot, millis()); }
  // It came with the row in the slot `last`, which completes it.
  void arrive_with(uint64_t slot, uint64_t last) {
    if (slot != last) note_arrival(slot, __atomic_load_n(&memory_.arrivals()[last], __ATOMIC_RELAXED));
  }

  // The stream does not go on after the row.
  void close_stream(uint64_t slot) { words_[slot] = of(slot).closing().word; }
  // The same of rows with these keys, as far as they are there.
  void close_streams(const std::vector<int64_t>& last_keys) {
    for (const int64_t key : last_keys)
      if (is_there(key)) close_stream(memory_.slot_of(static_cast<uint64_t>(key)));
  }

  // The item anchored there lacks a row from now on: who holds it may go on, and nobody gets it again. `dropped`: it
  // is, unless that one commits it. Nobody drops what is cleared.
  void end_item(uint64_t slot, bool dropped = true) {
    const Claim claim = of(slot);
    end_item_with(slot, is_lost(claim, dropped) ? Claim::kLost : Claim::kMostDraws);
  }

  // The row with that key is about to go. Its item stays counted, if somebody holds it or is done with it. `dropped` as
  // above.
  void let_row_go(uint64_t slot, uint64_t key1, bool dropped = true) {
    const Claim claim = of(slot);
    const bool lost = is_lost(claim, dropped), counts = is_handed_out(claim);
    if (!lost && !counts) return;
    ItemHolder* loser = lost ? &entry_of(claim.holder()) : nullptr;
    change_counts(key1, header_.handed_out_gone + counts, header_.dropped_items, header_.done_before, loser, +1);
  }

  // Whoever died while a row was going left it counted once: with those that are there, or with those that have gone.
  // So it is with what was dropped.
  void finish_going() {
    const uint64_t key1 = header_.going_key1;
    if (!key1) return;
    header_.handed_out_gone = header_.gone_with_it;
    TORCHREPLAY_FAULT("claims.gone");
    header_.dropped_items = header_.dropped_with_it;
    header_.done_before = header_.done_with_it;
    TORCHREPLAY_FAULT("claims.dropped");
    if (header_.loser1 && header_.loser1 <= static_cast<uint32_t>(kMaxParticipants)) {
      uint64_t& lost = holders_[header_.loser1 - 1].lost;
      header_.lost += header_.lost_with_it - lost;
      lost = header_.lost_with_it;
    }
    TORCHREPLAY_FAULT("claims.lost");
    if (key1 != kNever)
      if (const uint64_t slot = memory_.slot_of(key1 - 1); memory_.at(slot) == key1)
        end_item_with(slot, Claim::kMostDraws);
    TORCHREPLAY_FAULT("claims.gone_and_ended");
    kill_fence();
    header_.going_key1 = 0;
  }

  // The row is gone.
  void end_row(uint64_t slot) {
    forget_holding(of(slot).holder());
    TORCHREPLAY_FAULT("claims.row_ended");
    words_[slot] = 0;
  }

  // For those who draw

  // The process of that presence has the items, all of which could be drawn, in slots that ascend.
  void take(const int64_t* slots, int n, uint32_t presence) {
    if (n == 0) return;
    const DirtyScope dirty(header_, Dirty::kTree);
    ItemHolder& own = entry_of(presence);
    for (int k = 0; k < n; k++) {
      words_[slots[k]] = of(static_cast<uint64_t>(slots[k])).held_by(presence).word;
      TORCHREPLAY_FAULT("claims.held");
    }
    own.items += static_cast<uint64_t>(n);
    header_.held += static_cast<uint64_t>(n);
    header_.handed_out += static_cast<uint64_t>(n);
    was_.resize(static_cast<size_t>(n));
    std::transform(slots, slots + n, was_.begin(), [&](int64_t slot) { return tree_.leaf(slot); });
    now_.assign(static_cast<size_t>(n), 0);
    tree_.replace_sorted(slots, was_.data(), now_.data(), n);
    TORCHREPLAY_FAULT("claims.taken");
  }

  // The process is done with those of the items that it holds: with all of them, or, if it dies, with none. Or a group
  // would be given again that is not whole. Returns how many these are. `forgotten`: items that it has lost, and whose
  // keys it does not know any more.
  uint64_t commit(const std::vector<int64_t>& keys, uint32_t presence, uint64_t forgotten = 0) {
    if (keys.empty() && !forgotten) return 0;
    const DirtyScope dirty(header_, Dirty::kTree);
    const uint64_t lost = forgotten + find_held(keys, presence);
    for (const uint64_t slot : held_) {
      words_[slot] = of(slot).with_ending(true).word;
      TORCHREPLAY_FAULT("claims.marked");
    }
    kill_fence();
    header_.ending = presence;
    TORCHREPLAY_FAULT("claims.ending");
    const uint64_t n = let_go(presence, [](Claim c) { return c.draws() + 1; });
    kill_fence();
    header_.ending = 0;
    TORCHREPLAY_FAULT("claims.ended");
    lose_no_more(presence, lost, false);
    return n;
  }

  // Those of the items that it holds are in their places again, or are dropped. Returns how many these are.
  uint64_t release(const std::vector<int64_t>& keys, uint32_t presence, uint64_t forgotten = 0) {
    if (keys.empty() && !forgotten) return 0;
    const DirtyScope dirty(header_, Dirty::kTree);
    const uint64_t lost = forgotten + find_held(keys, presence);
    for (const uint64_t slot : held_)
      if (of(slot).is_lost()) drop_lost(slot);
    const auto again = std::ranges::count_if(held_, [this](uint64_t slot) { return !of(slot).is_over(); });
    if (Admission::is_kept(header_)) Admission(memory_).let_come_again(static_cast<uint64_t>(again));
    const uint64_t n = let_go(presence, [](Claim c) { return c.draws(); });
    lose_no_more(presence, lost, true);
    return n;
  }

  // The same for all that it holds or has lost. O(capacity), if it holds any.
  void release_all_of(uint32_t presence) {
    const ItemHolder* holder = find_entry(presence);
    if (!holder) return;
    std::vector<int64_t> keys;
    for (uint64_t slot = 0; holder->items && slot < memory_.capacity(); slot++)
      if (of(slot).holder() == presence) keys.push_back(static_cast<int64_t>(memory_.at(slot)) - 1);
    release(keys, presence, holder->lost);
  }

  // Nobody gets these items any more, all of which could be drawn, in slots that ascend.
  void drop(const std::vector<int64_t>& slots, uint32_t presence) {
    take(slots.data(), static_cast<int>(slots.size()), presence);
    std::vector<int64_t> keys(slots.size());
    std::ranges::transform(slots, keys.begin(), [&](int64_t slot) {
      return static_cast<int64_t>(memory_.at(static_cast<uint64_t>(slot))) - 1;
    });
    const DirtyScope dirty(header_, Dirty::kTree);
    find_held(keys, presence);
    let_go(presence, [](Claim) { return Claim::kMostDraws; });
  }

  // What the dead hold is in its place again. A system call for each other holder, and O(capacity) for each that died.
  void release_from_the_dead() {
    if (header_.held == 0 && header_.lost == 0) return;
    for (uint32_t i = 0; i < header_.holders; i++) {
      const ItemHolder& h = holders_[i];
      if (h.is_free() || memory_.liveness().present(h.presence)) continue;
      TORCHREPLAY_FAULT("claims.found_dead");
      release_all_of(h.presence);
      TORCHREPLAY_FAULT("claims.dead_released");
    }
  }

  // How often each item was done, of those that the process holds; of the others -1.
  std::vector<int64_t> draws_of(const std::vector<int64_t>& keys, uint32_t presence) const {
    std::vector<int64_t> draws;
    for (const int64_t key : keys) {
      const Claim claim = of(memory_.slot_of(static_cast<uint64_t>(key)));
      const bool held = is_there(key) && claim.holder() == presence && !claim.is_over();
      draws.push_back(held ? static_cast<int64_t>(claim.draws()) : -1);
    }
    return draws;
  }

  // Each item that was done so often is done once more, whoever has it. So it is the same to do that twice. The process
  // of that presence takes what nobody has: what it does not come to end goes back. Returns the keys of these.
  std::vector<int64_t> end_draws(const std::vector<int64_t>& keys, const std::vector<int64_t>& draws,
                                 uint32_t presence) {
    std::map<uint32_t, std::vector<int64_t>> held;  // by their holders
    std::vector<int64_t> free;
    for (size_t i = 0; i < keys.size(); i++) {
      if (!is_there(keys[i])) continue;
      const Claim claim = of(memory_.slot_of(static_cast<uint64_t>(keys[i])));
      if (static_cast<int64_t>(claim.draws()) != draws[i]) continue;
      if (claim.holder())
        held[claim.holder()].push_back(keys[i]);
      else if (is_free(keys[i]))
        free.push_back(keys[i]);
    }
    const uint64_t taken = take_keys(free, presence);
    if (Admission::is_kept(header_)) Admission(memory_).note_learnt(taken);
    commit(free, presence);
    for (const auto& [holder, theirs] : held) {
      commit(theirs, holder);
      free.insert(free.end(), theirs.begin(), theirs.end());
    }
    return free;
  }

  // What one process has drawn another one holds from now on. False, and nothing is changed: somebody else has got some
  // of it meanwhile, or it is done. What nobody has, as the one that drew it is dead, is taken.
  bool adopt(const std::vector<int64_t>& keys, uint32_t from, uint32_t to) {
    std::vector<int64_t> held, free;
    uint64_t lost = 0;
    for (const int64_t key : keys) {
      lost += !is_there(key);  // the batch has the values
      if (!is_there(key)) continue;
      if (of(memory_.slot_of(static_cast<uint64_t>(key))).holder() == from)
        held.push_back(key);
      else if (is_free(key))
        free.push_back(key);
      else
        return false;
    }
    take_keys(free, to);
    pass_on(held, from, to);
    pass_on_lost(lost, from, to);
    return true;
  }

  // Items that are dropped unless their holders commit them. O(capacity), where any are held.
  uint64_t lost() const {
    uint64_t n = header_.lost;
    for (uint64_t slot = 0; header_.held && slot < memory_.capacity(); slot++) n += of(slot).is_lost();
    return n;
  }

  // Milliseconds since the item came, which is there.
  uint32_t age(uint64_t slot) const {
    const uint32_t then = __atomic_load_n(&memory_.arrivals()[slot], __ATOMIC_RELAXED);
    return millis_since(then, millis());
  }

  // Leaves and counts that follow from the claims, after a death in the midst. Sums are left to be computed.
  // O(capacity).
  void restore() {
    finish_ending();
    header_.held = header_.handed_out = header_.lost = 0;
    for (uint32_t i = 0; i < std::min<uint32_t>(header_.holders, kMaxParticipants); i++) {
      holders_[i].items = 0;
      header_.lost += holders_[i].lost;
    }
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (!memory_.at(slot)) words_[slot] = 0;
      const Claim claim = of(slot);
      header_.handed_out += is_handed_out(claim);
      if (claim.holder()) {
        entry_of(claim.holder()).items++;
        header_.held++;
      }
      float& leaf = tree_.leaves()[slot];
      leaf = claim.holder() || claim.draws() >= header_.sampler.max_draws || leaf == 0 ? 0 : places_.leaf(slot);
    }
    TORCHREPLAY_FAULT("claims.restored");
  }

  // Nobody of before is there any more. O(capacity).
  void release_all() {
    finish_going();
    finish_ending();
    for (uint32_t i = 0; i < std::min<uint32_t>(header_.holders, kMaxParticipants); i++)
      lose_no_more(holders_[i].presence, holders_[i].lost, true);
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      if (of(slot).is_lost()) drop_lost(slot);
      const Claim claim = of(slot);
      arrive(slot);  // by the clock of this boot
      if (!claim.holder()) continue;
      if (may_come_again(slot, claim.draws())) {
        tree_.leaves()[slot] = places_.leaf(slot);
        versions_.note(slot);
      }
      words_[slot] = claim.free().word;
    }
    header_.held = header_.lost = header_.holders = 0;  // the rest is counted anew after that
  }

 private:
  void note_arrival(uint64_t slot, uint32_t when) {
    __atomic_store_n(&memory_.arrivals()[slot], when, __ATOMIC_RELAXED);
  }

  // Whether somebody has its item, or has had it as often as anybody may.
  bool is_handed_out(Claim claim) const {
    if (claim.is_over()) return false;
    return claim.holder() != 0 || claim.draws() >= header_.sampler.max_draws;
  }

  // Whether its holder loses it, where it lacks a row from now on, or did before.
  static bool is_lost(Claim claim, bool dropped) {
    return claim.is_lost() || (dropped && claim.holder() && !claim.is_over());
  }

  void end_item_with(uint64_t slot, uint64_t draws) {
    const Claim claim = of(slot);
    header_.handed_out -= is_handed_out(claim);
    words_[slot] = claim.with_draws(draws).word;
  }

  // These are the counts from now on, and of one holder so many items more are lost, also if this process dies in
  // between. The item of that key + 1 is over.
  void change_counts(uint64_t key1, uint64_t gone, uint64_t dropped, uint64_t done, const ItemHolder* loser,
                     int64_t more) {
    header_.gone_with_it = gone;
    header_.dropped_with_it = dropped;
    header_.done_with_it = done;
    header_.loser1 = loser ? static_cast<uint32_t>(loser - holders_) + 1 : 0;
    header_.lost_with_it = loser ? loser->lost + static_cast<uint64_t>(more) : 0;
    kill_fence();
    header_.going_key1 = key1;
    TORCHREPLAY_FAULT("claims.going");
    finish_going();
  }

  // An item that is there, and lacks a row, is dropped.
  void drop_lost(uint64_t slot) {
    change_counts(memory_.at(slot), header_.handed_out_gone, header_.dropped_items + 1, header_.done_before, nullptr,
                  0);
  }

  // So many items that the process has lost, or all, are dropped or committed.
  void lose_no_more(uint32_t presence, uint64_t n, bool dropped) {
    const ItemHolder* loser = n ? find_entry(presence) : nullptr;
    n = loser ? std::min(n, loser->lost) : 0;
    if (n == 0) return;
    const bool gives_back = dropped && Admission::is_kept(header_);
    change_counts(kNever, header_.handed_out_gone, header_.dropped_items + (dropped ? n : 0),
                  gives_back ? Admission(memory_).done_without(n) : header_.done_before, loser,
                  -static_cast<int64_t>(n));
  }

  // So many that one has lost are another's. If this process dies in between, they are dropped.
  void pass_on_lost(uint64_t n, uint32_t from, uint32_t to) {
    const ItemHolder* loser = n && from != to ? find_entry(from) : nullptr;
    n = loser ? std::min(n, loser->lost) : 0;
    if (n == 0) return;
    const uint64_t gone = header_.handed_out_gone, dropped = header_.dropped_items, done = header_.done_before;
    const ItemHolder& heir = entry_of(to);
    change_counts(kNever, gone, dropped + n, done, loser, -static_cast<int64_t>(n));
    change_counts(kNever, gone, dropped, done, &heir, static_cast<int64_t>(n));
  }

  static ItemHolder* holders_of(SegmentMemory& m) { return reinterpret_cast<ItemHolder*>(m.holders()); }

  bool may_come_again(uint64_t slot, uint64_t draws) const {
    return draws < header_.sampler.max_draws && !is_discarded(memory_, slot);
  }

  // Whoever died while it let items go is done with all of them; before that, with none. Sums are left to be computed.
  void finish_ending() {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      const Claim claim = of(slot);
      if (!claim.ending()) continue;
      if (header_.ending && claim.holder() == header_.ending)
        end_holding(slot, claim, std::min(claim.draws() + 1, Claim::kMostDraws));
      else
        words_[slot] = claim.with_ending(false).word;
      TORCHREPLAY_FAULT("claims.end_finished");
    }
    kill_fence();
    header_.ending = 0;
  }

  // Of these items the slots of those that the process holds, each once. Returns how many are not there.
  uint64_t find_held(const std::vector<int64_t>& keys, uint32_t presence) {
    held_.clear();
    std::vector<int64_t> gone;
    for (const int64_t key : keys) {
      const uint64_t slot = memory_.slot_of(static_cast<uint64_t>(key));
      if (memory_.at(slot) != static_cast<uint64_t>(key) + 1) {
        if (header_.lost) gone.push_back(key);
      } else if (of(slot).holder() == presence) {
        held_.push_back(slot);
      }
    }
    std::ranges::sort(held_);  // a key may come twice
    held_.erase(std::ranges::unique(held_).begin(), held_.end());
    std::ranges::sort(gone);
    return static_cast<uint64_t>(std::ranges::unique(gone).begin() - gone.begin());
  }

  bool is_there(int64_t key) const {
    return key >= 0 && memory_.at(memory_.slot_of(static_cast<uint64_t>(key))) == static_cast<uint64_t>(key) + 1;
  }

  // Whether the item there can be drawn.
  bool is_free(int64_t key) const {
    return tree_.leaf(static_cast<int64_t>(memory_.slot_of(static_cast<uint64_t>(key)))) > 0;
  }

  uint64_t take_keys(const std::vector<int64_t>& keys, uint32_t presence) {
    std::vector<int64_t> slots;
    slots.reserve(keys.size());
    for (const int64_t key : keys) slots.push_back(static_cast<int64_t>(memory_.slot_of(static_cast<uint64_t>(key))));
    std::ranges::sort(slots);
    slots.erase(std::ranges::unique(slots).begin(), slots.end());
    take(slots.data(), static_cast<int>(slots.size()), presence);
    return slots.size();
  }

  void pass_on(const std::vector<int64_t>& keys, uint32_t from, uint32_t to) {
    if (keys.empty() || from == to) return;
    const DirtyScope dirty(header_, Dirty::kTree);
    ItemHolder& heir = entry_of(to);
    for (const int64_t key : keys) {
      const uint64_t slot = memory_.slot_of(static_cast<uint64_t>(key));
      words_[slot] = of(slot).held_by(to).word;
      TORCHREPLAY_FAULT("claims.passed_on");
    }
    heir.items += keys.size();
    entry_of(from).items -= keys.size();
  }

  // The leaf first: after a death between the two the item still is its holder's. Returns whether it can be drawn
  // again.
  bool end_holding(uint64_t slot, Claim claim, uint64_t draws) {
    const bool again = may_come_again(slot, draws);
    if (again) {
      tree_.leaves()[slot] = places_.leaf(slot);
      versions_.note(slot);
      TORCHREPLAY_FAULT("claims.back");
    }
    kill_fence();
    words_[slot] = claim.with_draws(draws).free().word;
    return again;
  }

  template <class Draws>
  uint64_t let_go(uint32_t presence, const Draws& draws_of) {
    uint64_t n = 0;
    index_.clear();
    for (const uint64_t slot : held_) {
      const Claim claim = of(slot);
      n++;
      if (end_holding(slot, claim, std::min(draws_of(claim), Claim::kMostDraws)))
        index_.push_back(static_cast<int64_t>(slot));
      header_.handed_out -= is_handed_out(claim) && !is_handed_out(of(slot));
      TORCHREPLAY_FAULT("claims.let_go");
    }
    if (n) {
      entry_of(presence).items -= n;
      header_.held -= n;
    }
    std::ranges::sort(index_);
    was_.assign(index_.size(), 0);
    now_.resize(index_.size());
    std::ranges::transform(index_, now_.begin(), [&](int64_t slot) { return tree_.leaf(slot); });
    if (!index_.empty()) tree_.replace_sorted(index_.data(), was_.data(), now_.data(), static_cast<int>(index_.size()));
    TORCHREPLAY_FAULT("claims.all_let_go");
    return n;
  }

  void forget_holding(uint32_t presence) {
    if (!presence) return;
    entry_of(presence).items--;
    header_.held--;
  }

  // That of the process; nullptr: it has none.
  const ItemHolder* find_entry(uint32_t presence) const {
    const ItemHolder* end = holders_ + header_.holders;
    const ItemHolder* found =
        std::find_if(holders_, holders_ + header_.holders, [&](const ItemHolder& h) { return h.presence == presence; });
    return found == end ? nullptr : found;
  }

  // The same; where it has none, a free one becomes its own.
  ItemHolder& entry_of(uint32_t presence) {
    ItemHolder* unused = nullptr;
    for (uint32_t i = 0; i < header_.holders; i++) {
      if (holders_[i].presence == presence) return holders_[i];
      if (holders_[i].is_free() && !unused) unused = &holders_[i];
    }
    if (!unused) {
      if (header_.holders >= static_cast<uint32_t>(kMaxParticipants))
        throw std::runtime_error("more than " + std::to_string(kMaxParticipants) +
                                 " processes hold items of the queue");
      unused = &holders_[header_.holders];
      *unused = {};
      header_.holders++;
    }
    *unused = {presence, memory_.liveness().has_presence() && memory_.presence() == presence ? getpid() : 0, 0, 0};
    return *unused;
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  Places places_;
  ItemVersions versions_;
  uint64_t* words_;
  ItemHolder* holders_;
  std::vector<uint64_t> held_;
  std::vector<int64_t> index_;
  std::vector<float> was_, now_;
};

}  // namespace torchreplay
