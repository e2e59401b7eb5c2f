// Rows of a checkpoint, placed into an empty segment beside others who are attached to it: all of them become its rows,
// or none. Their tickets are issued first. So rows that others write meanwhile are newer, and none of them is touched.
// Nothing is absorbed before the end. If the importer dies, the next owner of the lock gets there by itself (Recovery).
#pragma once

#include "checkpoint/run_plan.h"
#include "checkpoint/snapshot.h"
#include "write/page_ring.h"

namespace torchreplay {

inline bool is_same(const LimiterConfig& a, const LimiterConfig& b) {
  return a.min_size == b.min_size && a.ratio == b.ratio && a.min_diff == b.min_diff && a.max_diff == b.max_diff;
}

// One import. For one thread at a time.
class Import {
 public:
  // Rows with keys below `head` are to come; where values have any length, those of `plan`. Throws RowsRefused when
  // there are rows already, or another import.
  Import(SegmentMemory& m, uint64_t head, RunPlan plan = {})
      : memory_(m),
        header_(m.header()),
        presence_(m.presence()),
        generation_(fork_generation.load(std::memory_order_relaxed)),
        pages_(m, static_cast<int>(slot_word::kLoaded)) {
    const SegmentLock lock(memory_);
    if (header_.importer) throw RowsRefused("the buffer is being restored already");
    uint64_t before = header_.import_head;  // all tickets there may be: of imports that came to nothing
    head = std::max(head, before);
    if (header_.rows || header_.inserted || header_.head.load(std::memory_order_relaxed) != before) throw_taken();
    // First: the pages of all rows that others write are newer, too. They begin at the start of the ring, as in a new
    // one. Behind an import that came to nothing, those would be lacking that no run takes at the ring's end.
    issue_pages(std::move(plan), true);
    header_.import_stage = ImportStage::kPlaces;
    header_.import_head = head;
    header_.imports++;
    kill_fence();
    header_.importer = presence_;
    TORCHREPLAY_FAULT("import.begun");
    if (!header_.head.compare_exchange_strong(before, head, std::memory_order_acq_rel)) {
      header_.import_head = 0;  // all tickets are those of others: no other import
      kill_fence();
      header_.importer = 0;
      throw_taken();
    }
    TORCHREPLAY_FAULT("import.issued");
  }
  // Gives up, if it did not come to its end: the next one to lock takes back what was placed.
  ~Import() { give_up(); }
  Import(const Import&) = delete;

  // Rows with keys below `head` are to come as well, and no more of those before. Throws RowsRefused when others have
  // written meanwhile.
  void issue(uint64_t head, RunPlan plan = {}) {
    const SegmentLock lock(memory_);
    issue_pages(std::move(plan));
    const uint64_t before = header_.import_head;
    if (head <= before) return;
    uint64_t issued = before;
    header_.import_head = head;
    kill_fence();
    if (header_.head.compare_exchange_strong(issued, head, std::memory_order_acq_rel)) return;
    header_.import_head = before;
    throw_taken();
  }

  // Places rows that Snapshot gave. Where two claim one slot, or the same pages, the newer stays. Throws
  // std::invalid_argument for a key that has no ticket, and for a row that was not to come.
  void place(uint64_t n, const RowColumns& rows) {
    for (uint64_t i = 0; i < n; i++)
      if (rows.key[i] < 0 || static_cast<uint64_t>(rows.key[i]) >= header_.import_head)
        throw std::invalid_argument("a key is out of range");
    uint64_t mapped = 0;  // of the rows
    if (memory_.has_pages()) find_runs(n, rows);
    for (uint64_t i = 0; i < n; i++) {
      const uint64_t slot = slot_of(rows, i);
      if (i == mapped) {
        do mapped++;
        while (mapped < n && slot_of(rows, mapped) == slot + (mapped - i));
        memory_.map_for_writing(slot, slot + (mapped - i));
      }
      place_row(slot, i, rows);
      TORCHREPLAY_FAULT("import.row");
    }
  }

  // The keys of rows that have no place, because there are too few pages for the values of all. O(capacity).
  std::vector<int64_t> left_out() const {
    std::vector<int64_t> keys = left_out_;
    std::vector<uint32_t> lengths(memory_.layout().pages.groups);
    const uint64_t head = header_.page_head.load(std::memory_order_relaxed);
    for (uint64_t slot = 0; memory_.has_pages() && slot < memory_.capacity(); slot++) {
      const uint64_t word = memory_.row(slot).word.load(std::memory_order_acquire);
      Run run;
      if (slot_word::writer(word) != slot_word::kLoaded || !read_run(memory_, slot, run, lengths.data())) continue;
      if (run.pages && run.first + memory_.layout().pages.count < head)
        keys.push_back(static_cast<int64_t>(slot_word::key1(word)) - 1);
    }
    return keys;
  }

