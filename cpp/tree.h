// The priority tree: exact proportional sampling over f32 leaves, in memory that several processes may share.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "simd.h"
#include "tree_node.h"

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
// A second hierarchy, of 16 a line, keeps the smallest positive leaf, as ranks (see tree_node::rank_of).
//
// The processor must round to nearest, as C++ programs do unless they ask otherwise.
class PriorityTree {
 public:
  static constexpr float kMaxLeaf = 8192.0f - 0x1p-11f;  // 8192 less one ulp: 2^13 of the grid's range
  static constexpr int64_t kMaxCapacity = int64_t{1} << 31;

  // Size of the memory of a tree of `capacity` leaves: 4.9 bytes a leaf when there are many.
  static size_t bytes(int64_t capacity) {
    check_capacity(capacity);
    return Shape(capacity).lines * kLine;
  }

  PriorityTree(int64_t capacity, void* memory, Simd simd = best_simd());

  int64_t capacity() const { return capacity_; }

  // Sum of all leaves in grid units.
  uint64_t total() const { return totals_->total; }

  // Number of positive leaves.
  int64_t count() const { return totals_->count; }

  // Smallest positive leaf, +infinity when there is none. Exact, O(1).
  float min() const {
    const uint32_t rank = ranks_[rank_levels_ - 1][0];
    return rank == 0 ? std::numeric_limits<float>::infinity() : std::bit_cast<float>(-rank);
  }

  float leaf(int64_t i) const { return leaves_[i]; }

  // The leaves themselves. Whoever writes them directly restores the sums by `rebuild` or `replace_sorted`.
  float* leaves() { return leaves_; }
  const float* leaves() const { return leaves_; }

  // The value stored for a leaf of `p`: 0 for p <= 0 or NaN, else p within [one grid step, kMaxLeaf].
  float clamp(float p) const { return p > 0 ? std::min(std::max(p, step_), kMaxLeaf) : 0.0f; }

  // Grid units of a stored leaf.
  uint64_t quantize(float leaf) const { return tree_node::grid_units(leaf, scale_); }

  // Leaves that hold the `n` targets, and their values. Requires total() > 0 and every target < total(); never finds a
  // leaf of zero. O(log capacity) each; all queries of a batch descend together, so that their cache misses overlap.
  void find(const uint64_t* target, int n, int64_t* index, float* leaf) const;

  // Sets `n` leaves, clamped. Of duplicate indices the last one wins. O(log capacity) each.
  void set(const int64_t* index, const float* leaf, int n);

  // Sets `n` leaves at strictly ascending indices. was[k] is the leaf that the sums still account for: the caller may
  // have zeroed the stored one already. Amortised O(1) each over contiguous runs.
  void replace_sorted(const int64_t* index, const float* was, const float* now, int n);

  // Computes total, count, sums and minima from the leaves, clamping those first. O(capacity): for repair and loading.
  void rebuild();

 private:
  static constexpr size_t kLine = 64;
  static constexpr int kMaxLevels = 10;  // 2^31 leaves take 9 levels of sums and 8 of ranks
  static constexpr int kBatch = 256;     // queries in flight in `find`
  static constexpr int kChunk = 512;     // items whose deltas `replace_sorted` gathers at a time
  static constexpr int kAhead = 16;      // items that `set` prefetches ahead

  struct Totals {
    uint64_t total;
    int64_t count;
  };

  // Lines of each level, bottom up. In order: one line of totals, leaves, sums, ranks.
  struct Shape {
    int sum_levels = 0, rank_levels = 0;
    int64_t leaf_lines, sum_lines[kMaxLevels], rank_lines[kMaxLevels];
    size_t lines;

    explicit Shape(int64_t capacity) : leaf_lines(ceil_div(capacity, tree_node::kLeaves)), lines(1 + leaf_lines) {
      int64_t children = leaf_lines;
      do {
        lines += sum_lines[sum_levels++] = children = ceil_div(children, tree_node::kSums);
      } while (children > 1);
      int64_t ranks = leaf_lines;  // one for each line of the level below, up to a single one
      for (;; ranks = ceil_div(ranks, tree_node::kRanks)) {
        lines += rank_lines[rank_levels++] = ceil_div(ranks, tree_node::kRanks);
        if (ranks == 1) break;
      }
    }
  };

  static int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

  static void check_capacity(int64_t capacity) {
    if (capacity < 1 || capacity > kMaxCapacity) {
      throw std::invalid_argument("tree capacity is " + std::to_string(capacity) + ", expected 1 to 2**31");
    }
  }

