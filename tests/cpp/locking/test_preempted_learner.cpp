// A learner that gets no processor: what becomes of the gate that it has shut.
#include <boost/test/unit_test.hpp>
#include <functional>

#include "reached.h"
#include "segments.h"
#include "session/segment_lock.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_preempted_learner)

namespace {

// What happens between two chunks of an absorption.
std::function<void()> between;

void reach(std::string_view point) {
  if (point == "lock.between" && between) between();
}

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity) {
  Plan plan;
  plan.capacity = capacity;
  return make_segment(plan);
}

void append_rows(SegmentMemory& m, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) append_row(m, 1);
}

void take_turn(SegmentMemory& m) {
  LearnerTurn turn(m);
  SegmentLock lock(m);
  turn.absorb(lock);
}

// Returns whether a writer that came to the gate lost patience.
bool lose_patience(SegmentMemory& m) {
  Header& h = m.header();
  if (!h.gate.is_shut(h.head.load())) return false;
  h.gate.pause(h.head, h.stopped, 100 * WriteGate::kMostPatienceNs);
  return h.gate.ticket() == WriteGate::kOpen;
}

}  // namespace

BOOST_AUTO_TEST_CASE(writers_that_lose_patience_in_an_absorption_wait_again_when_it_goes_on) {
  const AtPoints calls(reach);
  auto m = ring_of(uint64_t{1} << 16);
  append_rows(*m, m->capacity());
  uint64_t lost = 0;
  between = [&] { lost += lose_patience(*m); };
  take_turn(*m);
  between = nullptr;
  BOOST_TEST(lost == 1 + (m->capacity() - m->pace().budget()) / Absorber::kChunk);  // until they may go on
  BOOST_TEST(m->header().absorbed == m->capacity());
}

// Writers that wait for nobody leave a learner of low priority no processor to make many calls with.
BOOST_AUTO_TEST_CASE(a_learner_that_came_late_is_waited_for_again_after_a_time_however_few_calls_it_makes) {
  const AtPoints calls(reach);
  auto m = ring_of(64);
  const auto is_waited_for_in_vain = [&] {
    append_rows(*m, m->pace().budget());
    take_turn(*m);
    return lose_patience(*m);
  };
  take_turn(*m);
  BOOST_TEST(is_waited_for_in_vain());
  BOOST_TEST(!is_waited_for_in_vain());  // it is late
  const timespec late{1, 0};
  nanosleep(&late, nullptr);
  BOOST_TEST(is_waited_for_in_vain());
}

BOOST_AUTO_TEST_SUITE_END()
