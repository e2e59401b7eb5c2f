// Writers and learners of a queue with an admission that die at each fault point: what was begun and not written is
// given back, and what was handed out counts once for each version that was published for it.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>
#include <map>
#include <string>

#include "caller.h"
#include "children.h"
#include "client/writer.h"
#include "draw/batch_sampler.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_admission_deaths)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr size_t kNumbers = 200;
constexpr uint64_t kCapacity = 8, kMaxAge = 20;  // so much that nobody waits to be admitted
constexpr int kDrawn = 3;
constexpr LimiterConfig kLimiter{.batch_size = 1, .max_age = kMaxAge};  // each item has a version of its own

struct Journal {
  std::array<int, kNumbers> got;  // how often an item came, by its number
  uint64_t next;                  // the first number that nobody has begun to write
};

std::shared_ptr<Attachment> queue() {
  Plan plan;
  plan.capacity = kCapacity;
  plan.view.claimed = 1;
  plan.sampler = {.queue = 1, .max_draws = 1};
  plan.limiter = kLimiter;
  const Caller caller;
  auto a = std::make_shared<Attachment>(make_segment(plan));
  a->memory().header().ticket_limit.store(0);
  a->refresh({});
  return a;
}

struct Rows {
  RowMeta meta(uint64_t) const { return {}; }
  void commit(uint64_t, uint64_t) const {}
};

// Writes and draws, as one process that does both.
class Life {
 public:
  Life(const std::shared_ptr<Attachment>& a, Journal& j, uint64_t first_step)
      : attachment_(a),
        journal_(j),
        writer_(a, Lanes(1, false, Autoreset::kNextStep)),
        sampler_(a->memory()),
        step_(first_step) {
    wait_.at_look = [this](Blocked, int64_t) { draw(); };  // the ring is full of what others wrote
  }

  // Begins `n` items, and writes so many rows of them.
  void write(uint32_t n, uint64_t rows_of_them) {
    {
      const Writer::Call call(writer_);
      writer_.admit(n, wait_);
    }
    for (uint64_t i = 0; i < rows_of_them; i++) {
      const Writer::Call call(writer_);
      const uint64_t number = journal_.next++;
      int64_t key;
      Rows rows;
      const auto fill = [&](uint64_t, uint64_t slot) { fill_row(writer_.memory(), slot, number); };
      writer_.write(1, rows, &key, fill, wait_);
    }
    writer_.end_admission(n);
  }

  // Draws what there is, is done with what came before unless it keeps that, and publishes a version for each item.
  // False: there was nothing.
  bool draw(bool keeps = false) {
    std::array<int64_t, kDrawn> keys{}, numbers{};
    std::array<float, kDrawn> weight{}, probability{};
    Shortage shortage;
    const BatchPointers out{{reinterpret_cast<char*>(numbers.data())}, keys.data(), weight.data(), probability.data()};
    std::vector<int64_t> none;
    const DrawRules rules{.at_least = 1, .done = keeps ? &none : &held_};
    if (sampler_.sample(kDrawn, 0, {7, 0, step_++}, out, shortage, {}, rules) != Draw::kDone) return false;
    if (!keeps) held_.clear();
    for (int k = 0; k < sampler_.count(); k++) {
      journal_.got[static_cast<size_t>(numbers[static_cast<size_t>(k)])]++;
      held_.push_back(keys[static_cast<size_t>(k)]);
    }
    attachment_->set_policy_version(attachment_->policy_version() + sampler_.count());
    return true;
  }

  void give_back() { attachment_->release(held_); }
  // As who goes on from what it has saved: it is done with what came again.
  void go_on() {
    give_back();
    attachment_->end_draws(held_, std::vector<int64_t>(held_.size(), 0));
    held_.clear();
  }
  void change_limiter() { attachment_->set_limiter(kLimiter); }
  void end() { attachment_->commit(held_); }

 private:
  std::shared_ptr<Attachment> attachment_;
  Journal& journal_;
  Writer writer_;
  BatchSampler sampler_;
  CountedWait wait_;
  uint64_t step_;
  std::vector<int64_t> held_;
};

