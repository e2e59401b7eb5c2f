// Copying the items of a drawn batch out of the ring, without the lock, in several threads where it is large.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "draw/drawing.h"
#include "draw/item_gather.h"
#include "draw/ragged_gather.h"
#include "draw/thread_pool.h"
#include "session/segment_lock.h"

namespace torchreplay {

// Works on the items of drawing.todo. What was overwritten or rewritten meanwhile is not what was drawn: it fails.
class BatchCopier {
 public:
  // `plan` as for BatchSampler.
  BatchCopier(SegmentMemory& m, const ItemPlan* plan, Drawing& drawing)
      : memory_(m), plan_(plan), drawing_(drawing), copiers_(1) {
    copiers_[0].emplace(m, plan);
    if (!RaggedPlan::of(m.layout(), plan).outputs.empty()) values_ = std::make_unique<RaggedGather>(m, plan);
  }

  void set_threads(int n) { threads_ = n; }

  // Values of any length, where batches have some.
  RaggedGather& values() { return *values_; }
  bool has_values(const BatchPointers& out) const { return values_ && out.ragged; }

  // Finds the values of any length of the items in drawing_.todo. Returns those that are not what was drawn.
  std::vector<int> measure(const RewriteWatch& watch, const Patience& patience) {
    std::vector<int> lost = drawing_.todo;
    values_->measure(drawing_.items, lost);
    if (!lost.empty() && watch.any()) {  // a row that is being rewritten is there; nobody rewrites under the lock
      TORCHREPLAY_FAULT("draw.measures_again");
      const SegmentLock lock(memory_, patience);
      values_->measure(drawing_.items, lost);
    }
    TORCHREPLAY_FAULT("draw.measured");
    return lost;
  }

  // Gets memory for the values of any length, and copies those of the items in drawing_.todo. Of these it moves to
  // `lost` what was overwritten since it was measured.
  void copy_values(std::vector<int>& lost, const BatchPointers& out) {
    std::vector<int>& todo = drawing_.todo;
    values_->arrange(drawing_.items.size(), todo, *out.ragged);
    TORCHREPLAY_FAULT("draw.arranged");
    remove(todo, lost);
    std::vector<int> failed = todo;
    values_->copy(failed, *out.ragged, out.bytes, threads_);
    TORCHREPLAY_FAULT("draw.values");
    remove(todo, failed);
    add(lost, failed);
  }

  // Puts what is lost among what is still to be drawn. Both are ascending numbers.
  static void add(std::vector<int>& to, const std::vector<int>& lost) {
    if (lost.empty()) return;
    to.insert(to.end(), lost.begin(), lost.end());
    std::ranges::sort(to);
    to.erase(std::ranges::unique(to).begin(), to.end());
  }

  // Copies the items of drawing_.todo, and leaves there those that were not what was drawn. Without their values of any
  // length.
  void copy(const BatchPointers& out) {
    const int count = static_cast<int>(drawing_.todo.size());
    const int parts = parts_of(count, out.bytes);
    const int threads = std::min(threads_, parts);
    parts_.resize(static_cast<size_t>(parts));
    copiers_.resize(std::max(copiers_.size(), static_cast<size_t>(threads)));
    for (int p = 0; p < parts; p++)
      parts_[p].todo.assign(drawing_.todo.begin() + count * int64_t{p} / parts,
                            drawing_.todo.begin() + count * (int64_t{p} + 1) / parts);
    ThreadPool::instance().run(threads, parts, [&](int worker, int p) {
      auto& copier = copiers_[worker];
      if (!copier) copier.emplace(memory_, plan_);
      copier->copy(drawing_.items, parts_[p], out);
    });
    drawing_.todo.clear();
    for (const Part& part : parts_) drawing_.todo.insert(drawing_.todo.end(), part.todo.begin(), part.todo.end());
  }

  // If rows were rewritten since `watch` looked, copies again the items that hold some of them, or that failed. Nobody
  // rewrites under the lock, so all that was copied is of one moment: a row in two items is the same in both.
  void copy_rewritten(RewriteWatch& watch, const BatchPointers& out, const Patience& patience) {
    if (!watch.any() || (drawing_.todo.empty() && touched(watch).empty())) return;
    TORCHREPLAY_FAULT("draw.rewritten");
    const SegmentLock lock(memory_, patience);
    const std::vector<int> again = touched(watch);
    add(drawing_.todo, again);
    copy(out);
    watch = RewriteWatch(memory_.header());
    TORCHREPLAY_FAULT("draw.copied_again");
  }

  // Calls visit(slot) for each row of items that failed since the last copy began.
  template <class Visit>
  void each_failed_slot(Visit&& visit) const {
    for (const Part& part : parts_) std::ranges::for_each(part.touched, visit);
    if (values_) std::ranges::for_each(values_->touched(), visit);
  }

 private:
  // Less than this is not worth another thread's while.
  static constexpr uint64_t kPartBytes = uint64_t{512} << 10;
  static constexpr int kPartItems = 16;

  // A part of the items to copy; afterwards those that were not copied, and the slots of their rows.
  struct Part {
    std::vector<int> todo;
    std::vector<uint64_t> touched;
  };

  // What one thread copies with.
  class RowCopier {
   public:
    RowCopier(SegmentMemory& m, const ItemPlan* plan) : rows_(m) {
      if (plan) items_.emplace(m, *plan);
    }

    void keep_touched(const std::vector<DrawnItem>& items, std::vector<int>& todo, const RewriteWatch& watch) {
      items_ ? items_->keep_touched(items, todo, watch) : rows_.keep_touched(items, todo, watch);
    }

    void copy(const std::vector<DrawnItem>& items, Part& part, const BatchPointers& out) {
      if (!items_) return rows_.gather(items, part.todo, out);
      items_->gather(items, part.todo, out);
      part.touched = items_->touched();
    }

   private:
    RowGather rows_;
    std::optional<ItemGather> items_;
  };

  // Of the items that were copied those that hold a row which was rewritten, or is gone by now.
  std::vector<int> touched(const RewriteWatch& watch) {
    std::vector<int> copied = drawing_.done();
    if (auto& copier = copiers_[0])
      copier->keep_touched(drawing_.items, copied, watch);  // the first is there from the start
    return copied;
  }

  int parts_of(int count, uint64_t bytes) const {
    if (threads_ == 1 || bytes < 2 * kPartBytes) return 1;
    return static_cast<int>(std::clamp<uint64_t>(bytes / kPartBytes, 1, std::max(1, count / kPartItems)));
  }

  static void remove(std::vector<int>& from, const std::vector<int>& some) {
    if (some.empty()) return;
    std::erase_if(from, [&](int i) { return std::ranges::binary_search(some, i); });
  }

  SegmentMemory& memory_;
  const ItemPlan* plan_;
  Drawing& drawing_;
  int threads_ = 1;
  std::unique_ptr<RaggedGather> values_;           // where batches have ragged fields
  std::vector<std::optional<RowCopier>> copiers_;  // of each thread
  std::vector<Part> parts_;
};

}  // namespace torchreplay
