// What this process holds of a segment: the mapping, its places among the participants, and its stream of draws.
#pragma once

#include <algorithm>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "prefetch/prefetcher.h"
#include "python/new_tensors.h"
#include "python/object.h"
#include "session/segment_file.h"

namespace torchreplay::py {

// For so long what must not depend on anybody who may have been stopped waits for the drawing thread.
inline constexpr int64_t kSettleNs = 200'000'000;

// What writers and learners of one process share.
struct AttachedSegment {
  std::unique_ptr<SegmentMemory> memory;
  Fields fields;
  Fields batch;         // the tensors of a batch; those of `fields` when rows are not linked
  ItemPlan plan;        // how they come about, when rows are linked
  bool closed = false;  // by its buffer, while writers keep it; guarded by the interpreter lock

  static std::shared_ptr<AttachedSegment> make() {
    auto attached = std::make_shared<AttachedSegment>();
    std::erase_if(all(), [](const std::weak_ptr<AttachedSegment>& other) { return other.expired(); });
    all().push_back(attached);
    return attached;
  }
  AttachedSegment() = default;
  AttachedSegment(const AttachedSegment&) = delete;
  ~AttachedSegment() {
    if (memory) leave_saying_so([this] { release_segment(std::move(memory)); });
  }

  // All that this process has, kept from now on: nobody releases them any more. Needs the interpreter's lock, where
  // there still is one.
  static std::vector<std::shared_ptr<AttachedSegment>> keep_all() {
    static auto* kept = new std::vector<std::shared_ptr<AttachedSegment>>;
    for (const std::weak_ptr<AttachedSegment>& weak : all())
      if (auto attached = weak.lock(); attached && attached->memory) kept->push_back(std::move(attached));
    return *kept;
  }
  // Leaves the files among them, even where their memory is still held.
  static void leave_files(const std::vector<std::shared_ptr<AttachedSegment>>& kept) {
    for (const auto& attached : kept) leave_saying_so([&] { leave_segment(*attached->memory); });
  }

  bool linked() const { return memory->layout().view.linked(); }
  const Fields& outputs() const { return linked() ? batch : fields; }

  // A thread that draws ahead, for its user to keep.
  std::shared_ptr<Prefetcher> draw_ahead() {
    forget_drawing();
    auto ahead = std::make_shared<Prefetcher>(*memory, linked() ? &plan : nullptr, outstanding_);
    drawing_.push_back(ahead);
    return ahead;
  }

  // Before a writer changes the rows: batches that its thread ordered earlier are drawn from the rows of then, so that
  // the same calls give the same batches. Other threads' writers wait for nothing.
  void settle_own(const Patience& patience) {
    if (!outstanding_.empty()) settle_all(Whose::kOrderers, true, patience);
  }

  // The same before anyone else does; and what this process has fed back is applied. Throws LockTimeout when patience
  // ends before, and StoppedMeanwhile.
  void settle(const Patience& patience = {}) {
    if (!outstanding_.empty()) require_all(true, patience);
  }

  // Before any thread looks at priorities: what this process has fed back is applied. Throws as settle() does.
  void settle_feedback(const Patience& patience = {}) {
    if (outstanding_.feedback.load(std::memory_order_acquire) != 0) require_all(false, patience);
  }

  // The same for those who go on when patience ends: what they do next may come before it.
  void try_settle_feedback(const Patience& patience) {
    if (outstanding_.feedback.load(std::memory_order_acquire) != 0) settle_all(Whose::kEverybodys, false, patience);
  }

  // Whether a thread that draws ahead for this one has taken TD errors over, to apply them in their turn.
  bool enqueue_feedback(Feedback& feedback) {
    if (drawing_.empty()) return false;
    forget_drawing();
    const std::shared_ptr<Prefetcher> only = drawing_.size() == 1 ? drawing_.front().lock() : nullptr;
    return only && only->enqueue_feedback(feedback);
  }

 private:
  enum class Whose { kOrderers, kEverybodys };

  void require_all(bool draws, const Patience& patience) {
    if (settle_all(Whose::kEverybodys, draws, patience)) return;
    {
      const WithoutGil unlocked;
      const SegmentLock says_whose_it_is(*memory, patience);
    }
    if (settle_all(Whose::kEverybodys, draws, patience)) return;  // the lock has just come free
    if (patience.until_stopped && memory->header().stopped.load(std::memory_order_acquire)) throw StoppedMeanwhile{};
    throw LockTimeout("what this process has ordered and fed back before was not done in time");
  }

