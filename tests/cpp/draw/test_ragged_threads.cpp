#include <boost/test/unit_test.hpp>
#include <thread>

#include "explorers.h"
#include "invariants.h"
#include "ragged.h"
#include "ragged_rows.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_ragged_threads)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;

constexpr uint32_t kMost = 40;

// Writes episodes of rows that have numbers of their own, which say what all their values are.
void explore(SegmentMemory& m, int id, int rows) {
  std::mt19937 random(static_cast<unsigned>(id));
  Stream stream;
  for (int i = 0; i < rows; i++) {
    const RowMeta linked = stream.running ? stream.next(random() % 6 ? 0 : kTerminated) : stream.reset();
    const RowMeta meta = m.layout().view.linked() ? linked : RowMeta{};
    RaggedFill fill(m, static_cast<uint64_t>(id) << 32 | static_cast<uint64_t>(i), 1, kMost);
    int64_t key;
    uint64_t written = 0;
    if (RingWriter(m, id).append(1, &meta, &key, written, fill) != Append::kDone) break;
    stream.wrote(static_cast<uint64_t>(key), linked);
  }
}

// Whether the values of an output are those of the row of that number; of each item `number` says which.
template <class Number>
bool is_whole(const RaggedDraw& batch, Number&& number) {
  return batch.holds([&](size_t output, size_t item, size_t position) {
    const uint32_t field = batch.plan.outputs[output].field;
    const auto row = static_cast<uint64_t>(number(batch.plan.outputs[output].group, item, position));
    return testing::RaggedValues(row, kMost).of(batch.memory_.layout().ragged[field], field);
  });
}

// Draws while two writers turn both rings as fast as they can.
template <class Number>
void play(const View& view, const ItemPlan* plan, Number&& number) {
  for (const uint64_t capacity : {30, 300}) {
    Plan buffer = ragged_plan(capacity, capacity * 128);  // about half of what so many rows need
    buffer.view = view;
    auto m = make_segment(buffer);
    std::atomic<int> exploring{2}, torn{0}, drawn{0};
    std::vector<std::thread> threads;
    for (const int id : {1, 2})
      threads.emplace_back([&, id] {
        explore(*m, id, 4000);
        exploring--;
      });
    const auto learn = [&](uint32_t stream) {
      BatchSampler sampler(*m, plan);
      for (uint64_t step = 0; step < 3000; step++) {
        const bool last = exploring.load() == 0;
        RaggedDraw batch(*m, plan);
        if (batch.sample(sampler, 6, {7, stream, step})) {
          drawn += 6;
          torn += !is_whole(batch, [&](uint32_t group, size_t i, size_t k) { return number(batch, group, i, k); });
        }
        if (last) break;
      }
    };
    threads.emplace_back(learn, 1);
    learn(0);
    for (std::thread& t : threads) t.join();
    learn(2);
    BOOST_TEST(torn == 0);
    BOOST_TEST(drawn > 0);
    BOOST_TEST_MESSAGE(drawn << " items drawn, " << m->header().redraws.load() << " drawn again");
    settle(*m);
    BOOST_TEST(violation(*m) == "");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(values_of_any_length_never_tear_nor_come_with_another_row) {
  play({}, nullptr, [](const RaggedDraw& batch, uint32_t, size_t item, size_t) { return batch.rows[item]; });
}

BOOST_AUTO_TEST_CASE(values_of_transitions_are_those_of_both_their_rows) {
  ItemPlan plan{.outputs = {{.kind = Kind::kAnchor, .field = 0}}, .steps = 2};
  for (const int32_t field : {0, 1, 2})
    for (const Kind kind : {Kind::kAnchor, Kind::kEnd}) plan.outputs.push_back({.kind = kind, .ragged = field});
  plan.outputs.push_back({.kind = Kind::kEnd, .field = 0});
  const size_t end = plan.outputs.size() - 1;
  play(transitions(2), &plan, [=](const RaggedDraw& batch, uint32_t group, size_t item, size_t) {
    const bool from_end = batch.plan.windows[batch.plan.groups[group].window].kind == Kind::kEnd;
    return from_end ? batch.fixed_rows(end)[item] : batch.rows[item];
  });
}

BOOST_AUTO_TEST_SUITE_END()
