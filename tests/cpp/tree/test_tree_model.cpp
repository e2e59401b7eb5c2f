#include <boost/test/unit_test.hpp>

#include "tree_model.h"

BOOST_AUTO_TEST_SUITE(test_tree_model)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

void set_some(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  const int64_t capacity = tree.capacity();
  const int n = 1 + static_cast<int>(random() % 300);
  const float scale = any_scale(random);
  std::vector<int64_t> index(n);
  std::vector<float> leaf(n);
  for (int b = 0; b < n; b++) {
    index[b] = static_cast<int64_t>(random() % capacity);
    leaf[b] = any_priority(random, scale);
  }
  tree.set(index.data(), leaf.data(), n);
  model.set(index, leaf);
}

// As the absorber does it: some of the stored leaves are zeroed beforehand, while the sums still account for them.
void replace_some(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  const int64_t capacity = tree.capacity();
  const int64_t begin = static_cast<int64_t>(random() % capacity);
  const int64_t end = std::min<int64_t>(capacity, begin + 1 + static_cast<int64_t>(random() % 2000));
  const uint64_t gap = 1 + random() % 30;
  const bool removal = random() % 2 == 0;
  const float scale = any_scale(random);
  std::vector<int64_t> index;
  std::vector<float> was, now;
  for (int64_t i = begin; i < end; i += 1 + static_cast<int64_t>(random() % gap)) {
    index.push_back(i);
    was.push_back(model.leaves[i]);
    now.push_back(removal ? 0 : any_priority(random, scale));
    if (random() % 2) tree.leaves()[i] = 0;
  }
  tree.replace_sorted(index.data(), was.data(), now.data(), static_cast<int>(index.size()));
  model.set(index, now, false);
}

void write_and_rebuild(PriorityTree& tree, Model& model, std::mt19937_64& random) {
  const float scale = any_scale(random);
  for (int k = 0; k < 50; k++) {
    const int64_t i = static_cast<int64_t>(random() % tree.capacity());
    tree.leaves()[i] = model.leaves[i] = any_priority(random, scale);
  }
  const bool anew = random() % 2;
  anew ? tree.refit() : tree.rebuild();
  anew ? model.refit() : model.rebuild();
}

}  // namespace

BOOST_AUTO_TEST_CASE(random_operations_agree_with_an_array) {
  on_every_instruction_set([](Simd simd) {
    for (int64_t capacity : {1, 2, 15, 16, 17, 127, 128, 129, 1023, 1025, 4097, 100'003}) {
      Tree tree(capacity, simd);
      Model model(capacity);
      std::mt19937_64 random(capacity);
      check_equal(tree.tree, model);
      for (int round = 0; round < (capacity > 10'000 ? 5 : 60); round++) {
        const auto kind = random() % 8;
        (kind == 0 ? write_and_rebuild : kind < 3 ? replace_some : set_some)(tree.tree, model, random);
        check_equal(tree.tree, model);
        check_finds(tree.tree, model, random);
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(the_total_is_exact_after_a_million_updates_over_nine_decades) {
  on_every_instruction_set([](Simd simd) {
    const int capacity = 50'000, batch = 250;
    Tree tree(capacity, simd);
    Model model(capacity);
    std::mt19937_64 random(3);
    std::uniform_real_distribution<float> exponent(-6, 3);
    std::vector<int64_t> index(batch);
    std::vector<float> leaf(batch);
    for (int round = 0; round < 1'000'000 / batch; round++) {
      for (int b = 0; b < batch; b++) {
        index[b] = static_cast<int64_t>(random() % capacity);
        leaf[b] = model.leaves[index[b]] = std::pow(10.0f, exponent(random));
      }
      tree->set(index.data(), leaf.data(), batch);
    }
    model.unit = static_cast<int>(std::log2(tree->unit()));
    BOOST_TEST((*model.fit() - 1 <= *model.unit && *model.unit <= *model.fit() + 1));
    check_equal(tree.tree, model);
    check_finds(tree.tree, model, random);
  });
}

BOOST_AUTO_TEST_CASE(every_instruction_set_leaves_the_same_bytes) {
  for (int64_t capacity : {1, 17, 129, 5000}) {
    Tree a(capacity, Simd::kPortable), b(capacity, simds().back());
    for (Tree* tree : {&a, &b}) {
      Model model(capacity);
      std::mt19937_64 random(11);
      for (int round = 0; round < 30; round++) {
        set_some(tree->tree, model, random);
        replace_some(tree->tree, model, random);
      }
    }
    BOOST_TEST(std::memcmp(a.memory.get(), b.memory.get(), Tree::bytes(capacity)) == 0);
  }
}

BOOST_AUTO_TEST_CASE(rebuild_repairs_sums_minima_and_leaves_from_arbitrary_bytes) {
  const int64_t capacity = 5000;
  Tree tree(capacity, Simd::kPortable);
  Model model(capacity);
  std::mt19937_64 random(5);
  for (size_t k = 0; k < Tree::bytes(capacity); k++) static_cast<uint8_t*>(tree.memory.get())[k] = random();
  for (int64_t i = 0; i < capacity; i++) model.leaves[i] = Model::stored(tree->leaf(i));
  tree->rebuild();
  model.refit();
  model.written = tree->grid_state().written;
  check_equal(tree.tree, model);
  check_finds(tree.tree, model, random);
  set_some(tree.tree, model, random);
  check_equal(tree.tree, model);
}

BOOST_AUTO_TEST_SUITE_END()
