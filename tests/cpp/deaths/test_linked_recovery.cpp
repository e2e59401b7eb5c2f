#include <boost/test/unit_test.hpp>
#include <random>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "explorers.h"
#include "traced.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_linked_recovery)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

const View kViews[] = {transitions(2, 3), sequences(2, 2, 1), across_episodes(3), whole_episodes()};
constexpr float kLargest = 500;

std::unique_ptr<SegmentMemory> segment(const View& view, uint64_t capacity = 16) {
  Plan plan;
  plan.capacity = capacity;
  plan.view = view;
  plan.sampler = {1, Normalize::kBuffer, 1, 0};  // leaves are raw priorities
  return make_segment(plan);
}

// A full ring of which every drawable item has a priority of its own, the largest among them; none is as small as those
// of give().
std::unique_ptr<SegmentMemory> settled(const View& view) {
  auto m = segment(view);
  Explorer a(*m, 1), b(*m, 2);
  a.reset();
  b.reset();
  for (int i = 0; i < 4; i++) {
    a.step();
    b.step(i == 2 ? kTerminated : 0);
    if (i == 2) b.reset();
  }
  a.step(kTruncated);
  a.reset();
  while (m->header().head.load() < m->capacity()) a.step();
  settle(*m);
  std::vector<int64_t> keys;
  std::vector<double> td;
  for (uint64_t key : RowSet::committed(*m).items()) {
    keys.push_back(static_cast<int64_t>(key));
    td.push_back(td.empty() ? kLargest : 100.0 + static_cast<double>(key));
  }
  PriorityUpdater(*m).update(static_cast<int64_t>(keys.size()), keys.data(), td.data());
  return m;
}

std::optional<float> give(int i) { return i % 2 ? std::optional(0.25F + static_cast<float>(i)) : std::nullopt; }

// Rows to adopt, link, complete and evict: over episodes of which some rows stay, for one ticket is lost, one slot void
// and one held busy.
void disturb(SegmentMemory& m) {
  Explorer a(m, 1), b(m, 2);
  SteppedWriter slow(m, 3);
  a.reset();  // over the first row of all
  a.step(0, give(1));
  slow.take_ticket();  // lost
  b.reset();
  b.step(0, give(2));
  a.step(0, give(3));
  slow.take_ticket();
  slow.seize();
  reclaim(m, 3);  // void
  a.step(kTerminated, give(5));
  b.step(0, give(7));
  slow.take_ticket();
  slow.seize();  // busy
  b.step(kTruncated, give(4));
}

// Leaves by key.
std::map<uint64_t, float> leaves_by_key(const SegmentMemory& m) {
  std::map<uint64_t, float> leaves;
  for (uint64_t s = 0; s < m.capacity(); s++)
    if (const float leaf = m.tree().leaf(static_cast<int64_t>(s)); leaf > 0) leaves[m.at(s) - 1] = leaf;
  return leaves;
}

// Whether items have the leaf that they had, or the one that their rows give them; in words.
std::string leaf_violation(const SegmentMemory& m, const std::map<uint64_t, float>& before) {
  const RowSet rows = RowSet::committed(m);
  for (auto [key, leaf] : leaves_by_key(m)) {
    const float expected = before.contains(key) ? before.at(key) : rows.priority(key).value_or(kLargest);
    if (leaf != expected) return "leaf of key " + std::to_string(key) + ": " + std::to_string(leaf);
  }
  return "";
}

// The segment as it is after the `n`-th store of `body` that leaves it dirty; nothing when there are fewer.
std::unique_ptr<Image> half_done(const SegmentMemory& m, const std::function<void()>& body, int n) {
  auto image = std::make_unique<Image>(m);
  bool found = false;
  single_step(body, [&] {
    if (image->refresh() && image->memory().header().dirty == Dirty::kSlots) found = n-- == 0;
    return found ? Fate::kDie : Fate::kStep;
  });
  return found ? std::move(image) : nullptr;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_of_an_absorption_leaves_what_a_survivor_completes,
                     *kWhereTracingIsAllowed) {
  for (const View& view : kViews) {
    auto m = settled(view);
    const std::map<uint64_t, float> before = leaves_by_key(*m);
    const uint64_t inserted = m->header().inserted;
    disturb(*m);
    Image undisturbed(*m);
    undisturbed.refresh();
    settle(undisturbed.memory());
    const uint64_t completed = undisturbed.memory().header().inserted - inserted;
    BOOST_TEST(completed > 0U);
    BOOST_TEST(leaves_by_key(undisturbed.memory()).size() < before.size() + completed);  // items were evicted
    kill_everywhere(
        *m, [&] { settle(*m); },
        [&](SegmentMemory& survivor) {
          uint64_t kept = 0;
          const auto after = leaves_by_key(survivor);
          for (auto [key, leaf] : after) kept += before.contains(key);
          // A kill between two stores miscounts one item at most; items complete for a moment may count or not.
          const uint64_t counted = survivor.header().inserted - inserted;
          if (counted + 1 < after.size() - kept || counted > completed + 1)
            return std::to_string(counted) + " items counted";
          return leaf_violation(survivor, before);
        });
  }
}

