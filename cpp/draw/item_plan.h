// What a batch of a linked view consists of: which values of an item's rows go into which tensor.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "segment/layout.h"

namespace torchreplay {

// An item's rows have positions: 0 is the anchor, negative ones lie before it, the last one is its end.
struct Output {
  enum class Kind : uint32_t {
    kAnchor,      // values of `field` at positions first, first + 1, ...: frames before the start repeat the first one,
                  // positions beyond the end are zeros
    kEnd,         // the same, counted from the item's end
    kReturn,      // sum of `field` at position 1 + k times the discounts of the k steps before it
    kDiscount,    // float32: product of all steps' discounts, 0 when the end says terminated
    kMask,        // bool: position first + i + 1 is a step of an episode
    kFirst,       // bool: position first + i is an episode's first row
    kRelabelled,  // bool: the item got another goal
    kGoal,        // like kAnchor with one value; of the row whose goal replaces it when the item is relabelled
  };
  static constexpr uint32_t kKinds = 8;

  Kind kind = Kind::kAnchor;
  uint32_t field = 0;
  int32_t first = 0;
  uint32_t count = 1;
  uint32_t goal_field = 0;  // kGoal: where the goal comes from
  int32_t ragged = -1;      // kAnchor, kEnd: the ragged field in place of `field`; -1: none

  bool is_ragged() const { return ragged >= 0; }
  bool has_field() const { return !is_ragged() && (kind <= Kind::kReturn || kind == Kind::kGoal); }
  // One value for each of several rows; of other kinds there is one.
  bool has_rows() const { return has_frames() || kind == Kind::kMask || kind == Kind::kFirst; }
  // The rows may lie before the anchor.
  bool has_frames() const { return kind <= Kind::kEnd; }
};

// Which row of its episode gives an item another goal (Andrychowicz et al. 2017, section 4.5).
enum class Goal : uint32_t { kNone, kFuture, kFinal, kEpisode };
inline constexpr uint32_t kGoals = 4;

struct ItemPlan {
  std::vector<Output> outputs;
  uint32_t steps = 0;  // of an item at most
  double gamma = 1;    // discount of a step, times the value of its field, if there is one
  Goal goal = Goal::kNone;
  double share = 0;             // of items that get another goal
  int32_t discount_field = -1;  // -1: none

  // Whether items use random words of their own.
  bool takes_chances() const { return goal != Goal::kNone && share > 0; }

  // Bytes that one item takes in output `o`; 0: they differ from item to item.
  uint64_t item_bytes(size_t o, const Layout& layout) const {
    const Output& output = outputs[o];
    if (output.is_ragged()) return 0;
    if (output.kind == Output::Kind::kDiscount) return sizeof(float);
    return output.count * (output.has_field() ? layout.fields[output.field].nbytes : 1);
  }

  Element element(size_t o, const Layout& layout) const {
    const Output& output = outputs[o];
    if (output.is_ragged()) return layout.ragged[static_cast<size_t>(output.ragged)].element;
    if (output.has_field()) return layout.fields[output.field].element;
    return output.kind == Output::Kind::kDiscount ? Element::kF32 : Element::kBool;
  }

  // Throws std::invalid_argument for what could not be gathered from a segment of this layout.
  void check(const Layout& layout) const {
    constexpr int64_t kReach = 1 << 20;
    auto require = [](bool good, const char* what) {
      if (!good) throw std::invalid_argument(std::string("bad plan of a batch: ") + what);
    };
    require(steps >= 1 && steps <= kReach && steps <= layout.view.span, "steps");
    require(std::isfinite(gamma), "gamma");
    require(discount_field < 0 || is_number(layout, static_cast<uint32_t>(discount_field)), "discount");
    require(share >= 0 && share <= 1 && static_cast<uint32_t>(goal) < kGoals, "goal");
    for (const Output& o : outputs) {
      require(static_cast<uint32_t>(o.kind) < Output::kKinds, "kind");
      require(!o.has_field() || o.field < layout.fixed_fields(), "field");
      require(!o.is_ragged() || (o.has_frames() && static_cast<size_t>(o.ragged) < layout.ragged.size()),
              "ragged field");
      require(o.count >= 1 && o.count <= (o.has_rows() ? kReach : 1), "count");
      const int64_t earliest = o.has_frames() ? -static_cast<int64_t>(layout.view.history) : 0;
      require(o.first >= earliest && o.first <= kReach, "first position");
      require(o.kind != Output::Kind::kReturn || casts(Element::kF64, layout.fields[o.field].element), "return");
      if (o.kind != Output::Kind::kGoal) continue;
      require(o.goal_field < layout.fixed_fields(), "goal field");
      const Field &to = layout.fields[o.field], &from = layout.fields[o.goal_field];
      require(to.element == from.element && to.nbytes == from.nbytes, "the goal's type");
    }
  }

 private:
  static bool is_number(const Layout& layout, uint32_t field) {
    if (field >= layout.fixed_fields()) return false;
    const Field& f = layout.fields[field];
    return casts(Element::kF64, f.element) && f.nbytes == static_cast<uint64_t>(item_size(f.element));
  }
};

}  // namespace torchreplay
