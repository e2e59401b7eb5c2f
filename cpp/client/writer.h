// One writer's session: its place among the participants, its episodes under way, and the waits of its writes.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/membership.h"
#include "system/thread.h"
#include "write/lanes.h"

namespace torchreplay {

// Guarded by the caller's lock, which it lets go of while it waits and copies much.
class Writer {
 public:
  // `lanes`: of the streams that it writes, where rows are linked.
  Writer(std::shared_ptr<Attachment> attachment, Lanes lanes)
      : attachment_(std::move(attachment)),
        member_(attachment_, Role::kWriter),
        linked_(attachment_->linked()),
        lanes_(std::move(lanes)) {
    for (const Field& f : attachment_->memory().layout().fields) row_bytes_ += f.nbytes;
    member_.id();  // announced from the start: a learner that waits knows that rows may come
    member_.take_renewed();
  }

  // One call's use of the writer: a second one at the same time is refused.
  class Call {
   public:
    explicit Call(Writer& writer) : writer_(writer) { writer.begin(); }
    ~Call() { writer_.used_in_ = 0; }
    Call(const Call&) = delete;

   private:
    Writer& writer_;
  };

  SegmentMemory& memory() const { return attachment_->memory(); }
  Lanes& lanes() { return lanes_; }
  const Lanes& lanes() const { return lanes_; }
  bool closed() const { return closed_; }
  // A thread of the parent was using it when this process was forked.
  bool is_left_over() const { return used_in_ && !in_use(); }
  bool in_use() const { return used_in_ == fork_generation.load(std::memory_order_relaxed) + 1; }

  void require_open() const {
    if (closed_) throw std::invalid_argument("the writer is closed: make another with buffer.writer()");
  }

  // Rows that it has written, and those with which an item was complete.
  uint64_t rows() const {
    const int id = closed_ ? 0 : member_.held();
    return rows_before_ + (id ? memory().participant(id).rows.load(std::memory_order_relaxed) : 0);
  }
  uint64_t completed() const { return linked_ ? lanes_.completed() : rows(); }

  // Whether the limits of slots and of pages would let a row through now: the one that waits, or one without pages.
  bool admitted() const {
    const Header& h = memory().header();
    return h.head.load(std::memory_order_relaxed) < h.ticket_limit.load(std::memory_order_relaxed) &&
           (!pages_wanted_ || fits_below(memory(), h.page_limit.load(std::memory_order_acquire), pages_wanted_));
  }
  // How many pages the row needs that has to wait for some.
  uint64_t pages_wanted() const { return pages_wanted_; }

  // Gives its place up for good.
  void close() {
    refuse_second();
    rows_before_ = rows();
    closed_ = true;
    member_.release();
    Attachment::release(attachment_);  // or the file of a closed buffer would stay in use
  }

  // Others count no more on this writer, unless a thread is using it, until it is used again.
  void depart() {
    if (in_use() || closed_) return;
    rows_before_ = rows();
    member_.leave();
  }

  // Whether another thread is in the middle of an episode, which a step of the calling one would go on with. Lanes
  // where `but` is set begin anew.
  bool is_elsewhere(const uint8_t* but = nullptr) const { return owner_ != this_thread() && lanes_.running(but); }

  // Writes `n` rows, in a call, waiting as often as need be. `rows` and `fill` are those of RingWriter::append.
  // `run_bytes`: of the values that have any length.
  template <class Rows, class Fill>
  void write(uint64_t n, Rows& rows, int64_t* keys, Fill& fill, Wait& wait, uint64_t run_bytes = 0) {
    const Header& h = memory().header();
    const int id = member_.held();  // since begin()
    RingWriter ring(memory(), id, true);
    const bool has_to_be_admitted = Admission::is_kept(h);
    if (has_to_be_admitted) require_admitted(n);
    pages_wanted_ = 0;
    const uint64_t at_once = h.sampler.counts_dropped() ? rows_between_looks() : n;
    for (uint64_t written = 0;;) {
      const uint64_t before = written, end = std::min(n, written + at_once);
      Append outcome = Append::kLimited;
      if (h.sampler.counts_dropped()) look_before_overwriting(end - written);
      if (!h.stopped.load(std::memory_order_acquire)) {
        if (row_bytes_ * (end - written) + run_bytes > kUnlockedBytes) {
          const Unlocked others;
          outcome = ring.append(end, rows, keys, written, fill);
        } else {
          outcome = ring.append(end, rows, keys, written, fill);
        }
      }
      if (has_to_be_admitted) note_written(memory().participant(id), written - before);
      switch (outcome) {
        case Append::kDone:
          if (written < n) break;
          return look_around(memory().participant(id), wait);
        case Append::kGated:
          if (draws_itself(memory()))
            ring.pass_gate();
          else
            give_way();
          break;
        case Append::kLimited:
          pages_wanted_ = ring.pages_wanted();
          wait_for_room(wait, ring);
          break;
        case Append::kStalled:
          wait_for_slot(wait, ring);
          break;
        case Append::kSpent:
          throw std::runtime_error("the buffer has issued all its " + std::to_string(kMaxKeys) +
                                   " keys, and rows without one cannot be told apart: make a new buffer");
        case Append::kLost:
          Descriptor::throw_lost();
      }
      refuse_forked();
    }
  }

