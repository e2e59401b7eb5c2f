// Batches of several shards: a segment here, and a peer over a socket that answers as a server does.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <latch>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "caller.h"
#include "client/union_shards.h"
#include "prefetching_learner.h"

BOOST_AUTO_TEST_SUITE(test_union_shards)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int64_t kHere = 2, kThere = 5;  // numbers of shards
constexpr int64_t kOwnKey = (int64_t{1} << 48) - 1;
constexpr int64_t kFirstThere = 50'000;  // the value of row 0 there

template <class T>
void put(std::string& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
T get(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// What the shard there says of itself.
struct Figures {
  double total = 10;
  int64_t drawable = 100;
  double smallest = 0.05;
  int64_t rows_written = 100;
  double largest = 3;
  bool stopped = false;
  std::string text = "";
};

std::string head_of(const Figures& figures, int64_t given) {
  std::string head(ShardHead::bytes(), 0);
  put(head, 0, figures.total);
  put(head, 8, figures.drawable);
  put(head, 16, figures.smallest);
  put(head, 24, 0.5);
  put(head, 32, given);
  put(head, ShardHead::place("rows_written"), figures.rows_written);
  put(head, ShardHead::place("priority_max"), figures.largest);
  put(head, ShardHead::place("stopped"), int64_t{figures.stopped});
  return head;
}

std::vector<UnionDraw::Output> outputs_of(Drawn& batch) {
  return {{reinterpret_cast<char*>(batch.values.data()), 8},
          {reinterpret_cast<char*>(batch.keys.data()), 8},
          {reinterpret_cast<char*>(batch.weight.data()), 4},
          {reinterpret_cast<char*>(batch.probability.data()), 4}};
}

// Rows 0, 1, ... of the shard there.
std::string block_of(int64_t given) {
  constexpr size_t kAligned = 256;
  std::string block;
  for (int tensor = 0; tensor < 4; tensor++) {
    const size_t from = block.size();
    for (int64_t i = 0; i < given; i++) {
      const int64_t value = kFirstThere + i, key = (kThere << 48) + i;
      const float weight = 0, probability = 0.01F;
      if (tensor == 0) block.append(reinterpret_cast<const char*>(&value), 8);
      if (tensor == 1) block.append(reinterpret_cast<const char*>(&key), 8);
      if (tensor == 2) block.append(reinterpret_cast<const char*>(&weight), 4);
      if (tensor == 3) block.append(reinterpret_cast<const char*>(&probability), 4);
    }
    block.resize(from + (block.size() - from + kAligned - 1) / kAligned * kAligned);
  }
  return block;
}

void fill(Reply& reply, const Figures& figures, int64_t given) {
  reply.head = head_of(figures, given);
  reply.text = figures.text;
  const std::string block = block_of(given);
  if (given) reply.body = Body(block.size());
  if (given) std::memcpy(reply.body.data(), block.data(), block.size());
}

// As whoever reads it does.
void tell(Reply& reply) { std::exchange(reply.awaiting, nullptr)->one_is_there(); }

// A round of a shard here, which draws later, and two there.
struct Round {
  Drawn batch;
  std::shared_ptr<UnionRound> round =
      std::make_shared<UnionRound>(UnionDraw(kBatch, 0.4, UnionWeights::kBuffer, 7, 0, 3));
  std::vector<std::shared_ptr<Reply>> replies;

  Round() {
    for (int64_t i = 0; i < kBatch; i++) {
      batch.values[static_cast<size_t>(i)] = 1000 + i;
      batch.keys[static_cast<size_t>(i)] = i;
      batch.probability[static_cast<size_t>(i)] = 0.02F;
    }
    round->set_batch(outputs_of(batch));
    round->await_draw(kHere << 48);
    for (int i = 0; i < 2; i++) replies.push_back(std::make_shared<Reply>(0, round));
    for (const auto& reply : replies) fill(*reply, {}, kBatch);
  }

  std::vector<std::function<void()>> events() {
    return {[this] { round->drawn(kBatch, {8, 0.25, 40, 0}); }, [this] { tell(*replies[0]); },
            [this] { tell(*replies[1]); }, [this] { round->expect(std::nullopt, {nullptr, replies[0], replies[1]}); }};
  }
};

bool operator==(const Drawn& a, const Drawn& b) {
  return a.values == b.values && a.keys == b.keys && a.weight == b.weight && a.probability == b.probability;
}

Drawn expected_of_round() {
  Round r;
  for (const auto& event : r.events()) event();
  return r.batch;
}

class Aside {
 public:
  explicit Aside(std::function<void()> body) : thread_(std::move(body)) {}
  ~Aside() { thread_.join(); }

 private:
  std::thread thread_;
};

// The peer of a connection: a shard there.
class Server {
 public:
  Server() {
    BOOST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_.data()) == 0);
    link = std::make_shared<Link>(ends_[0], ShardHead::bytes());
    ::close(ends_[0]);
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() {
    end();
    thread_.join();
    ::close(ends_[1]);
  }

  void end() const { shutdown(ends_[1], SHUT_RDWR); }
  void say(const Figures& figures) {
    const std::lock_guard guard(mutex_);
    figures_ = figures;
  }
  double largest_told() {
    const std::lock_guard guard(mutex_);
    return largest_told_;
  }
  Feedback fed_back() {
    const std::lock_guard guard(mutex_);
    return fed_back_;
  }

  std::shared_ptr<Link> link;

 private:
  std::string read(size_t bytes) const {
    std::string got(bytes, 0);
    if (bytes && recv(ends_[1], got.data(), bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) got.clear();
    return got;
  }

  void serve() {
    for (;;) {
      const std::string request = read(16);
      if (request.empty() || request.substr(0, 4) != "trwr") return;
      const auto items = get<uint32_t>(request, 4);
      const auto largest = get<double>(request, 8);
      Figures figures;
      {
        const std::lock_guard guard(mutex_);
        figures = figures_;
      }
      std::string answer = "trwr", block;
      if (std::isnan(largest)) {
        const std::string keys = read(8 * items), td = read(8 * items);
        if (keys.empty() || td.empty()) return;
        const std::lock_guard guard(mutex_);
        for (size_t i = 0; i < items; i++) fed_back_.keys.push_back(get<int64_t>(keys, 8 * i));
        for (size_t i = 0; i < items; i++) fed_back_.td.push_back(get<double>(td, 8 * i));
      } else {
        block = block_of(items);
        const std::lock_guard guard(mutex_);
        largest_told_ = largest;
      }
      const auto text = static_cast<uint32_t>(figures.text.size());
      const auto body = static_cast<uint64_t>(block.size());
      answer.append(reinterpret_cast<const char*>(&text), 4);
      answer.append(reinterpret_cast<const char*>(&body), 8);
      answer += head_of(figures, block.empty() ? 0 : items) + figures.text + block;
      if (send(ends_[1], answer.data(), answer.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(answer.size())) return;
    }
  }

  std::array<int, 2> ends_{};
  std::mutex mutex_;  // guards what follows
  Figures figures_;
  double largest_told_ = 0;
  Feedback fed_back_;
  std::thread thread_;
};

std::shared_ptr<Learner> owner_of(size_t rows, const Plan& plan = {}) {
  auto learner = std::make_shared<Learner>(std::make_shared<Attachment>(buffer_of(rows, plan)));
  learner->own();
  return learner;
}

// A shard here and one there, and the batches that they are asked for.
struct Shards {
  Server server;
  std::shared_ptr<Exchange> exchange = std::make_shared<Exchange>();
  std::shared_ptr<Learner> learner;
  UnionShards shards;
  uint64_t step = 0;

  explicit Shards(size_t rows, const Plan& plan = {}, double largest = 1)
      : learner(owner_of(rows, plan)), shards(exchange, {{kHere, nullptr}, {kThere, server.link}}, learner, largest) {
    exchange->add(server.link);
  }

  struct UnderWay {
    std::shared_ptr<UnionRound> round;
    std::shared_ptr<Drawn> batch;
    bool draws_later = false;  // here, in its turn
  };

  UnderWay order(DrawsHere* draws) {
    UnderWay made{std::make_shared<UnionRound>(UnionDraw(kBatch, 0.4, UnionWeights::kBuffer, 7, 0, step++)),
                  std::make_shared<Drawn>(), false};
    made.round->set_batch(outputs_of(*made.batch));
    made.draws_later =
        shards.order(made.round, shards.asked(kBatch, 0.5), made.batch->pointers(), 1, draws, made.batch);
    return made;
  }

  // Whether all has come. What cannot be drawn here closes `draws`.
  bool wait(const UnderWay& what, DrawsHere* draws) const {
    for (const auto& reply : what.round->replies())
      if (reply && !exchange->wait(*reply, 20 * kSecond)) return false;
    const int64_t until = monotonic_ns() + 20 * kSecond;
    if (!what.draws_later) draws = nullptr;
    while (draws && !draws->take(kSecond))
      if (monotonic_ns() > until) return false;
    if (draws && draws->is_closed()) return true;
    return what.round->is_done(20 * kSecond);
  }
};

void check_items(const Drawn& batch) {
  for (size_t i = 0; i < kBatch; i++) {
    const int64_t number = batch.keys[i] >> 48, row = batch.keys[i] & kOwnKey;
    BOOST_TEST((number == kHere || number == kThere));
    BOOST_TEST(batch.values[i] == row + (number == kHere ? 1000 : kFirstThere));
    BOOST_TEST(batch.weight[i] > 0);
    BOOST_TEST(batch.probability[i] > 0);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_batch_is_made_by_the_last_of_all_that_it_waits_for_whatever_their_order) {
  const Drawn expected = expected_of_round();
  for (const int64_t number : {kHere, kThere})
    BOOST_TEST(std::ranges::any_of(expected.keys, [&](int64_t key) { return key >> 48 == number; }));
  std::array<size_t, 4> order = {0, 1, 2, 3};
  do {
    Round r;
    const auto events = r.events();
    for (const size_t event : order) {
      BOOST_TEST(!r.round->is_done());
      events[event]();
    }
    BOOST_TEST(r.round->is_done());
    BOOST_TEST(r.round->is_made());
    BOOST_TEST((r.batch == expected));
  } while (std::ranges::next_permutation(order).found);
}

// Each thing that the round waits for comes in a thread of its own.
std::vector<std::unique_ptr<Aside>> all_at_once(Round& r, std::latch& begin) {
  std::vector<std::unique_ptr<Aside>> threads;
  for (const auto& event : r.events())
    threads.push_back(std::make_unique<Aside>([&begin, event] {
      begin.arrive_and_wait();
      event();
    }));
  return threads;
}

BOOST_AUTO_TEST_CASE(a_batch_is_made_once_when_all_comes_from_several_threads) {
  const Drawn expected = expected_of_round();
  for (int round = 0; round < 200; round++) {
    Round r;
    std::latch begin(4);
    std::vector<std::unique_ptr<Aside>> threads = all_at_once(r, begin);
    BOOST_TEST(r.round->is_done(20 * kSecond));
    BOOST_TEST(r.round->is_made());
    BOOST_TEST((r.batch == expected));
  }
}

BOOST_AUTO_TEST_CASE(nothing_is_written_to_a_batch_that_is_abandoned_while_all_comes) {
  for (int round = 0; round < 200; round++) {
    Round r;
    std::latch begin(5);
    std::vector<std::unique_ptr<Aside>> threads = all_at_once(r, begin);
    begin.arrive_and_wait();
    for (int i = 0; i < round % 8; i++) static_cast<void>(r.round->replies());
    r.round->abandon();
    const Drawn before = r.batch;
    threads.clear();
    BOOST_TEST((r.batch == before));
    BOOST_TEST(r.round->is_done());
  }
}

BOOST_AUTO_TEST_CASE(a_round_that_is_abandoned_before_all_is_asked_for_keeps_nothing) {
  std::weak_ptr<UnionRound> round;
  {
    Round r;
    round = r.round;
    r.round->abandon();
    r.round->expect(std::nullopt, {r.replies[0], r.replies[1]});
    BOOST_TEST(r.round->replies().empty());
  }
  BOOST_TEST(round.expired());
}

BOOST_AUTO_TEST_CASE(no_batch_is_made_of_what_is_lost_or_says_more_or_is_too_little) {
  const std::vector<std::pair<const char*, std::function<void(Reply&)>>> cases = {
      {"lost", [](Reply& reply) { reply.lost = "why"; }},
      {"says more", [](Reply& reply) { reply.text = "more"; }},
      {"has too few items", [](Reply& reply) { fill(reply, {}, 1); }},
      {"has none", [](Reply& reply) { fill(reply, {}, 0), reply.body = {}; }},
      {"is shorter than its items", [](Reply& reply) { reply.body = Body(8); }},
      {"has less than no items", [](Reply& reply) { put<int64_t>(reply.head, 32, -1); }},
  };
  for (const auto& [what, spoil] : cases) {
    BOOST_TEST_CONTEXT(what) {
      Round r;
      const Drawn before = r.batch;
      spoil(*r.replies[1]);
      for (const auto& event : r.events()) event();
      BOOST_TEST(r.round->is_done());
      BOOST_TEST(!r.round->is_made());
      BOOST_TEST((r.batch == before));
      const std::string block = block_of(kBatch);
      BOOST_TEST(!r.round->make({{{10, 0.05, 100}, kBatch - 1, block.data()}}));
      BOOST_TEST(!r.round->is_made());
      BOOST_TEST(r.round->make({{{10, 0.05, 100}, kBatch, block.data()}}));
      BOOST_TEST(r.round->is_made());
      for (const int64_t key : r.batch.keys) BOOST_TEST(key >> 48 == kThere);
    }
  }
}

BOOST_AUTO_TEST_CASE(shards_of_which_nothing_is_known_are_asked_for_all_and_others_for_their_share) {
  const Caller caller;
  Shards s(50);
  BOOST_TEST((s.shards.asked(kBatch, 0.5) == std::vector<int64_t>{kBatch, kBatch}));
  s.server.say({.total = 0, .drawable = 0});
  auto first = s.order(nullptr);
  BOOST_REQUIRE(s.wait(first, nullptr));
  bool stopped = false;
  BOOST_TEST(s.shards.take_in(*first.round, stopped));
  BOOST_TEST((s.shards.asked(kBatch, 0.5) == std::vector<int64_t>{kBatch, 3}));
  const double here = s.shards.shards()[0].tree.total;
  s.server.say({.total = 3 * here});
  first = s.order(nullptr);
  BOOST_REQUIRE(s.wait(first, nullptr));
  BOOST_TEST(s.shards.take_in(*first.round, stopped));
  BOOST_TEST((s.shards.asked(100, 0.2) == std::vector<int64_t>{30 + 3, 90 + 3}));
}

BOOST_AUTO_TEST_CASE(items_come_from_both_shards_and_are_the_same_whoever_draws_here) {
  const Caller caller;
  std::vector<std::shared_ptr<Drawn>> batches[2];
  for (const bool ahead : {false, true}) {
    Shards s(50);
    s.server.say({.total = 400});
    DrawsHere draws(s.learner);
    DrawsHere* const by = ahead ? &draws : nullptr;
    for (int i = 0; i < 10; i++) {
      const auto what = s.order(by);
      BOOST_REQUIRE(s.wait(what, by));
      BOOST_REQUIRE(what.round->is_made());
      check_items(*what.batch);
      bool stopped = false;
      BOOST_TEST(s.shards.take_in(*what.round, stopped));
      BOOST_TEST(s.shards.drawable() == 150);
      batches[ahead].push_back(what.batch);
    }
  }
  for (size_t i = 0; i < 10; i++) BOOST_TEST((*batches[0][i] == *batches[1][i]));
  int counts[2] = {0, 0};
  for (const auto& batch : batches[0])
    for (const int64_t key : batch->keys) counts[key >> 48 == kThere]++;
  BOOST_TEST(counts[0] > 0);
  BOOST_TEST(counts[1] > 0);
}

BOOST_AUTO_TEST_CASE(several_batches_may_be_under_way_at_once) {
  const Caller caller;
  Shards s(50);
  s.server.say({.total = 400});
  DrawsHere draws(s.learner);
  std::deque<Shards::UnderWay> ahead;
  for (int i = 0; i < 40; i++) {
    ahead.push_back(s.order(&draws));
    if (ahead.size() < 4) continue;
    BOOST_REQUIRE(s.wait(ahead.front(), &draws));
    BOOST_REQUIRE(ahead.front().round->is_made());
    check_items(*ahead.front().batch);
    bool stopped = false;
    BOOST_TEST(s.shards.take_in(*ahead.front().round, stopped));
    ahead.pop_front();
  }
  draws.close();  // with some that nobody takes
  BOOST_TEST(draws.is_closed());
  for (const auto& what : ahead) what.round->abandon();
}

BOOST_AUTO_TEST_CASE(what_the_other_shard_says_is_taken_in_and_what_it_says_besides_is_not) {
  const Caller caller;
  Shards s(50, {}, 2);
  s.server.say({.total = 20, .drawable = 7, .rows_written = 77, .largest = 500, .stopped = true});
  auto what = s.order(nullptr);
  BOOST_REQUIRE(s.wait(what, nullptr));
  BOOST_TEST(s.server.largest_told() == 2);
  bool stopped = false;
  BOOST_TEST(s.shards.take_in(*what.round, stopped));
  BOOST_TEST(stopped);
  BOOST_TEST(s.shards.largest() == 500);
  BOOST_TEST(s.shards.drawable() == 57);
  BOOST_TEST(s.shards.shards()[1].rows_written == 77U);
  BOOST_TEST(s.shards.shards()[1].tree.total == 20);
  BOOST_TEST(s.shards.shards()[0].tree.drawable == 50);
  s.server.say({.text = "more"});
  what = s.order(nullptr);
  BOOST_REQUIRE(s.wait(what, nullptr));
  BOOST_TEST(s.server.largest_told() == 500);
  BOOST_TEST(s.learner->attachment().memory().header().max_raw == 500);
  BOOST_TEST(!what.round->is_made());
  BOOST_TEST(!s.shards.take_in(*what.round, stopped));
}

BOOST_AUTO_TEST_CASE(a_shard_that_ends_leaves_no_batch_waiting) {
  const Caller caller;
  for (const bool ahead : {false, true}) {
    Shards s(50);
    DrawsHere draws(s.learner);
    DrawsHere* const by = ahead ? &draws : nullptr;
    BOOST_TEST(s.shards.is_whole());
    s.server.end();
    for (int i = 0; i < 3; i++) {
      const auto what = s.order(by);
      BOOST_REQUIRE(s.wait(what, by));
      BOOST_TEST(what.round->is_done());
      BOOST_TEST(!what.round->is_made());
      bool stopped = false;
      BOOST_TEST(!s.shards.take_in(*what.round, stopped));
    }
    BOOST_TEST(!s.shards.is_whole());
  }
}

BOOST_AUTO_TEST_CASE(no_batch_is_made_where_nothing_can_be_drawn_here) {
  const Caller caller;
  Plan plan;
  plan.limiter.min_size = 60;
  Shards s(50, plan);
  DrawsHere draws(s.learner);
  const auto what = s.order(&draws);  // of which nothing is known, so no thread waits for it
  BOOST_REQUIRE(s.wait(what, &draws));
  BOOST_TEST(!what.draws_later);
  BOOST_TEST(what.round->is_done());
  BOOST_TEST(!what.round->is_made());
}

BOOST_AUTO_TEST_CASE(td_errors_go_to_the_shards_of_their_keys) {
  const Caller caller;
  Shards s(50);
  const auto what = s.order(nullptr);
  BOOST_REQUIRE(s.wait(what, nullptr));
  bool stopped = false;
  BOOST_REQUIRE(s.shards.take_in(*what.round, stopped));
  const int64_t here = kHere << 48, there = kThere << 48;
  const auto sent = s.shards.feed_back({{here + 3, there + 99, there + 1, here + 40, there + 1}, {1, 2, 3, 4, 5}});
  BOOST_REQUIRE(sent.has_value());
  BOOST_REQUIRE(sent->size() == 1U);
  BOOST_TEST(sent->front().number == kThere);
  BOOST_TEST(sent->front().count == 3U);
  BOOST_REQUIRE(s.exchange->wait(*sent->front().reply, 20 * kSecond));
  BOOST_TEST(sent->front().reply->lost.empty());
  BOOST_TEST((s.server.fed_back().keys == std::vector<int64_t>{99, 1, 1}));
  BOOST_TEST((s.server.fed_back().td == std::vector<double>{2, 3, 5}));
  s.learner->attachment().settle();
  auto expected = buffer_of(50);
  apply_to(*expected, {{3, 40}, {1, 4}});
  const std::vector<float> are = leaves(s.learner->attachment().memory()), should = leaves(*expected);
  BOOST_TEST(are[3] == should[3]);
  BOOST_TEST(are[40] == should[40]);
}

BOOST_AUTO_TEST_CASE(nothing_is_fed_back_where_one_key_is_of_no_shard_or_no_row) {
  const Caller caller;
  Shards s(50);
  const auto what = s.order(nullptr);
  BOOST_REQUIRE(s.wait(what, nullptr));
  bool stopped = false;
  BOOST_REQUIRE(s.shards.take_in(*what.round, stopped));
  const int64_t here = kHere << 48, there = kThere << 48;
  const std::vector<float> before = leaves(s.learner->attachment().memory());
  const uint64_t carried = s.exchange->carried();
  for (const int64_t bad : {int64_t{3}, int64_t{4} << 48, there + 100, there + kOwnKey, here + 50, here + kOwnKey,
                            int64_t{-1}, -here, std::numeric_limits<int64_t>::min()}) {
    for (const bool first : {true, false}) {
      Feedback feedback{{here + 1, there + 1}, {7, 8}};
      feedback.keys.insert(first ? feedback.keys.begin() : feedback.keys.end(), bad);
      feedback.td.push_back(9);
      BOOST_TEST(!s.shards.feed_back(feedback).has_value());
    }
  }
  s.learner->attachment().settle();
  BOOST_TEST(leaves(s.learner->attachment().memory()) == before);
  BOOST_TEST(s.exchange->carried() == carried);
}

BOOST_AUTO_TEST_SUITE_END()
