#include <boost/test/unit_test.hpp>
#include <map>
#include <numeric>
#include <set>

#include "explorers.h"
#include "invariants.h"
#include "ragged_rows.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_ragged)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Fields of one length, which all values of the buffer have.
Plan of_bytes(uint64_t capacity, uint64_t ragged_bytes, const SamplerConfig& sampler = {}) {
  Plan plan = rows_of_any_length(capacity, ragged_bytes);
  plan.sampler = sampler;
  plan.ragged = {{Element::kU8, 1, 0}};
  if (sampler.queue || sampler.max_draws) plan.view.claimed = 1;
  return plan;
}

}  // namespace

BOOST_AUTO_TEST_CASE(outputs_whose_fields_are_alike_and_show_the_same_rows_share_their_offsets) {
  const Layout layout = config_of(rows_of_any_length(8, kMiB, transitions(1))).layout;
  const RaggedPlan rows = RaggedPlan::of(layout, nullptr);
  BOOST_TEST(rows.width == 1U);
  BOOST_TEST(rows.groups.size() == 3U);
  BOOST_TEST(rows.outputs.size() == 4U);
  BOOST_TEST(rows.outputs[0].group == rows.outputs[1].group);
  ItemPlan plan;
  for (int32_t field : {0, 1, 2})
    for (int32_t first : {0, 1}) plan.outputs.push_back({.kind = Kind::kAnchor, .first = first, .ragged = field});
  plan.outputs.push_back({.kind = Kind::kEnd, .ragged = 0});
  const RaggedPlan items = RaggedPlan::of(layout, &plan);
  BOOST_TEST(items.width == 3U);
  BOOST_TEST(items.windows.size() == 3U);
  BOOST_TEST(items.groups.size() == 5U);
  const auto group = [&](size_t o) { return items.outputs[o].group; };
  BOOST_TEST((group(0) == group(2) && group(1) == group(3) && group(0) != group(1)));
  BOOST_TEST((group(4) != group(5) && group(4) != group(0) && group(6) > group(5)));
}

