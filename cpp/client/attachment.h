// A segment as one process has it: its memory, what a batch consists of, and what its threads draw ahead.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/wait.h"
#include "prefetch/prefetcher.h"
#include "session/segment_file.h"

namespace torchreplay {

// For so long what must not depend on anybody who may have been stopped waits for the drawing thread.
inline constexpr int64_t kSettleNs = 200'000'000;

// A segment was stopped before this process let go of it; what() says so.
struct Stopped : std::runtime_error {
  explicit Stopped(const std::string& called) : std::runtime_error(called + " was stopped, and is closed") {}
};

// How many epochs have ended; items that the one under way has not drawn; and all.
struct EpochState {
  uint64_t ended, due, items;
};

// Shared by all learners and writers of the process. Guarded by the caller's lock.
class Attachment {
 public:
  explicit Attachment(std::unique_ptr<SegmentMemory> memory) : memory_(std::move(memory)) {}
  ~Attachment() {
    if (memory_) leave_saying_so([this] { release_segment(std::move(memory_)); });
  }
  Attachment(const Attachment&) = delete;

  SegmentMemory& memory() const { return *memory_; }
  bool released() const { return !memory_; }
  bool linked() const { return memory_->layout().view.linked(); }

  // What a batch consists of; nullptr for one of single rows.
  const ItemPlan* plan() const { return linked() ? &plan_ : nullptr; }
  void set_plan(ItemPlan plan) {
    plan.check(memory_->layout());
    plan_ = std::move(plan);
  }

  // One user less. The last one may have to wait for a disk.
  template <class User>
  static void release(std::shared_ptr<User>& user) {
    const std::shared_ptr<User> attachment = std::exchange(user, nullptr);
    if (!attachment || attachment.use_count() > 1) return;
    auto memory = std::move(attachment->memory_);
    const Unlocked others;
    release_segment(std::move(memory));
  }

  // A thread that draws ahead, for its user to keep.
  std::shared_ptr<Prefetcher> make_prefetcher() {
    forget_gone();
    auto prefetcher = std::make_shared<Prefetcher>(*memory_, plan(), outstanding_);
    prefetchers_.push_back(prefetcher);
    return prefetcher;
  }

  // What was ordered and fed back comes before what a caller does next

  // Before a writer changes the rows: batches that its thread ordered earlier are drawn from the rows of then, so that
  // the same calls give the same batches. Other threads' writers wait for nothing. Gives up when patience ends.
  void settle_own(const Patience& patience) {
    if (!outstanding_.empty()) settled(Scope::kThread, true, patience);
  }

  // The same before anyone else does; and what this process has fed back is applied. Throws LockTimeout when patience
  // ends before, and StoppedMeanwhile.
  void settle(const Patience& patience = {}) {
    if (!outstanding_.empty()) require_settled(true, patience);
  }

  // Before any thread looks at priorities: what this process has fed back is applied. Throws as settle() does.
  void settle_feedback(const Patience& patience = {}) {
    if (outstanding_.feedback.load(std::memory_order_acquire) != 0) require_settled(false, patience);
  }

  // The same for those who go on when patience ends: what they do next may come before it.
  void try_settle_feedback(const Patience& patience) {
    if (outstanding_.feedback.load(std::memory_order_acquire) != 0) settled(Scope::kProcess, false, patience);
  }

  // Whether a thread that draws ahead for this one has taken TD errors over, to apply them in their turn.
  bool enqueue_feedback(Feedback& feedback) {
    if (prefetchers_.empty()) return false;
    forget_gone();
    const std::shared_ptr<Prefetcher> only = prefetchers_.size() == 1 ? prefetchers_.front().lock() : nullptr;
    return only && only->enqueue_feedback(feedback);
  }

  // For every process

  // Absorbs, and lets the limiter see what came. Returns the rows held. Throws as settle() does. `dropped`: the last
  // rows of episodes of a queue that do not go on.
  uint64_t refresh(const Patience& patience, const std::vector<int64_t>& dropped = {}) {
    settle_feedback(patience);
    const Unlocked others;
    SegmentLock lock(*memory_, patience);
    lock.absorb();
    if (!dropped.empty()) Claims(*memory_).close_streams(dropped);
    publish_limit(*memory_);
    return memory_->header().rows;
  }

  // Of draws without replacement, absorbed to now. With `begin` another epoch has begun where nothing was due in one.
  EpochState epoch(bool begin) {
    const Unlocked others;
    SegmentLock lock(*memory_);
    lock.absorb();
    publish_limit(*memory_);
    Epochs epochs(*memory_);
    if (begin && epochs.due() == 0 && memory_->tree().count() > 0) epochs.begin();
    return {epochs.ended(), epochs.due(), static_cast<uint64_t>(memory_->tree().count())};
  }

