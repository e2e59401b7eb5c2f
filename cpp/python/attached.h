// What this process holds of a segment: the mapping, its places among the participants, and its stream of draws.
#pragma once

#include "../file.h"
#include "../sample.h"
#include "../update.h"
#include "object.h"
#include "tensors.h"

namespace torchreplay::py {

// What writers and learners of one process share.
struct Attached {
  std::unique_ptr<SegmentMemory> memory;
  Fields fields;
  Fields batch;   // the tensors of a batch; those of `fields` when rows are not linked
  ItemPlan plan;  // how they come about, when rows are linked

  Attached() = default;
  Attached(const Attached&) = delete;
  ~Attached() {
    if (memory) release_segment(std::move(memory));
  }

  bool linked() const { return memory->layout().view.linked(); }
  const Fields& outputs() const { return linked() ? batch : fields; }
};

// A place in the table of participants that a forked child does not inherit.
class Membership {
 public:
  Membership(std::shared_ptr<Attached> attached, Role role) : attached_(std::move(attached)), role_(role) {}
  ~Membership() {
    try {
      close();
    } catch (const std::system_error&) {  // the byte goes with the process
    }
  }
  Membership(const Membership&) = delete;

  int id() {
    const uint64_t now = fork_generation.load(std::memory_order_relaxed);
    if (id_ == 0 || generation_ != now) {
      id_ = join(*attached_->memory, role_);
      generation_ = now;
      renewed_ = true;
    }
    return id_;
  }
  // True once after every id() that took a new id.
  bool take_renewed() { return std::exchange(renewed_, false); }

  void close() {
    if (id_ && generation_ == fork_generation.load(std::memory_order_relaxed)) leave(*attached_->memory, id_);
    id_ = 0;
  }

 private:
  std::shared_ptr<Attached> attached_;
  Role role_;
  int id_ = 0;
  uint64_t generation_ = 0;
  bool renewed_ = false;
};

struct SegmentState {
  std::shared_ptr<Attached> attached;
  Ref batch_type;  // called without arguments: an empty batch
  Ref nonce;
  std::unique_ptr<Membership> learner;
  std::unique_ptr<Membership> ownership;  // in the process that made the segment, or opened its file
  uint64_t owned_since = 0;               // fork generation
  uint64_t owned_step = 0;                // where the owner's stream of draws goes on
  DrawName next_draw;
  uint32_t seen_rows_signal = 0;
  std::vector<std::unique_ptr<BatchSampler>> samplers;  // idle ones; guarded by the interpreter lock
  std::vector<std::unique_ptr<PriorityUpdater>> updaters;

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

  // Registers this process as a learner and, in a new process, gives it a stream of draws of its own.
  void become_learner() {
    Participant& entry = memory().participant(learner->id());
    if (learner->take_renewed()) {
      const bool owner = ownership && fork_generation.load(std::memory_order_relaxed) == owned_since;
      next_draw = owner ? DrawName{header().seed, 0, owned_step}
                        : DrawName{header().seed, header().streams.fetch_add(1, std::memory_order_relaxed), 0};
    }
    entry.thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
  }
};

}  // namespace torchreplay::py
