#include <boost/test/unit_test.hpp>
#include <cmath>

#include "batches.h"
#include "explorers.h"
#include "invariants.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_items)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;
using Ints = std::vector<int64_t>;
using Bools = std::vector<uint8_t>;

// Fields: an observation, an action and a reward.
enum : uint32_t { kObs, kAction, kReward };

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view, Element reward = Element::kF32,
                                       uint64_t rewards = 1) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = {};
  plan.fields = {{Element::kI64, 8}, {Element::kI64, 8}, {reward, rewards * static_cast<uint64_t>(item_size(reward))}};
  return make_segment(plan);
}

// Writes rows with given values; those of a reset are zeros except the observation.
class Teller {
 public:
  explicit Teller(SegmentMemory& m, int id = 1) : m_(m), explorer_(m, id) {}

  uint64_t reset(int64_t obs) { return explorer_.reset(fill(obs, 0, {})); }
  uint64_t step(int64_t obs, int64_t action, const std::vector<double>& reward, uint64_t flags = 0) {
    return explorer_.step(flags, {}, fill(obs, action, reward));
  }

 private:
  Explorer::Fill fill(int64_t obs, int64_t action, std::vector<double> reward) {
    return [this, obs, action, reward](uint64_t slot) {
      const auto& f = m_.layout().fields;
      copy_payload(m_.value(f[kObs], slot), &obs, 8);
      copy_payload(m_.value(f[kAction], slot), &action, 8);
      std::vector<double> values = reward;
      values.resize(f[kReward].nbytes / static_cast<uint64_t>(item_size(f[kReward].element)));
      StridedArray a;
      a.element = Element::kF64;
      a.dims = 1;
      a.shape[0] = static_cast<int64_t>(values.size());
      a.stride[0] = 8;
      copy_converted(m_.value(f[kReward], slot), f[kReward].element, reinterpret_cast<char*>(values.data()), a, 0);
    };
  }

  SegmentMemory& m_;
  Explorer explorer_;
};

// An n-step transition: obs, action, reward, next_obs, discount.
ItemPlan n_step(uint32_t n, double gamma, uint32_t stack = 1) {
  const int32_t first = 1 - static_cast<int32_t>(stack);
  return {{{Kind::kAnchor, kObs, first, stack},
           {Kind::kAnchor, kAction, 1},
           {Kind::kReturn, kReward},
           {Kind::kEnd, kObs, first, stack},
           {Kind::kDiscount}},
          n,
          gamma};
}

