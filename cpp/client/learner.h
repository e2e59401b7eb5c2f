// One process's draws from a segment and its feedback: their names, their order, and its place among the participants.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/import.h"
#include "client/holdings.h"
#include "client/membership.h"
#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "system/blocks.h"

namespace torchreplay {

// What a draw gave, or why it gave nothing.
struct DrawResult {
  Draw outcome = Draw::kStopped;
  int count = 0;  // of its items
  Shortage shortage = {};
  DrawnFrom from = {};
};

// What a draw from a queue may do. Who asks for batches one after the other is a loop.
struct QueueDraw {
  int at_least = 0;             // items; 0: all that are asked for
  uint64_t loop = 0;            // that gets the batch; 0: none
  uint64_t ends = 0;            // the loop whose last batch is done; 0: none's is
  GroupDraw* groups = nullptr;  // whole groups are drawn; nullptr: items
};

// All threads of a process share it. Guarded by the caller's lock, which it lets go of while it waits and copies.
class Learner {
 public:
  explicit Learner(std::shared_ptr<Attachment> attachment)
      : attachment_(std::move(attachment)),
        member_(attachment_, Role::kLearner),
        ownership_(attachment_, Role::kOwner),
        holdings_(attachment_->memory()) {
    next_.seed = attachment_->seed();
  }

  bool closed() const { return !attachment_; }
  // What a call keeps that lets go of the caller's lock: another thread may close() this meanwhile. Throws
  // std::runtime_error when it is closed: Stopped where it was stopped first.
  std::shared_ptr<Attachment> require_open() const {
    attachment();
    return attachment_;
  }
  Attachment& attachment() const {
    if (!attachment_) refuse_closed();
    return *attachment_;
  }
  // Throws what a call of a closed one does.
  [[noreturn]] void refuse_closed() const {
    if (!stopped_as_.empty()) throw Stopped(stopped_as_);
    throw std::runtime_error("the replay buffer is closed");
  }

  // A draw that is under way in another thread ends as it would have. What this process holds goes back.
  void close() {
    if (attachment_ && is_queue()) give_all_back();
    samplers_.clear();
    updaters_.clear();
    member_.release();
    ownership_.release();
    if (attachment_ && attachment_->stopped()) stopped_as_ = attachment_->memory().called();
    attachment_.reset();
  }

  // What batches consist of from now on.
  void set_plan(ItemPlan plan) {
    attachment().set_plan(std::move(plan));
    samplers_.clear();  // they hold the plan before
  }

  // Taking part

  // This process made the segment, or opened its file when nobody had it. Its draws follow on all before.
  void own() {
    ownership_.id();
    owned_since_ = fork_generation.load(std::memory_order_relaxed);
    owned_step_ = next_.step = attachment().draws();
  }
  bool owns() const { return owned_since_ == fork_generation.load(std::memory_order_relaxed); }

  // Whether this process counts as a learner.
  bool held() const { return member_.held() != 0; }

  // Gives up the places among the participants, as one does that draws no more. The next draw takes one again, and goes
  // on where the draws were. With `seconds` the owner's counts for so long, unless somebody draws before.
  void depart(double seconds) {
    if (held()) owned_step_ = next_.step - ahead_;
    member_.leave();
    if (!ownership_.held()) return;
    if (seconds == 0) return ownership_.leave();
    end_owning(attachment().memory().participant(ownership_.held()),
               machine_ns() + static_cast<int64_t>(seconds * 1e9));
  }

  // Takes the place of a learner. In a new process it begins a stream of draws of its own.
  void join() {
    Attachment& a = attachment();
    if (!member_.act()) return;
    ahead_ = 0;
    go_on_at(owns() ? DrawName{a.seed(), 0, owned_step_} : DrawName{a.seed(), a.take_stream(), 0});
  }

  // This process got a batch of `n` items: for those who watch.
  void note_draw(int n) {
    if (!closed() && held()) torchreplay::note_draw(attachment().memory().participant(member_.held()), n);
  }

  // While it lives, those who watch see that a thread of this process waits for items.
  class WaitScope {
   public:
    explicit WaitScope(const Learner& learner)
        : attachment_(learner.require_open()), entry_(attachment_->memory().participant(learner.member_.held())) {
      entry_.waiting.store(1, std::memory_order_relaxed);
    }
    ~WaitScope() { entry_.waiting.store(0, std::memory_order_relaxed); }
    WaitScope(const WaitScope&) = delete;

