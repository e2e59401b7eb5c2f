// How long one side has waited for the other. Lies in the segment; a kill in between loses a few milliseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace torchreplay {

// In all, and of late: in the running window of ten seconds and the one before.
class WaitTime {
 public:
  // Counts `ns` that ended at `now`, a time of machine_ns().
  void add(int64_t ns, int64_t now) {
    total_.fetch_add(static_cast<uint64_t>(ns), std::memory_order_relaxed);
    const uint64_t number = window_number(now);
    std::atomic<uint64_t>& window = windows_[number % 2];
    uint64_t seen = window.load(std::memory_order_relaxed), more;
    do {
      more = (seen >> kShift == number ? seen : number << kShift) + static_cast<uint64_t>(ns) / kUnitNs;
    } while (!window.compare_exchange_weak(seen, more, std::memory_order_relaxed));
  }

  uint64_t total_ns() const { return total_.load(std::memory_order_relaxed); }

  // Waited since since(now, ...).
  uint64_t recent_ns(int64_t now) const {
    uint64_t units = 0;
    for (uint64_t number : {window_number(now), window_number(now - kWindowNs)}) {
      const uint64_t seen = windows_[number % 2].load(std::memory_order_relaxed);
      if (seen >> kShift == number) units += seen & ((uint64_t{1} << kShift) - 1);
    }
    return units * kUnitNs;
  }

  // Where the recent time begins, for a segment made at `made`.
  static int64_t since(int64_t now, int64_t made) { return std::max(made, (now / kWindowNs - 1) * kWindowNs); }

 private:
  static constexpr int64_t kWindowNs = 10'000'000'000;
  static constexpr uint64_t kUnitNs = 1000;
  // Number of a window above, microseconds below: all participants together wait less than 2^40 in one.
  static constexpr int kShift = 40;

  // Of 24 bits: it comes again after five years.
  static uint64_t window_number(int64_t now) {
    return static_cast<uint64_t>(now / kWindowNs) & ((uint64_t{1} << (64 - kShift)) - 1);
  }

  std::atomic<uint64_t> total_;
  std::atomic<uint64_t> windows_[2];
};

}  // namespace torchreplay
