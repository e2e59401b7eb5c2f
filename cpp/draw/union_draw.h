// Drawing from several buffers as if they were one: how many items come from each, which ones, and their weights.
// `docs/sharding_in_depth.md` derives the formulas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "draw/batch_sampler.h"
#include "system/philox.h"
#include "system/power.h"

namespace torchreplay {

// By what the weights of a union are divided: nothing, as they are all 1; or the largest one of the buffer, that of the
// batch, or nothing.
enum class UnionWeights { kEqual, kBuffer, kBatch, kNone };

// What one buffer has drawn for a batch of the union.
struct Candidates {
  DrawnFrom tree;  // as the draw found it
  int64_t given = 0;
  // The tensors of these items, one after the other as in the batch, each at a multiple of UnionDraw::kAlignment.
  // nullptr: they are the first rows of the batch itself.
  const char* block = nullptr;
  int64_t add_to_keys = 0;
};

class UnionDraw {
 public:
  static constexpr uint64_t kAlignment = 256;  // bytes, as in torchreplay/schema/tensor_info.py

  // One tensor of the batch. The last three are key, weight and probability.
  struct Output {
    char* data;
    uint64_t item_bytes;
  };

  // `seed`, `stream` and `step` name the random numbers.
  UnionDraw(int64_t n, double beta, UnionWeights weights, uint64_t seed, uint64_t stream, uint64_t step)
      : n_(n), beta_(beta), weights_(weights), seed_(seed ^ kOwn), stream_(stream), step_(step) {}

  int64_t items() const { return n_; }
  const DrawnFrom& drawn_from() const { return drawn_from_; }

  // Bytes of a block of `n` items.
  static uint64_t block_bytes(std::span<const Output> batch, int64_t n) {
    uint64_t bytes = 0;
    for (const Output& output : batch) bytes += aligned(output.item_bytes * static_cast<uint64_t>(n));
    return bytes;
  }

  // The tensors of a batch of `n` lie in a block.
  static void place(std::span<Output> batch, char* block, int64_t n) {
    for (Output& output : batch) {
      output.data = block;
      block += block_bytes({&output, 1}, n);
    }
  }

  // How many candidates to ask of each part for a batch of `n`, given what their totals were last: what its share may
  // have grown to since, by `slack`. Where nothing is known it is enough to learn the total.
  static std::vector<int64_t> asked(std::span<const double> totals, int64_t n, double slack) {
    const double whole = sum(totals);
    std::vector<int64_t> counts(totals.size(), n);
    if (totals.size() == 1 || whole <= 0) return counts;
    for (size_t i = 0; i < totals.size(); i++)
      counts[i] = std::min(n, static_cast<int64_t>(static_cast<double>(n) * (totals[i] / whole) * (1 + slack)) + 3);
    return counts;
  }

  // How many items may come from each at most, for all random numbers. The n strata have equal parts of the total. An
  // interval as long as x of them touches at most floor(x) + 2.
  static std::vector<int64_t> most(std::span<const double> totals, int64_t n) {
    const double whole = sum(totals);
    std::vector<int64_t> counts;
    counts.reserve(totals.size());
    for (const double total : totals) {
      const double share = total > 0 ? static_cast<double>(n) * (total / whole) : 0;
      counts.push_back(total > 0 ? std::min(n, static_cast<int64_t>(share) + 2) : 0);
    }
    return counts;
  }
  bool suffices(std::span<const Candidates> parts) const {
    return std::ranges::equal(most(totals_of(parts), n_), parts, std::ranges::less_equal{}, {}, &Candidates::given);
  }

  // Makes a batch of candidates that suffice, and of which there are some: so many of each part, each set of so many
  // being equally likely. At most one part has its items in the batch itself: the first one.
  void make(std::span<const Candidates> parts, std::span<const Output> batch) {
    compose(parts, counts_of(parts), batch);
  }
  // Makes it of all of them: they are n.
  void take_all(std::span<const Candidates> parts, std::span<const Output> batch) {
    std::vector<int64_t> counts;
    counts.reserve(parts.size());
    for (const Candidates& part : parts) counts.push_back(part.given);
    compose(parts, counts, batch);
  }

  // Of each part, which candidates are in the batch: in this order, unless they were in it already.
  const std::vector<std::vector<int64_t>>& chosen() const { return chosen_; }

 private:
  // Keeps its random numbers from being those of a shard that has the same seed.
  static constexpr uint64_t kOwn = 0x756e696f6e206f66;

  static uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  static double sum(std::span<const double> totals) {
    double whole = 0;
    for (const double total : totals) whole += total;
    return whole;
  }
  static std::vector<double> totals_of(std::span<const Candidates> parts) {
    std::vector<double> totals;
    totals.reserve(parts.size());
    for (const Candidates& part : parts) totals.push_back(part.tree.total);
    return totals;
  }
  static double total_of(std::span<const Candidates> parts) { return sum(totals_of(parts)); }

  // Word number `at` of this draw's, in [0, 1).
  double chance(int64_t at) {
    if (words_.empty() || at >= static_cast<int64_t>(words_.size())) {
      const size_t need = std::max<size_t>(static_cast<size_t>(at) + 1, 2 * static_cast<size_t>(n_) + 64);
      words_.resize(std::max(need, 2 * words_.size()));
      philox_fill(seed_, stream_, step_, words_.data(), static_cast<int>(words_.size()));
    }
    return static_cast<double>(words_[static_cast<size_t>(at)] >> 11) * 0x1p-53;
  }

