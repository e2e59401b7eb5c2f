// Drawing a batch: targets and descent under the mutex, copies without it, and a redraw of every row that changed
// meanwhile.
#pragma once

#include <vector>

#include "session.h"
#include "strata.h"

namespace torchreplay {

// Where a batch goes: `values[f]` receives n values of field f, one after the other.
struct BatchPointers {
  std::vector<char*> values;
  int64_t* keys = nullptr;
  float* weight = nullptr;
  float* probability = nullptr;
};

// Names a draw: the same (seed, stream, step) and the same contents of the buffer give the same batch.
struct DrawName {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint64_t step = 0;
};

enum class Draw { kDone, kWait, kStopped, kLapped };

// What a waiting learner has to know.
struct Shortage {
  uint64_t inserted = 0, needed = 0, drawable = 0;
};

class BatchSampler {
 public:
  explicit BatchSampler(SegmentMemory& m) : memory_(m) {}

  // Slots that the last draw found unsettled: their writers lag, or are dead.
  uint64_t pending() const { return pending_; }

  // Draws `n` items, stratified and with replacement. O(n (log capacity + bytes of an item)).
  Draw sample(int n, double beta, const DrawName& name, const BatchPointers& out, Shortage& shortage) {
    items_.resize(n);
    todo_.resize(n);
    for (int i = 0; i < n; i++) todo_[i] = i;
    for (uint32_t round = 0; round < kRounds; round++) {
      const Draw outcome = draw(n, name, round, shortage);
      if (outcome != Draw::kDone) return outcome;
      gather(out);
      if (todo_.empty()) {
        weigh(n, beta, out);
        return Draw::kDone;
      }
      memory_.header().redraws.fetch_add(todo_.size(), std::memory_order_relaxed);
    }
    const Locked lock(memory_);
    memory_.header().sampled -= static_cast<uint64_t>(n);
    return Draw::kLapped;
  }

 private:
  // After so many redraws of one batch the ring turns faster than a batch is copied.
  static constexpr uint32_t kRounds = 64;

  struct Item {
    uint64_t slot, key1;  // what was drawn: the row must still be this one
    uint64_t mass, total, min_mass;
    int64_t drawable;
  };

  // Draws the items of todo_. Round 0 is the draw itself; later rounds redraw in the same strata.
  Draw draw(int n, const DrawName& name, uint32_t round, Shortage& shortage) {
    const int count = static_cast<int>(todo_.size());
    random_.resize(count);
    philox_fill(name.seed, name.stream | uint64_t{round} << 32, name.step, random_.data(), count);
    Header& h = memory_.header();
    Locked lock(memory_);
    if (h.stopped.load(std::memory_order_relaxed)) {
      if (round) h.sampled -= static_cast<uint64_t>(n);  // the draw that was counted did not happen
      return Draw::kStopped;
    }
    if (round) resync_failed();
    // A redraw absorbs too: a learner that slept while the ring turned would find one stale leaf after the other.
    lock.absorb();
    pending_ = h.pending;
    const PriorityTree tree = memory_.tree();
    Limiter limiter(h);
    const bool admitted = round || limiter.can_sample(n);
    if (!admitted || tree.total() == 0) {
      shortage = {h.inserted, limiter.needed(n), static_cast<uint64_t>(tree.count())};
      if (round) h.sampled -= static_cast<uint64_t>(n);  // the draw that was counted did not happen
      limiter.demand(n);
      publish_limit(memory_);
      const uint64_t missing = shortage.needed > h.inserted ? shortage.needed - h.inserted : 1;
      const uint64_t wake_at = h.absorbed + missing - 1;
      if (wake_at < h.wake_at.load(std::memory_order_relaxed)) h.wake_at.store(wake_at, std::memory_order_relaxed);
      return Draw::kWait;
    }
    find(tree, n);
    if (!round) {
      h.sampled += static_cast<uint64_t>(n);
      h.draws.fetch_add(1, std::memory_order_relaxed);
      h.demand = 0;  // another learner that still waits will say so again
    }
    publish_limit(memory_);
    return Draw::kDone;
  }

  // A row that changed under a draw makes its item undrawable here, so that the redraw cannot fail on it again.
  void resync_failed() {
    const uint64_t head = memory_.header().head.load(std::memory_order_acquire);
    Absorber absorber(memory_);
    for (int i : todo_) absorber.resync(items_[i].slot, head);
  }

  void find(const PriorityTree& tree, int n) {
    const int count = static_cast<int>(todo_.size());
    const uint64_t total = tree.total();
    target_.resize(count);
    index_.resize(count);
    leaf_.resize(count);
    const Strata strata(total, static_cast<uint64_t>(n));
    for (int k = 0; k < count; k++) target_[k] = strata.target(static_cast<uint64_t>(todo_[k]), random_[k]);
    tree.find(target_.data(), count, index_.data(), leaf_.data());
    const uint64_t min_mass = tree.quantize(tree.min());
    for (int k = 0; k < count; k++) __builtin_prefetch(&memory_.at(index_[k]));
    for (int k = 0; k < count; k++) {
      const auto slot = static_cast<uint64_t>(index_[k]);
      items_[todo_[k]] = {slot, memory_.at(slot), tree.quantize(leaf_[k]), total, min_mass, tree.count()};
    }
  }