  // Writes the rows that lanes() has planned. Their keys, `first_key` more than the buffer's own, go to the places in
  // `answers` that they answer. `priority_of(row)` gives a step's.
  template <class PriorityOf, class Fill>
  void write_planned(int64_t* answers, int64_t first_key, const PriorityOf& priority_of, Fill& fill, Wait& wait,
                     uint64_t run_bytes = 0) {
    const std::vector<StreamRow>& plan = lanes_.rows();
    PlannedRows<PriorityOf> rows{lanes_, priority_of};
    keys_.resize(plan.size());
    const uint64_t owner = std::exchange(owner_, this_thread());
    try {
      if (!plan.empty()) write(plan.size(), rows, keys_.data(), fill, wait, run_bytes);
    } catch (...) {
      if (lanes_.untouched()) owner_ = owner;
      lanes_.break_off();
      throw;
    }
    for (size_t i = 0; i < plan.size(); i++)
      if (plan[i].answer >= 0) answers[plan[i].answer] = first_key + keys_[i];
  }

  // The episodes under way in the lanes of `mask` (nullptr: all) end with the rows that are there: as truncations, by
  // the flag `field`. Returns the keys of these rows.
  std::vector<int64_t> end_episodes(const uint8_t* mask, size_t field) {
    std::vector<int64_t> ends = lanes_.last_keys(mask);
    lanes_.end_running(mask);  // first: no step may follow a row that is an end
    if (!ends.empty()) truncate(ends, field);
    return ends;
  }
  void truncate(const std::vector<int64_t>& keys, size_t field) { attachment_->truncate(keys, field); }

  // Where items have to be admitted: waits until `n` more are, in a call. They count until end_admission(n), or until
  // their rows do.
  void admit(uint32_t n, Wait& wait) {
    if (!Admission::is_kept(memory().header()))
      throw std::invalid_argument("admit() is for buffers with limiter=tr.Admission(...), and this one has another");
    const int64_t start = monotonic_ns();
    std::optional<WaitScope> waiting;
    for (int64_t waited = 0; attachment_->stopped() || !try_to_admit(n); waited = monotonic_ns() - start) {
      if (!waiting) waiting.emplace(*this, n + 1);
      wait.look(Blocked::kNotAdmitted, waited);
      refuse_forked();
      {
        const Unlocked others;
        wait_to_be_admitted(n);
      }
      refuse_forked();
      if (waited) reclaim_dead(memory());
    }
    begun_ += n;
  }

  // Of items that were admitted, what is not written is given back, unless others were admitted meanwhile.
  void end_admission(uint32_t n) {
    const int id = closed_ ? 0 : member_.held();
    begun_ -= std::min(begun_, n);
    if (!id) return;
    Participant& entry = memory().participant(id);
    if (entry.admitted.load(std::memory_order_relaxed) <= begun_) return;
    entry.admitted.store(begun_, std::memory_order_release);
    TORCHREPLAY_FAULT("admit.given_back");
    wake_writers(memory().header());
  }

  // Items of admissions that have not ended; and those that it may write now.
  uint32_t begun_items() const { return begun_; }
  uint32_t open_items() const {
    const int id = closed_ ? 0 : member_.held();
    return id ? memory().participant(id).admitted.load(std::memory_order_relaxed) : 0;
  }

  // Gives back what a large call took.
  void trim(size_t most) {
    if (keys_.capacity() > most) std::vector<int64_t>().swap(keys_);
    if (lanes_.rows().capacity() > most) lanes_.forget_plan();
  }

 private:
  // So long a writer waits for the lock that waits for nothing else.
  static constexpr int64_t kLookNs = 10'000'000;
  // A stall that ended so long ago is another one.
  static constexpr int64_t kSameStallNs = 1'000'000'000;

