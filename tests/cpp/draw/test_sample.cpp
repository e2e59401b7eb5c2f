#include <boost/test/unit_test.hpp>
#include <random>

#include "draw/batch_sampler.h"
#include "explorers.h"
#include "invariants.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_sample)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

struct Batch {
  Draw outcome;
  Shortage shortage;
  std::vector<int64_t> keys, values;
  std::vector<float> weight, probability;
};

Batch draw(SegmentMemory& m, int n, double beta = 0.5, const DrawName& name = {7, 0, 0}) {
  Batch b{{}, {}, std::vector<int64_t>(n), std::vector<int64_t>(n), std::vector<float>(n), std::vector<float>(n)};
  const BatchPointers out{
      {reinterpret_cast<char*>(b.values.data())}, b.keys.data(), b.weight.data(), b.probability.data()};
  b.outcome = BatchSampler(m).sample(n, beta, name, out, b.shortage);
  return b;
}

// A buffer of one row for each raw priority; row i has value 1000 + i.
std::unique_ptr<SegmentMemory> buffer_of(const std::vector<float>& priorities, Plan plan = {}) {
  plan.capacity = priorities.size();
  auto m = make_segment(plan);
  for (size_t i = 0; i < priorities.size(); i++) append_row(*m, 1, 1000 + i, priorities[i]);
  return m;
}

std::vector<float> any_priorities(size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<float> p(n);
  for (float& v : p) v = std::pow(10.0F, std::uniform_real_distribution<float>(-3, 3)(random));
  return p;
}

// Takes the slot of the oldest row for a writer, so late that the learner does not know of it when it draws.
SteppedWriter overwrite_unseen(SegmentMemory& m) {
  settle(m);
  SteppedWriter writer(m, 2);
  m.header().absorbed = writer.take_ticket() + 1;
  writer.seize();
  return writer;
}

}  // namespace

BOOST_AUTO_TEST_CASE(rows_come_with_their_own_keys) {
  auto m = buffer_of(any_priorities(50, 1));
  const Batch b = draw(*m, 400);
  for (int i = 0; i < 400; i++) BOOST_TEST(b.values[i] == 1000 + b.keys[i]);
}

// Long values are copied another way than short ones, and differently into large batches where the processor can.
BOOST_AUTO_TEST_CASE(long_values_of_several_sizes_come_with_their_own_keys) {
  Plan plan;
  plan.capacity = 90;
  plan.fields = {{Element::kU8, 7000}, {Element::kI64, 8}, {Element::kF32, 1504}};
  auto m = make_segment(plan);
  for (uint64_t i = 0; i < plan.capacity; i++) append_row(*m, 1, 1000 + i, 1.0F);
  for (const int n : {1, 2, 15, 16, 17, 18, 33, 400})
    for (const uint64_t bytes : {uint64_t{0}, kStreamBatchBytes}) {
      const auto items = static_cast<size_t>(n);
      std::vector<std::vector<uint64_t>> values;
      BatchPointers out;
      for (const Field& f : plan.fields) values.emplace_back(items * f.nbytes / sizeof(uint64_t));
      for (auto& of_field : values) out.values.push_back(reinterpret_cast<char*>(of_field.data()));
      std::vector<int64_t> keys(items);
      std::vector<float> weight(items), probability(items);
      out.keys = keys.data();
      out.weight = weight.data();
      out.probability = probability.data();
      out.bytes = bytes;
      Shortage shortage;
      BOOST_REQUIRE((BatchSampler(*m).sample(n, 0.5, {7, 0, bytes}, out, shortage) == Draw::kDone));
      for (const auto& of_field : values) {
        const size_t words = of_field.size() / items;
        for (size_t i = 0; i < of_field.size(); i++)
          BOOST_REQUIRE(of_field[i] == 1000 + static_cast<uint64_t>(keys[i / words]));
      }
    }
}

// Item i of n comes from the i-th of n equal parts of the total, so the cumulated priorities bracket it.
BOOST_AUTO_TEST_CASE(every_item_comes_from_its_own_stratum) {
  for (unsigned seed = 0; seed < 50; seed++) {
    const int n = 1 + static_cast<int>(seed * 37 % 300);
    auto m = buffer_of(any_priorities(1 + seed * 7 % 90, seed));
    settle(*m);
    const PriorityTree tree = m->tree();
    std::vector<long double> before(m->capacity() + 1, 0);
    for (uint64_t s = 0; s < m->capacity(); s++)
      before[s + 1] = before[s] + static_cast<long double>(tree.quantize(tree.leaf(static_cast<int64_t>(s))));
    const Batch b = draw(*m, n, 0.5, {seed, 0, 3});
    for (int i = 0; i < n; i++) {
      const long double low = before.back() * i / n, high = before.back() * (i + 1) / n;
      BOOST_TEST((before[b.keys[i] + 1] >= std::floor(low) && before[b.keys[i]] <= high));
    }
  }
}

