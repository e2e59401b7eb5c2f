// The figures of a segment, of one moment as far as they lie under its lock.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "absorb/leaf_changes.h"
#include "client/attachment.h"
#include "segment/pages_in_use.h"

namespace torchreplay {

// The slot of the oldest item that can be drawn. The lock is held, and all is absorbed.
inline std::optional<uint64_t> oldest_of_queue(SegmentMemory& m) {
  const PriorityTree tree = m.tree();
  if (!Claims::are_kept(m.header()) || tree.count() == 0) return {};
  return OldestItems::oldest(m, tree);
}

// Versions that the items drawn so far were behind the learner's, on average.
inline double mean_age(const Header& h) {
  const auto ages = static_cast<double>(static_cast<int64_t>(h.ages.load(std::memory_order_relaxed)));
  return ages / static_cast<double>(std::max<uint64_t>(1, h.aged.load(std::memory_order_relaxed)));
}

// Times are in ns, as of `now` by machine_ns(); 0: it never was.
struct SegmentStats {
  // Under the lock.
  uint64_t rows, drawable, inserted, sampled, updated, stale_updates, unready_updates, evicted_unsampled;
  double priority_total, smallest_leaf, priority_min, priority_change;  // the last one summed over all updates
  float max_raw;
  uint64_t held_items, dropped_items;
  double oldest_age;  // of a queue: seconds since the oldest item came; -1: there is none
  uint64_t expired_items;
  uint64_t admitted_items, admission_limit, open_admissions;  // 0 where items need not be admitted
  // Beside it.
  int64_t policy_version;  // the learner's
  double age_mean;         // of the items drawn: versions that they were behind it
  int64_t age_max;
  Census census;
  int64_t now;
  uint64_t insert_wait, sample_wait;
  double insert_wait_share, sample_wait_share;  // of the recent time, by each writer and each learner
  uint64_t draws, redraws, head, taken_ahead, missed, dropped_rows;
  bool stopped;
  uint64_t ragged_bytes;  // for values of any length
  double ragged_fill;     // the share of them that rows have, in a queue those that are needed
  uint64_t evicted_by_pages;
  // As long as it is there.
  uint64_t capacity, nbytes;

  // Absorbed to now, after what this process has fed back.
  static SegmentStats of(Attachment& attachment) {
    attachment.settle_feedback();
    SegmentMemory& m = attachment.memory();
    SegmentStats s{};
    s.read_locked(m);
    s.read_participants(m);
    const Header& h = m.header();
    s.draws = h.draws.load(std::memory_order_relaxed);
    s.policy_version = h.policy_version.load(std::memory_order_relaxed);
    s.age_mean = mean_age(h);
    s.age_max = h.largest_age.load(std::memory_order_relaxed);
    s.redraws = h.redraws.load(std::memory_order_relaxed);
    s.head = h.head.load(std::memory_order_relaxed);
    s.taken_ahead = h.taken_ahead.load(std::memory_order_relaxed);
    s.missed = h.missed.load(std::memory_order_relaxed);
    s.dropped_rows = m.file().dropped_rows.load(std::memory_order_relaxed);
    s.stopped = attachment.stopped();
    s.capacity = m.capacity();
    s.nbytes = m.layout().bytes;
    return s;
  }

 private:
  void read_locked(SegmentMemory& m) {
    const Unlocked others;
    SegmentLock lock(m);
    lock.absorb();
    const Header& h = m.header();
    if (Claims::are_kept(h)) Claims(m).release_from_the_dead();
    publish_limit(m);
    const PriorityTree tree = m.tree();
    rows = h.rows, inserted = h.inserted, sampled = h.sampled, updated = h.updated, stale_updates = h.stale_updates,
    unready_updates = h.unready_updates, evicted_unsampled = h.evicted_unsampled, priority_change = h.priority_change,
    drawable = static_cast<uint64_t>(tree.count()), max_raw = h.max_raw;
    const bool are_alike = Claims::are_kept(h) || Epochs::are_kept(h);  // their leaves are marks, no priorities
    priority_total = are_alike ? static_cast<double>(drawable) : static_cast<double>(tree.total()) * tree.unit();
    smallest_leaf = drawable ? tree.min() : 0.0;
    priority_min = drawable ? raw_of(h.sampler, smallest_leaf) : 0.0;
    held_items = h.held, dropped_items = h.dropped_items, expired_items = h.expired_items;
    if (Admission::is_kept(h)) {
      const Admission admission(m);
      admitted_items = admission.count(), admission_limit = admission.limit(), open_admissions = admission.open();
    }
    ragged_bytes = m.layout().pages.given;
    if (m.has_pages()) {
      const uint64_t head = h.page_head.load(std::memory_order_acquire);
      ragged_fill =
          static_cast<double>(pages_in_use(m, h, head, h.absorbed)) / static_cast<double>(m.layout().pages.count);
    }
    evicted_by_pages = h.evicted_by_pages;
    const std::optional<uint64_t> oldest = oldest_of_queue(m);
    oldest_age = oldest ? static_cast<double>(Claims(m).age(*oldest)) * 1e-3 : -1;
  }

