#include <boost/test/unit_test.hpp>
#include <functional>
#include <set>
#include <thread>

#include "batches.h"
#include "checkpoint/import.h"
#include "draw/rewriter.h"
#include "explorers.h"
#include "invariants.h"
#include "reached.h"
#include "views.h"

using namespace torchreplay;
using namespace torchreplay::testing;

BOOST_AUTO_TEST_SUITE(test_rewriter)

namespace {

using Kind = Output::Kind;

// What this thread does the next time that it comes to a point.
thread_local std::string awaited;
thread_local std::function<void()> then;

void reach(std::string_view point) {
  if (point == awaited && then) std::exchange(then, nullptr)();
}

void once_at(const std::string& point, std::function<void()> what) {
  awaited = point;
  then = std::move(what);
}

constexpr uint64_t kWide = 2048;

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view = {}) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.fields = {{Element::kI64, 8}, {Element::kI64, kWide}, {Element::kI64, 8}};
  return make_segment(plan);
}

// Fields 0 and 1 of a row are one number throughout; field 2 is its key + 1, which nobody rewrites.
void write_key(SegmentMemory& m, uint64_t slot, uint64_t key) {
  const uint64_t key1 = key + 1;
  copy_value(m.value(m.layout().fields[2], slot), &key1, 8);
}

std::unique_ptr<SegmentMemory> rows(uint64_t n) {
  auto m = ring_of(n);
  for (uint64_t i = 0; i < n; i++) write_key(*m, m->slot_of(append_row(*m, 1, 0)), i);
  return m;
}

int64_t number_at(SegmentMemory& m, uint64_t key, size_t field) {
  int64_t number;
  std::memcpy(&number, m.value(m.layout().fields[field], m.slot_of(key)), 8);
  return number;
}

std::optional<BadKey> rewrite(SegmentMemory& m, const std::vector<int64_t>& keys, const std::vector<int64_t>& numbers,
                              const std::vector<size_t>& fields = {0, 1}, uint64_t* changed = nullptr) {
  Rewriter rewriter(m);
  const auto bad =
      rewriter.rewrite(static_cast<int64_t>(keys.size()), keys.data(), fields, [&](int64_t i, size_t f, char* to) {
        for (uint64_t at = 0; at < m.layout().fields[f].nbytes; at += 8) std::memcpy(to + at, &numbers[i], 8);
      });
  if (changed) *changed = rewriter.changed();
  return bad;
}

// Field 0 and field 1 of every row of items of `rows`, and the rows' keys.
ItemPlan whole_items(uint32_t rows) {
  ItemPlan plan;
  plan.steps = rows - 1;
  for (uint32_t f = 0; f < 3; f++) plan.outputs.push_back({Kind::kAnchor, f, 0, rows, 0});
  return plan;
}

// Throws unless every row of the batch has one number, wherever it is in it.
void require_one_version(const Items& items) {
  const std::vector<int64_t> number = items.of<int64_t>(0), wide = items.of<int64_t>(1), key = items.of<int64_t>(2);
  std::map<int64_t, int64_t> of_row;
  for (size_t i = 0; i < key.size(); i++) {
    if (!key[i]) continue;  // beyond the end of the episode
    for (size_t w = 0; w < kWide / 8; w++)
      if (wide[i * kWide / 8 + w] != number[i]) throw std::runtime_error("a row is a mix");
    if (of_row.try_emplace(key[i], number[i]).first->second != number[i])
      throw std::runtime_error("a batch has two versions of a row");
  }
}

Items draw_rows(SegmentMemory& m, int n, uint64_t step) {
  ItemPlan plan;  // of the fields as they are
  for (uint32_t f = 0; f < 3; f++) plan.outputs.push_back({Kind::kAnchor, f, 0, 1, 0});
  Room room(m, plan, static_cast<size_t>(n), 0);
  Shortage shortage;
  if (BatchSampler(m).sample(n, 0, {7, 0, step}, room.pointers(), shortage) != Draw::kDone)
    throw std::runtime_error("there was no batch");
  return room.take(static_cast<size_t>(n));
}

std::unique_ptr<SegmentMemory> one_episode(uint64_t rows, const View& view) {
  auto m = ring_of(rows, view);
  Explorer explorer(*m, 1);
  for (uint64_t i = 0; i < rows; i++) {
    const auto fill = [&](uint64_t slot) {
      fill_row(*m, slot, 0);
      write_key(*m, slot, i);
    };
    i ? explorer.step(i + 1 == rows ? kTerminated : 0, {}, fill) : explorer.reset(fill);
  }
  settle(*m);
  return m;
}

bool is_drawable(SegmentMemory& m, uint64_t key) { return m.tree().leaf(static_cast<int64_t>(m.slot_of(key))) > 0; }

}  // namespace

