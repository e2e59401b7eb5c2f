// The priority tree as operators. Checks and converts; the algorithms are the core's. They read and change the tree
// without a lock: it belongs to one caller at a time.
#pragma once

#include <cmath>
#include <tuple>

#include "draw/strata.h"
#include "ops/tensor_checks.h"
#include "system/philox.h"
#include "tree/priority_tree.h"

namespace torchreplay::ops {

inline PriorityTree tree_in(const Tensor& memory, int64_t capacity) {
  check_vector(memory, "memory", ScalarType::Byte);
  const auto needed = static_cast<int64_t>(PriorityTree::bytes(capacity));
  if (memory.numel() != needed) {
    fail("memory has ", memory.numel(), " bytes, a tree of capacity ", capacity, " has ", needed);
  }
  return PriorityTree(capacity, memory.mutable_data_ptr());
}

inline const int64_t* indices_of(const Tensor& index, int64_t capacity) {
  check_vector(index, "index", ScalarType::Long);
  const auto* values = static_cast<const int64_t*>(index.const_data_ptr());
  for (int64_t k = 0; k < index.numel(); k++) {
    if (values[k] < 0 || values[k] >= capacity) {
      fail("index[", k, "] is ", values[k], ", expected 0 to ", capacity - 1);
    }
  }
  return values;
}

inline const float* priorities_of(const Tensor& priority) {
  check_vector(priority, "priority", ScalarType::Float);
  const auto* values = static_cast<const float*>(priority.const_data_ptr());
  int64_t bad = 0, first = 0;
  for (int64_t k = priority.numel() - 1; k >= 0; k--) {
    if (!std::isfinite(values[k]) || values[k] < 0) bad++, first = k;
  }
  if (bad > 0) {
    fail(bad, " of ", priority.numel(), " priorities are negative or not finite, the first at ", first, ": ",
         values[first], "; nothing was set");
  }
  return values;
}

inline void check_not_empty(const PriorityTree& tree) {
  if (tree.total() == 0) fail("the tree has no positive priority, so nothing can be found in it: set one first");
}

// P(i) in place of the leaf.
inline void divide_by_total(const PriorityTree& tree, float* leaf, int64_t n) {
  const auto total = static_cast<double>(tree.total());
  for (int64_t k = 0; k < n; k++) leaf[k] = static_cast<float>(static_cast<double>(tree.quantize(leaf[k])) / total);
}

inline std::tuple<int64_t, int64_t> tree_layout(int64_t capacity) {
  const auto bytes = static_cast<int64_t>(PriorityTree::bytes(capacity));
  return {bytes, static_cast<int64_t>(PriorityTree::kLeavesOffset)};
}

inline void tree_set(const Tensor& memory, int64_t capacity, const Tensor& index, const Tensor& priority) {
  PriorityTree tree = tree_in(memory, capacity);
  if (index.numel() != priority.numel()) {
    fail("index has ", index.numel(), " elements, priority ", priority.numel(), "; expected as many");
  }
  const int64_t* i = indices_of(index, capacity);
  tree.set(i, priorities_of(priority), static_cast<int>(index.numel()));
}

inline Tensor tree_get(const Tensor& memory, int64_t capacity, const Tensor& index) {
  const PriorityTree tree = tree_in(memory, capacity);
  const int64_t* i = indices_of(index, capacity);
  Tensor priority = empty(index.numel(), ScalarType::Float);
  float* out = floats(priority);
  for (int64_t k = 0; k < index.numel(); k++) out[k] = tree.leaf(i[k]);
  return priority;
}

inline std::tuple<Tensor, Tensor> tree_find(const Tensor& memory, int64_t capacity, const Tensor& target) {
  const PriorityTree tree = tree_in(memory, capacity);
  check_vector(target, "target", ScalarType::Long);
  check_not_empty(tree);
  const int64_t n = target.numel();
  const auto* targets = static_cast<const uint64_t*>(target.const_data_ptr());
  for (int64_t k = 0; k < n; k++) {
    if (targets[k] >= tree.total()) {
      fail("target[", k, "] is ", static_cast<int64_t>(targets[k]), ", expected 0 to ", tree.total() - 1,
           " grid units");
    }
  }
  Tensor index = empty(n, ScalarType::Long), probability = empty(n, ScalarType::Float);
  tree.find(targets, static_cast<int>(n), longs(index), floats(probability));
  divide_by_total(tree, floats(probability), n);
  return {index, probability};
}

inline std::tuple<Tensor, Tensor> tree_sample(const Tensor& memory, int64_t capacity, int64_t n, int64_t seed,
                                              int64_t stream, int64_t step) {
  const PriorityTree tree = tree_in(memory, capacity);
  if (n < 1 || n > INT32_MAX) fail("n is ", n, ", expected 1 to 2**31 - 1");
  const auto limit = static_cast<int64_t>(Philox::kLimit);
  if (stream < 0 || stream >= limit) fail("stream is ", stream, ", expected 0 to 2**48 - 1");
  if (step < 0 || step >= limit) fail("step is ", step, ", expected 0 to 2**48 - 1");
  check_not_empty(tree);
  Tensor index = empty(n, ScalarType::Long), probability = empty(n, ScalarType::Float);
  draw_stratified(tree, static_cast<uint64_t>(seed), static_cast<uint64_t>(stream), static_cast<uint64_t>(step),
                  static_cast<int>(n), longs(index), floats(probability));
  divide_by_total(tree, floats(probability), n);
  return {index, probability};
}

inline void tree_rebuild(const Tensor& memory, int64_t capacity) { tree_in(memory, capacity).refit(); }

inline void tree_restore(const Tensor& memory, int64_t capacity, const Tensor& grid) {
  PriorityTree tree = tree_in(memory, capacity);
  check_vector(grid, "grid", ScalarType::Long);
  if (grid.numel() != 2) fail("grid has ", grid.numel(), " elements, expected the 2 that tree_grid returned");
  const auto* state = static_cast<const int64_t*>(grid.const_data_ptr());
  tree.rebuild_in({state[0], state[1]});
}

inline Tensor tree_grid(const Tensor& memory, int64_t capacity) {
  const PriorityTree::GridState state = tree_in(memory, capacity).grid_state();
  Tensor grid = empty(2, ScalarType::Long);
  longs(grid)[0] = state.top;
  longs(grid)[1] = state.written;
  return grid;
}

// As scalar tensors, so that compiled graphs need not read them: this and what follows.
inline Tensor tree_unit(const Tensor& memory, int64_t capacity) {
  Tensor unit = scalar(ScalarType::Double);
  *static_cast<double*>(unit.mutable_data_ptr()) = tree_in(memory, capacity).unit();
  return unit;
}

inline Tensor tree_total(const Tensor& memory, int64_t capacity) {
  Tensor total = scalar(ScalarType::Long);
  *longs(total) = static_cast<int64_t>(tree_in(memory, capacity).total());
  return total;
}

inline Tensor tree_count(const Tensor& memory, int64_t capacity) {
  Tensor count = scalar(ScalarType::Long);
  *longs(count) = tree_in(memory, capacity).count();
  return count;
}

inline Tensor tree_min(const Tensor& memory, int64_t capacity) {
  Tensor least = scalar(ScalarType::Float);
  *floats(least) = tree_in(memory, capacity).min();
  return least;
}

}  // namespace torchreplay::ops
