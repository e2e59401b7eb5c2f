// Changing the leaves of the tree while rows are absorbed. Runs under the segment's mutex.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "segment/segment_memory.h"
#include "system/fault.h"
#include "system/power.h"

namespace torchreplay {

// (|priority| + eps)^alpha, the proportional variant of Schaul et al. 2016, section 3.3. Uniform sampling: 1. Where no
// float holds that, the smallest or the largest normal number: never 0, which would mean that the item cannot be drawn.
inline void leaves_of(const SamplerConfig& c, const double* raw, int64_t n, float* leaf) {
  if (!c.prioritized) {
    std::fill_n(leaf, n, 1.0f);
    return;
  }
  using Double = std::numeric_limits<double>;
  using Float = std::numeric_limits<float>;
  constexpr int64_t kBlock = 256;
  double base[kBlock];
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t m = std::min(kBlock, n - from);
    for (int64_t i = 0; i < m; i++) {
      base[i] = std::min(std::max(std::fabs(raw[from + i]) + c.eps, Double::min()), Double::max());
    }
    power(base, m, c.alpha, leaf + from);
    for (int64_t i = from; i < from + m; i++) leaf[i] = std::min(std::max(leaf[i], Float::min()), Float::max());
  }
}

inline float leaf_of(const SamplerConfig& c, double raw) {
  float leaf;
  leaves_of(c, &raw, 1, &leaf);
  return leaf;
}

// The raw priority that a leaf comes of, as far as the leaf says it.
inline double raw_of(const SamplerConfig& c, double leaf) {
  if (!c.prioritized || c.alpha == 0) return 1;
  constexpr double kLargest = std::numeric_limits<float>::max();
  return std::max(0.0, std::min(std::pow(leaf, 1 / c.alpha), kLargest) - c.eps);
}

// Writes leaves at once, and lets the sums of the tree follow in flush(): in ascending runs, which the tree takes much
// faster than single changes. A crash in between is repaired from the leaves.
class LeafChanges {
 public:
  explicit LeafChanges(PriorityTree& tree) : tree_(tree) {}

  // `leaf` is 0 or clamped.
  void set(uint64_t slot, float leaf) {
    const auto index = static_cast<int64_t>(slot);
    float& now = tree_.leaves()[index];
    if (now == leaf) return;
    if (last_ != index) {
      if (n_ == kMost) flush();
      ascending_ &= last_ < index;
      last_ = index_[n_] = index;
      was_[n_++] = now;
    }
    const float was = std::exchange(now, leaf);
    TORCHREPLAY_FAULT("leaves.set");
    if (leaf >= largest_) {
      largest_ = leaf;
      holder_ = index;
    } else if (index == holder_ || (holder_ < 0 && was == largest_)) {
      forget_largest();
    }
  }

  // The largest leaf there is, changes included. O(1) unless the leaf that was known to be as large has fallen: in an
  // absorption that happens once, for the new items that start from it hold it then.
  float largest() {
    if (largest_ == kUnknown) {
      flush();
      largest_ = tree_.max();
    }
    return largest_;
  }

  void flush() {
    if (!ascending_) sort();
    for (int k = 0; k < n_; k++) now_[k] = tree_.leaf(index_[k]);
    if (n_) tree_.replace_sorted(index_, was_, now_, n_);
    n_ = 0;
    last_ = -1;
    ascending_ = true;
    forget_largest();  // others may change leaves now
  }

 private:
  void forget_largest() {
    largest_ = kUnknown;
    holder_ = -1;
  }

  // Of several changes of one leaf the first knows what the sums account for.
  void sort() {
    std::pair<int64_t, float> changes[kMost];
    for (int k = 0; k < n_; k++) changes[k] = {index_[k], was_[k]};
    const auto by_index = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::stable_sort(changes, changes + n_, by_index);
    n_ = static_cast<int>(std::unique(changes, changes + n_, [](auto& a, auto& b) { return a.first == b.first; }) -
                          changes);
    for (int k = 0; k < n_; k++) std::tie(index_[k], was_[k]) = changes[k];
  }

  static constexpr int kMost = 512;
  static constexpr float kUnknown = std::numeric_limits<float>::infinity();
  PriorityTree& tree_;
  float largest_ = kUnknown;
  int64_t holder_ = -1;  // of the largest leaf; -1: nobody looked who that is
  int n_ = 0;
  int64_t last_ = -1;  // of the changes' indices
  bool ascending_ = true;
  int64_t index_[kMost];
  float was_[kMost];  // the leaves that the sums account for
  float now_[kMost];
};

// The leaf of an item that becomes drawable.
class InitialLeaf {
 public:
  InitialLeaf(Header& h, const PriorityTree& tree, LeafChanges& leaves) : header_(h), tree_(tree), leaves_(leaves) {
    refresh();
  }

  // Others may have seen larger priorities since.
  void refresh() {
    const SamplerConfig& c = header_.sampler;
    default_ = tree_.clamp(leaf_of(c, c.initial == Initial::kMaxSeen ? header_.max_raw : c.initial_raw));
  }

  // `priority`: raw, NaN for none given: then the initial one of the sampler.
  float of(float priority) {
    if (std::isnan(priority)) {
      const float held = header_.sampler.initial == Initial::kMaxHeld ? leaves_.largest() : 0;
      return held > 0 ? held : default_;
    }
    if (priority > header_.max_raw) {
      header_.set_largest_raw(priority);
      TORCHREPLAY_FAULT("priority.largest");
      refresh();
    }
    return tree_.clamp(leaf_of(header_.sampler, priority));
  }

 private:
  Header& header_;
  const PriorityTree& tree_;
  LeafChanges& leaves_;
  float default_;
};

}  // namespace torchreplay
