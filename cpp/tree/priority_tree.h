// The priority tree: exact proportional sampling over f32 leaves, in memory that several processes may share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "system/fault.h"
#include "system/simd.h"
#include "tree/extreme_leaf.h"
#include "tree/tree_node.h"
#include "tree/tree_shape.h"

namespace torchreplay {

// A view of a priority tree in the caller's memory: 64-byte aligned, `bytes(capacity)` long, zero-filled when new. All
// state lies in that memory; the object holds pointers only, so attaching is O(levels) and copies are equal views. It
// is not synchronised: the caller holds the lock under which the memory changes.
//
// Leaves are f32. They are summed in fixed point, as integer multiples of one grid unit, in a hierarchy of 8 exclusive
// u64 prefix sums a node, one cache line each. Integer sums are exact: no drift, no leaf of zero is ever found, and
// P(i) = quantize(leaf(i)) / total() holds to the last bit.
//
// The grid follows the leaves. Its unit is the smallest power of two for which every leaf is below 2^51 units and their
// sum below 2^62. It is chosen anew, and everything computed from the leaves, when a leaf reaches 2^52 units or the
// total 2^63; when the leaves have less than 2^10 units on average; and, if it could be finer, once in `capacity`
// leaves written. None of that is a matter of time: the same calls choose the same grids, and those of leaves times a
// power of two find the same. Then the largest of a million leaves has 2^41 units or more. A positive leaf below half a
// unit has one all the same.
//
// A second hierarchy keeps the smallest positive leaf, and if wanted a third the largest (see ExtremeLeaf).
//
// The processor must round to nearest, as C++ programs do unless they ask otherwise.
class PriorityTree {
 public:
  static constexpr size_t kLeavesOffset = TreeShape::kLine;  // of the leaves, from the start of the memory

  // Whether a tree knows its largest leaf, as it knows the smallest.
  enum class Largest : bool { kUnknown, kKept };

  // Size of the memory of a tree of `capacity` leaves: 4.6 bytes a leaf when there are many.
  static size_t bytes(int64_t capacity, Largest largest = Largest::kUnknown) {
    const TreeShape shape(capacity);
    return (shape.lines + (largest == Largest::kKept ? shape.all_rank_lines : 0)) * TreeShape::kLine;
  }

  PriorityTree(int64_t capacity, void* memory, Simd simd = best_simd(), Largest largest = Largest::kUnknown);

  int64_t capacity() const { return capacity_; }

  // Sum of all leaves in grid units.
  uint64_t total() const { return totals_->total; }

  // One grid unit.
  double unit() const { return 1 / grid().scale; }

  // What is kept of the grid: which one it is, and how many leaves were written since it was chosen or looked at.
  struct GridState {
    int64_t top, written;
  };
  GridState grid_state() const { return {totals_->top, totals_->written}; }

  // Number of positive leaves.
  int64_t count() const { return totals_->count; }

  // Smallest positive leaf, +infinity when there is none. Exact. Amortised O(log capacity): it catches up with changes.
  float min() const { return extreme(smallest_); }

  // Largest leaf, 0 when none is positive. The same. Only if it is kept.
  float max() const { return extreme(largest_); }

  float leaf(int64_t i) const { return leaves_[i]; }

  // The leaves themselves. After direct writes the caller restores the sums by `rebuild` or `replace_sorted`.
  float* leaves() { return leaves_; }
  const float* leaves() const { return leaves_; }

  // The value stored for a leaf of `p`: 0 for p <= 0 or NaN, else the nearest positive normal number.
  static float clamp(float p) { return tree_node::clamp(p); }

  // Grid units of a stored leaf.
  uint64_t quantize(float leaf) const { return grid().units(leaf); }

  // Leaves that hold the `n` targets, and their values. Requires total() > 0 and every target < total(); never finds a
  // leaf of zero. O(log capacity) each; all queries of a batch descend together, so that their cache misses overlap.
  // `beside`: what the caller reads next of each leaf found, beside[leaf], is fetched meanwhile.
  void find(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside = nullptr) const;