BOOST_AUTO_TEST_CASE(probabilities_are_the_exact_share_of_the_leaf) {
  auto m = buffer_of(any_priorities(333, 2));
  const Batch b = draw(*m, 256);
  const PriorityTree tree = m->tree();
  for (int i = 0; i < 256; i++) {
    const double share = static_cast<double>(tree.quantize(tree.leaf(b.keys[i]))) / static_cast<double>(tree.total());
    BOOST_TEST(b.probability[i] == static_cast<float>(share));
  }
}

// Schaul et al. 2016: P(i) = p_i^alpha / sum, w_i = (N P(i))^-beta / max w, in double precision from raw priorities.
BOOST_AUTO_TEST_CASE(weights_and_probabilities_follow_the_published_formula) {
  for (Normalize normalize : {Normalize::kBuffer, Normalize::kBatch, Normalize::kNone}) {
    Plan plan;
    plan.sampler = {1, normalize, 0.7, 0.01};
    const std::vector<float> raw = any_priorities(100, 3);
    auto m = buffer_of(raw, plan);
    const double beta = 0.45;
    const Batch b = draw(*m, 64, beta);
    double sum = 0, largest_of_buffer = 0, largest_of_batch = 0;
    for (float p : raw) sum += std::pow(p + 0.01, 0.7);
    auto probability = [&](int64_t key) { return std::pow(raw[key] + 0.01, 0.7) / sum; };
    auto weight = [&](int64_t key) { return std::pow(100 * probability(key), -beta); };
    for (int64_t k = 0; k < 100; k++) largest_of_buffer = std::max(largest_of_buffer, weight(k));
    for (int64_t key : b.keys) largest_of_batch = std::max(largest_of_batch, weight(key));
    const double largest = normalize == Normalize::kBuffer  ? largest_of_buffer
                           : normalize == Normalize::kBatch ? largest_of_batch
                                                            : 1;
    for (int i = 0; i < 64; i++) {
      BOOST_TEST(b.probability[i] == probability(b.keys[i]), boost::test_tools::tolerance(1e-5));
      BOOST_TEST(b.weight[i] == weight(b.keys[i]) / largest, boost::test_tools::tolerance(1e-5));
    }
  }
}

BOOST_AUTO_TEST_CASE(without_beta_and_under_uniform_sampling_every_weight_is_one) {
  auto prioritized = buffer_of(any_priorities(20, 4));
  for (float w : draw(*prioritized, 32, 0).weight) BOOST_TEST(w == 1.0F);
  Plan plan;
  plan.sampler = {};
  auto uniform = buffer_of(any_priorities(20, 4), plan);
  const Batch b = draw(*uniform, 32, 1);
  for (float w : b.weight) BOOST_TEST(w == 1.0F);
  for (float p : b.probability) BOOST_TEST(p == 0.05F);
}

BOOST_AUTO_TEST_CASE(uniform_draws_of_whole_turns_take_every_row_equally_often) {
  Plan plan;
  plan.sampler = {};
  auto m = buffer_of(std::vector<float>(25, 1), plan);
  std::vector<int> count(25);
  for (int64_t key : draw(*m, 100).keys) count[key]++;
  for (int c : count) BOOST_TEST(c == 4);  // strata tile the rows
}

BOOST_AUTO_TEST_CASE(the_same_name_and_contents_give_the_same_batch_and_other_names_give_others) {
  auto a = buffer_of(any_priorities(500, 5)), b = buffer_of(any_priorities(500, 5));
  const Batch first = draw(*a, 128, 0.5, {9, 2, 40});
  const Batch same = draw(*b, 128, 0.5, {9, 2, 40});
  BOOST_TEST(first.keys == same.keys, boost::test_tools::per_element());
  BOOST_TEST(first.weight == same.weight, boost::test_tools::per_element());
  for (const DrawName& other : {DrawName{10, 2, 40}, {9, 3, 40}, {9, 2, 41}})
    BOOST_TEST((draw(*b, 128, 0.5, other).keys != first.keys));
}

