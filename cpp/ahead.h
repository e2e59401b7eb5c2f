// Drawing batches before they are asked for, in a thread of the learner's own, which also feeds back.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>

#include "feedback.h"
#include "pace.h"
#include "participants.h"
#include "sample.h"

namespace torchreplay {

// A batch to be drawn, and where it goes: memory that stays until the order is taken, or the thread has ended.
struct Order {
  int n = 0;
  double beta = 0;
  DrawName name;
  BatchPointers out;
  int threads = 1;                     // that may share the copies
  uint64_t updated = 0, fed_back = 0;  // TD errors applied before: all others, and those handed over here
  DrawnFrom drawn_from = {};           // once it is drawn
  int64_t took_ns = 0;                 // the draw, without its waits for items
};

// Draws what was ordered, in that order, and one batch after the other, and applies what was handed over in its turn.
// The thread does that, or while it sleeps whoever waits for it: to wake it takes several times as long as a draw. All
// but claim(), settled(), settle() and hand_over() is for one thread at a time.
class DrawAhead {
 public:
  // What a caller wants to find done, as of the moment when it says so.
  struct Claim {
    uint64_t feedback;  // of what was handed over, the first so many
    bool draws;         // all that is ordered
  };

  // `plan` as for BatchSampler. `backlog` counts what is to be done, by all who share it. All must outlive the object.
  DrawAhead(SegmentMemory& m, const ItemPlan* plan, Backlog& backlog)
      : memory_(m), backlog_(backlog), sampler_(m, plan), feedback_(m, backlog) {}
  ~DrawAhead() {
    try {
      close();
    } catch (...) {  // a lock table that cannot be read: the limiter takes the draws for made
    }
  }
  DrawAhead(const DrawAhead&) = delete;

  // False in a forked child, which has not got the thread. Nothing else may be called there, not even the destructor:
  // the thread may have held the lock.
  bool here() const { return generation_ == fork_generation.load(std::memory_order_relaxed); }

  void order(Order o) {
    if (!running_) start();
    bool unattended;
    {
      const std::lock_guard guard(mutex_);
      pace_.note_order(monotonic_ns());
      orderer_ = pthread_self();
      orders_.push_back(std::move(o));
      backlog_.draws.fetch_add(1, std::memory_order_relaxed);
      if (!pace_.allows_doze(done_)) dozing_ = false;  // orders come sooner than the thread thinks
      unattended = asleep_ && !dozing_;
    }
    if (unattended) ordered_.notify_one();  // not under the mutex, for which it would only go back to sleep
  }

  // Takes over TD errors, to be applied after what this thread has ordered and before what it orders from now on: as if
  // it had waited for the draws and applied them itself: the drawing thread has the time, and learners have other
  // things in their caches. What is left of it is memory for another. False: nothing was taken.
  bool hand_over(Feedback& feedback) {
    bool unattended;
    {
      const std::lock_guard guard(mutex_);
      if (!running_ || outcome_ != Draw::kDone || !ordered_by_caller()) return false;
      if (!memory_.header().sampler.prioritized) return false;  // there is next to nothing to do
      if (short_ && feedback_.empty()) return false;            // nobody knows how long the draws before it will wait
      if (feedback_.waiting() > kMostWaiting) return false;
      feedback_.push(taken_ + orders_.size(), feedback);
      unattended = asleep_ && !dozing_ && done_ == orders_.size();  // or it was woken when the order came
    }
    if (unattended) ordered_.notify_one();
    return true;
  }

  // Takes the oldest order, once it is drawn: kDone. kWait: not yet after `ns`, or, at once, when the thread has found
  // anew that it must wait for items: then `shortage` tells how many. kBarren: it waits for items, and the ring turned
  // without completing one. Otherwise the draw cannot be made, nor can those after it. Rethrows what the thread threw.
  Draw take(int64_t ns, std::optional<Shortage>& shortage) {
    shortage.reset();
    std::unique_lock lock(mutex_);
    if (!done_ && ns > 0) wait(lock, ns);
    if (done_) {
      const Order& order = orders_.front();
      missed_updates_ =
          updated_by_others() - order.updated + feedback_.updated() - order.fed_back + feedback_.waiting();
      drawn_from_ = order.drawn_from;
      took_ns_ = order.took_ns;
      orders_.pop_front();
      done_--;
      taken_++;
      return Draw::kDone;
    }
    if (error_) std::rethrow_exception(error_);
    if (outcome_ != Draw::kDone) return outcome_;
    if (short_ && std::exchange(short_->news, false)) {
      if (short_->barren) return Draw::kBarren;
      shortage = short_->shortage;
    }
    return Draw::kWait;
  }

