// A segment in a file: bringing it back when all who used it are gone, and putting it to rest behind the last of them.
//
// Everyone who uses the file holds flock(LOCK_SH) on the description that he has mapped; LOCK_EX says that nobody does.
// A forked child shares the description, and what keeps the mapping keeps the lock.
#pragma once

#include <fcntl.h>
#include <sys/file.h>

#include <cmath>
#include <cstdio>
#include <optional>

#include "segment/format.h"
#include "session/segment_lock.h"

namespace torchreplay {

namespace detail {

inline void require_intact(bool good, const std::string& what) {
  if (!good) throw NotASegment("the file is damaged: " + what);
}

// Of the runs and lengths of all rows. O(capacity).
inline uint64_t hash_of_lengths(const SegmentMemory& m) {
  Hash hash;
  for (uint64_t slot = 0; m.has_pages() && slot < m.capacity(); slot++) {
    if (!m.at(slot)) continue;
    hash.mix(*m.run1_of_row(slot));
    for (uint32_t g = 0; g < m.layout().pages.groups; g++) hash.mix(*m.length_of_row(slot, g));
  }
  return hash.value();
}

// Looks for what no death of a process can leave. Reads only. O(capacity).
class Examination {
 public:
  explicit Examination(SegmentMemory& m)
      : memory_(m), header_(m.header()), tree_(m.tree()), head_(header_.head.load(std::memory_order_relaxed)) {}

  void run() {
    require_intact(head_ <= kMaxHead, "tickets");
    require_intact(header_.draws.load(std::memory_order_relaxed) < kMaxDraws, "number of draws");
    for (uint64_t n : {header_.inserted, header_.sampled.load(std::memory_order_relaxed), header_.updated,
                       header_.stale_updates, header_.unready_updates, header_.evicted_unsampled, header_.dropped_items,
                       header_.expired_items, header_.evicted_by_pages})
      require_intact(n <= kMaxCount, "counters");
    require_intact(std::isfinite(header_.max_raw) && header_.max_raw >= 0, "largest priority");
    require_intact(std::isfinite(header_.priority_change) && header_.priority_change >= 0, "change of priorities");
    require_intact(header_.limiter_index < 2, "limiter");
    const int64_t version = header_.policy_version.load(std::memory_order_relaxed);
    require_intact(version >= 0 && header_.judged_version >= 0 && header_.judged_version <= version, "policy version");
    for (const LimiterConfig& limiter : header_.limiters)
      require_intact(limiter.ratio >= 0 && limiter.min_diff <= limiter.max_diff &&
                         std::max({limiter.min_size, limiter.inserted_before, limiter.sampled_before,
                                   limiter.cleared}) <= kMaxCount &&
                         limiter.batch_size <= kMaxCount && limiter.max_age <= kMaxCount,
                     "limiter");
    const bool untouched = header_.rows == 0 && header_.inserted == 0;
    require_intact(!header_.importer || untouched || header_.import_stage == ImportStage::kPlaced, "import");
    require_intact(!header_.importer || untouched || header_.imported.are_sound(), "import");
    const int64_t grid = tree_.grid_state().top;
    require_intact(grid >= 0 && grid <= tree_node::Grid::kMaxTop, "grid of priorities");
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      check_word(slot);
      check_leaf(slot);
      require_intact(is_sound(memory_, slot), "header of row " + std::to_string(slot));
    }
    if (memory_.has_pages()) run_pages();
  }

  // A sealed segment is settled: repairing it would change nothing.
  void run_sealed() {
    uint64_t rows = 0, total = 0;
    int64_t count = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      const uint64_t word = word_of(slot), row1 = slot_word::is_row(word) ? slot_word::key1(word) : 0;
      const float leaf = tree_.leaf(static_cast<int64_t>(slot));
      require_intact(memory_.at(slot) == row1 && (row1 || leaf == 0), "place of row " + std::to_string(slot));
      rows += row1 != 0;
      count += leaf > 0;
      total += tree_.quantize(leaf);
    }
    require_intact(rows == header_.rows, "number of rows");
    require_intact(count == tree_.count() && total == tree_.total(), "sums of priorities");
    if (memory_.has_pages()) run_sealed_pages();
  }

