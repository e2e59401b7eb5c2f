// The shards that are drawn from as if they were one buffer, as a learner reaches them: one here, the others over
// connections.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/learner.h"
#include "client/prefetch_stream.h"
#include "client/shard_messages.h"
#include "client/union_round.h"
#include "wire/exchange.h"

namespace torchreplay {

// Where the shard here draws to for a batch that is under way.
struct RowsHere {
  BatchPointers first;
  int n;
  std::shared_ptr<UnionRound> round;
  std::shared_ptr<void> memory;  // what keeps it

  void point(BatchPointers& out) const { out = first; }
  int items() const { return n; }
  std::shared_ptr<DrawListener> listener() const { return round; }
};

// The draws from the shard here of one iteration, in their order, by a thread. Once one of them cannot be taken, none
// of the later ones is.
class DrawsHere {
 public:
  explicit DrawsHere(const std::shared_ptr<Learner>& learner)
      : learner_(learner), attachment_(learner->require_open()), stream_(learner, 1) {}

  bool is_closed() const { return closed_; }
  void order(RowsHere rows, int threads) {
    if (closed_) throw std::logic_error("these draws have ended");
    stream_.order(0.0, std::move(rows), threads);
  }
  // Takes the oldest, in so long at most. False: it is not drawn.
  bool take(int64_t ns) {
    if (learner_->closed()) close();  // this process has let go of the shard
    if (closed_) return true;
    const auto taken = stream_.take(ns);
    if (taken.outcome == Draw::kDone) return true;
    if (taken.outcome == Draw::kWait && !taken.shortage) return false;
    close();
    return true;
  }
  void close() {
    closed_ = true;
    stream_.close();
  }

 private:
  std::shared_ptr<Learner> learner_;
  std::shared_ptr<Attachment> attachment_;  // its memory outlives the thread
  PrefetchStream<RowsHere> stream_;
  bool closed_ = false;
};

// For one thread at a time: it is guarded as all clients are.
class UnionShards {
 public:
  struct Shard {
    int64_t number;
    std::shared_ptr<Link> link;  // nullptr: it is here
    DrawnFrom tree = {};         // when it was drawn from last
    uint64_t rows_written = 0;
    std::string head = {};  // of its last answer; "" once it was asked for
  };

  // TD errors on their way to a shard; without a reply they are applied.
  struct Sent {
    int64_t number;
    size_t count;
    std::shared_ptr<Reply> reply;
  };

  // `here`: of the shard without a link, where there is one. `largest`: the largest raw priority seen so far.
  UnionShards(std::shared_ptr<Exchange> exchange, std::vector<Shard> shards, std::shared_ptr<Learner> here,
              double largest)
      : exchange_(std::move(exchange)), shards_(std::move(shards)), here_(std::move(here)), largest_(largest) {}

  const std::shared_ptr<Exchange>& exchange() const { return exchange_; }
  const std::vector<Shard>& shards() const { return shards_; }
  bool has_learner() const { return here_ != nullptr; }
  double largest() const { return largest_; }

  // Knows of these shards what others knew.
  void take_over(const UnionShards& others) {
    for (Shard& shard : shards_)
      for (const Shard& other : others.shards_)
        if (other.number == shard.number) shard.tree = other.tree, shard.rows_written = other.rows_written;
    largest_ = std::max(largest_, others.largest_);
  }

  // Whether all connections are there.
  bool is_whole() const {
    return std::ranges::all_of(
        shards_, [&](const Shard& shard) { return !shard.link || exchange_->broken(shard.link).empty(); });
  }

  // Items that can be drawn, as far as is known.
  int64_t drawable() const {
    int64_t count = 0;
    for (const Shard& shard : shards_) count += shard.tree.drawable;
    return count;
  }

  // How many candidates each shard is asked for, for a batch of `n`: what its share may have grown to, by `slack`.
  std::vector<int64_t> asked(int64_t n, double slack) const {
    std::vector<double> totals;
    totals.reserve(shards_.size());
    for (const Shard& shard : shards_) totals.push_back(shard.tree.total);
    return UnionDraw::asked(totals, n, slack);
  }

  // Asks all shards for candidates at once. `first`: where those of the shard here go, the first rows of the batch, in
  // their turn of `draws`, where that is given. `memory` keeps the batch. Returns whether `draws` has an order more.
  bool order(const std::shared_ptr<UnionRound>& round, const std::vector<int64_t>& counts, const BatchPointers& first,
             int threads, DrawsHere* draws, std::shared_ptr<void> memory) {
    std::vector<std::shared_ptr<Reply>> replies(shards_.size());
    std::vector<Exchange::Request> requests;
    for (size_t i = 0; i < shards_.size(); i++) {
      if (!shards_[i].link) continue;
      replies[i] = std::make_shared<Reply>(round->block_bytes(counts[i]), round);
      requests.push_back(
          {shards_[i].link, ShardRequest(static_cast<uint32_t>(counts[i]), largest_).bytes(), replies[i]});
    }
    {
      const Unlocked others;
      exchange_->ask(std::move(requests));
    }
    std::optional<Candidates> drawn_here;
    bool ordered = false;
    for (size_t i = 0; i < shards_.size(); i++) {
      if (shards_[i].link) continue;
      raise_largest_here();
      if (draws && shards_[i].tree.drawable) {  // a thread would wait for the first item
        round->await_draw(shards_[i].number << kShardKeyBits);
        draws->order({first, static_cast<int>(counts[i]), round, std::move(memory)}, threads);
        ordered = true;
      } else {
        drawn_here = draw_here(shards_[i], counts[i], first, threads);
      }
    }
    round->expect(drawn_here, std::move(replies));
    return ordered;
  }

