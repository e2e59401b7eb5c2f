// A place among the participants of a segment that a forked child does not inherit.
#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "client/attachment.h"

namespace torchreplay {

// Takes its place when it is first needed, and gives it up at its end.
class Membership {
 public:
  Membership(std::shared_ptr<Attachment> attachment, Role role) : attachment_(std::move(attachment)), role_(role) {}
  ~Membership() { release(); }
  Membership(const Membership&) = delete;

  // Throws DescriptorLost, a second after this process has lost it at the latest.
  int id() {
    const uint64_t now = fork_generation.load(std::memory_order_relaxed);
    require_own();
    if (id_ == 0 || generation_ != now) {
      id_ = join(attachment_->memory(), role_);
      generation_ = now;
      renewed_ = true;
    }
    return id_;
  }
  // True once after every id() that took a new id.
  bool take_renewed() { return std::exchange(renewed_, false); }
  // The id that this process has; 0: none.
  int held() const { return generation_ == fork_generation.load(std::memory_order_relaxed) ? id_ : 0; }

  // The calling thread is the one that acts here. True when that took a new id.
  bool act() {
    Participant& entry = attachment_->memory().participant(id());
    entry.thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
    return take_renewed();
  }

  void leave() {
    if (attachment_ && held()) torchreplay::leave(attachment_->memory(), id_);
    id_ = 0;
  }
  // The same for good: it keeps the memory no longer.
  void release() noexcept {
    try {
      leave();
    } catch (const std::exception&) {  // the byte goes with the process
    }
    attachment_.reset();
  }

 private:
  // A process that others take for dead must not go on: its id may be another's.
  void require_own() {
    constexpr int64_t kEvery = 1'000'000'000;
    const int64_t now = monotonic_ns(CLOCK_MONOTONIC_COARSE);
    if (now < looked_ + kEvery) return;
    looked_ = now;
    attachment_->memory().liveness().require_own();
  }

  std::shared_ptr<Attachment> attachment_;
  Role role_;
  int64_t looked_ = 0;  // when, by CLOCK_MONOTONIC_COARSE
  int id_ = 0;
  uint64_t generation_ = 0;
  bool renewed_ = false;
};

}  // namespace torchreplay