 private:
  // No length and no run leads past an end.
  void run_pages() {
    const uint64_t page_head = header_.page_head.load(std::memory_order_relaxed);
    const uint64_t furthest = std::max({header_.followed, header_.page_needed_from, header_.pages_settled});
    require_intact(page_head <= kMaxHead && furthest <= page_head, "tickets of pages");
    for (uint64_t page = 0; page < memory_.layout().pages.count; page++) {
      const uint64_t word = memory_.page_word(page).load(std::memory_order_relaxed), key1 = slot_word::key1(word);
      const bool known = slot_word::writer(word) < kMaxParticipants || slot_word::writer(word) == slot_word::kLoaded;
      require_intact(word == 0 || (known && key1 > 0 && key1 <= page_head && memory_.page_of(key1 - 1) == page),
                     "word of page " + std::to_string(page));
    }
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      Run run;
      require_intact(!slot_word::is_row(word_of(slot)) || read_run(memory_, slot, run, lengths_.data()),
                     "lengths of the values of row " + std::to_string(slot));
    }
  }

  void run_sealed_pages() {
    uint64_t owned = 0;
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      Run run;
      if (!memory_.at(slot)) continue;
      read_run(memory_, slot, run, lengths_.data());
      const bool led_to = run.pages == 0 || memory_.owner1(memory_.page_of(run.first)) == slot + 1;
      require_intact(is_intact(memory_, run) && led_to && memory_.run1(slot) == (run.pages ? run.first + 1 : 0),
                     "pages of row " + std::to_string(slot));
      owned += run.pages > 0;
    }
    for (uint64_t page = 0; page < memory_.layout().pages.count; page++) owned -= memory_.owner1(page) != 0;
    require_intact(owned == 0, "rows of pages");
    require_intact(memory_.file().lengths == hash_of_lengths(memory_), "lengths of the values");
  }

  uint64_t word_of(uint64_t slot) const { return memory_.row(slot).word.load(std::memory_order_relaxed); }

  void check_word(uint64_t slot) const {
    const uint64_t word = word_of(slot), key1 = slot_word::key1(word), writer = slot_word::writer(word);
    const bool known = writer < kMaxParticipants || slot_word::is_stamped(word) || writer == slot_word::kLoaded;
    require_intact(word == 0 || (known && key1 > 0 && key1 <= head_ && memory_.slot_of(key1 - 1) == slot),
                   "word of row " + std::to_string(slot));
  }

  void check_leaf(uint64_t slot) const {
    const float leaf = tree_.leaf(static_cast<int64_t>(slot));
    const bool known = header_.sampler.prioritized ? leaf == PriorityTree::clamp(leaf)
                       : Claims::are_kept(header_) ? leaf == 0 || leaf == Places::kInOrder || leaf == Places::kKept
                       : Epochs::are_kept(header_) ? leaf == 0 || leaf == Epochs::kDue || leaf == Epochs::kDrawn
                                                   : leaf == 0 || leaf == 1;
    require_intact(known, "priority of row " + std::to_string(slot));
  }

  SegmentMemory& memory_;
  Header& header_;
  PriorityTree tree_;
  uint64_t head_;
  std::vector<uint32_t> lengths_ = std::vector<uint32_t>(memory_.layout().pages.groups);
};

// The caller holds LOCK_EX and the mutex. Gives up pages that were being written, and rows that have not all of theirs.
// Those are none that a death of a process leaves. O(pages).
inline void settle_pages(SegmentMemory& m) {
  for (uint64_t page = 0; page < m.layout().pages.count; page++) {
    std::atomic<uint64_t>& word = m.page_word(page);
    const uint64_t was = word.load(std::memory_order_relaxed);
    if (slot_word::is_busy(was)) word.store(slot_word::voided(slot_word::key1(was) - 1), std::memory_order_relaxed);
  }
  PageFollower follower(m);
  for (uint64_t slot = 0; slot < m.capacity(); slot++) follower.drop_spoilt(slot);
}

