// The start of a segment, and the table of its participants. Part of the segment format.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "locking/robust_mutex.h"
#include "locking/wait_time.h"
#include "locking/write_gate.h"
#include "segment/layout.h"

namespace torchreplay {

inline constexpr uint64_t kMagic = 0x79616c7065726854;  // "Threplay", little endian
inline constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

// No ticket is taken beyond: words and links keep key + 1 in 48 bits. This leaves half of them to processes that take
// theirs at the same time. At a million rows a second it is reached after four years.
inline constexpr uint64_t kMaxKeys = uint64_t{1} << 47;
inline constexpr uint64_t kMaxHead = 2 * kMaxKeys - 1;  // with the tickets of all who took theirs at that time
inline constexpr uint64_t kMaxDraws = uint64_t{1} << 48;
inline constexpr uint64_t kMaxCount = uint64_t{1} << 63;  // of whatever is counted: sums and differences fit 64 bits

enum class Normalize : uint32_t { kBuffer, kBatch, kNone };

// The priority of an item that is given none: the largest ever seen, that of the items held now, or a number.
enum class Initial : uint32_t { kMaxSeen, kMaxHeld, kNumber };
inline constexpr uint32_t kInitials = 3;

// What turns a TD error into a leaf. Immutable.
struct SamplerConfig {
  uint32_t prioritized = 0;  // 0: every drawable item has leaf 1
  Normalize normalize = Normalize::kBuffer;
  double alpha = 0;
  double eps = 0;
  Initial initial = Initial::kMaxSeen;
  double initial_raw = 1;    // kNumber: that number; kMaxHeld: what counts where no item is held
  uint32_t epochs = 0;       // 1: every item is drawn once before any is drawn again; leaves are those of Epochs
  uint32_t queue = 0;        // 1: the oldest items first, each held by one process until it is done with it
  uint32_t drop_oldest = 0;  // of a queue: 1: writers overwrite what is still to be drawn; 0: they wait
  uint64_t max_draws = 0;    // how often an item is handed out; 0: as often as it is drawn
  uint64_t window = 0;       // of a queue: rows by which items overtake older ones that are not complete; 0: any
  uint64_t max_age1 = 0;     // policy versions that an item may be behind the learner's, plus one; 0: any

  bool makes_writers_wait() const { return queue && !drop_oldest; }
  // Whether what writers overwrite while it is still to be drawn counts.
  bool counts_dropped() const { return queue && drop_oldest; }
};

// Reverb's rate limiter: at least min_size items, and min_diff <= inserted * ratio - sampled <= max_diff, where what
// came before the limiter was set does not count. Or an admission, with a batch_size.
struct LimiterConfig {
  uint64_t min_size = 1;
  double ratio = 0;  // samples per insert; 0: no ratio is kept
  double min_diff = 0;
  double max_diff = 0;
  double tolerance = 0;  // as it was given; 0: it was not
  uint64_t inserted_before = 0;
  uint64_t sampled_before = 0;
  uint64_t cleared = 0;  // items inserted before the last clear(): they count for nothing
  // Of an admission: items of a batch, and versions that one may be behind the learner's when it is drawn.
  uint64_t batch_size = 0;  // 0: it is none
  uint64_t max_age = 0;
};

// What a segment has counted.
struct Counts {
  static constexpr int64_t kMaxSum = kMaxCount / 2;  // of ages, which may be made up

  uint64_t head, inserted, sampled, updated, stale_updates, unready_updates, draws, evicted_unsampled;
  uint32_t streams;
  float max_raw;
  double priority_change;
  uint64_t inserted_before, sampled_before;  // the limiter was set
  PriorityTree::GridState grid;              // of the leaves; zeros: not known
  uint64_t cleared;                          // items inserted before the last clear()
  uint64_t dropped_items, expired_items, evicted_by_pages, redraws, taken_ahead, missed, aged;
  int64_t ages, largest_age;

