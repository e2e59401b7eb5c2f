// The connections of a process: one thread at a time sends and receives for all that wait.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "system/clock.h"
#include "system/descriptor.h"
#include "system/thread.h"
#include "system/wakeup_timer.h"
#include "wire/link.h"

namespace torchreplay {

// A caller that waits for a reply sends and receives itself, if nobody else does: to wake a thread takes longer. A
// caller that is away between its calls, as a learner that computes, leaves that to a thread: sending takes it longer
// than handing over. A forked child has none of it: nothing may be called there but here().
class Exchange {
 public:
  Exchange() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.get() < 0) throw std::system_error(errno, std::generic_category(), "no descriptor for connections");
  }
  ~Exchange() {
    {
      const std::lock_guard guard(mutex_);
      ending_ = true;
    }
    poke();
    work_.notify_all();
    if (running_) pthread_join(thread_, nullptr);
  }
  Exchange(const Exchange&) = delete;

  bool here() const { return process_ == getpid(); }

  void add(const std::shared_ptr<Link>& link) {
    const std::lock_guard guard(mutex_);
    links_.push_back(link);
  }

  struct Request {
    std::shared_ptr<Link> link;
    std::string bytes;
    std::shared_ptr<Reply> reply;
  };

  // Sends requests, or has them sent. The replies are there later, or, where nothing comes through, at once.
  void ask(std::vector<Request> requests) {
    std::unique_lock lock(mutex_);
    const Caller caller(*this);
    const bool away = is_away();
    for (Request& request : requests) {
      if (!request.link->broken.empty()) {
        lose(lock, *request.reply, request.link->broken);
        continue;
      }
      carried_.fetch_add(request.bytes.size(), std::memory_order_relaxed);
      request.link->requests.push_back(std::move(request.bytes));
      request.link->replies.push_back(request.reply);
      request.reply->ahead = away;
      ahead_ += away;
    }
    if (!away && !busy_) {
      const Carrier carrier(*this, lock);
      for (const Request& request : requests) send(lock, request.link);
    }
    set_going();
  }

  // Waits for a reply, so long at most, or until a signal comes; returns whether it is there.
  bool wait(const Reply& reply, int64_t ns) {
    if (reply.is_there()) return true;
    std::unique_lock lock(mutex_);
    const Caller caller(*this);
    const int64_t until = monotonic_ns() + ns;
    for (int64_t left = ns; !reply.is_there() && left > 0; left = until - monotonic_ns()) {
      if (!busy_) {
        if (!carry(lock, left, [&] { return reply.is_there(); })) break;
      } else {
        news_.wait_for(lock, std::chrono::nanoseconds(left), [&] { return reply.is_there() || !busy_; });
      }
    }
    set_going();
    return reply.is_there();
  }

  // Why nothing comes through a connection any more; "" while it does. It is looked for where nobody waits for
  // anything.
  std::string broken(const std::shared_ptr<Link>& link) {
    std::unique_lock lock(mutex_);
    if (link->broken.empty() && link->replies.empty() && !busy_) {
      char byte;
      const ssize_t got = recv(link->socket(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        fail(lock, link, "the connection has ended");
    }
    return link->broken;
  }

  // Ends a connection: no reply comes any more.
  void close(const std::shared_ptr<Link>& link) {
    std::unique_lock lock(mutex_);
    link->closing = true;  // first: whoever receives finds the end
    shutdown(link->socket(), SHUT_RDWR);
    while (link->broken.empty()) {
      if (!busy_) {
        fail(lock, link, "");
      } else {
        poke();
        news_.wait_for(lock, std::chrono::milliseconds(20), [&] { return !link->broken.empty() || !busy_; });
      }
    }
  }

  // Bytes of requests and of answers.
  uint64_t carried() const { return carried_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kAwayNs = 500'000;
  static constexpr int64_t kSliceNs = 50'000'000;
  // For so long a thread that was woken lets requests gather: a learner feeds back, and asks for a batch. They leave
  // together, once it computes again, and what they wake takes no processor from it before.
  static constexpr int64_t kGatherNs = 300'000;

  // A call, between whose like the caller is away. The mutex is held when it begins and when it ends.
  class Caller {
   public:
    explicit Caller(Exchange& exchange) : exchange_(exchange) {
      const int64_t now = monotonic_ns(), away = now - exchange.left_;
      if (!exchange.left_ || away <= kAwayNs) return;
      exchange.away_until_ = now + 4 * away;
      exchange.wakeup_timer_.note_order(now);
    }
    ~Caller() { exchange_.left_ = monotonic_ns(); }
    Caller(const Caller&) = delete;

   private:
    Exchange& exchange_;
  };

  // The thread that sends and receives. The mutex is held when it begins.
  class Carrier {
   public:
    Carrier(Exchange& exchange, std::unique_lock<std::mutex>& lock) : exchange_(exchange), lock_(lock) {
      exchange.busy_ = true;
    }
    ~Carrier() {
      if (!lock_.owns_lock()) lock_.lock();
      exchange_.busy_ = false;
      exchange_.news_.notify_all();
    }
    Carrier(const Carrier&) = delete;

   private:
    Exchange& exchange_;
    std::unique_lock<std::mutex>& lock_;
  };

  bool is_away() const { return monotonic_ns() < away_until_; }

  bool has_work() const {
    return ahead_ > 0 || std::ranges::any_of(links_, [](const auto& link) { return !link->requests.empty(); });
  }

  // Has somebody go on with what is to be done. Whoever is at it calls this in the end. The mutex is held.
  void set_going() {
    if (busy_) return poke();
    if (!has_work()) return;
    start();
    if (!dozing_) work_.notify_one();
  }

  void poke() const {
    const uint64_t one = 1;
    if (::write(event_.get(), &one, sizeof one) < 0) return;  // it is full: who looks finds it
  }

  void start() {
    if (running_) return;
    const auto body = [](void* self) -> void* {
      static_cast<Exchange*>(self)->run();
      return nullptr;
    };
    if (const int error = start_thread(thread_, "replay-wire", body, this))
      throw std::system_error(error, std::generic_category(), "cannot start a thread for connections");
    running_ = true;
  }

  void run() {
    std::unique_lock lock(mutex_);
    const auto called = [&] { return ending_ || (!busy_ && has_work()); };
    while (!ending_) {
      const bool expects = is_away() && wakeup_timer_.allows_doze(0);
      doze(lock, expects ? wakeup_timer_.doze_ns(monotonic_ns()) : 0);  // it finds what has been asked for meanwhile
      if (!called()) {
        work_.wait(lock, called);
        doze(lock, kGatherNs);
      }
      if (ending_ || busy_) continue;
      try {
        carry(lock, kSliceNs, [&] { return ending_ || !has_work(); });
      } catch (const std::bad_alloc&) {  // there may be memory later
      }
    }
  }

  // Nobody wakes the thread meanwhile.
  void doze(std::unique_lock<std::mutex>& lock, int64_t ns) {
    if (ns <= 0) return;
    dozing_ = true;
    work_.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return ending_; });
    dozing_ = false;
  }

  // Sends and receives until `done`, or for so long. The mutex is held, but not meanwhile; nobody else is at it. False:
  // a signal has come, whose handler is first.
  template <class Done>
  bool carry(std::unique_lock<std::mutex>& lock, int64_t ns, const Done& done) {
    const Carrier carrier(*this, lock);
    bool interrupted = false;
    const int64_t until = monotonic_ns() + ns;
    std::vector<std::shared_ptr<Link>> links;
    std::vector<pollfd> polled;
    for (int64_t left = ns;; left = until - monotonic_ns()) {
      links = links_;
      for (const auto& link : links) send(lock, link);
      if (done() || left <= 0) break;
      polled.assign(1, {event_.get(), POLLIN, 0});
      for (const auto& link : links)
        polled.push_back({link->socket(), static_cast<short>(link->requests.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      lock.unlock();
      const timespec patience{left / 1'000'000'000, left % 1'000'000'000};
      const int ready = ppoll(polled.data(), polled.size(), &patience, nullptr);
      if (ready > 0 && polled[0].revents) {
        uint64_t count;
        if (::read(event_.get(), &count, sizeof count) < 0) count = 0;
      }
      lock.lock();
      interrupted = ready < 0;
      for (size_t i = 0; ready > 0 && i < links.size(); i++)  // one that cannot send any more may still have bytes
        if (links[i]->broken.empty() && polled[i + 1].revents & (POLLIN | POLLERR | POLLHUP)) receive(lock, links[i]);
      if (interrupted || done()) break;
    }
    return !interrupted;
  }

  void send(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Link>& link) {
    if (link->requests.empty()) return;
    try {
      link->send_some(lock);
    } catch (const LinkEnded& ended) {
      fail(lock, link, ended.what());
    }
  }

  void receive(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Link>& link) {
    lock.unlock();
    std::string why;
    try {
      link->receive_some(
          [&] {
            const std::lock_guard guard(mutex_);
            return link->replies.empty() ? nullptr : link->replies.front();
          },
          [&](const std::shared_ptr<Reply>& reply, uint64_t bytes) {
            carried_.fetch_add(bytes, std::memory_order_relaxed);
            tell(*reply);
            const std::lock_guard guard(mutex_);
            link->replies.pop_front();
            settle(*reply);
          });
    } catch (const std::exception& error) {
      why = error.what();
    }
    lock.lock();
    if (!why.empty()) fail(lock, link, why);
  }

  // Whoever awaits it learns that it is there. The mutex is not held.
  static void tell(Reply& reply) {
    if (const std::shared_ptr<Awaiting> awaiting = std::move(reply.awaiting)) awaiting->one_is_there();
  }

  void settle(Reply& reply) {
    if (reply.ahead) ahead_--;
    reply.there.store(true, std::memory_order_release);
    news_.notify_all();
  }

  void lose(std::unique_lock<std::mutex>& lock, Reply& reply, const std::string& why) {
    reply.lost = why;
    lock.unlock();
    tell(reply);
    lock.lock();
    settle(reply);
  }

  void fail(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Link>& link, const std::string& why) {
    if (link->broken.empty()) link->broken = link->closing ? "the connection was closed" : why;
    shutdown(link->socket(), SHUT_RDWR);
    std::erase(links_, link);
    link->requests.clear();
    const auto replies = std::exchange(link->replies, {});
    for (const auto& reply : replies) lose(lock, *reply, link->broken);
    news_.notify_all();
  }

  const pid_t process_ = getpid();
  Descriptor event_;  // wakes who polls
  pthread_t thread_{};
  std::atomic<uint64_t> carried_{0};

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, news_;
  std::vector<std::shared_ptr<Link>> links_;
  bool busy_ = false;  // a thread sends and receives
  bool running_ = false, ending_ = false;
  bool dozing_ = false;     // the thread lets requests gather, and wakes by itself
  int ahead_ = 0;           // replies that the thread is to take in
  int64_t left_ = 0;        // when the last call ended
  int64_t away_until_ = 0;  // the caller counts as one that is away between its calls
  WakeupTimer wakeup_timer_;
};

}  // namespace torchreplay
