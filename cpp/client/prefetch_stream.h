// One iteration's batches, in the order in which they are asked for, drawn by a thread before that.
#pragma once

#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/learner.h"

namespace torchreplay {

// For one thread at a time. `Memory` keeps what a batch is drawn into, says where by point(), and goes back to the
// caller with the batch. It may have a listener(), as an Order has, and then items() of its own.
template <class Memory>
class PrefetchStream {
 public:
  // A batch, or why there is none yet. kWait without `shortage`: it is not drawn so far.
  struct Taken {
    Draw outcome = Draw::kWait;
    std::optional<Shortage> shortage;
    std::optional<Memory> memory;
    int count = 0;  // of its items
  };

  // `last_epoch` as in DrawRules; `loop` as in QueueDraw: what a batch of a queue is handed out to.
  PrefetchStream(std::shared_ptr<Learner> learner, int batch_size, uint64_t last_epoch = kNever, uint64_t loop = 0)
      : learner_(std::move(learner)), batch_size_(batch_size), last_epoch_(last_epoch), loop_(loop) {}
  ~PrefetchStream() {
    try {
      close();
    } catch (...) {  // the thread has ended; nobody is left to hear of it
    }
  }
  PrefetchStream(const PrefetchStream&) = delete;

  // Has one more batch drawn into `memory`, with copies shared by so many threads.
  void order(double beta, Memory memory, int threads) {
    refuse_others();
    follow_fork();
    order_next(beta, std::move(memory), threads);
  }

  // Takes the oldest batch, once it is drawn, waiting for `ns` at most. Rethrows what its thread threw.
  Taken take(int64_t ns) {
    refuse_others();
    follow_fork();
    const std::shared_ptr<Attachment> attachment = learner_->require_open();  // close() may run meanwhile
    if (orders_.empty()) throw std::logic_error("nothing is ordered");
    Taken taken;
    if (ns == 0) {
      taken.outcome = prefetcher_->take(0, taken.shortage);
    } else {
      const BusyScope mine(*this, Busy::kWaits);
      std::optional<Learner::WaitScope> waiting;
      if (is_short_) waiting.emplace(*learner_);
      const Unlocked others;
      taken.outcome = prefetcher_->take(ns, taken.shortage);
    }
    if (taken.shortage || taken.outcome == Draw::kDone) is_short_ = taken.outcome != Draw::kDone;
    if (taken.outcome != Draw::kDone) return taken;
    attachment->note_taken(prefetcher_->missed_updates());
    drawn_from_ = prefetcher_->drawn_from();
    learner_->note_draw(prefetcher_->count());
    taken.count = prefetcher_->count();
    taken.memory = std::move(orders_.front().memory);
    const bool is_held = Claims::are_kept(attachment->memory().header());
    if (is_held || attachment->memory().layout().view.version1) {
      BatchPointers out;
      taken.memory->point(out);
      if (out.age) add_versions(out.age, taken.count, attachment->policy_version() - drawn_from_.version);
      if (is_held) learner_->got(*attachment, out.keys, taken.count, loop_);
    }
    forget(1);
    return taken;
  }

  // Batches of a queue may be as short, from the next on that is drawn.
  void accept(int at_least) {
    at_least_ = at_least;
    if (has_thread()) prefetcher_->accept(at_least);
  }

  // How many of the oldest batches are drawn, and not taken.
  size_t ready() const { return has_thread() ? prefetcher_->finished() : 0; }

  // What the oldest of them is drawn into, where there is one.
  Memory& oldest() { return orders_.front().memory; }

  // Of the batch taken last.
  const DrawnFrom& drawn_from() const { return drawn_from_; }

  // The batches that are drawn and not taken, once all that are ordered are drawn, as far as they can be.
  std::vector<Order> drawn() {
    if (!has_thread()) return {};
    refuse_others();
    const std::shared_ptr<Prefetcher> prefetcher = prefetcher_;  // close() may run in another thread meanwhile
    const std::shared_ptr<Attachment> attachment = learner_->require_open();
    attachment->settle();
    return prefetcher->drawn();
  }

  // Ends the thread, unless another one is at that. The draws that nobody took have not happened, unless others of this
  // process followed them.
  void close() {
    if (busy() == Busy::kCloses) return;
    refuse_others();
    if (has_thread()) {
      const BusyScope mine(*this, Busy::kCloses);
      const Unlocked others;
      prefetcher_->close();
    }
    abandon();
    if (!orders_.empty()) learner_->unname(orders_.back().name, orders_.size());
    forget(orders_.size());
  }

