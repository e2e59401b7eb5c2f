// What a shard answers over a connection, asked byte by byte, and by a peer that is slow to read.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "caller.h"
#include "client/shard_service.h"
#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_shard_service)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int64_t kNumber = 6;
constexpr int64_t kMost = 1000;  // items of a batch
constexpr size_t kRows = 100;
constexpr int kSmall = 4096;  // bytes that a socket holds

// A shard that serves one connection by a thread, and the other end of it.
class Served {
 public:
  Served()
      : learner_(std::make_shared<Learner>(std::make_shared<Attachment>(buffer_of(kRows)))),
        service_(learner_, {8}, kNumber, kMost) {
    learner_->own();
    BOOST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_.data()) == 0);
    for (const int end : ends_) setsockopt(end, SOL_SOCKET, SO_SNDBUF, &kSmall, sizeof kSmall);
    thread_ = std::thread([this] {
      const Caller caller;
      try {
        for (;;) left_.push_back(service_.serve(ends_[1], [](uint32_t) { return 1; }));
      } catch (const LinkEnded&) {
        has_ended_ = true;
      }
      shutdown(ends_[1], SHUT_RDWR);
    });
  }
  ~Served() { end(); }

  void end() {
    shutdown(ends_[0], SHUT_WR);
    if (thread_.joinable()) thread_.join();
    for (int& socket : ends_)
      if (socket >= 0) ::close(std::exchange(socket, -1));
  }
  // What it did not answer, and whether it saw the end; once all has ended.
  const std::vector<ShardCall>& left() const { return left_; }
  bool has_ended() const { return has_ended_; }

  void write(const std::string& bytes, size_t at_once) const {
    for (size_t at = 0; at < bytes.size(); at += at_once) {
      const size_t count = std::min(at_once, bytes.size() - at);
      BOOST_REQUIRE(send(ends_[0], bytes.data() + at, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
    }
  }
  std::string read(size_t bytes) const {
    std::string got(bytes, 0);
    const ssize_t count = recv(ends_[0], got.data(), bytes, MSG_WAITALL);
    got.resize(static_cast<size_t>(std::max<ssize_t>(0, count)));
    return got;
  }

  struct Answer {
    std::string head, body;
  };
  Answer answer() const {
    const std::string begins = read(sizeof(AnswerStart));
    BOOST_REQUIRE(begins.size() == sizeof(AnswerStart));
    AnswerStart start;
    std::memcpy(&start, begins.data(), sizeof start);
    BOOST_TEST(std::string(start.mark, 4) == "trwr");
    BOOST_TEST(start.text_bytes == 0U);
    std::string head = read(ShardHead::bytes());
    return {std::move(head), read(start.body_bytes)};
  }

 private:
  std::shared_ptr<Learner> learner_;
  ShardService service_;
  std::array<int, 2> ends_{};
  std::vector<ShardCall> left_;
  bool has_ended_ = false;
  std::thread thread_;
};

std::string draw_of(uint32_t n, double largest = 1) { return ShardRequest(n, largest).bytes(); }
std::string feedback_of(const std::vector<int64_t>& keys, const std::vector<double>& td) {
  std::string bytes =
      ShardRequest(static_cast<uint32_t>(keys.size()), std::numeric_limits<double>::quiet_NaN()).bytes();
  bytes.append(reinterpret_cast<const char*>(keys.data()), 8 * keys.size());
  return bytes.append(reinterpret_cast<const char*>(td.data()), 8 * td.size());
}

}  // namespace

