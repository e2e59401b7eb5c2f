// A learner whose batches are drawn ahead, and what it would draw if it did so itself.
#pragma once

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "prefetch/prefetcher.h"
#include "segments.h"

namespace torchreplay::testing {

inline constexpr int kBatch = 16;
inline constexpr int64_t kSecond = 1'000'000'000;

struct Drawn {
  std::vector<int64_t> keys = std::vector<int64_t>(kBatch), values = std::vector<int64_t>(kBatch);
  std::vector<float> weight = std::vector<float>(kBatch), probability = std::vector<float>(kBatch);

  BatchPointers pointers() {
    return {{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()};
  }
};

inline std::unique_ptr<SegmentMemory> buffer_of(size_t rows, Plan plan = {}) {
  plan.capacity = 64;
  auto m = make_segment(plan);
  for (size_t i = 0; i < rows; i++) append_row(*m, 1, 1000 + i, static_cast<float>(i * i % 37 + 1));
  return m;
}

// The batches drawn one by one, when they are wanted.
inline std::vector<Drawn> draw_in_turn(SegmentMemory& m, uint64_t n) {
  std::vector<Drawn> batches(n);
  BatchSampler sampler(m);
  for (uint64_t step = 0; step < n; step++) {
    Shortage shortage;
    BOOST_REQUIRE(sampler.sample(kBatch, 0.5, {7, 0, step}, batches[step].pointers(), shortage) == Draw::kDone);
  }
  return batches;
}

// TD errors for batch `k`, that differ much.
inline Feedback feedback_to(const Drawn& batch, uint64_t k) {
  Feedback feedback{batch.keys, {}};
  for (size_t i = 0; i < batch.keys.size(); i++) feedback.td.push_back(static_cast<double>((k + 3) * (i + 1) % 101));
  return feedback;
}

inline void apply_to(SegmentMemory& m, const Feedback& f) {
  PriorityUpdater(m).update(static_cast<int64_t>(f.keys.size()), f.keys.data(), f.td.data());
}

// Every slot's leaf.
inline std::vector<float> leaves(SegmentMemory& m) {
  const float* first = m.tree().leaves();
  return {first, first + m.capacity()};
}

// The batches of a learner that draws so many steps ahead and feeds back, all by itself: in each step the feedback, and
// then the draw, or the other way round.
inline std::vector<Drawn> learn_in_turn(SegmentMemory& m, size_t steps, size_t ahead, bool feedback_first) {
  std::vector<Drawn> batches(steps + ahead);
  BatchSampler sampler(m);
  const auto draw = [&](size_t step) {
    Shortage shortage;
    BOOST_REQUIRE(sampler.sample(kBatch, 0.5, {7, 0, step}, batches[step].pointers(), shortage) == Draw::kDone);
  };
  for (size_t k = 0; k < ahead; k++) draw(k);
  for (size_t k = 0; k < steps; k++) {
    if (feedback_first) apply_to(m, feedback_to(batches[k], k));
    draw(k + ahead);
    if (!feedback_first) apply_to(m, feedback_to(batches[k], k));
  }
  return batches;
}

class PrefetchingLearner {
 public:
  explicit PrefetchingLearner(SegmentMemory& m) : ahead(m, nullptr, outstanding) {}

  void order(int many = 1) {
    for (int i = 0; i < many; i++) {
      batches_.push_back(std::make_unique<Drawn>());
      ahead.order({kBatch, 0.5, {7, 0, step_++}, batches_.back()->pointers()});
    }
  }

  bool settled() { return ahead.settled(ahead.settle_point(true)); }

  void settle() {
    const SettlePoint point = ahead.settle_point(true);
    while (!ahead.settle(point, kSecond)) {
    }
  }

  Draw take(int64_t ns = 20 * kSecond) { return ahead.take(ns, shortage); }

  // The batch ordered as number `i`.
  const Drawn& operator[](size_t i) const { return *batches_[i]; }

  Outstanding outstanding;
  std::optional<Shortage> shortage;

 private:
  std::vector<std::unique_ptr<Drawn>> batches_;
  uint64_t step_ = 0;

 public:
  Prefetcher ahead;  // goes first: its thread writes to the batches
};

}  // namespace torchreplay::testing
