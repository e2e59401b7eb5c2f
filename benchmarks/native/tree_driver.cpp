// Drives the priority tree and a textbook one from C++, so that the table shows the trees' cost without that of
// Python's calls. Compiled on the fly; called through ctypes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "binary_tree.h"
#include "system/philox.h"
#include "tree/priority_tree.h"

namespace benchmarks {
namespace {

constexpr int kBatch = 256;
/// Returns a word as a number in [0, 1).
double unit(uint64_t word) { return static_cast<double>(word >> 11U) * 0x1p-53; }

constexpr int64_t kPool = 256;  // prepared batches of updates: 65,536 random leaves, more than a core's caches keep

/// Indices and exponentially distributed leaves for `kPool` batches.
struct Updates {
  explicit Updates(int64_t capacity) : index(kPool * kBatch), leaf(kPool * kBatch) {
    std::vector<uint64_t> words(2 * index.size());
    torchreplay::philox_fill(0, 0, 0, words.data(), static_cast<int>(words.size()));
    for (size_t i = 0; i < index.size(); ++i) {
      index[i] = static_cast<int64_t>(words[2 * i] % static_cast<uint64_t>(capacity));
      leaf[i] = static_cast<float>(std::pow(1e-6 - std::log1p(-unit(words[2 * i + 1])), 0.6));
    }
  }

  std::vector<int64_t> index;
  std::vector<float> leaf;
};

class Driver {
 public:
  virtual ~Driver() = default;
  virtual void sample(int64_t batches) = 0;
  virtual void update(int64_t batches) = 0;
};

class CoreDriver : public Driver {
 public:
  explicit CoreDriver(int64_t capacity)
      : updates_(capacity),
        memory_(torchreplay::PriorityTree::bytes(capacity) / sizeof(Line) + 1),
        tree_(capacity, memory_.data()) {
    std::vector<int64_t> index(kBatch);
    for (int64_t start = 0; start < capacity; start += kBatch) {
      const int n = static_cast<int>(std::min<int64_t>(kBatch, capacity - start));
      for (int b = 0; b < n; ++b) index[b] = start + b;
      tree_.set(index.data(), updates_.leaf.data(), n);
    }
  }

  void sample(int64_t batches) override {
    uint64_t words[kBatch];
    uint64_t target[kBatch];
    int64_t index[kBatch];
    float leaf[kBatch];
    for (int64_t k = 0; k < batches; ++k) {
      torchreplay::philox_fill(0, 0, static_cast<uint64_t>(step_++), words, kBatch);
      const uint64_t stratum = tree_.total() / kBatch;
      for (int b = 0; b < kBatch; ++b) {
        const auto offset = static_cast<uint64_t>(static_cast<unsigned __int128>(words[b]) * stratum >> 64U);
        target[b] = static_cast<uint64_t>(b) * stratum + offset;
      }
      tree_.find(target, kBatch, index, leaf);
      found_ = found_ + index[0];
    }
  }

  void update(int64_t batches) override {
    for (int64_t k = 0; k < batches; ++k) {
      const int64_t start = (k % kPool) * kBatch;
      tree_.set(&updates_.index[start], &updates_.leaf[start], kBatch);
    }
  }

 private:
  struct alignas(64) Line {
    char bytes[64] = {};
  };
  Updates updates_;
  std::vector<Line> memory_;
  torchreplay::PriorityTree tree_;
  int64_t step_ = 0;
  volatile int64_t found_ = 0;  // keeps the draws from being optimised away
};

class BinaryDriver : public Driver {
 public:
  explicit BinaryDriver(int64_t capacity) : updates_(capacity), tree_(capacity) {
    for (int64_t i = 0; i < capacity; ++i) tree_.set(i, updates_.leaf[i % (kPool * kBatch)]);
  }

  void sample(int64_t batches) override {
    uint64_t words[kBatch];
    for (int64_t k = 0; k < batches; ++k) {
      torchreplay::philox_fill(0, 0, static_cast<uint64_t>(step_++), words, kBatch);
      const double stratum = tree_.total() / kBatch;
      for (int b = 0; b < kBatch; ++b) {
        found_ = found_ + tree_.find((b + unit(words[b])) * stratum);
      }
    }
  }

  void update(int64_t batches) override {
    for (int64_t k = 0; k < batches; ++k) {
      const int64_t start = (k % kPool) * kBatch;
      for (int64_t i = start; i < start + kBatch; ++i) tree_.set(updates_.index[i], updates_.leaf[i]);
    }
  }

 private:
  Updates updates_;
  BinaryTree tree_;
  int64_t step_ = 0;
  volatile int64_t found_ = 0;  // keeps the draws from being optimised away
};

}  // namespace
}  // namespace benchmarks

using benchmarks::Driver;

extern "C" {

/// Returns a full tree of exponentially distributed priorities, or null when memory is short.
void* tree_new(int64_t capacity, int binary) {
  try {
    if (binary) return static_cast<Driver*>(new benchmarks::BinaryDriver(capacity));
    return static_cast<Driver*>(new benchmarks::CoreDriver(capacity));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void tree_sample(void* tree, int64_t batches) { static_cast<Driver*>(tree)->sample(batches); }
void tree_update(void* tree, int64_t batches) { static_cast<Driver*>(tree)->update(batches); }
void tree_delete(void* tree) { delete static_cast<Driver*>(tree); }
}
