#include <boost/test/unit_test.hpp>

#include "draw/priority_updater.h"
#include "invariants.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_update)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

std::unique_ptr<SegmentMemory> filled(uint64_t capacity, uint64_t rows, SamplerConfig sampler) {
  Plan plan;
  plan.capacity = capacity;
  plan.sampler = sampler;
  auto m = make_segment(plan);
  for (uint64_t i = 0; i < rows; i++) append_row(*m, 1, i);
  return m;
}

constexpr SamplerConfig kSquareRoot{1, Normalize::kBuffer, 0.5, 0};

std::optional<BadKey> update(SegmentMemory& m, const std::vector<int64_t>& keys, const std::vector<double>& td) {
  return PriorityUpdater(m).update(static_cast<int64_t>(keys.size()), keys.data(), td.data());
}

}  // namespace

BOOST_AUTO_TEST_CASE(leaves_become_the_td_error_plus_eps_to_the_alpha) {
  auto m = filled(10, 10, {1, Normalize::kBuffer, 0.6, 0.5});
  BOOST_TEST(!update(*m, {2, 7, 9}, {3.0, -0.25, 0.0}));
  const double raw[] = {3.0, 0.25, 0.0};
  const int64_t keys[] = {2, 7, 9};
  for (int i = 0; i < 3; i++)
    BOOST_TEST(m->tree().leaf(keys[i]) == std::pow(raw[i] + 0.5, 0.6), boost::test_tools::tolerance(1e-6));
  BOOST_TEST(m->header().updated == 3U);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_row_just_written_can_be_updated) {
  auto m = filled(10, 3, kSquareRoot);
  BOOST_TEST(!update(*m, {2}, {4}));
  BOOST_TEST(m->tree().leaf(2) == 2.0F);
}

BOOST_AUTO_TEST_CASE(of_equal_keys_the_last_wins) {
  auto m = filled(10, 10, kSquareRoot);
  update(*m, {4, 5, 4, 4}, {100, 1, 64, 9});
  BOOST_TEST(m->tree().leaf(4) == 3.0F);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(updates_of_overwritten_rows_are_dropped_and_counted) {
  auto m = filled(4, 6, kSquareRoot);  // keys 0 and 1 are gone
  update(*m, {0, 1, 2, 5}, {1e6, 1e6, 4, 9});
  BOOST_TEST(m->header().stale_updates == 2U);
  BOOST_TEST(m->header().updated == 2U);
  BOOST_TEST(m->tree().leaf(0) == 1.0F);    // key 4 now, untouched
  BOOST_TEST(m->tree().leaf(1) == 3.0F);    // key 5
  BOOST_TEST(m->header().max_raw == 9.0F);  // a dropped TD error does not raise the maximum
}

BOOST_AUTO_TEST_CASE(a_row_still_being_written_is_unready) {
  auto m = filled(4, 4, kSquareRoot);
  SteppedWriter slow(*m, 2);
  slow.take_ticket();
  slow.seize();
  update(*m, {4, 0}, {50, 50});
  BOOST_TEST(m->header().unready_updates == 1U);
  BOOST_TEST(m->header().stale_updates == 1U);
  BOOST_TEST(m->header().max_raw == 1.0F);
  slow.finish();
  update(*m, {4}, {25});
  BOOST_TEST(m->tree().leaf(0) == 5.0F);
}

BOOST_AUTO_TEST_CASE(the_row_of_a_freed_slot_is_not_revived) {
  auto m = filled(4, 4, kSquareRoot);
  SteppedWriter dead(*m, 2);
  dead.take_ticket();
  dead.seize();
  reclaim(*m, 2);
  update(*m, {4, 0}, {50, 50});
  BOOST_TEST(m->tree().leaf(0) == 0.0F);
  BOOST_TEST(m->header().updated == 0U);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_key_never_issued_is_returned_and_nothing_is_applied) {
  auto m = filled(10, 5, kSquareRoot);
  const auto bad = update(*m, {1, 2, 5, 6}, {9, 9, 9, 9});
  BOOST_REQUIRE(bad.has_value());
  BOOST_TEST(bad->index == 2);
  BOOST_TEST(bad->key == 5);
  BOOST_TEST(bad->issued == 5U);
  BOOST_TEST(update(*m, {-1}, {1})->key == -1);
  settle(*m);
  for (int i = 0; i < 5; i++) BOOST_TEST(m->tree().leaf(i) == 1.0F);
  BOOST_TEST(m->header().updated + m->header().stale_updates + m->header().unready_updates == 0U);
}

BOOST_AUTO_TEST_CASE(the_largest_td_error_is_what_new_rows_get) {
  auto m = filled(10, 5, kSquareRoot);
  update(*m, {0, 1}, {-16, 0.25});
  const uint64_t key = append_row(*m, 1);
  settle(*m);
  BOOST_TEST(m->tree().leaf(static_cast<int64_t>(key)) == 4.0F);
  update(*m, {0}, {0.01});  // the maximum never falls
  BOOST_TEST(m->header().max_raw == 16.0F);
}

BOOST_AUTO_TEST_CASE(td_errors_whose_leaves_no_float_holds_get_the_largest_or_the_smallest_normal_one) {
  using Float = std::numeric_limits<float>;
  auto m = filled(10, 5, {1, Normalize::kBuffer, 2, 0});
  update(*m, {0, 1, 2, 3, 4}, {1e300, 1e20, 1e-30, 0, 1e15});
  BOOST_TEST(m->tree().leaf(0) == Float::max());
  BOOST_TEST(m->tree().leaf(1) == Float::max());
  BOOST_TEST(m->tree().leaf(2) == Float::min());
  BOOST_TEST(m->tree().leaf(3) == Float::min());
  BOOST_TEST(m->tree().leaf(4) == 1e30F);
  BOOST_TEST(m->header().max_raw == Float::max());
  append_row(*m, 1);
  settle(*m);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(under_uniform_sampling_nothing_changes_but_the_counts_of_the_dropped) {
  auto m = filled(4, 6, {});
  update(*m, {0, 3, 5}, {10, 10, 10});
  for (int i = 0; i < 4; i++) BOOST_TEST(m->tree().leaf(i) == 1.0F);
  BOOST_TEST(m->header().stale_updates == 1U);
  BOOST_TEST(m->header().max_raw == 1.0F);
}

BOOST_AUTO_TEST_CASE(an_update_of_no_keys_is_an_update_of_nothing) {
  auto m = filled(4, 2, kSquareRoot);
  BOOST_TEST(!update(*m, {}, {}));
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(updates_larger_than_the_ring_are_applied_in_order) {
  auto m = filled(100, 100, kSquareRoot);
  std::vector<int64_t> keys;
  std::vector<double> td;
  for (int64_t i = 0; i < 5000; i++) {
    keys.push_back(i * 37 % 100);
    td.push_back(static_cast<double>(i + 1));
  }
  update(*m, keys, td);
  for (int64_t i = 4900; i < 5000; i++)
    BOOST_TEST(m->tree().leaf(keys[i]) == std::sqrt(static_cast<float>(i + 1)), boost::test_tools::tolerance(1e-6F));
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_SUITE_END()
