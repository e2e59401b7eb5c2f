#include <boost/test/unit_test.hpp>
#include <random>

#include "crowd.h"
#include "draw/priority_updater.h"
#include "invariants.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_linked_absorb)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// Random interleavings of explorers that lag and die with absorptions and updates, and what must have come of them.
class Play {
 public:
  Play(uint64_t capacity, const View& view, int explorers, unsigned seed)
      : random_(seed), m_(segment(capacity, view)), crowd_(*m_, explorers, seed) {}

  void step() {
    switch (random_() % 24) {
      case 0:
        return absorb_and_check();
      case 1:
        return update_and_check();
      case 2:
        return resync();
      case 3:
        return absorb_to_an_older_head();
      default:
        return crowd_.move();
    }
  }

  void absorb_and_check() {
    const float before = m_->header().max_raw;
    settle(*m_);
    learn(before);
    const std::string v = violation(*m_);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }

  void quiesce() {
    crowd_.quiesce();
    absorb_and_check();
    BOOST_REQUIRE(m_->header().rows == RowSet::committed(*m_).rows().size());
    // Items that were complete between two absorptions only may count or not.
    BOOST_REQUIRE(m_->header().inserted >= leaves_.size());
    BOOST_REQUIRE(m_->header().inserted <= crowd_.written().items().size());
  }

  // Absorbs after every step, so that no item is missed.
  void play_watched(int steps) {
    for (int i = 0; i < steps; i++) {
      crowd_.move();
      absorb_and_check();
      BOOST_REQUIRE(m_->header().inserted == leaves_.size());
    }
  }

 private:
  static std::unique_ptr<SegmentMemory> segment(uint64_t capacity, const View& view) {
    Plan plan;
    plan.capacity = capacity;
    plan.view = view;
    plan.sampler = {1, Normalize::kBuffer, 1, 0};  // leaves are raw priorities
    return make_segment(plan);
  }

  // Items seen for the first time have the priority given with their rows, or the largest raw one. That may be the one
  // before or after this absorption: the order within it is free. All other leaves are as they were.
  void learn(float max_before) {
    const float max_after = m_->header().max_raw;
    const PriorityTree tree = m_->tree();
    BOOST_REQUIRE(max_after >= max_before);
    for (uint64_t s = 0; s < m_->capacity(); s++) {
      const float leaf = tree.leaf(static_cast<int64_t>(s));
      if (leaf <= 0) continue;
      const uint64_t key = m_->at(s) - 1;
      if (const auto [known, is_new] = leaves_.try_emplace(key, leaf); !is_new) {
        if (leaf != known->second)
          BOOST_FAIL("the leaf of slot " << s << " has changed");  // most checks: Boost is slow
        continue;
      }
      const auto given = crowd_.written().priority(key);
      BOOST_REQUIRE(leaf >= tree.clamp(given ? *given : max_before));
      BOOST_REQUIRE(leaf <= tree.clamp(given ? *given : max_after));
      if (given) BOOST_REQUIRE(max_after >= *given);
    }
  }

  void update_and_check() {
    Header& h = m_->header();
    const uint64_t head = h.head.load();
    if (head == 0) return;
    absorb_and_check();
    std::map<int64_t, double> td;
    const uint64_t recent = std::min(head, 2 * m_->capacity());
    for (uint64_t i = random_() % 6; i > 0; i--)
      td[static_cast<int64_t>(head - 1 - random_() % recent)] = 0.01 * static_cast<double>(1 + random_() % 1000);
    std::vector<int64_t> keys;
    std::vector<double> values;
    const std::set<uint64_t> complete = RowSet::committed(*m_).items();
    const uint64_t applied = h.updated, dropped = h.stale_updates + h.unready_updates;
    uint64_t expected = 0;
    for (auto [key, value] : td) {
      keys.push_back(key);
      values.push_back(value);
      if (!complete.contains(static_cast<uint64_t>(key))) continue;
      expected++;
      leaves_[static_cast<uint64_t>(key)] = m_->tree().clamp(static_cast<float>(value));
    }
    BOOST_REQUIRE(!PriorityUpdater(*m_).update(static_cast<int64_t>(keys.size()), keys.data(), values.data()));
    BOOST_REQUIRE(h.updated - applied == expected);
    BOOST_REQUIRE(h.stale_updates + h.unready_updates - dropped == keys.size() - expected);
    absorb_and_check();
  }

  // What a failed draw does to a slot: other slots may be left as they were.
  void resync() {
    const uint64_t slot = random_() % m_->capacity();
    const float before = m_->header().max_raw;
    {
      SegmentLock lock(*m_);
      Absorber(*m_).resync(slot, m_->header().head.load());
    }
    check_unsettled(before);
  }

