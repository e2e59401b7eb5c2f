#include <boost/test/unit_test.hpp>

#include "children.h"
#include "client/membership.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_membership)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

std::shared_ptr<Attachment> attachment() { return std::make_shared<Attachment>(make_segment()); }

int count_of(Attachment& a, Role role) {
  const Census c = take_census(a.memory(), true);
  return role == Role::kWriter ? c.writers : c.learners;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_place_is_taken_when_it_is_needed_and_given_up_at_the_end) {
  const auto a = attachment();
  {
    Membership member(a, Role::kWriter);
    BOOST_TEST(member.held() == 0);
    BOOST_TEST(count_of(*a, Role::kWriter) == 0);
    const int id = member.id();
    BOOST_TEST(id > 0);
    BOOST_TEST(member.take_renewed());
    BOOST_TEST(!member.take_renewed());
    BOOST_TEST(member.id() == id);
    BOOST_TEST(member.held() == id);
    BOOST_TEST(count_of(*a, Role::kWriter) == 1);
  }
  BOOST_TEST(count_of(*a, Role::kWriter) == 0);
}

BOOST_AUTO_TEST_CASE(who_left_can_come_back) {
  const auto a = attachment();
  Membership member(a, Role::kLearner);
  member.act();
  member.leave();
  BOOST_TEST(count_of(*a, Role::kLearner) == 0);
  BOOST_TEST(member.act(), "it is a new place");
  BOOST_TEST(!member.act());
  BOOST_TEST(count_of(*a, Role::kLearner) == 1);
}

BOOST_AUTO_TEST_CASE(a_released_one_keeps_the_memory_no_longer) {
  auto a = attachment();
  const std::weak_ptr<Attachment> memory = a;
  Membership member(a, Role::kLearner);
  member.act();
  a.reset();
  BOOST_TEST(!memory.expired());
  member.release();
  BOOST_TEST(memory.expired());
}

BOOST_AUTO_TEST_CASE(a_forked_child_takes_a_place_of_its_own_and_leaves_the_parents_alone) {
  const auto a = attachment();
  Membership member(a, Role::kWriter);
  const int id = member.id();
  const Shared<std::array<int, 3>> seen;
  {
    Child child([&] {
      (*seen)[0] = member.held();
      member.leave();
      (*seen)[1] = count_of(*a, Role::kWriter);
      (*seen)[2] = member.id();
    });
    BOOST_REQUIRE(child.wait() == 0);
  }
  BOOST_TEST((*seen)[0] == 0);
  BOOST_TEST((*seen)[1] == 1, "the parent's is still there");
  BOOST_TEST((*seen)[2] != id);
  BOOST_TEST(member.id() == id);
  BOOST_TEST(count_of(*a, Role::kWriter) == 1);
}

BOOST_AUTO_TEST_SUITE_END()
