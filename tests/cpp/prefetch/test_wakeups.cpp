#include <boost/test/unit_test.hpp>
#include <functional>

#include "children.h"
#include "draw/batch_sampler.h"
#include "invariants.h"
#include "reached.h"
#include "segments.h"
#include "write/participants.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_wakeups)

namespace {

// What others do meanwhile: it is called once, at the place that is `steps_left` places away.
std::function<void()> meanwhile;
int steps_left = 0;

void reach(std::string_view) {
  if (meanwhile && steps_left-- == 0) std::exchange(meanwhile, nullptr)();
}

// Runs `body`, in which others do `other` at place number `place`. False: there are not so many.
bool with_others_at(int place, std::function<void()> other, const std::function<void()>& body) {
  steps_left = place;
  meanwhile = std::move(other);
  body();
  return !std::exchange(meanwhile, nullptr);
}

// One insert for each draw, and no more than that ahead.
std::unique_ptr<SegmentMemory> tight_segment() {
  Plan plan;
  plan.capacity = 64;
  plan.limiter = {.min_size = 1, .ratio = 1, .min_diff = 0, .max_diff = 2};
  auto m = make_segment(plan);
  append_row(*m, 1);
  SegmentLock lock(*m);
  lock.absorb();
  publish_limit(*m);
  return m;
}

bool is_admitted(SegmentMemory& m) { return m.header().head.load() < m.header().ticket_limit.load(); }

void write_all_admitted(SegmentMemory& m) {
  while (is_admitted(m)) append_row(m, 1);
}

Draw draw_four(SegmentMemory& m) {
  int64_t values[4], keys[4];
  float weight[4], probability[4];
  Shortage shortage;
  const BatchPointers out{{reinterpret_cast<char*>(values)}, keys, weight, probability, sizeof values};
  return BatchSampler(m).sample(4, 0.4, {7, 0, 0}, out, shortage);
}

// Another learner draws: writers may go on.
void make_room(SegmentMemory& m) {
  SegmentLock lock(m);
  m.header().sampled += 4;
  publish_limit(m);
}

}  // namespace

// A learner and a writer under a tight limiter: each waits for the other. If the learner goes to sleep although all
// that it waits for is written, and nobody is left to wake it, both sleep until they look around by themselves.
BOOST_AUTO_TEST_CASE(a_learner_does_not_sleep_when_what_it_waits_for_was_written_while_it_said_so) {
  const AtPoints calls(reach);
  int place = 0, written = 0;
  for (bool there = true; there; place++) {
    auto m = tight_segment();
    Header& h = m->header();
    const uint32_t seen = h.rows_signal.load();
    Draw outcome = Draw::kDone;
    const auto write = [&] {
      written += is_admitted(*m);
      write_all_admitted(*m);
    };
    there = with_others_at(place, write, [&] { outcome = draw_four(*m); });
    if (outcome == Draw::kDone || h.rows_signal.load() != seen) continue;
    SegmentLock lock(*m);
    lock.absorb();
    BOOST_TEST((!Limiter(h).can_sample(4) || is_admitted(*m)), "at place " << place);
  }
  BOOST_TEST(place > 5);
  BOOST_TEST(written > 5);
}

BOOST_AUTO_TEST_CASE(a_writer_does_not_sleep_when_room_was_made_while_it_said_that_it_waits) {
  const AtPoints calls(reach);
  constexpr int64_t kNs = 20'000'000'000;
  constexpr int kPlacesBeforeItSleeps = 2;
  for (int place = 0; place < kPlacesBeforeItSleeps; place++) {
    auto m = tight_segment();
    write_all_admitted(*m);
    Header& h = m->header();
    const uint32_t seen = h.room_signal.load();
    const int64_t start = monotonic_ns();
    BOOST_TEST(with_others_at(place, [&] { make_room(*m); }, [&] { wait_for_room(h, seen, kNs); }));
    BOOST_TEST(monotonic_ns() - start < kNs);
  }
}

BOOST_AUTO_TEST_CASE(a_writer_that_is_killed_in_its_sleep_costs_others_one_signal) {
  const AtPoints calls(reach);
  auto m = tight_segment();
  write_all_admitted(*m);
  Header& h = m->header();
  {
    Child writer([&] { wait_for_room(h, h.room_signal.load(), 3'600'000'000'000); });
    while (process_state(writer.pid()) != 'S') sched_yield();
    writer.kill_and_wait();
  }
  const uint32_t before = h.room_signal.load();
  for (int i = 0; i < 5; i++) {
    make_room(*m);
    BOOST_TEST(h.room_signal.load() == before + 1);
  }
}

BOOST_AUTO_TEST_SUITE_END()