  // Whether a segment can have counted so, and can go on.
  bool are_sound() const {
    bool good = head <= kMaxHead && draws <= kMaxDraws / 2 && max_raw >= 0 && std::isfinite(max_raw) &&
                priority_change >= 0 && std::isfinite(priority_change) && ages >= -kMaxSum && ages <= kMaxSum &&
                largest_age >= 0 && largest_age <= kMaxSum;
    for (uint64_t n :
         {inserted, sampled, updated, stale_updates, unready_updates, evicted_unsampled, inserted_before,
          sampled_before, cleared, dropped_items, expired_items, evicted_by_pages, redraws, taken_ahead, missed, aged})
      good &= n <= kMaxCount / 2;
    return good;
  }
};

enum class ImportStage : uint32_t {
  kPlaces = 0,
  kPlaced = 1,  // all its rows are there: what follows is as good as done
};

inline constexpr uint32_t kGone = std::numeric_limits<uint32_t>::max();  // a presence that nobody has

// Which derived state an owner that died may have left wrong.
enum class Dirty : uint32_t {
  kClean = 0,
  kTree = 1,   // sums
  kLinks = 2,  // everything that follows from the rows
  kSlots = 3,  // one slot of those that an absorption goes through, what is linked with it, and sums
  kRow = 4,    // the row that the rewrite record names, the leaf of its item, and sums
  kEpoch = 5,  // an epoch that begins, and sums
};

struct Header {
  // Written once, before anyone else can attach.
  uint64_t magic;
  uint64_t version;
  uint64_t layout_hash;
  uint64_t nonce;
  uint64_t bytes;
  uint64_t config_bytes;
  uint64_t config_hash;  // of the configuration, the sampler and the nonce
  uint64_t seed;
  SamplerConfig sampler;

  // Writers.
  alignas(kLine) std::atomic<uint64_t> head;  // the next ticket

  // Read by every append, written by learners now and then.
  alignas(kLine) std::atomic<uint64_t> ticket_limit;  // an append waits while head >= ticket_limit
  std::atomic<uint64_t> wake_at;                      // the ticket whose writer wakes waiting learners
  std::atomic<uint32_t> stopped;
  std::atomic<uint32_t> shared;          // a handle was given out, or the owner forked: others may come
  std::atomic<uint32_t> admits_by_hand;  // 1: others say how far writers may go, and the limiter does not
  std::atomic<uint32_t> room_waiters;    // 1: writers may sleep on room_signal; a signal sets 0
  std::atomic<uint32_t> streams;         // the next stream of random draws
  std::atomic<uint32_t> rows_signal;     // futex: rows have come
  std::atomic<uint32_t> room_signal;     // futex: the limiter admits writers, or the buffer was stopped
  std::atomic<int64_t> last_departure;   // machine_ns() when a participant was last seen to leave or die; 0: never
  std::atomic<uint32_t> presences;       // attachments that ever took the mutex
  std::atomic<uint32_t> ids;             // ids of participants above this one were never taken
  WaitTime insert_wait;                  // of writers
  WaitTime sample_wait;                  // of learners
  int64_t made;                          // machine_ns() when the segment was made
  std::atomic<uint64_t> redraws;         // rows drawn again because they were overwritten during the copy
  std::atomic<uint64_t> draws;           // batches drawn
  std::atomic<uint64_t> taken_ahead;     // ... before their learner asked for them, and then taken
  std::atomic<uint64_t> missed;          // TD errors that were applied between the two
  std::atomic<int64_t> last_census;      // machine_ns() when the dead were last looked for
  std::atomic<int64_t> last_write;       // of those whose places others took; 0: of none

  // Read by every append, written by every call of a learner.
  alignas(kLine) WriteGate gate;

  alignas(kLine) RobustMutex mutex;

