// One connection: requests that wait to be sent, and answers that come, in the order of the requests.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "system/descriptor.h"
#include "wire/reply.h"

namespace torchreplay {

// Nothing more comes over a connection.
struct LinkEnded : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How each answer begins. Behind it come the rest of the head, the text and the body.
struct AnswerStart {
  char mark[4];
  uint32_t text_bytes;
  uint64_t body_bytes;
};

inline constexpr char kMark[4] = {'t', 'r', 'w', 'r'};
inline constexpr uint32_t kMostText = 1 << 20;
inline constexpr uint64_t kMostBody = uint64_t{1} << 40;  // sizes of memory near 2^64 would come round

// What says `guarded` is looked at under the exchange's mutex; the rest is of the thread that sends and receives.
class Link {
 public:
  // `socket` is a connected one, of which this has a descriptor of its own. A head has so many bytes behind its start.
  Link(int socket, size_t head_bytes) : socket_(Descriptor::duplicate(socket)), head_bytes_(head_bytes) { expect(); }

  int socket() const { return socket_.get(); }

  // Guarded.
  std::deque<std::string> requests;            // not sent yet
  std::deque<std::shared_ptr<Reply>> replies;  // of all requests that have none
  std::string broken;                          // why nothing comes through any more; "" while it does
  bool closing = false;

  // Sends what goes out now. The mutex is held, but not while it sends. Throws LinkEnded.
  void send_some(std::unique_lock<std::mutex>& lock) {
    while (!requests.empty()) {
      std::array<iovec, 16> parts;
      size_t count = 0;
      for (std::string& request : requests) {
        const size_t from = count ? 0 : sent_;
        parts[count++] = {request.data() + from, request.size() - from};
        if (count == parts.size()) break;
      }
      lock.unlock();  // others only add requests: those that are there stay where they are
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = count;
      const ssize_t sent = sendmsg(socket(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      const int error = errno;
      lock.lock();
      if (sent < 0) {
        if (error == EINTR) continue;
        if (error == EAGAIN || error == EWOULDBLOCK) return;
        throw LinkEnded(std::string("the connection has ended: ") + std::strerror(error));
      }
      sent_ += static_cast<size_t>(sent);
      while (!requests.empty() && sent_ >= requests.front().size()) {
        sent_ -= requests.front().size();
        requests.pop_front();
      }
    }
  }

  // Takes in what has come. Calls next() for the reply that it belongs to, and done() when that is whole. The mutex is
  // not held. Throws LinkEnded, std::bad_alloc, and what those throw.
  template <class Next, class Done>
  void receive_some(const Next& next, const Done& done) {
    for (;;) {
      while (left_) {
        const ssize_t got = recv(socket(), target_, left_, MSG_DONTWAIT);
        if (got == 0) throw LinkEnded("the connection has ended");
        if (got < 0) {
          if (errno == EINTR) continue;
          if (errno == EAGAIN || errno == EWOULDBLOCK) return;
          throw LinkEnded(std::string("the connection has ended: ") + std::strerror(errno));
        }
        target_ += got;
        left_ -= static_cast<size_t>(got);
      }
      advance(next, done);
    }
  }

 private:
  enum class Part { kStart, kHead, kText, kBody };

  void expect() {
    part_ = Part::kStart;
    target_ = reinterpret_cast<char*>(&start_);
    left_ = sizeof start_;
  }

  void expect(Part part, char* target, size_t bytes) {
    part_ = part;
    target_ = target;
    left_ = bytes;
  }

  // What was awaited is there.
  template <class Next, class Done>
  void advance(const Next& next, const Done& done) {
    switch (part_) {
      case Part::kStart:
        if (std::memcmp(start_.mark, kMark, sizeof kMark) != 0 || start_.text_bytes > kMostText ||
            start_.body_bytes > kMostBody)
          throw LinkEnded("something else than an answer has come");
        reply_ = next();
        if (!reply_) throw LinkEnded("an answer has come that nobody has asked for");
        if (start_.body_bytes && reply_->exact_bytes && start_.body_bytes != reply_->exact_bytes)
          throw LinkEnded("items have come that nobody has asked for");
        reply_->head.resize(head_bytes_);
        return expect(Part::kHead, reply_->head.data(), head_bytes_);
      case Part::kHead:
        reply_->text.resize(start_.text_bytes);
        return expect(Part::kText, reply_->text.data(), start_.text_bytes);
      case Part::kText:
        if (start_.body_bytes) reply_->body = Body(start_.body_bytes);
        return expect(Part::kBody, reply_->body.data(), start_.body_bytes);
      case Part::kBody:
        const uint64_t bytes = sizeof start_ + head_bytes_ + start_.text_bytes + start_.body_bytes;
        expect();
        return done(std::move(reply_), bytes);
    }
  }

  Descriptor socket_;
  const size_t head_bytes_;
  size_t sent_ = 0;  // bytes of the first request
  AnswerStart start_{};
  Part part_ = Part::kStart;
  char* target_ = nullptr;
  size_t left_ = 0;
  std::shared_ptr<Reply> reply_;  // that is being taken in
};

}  // namespace torchreplay