  template <class Node>
  void find_with(const uint64_t* target, int n, int64_t* index, float* leaf) const;
  template <class Node>
  void set_with(const int64_t* index, const float* leaf, int n);
  template <class Node>
  void replace_with(const int64_t* index, const float* was, const float* now, int n);
  template <class Node>
  void raise_ranks(int level, int64_t entry, uint32_t was, uint32_t now);
  template <class Node>
  void refresh_rank(int64_t line);
  int add_level(uint64_t* sums, int64_t* child, uint64_t* delta, int n);
  void prefetch_for_set(int64_t i) const;
  void rebuild_sums();
  void rebuild_ranks();

#if defined(TORCHREPLAY_X86)
  TORCHREPLAY_AVX512 void find_avx512(const uint64_t* target, int n, int64_t* index, float* leaf) const {
    find_with<tree_node::Avx512>(target, n, index, leaf);
  }
  TORCHREPLAY_AVX512 void set_avx512(const int64_t* index, const float* leaf, int n) {
    set_with<tree_node::Avx512>(index, leaf, n);
  }
  TORCHREPLAY_AVX512 void replace_avx512(const int64_t* index, const float* was, const float* now, int n) {
    replace_with<tree_node::Avx512>(index, was, now, n);
  }
#endif

  Simd simd_;
  int sum_levels_, rank_levels_;
  int64_t capacity_, leaf_lines_;
  double scale_;  // grid steps in 1.0
  float step_;
  Totals* totals_;
  float* leaves_;
  uint64_t* sums_[kMaxLevels];
  uint32_t* ranks_[kMaxLevels];
  int64_t sum_nodes_[kMaxLevels];
};

inline PriorityTree::PriorityTree(int64_t capacity, void* memory, Simd simd) : simd_(simd), capacity_(capacity) {
  check_capacity(capacity);
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % kLine != 0) {
    throw std::invalid_argument("tree memory must be aligned to 64 bytes");
  }
  // capacity * 2^bits < 2^63 keeps the total in range; 51 bits is what grid_units can hold.
  const int bits = std::min(51, 62 - static_cast<int>(std::bit_width(static_cast<uint64_t>(capacity - 1))));
  scale_ = std::ldexp(1.0, bits - 13);
  step_ = static_cast<float>(1 / scale_);
  const Shape shape(capacity);
  leaf_lines_ = shape.leaf_lines;
  sum_levels_ = shape.sum_levels;
  rank_levels_ = shape.rank_levels;
  char* at = static_cast<char*>(memory);
  auto take = [&at](int64_t lines) { return std::exchange(at, at + lines * kLine); };
  totals_ = reinterpret_cast<Totals*>(take(1));
  leaves_ = reinterpret_cast<float*>(take(leaf_lines_));
  for (int l = 0; l < sum_levels_; l++) {
    sums_[l] = reinterpret_cast<uint64_t*>(take(shape.sum_lines[l]));
    sum_nodes_[l] = shape.sum_lines[l];
  }
  for (int l = 0; l < rank_levels_; l++) ranks_[l] = reinterpret_cast<uint32_t*>(take(shape.rank_lines[l]));
}

// The bodies below carry no target of their own: inlined into a function with AVX-512 enabled they are compiled with
// it.
template <class Node>
[[gnu::always_inline]] inline void PriorityTree::find_with(const uint64_t* target, int n, int64_t* index,
                                                           float* leaf) const {
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
        __builtin_prefetch(below + child * kLine);
      }
    }
    for (int b = 0; b < m; b++) {
      const int64_t first = int64_t{node[b]} * tree_node::kLeaves;
      const int64_t i = first + Node::pick(leaves_ + first, x[b], scale_);
      index[from + b] = i;
      leaf[from + b] = leaves_[i];
    }
  }
}

inline void PriorityTree::prefetch_for_set(int64_t i) const {
  const int64_t line = i / tree_node::kLeaves;
  __builtin_prefetch(leaves_ + i, 1);
  __builtin_prefetch(sums_[0] + line, 1);
  __builtin_prefetch(ranks_[0] + line, 1);
  if (sum_levels_ > 1) __builtin_prefetch(sums_[1] + line / tree_node::kSums, 1);
}

// One child of `entry` changed its rank from `was` to `now`: carries that up until a level does not change.
template <class Node>
[[gnu::always_inline]] inline void PriorityTree::raise_ranks(int level, int64_t entry, uint32_t was, uint32_t now) {
  for (; level < rank_levels_; level++, entry >>= 4) {
    uint32_t& top = ranks_[level][entry];
    const uint32_t before = top;
    if (now > before) {
      top = now;
    } else if (was == before && now < before) {
      top = level == 0 ? Node::greatest_of(leaves_ + entry * tree_node::kLeaves)
                       : Node::greatest(ranks_[level - 1] + entry * tree_node::kRanks);
    }
    if (top == before) return;
    was = before;
    now = top;
  }
}

// Several leaves of a line changed.
template <class Node>
[[gnu::always_inline]] inline void PriorityTree::refresh_rank(int64_t line) {
  const uint32_t before = ranks_[0][line], now = Node::greatest_of(leaves_ + line * tree_node::kLeaves);
  if (now == before) return;
  ranks_[0][line] = now;
  raise_ranks<Node>(1, line >> 4, before, now);
}