  // Grid units of all leaves before that one. O(log capacity).
  uint64_t sum_before(int64_t i) const {
    const tree_node::Grid now = grid();
    uint64_t sum = 0;
    for (int64_t k = line_of(i) * tree_node::kLeaves; k < i; k++) sum += now.units(leaves_[k]);
    int64_t child = line_of(i);
    for (int l = 0; l < sum_levels_; l++, child >>= 3) sum += sums_[l][child];
    return sum;
  }

  // Sets `n` leaves, clamped. Of duplicate indices the last one wins. O(log capacity) each; O(capacity) in all when the
  // grid changes.
  void set(const int64_t* index, const float* leaf, int n);

  // Sets `n` leaves at strictly ascending indices, clamped. was[k] is the leaf that the sums still account for: the
  // caller may have changed the stored one already, and none other. Amortised O(1) each over contiguous runs;
  // O(capacity) in all when the grid changes.
  void replace_sorted(const int64_t* index, const float* was, const float* now, int n);

  // Leaves were written directly, or it is not known which: max() is right again. O(capacity).
  void rebuild_largest() { largest_.rebuild<tree_node::Portable>(TreeShape(capacity_)); }

  // Computes total, count, sums and minima from the leaves, clamping those first. The grid stays, unless it does not
  // hold them or one chosen anew is finer. O(capacity): for repair.
  void rebuild() { rebuild_as(true); }

  // The same, in the grid that grid_state() named in another tree of the same leaves. So both find the same. A grid
  // that no tree would keep for these leaves is chosen anew. For loading.
  void rebuild_in(const GridState& grid) {
    totals_->top = grid.top;
    totals_->written = grid.written;
    rebuild_as(false);
  }

  // The same, in a grid chosen anew.
  void refit() { rebuild_in({0, 0}); }

 private:
  static constexpr int kBatch = 256;  // queries in flight in `find`
  static constexpr int kChunk =
      512;  // items after which the total is looked at, and whose deltas `replace_sorted` gathers
  static constexpr int kAhead = 32;     // items that `set` prefetches ahead
  static constexpr int kMeanBits = 10;  // of the units that a leaf has on average, at the least

  struct Totals {
    uint64_t total;
    int64_t count;
    int64_t top;      // names the grid
    int64_t written;  // leaves, since the grid was chosen or looked at
  };
  __extension__ using Wide = unsigned __int128;

  // Of the memory each time: other views change it.
  tree_node::Grid grid() const { return tree_node::Grid(totals_->top); }

  static int64_t line_of(int64_t i) { return i >> 4; }
  static int64_t block_of(int64_t i) { return i >> 7; }
  // Whether ascending indices begin with those of one whole line.
  static bool is_whole_line(const int64_t* index, int n) {
    return n >= tree_node::kLeaves && index[0] % tree_node::kLeaves == 0 &&
           index[tree_node::kLeaves - 1] == index[0] + tree_node::kLeaves - 1;
  }

  template <class Node, bool tiny>
  void find_with(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside) const;
  // False when the grid does not hold a leaf or the total: then nothing but the leaves counts, and some are not set.
  template <class Node>
  bool set_with(const int64_t* index, const float* leaf, int n);
  template <class Node>
  bool replace_with(const int64_t* index, const float* was, const float* now, int n);
  template <class Node>
  bool replace_line(int64_t first, const float* was, const float* now, const tree_node::Grid& grid, uint64_t& change);
  template <class Node>
  void rebuild_with(const TreeShape& shape, bool finest);
  template <class Node>
  Wide add_lines(const TreeShape& shape, int64_t top);
  template <class Node>
  bool is_coarse_with(const TreeShape& shape) const;

  template <class Extreme>
  float extreme(const Extreme& leaf) const {
#if defined(TORCHREPLAY_X86)
    if (simd_ == Simd::kAvx512) return extreme_avx512(leaf);
#endif
    return leaf.template leaf<tree_node::Portable>();
  }