   private:
    std::shared_ptr<Attachment> attachment_;
    Participant& entry_;  // of who takes no part: that of nobody
  };

  // Sleeps until a writer signals rows, as Attachment does.
  void wait_for_rows(uint32_t seen, int64_t ns) {
    const WaitScope waiting(*this);
    attachment().wait_for_rows(seen, ns);
  }

  // The stream of draws

  // The next draw that nobody has ordered, or that was ordered and not taken. Of a process that has made none it comes
  // after all that others have made.
  DrawName position() const {
    if (held()) return {next_.seed, next_.stream, step()};
    return {attachment().seed(), 0, owns() ? owned_step_ : attachment().draws()};
  }
  uint64_t step() const { return next_.step - ahead_; }
  uint32_t stream() {
    join();
    return next_.stream;
  }
  void set_step(uint64_t step) {
    join();  // or the first draw would start the stream over
    go_on_at({next_.seed, next_.stream, step + ahead_});
  }
  void set_stream(uint32_t stream) {
    join();
    go_on_at({next_.seed, stream, next_.step});
  }

  // Ends an import. The draws go on at `position`: in that stream, unless somebody else made the buffer.
  void finish(Import& import, const Counts& counts, const LimiterConfig& limiter, const DrawName& position) {
    const std::shared_ptr<Attachment> a = attachment_;
    if (a) member_.id();
    const uint32_t given_out = a ? a->streams() : 0;
    {
      const Unlocked others;
      import.finish(counts, limiter, position.seed);
    }
    if (a) a->wake_learners();
    if (closed()) return;  // meanwhile
    join();
    // Another process's stream is one that nobody has had; of the saved one that is certain where none was given out.
    const bool is_free = owns() && (position.stream == 0 || position.stream >= given_out);
    go_on_at({position.seed, is_free ? position.stream : next_.stream, position.step + ahead_});
  }

  // Drawing

  // Draws once, as far as the limiter admits it. Whatever ends it, a draw that gave no batch has not happened.
  // `last_epoch` as in DrawRules.
  DrawResult draw(int n, double beta, const Patience& patience, const BatchPointers& out, int threads,
                  uint64_t last_epoch = kNever, const QueueDraw& queue = {}) {
    const std::shared_ptr<Attachment> a = require_open();
    DrawResult result;
    join();
    NextDraw next(*this);
    EndedBatch ended(*this, queue.ends);
    const DrawRules rules{
        .last_epoch = last_epoch, .at_least = queue.at_least, .done = &ended.keys, .groups = queue.groups};
    try {
      a->settle(patience);
      std::unique_ptr<BatchSampler> sampler = take_sampler(*a);
      sampler->set_threads(threads);
      next.take();
      {
        const Unlocked others;
        result.outcome = sampler->sample(n, beta, next.name(), out, result.shortage, patience, rules);
        result.count = sampler->count();
        if (sampler->pending()) reclaim_dead(a->memory());
      }
      result.from = sampler->drawn_from();
      give_back(std::move(sampler));
    } catch (const StoppedMeanwhile&) {
      result.outcome = Draw::kStopped;
    } catch (const NoMemory&) {  // it knows the sizes
      throw;
    } catch (const std::bad_alloc&) {
      throw NoMemory(out.bytes + static_cast<uint64_t>(n) * 16);  // key, weight and probability
    }
    if (result.outcome != Draw::kDone) return result;
    next.keep();
    note_draw(result.count);
    if (Claims::are_kept(a->memory().header())) got(*a, out.keys, result.count, queue.loop);
    return result;
  }

  // Of a queue

  bool is_queue() const { return Claims::are_kept(attachment().memory().header()); }

  // A loop with a number of its own.
  uint64_t new_loop() { return holdings_.new_loop(); }

  // A loop got these items; or nobody did, as this was closed meanwhile.
  void got(Attachment& a, const int64_t* keys, int n, uint64_t loop) {
    if (closed())
      a.release({keys, keys + n});
    else
      holdings_.add(keys, n, loop);
  }

  // Of those that this process was handed, the ones that other loops got last.
  uint64_t held_by_other_loops(uint64_t loop) { return holdings_.in_other_loops(loop); }

  // What a loop got last is done.
  void end_loop(uint64_t loop) {
    EndedBatch ended(*this, loop);
    if (ended.keys.empty()) return;
    require_open()->commit(ended.keys);
    ended.keys.clear();
  }