  template <class PriorityOf>
  struct PlannedRows {
    Lanes& lanes;
    const PriorityOf& priority_of;
    RowMeta meta(uint64_t i) const {
      const StreamRow& row = lanes.rows()[i];
      return lanes.meta(i, row.kind == StreamRow::Kind::kReset ? RowMeta{} : priority_of(row));
    }
    void commit(uint64_t i, uint64_t key) const { lanes.commit(i, key); }
  };

  void begin() {
    require_open();
    refuse_second();
    used_in_ = fork_generation.load(std::memory_order_relaxed) + 1;
    try {
      // Not for long: a writer depends on nobody who may have been stopped.
      attachment_->settle_own({.deadline = monotonic_ns() + kSettleNs});
      if (member_.act()) {
        lanes_.forget();
        begun_ = 0;
      }
    } catch (...) {
      used_in_ = 0;
      throw;
    }
  }

  void refuse_second() const {
    if (in_use()) throw std::runtime_error("the writer is in use in another thread: make one writer for each thread");
  }

  // After a wait: the parent goes on with this call, and its id is the parent's.
  void refuse_forked() const {
    if (!in_use()) throw std::runtime_error("the process was forked out of a waiting call: start a call of its own");
  }

  // Now and then: is anybody there to draw what is written?
  void look_around(const Participant& own, Wait& wait) {
    constexpr int64_t kEvery = 1'000'000'000;
    const int64_t now = own.last_write.load(std::memory_order_relaxed);
    if (looked_around_ == 0) looked_around_ = now;
    if (now - looked_around_ < kEvery) return;
    looked_around_ = now;
    wait.look_around();
  }

  // While it lives, those who look see that this writer waits, and for how many items: also between two slices, or who
  // waits for it, too, would now and then take it for one that goes on.
  class WaitScope {
   public:
    WaitScope(const Writer& writer, uint32_t why)
        : writer_(writer), entry_(writer.memory().participant(writer.member_.held())) {
      entry_.waiting.store(why, std::memory_order_relaxed);
    }
    ~WaitScope() {
      if (!writer_.in_use()) return;  // forked meanwhile: the parent waits on
      entry_.waiting.store(0, std::memory_order_relaxed);
    }
    WaitScope(const WaitScope&) = delete;

   private:
    const Writer& writer_;
    Participant& entry_;
  };

  // Values of any length may take a quarter of the pages each.
  uint64_t rows_between_looks() const {
    return memory().has_pages() ? 1 : std::max<uint64_t>(1, memory().capacity() / 4);
  }

  // Where writers overwrite what is still to be drawn: each looks at least once in half a turn of slots or of pages, or
  // nobody could count what nobody saw. Behind a holder of the lock who may be stopped it goes on, though.
  void look_before_overwriting(uint64_t n) {
    SegmentMemory& m = memory();
    const Header& h = m.header();
    const auto page_head = [&] { return m.has_pages() ? h.page_head.load(std::memory_order_relaxed) : 0; };
    if (h.head.load(std::memory_order_relaxed) + n <= look_at_ && page_head() <= look_at_page_) return;
    {
      const Unlocked others;
      try {
        SegmentLock(m, {.deadline = monotonic_ns() + kLookNs}).absorb();
      } catch (const LockTimeout&) {
      }
    }
    refuse_forked();
    look_at_ = h.head.load(std::memory_order_relaxed) + std::max<uint64_t>(1, m.capacity() / 2);
    look_at_page_ = page_head() + (m.has_pages() ? m.layout().pages.count / 2 : 0);
  }

  // Sleeps for a slice while a learner that has fallen behind draws.
  void give_way() {
    Header& h = memory().header();
    const Unlocked others;
    const int64_t start = monotonic_ns();
    h.gate.pause(h.head, h.stopped, kSliceNs);
    h.insert_wait.add(monotonic_ns() - start, machine_ns());
    if (interrupted()) throw Interrupted{};
  }

  // Returns when the limit admits the next row of `ring`. A signal after a look at the limit ends the next sleep, one
  // before it does not: others may have used up what that one admitted.
  void wait_for_room(Wait& wait, const RingWriter& ring) {
    Header& h = memory().header();
    const int64_t start = monotonic_ns();
    const auto has_room = [&] { return ring.has_room(); };
    int64_t waited = 0;
    // Those that it drops need no room any more, or it would wait for itself.
    std::vector<int64_t> dropped;
    if (linked_ && Claims::are_kept(h)) dropped = lanes_.drop_before_resets();
    catch_up(dropped);
    std::optional<WaitScope> waiting;
    for (;;) {
      if (has_room() && !attachment_->stopped()) return;
      if (!waiting) waiting.emplace(*this, 1);
      wait.look(ring.lacks_pages() ? Blocked::kPagesLimited : Blocked::kLimited, waited);
      refuse_forked();
      const uint32_t seen = h.room_signal.load(std::memory_order_acquire);
      if (has_room()) return;
      {
        const Unlocked others;
        torchreplay::wait_for_room(h, seen, kSliceNs, has_room);
      }
      refuse_forked();
      waited = monotonic_ns() - start;
      if (has_room()) continue;
      ring.ask_for_room();
      reclaim_dead(memory());  // no row speaks of the pages of one that died before it
      catch_up(dropped);
    }
  }

