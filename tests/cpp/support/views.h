// Views as users make them.
#pragma once

#include "segment/view.h"

namespace torchreplay::testing {

inline View transitions(uint32_t n, uint32_t stack = 1) { return {.span = n, .history = stack - 1}; }

inline View sequences(uint32_t length, uint32_t stride, uint32_t burn_in = 0) {
  const uint32_t steps = burn_in + length;
  return {.span = steps, .min_steps = burn_in + 1, .stride = stride, .priority_steps = steps};
}

inline View across_episodes(uint32_t length) {
  return {.span = length, .stride = length, .across = 1, .priority_steps = length};
}

inline View whole_episodes() { return {.span = View::kWholeEpisode, .priority_steps = 1}; }

}  // namespace torchreplay::testing
