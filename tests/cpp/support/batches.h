// Batches of items, in memory of the test's own.
#pragma once

#include <cstring>

#include "draw/batch_sampler.h"

namespace torchreplay::testing {

struct Items {
  std::vector<std::vector<char>> values;  // of each output
  std::vector<int64_t> keys;
  std::vector<float> weight, probability;
  Draw outcome = Draw::kDone;
  Shortage shortage;

  // All values of an output, one after the other.
  template <class T>
  std::vector<T> of(size_t output) const {
    std::vector<T> v(values[output].size() / sizeof(T));
    std::memcpy(v.data(), values[output].data(), v.size() * sizeof(T));
    return v;
  }
};

// Room for `n` items, filled with what no test expects. `bytes`: what the batch is said to take.
class Room {
 public:
  Room(const SegmentMemory& m, const ItemPlan& plan, size_t n, uint64_t bytes) {
    for (size_t o = 0; o < plan.outputs.size(); o++) {
      item_bytes_.push_back(plan.item_bytes(o, m.layout()));
      items_.values.emplace_back(n * item_bytes_.back() + 1, '\x5a');
      pointers_.values.push_back(items_.values.back().data());
    }
    items_.keys.resize(n);
    items_.weight.resize(n);
    items_.probability.resize(n);
    pointers_.keys = items_.keys.data();
    pointers_.weight = items_.weight.data();
    pointers_.probability = items_.probability.data();
    pointers_.bytes = bytes;
  }

  const BatchPointers& pointers() const { return pointers_; }

  // The first `n` items.
  Items take(size_t n) {
    for (size_t o = 0; o < items_.values.size(); o++) {
      if (items_.values[o].back() != '\x5a') throw std::runtime_error("an output was written beyond its end");
      items_.values[o].resize(n * item_bytes_[o]);
    }
    items_.keys.resize(n);
    items_.weight.resize(n);
    items_.probability.resize(n);
    return std::move(items_);
  }

 private:
  Items items_;
  BatchPointers pointers_;
  std::vector<uint64_t> item_bytes_;
};

// The items anchored at `keys` that can be drawn.
inline Items gather(SegmentMemory& m, const ItemPlan& plan, const std::vector<int64_t>& keys, uint64_t bytes = 0) {
  plan.check(m.layout());
  Room room(m, plan, keys.size(), bytes);
  const int n = BatchSampler(m, &plan).gather(keys.data(), static_cast<int>(keys.size()), 0, room.pointers());
  return room.take(static_cast<size_t>(n));
}

inline Items draw(SegmentMemory& m, const ItemPlan& plan, int n, const DrawName& name = {7, 0, 0}) {
  plan.check(m.layout());
  Room room(m, plan, static_cast<size_t>(n), 0);
  Shortage shortage;
  const Draw outcome = BatchSampler(m, &plan).sample(n, 0, name, room.pointers(), shortage);
  Items items = room.take(static_cast<size_t>(n));
  items.outcome = outcome;
  items.shortage = shortage;
  return items;
}

}  // namespace torchreplay::testing