  // One item is drawn from each of n equal strata of [0, total), in which the parts lie one after the other (Schaul et
  // al. 2016, appendix B.2.1).
  std::vector<int64_t> counts_of(std::span<const Candidates> parts) {
    std::vector<int64_t> counts(parts.size());
    size_t last = 0;  // a target may round up to the end
    for (size_t p = 0; p < parts.size(); p++)
      if (parts[p].tree.total > 0) last = p;
    const double width = total_of(parts) / static_cast<double>(n_);
    size_t p = 0;
    double end = parts[0].tree.total;
    for (int64_t i = 0; i < n_; i++) {
      const double target = (static_cast<double>(i) + chance(i)) * width;
      while (p < last && target >= end) end += parts[++p].tree.total;
      counts[p]++;
    }
    return counts;
  }

  void compose(std::span<const Candidates> parts, const std::vector<int64_t>& counts, std::span<const Output> batch) {
    int64_t at = 0, word = n_;
    chosen_.resize(parts.size());
    for (size_t p = 0; p < parts.size(); p++) {
      std::vector<int64_t>& which = chosen_[p];
      choose(parts[p].given, counts[p], word, which);
      word += parts[p].given;
      if (parts[p].block)
        copy(parts[p], which, batch, at);
      else
        keep(which, batch);
      if (parts[p].add_to_keys) {
        auto* const keys = reinterpret_cast<int64_t*>(batch[batch.size() - 3].data);
        for (int64_t i = at; i < at + counts[p]; i++) keys[i] += parts[p].add_to_keys;
      }
      at += counts[p];
    }
    weigh(parts, counts, batch);
  }

  // Which `count` of `given` are taken, ascending, from one random number for each (selection sampling: Knuth, The Art
  // of Computer Programming, volume 2, section 3.4.2, algorithm S).
  void choose(int64_t given, int64_t count, int64_t word, std::vector<int64_t>& which) {
    which.clear();
    for (int64_t i = 0; i < given && count > 0; i++) {
      if (chance(word + i) * static_cast<double>(given - i) >= static_cast<double>(count)) continue;
      which.push_back(i);
      count--;
    }
  }

  static void copy(const Candidates& part, const std::vector<int64_t>& which, std::span<const Output> batch,
                   int64_t at) {
    const char* from = part.block;
    for (const Output& output : batch) {
      const uint64_t bytes = output.item_bytes;
      char* to = output.data + static_cast<uint64_t>(at) * bytes;
      for (size_t i = 0; i < which.size();) {
        size_t run = 1;  // neighbours go together
        while (i + run < which.size() && which[i + run] == which[i] + static_cast<int64_t>(run)) run++;
        std::memcpy(to, from + static_cast<uint64_t>(which[i]) * bytes, run * bytes);
        to += run * bytes;
        i += run;
      }
      from += aligned(bytes * static_cast<uint64_t>(part.given));
    }
  }

  // Moves chosen items to the front of the batch, in any order: the last ones fill the free places.
  static void keep(const std::vector<int64_t>& which, std::span<const Output> batch) {
    const auto count = static_cast<int64_t>(which.size());
    size_t last = which.size();
    int64_t expected = 0;
    for (size_t i = 0; expected < count; expected++) {
      if (i < last && which[i] == expected) {
        i++;
        continue;
      }
      const int64_t moved = which[--last];
      for (const Output& output : batch)
        std::memcpy(output.data + static_cast<uint64_t>(expected) * output.item_bytes,
                    output.data + static_cast<uint64_t>(moved) * output.item_bytes, output.item_bytes);
    }
  }

  // Turns items' probabilities within their parts into those of the union, and sets the weights (N P(i))^-beta (Schaul
  // et al. 2016, section 3.4), divided as `weights_` says: by the largest one possible in the union, that of its
  // smallest leaf; by the largest one of the batch; or by nothing.
  void weigh(std::span<const Candidates> parts, const std::vector<int64_t>& counts, std::span<const Output> batch) {
    const double total = total_of(parts);
    drawn_from_ = {total, std::numeric_limits<double>::infinity(), 0, beta_};
    for (const Candidates& part : parts) {
      drawn_from_.drawable += part.tree.drawable;
      if (part.tree.drawable) drawn_from_.smallest = std::min(drawn_from_.smallest, part.tree.smallest);
    }
    auto* const weight = reinterpret_cast<float*>(batch[batch.size() - 2].data);
    auto* const probability = reinterpret_cast<float*>(batch[batch.size() - 1].data);
    std::vector<double> exact(static_cast<size_t>(n_));
    double least = 1;
    size_t i = 0;
    for (size_t p = 0; p < parts.size(); p++) {
      const double share = parts[p].tree.total > 0 ? parts[p].tree.total / total : 0;
      for (int64_t k = 0; k < counts[p]; k++, i++) {
        exact[i] = static_cast<double>(probability[i]) * share;
        if (exact[i] > 0) least = std::min(least, exact[i]);
        probability[i] = static_cast<float>(exact[i]);
      }
    }
    if (weights_ == UnionWeights::kEqual) {
      std::fill_n(weight, n_, 1.0F);
      return;
    }
    if (weights_ == UnionWeights::kBuffer) least = drawn_from_.smallest / total;
    if (weights_ == UnionWeights::kNone) least = 1.0 / static_cast<double>(drawn_from_.drawable);
    for (double& p : exact) p = p > 0 ? least / p : 0;  // what was found may not be there any more
    power(exact.data(), n_, beta_, weight);
  }

  const int64_t n_;
  const double beta_;
  const UnionWeights weights_;
  const uint64_t seed_, stream_, step_;
  std::vector<uint64_t> words_;
  std::vector<std::vector<int64_t>> chosen_;
  DrawnFrom drawn_from_;
};

}  // namespace torchreplay
