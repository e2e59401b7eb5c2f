// A batch of the union that is made of several shards' answers, by the thread that has read the last one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "client/shard_messages.h"
#include "draw/union_draw.h"
#include "prefetch/prefetch_queue.h"
#include "wire/reply.h"
#include "write/participants.h"

namespace torchreplay {

class UnionRound : public Awaiting, public DrawListener {
 public:
  explicit UnionRound(UnionDraw draw) : draw_(std::move(draw)) {}

  // False in a forked child: a thread that it has not got may have been at it. Nothing else may be called there, not
  // even the destructor.
  bool here() const { return generation_ == fork_generation.load(std::memory_order_relaxed); }

  // The batch's memory, which stays until abandon(). Without memory the batch is the body of the only answer. Called
  // first.
  void set_batch(std::vector<UnionDraw::Output> batch) {
    is_body_ = !batch.empty() && !batch.front().data;
    batch_ = std::move(batch);
  }
  // Bytes of the body of an answer with so many items.
  uint64_t block_bytes(int64_t n) const { return UnionDraw::block_bytes(batch_, n); }

  // What is drawn here, into the first rows, comes later, by drawn(). Its keys lack `add_to_keys`.
  void await_draw(int64_t add_to_keys) {
    await_one();
    add_to_keys_ = add_to_keys;
  }
  void drawn(int n, const DrawnFrom& from) noexcept override {
    {
      const std::lock_guard guard(mutex_);
      here_ = Candidates{from, n, nullptr, add_to_keys_};
    }
    one_is_there();
  }

  // Called once, with what was drawn here, if anything was, and all replies that bring the rest; nullptr for none.
  void expect(std::optional<Candidates> here, std::vector<std::shared_ptr<Reply>> replies) {
    {
      const std::lock_guard guard(mutex_);
      if (here) here_ = here;
      if (!abandoned_) replies_ = std::move(replies);  // or they would keep each other: a reply has whom it is told
    }
    one_is_there();
  }

  // Nothing is written to the batch from now on.
  void abandon() {
    const std::lock_guard guard(mutex_);
    abandoned_ = true;
    replies_.clear();
  }

  // What was expected; nothing once it is abandoned, which another thread may do meanwhile.
  std::vector<std::shared_ptr<Reply>> replies() const {
    const std::lock_guard guard(mutex_);
    return replies_;
  }
  DrawnFrom drawn_here() const {
    const std::lock_guard guard(mutex_);
    return here_ ? here_->tree : DrawnFrom{};
  }

  // Whether all is there that it waits for. It waits so long at most.
  bool is_done(int64_t ns = 0) {
    std::unique_lock lock(mutex_);
    return done_ || (ns > 0 && news_.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return done_; }));
  }

  // Whether the batch is made. Otherwise an answer is lost, or says more, or has too few items, or there are none, or
  // it was abandoned.
  bool is_made() {
    const std::lock_guard guard(mutex_);
    return made_ && !abandoned_;
  }

  // Lets go of the body that is the batch. Nothing: it was taken, or is none.
  Body take_body() {
    const std::lock_guard guard(mutex_);
    if (!is_body_ || !made_ || abandoned_) return {};
    return std::move(replies_[0]->body);
  }

  // Makes it of other candidates, which have come since, of which some can be drawn. False: they do not suffice.
  bool make(const std::vector<Candidates>& parts) {
    const std::lock_guard guard(mutex_);
    require_memory();
    made_ = draw_.suffices(parts);
    if (made_) draw_.make(parts, batch_);
    return made_;
  }

  // Makes it of all items that were found, which are so many.
  void take_all(const std::vector<Candidates>& parts) {
    const std::lock_guard guard(mutex_);
    require_memory();
    draw_.take_all(parts, batch_);
  }

  // How it is made, once it is.
  const UnionDraw& draw() const { return draw_; }

 private:
  void all_are_there() noexcept override {
    const std::lock_guard guard(mutex_);
    if (!abandoned_) make_of_replies();
    done_ = true;
    news_.notify_all();
  }

  // The mutex is held.
  void make_of_replies() noexcept {
    try {
      std::vector<Candidates> parts;
      if (here_) add(parts, *here_);
      for (const auto& reply : replies_) {
        if (!reply) continue;
        if (!reply->lost.empty() || !reply->text.empty()) return;
        const DrawnThere there = read_drawn(reply->head.data());
        const int64_t given = there.given;
        if (!there.is_sound() || reply->body.bytes() != (given ? block_bytes(given) : 0)) return;
        add(parts, {drawn_there(reply->head.data()), given, reply->body.data()});
      }
      if (parts.empty() || !draw_.suffices(parts)) return;
      if (is_body_) {
        if (replies_.size() != 1 || parts[0].given != draw_.items()) return;
        UnionDraw::place(batch_, replies_[0]->body.data(), draw_.items());
        parts[0].block = nullptr;  // they are where they belong
      }
      draw_.make(parts, batch_);
      made_ = true;
      if (is_body_) return;
      for (const auto& reply : replies_)
        if (reply) reply->body = {};
    } catch (...) {  // there is no memory: whoever makes it says so
    }
  }

  void require_memory() const {
    if (is_body_) throw std::logic_error("the batch has no memory of its own");
  }

  static void add(std::vector<Candidates>& parts, const Candidates& part) {
    if (part.tree.total > 0) parts.push_back(part);
  }

  const uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  mutable std::mutex mutex_;  // guards what follows
  UnionDraw draw_;
  std::vector<UnionDraw::Output> batch_;
  bool is_body_ = false;  // the batch is the body of the only answer
  std::optional<Candidates> here_;
  std::vector<std::shared_ptr<Reply>> replies_;
  int64_t add_to_keys_ = 0;
  bool abandoned_ = false, made_ = false, done_ = false;
  std::condition_variable news_;
};

}  // namespace torchreplay