// With one stratum a draw is a plain proportional one. Chi-square over 200 rows and 40,000 draws: the threshold is the
// normal approximation at 5 sigma, a false alarm in about 10^6 runs; the seeds are fixed.
BOOST_AUTO_TEST_CASE(single_draws_follow_the_distribution) {
  const std::vector<float> raw = any_priorities(200, 6);
  Plan plan;
  plan.sampler = {1, Normalize::kBuffer, 0.4, 0};
  auto m = buffer_of(raw, plan);
  constexpr int kDraws = 40'000;
  std::vector<int> count(raw.size());
  for (uint64_t step = 0; step < kDraws; step++) count[draw(*m, 1, 0, {11, 0, step}).keys[0]]++;
  double sum = 0, chi = 0;
  for (float p : raw) sum += std::pow(p, 0.4);
  for (size_t i = 0; i < raw.size(); i++) {
    const double expected = kDraws * std::pow(raw[i], 0.4) / sum;
    chi += (count[i] - expected) * (count[i] - expected) / expected;
  }
  BOOST_TEST(chi < 199 + 5 * std::sqrt(2 * 199.0));
}

BOOST_AUTO_TEST_CASE(more_items_than_units_of_priority_are_drawn_all_the_same) {
  Plan plan;
  plan.sampler = {1, Normalize::kBuffer, 1, 0};
  auto m = buffer_of({0x1p-41F}, plan);
  settle(*m);
  m->tree().rebuild_in({127, 0});  // as beside a leaf of 1
  BOOST_TEST(m->tree().total() == 1024U);
  BOOST_TEST((draw(*m, 3000).keys == std::vector<int64_t>(3000, 0)));
}

BOOST_AUTO_TEST_CASE(a_row_overwritten_after_the_draw_is_drawn_again_elsewhere) {
  auto m = buffer_of({8000, 1, 1});
  settle(*m);
  const double before = std::pow(8000, -0.6);  // about the light rows' share when the heavy one counted
  overwrite_unseen(*m);                        // the heavy row is being replaced
  const Batch b = draw(*m, 64);
  BOOST_TEST((b.outcome == Draw::kDone));
  for (int i = 0; i < 64; i++) {
    BOOST_TEST(b.keys[i] != 0);
    BOOST_TEST(b.values[i] == 1000 + b.keys[i]);
    BOOST_TEST((b.probability[i] == 0.5F || std::fabs(b.probability[i] - before) < before / 50));
    BOOST_TEST(b.weight[i] == 1.0F);
  }
  BOOST_TEST(std::count(b.probability.begin(), b.probability.end(), 0.5F) >= 60);
  BOOST_TEST(m->header().redraws.load() >= 60U);
  BOOST_TEST(m->header().sampled == 64U);  // counted once
  BOOST_TEST(m->tree().leaf(0) == 0.0F);   // and never drawn again
}

BOOST_AUTO_TEST_CASE(the_new_row_of_a_slot_is_never_returned_under_the_old_ones_key_or_probability) {
  auto m = buffer_of({8000, 1});
  SteppedWriter writer = overwrite_unseen(*m);
  writer.finish(1.0F, 5000);
  const Batch b = draw(*m, 40);
  for (int i = 0; i < 40; i++) {
    BOOST_TEST((b.keys[i] == 1 || b.keys[i] == 2));
    BOOST_TEST(b.values[i] == (b.keys[i] == 1 ? 1001 : 5000));
    BOOST_TEST(b.probability[i] == 0.5F);
  }
}

BOOST_AUTO_TEST_CASE(when_the_last_row_is_overwritten_the_draw_waits_and_is_not_counted) {
  auto m = buffer_of({3});
  SteppedWriter writer = overwrite_unseen(*m);
  const Batch b = draw(*m, 8);
  BOOST_TEST((b.outcome == Draw::kWait));
  BOOST_TEST(b.shortage.drawable == 0U);
  BOOST_TEST(m->header().sampled == 0U);
  writer.finish({}, 5000);
  BOOST_TEST((draw(*m, 8).values == std::vector<int64_t>(8, 5000)));
}

BOOST_AUTO_TEST_CASE(an_empty_buffer_and_one_below_its_minimum_wait_and_say_for_what) {
  Plan plan;
  plan.capacity = 16;
  plan.limiter.min_size = 10;
  auto m = make_segment(plan);
  Batch b = draw(*m, 4);
  BOOST_TEST((b.outcome == Draw::kWait));
  BOOST_TEST(b.shortage.needed == 10U);
  BOOST_TEST(b.shortage.inserted == 0U);
  BOOST_TEST(m->header().wake_at.load() == 9U);  // the tenth ticket wakes the learner
  for (int i = 0; i < 9; i++) append_row(*m, 1);
  b = draw(*m, 4);
  BOOST_TEST((b.outcome == Draw::kWait));
  BOOST_TEST(b.shortage.inserted == 9U);
  BOOST_TEST(b.shortage.drawable == 9U);
  append_row(*m, 1);
  BOOST_TEST(m->header().rows_signal.load() == 1U);
  BOOST_TEST((draw(*m, 4).outcome == Draw::kDone));
  BOOST_TEST(m->header().sampled == 4U);
}