  // TD errors that were fed back between the draw of the batch taken last and its taking.
  uint64_t missed_updates() const { return missed_updates_; }

  // What that batch was drawn from.
  const DrawnFrom& drawn_from() const { return drawn_from_; }
  // How long the draw of the batch taken last took, without its waits for items.
  int64_t took_ns() const { return took_ns_; }

  // Whether the caller is the one who orders.
  bool is_orderer() {
    const std::lock_guard guard(mutex_);
    return ordered_by_caller();
  }

  // What was handed over, and where the caller is the one who orders, and wants it, what it ordered.
  Claim claim(bool draws) {
    const std::lock_guard guard(mutex_);
    return {feedback_.pushed(), draws && ordered_by_caller()};
  }

  // Whether that is applied; and drawn, or waiting for items that have not come.
  bool settled(const Claim& claim) {
    const std::lock_guard guard(mutex_);
    return is_settled(claim);
  }

  // Waits for it, for `ns` at most; false: it still is not.
  bool settle(const Claim& claim, int64_t ns) {
    std::unique_lock lock(mutex_);
    return await(lock, ns, [&] { return is_settled(claim); });
  }

  // How many orders are drawn and not taken. Their memory is written to no more.
  size_t finished() {
    const std::lock_guard guard(mutex_);
    return done_;
  }

  // The orders that are drawn and not taken, the oldest first.
  std::vector<Order> drawn() {
    const std::lock_guard guard(mutex_);
    return {orders_.begin(), orders_.begin() + static_cast<ptrdiff_t>(done_)};
  }

  // Ends the thread, and the draws that nobody took: they have not happened. What was handed over is applied, unless
  // the memory's lock does not come free: then it is dropped, and counted as stale.
  void close() {
    if (running_) end_thread();
    const Undisturbed here;  // a signal is no reason to leave them
    const Patience patience{.deadline = monotonic_ns() + kClosingNs};
    std::unique_lock lock(mutex_);
    try {
      while (!feedback_.empty()) apply_first(lock, patience);
    } catch (...) {
      drop_feedback();
    }
  }

 private:
  static constexpr int64_t kClosingNs = 1'000'000'000;
  static constexpr uint64_t kMostWaiting = 1 << 20;  // TD errors: whoever is so far ahead of the thread waits for it

  void wait(std::unique_lock<std::mutex>& lock, int64_t ns) {
    const int64_t start = monotonic_ns();
    const bool was_short = short_.has_value();
    const auto there = [&] { return done_ || outcome_ != Draw::kDone || (short_ && short_->news); };
    if (dozing_)
      await(lock, ns, there);
    else  // a thread that the order woke is there soon, and draws the batches after this one, too
      drawn_.wait_for(lock, std::chrono::nanoseconds(ns), there);
    const int64_t end = monotonic_ns();
    if (was_short || short_) memory_.header().sample_wait.add(end - start, end);
  }

  // What the draw that waits needs.
  struct Short {
    Shortage shortage;
    uint32_t seen = 0;    // rows_signal when it was found
    bool barren = false;  // the ring turned without completing an item
    bool news = true;     // nobody was told
  };

  // Draws that have not happened, and the demand of the one that waited. Where the memory's lock does not come free
  // they stay counted.
  void take_back(uint64_t draws, uint64_t items) {
    const Undisturbed here;  // a signal is no reason to leave them
    try {
      const Locked lock(memory_, {.deadline = monotonic_ns() + kSliceNs});
      Header& h = memory_.header();
      h.sampled -= items;
      h.draws.fetch_sub(draws, std::memory_order_relaxed);
      h.demand = 0;  // or writers would go on running ahead for a learner that does not come
      publish_limit(memory_);
    } catch (const LockTimeout&) {
    }
  }

  void end_thread() {
    {
      const std::lock_guard guard(mutex_);
      ending_.store(true, std::memory_order_relaxed);
    }
    ordered_.notify_one();
    futex_signal(memory_.header().rows_signal);
    pthread_join(thread_, nullptr);
    uint64_t draws, items = 0;
    {
      std::unique_lock lock(mutex_);
      drawn_.wait(lock, [&] { return !stood_in_; });
      running_ = false;
      for (size_t i = 0; i < done_; i++) items += static_cast<uint64_t>(orders_[i].n);
      draws = std::exchange(done_, 0);
      backlog_.draws.fetch_sub(static_cast<int>(orders_.size() - draws), std::memory_order_relaxed);
      orders_.clear();
      if (const int given_up = sampler_.forget_given_up()) {
        draws++;
        items += static_cast<uint64_t>(given_up);
      }
    }
    drawn_.notify_all();
    if (draws || demanded_) take_back(draws, items);
  }