// Turns the ring, and leaves items there.
void live(const std::shared_ptr<Attachment>& a, Journal& j) {
  const Caller caller;
  Life life(a, j, 0);
  for (int turn = 0; turn < 5; turn++) {
    life.write(1, 1);
    life.write(3, 2);
    life.write(1, 0);
    life.draw();
  }
  life.write(3, 3);
  life.draw(true);
  life.change_limiter();
  life.go_on();
  life.write(3, 3);
  life.draw();
  life.give_back();
}

// Who comes after: all is handed out and published. So as many items may begin as before the first version.
void require_exact(const std::shared_ptr<Attachment>& a, Journal& j, const std::string& where) {
  const Caller caller;
  SegmentMemory& m = a->memory();
  take_census(m, false);
  Life life(a, j, 100);
  while (life.draw()) {
  }
  life.end();
  a->refresh({});
  const SegmentLock lock(m);
  const Admission admission(m);
  BOOST_TEST(admission.open() == 0U, where);
  BOOST_TEST(admission.room() == kMaxAge + 1, where << ": " << admission.room() << " may begin");
  BOOST_TEST(m.header().held == 0U, where);
}

// How often who lives after `before` comes to each point.
template <class Before>
std::map<std::string, uint64_t> rehearse(const Before& before) {
  constexpr int kMost = 512;
  const Shared<std::array<uint64_t, kMost>> reached;
  Child child([&] {
    const auto a = queue();
    const Shared<Journal> j;
    before(a, *j);
    fault::Point::each([](fault::Point& p) { p.arm(kNever, false); });
    live(a, *j);
    int i = 0;
    fault::Point::each([&](const fault::Point& p) { (*reached)[static_cast<size_t>(i++)] = p.reached(); });
  });
  BOOST_REQUIRE(child.wait() == 0);
  std::map<std::string, uint64_t> points;
  int i = 0;
  fault::Point::each([&](const fault::Point& p) {
    if (const uint64_t times = (*reached)[static_cast<size_t>(i++)]) points[p.name()] = times;
  });
  return points;
}

bool dies_at(const std::shared_ptr<Attachment>& a, Journal& j, const std::string& point, uint64_t nth) {
  Child child([&] {
    fault::arm(point, nth);
    live(a, j);
  });
  const int status = child.wait();
  BOOST_REQUIRE_MESSAGE(status == 0 || status == fault::kExitStatus, point << " " << nth << ": " << status);
  return status == fault::kExitStatus;
}

}  // namespace

BOOST_AUTO_TEST_CASE(whoever_dies_at_any_point_takes_no_admission_along_and_counts_none_twice) {
  const auto points = rehearse([](const auto&, Journal&) {});
  BOOST_TEST(points.contains("admit.admitted"));
  BOOST_TEST(points.contains("claims.gone"));
  for (const auto& [name, times] : points)
    for (const uint64_t nth : {uint64_t{1}, (times + 1) / 2, times}) {
      const auto a = queue();
      const Shared<Journal> j;
      BOOST_TEST(dies_at(a, *j, name, nth), name << " " << nth);
      require_exact(a, *j, name + " " + std::to_string(nth));
    }
}

BOOST_AUTO_TEST_CASE(whoever_dies_while_it_repairs_what_the_dead_left_counts_none_twice) {
  for (const std::string first :
       {"claims.going", "claims.gone", "claims.gone_and_ended", "claims.let_go", "claims.taken", "evict.at",
        "admit.admitted", "admit.counted", "admit.come_again", "admit.taken", "admit.learnt", "append.done"}) {
    const auto die_first = [&](const std::shared_ptr<Attachment>& a, Journal& j) {
      BOOST_TEST(dies_at(a, j, first, first.starts_with("admit.") && first != "admit.admitted" ? 1 : 2), first);
    };
    const auto points = rehearse(die_first);
    for (const auto& [name, times] : points) {
      if (!name.starts_with("recover.") && !name.starts_with("claims.") && !name.starts_with("reclaim.") &&
          name != "admit.come_again")
        continue;
      const auto a = queue();
      const Shared<Journal> j;
      die_first(a, *j);
      BOOST_TEST(dies_at(a, *j, name, 1), first << ", then " << name);
      require_exact(a, *j, first + ", then " + name);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
