// Batches of a union of buffers, against a model of strata, of selections and of the weights of Schaul et al. (2016).
// Seeds are fixed. Were they not, each statistical test would fail by chance less than once in a million runs.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "draw/union_draw.h"

BOOST_AUTO_TEST_SUITE(test_union_draw)

using namespace torchreplay;

namespace {

constexpr int64_t kPartKeys = 1000;                // keys of part p begin at p times this
constexpr uint64_t kAlignment = 256;               // bytes, of each tensor of a block
constexpr uint64_t kSizes[] = {1, 3, 8, 20, 300};  // bytes of an item in the tensors before key, weight, probability
constexpr size_t kTensors = std::size(kSizes) + 3;

uint64_t size_of(size_t tensor) { return tensor < std::size(kSizes) ? kSizes[tensor] : tensor == kTensors - 3 ? 8 : 4; }

struct Part {
  double total;
  int64_t given;
  bool here = false;
  int64_t add_to_keys = 0;
  int64_t drawable = 40;
  double smallest = 0.25;
};

// Of a candidate, within its part.
float probability_of(int64_t candidate) { return static_cast<float>(candidate % 7 + 1) / 64.0F; }

std::vector<char> value_of(size_t part, int64_t candidate, size_t tensor) {
  std::vector<char> value(size_of(tensor));
  for (size_t i = 0; i < value.size(); i++)
    value[i] = static_cast<char>(part * 101 + static_cast<size_t>(candidate) * 7 + tensor * 31 + i);
  const int64_t key = static_cast<int64_t>(part) * kPartKeys + candidate;
  const float weight = -1, probability = probability_of(candidate);
  if (tensor == kTensors - 3) std::memcpy(value.data(), &key, sizeof key);
  if (tensor == kTensors - 2) std::memcpy(value.data(), &weight, sizeof weight);
  if (tensor == kTensors - 1) std::memcpy(value.data(), &probability, sizeof probability);
  return value;
}

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The candidates of a part as a shard sends them.
std::vector<char> block_of(size_t part, int64_t given) {
  std::vector<char> block;
  for (size_t t = 0; t < kTensors; t++) {
    const size_t from = block.size();
    for (int64_t c = 0; c < given; c++) {
      const std::vector<char> value = value_of(part, c, t);
      block.insert(block.end(), value.begin(), value.end());
    }
    block.resize(from + aligned(block.size() - from));
  }
  return block;
}

struct Batch {
  int64_t n;
  std::vector<std::vector<char>> tensors;
  DrawnFrom from = {};

  explicit Batch(int64_t items) : n(items), tensors(kTensors) {
    for (size_t t = 0; t < kTensors; t++) tensors[t].resize(static_cast<size_t>(n) * size_of(t));
  }

  std::vector<UnionDraw::Output> outputs() {
    std::vector<UnionDraw::Output> outputs;
    for (size_t t = 0; t < kTensors; t++) outputs.push_back({tensors[t].data(), size_of(t)});
    return outputs;
  }

  std::vector<char> value(size_t tensor, int64_t i) const {
    const auto bytes = static_cast<ptrdiff_t>(size_of(tensor));
    const auto first = tensors[tensor].begin() + static_cast<ptrdiff_t>(i) * bytes;
    return {first, first + bytes};
  }

  template <class T>
  std::vector<T> all(size_t tensor) const {
    std::vector<T> values(static_cast<size_t>(n));
    std::memcpy(values.data(), tensors[tensor].data(), tensors[tensor].size());
    return values;
  }
  std::vector<int64_t> keys() const { return all<int64_t>(kTensors - 3); }
  std::vector<float> weights() const { return all<float>(kTensors - 2); }
  std::vector<float> probabilities() const { return all<float>(kTensors - 1); }
};

struct Name {
  uint64_t seed = 7, stream = 0, step = 0;
};

std::vector<Candidates> candidates_of(const std::vector<Part>& parts, const std::vector<std::vector<char>>& blocks) {
  std::vector<Candidates> candidates;
  for (size_t p = 0; p < parts.size(); p++)
    candidates.push_back({{parts[p].total, parts[p].smallest, parts[p].drawable},
                          parts[p].given,
                          parts[p].here ? nullptr : blocks[p].data(),
                          parts[p].add_to_keys});
  return candidates;
}

// The same parts, drawn from again and again.
class Union {
 public:
  Union(std::vector<Part> parts, int64_t n) : parts_(std::move(parts)), n_(n) {
    for (size_t p = 0; p < parts_.size(); p++) blocks_.push_back(block_of(p, parts_[p].given));
  }

