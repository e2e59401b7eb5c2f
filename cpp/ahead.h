// Drawing batches before they are asked for, in a thread of the learner's own.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>

#include "participants.h"
#include "sample.h"

namespace torchreplay {

// A batch to be drawn, and where it goes: memory that stays until the order is taken, or the thread has ended.
struct Order {
  int n = 0;
  double beta = 0;
  DrawName name;
  BatchPointers out;
  int threads = 1;       // that may share the copies
  uint64_t updated = 0;  // TD errors that had been applied when it was drawn
};

// Draws what was ordered, in that order, and one batch after the other. All but settle() is for one thread at a time.
class DrawAhead {
 public:
  // `plan` as for BatchSampler. `undrawn` counts the orders not drawn, of all who share it. All must outlive the
  // object.
  DrawAhead(SegmentMemory& m, const ItemPlan* plan, std::atomic<int>& undrawn)
      : memory_(m), plan_(plan), undrawn_(undrawn) {}
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
    const std::lock_guard guard(mutex_);
    const int64_t now = monotonic_ns();
    interval_ = (3 * interval_ + std::min(now - ordered_at_, kMaxDoze)) / 4;
    ordered_at_ = now;
    orderer_ = pthread_self();
    orders_.push_back(std::move(o));
    undrawn_.fetch_add(1, std::memory_order_relaxed);
    if (!dozing_ || done_ == 0) wake();
  }

  // Takes the oldest order, once it is drawn: kDone. kWait: not yet after `ns`, or, at once, when the thread has found
  // anew that it must wait for items: then `shortage` tells how many. Otherwise the draw cannot be made, nor can those
  // after it. Rethrows what the thread threw.
  Draw take(int64_t ns, std::optional<Shortage>& shortage) {
    shortage.reset();
    std::unique_lock lock(mutex_);
    if (!done_) wait(lock, ns);
    if (done_) {
      const Header& h = memory_.header();
      missed_updates_ = __atomic_load_n(&h.updated, __ATOMIC_RELAXED) - orders_.front().updated;
      orders_.pop_front();
      done_--;
      return Draw::kDone;
    }
    if (error_) std::rethrow_exception(error_);
    if (outcome_ != Draw::kDone) return outcome_;
    if (short_ && std::exchange(short_->news, false)) shortage = short_->shortage;
    return Draw::kWait;
  }

  // TD errors that were applied between the draw of the batch taken last and its taking.
  uint64_t missed_updates() const { return missed_updates_; }

  // Whether what this thread ordered is drawn, or waits for items that have not come.
  bool settled() {
    const std::lock_guard guard(mutex_);
    return is_settled();
  }