  // Makes them the segment's rows, and its counts those that were saved under `limiter`. Throws std::invalid_argument
  // when no buffer can have had such rows, or counted so: then nothing has happened.
  void finish(const Counts& saved, const LimiterConfig& limiter, uint64_t seed) {
    SegmentLock lock(memory_);
    if (!saved.are_sound()) throw std::invalid_argument("the counters are out of range");
    check_rows();
    Counts& c = header_.imported;
    c = saved;
    c.stale_updates += header_.stale_updates;
    c.unready_updates += header_.unready_updates;
    header_.import_seed = seed;
    header_.import_keeps_limiter = is_same(header_.limiter(), limiter);
    TORCHREPLAY_FAULT("import.told");
    kill_fence();
    header_.import_stage = ImportStage::kPlaced;
    kill_fence();
    TORCHREPLAY_FAULT("import.placed");
    Recovery(memory_).end_import();
    ended_ = true;
    publish_limit(memory_);
  }

  // Takes back what was placed.
  void abandon() {
    give_up();
    TORCHREPLAY_FAULT("import.abandoned");
    const SegmentLock ends_it(memory_);
    publish_limit(memory_);
  }

 private:
  void give_up() {
    uint32_t own = presence_;
    const bool forked = generation_ != fork_generation.load(std::memory_order_relaxed);  // it is the parent's
    if (!ended_ && !forked) header_.importer.compare_exchange_strong(own, kGone);
    ended_ = true;
  }

  // Others may write newer rows, of streams of their own, and take slots for them.
  void check_rows() const {
    for (uint64_t slot = 0; slot < memory_.capacity(); slot++) {
      const std::atomic<uint64_t>& at = memory_.row(slot).word;
      const uint64_t word = at.load(std::memory_order_acquire);
      if (slot_word::writer(word) != slot_word::kLoaded || is_sound(memory_, slot)) continue;
      throw std::invalid_argument("the row with key " + std::to_string(slot_word::key1(word) - 1) +
                                  " does not follow its episode");
    }
  }

  [[noreturn]] static void throw_taken() {
    throw RowsRefused("the buffer holds rows already: restore a new one, before its explorers start");
  }

  uint64_t slot_of(const RowColumns& rows, uint64_t i) const {
    return memory_.slot_of(static_cast<uint64_t>(rows.key[i]));
  }

  void issue_pages(RunPlan plan, bool at_start = false) {
    plan_ = std::move(plan);
    if (plan_.empty()) return;
    uint64_t head = header_.page_head.load(std::memory_order_relaxed), end;
    do {
      end = plan_.arrange(memory_, at_start ? round_up(head, memory_.layout().pages.count) : head);
      if (end > kMaxKeys) throw RowsRefused("every ticket of a page that there is was issued: make a new buffer");
    } while (!header_.page_head.compare_exchange_weak(head, end, std::memory_order_acq_rel, std::memory_order_relaxed));
    left_out_.insert(left_out_.end(), plan_.left_out().begin(), plan_.left_out().end());
    TORCHREPLAY_FAULT("import.pages");
  }

  // Where the values of `n` rows go, and where each has them.
  void find_runs(uint64_t n, const RowColumns& rows) {
    const Layout& layout = memory_.layout();
    const size_t fields = layout.ragged.size();
    std::vector<uint32_t> lengths(layout.pages.groups);
    runs_.resize(n);
    begins_.assign((n + 1) * fields, 0);
    for (uint64_t i = 0; i < n; i++) {
      for (size_t g = 0; g < lengths.size(); g++) lengths[g] = rows.lengths[g][i];
      runs_[i] = plan_.find(rows.key[i], pages_of(layout, place_values(layout.ragged, lengths.data(), nullptr)));
      for (size_t f = 0; f < fields; f++)
        begins_[(i + 1) * fields + f] = begins_[i * fields + f] + lengths[layout.ragged[f].group];
    }
  }