  // False when patience ends before it is done; a late caller still gets a slice.
  bool settle_all(Whose whose, bool draws, const Patience& patience) {
    forget_drawing();
    std::vector<std::pair<std::shared_ptr<Prefetcher>, SettlePoint>> busy;
    for (const auto& weak : drawing_) {
      auto ahead = weak.lock();
      if (!ahead || (whose == Whose::kOrderers && !ahead->is_orderer())) continue;
      const SettlePoint point = ahead->settle_point(draws);
      if (!ahead->settled(point)) busy.emplace_back(std::move(ahead), point);
    }
    if (busy.empty()) return true;
    const WithoutGil unlocked;
    const Header& h = memory->header();
    const int64_t start = monotonic_ns();
    for (const auto& [ahead, point] : busy) {
      while (!ahead->settle(point, kSliceNs)) {
        const int64_t now = monotonic_ns();
        if (now >= patience.deadline) return false;
        if (patience.until_stopped && h.stopped.load(std::memory_order_acquire)) return false;
        if (interrupted()) throw Interrupted{};
        if (now - start <= report_every_ns) continue;
        try {
          const SegmentLock says_whose_it_is(*memory, patience);  // if the memory's lock does not come free
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
  void forget_drawing() {
    std::erase_if(drawing_, [](const std::weak_ptr<Prefetcher>& weak) {
      const std::shared_ptr<Prefetcher> ahead = weak.lock();
      return !ahead || !ahead->here();
    });
    if (drawing_.empty()) {
      outstanding_.draws.store(0, std::memory_order_relaxed);
      outstanding_.feedback.store(0, std::memory_order_relaxed);
    }
  }

  // Of this process; guarded by the interpreter lock.
  static std::vector<std::weak_ptr<AttachedSegment>>& all() {
    static auto* attached = new std::vector<std::weak_ptr<AttachedSegment>>;  // outlives static destructors
    return *attached;
  }

  // The prefetchers for learners of this process; guarded by the interpreter lock.
  std::vector<std::weak_ptr<Prefetcher>> drawing_;
  Outstanding outstanding_;  // of them
};

// A place in the table of participants that a forked child does not inherit.
class Membership {
 public:
  Membership(std::shared_ptr<AttachedSegment> attached, Role role) : attached_(std::move(attached)), role_(role) {}
  ~Membership() {
    try {
      close();
    } catch (const std::exception&) {  // the byte goes with the process
    }
  }
  Membership(const Membership&) = delete;

  // Throws DescriptorLost, a second after this process has lost it at the latest.
  int id() {
    const uint64_t now = fork_generation.load(std::memory_order_relaxed);
    require_own();
    if (id_ == 0 || generation_ != now) {
      id_ = join(*attached_->memory, role_);
      generation_ = now;
      renewed_ = true;
    }
    return id_;
  }
  // True once after every id() that took a new id.
  bool take_renewed() { return std::exchange(renewed_, false); }
  // The id that this process has; 0: none.
  int held() const { return generation_ == fork_generation.load(std::memory_order_relaxed) ? id_ : 0; }

  void close() {
    if (id_ && generation_ == fork_generation.load(std::memory_order_relaxed)) leave(*attached_->memory, id_);
    id_ = 0;
  }
  // The same for good: it keeps the memory no longer.
  void release() {
    close();
    attached_.reset();
  }

 private:
  // A process that others take for dead must not go on: its id may be another's.
  void require_own() {
    constexpr int64_t kEvery = 1'000'000'000;
    const int64_t now = monotonic_ns(CLOCK_MONOTONIC_COARSE);
    if (now < looked_ + kEvery) return;
    looked_ = now;
    attached_->memory->liveness().require_own();
  }

  std::shared_ptr<AttachedSegment> attached_;
  Role role_;
  int64_t looked_ = 0;  // when, by CLOCK_MONOTONIC_COARSE
  int id_ = 0;
  uint64_t generation_ = 0;
  bool renewed_ = false;
};

// (total, drawable, smallest, beta).
inline PyObject* as_tuple(const DrawnFrom& from) {
  const Ref total(checked(PyFloat_FromDouble(from.total))), drawable(checked(PyLong_FromLongLong(from.drawable))),
      smallest(checked(PyFloat_FromDouble(from.smallest))), beta(checked(PyFloat_FromDouble(from.beta)));
  return checked(PyTuple_Pack(4, total.get(), drawable.get(), smallest.get(), beta.get()));
}

struct SegmentObject {
  std::shared_ptr<AttachedSegment> attached;
  Ref batch_type;  // called without arguments: an empty batch
  Ref nonce;
  std::unique_ptr<Membership> learner;
  std::unique_ptr<Membership> ownership;  // in the process that made the segment, or opened its file
  uint64_t owned_since = 0;               // fork generation
  uint64_t owned_step = 0;                // where the owner's stream of draws goes on
  DrawName next_draw;
  uint64_t ahead = 0;  // draws that next_draw has passed, of batches that nobody has got yet
  std::vector<std::unique_ptr<BatchSampler>> samplers;  // idle ones; guarded by the interpreter lock
  std::vector<std::unique_ptr<PriorityUpdater>> updaters;
  Feedback feedback;     // idle memory
  Descriptor attach_fd;  // of the memory, while others may attach by it: writers may hold that, and its own, for longer

  SegmentMemory& memory() {
    if (!attached) throw std::runtime_error("the replay buffer is closed");
    return *attached->memory;
  }
  Header& header() { return memory().header(); }

  void become_owner() {
    ownership = std::make_unique<Membership>(attached, Role::kOwner);
    ownership->id();
    owned_since = fork_generation.load(std::memory_order_relaxed);
    owned_step = next_draw.step = header().draws.load(std::memory_order_relaxed);
  }

  // Whether this process made the segment, or opened its file when nobody had it.
  bool owns() const { return ownership && fork_generation.load(std::memory_order_relaxed) == owned_since; }

  // Gives up the places among the participants, as one does that draws no more. The next draw takes one again, and goes
  // on where the draws were. With `seconds` the owner's counts for so long, unless somebody draws before.
  void depart(double seconds) {
    if (learner && learner->held()) owned_step = next_draw.step - ahead;
    if (learner) learner->close();
    if (!ownership || !ownership->held()) return;
    if (seconds == 0) return ownership->close();
    end_owning(memory().participant(ownership->held()), machine_ns() + static_cast<int64_t>(seconds * 1e9));
  }

  // Where the draws of this process go on. Of one that has made none, behind all that others have made.
  DrawName draws_go_on() {
    const uint64_t draws = header().draws.load(std::memory_order_relaxed);
    if (learner->held()) return {next_draw.seed, next_draw.stream, next_draw.step - ahead};
    return {header().seed, 0, owns() ? owned_step : draws};
  }

  // Registers this process as a learner and, in a new process, gives it a stream of draws of its own.
  void become_learner() {
    Participant& entry = memory().participant(learner->id());
    if (learner->take_renewed()) {
      ahead = 0;
      next_draw = owns() ? DrawName{header().seed, 0, owned_step}
                         : DrawName{header().seed, header().streams.fetch_add(1, std::memory_order_relaxed), 0};
    }
    entry.thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
  }

  // The last `n` draws of this process, up to that of this name, have not happened, unless others have followed.
  void unname(const DrawName& last, uint64_t n) {
    const DrawName next{last.seed, last.stream, last.step + 1};
    if (next_draw == next) next_draw.step -= n;
  }

  // This process, a learner, got a batch of `n` items: for those who watch.
  void note_draw(int n) {
    if (attached && learner->held()) torchreplay::note_draw(memory().participant(learner->held()), n);
  }
};

// Takes the name of this process's next draw. Unless it is kept, no draw has that name yet.
class NamedDraw {
 public:
  explicit NamedDraw(SegmentObject& s) : state_(s), name_(s.next_draw) { s.next_draw.step++; }
  ~NamedDraw() {
    if (!kept_) state_.unname(name_, 1);
  }
  NamedDraw(const NamedDraw&) = delete;

  const DrawName& name() const { return name_; }
  void keep() { kept_ = true; }

 private:
  SegmentObject& state_;
  DrawName name_;
  bool kept_ = false;
};

}  // namespace torchreplay::py