BOOST_AUTO_TEST_CASE(every_row_comes_with_the_values_that_it_was_given) {
  auto m = make_segment(rows_of_any_length(200, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 230; i++) rows.append(rows.some_values(i % 50 == 7 ? 900 : 20));
  BatchSampler sampler(*m);
  for (int n : {1, 3, 16, 37, 256, 1000}) {  // not multiples of what is fetched at a time
    RaggedDraw batch(*m);
    BOOST_REQUIRE(batch.sample(sampler, n, {7, 0, static_cast<uint64_t>(n)}));
    BOOST_TEST(batch.keys.size() == static_cast<size_t>(n));
    BOOST_TEST(batch.holds(rows));
  }
}

BOOST_AUTO_TEST_CASE(a_batch_without_any_element_has_memory_and_offsets_of_zero) {
  auto m = make_segment(rows_of_any_length(8, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 8; i++) rows.append(rows.some_values(0));
  BOOST_TEST(m->header().page_head.load() == 0U);
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  BOOST_REQUIRE(batch.sample(sampler, 16));
  BOOST_TEST(batch.holds(rows));
  for (const auto& values : batch.ragged.values) BOOST_TEST((values.data && values.elements == 0));
}

BOOST_AUTO_TEST_CASE(a_gather_of_nothing_has_one_offset) {
  auto m = make_segment(rows_of_any_length(8, kMiB));
  RaggedRows rows(*m);
  rows.append(rows.some_values(5));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  batch.gather(sampler, {});
  BOOST_TEST(batch.holds(rows));
  BOOST_TEST(batch.ragged.lengths[0].offsets[0] == 0);
}

BOOST_AUTO_TEST_CASE(a_gather_has_the_rows_asked_for_in_their_order_and_leaves_out_what_is_gone) {
  auto m = make_segment(rows_of_any_length(20, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 25; i++) rows.append(rows.some_values(30));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  batch.gather(sampler, {24, 3, 7, 5, 7, 4, 99});
  BOOST_TEST(batch.keys == (std::vector<int64_t>{24, 7, 5, 7}), boost::test_tools::per_element());
  BOOST_TEST(batch.holds(rows));
}

BOOST_AUTO_TEST_CASE(threads_share_a_value_that_is_longer_than_all_others) {
  Plan plan = rows_of_any_length(8, 64 * kMiB);
  auto m = make_segment(plan);
  RaggedRows rows(*m);
  for (uint32_t length : {5U, 700'000U, 0U, 3U, 100'000U}) rows.append(rows.random_values({length, 2 * length, 1}));
  BatchSampler sampler(*m);
  sampler.set_threads(4);
  for (int n : {1, 2, 7}) {
    RaggedDraw batch(*m);
    BOOST_REQUIRE(batch.sample(sampler, n, {7, 0, static_cast<uint64_t>(n)}));
    BOOST_TEST(batch.holds(rows));
  }
}

BOOST_AUTO_TEST_CASE(memory_that_is_given_is_used_where_it_is_enough) {
  auto m = make_segment(rows_of_any_length(8, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 8; i++) rows.append(rows.random_values({40, 40, 40}));
  BatchSampler sampler(*m);
  uint64_t needed = 0;
  for (const bool enough : {false, true}) {
    RaggedDraw batch(*m);
    std::vector<char> memory(enough ? needed + kLine : 100);
    batch.ragged.given = memory.data() + (kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine) % kLine;
    batch.ragged.given_bytes = enough ? needed : 36;
    BOOST_REQUIRE(batch.sample(sampler, 16));
    BOOST_TEST(batch.holds(rows));
    BOOST_TEST(batch.ragged.is_given() == enough);
    Block* const block = batch.ragged.share();
    BOOST_TEST((block == nullptr) == enough);
    if (block) block->release();
    needed = batch.ragged.bytes();
  }
}

BOOST_AUTO_TEST_CASE(the_memory_of_a_batch_stays_for_as_long_as_somebody_shares_it) {
  auto m = make_segment(rows_of_any_length(8, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 8; i++) rows.append(rows.random_values({40, 40, 40}));
  BatchSampler sampler(*m);
  Block* block;
  const char* data;
  Bytes copy;
  {
    RaggedDraw batch(*m);
    BOOST_REQUIRE(batch.sample(sampler, 16));
    block = batch.ragged.share();
    data = batch.ragged.data();
    copy.assign(data, data + batch.ragged.bytes());
  }
  RaggedDraw other(*m);
  BOOST_REQUIRE(other.sample(sampler, 16, {7, 0, 1}));
  BOOST_TEST((other.ragged.data() != data));
  BOOST_TEST(std::equal(copy.begin(), copy.end(), data));
  block->release();
}

BOOST_AUTO_TEST_CASE(more_elements_than_offsets_hold_are_refused_before_there_is_memory_for_them) {
  auto m = make_segment(of_bytes(4, 16 * kMiB));
  RaggedRows rows(*m);
  rows.append(rows.random_values({4 * static_cast<uint32_t>(kMiB)}));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  BOOST_CHECK_EXCEPTION(batch.sample(sampler, 512), TooManyElements,
                        [](const auto& e) { return e.elements == 512 * 4 * kMiB && e.group == 0; });
  BOOST_TEST(!batch.ragged.data());
  BOOST_TEST(m->header().sampled == 0U);
  BOOST_TEST(batch.sample(sampler, 2));
  BOOST_TEST(batch.holds(rows));
}

// Whatever lies in the lengths of a row: what is drawn is exact, and nothing is read past an end (which the address
// sanitizer would not see in a mapping: the bounds are those of read_run, and no batch is larger than its rows are).
BOOST_AUTO_TEST_CASE(a_row_whose_lengths_lie_is_never_handed_out) {
  auto m = make_segment(rows_of_any_length(32, kMiB));
  RaggedRows rows(*m);
  std::mt19937_64 random(3);
  for (int i = 0; i < 32; i++) rows.append(rows.random_values({10, 11, 12}));
  settle(*m);
  const uint64_t bytes_of_row = pages_of(m->layout(), 10 * 8 + 16 + 12 * 12) * m->layout().pages.bytes;
  for (int trial = 0; trial < 200; trial++) {
    const uint64_t slot = random() % 32;
    uint64_t* run1 = m->run1_of_row(slot);
    uint32_t* length = m->length_of_row(slot, random() % 3);
    const uint64_t run_before = *run1;
    const uint32_t length_before = *length;
    const uint64_t lies[] = {0, 1, random(), random() >> 40, ~uint64_t{0}, m->layout().pages.count, 1000, kMaxLength};
    random() % 2 ? static_cast<void>(*run1 = lies[random() % 8])
                 : static_cast<void>(*length = static_cast<uint32_t>(lies[random() % 8]));
    const bool changed = *run1 != run_before || *length != length_before;
    BatchSampler sampler(*m);
    RaggedDraw batch(*m);
    batch.gather(sampler, {static_cast<int64_t>(slot)});
    if (changed && !batch.keys.empty())  // it may lie about other pages that have values, or about fewer of its own
      BOOST_TEST(batch.ragged.bytes() <=
                 bytes_of_row + 12 * kLine + m->layout().pages.most() * m->layout().pages.bytes);
    else
      BOOST_TEST(batch.keys.size() == (changed ? 0U : 1U));
    *run1 = run_before;
    *length = length_before;
  }
}

// Budgets

BOOST_AUTO_TEST_CASE(a_budget_ends_a_batch_before_the_first_item_that_it_has_no_room_for) {
  auto m = make_segment(rows_of_any_length(50, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 50; i++) rows.append(rows.some_values(30));
  BatchSampler all(*m), some(*m);
  for (uint64_t step = 0; step < 30; step++) {
    RaggedDraw whole(*m), cut(*m);
    whole.ragged.budget = {-1, -1, -1};  // the same items in the same order
    cut.ragged.budget = {200, -1, 150};
    BOOST_REQUIRE(whole.sample(all, 40, {7, 0, step}));
    BOOST_REQUIRE(cut.sample(some, 40, {7, 0, step}));
    BOOST_TEST(whole.keys.size() == 40U);
    size_t expected = 0;
    int64_t tokens = 0, points = 0;
    for (; expected < 40; expected++) {
      tokens += whole.ragged.lengths[0].lengths[expected];
      points += whole.ragged.lengths[2].lengths[expected];
      if (tokens > 200 || points > 150) break;
    }
    whole.keys.resize(expected);
    BOOST_TEST(cut.keys == whole.keys, boost::test_tools::per_element());
    BOOST_TEST(cut.holds(rows));
  }
  BOOST_TEST(m->header().sampled < 30U * 80U);
}

BOOST_AUTO_TEST_CASE(draws_with_a_budget_count_as_the_items_that_came) {
  auto m = make_segment(of_bytes(8, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 8; i++) rows.append(rows.random_values({100}));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  batch.ragged.budget = {350};
  BOOST_REQUIRE(batch.sample(sampler, 8));
  BOOST_TEST(batch.keys.size() == 3U);
  BOOST_TEST(m->header().sampled == 3U);
  BOOST_TEST(m->header().draws == 1U);
}

BOOST_AUTO_TEST_CASE(writers_are_admitted_for_the_items_that_a_budget_leaves) {
  Plan plan = of_bytes(4, kMiB);
  plan.limiter = {2, 4, 0, 8};
  auto m = make_segment(plan);
  RaggedRows rows(*m);
  for (int i = 0; i < 2; i++) rows.append(rows.random_values({100}));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  batch.ragged.budget = {350};
  BOOST_REQUIRE(batch.sample(sampler, 8));
  BOOST_TEST(m->header().sampled == 3U);
  BOOST_TEST(m->header().ticket_limit.load() == 2U);  // (3 + 8) / 4
}

BOOST_AUTO_TEST_CASE(an_item_larger_than_the_budget_comes_alone) {
  auto m = make_segment(of_bytes(8, kMiB));
  RaggedRows rows(*m);
  for (int i = 0; i < 8; i++) rows.append(rows.random_values({100}));
  BatchSampler sampler(*m);
  RaggedDraw batch(*m);
  batch.ragged.budget = {7};
  BOOST_REQUIRE(batch.sample(sampler, 8));
  BOOST_TEST(batch.keys.size() == 1U);
  BOOST_TEST(batch.holds(rows));
}

// Chi-square over 64 rows and 16,000 draws of 8 of 64 items: the threshold is the normal approximation at 5 sigma, a
// false alarm in about 10^6 runs; the seeds are fixed. Without replacement counts vary less.
BOOST_AUTO_TEST_CASE(a_budget_leaves_no_slot_out_more_often_than_others) {
  for (const uint32_t epochs : {0U, 1U}) {
    auto m = make_segment(of_bytes(64, kMiB, {.epochs = epochs}));
    RaggedRows rows(*m);
    for (int i = 0; i < 64; i++) rows.append(rows.random_values({10}));
    BatchSampler sampler(*m);
    std::vector<int> first(64), together(64);
    constexpr int kDraws = 2000;
    for (uint64_t step = 0; step < kDraws; step++) {
      RaggedDraw batch(*m);
      batch.ragged.budget = {80};
      BOOST_REQUIRE(batch.sample(sampler, 64, {7, 0, step}));
      BOOST_REQUIRE(batch.keys.size() == 8U);
      for (const int64_t key : batch.keys) first[static_cast<size_t>(key)]++;
      for (size_t i = 1; i < 8; i++) together[static_cast<size_t>((batch.keys[i] - batch.keys[0] + 64) % 64)]++;
    }
    double chi = 0, apart = 0;
    for (const int n : first) chi += (n - kDraws / 8.0) * (n - kDraws / 8.0) / (kDraws / 8.0);
    BOOST_TEST(chi < 63 + 5 * std::sqrt(2 * 63.0));
    // Items of one batch lie as far from each other as any: strata keep most of them from being the same one.
    const double mean = kDraws * 7 / 63.0;
    for (size_t d = 2; d < 63; d++) apart += (together[d] - mean) * (together[d] - mean) / mean;
    BOOST_TEST(apart < 2 * (61 + 5 * std::sqrt(2 * 61.0)));
  }
}

BOOST_AUTO_TEST_CASE(with_a_budget_every_item_of_an_epoch_is_drawn_once) {
  auto m = make_segment(of_bytes(100, kMiB, {.epochs = 1}));
  RaggedRows rows(*m);
  std::mt19937 random(5);
  for (int i = 0; i < 100; i++) rows.append(rows.random_values({static_cast<uint32_t>(random() % 50)}));
  for (const bool bounded : {false, true}) {
    BatchSampler sampler(*m);
    uint64_t step = 0;
    for (int epoch = 0; epoch < 4; epoch++) {
      std::set<int64_t> drawn;
      while (drawn.size() < 100) {
        RaggedDraw batch(*m);
        batch.ragged.budget = {300};
        DrawRules rules;
        if (bounded) rules.last_epoch = Epochs(*m).ended();
        if (bounded && drawn.empty()) rules.last_epoch++;
        BOOST_REQUIRE(batch.sample(sampler, 32, {7, 0, step++}, rules));
        BOOST_TEST(batch.holds(rows));
        for (const int64_t key : batch.keys) BOOST_TEST(drawn.insert(key).second);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(with_a_budget_no_draw_of_a_counted_item_is_lost) {
  auto m = make_segment(of_bytes(40, kMiB, {.max_draws = 3}));
  RaggedRows rows(*m);
  std::mt19937 random(6);
  for (int i = 0; i < 40; i++) rows.append(rows.random_values({static_cast<uint32_t>(random() % 50)}));
  BatchSampler sampler(*m);
  std::vector<int> drawn(40);
  for (uint64_t step = 0; std::accumulate(drawn.begin(), drawn.end(), 0) < 110; step++) {
    RaggedDraw batch(*m);
    batch.ragged.budget = {100};
    BOOST_REQUIRE(batch.sample(sampler, 10, {7, 0, step}));
    for (const int64_t key : batch.keys) drawn[static_cast<size_t>(key)]++;
  }
  for (size_t key = 0; key < 40; key++) BOOST_TEST(DrawCounts(*m).draws(key) == static_cast<uint64_t>(drawn[key]));
}

BOOST_AUTO_TEST_CASE(what_a_budget_leaves_out_of_a_queues_batch_is_the_next_to_come) {
  auto m = make_segment(of_bytes(60, kMiB, {.queue = 1, .max_draws = 1}));
  RaggedRows rows(*m);
  std::mt19937 random(8);
  for (int i = 0; i < 60; i++) rows.append(rows.random_values({static_cast<uint32_t>(random() % 50)}));
  BatchSampler sampler(*m);
  int64_t next = 0;
  for (uint64_t step = 0; next < 60; step++) {
    RaggedDraw batch(*m);
    batch.ragged.budget = {100};
    BOOST_REQUIRE(batch.sample(sampler, 16, {7, 0, step}, {.at_least = 1}));
    BOOST_TEST(batch.holds(rows));
    int64_t bytes = 0;
    for (const int64_t key : batch.keys) {
      BOOST_TEST(key == next++);
      bytes += static_cast<int64_t>(rows[static_cast<size_t>(key)][0].size());
    }
    BOOST_TEST((bytes <= 100 || batch.keys.size() == 1));
    if (next < 60 && batch.keys.size() < 16)
      BOOST_TEST(bytes + static_cast<int64_t>(rows[static_cast<size_t>(next)][0].size()) > 100);
  }
}

// Items of several rows

namespace {

// Episodes of several streams, and which rows each consists of.
struct Episodes {
  std::vector<std::vector<uint64_t>> keys;              // of each episode
  std::map<uint64_t, std::pair<size_t, size_t>> place;  // of a key: its episode, and which row of that

  void add(size_t episode, uint64_t key) {
    place[key] = {episode, keys[episode].size()};
    keys[episode].push_back(key);
  }
};

Episodes explore(SegmentMemory& m, RaggedRows& rows, int episodes, unsigned seed) {
  std::mt19937 random(seed);
  Explorer explorers[2] = {{m, 1}, {m, 2}};
  Episodes e;
  for (int i = 0; i < episodes; i++) {
    e.keys.resize(e.keys.size() + 2);
    const size_t first = e.keys.size() - 2;
    const uint32_t steps = 1 + random() % 9;
    for (size_t k : {0, 1}) e.add(first + k, explorers[k].reset(rows.prepare(rows.some_values(20))));
    for (uint32_t s = 1; s <= steps; s++)
      for (size_t k : {0, 1})
        e.add(first + k, explorers[k].step(s == steps ? kTerminated : 0, {}, rows.prepare(rows.some_values(20))));
  }
  return e;
}

// What an output shows at a position, as the model has it.
const Bytes& expected(const RaggedRows& rows, const Episodes& e, const Output& o, uint64_t anchor, size_t position,
                      uint32_t most_steps) {
  static const Bytes none;
  const auto& [episode, at] = e.place.at(anchor);
  const std::vector<uint64_t>& keys = e.keys[episode];
  const size_t end = std::min(at + most_steps, keys.size() - 1);
  const auto from = static_cast<int64_t>(o.kind == Kind::kEnd ? end : at) + o.first + static_cast<int64_t>(position);
  if (from > static_cast<int64_t>(end)) return none;
  return rows[keys[static_cast<size_t>(std::max<int64_t>(from, 0))]][static_cast<size_t>(o.ragged)];
}

void check_items(const View& view, const ItemPlan& plan) {
  Plan buffer = rows_of_any_length(400, 4 * kMiB, view);
  auto m = make_segment(buffer);
  plan.check(m->layout());
  RaggedRows rows(*m);
  const Episodes episodes = explore(*m, rows, 30, 4);  // fewer rows than slots: keys count them
  BatchSampler sampler(*m, &plan);
  for (const int n : {1, 16, 53}) {
    RaggedDraw batch(*m, &plan);
    BOOST_REQUIRE(batch.sample(sampler, n, {7, 0, static_cast<uint64_t>(n)}));
    std::vector<const Output*> outputs;
    for (const Output& o : plan.outputs)
      if (o.is_ragged()) outputs.push_back(&o);
    BOOST_TEST(batch.holds([&](size_t output, size_t item, size_t position) -> const Bytes& {
      return expected(rows, episodes, *outputs[output], static_cast<uint64_t>(batch.keys[item]), position, plan.steps);
    }));
    for (size_t i = 0; i < batch.keys.size(); i++) BOOST_TEST(batch.rows[i] == batch.keys[i]);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(transitions_have_the_values_of_their_first_and_their_last_row) {
  for (const uint32_t steps : {1U, 3U}) {
    ItemPlan plan{.outputs = {{.kind = Kind::kAnchor, .field = 0}}, .steps = steps};
    for (const int32_t field : {0, 1, 2, 3})
      for (const Kind kind : {Kind::kAnchor, Kind::kEnd}) plan.outputs.push_back({.kind = kind, .ragged = field});
    plan.outputs.push_back({.kind = Kind::kAnchor, .first = 1, .ragged = 2});
    check_items(transitions(steps), plan);
  }
}

BOOST_AUTO_TEST_CASE(stacks_repeat_the_values_of_an_episodes_first_row) {
  constexpr uint32_t kStack = 4;
  ItemPlan plan{.outputs = {{.kind = Kind::kAnchor, .field = 0}}, .steps = 1};
  for (const int32_t field : {0, 2})
    for (const Kind kind : {Kind::kAnchor, Kind::kEnd})
      plan.outputs.push_back(
          {.kind = kind, .first = 1 - static_cast<int32_t>(kStack), .count = kStack, .ragged = field});
  check_items(transitions(1, kStack), plan);
}

BOOST_AUTO_TEST_CASE(sequences_have_a_value_for_each_step_and_none_beyond_the_end) {
  ItemPlan plan{.outputs = {{.kind = Kind::kAnchor, .field = 0}}, .steps = 6};
  plan.outputs.push_back({.kind = Kind::kAnchor, .first = 0, .count = 7, .ragged = 0});
  plan.outputs.push_back({.kind = Kind::kAnchor, .first = 1, .count = 6, .ragged = 1});
  plan.outputs.push_back({.kind = Kind::kAnchor, .first = 1, .count = 6, .ragged = 3});
  check_items(sequences(6, 2), plan);
}

BOOST_AUTO_TEST_CASE(a_plan_that_asks_of_a_ragged_field_what_it_has_not_is_refused) {
  const Layout layout = config_of(rows_of_any_length(8, kMiB, transitions(1))).layout;
  const auto check = [&](const Output& output) { ItemPlan{.outputs = {output}, .steps = 1}.check(layout); };
  check({.kind = Kind::kEnd, .ragged = 3});
  BOOST_CHECK_THROW(check({.kind = Kind::kEnd, .ragged = 4}), std::invalid_argument);
  BOOST_CHECK_THROW(check({.kind = Kind::kReturn, .ragged = 0}), std::invalid_argument);
  BOOST_CHECK_THROW(check({.kind = Kind::kGoal, .ragged = 0}), std::invalid_argument);
  BOOST_CHECK_THROW(check({.kind = Kind::kMask, .ragged = 0}), std::invalid_argument);
  BOOST_CHECK_THROW(check({.kind = Kind::kAnchor, .field = 1}), std::invalid_argument);  // hidden
}

BOOST_AUTO_TEST_SUITE_END()
