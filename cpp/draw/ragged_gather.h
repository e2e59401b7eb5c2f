// Copying values of any length out of the ring, without a lock. Lengths are read first: they say where each value goes.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "draw/item_rows.h"
#include "draw/thread_pool.h"
#include "segment/run.h"

namespace torchreplay {

// A row that is measured may be overwritten before its values are copied. Its pages' words say so afterwards: values
// are exact when every page of their run still has the ticket that it had.
class RaggedGather {
 public:
  // `plan` as for BatchSampler.
  RaggedGather(SegmentMemory& m, const ItemPlan* plan)
      : memory_(m), plan_(RaggedPlan::of(m.layout(), plan)), groups_(m.layout().pages.groups) {
    if (plan) paths_ = std::make_unique<Paths>(m, plan->steps);
  }

  // Reads where the values lie of the items whose numbers are in `todo`, and how long they are. Leaves in it those that
  // are not, or no longer, what was drawn: for now their values have no elements. O(rows of the items).
  void measure(const std::vector<DrawnItem>& items, std::vector<int>& todo) {
    rows_.resize(items.size() * plan_.width);
    lengths_.resize(rows_.size() * groups_);
    touched_.clear();
    paths_ ? measure_paths(items, todo) : measure_rows(items, todo);
    for (const int i : todo) forget(i);
  }

  // How far a budget goes.
  struct Within {
    size_t items;    // that stay within it, from the first one on: at least one
    uint64_t lacks;  // more items that it takes at the least, if none is longer than those; 0: it is used up
  };

  // Of `n` items that were measured. `budget`: most elements of each group, -1 for any number. Empty: there is none.
  // O(rows of the items).
  Within within(const std::vector<int64_t>& budget, size_t n) const {
    std::vector<int64_t> elements(budget.size(), 0), longest(budget.size(), 1);
    for (size_t i = 0; i < n; i++)
      for (size_t g = 0; g < budget.size(); g++) {
        if (budget[g] < 0) continue;
        const int64_t before = elements[g];
        each_length(g, i, i + 1, [&](size_t, uint32_t length) { elements[g] += length; });
        if (elements[g] > budget[g] && i > 0) return {i, 0};
        longest[g] = std::max(longest[g], elements[g] - before);
      }
    uint64_t lacks = kNever;
    for (size_t g = 0; g < budget.size(); g++) {
      if (budget[g] < 0) continue;
      const int64_t left = std::max<int64_t>(0, budget[g] - elements[g]);
      lacks = std::min(lacks, static_cast<uint64_t>(left / longest[g] + (left % longest[g] != 0)));
    }
    return {n, lacks};
  }

  // Gets memory for the values of `n` items, and says in `out` where each begins. The values of the items in `todo` are
  // still to be copied; those of all others are there, and move. Throws TooManyElements, and NoMemory.
  void arrange(size_t n, const std::vector<int>& todo, RaggedBatch& out) {
    std::vector<uint64_t> elements, bytes;
    std::vector<int64_t> counts;
    for (uint32_t g = 0; g < plan_.groups.size(); g++) {
      elements.push_back(0);
      each_length(g, 0, n, [&](size_t, uint32_t length) { elements.back() += length; });
      if (elements.back() > TooManyElements::kMost) throw TooManyElements(g, elements.back());
      counts.push_back(static_cast<int64_t>(n * window_of(g).count));
    }
    for (const RaggedPlan::Values& v : plan_.outputs) bytes.push_back(elements[v.group] * element_bytes(v));
    const std::vector<RaggedBatch::Values> values = out.values;
    const std::vector<RaggedBatch::Lengths> lengths = out.lengths;
    const bool stays = todo.size() < n;
    Block* const before = out.allocate(bytes, counts, stays);
    for (size_t o = 0; o < out.values.size(); o++)
      out.values[o].elements = static_cast<int64_t>(elements[plan_.outputs[o].group]);
    for (uint32_t g = 0; g < plan_.groups.size(); g++) write_offsets(g, n, out.lengths[g]);
    if (stays) move(n, todo, values, lengths, out);
    if (before) before->release();
  }