  void start() {
    const std::lock_guard guard(mutex_);  // which the thread waits for, too
    generation_ = fork_generation.load(std::memory_order_relaxed);
    ending_.store(false, std::memory_order_relaxed);
    outcome_ = Draw::kDone;
    error_ = nullptr;
    short_.reset();
    demanded_ = false;
    // Signals are for the threads that know what to do with them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto body = [](void* self) -> void* {
      static_cast<DrawAhead*>(self)->run();
      return nullptr;
    };
    const int error = pthread_create(&thread_, nullptr, body, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) throw std::system_error(error, std::generic_category(), "cannot start a thread that draws ahead");
    running_ = true;
  }

  void run() {
    unwanted = &ending_;
    try {
      while (Order* order = next()) finish(*order, draw(*order));
    } catch (const Interrupted&) {  // close() waits for nobody
    } catch (const StoppedMeanwhile&) {
      fail(Draw::kStopped, nullptr);
    } catch (...) {
      fail(Draw::kStopped, std::current_exception());
    }
    apply_the_rest();
  }

  // Nothing more is drawn, and nothing more handed over; what has been is applied, unless close() does that.
  void apply_the_rest() {
    std::unique_lock lock(mutex_);
    try {
      while (!feedback_.empty() && !ending()) apply_first(lock, {});
    } catch (const Interrupted&) {
    } catch (...) {
      drop_feedback();
    }
  }

  // The mutex is held.
  void wake() {
    dozing_ = false;
    ordered_.notify_one();
  }

  bool has_work() const { return done_ < orders_.size() || feedback_.due(taken_ + done_); }

  // The oldest order that is not drawn, once all that was handed over before it is applied; nullptr when the thread has
  // to end, or a draw could not be made.
  Order* next() {
    std::unique_lock lock(mutex_);
    for (;;) {
      sleep(lock);
      if (ending() || outcome_ != Draw::kDone) return nullptr;
      if (!feedback_.due(taken_ + done_)) return &orders_[done_];
      apply_first(lock, {});
    }
  }

  // Returns when there is something to do.
  void sleep(std::unique_lock<std::mutex>& lock) {
    const auto called = [&] { return ending() || (!stood_in_ && (has_work() || outcome_ != Draw::kDone)); };
    while (!called()) {
      asleep_ = true;
      met_work_ = has_work();  // which another does: what that leaves is the thread's
      const int64_t doze = pace_.doze_ns(monotonic_ns());
      if (doze > 0 && pace_.allows_doze(done_)) {
        dozing_ = true;
        ordered_.wait_for(lock, std::chrono::nanoseconds(doze), [&] { return ending() || !dozing_; });
        dozing_ = false;
      } else {
        ordered_.wait(lock, called);
      }
    }
    asleep_ = false;
  }

  struct NotDrawn {};