  // Copies the rows of todo_, and leaves in it those that were not, or no longer, the row that was drawn.
  void gather(const BatchPointers& out) {
    const int count = static_cast<int>(todo_.size());
    int failed = 0;
    prefetch(0, count);
    for (int first = 0; first < count; first += kBlock) {
      prefetch(first + kBlock, count);
      failed = gather_block(first, std::min(kBlock, count - first), failed, out);
    }
    todo_.resize(failed);
  }

  // Rows copied at a time: their lines arrive while the block before is copied.
  static constexpr int kBlock = 16;

  // One block of todo_. A row's word must name the row drawn before and after the copy of its fields.
  int gather_block(int first, int n, int failed, const BatchPointers& out) {
    const auto& fields = memory_.layout().fields;
    uint64_t word[kBlock];
    for (int k = 0; k < n; k++) {
      const Item& item = items_[todo_[first + k]];
      word[k] = memory_.row(item.slot).word.load(std::memory_order_acquire);
      if (!slot_word::is_row(word[k]) || slot_word::key1(word[k]) != item.key1) word[k] = 0;
    }
    for (size_t f = 0; f < fields.size(); f++) copy_field(fields[f], out.values[f], first, n);
    for (int k = 0; k < n; k++) {
      const int i = todo_[first + k];
      const bool intact = word[k] && load_after_copy(memory_.row(items_[i].slot).word) == word[k];
      out.keys[i] = static_cast<int64_t>(items_[i].key1) - 1;
      if (!intact) todo_[failed++] = i;
    }
    return failed;
  }

  void copy_field(const Field& field, char* to, int first, int n) const {
    switch (field.nbytes) {
      case 1:
        return copy_values<1>(field, to, first, n);
      case 4:
        return copy_values<4>(field, to, first, n);
      case 8:
        return copy_values<8>(field, to, first, n);
      case 16:
        return copy_values<16>(field, to, first, n);
      case 32:
        return copy_values<32>(field, to, first, n);
      default:
        return copy_values<0>(field, to, first, n);
    }
  }

  // The sizes of scalars and small vectors are known to the compiler; 0: any other.
  template <uint64_t kBytes>
  void copy_values(const Field& field, char* to, int first, int n) const {
    const uint64_t bytes = kBytes ? kBytes : field.nbytes;
    for (int k = 0; k < n; k++) {
      const int i = todo_[first + k];
      copy_payload(to + i * bytes, memory_.value(field, items_[i].slot), bytes);
    }
  }

  // Always inlined: gcc takes a function that only prefetches for one without effects, and drops calls of it.
  [[gnu::always_inline]] void prefetch(int first, int count) const {
    const uint64_t record_bytes = std::min(memory_.layout().record_stride, kPrefetchBytes);
    for (int k = first; k < std::min(first + kBlock, count); k++) {
      const uint64_t slot = items_[todo_[k]].slot;
      const char* record = reinterpret_cast<const char*>(&memory_.row(slot));
      for (uint64_t line = 0; line < record_bytes; line += kLine) __builtin_prefetch(record + line);
      for (const Field& f : memory_.layout().fields)
        if (f.own_array)
          for (uint64_t line = 0; line < kPrefetchBytes; line += kLine)
            __builtin_prefetch(memory_.value(f, slot) + line);
    }
  }
  // The processor follows a longer value by itself.
  static constexpr uint64_t kPrefetchBytes = 512;

  // P(i) = p_i / sum and w_i = (N P(i))^-beta, normalised by the maximum over the buffer or the batch
  // (Schaul et al. 2016, equation 1 and section 3.4). N and sum cancel in a normalised weight.
  void weigh(int n, double beta, const BatchPointers& out) const {
    const Normalize normalize = memory_.header().sampler.normalize;
    double smallest = 1;  // probability of the batch
    for (int i = 0; i < n; i++) {
      const Item& item = items_[i];
      const double p = static_cast<double>(item.mass) / static_cast<double>(item.total);
      smallest = std::min(smallest, p);
      out.probability[i] = static_cast<float>(p);
    }
    for (int i = 0; i < n; i++) {
      const Item& item = items_[i];
      const auto mass = static_cast<double>(item.mass), total = static_cast<double>(item.total);
      const double base = normalize == Normalize::kBuffer  ? static_cast<double>(item.min_mass) / mass
                          : normalize == Normalize::kBatch ? smallest * total / mass
                                                           : total / (static_cast<double>(item.drawable) * mass);
      out.weight[i] = std::pow(static_cast<float>(base), static_cast<float>(beta));
    }
  }

  SegmentMemory& memory_;
  uint64_t pending_ = 0;
  std::vector<Item> items_;
  std::vector<int> todo_;
  std::vector<uint64_t> random_, target_;
  std::vector<int64_t> index_;
  std::vector<float> leaf_;
};

}  // namespace torchreplay
