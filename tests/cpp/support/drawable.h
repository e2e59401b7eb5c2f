// A ring under a view, and the items of its streams that can be drawn.
#pragma once

#include <boost/test/unit_test.hpp>
#include <memory>
#include <set>

#include "invariants.h"
#include "segments.h"
#include "views.h"

namespace torchreplay::testing {

using Keys = std::set<int64_t>;

// Leaves are raw priorities.
inline constexpr SamplerConfig kRaw{1, Normalize::kBuffer, 1, 0};

inline std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = kRaw;
  return make_segment(plan);
}

// Keys of the items that can be drawn.
inline Keys drawable(SegmentMemory& m) {
  settle(m);
  BOOST_TEST(violation(m) == "");
  Keys keys;
  const PriorityTree tree = m.tree();
  for (uint64_t s = 0; s < m.capacity(); s++)
    if (tree.leaf(static_cast<int64_t>(s)) > 0) keys.insert(static_cast<int64_t>(m.at(s)) - 1);
  return keys;
}

inline float leaf(const SegmentMemory& m, uint64_t key) { return m.tree().leaf(static_cast<int64_t>(m.slot_of(key))); }

}  // namespace torchreplay::testing