  // What a loop got last is held until commit() or release().
  void keep_loop(uint64_t loop) { holdings_.keep_batch(loop); }

  // What a loop got last goes back.
  void leave_loop(uint64_t loop) {
    EndedBatch ended(*this, loop);
    if (ended.keys.empty()) return;
    require_open()->release(ended.keys);
    ended.keys.clear();
  }

  // Items that were handed out here, in their order, and are not done.
  std::vector<int64_t> held_keys() { return holdings_.all(); }
  // The index of the first that is not one of them.
  std::optional<size_t> first_not_held(const std::vector<int64_t>& keys) { return holdings_.first_missing(keys); }

  // How often each of these items was done, of those that this process holds; of the others -1.
  std::vector<int64_t> draws_of_held(const std::vector<int64_t>& keys) { return require_open()->draws_of_held(keys); }

  // Each item that was done so often is done once more, whoever has it. Returns how many these are.
  uint64_t end_draws(const std::vector<int64_t>& keys, const std::vector<int64_t>& draws) {
    const std::vector<int64_t> ended = require_open()->end_draws(keys, draws);
    holdings_.remove(ended);
    return ended.size();
  }

  // A loop gets what the process of that presence has drawn for it. False: not all of it is to be had.
  bool adopt(const std::vector<int64_t>& keys, uint32_t from, uint64_t loop) {
    const std::shared_ptr<Attachment> a = require_open();
    join();
    if (!a->adopt(keys, from)) return false;
    got(*a, keys.data(), static_cast<int>(keys.size()), loop);
    note_draw(static_cast<int>(keys.size()));
    return true;
  }

  // These are done, or are in their places again. Returns how many still were this process's. `all`: they are all that
  // it holds.
  uint64_t commit(const std::vector<int64_t>& keys, bool all) {
    return end(keys, all, [&](Attachment& a, uint64_t forgotten) { return a.commit(keys, forgotten); });
  }
  uint64_t release(const std::vector<int64_t>& keys, bool all) {
    return end(keys, all, [&](Attachment& a, uint64_t forgotten) { return a.release(keys, forgotten); });
  }

  // Copies the items anchored at `keys` that can be drawn, in their order. `step`: of the draw of this process whose
  // chances they take again. Returns how many there are. `a` is what the call began with, and keeps.
  int gather(const std::shared_ptr<Attachment>& a, const std::vector<int64_t>& keys, double beta,
             std::optional<uint64_t> step, const BatchPointers& out, int threads, DrawnFrom& from) {
    a->settle_feedback();
    if (step) join();
    const DrawName name{next_.seed, next_.stream, step.value_or(0)};
    std::unique_ptr<BatchSampler> sampler = take_sampler(*a);
    sampler->set_threads(threads);
    int found;
    {
      const Unlocked others;
      found = sampler->gather(keys.data(), static_cast<int>(keys.size()), beta, out, step ? &name : nullptr);
    }
    from = sampler->drawn_from();
    give_back(std::move(sampler));
    return found;
  }

  // Applies TD errors, or has the thread do it that draws ahead for the caller. Nothing is applied when a key was never
  // issued: it is returned. What is left of `feedback` is memory for the next. `a` as for gather().
  std::optional<BadKey> update(const std::shared_ptr<Attachment>& a, Feedback& feedback) {
    const auto n = static_cast<int64_t>(feedback.keys.size());
    if (const std::optional<BadKey> bad = unissued(a->memory(), n, feedback.keys.data())) return bad;
    if (a->enqueue_feedback(feedback)) return std::nullopt;
    a->settle();
    std::unique_ptr<PriorityUpdater> updater = take_idle(updaters_);
    if (!updater) updater = std::make_unique<PriorityUpdater>(a->memory());
    std::optional<BadKey> bad;
    {
      const Unlocked others;
      bad = updater->update(n, feedback.keys.data(), feedback.td.data());
    }
    if (!closed() && updaters_.size() < kMostIdle) updaters_.push_back(std::move(updater));
    return bad;
  }

 private:
  // Tools that are kept. Each grows with the largest batch; of more threads at once some make new ones for each call.
  static constexpr size_t kMostIdle = 4;

  template <class Memory>
  friend class PrefetchStream;

  // The name of this process's next draw. Unless it is kept, no draw has that name yet.
  class NextDraw {
   public:
    explicit NextDraw(Learner& learner) : learner_(learner) {}
    ~NextDraw() {
      if (!taken_ || kept_ || learner_.next_ != following(name_)) return;
      learner_.next_ = name_;
      learner_.others_below_ = others_below_;
    }
    NextDraw(const NextDraw&) = delete;