  // Guarded by the mutex.
  alignas(kLine) uint64_t absorbed;  // every slot whose newest ticket is below this is absorbed or pending
  Dirty dirty;
  float max_raw;                  // largest raw priority seen
  uint64_t rows;                  // slots that hold an absorbed row
  uint64_t completed_at;          // head of the absorption in which an item last became drawable
  uint64_t pending;               // slots marked pending
  uint64_t inserted;              // items that ever became drawable
  std::atomic<uint64_t> sampled;  // items drawn; taken back without the mutex
  uint64_t updated;               // TD errors applied
  uint64_t stale_updates;         // ... dropped: the row was overwritten
  uint64_t unready_updates;       // ... dropped: the item was not (or no longer) complete
  uint64_t evicted_unsampled;     // items that were never drawn, of those that were overwritten
  double priority_change;         // by the TD errors applied: absolute differences of leaves, added up
  uint64_t demand;                // `inserted` that a waiting learner needs; insertion up to it is always admitted
  uint32_t limiter_index;         // which of the two holds
  // Presence of who imports the rows of a checkpoint: until that ends nothing is absorbed, and only its end repairs. 0:
  // nobody; kGone: somebody who has given up.
  std::atomic<uint32_t> importer;
  LimiterConfig limiters[2];
  std::atomic<uint64_t> holder;     // of the mutex: presence << 32 | thread id; 0: nobody, or not yet known
  std::atomic<int32_t> holder_pid;  // who took the mutex last, for messages
  std::atomic<uint32_t> repairing;  // counts the steps of repairs
  uint64_t import_head;             // tickets below are those of imports
  uint64_t imports;                 // how many have begun
  ImportStage import_stage;         // of the one under way
  uint32_t import_keeps_limiter;    // 1: the counts are of the limiter that holds
  uint64_t import_seed;
  Counts imported;
  uint64_t discarded_below;  // no row with this key or a later one was discarded
  uint64_t needed_from;      // of a queue: no item needs a row below
  uint64_t settled_below;    // of a queue: rows below are in complete items, or in none
  uint64_t dropped_items;    // of a queue: overwritten while they were still to be drawn, or held and not committed
  uint64_t held;             // of a queue: items that somebody holds
  // Of a queue: the anchor of an item that was not complete at the last look, the last row of it, and its steps so far.
  uint64_t unfinished_key, unfinished_last, unfinished_last_key1;
  uint32_t unfinished_steps;
  uint32_t holders;  // entries of the table of holders that were ever used
  uint64_t epochs;   // twice those that have ended, of draws without replacement; odd while one begins

  // Twice the times that rows were rewritten under the mutex, less one while they are.
  alignas(kLine) std::atomic<uint64_t> rewrites;

  // Of a segment with ragged fields. Of its writers: the next page ticket, and the one up to which they may go.
  alignas(kLine) std::atomic<uint64_t> page_head;
  std::atomic<uint64_t> page_limit;
  std::atomic<uint64_t> pages_wanted;  // of a queue: pages that a waiting writer lacks room for; 0: there is none

  // Guarded by the mutex.
  alignas(kLine) uint64_t followed;  // no row is absorbed whose first page was issued again below
  uint64_t pages_settled;            // of a queue: rows with pages below are absorbed, or will never be there
  uint64_t page_needed_from;         // of a queue: no item needs a page below
  uint64_t evicted_by_pages;         // rows that went because their pages were taken again

  // Where rows have a policy version.
  alignas(kLine) std::atomic<int64_t> policy_version;  // the learner's
  std::atomic<uint64_t> ages;        // of all items drawn, added up: versions that they were behind the learner's
  std::atomic<int64_t> largest_age;  // of an item drawn
  std::atomic<uint64_t> aged;        // items drawn

  // Guarded by the mutex.
  int64_t judged_version;  // the learner's at the last absorption: what is too old for it is gone
  int64_t oldest_version;  // no item that can be drawn is below
  uint64_t expired_items;  // that were too old

  // Of a queue: items that somebody holds or is done with, of the rows that are there, and of those that have gone.
  uint64_t handed_out, handed_out_gone;
  // Items that went while somebody held them: dropped, unless that one commits them.
  uint64_t lost;
  // The row of an item is going: key + 1. 0: none is; kNever: items that have gone are dropped, or committed. And what
  // follows from that: these counts, and what the holder with that index, less one, has lost (0: nobody has).
  uint64_t going_key1, gone_with_it, dropped_with_it, done_with_it, lost_with_it;
  uint32_t loser1;
  // Of an admission. Since when it counts: the learner's version, and items that were done by then.
  int64_t admission_base;
  uint64_t done_before;
  uint32_t admission_begun;  // 0: it begins with the next item that is admitted or drawn

