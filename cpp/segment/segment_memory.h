// One process's view of a segment: the mapping, and typed access to everything in it.
#pragma once

#include <cstddef>
#include <cstdio>

#include "segment/header.h"
#include "segment/liveness.h"
#include "segment/owed_keys.h"
#include "system/divisor.h"
#include "system/pages.h"
#include "system/streaming.h"

namespace torchreplay {

// Copies of row payload. Under the seqlock these race with writers by design; -DTORCHREPLAY_RACEFREE makes every byte
// an atomic access, so that ThreadSanitizer can check everything else.
inline void copy_payload(void* to, const void* from, size_t n) {
#ifdef TORCHREPLAY_RACEFREE
  auto* t = static_cast<unsigned char*>(to);
  auto* f = static_cast<unsigned char*>(const_cast<void*>(from));
  for (size_t i = 0; i < n; i++) __atomic_store_n(t + i, __atomic_load_n(f + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
#else
  std::memcpy(to, from, n);
#endif
}

inline void zero_payload(void* to, size_t n) {
#ifdef TORCHREPLAY_RACEFREE
  auto* t = static_cast<unsigned char*>(to);
  for (size_t i = 0; i < n; i++) __atomic_store_n(t + i, 0, __ATOMIC_RELAXED);
#else
  std::memset(to, 0, n);
#endif
}

// Calls copy(bytes): sizes of scalars and small vectors are known to the compiler.
template <class Copy>
[[gnu::always_inline]] inline void with_size(uint64_t bytes, Copy&& copy) {
  switch (bytes) {
    case 1:
      return copy(std::integral_constant<uint64_t, 1>{});
    case 4:
      return copy(std::integral_constant<uint64_t, 4>{});
    case 8:
      return copy(std::integral_constant<uint64_t, 8>{});
    case 16:
      return copy(std::integral_constant<uint64_t, 16>{});
    case 32:
      return copy(std::integral_constant<uint64_t, 32>{});
    default:
      return copy(bytes);
  }
}

inline void copy_value(void* to, const void* from, uint64_t n) {
  with_size(n, [&](auto bytes) { copy_payload(to, from, bytes); });
}

// ThreadSanitizer does not model fences; a read-modify-write orders for it what the fence orders for the machine.
inline uint64_t load_after_copy(std::atomic<uint64_t>& word) {
#ifdef TORCHREPLAY_RACEFREE
  return word.fetch_add(0, std::memory_order_acq_rel);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
  return word.load(std::memory_order_relaxed);
#endif
}

// Keeps the compiler from moving stores across it: enough for a process that may be killed between any two of them.
inline void kill_fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

class SegmentMemory {
 public:
  // Maps `fd`, which must be `layout.bytes` long. `text`: the Python side's description of it.
  SegmentMemory(Descriptor fd, Layout layout, std::string text = {})
      : layout_(std::move(layout)),
        by_capacity_(layout_.capacity),
        by_pages_(std::max<uint64_t>(1, layout_.pages.count)),
        fd_(std::move(fd)),
        liveness_(fd_),
        base_(map_shared(fd_, layout_.bytes)),
        text_(std::move(text)),
        pace_(layout_.capacity, row_bytes(layout_)) {
    fd_.keep();
  }
  ~SegmentMemory() { munmap(base_, layout_.bytes); }
  SegmentMemory(const SegmentMemory&) = delete;

  const Layout& layout() const { return layout_; }
  uint64_t capacity() const { return layout_.capacity; }
  const std::string& text() const { return text_; }
  // What messages call it.
  const std::string& called() const { return called_; }
  void call(std::string called) { called_ = std::move(called); }
  // Throws DescriptorLost.
  int fd() const { return fd_.require_own(); }
  char* base() const { return base_; }
  Liveness& liveness() { return liveness_; }
  LearnerPace& pace() { return pace_; }
  OwedKeys& owed() { return owed_; }

  // The number of this attachment, to be set before the lock is taken. Throws OtherNamespace.
  uint32_t presence() {
    if (!liveness_.has_presence()) header().mutex.require_same_namespace();
    return liveness_.presence(header().presences);
  }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  FileState& file() const { return *reinterpret_cast<FileState*>(base_ + kFileState); }
  Participant& participant(int id) const {
    return *reinterpret_cast<Participant*>(base_ + layout_.participants +
                                           static_cast<uint64_t>(id) * kParticipantBytes);
  }
  char* config() const { return base_ + layout_.config; }
  uint64_t slot_of(uint64_t key) const { return by_capacity_.rest(key); }
  RowHeader& row(uint64_t slot) const {
    return *reinterpret_cast<RowHeader*>(base_ + layout_.records + slot * layout_.record_stride);
  }
  char* value(const Field& f, uint64_t slot) const { return base_ + f.offset + slot * f.stride; }
  // Copies a value into the row in `slot`, which is busy.
  void write(const Field& f, uint64_t slot, const char* from) const {
    if (can_stream_into(f.stride * layout_.capacity, f.nbytes)) return stream_value(value(f, slot), from, f.nbytes);
    copy_value(value(f, slot), from, f.nbytes);
  }

  // Makes the mapping this process's own copy, and lets go of the file. From here on nothing that threads of this
  // process do with the memory reaches other processes. For all others it is as if they had died.
  void leave_file() {
    const Descriptor source = open_again(O_RDWR);
    const Descriptor nothing(memfd_create("torchreplay-left", MFD_CLOEXEC));
    if (nothing.get() < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
    if (mmap(base_, layout_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, source.get(), 0) ==
        MAP_FAILED)
      throw std::system_error(errno, std::generic_category(), "mmap of a replay segment");
    header().mutex.init();  // its holder may be in the file only
    give_up_lock(source);
    fd_.replace(nothing);
    liveness_.forget();
  }
  // A descriptor of the same file that shares no lock with fd().
  Descriptor open_again(int flags) const { return fd_.open_again(flags); }

  // For draws from a file: rows lie all over it, and the system would read ahead the wrong ones. With 1.3 GiB of frames
  // in 0.4 GiB of memory draws are 20 times faster without.
  void expect_random_access() const {
    if (file().phase != Phase::kMemory) madvise(base_, layout_.bytes, MADV_RANDOM);
  }
  // Has the system read the rows in slots [first, last) of a file all at once.
  void fetch(uint64_t first, uint64_t last) const {
    if (file().phase != Phase::kMemory) advise(first, last, MADV_WILLNEED);
  }
  // Maps the pages of slots [first, last) all at once, before all are written: page by page that takes longer than
  // writing. A system that cannot do it does so page by page.
  void map_for_writing(uint64_t first, uint64_t last) const { advise(first, last, kPopulateWrite); }

  // Absorber's state of a slot: key + 1 of the row absorbed there, 0 for none. Guarded by the mutex.
  uint64_t& at(uint64_t slot) const { return reinterpret_cast<uint64_t*>(base_ + layout_.at)[slot]; }
  // Neighbours of a slot's row; there for linked views only. Guarded by the mutex; those who gather read `next` without
  // it, as a hint.
  Links& links(uint64_t slot) const { return reinterpret_cast<Links*>(base_ + layout_.links)[slot]; }
  uint64_t* drawn_words() const { return reinterpret_cast<uint64_t*>(base_ + layout_.drawn); }
  uint64_t* pending_words() const { return reinterpret_cast<uint64_t*>(base_ + layout_.pending); }
  uint64_t* pending_summary() const { return reinterpret_cast<uint64_t*>(base_ + layout_.pending_summary); }
  // Of a queue: who holds items, who holds that of each slot, and when it came. Guarded by the mutex, but when a row
  // came says its writer.
  char* holders() const { return base_ + layout_.holders; }
  uint64_t* claims() const { return reinterpret_cast<uint64_t*>(base_ + layout_.claims); }
  uint64_t* kept() const { return reinterpret_cast<uint64_t*>(base_ + layout_.kept); }
  uint32_t* arrivals() const { return reinterpret_cast<uint32_t*>(base_ + layout_.arrivals); }
  // Where rows have a policy version: that of the item anchored in a slot, and for each block of slots one that no item
  // which can be drawn is below. Guarded by the mutex.
  int64_t& version(uint64_t slot) const { return reinterpret_cast<int64_t*>(base_ + layout_.versions)[slot]; }
  int64_t& version_bound(uint64_t block) const {
    return reinterpret_cast<int64_t*>(base_ + layout_.version_bounds)[block];
  }
  // Of segments with ragged fields. A page's word has the form of a row's, with the ticket of the page.
  bool has_pages() const { return layout_.pages.are_there(); }
  uint64_t page_of(uint64_t ticket) const { return by_pages_.rest(ticket); }
  std::atomic<uint64_t>& page_word(uint64_t page) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + layout_.pages.words)[page];
  }
  char* page(uint64_t page) const { return base_ + layout_.pages.values + page * layout_.pages.bytes; }
  RunInFlight& run_in_flight(int id) const {
    return reinterpret_cast<RunInFlight*>(base_ + layout_.pages.in_flight)[id];
  }
  // In the record of the row in a slot: the ticket of its first page + 1, and the length of its values in a group.
  uint64_t* run1_of_row(uint64_t slot) const {
    return reinterpret_cast<uint64_t*>(value(layout_.fields[layout_.pages.run_field], slot));
  }
  uint32_t* length_of_row(uint64_t slot, size_t group) const {
    return reinterpret_cast<uint32_t*>(value(layout_.fields[layout_.pages.first_length() + group], slot));
  }
  // Absorber's state: the first page + 1 of the row absorbed in a slot, 0 for none; and the slot + 1 of the row that
  // begins at a page, 0 for none. What it says of rows that are there no more means nothing. Guarded by the mutex.
  uint64_t& run1(uint64_t slot) const { return reinterpret_cast<uint64_t*>(base_ + layout_.pages.runs)[slot]; }
  uint32_t& owner1(uint64_t page) const { return reinterpret_cast<uint32_t*>(base_ + layout_.pages.owners)[page]; }
  // Guarded by the mutex.
  char* rewrite_record() const { return base_ + layout_.rewrite; }
  PriorityTree tree() const {
    using Largest = PriorityTree::Largest;
    const bool kept = header().sampler.initial == Initial::kMaxHeld;
    return PriorityTree(static_cast<int64_t>(layout_.capacity), base_ + layout_.tree, best_simd(),
                        kept ? Largest::kKept : Largest::kUnknown);
  }

 private:
  // A thread of this process that has the lock would keep it in the file for as long as it lives.
  void give_up_lock(const Descriptor& source) {
    char* page = map_shared(source, kPage);
    Header& others = *reinterpret_cast<Header*>(page);
    const uint64_t holder = others.holder.load(std::memory_order_acquire);
    if (holder && liveness_.has_presence() && holder >> 32 == liveness_.presence(others.presences))
      others.mutex.give_up_for(static_cast<uint32_t>(holder));
    munmap(page, kPage);
  }

  static constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

  static uint64_t row_bytes(const Layout& layout) {
    uint64_t bytes = layout.record_stride + layout.pages.count * layout.pages.bytes / layout.capacity;
    for (const Field& f : layout.fields) bytes += f.own_array ? f.nbytes : 0;
    return bytes;
  }

  void advise(uint64_t first, uint64_t last, int what) const {
    const auto region = [&](uint64_t offset, uint64_t stride) {
      const uint64_t start = (offset + first * stride) / kPage * kPage;
      madvise(base_ + start, offset + last * stride - start, what);
    };
    region(layout_.records, layout_.record_stride);
    for (const Field& f : layout_.fields)
      if (f.own_array) region(f.offset, f.stride);
  }

  Layout layout_;
  Divisor by_capacity_, by_pages_;
  Descriptor fd_;
  Liveness liveness_;
  char* base_;
  std::string text_, called_ = "the replay buffer";
  LearnerPace pace_;
  OwedKeys owed_;
};

}  // namespace torchreplay
