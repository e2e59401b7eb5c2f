// Drawing a batch: targets and descent under the mutex, copies without it, and a redraw of every row that changed
// meanwhile.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "absorb/draw_counts.h"
#include "absorb/item_versions.h"
#include "draw/batch_copier.h"
#include "draw/batch_weights.h"
#include "draw/counted_draw.h"
#include "draw/due_items.h"
#include "draw/oldest_items.h"
#include "session/segment_lock.h"

namespace torchreplay {

// More are not drawn, found or fed back at once.
inline constexpr int64_t kMostItems = std::numeric_limits<int>::max();

// The tree as a draw found it: the sum of all leaves, the number of positive ones and their smallest; and the exponent
// of its weights. A mix of draws of several buffers needs all of it as of one moment.
struct DrawnFrom {
  double total = 0, smallest = 0;
  int64_t drawable = 0;
  double beta = 0;
  int64_t version = 0;  // the learner's, where rows have a policy version
};

class BatchSampler {
 public:
  // `plan`: what a batch consists of; nullptr for one of single rows. It must outlive the sampler.
  explicit BatchSampler(SegmentMemory& m, const ItemPlan* plan = nullptr)
      : memory_(m),
        plan_(plan),
        drawing_(plan),
        copier_(m, plan, drawing_),
        due_(m, drawing_),
        oldest_(m, drawing_),
        counts_(m),
        versions_(m),
        keeps_epochs_(Epochs::are_kept(m.header())),
        is_queue_(Claims::are_kept(m.header())),
        counts_draws_(DrawCounts::are_kept(m.header())) {}

  // Threads that may share the copies of a large batch.
  void set_threads(int n) { copier_.set_threads(std::max(1, n)); }

  // Slots that the last draw found unsettled: their writers lag, or are dead.
  uint64_t pending() const { return pending_; }

  // The tree as the last draw, or gather(), found it, before any redraw.
  const DrawnFrom& drawn_from() const { return drawn_from_; }

  // Items of the last draw, and the epoch that it was of, by number.
  int count() const { return static_cast<int>(drawing_.items.size()); }
  uint64_t epoch() const { return due_.epoch(); }

  // Copies the items anchored at `keys`, in their order, leaving out those that cannot be drawn (any more). Returns how
  // many there are. Their weights and probabilities are those of a draw; `name`: of the one whose chances they take
  // again.
  int gather(const int64_t* keys, int n, double beta, const BatchPointers& out, const DrawName* name = nullptr) {
    std::vector<DrawnItem>& items = drawing_.items;
    std::vector<int>& todo = drawing_.todo;
    drawing_.take_no_chances();
    if (name) drawing_.take_chances(*name, 0, n);
    find_keys(keys, n, name != nullptr);
    for (;;) {
      todo = numbers_below(items.size());
      TORCHREPLAY_FAULT("gather.found");
      RewriteWatch watch(memory_.header());
      std::vector<int> lost;
      if (copier_.has_values(out)) {
        lost = copier_.measure(watch, {});
        copier_.copy_values(lost, out);
      }
      copier_.copy(out);
      copier_.copy_rewritten(watch, out, {});
      copier_.add(todo, lost);
      if (todo.empty()) break;
      const std::vector<int> copied = drawing_.done();
      std::ranges::transform(copied, items.begin(), [&](int i) { return items[i]; });
      items.resize(copied.size());
    }
    drawn_from_.beta = beta;
    finish(count(), beta, out);
    return count();
  }