  // Copies the values of row i to its run. False: others who were faster have its pages.
  bool place_run(const Run& run, uint64_t i, const RowColumns& rows) {
    const Layout& layout = memory_.layout();
    if (!pages_.take_issued(run)) return false;
    std::vector<uint32_t> lengths;
    lengths.reserve(rows.lengths.size());
    for (const uint32_t* of_group : rows.lengths) lengths.push_back(of_group[i]);
    std::vector<uint64_t> offsets(layout.ragged.size());
    place_values(layout.ragged, lengths.data(), offsets.data());
    for (size_t f = 0; f < offsets.size(); f++) {
      const RaggedField& field = layout.ragged[f];
      const uint64_t bytes = lengths[field.group] * field.nbytes;
      char* to = pages_.data() + offsets[f];
      copy_payload(to, rows.ragged[f] + begins_[i * offsets.size() + f] * field.nbytes, bytes);
      if (field.element == Element::kBool) make_bools(to, bytes);
    }
    return pages_.commit();
  }

  // As a writer does, for there may be others.
  void place_row(uint64_t slot, uint64_t i, const RowColumns& rows) {
    const auto key = static_cast<uint64_t>(rows.key[i]);
    RowHeader& row = memory_.row(slot);
    uint64_t word = row.word.load(std::memory_order_acquire);
    if (slot_word::key1(word) > header_.import_head || (slot_word::is_row(word) && slot_word::key1(word) > key)) return;
    if (memory_.has_pages()) {
      const std::optional<Run>& run = runs_[i];
      if (!run) return;
      if (run->pages && !place_run(*run, i, rows)) return left_out_.push_back(rows.key[i]);
    }
    DrawnItems(memory_).mark(slot);  // first: who takes rows back looks there
    kill_fence();
    if (!row.word.compare_exchange_strong(word, slot_word::busy(key, slot_word::kLoaded), std::memory_order_acq_rel,
                                          std::memory_order_relaxed))
      return;  // a newer one
    TORCHREPLAY_FAULT("import.busy");
    std::atomic_thread_fence(std::memory_order_release);
    const auto& fields = memory_.layout().fields;
    for (size_t f = 0; f < rows.values.size(); f++) {
      char* value = memory_.value(fields[f], slot);
      copy_value(value, rows.values[f] + i * fields[f].nbytes, fields[f].nbytes);
      if (fields[f].element == Element::kBool) make_bools(value, fields[f].nbytes);
    }
    if (memory_.has_pages()) describe_run(slot, i, rows);
    const auto link = static_cast<uint64_t>(rows.link[i]);
    const bool used_up = link & kUsedUp, is_counted = DrawCounts::are_kept(header_);
    const uint64_t flags_not_kept = used_up && is_counted ? kUsedUp | kDiscarded : kUsedUp;
    row.set({link & ~flags_not_kept, static_cast<uint32_t>(rows.step[i]), rows.priority[i]},
            memory_.layout().view.linked());
    PriorityTree tree = memory_.tree();
    const float leaf = tree.clamp(rows.leaf[i]);
    const float unit = leaf >= 1 ? 1 : leaf > 0 ? Epochs::kDrawn : 0;  // of leaves that are no priorities
    const float own = header_.sampler.prioritized ? leaf : Epochs::are_kept(header_) ? unit : unit > 0;
    tree.leaves()[slot] = used_up ? 0 : own;
    const bool tells_draws = !header_.sampler.prioritized && leaf > 0;
    const uint64_t draws = tells_draws ? static_cast<uint64_t>(std::min(leaf / unit, 0x1p16f)) - 1 : 0;
    if (Claims::are_kept(header_)) {
      Claims claims(memory_);
      claims.begin(slot, 0);
      claims.arrive(slot);
      claims.set_draws(slot, draws);
    }
    if (is_counted) DrawCounts(memory_).set_draws(slot, used_up ? DrawCounts::kMost : draws, own);
    TORCHREPLAY_FAULT("import.copied");
    row.word.store(slot_word::done(key, slot_word::kLoaded), std::memory_order_release);
  }

  void describe_run(uint64_t slot, uint64_t i, const RowColumns& rows) const {
    const Run run = runs_[i].value_or(Run{});
    *memory_.run1_of_row(slot) = run.pages ? run.first + 1 : 0;
    for (size_t g = 0; g < rows.lengths.size(); g++) *memory_.length_of_row(slot, g) = rows.lengths[g][i];
  }

  SegmentMemory& memory_;
  Header& header_;
  uint32_t presence_;
  uint64_t generation_;
  PageRing pages_;
  RunPlan plan_;
  std::vector<int64_t> left_out_;
  // Of the rows that are being placed: the run of each, where it has a place; and its first element of each ragged
  // field, among those given.
  std::vector<std::optional<Run>> runs_;
  std::vector<uint64_t> begins_;
  bool ended_ = false;
};

}  // namespace torchreplay