  bool set_within(const int64_t* index, const float* leaf, int n);
  bool replace_within(const int64_t* index, const float* was, const float* now, int n);
  void rebuild_as(bool finest);
  void outgrow(const int64_t* index, const float* leaf, int n);
  void count_written(int n);
  bool is_full() const { return totals_->total >> tree_node::Grid::kTotalBits; }
  // The largest leaves are gone: those that are left have few units.
  static bool is_sparse(Wide sum, int64_t count) { return sum >> kMeanBits < static_cast<Wide>(count); }
  // A grid just chosen, for leaves of which the largest wants `least`, would be finer.
  static bool is_coarse(int64_t top, Wide sum, int64_t least) {
    return sum >> (tree_node::Grid::kTotalBits - tree_node::Grid::kRoomBits - 1) == 0 && least < top;
  }
  bool is_coarse() const;

  void prefetch_for_set(int64_t i) const;
  static int add_level(uint64_t* sums, int64_t* child, uint64_t* delta, int n);
  void rebuild_sums(const TreeShape& shape);

#if defined(TORCHREPLAY_X86)
  // The bodies have no target of their own. Flattened into these functions, they are compiled for AVX-512.
  [[gnu::flatten]] TORCHREPLAY_AVX512 void find_avx512(const uint64_t* target, int n, int64_t* index, float* leaf,
                                                       const uint64_t* beside) const {
    find_with<tree_node::Avx512, false>(target, n, index, leaf, beside);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 void find_tiny_avx512(const uint64_t* target, int n, int64_t* index, float* leaf,
                                                            const uint64_t* beside) const {
    find_with<tree_node::Avx512, true>(target, n, index, leaf, beside);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 bool set_avx512(const int64_t* index, const float* leaf, int n) {
    return set_with<tree_node::Avx512>(index, leaf, n);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 bool replace_avx512(const int64_t* index, const float* was, const float* now,
                                                          int n) {
    return replace_with<tree_node::Avx512>(index, was, now, n);
  }
  template <class Extreme>
  [[gnu::flatten]] TORCHREPLAY_AVX512 static float extreme_avx512(const Extreme& leaf) {
    return leaf.template leaf<tree_node::Avx512>();
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 bool is_coarse_avx512(const TreeShape& shape) const {
    return is_coarse_with<tree_node::Avx512>(shape);
  }
  [[gnu::flatten]] TORCHREPLAY_AVX512 void rebuild_avx512(const TreeShape& shape, bool finest) {
    rebuild_with<tree_node::Avx512>(shape, finest);
  }
#endif

  int64_t capacity_;
  Simd simd_;
  int sum_levels_;
  Totals* totals_;
  float* leaves_;
  uint64_t* sums_[TreeShape::kMaxLevels];
  SmallestLeaf smallest_;
  LargestLeaf largest_;
};

inline PriorityTree::PriorityTree(int64_t capacity, void* memory, Simd simd, Largest largest)
    : capacity_(capacity), simd_(simd) {
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
  smallest_ = SmallestLeaf(shape, leaves_, take(static_cast<int64_t>(shape.all_rank_lines)));
  if (largest == Largest::kKept) largest_ = LargestLeaf(shape, leaves_, at);
}

template <class Node, bool tiny>
void PriorityTree::find_with(const uint64_t* target, int n, int64_t* index, float* leaf, const uint64_t* beside) const {
  const tree_node::Grid now = grid();
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
      const int64_t i = first + Node::template pick<tiny>(leaves_ + first, x[b], now);
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
bool PriorityTree::set_with(const int64_t* index, const float* leaf, int n) {
  const int64_t top = totals_->top;
  const tree_node::Grid grid(top);
  for (int b = 0; b < std::min(n, kAhead); b++) prefetch_for_set(index[b]);
  for (int b = 0; b < n; b++) {
    if (b + kAhead < n) prefetch_for_set(index[b + kAhead]);
    float now = leaf[b];
    if (!grid.holds(now)) [[unlikely]] {
      now = clamp(now);
      if (grid.exponent(now) > top) return false;
    }
    const float was = std::exchange(leaves_[index[b]], now);
    const uint64_t delta = grid.units(now) - grid.units(was);
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
    smallest_.raise(index[b], now);
    largest_.raise(index[b], now);
  }
  return !is_full();
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
bool PriorityTree::replace_with(const int64_t* index, const float* was, const float* now, int n) {
  const int64_t top = totals_->top;
  const tree_node::Grid grid(top);
  int64_t child[kChunk];
  uint64_t delta[kChunk];
  int lines = 0;
  bool holds = true;
  for (int b = 0; b < n;) {
    const int64_t line = line_of(index[b]);
    uint64_t change = 0;
    if (is_whole_line(index + b, n - b)) {
      holds &= replace_line<Node>(index[b], was + b, now + b, grid, change);
      b += tree_node::kLeaves;
    }
    for (; b < n && line_of(index[b]) == line; b++) {
      const float value = leaves_[index[b]] = clamp(now[b]);
      holds &= grid.exponent(value) <= top;
      change += grid.units(value) - grid.units(was[b]);
      totals_->count += (value > 0) - (was[b] > 0);
    }
    child[lines] = line;
    delta[lines++] = change;
  }
  if (!holds) return false;
  for (int l = 0; l < lines; l++) {
    smallest_.template raise_line<Node>(child[l]);
    largest_.template raise_line<Node>(child[l]);
  }
  TORCHREPLAY_FAULT("tree.extremes");
  for (int l = 0; l < sum_levels_; l++) lines = add_level(sums_[l], child, delta, lines);
  TORCHREPLAY_FAULT("tree.levels");
  totals_->total += delta[0];
  return !is_full();
}

// Replaces the line of leaves that begins with `first`: all at once, which takes a tenth of the time. False when the
// grid does not hold them.
template <class Node>
bool PriorityTree::replace_line(int64_t first, const float* was, const float* now, const tree_node::Grid& grid,
                                uint64_t& change) {
  alignas(TreeShape::kLine) float before[tree_node::kLeaves];
  std::copy_n(was, tree_node::kLeaves, before);
  float* leaves = std::copy_n(now, tree_node::kLeaves, leaves_ + first) - tree_node::kLeaves;
  int64_t gone = 0;
  Node::restore(before, gone);
  totals_->count -= gone;
  if (grid.exponent(Node::restore(leaves, totals_->count)) > totals_->top) return false;
  change = Node::sum(leaves, grid) - Node::sum(before, grid);
  return true;
}

template <class Node>
void PriorityTree::rebuild_with(const TreeShape& shape, bool finest) {
  using tree_node::Grid;
  std::fill(leaves_ + capacity_, leaves_ + shape.leaf_lines * tree_node::kLeaves, 0.0f);
  int64_t count = 0;
  float largest = 0;
  for (int64_t i = 0; i < shape.leaf_lines; i++) {
    largest = std::max(largest, Node::restore(leaves_ + i * tree_node::kLeaves, count));
  }
  totals_->count = count;
  totals_->written = std::clamp<int64_t>(totals_->written, 0, capacity_);
  TORCHREPLAY_FAULT("tree.clamped");
  int64_t top = totals_->top;
  const int64_t least = count ? Grid::exponent(largest) + Grid::kRoomBits : 0;
  int most = Grid::kTotalBits;  // of the total
  Wide sum = 0;
  bool anew = top < Grid::exponent(largest) || top > Grid::kMaxTop;
  if (!anew) {
    sum = add_lines<Node>(shape, top);
    anew = finest ? is_coarse(top, sum, least) : is_sparse(sum, count);
  }
  if (anew) {
    top = least;
    most -= Grid::kRoomBits;
    sum = add_lines<Node>(shape, top);
  }
  if (sum >> most) {
    for (Wide rest = sum >> (Grid::kTotalBits - Grid::kRoomBits); rest; rest >>= 1) top++;
    add_lines<Node>(shape, top);
  }
  totals_->top = top;
  TORCHREPLAY_FAULT("tree.grid");
  rebuild_sums(shape);
  smallest_.rebuild<Node>(shape);
  largest_.rebuild<Node>(shape);
}

// Leaves the sums of the lines of leaves in the lowest level, which rebuild_sums() goes on from. Returns their sum.
template <class Node>
PriorityTree::Wide PriorityTree::add_lines(const TreeShape& shape, int64_t top) {
  const tree_node::Grid grid(top);
  Wide sum = 0;
  for (int64_t i = 0; i < shape.leaf_lines; i++) {
    sum += sums_[0][i] = Node::sum(leaves_ + i * tree_node::kLeaves, grid);
  }
  return sum;
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
  // Few trees have such leaves, and a draw from the others takes a tenth less without them.
  const bool tiny = grid().nearest(min()) == 0;
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) {
    return tiny ? find_tiny_avx512(target, n, index, leaf, beside) : find_avx512(target, n, index, leaf, beside);
  }
#endif
  tiny ? find_with<tree_node::Portable, true>(target, n, index, leaf, beside)
       : find_with<tree_node::Portable, false>(target, n, index, leaf, beside);
}

inline bool PriorityTree::set_within(const int64_t* index, const float* leaf, int n) {
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return set_avx512(index, leaf, n);
#endif
  return set_with<tree_node::Portable>(index, leaf, n);
}

inline bool PriorityTree::replace_within(const int64_t* index, const float* was, const float* now, int n) {
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return replace_avx512(index, was, now, n);
#endif
  return replace_with<tree_node::Portable>(index, was, now, n);
}

inline void PriorityTree::set(const int64_t* index, const float* leaf, int n) {
  for (int from = 0; from < n; from += kChunk) {
    if (!set_within(index + from, leaf + from, std::min(kChunk, n - from))) {
      return outgrow(index + from, leaf + from, n - from);
    }
  }
  count_written(n);
}

inline void PriorityTree::replace_sorted(const int64_t* index, const float* was, const float* now, int n) {
  for (int from = 0; from < n; from += kChunk) {
    const int m = std::min(kChunk, n - from);
    if (!replace_within(index + from, was + from, now + from, m)) return outgrow(index + from, now + from, n - from);
  }
  count_written(static_cast<int>(std::count_if(now, now + n, [](float leaf) { return leaf > 0; })));
}

// Sets leaves that the grid has turned out not to hold: all of them, then the sums in another grid.
inline void PriorityTree::outgrow(const int64_t* index, const float* leaf, int n) {
  for (int b = 0; b < n; b++) leaves_[index[b]] = clamp(leaf[b]);
  TORCHREPLAY_FAULT("tree.outgrown");
  refit();
}

inline void PriorityTree::count_written(int n) {
  totals_->written += n;
  bool coarse = is_sparse(totals_->total, totals_->count);
  if (totals_->written >= capacity_) {
    totals_->written = 0;
    coarse = coarse || is_coarse();
  }
  if (coarse) refit();
}

template <class Node>
bool PriorityTree::is_coarse_with(const TreeShape& shape) const {
  using tree_node::Grid;
  if (!is_coarse(totals_->top, totals_->total, 0)) return false;
  float largest = 0;
  for (int64_t i = 0; i < shape.leaf_lines; i++) {
    largest = std::max(largest, Node::largest(leaves_ + i * tree_node::kLeaves));
  }
  return is_coarse(totals_->top, totals_->total, Grid::exponent(largest) + Grid::kRoomBits);
}

inline bool PriorityTree::is_coarse() const {
  const TreeShape shape(capacity_);
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return is_coarse_avx512(shape);
#endif
  return is_coarse_with<tree_node::Portable>(shape);
}

inline void PriorityTree::rebuild_as(bool finest) {
  const TreeShape shape(capacity_);
#if defined(TORCHREPLAY_X86)
  if (simd_ == Simd::kAvx512) return rebuild_avx512(shape, finest);
#endif
  rebuild_with<tree_node::Portable>(shape, finest);
}

}  // namespace torchreplay