  // Draws `n` items, stratified; with replacement, unless the segment keeps epochs. O(n (log capacity + bytes of an
  // item)), and O(capacity) when an epoch begins. Throws what a wait for the mutex throws, NoMemory and
  // TooManyElements. A draw that throws, or ends otherwise, is not counted, and its items stay due.
  Draw sample(int n, double beta, const DrawName& name, const BatchPointers& out, Shortage& shortage,
              const Patience& patience = {}, const DrawRules& rules = {}) {
    LearnerTurn turn(memory_);
    CountedDraw counted(memory_.header());
    TakenItems taken(*this);
    drawing_.begin(is_queue_ ? 0 : static_cast<size_t>(n));
    budget_ = copier_.has_values(out) && !out.ragged->budget.empty() ? &out.ragged->budget : nullptr;
    drawing_.shuffles = budget_ && !is_queue_;
    drawing_.shuffle_nothing();
    if (drawing_.shuffles && !keeps_epochs_)
      drawing_.shuffle_strata(name.seed, name.stream, name.step, static_cast<size_t>(n));
    failed_are_back_ = false;
    RewriteWatch watch(memory_.header());
    for (uint32_t round = 0; round < kRounds; round++) {
      const Draw outcome = draw(n, name, round, shortage, patience, turn, counted, rules);
      if (outcome != Draw::kDone) return outcome;
      if (round >= kLapped) turn.hold_writers();
      taken.begin();
      TORCHREPLAY_FAULT("draw.drawn");
      std::vector<int> lost;
      if (copier_.has_values(out)) {
        lost = copier_.measure(watch, patience);
        if (budget_) keep_within(lost, counted, patience);
        copier_.copy_values(lost, out);
      }
      copier_.copy(out);
      TORCHREPLAY_FAULT("draw.copied");
      copier_.copy_rewritten(watch, out, patience);
      copier_.add(drawing_.todo, lost);
      if (drawing_.todo.empty()) {
        drawn_from_.beta = beta;
        finish(count(), beta, out);
        note_ages(out);
        counted.keep();
        taken.keep();
        return Draw::kDone;
      }
      memory_.header().redraws.fetch_add(drawing_.todo.size(), std::memory_order_relaxed);
      TORCHREPLAY_FAULT("draw.failed");
    }
    return Draw::kLapped;
  }

 private:
  // What a draw has taken without replacement, from a queue, or of the draws that an item has. Unless it is kept it
  // can be drawn again.
  class TakenItems {
   public:
    explicit TakenItems(BatchSampler& sampler) : sampler_(sampler) {}
    ~TakenItems() {
      if (begun_) sampler_.give_back();
    }
    TakenItems(const TakenItems&) = delete;

    void begin() { begun_ = sampler_.keeps_epochs_ || sampler_.is_queue_ || sampler_.counts_draws_; }
    void keep() { begun_ = false; }

   private:
    BatchSampler& sampler_;
    bool begun_ = false;
  };

  // After so many redraws of one batch writers pause, where they are; and after so many it is given up, for the ring
  // turns faster than a batch is copied.
  static constexpr uint32_t kLapped = 8, kRounds = 64;
  // Takes no chance: nothing is relabelled.
  static constexpr uint64_t kNoChance = std::numeric_limits<uint64_t>::max();

  // Draws the items that are still to be drawn. Round 0 is the draw itself; later rounds redraw in the same strata.
  Draw draw(int n, const DrawName& name, uint32_t round, Shortage& shortage, const Patience& patience,
            LearnerTurn& turn, CountedDraw& counted, DrawRules rules) {
    const int at_least = rules.at_least;
    drawing_.fill_random(name, round);
    Header& h = memory_.header();
    shortage.seen = h.rows_signal.load(std::memory_order_acquire);
    SegmentLock lock(memory_, patience);
    if (is_queue_) oldest_.settle(rules);
    if (counts_draws_) counts_.give_back(memory_.owed().take());
    if (h.stopped.load(std::memory_order_relaxed)) return Draw::kStopped;
    if (round && counts_draws_) give_back_failed();
    if (round) resync_failed();
    // A redraw absorbs too: a learner that slept while the ring turned would find one stale leaf after the other.
    turn.absorb(lock);
    TORCHREPLAY_FAULT("draw.absorbed");
    if (is_queue_ && round) oldest_.drop_failed(rules);
    const PriorityTree tree = memory_.tree();
    // In a redraw of a batch that may become shorter what was copied is enough.
    const bool has_enough = rules.last_epoch != kNever && round && drawing_.todo.size() < drawing_.items.size();
    if (!is_queue_ && !has_enough && tree.total() == 0) counted.take_back();  // it waits, as one that begins does
    if (!counted && due_.is_over(rules)) return Draw::kEpochOver;
    const auto lacks_items = [&] {
      if (is_queue_ && budget_) rules.at_least = least_within_budget(n, at_least, rules);
      if (!counted && !Limiter(h).can_sample(most_of(n, rules))) return true;
      if (is_queue_) return oldest_.look(rules), oldest_.lacks_items(n, rules);
      return !has_enough && (tree.total() == 0 || (counts_draws_ && !counts_.has_left(draws_of(n, rules))));
    };
    // Those it admits may write all that is missing before it sleeps.
    while (lacks_items() && !announce_wait(n, rules, shortage)) turn.absorb(lock);
    pending_ = h.pending;
    if (lacks_items()) {
      turn.wait_for_rows();
      TORCHREPLAY_FAULT("draw.waits");
      const bool barren = tree.total() == 0 && h.absorbed > h.completed_at + 2 * memory_.capacity();
      return barren ? Draw::kBarren : Draw::kWait;
    }
    if (!round) {
      note_tree(tree);  // before items are taken
      drawn_from_.version = h.judged_version;
    }
    if (keeps_epochs_) {
      if (const Draw due = due_.find(n, name, round, rules); due != Draw::kDone) return due;
    } else if (is_queue_) {
      oldest_.find(n, rules);
    } else {
      find(tree, n, name, round);
    }
    failed_are_back_ = false;
    note_versions(drawing_.todo);
    if (counted) counted.recount(drawing_.items.size());
    if (!counted) {
      counted.count(count());
      h.demand = 0;  // another learner that still waits will say so again
    }
    if (!budget_) publish_limit(memory_);  // or it is not known yet how many items come
    return Draw::kDone;
  }