BOOST_AUTO_TEST_CASE(a_minimum_beyond_the_capacity_is_reached_by_a_learner_that_is_woken_once_a_turn) {
  Plan plan;
  plan.capacity = 16;
  plan.limiter.min_size = 40;
  auto m = make_segment(plan);
  for (uint64_t wakes : {15U, 31U, 39U}) {
    BOOST_TEST((draw(*m, 4).outcome == Draw::kWait));
    BOOST_TEST(m->header().wake_at.load() == wakes);
    while (m->header().head.load() <= wakes) append_row(*m, 1);
  }
  BOOST_TEST((draw(*m, 4).outcome == Draw::kDone));
  BOOST_TEST(m->header().inserted == 40U);
}

// Items of episodes longer than the ring: none can be drawn between the turn after an end and the next end.
BOOST_AUTO_TEST_CASE(a_wait_is_in_vain_once_two_turns_of_rows_completed_no_item) {
  Plan plan;
  plan.view = whole_episodes();
  for (bool repaired : {false, true}) {
    auto m = make_segment(plan);  // 8 slots
    Explorer a(*m, 1);
    BOOST_TEST((draw(*m, 4).outcome == Draw::kWait));
    a.episode(29);  // not watched by any learner
    if (repaired) m->header().dirty = Dirty::kLinks, Recovery(*m).run();
    BOOST_TEST((draw(*m, 4).outcome == Draw::kDone));
    a.reset();
    for (int row = 2; row <= 16; row++) {
      a.step();
      if (row >= 8) BOOST_TEST((draw(*m, 4).outcome == Draw::kWait));
    }
    a.step();
    BOOST_TEST((draw(*m, 4).outcome == Draw::kBarren));
    a.step(kTruncated);
    BOOST_TEST((draw(*m, 4).outcome == Draw::kDone));
  }
}

BOOST_AUTO_TEST_CASE(a_stopped_buffer_is_not_drawn_from) {
  auto m = buffer_of({1, 2});
  m->header().stopped.store(1);
  BOOST_TEST((draw(*m, 4).outcome == Draw::kStopped));
  BOOST_TEST(m->header().sampled == 0U);
}

BOOST_AUTO_TEST_CASE(a_learner_ahead_of_the_ratio_waits_and_its_draws_admit_writers) {
  Plan plan;
  plan.limiter = {2, 4, 0, 8};
  plan.capacity = 4;
  auto m = make_segment(plan);
  for (int i = 0; i < 2; i++) append_row(*m, 1, 0, 1);
  BOOST_TEST((draw(*m, 8).outcome == Draw::kDone));
  BOOST_TEST(m->header().ticket_limit.load() == 4U);  // (8 + 8) / 4
  const Batch b = draw(*m, 1);
  BOOST_TEST((b.outcome == Draw::kWait));
  BOOST_TEST(b.shortage.needed == 3U);
}

BOOST_AUTO_TEST_CASE(fields_of_every_size_are_copied_whole) {
  Plan plan;
  plan.capacity = 40;
  const uint64_t sizes[] = {1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 33, 100, 1024, 5000};
  plan.fields.clear();
  for (uint64_t n : sizes) plan.fields.push_back({Element::kU8, n});
  auto m = make_segment(plan);
  for (uint64_t i = 0; i < 55; i++) append_row(*m, 1, 0x0101010101010101 * (i + 1));
  constexpr int kBatch = 37;  // not a multiple of the block
  std::vector<std::vector<char>> values;
  BatchPointers out;
  for (uint64_t n : sizes) values.emplace_back(n * kBatch + 1, '\x7f');
  for (auto& v : values) out.values.push_back(v.data());
  std::vector<int64_t> keys(kBatch);
  std::vector<float> weight(kBatch), probability(kBatch);
  out.keys = keys.data();
  out.weight = weight.data();
  out.probability = probability.data();
  Shortage shortage;
  BOOST_TEST((BatchSampler(*m).sample(kBatch, 0, {}, out, shortage) == Draw::kDone));
  for (size_t f = 0; f < std::size(sizes); f++) {
    bool right = values[f].back() == '\x7f';
    for (uint64_t i = 0; i < kBatch * sizes[f]; i++) right &= values[f][i] == static_cast<char>(keys[i / sizes[f]] + 1);
    BOOST_TEST(right);
  }
}

BOOST_AUTO_TEST_SUITE_END()