 private:
  // What a thread does here without the caller's lock.
  enum class Busy { kNo, kWaits, kCloses };

  class BusyScope {
   public:
    BusyScope(PrefetchStream& stream, Busy with) : stream_(stream) {
      stream_.busy_ = with;
      stream_.busy_in_ = fork_generation.load(std::memory_order_relaxed);
    }
    ~BusyScope() { stream_.busy_ = Busy::kNo; }
    BusyScope(const BusyScope&) = delete;

   private:
    PrefetchStream& stream_;
  };

  // A forked child has not got the thread that was busy.
  Busy busy() const { return busy_in_ == fork_generation.load(std::memory_order_relaxed) ? busy_ : Busy::kNo; }

  void refuse_others() const {
    if (busy() == Busy::kCloses) throw std::runtime_error("another thread ends this iteration");
    if (busy() == Busy::kWaits)
      throw std::runtime_error("another thread waits for a batch of this iteration: it is for one thread");
  }

  // Items that were drawn ahead have become so many versions older.
  static void add_versions(int64_t* age, int n, int64_t versions) {
    for (int i = 0; i < n; i++)
      if (__builtin_add_overflow(age[i], versions, &age[i])) age[i] = std::numeric_limits<int64_t>::max();
  }

  bool has_thread() const { return prefetcher_ && prefetcher_->here(); }

  struct Ordered {
    Memory memory;
    DrawName name;
    double beta;
    int threads;
  };

  void order_next(double beta, Memory memory, int threads) {
    learner_->join();
    if (!prefetcher_) {  // what was fed back in another iteration comes before the draws of this one
      const BusyScope mine(*this, Busy::kWaits);
      const std::shared_ptr<Attachment> attachment = learner_->require_open();
      attachment->try_settle_feedback({.deadline = monotonic_ns() + kSettleNs, .until_stopped = true});
      prefetcher_ = attachment->make_prefetcher();
      if (at_least_) prefetcher_->accept(at_least_);
    }
    Order order{.n = batch_size_, .beta = beta, .name = learner_->next_, .out = {}, .threads = threads};
    if constexpr (requires { memory.listener(); }) {
      order.n = memory.items();
      order.listener = memory.listener();
    }
    order.rules.last_epoch = last_epoch_;
    memory.point(order.out);
    orders_.push_back({std::move(memory), order.name, beta, threads});
    try {
      prefetcher_->order(std::move(order));
    } catch (...) {
      orders_.pop_back();
      throw;
    }
    learner_->name_order(this);
  }

  // In a forked child the thread is missing, and what it was drawing is the parent's: all is ordered again.
  void follow_fork() {
    if (!prefetcher_ || prefetcher_->here()) return;
    abandon();
    std::deque<Ordered> again = std::exchange(orders_, {});
    learner_->ahead_ -= std::min<uint64_t>(learner_->ahead_, again.size());
    for (Ordered& o : again) order_next(o.beta, std::move(o.memory), o.threads);
  }

  // The locks of a prefetcher whose thread is in another process may be held for ever: it is never destroyed.
  void abandon() {
    if (prefetcher_ && !prefetcher_->here()) static_cast<void>(new std::shared_ptr<Prefetcher>(prefetcher_));
    prefetcher_.reset();
  }

  void forget(size_t n) {
    learner_->ahead_ -= std::min<uint64_t>(learner_->ahead_, n);  // none are left after a fork
    orders_.erase(orders_.begin(), orders_.begin() + static_cast<ptrdiff_t>(n));
  }

  std::shared_ptr<Learner> learner_;
  int batch_size_;
  uint64_t last_epoch_;
  uint64_t loop_;
  int at_least_ = 0;       // items of a batch, of a queue; 0: all
  bool is_short_ = false;  // the thread was last heard to wait for items
  Busy busy_ = Busy::kNo;
  uint64_t busy_in_ = 0;  // fork generation
  std::deque<Ordered> orders_;
  std::shared_ptr<Prefetcher> prefetcher_;  // ends before the memory that it draws into
  DrawnFrom drawn_from_;
};

}  // namespace torchreplay