  // The heads of answers that were taken in since this was called last, each with its shard's number.
  std::vector<std::pair<int64_t, std::string>> said() {
    std::vector<std::pair<int64_t, std::string>> heads;
    for (Shard& shard : shards_)
      if (!shard.head.empty()) heads.emplace_back(shard.number, std::exchange(shard.head, {}));
    return heads;
  }

  // Takes in what the shards have said, once all is there. False: one has said more than that, or its answer is lost.
  bool take_in(const UnionRound& round, bool& stopped) {
    const std::vector<std::shared_ptr<Reply>> replies = round.replies();
    for (size_t i = 0; i < shards_.size() && i < replies.size(); i++) {
      Shard& shard = shards_[i];
      if (!replies[i]) {
        shard.tree = round.drawn_here();
        if (!here_->closed()) stopped |= here_->require_open()->stopped();
        continue;
      }
      if (!replies[i]->lost.empty() || !replies[i]->text.empty()) return false;
      shard.head = replies[i]->head;
      const char* const head = replies[i]->head.data();
      if (!read_drawn(head).is_sound()) return false;
      shard.tree = drawn_there(head);
      shard.rows_written = ShardHead::read<uint64_t>(head, written_at_);
      largest_ = std::max(largest_, ShardHead::read<double>(head, largest_at_));
      stopped |= ShardHead::read<int64_t>(head, stopped_at_) != 0;
    }
    return true;
  }

  // Feeds TD errors back for these keys of the union, each to its own shard. nullopt: nothing is sent, since one is not
  // known, or has no such row, or its connection is broken.
  std::optional<std::vector<Sent>> feed_back(const Feedback& feedback) {
    if (!is_whole()) return std::nullopt;
    constexpr int64_t kOwn = (int64_t{1} << kShardKeyBits) - 1;
    const size_t n = feedback.keys.size();
    std::vector<size_t> counts(shards_.size()), whose(n);
    for (size_t i = 0, at = 0; i < n; i++) {
      const int64_t key = feedback.keys[i], number = key >> kShardKeyBits;
      if (shards_[at].number != number) {
        at = 0;
        while (at < shards_.size() && shards_[at].number != number) at++;
        if (at == shards_.size()) return std::nullopt;
      }
      if (key < 0 || (shards_[at].link && static_cast<uint64_t>(key & kOwn) >= shards_[at].rows_written))
        return std::nullopt;
      whose[i] = at;
      counts[at]++;
    }
    for (size_t s = 0; s < shards_.size(); s++) {  // first: it may refuse a key
      if (shards_[s].link || !counts[s]) continue;
      Feedback here;
      here.keys.reserve(counts[s]);
      here.td.reserve(counts[s]);
      for (size_t i = 0; i < n; i++)
        if (whose[i] == s) here.keys.push_back(feedback.keys[i] & kOwn), here.td.push_back(feedback.td[i]);
      if (!apply_here(here)) return std::nullopt;
    }
    std::vector<Sent> sent;
    std::vector<Exchange::Request> requests;
    sent.reserve(shards_.size());
    requests.reserve(shards_.size());
    for (size_t s = 0; s < shards_.size(); s++) {
      if (!counts[s] || !shards_[s].link) continue;
      const auto count = static_cast<uint32_t>(counts[s]);
      std::string request = ShardRequest(count, std::numeric_limits<double>::quiet_NaN()).bytes();
      const size_t head = request.size();
      request.resize(head + 16 * counts[s]);
      char* key = request.data() + head;
      char* td = key + 8 * counts[s];
      for (size_t i = 0; i < n; i++) {
        if (whose[i] != s) continue;
        const int64_t own = feedback.keys[i] & kOwn;
        std::memcpy(std::exchange(key, key + 8), &own, 8);
        std::memcpy(std::exchange(td, td + 8), &feedback.td[i], 8);
      }
      sent.push_back({shards_[s].number, counts[s], std::make_shared<Reply>(0)});
      requests.push_back({shards_[s].link, std::move(request), sent.back().reply});
    }
    const Unlocked others;
    exchange_->ask(std::move(requests));
    return sent;
  }

 private:
  // Its new rows without a priority count as the largest that any shard has seen.
  void raise_largest_here() {
    Attachment& attachment = *here_->require_open();
    const Header& header = attachment.memory().header();
    if (!header.sampler.prioritized) return;
    attachment.raise_largest(static_cast<float>(largest_));
    largest_ = std::max(largest_, static_cast<double>(header.largest_raw()));
  }

  Candidates draw_here(Shard& shard, int64_t n, const BatchPointers& first, int threads) {
    const DrawResult drawn = here_->draw(static_cast<int>(n), 0.0, {}, first, threads);
    // Without an item it has no part in the batch; else none can be made of this.
    if (drawn.outcome != Draw::kDone) return {{drawn.shortage.drawable ? 1.0 : 0.0, 0, 0, 0}, 0, nullptr, 0};
    return {drawn.from, n, nullptr, shard.number << kShardKeyBits};
  }

  bool apply_here(Feedback& feedback) {
    const std::shared_ptr<Attachment> attachment = here_->require_open();
    return !here_->update(attachment, feedback);
  }

  const size_t written_at_ = ShardHead::place("rows_written"), largest_at_ = ShardHead::place("priority_max"),
               stopped_at_ = ShardHead::place("stopped");
  std::shared_ptr<Exchange> exchange_;
  std::vector<Shard> shards_;
  std::shared_ptr<Learner> here_;
  double largest_;
};

}  // namespace torchreplay
