// Drawing a batch: targets and descent under the mutex, copies without it, and a redraw of every row that changed
// meanwhile.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "absorb/drawn_items.h"
#include "absorb/epochs.h"
#include "draw/item_gather.h"
#include "draw/strata.h"
#include "draw/thread_pool.h"
#include "session/segment_lock.h"

namespace torchreplay {

// More are not drawn, found or fed back at once.
inline constexpr int64_t kMostItems = std::numeric_limits<int>::max();

// Names a draw: the same (seed, stream, step) and the same contents of the buffer give the same batch.
struct DrawName {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint64_t step = 0;
  bool operator==(const DrawName&) const = default;
};

enum class Draw {
  kDone,
  kWait,       // the limiter wants more items, or none can be drawn yet
  kBarren,     // whole turns of rows completed no item: waiting is in vain, unless they were not looked at
  kStopped,    // the buffer was
  kLapped,     // the ring turns faster than a batch is copied
  kEpochEnds,  // the next epoch may not begin yet
  kEpochOver,  // nor ever: it was the last
};

// What a waiting learner has to know.
struct Shortage {
  uint64_t inserted = 0, needed = 0, drawable = 0;
  uint32_t seen = 0;  // rows_signal before the draw looked: what it sleeps on
};

// Of a draw without replacement. With a last epoch its batches end with epochs, shorter than others; else they go on
// into the next one.
struct EpochRules {
  uint64_t last = kNever;  // by number
  bool may_begin = true;   // an epoch
};

// The tree as a draw found it: the sum of all leaves, the number of positive ones and their smallest; and the exponent
// of its weights. A mix of draws of several buffers needs all of it as of one moment.
struct DrawnFrom {
  double total = 0, smallest = 0;
  int64_t drawable = 0;
  double beta = 0;
};

// A draw as the segment counts it. Unless it is kept it has not happened: whatever ends it takes it back. That needs no
// lock, which may be what does not come free.
class CountedDraw {
 public:
  explicit CountedDraw(Header& h) : header_(h) {}
  ~CountedDraw() { take_back(); }
  CountedDraw(const CountedDraw&) = delete;

  explicit operator bool() const { return items_ != 0; }

  // The lock is held.
  void count(int n) {
    items_ = static_cast<uint64_t>(n);
    header_.sampled.fetch_add(items_, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("draw.counted");
    header_.draws.fetch_add(1, std::memory_order_relaxed);
  }

  // It turned out to be of another number of items.
  void recount(uint64_t n) { header_.sampled.fetch_add(n - std::exchange(items_, n), std::memory_order_relaxed); }

  void take_back() {
    if (items_) uncount(header_, 1, std::exchange(items_, 0));
  }

  void keep() { items_ = 0; }

  // So many draws, of so many items in all, have not happened.
  static void uncount(Header& h, uint64_t draws, uint64_t items) {
    h.sampled.fetch_sub(items, std::memory_order_relaxed);
    h.draws.fetch_sub(draws, std::memory_order_relaxed);
  }

 private:
  Header& header_;
  uint64_t items_ = 0;
};

class BatchSampler {
 public:
  // `plan`: what a batch consists of; nullptr for one of single rows. It must outlive the sampler.
  explicit BatchSampler(SegmentMemory& m, const ItemPlan* plan = nullptr)
      : memory_(m), plan_(plan), epochs_(m), keeps_epochs_(Epochs::are_kept(m.header())), copiers_(1) {
    copiers_[0].emplace(m, plan);
  }

  // Threads that may share the copies of a large batch.
  void set_threads(int n) { threads_ = std::max(1, n); }

  // Slots that the last draw found unsettled: their writers lag, or are dead.
  uint64_t pending() const { return pending_; }

  // The tree as the last draw, or gather(), found it, before any redraw.
  const DrawnFrom& drawn_from() const { return drawn_from_; }

  // Items of the last draw, and the epoch that it was of, by number.
  int count() const { return static_cast<int>(items_.size()); }
  uint64_t epoch() const { return epoch_; }