  // Nobody got the items of these keys that were drawn. Those of an epoch that is over are due anyhow.
  void give_back(const std::vector<int64_t>& keys) {
    const Unlocked others;
    const SegmentLock lock(*memory_);
    if (DrawCounts::are_kept(memory_->header())) DrawCounts(*memory_).give_back(keys);
    if (!Epochs::are_kept(memory_->header())) return;
    Epochs epochs(*memory_);
    epochs.give_back_keys(epochs.ended(), keys);
  }

  // How often each item was drawn, where that is counted.
  std::vector<int64_t> draws_of(const std::vector<int64_t>& keys) {
    const Unlocked others;
    SegmentLock lock(*memory_);
    lock.absorb();
    publish_limit(*memory_);
    return DrawCounts(*memory_).draws_of(keys);
  }
  // Where that is counted: these items were drawn so often at the least.
  void raise_draws(const std::vector<int64_t>& keys, const std::vector<int64_t>& draws) {
    const Unlocked others;
    SegmentLock lock(*memory_);
    lock.absorb();
    publish_limit(*memory_);
    DrawCounts(*memory_).raise(keys, draws);
  }

  // Of a queue. This process is done with those of the items that it holds, and they leave, or come again. Returns how
  // many these are.
  uint64_t commit(const std::vector<int64_t>& keys, uint64_t forgotten = 0) {
    return end_holding([&](Claims& claims) { return claims.commit(keys, memory_->presence(), forgotten); });
  }
  // The same, but they are in their places again.
  uint64_t release(const std::vector<int64_t>& keys, uint64_t forgotten = 0) {
    return end_holding([&](Claims& claims) { return claims.release(keys, memory_->presence(), forgotten); });
  }

  // How often each item was done, of those that this process holds; of the others -1.
  std::vector<int64_t> draws_of_held(const std::vector<int64_t>& keys) {
    std::vector<int64_t> draws;
    end_holding([&](Claims& claims) {
      draws = claims.draws_of(keys, memory_->presence());
      return uint64_t{0};
    });
    return draws;
  }

  // Each item that was done so often is done once more, whoever has it. Returns the keys of these.
  std::vector<int64_t> end_draws(const std::vector<int64_t>& keys, const std::vector<int64_t>& draws) {
    std::vector<int64_t> ended;
    end_holding([&](Claims& claims) {
      ended = claims.end_draws(keys, draws, memory_->presence());
      return uint64_t{0};
    });
    return ended;
  }

  // What the process of that presence has drawn this one holds from now on. False: not all of it is to be had.
  bool adopt(const std::vector<int64_t>& keys, uint32_t from) {
    return end_holding([&](Claims& claims) { return uint64_t{claims.adopt(keys, from, memory_->presence())}; }) != 0;
  }

  // These are, and what this process could not give back before. Throws LockTimeout.
  void release_all(const std::vector<int64_t>& keys, const Patience& patience) {
    end_holding(
        [&](Claims& claims) {
          claims.release(memory_->owed().take(), memory_->presence());
          return claims.release(keys, memory_->presence());
        },
        patience);
  }

  // A learner that waited has given up: what it needed is no longer admitted beyond the ratio. It must not wait again,
  // for a holder of the mutex that is stopped: then the next draw withdraws the demand.
  void withdraw_demand() {
    const Unlocked others;
    try {
      const SegmentLock lock(*memory_, {.deadline = 0});
      memory_->header().demand = 0;
      TORCHREPLAY_FAULT("withdraw.demand");
      publish_limit(*memory_);
    } catch (const LockTimeout&) {
    }
  }

  // Whether a thread that writes to the segment `other` waits here. If so, `n` items more than there are are admitted,
  // until the demand is withdrawn, or the next draw. It does not wait for a holder of the mutex that is stopped.
  bool admit_writers_of(const std::shared_ptr<Attachment>& other, uint64_t n) {
    if (!holds_back_writer_of(*memory_, other->memory())) return false;
    const Unlocked others;
    try {
      SegmentLock lock(*memory_, {.deadline = 0});
      lock.absorb();
      Limiter(memory_->header()).admit(n);
      publish_limit(*memory_);
    } catch (const LockTimeout&) {
    }
    return true;
  }

  // Sleeps until a writer signals rows, at most `ns`; not at all when one has since the draw that said `seen`.
  void wait_for_rows(uint32_t seen, int64_t ns) {
    const Unlocked others;
    Header& h = memory_->header();
    const int64_t start = monotonic_ns();
    futex_wait(h.rows_signal, seen, ns);
    TORCHREPLAY_FAULT("rows.awake");
    h.sample_wait.add(monotonic_ns() - start, machine_ns());
  }

