// A learner beside writers that turn the ring while it copies a batch: many of them, each on a processor of its own.
#include <boost/test/unit_test.hpp>
#include <functional>

#include "draw/batch_sampler.h"
#include "reached.h"
#include "segments.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_lapped_draws)

namespace {

// What happens between the choice of a batch's rows and their copies.
std::function<void()> meanwhile;

void reach(std::string_view point) {
  if (point == "draw.drawn" && meanwhile) meanwhile();
}

constexpr uint64_t kCapacity = 64;

// Writes `n` rows that say their own key, or fewer: up to the gate.
void write_up_to_gate(SegmentMemory& m, uint64_t n) {
  Header& h = m.header();
  for (uint64_t i = 0; i < n && !h.gate.is_shut(h.head.load()); i++) append_row(m, 1, h.head.load());
}

void take_turn(SegmentMemory& m) {
  LearnerTurn turn(m);
  SegmentLock lock(m);
  turn.absorb(lock);
}

void outlast_a_learners_turn() {
  const timespec turn{0, 5'000'000};
  nanosleep(&turn, nullptr);
}

// Writers have shown that they turn the ring hundreds of times in their turn, and may go on. It takes longer where they
// are preempted meanwhile.
void open_gate_for_many_turns(SegmentMemory& m) {
  write_up_to_gate(m, 1);
  take_turn(m);
  do {
    write_up_to_gate(m, 1 << 20);
    take_turn(m);  // it finds the gate shut, and measures
    outlast_a_learners_turn();
    take_turn(m);  // it opens the gate
  } while (m.header().gate.ticket() - m.header().head.load() < 100 * kCapacity);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_batch_comes_although_writers_turn_the_ring_within_each_copy) {
  const AtPoints calls(reach);
  Plan plan;
  plan.capacity = kCapacity;
  auto m = make_segment(plan);
  open_gate_for_many_turns(*m);
  int lapped = 0;
  meanwhile = [&] {
    const uint64_t before = m->header().head.load();
    write_up_to_gate(*m, kCapacity);
    lapped += m->header().head.load() == before + kCapacity;
  };
  constexpr int kItems = 32;
  std::vector<int64_t> keys(kItems), values(kItems);
  std::vector<float> weight(kItems), probability(kItems);
  Shortage shortage;
  const BatchPointers out{{reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data()};
  const Draw outcome = BatchSampler(*m).sample(kItems, 0.5, {7, 0, 0}, out, shortage);
  meanwhile = nullptr;
  BOOST_TEST((outcome == Draw::kDone));
  BOOST_TEST(lapped > 1);
  BOOST_TEST(keys == values, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