  // Copies the items anchored at `keys`, in their order, leaving out those that cannot be drawn (any more). Returns how
  // many there are. Their weights and probabilities are those of a draw; `name`: of the one whose chances they take
  // again.
  int gather(const int64_t* keys, int n, double beta, const BatchPointers& out, const DrawName* name = nullptr) {
    chance_.clear();
    if (name) take_chances(*name, 0, n);
    find_keys(keys, n);
    for (;;) {
      const int count = static_cast<int>(items_.size());
      todo_.resize(count);
      for (int i = 0; i < count; i++) todo_[i] = i;
      TORCHREPLAY_FAULT("gather.found");
      RewriteWatch watch(memory_.header());
      copy(out);
      copy_rewritten(watch, out, {});
      if (todo_.empty()) break;
      size_t kept = 0, failed = 0;
      for (size_t i = 0; i < items_.size(); i++)
        if (failed < todo_.size() && todo_[failed] == static_cast<int>(i))
          failed++;
        else
          items_[kept++] = items_[i];
      items_.resize(kept);
    }
    drawn_from_.beta = beta;
    finish(static_cast<int>(items_.size()), beta, out);
    return static_cast<int>(items_.size());
  }

  // Draws `n` items, stratified; with replacement, unless the segment keeps epochs. O(n (log capacity + bytes of an
  // item)), and O(capacity) when an epoch begins. Throws what a wait for the mutex throws. A draw that throws, or ends
  // otherwise, is not counted, and its items stay due.
  Draw sample(int n, double beta, const DrawName& name, const BatchPointers& out, Shortage& shortage,
              const Patience& patience = {}, const EpochRules& rules = {}) {
    LearnerTurn turn(memory_);
    CountedDraw counted(memory_.header());
    TakenItems taken(*this);
    items_.resize(n);
    todo_.resize(n);
    for (int i = 0; i < n; i++) todo_[i] = i;
    RewriteWatch watch(memory_.header());
    for (uint32_t round = 0; round < kRounds; round++) {
      const Draw outcome = draw(n, name, round, shortage, patience, turn, counted, rules);
      if (outcome != Draw::kDone) return outcome;
      taken.begin();
      TORCHREPLAY_FAULT("draw.drawn");
      copy(out);
      TORCHREPLAY_FAULT("draw.copied");
      copy_rewritten(watch, out, patience);
      if (todo_.empty()) {
        drawn_from_.beta = beta;
        finish(count(), beta, out);
        counted.keep();
        taken.keep();
        return Draw::kDone;
      }
      memory_.header().redraws.fetch_add(todo_.size(), std::memory_order_relaxed);
      TORCHREPLAY_FAULT("draw.failed");
    }
    return Draw::kLapped;
  }

 private:
  // Less than this is not worth another thread's while.
  static constexpr uint64_t kPartBytes = uint64_t{512} << 10;
  static constexpr int kPartItems = 16;

  // A part of the items to copy; afterwards those that were not copied, and the slots of their rows.
  struct Part {
    std::vector<int> todo;
    std::vector<uint64_t> touched;
  };

  // What one thread copies with.
  class Copier {
   public:
    Copier(SegmentMemory& m, const ItemPlan* plan) : rows_(m) {
      if (plan) items_.emplace(m, *plan);
    }

    void keep_touched(const std::vector<DrawnItem>& items, std::vector<int>& todo, const RewriteWatch& watch) {
      items_ ? items_->keep_touched(items, todo, watch) : rows_.keep_touched(items, todo, watch);
    }

    void copy(const std::vector<DrawnItem>& items, Part& part, const BatchPointers& out) {
      if (!items_) return rows_.gather(items, part.todo, out);
      items_->gather(items, part.todo, out);
      part.touched = items_->touched();
    }

   private:
    RowGather rows_;
    std::optional<ItemGather> items_;
  };

  // What a draw without replacement has taken. Unless it is kept it is due again, if the lock comes free at once.
  class TakenItems {
   public:
    explicit TakenItems(BatchSampler& sampler) : sampler_(sampler) {}
    ~TakenItems() {
      if (begun_) sampler_.give_back();
    }
    TakenItems(const TakenItems&) = delete;

    void begin() { begun_ = sampler_.keeps_epochs_; }
    void keep() { begun_ = false; }

   private:
    BatchSampler& sampler_;
    bool begun_ = false;
  };

