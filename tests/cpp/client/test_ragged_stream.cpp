#include <boost/test/unit_test.hpp>

#include "caller.h"
#include "children.h"
#include "client/prefetch_stream.h"
#include "ragged_rows.h"

BOOST_AUTO_TEST_SUITE(test_ragged_stream)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kItems = 24;
constexpr int64_t kLong = 20'000'000'000;

// A learner, and what its buffer's rows were given.
struct Made {
  std::shared_ptr<Learner> learner;
  std::unique_ptr<RaggedRows> rows;

  Made() {
    auto memory = make_segment(rows_of_any_length(40, 1 << 20));
    rows = std::make_unique<RaggedRows>(*memory);
    for (int i = 0; i < 40; i++) rows->append(rows->some_values(50));
    learner = std::make_shared<Learner>(std::make_shared<Attachment>(std::move(memory)));
    learner->own();
  }
  SegmentMemory& memory() const { return learner->attachment().memory(); }
};

struct Memory {
  explicit Memory(const Made& made, std::vector<int64_t> budget = {})
      : batch(std::make_unique<RaggedDraw>(made.memory())) {
    batch->ragged.budget = std::move(budget);
    out = batch->point(kItems);
  }
  std::unique_ptr<RaggedDraw> batch;
  BatchPointers out;
  void point(BatchPointers& o) const { o = out; }
};

using Stream = PrefetchStream<Memory>;

std::unique_ptr<RaggedDraw> next(Stream& stream) {
  for (;;) {
    auto taken = stream.take(kLong);
    if (taken.outcome != Draw::kDone && taken.outcome != Draw::kWait) return nullptr;
    if (!taken.memory) continue;
    taken.memory->batch->take(static_cast<size_t>(taken.count));
    return std::move(taken.memory->batch);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(batches_drawn_ahead_have_their_values_and_keep_to_their_budget) {
  const Caller caller;
  const Made drawn, made;
  Stream stream(made.learner, kItems);
  for (int i = 0; i < 12; i++) {
    const std::vector<int64_t> budget = i % 2 ? std::vector<int64_t>{300, -1, 300} : std::vector<int64_t>{};
    stream.order(0.5, Memory(made, budget), 1);
    Memory own(drawn, budget);
    const DrawResult result = drawn.learner->draw(kItems, 0.5, {}, own.out, 1);
    BOOST_REQUIRE((result.outcome == Draw::kDone));
    own.batch->take(static_cast<size_t>(result.count));
    const auto batch = next(stream);
    BOOST_TEST(batch->keys == own.batch->keys, boost::test_tools::per_element());
    BOOST_TEST(batch->holds(*made.rows));
    BOOST_TEST(own.batch->holds(*drawn.rows));
    BOOST_TEST((batch->keys.size() < kItems) == (i % 2 == 1));
  }
  for (int i = 0; i < 3; i++) stream.order(0.5, Memory(made), 1);  // given up: the sanitizer finds what stays
}

BOOST_AUTO_TEST_CASE(a_forked_child_has_its_own_values) {
  const Caller caller;
  const Made made;
  Stream stream(made.learner, kItems);
  for (int i = 0; i < 3; i++) stream.order(0.5, Memory(made), 1);
  BOOST_TEST(next(stream)->holds(*made.rows));
  {
    Child child([&] {
      for (int i = 0; i < 2; i++)
        if (const auto batch = next(stream); !batch || !batch->holds(*made.rows)) _exit(1);
      stream.close();
    });
    BOOST_REQUIRE(child.wait() == 0);
  }
  for (int i = 0; i < 2; i++) BOOST_TEST(next(stream)->holds(*made.rows));
}

BOOST_AUTO_TEST_SUITE_END()