BOOST_AUTO_TEST_CASE(the_fields_given_change_and_nothing_else) {
  auto m = rows(8);
  settle(*m);
  PriorityUpdater(*m).update(1, std::array<int64_t, 1>{3}.data(), std::array<double, 1>{5}.data());
  const float leaf = m->tree().leaf(3);
  uint64_t changed = 0;
  BOOST_TEST(!rewrite(*m, {3, 6}, {30, 60}, {1}, &changed));
  BOOST_TEST(changed == 2U);
  BOOST_TEST(number_at(*m, 3, 0) == 0);
  BOOST_TEST(number_at(*m, 3, 1) == 30);
  BOOST_TEST(number_at(*m, 6, 1) == 60);
  BOOST_TEST(number_at(*m, 4, 1) == 0);
  BOOST_TEST(m->tree().leaf(3) == leaf);
  BOOST_TEST(m->header().inserted == 8U);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(rows_that_are_gone_are_left_out_and_of_equal_keys_the_last_wins) {
  auto m = rows(4);
  append_row(*m, 1, 0);  // key 0 is gone
  uint64_t changed = 0;
  BOOST_TEST(!rewrite(*m, {0, 2, 2, 3, 2}, {1, 2, 3, 4, 5}, {0}, &changed));
  BOOST_TEST(changed == 2U);
  BOOST_TEST(number_at(*m, 2, 0) == 5);
  BOOST_TEST(number_at(*m, 4, 0) == 0);
}

BOOST_AUTO_TEST_CASE(nothing_changes_when_a_key_was_never_issued) {
  auto m = rows(4);
  const auto bad = rewrite(*m, {1, 4}, {9, 9});
  BOOST_REQUIRE(bad);
  BOOST_TEST(bad->index == 1);
  BOOST_TEST(number_at(*m, 1, 0) == 0);
}

BOOST_AUTO_TEST_CASE(a_batch_that_is_rewritten_before_it_is_handed_out_has_the_new_values_throughout) {
  const AtPoints calls(reach);
  for (const char* point : {"draw.drawn", "draw.copied"}) {
    auto m = rows(8);
    once_at(point, [&] { rewrite(*m, {0, 1, 2, 3, 4, 5, 6, 7}, std::vector<int64_t>(8, 9)); });
    const Items items = draw_rows(*m, 16, 0);
    require_one_version(items);
    for (int64_t number : items.of<int64_t>(0)) BOOST_TEST(number == 9);
    BOOST_TEST(m->header().redraws == 0U);
  }
}

BOOST_AUTO_TEST_CASE(a_writer_that_meets_a_row_under_rewrite_takes_another_slot_and_the_row_stays) {
  const AtPoints calls(reach);
  auto m = rows(4);
  once_at("rewrite.copied", [&] { append_row(*m, 2, 5); });
  rewrite(*m, {0}, {9});
  BOOST_TEST(number_at(*m, 0, 0) == 9);
  BOOST_TEST(number_at(*m, 5, 0) == 5);  // its first ticket was for slot 0
  settle(*m);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_row_that_a_writer_takes_first_is_not_rewritten) {
  const AtPoints calls(reach);
  auto m = rows(4);
  once_at("rewrite.recorded", [&] { append_row(*m, 2, 5); });
  uint64_t changed = 1;
  rewrite(*m, {0}, {9}, {0, 1}, &changed);
  BOOST_TEST(changed == 0U);
  BOOST_TEST(number_at(*m, 4, 0) == 5);
}

BOOST_AUTO_TEST_CASE(rows_gathered_by_key_are_not_left_out_because_they_are_rewritten) {
  const AtPoints calls(reach);
  auto m = one_episode(12, sequences(3, 1));
  once_at("gather.found", [&] { rewrite(*m, {0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5, 6}); });
  const Items items = gather(*m, whole_items(4), {0, 2, 4});
  BOOST_TEST(items.keys.size() == 3U);
  require_one_version(items);
}

BOOST_AUTO_TEST_CASE(batches_beside_one_who_rewrites_all_the_time_have_one_version_of_each_row) {
  for (const bool linked : {false, true}) {
    auto m = linked ? one_episode(40, sequences(5, 1)) : rows(24);
    const auto n = static_cast<int64_t>(m->capacity());
    std::atomic<bool> over = false;
    std::jthread rewriter([&] {
      std::vector<int64_t> keys(static_cast<size_t>(n)), numbers(keys.size());
      std::iota(keys.begin(), keys.end(), 0);
      for (int64_t round = 1; !over; round++) {
        for (int64_t i = 0; i < n; i++) numbers[i] = round * 1000 + i;
        rewrite(*m, keys, numbers);
      }
    });
    const ItemPlan plan = whole_items(6);
    std::string wrong;
    try {
      for (uint64_t step = 0; step < 300; step++)
        require_one_version(linked ? draw(*m, plan, 8, {7, 0, step}) : draw_rows(*m, 16, step));
    } catch (const std::exception& e) {
      wrong = e.what();
    }
    over = true;
    rewriter.join();
    BOOST_TEST(wrong == "");
    settle(*m);
    BOOST_TEST(violation(*m) == "");
  }
}

BOOST_AUTO_TEST_CASE(rows_saved_beside_one_who_rewrites_are_all_there_and_none_is_a_mix) {
  const AtPoints calls(reach);
  auto m = rows(24);
  once_at("save.looked", [&] { rewrite(*m, {3, 4}, {9, 9}); });
  std::vector<int64_t> number(24), wide(24 * kWide / 8), key(24), keys(24), link(24);
  std::vector<int32_t> step(24);
  std::vector<float> leaf(24), priority(24);
  auto bytes = [](auto& v) { return reinterpret_cast<char*>(v.data()); };
  const RowColumns out{.values = {bytes(number), bytes(wide), bytes(key)},
                       .key = keys.data(),
                       .leaf = leaf.data(),
                       .link = link.data(),
                       .step = step.data(),
                       .priority = priority.data(),
                       .lengths = {},
                       .ragged = {}};
  BOOST_TEST(Snapshot(*m).copy_out(0, 24, out) == 24U);
  for (size_t i = 0; i < 24; i++) BOOST_TEST(wide[i * kWide / 8 + 7] == number[i]);
}

BOOST_AUTO_TEST_CASE(stamps_come_round_without_a_rewrite_that_goes_unseen) {
  auto m = rows(4);
  const RewriteWatch watch(m->header());
  BOOST_TEST(!watch.any());
  const uint64_t word = m->row(0).word.load();
  BOOST_TEST(!watch.touches(word));
  rewrite(*m, {1}, {9});
  BOOST_TEST(watch.any());
  BOOST_TEST(watch.touches(m->row(1).word.load()));
  BOOST_TEST(!watch.touches(word));
  const RewriteWatch later(m->header());
  BOOST_TEST(!later.touches(m->row(1).word.load()));
  for (uint64_t i = 0; i < slot_word::kStamps; i++) rewrite(*m, {2}, {static_cast<int64_t>(i)}, {0});
  BOOST_TEST(later.touches(m->row(1).word.load()));  // nobody knows any more
  BOOST_TEST(later.touches(m->row(2).word.load()));
}

BOOST_AUTO_TEST_CASE(a_discarded_item_is_not_drawn_whatever_comes) {
  for (const View& view : {View{}, transitions(2), sequences(3, 1), whole_episodes()}) {
    auto m = view.linked() ? one_episode(12, view) : rows(12);
    settle(*m);
    const int64_t keys[] = {0, 5};
    Rewriter rewriter(*m);
    BOOST_TEST(!rewriter.discard(2, keys));
    BOOST_TEST(rewriter.changed() == 2U);
    BOOST_TEST(violation(*m) == "");
    const double td[] = {4, 4};
    PriorityUpdater(*m).update(2, keys, td);
    BOOST_TEST(m->header().unready_updates == 2U);
    {
      SegmentLock lock(*m);
      m->header().dirty = Dirty::kLinks;  // as a death leaves it
    }
    settle(*m);
    for (uint64_t key = 0; key < 12; key++) {
      const bool complete = !view.linked() || key < 11;
      BOOST_TEST(is_drawable(*m, key) == (complete && key != 0 && key != 5), "key " << key);
    }
    BOOST_TEST(violation(*m) == "");
  }
}

BOOST_AUTO_TEST_CASE(an_item_that_was_discarded_before_it_was_complete_never_can_be_drawn) {
  auto m = ring_of(16, transitions(2));
  Explorer explorer(*m, 1);
  explorer.reset();
  explorer.step();
  settle(*m);
  const int64_t keys[] = {0};
  (void)Rewriter(*m).discard(1, keys);
  for (int i = 0; i < 3; i++) explorer.step();
  settle(*m);
  BOOST_TEST(!is_drawable(*m, 0));
  BOOST_TEST(is_drawable(*m, 1));
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(an_episode_is_all_its_rows_and_no_others) {
  for (const View& view : {transitions(2), across_episodes(3), whole_episodes()}) {
    auto m = ring_of(32, view);
    Explorer a(*m, 1), b(*m, 2);
    a.episode(3);
    a.reset();
    std::vector<int64_t> expected = {static_cast<int64_t>(a.stream.key1 - 1)};
    b.reset();
    for (int i = 0; i < 4; i++) {
      expected.push_back(static_cast<int64_t>(a.step(i == 3 ? kTruncated : 0)));
      b.step();
    }
    a.episode(2);
    for (int64_t key : expected)
      BOOST_TEST(Rewriter(*m).episode_of(static_cast<uint64_t>(key)) == expected, boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(the_rows_of_an_item_are_its_anchor_and_the_steps_there_are) {
  auto m = ring_of(32, transitions(3));
  Explorer a(*m, 1), b(*m, 2);
  const uint64_t first = a.reset(), other = b.reset(), second = a.step();
  b.step();
  const uint64_t last = a.step(kTerminated), next = a.reset();
  const int64_t keys[] = {static_cast<int64_t>(first), static_cast<int64_t>(last), static_cast<int64_t>(other)};
  int64_t found[3][4];
  Rewriter(*m).rows_of(3, keys, 4, found[0]);
  const std::vector<uint64_t> expected = {first, second, last, kNever};
  for (int k = 0; k < 4; k++) BOOST_TEST(static_cast<uint64_t>(found[0][k]) == expected[k]);
  BOOST_TEST(found[1][1] == -1);  // nothing follows an end
  BOOST_TEST(found[2][2] == -1);
  (void)next;
}

BOOST_AUTO_TEST_SUITE_END()