  // How many items a draw of `n` counts as.
  uint64_t most_of(int n, const DrawRules& rules) const {
    return static_cast<uint64_t>(is_queue_ && rules.at_least ? rules.at_least : due_.most_of(n, rules));
  }

  // How many draws a batch of `n` still takes of the items.
  uint64_t draws_of(int n, const DrawRules& rules) const {
    const size_t has = drawing_.items.size() - drawing_.todo.size();
    return static_cast<uint64_t>(has ? static_cast<int>(drawing_.todo.size()) : due_.most_of(n, rules));
  }

  // How many items a queue's batch of `n` has at the least: fewer than `at_least` says, where those that are there use
  // up the budget. O(1) if there are enough, else O(rows of those that are there). The lock is held.
  int least_within_budget(int n, int at_least, DrawRules rules) {
    rules.at_least = at_least;
    budget_lacks_ = kNever;
    if (rules.groups || !oldest_.lacks_items(n, rules)) return at_least;
    const std::vector<DrawnItem> items = oldest_.look_ahead(n);
    std::vector<int> all = numbers_below(items.size());
    copier_.values().measure(items, all);
    const auto [within, lacks] = copier_.values().within(*budget_, items.size());
    budget_lacks_ = lacks;
    return lacks || !within ? at_least : static_cast<int>(within);
  }

  // Shows writers what a draw of `n` waits for, and which ticket wakes it. False: that one was taken meanwhile, and its
  // writer may have seen nobody to wake. The lock is held.
  bool announce_wait(int n, const DrawRules& rules, Shortage& shortage) {
    Header& h = memory_.header();
    Limiter limiter(h);
    const uint64_t most = most_of(n, rules);
    shortage = {h.inserted, limiter.needed(most), static_cast<uint64_t>(memory_.tree().count()), shortage.seen};
    if (is_queue_) {
      const uint64_t missing = std::min(oldest_.missing(n, rules), budget_ ? budget_lacks_ : kNever);
      shortage.needed = std::max(shortage.needed, h.inserted + missing);
      shortage.drawable = oldest_.available();
    }
    if (counts_draws_) {
      const uint64_t draws = counts_.missing(draws_of(n, rules)), each = h.sampler.max_draws;
      shortage.needed = std::max(shortage.needed, h.inserted + (draws + each - 1) / each);
    }
    const uint64_t missing = shortage.needed > h.inserted ? shortage.needed - h.inserted : 1;
    limiter.demand(most);
    if (counts_draws_ || is_queue_) h.demand = std::max(h.demand, shortage.needed);
    TORCHREPLAY_FAULT("draw.demanded");
    // Once a turn at the least: what is overwritten unseen never counts. And where writers have to stop.
    uint64_t wake_at = h.absorbed + std::min(missing, memory_.capacity()) - 1;
    if (is_queue_) {
      publish_limit(memory_, true);
      wake_at = std::min(wake_at, std::max(h.absorbed + 1, h.ticket_limit.load(std::memory_order_relaxed)) - 1);
    }
    // Before writers are admitted: one on another processor is done before the next line, and then sleeps.
    if (!h.importer && wake_at < h.wake_at.load(std::memory_order_relaxed))
      h.wake_at.store(wake_at, std::memory_order_seq_cst);
    TORCHREPLAY_FAULT("draw.wakes_at");
    if (!is_queue_) publish_limit(memory_);
    return h.importer || h.head.load(std::memory_order_seq_cst) <= wake_at;
  }

  // The lock is held.
  void note_tree(const PriorityTree& tree) {
    const double unit = are_alike() ? 1 : tree.unit();
    const auto smallest = static_cast<double>(mass_of(tree, tree.min()));  // as weights are made of it
    drawn_from_ = {static_cast<double>(total_of(tree)) * unit, smallest * unit, tree.count()};
  }

