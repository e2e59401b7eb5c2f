// Who must wait: the arithmetic of the samples-per-insert limiter.
#pragma once

#include <algorithm>
#include <cmath>

#include "segment/header.h"

namespace torchreplay {

// What a limiter asks for, by counts that are kept anywhere: semantics of Reverb's RateLimiter, from the moment at
// which it was set. `sampled`: draws since then, over all learners.
class LimiterRule {
 public:
  explicit LimiterRule(const LimiterConfig& config) : config_(config) {}

  // Items that must have become drawable in all before `n` more may be drawn.
  uint64_t needed(double sampled, uint64_t n) const {
    uint64_t items = config_.cleared + std::max<uint64_t>(config_.min_size, 1);
    if (config_.ratio > 0) {
      const double draws = config_.min_diff + sampled + static_cast<double>(n);
      if (draws > 0) items = std::max(items, config_.inserted_before + whole(std::ceil(draws / config_.ratio)));
    }
    return items;
  }

  // Items up to which inserts are admitted under a ratio. Those that a waiting learner demands are in any case, or both
  // could wait for ever.
  uint64_t admitted(double sampled, uint64_t demanded) const {
    const double allowed = std::floor((config_.max_diff + sampled) / config_.ratio);
    return std::max({config_.cleared + config_.min_size, demanded, config_.inserted_before + whole(allowed)});
  }

  // Of `inserted` items those that it does not count if it is set now. It counts as if the buffer had just been filled
  // with its rows: `min_size` items, and none of those before the last clear().
  uint64_t start(uint64_t inserted) const {
    return inserted - std::min(inserted - std::min(inserted, config_.cleared), config_.min_size);
  }

 private:
  // A ratio may be tiny: what does not fit is as good as unlimited.
  static uint64_t whole(double n) { return n > 0 ? static_cast<uint64_t>(std::min(n, 0x1p62)) : 0; }

  const LimiterConfig& config_;
};

// A segment's limiter, counted over all its learners and explorers. Used under the segment's mutex.
class Limiter {
 public:
  explicit Limiter(Header& h) : header_(h), config_(h.limiter()), rule_(config_) {}

  // Items that must have become drawable in all before `n` more may be drawn.
  uint64_t needed(uint64_t n) const { return rule_.needed(sampled(), n); }

  bool can_sample(uint64_t n) const { return header_.inserted >= needed(n); }

  // Publishes the ticket up to which appends are admitted, given that `drawable` items can be drawn: with none, only an
  // insert can help. Tickets below `head` are counted in `inserted`, or lost, or under way. The latter two look alike,
  // so rows under way give room to as many others: no more than one call's rows for each writer. Held back, they would
  // let one that is stopped, or lost tickets, keep everybody waiting. Rows that the ring overwrites before a look are
  // never counted. So no writer goes on for more than `unseen` tickets before somebody has looked, if need be the
  // writer itself.
  void publish(uint64_t head, uint64_t unseen, int64_t drawable) {
    uint64_t limit = kMaxKeys;
    if (config_.ratio > 0) {
      uint64_t target = rule_.admitted(sampled(), header_.demand);
      if (drawable == 0) target = std::max(target, header_.inserted + 1);
      limit = std::min(limit, head + std::min(unseen, target > header_.inserted ? target - header_.inserted : 0));
    }
    header_.ticket_limit.store(limit, std::memory_order_relaxed);
  }

  // A learner waits for `n` items: insertion up to its need is admitted, also beyond the ratio.
  void demand(uint64_t n) { header_.demand = std::max(header_.demand, needed(n)); }

  // The same of a learner that waits elsewhere, for writers that wait here: `n` items more than there are.
  void admit(uint64_t n) { header_.demand = std::max(header_.demand, header_.inserted + n); }

 private:
  // Draws since it was set. One that was counted before may be taken back later: hence signed.
  double sampled() const { return static_cast<double>(static_cast<int64_t>(header_.sampled - config_.sampled_before)); }

  Header& header_;
  const LimiterConfig& config_;
  const LimiterRule rule_;
};

// Of an admission: items up to which are admitted, when the learner has come so many versions further.
inline uint64_t admission_limit(const LimiterConfig& config, int64_t versions) {
  uint64_t batches, items;
  const bool fits =
      !__builtin_add_overflow(config.max_age + 1, static_cast<uint64_t>(std::max<int64_t>(0, versions)), &batches) &&
      !__builtin_mul_overflow(batches, config.batch_size, &items);
  return fits ? std::min(items, kMaxCount) : kMaxCount;
}

// Sets another limiter. It counts from here, and no draw before does. A death in between leaves the old one or the new
// one.
inline void change_limiter(Header& h, LimiterConfig config) {
  config.inserted_before = LimiterRule(config).start(h.inserted);
  config.sampled_before = h.sampled;
  const uint32_t next = 1 - (h.limiter_index & 1);
  h.limiters[next] = config;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  h.limiter_index = next;
  h.demand = 0;  // a writer that still waits says so again
}

// All rows are gone but those of `left` items, which came meanwhile: the limiter counts as that of a new buffer does
// that has these.
inline void restart_limiter(Header& h, uint64_t left) {
  LimiterConfig config = h.limiter();
  config.cleared = h.inserted - std::min(h.inserted, left);
  change_limiter(h, config);
}

}  // namespace torchreplay
