// Copying drawn items of several rows out of the ring, without a lock. Rows are immutable as long as their word names
// the same key, so an item is exact when every row of it is checked by itself, before and after the copy, and every row
// names its predecessor.
#pragma once

#include "gather.h"
#include "path.h"
#include "plan.h"

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
    paths_.prefetch(items, todo, 0);
    for (int first = 0; first < count; first += Paths::kBlock) {
      const int n = std::min(Paths::kBlock, count - first);
      paths_.resolve(items, todo, first, n);
      goals_.choose(items, todo, first, n, paths_);
      paths_.prefetch(items, todo, first + n);
      for (size_t o = 0; o < plan_.outputs.size(); o++) copy(o, todo.data() + first, n, out);
      for (int k = 0; k < n; k++) {
        const int i = todo[first + k];
        if (paths_.intact(k) && goals_.intact(k)) continue;
        paths_.each_row(k, [&](const RowAt& row) { touched_.push_back(row.slot); });
        todo[failed++] = i;
      }
    }
    todo.resize(failed);
  }

  // Whether items use random words of their own.
  bool takes_chances() const { return plan_.goal != Goal::kNone && plan_.share > 0; }

  // The slots of items that failed: to be brought up to date before the next draw.
  const std::vector<uint64_t>& touched() const { return touched_; }

 private:
  void copy(size_t o, const int* numbers, int n, const BatchPointers& out) {
    const Output& output = plan_.outputs[o];
    const uint64_t bytes = plan_.item_bytes(o, memory_.layout());
    const bool rows = output.kind == Output::Kind::kAnchor || output.kind == Output::Kind::kEnd;
    if (rows && can_stream(memory_.layout().fields[output.field].nbytes, out.bytes))
      return stream(output, numbers, n, bytes, out.values[o]);
    for (int k = 0; k < n; k++)
      if (paths_.steps(k) >= 0) fill(output, k, out.values[o] + static_cast<uint64_t>(numbers[k]) * bytes);
  }

  // Long values: each is fetched while the one before is copied.
  void stream(const Output& output, const int* numbers, int n, uint64_t item_bytes, char* to) {
    const Field& field = memory_.layout().fields[output.field];
    moves_.clear();
    for (int k = 0; k < n; k++) {
      if (paths_.steps(k) < 0) continue;
      char* item = to + static_cast<uint64_t>(numbers[k]) * item_bytes;
      const int first = output.first + (output.kind == Output::Kind::kEnd ? paths_.steps(k) : 0);
      for (int i = 0; i < static_cast<int>(output.count); i++, item += field.nbytes) {
        const int position = std::max(first + i, paths_.start(k));
        if (position > paths_.steps(k))
          std::memset(item, 0, field.nbytes);
        else
          moves_.push_back({item, memory_.value(field, paths_.row(k, position).slot)});
      }
    }
    for (size_t i = 0; i < moves_.size(); i++)
      stream_payload(moves_[i].to, moves_[i].from, moves_[std::min(i + 1, moves_.size() - 1)].from, field.nbytes);
    finish_stream();
  }

  void fill(const Output& output, int k, char* to) {
    const int steps = paths_.steps(k);
    switch (output.kind) {
      case Output::Kind::kAnchor:
        return copy_rows(output, k, output.first, to);
      case Output::Kind::kEnd:
        return copy_rows(output, k, steps + output.first, to);
      case Output::Kind::kGoal:
        if (goals_.relabelled(k)) return copy_value_of(output.goal_field, goals_.row(k), to);
        return copy_rows(output, k, output.first, to);
      case Output::Kind::kReturn:
        return sum_rewards(output, k, to);
      case Output::Kind::kDiscount: {
        const bool terminated = paths_.row(k, steps).flags & kTerminated;
        const auto discount = static_cast<float>(terminated ? 0 : power_[steps]);
        return std::memcpy(to, &discount, sizeof discount), void();
      }
      case Output::Kind::kRelabelled:
        *to = goals_.relabelled(k);
        return;
      case Output::Kind::kMask:
        for (int i = 0; i < static_cast<int>(output.count); i++) to[i] = is_step(k, output.first + i + 1);
        return;
      case Output::Kind::kFirst:
        for (int i = 0; i < static_cast<int>(output.count); i++) to[i] = is_first(k, output.first + i);
    }
  }

  bool is_first(int k, int position) const {
    return position <= paths_.steps(k) && (paths_.row(k, position).flags & kFirst);
  }
  bool is_step(int k, int position) const { return position <= paths_.steps(k) && !is_first(k, position); }

  // Values of output.field at `count` positions from `first`.
  void copy_rows(const Output& output, int k, int first, char* to) const {
    const Field& field = memory_.layout().fields[output.field];
    const int steps = paths_.steps(k), start = paths_.start(k);
    for (int i = 0; i < static_cast<int>(output.count); i++, to += field.nbytes) {
      const int position = std::max(first + i, start);
      if (position > steps) return std::memset(to, 0, (output.count - i) * field.nbytes), void();
      copy_value(to, memory_.value(field, paths_.row(k, position).slot), field.nbytes);
    }
  }

  void copy_value_of(uint32_t f, const RowAt& row, char* to) const {
    const Field& field = memory_.layout().fields[f];
    copy_value(to, memory_.value(field, row.slot), field.nbytes);
  }

  // R = sum over k < steps of gamma^k r_{k+1} (Sutton 1988), in float64, rounded once.
  void sum_rewards(const Output& output, int k, char* to) {
    const Field& field = memory_.layout().fields[output.field];
    const auto elements = static_cast<int64_t>(field.nbytes) / item_size(field.element);
    sum_.assign(elements, 0);
    reward_.resize(elements);
    raw_.resize(field.nbytes);
    for (int position = 1; position <= paths_.steps(k); position++) {
      copy_payload(raw_.data(), memory_.value(field, paths_.row(k, position).slot), field.nbytes);
      convert_elements(reward_.data(), Element::kF64, raw_.data(), field.element, elements);
      for (int64_t e = 0; e < elements; e++) sum_[e] += power_[position - 1] * reward_[e];
    }
    convert_elements(to, field.element, sum_.data(), Element::kF64, elements);
  }

  static void convert_elements(void* to, Element to_element, const void* from, Element from_element, int64_t n) {
    StridedArray source;
    source.element = from_element;
    source.dims = 1;
    source.shape[0] = n;
    source.stride[0] = item_size(from_element);
    copy_converted(static_cast<char*>(to), to_element, static_cast<const char*>(from), source, 0);
  }

  struct Move {
    char* to;
    const char* from;
  };

  SegmentMemory& memory_;
  const ItemPlan& plan_;
  Paths paths_;
  Goals goals_;
  std::vector<double> power_;  // gamma^k
  std::vector<double> sum_, reward_;
  std::vector<char> raw_;
  std::vector<Move> moves_;
  std::vector<uint64_t> touched_;
};

}  // namespace torchreplay
