// A batch of the union that is made of several shards' answers, by the thread that has read the last one.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "draw/union_draw.h"
#include "wire/reply.h"

namespace torchreplay {

// With what the head of an answer to a draw begins, behind the start of each answer.
struct DrawnThere {
  double total;
  int64_t drawable;
  double smallest, beta;
  int64_t given;
};

class UnionRound : public Awaiting {
 public:
  explicit UnionRound(UnionDraw draw) : draw_(std::move(draw)) {}

  // The batch's memory, which stays until abandon(). Called first.
  void set_batch(std::vector<UnionDraw::Output> batch) { batch_ = std::move(batch); }
  // Bytes of the body of an answer with so many items.
  uint64_t block_bytes(int64_t n) const { return UnionDraw::block_bytes(batch_, n); }

  // Called once, with what was drawn here, if anything was, and all replies that bring the rest.
  void expect(std::optional<Candidates> here, std::vector<std::shared_ptr<Reply>> replies) {
    {
      const std::lock_guard guard(mutex_);
      here_ = here;
      replies_ = std::move(replies);
    }
    one_is_there();
  }

  // Nothing is written to the batch from now on.
  void abandon() {
    const std::lock_guard guard(mutex_);
    abandoned_ = true;
    replies_.clear();
  }

  // Whether the batch is made. Otherwise an answer is lost, or says more, or has too few items, or there are none.
  bool is_made() {
    const std::lock_guard guard(mutex_);
    return made_;
  }

  // Makes it of other candidates, which have come since, of which some can be drawn. False: they do not suffice.
  bool make(const std::vector<Candidates>& parts) {
    const std::lock_guard guard(mutex_);
    made_ = draw_.suffices(parts);
    if (made_) draw_.make(parts, batch_);
    return made_;
  }

  const DrawnFrom& drawn_from() const { return draw_.drawn_from(); }

 private:
  void all_are_there() noexcept override {
    const std::lock_guard guard(mutex_);
    if (abandoned_) return;
    try {
      std::vector<Candidates> parts;
      if (here_) add(parts, *here_);
      for (const auto& reply : replies_) {
        if (!reply->lost.empty() || !reply->text.empty()) return;
        DrawnThere there;
        std::memcpy(&there, reply->head.data(), sizeof there);
        if (there.given < 0 || reply->body.bytes() != (there.given ? block_bytes(there.given) : 0)) return;
        add(parts, {{there.total, there.smallest, there.drawable, 0}, there.given, reply->body.data()});
      }
      if (parts.empty() || !draw_.suffices(parts)) return;
      draw_.make(parts, batch_);
      made_ = true;
    } catch (...) {  // there is no memory: whoever makes it says so
    }
    replies_.clear();
  }

  static void add(std::vector<Candidates>& parts, const Candidates& part) {
    if (part.tree.total > 0) parts.push_back(part);
  }

  std::mutex mutex_;  // guards what follows
  UnionDraw draw_;
  std::vector<UnionDraw::Output> batch_;
  std::optional<Candidates> here_;
  std::vector<std::shared_ptr<Reply>> replies_;
  bool abandoned_ = false, made_ = false;
};

}  // namespace torchreplay