  // What P is made of, in grid units. Of all epochs together each item has the same share. One of a queue has all.
  uint64_t mass_of(const PriorityTree& tree, float leaf) const { return are_alike() ? 1 : tree.quantize(leaf); }
  uint64_t total_of(const PriorityTree& tree) const {
    return is_queue_ ? 1 : keeps_epochs_ ? static_cast<uint64_t>(tree.count()) : tree.total();
  }
  bool are_alike() const { return keeps_epochs_ || is_queue_; }

  // A row that changed under a draw makes its item undrawable here, so that the redraw cannot fail on it again. So does
  // an item whose rows do not lead to each other, although none has changed: they say something wrong about their
  // steps.
  void resync_failed() {
    const uint64_t head = memory_.header().head.load(std::memory_order_acquire);
    Absorber absorber(memory_);
    for (int i : drawing_.todo) absorber.resync(drawing_.items[i].slot, head);
    copier_.each_failed_slot([&](uint64_t slot) { absorber.resync(slot, head); });
    if (!plan_) return;
    ItemGather look(memory_, *plan_);
    for (int i : drawing_.todo) {
      const DrawnItem& item = drawing_.items[i];
      const bool stays = memory_.at(item.slot) == item.key1 && memory_.tree().leaf(static_cast<int64_t>(item.slot)) > 0;
      if (stays && !look.is_whole(item)) absorber.give_up(item.slot);
    }
  }

  // `again`: they were drawn, though none may be left to draw.
  void find_keys(const int64_t* keys, int n, bool again) {
    drawing_.items.clear();
    const Header& h = memory_.header();
    SegmentLock lock(memory_);
    lock.absorb();
    publish_limit(memory_);
    const PriorityTree tree = memory_.tree();
    const uint64_t min_mass = mass_of(tree, tree.min());
    note_tree(tree);
    for (int i = 0; i < n; i++) {
      if (keys[i] < 0 || static_cast<uint64_t>(keys[i]) >= h.absorbed) continue;
      const auto key = static_cast<uint64_t>(keys[i]);
      const uint64_t slot = memory_.slot_of(key);
      const float leaf = tree.leaf(static_cast<int64_t>(slot));
      const bool used_up = again && counts_draws_ && counts_.is_used_up(slot) && !is_discarded(memory_, slot);
      const bool is_there = leaf > 0 || used_up || (is_queue_ && Claims(memory_).of(slot).holder());
      if (memory_.at(slot) != key + 1 || !is_there) continue;
      drawing_.items.push_back({slot, key + 1, mass_of(tree, leaf), total_of(tree), min_mass, tree.count(),
                                drawing_.chance(static_cast<size_t>(i), kNoChance)});
    }
    drawn_from_.version = h.judged_version;
    note_versions(numbers_below(drawing_.items.size()));
  }

  // The lock is held.
  void note_versions(const std::vector<int>& numbers) {
    if (!versions_.are_kept()) return;
    for (const int i : numbers) drawing_.items[i].version = versions_.of(drawing_.items[i].slot);
  }

  // For those who watch.
  void note_ages(const BatchPointers& out) const {
    if (!out.age || drawing_.items.empty()) return;
    Header& h = memory_.header();
    const std::span<const int64_t> ages(out.age, drawing_.items.size());
    // Versions may be made up: their sum may be of more than 64 bits.
    const auto add = [](uint64_t sum, int64_t age) { return sum + static_cast<uint64_t>(age); };
    h.ages.fetch_add(std::accumulate(ages.begin(), ages.end(), uint64_t{0}, add), std::memory_order_relaxed);
    h.aged.fetch_add(ages.size(), std::memory_order_relaxed);
    const int64_t largest = std::ranges::max(ages);
    int64_t before = h.largest_age.load(std::memory_order_relaxed);
    while (before < largest && !h.largest_age.compare_exchange_weak(before, largest, std::memory_order_relaxed)) {
    }
  }

  // With replacement: one item of each stratum. An item has no more draws than are left of it: the others are found
  // anew, by words of their own, among the items that are left.
  void find(const PriorityTree& tree, int n, const DrawName& name, uint32_t round) {
    find_in_strata(tree, n);
    if (!counts_draws_) return;
    const std::vector<int> all = drawing_.todo;
    for (uint32_t again = 1;; again++) {
      std::vector<int> todo = counts_.take(drawing_.index);
      if (todo.empty()) break;
      for (int& k : todo) k = drawing_.todo[static_cast<size_t>(k)];
      drawing_.todo = std::move(todo);
      drawing_.fill_random(name, round + kRounds * (again % kRounds));
      find_in_strata(tree, n);
    }
    drawing_.todo = all;
  }