  void require_admitted(uint64_t n) {
    const uint64_t may = memory().participant(member_.held()).admitted.load(std::memory_order_relaxed);
    if (may < n)
      throw std::runtime_error("writing " + std::to_string(n) + (n == 1 ? " row" : " rows") + " to " +
                               memory().called() + ", of which " + std::to_string(may) + (may == 1 ? " is" : " are") +
                               " admitted: begin what the buffer is to take in `with writer.admit():`, or in `with "
                               "writer.admit(n):` for n rows, and write it there");
  }

  // Whether `n` items more are admitted. The learner that holds the lock may be stopped: this wait has its own ends.
  bool try_to_admit(uint32_t n) {
    Participant& entry = memory().participant(member_.id());
    const Unlocked others;
    try {
      SegmentLock lock(memory(), {.deadline = 0});
      Admission admission(memory());
      if (admission.admit(entry, n)) return true;
      lock.absorb();  // rows that were lost do not count, nor those that are too old
      publish_limit(memory());
      return admission.admit(entry, n);
    } catch (const LockTimeout&) {
      return false;
    }
  }

  // Sleeps for a slice, unless somebody wakes the writers after the last look.
  void wait_to_be_admitted(uint32_t n) {
    Header& h = memory().header();
    const int64_t start = monotonic_ns();
    TORCHREPLAY_FAULT("admit.waiting");
    h.room_waiters.store(1, std::memory_order_seq_cst);  // before the last look: see wake_writers()
    const uint32_t seen = h.room_signal.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_room_for(n)) futex_wait(h.room_signal, seen, kSliceNs);
    TORCHREPLAY_FAULT("admit.awake");
    h.insert_wait.add(monotonic_ns() - start, machine_ns());
  }

  bool is_room_for(uint32_t n) {
    try {
      SegmentLock lock(memory(), {.deadline = 0});
      lock.absorb();
      return Admission(memory()).room() >= n && !memory().header().importer;
    } catch (const LockTimeout&) {
      return false;
    }
  }

  // Lets the limiter see what came: rows that are no items yet, and rows lost to the dead, make room for others. The
  // learner that holds the lock may be stopped: this wait has its own ends.
  void catch_up(const std::vector<int64_t>& dropped) {
    if (memory().header().admits_by_hand.load(std::memory_order_relaxed)) return;
    try {
      attachment_->refresh({.deadline = 0}, dropped);
    } catch (const LockTimeout&) {
    }
  }

  // Sleeps a little. A full turn of slots is held by others, who are stopped, or died and are freed by the census.
  void wait_for_slot(Wait& wait, const RingWriter& ring) {
    const int64_t now = monotonic_ns();
    if (now - last_stall_ > kSameStallNs) stalled_since_ = looked_at_ = 0;
    last_stall_ = now;
    if (!stalled_since_) stalled_since_ = now;
    if (now - looked_at_ >= kSliceNs) {
      looked_at_ = now;
      wait.look(ring.lacks_pages() ? Blocked::kPagesStalled : Blocked::kStalled, now - stalled_since_);
      refuse_forked();
    }
    take_census(memory(), false);
    const Unlocked others;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::shared_ptr<Attachment> attachment_;
  Membership member_;
  bool linked_;
  uint64_t row_bytes_ = 0, pages_wanted_ = 0;
  uint64_t look_at_ = 0, look_at_page_ = 0;  // the tickets of a row, and of a page, before which it looks again
  Lanes lanes_;
  std::vector<int64_t> keys_;
  uint64_t owner_ = 0;    // the thread that the episodes under way belong to
  uint64_t used_in_ = 0;  // the fork generation, plus one, of the call in progress
  bool closed_ = false;
  uint32_t begun_ = 0;         // items of admissions that have not ended
  uint64_t rows_before_ = 0;   // under places that it has given up
  int64_t looked_around_ = 0;  // when, by the clock of last_write
  int64_t stalled_since_ = 0, last_stall_ = 0, looked_at_ = 0;
};

}  // namespace torchreplay
