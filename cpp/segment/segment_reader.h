// Looking at a segment from outside, while others use it: nothing is written, no lock is taken, nobody counts the
// reader.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "segment/format.h"
#include "segment/limiter.h"
#include "segment/liveness.h"
#include "segment/pages_in_use.h"
#include "segment/weights_memory.h"

namespace torchreplay {

// What a participant has said of itself, and whether it lives.
struct ParticipantFacts {
  int id;
  Role role;
  bool alive;
  bool waiting;  // for the limiter, or for room; a learner: for items
  int32_t pid;
  uint64_t rows;                  // written; of a learner: items that it got
  int64_t last_write, last_draw;  // machine_ns(); 0: never
};

// What a segment has counted, and who takes part. Each figure is whole. They are read one after the other, so two of
// them may be of different moments, microseconds apart.
struct SegmentFacts {
  int64_t now, made;
  uint64_t head, absorbed, rows, inserted, sampled, updated, stale_updates, unready_updates, evicted_unsampled,
      evicted_by_pages, draws, redraws, dropped_rows;
  uint64_t insert_wait_ns, sample_wait_ns;
  uint64_t drawable;
  double ragged_fill;  // the share of the pages that rows have
  float max_raw;
  bool stopped, importing;
  int32_t holder_pid;  // of the lock; 0: nobody
  int64_t last_write;  // of writers that have left
  int64_t policy_version, largest_age;
  uint64_t ages, aged, expired_items;
  LimiterConfig limiter;
  uint64_t admitted_items, admission_limit, open_admissions;  // 0 where items need not be admitted
  std::vector<ParticipantFacts> participants;
};

// A mapping of the segment that cannot be written to. Its user may be killed at any moment: nothing is left.
class SegmentReader {
 public:
  // `fd` may be open for reading only. Throws NotASegment and std::system_error.
  explicit SegmentReader(Descriptor fd) : fd_(std::move(fd)), description_(read_description(fd_)) {
    void* mapped = mmap(nullptr, layout().bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map a replay segment");
    base_ = static_cast<const char*>(mapped);
    madvise(mapped, layout().bytes, MADV_RANDOM);  // of a file only what is looked at is read
  }
  ~SegmentReader() { munmap(const_cast<char*>(base_), layout().bytes); }
  SegmentReader(const SegmentReader&) = delete;

  const Layout& layout() const { return description_.layout; }
  const std::string& text() const { return description_.text; }
  const char* base() const { return base_; }
  const Header& header() const { return *reinterpret_cast<const Header*>(base_); }
  uint64_t nonce() const { return header().nonce; }
  uint64_t seed() const { return header().seed; }
  uint64_t format() const { return header().version; }
  const FileState& file() const { return *reinterpret_cast<const FileState*>(base_ + kFileState); }

  // Whether the numbers of its processes are those that this process sees.
  bool same_namespace() const {
    try {
      header().mutex.require_same_namespace();
    } catch (const OtherNamespace&) {
      return false;
    }
    return true;
  }

  // Whether any process that takes part, or ever took the lock, lives. One system call.
  bool in_use() const { return is_locked(0, 0); }

  // Whether the process of that attachment lives. One system call.
  bool is_present(uint32_t presence) const { return is_locked(Liveness::presence_byte(presence), 1); }

  // O(participants ever at one time).
  SegmentFacts facts() const {
    const Header& h = header();
    SegmentFacts f{};
    f.now = machine_ns();
    f.made = h.made;
    f.head = load(h.head);
    f.absorbed = plain(h.absorbed);
    f.rows = plain(h.rows);
    f.inserted = plain(h.inserted);
    f.sampled = load(h.sampled);
    f.updated = plain(h.updated);
    f.stale_updates = plain(h.stale_updates);
    f.unready_updates = plain(h.unready_updates);
    f.evicted_unsampled = plain(h.evicted_unsampled);
    f.evicted_by_pages = plain(h.evicted_by_pages);
    f.draws = load(h.draws);
    f.redraws = load(h.redraws);
    f.insert_wait_ns = h.insert_wait.total_ns();
    f.sample_wait_ns = h.sample_wait.total_ns();
    f.max_raw = plain(h.max_raw);
    f.stopped = load(h.stopped) != 0;
    f.importing = load(h.importer) != 0;
    f.holder_pid = load(h.holder) != 0 ? load(h.holder_pid) : 0;
    f.last_write = load(h.last_write);
    f.policy_version = load(h.policy_version);
    f.largest_age = load(h.largest_age);
    f.ages = load(h.ages);
    f.aged = load(h.aged);
    f.expired_items = plain(h.expired_items);
    f.limiter = limiter();
    f.dropped_rows = load(file().dropped_rows);
    read_pages(f);
    read_tree(f);
    read_participants(f);
    if (f.limiter.batch_size) read_admission(f);
    return f;
  }

  // Copies the leaves and the keys + 1 of `n` slots from `first` on, as far as there are so many. Returns how many.
  uint64_t copy_slots(uint64_t first, uint64_t n, float* leaves, uint64_t* keys1) const {
    if (first >= layout().capacity) return 0;
    n = std::min(n, layout().capacity - first);
    const auto* leaf = reinterpret_cast<const uint32_t*>(base_ + layout().tree + PriorityTree::kLeavesOffset) + first;
    const auto* key1 = reinterpret_cast<const uint64_t*>(base_ + layout().at) + first;
    for (uint64_t i = 0; i < n; i++) {
      leaves[i] = std::bit_cast<float>(__atomic_load_n(leaf + i, __ATOMIC_RELAXED));
      keys1[i] = __atomic_load_n(key1 + i, __ATOMIC_RELAXED);
    }
    return n;
  }

 private:
  template <class T>
  static T load(const std::atomic<T>& from) {
    return from.load(std::memory_order_relaxed);
  }
  // Of what its owners read under the lock, which is not taken here.
  template <class T>
  static T plain(const T& from) {
    using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    static_assert(sizeof(T) == sizeof(Word));
    return std::bit_cast<T>(__atomic_load_n(reinterpret_cast<const Word*>(&from), __ATOMIC_RELAXED));
  }

  // One of the two is left alone while the other holds.
  LimiterConfig limiter() const {
    const Header& h = header();
    LimiterConfig config;
    uint32_t index = plain(h.limiter_index);
    for (;;) {
      config = h.limiters[index & 1];
      std::atomic_thread_fence(std::memory_order_acquire);
      const uint32_t now = plain(h.limiter_index);
      if (now == index) return config;
      index = now;
    }
  }

  void read_tree(SegmentFacts& f) const {
    const PriorityTree tree(static_cast<int64_t>(layout().capacity), const_cast<char*>(base_ + layout().tree));
    f.drawable = static_cast<uint64_t>(std::max<int64_t>(0, tree.count()));
  }

  // What pages_in_use() asks for, read without the lock.
  struct Looked {
    const SegmentReader& reader;
    const Layout& layout() const { return reader.layout(); }
    template <class T>
    T read(uint64_t region, uint64_t index) const {
      return __atomic_load_n(reinterpret_cast<const T*>(reader.base_ + region) + index, __ATOMIC_RELAXED);
    }
    uint64_t at(uint64_t slot) const { return read<uint64_t>(layout().at, slot); }
    uint64_t run1(uint64_t slot) const { return read<uint64_t>(layout().pages.runs, slot); }
    uint64_t owner1(uint64_t page) const { return read<uint32_t>(layout().pages.owners, page); }
  };

  void read_pages(SegmentFacts& f) const {
    const uint64_t pages = layout().pages.count;
    if (pages == 0) return;
    const uint64_t used = pages_in_use(Looked{*this}, header(), load(header().page_head), f.absorbed);
    f.ragged_fill = static_cast<double>(std::min(used, pages)) / static_cast<double>(pages);
  }

  void read_participants(SegmentFacts& f) const {
    const uint32_t highest = std::min<uint32_t>(kMaxParticipants - 1, load(header().ids));
    for (uint32_t id = 1; id <= highest; id++) {
      const auto& entry = *reinterpret_cast<const Participant*>(base_ + layout().participants + id * kParticipantBytes);
      const auto role = static_cast<Role>(entry.role.load(std::memory_order_acquire));
      if (role == Role::kNone) continue;
      f.participants.push_back({static_cast<int>(id), role, is_locked(id, 1), load(entry.waiting) != 0, load(entry.pid),
                                load(entry.rows), load(entry.last_write), load(entry.last_draw)});
    }
  }

  // As Admission counts, but that each ticket counts which nobody has absorbed.
  void read_admission(SegmentFacts& f) const {
    const Header& h = header();
    const bool begun = plain(h.admission_begun) != 0;
    f.admission_limit = admission_limit(f.limiter, begun ? f.policy_version - plain(h.admission_base) : 0);
    const uint32_t ids = std::min<uint32_t>(kMaxParticipants - 1, load(h.ids));
    for (uint32_t id = 1; id <= ids; id++)
      f.open_admissions +=
          load(reinterpret_cast<const Participant*>(base_ + layout().participants + id * kParticipantBytes)->admitted);
    f.admitted_items = f.open_admissions + f.drawable + f.head - std::min(f.head, f.absorbed);
    if (begun) f.admitted_items += plain(h.handed_out) + plain(h.handed_out_gone) - plain(h.done_before);
  }

  // Whether anybody holds one of `n` bytes of the lock table (0: of all). A reader holds none.
  bool is_locked(int64_t first, int64_t n) const {
    struct flock probe{};
    probe.l_type = F_WRLCK;
    probe.l_whence = SEEK_SET;
    probe.l_start = first;
    probe.l_len = n;
    if (fcntl(fd_.get(), F_OFD_GETLK, &probe) != 0)
      throw std::system_error(errno, std::generic_category(), "F_OFD_GETLK on the replay segment");
    return probe.l_type != F_UNLCK;
  }

  Descriptor fd_;
  Description description_;
  const char* base_;
};

// The newest complete publication of shared weights. Throws NotASegment.
inline uint64_t published_version(const Descriptor& fd) {
  alignas(kLine) char page[sizeof(WeightsHeader)];
  if (pread(fd.get(), page, sizeof page, 0) != static_cast<ssize_t>(sizeof page))
    throw NotASegment("the file is too short for shared weights");
  const auto& header = *reinterpret_cast<const WeightsHeader*>(page);
  if (header.magic != kWeightsMagic || header.version != kFormatVersion)
    throw NotASegment("the file holds no shared weights of this version of torchreplay");
  return header.published.load(std::memory_order_relaxed);
}

}  // namespace torchreplay