  // Items without a priority of their own count as at least this much from now on, as if it had been seen here.
  void raise_largest(float priority) {
    const Header& header = memory_->header();
    if (!header.sampler.prioritized || priority <= header.largest_raw()) return;
    change([&](SegmentLock&) {
      Header& h = memory_->header();
      h.set_largest_raw(std::max(h.max_raw, priority));
    });
  }

  // Another limiter from now on. Writers and learners that can go on under it wake up.
  void set_limiter(LimiterConfig next) {
    change([&](SegmentLock& lock) {
      lock.absorb();
      next.cleared = memory_->header().limiter().cleared;
      if ((next.batch_size != 0) != Admission::is_kept(memory_->header()))
        throw std::invalid_argument("whether writers are admitted is decided when the buffer is made");
      if (next.batch_size)
        Admission(*memory_).change(next);
      else
        change_limiter(memory_->header(), next);
      publish_limit(*memory_);
    });
    wake_learners();
  }

  // The policy version that the learner is at. It only grows: rows of versions that come again would be taken for those
  // of before. Throws std::invalid_argument.
  int64_t policy_version() const { return memory_->header().policy_version.load(std::memory_order_acquire); }
  void set_policy_version(int64_t version) {
    std::atomic<int64_t>& now = memory_->header().policy_version;
    int64_t before = now.load(std::memory_order_relaxed);
    do {
      if (version < before)
        throw std::invalid_argument("policy_version is " + std::to_string(version) + ", and " + memory_->called() +
                                    " is at " + std::to_string(before) +
                                    ": it only grows, or rows of other weights would have the same version; go on "
                                    "counting, such as by SharedWeights(module, version=buffer.policy_version)");
    } while (!now.compare_exchange_weak(before, version, std::memory_order_seq_cst));
    note_publisher();
  }

  // The same, unless it is further by now.
  void raise_policy_version(int64_t version) {
    std::atomic<int64_t>& now = memory_->header().policy_version;
    int64_t before = now.load(std::memory_order_relaxed);
    while (before < version && !now.compare_exchange_weak(before, version, std::memory_order_seq_cst)) {
    }
    wake_writers(memory_->header());
  }

  // Whether somebody else than the calling thread has set the learner's version last, and may set it again.
  bool has_other_publisher() const {
    const uint64_t last = memory_->header().publisher.load(std::memory_order_relaxed);
    const auto presence = static_cast<uint32_t>(last >> 32), thread = static_cast<uint32_t>(last);
    if (last == 0 || !memory_->liveness().present(presence)) return false;
    if (presence != memory_->presence()) return true;
    const char state = process_state(static_cast<int>(thread));
    return thread != static_cast<uint32_t>(gettid()) && state != kEnded && state != 'Z';
  }

  // Whether another process has set it last, and is gone.
  bool has_lost_publisher() const {
    const uint64_t last = memory_->header().publisher.load(std::memory_order_relaxed);
    return last != 0 && !memory_->liveness().present(static_cast<uint32_t>(last >> 32));
  }

  LimiterConfig limiter() {
    const Unlocked others;
    const SegmentLock lock(*memory_);
    return memory_->header().limiter();
  }

  // Takes all rows away. Batches that the calling thread ordered are drawn before.
  void clear() {
    settle();
    change([&](SegmentLock& lock) {
      lock.clear();
      publish_limit(*memory_);
    });
  }

  // Ends the episodes whose last rows have these keys, by truncation; `field` is that of the flag. Nothing happens to
  // those whose rows are gone.
  void truncate(const std::vector<int64_t>& keys, size_t field) {
    try {
      const Unlocked others;
      SegmentLock lock(*memory_, {.until_stopped = true});
      for (const int64_t key : keys) lock.end_episode(static_cast<uint64_t>(key), field);
      publish_limit(*memory_);
    } catch (const StoppedMeanwhile&) {  // nobody draws any more
    }
    wake_learners();
  }

  // Those that wait for rows look again.
  void wake_learners() { futex_signal(memory_->header().rows_signal); }

  void stop() {
    Header& h = memory_->header();
    h.stopped.store(1, std::memory_order_release);
    TORCHREPLAY_FAULT("stop.silent");
    wake_learners();
    futex_signal(h.room_signal);
  }
  bool stopped() const { return memory_->header().stopped.load(std::memory_order_acquire) != 0; }

  // Others than this process have it, too.
  void mark_shared() { memory_->header().shared.store(1, std::memory_order_relaxed); }

  // What is counted

