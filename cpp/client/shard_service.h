// What a shard answers the learners of other nodes, each over a connection of its own.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/learner.h"
#include "client/segment_stats.h"
#include "client/shard_messages.h"
#include "draw/union_draw.h"
#include "system/clock.h"
#include "wire/link.h"

namespace torchreplay {

// A connection, of whose descriptor the caller takes care. Throws LinkEnded where it has ended.
class ServedSocket {
 public:
  explicit ServedSocket(int socket) : socket_(socket) {}

  // Fills memory with what comes next. Answers that wait leave before it waits itself, or once they are many.
  void receive(void* to, size_t bytes) {
    auto* at = static_cast<char*>(to);
    if (waiting_.size() >= kMostWaiting) send();
    while (bytes) {
      const ssize_t got = recv(socket_, at, bytes, waiting_.empty() ? 0 : MSG_DONTWAIT);
      if (got == 0) throw LinkEnded("the connection has ended");
      if (got > 0) {
        at += got;
        bytes -= static_cast<size_t>(got);
      } else if ((errno == EAGAIN || errno == EWOULDBLOCK) && !waiting_.empty()) {
        send();
      } else if (errno != EINTR) {
        throw LinkEnded("the connection has ended");
      }
    }
  }

  // What is sent before anything else, at the latest by receive().
  std::string& waiting() { return waiting_; }

  // Sends what waits, and a body.
  void send(const char* body = nullptr, size_t bytes = 0) {
    std::array<iovec, 2> parts{iovec{waiting_.data(), waiting_.size()}, iovec{const_cast<char*>(body), bytes}};
    while (parts[0].iov_len || parts[1].iov_len) {
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = parts.size();
      const ssize_t sent = sendmsg(socket_, &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) throw LinkEnded("the connection has ended");
      auto left = static_cast<size_t>(sent);
      for (iovec& part : parts) {
        const size_t gone = std::min(left, part.iov_len);
        part = {static_cast<char*>(part.iov_base) + gone, part.iov_len - gone};
        left -= gone;
      }
    }
    waiting_.clear();
  }

 private:
  static constexpr size_t kMostWaiting = 1 << 16;  // bytes

  int socket_;
  std::string waiting_;
};

// A request that somebody else answers: a draw of so many items, or what is fed back.
struct ShardCall {
  uint32_t items = 0;
  double largest = 0;  // raw priority that was seen in any shard
  bool is_feedback = false;
  Feedback feedback = {};
};

// Guarded by the caller's lock, which it lets go of while it waits, sends, receives and copies.
class ShardService {
 public:
  // `item_bytes`: of the tensors of a batch in their order, without key, weight and probability; none: nothing is drawn
  // here. `number`: of the shard. `largest_batch`: the most items that may be asked for.
  ShardService(std::shared_ptr<Learner> learner, const std::vector<uint64_t>& item_bytes, int64_t number,
               int64_t largest_batch)
      : learner_(std::move(learner)), number_(number), largest_batch_(largest_batch) {
    if (item_bytes.empty()) return;
    outputs_.reserve(item_bytes.size() + 3);
    for (const uint64_t bytes : item_bytes) outputs_.push_back({nullptr, bytes});
    for (const uint64_t bytes : {8, 4, 4}) outputs_.push_back({nullptr, bytes});
  }

  // Of the shard, from the next draw on.
  void renumber(int64_t number) { number_ = number; }

  // Answers the requests of one learner, in their order. Returns one that it has not answered: it cannot, or has
  // failed. Throws LinkEnded. `threads`: of a draw of so many items.
  template <class Threads>
  ShardCall serve(int socket, const Threads& threads) {
    ServedSocket connection(socket);
    for (;;) {
      ShardCall call = next_call(connection);
      bool is_answered = false;
      try {
        is_answered = call.is_feedback ? feed_back(connection, call) : draw(connection, call, threads);
      } catch (const LinkEnded&) {
        throw;
      } catch (...) {  // whoever does it again says what is wrong
      }
      if (is_answered) continue;
      const Unlocked others;
      connection.send();
      return call;
    }
  }