// A window: obs [T + 1], action [T], mask [T], is_first [T], the first step's action.
ItemPlan window(uint32_t steps) {
  return {{{Kind::kAnchor, kObs, 0, steps + 1},
           {Kind::kAnchor, kAction, 1, steps},
           {Kind::kMask, 0, 0, steps},
           {Kind::kFirst, 0, 0, steps},
           {Kind::kAnchor, kAction, 1}},
          steps};
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_n_step_transition_has_the_discounted_return_and_the_observation_after_it) {
  auto m = ring_of(32, transitions(3));
  Teller t(*m);
  t.reset(10);
  for (int64_t i = 1; i <= 4; i++) t.step(10 + i, 100 + i, {static_cast<double>(1 << i)});  // 2, 4, 8, 16
  t.step(15, 105, {32}, kTerminated);
  t.reset(20);
  t.step(21, 201, {3});
  t.step(22, 202, {5}, kTruncated);
  const ItemPlan plan = n_step(3, 0.5);
  const Items b = gather(*m, plan, {0, 1, 2, 3, 4, 6, 7});
  BOOST_TEST(b.keys == (Ints{0, 1, 2, 3, 4, 6, 7}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(0) == (Ints{10, 11, 12, 13, 14, 20, 21}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(1) == (Ints{101, 102, 103, 104, 105, 201, 202}), boost::test_tools::per_element());
  // 2 + 4/2 + 8/4, 4 + 8/2 + 16/4, 8 + 16/2 + 32/4, 16 + 32/2, 32; 3 + 5/2, 5
  BOOST_TEST(b.of<float>(2) == (std::vector<float>{6, 12, 24, 32, 32, 5.5, 5}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(3) == (Ints{13, 14, 15, 15, 15, 22, 22}), boost::test_tools::per_element());
  // A truncated episode bootstraps, a terminated one does not.
  BOOST_TEST(b.of<float>(4) == (std::vector<float>{0.125, 0.125, 0, 0, 0, 0.25, 0.5}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_end_of_both_kinds_counts_as_terminated) {
  auto m = ring_of(8, transitions(1));
  Teller t(*m);
  t.reset(0);
  t.step(1, 0, {1}, kTerminated | kTruncated);
  const ItemPlan plan = n_step(1, 0.9);
  BOOST_TEST(gather(*m, plan, {0}).of<float>(4)[0] == 0.0F);
}

BOOST_AUTO_TEST_CASE(a_stack_repeats_the_episodes_first_frame_and_reaches_into_no_other_episode) {
  auto m = ring_of(32, transitions(2, 4));
  Teller t(*m);
  t.reset(90);
  t.step(91, 0, {0}, kTerminated);
  t.reset(10);  // key 2
  for (int64_t i = 1; i <= 5; i++) t.step(10 + i, 0, {0}, i == 5 ? kTerminated : 0);
  const ItemPlan plan = n_step(2, 1, 4);
  const Items b = gather(*m, plan, {0, 2, 3, 5, 6});
  BOOST_TEST(b.of<int64_t>(0) == (Ints{90, 90, 90, 90, 10, 10, 10, 10, 10, 10, 10, 11, 10, 11, 12, 13, 11, 12, 13, 14}),
             boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(3) == (Ints{90, 90, 90, 91, 10, 10, 11, 12, 10, 11, 12, 13, 12, 13, 14, 15, 12, 13, 14, 15}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(fields_of_one_item_may_show_different_numbers_of_frames) {
  auto m = ring_of(32, transitions(1, 3));
  Teller t(*m);
  t.reset(10);
  for (int64_t i = 1; i <= 3; i++) t.step(10 + i, 20 + i, {0});
  const ItemPlan plan{{{Kind::kAnchor, kObs, -2, 3}, {Kind::kAnchor, kAction, -1, 2}, {Kind::kEnd, kAction, -1, 2}}, 1};
  const Items b = gather(*m, plan, {0, 1, 2});
  BOOST_TEST(b.of<int64_t>(0) == (Ints{10, 10, 10, 10, 10, 11, 10, 11, 12}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(1) == (Ints{0, 0, 0, 21, 21, 22}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(2) == (Ints{0, 21, 21, 22, 22, 23}), boost::test_tools::per_element());
}

// Of an episode of rewards 2, 4, 8, 16 with discounts 0.5, 0.25, 2, 0, kept in the field of actions.
BOOST_AUTO_TEST_CASE(a_field_may_discount_each_step_beside_gamma) {
  Plan ring;
  ring.capacity = 16;
  ring.view = transitions(3);
  ring.sampler = {};
  ring.fields = {{Element::kI64, 8}, {Element::kF64, 8}, {Element::kF32, 4}};
  auto m = make_segment(ring);
  Explorer explorer(*m, 1);
  auto row = [&m](double discount, float reward) {
    return [&m, discount, reward](uint64_t slot) {
      const auto& f = m->layout().fields;
      copy_payload(m->value(f[kAction], slot), &discount, sizeof discount);
      copy_payload(m->value(f[kReward], slot), &reward, sizeof reward);
    };
  };
  explorer.reset(row(0, 0));
  explorer.step(0, {}, row(0.5, 2));
  explorer.step(0, {}, row(0.25, 4));
  explorer.step(0, {}, row(2, 8));
  explorer.step(kTruncated, {}, row(0, 16));
  ItemPlan plan{{{Kind::kReturn, kReward}, {Kind::kDiscount}}, 3, 0.5};
  plan.discount_field = kAction;
  const Items b = gather(*m, plan, {0, 1, 2, 3});
  // Discounts with gamma: 0.25, 0.125, 1, 0. 2 + 4/4 + 8/32, 4 + 8/8 + 16/8, 8 + 16, 16.
  BOOST_TEST(b.of<float>(0) == (std::vector<float>{3.25, 7, 24, 16}), boost::test_tools::per_element());
  BOOST_TEST(b.of<float>(1) == (std::vector<float>{0.03125, 0, 0, 0}), boost::test_tools::per_element());
}

// In float32 1e8 swallows what is added to it; in float16 1/3 is 0.33325.
BOOST_AUTO_TEST_CASE(returns_are_summed_in_double_precision_and_rounded_once) {
  auto m = ring_of(8, transitions(3));
  Teller t(*m);
  t.reset(0);
  for (double r : {1e8, 1.0, -1e8}) t.step(0, 0, {r});
  const ItemPlan plan = n_step(3, 1);
  BOOST_TEST(gather(*m, plan, {0}).of<float>(2)[0] == 1.0F);

  auto half = ring_of(8, transitions(2), Element::kF16);
  Teller h(*half);
  h.reset(0);
  for (double r : {1.0, 1.0}) h.step(0, 0, {r});
  const ItemPlan two = n_step(2, 1 / 3.0);
  const Items b = gather(*half, two, {0});
  BOOST_TEST(b.of<uint16_t>(2)[0] == Half(4 / 3.0).bits);
}

BOOST_AUTO_TEST_CASE(returns_of_vectors_are_summed_element_by_element) {
  auto m = ring_of(8, transitions(2), Element::kF64, 3);
  Teller t(*m);
  t.reset(0);
  t.step(0, 0, {1, 2, 3});
  t.step(0, 0, {10, 20, -30}, kTerminated);
  const ItemPlan plan = n_step(2, 0.1);
  BOOST_TEST(gather(*m, plan, {0, 1}).of<double>(2) == (std::vector<double>{2, 4, 0, 10, 20, -30}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_sequence_is_padded_with_zeros_beyond_its_episodes_end) {
  auto m = ring_of(32, sequences(3, 2, 1));
  Teller t(*m);
  t.reset(10);
  for (int64_t i = 1; i <= 7; i++) t.step(10 + i, 100 + i, {0}, i == 7 ? kTruncated : 0);
  const ItemPlan plan = window(4);
  const Items b = gather(*m, plan, {0, 1, 2, 4, 6});
  BOOST_TEST(b.keys == (Ints{0, 2, 4}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(0) == (Ints{10, 11, 12, 13, 14, 12, 13, 14, 15, 16, 14, 15, 16, 17, 0}),
             boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(1) == (Ints{101, 102, 103, 104, 103, 104, 105, 106, 105, 106, 107, 0}),
             boost::test_tools::per_element());
  BOOST_TEST(b.of<uint8_t>(2) == (Bools{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0}), boost::test_tools::per_element());
  BOOST_TEST(b.of<uint8_t>(3) == (Bools{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(4) == (Ints{101, 103, 105}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_window_runs_over_the_ends_of_episodes_and_marks_the_resets) {
  auto m = ring_of(32, across_episodes(4));
  Teller t(*m);
  t.reset(10);
  t.step(11, 101, {0});
  t.step(12, 102, {0}, kTerminated);
  t.reset(20);  // key 3
  t.step(21, 201, {0}, kTruncated);
  t.reset(30);
  const ItemPlan plan = window(4);
  const Items b = gather(*m, plan, {0, 1, 2});
  BOOST_TEST(b.keys == (Ints{0, 1}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(0) == (Ints{10, 11, 12, 20, 21, 11, 12, 20, 21, 30}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(1) == (Ints{101, 102, 0, 201, 102, 0, 201, 0}), boost::test_tools::per_element());
  BOOST_TEST(b.of<uint8_t>(2) == (Bools{1, 1, 0, 1, 1, 0, 1, 0}), boost::test_tools::per_element());
  BOOST_TEST(b.of<uint8_t>(3) == (Bools{1, 0, 0, 1, 0, 0, 1, 0}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(keys_that_cannot_be_drawn_are_left_out_and_the_order_is_kept) {
  auto m = ring_of(6, transitions(1));
  Teller t(*m);
  t.reset(0);
  for (int64_t i = 1; i <= 8; i++) t.step(i, 0, {0});
  const ItemPlan plan = n_step(1, 1);
  const Items b = gather(*m, plan, {7, 8, 3, 2, 5, 5, -1, 9, 1 << 20, 4});
  BOOST_TEST(b.keys == (Ints{7, 3, 5, 5, 4}), boost::test_tools::per_element());
  BOOST_TEST(b.of<int64_t>(3) == (Ints{8, 4, 6, 6, 5}), boost::test_tools::per_element());
  for (float p : b.probability) BOOST_TEST(p == 0.2F);
  BOOST_TEST(gather(*m, plan, {}).keys.empty());
}

// Long values are copied another way, where the processor knows one.
BOOST_AUTO_TEST_CASE(long_values_of_large_batches_are_the_same_as_those_of_small_ones) {
  constexpr uint64_t kBytes = 7000;
  Plan wide;
  wide.capacity = 64;
  wide.view = transitions(3, 4);
  wide.sampler = {};
  wide.fields = {{Element::kU8, kBytes}};
  auto m = make_segment(wide);
  Explorer a(*m, 1);
  for (int i = 0; i < 7; i++) a.episode(static_cast<uint32_t>(i % 5 + 3), i % 2 ? kTerminated : kTruncated);
  settle(*m);
  Ints keys;
  for (uint64_t key : RowSet::committed(*m).items()) keys.push_back(static_cast<int64_t>(key));
  BOOST_TEST(keys.size() > 16U);
  const ItemPlan plan{{{Kind::kAnchor, 0, -3, 4}, {Kind::kEnd, 0, -3, 4}, {Kind::kAnchor, 0, 1, 3}}, 3};
  const Items small = gather(*m, plan, keys), large = gather(*m, plan, keys, kStreamBatchBytes);
  BOOST_TEST(small.keys == keys, boost::test_tools::per_element());
  BOOST_TEST(large.keys == keys, boost::test_tools::per_element());
  for (size_t o = 0; o < plan.outputs.size(); o++) BOOST_TEST((small.values[o] == large.values[o]));
}

BOOST_AUTO_TEST_CASE(an_item_whose_rows_say_wrong_steps_is_given_up_and_the_others_are_drawn) {
  const View view = transitions(1, 2);
  auto m = ring_of(100, view);
  Explorer explorer(*m, 1);
  explorer.episode(3);
  // The row after it says that it is the first step, and so its item needs no frame before it. The row itself says 7.
  const uint64_t wrong = explorer.write({kFirst, 7, 0});
  explorer.write({(wrong + 1) << 16, 1, 0});
  settle(*m);
  BOOST_REQUIRE(m->tree().count() == 4);
  ItemPlan plan;
  plan.steps = 1;
  plan.outputs = {{Kind::kAnchor, kObs, -1, 2, 0}};
  for (uint64_t step = 0; step < 20; step++) {
    const Items items = draw(*m, plan, 8, {7, 0, step});
    BOOST_REQUIRE((items.outcome == Draw::kDone));
    for (const int64_t key : items.keys) BOOST_TEST(key < 3);
  }
  BOOST_TEST(m->tree().count() == 3);
  BOOST_TEST((m->header().dirty == Dirty::kClean));
}

BOOST_AUTO_TEST_SUITE_END()