  // After so many redraws of one batch the ring turns faster than a batch is copied.
  static constexpr uint32_t kRounds = 64;
  // Takes no chance: nothing is relabelled.
  static constexpr uint64_t kNoChance = std::numeric_limits<uint64_t>::max();
  // Marks the stream of random words that items use for themselves.
  static constexpr uint64_t kChances = uint64_t{1} << 47;  // rounds lie below
  // Marks the one that turns the strata of a draw without replacement.
  static constexpr uint64_t kTurns = uint64_t{1} << 46;

  // Draws the items of todo_. Round 0 is the draw itself; later rounds redraw in the same strata.
  Draw draw(int n, const DrawName& name, uint32_t round, Shortage& shortage, const Patience& patience,
            LearnerTurn& turn, CountedDraw& counted, const EpochRules& rules) {
    const int count = static_cast<int>(todo_.size());
    fill_random(count, name, round);
    Header& h = memory_.header();
    shortage.seen = h.rows_signal.load(std::memory_order_acquire);
    SegmentLock lock(memory_, patience);
    if (h.stopped.load(std::memory_order_relaxed)) return Draw::kStopped;
    if (round) resync_failed();
    // A redraw absorbs too: a learner that slept while the ring turned would find one stale leaf after the other.
    turn.absorb(lock);
    TORCHREPLAY_FAULT("draw.absorbed");
    const PriorityTree tree = memory_.tree();
    if (tree.total() == 0) counted.take_back();  // it waits, as one that begins does
    if (!counted && is_over(rules)) return Draw::kEpochOver;
    const auto lacks_items = [&] {
      return (!counted && !Limiter(h).can_sample(most_of(n, rules))) || tree.total() == 0;
    };
    // Those it admits may write all that is missing before it sleeps.
    while (lacks_items() && !announce_wait(most_of(n, rules), shortage)) turn.absorb(lock);
    pending_ = h.pending;
    if (lacks_items()) {
      turn.wait_for_rows();
      TORCHREPLAY_FAULT("draw.waits");
      const bool barren = tree.total() == 0 && h.absorbed > h.completed_at + 2 * memory_.capacity();
      return barren ? Draw::kBarren : Draw::kWait;
    }
    if (keeps_epochs_) {
      if (const Draw due = find_due(n, name, round, rules); due != Draw::kDone) return due;
      if (counted) counted.recount(items_.size());
    } else {
      find(tree, n);
    }
    if (!round) note_tree(tree);
    if (!counted) {
      counted.count(static_cast<int>(items_.size()));
      h.demand = 0;  // another learner that still waits will say so again
    }
    publish_limit(memory_);
    return Draw::kDone;
  }

  void fill_random(int count, const DrawName& name, uint32_t round) {
    random_.resize(count);
    philox_fill(name.seed, name.stream | uint64_t{round} << 32, name.step, random_.data(), count);
    take_chances(name, round, count);
  }

  // Shows writers what a draw of `n` waits for, and which ticket wakes it. False: that one was taken meanwhile, and its
  // writer may have seen nobody to wake. The lock is held.
  bool announce_wait(int n, Shortage& shortage) {
    Header& h = memory_.header();
    Limiter limiter(h);
    shortage = {h.inserted, limiter.needed(n), static_cast<uint64_t>(memory_.tree().count()), shortage.seen};
    const uint64_t missing = shortage.needed > h.inserted ? shortage.needed - h.inserted : 1;
    // Once a turn at the least: what is overwritten unseen never counts.
    const uint64_t wake_at = h.absorbed + std::min(missing, memory_.capacity()) - 1;
    // Before writers are admitted: one on another processor is done before the next line, and then sleeps.
    if (!h.importer && wake_at < h.wake_at.load(std::memory_order_relaxed))
      h.wake_at.store(wake_at, std::memory_order_seq_cst);
    TORCHREPLAY_FAULT("draw.wakes_at");
    limiter.demand(n);
    TORCHREPLAY_FAULT("draw.demanded");
    publish_limit(memory_);
    return h.importer || h.head.load(std::memory_order_seq_cst) <= wake_at;
  }

  // The lock is held.
  void note_tree(const PriorityTree& tree) {
    const double unit = keeps_epochs_ ? 1 : tree.unit();
    const auto smallest = static_cast<double>(mass_of(tree, tree.min()));  // as weights are made of it
    drawn_from_ = {static_cast<double>(total_of(tree)) * unit, smallest * unit, tree.count()};
  }