  // Waits until that is so, for `ns` at most; false: it is not.
  bool settle(int64_t ns) {
    std::unique_lock lock(mutex_);
    if (is_settled()) return true;
    wake();
    return drawn_.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return is_settled(); });
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

  // Ends the thread, and the draws that nobody took: they have not happened.
  void close() {
    if (!running_) return;
    {
      const std::lock_guard guard(mutex_);
      ending_.store(true, std::memory_order_relaxed);
    }
    ordered_.notify_one();
    futex_signal(memory_.header().rows_signal);
    pthread_join(thread_, nullptr);
    running_ = false;
    uint64_t draws, items = 0;
    {
      const std::lock_guard guard(mutex_);
      for (size_t i = 0; i < done_; i++) items += static_cast<uint64_t>(orders_[i].n);
      draws = std::exchange(done_, 0);
      undrawn_.fetch_sub(static_cast<int>(orders_.size() - draws), std::memory_order_relaxed);
      orders_.clear();
    }
    drawn_.notify_all();
    if (draws || demanded_) take_back(draws, items);
  }

 private:
  // Waits for the memory's lock are told no signal while it lives, and report nothing.
  class Undisturbed {
   public:
    Undisturbed() : before_(std::exchange(unwanted, &never_)) {}
    ~Undisturbed() { unwanted = before_; }
    Undisturbed(const Undisturbed&) = delete;

   private:
    static inline const std::atomic<bool> never_{false};
    const std::atomic<bool>* before_;
  };

  // To wake a thread takes the learner as long as half a draw, or all of it. So the drawing thread wakes by itself, a
  // little after the time when the next order should be there, where a learner's steps are of such a length.
  static constexpr int64_t kMinDoze = 200'000, kMaxDoze = 5'000'000;

  void wait(std::unique_lock<std::mutex>& lock, int64_t ns) {
    wake();
    const int64_t start = monotonic_ns();
    const bool was_short = short_.has_value();
    drawn_.wait_for(lock, std::chrono::nanoseconds(ns),
                    [&] { return done_ || outcome_ != Draw::kDone || (short_ && short_->news); });
    const int64_t end = monotonic_ns();
    if (was_short || short_) memory_.header().sample_wait.add(end - start, end);
  }

  // What the draw that waits needs.
  struct Short {
    Shortage shortage;
    uint32_t seen = 0;  // rows_signal when it was found
    bool news = true;   // nobody was told
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

  void start() {
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
      BatchSampler sampler(memory_, plan_);
      while (Order* order = next()) finish(*order, draw(sampler, *order));
    } catch (const Interrupted&) {  // close() waits for nobody
    } catch (const StoppedMeanwhile&) {
      fail(Draw::kStopped, nullptr);
    } catch (...) {
      fail(Draw::kStopped, std::current_exception());
    }
  }

  // The mutex is held.
  void wake() {
    dozing_ = false;
    ordered_.notify_one();
  }

  // The oldest order that is not drawn; nullptr when the thread has to end, or a draw could not be made.
  Order* next() {
    std::unique_lock lock(mutex_);
    const auto called = [&] { return ending() || done_ < orders_.size(); };
    if (!called() && interval_ >= kMinDoze && interval_ < kMaxDoze) {
      dozing_ = true;
      const auto length = std::chrono::nanoseconds(ordered_at_ + interval_ + interval_ / 4 - monotonic_ns());
      ordered_.wait_for(lock, length, [&] { return ending() || !dozing_; });
      dozing_ = false;
    }
    ordered_.wait(lock, called);
    return ending() || outcome_ != Draw::kDone ? nullptr : &orders_[done_];
  }

  Draw draw(BatchSampler& sampler, Order& order) {
    Header& h = memory_.header();
    sampler.set_threads(order.threads);
    for (;;) {
      const uint32_t seen = h.rows_signal.load(std::memory_order_acquire);
      Shortage shortage;
      const Draw outcome =
          sampler.sample(order.n, order.beta, order.name, order.out, shortage, {.until_stopped = true});
      if (sampler.pending()) reclaim_dead(memory_);
      demanded_ = outcome != Draw::kDone;
      if (outcome != Draw::kWait) return outcome;
      {
        const std::lock_guard guard(mutex_);
        short_ = {shortage, seen};
      }
      drawn_.notify_all();
      if (ending()) throw Interrupted{};
      futex_wait(h.rows_signal, seen, kSliceNs);
      if (ending()) throw Interrupted{};
    }
  }

  void finish(Order& order, Draw outcome) {
    if (outcome != Draw::kDone) return fail(outcome, nullptr);
    {
      const std::lock_guard guard(mutex_);
      order.updated = __atomic_load_n(&memory_.header().updated, __ATOMIC_RELAXED);
      done_++;
      short_.reset();
      undrawn_.fetch_sub(1, std::memory_order_release);
    }
    drawn_.notify_all();
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

  bool is_settled() const {
    if (done_ == orders_.size() || outcome_ != Draw::kDone || !pthread_equal(orderer_, pthread_self())) return true;
    return short_ && short_->seen == memory_.header().rows_signal.load(std::memory_order_acquire);
  }

  bool ending() const { return ending_.load(std::memory_order_relaxed); }

  SegmentMemory& memory_;
  const ItemPlan* plan_;
  std::atomic<int>& undrawn_;
  pthread_t thread_{};
  bool running_ = false;
  uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  uint64_t missed_updates_ = 0;
  bool demanded_ = false;  // the last draw may have left a demand; the thread's own while it runs
  std::atomic<bool> ending_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable ordered_, drawn_;
  pthread_t orderer_{};
  std::deque<Order> orders_;  // places stay where they are
  int64_t ordered_at_ = 0;    // when the last order came, and how long after the one before on average
  int64_t interval_ = 0;
  bool dozing_ = false;         // the thread wakes by itself
  size_t done_ = 0;             // of the orders, the oldest: drawn, and not taken
  Draw outcome_ = Draw::kDone;  // of the first draw that could not be made
  std::optional<Short> short_;
  std::exception_ptr error_;
};

}  // namespace torchreplay
