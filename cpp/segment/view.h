// How rows become items, as far as it decides which items can be drawn. Part of the segment format.
#pragma once

#include <cstdint>
#include <limits>

namespace torchreplay {

// An item starts at its anchor and has `span` steps more, or fewer when the episode ends before. With a span of 0 every
// row is an item by itself, and rows are not linked.
struct View {
  // Items that are complete when the episode has ended, and not before.
  static constexpr uint32_t kWholeEpisode = std::numeric_limits<uint32_t>::max();

  uint32_t span = 0;
  uint32_t min_steps = 1;  // that an item cut short by the episode's end must have
  uint32_t stride = 1;     // anchors are the rows at multiples of it, counted from the episode's start
  uint32_t history = 0;    // frames that an item needs before its anchor, as far as the episode has them
  uint32_t across = 0;     // items run on into the stream's next episode, and every row may be an anchor
  // Steps whose largest given priority an item gets at first; 0: that of the row which completes it.
  uint32_t priority_steps = 0;
  uint32_t claimed = 0;   // 1: it is known of each item who holds it, or how often it was drawn
  uint32_t version1 = 0;  // the field that says by which policy a row came about, plus one; 0: none does

  bool linked() const { return span > 0; }

  // The step that follows in the same episode. It is kept in 32 bits. An episode that goes on for ever comes back to
  // the middle of them. It then has as many steps before it as any item looks back, and the same anchors. Strides are
  // below 2^31.
  uint32_t step_after(uint32_t step) const {
    constexpr uint32_t kMiddle = uint32_t{1} << 31;
    return step == std::numeric_limits<uint32_t>::max() ? kMiddle + kMiddle % stride : step + 1;
  }
  bool operator==(const View&) const = default;
};

}  // namespace torchreplay
