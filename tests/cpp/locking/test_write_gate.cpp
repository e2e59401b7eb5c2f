#include <boost/test/unit_test.hpp>
#include <random>
#include <thread>
#include <vector>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "ragged.h"
#include "segments.h"
#include "write/participants.h"

BOOST_AUTO_TEST_SUITE(test_write_gate)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kRows = 50;  // that a writer appends in one call

// A writer that gives way, in a thread of its own: it writes until the buffer is stopped.
class GatedWriter {
 public:
  explicit GatedWriter(SegmentMemory& m) : memory_(m), id_(join(m, Role::kWriter)), thread_([this] { write(); }) {}
  ~GatedWriter() {
    memory_.header().stopped.store(1);
    thread_.join();
    leave(memory_, id_);
  }
  uint64_t rows() const { return rows_.load(); }

 private:
  void write() {
    RingWriter ring(memory_, id_, true);
    Header& h = memory_.header();
    const RowMeta meta[kRows];
    int64_t keys[kRows];
    while (!h.stopped.load()) {
      uint64_t written = 0;
      const Append outcome =
          ring.append(kRows, meta, keys, written, [&](uint64_t, uint64_t slot) { fill_row(memory_, slot, slot); });
      rows_.fetch_add(written);
      if (outcome == Append::kGated) h.gate.pause(h.head, h.stopped, kSliceNs);
    }
  }

  SegmentMemory& memory_;
  int id_;
  std::atomic<uint64_t> rows_{0};
  std::thread thread_;
};

Plan ring_of(uint64_t capacity) {
  Plan plan;
  plan.capacity = capacity;
  return plan;
}

void append_rows(SegmentMemory& m, int n) {
  for (int i = 0; i < n; i++) append_row(m, 1);
}

// The outcome of one append of a writer that gives way.
Append try_append(SegmentMemory& m) {
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  return RingWriter(m, 1, true).append(1, &meta, &key, written, [](uint64_t, uint64_t) {});
}

// A learner's call in which it absorbs, from its start to its end.
void take_turn(SegmentMemory& m) {
  LearnerTurn turn(m);
  SegmentLock lock(m);
  turn.absorb(lock);
}

int64_t paused_for(SegmentMemory& m) {
  Header& h = m.header();
  const int64_t start = monotonic_ns();
  h.gate.pause(h.head, h.stopped, 10 * WriteGate::kMostPatienceNs);
  return monotonic_ns() - start;
}

}  // namespace

