#define BOOST_TEST_MODULE linked_absorb
#include <boost/test/unit_test.hpp>
#include <random>

#include "explorers.h"
#include "invariants.h"
#include "update.h"
#include "views.h"

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// Random interleavings of explorers with several streams each, which lag and die, with absorptions and updates; and
// what must have come of them.
class Play {
 public:
  Play(uint64_t capacity, const View& view, int explorers, unsigned seed)
      : random_(seed), m_(segment(capacity, view)), written_(view) {
    for (int w = 0; w < explorers; w++) explorers_.emplace_back(*m_, w + 1);
    states_.assign(explorers, kIdle);
    streams_.resize(explorers);
    for (auto& s : streams_) s.resize(1 + random_() % 3);
    // Some games have long episodes, some end nearly always.
    end_every_ = 1 + random_() % 20;
    reset_every_ = 2 + random_() % 60;
  }

  void step() {
    const auto w = random_() % explorers_.size();
    switch (random_() % 24) {
      case 0:
        return absorb_and_check();
      case 1:
        return update_and_check();
      case 2:
        return die(w);
      case 3:
        return resync();
      case 4:
        return absorb_to_an_older_head();
      default:
        return advance(w);
    }
  }

  void absorb_and_check() {
    const float before = m_->header().max_raw;
    settle(*m_);
    learn(before);
    const std::string v = violation(*m_);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }

  // Every explorer finishes or dies, and its slot is freed.
  void quiesce() {
    for (size_t w = 0; w < explorers_.size(); w++) {
      while (random_() % 2 && states_[w] != kIdle) advance(w);
      die(w);
      reclaim(*m_, static_cast<int>(w) + 1);
    }
    absorb_and_check();
    BOOST_REQUIRE(m_->header().rows == RowSet::committed(*m_).rows().size());
    // Items that were complete between two absorptions only may count or not.
    BOOST_REQUIRE(m_->header().inserted >= leaves_.size());
    BOOST_REQUIRE(m_->header().inserted <= written_.items().size());
  }

  // Absorbs after every row, so that no item is missed.
  void play_watched(int steps) {
    for (int i = 0; i < steps; i++) {
      advance(random_() % explorers_.size());
      absorb_and_check();
      BOOST_REQUIRE(m_->header().inserted == leaves_.size());
    }
  }

 private:
  enum State { kIdle, kTicket, kBusy };

  static std::unique_ptr<SegmentMemory> segment(uint64_t capacity, const View& view) {
    Plan plan;
    plan.capacity = capacity;
    plan.view = view;
    plan.sampler = {1, Normalize::kBuffer, 1, 0};  // leaves are raw priorities
    return make_segment(plan);
  }

  void advance(size_t w) {
    if (states_[w] == kIdle) {
      explorers_[w].writer().take_ticket();
      states_[w] = kTicket;
    } else if (states_[w] == kTicket) {
      states_[w] = explorers_[w].writer().seize() ? kBusy : kIdle;
    } else {
      write(explorers_[w], streams_[w][random_() % streams_[w].size()]);
      states_[w] = kIdle;
    }
  }

  void write(Explorer& explorer, Stream& stream) {
    RowMeta meta = stream.reset();
    if (stream.running && random_() % reset_every_ != 0) {
      const uint64_t flags = random_() % end_every_ == 0 ? (1 + random_() % 3) * kTerminated : 0;
      std::optional<float> given;
      if (random_() % 3 == 0) given = std::pow(2.0F, static_cast<float>(random_() % 100) / 10 - 5);
      meta = stream.next(flags, given);
    }
    written_.add(explorer.writer().key(), {meta.link, meta.step, meta.priority});
    explorer.finish(meta);
    stream.wrote(explorer.writer().key(), meta);
  }

  // A ticket lost before its slot was busy stays lost; a slot left busy is freed, now or later. Its successor under the
  // same id has streams of its own.
  void die(size_t w) {
    if (states_[w] == kBusy) reclaim(*m_, static_cast<int>(w) + 1);
    states_[w] = kIdle;
    for (Stream& s : streams_[w]) s = {};
  }

  // Items seen for the first time have the priority given with their rows, or the largest raw one: that before or after
  // this absorption, since the order within it is free. All other leaves are as they were.
  void learn(float max_before) {
    const float max_after = m_->header().max_raw;
    BOOST_REQUIRE(max_after >= max_before);
    for (uint64_t s = 0; s < m_->capacity(); s++) {
      const float leaf = m_->tree().leaf(static_cast<int64_t>(s));
      if (leaf <= 0) continue;
      const uint64_t key = m_->at(s) - 1;
      if (const auto [known, is_new] = leaves_.try_emplace(key, leaf); !is_new) {
        BOOST_REQUIRE(leaf == known->second);
        continue;
      }
      const auto given = written_.priority(key);
      BOOST_REQUIRE(leaf >= m_->tree().clamp(given ? *given : max_before));
      BOOST_REQUIRE(leaf <= m_->tree().clamp(given ? *given : max_after));
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
      Locked lock(*m_);
      Absorber(*m_).resync(slot, m_->header().head.load());
    }
    check_unsettled(before);
  }

  // A learner that read the head and then waited for the lock.
  void absorb_to_an_older_head() {
    const float before = m_->header().max_raw;
    const uint64_t head = m_->header().head.load();
    {
      Locked lock(*m_);
      Absorber(*m_).step(head - std::min(head, random_() % (m_->capacity() + 2)));
    }
    check_unsettled(before);
  }

  // What holds at any time under the lock: every item with a leaf has all its rows absorbed and linked, and links go
  // both ways between rows of which one names the other.
  void check_unsettled(float max_before) {
    learn(max_before);
    std::string v = tree_violation(m_->tree());
    for (uint64_t s = 0; s < m_->capacity() && v.empty(); s++) v = unsettled_violation(s);
    BOOST_REQUIRE_MESSAGE(v.empty(), v);
  }

  std::string unsettled_violation(uint64_t slot) const {
    const Links& links = m_->links(slot);
    const uint32_t prev1 = links.prev.load(), next1 = links.next.load();
    if (prev1 && m_->links(prev1 - 1).next.load() != slot + 1) return "the row before does not know of its successor";
    if (next1 && m_->links(next1 - 1).prev.load() != slot + 1) return "the row after does not know of its predecessor";
    const uint64_t at = m_->at(slot);
    if (!at) return prev1 || next1 ? "links of an empty slot" : "";
    if (prev1 &&
        (m_->at(prev1 - 1) != written_.rows().at(at - 1).prev_key1 || !written_.follows(written_.rows().at(at - 1))))
      return "a row is linked to one that it does not name";
    if (!(m_->tree().leaf(static_cast<int64_t>(slot)) > 0)) return "";
    const auto item = written_.item(at - 1);
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
  std::vector<Explorer> explorers_;
  std::vector<State> states_;
  std::vector<std::vector<Stream>> streams_;
  uint64_t end_every_, reset_every_;
  RowSet written_;                    // every row that ever was
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