  // What P is made of, in grid units. Of all epochs together each item has the same share.
  uint64_t mass_of(const PriorityTree& tree, float leaf) const { return keeps_epochs_ ? 1 : tree.quantize(leaf); }
  uint64_t total_of(const PriorityTree& tree) const {
    return keeps_epochs_ ? static_cast<uint64_t>(tree.count()) : tree.total();
  }

  // Random words for `count` items' own use, where they have one.
  void take_chances(const DrawName& name, uint32_t round, int count) {
    if (!plan_ || !plan_->takes_chances()) return;
    chance_.resize(count);
    philox_fill(name.seed, name.stream | uint64_t{round} << 32 | kChances, name.step, chance_.data(), count);
  }

  // A row that changed under a draw makes its item undrawable here, so that the redraw cannot fail on it again. So does
  // an item whose rows do not lead to each other, although none has changed: they say something wrong about their
  // steps.
  void resync_failed() {
    const uint64_t head = memory_.header().head.load(std::memory_order_acquire);
    Absorber absorber(memory_);
    for (int i : todo_) absorber.resync(items_[i].slot, head);
    for (const auto& part : parts_)
      for (uint64_t slot : part.touched) absorber.resync(slot, head);
    if (!plan_) return;
    ItemGather look(memory_, *plan_);
    for (int i : todo_) {
      const DrawnItem& item = items_[i];
      const bool stays = memory_.at(item.slot) == item.key1 && memory_.tree().leaf(static_cast<int64_t>(item.slot)) > 0;
      if (stays && !look.is_whole(item)) absorber.give_up(item.slot);
    }
  }

  void find_keys(const int64_t* keys, int n) {
    items_.clear();
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
      if (memory_.at(slot) != key + 1 || !(leaf > 0)) continue;
      items_.push_back({slot, key + 1, mass_of(tree, leaf), total_of(tree), min_mass, tree.count(),
                        chance_.empty() ? kNoChance : chance_[i]});
    }
  }

  void find(const PriorityTree& tree, int n) {
    const int count = static_cast<int>(todo_.size());
    const uint64_t total = tree.total();
    target_.resize(count);
    index_.resize(count);
    leaf_.resize(count);
    const Strata strata(total, static_cast<uint64_t>(n));
    for (int k = 0; k < count; k++) target_[k] = strata.target(static_cast<uint64_t>(todo_[k]), random_[k]);
    tree.find(target_.data(), count, index_.data(), leaf_.data(), &memory_.at(0));
    const uint64_t min_mass = tree.quantize(tree.min());
    DrawnItems drawn(memory_);
    for (int k = 0; k < count; k++) {
      const auto slot = static_cast<uint64_t>(index_[k]);
      drawn.mark(slot);
      items_[todo_[k]] = {slot,     memory_.at(slot), tree.quantize(leaf_[k]),         total,
                          min_mass, tree.count(),     chance_.empty() ? 0 : chance_[k]};
    }
  }

  // Whether the last epoch has nothing left to draw. An empty buffer may still get its first items.
  bool is_over(const EpochRules& rules) const {
    if (rules.last == kNever || epochs_.ended() < rules.last) return false;
    return epochs_.ended() > rules.last || (epochs_.due() == 0 && memory_.tree().count() > 0);
  }

  // How many items a draw of `n` can have.
  int most_of(int n, const EpochRules& rules) const {
    if (rules.last == kNever) return n;
    const uint64_t due = epochs_.due(), there = due ? due : static_cast<uint64_t>(memory_.tree().count());
    return there ? static_cast<int>(std::min<uint64_t>(n, there)) : n;
  }