  // Copies the values of the items in `todo` to where they belong, and leaves in it those that were overwritten.
  // `batch_bytes`: of everything else in the batch. O(bytes).
  void copy(std::vector<int>& todo, const RaggedBatch& out, uint64_t batch_bytes, int threads) {
    collect(todo, out);
    const uint64_t bytes = copies_.empty() ? 0 : copies_.back().end;
    const uint64_t parts = std::max<uint64_t>(1, bytes / kPartBytes), part_bytes = bytes / parts + 1;
    const int workers = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(threads), parts));
    tools_.resize(std::max(tools_.size(), static_cast<size_t>(workers)));
    ThreadPool::instance().run(workers, static_cast<int>(parts), [&](int worker, int part) {
      copy_part(static_cast<uint64_t>(part) * part_bytes, part_bytes, bytes + batch_bytes, tools_[worker]);
    });
    std::erase_if(todo, [&](int i) { return is_whole(i); });
    for (const int i : todo)
      for (const Row* row = rows_of(i); row < rows_of(i) + plan_.width; row++)
        if (row->run.pages) touched_.push_back(row->slot);
  }

  // The slots of items that failed since they were measured: to be brought up to date before the next draw.
  const std::vector<uint64_t>& touched() const { return touched_; }

 private:
  // As much is one piece of work. A value may be several.
  static constexpr uint64_t kPartBytes = uint64_t{512} << 10;
  // Rows whose records are fetched ahead.
  static constexpr size_t kAhead = 16;

  // Where a row's values lie. Without pages there is no row, or all its values are of length 0.
  struct Row {
    uint64_t slot = 0;
    Run run;
  };
  // `end`: bytes of all copies up to this one.
  struct Copy {
    char* to;
    const char* from;
    uint64_t end;
  };

  const RaggedPlan::Window& window_of(uint32_t group) const { return plan_.windows[plan_.groups[group].window]; }
  uint64_t element_bytes(const RaggedPlan::Values& v) const { return memory_.layout().ragged[v.field].nbytes; }
  Row* rows_of(int item) { return rows_.data() + static_cast<size_t>(item) * plan_.width; }
  uint32_t* lengths_of(const Row* row) { return lengths_.data() + static_cast<size_t>(row - rows_.data()) * groups_; }

  // Calls visit(which, length) for each value of a group in the items from `first` to `last`.
  template <class Visit>
  void each_length(size_t group, size_t first, size_t last, Visit&& visit) const {
    const RaggedPlan::Group& of = plan_.groups[group];
    const RaggedPlan::Window& window = plan_.windows[of.window];
    size_t value = first * window.count;
    for (size_t i = first; i < last; i++) {
      const uint32_t* length = lengths_.data() + (i * plan_.width + window.place) * groups_ + of.length;
      for (uint32_t j = 0; j < window.count; j++, length += groups_) visit(value++, *length);
    }
  }

  void forget(int item) {
    std::fill_n(rows_of(item), plan_.width, Row{});
    std::fill_n(lengths_of(rows_of(item)), size_t{plan_.width} * groups_, 0);
  }

  void measure_rows(const std::vector<DrawnItem>& items, std::vector<int>& todo) {
    for (size_t k = 0; k < std::min(kAhead, todo.size()); k++) fetch(items[todo[k]].slot);
    size_t failed = 0;
    for (size_t k = 0; k < todo.size(); k++) {
      if (k + kAhead < todo.size()) fetch(items[todo[k + kAhead]].slot);
      const int i = todo[k];
      const DrawnItem& item = items[i];
      const uint64_t word = memory_.row(item.slot).word.load(std::memory_order_acquire);
      const bool there = slot_word::is_row(word) && slot_word::key1(word) == item.key1;
      if (!there || !measure(rows_of(i), item.slot, word)) todo[failed++] = i;
    }
    todo.resize(failed);
  }

  void measure_paths(const std::vector<DrawnItem>& items, std::vector<int>& todo) {
    const int count = static_cast<int>(todo.size());
    int failed = 0;
    paths_->trace(items, todo, 0);
    for (int first = 0; first < count; first += Paths::kBlock) {
      const int n = std::min(Paths::kBlock, count - first);
      paths_->resolve(items, todo, first, n);
      paths_->trace(items, todo, first + n);
      for (int k = 0; k < n; k++) {
        const int i = todo[first + k];
        if (paths_->steps(k) >= 0 && measure_path(i, k)) continue;
        paths_->each_row(k, [&](const RowAt& row) { touched_.push_back(row.slot); });
        todo[failed++] = i;
      }
    }
    todo.resize(failed);
  }

  // Item i, the k-th of its block. Frames before the start repeat the first one, and beyond the end there are none, as
  // among the values of one size.
  bool measure_path(int i, int k) {
    forget(i);
    const RowAt* rows = paths_->rows(k);
    const int steps = paths_->steps(k), start = paths_->start(k);
    for (const RaggedPlan::Window& w : plan_.windows) {
      const int first = w.first + (w.kind == Output::Kind::kEnd ? steps : 0);
      const int held = std::clamp(steps - first + 1, 0, static_cast<int>(w.count));
      for (int j = 0; j < held; j++) {
        const RowAt& row = rows[std::max(first + j, start)];
        if (!measure(rows_of(i) + w.place + j, row.slot, row.word)) return false;
      }
    }
    return true;
  }

  // Reads where the values of a row lie, and fetches the first ones. False: its word has changed, or it is spoilt.
  bool measure(Row* row, uint64_t slot, uint64_t word) {
    row->slot = slot;
    if (!read_run(memory_, slot, row->run, lengths_of(row))) return false;
    if (load_after_copy(memory_.row(slot).word) != word) return false;
    if (row->run.pages) {
      const uint64_t page = memory_.page_of(row->run.first);
      __builtin_prefetch(memory_.page(page));
      __builtin_prefetch(&memory_.page_word(page));
    }
    return true;
  }

  [[gnu::always_inline]] void fetch(uint64_t slot) const {
    __builtin_prefetch(&memory_.row(slot));
    __builtin_prefetch(memory_.run1_of_row(slot));
    __builtin_prefetch(memory_.length_of_row(slot, 0));
  }

  void write_offsets(uint32_t group, size_t n, const RaggedBatch::Lengths& out) const {
    int32_t end = 0;
    each_length(group, 0, n, [&](size_t value, uint32_t length) {
      out.offsets[value] = end;
      out.lengths[value] = length;
      end += static_cast<int32_t>(length);
    });
    out.offsets[out.count] = end;
  }

  // Moves the values of all items but those in `todo` from where they were.
  void move(size_t n, const std::vector<int>& todo, const std::vector<RaggedBatch::Values>& values,
            const std::vector<RaggedBatch::Lengths>& lengths, const RaggedBatch& out) const {
    for (size_t o = 0; o < plan_.outputs.size(); o++) {
      const uint32_t g = plan_.outputs[o].group;
      const uint64_t size = element_bytes(plan_.outputs[o]);
      const size_t each = window_of(g).count;
      size_t next = 0;
      for (size_t i = 0; i < n; i++) {
        if (next < todo.size() && static_cast<size_t>(todo[next]) == i) {
          next++;
          continue;
        }
        const int32_t from = lengths[g].offsets[i * each], end = lengths[g].offsets[(i + 1) * each];
        std::memcpy(out.values[o].data + static_cast<uint64_t>(out.lengths[g].offsets[i * each]) * size,
                    values[o].data + static_cast<uint64_t>(from) * size, static_cast<uint64_t>(end - from) * size);
      }
    }
  }

  // Fills copies_ with the values of the items in `todo`. Those of a row lie side by side.
  void collect(const std::vector<int>& todo, const RaggedBatch& out) {
    const std::vector<RaggedField>& fields = memory_.layout().ragged;
    std::vector<uint64_t> offsets(fields.size());
    uint64_t end = 0;
    copies_.clear();
    for (const int i : todo)
      for (uint32_t w = 0; w < plan_.windows.size(); w++)
        for (uint32_t j = 0; j < plan_.windows[w].count; j++) {
          const Row* row = rows_of(i) + plan_.windows[w].place + j;
          if (row->run.pages == 0) continue;
          const uint32_t* lengths = lengths_of(row);
          place_values(fields, lengths, offsets.data());
          const char* from = memory_.page(memory_.page_of(row->run.first));
          for (size_t o = 0; o < plan_.outputs.size(); o++) {
            const auto& [field, g] = plan_.outputs[o];
            const uint64_t size = fields[field].nbytes, bytes = lengths[plan_.groups[g].length] * size;
            if (plan_.groups[g].window != w || bytes == 0) continue;
            const int32_t at = out.lengths[g].offsets[static_cast<size_t>(i) * plan_.windows[w].count + j];
            copies_.push_back(
                {out.values[o].data + static_cast<uint64_t>(at) * size, from + offsets[field], end += bytes});
          }
        }
  }

  // Copies `bytes` of all that there are to copy, from byte `first` on.
  void copy_part(uint64_t first, uint64_t bytes, uint64_t batch_bytes, LongCopies& tool) const {
    size_t c = static_cast<size_t>(std::ranges::upper_bound(copies_, first, {}, &Copy::end) - copies_.begin());
    const auto start_of = [&](size_t copy) { return copy ? copies_[copy - 1].end : 0; };
    tool.clear();
    for (; c < copies_.size() && start_of(c) < first + bytes; c++) {
      const uint64_t start = start_of(c), from = std::max(first, start), end = std::min(first + bytes, copies_[c].end);
      tool.add(copies_[c].to + (from - start), copies_[c].from + (from - start), end - from);
    }
    const size_t here = tool.size();
    for (; c < copies_.size() && tool.size() < here + LongCopies::kAhead; c++)
      tool.add(copies_[c].to, copies_[c].from, copies_[c].end - start_of(c));
    tool.run(here, batch_bytes);
  }

  // Whether an item's rows have had their pages all the while.
  bool is_whole(int item) {
    const Row* before = nullptr;
    for (const Row* row = rows_of(item); row < rows_of(item) + plan_.width; before = row++)
      if (row->run.pages && !(before && before->run == row->run) && !is_intact(memory_, row->run)) return false;
    return true;
  }

  SegmentMemory& memory_;
  RaggedPlan plan_;
  uint32_t groups_;                // of fields of the same length
  std::unique_ptr<Paths> paths_;   // of items of several rows
  std::vector<Row> rows_;          // of each item those of all windows
  std::vector<uint32_t> lengths_;  // of each row that of each group of fields
  std::vector<Copy> copies_;
  std::vector<LongCopies> tools_;  // of each thread
  std::vector<uint64_t> touched_;
};

}  // namespace torchreplay
