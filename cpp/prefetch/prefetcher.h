// Drawing batches before they are asked for, in a thread of the learner's own, which also feeds back.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <vector>

#include "prefetch/prefetch_queue.h"
#include "system/thread.h"
#include "system/wakeup_timer.h"
#include "write/participants.h"

namespace torchreplay {

// Draws the ordered batches one after the other, and applies the handed-over TD errors in between, in the order of the
// calls. The thread does that. While it sleeps, the waiting caller does: to wake the thread takes several times as long
// as a draw. All but settle_point(), settled(), settle() and enqueue_feedback() is for one thread at a time.
class Prefetcher {
 public:
  // `plan` as for BatchSampler. `outstanding` counts what is to be done, by all who share it. All must outlive the
  // object.
  Prefetcher(SegmentMemory& m, const ItemPlan* plan, Outstanding& outstanding)
      : memory_(m), queue_(m, plan, outstanding) {}
  ~Prefetcher() {
    try {
      close();
    } catch (...) {  // a lock table that cannot be read: writers may go on running ahead
    }
  }
  Prefetcher(const Prefetcher&) = delete;

  // False in a forked child, which has not got the thread. Nothing else may be called there, not even the destructor:
  // the thread may have held the lock.
  bool here() const { return generation_ == fork_generation.load(std::memory_order_relaxed); }

  void order(Order o) {
    if (!running_) start();
    bool unattended;
    {
      const std::lock_guard guard(mutex_);
      wakeup_timer_.note_order(monotonic_ns());
      orderer_ = pthread_self();
      queue_.order(std::move(o));
      if (!wakeup_timer_.allows_doze(queue_.finished())) dozing_ = false;  // orders come sooner than the thread thinks
      unattended = asleep_ && !dozing_;
    }
    if (unattended) ordered_.notify_one();  // not under the mutex, for which it would only go back to sleep
  }

  // Takes over TD errors, to be applied after the batches that this thread has ordered and before those of later
  // orders. It is as if the caller had waited for the draws and applied them itself. But the drawing thread has the
  // time, and learners have other data in their caches. What is left of it is memory for another. False: nothing was
  // taken.
  bool enqueue_feedback(Feedback& feedback) {
    bool unattended;
    {
      const std::lock_guard guard(mutex_);
      if (!running_ || !ordered_by_caller() || !queue_.enqueue_feedback(feedback)) return false;
      unattended = asleep_ && !dozing_ && queue_.all_drawn();  // or it was woken when the order came
    }
    if (unattended) ordered_.notify_one();
    return true;
  }

  // Takes the oldest order, once it is drawn: kDone. kWait: not yet after `ns`, or, at once, when the thread has found
  // anew that it must wait for items: then `shortage` says how many. kBarren: it waits for items, and the ring turned
  // without completing one. Otherwise the draw cannot be made, nor can those after it. Rethrows what the thread threw.
  Draw take(int64_t ns, std::optional<Shortage>& shortage) {
    std::unique_lock lock(mutex_);
    if (!queue_.finished() && ns > 0) wait(lock, ns);
    return queue_.take(shortage);
  }

  // Batches of a queue may be as short, from the next on that is drawn.
  void accept(int at_least) {
    {
      const std::lock_guard guard(mutex_);
      queue_.accept(at_least);
    }
    futex_signal(memory_.header().rows_signal);
  }

  // Of the batch taken last: TD errors that were fed back between its draw and its taking, and what it was drawn
  // from.
  uint64_t missed_updates() const { return queue_.missed_updates(); }
  const DrawnFrom& drawn_from() const { return queue_.drawn_from(); }
  int count() const { return queue_.count(); }  // its items

  // Whether the caller is the one who orders.
  bool is_orderer() {
    const std::lock_guard guard(mutex_);
    return ordered_by_caller();
  }

  // What was handed over, and where the caller is the one who orders, and wants it, what it ordered.
  SettlePoint settle_point(bool draws) {
    const std::lock_guard guard(mutex_);
    return queue_.settle_point(draws && ordered_by_caller());
  }

  // Whether that is applied; and drawn, or waiting for items that have not come.
  bool settled(const SettlePoint& point) {
    const std::lock_guard guard(mutex_);
    return queue_.is_settled(point);
  }

  // Waits for it, for `ns` at most; false: it still is not.
  bool settle(const SettlePoint& point, int64_t ns) {
    std::unique_lock lock(mutex_);
    return await(lock, ns, [&] { return queue_.is_settled(point); });
  }

