// Taking part: ids for writers, learners and supervisors, safe to reuse because taking one cleans up after its last
// holder.
#pragma once

#include <stdexcept>

#include "write/ring_writer.h"

namespace torchreplay {

struct NoFreeId : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Keeps when `entry` was last written with, for its next holder forgets it. Idempotent.
inline void keep_last_write(Header& h, const Participant& entry) {
  const int64_t written = entry.last_write.load(std::memory_order_relaxed);
  int64_t latest = h.last_write.load(std::memory_order_relaxed);
  while (latest < written && !h.last_write.compare_exchange_weak(latest, written, std::memory_order_relaxed)) {
  }
}

// Takes a free id and announces `role`. O(participants ever at one time).
inline int join(SegmentMemory& m, Role role) {
  for (int id = 1; id < kMaxParticipants; id++) {
    if (!m.liveness().take(id)) continue;
    TORCHREPLAY_FAULT("join.taken");
    reclaim(m, id);
    Participant& entry = m.participant(id);
    if (entry.role.load(std::memory_order_relaxed) != 0)  // its last holder died
      m.header().last_departure.store(machine_ns(), std::memory_order_relaxed);
    TORCHREPLAY_FAULT("join.reclaimed");
    entry.first.store(0, std::memory_order_relaxed);
    entry.rows.store(0, std::memory_order_relaxed);
    keep_last_write(m.header(), entry);
    entry.last_write.store(0, std::memory_order_release);  // after it is kept: a census reads this one first
    entry.waiting.store(0, std::memory_order_relaxed);
    entry.last_draw.store(0, std::memory_order_relaxed);
    entry.thread.store(0, std::memory_order_relaxed);
    entry.pid.store(getpid(), std::memory_order_relaxed);
    entry.since.store(m.header().head.load(std::memory_order_acquire), std::memory_order_relaxed);
    std::atomic<uint32_t>& ids = m.header().ids;
    uint32_t highest = ids.load(std::memory_order_relaxed);
    while (highest < static_cast<uint32_t>(id) && !ids.compare_exchange_weak(highest, static_cast<uint32_t>(id))) {
    }
    TORCHREPLAY_FAULT("join.cleared");
    entry.role.store(static_cast<uint16_t>(role), std::memory_order_release);
    TORCHREPLAY_FAULT("join.announced");
    return id;
  }
  throw NoFreeId("all " + std::to_string(kMaxParticipants - 1) +
                 " places for writers and learners are taken: close writers that are no longer used");
}

inline void leave(SegmentMemory& m, int id) {
  if (!m.liveness().holds(id)) return;  // others take its holder for dead, and may have given the id to another
  TORCHREPLAY_FAULT("leave.begun");
  m.participant(id).admitted.store(0, std::memory_order_relaxed);  // first: nobody looks at one without a role
  TORCHREPLAY_FAULT("leave.admitted");
  m.participant(id).role.store(0, std::memory_order_relaxed);
  TORCHREPLAY_FAULT("leave.role");
  m.header().last_departure.store(machine_ns(), std::memory_order_relaxed);
  TORCHREPLAY_FAULT("leave.departed");
  m.liveness().release(id);
  TORCHREPLAY_FAULT("leave.released");
}

// An owner that has only started others, and ends when they do, counts until one of them has drawn, or until the time
// in its entry. Then it is as if it had left.
inline void end_owning(Participant& entry, int64_t until) { entry.last_draw.store(until, std::memory_order_relaxed); }
inline bool still_owns(const Header& h, const Participant& entry) {
  const int64_t until = entry.last_draw.load(std::memory_order_relaxed);  // owners draw as learners
  return until == 0 || (h.draws.load(std::memory_order_relaxed) == 0 && machine_ns() < until);
}

struct Census {
  int writers = 0, learners = 0, supervisors = 0, owners = 0;  // alive
  int others_writing = 0;  // writers that somebody else than the asking thread uses or may use
  int others_learning = 0;
  int others_owning = 0;                                // owners in other processes
  int waiting = 0;                                      // writers that wait for the limiter
  bool shared = false;                                  // others than the process that made the segment have it, or had
  int64_t now = 0, last_write = 0, last_departure = 0;  // machine_ns(); 0: never
};

// The participants. Frees what the dead left behind on the way. O(participants ever at one time).
inline Census take_census(SegmentMemory& m, bool unused_count_as_others) {
  Census c;
  const auto self = static_cast<uint64_t>(pthread_self());
  const int highest = std::min(kMaxParticipants - 1, static_cast<int>(m.header().ids.load(std::memory_order_acquire)));
  for (int id = 1; id <= highest; id++) {
    Participant& entry = m.participant(id);
    const auto role = static_cast<Role>(entry.role.load(std::memory_order_acquire));
    c.last_write = std::max(c.last_write, entry.last_write.load(std::memory_order_acquire));
    if (role == Role::kNone) continue;
    if (!m.liveness().alive(id)) {
      if (m.liveness().take(id)) {
        TORCHREPLAY_FAULT("census.taken");
        reclaim(m, id);
        leave(m, id);
      }
      continue;
    }
    if (role == Role::kOwner && !still_owns(m.header(), entry)) continue;
    const uint64_t thread = entry.thread.load(std::memory_order_relaxed);
    const bool other = !m.liveness().owns(id) || (thread ? thread != self : unused_count_as_others);
    c.writers += role == Role::kWriter;
    c.learners += role == Role::kLearner;
    c.supervisors += role == Role::kSupervisor;
    c.owners += role == Role::kOwner;
    c.others_owning += role == Role::kOwner && !m.liveness().owns(id);
    c.others_writing += role == Role::kWriter && other;
    c.others_learning += role == Role::kLearner && other;
    c.waiting += role == Role::kWriter && entry.waiting.load(std::memory_order_relaxed);
  }
  c.last_write = std::max(c.last_write, m.header().last_write.load(std::memory_order_relaxed));
  const uint32_t importer = m.header().importer;
  c.supervisors += importer && m.liveness().present(importer);  // rows are to come
  c.shared = m.header().shared.load(std::memory_order_relaxed) != 0;
  c.last_departure = m.header().last_departure.load(std::memory_order_relaxed);
  c.now = machine_ns();
  return c;
}

// Whether a living participant of that role is what is wanted. O(participants ever at one time).
template <class Wanted>
bool has_participant(SegmentMemory& m, Role role, const Wanted& wanted) {
  const uint32_t ids = m.header().ids.load(std::memory_order_acquire);
  for (int id = 1; id < kMaxParticipants && id <= static_cast<int>(ids); id++) {
    const Participant& entry = m.participant(id);
    if (static_cast<Role>(entry.role.load(std::memory_order_acquire)) == role && wanted(entry) &&
        m.liveness().alive(id))
      return true;
  }
  return false;
}

// Whether a thread that has a writer to `other` waits for the limiter of `m`. A writer that was not used yet may be any
// thread's of its process. O(participants ever at one time), of `other` for each writer that waits.
inline bool holds_back_writer_of(SegmentMemory& m, SegmentMemory& other) {
  return has_participant(m, Role::kWriter, [&](const Participant& waiting) {
    if (!waiting.waiting.load(std::memory_order_relaxed)) return false;
    return has_participant(other, Role::kWriter, [&](const Participant& writer) {
      const uint64_t thread = writer.thread.load(std::memory_order_relaxed);
      return writer.pid.load(std::memory_order_relaxed) == waiting.pid.load(std::memory_order_relaxed) &&
             (thread == 0 || thread == waiting.thread.load(std::memory_order_relaxed));
    });
  });
}

// Whether the calling thread is one that draws, through whichever mapping of its process: of each the last that did. It
// would wait for itself at the gate. O(participants ever at one time).
inline bool draws_itself(SegmentMemory& m) {
  const auto self = static_cast<uint64_t>(pthread_self());
  const int pid = getpid();
  return has_participant(m, Role::kLearner, [&](const Participant& learner) {
    return learner.thread.load(std::memory_order_relaxed) == self && learner.pid.load(std::memory_order_relaxed) == pid;
  });
}

// Frees the slots of the dead, at most ten times a second: for those who found slots unsettled.
inline void reclaim_dead(SegmentMemory& m) {
  constexpr int64_t kEvery = 100'000'000;
  Header& h = m.header();
  const int64_t now = machine_ns(CLOCK_MONOTONIC_COARSE);
  int64_t last = h.last_census.load(std::memory_order_relaxed);
  if (now - last < kEvery || !h.last_census.compare_exchange_strong(last, now, std::memory_order_relaxed)) return;
  take_census(m, false);
}

}  // namespace torchreplay
