// What a learner has ordered and handed over: batches to draw, and TD errors to apply between the draws.
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "draw/batch_sampler.h"
#include "prefetch/feedback_queue.h"

namespace torchreplay {

// Is told that an order is drawn, by the thread that has drawn it, before that is taken.
class DrawListener {
 public:
  virtual ~DrawListener() = default;
  virtual void drawn(int n, const DrawnFrom& from) noexcept = 0;
};

// A batch to be drawn, and where it goes: memory that stays until the order is taken, or given up.
struct Order {
  int n = 0;
  double beta = 0;
  DrawName name;
  BatchPointers out;
  int threads = 1;  // that may share the copies
  DrawRules rules = {};
  uint64_t epoch = 0;                  // once it is drawn, and then `n` is the number of its items
  uint64_t updated = 0, fed_back = 0;  // TD errors applied before: all others, and those handed over here
  DrawnFrom drawn_from = {};           // once it is drawn
  std::shared_ptr<DrawListener> listener = nullptr;
};

// What a caller wants to find done, as of the moment when it says so.
struct SettlePoint {
  uint64_t feedback;  // of what was handed over, the first so many
  bool draws;         // all that is ordered
};

// The work, piece by piece, and its results. One thread at a time does it. All calls are under the user's lock unless
// they say otherwise.
class PrefetchQueue {
 public:
  // What the draw that waits needs.
  struct Short {
    Shortage shortage;
    bool barren = false;  // the ring turned without completing an item
    bool news = true;     // nobody was told
  };

  // Draws that have not happened.
  struct GivenUp {
    uint64_t draws = 0, items = 0;
    // By epoch: keys that it has not drawn then. Of a queue: keys of items that go back.
    std::vector<std::pair<uint64_t, std::vector<int64_t>>> due;
  };

  // `plan` as for BatchSampler. `outstanding` counts what is to be done, by all who share it. All must outlive the
  // object.
  PrefetchQueue(SegmentMemory& m, const ItemPlan* plan, Outstanding& outstanding)
      : memory_(m), outstanding_(outstanding), sampler_(m, plan), feedback_(m, outstanding) {}
  PrefetchQueue(const PrefetchQueue&) = delete;

  // --- for the learner ---

  void order(Order o) {
    orders_.push_back(std::move(o));
    outstanding_.draws.fetch_add(1, std::memory_order_relaxed);
  }

  // Takes over TD errors, to be applied after what is ordered. What is left of them is memory for others. False:
  // nothing was taken.
  bool enqueue_feedback(Feedback& feedback) {
    if (failed()) return false;
    if (!memory_.header().sampler.prioritized) return false;  // there is next to nothing to do
    if (short_ && feedback_.empty()) return false;            // nobody knows how long the draws before it will wait
    if (feedback_.waiting() > kMostWaiting) return false;
    feedback_.push(taken_ + orders_.size(), feedback);
    return true;
  }

  // Takes the oldest order: kDone. Otherwise it is not drawn. kWait: the drawing thread may have found anew that items
  // are missing: then `shortage` says how many. kBarren: and the ring turned without completing one. Others: the draw
  // cannot be made, nor can those after it. Rethrows why not.
  Draw take(std::optional<Shortage>& shortage) {
    shortage.reset();
    if (done_) {
      const Order& order = orders_.front();
      missed_updates_ =
          updated_by_others() - order.updated + feedback_.updated() - order.fed_back + feedback_.waiting();
      drawn_from_ = order.drawn_from;
      count_ = order.n;
      orders_.pop_front();
      done_--;
      taken_++;
      return Draw::kDone;
    }
    if (error_) std::rethrow_exception(error_);
    if (failed()) return outcome_;
    if (short_ && std::exchange(short_->news, false)) {
      if (short_->barren) return Draw::kBarren;
      shortage = short_->shortage;
    }
    return Draw::kWait;
  }

  // Whether take() has something to report.
  bool has_news() const { return done_ || failed() || (short_ && short_->news); }

  // Of the order taken last, for the thread that took it, without the lock: TD errors that were fed back between its
  // draw and its taking, and what it was drawn from.
  uint64_t missed_updates() const { return missed_updates_; }
  const DrawnFrom& drawn_from() const { return drawn_from_; }
  int count() const { return count_; }  // its items

  SettlePoint settle_point(bool draws) const { return {feedback_.pushed(), draws}; }

  // Whether that is applied; and drawn, or waiting for items that have not come.
  bool is_settled(const SettlePoint& point) const {
    if (feedback_.done() < point.feedback) return false;
    if (!point.draws || all_drawn() || failed() || holds_) return true;
    return short_ && short_->shortage.seen == memory_.header().rows_signal.load(std::memory_order_acquire);
  }

  // How many orders are drawn and not taken, and these, the oldest first. Their memory is written to no more.
  size_t finished() const { return done_; }
  std::vector<Order> drawn() const { return {orders_.begin(), orders_.begin() + static_cast<ptrdiff_t>(done_)}; }

  // --- for the working thread ---

  void begin() {
    outcome_ = Draw::kDone;
    error_ = nullptr;
    short_.reset();
    demanded_ = false;
    holds_ = false;
  }

  bool all_drawn() const { return done_ == orders_.size(); }
  bool is_feedback_due() const { return feedback_.due(taken_ + done_); }
  bool has_work() const { return !all_drawn() || is_feedback_due(); }
  bool has_feedback() const { return !feedback_.empty(); }
  bool is_short() const { return short_.has_value(); }
  bool failed() const { return outcome_ != Draw::kDone; }