  // Draws the items of todo_ from those that are due. Where fewer are than it needs and the rules let no other epoch
  // begin, the batch becomes shorter. Then all of it is to be copied.
  Draw find_due(int n, const DrawName& name, uint32_t round, const EpochRules& rules) {
    const bool bounded = rules.last != kNever;
    const auto left = [&] { return epochs_.ended() > rules.last ? 0 : epochs_.due(); };
    if (round) give_back_failed();
    fresh_ = todo_;
    if (left() < fresh_.size()) {
      const bool empty = fresh_.size() == items_.size();  // no item of it is there yet
      if (!bounded && !rules.may_begin && empty) return Draw::kEpochEnds;
      if (bounded && empty && left() == 0) {
        if (epochs_.ended() >= rules.last) return Draw::kEpochOver;
        if (!rules.may_begin) return Draw::kEpochEnds;
        epochs_.begin();
        items_.resize(static_cast<size_t>(n));
        todo_ = fresh_ = iota(n);
        fill_random(n, name, round);
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
      take_due(from, many, turn);
      from += many;
    }
    put_off_no_longer();
    if (!fresh_.empty()) epoch_ = epochs_.ended();
    return Draw::kDone;
  }

  static std::vector<int> iota(int n) {
    std::vector<int> all(static_cast<size_t>(n));
    for (int i = 0; i < n; i++) all[static_cast<size_t>(i)] = i;
    return all;
  }

  // Only so many of fresh_ can be drawn: the others leave the batch.
  void shorten(uint64_t most) {
    if (fresh_.size() == items_.size()) {
      items_.resize(most);
      todo_ = fresh_ = iota(static_cast<int>(most));
      return;
    }
    size_t kept = 0, next = 0;
    std::vector<int> drawn;
    for (size_t i = 0; i < items_.size(); i++) {
      const bool failed = next < fresh_.size() && fresh_[next] == static_cast<int>(i);
      if (failed && next++ >= most) continue;
      if (failed) drawn.push_back(static_cast<int>(kept));
      items_[kept++] = items_[i];
    }
    items_.resize(kept);
    fresh_ = std::move(drawn);
    todo_ = iota(static_cast<int>(kept));
  }

  // Begins an epoch for a batch that the one before has not filled: its items come again only after all others.
  void begin_within(size_t drawn) {
    epochs_.begin();
    early_.clear();
    size_t next = 0;
    for (size_t i = 0; i < items_.size(); i++) {
      const bool fresh = next < fresh_.size() && fresh_[next] == static_cast<int>(i);
      if (fresh && next++ >= drawn) continue;
      const DrawnItem& item = items_[i];
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
  void take_due(size_t from, size_t many, uint64_t turn) {
    __extension__ using Wide = unsigned __int128;
    const PriorityTree tree = memory_.tree();
    const uint64_t due = epochs_.due(), first = static_cast<uint64_t>(Wide{turn} * due >> 64);
    const Strata strata(due, many);
    target_.resize(many);
    index_.resize(many);
    leaf_.resize(many);
    for (size_t k = 0; k < many; k++) {
      const uint64_t rank = first + strata.target(k, random_[from + k]);
      target_[k] = epochs_.target(rank < due ? rank : rank - due);
    }
    tree.find(target_.data(), static_cast<int>(many), index_.data(), leaf_.data(), &memory_.at(0));
    const auto items = static_cast<uint64_t>(tree.count());
    DrawnItems drawn(memory_);
    for (size_t k = 0; k < many; k++) {
      const auto slot = static_cast<uint64_t>(index_[k]);
      drawn.mark(slot);
      items_[fresh_[from + k]] = {
          slot, memory_.at(slot), 1, items, 1, tree.count(), chance_.empty() ? 0 : chance_[from + k]};
    }
    epochs_.take(index_.data(), static_cast<int>(many));
  }

  static int64_t key_of(const DrawnItem& item) { return static_cast<int64_t>(item.key1) - 1; }

  // The items of todo_ could not be copied. Those that are there still are due.
  void give_back_failed() {
    std::vector<int64_t> keys(todo_.size());
    std::ranges::transform(todo_, keys.begin(), [&](int i) { return key_of(items_[i]); });
    epochs_.give_back_keys(epoch_, keys);
  }

  // All items are due again, unless the lock is another's, who may be stopped: then in the next epoch.
  void give_back() {
    std::vector<int64_t> keys(items_.size());
    std::ranges::transform(items_, keys.begin(), key_of);
    const Undisturbed here;
    try {
      const SegmentLock lock(memory_, {.deadline = 0});
      epochs_.give_back_keys(epoch_, keys);
    } catch (...) {
    }
  }

  // Copies the items of todo_, and leaves in it those that were not what was drawn.
  void copy(const BatchPointers& out) {
    const int count = static_cast<int>(todo_.size());
    const int parts = parts_of(count, out.bytes);
    const int threads = std::min(threads_, parts);
    parts_.resize(static_cast<size_t>(parts));
    copiers_.resize(std::max(copiers_.size(), static_cast<size_t>(threads)));
    for (int p = 0; p < parts; p++)
      parts_[p].todo.assign(todo_.begin() + count * int64_t{p} / parts,
                            todo_.begin() + count * (int64_t{p} + 1) / parts);
    ThreadPool::instance().run(threads, parts, [&](int worker, int p) {
      auto& copier = copiers_[worker];
      if (!copier) copier.emplace(memory_, plan_);
      copier->copy(items_, parts_[p], out);
    });
    todo_.clear();
    for (const Part& part : parts_) todo_.insert(todo_.end(), part.todo.begin(), part.todo.end());
  }

  // If rows were rewritten since `watch` looked, copies again the items that hold some of them, or that failed. Nobody
  // rewrites under the lock, so all that was copied is of one moment: a row in two items is the same in both.
  void copy_rewritten(RewriteWatch& watch, const BatchPointers& out, const Patience& patience) {
    if (!watch.any() || (todo_.empty() && touched(watch).empty())) return;
    TORCHREPLAY_FAULT("draw.rewritten");
    const SegmentLock lock(memory_, patience);
    const std::vector<int> again = touched(watch);
    todo_.insert(todo_.end(), again.begin(), again.end());
    std::ranges::sort(todo_);
    copy(out);
    watch = RewriteWatch(memory_.header());
    TORCHREPLAY_FAULT("draw.copied_again");
  }

  // Of the items that were copied those that hold a row which was rewritten, or is gone by now.
  std::vector<int> touched(const RewriteWatch& watch) {
    std::vector<int> copied;
    size_t failed = 0;
    for (int i = 0; i < static_cast<int>(items_.size()); i++)
      if (failed < todo_.size() && todo_[failed] == i)
        failed++;
      else
        copied.push_back(i);
    if (auto& copier = copiers_[0]) copier->keep_touched(items_, copied, watch);  // the first is there from the start
    return copied;
  }

  int parts_of(int count, uint64_t bytes) const {
    if (threads_ == 1 || bytes < 2 * kPartBytes) return 1;
    return static_cast<int>(std::clamp<uint64_t>(bytes / kPartBytes, 1, std::max(1, count / kPartItems)));
  }

  // P(i) = p_i / sum and w_i = (N P(i))^-beta, normalised by the maximum over the buffer or the batch
  // (Schaul et al. 2016, equation 1 and section 3.4). N and sum cancel in a normalised weight.
  void finish(int n, double beta, const BatchPointers& out) const {
    for (int i = 0; i < n; i++) out.keys[i] = static_cast<int64_t>(items_[i].key1) - 1;
    const Normalize normalize = memory_.header().sampler.normalize;
    double smallest = 1;  // probability of the batch
    for (int i = 0; i < n; i++) {
      const DrawnItem& item = items_[i];
      const double p = static_cast<double>(item.mass) / static_cast<double>(item.total);
      smallest = std::min(smallest, p);
      out.probability[i] = static_cast<float>(p);
    }
    for (int i = 0; i < n; i++) {
      const DrawnItem& item = items_[i];
      const auto mass = static_cast<double>(item.mass), total = static_cast<double>(item.total);
      const double base = normalize == Normalize::kBuffer  ? static_cast<double>(item.min_mass) / mass
                          : normalize == Normalize::kBatch ? smallest * total / mass
                                                           : total / (static_cast<double>(item.drawable) * mass);
      out.weight[i] = static_cast<float>(base);
    }
    power(out.weight, n, static_cast<float>(beta));
  }

  SegmentMemory& memory_;
  const ItemPlan* plan_;
  Epochs epochs_;
  bool keeps_epochs_;
  uint64_t epoch_ = 0;
  std::vector<int> fresh_;      // items that find_due() draws
  std::vector<int64_t> early_;  // slots of those of the epoch that ended in it
  int threads_ = 1;
  std::vector<std::optional<Copier>> copiers_;  // of each thread
  std::vector<Part> parts_;
  uint64_t pending_ = 0;
  DrawnFrom drawn_from_;
  std::vector<DrawnItem> items_;
  std::vector<int> todo_;
  std::vector<uint64_t> random_, target_, chance_;
  std::vector<int64_t> index_;
  std::vector<float> leaf_;
};

}  // namespace torchreplay