  void read_participants(SegmentMemory& m) {
    const Header& h = m.header();
    census = take_census(m, false);
    now = machine_ns();
    const int64_t recent = std::max<int64_t>(1, now - WaitTime::since(now, h.made));
    insert_wait = h.insert_wait.total_ns();
    sample_wait = h.sample_wait.total_ns();
    insert_wait_share = share(h.insert_wait.recent_ns(now), recent, census.writers);
    sample_wait_share = share(h.sample_wait.recent_ns(now), recent, census.learners);
  }

  // How much of the time `elapsed` each of `many` has waited, on average.
  static double share(uint64_t waited, int64_t elapsed, int many) {
    return std::min(1.0, static_cast<double>(waited) / (static_cast<double>(elapsed) * std::max(1, many)));
  }
};

// A string literal as an argument of a template.
template <size_t n>
struct Literal {
  consteval Literal(const char (&from)[n]) { std::copy(from, from + n, text); }
  constexpr bool operator==(std::string_view other) const { return std::string_view(text, n - 1) == other; }
  char text[n];
};

template <Literal name>
struct Figure {};

inline double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Seconds between a time of machine_ns() and `now`; -1: it never was.
inline double ago(int64_t then, int64_t now) { return then ? static_cast<double>(now - then) * 1e-9 : -1.0; }

inline double ratio(double of, uint64_t to) { return of / static_cast<double>(std::max<uint64_t>(1, to)); }

// Calls put(Figure<name>, value) for each field of torchreplay.Stats.
template <class Put>
void each_figure(const SegmentStats& s, Put&& put) {
  put(Figure<"size">{}, s.rows);
  put(Figure<"drawable">{}, s.drawable);
  put(Figure<"inserted">{}, s.inserted);
  put(Figure<"sampled">{}, s.sampled);
  put(Figure<"updated">{}, s.updated);
  put(Figure<"stale_updates">{}, s.stale_updates);
  put(Figure<"unready_updates">{}, s.unready_updates);
  put(Figure<"samples_per_insert">{}, ratio(static_cast<double>(s.sampled), s.inserted));
  put(Figure<"evicted_unsampled">{}, s.evicted_unsampled);
  put(Figure<"held_items">{}, s.held_items);
  put(Figure<"dropped_items">{}, s.dropped_items);
  put(Figure<"oldest_age">{}, s.oldest_age);
  put(Figure<"policy_version">{}, s.policy_version);
  put(Figure<"age_mean">{}, s.age_mean);
  put(Figure<"age_max">{}, s.age_max);
  put(Figure<"expired_items">{}, s.expired_items);
  put(Figure<"admitted_items">{}, s.admitted_items);
  put(Figure<"admission_limit">{}, s.admission_limit);
  put(Figure<"open_admissions">{}, s.open_admissions);
  put(Figure<"priority_change">{}, ratio(s.priority_change, s.updated));
  put(Figure<"priority_total">{}, s.priority_total);
  put(Figure<"priority_min">{}, s.priority_min);
  put(Figure<"priority_max">{}, s.max_raw);
  put(Figure<"writers">{}, s.census.writers);
  put(Figure<"learners">{}, s.census.learners);
  put(Figure<"last_write_age">{}, ago(s.census.last_write, s.now));
  put(Figure<"insert_wait">{}, seconds(s.insert_wait));
  put(Figure<"sample_wait">{}, seconds(s.sample_wait));
  put(Figure<"insert_wait_share">{}, s.insert_wait_share);
  put(Figure<"sample_wait_share">{}, s.sample_wait_share);
  put(Figure<"capacity">{}, s.capacity);
  put(Figure<"nbytes">{}, s.nbytes);
  put(Figure<"ragged_bytes">{}, s.ragged_bytes);
  put(Figure<"ragged_fill">{}, s.ragged_fill);
  put(Figure<"evicted_by_pages">{}, s.evicted_by_pages);
  put(Figure<"draws">{}, s.draws);
  put(Figure<"redraws">{}, s.redraws);
  put(Figure<"staleness">{}, ratio(static_cast<double>(s.missed), s.taken_ahead));
  put(Figure<"dropped_rows">{}, s.dropped_rows);
  put(Figure<"rows_written">{}, s.head);
  put(Figure<"stopped">{}, s.stopped);
}

// How many there are.
inline size_t figure_count() {
  size_t count = 0;
  each_figure({}, [&]<Literal name>(Figure<name>, const auto&) { count++; });
  return count;
}

// How many come before one of them.
inline size_t figure_place(std::string_view wanted) {
  size_t count = 0;
  std::optional<size_t> place;
  each_figure({}, [&]<Literal name>(Figure<name>, const auto&) {
    if (name == wanted) place = count;
    count++;
  });
  if (!place) throw std::logic_error("there is no such figure: " + std::string(wanted));
  return *place;
}

}  // namespace torchreplay
