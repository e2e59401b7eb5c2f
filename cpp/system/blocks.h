// Memory for batches: reused when the last tensor over it is garbage, so that a large batch does not pay for fresh
// pages each time.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchreplay {

// There is no memory for a batch, or for a tensor. The message says how much was asked for.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(size_t bytes) {
    snprintf(text_, sizeof text_, "%.2f MiB of memory were asked for, and cannot be had",
             static_cast<double>(bytes) / (1 << 20));
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[80];
};

// Hands out 64-byte aligned blocks and keeps freed ones, by size, up to a bound. At that limit, blocks go whose size
// was not asked for in the longest time. Otherwise keys of episodes, each of another length, could fill it all.
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

  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  ~BlockPool() {
    for (auto& [bytes, kept] : sizes_)
      for (void* block : kept.blocks) std::free(block);
  }

  void* take(size_t bytes) {
    {
      const std::lock_guard guard(mutex_);
      Kept& kept = used(bytes);
      if (!kept.blocks.empty()) {
        void* p = kept.blocks.back();
        kept.blocks.pop_back();
        kept_bytes_ -= bytes;
        return p;
      }
    }
    const size_t alignment = bytes >= kHuge ? kHuge : 64;
    void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!p) throw NoMemory(bytes);
    if (bytes >= kHuge) madvise(p, bytes, MADV_HUGEPAGE);  // best effort
    return p;
  }

  void give(void* p, size_t bytes) {
    void* dropped = nullptr;
    {
      const std::lock_guard guard(mutex_);
      Kept& kept = used(bytes);
      bool has_room = kept.blocks.size() < kKeepOfASize && bytes <= kKeepBytes;
      while (has_room && kept_bytes_ + bytes > kKeepBytes) has_room = drop_oldest(bytes, dropped);
      if (has_room) {
        kept.blocks.push_back(p);
        kept_bytes_ += bytes;
      } else {
        chain(p, dropped);
      }
    }
    while (dropped) std::free(std::exchange(dropped, *static_cast<void**>(dropped)));
  }

  size_t kept_bytes() {
    const std::lock_guard guard(mutex_);
    return kept_bytes_;
  }

 private:
  struct Kept {
    std::vector<void*> blocks;
    uint64_t used = 0;
  };

  Kept& used(size_t bytes) {
    Kept& kept = sizes_[bytes];
    kept.used = ++uses_;
    return kept;
  }

  // Each dropped block holds the address of the next one: letting memory go takes none.
  static void chain(void* block, void*& dropped) {
    *static_cast<void**>(block) = dropped;
    dropped = block;
  }

  // Drops a block of the size that was not used for the longest time, and is not `but`. False: there is none. O(sizes).
  bool drop_oldest(size_t but, void*& dropped) {
    auto oldest = sizes_.end();
    for (auto at = sizes_.begin(); at != sizes_.end(); ++at)
      if (at->first != but && (oldest == sizes_.end() || at->second.used < oldest->second.used)) oldest = at;
    if (oldest == sizes_.end()) return false;
    std::vector<void*>& blocks = oldest->second.blocks;
    if (!blocks.empty()) {
      chain(blocks.back(), dropped);
      blocks.pop_back();
      kept_bytes_ -= oldest->first;
    }
    if (blocks.empty()) sizes_.erase(oldest);
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<size_t, Kept> sizes_;
  size_t kept_bytes_ = 0;
  uint64_t uses_ = 0;
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
  // The same for sizes that are never twice the same: up to an eighth more, so that the pool has some that fit.
  static Block* make_alike(size_t payload, int owners) {
    const size_t bytes = payload + kHeader, step = std::max<size_t>(64, std::bit_floor(bytes) / 8);
    return make((bytes + step - 1) / step * step - kHeader, owners);
  }
  char* data() { return reinterpret_cast<char*>(this) + kHeader; }
  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) BlockPool::instance().give(this, bytes);
  }

  static constexpr size_t kHeader = 64;
};

}  // namespace torchreplay