  void find_in_strata(const PriorityTree& tree, int n) {
    const size_t count = drawing_.todo.size();
    const uint64_t total = tree.total();
    drawing_.target.resize(count);
    const Strata strata(total, static_cast<uint64_t>(n));
    for (size_t k = 0; k < count; k++)
      drawing_.target[k] = strata.target(drawing_.stratum(static_cast<size_t>(drawing_.todo[k])), drawing_.random[k]);
    drawing_.find(tree, &memory_.at(0));
    const uint64_t min_mass = tree.quantize(tree.min());
    DrawnItems drawn(memory_);
    for (size_t k = 0; k < count; k++) {
      const auto slot = static_cast<uint64_t>(drawing_.index[k]);
      drawn.mark(slot);
      drawing_.items[drawing_.todo[k]] = {
          slot, memory_.at(slot), tree.quantize(drawing_.leaf[k]), total, min_mass, tree.count(), drawing_.chance(k)};
    }
  }

  // All items can be drawn again. If the lock is another's, who may be stopped: in the next epoch; of a queue, and
  // where draws are counted, as soon as this process has the lock.
  void give_back() {
    const std::vector<int64_t> keys = drawing_.keys_from(0);
    const Undisturbed here;
    try {
      const SegmentLock lock(memory_, {.deadline = 0});
      give_back(keys, counted_keys());
    } catch (...) {
      if (is_queue_) memory_.owed().add(keys);
      if (counts_draws_) memory_.owed().add(counted_keys());
    }
  }

  // The same for these items. `counted`: those whose draws count. The lock is held.
  void give_back(const std::vector<int64_t>& keys, const std::vector<int64_t>& counted) {
    if (is_queue_) oldest_.give_back(keys);
    if (counts_draws_) counts_.give_back(counted);
    if (keeps_epochs_) due_.give_back(keys);
  }

  // The draws of the items that could not be copied did not happen. Others may be drawn for them, or none.
  void give_back_failed() {
    counts_.give_back(drawing_.keys_of(drawing_.todo));
    failed_are_back_ = true;
  }

  // The keys of the items whose draws count.
  std::vector<int64_t> counted_keys() const {
    return failed_are_back_ ? drawing_.keys_of(drawing_.done()) : drawing_.keys_from(0);
  }

  // Ends the batch where its budget does. The items beyond were not drawn: they are in their places again, and writers
  // are admitted for the others only.
  void keep_within(std::vector<int>& lost, CountedDraw& counted, const Patience& patience) {
    const size_t end = copier_.values().within(*budget_, drawing_.items.size()).items;
    const bool shorter = end < drawing_.items.size();
    {
      const SegmentLock lock(memory_, patience);
      if (shorter) give_back(drawing_.keys_from(end), drawing_.keys_from(end));
      TORCHREPLAY_FAULT("draw.left_out");
      drawing_.items.resize(end);
      counted.recount(end);
      publish_limit(memory_);
    }
    const auto is_out = [&](int i) { return static_cast<size_t>(i) >= end; };
    std::erase_if(drawing_.todo, is_out);
    std::erase_if(lost, is_out);
    if (is_queue_ && shorter) futex_signal(memory_.header().rows_signal);  // others may have found too few
  }

  void finish(int n, double beta, const BatchPointers& out) const {
    for (int i = 0; i < n; i++) out.keys[i] = drawing_.items[i].key();
    if (out.age)
      for (int i = 0; i < n; i++) out.age[i] = versions_behind(drawn_from_.version, drawing_.items[i].version);
    weigh({drawing_.items.data(), static_cast<size_t>(n)}, memory_.header().sampler.normalize, beta, out);
  }

  SegmentMemory& memory_;
  const ItemPlan* plan_;
  Drawing drawing_;
  BatchCopier copier_;
  DueItems due_;
  OldestItems oldest_;
  DrawCounts counts_;
  ItemVersions versions_;
  bool keeps_epochs_, is_queue_, counts_draws_;
  bool failed_are_back_ = false;                  // those of todo
  const std::vector<int64_t>* budget_ = nullptr;  // of the draw that is under way; nullptr: it has none
  uint64_t budget_lacks_ = 0;                     // items, at the last look
  uint64_t pending_ = 0;
  DrawnFrom drawn_from_;
};

}  // namespace torchreplay
