// Copying drawn items of several rows out of the ring, without a lock. Rows do not change as long as their word names
// the same key. So an item is exact when every row is checked before and after the copy, and every row names its
// predecessor.
#pragma once

#include "draw/item_plan.h"
#include "draw/item_rows.h"
#include "draw/row_gather.h"

namespace torchreplay {

class ItemGather {
 public:
  ItemGather(SegmentMemory& m, const ItemPlan& plan)
      : memory_(m), plan_(plan), paths_(m, plan.steps), goals_(m, plan.goal, plan.share) {
    power_.push_back(1);
    for (uint32_t k = 0; k < plan.steps; k++) power_.push_back(power_.back() * plan.gamma);
  }

  // Copies the items whose numbers are in `todo`, and leaves in it those that were not, or no longer, what was drawn.
  void gather(const std::vector<DrawnItem>& items, std::vector<int>& todo, const BatchPointers& out) {
    const int count = static_cast<int>(todo.size());
    touched_.clear();
    int failed = 0;
    paths_.trace(items, todo, 0);
    for (int first = 0; first < count; first += Paths::kBlock) {
      const int n = std::min(Paths::kBlock, count - first);
      paths_.resolve(items, todo, first, n);
      goals_.choose(items, todo, first, n, paths_);
      paths_.trace(items, todo, first + n);
      found_.clear();
      for (int k = 0; k < n; k++)
        if (paths_.steps(k) >= 0) found_.push_back({k, static_cast<uint64_t>(todo[first + k])});
      if (plan_.discount_field >= 0) multiply_discounts();
      for (size_t o = 0; o < plan_.outputs.size(); o++)
        if (!plan_.outputs[o].is_ragged()) copy(o, out);
      for (int k = 0; k < n; k++) {
        const int i = todo[first + k];
        if (paths_.intact(k) && goals_.intact(k)) continue;
        paths_.each_row(k, [&](const RowAt& row) { touched_.push_back(row.slot); });
        todo[failed++] = i;
      }
    }
    todo.resize(failed);
  }

  // Leaves in `todo` the items that are not what was drawn any more, or have a row that may have been rewritten.
  void keep_touched(const std::vector<DrawnItem>& items, std::vector<int>& todo, const RewriteWatch& watch) {
    const int count = static_cast<int>(todo.size());
    int kept = 0;
    for (int first = 0; first < count; first += Paths::kBlock) {
      const int n = std::min(Paths::kBlock, count - first);
      paths_.trace(items, todo, first);
      paths_.resolve(items, todo, first, n);
      goals_.choose(items, todo, first, n, paths_);
      for (int k = 0; k < n; k++) {
        bool touched = paths_.steps(k) < 0 || (goals_.relabelled(k) && watch.touches(goals_.row(k).word));
        paths_.each_row(k, [&](const RowAt& row) { touched |= watch.touches(row.word); });
        if (touched) todo[kept++] = todo[first + k];
      }
    }
    todo.resize(kept);
  }

  // Whether every row of an item is there, as a copy would look for them. Under the mutex the answer no is for good:
  // links stay, and a row that is overwritten does not come back.
  bool is_whole(const DrawnItem& item) {
    paths_.trace({item}, {0}, 0);
    paths_.resolve({item}, {0}, 0, 1);
    return paths_.steps(0) >= 0;
  }

  // The slots of items that failed: to be brought up to date before the next draw.
  const std::vector<uint64_t>& touched() const { return touched_; }

 private:
  using Kind = Output::Kind;

  // An item of the block whose rows were found, and its place in the batch.
  struct Found {
    int k;
    uint64_t number;
  };

  void copy(size_t o, const BatchPointers& out) {
    const Output& output = plan_.outputs[o];
    const uint64_t bytes = plan_.item_bytes(o, memory_.layout());
    char* to = out.values[o];
    switch (output.kind) {
      case Kind::kAnchor:
      case Kind::kEnd:
        if (field_of(output).own_array) return copy_long(output, out.bytes, to);
        return with_size(field_of(output).nbytes, [&](auto size) { copy_rows(output, size, to); });
      case Kind::kGoal:
        return with_size(bytes, [&](auto size) { copy_goals(output, size, to); });
      case Kind::kReturn:
        return with_size(bytes, [&](auto size) { sum_rewards(output, size, to); });
      case Kind::kDiscount:
        for (const Found& item : found_) discount(item, to + item.number * bytes);
        return;
      case Kind::kRelabelled:
        for (const Found& item : found_) to[item.number] = goals_.relabelled(item.k);
        return;
      case Kind::kMask:
        for (const Found& item : found_) mark(item, output.first + 1, bytes, 0, to + item.number * bytes);
        return;
      case Kind::kFirst:
        for (const Found& item : found_) mark(item, output.first, bytes, kFirst, to + item.number * bytes);
    }
  }

  const Field& field_of(const Output& output) const { return memory_.layout().fields[output.field]; }

  // Calls visit(to, row) for every value of an output whose row there is, and zeros the others; `bytes`: of each.
  template <class Size, class Visit>
  void each_row(const Output& output, Size bytes, char* to, Visit&& visit) const {
    const int count = static_cast<int>(output.count);
    for (const Found& item : found_) {
      const RowAt* rows = paths_.rows(item.k);
      const int steps = paths_.steps(item.k), start = paths_.start(item.k);
      const int first = output.first + (output.kind == Kind::kEnd ? steps : 0);
      const int held = std::clamp(steps - first + 1, 0, count);
      char* value = to + item.number * output.count * bytes;
      for (int i = 0; i < held; i++, value += bytes) visit(value, rows[std::max(first + i, start)]);
      if (held < count) std::memset(value, 0, static_cast<uint64_t>(count - held) * bytes);
    }
  }

