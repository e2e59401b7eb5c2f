// How many items may be begun, by how far the learner is: so that none is too old when it is drawn.
#pragma once

#include <algorithm>

#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

// A learner at version v has drawn v batches, and an item that is admitted as number n is in batch n / batch_size. It
// is at most max_age versions old then if n is at most (max_age + 1 + v) * batch_size: the capacity of the staleness
// manager of AReaL (https://arxiv.org/abs/2505.24298, section 5.1). Items count that may be written, that are to be
// drawn, and that somebody holds or is done with. So whatever is lost, dropped or too old counts no more, with nobody
// to take it back. Versions, and items that were done, count from where the admission began: at that moment the count
// is what the buffer holds. Runs under the segment's mutex.
class Admission {
 public:
  explicit Admission(SegmentMemory& m) : memory_(m), header_(m.header()) {}

  // Whether writers have to be admitted. That is so for as long as there is the segment, or never.
  static bool is_kept(const Header& h) { return h.limiters[0].batch_size != 0; }

  // Items up to which are admitted, when the learner has come so many versions further.
  static uint64_t limit_of(const LimiterConfig& config, int64_t versions) {
    uint64_t batches, items;
    const bool fits =
        !__builtin_add_overflow(config.max_age + 1, static_cast<uint64_t>(std::max<int64_t>(0, versions)), &batches) &&
        !__builtin_mul_overflow(batches, config.batch_size, &items);
    return fits ? std::min(items, kMaxCount) : kMaxCount;
  }
  uint64_t limit() const {
    const int64_t version = header_.policy_version.load(std::memory_order_seq_cst);
    return limit_of(header_.limiter(), header_.admission_begun ? version - header_.admission_base : 0);
  }

  // Items that writers may write. O(participants ever at one time).
  uint64_t open() const {
    const uint32_t ids = header_.ids.load(std::memory_order_acquire);
    uint64_t n = 0;
    for (int id = 1; id < kMaxParticipants && id <= static_cast<int>(ids); id++)
      n += memory_.participant(id).admitted.load(std::memory_order_acquire);
    return n;
  }

  // Items that count. Rows that nobody has absorbed yet do, and those that are being written twice: a writer takes its
  // row off what it may write when it is there. So it is never too few, as the sum is taken before the look at rows.
  uint64_t count() const {
    const uint64_t may_write = open(), unseen = header_.head.load(std::memory_order_acquire) - header_.absorbed;
    return may_write + unseen + header_.pending + static_cast<uint64_t>(memory_.tree().count()) + handed_out();
  }

  // Items that may still be admitted.
  uint64_t room() const {
    const uint64_t most = limit();
    return most - std::min(most, count());
  }

  // Admits `n` items, which that participant may write then, unless there is no room.
  bool admit(Participant& writer, uint32_t n) {
    if (header_.importer) return false;
    begin();
    if (room() < n) return false;
    TORCHREPLAY_FAULT("admit.ready");
    writer.admitted.store(writer.admitted.load(std::memory_order_relaxed) + n, std::memory_order_release);
    TORCHREPLAY_FAULT("admit.admitted");
    return true;
  }

 private:
  // After a death in between it begins again.
  void begin() {
    if (header_.admission_begun) return;
    header_.admission_base = header_.policy_version.load(std::memory_order_seq_cst);
    header_.done_before = header_.handed_out_gone + header_.handed_out - std::min(header_.held, header_.handed_out);
    TORCHREPLAY_FAULT("admit.counted");
    kill_fence();
    header_.admission_begun = 1;
    TORCHREPLAY_FAULT("admit.begun");
  }

  // Items that somebody holds or is done with, since it began.
  uint64_t handed_out() const {
    if (!header_.admission_begun) return header_.held;
    return header_.handed_out_gone + header_.handed_out - header_.done_before;
  }

  SegmentMemory& memory_;
  Header& header_;
};

// The writer has written `n` of the items that it may.
inline void note_written(Participant& writer, uint64_t n) {
  const uint32_t may = writer.admitted.load(std::memory_order_relaxed);
  writer.admitted.store(may - static_cast<uint32_t>(std::min<uint64_t>(n, may)), std::memory_order_release);
}

}  // namespace torchreplay