 private:
  ShardCall next_call(ServedSocket& connection) const {
    const Unlocked others;
    ShardRequest request(0, 0);
    connection.receive(&request, sizeof request);
    if (std::memcmp(request.mark, kMark, sizeof kMark) != 0 || request.items > largest_batch_)
      throw LinkEnded("something else than a request has come");
    ShardCall call{request.items, request.largest, std::isnan(request.largest)};
    if (!call.is_feedback) return call;
    call.feedback.keys.resize(call.items);
    call.feedback.td.resize(call.items);
    connection.receive(call.feedback.keys.data(), call.feedback.keys.size() * sizeof(int64_t));
    connection.receive(call.feedback.td.data(), call.feedback.td.size() * sizeof(double));
    return call;
  }

  bool feed_back(ServedSocket& connection, const ShardCall& call) {
    const auto is_finite = [](double td) { return std::isfinite(td); };
    if (!learner_ || !std::ranges::all_of(call.feedback.td, is_finite)) return false;
    Feedback given = call.feedback;
    reserve_head(connection);
    if (learner_->update(learner_->require_open(), given)) return false;
    begin(connection, 0);
    connection.waiting().resize(connection.waiting().size() + ShardHead::bytes());
    return true;
  }

  template <class Threads>
  bool draw(ServedSocket& connection, const ShardCall& call, const Threads& threads) {
    const bool is_sound = call.largest >= 0 && call.largest <= double{std::numeric_limits<float>::max()};
    if (outputs_.empty() || !call.items || !is_sound) return false;
    const Body block(UnionDraw::block_bytes(outputs_, call.items));
    reserve_head(connection);
    if (!draw_into(block, connection, call, threads(call.items))) return false;
    const Unlocked others;
    connection.send(block.data(), block.bytes());
    return true;
  }

  // And has the head wait. Nothing keeps the memory of the shard while the answer is sent.
  bool draw_into(const Body& block, ServedSocket& connection, const ShardCall& call, int threads) {
    const std::shared_ptr<Attachment> attachment = learner_->require_open();
    attachment->raise_largest(static_cast<float>(call.largest));
    const auto n = static_cast<int64_t>(call.items);
    const BatchPointers place = placed(block, n);
    const int64_t number = number_;
    const DrawResult drawn = learner_->draw(static_cast<int>(n), 0.0, {.until_stopped = true}, place, threads);
    if (drawn.outcome != Draw::kDone) return false;
    for (int64_t i = 0; i < n; i++) place.keys[i] += number << kShardKeyBits;
    const double moment = static_cast<double>(monotonic_ns()) * 1e-9;
    const SegmentStats stats = SegmentStats::of(*attachment);
    begin(connection, block.bytes());
    const DrawnFrom& from = drawn.from;
    ShardHead::write(connection.waiting(), {from.total, from.drawable, from.smallest, from.beta, n}, stats, moment);
    return true;
  }

  // Nothing fails any more that is answered from here on.
  static void reserve_head(ServedSocket& connection) {
    connection.waiting().reserve(connection.waiting().size() + sizeof(AnswerStart) + ShardHead::bytes());
  }

  static void begin(ServedSocket& connection, uint64_t body_bytes) {
    AnswerStart start{{}, 0, body_bytes};
    std::memcpy(start.mark, kMark, sizeof kMark);
    connection.waiting().append(reinterpret_cast<const char*>(&start), sizeof start);
  }

  BatchPointers placed(const Body& block, int64_t n) const {
    std::vector<UnionDraw::Output> outputs = outputs_;
    UnionDraw::place(outputs, block.data(), n);
    const size_t fields = outputs.size() - 3;
    BatchPointers place;
    place.values.reserve(fields);
    for (size_t o = 0; o < outputs.size(); o++) {
      place.bytes += outputs[o].item_bytes * static_cast<uint64_t>(n);
      if (o < fields) place.values.push_back(outputs[o].data);
    }
    place.keys = reinterpret_cast<int64_t*>(outputs[fields].data);
    place.weight = reinterpret_cast<float*>(outputs[fields + 1].data);
    place.probability = reinterpret_cast<float*>(outputs[fields + 2].data);
    return place;
  }

  std::shared_ptr<Learner> learner_;
  int64_t number_, largest_batch_;
  std::vector<UnionDraw::Output> outputs_;
};

}  // namespace torchreplay
