#include <boost/test/unit_test.hpp>
#include <random>

#include "batches.h"
#include "explorers.h"
#include "traced.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_item_races)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = Output::Kind;
using Numbers = std::vector<int>;

constexpr uint64_t kLarge = kOwnArrayBytes / 8;

// A small field and one in an array of its own.
std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, const View& view) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = {1, Normalize::kBuffer, 1, 0};
  plan.fields = {{Element::kI64, 8}, {Element::kI64, 8 * kLarge}};
  return make_segment(plan);
}

// All rows of an item, twice: by the small field, and by the large one.
ItemPlan all_rows(const View& view) {
  const auto before = static_cast<int32_t>(view.history);
  return {{{Kind::kAnchor, 0, -before, view.history + view.span + 1},
           {Kind::kAnchor, 1, -before, view.history + view.span + 1}},
          view.span};
}

struct Attempt {
  Numbers failed;
  std::set<uint64_t> touched;
  std::vector<int64_t> small, large;
};

// Copies the items anchored in `slots` as if their rows had just been drawn.
Attempt attempt(SegmentMemory& m, const ItemPlan& plan, const std::vector<DrawnItem>& items) {
  Room room(m, plan, items.size(), 0);
  Attempt a;
  for (size_t i = 0; i < items.size(); i++) a.failed.push_back(static_cast<int>(i));
  ItemGather gather(m, plan);
  gather.gather(items, a.failed, room.pointers());
  a.touched.insert(gather.touched().begin(), gather.touched().end());
  const Items copied = room.take(items.size());
  a.small = copied.of<int64_t>(0);
  a.large = copied.of<int64_t>(1);
  return a;
}

DrawnItem drawn(const SegmentMemory& m, uint64_t key) { return {m.slot_of(key), key + 1, 1, 1, 1, 1, 0}; }