  // A learner that read the head and then waited for the lock.
  void absorb_to_an_older_head() {
    const float before = m_->header().max_raw;
    const uint64_t head = m_->header().head.load();
    {
      SegmentLock lock(*m_);
      Absorber(*m_).step(head - std::min(head, random_() % (m_->capacity() + 2)));
    }
    check_unsettled(before);
  }

  // What holds at any time under the lock. Every item with a leaf has all its rows absorbed and linked. Where one row
  // names another, both are linked to each other.
  void check_unsettled(float max_before) {
    learn(max_before);
    const PriorityTree tree = m_->tree();
    std::string v = tree_violation(tree);
    for (uint64_t s = 0; s < m_->capacity() && v.empty(); s++) v = unsettled_violation(tree, s);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }

  std::string unsettled_violation(const PriorityTree& tree, uint64_t slot) const {
    const RowSet& written = crowd_.written();
    const Links& links = m_->links(slot);
    const uint32_t prev1 = links.prev.load(), next1 = links.next.load();
    if (prev1 && m_->links(prev1 - 1).next.load() != slot + 1) return "the row before does not know of its successor";
    if (next1 && m_->links(next1 - 1).prev.load() != slot + 1) return "the row after does not know of its predecessor";
    const uint64_t at = m_->at(slot);
    if (!at) return prev1 || next1 ? "links of an empty slot" : "";
    const HeldRow& row = written.rows().at(at - 1);
    if (prev1 && (m_->at(prev1 - 1) != row.prev_key1 || !written.follows(row)))
      return "a row is linked to one that it does not name";
    if (!(tree.leaf(static_cast<int64_t>(slot)) > 0)) return "";
    const auto item = written.item(at - 1);
    if (!item) return "a leaf without an item";
    for (size_t i = 0; i < item->size(); i++) {
      const uint64_t key = (*item)[i], s = m_->slot_of(key);
      if (m_->at(s) != key + 1) return "a leaf whose item has lost a row";
      if (i && m_->links(s).prev.load() != m_->slot_of((*item)[i - 1]) + 1) return "a leaf whose item is not linked";
    }
    return "";
  }

  std::mt19937_64 random_;
  std::unique_ptr<SegmentMemory> m_;
  Crowd crowd_;
  std::map<uint64_t, float> leaves_;  // of every item that ever was seen drawable
};

const View kViews[] = {transitions(1),     transitions(3),   transitions(5),     transitions(1, 4), transitions(3, 3),
                       sequences(1, 1),    sequences(4, 4),  sequences(3, 2, 2), sequences(2, 5),   across_episodes(1),
                       across_episodes(4), whole_episodes(), sequences(1, 1, 3)};
constexpr uint64_t kCapacities[] = {1, 2, 3, 4, 5, 8, 17, 64, 70};

}  // namespace

BOOST_AUTO_TEST_CASE(after_any_interleaving_exactly_the_complete_items_are_drawable) {
  for (unsigned seed = 0; seed < 117; seed++) {  // every view with every capacity
    const View& view = kViews[seed % std::size(kViews)];
    const uint64_t capacity = kCapacities[seed % std::size(kCapacities)];
    BOOST_TEST_CONTEXT("seed " << seed << " capacity " << capacity) {
      Play game(capacity, view, 1 + static_cast<int>(seed % 4), seed);
      for (int i = 0; i < 2000; i++) game.step();
      game.quiesce();
    }
  }
}

BOOST_AUTO_TEST_CASE(items_count_as_inserted_once_each_when_none_is_missed) {
  for (unsigned seed = 0; seed < 26; seed++) BOOST_TEST_CONTEXT("seed " << seed) {
      Play game(24, kViews[seed % std::size(kViews)], 2, seed);
      game.play_watched(1500);
    }
}

BOOST_AUTO_TEST_CASE(the_same_holds_when_there_are_more_laggards_than_slots) {
  for (const View& view : kViews) {
    Play game(3, view, 9, 1);
    for (int i = 0; i < 5000; i++) game.step();
    game.quiesce();
  }
}

BOOST_AUTO_TEST_CASE(the_same_holds_over_several_words_of_pending_bits_and_turns_of_the_ring) {
  for (const View& view : {transitions(3, 3), sequences(6, 3, 2), whole_episodes()}) {
    Play game(300, view, 8, 2);
    for (int i = 0; i < 6000; i++) game.step();
    game.quiesce();
  }
}

BOOST_AUTO_TEST_SUITE_END()
