// What a request over a connection comes to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "system/blocks.h"

namespace torchreplay {

// Who wants several replies, and is told by the thread that has taken in the last one.
class Awaiting {
 public:
  Awaiting() = default;
  virtual ~Awaiting() = default;
  Awaiting(const Awaiting&) = delete;

  // For each reply, before it is asked for.
  void await_one() noexcept { missing_.fetch_add(1, std::memory_order_relaxed); }
  // For each reply, and once more when all have been asked for.
  void one_is_there() noexcept {
    if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) all_are_there();
  }

 private:
  virtual void all_are_there() noexcept = 0;

  std::atomic<int> missing_{1};
};

// Bytes with an owner: memory that is used again.
class Body {
 public:
  Body() = default;
  explicit Body(uint64_t bytes) : block_(Block::make_alike(bytes, 1)), bytes_(bytes) {}
  Body(Body&& other) noexcept : block_(std::exchange(other.block_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Body& operator=(Body&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Body() {
    if (block_) block_->release();
  }

  char* data() const { return block_ ? block_->data() : nullptr; }
  uint64_t bytes() const { return bytes_; }
  // The memory, which the caller releases once.
  Block* release() {
    bytes_ = 0;
    return std::exchange(block_, nullptr);
  }

 private:
  Block* block_ = nullptr;
  uint64_t bytes_ = 0;
};

// Filled in by whoever reads, and of everybody once it is there.
struct Reply {
  // `exact`: bytes of the body, if there is one; 0: it may have any.
  explicit Reply(uint64_t exact, std::shared_ptr<Awaiting> whose = nullptr)
      : exact_bytes(exact), awaiting(std::move(whose)) {
    if (awaiting) awaiting->await_one();
  }

  bool is_there() const { return there.load(std::memory_order_acquire); }

  const uint64_t exact_bytes;
  std::shared_ptr<Awaiting> awaiting;
  bool ahead = false;  // nobody waits for it now: a thread reads it
  std::string head, text;
  Body body;
  std::string lost;  // why there is no answer; "" while there is, or may be
  std::atomic<bool> there{false};
};

}  // namespace torchreplay