  // The mutex is held. Has done what `done` waits for, for `ns` at most; false: it still is not.
  template <class Done>
  bool await(std::unique_lock<std::mutex>& lock, int64_t ns, const Done& done) {
    if (done()) return true;
    const int64_t until = monotonic_ns() + ns;
    int64_t left = ns;
    for (; left > 0 && stand_in(lock, left); left = until - monotonic_ns()) {
      if (!done()) continue;
      if (has_work() && (!dozing_ || met_work_)) wake();  // it has been up, and has gone back to sleep
      return true;
    }
    wake();
    return drawn_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(left, 0)), done);
  }

  // The mutex is held. Does what the thread would do next while that sleeps. False: it does not, or has nothing to do,
  // or does that better itself: where the memory's lock does not come free in `ns`, or items are missing, or worse.
  bool stand_in(std::unique_lock<std::mutex>& lock, int64_t ns) {
    if (!asleep_ || stood_in_ || ending() || outcome_ != Draw::kDone || !has_work()) return false;
    const Undisturbed here;  // signals are told after `ns`
    const Patience patience{.deadline = monotonic_ns() + ns, .until_stopped = true};
    bool worked = false;
    stood_in_ = true;
    try {
      if (feedback_.due(taken_ + done_))
        feedback_.apply_first(lock, patience);
      else
        draw_first(lock, patience);
      worked = true;
    } catch (...) {  // the thread finds that too, and tells it
      if (!lock.owns_lock()) lock.lock();
    }
    stood_in_ = false;
    drawn_.notify_all();
    return worked;
  }

  // The mutex is held, but not while it draws, nor where that throws.
  void draw_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    Order& order = orders_[done_];  // places stay where they are
    lock.unlock();
    Shortage shortage;
    if (draw_once(order, shortage, patience) != Draw::kDone) throw NotDrawn{};
    lock.lock();
    note_drawn(order);
    if (!sampler_.pending()) return;
    lock.unlock();
    reclaim_dead(memory_);
    lock.lock();
  }

  // The mutex is held.
  void apply_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    feedback_.apply_first(lock, patience);
    drawn_.notify_all();
  }

  // The mutex is held. The memory's lock is not: a count that its holder changes at this moment may be off.
  void drop_feedback() {
    while (!feedback_.empty())
      __atomic_fetch_add(&memory_.header().stale_updates, feedback_.drop_first(), __ATOMIC_RELAXED);
    drawn_.notify_all();
  }

  // For the thread that works, or who stands in.
  Draw draw_once(Order& order, Shortage& shortage, const Patience& patience) {
    const int64_t start = monotonic_ns();
    sampler_.set_threads(order.threads);
    const Draw outcome = sampler_.sample(order.n, order.beta, order.name, order.out, shortage, patience);
    order.took_ns = monotonic_ns() - start;
    demanded_ = outcome != Draw::kDone;
    order.drawn_from = sampler_.drawn_from();
    return outcome;
  }

  Draw draw(Order& order) {
    Header& h = memory_.header();
    for (;;) {
      const uint32_t seen = h.rows_signal.load(std::memory_order_acquire);
      Shortage shortage;
      const Draw outcome = draw_once(order, shortage, {.until_stopped = true});
      if (sampler_.pending()) reclaim_dead(memory_);
      if (outcome != Draw::kWait && outcome != Draw::kBarren) return outcome;
      wait_for_rows({shortage, seen, outcome == Draw::kBarren});
      if (ending()) throw Interrupted{};
      futex_wait(h.rows_signal, seen, kSliceNs);
      if (ending()) throw Interrupted{};
    }
  }

  // Says what the draw waits for. What was handed over does not wait with it.
  void wait_for_rows(Short what) {
    std::unique_lock lock(mutex_);
    short_ = what;
    drawn_.notify_all();
    while (!feedback_.empty()) apply_first(lock, {});
  }

  void finish(Order& order, Draw outcome) {
    if (outcome != Draw::kDone) return fail(outcome, nullptr);
    {
      const std::lock_guard guard(mutex_);
      note_drawn(order);
    }
    drawn_.notify_all();
  }

  // The mutex is held.
  void note_drawn(Order& order) {
    order.updated = updated_by_others();
    order.fed_back = feedback_.updated();
    done_++;
    short_.reset();
    backlog_.draws.fetch_sub(1, std::memory_order_release);
  }

  void fail(Draw outcome, std::exception_ptr error) {
    {
      const std::lock_guard guard(mutex_);
      outcome_ = outcome;
      error_ = std::move(error);
      short_.reset();
    }
    drawn_.notify_all();
  }

  // TD errors that were applied, but for those handed over here. Of a time shortly ago when such are being applied.
  uint64_t updated_by_others() {
    if (!feedback_.applying())
      updated_by_others_ = __atomic_load_n(&memory_.header().updated, __ATOMIC_RELAXED) - feedback_.updated();
    return updated_by_others_;
  }

  bool is_settled(const Claim& claim) const {
    if (feedback_.done() < claim.feedback) return false;
    if (!claim.draws || done_ == orders_.size() || outcome_ != Draw::kDone) return true;
    return short_ && short_->seen == memory_.header().rows_signal.load(std::memory_order_acquire);
  }

  bool ordered_by_caller() const { return pthread_equal(orderer_, pthread_self()) != 0; }

  bool ending() const { return ending_.load(std::memory_order_relaxed); }

  SegmentMemory& memory_;
  Backlog& backlog_;
  pthread_t thread_{};
  bool running_ = false;
  uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  uint64_t missed_updates_ = 0;
  DrawnFrom drawn_from_;
  int64_t took_ns_ = 0;
  BatchSampler sampler_;   // this and the next are whose thread draws
  bool demanded_ = false;  // the last draw may have left a demand
  std::atomic<bool> ending_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable ordered_, drawn_;
  bool asleep_ = false;    // the thread waits for something to do
  bool dozing_ = false;    // it wakes by itself
  bool stood_in_ = false;  // another works in its place
  bool met_work_ = false;  // it did so when the thread went to sleep
  pthread_t orderer_{};
  std::deque<Order> orders_;  // places stay where they are
  uint64_t taken_ = 0;        // orders before those
  FeedbackQueue feedback_;
  uint64_t updated_by_others_ = 0;
  Pace pace_;
  size_t done_ = 0;             // of the orders, the oldest: drawn, and not taken
  Draw outcome_ = Draw::kDone;  // of the first draw that could not be made
  std::optional<Short> short_;
  std::exception_ptr error_;
};

}  // namespace torchreplay