  template <class Size>
  void copy_rows(const Output& output, Size bytes, char* to) const {
    const Field& field = field_of(output);
    each_row(output, bytes, to,
             [&](char* value, const RowAt& row) { copy_payload(value, memory_.value(field, row.slot), bytes); });
  }

  void copy_long(const Output& output, uint64_t batch_bytes, char* to) {
    const Field& field = field_of(output);
    copies_.clear();
    each_row(output, field.nbytes, to,
             [&](char* value, const RowAt& row) { copies_.add(value, memory_.value(field, row.slot), field.nbytes); });
    copies_.run(copies_.size(), batch_bytes);
  }

  template <class Size>
  void copy_goals(const Output& output, Size bytes, char* to) const {
    for (const Found& item : found_) {
      const bool relabelled = goals_.relabelled(item.k);
      const Field& field = memory_.layout().fields[relabelled ? output.goal_field : output.field];
      const RowAt& row = relabelled ? goals_.row(item.k) : paths_.rows(item.k)[output.first];
      copy_payload(to + item.number * bytes, memory_.value(field, row.slot), bytes);
    }
  }

  // Whether each of `count` positions is an episode's first row (`flag`: kFirst), or a step (0).
  void mark(const Found& item, int first, uint64_t count, uint64_t flag, char* to) const {
    const RowAt* rows = paths_.rows(item.k);
    const int steps = paths_.steps(item.k);
    for (int i = 0; i < static_cast<int>(count); i++)
      to[i] = first + i <= steps && (rows[first + i].flags & kFirst) == flag;
  }

  void discount(const Found& item, char* to) const {
    const int steps = paths_.steps(item.k);
    const bool terminated = paths_.rows(item.k)[steps].flags & kTerminated;
    const auto discount = static_cast<float>(terminated ? 0 : discounts(item)[steps]);
    std::memcpy(to, &discount, sizeof discount);
  }

  // What the value k steps after the anchor counts for, k = 0 ... steps: gamma^k times the discounts of these steps.
  const double* discounts(const Found& item) const {
    return plan_.discount_field < 0 ? power_.data() : discount_.data() + static_cast<size_t>(item.k) * power_.size();
  }

  void multiply_discounts() {
    const Field& field = memory_.layout().fields[plan_.discount_field];
    const double* factor = read_steps(field, static_cast<uint64_t>(item_size(field.element)));
    discount_.resize(Paths::kBlock * power_.size());
    for (const Found& item : found_) {
      double* product = discount_.data() + static_cast<size_t>(item.k) * power_.size();
      *product = 1;
      for (int k = 0; k < paths_.steps(item.k); k++, product++) product[1] = product[0] * plan_.gamma * *factor++;
    }
  }

  // The values of a field in all steps of the items, one item after the other, as float64.
  template <class Size>
  const double* read_steps(const Field& field, Size bytes) {
    uint64_t steps = 0;
    for (const Found& item : found_) steps += static_cast<uint64_t>(paths_.steps(item.k));
    raw_.resize(steps * bytes);
    char* raw = raw_.data();
    for (const Found& item : found_)
      for (int position = 1; position <= paths_.steps(item.k); position++, raw += bytes)
        copy_payload(raw, memory_.value(field, paths_.rows(item.k)[position].slot), bytes);
    value_.resize(raw_.size() / static_cast<uint64_t>(item_size(field.element)));
    convert_elements(value_.data(), Element::kF64, raw_.data(), field.element, value_.size());
    return value_.data();
  }

  // R = sum over k < steps of gamma^k r_{k+1} (Sutton 1988), in float64, rounded once.
  template <class Size>
  void sum_rewards(const Output& output, Size bytes, char* to) {
    const Field& field = field_of(output);
    const auto elements = bytes / static_cast<uint64_t>(item_size(field.element));
    const double* reward = read_steps(field, bytes);
    sum_.assign(found_.size() * elements, 0);
    double* sum = sum_.data();
    for (const Found& item : found_) {
      const double* discount = discounts(item);
      for (int k = 0; k < paths_.steps(item.k); k++)
        for (uint64_t e = 0; e < elements; e++) sum[e] += discount[k] * *reward++;
      sum += elements;
    }
    convert_elements(raw_.data(), field.element, sum_.data(), Element::kF64, sum_.size());
    char* raw = raw_.data();
    for (const Found& item : found_) {
      std::memcpy(to + item.number * bytes, raw, bytes);
      raw += bytes;
    }
  }

  static void convert_elements(void* to, Element to_element, const void* from, Element from_element, uint64_t n) {
    StridedArray source;
    source.element = from_element;
    source.dims = 1;
    source.shape[0] = static_cast<int64_t>(n);
    source.stride[0] = item_size(from_element);
    copy_converted(static_cast<char*>(to), to_element, static_cast<const char*>(from), source, 0);
  }

  SegmentMemory& memory_;
  const ItemPlan& plan_;
  Paths paths_;
  Goals goals_;
  std::vector<Found> found_;
  std::vector<double> power_;     // gamma^k
  std::vector<double> discount_;  // of each item of the block, if a field has a part in it
  std::vector<double> sum_, value_;
  std::vector<char> raw_;
  LongCopies copies_;
  std::vector<uint64_t> touched_;
};

}  // namespace torchreplay
