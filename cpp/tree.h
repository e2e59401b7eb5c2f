// The priority tree: exact proportional sampling over f32 leaves, in memory that several processes may share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "fault.h"
#include "simd.h"
#include "tree_node.h"
#include "tree_shape.h"
#include "tree_smallest.h"

namespace torchreplay {

// A view of a priority tree in the caller's memory: 64-byte aligned, `bytes(capacity)` long, zero-filled when new. All
// state lies in that memory; the object holds pointers only, so attaching is O(levels) and copies are equal views. It
// is not synchronised: whoever calls holds the lock under which the memory changes.
//
// Leaves are f32. They are summed in fixed point, as integer multiples of one grid step, in a hierarchy of 8 exclusive
// u64 prefix sums a node, one cache line each. Integer sums are exact: no drift, no leaf of zero is ever found, and
// P(i) = quantize(leaf(i)) / total() holds to the last bit. In exchange leaves saturate at kMaxLeaf, and positive
// values below one grid step round up to it: the step is 1.9e-9 at a capacity of a million, 2.4e-7 at 10^8.
//
// A second hierarchy keeps the smallest positive leaf (see SmallestLeaf).
//
// The processor must round to nearest, as C++ programs do unless they ask otherwise.
class PriorityTree {
 public:
  static constexpr float kMaxLeaf = tree_node::Grid::kMax;   // 8192 less one ulp
  static constexpr size_t kLeavesOffset = TreeShape::kLine;  // of the leaves, from the start of the memory

  // Size of the memory of a tree of `capacity` leaves: 4.6 bytes a leaf when there are many.
  static size_t bytes(int64_t capacity) { return TreeShape(capacity).lines * TreeShape::kLine; }

  PriorityTree(int64_t capacity, void* memory, Simd simd = best_simd());

  int64_t capacity() const { return capacity_; }

  // Sum of all leaves in grid units.
  uint64_t total() const { return totals_->total; }

  // Number of positive leaves.
  int64_t count() const { return totals_->count; }

  // Smallest positive leaf, +infinity when there is none. Exact, O(1).
  float min() const { return smallest_.leaf(); }

  float leaf(int64_t i) const { return leaves_[i]; }

  // The leaves themselves. Whoever writes them directly restores the sums by `rebuild` or `replace_sorted`.
  float* leaves() { return leaves_; }
  const float* leaves() const { return leaves_; }

  // The value stored for a leaf of `p`: 0 for p <= 0 or NaN, else p within [one grid step, kMaxLeaf].
  float clamp(float p) const { return grid_.clamp(p); }

  // Grid units of a stored leaf.
  uint64_t quantize(float leaf) const { return grid_.units(leaf); }

  // Leaves that hold the `n` targets, and their values. Requires total() > 0 and every target < total(); never finds a
  // leaf of zero. O(log capacity) each; all queries of a batch descend together, so that their cache misses overlap.
  // `beside`: what the caller reads next of each leaf found, beside[leaf], is fetched meanwhile.
  void find(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside = nullptr) const;

  // Sets `n` leaves, clamped. Of duplicate indices the last one wins. O(log capacity) each.
  void set(const int64_t* index, const float* leaf, int n);

  // Sets `n` leaves at strictly ascending indices, clamped. was[k] is the leaf that the sums still account for: the
  // caller may have zeroed the stored one already. Amortised O(1) each over contiguous runs.
  void replace_sorted(const int64_t* index, const float* was, const float* now, int n);

  // Computes total, count, sums and minima from the leaves, clamping those first. O(capacity): for repair and loading.
  void rebuild();

 private:
  static constexpr int kBatch = 256;  // queries in flight in `find`
  static constexpr int kChunk = 512;  // items whose deltas `replace_sorted` gathers at a time
  static constexpr int kAhead = 32;   // items that `set` prefetches ahead

  struct Totals {
    uint64_t total;
    int64_t count;
  };

  static int64_t line_of(int64_t i) { return i >> 4; }
  static int64_t block_of(int64_t i) { return i >> 7; }

  template <class Node>
  void find_with(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside) const;
  template <class Node>
  void set_with(const int64_t* index, const float* leaf, int n);
  template <class Node>
  void replace_with(const int64_t* index, const float* was, const float* now, int n);
  template <class Node>
  void rebuild_with(const TreeShape& shape);