// The caller holds LOCK_EX and the mutex. Gives up the rows that were being written, and returns how many; derives
// everything else anew. O(capacity).
inline uint64_t settle(SegmentMemory& m) {
  Header& h = m.header();
  RowRewriter(m).finish();  // before busy rows are taken for half written ones
  h.dirty = Dirty::kLinks;
  kill_fence();
  uint64_t dropped = 0;
  for (uint64_t slot = 0; slot < m.capacity(); slot++) {
    std::atomic<uint64_t>& word = m.row(slot).word;
    const uint64_t was = word.load(std::memory_order_relaxed);
    if (!slot_word::is_busy(was)) continue;
    word.store(slot_word::voided(slot_word::key1(was) - 1), std::memory_order_relaxed);
    dropped++;
  }
  if (m.has_pages()) {
    settle_pages(m);
    h.pages_settled = h.page_head;
  }
  if (Claims::are_kept(h)) {
    for (uint64_t slot = 0; slot < m.capacity(); slot++) Places(m).begin_at_newest(slot, h.head.load());
    Claims(m).release_all();
  }
  std::memset(m.pending_words(), 0, m.layout().tree - m.layout().pending);  // recovery marks what it finds
  h.pending = 0;
  Recovery(m).run();
  h.inserted = std::max(h.inserted, static_cast<uint64_t>(m.tree().count()));
  h.completed_at = h.absorbed;
  publish_limit(m);
  return dropped;
}

// What belongs to processes, all gone, and to the clock of a boot that may be over.
inline void forget_processes(SegmentMemory& m) {
  Header& h = m.header();
  std::memset(static_cast<void*>(&m.participant(0)), 0, kMaxParticipants * kParticipantBytes);
  if (m.has_pages()) std::memset(static_cast<void*>(&m.run_in_flight(0)), 0, kMaxParticipants * kRunInFlightBytes);
  h.mutex.init();
  h.dirty = Dirty::kClean;  // nobody is to repair what is derived anew
  h.wake_at = kNever;
  h.gate.init();
  h.stopped = h.shared = h.admits_by_hand = h.room_waiters = h.repairing = h.presences = h.ids = 0;
  h.holder = 0;
  h.made = machine_ns();
  h.streams = std::max(1U, h.streams.load(std::memory_order_relaxed));
  h.last_departure = h.last_census = h.last_write = 0;
  h.demand = 0;
  h.pages_wanted = 0;
  h.admission_begun = 0;
  h.publisher = 0;
  if (h.importer) h.importer = kGone;
}

inline uint64_t seal_of(const SegmentMemory& m) { return Hash().mix(m.base(), kFileState).value(); }

inline void sync_file(const SegmentMemory& m) {
  if (fsync(m.fd()) != 0) throw std::system_error(errno, std::generic_category(), "fsync of a replay segment");
}

// The caller holds LOCK_EX. Without a seal the file is what a death of its last user would have left.
inline void seal_segment(SegmentMemory& m) {
  FileState& file = m.file();
  if (file.phase != Phase::kInUse) return;
  {
    SegmentLock lock(m);
    lock.absorb();
    file.dropped_rows += settle(m);
  }
  file.lengths = hash_of_lengths(m);
  sync_file(m);
  file.seal = seal_of(m);
  file.phase = Phase::kSealed;
  sync_file(m);
}

// Whether a death would leave no row half written.
inline bool is_at_rest(const FileState& file) { return file.phase == Phase::kSealed || file.phase == Phase::kCopied; }

// Throws NotASegment for a file whose parts are of different moments.
inline void require_one_moment(const FileState& file, uint64_t place, uint64_t boot) {
  require_intact(file.phase >= Phase::kInUse && file.phase <= Phase::kCopied, "phase");
  if (is_at_rest(file)) return;
  if (file.boot != boot)
    throw NotASegment(
        "the machine was restarted while the buffer was in use, and what had reached the disk by then need not fit "
        "together: load its last checkpoint");
  if (file.place && file.place != place)
    throw NotASegment(
        "the file is a copy that was made while the buffer was in use, so its rows need not fit together: copy a "
        "buffer in use by save(directory) and load(directory, path=...), or its file once all have closed it");
}

// Or the first touch of a page without room on the disk would raise SIGBUS.
inline void reserve(const Descriptor& fd, uint64_t bytes) {
  int error;
  do error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error) throw std::system_error(error, std::generic_category(), "reserving the file of a replay segment");
}

// Gives a segment another nonce: both that and the hash over it, or neither, whenever this process dies.
inline void give_nonce(SegmentMemory& m, uint64_t nonce) {
  constexpr size_t kFrom = offsetof(Header, nonce), kTo = offsetof(Header, config_hash) + sizeof(Header::config_hash);
  Header& h = m.header();
  uint64_t words[(kTo - kFrom) / sizeof(uint64_t)];
  std::memcpy(words, m.base() + kFrom, sizeof words);
  words[0] = nonce;
  words[std::size(words) - 1] = config_hash(h, m.config(), nonce);
  if (pwrite(m.fd(), words, sizeof words, kFrom) != static_cast<ssize_t>(sizeof words))
    throw std::system_error(errno, std::generic_category(), "writing the header of a replay segment");
}

}  // namespace detail