  // How many orders are drawn and not taken. Their memory is written to no more.
  size_t finished() {
    const std::lock_guard guard(mutex_);
    return queue_.finished();
  }

  // The orders that are drawn and not taken, the oldest first.
  std::vector<Order> drawn() {
    const std::lock_guard guard(mutex_);
    return queue_.drawn();
  }

  // Ends the thread, and the draws that nobody took: they have not happened. What was handed over is applied, unless
  // the memory's lock does not come free: then it is dropped, and counted as stale.
  void close() {
    if (running_) end_thread();
    const Undisturbed here;  // a signal is no reason to leave them
    const Patience patience{.deadline = monotonic_ns() + kClosingNs};
    std::unique_lock lock(mutex_);
    try {
      while (queue_.has_feedback()) apply_first(lock, patience);
    } catch (...) {
      drop_feedback();
    }
  }

 private:
  static constexpr int64_t kClosingNs = 1'000'000'000;

  void wait(std::unique_lock<std::mutex>& lock, int64_t ns) {
    const int64_t start = monotonic_ns();
    const bool was_short = queue_.is_short();
    wanted_ = true;
    if (held_) ordered_.notify_one();
    const auto there = [&] { return queue_.has_news(); };
    if (dozing_)
      await(lock, ns, there);
    else  // a thread that the order woke is there soon, and draws the batches after this one, too
      drawn_.wait_for(lock, std::chrono::nanoseconds(ns), there);
    wanted_ = false;
    const int64_t end = monotonic_ns();
    if (was_short || queue_.is_short()) memory_.header().sample_wait.add(end - start, machine_ns());
  }

  void end_thread() {
    {
      const std::lock_guard guard(mutex_);
      ending_.store(true, std::memory_order_relaxed);
    }
    ordered_.notify_one();
    futex_signal(memory_.header().rows_signal);
    pthread_join(thread_, nullptr);
    PrefetchQueue::GivenUp given_up;
    {
      std::unique_lock lock(mutex_);
      drawn_.wait(lock, [&] { return !stood_in_; });
      running_ = false;
      given_up = queue_.give_up();
    }
    drawn_.notify_all();
    queue_.take_back(given_up);
  }

