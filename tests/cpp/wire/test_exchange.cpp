// Requests and answers over pairs of connected sockets. The test is the peer, and speaks the format by itself.
#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "wire/exchange.h"

BOOST_AUTO_TEST_SUITE(test_exchange)

using namespace torchreplay;

namespace {

using std::chrono::milliseconds;

constexpr int64_t kSecond = 1'000'000'000;
constexpr size_t kHead = 12;    // bytes of a head behind its start
constexpr size_t kRequest = 8;  // bytes of the requests that have an answer of their own
constexpr size_t kStart = 16;   // mark, uint32, uint64

std::string start_of(uint32_t text, uint64_t body, const char* mark = "trwr") {
  std::string start(mark, 4);
  start.append(reinterpret_cast<const char*>(&text), sizeof text);
  start.append(reinterpret_cast<const char*>(&body), sizeof body);
  return start;
}

struct Answer {
  std::string head, text, body;

  std::string bytes() const { return start_of(static_cast<uint32_t>(text.size()), body.size()) + head + text + body; }
};

std::string pattern(size_t bytes, uint64_t seed) {
  std::string made(bytes, 0);
  for (size_t i = 0; i < bytes; i++) made[i] = static_cast<char>((seed + 1) * (i + 17) * 2654435761U >> 13);
  return made;
}

std::string request_of(uint64_t number) { return {reinterpret_cast<const char*>(&number), sizeof number}; }

// What is answered to request `number`, of parts of many lengths, which may be empty.
Answer answer_to(uint64_t number) {
  return {pattern(kHead, number), pattern(number * 7 % 50, number + 1),
          pattern(number * number * 37 % 5001, number + 2)};
}

bool holds(const Reply& reply, const Answer& answer) {
  return reply.lost.empty() && reply.head == answer.head && reply.text == answer.text &&
         std::string(reply.body.data() ? reply.body.data() : "", reply.body.bytes()) == answer.body;
}

// The peer's end of a connection.
class Peer {
 public:
  explicit Peer(int socket) : socket_(socket) {}

  // All, or what comes before the end.
  std::string read(size_t bytes) const {
    std::string got(bytes, 0);
    size_t at = 0;
    while (at < bytes) {
      const ssize_t some = recv(socket_.get(), got.data() + at, bytes - at, 0);
      if (some <= 0) break;
      at += static_cast<size_t>(some);
    }
    got.resize(at);
    return got;
  }

  // In pieces of so many bytes. False: the other side has ended it.
  bool write(const std::string& bytes, size_t piece = std::string::npos) const {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t some = send(socket_.get(), bytes.data() + at, std::min(piece, bytes.size() - at), MSG_NOSIGNAL);
      if (some <= 0) return false;
      at += static_cast<size_t>(some);
    }
    return true;
  }

  // Answers requests by their numbers, until the other side ends it, or so many.
  void serve(size_t piece = std::string::npos, size_t many = std::string::npos) const {
    for (size_t i = 0; i < many; i++) {
      const std::string request = read(kRequest);
      uint64_t number;
      if (request.size() < kRequest) return;
      std::memcpy(&number, request.data(), sizeof number);
      if (!write(answer_to(number).bytes(), piece)) return;
    }
  }

  void stop_reading() const { shutdown(socket_.get(), SHUT_RD); }
  void end() const { shutdown(socket_.get(), SHUT_RDWR); }

 private:
  Descriptor socket_;
};

struct Connection {
  std::shared_ptr<Link> link;
  std::unique_ptr<Peer> peer;
};

Connection connect(Exchange& exchange) {
  int ends[2];
  BOOST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  Connection made{std::make_shared<Link>(ends[0], kHead), std::make_unique<Peer>(ends[1])};
  ::close(ends[0]);  // a link has a descriptor of its own
  exchange.add(made.link);
  return made;
}

