// Rows with values of any length, and batches of them beside a model: what every row was given, in vectors of vectors.
#pragma once

#include <concepts>
#include <random>
#include <stdexcept>

#include "draw/batch_sampler.h"
#include "segments.h"

namespace torchreplay::testing {

using Bytes = std::vector<char>;

// What a row is given: of each ragged field its bytes.
using Values = std::vector<Bytes>;

// Rows are counted: the number of a row is its value of the first field of one size.
class RaggedRows {
 public:
  explicit RaggedRows(SegmentMemory& m, int id = 1) : memory_(m), id_(static_cast<uint64_t>(id)) {}

  const Values& operator[](size_t row) const { return rows_.at(row); }
  size_t size() const { return rows_.size(); }

  // Values of so many elements in each group of fields. No two of them have the same bytes, unless they are short.
  Values random_values(const std::vector<uint32_t>& lengths) {
    Values values;
    for (const RaggedField& f : memory_.layout().ragged) {
      values.emplace_back(lengths[f.group] * f.nbytes);
      for (char& byte : values.back()) byte = static_cast<char>(random_());
    }
    return values;
  }
  // Of at most so many elements; often none.
  Values some_values(uint32_t most) {
    std::vector<uint32_t> lengths(memory_.layout().pages.groups);
    for (uint32_t& length : lengths) length = random_() % 4 ? static_cast<uint32_t>(random_() % (most + 1)) : 0;
    return random_values(lengths);
  }

  // Takes pages for the next row's values, as writers do. Returns what writes the row to a slot.
  std::function<void(uint64_t)> prepare(const Values& values) {
    const Layout& layout = memory_.layout();
    std::vector<uint32_t> lengths(layout.pages.groups);
    for (size_t f = 0; f < values.size(); f++)
      lengths[layout.ragged[f].group] = static_cast<uint32_t>(values[f].size() / layout.ragged[f].nbytes);
    std::vector<uint64_t> offsets(values.size());
    const uint64_t pages = pages_of(layout, place_values(layout.ragged, lengths.data(), offsets.data()));
    const uint64_t first = take(pages);
    for (size_t f = 0; f < values.size(); f++)
      if (!values[f].empty())
        copy_payload(memory_.page(memory_.page_of(first)) + offsets[f], values[f].data(), values[f].size());
    for (uint64_t t = first; t < first + pages; t++)
      memory_.page_word(memory_.page_of(t)).store(slot_word::done(t, id_), std::memory_order_release);
    const uint64_t number = rows_.size(), run1 = pages ? first + 1 : 0;
    rows_.push_back(values);
    return [this, number, run1, lengths](uint64_t slot) {
      for (size_t f = 0; f < memory_.layout().fixed_fields(); f++) {
        const Field& field = memory_.layout().fields[f];
        for (uint64_t at = 0; at < field.nbytes; at += 8)
          copy_payload(memory_.value(field, slot) + at, &number, std::min<uint64_t>(8, field.nbytes - at));
      }
      copy_payload(memory_.run1_of_row(slot), &run1, sizeof run1);
      for (size_t g = 0; g < lengths.size(); g++)
        copy_payload(memory_.length_of_row(slot, g), &lengths[g], sizeof lengths[g]);
    };
  }

  // Writes a row of its own, and returns its key.
  uint64_t append(const Values& values, std::optional<float> priority = {}) {
    const auto fill = prepare(values);
    SteppedWriter writer(memory_, static_cast<int>(id_));
    do {
      writer.take_ticket();
    } while (!writer.seize());
    writer.finish(meta_of(priority), fill);
    return writer.key();
  }

  // Takes `n` page tickets, and marks the pages as those of nobody's row.
  void take_pages(uint64_t n) {
    for (; n; n--) take(1);
  }

 private:
  // The first of so many page tickets, whose pages are busy.
  uint64_t take(uint64_t pages) {
    Header& h = memory_.header();
    uint64_t head = h.page_head.load();
    while (!h.page_head.compare_exchange_weak(head, start_of_run(memory_, head, pages) + pages)) {
    }
    const uint64_t first = start_of_run(memory_, head, pages);
    for (uint64_t t = first; t < first + pages; t++)
      memory_.page_word(memory_.page_of(t)).store(slot_word::busy(t, id_));
    std::atomic_thread_fence(std::memory_order_release);
    return first;
  }

  SegmentMemory& memory_;
  uint64_t id_;
  std::vector<Values> rows_;
  std::mt19937 random_{7};
};

// Two fields of one length, a field of bytes, and one of vectors.
inline std::vector<RaggedField> tokens_bytes_and_points() {
  return {{Element::kI32, 4, 0}, {Element::kF32, 4, 0}, {Element::kU8, 1, 1}, {Element::kF32, 12, 2}};
}

inline Plan rows_of_any_length(uint64_t capacity, uint64_t ragged_bytes, const View& view = {}) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = {};
  plan.ragged = tokens_bytes_and_points();
  plan.ragged_bytes = ragged_bytes;
  return plan;
}