  // A batch that was drawn ahead is taken. It missed so many updates.
  void note_taken(uint64_t missed_updates) {
    memory_->header().taken_ahead.fetch_add(1, std::memory_order_relaxed);
    memory_->header().missed.fetch_add(missed_updates, std::memory_order_relaxed);
  }
  uint64_t draws() const { return memory_->header().draws.load(std::memory_order_relaxed); }
  uint64_t head() const { return memory_->header().head.load(std::memory_order_relaxed); }
  uint64_t imports() const { return memory_->header().imports; }
  // Odd while somebody rewrites rows; another number after that.
  uint64_t rewrites() const { return memory_->header().rewrites.load(std::memory_order_acquire); }
  uint64_t seed() const { return memory_->header().seed; }
  uint64_t layout_hash() const { return memory_->header().layout_hash; }
  // Streams of draws that were given out, and one more.
  uint32_t streams() const { return memory_->header().streams.load(std::memory_order_relaxed); }
  uint32_t take_stream() { return memory_->header().streams.fetch_add(1, std::memory_order_relaxed); }

 private:
  enum class Scope { kThread, kProcess };

  // Where writers have to be admitted they wait for that.
  void note_publisher() {
    Header& h = memory_->header();
    if (!Admission::is_kept(h)) return;
    h.publisher.store(uint64_t{memory_->presence()} << 32 | static_cast<uint32_t>(gettid()), std::memory_order_relaxed);
    wake_writers(h);
  }

  template <class End>
  uint64_t end_holding(const End& end, const Patience& patience = {}) {
    uint64_t n;
    {
      const Unlocked others;
      SegmentLock lock(*memory_, patience);
      lock.absorb();  // what is overwritten is nobody's any more
      Claims claims(*memory_);
      n = end(claims);
      publish_limit(*memory_);
    }
    wake_learners();
    return n;
  }

  // Changes something under the lock, after what this process has fed back.
  template <class Change>
  void change(Change&& change) {
    settle_feedback();
    const Unlocked others;
    SegmentLock lock(*memory_);
    change(lock);
  }

  void require_settled(bool draws, const Patience& patience) {
    if (settled(Scope::kProcess, draws, patience)) return;
    {
      const Unlocked others;
      SegmentLock::require_free(*memory_, patience);
    }
    if (settled(Scope::kProcess, draws, patience)) return;  // the lock has just come free
    if (patience.until_stopped && stopped()) throw StoppedMeanwhile{};
    throw LockTimeout("what this process has ordered and fed back before was not done in time");
  }

  // Waits for it. False when patience ends before it is done; a late caller still gets a slice.
  bool settled(Scope scope, bool draws, const Patience& patience) {
    forget_gone();
    std::vector<std::pair<std::shared_ptr<Prefetcher>, SettlePoint>> busy;
    for (const auto& weak : prefetchers_) {
      auto prefetcher = weak.lock();
      if (!prefetcher || (scope == Scope::kThread && !prefetcher->is_orderer())) continue;
      const SettlePoint point = prefetcher->settle_point(draws);
      if (!prefetcher->settled(point)) busy.emplace_back(std::move(prefetcher), point);
    }
    if (busy.empty()) return true;
    const Unlocked others;
    const int64_t start = monotonic_ns();
    for (const auto& [prefetcher, point] : busy) {
      while (!prefetcher->settle(point, kSliceNs)) {
        const int64_t now = monotonic_ns();
        if (now >= patience.deadline) return false;
        if (patience.until_stopped && stopped()) return false;
        if (interrupted()) throw Interrupted{};
        if (now - start <= report_every_ns) continue;
        try {
          SegmentLock::require_free(*memory_, patience);  // it may be the memory's lock that does not come free
        } catch (const LockTimeout&) {
          return false;
        } catch (const StoppedMeanwhile&) {
          return false;
        }
      }
    }
    return true;
  }

  // Those that are gone, and in a forked child those of the parent.
  void forget_gone() {
    std::erase_if(prefetchers_, [](const std::weak_ptr<Prefetcher>& weak) {
      const std::shared_ptr<Prefetcher> prefetcher = weak.lock();
      return !prefetcher || !prefetcher->here();
    });
    if (prefetchers_.empty()) {
      outstanding_.draws.store(0, std::memory_order_relaxed);
      outstanding_.feedback.store(0, std::memory_order_relaxed);
    }
  }

  std::unique_ptr<SegmentMemory> memory_;
  ItemPlan plan_;
  std::vector<std::weak_ptr<Prefetcher>> prefetchers_;  // for learners of this process
  Outstanding outstanding_;                             // of them
};

}  // namespace torchreplay