  uint32_t ending;  // of a queue: presence of who is done with the items that it has marked; 0: nobody

  // Who set the learner's version last: presence << 32 | thread id; 0: nobody has.
  std::atomic<uint64_t> publisher;

  const LimiterConfig& limiter() const { return limiters[limiter_index & 1]; }

  // `max_raw` as others may read it, who have not got the mutex, and as its holder writes it for them.
  float largest_raw() const {
    float largest;
    __atomic_load(&max_raw, &largest, __ATOMIC_RELAXED);
    return largest;
  }
  void set_largest_raw(float largest) { __atomic_store(&max_raw, &largest, __ATOMIC_RELAXED); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

enum class Phase : uint32_t {
  kMemory,     // not in a file
  kInUse,      // processes of the boot named use it, or died
  kRepairing,  // one of them was about to repair it
  kSealed,     // put to rest by its last user, everything being on the disk
  kCopied,     // was that, and turned out to be a copy: it is getting another nonce
};

// What a segment in a file knows of its users. At the end of the header's page.
struct FileState {
  std::atomic<Phase> phase;
  uint64_t boot;                       // of the machine, when it was opened last
  uint64_t seal;                       // kSealed: hash of the header
  uint64_t lengths;                    // at rest: hash of where the values of any length lie, and how long they are
  std::atomic<uint64_t> dropped_rows;  // rows that were being written when everybody had died
  uint64_t place;                      // of the file that was opened last: a copy lies elsewhere; 0: not known
};
inline constexpr uint64_t kFileState = kSegmentHeaderBytes - kLine;
static_assert(sizeof(FileState) <= kLine && sizeof(Header) <= kFileState);

enum class Role : uint32_t { kNone = 0, kWriter = 1, kLearner = 2, kSupervisor = 3, kOwner = 4 };

// One line of the table. The byte lock of the same index says whether the process is alive, not this.
struct Participant {
  std::atomic<uint64_t> first;  // tickets in flight: [first, first + count)
  std::atomic<uint16_t> count;
  std::atomic<uint16_t> role;
  std::atomic<uint32_t> admitted;   // items that it may write: admitted, and neither written nor given back
  std::atomic<uint64_t> rows;       // rows written; of a learner: items that it got
  std::atomic<int64_t> last_write;  // machine_ns(); 0: never
  std::atomic<uint64_t> thread;     // pthread_self() of the last user
  std::atomic<int32_t> pid;
  // Not 0 while it waits for the limiter or for room, one more than it wants where it waits to be admitted; of a
  // learner: for items.
  std::atomic<uint32_t> waiting;
  std::atomic<int64_t> last_draw;  // machine_ns() when a learner got its last batch; 0: never
  std::atomic<uint64_t> since;     // tickets below were never this holder's
};
static_assert(sizeof(Participant) <= kParticipantBytes);

// The run of pages that a participant writes, or is about to take. In a table of its own: only writers of ragged fields
// have such.
struct RunInFlight {
  std::atomic<uint64_t> first1;  // ticket of its first page + 1; 0: there is none
  std::atomic<uint64_t> pages;
};
static_assert(sizeof(RunInFlight) <= kRunInFlightBytes);

// A learner got a batch of `n` items. Where two threads of its process draw at once, one of the two may not count.
inline void note_draw(Participant& learner, int n) {
  learner.rows.store(learner.rows.load(std::memory_order_relaxed) + static_cast<uint64_t>(n),
                     std::memory_order_relaxed);
  learner.last_draw.store(machine_ns(CLOCK_MONOTONIC_COARSE), std::memory_order_relaxed);
}

inline constexpr uint64_t kFirst = 1, kTerminated = 2, kTruncated = 4, kHasPriority = 8;
inline constexpr uint64_t kDiscarded = 16;  // nobody draws the item that the row is the anchor of
inline constexpr uint64_t kUsedUp =
    32;  // in checkpoints: it was handed out as often as it may be, and has its old leaf
inline constexpr uint64_t kEnds = kTerminated | kTruncated;

// The description of a row.
struct RowMeta {
  uint64_t link = 0;   // (previous key of the stream + 1) << 16 | flags
  uint32_t step = 0;   // index in the episode
  float priority = 0;  // raw, meaningful with kHasPriority
};

// A row's header, at the start of its record. Immutable once the word says done, except for what RowRewriter changes.
// Rows of a view that links none are by themselves: their records have no more of it than a word and a priority, which
// is NaN when none was given, and -infinity when the row was discarded.
struct RowHeader {
  std::atomic<uint64_t> word;  // (key + 1) << 16 | writer << 1 | busy; writer 0: void
  std::atomic<float> priority;
  std::atomic<uint32_t> step;
  std::atomic<uint64_t> link;

  RowMeta meta(bool linked) const {
    const float given = priority.load(std::memory_order_relaxed);
    if (linked) return {link.load(std::memory_order_relaxed), step.load(std::memory_order_relaxed), given};
    if (given == kDiscardedPriority) return {kDiscarded, 0, 0};
    return std::isnan(given) ? RowMeta{} : RowMeta{kHasPriority, 0, given};
  }

  void set(const RowMeta& meta, bool linked) {
    if (linked) {
      link.store(meta.link, std::memory_order_relaxed);
      step.store(meta.step, std::memory_order_relaxed);
      priority.store(meta.priority, std::memory_order_relaxed);
    } else {
      const float given = meta.link & kHasPriority ? meta.priority : NAN;
      priority.store(meta.link & kDiscarded ? kDiscardedPriority : given, std::memory_order_relaxed);
    }
  }

  void add(uint64_t flags, bool linked) {
    if (linked)
      link.store(link.load(std::memory_order_relaxed) | flags, std::memory_order_relaxed);
    else if (flags & kDiscarded)
      priority.store(kDiscardedPriority, std::memory_order_relaxed);
  }

 private:
  static constexpr float kDiscardedPriority = -std::numeric_limits<float>::infinity();
};
static_assert(sizeof(RowHeader) == kLinkedHeaderBytes);
static_assert(offsetof(RowHeader, step) == kSingleHeaderBytes);

// What an absorber keeps of a slot's place in its stream: slots plus one, 0 for none. Both sides of a link agree.
struct Links {
  std::atomic<uint32_t> prev, next;
};
static_assert(sizeof(Links) == sizeof(uint64_t));

namespace slot_word {
inline constexpr uint64_t kBusy = 1;
inline constexpr uint64_t kLoaded = 0x7fff;  // the writer of rows from a checkpoint: an id that nobody takes
// A row that was rewritten has a stamp in place of its writer: which of so many rewrites was its last.
inline constexpr uint64_t kFirstStamp = kMaxParticipants, kStamps = kLoaded - kFirstStamp;
static_assert(kLoaded > kFirstStamp);
constexpr uint64_t busy(uint64_t key, uint64_t writer) { return (key + 1) << 16 | writer << 1 | kBusy; }
constexpr uint64_t done(uint64_t key, uint64_t writer) { return (key + 1) << 16 | writer << 1; }
constexpr uint64_t voided(uint64_t key) { return (key + 1) << 16; }
constexpr bool is_busy(uint64_t w) { return w & kBusy; }
constexpr bool is_row(uint64_t w) { return !(w & kBusy) && (w & 0xfffe); }
constexpr uint64_t key1(uint64_t w) { return w >> 16; }  // key + 1; 0: never written
constexpr uint64_t writer(uint64_t w) { return (w & 0xffff) >> 1; }
constexpr bool is_stamped(uint64_t w) { return writer(w) >= kFirstStamp && writer(w) < kLoaded; }
}  // namespace slot_word

}  // namespace torchreplay
