// Draws of values of any length while writers overwrite them, at every step of a draw.
#include <boost/test/unit_test.hpp>
#include <functional>
#include <semaphore>
#include <thread>

#include "draw/rewriter.h"
#include "explorers.h"
#include "invariants.h"
#include "ragged_rows.h"
#include "reached.h"
#include "views.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_ragged_redraws)

namespace {

using Kind = Output::Kind;

// What this thread does at the points that it comes to.
thread_local std::function<void(std::string_view)> to_do;

void reach(std::string_view point) {
  if (!to_do) return;
  const auto what = std::exchange(to_do, nullptr);  // not in what it does itself
  what(point);
  if (!to_do) to_do = what;
}

class ToDo {
 public:
  explicit ToDo(std::function<void(std::string_view)> what) { to_do = std::move(what); }
  ~ToDo() { to_do = nullptr; }
};

// What happens once, the first time that this thread comes there.
std::function<void(std::string_view)> once_at(std::string point, std::function<void()> what) {
  return [=, done = false](std::string_view name) mutable {
    if (name == point && !std::exchange(done, true)) what();
  };
}

// Rows of 40 bytes, one page each, of which the pages hold 32.
struct Buffer {
  explicit Buffer(const SamplerConfig& sampler = {}) {
    Plan plan = rows_of_any_length(64, 2048);
    plan.sampler = sampler;
    plan.view.claimed = sampler.queue;
    plan.ragged = {{Element::kU8, 1, 0}};
    memory = make_segment(plan);
    rows.emplace(*memory);
    write(32);
  }

  void write(int n) {
    for (int i = 0; i < n; i++) rows->append(rows->random_values(std::vector<uint32_t>{40}));
  }
  // The rows whose pages others have got.
  int64_t gone() const { return static_cast<int64_t>(rows->size()) - 32; }

  std::unique_ptr<SegmentMemory> memory;
  std::optional<RaggedRows> rows;
};

}  // namespace

BOOST_AUTO_TEST_CASE(what_was_overwritten_before_its_values_were_copied_is_drawn_again_elsewhere) {
  const AtPoints calls(reach);
  for (const char* point : {"draw.drawn", "draw.measured", "draw.arranged"})
    for (const bool given : {false, true}) {
      Buffer buffer;
      SegmentMemory& m = *buffer.memory;
      settle(m);
      BatchSampler sampler(m);
      RaggedDraw batch(m);
      alignas(kLine) char memory[8192];
      if (given) batch.ragged.given = memory, batch.ragged.given_bytes = sizeof memory;
      const ToDo points(once_at(point, [&] { buffer.write(9); }));
      BOOST_REQUIRE(batch.sample(sampler, 64));
      BOOST_TEST(batch.holds(*buffer.rows));
      for (const int64_t key : batch.keys) BOOST_TEST(key >= buffer.gone());
      BOOST_TEST(m.header().redraws.load() >= 9U);
      BOOST_TEST(!batch.ragged.is_given());  // that memory had the values that stayed
    }
}

BOOST_AUTO_TEST_CASE(values_that_were_copied_stay_when_their_pages_are_taken_afterwards) {
  const AtPoints calls(reach);
  Buffer buffer;
  BatchSampler sampler(*buffer.memory);
  RaggedDraw batch(*buffer.memory);
  settle(*buffer.memory);
  const ToDo points(once_at("draw.values", [&] { buffer.write(9); }));
  BOOST_REQUIRE(batch.sample(sampler, 32));
  BOOST_TEST(batch.holds(*buffer.rows));
  BOOST_TEST(std::ranges::count_if(batch.keys, [](int64_t key) { return key < 9; }) == 9);
  BOOST_TEST(buffer.memory->header().redraws.load() == 0U);
}

BOOST_AUTO_TEST_CASE(a_gather_leaves_out_what_is_overwritten_meanwhile) {
  const AtPoints calls(reach);
  for (const char* point : {"gather.found", "draw.measured", "draw.arranged"}) {
    Buffer buffer;
    BatchSampler sampler(*buffer.memory);
    RaggedDraw batch(*buffer.memory);
    const ToDo points(once_at(point, [&] { buffer.write(2); }));
    batch.gather(sampler, {5, 1, 7, 0, 31});
    BOOST_TEST(batch.keys == (std::vector<int64_t>{5, 7, 31}), boost::test_tools::per_element());
    BOOST_TEST(batch.holds(*buffer.rows));
  }
}

BOOST_AUTO_TEST_CASE(a_row_that_is_being_rewritten_has_its_values_still) {
  const AtPoints calls(reach);
  Buffer buffer;
  SegmentMemory& m = *buffer.memory;
  std::binary_semaphore busy(0), met(0);
  std::thread rewriter;
  const auto rewrite = [&] {
    const ToDo points(once_at("rewrite.busy", [&] {
      busy.release();
      met.acquire();
    }));
    const SegmentLock lock(m);
    RowRewriter row(m);
    row.choose({0});
    const uint64_t number = 4;  // as it was
    std::memcpy(row.value(0), &number, 8);
    row.change(4);
    row.close();
  };
  BatchSampler sampler(m);
  RaggedDraw batch(m);
  {
    const ToDo points([&](std::string_view point) {
      if (point == "draw.measures_again") met.release();
      if (point != "gather.found" || rewriter.joinable()) return;
      rewriter = std::thread(rewrite);
      busy.acquire();
    });
    batch.gather(sampler, {3, 4, 5});
  }
  rewriter.join();
  BOOST_TEST(batch.keys == (std::vector<int64_t>{3, 4, 5}), boost::test_tools::per_element());
  BOOST_TEST(batch.holds(*buffer.rows));
}

