// The probabilities of a batch's items, and their weights.
#pragma once

#include <algorithm>
#include <span>

#include "draw/row_gather.h"
#include "system/power.h"

namespace torchreplay {

// P(i) = p_i / sum and w_i = (N P(i))^-beta, normalised by the maximum over the buffer or the batch
// (Schaul et al. 2016, equation 1 and section 3.4). N and sum cancel in a normalised weight.
inline void weigh(std::span<const DrawnItem> items, Normalize normalize, double beta, const BatchPointers& out) {
  double smallest = 1;  // probability of the batch
  for (size_t i = 0; i < items.size(); i++) {
    const double p = static_cast<double>(items[i].mass) / static_cast<double>(items[i].total);
    smallest = std::min(smallest, p);
    out.probability[i] = static_cast<float>(p);
  }
  for (size_t i = 0; i < items.size(); i++) {
    const DrawnItem& item = items[i];
    const auto mass = static_cast<double>(item.mass), total = static_cast<double>(item.total);
    const double base = normalize == Normalize::kBuffer  ? static_cast<double>(item.min_mass) / mass
                        : normalize == Normalize::kBatch ? smallest * total / mass
                                                         : total / (static_cast<double>(item.drawable) * mass);
    out.weight[i] = static_cast<float>(base);
  }
  power(out.weight, static_cast<int>(items.size()), static_cast<float>(beta));
}

}  // namespace torchreplay
