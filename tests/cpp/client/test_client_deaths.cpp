// Learners and writers that die at each fault point of a call: others go on, and nothing is counted that did not
// happen.
#define TORCHREPLAY_FAULTS
#include <boost/test/unit_test.hpp>
#include <functional>
#include <map>

#include "caller.h"
#include "children.h"
#include "client/prefetch_stream.h"
#include "client/writer.h"
#include "invariants.h"
#include "prefetching_learner.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_client_deaths)

namespace {

using Body = std::function<void(const std::shared_ptr<Attachment>&)>;

Plan tight() {
  Plan plan;
  plan.limiter = {.min_size = 4, .ratio = 1, .min_diff = -1e6, .max_diff = 24};  // writers wait, learners do not
  return plan;
}

std::shared_ptr<Attachment> fresh() {
  const Caller caller;
  auto a = std::make_shared<Attachment>(buffer_of(20, tight()));
  a->refresh({});
  return a;
}

void draw_and_feed_back(const std::shared_ptr<Attachment>& a) {
  Learner learner(a);
  Drawn batch;
  learner.draw(kBatch, 0.5, {}, batch.pointers(), 1);
  Feedback feedback = feedback_to(batch, 1);
  learner.update(a, feedback);
  learner.depart(0);
}

struct BatchMemory {
  std::unique_ptr<Drawn> batch = std::make_unique<Drawn>();
  void point(BatchPointers& out) const { out = batch->pointers(); }
};

void prefetch(const std::shared_ptr<Attachment>& a) {
  const auto learner = std::make_shared<Learner>(a);
  PrefetchStream<BatchMemory> stream(learner, kBatch);
  stream.order(0.5, {}, 1);
  stream.take(kSecond);
}

// The limiter lets through what a draw beside it makes room for.
void write_waiting(const std::shared_ptr<Attachment>& a) {
  Writer writer(a, Lanes(1, false, Autoreset::kNextStep));
  CountedWait wait;
  wait.at_look = [&](Blocked, int64_t) {
    Learner other(a);
    Drawn batch;
    other.draw(kBatch, 0.5, {}, batch.pointers(), 1);
  };
  const Writer::Call call(writer);
  struct Rows {
    RowMeta meta(uint64_t) const { return {}; }
    void commit(uint64_t, uint64_t) const {}
  } rows;
  std::vector<int64_t> keys(30);
  const auto fill = [&](uint64_t, uint64_t slot) { fill_row(a->memory(), slot, 7); };
  writer.write(keys.size(), rows, keys.data(), fill, wait);
}

// How often a process that runs `body` comes to each point.
std::map<std::string, uint64_t> rehearse(const Body& body) {
  constexpr int kMost = 256;
  const Shared<std::array<uint64_t, kMost>> reached;
  Child child([&] {
    const auto a = fresh();
    fault::Point::each([](fault::Point& p) { p.arm(kNever, false); });
    {
      const Caller caller;
      body(a);
    }
    int i = 0;
    fault::Point::each([&](const fault::Point& p) { (*reached)[i++] = p.reached(); });
  });
  BOOST_REQUIRE(child.wait() == 0);
  std::map<std::string, uint64_t> points;
  int i = 0;
  fault::Point::each([&](const fault::Point& p) {
    if ((*reached)[i++]) points[p.name()] = (*reached)[i - 1];
  });
  return points;
}

// Others draw and write, and find no participant that is gone.
void require_sound(const std::shared_ptr<Attachment>& a, const std::string& where) {
  const Caller caller;
  a->refresh({});
  const std::string wrong = violation(a->memory());
  BOOST_TEST(wrong.empty(), where << ": " << wrong);
  const Census census = take_census(a->memory(), true);
  BOOST_TEST(census.writers == 0, where);
  BOOST_TEST(census.learners == 0, where);
  Learner learner(a);
  Drawn batch;
  BOOST_TEST((learner.draw(kBatch, 0.5, {}, batch.pointers(), 1).outcome == Draw::kDone), where);
  learner.close();
  write_waiting(a);
}

void die_at_every_point(const Body& body) {
  const std::map<std::string, uint64_t> points = rehearse(body);
  BOOST_TEST(points.size() > 5U);
  for (const auto& [name, times] : points)
    for (const uint64_t nth : {uint64_t{1}, times}) {
      const auto a = fresh();
      Child child([&] {
        fault::arm(name, nth);
        const Caller caller;
        body(a);
      });
      const int status = child.wait();
      BOOST_TEST(status == fault::kExitStatus, name << " " << nth << ": " << status);
      require_sound(a, name + " " + std::to_string(nth));
    }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_learner_dies) { die_at_every_point(draw_and_feed_back); }
BOOST_AUTO_TEST_CASE(a_learner_that_draws_ahead_dies) { die_at_every_point(prefetch); }
BOOST_AUTO_TEST_CASE(a_writer_that_waits_for_the_learner_dies) { die_at_every_point(write_waiting); }

BOOST_AUTO_TEST_SUITE_END()