// Whether processes of this boot may use the segment in `fd`; its nonce, if so. For those who hold LOCK_SH. Throws
// NotASegment.
inline std::optional<uint64_t> nonce_in_use(const Descriptor& fd, uint64_t boot) {
  const HeaderPage page(fd);
  if (page.file().phase != Phase::kInUse || page.file().boot != boot) return {};
  detail::require_one_moment(page.file(), place_of(fd), boot);
  return page.header().nonce;
}

struct Repaired {
  uint64_t nonce;
  uint64_t dropped_rows;  // this time
};

// Makes the segment in `fd` fit for use again. The caller holds LOCK_EX: nobody else uses it. A copy of another file
// gets the nonce given: two files are never the same buffer. Throws NotASegment, and has changed nothing, when the file
// is damaged, was in use when the machine went down, or is a copy of one in use. Then it has parts of different
// moments. Throws std::system_error when a file with holes finds no room on the disk. O(capacity).
inline Repaired repair_segment(Descriptor fd, uint64_t boot, uint64_t nonce) {
  const uint64_t place = place_of(fd);
  Description found = read_description(fd);
  detail::require_one_moment(HeaderPage(fd).file(), place, boot);
  detail::reserve(fd, found.layout.bytes);
  SegmentMemory m(std::move(fd), std::move(found.layout), std::move(found.text));
  FileState& file = m.file();
  detail::Examination examination(m);
  if (file.phase == Phase::kSealed) detail::require_intact(file.seal == detail::seal_of(m), "header");
  examination.run();
  if (detail::is_at_rest(file)) {
    examination.run_sealed();
    if (file.phase == Phase::kCopied || file.place != place) {
      file.phase = Phase::kCopied;  // without the seal, which is of the nonce too
      kill_fence();
      detail::give_nonce(m, nonce);
    }
  }
  file.boot = boot;
  file.place = place;
  kill_fence();
  file.phase = Phase::kRepairing;
  detail::forget_processes(m);
  uint64_t dropped;
  {
    const SegmentLock lock(m);
    dropped = detail::settle(m);
  }
  file.dropped_rows += dropped;
  file.phase = Phase::kInUse;
  return {m.header().nonce, dropped};
}

namespace detail {

// The caller uses the file `fd` no longer; the last user marks it as closed. Throws std::system_error.
inline void seal_if_last(Descriptor fd) {
  struct stat status;
  if (fstat(fd.get(), &status) != 0 || status.st_nlink == 0) return;
  if (flock(fd.get(), LOCK_EX | LOCK_NB) == 0) seal_segment(*map_segment(std::move(fd)));
}

// Runs `leave`, and says what is to be done where it fails.
template <class Leave>
void leave_file(Leave&& leave) {
  try {
    leave();
  } catch (const OtherNamespace&) {  // they mark it when they have ended
  } catch (const std::system_error& e) {
    throw std::system_error(e.code(),
                            "the replay buffer's file could not be marked as closed, and will be refused when the "
                            "machine was restarted: open it again before, and save a checkpoint on another disk; why");
  }
}

}  // namespace detail

// Unmaps a segment. The last user of a file marks it as closed, which takes as long as the disk needs. Throws
// std::system_error where that fails.
inline void release_segment(std::unique_ptr<SegmentMemory> memory) {
  if (memory->file().phase == Phase::kMemory) return;
  detail::leave_file([&] {
    Descriptor again = memory->open_again(O_RDWR);
    memory.reset();
    detail::seal_if_last(std::move(again));
  });
}

// The same for a process that comes to its end while threads, writers or tensors have the memory: they keep a copy.
inline void leave_segment(SegmentMemory& m) {
  if (m.file().phase == Phase::kMemory) return;
  detail::leave_file([&] {
    Descriptor again = m.open_again(O_RDWR);
    m.leave_file();
    detail::seal_if_last(std::move(again));
  });
}

// Runs what nobody can catch the failure of: it is said where a user looks for what went wrong.
template <class Leave>
void leave_saying_so(Leave&& leave) noexcept {
  try {
    leave();
  } catch (const std::exception& e) {
    fprintf(stderr, "torchreplay: %s\n", e.what());
  } catch (...) {  // a signal ended a wait
  }
}

}  // namespace torchreplay