BOOST_AUTO_TEST_CASE(a_repairer_killed_at_any_instruction_leaves_what_the_next_one_repairs, *kWhereTracingIsAllowed) {
  int state = 8;
  for (const View& view : kViews) {
    auto m = settled(view);
    const std::map<uint64_t, float> before = leaves_by_key(*m);
    disturb(*m);
    const auto image = half_done(*m, [&] { settle(*m); }, state += 6);
    BOOST_REQUIRE(image);
    SegmentMemory& dead = image->memory();
    kill_everywhere(
        dead, [&] { Recovery(dead).run(); }, [&](SegmentMemory& survivor) { return leaf_violation(survivor, before); });
  }
}

// Every half-done state that the order of stores allows, at random and all at once: a leaf under another key or of an
// item that has lost rows, a row adopted without its links, its leaf or those of the items it completes, any links.
BOOST_AUTO_TEST_CASE(any_half_done_state_is_repaired_to_what_the_headers_say_and_twice_is_as_good_as_once) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; round++) {
    auto m = settled(kViews[round % std::size(kViews)]);
    disturb(*m);
    const RowSet rows = RowSet::committed(*m);
    if (random() % 2) settle(*m);
    std::map<uint64_t, float> kept;
    for (uint64_t s = 0; s < m->capacity(); s++) {
      const uint64_t word = m->row(s).word.load(), done1 = slot_word::is_row(word) ? slot_word::key1(word) : 0;
      float& leaf = m->tree().leaves()[s];
      switch (random() % 4) {
        case 0:
          leaf = 0;  // evicted: leaf first ...
          break;
        case 1:
          leaf = 0;
          m->at(s) = 0;  // ... then at ...
          break;
        case 2:
          leaf = 0;
          m->at(s) = done1;  // ... and the new row adopted, its leaf not yet set
          break;
        default:
          if (m->at(s) == done1 && done1 && !rows.item(done1 - 1)) leaf = 321;  // not cleared yet
      }
      if (leaf > 0 && m->at(s) == done1 && done1 && rows.item(done1 - 1)) kept[done1 - 1] = leaf;
      m->links(s).prev.store(static_cast<uint32_t>(random() % (m->capacity() + 1)));
      m->links(s).next.store(static_cast<uint32_t>(random() % (m->capacity() + 1)));
    }
    m->pending_words()[0] = random() % (1 << m->capacity());
    m->header().pending = random();
    m->header().absorbed = random() % (m->header().head.load() + 1);
    for (int times = 0; times < 2; times++) {
      m->header().dirty = Dirty::kLinks;
      Recovery(*m).run();
      BOOST_REQUIRE(violation(*m) == "");
      BOOST_REQUIRE(leaf_violation(*m, kept) == "");
    }
  }
}

// The repair reads slots in ascending order: slot 2 while its row is being written, slot 4 when that row and its
// successor, which lies there, are both done.
BOOST_AUTO_TEST_CASE(a_row_committed_while_a_repair_reads_the_slots_waits_for_its_predecessor,
                     *kWhereTracingIsAllowed) {
  for (const View& view : {transitions(1), across_episodes(1)}) {
    auto m = segment(view);
    Explorer a(*m, 1), b(*m, 2);
    a.reset();
    b.reset();
    a.writer().take_ticket();
    a.writer().seize();  // 2
    b.step();
    m->header().dirty = Dirty::kLinks;  // the owner died before it adopted the first row
    bool passed = false;
    single_step([&] { Recovery(*m).run(); },
                [&] {
                  if (m->at(3) && !passed) {  // slot 2 was read
                    passed = true;
                    a.finish(a.stream.next());
                    a.step();
                    a.step();
                  }
                  return passed ? Fate::kFinish : Fate::kStep;
                });
    BOOST_TEST(passed);
    settle(*m);
    BOOST_TEST(violation(*m) == "");
  }
}

BOOST_AUTO_TEST_SUITE_END()