  Batch draw(const Name& name, UnionWeights weights = UnionWeights::kBuffer, double beta = 0.4) const {
    Batch batch(n_);
    for (size_t t = 0; t < kTensors; t++)
      if (parts_[0].here)
        for (int64_t c = 0; c < parts_[0].given; c++)
          std::ranges::copy(value_of(0, c, t), batch.tensors[t].begin() + c * static_cast<int64_t>(size_of(t)));
    UnionDraw draw(n_, beta, weights, name.seed, name.stream, name.step);
    const std::vector<Candidates> candidates = candidates_of(parts_, blocks_);
    BOOST_REQUIRE(draw.suffices(candidates));
    draw.make(candidates, batch.outputs());
    batch.from = draw.drawn_from();
    return batch;
  }

  std::vector<int64_t> counts(const Batch& batch) const {
    std::vector<int64_t> counts(parts_.size());
    for (const int64_t key : batch.keys()) counts.at(static_cast<size_t>(key / kPartKeys))++;
    return counts;
  }

 private:
  std::vector<Part> parts_;
  int64_t n_;
  std::vector<std::vector<char>> blocks_;
};

double sum_of(const std::vector<Part>& parts) {
  double total = 0;
  for (const Part& part : parts) total += part.total;
  return total;
}

}  // namespace

BOOST_AUTO_TEST_CASE(each_part_gives_what_the_strata_in_it_are_and_on_average_its_share) {
  const std::vector<std::vector<Part>> cases = {
      {{3, 16}, {5, 16}, {2.5, 16}},
      {{0.01, 16}, {1000, 16}, {0.02, 16}, {7, 16}},
      {{1, 16}, {0, 16}, {1, 16}, {0, 16}},
      {{1e-30, 16}, {3e-30, 16}},
      {{4, 16, true}, {1, 16}},
  };
  constexpr int64_t kItems = 16;
  constexpr uint64_t kDraws = 4000;
  for (const std::vector<Part>& parts : cases) {
    const Union all(parts, kItems);
    const double width = sum_of(parts) / kItems;
    std::vector<double> mean(parts.size());
    for (uint64_t step = 0; step < kDraws; step++) {
      const std::vector<int64_t> counts = all.counts(all.draw({.step = step}));
      int64_t sum = 0;
      double begin = 0;
      for (size_t p = 0; p < parts.size(); p++) {
        const double first = begin / width, last = (begin + parts[p].total) / width;
        const double whole = std::floor(last + 1e-9) - std::ceil(first - 1e-9);
        const double touched = parts[p].total > 0 ? std::ceil(last + 1e-9) - std::floor(first - 1e-9) : 0;
        if (counts[p] < whole || counts[p] > touched) BOOST_ERROR("a part has others' strata, or lacks its own");
        if (std::abs(static_cast<double>(counts[p]) - (last - first)) >= 2) BOOST_ERROR("a part is far off its share");
        mean[p] += static_cast<double>(counts[p]) / kDraws;
        sum += counts[p];
        begin += parts[p].total;
      }
      if (sum != kItems) BOOST_ERROR("a batch has other than its number of items");
    }
    // Two strata at most are shared with others, each with a variance of 1/4 at most. 5 sigma: 6e-7 for each mean.
    for (size_t p = 0; p < parts.size(); p++)
      BOOST_TEST(std::abs(mean[p] - parts[p].total / width) < 5 * std::sqrt(0.5 / kDraws));
  }
}

BOOST_AUTO_TEST_CASE(each_candidate_is_taken_equally_often) {
  constexpr int64_t kItems = 8, kGiven = 12, kTaken = kItems / 2;  // of equal parts it is always half
  constexpr uint64_t kDraws = 20000;
  for (const bool here : {false, true}) {
    const int64_t first_given = here ? kItems : kGiven;
    const Union all({{2, first_given, here}, {2, kGiven}}, kItems);
    std::map<int64_t, double> often;
    for (uint64_t step = 0; step < kDraws; step++)
      for (const int64_t key : all.draw({.step = step}).keys()) often[key]++;
    for (const int64_t part : {0, 1}) {
      const int64_t given = part == 0 ? first_given : kGiven;
      const double p = static_cast<double>(kTaken) / static_cast<double>(given);
      double chi_square = 0;  // of a selection without replacement: (g - 1) / g of the sum over independent ones
      for (int64_t c = 0; c < given; c++)
        chi_square += std::pow(often[part * kPartKeys + c] - kDraws * p, 2) / (kDraws * p * (1 - p));
      chi_square *= static_cast<double>(given - 1) / static_cast<double>(given);
      BOOST_TEST(chi_square < (given == kGiven ? 50.0 : 41.0));  // 1e-6 of those with 11 and 7 degrees of freedom
    }
  }
}