  void prefetch_for_set(int64_t i) const;
  static int add_level(uint64_t* sums, int64_t* child, uint64_t* delta, int n);
  void rebuild_sums(const TreeShape& shape);

#if defined(TORCHREPLAY_X86)
  // The bodies have no target of their own. Flattened into these functions, they are compiled for AVX-512.
  [[gnu::flatten]] TORCHREPLAY_AVX512 void find_avx512(const uint64_t* target, int n, int64_t* index, float* leaf,
                                                       const uint64_t* beside) const {
    find_with<tree_node::Avx512>(target, n, index, leaf, beside);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 void set_avx512(const int64_t* index, const float* leaf, int n) {
    set_with<tree_node::Avx512>(index, leaf, n);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 void replace_avx512(const int64_t* index, const float* was, const float* now,
                                                          int n) {
    replace_with<tree_node::Avx512>(index, was, now, n);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 void rebuild_avx512(const TreeShape& shape) {
    rebuild_with<tree_node::Avx512>(shape);
  }
#endif

  int64_t capacity_;
  tree_node::Grid grid_;
  Simd simd_;
  int sum_levels_;
  Totals* totals_;
  float* leaves_;
  uint64_t* sums_[TreeShape::kMaxLevels];
  SmallestLeaf smallest_;
};

inline PriorityTree::PriorityTree(int64_t capacity, void* memory, Simd simd)
    : capacity_(capacity), grid_(capacity), simd_(simd) {
  const TreeShape shape(capacity);
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % TreeShape::kLine != 0) {
    throw std::invalid_argument("tree memory must be aligned to 64 bytes");
  }
  char* at = static_cast<char*>(memory);
  auto take = [&at](int64_t lines) { return std::exchange(at, at + lines * int64_t{TreeShape::kLine}); };
  totals_ = reinterpret_cast<Totals*>(take(1));
  leaves_ = reinterpret_cast<float*>(take(shape.leaf_lines));
  sum_levels_ = shape.sum_levels;
  for (int l = 0; l < sum_levels_; l++) sums_[l] = reinterpret_cast<uint64_t*>(take(shape.nodes[l]));
  smallest_ = SmallestLeaf(shape, leaves_, at);
}

template <class Node>
void PriorityTree::find_with(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside) const {
  for (int from = 0; from < n; from += kBatch) {
    const int m = std::min(kBatch, n - from);
    uint64_t x[kBatch];
    uint32_t node[kBatch] = {};
    // The limit guards memory, not meaning: a target out of range must not lead out of the tree.
    for (int b = 0; b < m; b++) x[b] = std::min(target[from + b], totals_->total - 1);
    for (int l = sum_levels_ - 1; l >= 0; l--) {
      const char* below = l > 0 ? reinterpret_cast<const char*>(sums_[l - 1]) : reinterpret_cast<const char*>(leaves_);
      for (int b = 0; b < m; b++) {
        const int64_t i = node[b];
        const int64_t child = i * tree_node::kSums + Node::child(sums_[l] + i * tree_node::kSums, x[b]);
        node[b] = static_cast<uint32_t>(child);
        __builtin_prefetch(below + child * int64_t{TreeShape::kLine});
      }
    }
    for (int b = 0; b < m; b++) {
      const int64_t first = int64_t{node[b]} * tree_node::kLeaves;
      const int64_t i = first + Node::pick(leaves_ + first, x[b], grid_);
      index[from + b] = i;
      leaf[from + b] = leaves_[i];
      if (beside) __builtin_prefetch(beside + i);
    }
  }
}

// The ranks lie in an inner cache; prefetching them too doubled the time of random updates at 10^7.
inline void PriorityTree::prefetch_for_set(int64_t i) const {
  __builtin_prefetch(leaves_ + i, 1);
  __builtin_prefetch(sums_[0] + line_of(i), 1);
  if (sum_levels_ > 1) __builtin_prefetch(sums_[1] + block_of(i), 1);
}

template <class Node>
void PriorityTree::set_with(const int64_t* index, const float* leaf, int n) {
  for (int b = 0; b < std::min(n, kAhead); b++) prefetch_for_set(index[b]);
  for (int b = 0; b < n; b++) {
    if (b + kAhead < n) prefetch_for_set(index[b + kAhead]);
    const float now = clamp(leaf[b]), was = std::exchange(leaves_[index[b]], now);
    const uint64_t delta = quantize(now) - quantize(was);
    TORCHREPLAY_FAULT("tree.leaf");
    totals_->total += delta;
    totals_->count += (now > 0) - (was > 0);
    TORCHREPLAY_FAULT("tree.totals");
    // Integer deltas commute and are exact, so no level waits for the one below.
    int64_t child = line_of(index[b]);
    for (int l = 0; l < sum_levels_; l++, child >>= 3) {
      Node::add(sums_[l] + (child & ~int64_t{7}), static_cast<int>(child & 7), delta);
    }
    TORCHREPLAY_FAULT("tree.sums");
    smallest_.change<Node>(block_of(index[b]), was, now);
  }
}

// Adds the deltas of `n` ascending children to their level; leaves the deltas of their parents, and returns how many.
inline int PriorityTree::add_level(uint64_t* sums, int64_t* child, uint64_t* delta, int n) {
  int parents = 0;
  for (int b = 0; b < n;) {
    const int64_t node = child[b] >> 3;
    uint64_t change[tree_node::kSums] = {};
    for (; b < n && child[b] >> 3 == node; b++) change[child[b] & 7] = delta[b];
    uint64_t before = 0;
    for (int k = 0; k < tree_node::kSums; k++) {
      sums[node * tree_node::kSums + k] += before;
      before += change[k];
    }
    child[parents] = node;
    delta[parents++] = before;
  }
  return parents;
}

template <class Node>
void PriorityTree::replace_with(const int64_t* index, const float* was, const float* now, int n) {
  int64_t child[kChunk];
  uint64_t delta[kChunk];
  int lines = 0;
  for (int b = 0; b < n;) {
    const int64_t line = line_of(index[b]);
    uint64_t change = 0;
    for (; b < n && line_of(index[b]) == line; b++) {
      const float value = leaves_[index[b]] = clamp(now[b]);
      change += quantize(value) - quantize(was[b]);
      totals_->count += (value > 0) - (was[b] > 0);
    }
    child[lines] = line;
    delta[lines++] = change;
  }
  for (int b = 0; b < n; b++) {
    if (b + 1 == n || block_of(index[b + 1]) != block_of(index[b])) smallest_.refresh<Node>(block_of(index[b]));
  }
  TORCHREPLAY_FAULT("tree.smallest");
  for (int l = 0; l < sum_levels_; l++) lines = add_level(sums_[l], child, delta, lines);
  TORCHREPLAY_FAULT("tree.levels");
  totals_->total += delta[0];
}

template <class Node>
void PriorityTree::rebuild_with(const TreeShape& shape) {
  std::fill(leaves_ + capacity_, leaves_ + shape.leaf_lines * tree_node::kLeaves, 0.0f);
  int64_t count = 0;
  for (int64_t i = 0; i < shape.leaf_lines; i++) {
    sums_[0][i] = Node::restore(leaves_ + i * tree_node::kLeaves, grid_, count);
  }
  totals_->count = count;
  rebuild_sums(shape);
  smallest_.rebuild<Node>(shape);
}

// Each level leaves the sums of its nodes in the entries of the level above, which turns them into prefix sums.
inline void PriorityTree::rebuild_sums(const TreeShape& shape) {
  for (int l = 0; l < sum_levels_; l++) {
    const int64_t nodes = shape.nodes[l];
    const bool top = l + 1 == sum_levels_;
    for (int64_t node = 0; node < nodes; node++) {
      uint64_t before = 0;
      for (int k = 0; k < tree_node::kSums; k++) before += std::exchange(sums_[l][node * tree_node::kSums + k], before);
      (top ? totals_->total : sums_[l + 1][node]) = before;
    }
    if (!top) std::fill(sums_[l + 1] + nodes, sums_[l + 1] + shape.nodes[l + 1] * tree_node::kSums, uint64_t{0});
  }
}

inline void PriorityTree::find(const uint64_t* target, int n, int64_t* index, float* leaf,
                               const uint64_t* beside) const {
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return find_avx512(target, n, index, leaf, beside);
#endif
  find_with<tree_node::Portable>(target, n, index, leaf, beside);
}

inline void PriorityTree::set(const int64_t* index, const float* leaf, int n) {
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return set_avx512(index, leaf, n);
#endif
  set_with<tree_node::Portable>(index, leaf, n);
}

inline void PriorityTree::replace_sorted(const int64_t* index, const float* was, const float* now, int n) {
  for (int from = 0; from < n; from += kChunk) {
    const int m = std::min(kChunk, n - from);
#if defined(TORCHREPLAY_X86)
    if (simd_ == Simd::kAvx512) {
      replace_avx512(index + from, was + from, now + from, m);
      continue;
    }
#endif
    replace_with<tree_node::Portable>(index + from, was + from, now + from, m);
  }
}

inline void PriorityTree::rebuild() {
  const TreeShape shape(capacity_);
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return rebuild_avx512(shape);
#endif
  rebuild_with<tree_node::Portable>(shape);
}

}  // namespace torchreplay