template <class Node>
[[gnu::always_inline]] inline void PriorityTree::set_with(const int64_t* index, const float* leaf, int n) {
  for (int b = 0; b < std::min(n, kAhead); b++) prefetch_for_set(index[b]);
  for (int b = 0; b < n; b++) {
    if (b + kAhead < n) prefetch_for_set(index[b + kAhead]);
    const float now = clamp(leaf[b]), was = std::exchange(leaves_[index[b]], now);
    const uint64_t delta = quantize(now) - quantize(was);
    totals_->total += delta;
    totals_->count += (now > 0) - (was > 0);
    // Integer deltas commute and are exact, so no level waits for the one below.
    const int64_t line = index[b] >> 4;
    int64_t child = line;
    for (int l = 0; l < sum_levels_; l++, child >>= 3) {
      Node::add(sums_[l] + (child & ~int64_t{7}), static_cast<int>(child & 7), delta);
    }
    raise_ranks<Node>(0, line, tree_node::rank_of(was), tree_node::rank_of(now));
  }
}

// Adds the deltas of `n` ascending children to their level; leaves the deltas of their parents, and returns how many.
[[gnu::always_inline]] inline int PriorityTree::add_level(uint64_t* sums, int64_t* child, uint64_t* delta, int n) {
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
[[gnu::always_inline]] inline void PriorityTree::replace_with(const int64_t* index, const float* was, const float* now,
                                                              int n) {
  int64_t child[kChunk];
  uint64_t delta[kChunk];
  int lines = 0;
  for (int b = 0; b < n;) {
    const int64_t line = index[b] >> 4;
    uint64_t change = 0;
    for (; b < n && index[b] >> 4 == line; b++) {
      const float value = leaves_[index[b]] = clamp(now[b]);
      change += quantize(value) - quantize(was[b]);
      totals_->count += (value > 0) - (was[b] > 0);
    }
    refresh_rank<Node>(line);
    child[lines] = line;
    delta[lines++] = change;
  }
  for (int l = 0; l < sum_levels_; l++) lines = add_level(sums_[l], child, delta, lines);
  totals_->total += delta[0];
}

inline void PriorityTree::find(const uint64_t* target, int n, int64_t* index, float* leaf) const {
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return find_avx512(target, n, index, leaf);
#endif
  find_with<tree_node::Portable>(target, n, index, leaf);
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
  std::fill(leaves_ + capacity_, leaves_ + leaf_lines_ * tree_node::kLeaves, 0.0f);
  int64_t count = 0;
  for (int64_t i = 0; i < capacity_; i++) {
    leaves_[i] = clamp(leaves_[i]);
    count += leaves_[i] > 0;
  }
  totals_->count = count;
  rebuild_sums();
  rebuild_ranks();
}

// Each level leaves the sums of its nodes in the entries of the level above, which turns them into prefix sums.
inline void PriorityTree::rebuild_sums() {
  for (int64_t line = 0; line < sum_nodes_[0] * tree_node::kSums; line++) {
    uint64_t sum = 0;
    if (line < leaf_lines_) {
      for (int k = 0; k < tree_node::kLeaves; k++) sum += quantize(leaves_[line * tree_node::kLeaves + k]);
    }
    sums_[0][line] = sum;
  }
  for (int l = 0; l < sum_levels_; l++) {
    const int64_t nodes = sum_nodes_[l];
    for (int64_t node = 0; node < nodes; node++) {
      uint64_t before = 0;
      for (int k = 0; k < tree_node::kSums; k++) before += std::exchange(sums_[l][node * tree_node::kSums + k], before);
      (l + 1 < sum_levels_ ? sums_[l + 1][node] : totals_->total) = before;
    }
    if (l + 1 < sum_levels_) std::fill(sums_[l + 1] + nodes, sums_[l + 1] + sum_nodes_[l + 1] * tree_node::kSums, 0);
  }
}

inline void PriorityTree::rebuild_ranks() {
  int64_t entries = leaf_lines_;
  for (int64_t line = 0; line < entries; line++) {
    ranks_[0][line] = tree_node::Portable::greatest_of(leaves_ + line * tree_node::kLeaves);
  }
  for (int l = 0;; l++) {
    std::fill(ranks_[l] + entries, ranks_[l] + ceil_div(entries, tree_node::kRanks) * tree_node::kRanks, 0);
    if (l + 1 == rank_levels_) return;
    entries = ceil_div(entries, tree_node::kRanks);
    for (int64_t i = 0; i < entries; i++) {
      ranks_[l + 1][i] = tree_node::Portable::greatest(ranks_[l] + i * tree_node::kRanks);
    }
  }
}

}  // namespace torchreplay
