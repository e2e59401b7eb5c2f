// How many items may be begun, by how far the learner is: so that none is too old when it is drawn.
#pragma once

#include <algorithm>

#include "absorb/pending_set.h"
#include "segment/limiter.h"
#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

// A learner at version v has drawn v batches, and an item that is admitted as number n is in batch n / batch_size. It
// is at most max_age versions old then if n is at most (max_age + 1 + v) * batch_size: the capacity of the staleness
// manager of AReaL (https://arxiv.org/abs/2505.24298, section 5.1). Items count that may be written, that are to be
// drawn, and that somebody holds or is done with. So whatever is lost, dropped or too old counts no more, with nobody
// to take it back. Versions, and items that are handed out, count from where the admission began: at that moment the
// count is what is to be drawn. An item that comes again counts again if its version had come, as there will be another
// one. Runs under the segment's mutex.
class Admission {
 public:
  explicit Admission(SegmentMemory& m) : memory_(m), header_(m.header()) {}

  // Whether writers have to be admitted. That is so for as long as there is the segment, or never.
  static bool is_kept(const Header& h) { return h.limiters[0].batch_size != 0; }

  // Items up to which are admitted.
  uint64_t limit() const { return limit_at(version()); }

  // Items that writers may write. O(participants ever at one time).
  uint64_t open() const {
    const uint32_t ids = header_.ids.load(std::memory_order_acquire);
    uint64_t n = 0;
    for (int id = 1; id < kMaxParticipants && id <= static_cast<int>(ids); id++)
      n += memory_.participant(id).admitted.load(std::memory_order_acquire);
    return n;
  }

  // Items that count. A writer takes its row off what it may write when it is there. So it is never too few, as the sum
  // is taken before the look at rows. O(participants ever at one time, and rows that nobody has absorbed).
  uint64_t count() const {
    const uint64_t may_write = open();
    return may_write + unseen() + static_cast<uint64_t>(memory_.tree().count()) + handed_out();
  }

  // Items that may still be admitted.
  uint64_t room() const {
    const uint64_t most = limit();
    return most - std::min(most, count());
  }

  // From here on versions count, and items that are handed out: when the first item is admitted or drawn, whichever
  // comes first. After a death in between it begins again.
  void begin() {
    if (!header_.admission_begun) begin_at(version(), 0);
  }

  // Another limiter from now on. Of what is handed out that counts whose version has yet to come. After a death in
  // between nothing of it does.
  void change(const LimiterConfig& next) {
    const int64_t now = version();
    const bool begun = header_.admission_begun;
    const uint64_t due = begun ? unpublished(now, header_.held) : 0;
    header_.admission_begun = 0;
    kill_fence();
    change_limiter(header_, next);
    TORCHREPLAY_FAULT("admit.changed");
    if (begun) begin_at(now, due);
  }

  // Of items that somebody holds `n` are about to be drawn again. Those whose version has come stay counted. After a
  // death in between what has not gone back does, and the sum is the same.
  void let_come_again(uint64_t n) {
    if (!header_.admission_begun) return;
    header_.done_before -= n - unpublished(version(), n);
    kill_fence();
    TORCHREPLAY_FAULT("admit.come_again");
  }

  // `done_before`, when of the items that somebody holds `n` are dropped. Those whose version has come stay counted.
  uint64_t done_without(uint64_t n) const {
    return header_.done_before + (header_.admission_begun ? unpublished(version(), n) : 0);
  }

  // A learner that goes on from what it has saved takes `n` items, and is done with them: their versions have come. If
  // it dies first they go back.
  void note_learnt(uint64_t n) {
    if (!header_.admission_begun) return;
    TORCHREPLAY_FAULT("admit.taken");
    kill_fence();
    header_.done_before += n;
    kill_fence();
    TORCHREPLAY_FAULT("admit.learnt");
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
  int64_t version() const { return header_.policy_version.load(std::memory_order_seq_cst); }

  uint64_t limit_at(int64_t version) const {
    return admission_limit(header_.limiter(), header_.admission_begun ? version - header_.admission_base : 0);
  }

  // Of items that are handed out those whose version has yet to come, as far as one follows each batch; at most `most`.
  // Where several learners hold batches nobody knows whose version that is: the others' count then as the one's.
  uint64_t unpublished(int64_t version, uint64_t most) const {
    const uint64_t out = handed_out(), published = limit_at(version) - admission_limit(header_.limiter(), 0);
    return std::min(most, out - std::min(out, published));
  }

  void begin_at(int64_t version, uint64_t due) {
    header_.admission_base = version;
    header_.done_before = header_.handed_out_gone + header_.handed_out - due;
    TORCHREPLAY_FAULT("admit.counted");
    kill_fence();
    header_.admission_begun = 1;
    TORCHREPLAY_FAULT("admit.begun");
  }

  // So many tickets are looked at one by one. Of more each counts, until they are absorbed.
  static constexpr uint64_t kMostLooked = 64;

  // Rows that are there and not absorbed. Those that are being written are among what their writers may write; those
  // that will never be there are not.
  uint64_t unseen() const {
    const uint64_t head = header_.head.load(std::memory_order_acquire), absorbed = std::min(head, header_.absorbed);
    if (head - absorbed > kMostLooked) return head - absorbed + header_.pending;
    uint64_t n = 0;
    for (uint64_t key = absorbed; key < head; key++) n += is_unseen(memory_.slot_of(key), key);
    PendingSet(memory_).each([&](uint64_t slot) {
      if (slot < absorbed) n += is_unseen(slot, absorbed - 1 - (absorbed - 1 - slot) % memory_.capacity());
    });
    return n;
  }

  // Whether the row of that ticket is in the slot, and not absorbed.
  bool is_unseen(uint64_t slot, uint64_t key) const {
    const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
    return slot_word::is_row(word) && slot_word::key1(word) == key + 1 && memory_.at(slot) != key + 1;
  }

  // Items that somebody got since it began.
  uint64_t handed_out() const {
    return header_.admission_begun ? header_.handed_out_gone + header_.handed_out - header_.done_before : 0;
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
