// A draw that has happened only when it is kept.
#pragma once

#include <utility>

#include "segment/header.h"
#include "system/fault.h"

namespace torchreplay {

// A draw as the segment counts it. Unless it is kept it has not happened: whatever ends it takes it back. That needs no
// lock, which may be what does not come free.
class CountedDraw {
 public:
  explicit CountedDraw(Header& h) : header_(h) {}
  ~CountedDraw() { take_back(); }
  CountedDraw(const CountedDraw&) = delete;

  explicit operator bool() const { return items_ != 0; }

  // The lock is held.
  void count(int n) {
    items_ = static_cast<uint64_t>(n);
    header_.sampled.fetch_add(items_, std::memory_order_relaxed);
    TORCHREPLAY_FAULT("draw.counted");
    header_.draws.fetch_add(1, std::memory_order_relaxed);
  }

  // It turned out to be of another number of items.
  void recount(uint64_t n) { header_.sampled.fetch_add(n - std::exchange(items_, n), std::memory_order_relaxed); }

  void take_back() {
    if (items_) uncount(header_, 1, std::exchange(items_, 0));
  }

  void keep() { items_ = 0; }

  // So many draws, of so many items in all, have not happened.
  static void uncount(Header& h, uint64_t draws, uint64_t items) {
    h.sampled.fetch_sub(items, std::memory_order_relaxed);
    h.draws.fetch_sub(draws, std::memory_order_relaxed);
  }

 private:
  Header& header_;
  uint64_t items_ = 0;
};

}  // namespace torchreplay
