// Module weights from a learner to many explorers: two buffers in shared memory; readers copy the one that is not being
// written.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "locking/robust_mutex.h"
#include "segment/layout.h"
#include "system/fault.h"
#include "system/pages.h"

namespace torchreplay {

inline constexpr uint64_t kMaxWeightsBytes = uint64_t{1} << 46;  // of one buffer: more than any machine maps
inline constexpr uint64_t kWeightsMagic = 0x7374686769655754;    // "TWeights", little endian

struct WeightsHeader {
  uint64_t magic;
  uint64_t version;
  uint64_t nonce;
  uint64_t buffer_bytes;
  alignas(kLine) std::atomic<uint64_t> published;  // the newest complete publication; it lies in buffer published % 2
  alignas(kLine) std::atomic<uint64_t> started;    // the newest publication begun
  alignas(kLine) RobustMutex mutex;                // one publisher at a time
};
static_assert(sizeof(WeightsHeader) <= kPage);

class WeightsMemory {
 public:
  static uint64_t bytes(uint64_t buffer_bytes) { return kPage + 2 * round_up(buffer_bytes, kPage); }

  // Maps `fd`. `fresh`: formats the zero-filled file, in which the next publication follows on `version`; otherwise
  // checks it.
  WeightsMemory(Descriptor fd, uint64_t nonce, uint64_t buffer_bytes, bool fresh, uint64_t version = 0)
      : fd_(std::move(fd)), buffer_bytes_(buffer_bytes), size_(bytes(buffer_bytes)) {
    if (buffer_bytes > kMaxWeightsBytes || fd_.file_bytes() != size_)
      throw std::runtime_error("the shared weights have another size than their handle says: their owner is gone");
    base_ = map_shared(fd_, size_);
    fd_.keep();
    WeightsHeader& h = header();
    if (fresh) {
      h.version = kFormatVersion;
      h.nonce = nonce;
      h.buffer_bytes = buffer_bytes;
      h.started.store(version, std::memory_order_relaxed);
      h.published.store(version, std::memory_order_relaxed);
      h.mutex.init();
      h.magic = kWeightsMagic;
    } else if (h.magic != kWeightsMagic || h.version != kFormatVersion || h.nonce != nonce ||
               h.buffer_bytes != buffer_bytes) {
      munmap(base_, size_);
      throw std::runtime_error(
          "the handle names other shared weights than those found in its place: their owner is gone");
    }
  }
  ~WeightsMemory() { munmap(base_, size_); }
  WeightsMemory(const WeightsMemory&) = delete;

  WeightsHeader& header() const { return *reinterpret_cast<WeightsHeader*>(base_); }
  char* buffer(uint64_t version) const { return base_ + kPage + version % 2 * round_up(buffer_bytes_, kPage); }
  uint64_t version() const { return header().published.load(std::memory_order_acquire); }
  // As it was checked: others may write to the header.
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  // Throws DescriptorLost.
  int fd() const { return fd_.require_own(); }

  // Id of the thread that is publishing, in any process; 0: nobody.
  uint32_t publisher() const { return header().mutex.holder(); }

  // Waits at most `ns` for other publishers. False: not yet. The lock frees itself when a publisher dies. Throws
  // OtherNamespace.
  bool begin_publish(int64_t ns) {
    header().mutex.require_same_namespace();
    const auto outcome = header().mutex.lock_for(ns);
    if (outcome == RobustMutex::Outcome::kTimeout) return false;
    if (outcome == RobustMutex::Outcome::kOwnerDied)
      header().mutex.mark_consistent();  // its buffer is simply written again
    publisher_.store(gettid(), std::memory_order_relaxed);
    TORCHREPLAY_FAULT("publish.locked");
    header().started.store(version() + 1, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("publish.started");
    std::atomic_thread_fence(std::memory_order_release);  // started before the first byte
    return true;
  }
  // Nothing to end unless this thread has begun: who does not know, because an exception came in between, calls it too.
  // The publication is `next`, or a later one, `as`, whose buffer then has the weights.
  void end_publish(bool complete, uint64_t as = 0) {
    if (publisher_.load(std::memory_order_relaxed) != gettid()) return;
    TORCHREPLAY_FAULT("publish.copied");
    const uint64_t next = version() + 1;
    if (complete) header().published.store(std::max(next, as), std::memory_order_release);
    TORCHREPLAY_FAULT("publish.published");
    publisher_.store(0, std::memory_order_relaxed);
    header().mutex.unlock();
  }

  // After a copy of publication `v`: was its buffer left alone all the time?
  bool intact(uint64_t v) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return header().started.load(std::memory_order_relaxed) < v + 2;
  }

 private:
  Descriptor fd_;
  uint64_t buffer_bytes_;
  uint64_t size_;
  char* base_;
  std::atomic<pid_t> publisher_ = 0;  // the thread that publishes by means of this object
};

}  // namespace torchreplay
