// When a caller that comes again and again is due.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace torchreplay {

// To wake a thread takes the learner as long as half a draw, or all of it. So a thread that works for it wakes by
// itself, a little after the time when the next order should be there. It does so where a learner's steps take at most
// `kMaxDoze`, and the drawn batches last for `kMinDrawn`: a thread is late by a tenth of a millisecond. Times are
// monotonic, ns.
class WakeupTimer {
 public:
  void note_order(int64_t now) {
    interval_ = (3 * interval_ + std::min(now - ordered_at_, kMaxDoze) + 3) / 4;
    ordered_at_ = now;
  }

  // Whether a thread may doze that has drawn so many batches ahead.
  bool allows_doze(size_t drawn) const {
    return interval_ < kMaxDoze && interval_ * static_cast<int64_t>(std::max<size_t>(drawn, 1)) >= kMinDrawn;
  }

  // For how long. Not positive: the next order is overdue, and nobody knows when it comes.
  int64_t doze_ns(int64_t now) const { return ordered_at_ + interval_ + std::min(interval_ / 4, kMaxLate) - now; }

 private:
  static constexpr int64_t kMaxDoze = 20'000'000, kMaxLate = 1'000'000, kMinDrawn = 200'000;

  int64_t ordered_at_ = 0;  // when the last order came
  int64_t interval_ = 0;    // and how long after the one before, on average
};

}  // namespace torchreplay
