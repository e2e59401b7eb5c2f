// What the absorber's state must be once everything is absorbed, recomputed from the words and the leaves alone.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "complete_items.h"
#include "segment/run.h"
#include "session/segment_lock.h"

namespace torchreplay::testing {

// Absorbs everything, as a learner does.
inline uint64_t settle(SegmentMemory& m) { return SegmentLock(m).absorb(); }

// Newest ticket + 1 of every slot, 0 for none.
inline std::vector<uint64_t> newest_tickets(const SegmentMemory& m) {
  std::vector<uint64_t> newest(m.capacity());
  const uint64_t head = m.header().head.load();
  for (uint64_t t = head > m.capacity() ? head - m.capacity() : 0; t < head; t++) newest[m.slot_of(t)] = t + 1;
  return newest;
}

// The first thing in which word, `at`, leaf and pending bit of a slot contradict each other, or the rows there are.
inline std::string slot_violation(SegmentMemory& m, const PriorityTree& tree, uint64_t slot, uint64_t newest,
                                  const RowSet& rows) {
  const uint64_t word = m.row(slot).word.load();
  const bool is_row = word % 2 == 0 && word % 65536 != 0, busy = word % 2 == 1;
  const uint64_t at = m.at(slot);
  const bool pending = PendingSet(m).contains(slot);
  const auto says = [&](const char* what) { return "slot " + std::to_string(slot) + ": " + what; };
  if (at != (is_row ? word >> 16 : 0)) return says("`at` is not the committed row");
  const bool complete = at && rows.item(at - 1);
  if ((tree.leaf(static_cast<int64_t>(slot)) > 0) != complete)
    return says(complete ? "a complete item cannot be drawn" : "an incomplete item can be drawn");
  if (pending != (busy || word >> 16 < newest)) return says("pending bit");
  return "";
}

// Whether each row is linked to the one that it names, where both are there, and nothing else is.
inline std::string link_violation(const SegmentMemory& m, const RowSet& rows) {
  std::vector<uint32_t> prev(m.capacity()), next(m.capacity());
  for (const auto& [key, row] : rows.rows())
    if (rows.follows(row) && rows.rows().contains(row.prev_key1 - 1)) {
      const uint64_t slot = key % m.capacity(), before = (row.prev_key1 - 1) % m.capacity();
      prev[slot] = static_cast<uint32_t>(before + 1);
      next[before] = static_cast<uint32_t>(slot + 1);
    }
  for (uint64_t slot = 0; slot < m.capacity(); slot++)
    if (m.links(slot).prev.load() != prev[slot] || m.links(slot).next.load() != next[slot])
      return "links of slot " + std::to_string(slot);
  return "";
}

// The first row without all its pages, or of which following says something else than its record.
inline std::string page_violation(const SegmentMemory& m) {
  const uint64_t pages = m.layout().pages.count, head = m.header().page_head.load();
  if (m.header().followed != head) return "cursor of the pages";
  for (uint64_t slot = 0; slot < m.capacity(); slot++) {
    if (!m.at(slot)) continue;
    const auto says = [&](const char* what) { return "row of slot " + std::to_string(slot) + ": " + what; };
    Run run;
    std::vector<uint32_t> lengths(m.layout().pages.groups);
    if (!read_run(m, slot, run, lengths.data())) return says("lengths");
    if (m.run1(slot) != (run.pages ? run.first + 1 : 0)) return says("its run");
    if (run.pages == 0) continue;
    if (m.owner1(run.first % pages) != slot + 1) return says("its first page leads elsewhere");
    if (run.first + pages < head) return says("its first page was issued again");
    for (uint64_t t = run.first; t < run.first + run.pages; t++) {
      const uint64_t word = m.page_word(t % pages).load();
      if (word % 2 || word % 65536 == 0 || word >> 16 != t + 1) return says("a page is not its own");
    }
  }
  return "";
}

// Whether sums, count and extremes of the tree are those of its leaves, and every positive leaf can be found.
inline std::string tree_violation(const PriorityTree& tree, bool keeps_largest = false) {
  uint64_t total = 0;
  int64_t count = 0;
  float least = std::numeric_limits<float>::infinity(), most = 0;
  std::vector<uint64_t> targets;
  std::vector<int64_t> expected;
  for (int64_t i = 0; i < tree.capacity(); i++) {
    const float leaf = tree.leaf(i);
    if (!(leaf > 0)) continue;
    const uint64_t units = tree.quantize(leaf);
    for (uint64_t t : {total, total + units - 1}) {
      targets.push_back(t);
      expected.push_back(i);
    }
    total += units;
    count++;
    least = std::min(least, leaf);
    most = std::max(most, leaf);
  }
  if (tree.total() != total) return "total of the tree";
  if (tree.count() != count) return "count of the tree";
  if (tree.min() != least) return "minimum of the tree";
  if (keeps_largest && tree.max() != most) return "maximum of the tree";
  std::vector<int64_t> found(targets.size());
  std::vector<float> leaf(targets.size());
  if (count) tree.find(targets.data(), static_cast<int>(targets.size()), found.data(), leaf.data());
  return found == expected ? "" : "inner sums of the tree";
}

// Empty when every invariant holds of a segment that is fully absorbed and in which nobody writes at the moment
// (writers may lag between two steps), and every stream has one writer. O(capacity).
inline std::string violation(SegmentMemory& m) {
  const Header& h = m.header();
  uint64_t rows = 0, pending = 0;
  const std::vector<uint64_t> newest = newest_tickets(m);
  const RowSet committed = RowSet::committed(m);
  const PriorityTree tree = m.tree();
  for (uint64_t slot = 0; slot < m.capacity(); slot++) {
    if (std::string v = slot_violation(m, tree, slot, newest[slot], committed); !v.empty()) return v;
    rows += m.at(slot) != 0;
    pending += PendingSet(m).contains(slot);
    if (m.pending_words()[slot / 64] && !(m.pending_summary()[slot / 4096] >> slot / 64 % 64 & 1))
      return "summary of the pending slots";
  }
  if (h.rows != rows) return "count of rows";
  if (h.pending != pending) return "count of pending slots";
  if (h.absorbed != h.head.load()) return "cursor";
  if (h.dirty != Dirty::kClean) return "dirty";
  if (m.layout().pages.count)
    if (std::string v = page_violation(m); !v.empty()) return v;
  if (m.layout().view.linked())
    if (std::string v = link_violation(m, committed); !v.empty()) return v;
  return tree_violation(tree, h.sampler.initial == Initial::kMaxHeld);
}

}  // namespace torchreplay::testing