BOOST_AUTO_TEST_CASE(requests_in_any_pieces_are_answered_in_their_order) {
  for (const size_t at_once : {size_t{1}, size_t{15}, size_t{17}, size_t{4000}}) {
    Served served;
    std::string asked;
    for (int round = 0; round < 5; round++) asked += feedback_of({60, 61}, {0.5, 50.0 + round}) + draw_of(33);
    std::thread asking([&] { served.write(asked, at_once); });
    for (int round = 0; round < 5; round++) {
      BOOST_TEST(served.answer().body.empty());
      const auto [head, body] = served.answer();
      BOOST_TEST(read_drawn(head.data()).given == 33);
      BOOST_TEST(ShardHead::read<double>(head.data(), ShardHead::place("priority_max")) == 50.0 + round);
      BOOST_TEST(ShardHead::read<int64_t>(head.data(), ShardHead::place("updated")) == 2 * (round + 1));
      BOOST_TEST(ShardHead::read<int64_t>(head.data(), ShardHead::place("rows_written")) == int64_t{kRows});
      BOOST_REQUIRE(body.size() == 512U + 512 + 256 + 256);  // each tensor at a multiple of 256
      for (size_t i = 0; i < 33; i++) BOOST_TEST((ShardHead::read<int64_t>(body.data(), 512 + 8 * i) >> 48) == kNumber);
    }
    asking.join();
    served.end();
    BOOST_TEST(served.left().empty());
    BOOST_TEST(served.has_ended());
  }
}

BOOST_AUTO_TEST_CASE(an_answer_that_is_longer_than_a_socket_holds_comes_whole) {
  const Served served;
  served.write(draw_of(kMost), 16);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it waits for room
  const auto [head, body] = served.answer();
  BOOST_TEST(body.size() == 2 * 8192U + 2 * 4096U);
}

BOOST_AUTO_TEST_CASE(answers_do_not_gather_without_limit_while_more_is_asked) {
  std::array<int, 2> ends{};
  BOOST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  constexpr size_t kMany = 1 << 16;
  ServedSocket served(ends[1]);
  std::string got(kMany, 0);
  for (const size_t gathered : {kMany - 1, kMany}) {
    served.waiting().assign(gathered, 'a');
    BOOST_REQUIRE(send(ends[0], "request", 7, 0) == 7);
    served.receive(got.data(), 7);
    BOOST_TEST(served.waiting().size() == (gathered < kMany ? gathered : 0));
  }
  BOOST_TEST(recv(ends[0], got.data(), kMany, MSG_WAITALL) == static_cast<ssize_t>(kMany));
  for (const int end : ends) ::close(end);
}

BOOST_AUTO_TEST_CASE(what_it_cannot_answer_it_leaves_whole_behind_the_answers_before) {
  Served served;
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::string odd = draw_of(0) + feedback_of({63, 1'000'000}, {1, 2}) + feedback_of({63, 64}, {1, nan}) +
                          draw_of(5, infinity) + draw_of(5, -1);
  served.write(draw_of(2) + odd + draw_of(3), 4000);
  BOOST_TEST(read_drawn(served.answer().head.data()).given == 2);
  const auto [head, body] = served.answer();
  BOOST_TEST(read_drawn(head.data()).given == 3);
  BOOST_TEST(ShardHead::read<int64_t>(head.data(), ShardHead::place("updated")) == 0);  // nor was any part applied
  served.end();
  const std::vector<ShardCall>& left = served.left();
  BOOST_REQUIRE(left.size() == 5U);
  BOOST_TEST(!left[0].is_feedback);
  BOOST_TEST(left[0].items == 0U);
  BOOST_TEST((left[1].feedback.keys == std::vector<int64_t>{63, 1'000'000}));
  BOOST_TEST((left[1].feedback.td == std::vector<double>{1, 2}));
  BOOST_TEST((left[2].feedback.keys == std::vector<int64_t>{63, 64}));
  BOOST_TEST(left[3].largest == infinity);
  BOOST_TEST(left[4].largest == -1);
}

BOOST_AUTO_TEST_CASE(what_is_no_request_ends_the_connection) {
  for (const std::string& bytes : {std::string("what") + draw_of(3).substr(4), draw_of(kMost + 1),
                                   feedback_of({1}, {2}).substr(0, 20), std::string()}) {
    Served served;
    served.write(bytes, 4000);
    served.end();
    BOOST_TEST(served.has_ended());
    BOOST_TEST(served.left().empty());
  }
}

BOOST_AUTO_TEST_SUITE_END()