    void take() {
      name_ = learner_.next_;
      learner_.next_ = following(name_);
      others_below_ = std::exchange(learner_.others_below_, learner_.next_.step);
      taken_ = true;
    }
    const DrawName& name() const { return name_; }
    void keep() { kept_ = true; }

   private:
    Learner& learner_;
    DrawName name_;
    uint64_t others_below_ = 0;
    bool taken_ = false, kept_ = false;
  };

  // What a loop got last, while it is being ended. Unless it is, the loop still holds it.
  class EndedBatch {
   public:
    EndedBatch(Learner& learner, uint64_t loop)
        : keys(loop ? learner.holdings_.end_batch(loop) : std::vector<int64_t>{}), learner_(learner), loop_(loop) {}
    ~EndedBatch() {
      if (!keys.empty()) learner_.holdings_.add(keys.data(), static_cast<int>(keys.size()), loop_);
    }
    EndedBatch(const EndedBatch&) = delete;

    std::vector<int64_t> keys;  // emptied when they are done

   private:
    Learner& learner_;
    uint64_t loop_;
  };

  template <class End>
  uint64_t end(const std::vector<int64_t>& keys, bool all, const End& end) {
    const std::shared_ptr<Attachment> a = require_open();
    holdings_.remove(keys);
    const uint64_t forgotten = all ? holdings_.take_forgotten() : 0;
    try {
      return end(*a, forgotten);
    } catch (...) {
      holdings_.add_forgotten(forgotten);
      if (!closed()) holdings_.add(keys.data(), static_cast<int>(keys.size()), 0);
      throw;
    }
  }

  static DrawName following(const DrawName& name) { return {name.seed, name.stream, name.step + 1}; }

  // `orderer` has ordered the draw of the next name.
  void name_order(const void* orderer) {
    if (std::exchange(orderer_, orderer) != orderer) others_below_ = next_.step;
    next_.step++;
    ahead_++;
  }

  // The last `n` draws that its orderer has ordered, up to that of this name, have not happened, unless others have
  // followed.
  void unname(const DrawName& last, uint64_t n) {
    if (next_ == following(last)) next_.step = std::max(next_.step - n, others_below_);
  }

  // The draws go on there.
  void go_on_at(const DrawName& name) {
    next_ = name;
    others_below_ = 0;
  }

  // It must not wait for a holder of the lock that is stopped: what stays held goes back when this process ends.
  void give_all_back() {
    const std::shared_ptr<Attachment> a = attachment_;
    const std::vector<int64_t> keys = holdings_.all();
    try {
      a->release_all(keys, {.deadline = monotonic_ns() + kSettleNs});
    } catch (const LockTimeout&) {
    }
    holdings_.remove(keys);
  }

  template <class Tool>
  static std::unique_ptr<Tool> take_idle(std::vector<std::unique_ptr<Tool>>& idle) {
    if (idle.empty()) return nullptr;
    auto tool = std::move(idle.back());
    idle.pop_back();
    return tool;
  }

  std::unique_ptr<BatchSampler> take_sampler(Attachment& a) {
    auto sampler = take_idle(samplers_);
    return sampler ? std::move(sampler) : std::make_unique<BatchSampler>(a.memory(), a.plan());
  }
  void give_back(std::unique_ptr<BatchSampler> sampler) {
    if (!closed() && samplers_.size() < kMostIdle) samplers_.push_back(std::move(sampler));
  }

  std::shared_ptr<Attachment> attachment_;
  Membership member_;
  Membership ownership_;           // in the process that made the segment, or opened its file
  uint64_t owned_since_ = kNever;  // fork generation
  uint64_t owned_step_ = 0;        // where the owner's stream of draws goes on
  DrawName next_;
  uint64_t others_below_ = 0;      // steps below were named for others than the last orderer
  const void* orderer_ = nullptr;  // the last one
  std::string stopped_as_;         // what it was called, if it was stopped before it was closed
  Holdings holdings_;
  uint64_t ahead_ = 0;  // draws that next_ has passed, of batches that nobody has got yet
  std::vector<std::unique_ptr<BatchSampler>> samplers_;  // idle ones
  std::vector<std::unique_ptr<PriorityUpdater>> updaters_;
};

}  // namespace torchreplay