  void start() {
    const std::lock_guard guard(mutex_);  // which the thread waits for, too
    generation_ = fork_generation.load(std::memory_order_relaxed);
    ending_.store(false, std::memory_order_relaxed);
    queue_.begin();
    const auto body = [](void* self) -> void* {
      static_cast<Prefetcher*>(self)->run();
      return nullptr;
    };
    if (const int error = start_thread(thread_, "replay-ahead", body, this))
      throw std::system_error(error, std::generic_category(), "cannot start a thread that draws ahead");
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
      while (queue_.has_feedback() && !ending()) apply_first(lock, {});
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

  // The oldest order that is not drawn, once all TD errors handed over before it are applied. nullptr when the thread
  // has to end, or a draw could not be made.
  Order* next() {
    std::unique_lock lock(mutex_);
    for (;;) {
      sleep(lock);
      if (ending() || queue_.failed()) return nullptr;
      if (!queue_.is_feedback_due()) return &first();
      apply_first(lock, {});
    }
  }

  // Returns when there is something to do.
  void sleep(std::unique_lock<std::mutex>& lock) {
    const auto called = [&] { return ending() || (!stood_in_ && (queue_.has_work() || queue_.failed())); };
    while (!called()) {
      asleep_ = true;
      met_work_ = queue_.has_work();  // which another does: what that leaves is the thread's
      const int64_t doze = wakeup_timer_.doze_ns(monotonic_ns());
      if (doze > 0 && wakeup_timer_.allows_doze(queue_.finished())) {
        dozing_ = true;
        ordered_.wait_for(lock, std::chrono::nanoseconds(doze), [&] { return ending() || !dozing_; });
        dozing_ = false;
      } else {
        ordered_.wait(lock, called);
      }
    }
    asleep_ = false;
  }

  // The mutex is held. The next to draw, which may begin an epoch only when the caller waits for it.
  Order& first() {
    Order& order = queue_.first();
    order.rules.may_begin_epoch = wanted_ && !queue_.finished();
    return order;
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
      if (queue_.has_work() && (!dozing_ || met_work_)) wake();  // it has been up, and has gone back to sleep
      return true;
    }
    wake();
    return drawn_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(left, 0)), done);
  }

  // The mutex is held. Does what the thread would do next while that sleeps. False: it does not, or has nothing to do.
  // Or it does that better itself: the memory's lock does not come free in `ns`, items are missing, or worse.
  bool stand_in(std::unique_lock<std::mutex>& lock, int64_t ns) {
    if (!asleep_ || stood_in_ || ending() || queue_.failed() || !queue_.has_work()) return false;
    const Undisturbed here;  // signals are handled after `ns`
    const Patience patience{.deadline = monotonic_ns() + ns, .until_stopped = true};
    bool worked = false;
    stood_in_ = true;
    try {
      if (queue_.is_feedback_due())
        queue_.apply_first(lock, patience);
      else
        draw_first(lock, patience);
      worked = true;
    } catch (...) {  // the thread finds that too, and reports it
      if (!lock.owns_lock()) lock.lock();
    }
    stood_in_ = false;
    drawn_.notify_all();
    return worked;
  }

  // The mutex is held, but not while it draws, nor where that throws.
  void draw_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    Order& order = first();
    lock.unlock();
    Shortage shortage;
    if (queue_.draw(order, shortage, patience) != Draw::kDone) throw NotDrawn{};
    PrefetchQueue::tell(order);
    lock.lock();
    queue_.note_drawn(order);
    if (!queue_.met_pending()) return;
    lock.unlock();
    reclaim_dead(memory_);
    lock.lock();
  }

  // The mutex is held.
  void apply_first(std::unique_lock<std::mutex>& lock, const Patience& patience) {
    queue_.apply_first(lock, patience);
    drawn_.notify_all();
  }

  // The mutex is held.
  void drop_feedback() {
    queue_.drop_feedback();
    drawn_.notify_all();
  }

  Draw draw(Order& order) {
    Header& h = memory_.header();
    for (;;) {
      Shortage shortage;
      const Draw outcome = queue_.draw(order, shortage, {.until_stopped = true});
      if (queue_.met_pending()) reclaim_dead(memory_);
      if (outcome == Draw::kEpochEnds) {
        wait_until_wanted();
        continue;
      }
      if (outcome != Draw::kWait && outcome != Draw::kBarren) return outcome;
      wait_for_rows({shortage, outcome == Draw::kBarren});
      if (ending()) throw Interrupted{};
      futex_wait(h.rows_signal, shortage.seen, kSliceNs);
      if (ending()) throw Interrupted{};
      const std::lock_guard guard(mutex_);
      first();  // who waited for it may have given up
    }
  }

  // Says what the draw waits for. What was handed over does not wait with it.
  void wait_for_rows(const PrefetchQueue::Short& what) {
    std::unique_lock lock(mutex_);
    queue_.note_short(what);
    drawn_.notify_all();
    while (queue_.has_feedback()) apply_first(lock, {});
  }

  // Until the caller waits for the batch that would begin an epoch. Such buffers have no TD errors to apply meanwhile.
  void wait_until_wanted() {
    std::unique_lock lock(mutex_);
    held_ = true;
    queue_.note_held(true);
    drawn_.notify_all();
    ordered_.wait(lock, [&] { return ending() || (wanted_ && !queue_.finished()); });
    held_ = false;
    queue_.note_held(false);
    if (ending()) throw Interrupted{};
    first();
  }

  void finish(Order& order, Draw outcome) {
    if (outcome != Draw::kDone) return fail(outcome, nullptr);
    PrefetchQueue::tell(order);
    {
      const std::lock_guard guard(mutex_);
      queue_.note_drawn(order);
    }
    drawn_.notify_all();
  }

  void fail(Draw outcome, std::exception_ptr error) {
    {
      const std::lock_guard guard(mutex_);
      queue_.fail(outcome, std::move(error));
    }
    drawn_.notify_all();
  }

  bool ordered_by_caller() const { return pthread_equal(orderer_, pthread_self()) != 0; }

  bool ending() const { return ending_.load(std::memory_order_relaxed); }

  SegmentMemory& memory_;
  pthread_t thread_{};
  bool running_ = false;
  uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  std::atomic<bool> ending_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable ordered_, drawn_;
  bool asleep_ = false;    // the thread waits for something to do
  bool dozing_ = false;    // it wakes by itself
  bool stood_in_ = false;  // another thread does its work
  bool met_work_ = false;  // it did so when the thread went to sleep
  bool wanted_ = false;    // the caller waits for the oldest batch
  bool held_ = false;      // the thread waits for that, to begin an epoch
  pthread_t orderer_{};
  WakeupTimer wakeup_timer_;
  PrefetchQueue queue_;
};

}  // namespace torchreplay