BOOST_AUTO_TEST_CASE(each_set_of_candidates_is_equally_likely) {
  constexpr uint64_t kDraws = 20000;
  for (const bool here : {false, true}) {
    const Union all({{1, 4, here}, {1, 5}}, 4);  // two of each
    std::map<std::set<int64_t>, double> often[2];
    for (uint64_t step = 0; step < kDraws; step++) {
      std::set<int64_t> sets[2];
      for (const int64_t key : all.draw({.stream = 3, .step = step}).keys())
        sets[key / kPartKeys].insert(key % kPartKeys);
      for (const int part : {0, 1}) often[part][sets[part]]++;
    }
    for (const int part : {0, 1}) {
      const double expected = kDraws / (part == 0 ? 6.0 : 10.0);
      BOOST_TEST(often[part].size() == (part == 0 ? 6U : 10U));
      double chi_square = 0;
      for (const auto& [set, count] : often[part]) chi_square += std::pow(count - expected, 2) / expected;
      BOOST_TEST(chi_square < (part == 0 ? 36.0 : 46.0));  // 1e-6 of those with 5 and 9 degrees of freedom
    }
  }
}

BOOST_AUTO_TEST_CASE(items_move_whole_whatever_their_size_and_none_is_there_twice) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; round++) {
    const int64_t n = std::uniform_int_distribution<int64_t>(1, 40)(random);
    const bool here = round % 2;
    std::vector<Part> parts;
    for (int p = std::uniform_int_distribution<int>(1, 4)(random); p > 0; p--) {
      const bool first = parts.empty();
      parts.push_back({std::uniform_real_distribution<double>(0.1, 5)(random),
                       n + (here && first ? 0 : std::uniform_int_distribution<int64_t>(0, 9)(random)), here && first});
    }
    const Batch batch = Union(parts, n).draw({.step = static_cast<uint64_t>(round)});
    const std::vector<int64_t> keys = batch.keys();
    BOOST_TEST(std::set<int64_t>(keys.begin(), keys.end()).size() == static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) {
      const auto part = static_cast<size_t>(keys[static_cast<size_t>(i)] / kPartKeys);
      const int64_t candidate = keys[static_cast<size_t>(i)] % kPartKeys;
      BOOST_REQUIRE((part < parts.size() && candidate < parts[part].given));
      for (size_t t = 0; t < kTensors - 2; t++)
        if (batch.value(t, i) != value_of(part, candidate, t)) BOOST_ERROR("an item is not what was drawn");
    }
  }
}

BOOST_AUTO_TEST_CASE(a_block_has_a_tensor_at_each_multiple_of_256_bytes) {
  Batch batch(5);
  for (const int64_t n : {0, 1, 3, 64, 100})
    BOOST_TEST(UnionDraw::block_bytes(batch.outputs(), n) == block_of(0, n).size());
}

BOOST_AUTO_TEST_CASE(keys_get_the_number_of_their_part_on_top_and_no_others) {
  for (const bool here : {false, true}) {
    constexpr int64_t kFirst = int64_t{3} << 48, kLast = int64_t{9} << 48;
    const std::vector<Part> parts = {{1, 12, here, kFirst}, {1, 12}, {1, 12, false, kLast}};
    std::vector<Part> plain = parts;
    for (Part& part : plain) part.add_to_keys = 0;
    for (uint64_t step = 0; step < 20; step++) {
      std::vector<int64_t> expected = Union(plain, 12).draw({.step = step}).keys();
      for (int64_t& key : expected) key += key / kPartKeys == 0 ? kFirst : key / kPartKeys == 2 ? kLast : 0;
      BOOST_TEST(Union(parts, 12).draw({.step = step}).keys() == expected);
    }
  }
}

