// Memory for batches: reused when the last tensor over it is garbage, so that a large batch does not pay for fresh
// pages each time.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace torchreplay {

// Hands out 64-byte aligned blocks and keeps freed ones, by size, up to a bound.
class BlockPool {
 public:
  static constexpr size_t kKeepBytes = size_t{256} << 20;
  static constexpr size_t kKeepOfASize = 8;
  static constexpr size_t kHuge = size_t{2} << 20;

  // Never destroyed: tensors may outlive every static.
  static BlockPool& instance() {
    static auto* pool = [] {
      pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { new (&instance().mutex_) std::mutex; });
      return new BlockPool;
    }();
    return *pool;
  }

  void* take(size_t bytes) {
    {
      const std::lock_guard guard(mutex_);
      auto& free = free_[bytes];
      if (!free.empty()) {
        void* p = free.back();
        free.pop_back();
        kept_ -= bytes;
        return p;
      }
    }
    const size_t alignment = bytes >= kHuge ? kHuge : 64;
    void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!p) throw std::bad_alloc();
    if (bytes >= kHuge) madvise(p, bytes, MADV_HUGEPAGE);  // best effort
    return p;
  }

  void give(void* p, size_t bytes) {
    {
      const std::lock_guard guard(mutex_);
      auto& free = free_[bytes];
      if (free.size() < kKeepOfASize && kept_ + bytes <= kKeepBytes) {
        free.push_back(p);
        kept_ += bytes;
        return;
      }
    }
    std::free(p);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_;
  size_t kept_ = 0;
};

// One block shared by the tensors of a batch.
struct Block {
  std::atomic<int> owners;
  size_t bytes;

  // `owners` tensors will each call release() once.
  static Block* make(size_t payload, int owners) {
    const size_t bytes = kHeader + (payload + 63) / 64 * 64;
    auto* b = static_cast<Block*>(BlockPool::instance().take(bytes));
    new (b) Block{owners, bytes};
    return b;
  }
  char* data() { return reinterpret_cast<char*>(this) + kHeader; }
  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) BlockPool::instance().give(this, bytes);
  }

  static constexpr size_t kHeader = 64;
};

}  // namespace torchreplay