// Episode of one explorer, of which value `first` + i is that of row i.
void write_rows(SegmentMemory& m, int id, int64_t first, int rows) {
  Explorer a(m, id);
  for (int64_t value = first; value < first + rows; value++) {
    const Explorer::Fill fill = [&](uint64_t slot) { fill_row(m, slot, static_cast<uint64_t>(value)); };
    value == first ? a.reset(fill) : a.step(0, {}, fill);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_item_of_which_any_row_is_being_overwritten_is_not_copied_and_its_slots_are_named) {
  const View view = transitions(2, 3);
  for (uint64_t slot = 0; slot < 8; slot++)
    for (bool done : {false, true}) {
      auto m = ring_of(8, view);
      write_rows(*m, 1, 100, 8);
      settle(*m);
      SteppedWriter writer(*m, 2);
      m->header().head.store(8 + slot);
      writer.take_ticket();
      writer.seize();
      if (done) writer.finish({}, 999);
      const Attempt a = attempt(*m, all_rows(view), {drawn(*m, 3)});  // rows 1 to 5
      const bool hit = slot >= 1 && slot <= 5;
      BOOST_TEST(a.failed == (hit ? Numbers{0} : Numbers{}), boost::test_tools::per_element());
      if (hit) BOOST_TEST(a.touched.contains(3));
      const std::vector<int64_t> rows = {101, 102, 103, 104, 105};
      if (!hit) BOOST_TEST(a.small == rows, boost::test_tools::per_element());
    }
}

BOOST_AUTO_TEST_CASE(the_row_of_another_key_is_not_copied_for_the_one_drawn) {
  const View view = transitions(1);
  auto m = ring_of(4, view);
  write_rows(*m, 1, 100, 4);
  settle(*m);
  write_rows(*m, 2, 200, 4);  // whole and linked, but not what was drawn
  settle(*m);
  BOOST_TEST(attempt(*m, all_rows(view), {drawn(*m, 1)}).failed == Numbers{0}, boost::test_tools::per_element());
  BOOST_TEST(attempt(*m, all_rows(view), {drawn(*m, 5)}).failed == Numbers{}, boost::test_tools::per_element());
}

// A link that was read may belong to another row by now.
BOOST_AUTO_TEST_CASE(a_link_is_followed_only_to_a_row_that_names_the_one_it_came_from) {
  const View view = transitions(1);
  auto m = ring_of(8, view);
  write_rows(*m, 1, 100, 2);
  write_rows(*m, 2, 200, 2);
  settle(*m);
  const ItemPlan plan = all_rows(view);
  BOOST_TEST(attempt(*m, plan, {drawn(*m, 0)}).failed.empty());
  // Rows of another stream, itself, an empty slot, beyond the ring, none.
  for (uint32_t slot1 : {3U, 4U, 1U, 8U, 9U, ~0U, 0U}) {
    m->links(0).next.store(slot1);
    const Attempt a = attempt(*m, plan, {drawn(*m, 0), drawn(*m, 2)});
    BOOST_TEST(a.failed == Numbers{0}, boost::test_tools::per_element());
    BOOST_TEST(a.small[3] == 201);
  }
}

// The reset row names the row before it, for windows that run across episodes.
BOOST_AUTO_TEST_CASE(a_link_is_not_followed_into_the_next_episode) {
  for (const View& view : {transitions(1), across_episodes(1)}) {
    auto m = ring_of(8, view);
    Explorer a(*m, 1);
    a.reset();
    a.reset();
    settle(*m);
    m->links(0).next.store(2);
    BOOST_TEST(attempt(*m, all_rows(view), {drawn(*m, 0)}).failed.empty() == (view.across != 0));
  }
}

// The learner is stopped right after it has drawn, and a row of the heavy item is taken.
BOOST_AUTO_TEST_CASE(what_fails_is_drawn_again_elsewhere_once_and_for_all,
                     *kUnlessThreadSanitized* kWhereTracingIsAllowed) {
  constexpr int kBatch = 8;
  struct Result {
    bool done;
    int64_t keys[kBatch];
  };
  const View view = transitions(2);
  const ItemPlan plan{{{Kind::kAnchor, 0, 0, 3}}, 2};
  for (uint64_t victim : {0, 1, 2}) {  // anchor, middle and end of the heavy item
    auto m = ring_of(12, view);
    Explorer a(*m, 1);
    a.reset();
    a.step();
    a.step(0, 8000.0F);
    for (int i = 0; i < 9; i++) a.step(0, 1.0F);
    settle(*m);
    SteppedWriter late(*m, 2);
    m->header().head.store(12 + victim);
    late.take_ticket();
    Shared<Result> result;
    single_step(
        [&] {
          const Items b = draw(*m, plan, kBatch);
          result->done = b.outcome == Draw::kDone;
          std::copy(b.keys.begin(), b.keys.end(), result->keys);
        },
        [&, taken = false]() mutable {
          if (m->header().sampled && !taken) taken = late.seize();
          return taken ? Fate::kFinish : Fate::kStep;
        });
    BOOST_TEST(result->done);
    for (int64_t key : result->keys) BOOST_TEST(key > static_cast<int64_t>(victim));
    BOOST_TEST(m->header().redraws.load() >= 6U);
    BOOST_TEST(m->header().sampled == kBatch + 0U);  // counted once
    BOOST_TEST(m->tree().leaf(0) == 0.0F);
  }
}

// The learner is stopped after some number of instructions of a copy, and a row, of its item or not, replaced there.
BOOST_AUTO_TEST_CASE(a_row_overwritten_at_any_instruction_of_a_copy_never_tears_nor_mixes_an_item,
                     *kUnlessThreadSanitized* kWhereTracingIsAllowed) {
  const View view = transitions(2, 3);
  const ItemPlan plan = all_rows(view);
  const int64_t expected[] = {101, 102, 103, 104, 105};
  struct Result {
    int64_t small[5], large[kLarge * 5];
    bool failed;
  };
  Shared<Result> result;
  BatchPointers out;
  out.values = {reinterpret_cast<char*>(result->small), reinterpret_cast<char*>(result->large)};
  std::mt19937_64 random(1);
  int copied = 0, failed = 0;
  int64_t instructions = 2;  // of the copy; the first run counts them
  for (int64_t at = 1; at < instructions; at += 1 + static_cast<int64_t>(random() % (1 + instructions / 8))) {
    auto m = ring_of(8, view);
    write_rows(*m, 1, 100, 8);
    settle(*m);
    SteppedWriter writer(*m, 2);
    m->header().head.store(8 + random() % 8);
    writer.take_ticket();
    ItemGather gather(*m, plan);
    const std::vector<DrawnItem> items = {drawn(*m, 3)};
    Numbers todo = {0};
    const auto copy = [&] {
      gather.gather(items, todo, out);
      result->failed = !todo.empty();
    };
    const auto overwrite = [&, steps = random() % 3, count = int64_t{0}]() mutable {
      if (++count == at) {
        writer.seize();
        if (steps) fill_row(*m, writer.slot(), 999);
        if (steps == 2) writer.finish({}, 999);
      }
      instructions = std::max(instructions, count);
      return at > 1 && count >= at ? Fate::kFinish : Fate::kStep;
    };
    single_step(copy, overwrite);
    failed += result->failed;
    copied += !result->failed;
    for (size_t k = 0; k < 5 && !result->failed; k++) {
      BOOST_REQUIRE(result->small[k] == expected[k]);
      for (size_t b = 0; b < kLarge; b++) BOOST_REQUIRE(result->large[kLarge * k + b] == expected[k]);
    }
  }
  BOOST_TEST(copied > 2);
  BOOST_TEST(failed > 2);
}

BOOST_AUTO_TEST_SUITE_END()