// Memory for a batch, and the batch in it.
class RaggedDraw {
 public:
  explicit RaggedDraw(const SegmentMemory& m, const ItemPlan* item_plan = nullptr)
      : memory_(m), item_plan_(item_plan), plan(RaggedPlan::of(m.layout(), item_plan)), ragged(plan) {}

  const SegmentMemory& memory_;
  const ItemPlan* item_plan_;
  RaggedPlan plan;
  RaggedBatch ragged;
  std::vector<int64_t> keys, rows;  // of each item, and the number of its (first) row
  std::vector<float> weight, probability;
  Draw outcome = Draw::kDone;
  Shortage shortage;

  // Room for `n` items. Output 0 is the field that says which row it is.
  BatchPointers point(size_t n) {
    fixed_.clear();
    for (size_t o = 0; o < outputs(); o++) fixed_.emplace_back(n * item_bytes(o));
    keys.assign(n, -1);
    weight.assign(n, 0);
    probability.assign(n, 0);
    BatchPointers out;
    for (Bytes& values : fixed_) {
      out.values.push_back(values.data());
      out.bytes += values.size();
    }
    out.keys = keys.data();
    out.weight = weight.data();
    out.probability = probability.data();
    out.ragged = &ragged;
    return out;
  }

  // What came: `n` items.
  void take(size_t n) {
    keys.resize(n);
    rows = fixed_rows(0);
  }

  // What an output of one such number an item says.
  std::vector<int64_t> fixed_rows(size_t output) const {
    std::vector<int64_t> numbers(keys.size());
    if (!numbers.empty()) std::memcpy(numbers.data(), fixed_[output].data(), numbers.size() * 8);
    return numbers;
  }

  bool sample(BatchSampler& sampler, int n, const DrawName& name = {7, 0, 0}, const DrawRules& rules = {}) {
    const BatchPointers out = point(static_cast<size_t>(n));
    outcome = sampler.sample(n, 0, name, out, shortage, {}, rules);
    take(outcome == Draw::kDone ? static_cast<size_t>(sampler.count()) : 0);
    return outcome == Draw::kDone;
  }

  void gather(BatchSampler& sampler, const std::vector<int64_t>& of) {
    const BatchPointers out = point(of.size());
    take(static_cast<size_t>(sampler.gather(of.data(), static_cast<int>(of.size()), 0, out)));
  }

  // Value `i` of a ragged output.
  Bytes value(size_t output, size_t i) const {
    const RaggedBatch::Lengths& lengths = ragged.lengths[plan.outputs[output].group];
    const uint64_t size = memory_.layout().ragged[plan.outputs[output].field].nbytes;
    if (lengths.offsets[i + 1] - lengths.offsets[i] != lengths.lengths[i])  // threads cannot share Boost's log
      throw std::runtime_error("the offsets of a batch are not those of its lengths");
    const char* data = ragged.values[output].data + static_cast<uint64_t>(lengths.offsets[i]) * size;
    return {data, data + static_cast<uint64_t>(lengths.lengths[i]) * size};
  }

  // Whether every value of every output is `expected(output, item, position)`, and nothing lies between or behind them.
  template <std::invocable<size_t, size_t, size_t> Expected>
  bool holds(Expected&& expected) const {
    bool good = true;
    for (size_t o = 0; o < plan.outputs.size(); o++) {
      const RaggedBatch::Lengths& lengths = ragged.lengths[plan.outputs[o].group];
      const size_t each = plan.windows[plan.groups[plan.outputs[o].group].window].count;
      good &= static_cast<size_t>(lengths.count) == keys.size() * each;
      good &= lengths.offsets[0] == 0 && lengths.offsets[lengths.count] == ragged.values[o].elements;
      for (size_t i = 0; good && i < keys.size(); i++)
        for (size_t j = 0; j < each; j++) good &= value(o, i * each + j) == expected(o, i, j);
    }
    return good;
  }

  // Of single rows: whether they have the values that they were given.
  bool holds(const RaggedRows& model) const {
    return holds([&](size_t output, size_t item, size_t) -> const Bytes& {
      return model[static_cast<size_t>(rows[item])][plan.outputs[output].field];
    });
  }

 private:
  size_t outputs() const { return item_plan_ ? item_plan_->outputs.size() : memory_.layout().fixed_fields(); }
  uint64_t item_bytes(size_t o) const {
    return item_plan_ ? item_plan_->item_bytes(o, memory_.layout()) : memory_.layout().fields[o].nbytes;
  }

  std::vector<Bytes> fixed_;
};

}  // namespace torchreplay::testing