  // Lets go of the lock meanwhile. What throws leaves it there.
  void apply_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    feedback_.apply_first(lock, patience);
  }

  // What was handed over is stale. The memory's lock is not held: a count that its holder changes may be off.
  void drop_feedback() {
    while (!feedback_.empty())
      __atomic_fetch_add(&memory_.header().stale_updates, feedback_.drop_first(), __ATOMIC_RELAXED);
  }

  // The oldest that is not drawn. It stays where it is.
  Order& first() {
    if (at_least_) orders_[done_].rules.at_least = at_least_;
    return orders_[done_];
  }

  // Batches of a queue that are drawn from now on may be as short.
  void accept(int at_least) { at_least_ = at_least; }

  // Without the lock. Where it is kDone, note_drawn() follows.
  Draw draw(Order& order, Shortage& shortage, const Patience& patience) {
    sampler_.set_threads(order.threads);
    const Draw outcome = sampler_.sample(order.n, order.beta, order.name, order.out, shortage, patience, order.rules);
    demanded_ = outcome != Draw::kDone && outcome != Draw::kEpochEnds;
    order.drawn_from = sampler_.drawn_from();
    if (outcome != Draw::kDone) return outcome;
    order.n = sampler_.count();
    order.epoch = sampler_.epoch();
    return outcome;
  }

  // Without the lock, after draw(). Whoever waits for the order may do more than note that.
  static void tell(const Order& order) {
    if (order.listener) order.listener->drawn(order.n, order.drawn_from);
  }

  // Without the lock. Whether the last draw met rows that wait for others, whose writers may be dead.
  bool met_pending() const { return sampler_.pending(); }

  void note_drawn(Order& order) {
    order.updated = updated_by_others();
    order.fed_back = feedback_.updated();
    done_++;
    short_.reset();
    outstanding_.draws.fetch_sub(1, std::memory_order_release);
  }

  void note_short(const Short& what) { short_ = what; }

  // The first that is not drawn would begin an epoch. It waits until the batches before it are taken, and it is asked
  // for: one that is given up could not end that epoch again.
  void note_held(bool holds) { holds_ = holds; }

  void fail(Draw outcome, std::exception_ptr error) {
    outcome_ = outcome;
    error_ = std::move(error);
    short_.reset();
  }

  // Gives up all orders. Nobody is at work.
  GivenUp give_up() {
    GivenUp given_up;
    const Header& h = memory_.header();
    const bool go_back = Epochs::are_kept(h) || Claims::are_kept(h) || DrawCounts::are_kept(h);
    for (size_t i = 0; i < done_; i++) {
      const Order& order = orders_[i];
      given_up.items += static_cast<uint64_t>(order.n);
      if (go_back)
        given_up.due.emplace_back(order.epoch, std::vector<int64_t>(order.out.keys, order.out.keys + order.n));
    }
    given_up.draws = std::exchange(done_, 0);
    outstanding_.draws.fetch_sub(static_cast<int>(orders_.size() - given_up.draws), std::memory_order_relaxed);
    orders_.clear();
    return given_up;
  }

  // Without the lock, when nobody is at work: uncounts them, with the demand of one that waited. Where the memory's
  // lock does not come free, the next draw withdraws the demand.
  void take_back(const GivenUp& given_up) {
    if (!given_up.draws && !demanded_) return;
    Header& h = memory_.header();
    CountedDraw::uncount(h, given_up.draws, given_up.items);
    const Undisturbed here;  // a signal is no reason to leave it
    try {
      const SegmentLock lock(memory_, {.deadline = monotonic_ns() + kSliceNs});
      h.demand = 0;  // or writers would go on running ahead for a learner that does not come
      for (const auto& [epoch, keys] : given_up.due) {
        if (DrawCounts::are_kept(h)) DrawCounts(memory_).give_back(keys);
        if (Epochs::are_kept(h)) Epochs(memory_).give_back_keys(epoch, keys);
        if (Claims::are_kept(h)) Claims(memory_).release(keys, memory_.presence());
      }
      publish_limit(memory_);
    } catch (const LockTimeout&) {
      for (const auto& [epoch, keys] : given_up.due)
        if (Claims::are_kept(h) || DrawCounts::are_kept(h)) memory_.owed().add(keys);
    }
    if (Claims::are_kept(h)) futex_signal(h.rows_signal);
  }

 private:
  static constexpr uint64_t kMostWaiting = 1 << 20;  // TD errors: a caller so far ahead of the work waits for it

  // TD errors that were applied, without those handed over here. Of a time shortly ago when such are being applied.
  uint64_t updated_by_others() {
    if (!feedback_.applying())
      updated_by_others_ = __atomic_load_n(&memory_.header().updated, __ATOMIC_RELAXED) - feedback_.updated();
    return updated_by_others_;
  }

  SegmentMemory& memory_;
  Outstanding& outstanding_;
  BatchSampler sampler_;   // this and the next are whose thread draws
  bool demanded_ = false;  // the last draw may have left a demand
  bool holds_ = false;     // see note_held()
  int at_least_ = 0;       // see accept()
  std::deque<Order> orders_;
  uint64_t taken_ = 0;  // orders before those
  size_t done_ = 0;     // of the orders, the oldest: drawn, and not taken
  FeedbackQueue feedback_;
  uint64_t updated_by_others_ = 0;
  Draw outcome_ = Draw::kDone;  // of the first draw that could not be made
  std::exception_ptr error_;
  std::optional<Short> short_;
  uint64_t missed_updates_ = 0;
  DrawnFrom drawn_from_;
  int count_ = 0;
};

}  // namespace torchreplay