// w(i) = (N P(i))^-beta, divided by the largest one.
BOOST_AUTO_TEST_CASE(weights_and_probabilities_are_those_of_the_published_formula_over_the_union) {
  const std::vector<Part> parts = {
      {4, 12, true, 0, 30, 0.125}, {6, 12, false, 0, 500, 0.01}, {1.5, 12, false, 0, 9, 0.3}};
  const double total = sum_of(parts), drawable = 30 + 500 + 9;
  for (const UnionWeights divided :
       {UnionWeights::kEqual, UnionWeights::kBuffer, UnionWeights::kBatch, UnionWeights::kNone}) {
    for (const double beta : {0.0, 0.4, 1.0}) {
      const Batch batch = Union(parts, 12).draw({.step = 2}, divided, beta);
      const std::vector<int64_t> keys = batch.keys();
      std::vector<double> p, w;
      for (const int64_t key : keys) {
        p.push_back(static_cast<double>(probability_of(key % kPartKeys)) *
                    parts[static_cast<size_t>(key / kPartKeys)].total / total);
        w.push_back(std::pow(drawable * p.back(), -beta));
      }
      double largest = 1;
      if (divided == UnionWeights::kBuffer) largest = std::pow(drawable * 0.01 / total, -beta);
      if (divided == UnionWeights::kBatch) largest = *std::ranges::max_element(w);
      for (size_t i = 0; i < keys.size(); i++) {
        const double expected = divided == UnionWeights::kEqual ? 1 : w[i] / largest;
        BOOST_TEST(static_cast<double>(batch.weights()[i]) == expected, boost::test_tools::tolerance(1e-6));
        BOOST_TEST(static_cast<double>(batch.probabilities()[i]) == p[i], boost::test_tools::tolerance(1e-6));
      }
      BOOST_TEST(batch.from.total == total);
      BOOST_TEST(batch.from.smallest == 0.01);
      BOOST_TEST(batch.from.drawable == 539);
      BOOST_TEST(batch.from.beta == beta);
    }
  }
}

BOOST_AUTO_TEST_CASE(an_empty_part_has_no_smallest_leaf) {
  const Batch batch = Union({{2, 8, false, 0, 5, 0.5}, {0, 0, false, 0, 0, 0}}, 8).draw({});
  BOOST_TEST(batch.from.smallest == 0.5);
  BOOST_TEST(batch.from.drawable == 5);
}

BOOST_AUTO_TEST_CASE(two_candidates_more_than_the_whole_strata_of_a_share_suffice_and_less_do_not) {
  const auto suffice = [](const std::vector<Part>& parts, int64_t n) {
    return UnionDraw(n, 0.4, UnionWeights::kBuffer, 7, 0, 0)
        .suffices(candidates_of(parts, std::vector<std::vector<char>>(parts.size(), std::vector<char>(1))));
  };
  BOOST_TEST(suffice({{1, 6}, {3, 14}}, 16));
  BOOST_TEST(!suffice({{1, 5}, {3, 14}}, 16));
  BOOST_TEST(!suffice({{1, 6}, {3, 13}}, 16));
  BOOST_TEST(suffice({{1, 6}, {0, 0}, {3, 14}}, 16));  // nothing can be drawn there
  BOOST_TEST(suffice({{1, 2}, {1e9, 16}}, 16));        // and never more than all
  BOOST_TEST(!suffice({{1, 2}, {1e9, 15}}, 16));
  BOOST_TEST(!suffice({{1, 1}, {1e9, 16}}, 16));
}

BOOST_AUTO_TEST_CASE(candidates_that_suffice_are_never_too_few) {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; round++) {
    const int64_t n = std::uniform_int_distribution<int64_t>(1, 20)(random);
    std::vector<Part> parts(std::uniform_int_distribution<size_t>(1, 5)(random));
    for (Part& part : parts)
      part.total = round % 3 ? std::exp(std::normal_distribution<double>(0, 3)(random))
                             : std::uniform_int_distribution<int>(0, 3)(random);
    if (sum_of(parts) <= 0) continue;
    for (Part& part : parts)  // as few as suffice
      part.given =
          part.total > 0
              ? std::min(n, static_cast<int64_t>(static_cast<double>(n) * part.total / sum_of(parts) + 1e-9) + 2)
              : 0;
    const Batch batch = Union(parts, n).draw({.seed = random(), .step = static_cast<uint64_t>(round)});
    const std::vector<int64_t> keys = batch.keys();
    if (std::set<int64_t>(keys.begin(), keys.end()).size() != static_cast<size_t>(n))
      BOOST_ERROR("places of the batch are empty");
    for (const float weight : batch.weights())
      if (!(weight > 0)) BOOST_ERROR("an item has no weight");
  }
}

BOOST_AUTO_TEST_CASE(a_batch_is_a_function_of_seed_stream_and_step) {
  const Union all({{3, 40}, {2, 40}, {1, 40}}, 16);
  const std::vector<int64_t> keys = all.draw({1, 2, 3}).keys();
  BOOST_TEST(all.draw({1, 2, 3}).keys() == keys);
  BOOST_TEST(all.draw({2, 2, 3}).keys() != keys);
  BOOST_TEST(all.draw({1, 3, 3}).keys() != keys);
  BOOST_TEST(all.draw({1, 2, 4}).keys() != keys);
  BOOST_TEST(all.draw({1, 2, 3}, UnionWeights::kNone, 1.0).keys() == keys, "weights choose nothing");
}

BOOST_AUTO_TEST_SUITE_END()