BOOST_AUTO_TEST_CASE(nobody_gives_way_where_nobody_draws) {
  auto m = make_segment(ring_of(64));
  append_rows(*m, 200'000);
  BOOST_TEST((try_append(*m) == Append::kDone));
  {
    SegmentLock(*m).absorb();
  }
  BOOST_TEST((try_append(*m) == Append::kDone));
}

BOOST_AUTO_TEST_CASE(a_writer_far_ahead_of_a_learners_call_pauses_before_it_takes_a_ticket) {
  auto m = make_segment(ring_of(64));
  LearnerTurn turn(*m);
  {
    SegmentLock lock(*m);
    turn.absorb(lock);
  }
  append_rows(*m, static_cast<int>(m->pace().budget()));
  const uint64_t head = m->header().head.load();
  BOOST_TEST((try_append(*m) == Append::kGated));
  BOOST_TEST(m->header().head.load() == head);
}

BOOST_AUTO_TEST_CASE(a_learner_that_keeps_up_stops_nobody) {
  auto m = make_segment(ring_of(64));
  for (int call = 0; call < 1000; call++) {
    take_turn(*m);
    append_rows(*m, static_cast<int>(m->pace().budget()) / 2);
    BOOST_TEST_REQUIRE((try_append(*m) == Append::kDone));
  }
}

BOOST_AUTO_TEST_CASE(writers_wait_for_a_learner_that_does_not_come_back_once_and_not_for_long) {
  auto m = make_segment(ring_of(64));
  take_turn(*m);
  append_rows(*m, static_cast<int>(m->pace().budget()));
  BOOST_TEST((try_append(*m) == Append::kGated));
  const int64_t paused = paused_for(*m);
  BOOST_TEST(paused >= WriteGate::kMostPatienceNs);
  BOOST_TEST(paused < 10 * WriteGate::kMostPatienceNs);
  append_rows(*m, 10 * static_cast<int>(m->pace().budget()));
  BOOST_TEST((try_append(*m) == Append::kDone));
}

BOOST_AUTO_TEST_CASE(a_learner_that_is_late_again_and_again_is_not_waited_for_each_time) {
  auto m = make_segment(ring_of(64));
  const int64_t start = monotonic_ns();
  int waits = 0;
  for (int call = 0; call < 60; call++) {
    take_turn(*m);
    append_rows(*m, 2 * static_cast<int>(m->pace().budget()));
    take_turn(*m);  // finds the gate shut
    if (try_append(*m) != Append::kGated) continue;
    const int64_t paused = paused_for(*m);
    waits += paused >= WriteGate::kMostPatienceNs;
  }
  BOOST_TEST(waits >= 1);
  BOOST_TEST(waits <= 2 + (monotonic_ns() - start) / LearnerPace::kLateNs, "lateness is forgotten after a while");
}

BOOST_AUTO_TEST_CASE(writers_wait_on_while_a_learner_makes_progress) {
  auto m = make_segment(ring_of(64));
  Header& h = m->header();
  h.gate.shut_at(0);
  std::atomic<bool> over{false};
  std::thread learner([&] {
    const int64_t until = monotonic_ns() + 3 * WriteGate::kMostPatienceNs;
    while (monotonic_ns() < until) h.gate.note_progress();
    over.store(true);
    h.gate.open_at(WriteGate::kOpen);
  });
  h.gate.pause(h.head, h.stopped, 100 * WriteGate::kMostPatienceNs);
  BOOST_TEST(over.load());
  learner.join();
}

BOOST_AUTO_TEST_CASE(the_end_of_the_buffer_ends_a_pause) {
  auto m = make_segment(ring_of(64));
  Header& h = m->header();
  h.gate.shut_at(0);
  h.stopped.store(1);
  h.gate.pause(h.head, h.stopped, 100 * WriteGate::kMostPatienceNs);
  BOOST_TEST(h.gate.ticket() == 0U);  // nobody had to give up
}

BOOST_AUTO_TEST_CASE(a_learner_that_waits_for_rows_lets_everybody_write) {
  Plan plan = ring_of(64);
  plan.limiter.min_size = 1'000'000;
  auto m = make_segment(plan);
  m->header().gate.shut_at(0);
  BatchSampler sampler(*m);
  Shortage shortage;
  const BatchPointers out;
  BOOST_TEST((sampler.sample(1, 0, {}, out, shortage) == Draw::kWait));
  BOOST_TEST((try_append(*m) == Append::kDone));
}

BOOST_AUTO_TEST_CASE(a_writer_waits_for_nobody_for_long_whatever_patience_stands_in_the_gate) {
  auto m = make_segment(ring_of(64));
  WriteGate& gate = m->header().gate;
  std::mt19937_64 random(1);
  for (int bytes = 0; bytes < 20; bytes++) {
    auto* at = reinterpret_cast<unsigned char*>(&gate);
    std::generate(at, at + sizeof gate, [&] { return static_cast<unsigned char>(bytes ? random() : ~0U); });
    gate.shut_at(0);
    const int64_t paused = paused_for(*m);
    BOOST_TEST(paused < 8 * WriteGate::kMostPatienceNs);
    BOOST_TEST(gate.ticket() == WriteGate::kOpen);
  }
}

// Any value of the gate at any time: each writer goes on, and each wait ends.
BOOST_AUTO_TEST_CASE(whatever_stands_in_the_gate_writers_go_on) {
  auto m = make_segment(ring_of(256));
  const GatedWriter one(*m), two(*m);
  std::mt19937_64 random(1);
  const int64_t until = monotonic_ns() + 1'000'000'000;
  while (monotonic_ns() < until) {
    m->header().gate.shut_at(random() % 2 ? random() % (2 * m->header().head.load() + 1) : WriteGate::kOpen);
    const timespec nap{0, static_cast<long>(random() % 300'000)};
    nanosleep(&nap, nullptr);
  }
  m->header().gate.shut_at(0);
  for (const GatedWriter* writer : {&one, &two}) {
    const uint64_t before = writer->rows();
    while (writer->rows() == before) std::this_thread::yield();
  }
}

// Each of the writers alone outruns the learner, which gets a small share of the processors. Without a gate its
// absorbed rows are overwritten before they are copied, and its feedback comes too late.
BOOST_AUTO_TEST_CASE(a_learner_that_is_outrun_draws_what_is_there_and_feeds_back_in_time) {
  auto m = make_segment(ring_of(1 << 20));
  append_rows(*m, 1 << 20);
  {
    SegmentLock(*m).absorb();
  }
  std::vector<std::unique_ptr<GatedWriter>> writers;
  for (int k = 0; k < 16; k++) writers.push_back(std::make_unique<GatedWriter>(*m));
  constexpr int kItems = 256, kBatches = 30;
  const std::vector<double> td(kItems, 0.5);
  std::vector<int64_t> values(kItems), keys(kItems);
  std::vector<float> weight(kItems), probability(kItems);
  const BatchPointers out{
      {reinterpret_cast<char*>(values.data())}, keys.data(), weight.data(), probability.data(), 8 * kItems};
  BatchSampler sampler(*m);
  PriorityUpdater updater(*m);
  uint64_t wrong = 0;
  for (uint64_t step = 0; step < kBatches; step++) {
    Shortage shortage;
    BOOST_TEST_REQUIRE((sampler.sample(kItems, 0.4, {1, 0, step}, out, shortage) == Draw::kDone));
    for (int i = 0; i < kItems; i++)
      wrong += keys[i] >= 1 << 20 && static_cast<uint64_t>(values[i]) != m->slot_of(static_cast<uint64_t>(keys[i]));
    BOOST_TEST_REQUIRE(!updater.update(kItems, keys.data(), td.data()));
  }
  BOOST_TEST(wrong == 0U);
  const Header& h = m->header();
  BOOST_TEST(h.redraws.load() < uint64_t{kBatches} * kItems / 10);
  BOOST_TEST(h.stale_updates < uint64_t{kBatches} * kItems / 5);
}

BOOST_AUTO_TEST_CASE(where_long_values_fill_their_ring_writers_go_ahead_by_the_rows_that_are_there) {
  auto m = make_segment(ragged_plan(100'000, 64 * 1000));
  append_ragged(*m, 1, 50, 0, 60);
  take_turn(*m);
  const uint64_t before = m->pace().budget();  // nothing was taken again yet
  BOOST_TEST(before > 5000U);
  append_ragged(*m, 1, 1000, 50, 60);
  take_turn(*m);
  BOOST_TEST(m->header().rows < 500U);
  BOOST_TEST(m->pace().budget() == m->header().rows);
}

BOOST_AUTO_TEST_SUITE_END()
