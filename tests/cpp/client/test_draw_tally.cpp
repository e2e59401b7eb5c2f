// What is counted of batches, beside plain lists of what has happened.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "client/draw_tally.h"

BOOST_AUTO_TEST_SUITE(test_draw_tally)

using namespace torchreplay;

namespace {

enum class End { kNone, kHandedOut, kGivenUp };

struct Known {
  int64_t n, rule;
  End end = End::kNone;
};

int64_t items(const std::vector<Known>& rounds, const auto& which) {
  return std::accumulate(rounds.begin(), rounds.end(), int64_t{0},
                         [&](int64_t sum, const Known& round) { return which(round) ? sum + round.n : sum; });
}

}  // namespace

BOOST_AUTO_TEST_CASE(each_item_counts_once_under_the_limiter_that_has_admitted_it) {
  std::mt19937_64 random(7);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  auto tally = std::make_shared<DrawTally>();
  std::vector<std::unique_ptr<CountedRound>> rounds;
  std::vector<Known> known;
  for (int turn = 0; turn < 20'000; turn++) {
    const size_t kind = below(10);
    if (kind == 0) {
      tally->restart(tally->rule + 1);
    } else if (kind < 5 || known.empty()) {
      known.push_back({static_cast<int64_t>(below(100)), tally->rule});
      rounds.push_back(std::make_unique<CountedRound>(tally, nullptr, known.back().n));
    } else {
      const size_t at = known.size() - 1 - below(std::min<size_t>(known.size(), 10));
      if (!rounds[at]) continue;
      if (kind == 5 && known[at].end == End::kNone) {
        known[at].n = static_cast<int64_t>(below(static_cast<size_t>(known[at].n) + 1));
        rounds[at]->shorten(known[at].n);
      } else if (kind == 6) {
        rounds[at].reset();
        if (known[at].end == End::kNone) known[at].end = End::kGivenUp;
      } else {
        kind == 7 ? rounds[at]->give_up() : rounds[at]->hand_out();
        if (known[at].end == End::kNone) known[at].end = kind == 7 ? End::kGivenUp : End::kHandedOut;
      }
    }
    if (turn % 50) continue;
    const auto now = [&](const Known& r) { return r.rule == tally->rule; };
    const auto out = [](const Known& r) { return r.end == End::kHandedOut; };
    BOOST_TEST(tally->sampled == items(known, [&](const Known& r) { return now(r) && r.end != End::kGivenUp; }));
    BOOST_TEST(tally->counted == items(known, [&](const Known& r) { return now(r) && out(r); }));
    BOOST_TEST(tally->items == items(known, out));
    BOOST_TEST(tally->batches == std::ranges::count_if(known, out));
  }
}

BOOST_AUTO_TEST_CASE(no_step_is_used_twice_and_the_last_one_given_up_is_free_again) {
  auto tally = std::make_shared<DrawTally>();
  auto steps = std::make_shared<DrawSteps>();
  const auto begin = [&] { return std::make_unique<CountedRound>(tally, steps, 8); };
  auto first = begin(), second = begin(), third = begin();
  BOOST_TEST((first->step() == 0 && second->step() == 1 && third->step() == 2));
  second.reset();  // the third one has been asked for: its number stays
  BOOST_TEST(begin()->step() == 3);
  BOOST_TEST(begin()->step() == 3);  // as nobody holds that any more
  third->give_up();
  first->hand_out();
  third->hand_out();
  BOOST_TEST((steps->made == 1 && steps->under_way == 0 && tally->batches == 1));
  BOOST_TEST(begin()->step() == 2);
  auto ahead = begin();
  steps->go_on_from(70);
  BOOST_TEST(begin()->step() == 71);  // of the one under way, which was asked for under another number
  ahead->hand_out();
  BOOST_TEST((steps->made == 71 && steps->next == 71));
}

BOOST_AUTO_TEST_CASE(a_lease_is_asked_for_anew_once_half_of_what_is_left_is_ordered) {
  auto tally = std::make_shared<DrawTally>();
  CountedRound(tally, nullptr, 40).hand_out();
  tally->grant(100, 7.0);
  BOOST_TEST((tally->lease == 100 && tally->enough == 70));
  BOOST_TEST((tally->covers(60, 6.9) && !tally->covers(61, 6.9) && !tally->covers(60, 7.0)));
  tally->restart(1);
  BOOST_TEST((tally->lease == 0 && tally->enough == 0 && tally->sampled == 0 && tally->items == 40));
  BOOST_TEST(!tally->covers(0, 1.0));  // a lease ends with its limiter
}

BOOST_AUTO_TEST_SUITE_END()