BOOST_AUTO_TEST_CASE(a_queue_whose_rows_are_overwritten_hands_out_those_that_are_left) {
  const AtPoints calls(reach);
  Buffer buffer({.queue = 1, .drop_oldest = 1, .max_draws = 1});
  BatchSampler sampler(*buffer.memory);
  RaggedDraw batch(*buffer.memory);
  settle(*buffer.memory);
  const ToDo points(once_at("draw.measured", [&] { buffer.write(3); }));
  BOOST_REQUIRE(batch.sample(sampler, 8));
  BOOST_TEST(batch.keys == (std::vector<int64_t>{3, 4, 5, 6, 7, 8, 9, 10}), boost::test_tools::per_element());
  BOOST_TEST(batch.holds(*buffer.rows));
}

// Writers that come in at any point of a draw, and overwrite pages, rows or both: what is drawn is what was written,
// and stays within its budget.
BOOST_AUTO_TEST_CASE(random_programs_draw_what_was_written) {
  const AtPoints calls(reach);
  for (unsigned seed = 0; seed < 60; seed++) {
    std::mt19937 random(seed);
    Plan plan = rows_of_any_length(random() % 2 ? 16 : 80, 4096 << random() % 3);
    plan.sampler.epochs = random() % 3 == 0;
    auto m = make_segment(plan);
    RaggedRows rows(*m);
    const auto write = [&] { rows.append(rows.some_values(random() % 20)); };
    for (int i = 0; i < 20; i++) write();
    BatchSampler sampler(*m);
    RaggedDraw batch(*m);
    int lapped = 0;
    for (uint64_t step = 0; step < 25; step++) {
      const unsigned often = 1 + random() % 60;
      const ToDo points([&](std::string_view) {
        if (random() % often == 0)
          for (int i = static_cast<int>(random() % 4); i > 0; i--) write();
      });
      batch.ragged.budget.clear();
      if (random() % 2)
        batch.ragged.budget = {static_cast<int64_t>(random() % 200), -1, static_cast<int64_t>(random() % 200)};
      if (random() % 4 == 0) {
        std::vector<int64_t> keys;
        for (int i = static_cast<int>(random() % 20); i > 0; i--)
          keys.push_back(static_cast<int64_t>(random() % rows.size()));
        batch.gather(sampler, keys);
      } else if (!batch.sample(sampler, 1 + static_cast<int>(random() % 40), {seed, 0, step})) {
        BOOST_TEST((batch.outcome == Draw::kLapped || batch.outcome == Draw::kWait));
        lapped++;
        continue;
      } else if (!batch.ragged.budget.empty() && batch.keys.size() > 1) {
        for (const size_t g : {0, 2})
          BOOST_TEST(batch.ragged.lengths[g].offsets[batch.keys.size()] <= batch.ragged.budget[g]);
      }
      BOOST_TEST(batch.holds(rows));
    }
    BOOST_TEST(lapped < 13);
  }
}

BOOST_AUTO_TEST_CASE(random_programs_draw_transitions_as_they_were_written) {
  const AtPoints calls(reach);
  for (unsigned seed = 0; seed < 40; seed++) {
    std::mt19937 random(seed);
    const View view = transitions(1 + random() % 3, 1 + random() % 3);
    auto m = make_segment(rows_of_any_length(random() % 2 ? 40 : 200, 8192 << random() % 3, view));
    ItemPlan plan{.outputs = {{.kind = Kind::kAnchor, .field = 0}}, .steps = view.span};
    for (const int32_t field : {0, 1, 2})
      for (const Kind kind : {Kind::kAnchor, Kind::kEnd})
        plan.outputs.push_back(
            {.kind = kind, .first = -static_cast<int32_t>(view.history), .count = view.history + 1, .ragged = field});
    plan.outputs.push_back({.kind = Kind::kEnd, .field = 0});
    RaggedRows rows(*m);
    Explorer explorer(*m, 1);
    std::vector<size_t> starts;  // of each row's episode
    const auto write = [&] {
      const auto fill = rows.prepare(rows.some_values(random() % 12));
      if (!explorer.stream.running) {
        starts.push_back(rows.size() - 1);
        explorer.reset(fill);
      } else {
        starts.push_back(starts.back());
        explorer.step(random() % 8 ? 0 : kTerminated, {}, fill);
      }
    };
    for (int i = 0; i < 40; i++) write();
    BatchSampler sampler(*m, &plan);
    RaggedDraw batch(*m, &plan);
    int lapped = 0;
    for (uint64_t step = 0; step < 20; step++) {
      const unsigned often = 20 + random() % 100;
      const ToDo points([&](std::string_view) {
        if (random() % often == 0)
          for (int i = static_cast<int>(random() % 4); i > 0; i--) write();
      });
      if (!batch.sample(sampler, 1 + static_cast<int>(random() % 20), {seed, 0, step})) {
        BOOST_TEST((batch.outcome == Draw::kLapped || batch.outcome == Draw::kWait));
        lapped++;
        continue;
      }
      const std::vector<int64_t> ends = batch.fixed_rows(plan.outputs.size() - 1);
      BOOST_TEST(batch.holds([&](size_t output, size_t item, size_t position) -> const Bytes& {
        const RaggedPlan::Group& group = batch.plan.groups[batch.plan.outputs[output].group];
        const bool from_end = batch.plan.windows[group.window].kind == Kind::kEnd;
        const auto at = static_cast<size_t>(from_end ? ends[item] : batch.rows[item]);
        const size_t back = view.history - position, start = starts[at];
        return rows[at >= start + back ? at - back : start][batch.plan.outputs[output].field];
      }));
    }
    BOOST_TEST(lapped < 15);
  }
}

BOOST_AUTO_TEST_SUITE_END()