// A thread that ends before the test goes on.
class Aside {
 public:
  explicit Aside(std::function<void()> body) : thread_(std::move(body)) {}
  ~Aside() { join(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

using ReplyPointer = std::shared_ptr<Reply>;

ReplyPointer ask(Exchange& exchange, const std::shared_ptr<Link>& link, std::string bytes, uint64_t exact = 0,
                 std::shared_ptr<Awaiting> awaiting = nullptr) {
  auto reply = std::make_shared<Reply>(exact, std::move(awaiting));
  exchange.ask({{link, std::move(bytes), reply}});
  return reply;
}

// Without any call of the exchange. A thread that does not do its work is found by the time that it takes.
template <class Done>
bool comes_true(const Done& done) {
  const int64_t until = monotonic_ns() + 20 * kSecond;
  while (!done() && monotonic_ns() < until) std::this_thread::yield();
  return done();
}

// So long that a caller counts as one that is away between its calls.
void be_away() { std::this_thread::sleep_for(milliseconds(1)); }

struct Counted : Awaiting {
  std::atomic<int> told{0};

 private:
  void all_are_there() noexcept override { told++; }
};

}  // namespace

BOOST_AUTO_TEST_CASE(answers_arrive_whole_in_the_order_of_the_requests_in_pieces_of_any_size) {
  for (const size_t piece : {std::string::npos, size_t{1}, size_t{7}, size_t{16}}) {
    Exchange exchange;
    const Connection at = connect(exchange);
    constexpr uint64_t kMany = 12;
    const Aside server([&] { at.peer->serve(piece, kMany); });
    std::vector<ReplyPointer> replies;
    for (uint64_t i = 0; i < kMany; i++) replies.push_back(ask(exchange, at.link, request_of(i)));
    for (uint64_t i = 0; i < kMany; i++) {
      BOOST_REQUIRE(exchange.wait(*replies[i], 20 * kSecond));
      for (uint64_t k = 0; k <= i; k++) BOOST_TEST(replies[k]->is_there());
      BOOST_TEST(holds(*replies[i], answer_to(i)));
    }
    BOOST_TEST(exchange.broken(at.link).empty());
  }
}

BOOST_AUTO_TEST_CASE(two_links_do_not_wait_for_each_other) {
  Exchange exchange;
  const Connection slow = connect(exchange), fast = connect(exchange);
  std::vector<Exchange::Request> requests;
  std::vector<ReplyPointer> of_slow, of_fast;
  for (uint64_t i = 0; i < 8; i++) {
    of_slow.push_back(std::make_shared<Reply>(0));
    of_fast.push_back(std::make_shared<Reply>(0));
    requests.push_back({slow.link, request_of(i), of_slow.back()});
    requests.push_back({fast.link, request_of(100 + i), of_fast.back()});
  }
  exchange.ask(std::move(requests));
  {
    const Aside server([&] { fast.peer->serve(3, 8); });
    for (uint64_t i = 0; i < 8; i++) {
      BOOST_REQUIRE(exchange.wait(*of_fast[i], 20 * kSecond));
      BOOST_TEST(holds(*of_fast[i], answer_to(100 + i)));
      BOOST_TEST(!of_slow[i]->is_there());
    }
  }
  const Aside server([&] { slow.peer->serve(1, 8); });
  for (uint64_t i = 8; i-- > 0;) {  // the last one first
    BOOST_REQUIRE(exchange.wait(*of_slow[i], 20 * kSecond));
    BOOST_TEST(holds(*of_slow[i], answer_to(i)));
  }
}

BOOST_AUTO_TEST_CASE(the_longest_text_and_a_large_body_of_the_right_size_arrive) {
  Exchange exchange;
  const Connection at = connect(exchange);
  const Answer answer{pattern(kHead, 1), pattern(1 << 20, 2), pattern(3'000'001, 3)};
  const ReplyPointer reply = ask(exchange, at.link, request_of(1), answer.body.size());
  const ReplyPointer without = ask(exchange, at.link, request_of(2), 77);  // a body need not be there
  const Aside server([&] { at.peer->write(answer.bytes() + Answer{pattern(kHead, 4), "no", ""}.bytes()); });
  BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
  BOOST_TEST(holds(*reply, answer));
  BOOST_REQUIRE(exchange.wait(*without, 20 * kSecond));
  BOOST_TEST(holds(*without, {pattern(kHead, 4), "no", ""}));
}

BOOST_AUTO_TEST_CASE(many_threads_may_wait_for_one_reply) {
  for (int round = 0; round < 20; round++) {
    Exchange exchange;
    const Connection at = connect(exchange);
    const ReplyPointer reply = ask(exchange, at.link, request_of(5));
    std::atomic<int> there{0}, begun{0};
    std::vector<std::unique_ptr<Aside>> threads;
    for (int i = 0; i < 4; i++)
      threads.push_back(std::make_unique<Aside>([&] {
        begun++;
        there += exchange.wait(*reply, 20 * kSecond) && holds(*reply, answer_to(5));
      }));
    while (begun < 4) std::this_thread::yield();
    at.peer->serve(std::string::npos, 1);
    threads.clear();
    BOOST_TEST(there == 4);
  }
}

BOOST_AUTO_TEST_CASE(who_waits_too_little_is_told_so_and_may_wait_again) {
  Exchange exchange;
  const Connection at = connect(exchange);
  const ReplyPointer reply = ask(exchange, at.link, request_of(7));
  const std::string bytes = answer_to(7).bytes();
  BOOST_TEST(!exchange.wait(*reply, 0));
  BOOST_TEST(!exchange.wait(*reply, 1'000'000));
  at.peer->write(bytes.substr(0, 20));
  BOOST_TEST(!exchange.wait(*reply, 1'000'000));
  at.peer->write(bytes.substr(20));
  BOOST_TEST(exchange.wait(*reply, 20 * kSecond));
  BOOST_TEST(exchange.wait(*reply, 0));
  BOOST_TEST(holds(*reply, answer_to(7)));
}

BOOST_AUTO_TEST_CASE(what_is_no_answer_ends_its_link_and_no_other) {
  const std::string head = pattern(kHead, 0);
  const std::vector<std::pair<const char*, std::string>> wrong = {
      {"another mark", start_of(0, 0, "trwx") + head},
      {"too long a text", start_of((1 << 20) + 1, 0) + head},
      {"too small a body", start_of(0, 99) + head + pattern(99, 0)},
      {"too large a body", start_of(0, 101) + head + pattern(101, 0)},
      {"a body larger than all memory", start_of(0, ~uint64_t{0}) + head},
  };
  for (const auto& [what, bytes] : wrong) {
    BOOST_TEST_CONTEXT(what) {
      Exchange exchange;
      const Connection bad = connect(exchange), good = connect(exchange);
      std::vector<ReplyPointer> replies;
      for (int i = 0; i < 3; i++) replies.push_back(ask(exchange, bad.link, request_of(1), 100));
      const ReplyPointer other = ask(exchange, good.link, request_of(2));
      bad.peer->write(bytes);
      for (const ReplyPointer& reply : replies) {
        BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
        BOOST_TEST(!reply->lost.empty());
      }
      BOOST_TEST(exchange.broken(bad.link) == replies[0]->lost);
      const ReplyPointer later = ask(exchange, bad.link, request_of(3));
      BOOST_TEST(later->is_there());
      BOOST_TEST(later->lost == replies[0]->lost);
      good.peer->serve(std::string::npos, 1);
      BOOST_REQUIRE(exchange.wait(*other, 20 * kSecond));
      BOOST_TEST(holds(*other, answer_to(2)));
      BOOST_TEST(exchange.broken(good.link).empty());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_body_that_no_memory_can_hold_ends_a_link_of_which_any_size_was_wanted) {
  for (const uint64_t bytes : {~uint64_t{0}, ~uint64_t{0} - 64, ~uint64_t{0} >> 1}) {
    Exchange exchange;
    const Connection at = connect(exchange);
    const ReplyPointer reply = ask(exchange, at.link, request_of(1));
    at.peer->write(start_of(0, bytes) + pattern(100'000, 1));
    BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
    BOOST_TEST(!reply->lost.empty());
  }
}

BOOST_AUTO_TEST_CASE(an_answer_that_nobody_has_asked_for_ends_its_link_but_not_what_came_before) {
  Exchange exchange;
  const Connection bad = connect(exchange), good = connect(exchange);
  const ReplyPointer first = ask(exchange, bad.link, request_of(1));
  bad.peer->write(answer_to(1).bytes() + answer_to(2).bytes());
  BOOST_REQUIRE(exchange.wait(*first, 20 * kSecond));
  BOOST_TEST(holds(*first, answer_to(1)));
  const ReplyPointer later = ask(exchange, bad.link, request_of(2));
  BOOST_TEST(later->is_there());
  BOOST_TEST(!later->lost.empty());
  const ReplyPointer other = ask(exchange, good.link, request_of(3));
  good.peer->serve(std::string::npos, 1);
  BOOST_REQUIRE(exchange.wait(*other, 20 * kSecond));
  BOOST_TEST(holds(*other, answer_to(3)));
}

BOOST_AUTO_TEST_CASE(a_peer_that_ends_it_leaves_nobody_waiting_wherever_it_is_in_an_answer) {
  const std::string bytes = answer_to(9).bytes();
  for (const size_t sent : {size_t{0}, size_t{5}, kStart, kStart + 3, kStart + kHead, bytes.size() - 1}) {
    Exchange exchange;
    const Connection at = connect(exchange), good = connect(exchange);
    const ReplyPointer first = ask(exchange, at.link, request_of(9)), second = ask(exchange, at.link, request_of(10));
    at.peer->write(bytes.substr(0, sent));
    at.peer->end();
    for (const ReplyPointer& reply : {first, second}) {
      BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
      BOOST_TEST(!reply->lost.empty());
    }
    BOOST_TEST(ask(exchange, at.link, request_of(11))->is_there());
    BOOST_TEST(exchange.broken(good.link).empty());
  }
}

BOOST_AUTO_TEST_CASE(an_end_is_found_when_nobody_waits_for_anything) {
  Exchange exchange;
  const Connection at = connect(exchange);
  BOOST_TEST(exchange.broken(at.link).empty());
  at.peer->end();
  BOOST_TEST(!exchange.broken(at.link).empty());
}

BOOST_AUTO_TEST_CASE(a_link_that_cannot_send_has_no_answer_any_more_not_even_one_that_is_half_there) {
  const std::string bytes = answer_to(3).bytes();
  for (int round = 0; round < 20; round++) {
    Exchange exchange;
    const Connection at = connect(exchange), good = connect(exchange);
    const ReplyPointer first = ask(exchange, at.link, request_of(3));
    at.peer->write(bytes.substr(0, kStart + kHead + 2));
    BOOST_TEST(!exchange.wait(*first, 100'000));
    at.peer->write(bytes.substr(kStart + kHead + 2));
    at.peer->stop_reading();
    const ReplyPointer other = ask(exchange, good.link, request_of(5));
    be_away();  // so that whoever receives sends, too
    const ReplyPointer second = ask(exchange, at.link, request_of(4));
    BOOST_TEST(!exchange.wait(*other, 1'000'000));
    BOOST_REQUIRE(exchange.wait(*second, 20 * kSecond));
    BOOST_TEST(!second->lost.empty());
    BOOST_REQUIRE(exchange.wait(*first, 20 * kSecond));
    BOOST_TEST(!first->lost.empty());
    good.peer->serve(std::string::npos, 1);
    BOOST_REQUIRE(exchange.wait(*other, 20 * kSecond));
    BOOST_TEST(holds(*other, answer_to(5)));
  }
}

BOOST_AUTO_TEST_CASE(a_large_request_does_not_block_its_asker_and_goes_out_when_the_peer_reads) {
  Exchange exchange;
  const Connection at = connect(exchange);
  const std::string large = pattern(8 << 20, 5);
  const ReplyPointer first = ask(exchange, at.link, large), second = ask(exchange, at.link, request_of(6));
  BOOST_TEST(at.peer->read(large.size()) == large);  // nobody waits meanwhile
  BOOST_TEST(at.peer->read(kRequest) == request_of(6));
  at.peer->write(answer_to(5).bytes() + answer_to(6).bytes());
  BOOST_REQUIRE(exchange.wait(*second, 20 * kSecond));
  BOOST_TEST(holds(*first, answer_to(5)));
  BOOST_TEST(holds(*second, answer_to(6)));
}

BOOST_AUTO_TEST_CASE(what_is_not_sent_when_another_threads_wait_ends_goes_out_all_the_same) {
  Exchange exchange;
  const Connection slow = connect(exchange), at = connect(exchange);
  const std::string large = pattern(8 << 20, 5);
  std::vector<Exchange::Request> requests{{slow.link, large, std::make_shared<Reply>(0)}};
  const ReplyPointer awaited = ask(exchange, at.link, request_of(1)), never = ask(exchange, at.link, request_of(2));
  std::atomic<bool> begun{false};
  Aside waiting([&] {
    begun = true;
    exchange.wait(*awaited, 20 * kSecond);
  });
  while (!begun) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(3));                  // by now it sends and receives
  for (int i = 0; i < 300; i++) exchange.wait(*never, 100'000);  // and this one does not count as away
  exchange.ask(std::move(requests));
  at.peer->serve(std::string::npos, 1);
  waiting.join();
  BOOST_TEST(slow.peer->read(large.size()) == large);
}

BOOST_AUTO_TEST_CASE(who_waits_for_an_answer_learns_that_another_thread_closes_the_link) {
  for (int round = 0; round < 100; round++) {
    Exchange exchange;
    const Connection at = connect(exchange);
    const ReplyPointer reply = ask(exchange, at.link, request_of(1));
    bool there = false;
    std::atomic<bool> begun{false};
    Aside waiting([&] {
      begun = true;
      there = exchange.wait(*reply, 20 * kSecond);
    });
    while (!begun) std::this_thread::yield();
    if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(50));
    exchange.close(at.link);
    BOOST_TEST(ask(exchange, at.link, request_of(2))->lost == "the connection was closed");
    waiting.join();
    BOOST_TEST(there);
    BOOST_TEST(reply->lost == "the connection was closed");
    exchange.close(at.link);  // again
  }
}

BOOST_AUTO_TEST_CASE(an_exchange_ends_while_answers_are_outstanding) {
  for (int round = 0; round < 20; round++) {
    ReplyPointer reply, half;
    Connection at, stuck;
    {
      Exchange exchange;
      at = connect(exchange);
      stuck = connect(exchange);
      reply = ask(exchange, stuck.link, pattern(8 << 20, 1));  // which is never read
      half = ask(exchange, at.link, request_of(1));
      if (round % 2) be_away();
      for (int i = 0; i < round % 4; i++) {
        ask(exchange, at.link, request_of(2));
        be_away();
      }
      at.peer->write(answer_to(1).bytes().substr(0, kStart + 1));
    }
    BOOST_TEST(!reply->is_there());
    BOOST_TEST(!half->is_there());
  }
}

BOOST_AUTO_TEST_CASE(who_is_away_between_calls_has_its_answers_read_without_waiting) {
  Exchange exchange;
  const Connection at = connect(exchange);
  const Aside server([&] { at.peer->serve(); });
  for (uint64_t i = 0; i < 30; i++) {
    const ReplyPointer first = ask(exchange, at.link, request_of(2 * i));
    const ReplyPointer second = ask(exchange, at.link, request_of(2 * i + 1));
    be_away();
    if (i == 0) {  // it was not known to be away
      BOOST_REQUIRE(exchange.wait(*second, 20 * kSecond));
      be_away();
      continue;
    }
    BOOST_REQUIRE(comes_true([&] { return second->is_there(); }));
    BOOST_TEST(holds(*first, answer_to(2 * i)));
    BOOST_TEST(holds(*second, answer_to(2 * i + 1)));
    be_away();
  }
  exchange.close(at.link);
}

BOOST_AUTO_TEST_CASE(what_is_asked_for_earlier_or_later_than_expected_is_sent_all_the_same) {
  for (const int ms : {0, 1, 3, 12, 40}) {  // the last step, of which nobody knows that there is no other
    Exchange exchange;
    const Connection at = connect(exchange);
    const Aside server([&] { at.peer->serve(); });
    uint64_t number = 0;
    for (; number < 20; number++) {
      const ReplyPointer reply = ask(exchange, at.link, request_of(number));
      std::this_thread::sleep_for(milliseconds(4));
      if (number == 0) BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
    }
    std::this_thread::sleep_for(milliseconds(ms));
    const ReplyPointer last = ask(exchange, at.link, request_of(number));
    BOOST_REQUIRE(comes_true([&] { return last->is_there(); }));
    BOOST_TEST(holds(*last, answer_to(number)));
    exchange.close(at.link);
  }
}

BOOST_AUTO_TEST_CASE(who_is_away_is_told_of_an_end_without_waiting) {
  Exchange exchange;
  const Connection at = connect(exchange);
  ask(exchange, at.link, request_of(0));
  be_away();
  const ReplyPointer reply = ask(exchange, at.link, request_of(1));
  at.peer->end();
  BOOST_TEST(comes_true([&] { return reply->is_there(); }));
  BOOST_TEST(!reply->lost.empty());
}

BOOST_AUTO_TEST_CASE(what_is_carried_is_counted_to_the_byte) {
  Exchange exchange;
  const Connection at = connect(exchange);
  const Aside server([&] { at.peer->serve(11, 20); });
  uint64_t expected = 0;
  for (uint64_t i = 0; i < 20; i++) {
    const Answer answer = answer_to(i);
    expected += kRequest;
    const ReplyPointer reply = ask(exchange, at.link, request_of(i));
    BOOST_TEST(exchange.carried() == expected);
    expected += kStart + kHead + answer.text.size() + answer.body.size();
    BOOST_REQUIRE(exchange.wait(*reply, 20 * kSecond));
    BOOST_TEST(exchange.carried() == expected);
  }
  exchange.close(at.link);
  ask(exchange, at.link, request_of(1));  // goes nowhere
  BOOST_TEST(exchange.carried() == expected);
}

BOOST_AUTO_TEST_CASE(who_awaits_several_replies_is_told_once_when_the_last_one_is_there_or_lost) {
  Exchange exchange;
  const Connection at = connect(exchange), bad = connect(exchange);
  const auto awaiting = std::make_shared<Counted>();
  const ReplyPointer first = ask(exchange, at.link, request_of(1), 0, awaiting);
  const ReplyPointer lost = ask(exchange, bad.link, request_of(2), 0, awaiting);
  bad.peer->end();
  BOOST_REQUIRE(exchange.wait(*lost, 20 * kSecond));
  const ReplyPointer later = ask(exchange, bad.link, request_of(3), 0, awaiting);
  awaiting->one_is_there();  // all are asked for
  BOOST_TEST(awaiting->told == 0);
  at.peer->serve(std::string::npos, 1);
  BOOST_REQUIRE(exchange.wait(*first, 20 * kSecond));
  BOOST_TEST(awaiting->told == 1);
  BOOST_TEST(awaiting.use_count() == 1, "a reply that is there keeps nobody");
}

BOOST_AUTO_TEST_CASE(many_threads_ask_and_wait_over_some_links_while_one_is_closed) {
  for (int round = 0; round < 3; round++) {
    Exchange exchange;
    std::vector<Connection> links;
    for (int i = 0; i < 3; i++) links.push_back(connect(exchange));
    std::vector<std::unique_ptr<Aside>> servers, askers;
    for (const Connection& at : links) servers.push_back(std::make_unique<Aside>([&] { at.peer->serve(1000); }));
    std::atomic<int> lost{0}, wrong{0}, told{0};
    constexpr int kThreads = 4, kEach = 150;
    for (int t = 0; t < kThreads; t++)
      askers.push_back(std::make_unique<Aside>([&, t] {
        for (uint64_t i = 0; i < kEach; i++) {
          const auto awaiting = std::make_shared<Counted>();
          std::vector<Exchange::Request> requests;
          std::vector<ReplyPointer> replies;
          const uint64_t number = 1000 * static_cast<uint64_t>(t) + i;
          for (const Connection& at : links) {
            replies.push_back(std::make_shared<Reply>(0, awaiting));
            requests.push_back({at.link, request_of(number), replies.back()});
          }
          exchange.ask(std::move(requests));
          awaiting->one_is_there();
          if (i % 50 == 49) be_away();
          for (size_t k = 0; k < links.size(); k++) {
            if (i % 3 && t) exchange.wait(*replies[k], 1000);
            if (!exchange.wait(*replies[k], 20 * kSecond)) wrong++;
            if (k == 2 && !replies[k]->lost.empty())
              lost++;
            else
              wrong += !holds(*replies[k], answer_to(number));
          }
          told += awaiting->told;
          if (t == 0 && i == kEach / 2) exchange.close(links[2].link);
        }
      }));
    askers.clear();
    BOOST_TEST(wrong == 0);
    BOOST_TEST(told == kThreads * kEach);
    BOOST_TEST(lost >= kEach / 2 - 1);
    for (const Connection& at : links) exchange.close(at.link);
  }
}

BOOST_AUTO_TEST_SUITE_END()
