#include <boost/test/unit_test.hpp>
#include <map>
#include <random>

#include "segment/header.h"
#include "segment/layout.h"

BOOST_AUTO_TEST_SUITE(test_layout)

using namespace torchreplay;

namespace {

// Of rows by themselves: a word and a priority; linked ones have a link and a step besides.
uint64_t header_bytes(const Layout& l) { return l.view.linked() ? 24 : 12; }

struct Range {
  std::string name;
  uint64_t begin, end;
};

// Every byte range a segment of this layout uses, from the documented sizes of
// its parts.
std::vector<Range> ranges_of(const Layout& l) {
  std::vector<Range> r = {{"header", 0, sizeof(Header)},
                          {"participants", l.participants, l.participants + kMaxParticipants * sizeof(Participant)},
                          {"config", l.config, l.config + l.config_bytes},
                          {"at", l.at, l.at + l.capacity * 8},
                          {"pending", l.pending, l.pending + (l.capacity + 63) / 64 * 8},
                          {"summary", l.pending_summary, l.pending_summary + (l.capacity + 4095) / 4096 * 8},
                          {"tree", l.tree, l.tree + PriorityTree::bytes(static_cast<int64_t>(l.capacity))},
                          {"rewrite", l.rewrite, l.rewrite + 16 + l.fields.size()}};
  for (const Field& f : l.fields) r.back().end += f.nbytes;
  if (!l.ragged.empty()) {
    r.push_back({"page words", l.pages.words, l.pages.words + l.pages.count * 8});
    r.push_back({"pages", l.pages.values, l.pages.values + l.pages.count * l.pages.bytes});
    r.push_back({"runs of rows", l.pages.runs, l.pages.runs + l.capacity * 8});
    r.push_back({"owners of pages", l.pages.owners, l.pages.owners + l.pages.count * 4});
    r.push_back({"runs in flight", l.pages.in_flight, l.pages.in_flight + kMaxParticipants * sizeof(RunInFlight)});
  }
  if (l.view.linked()) r.push_back({"links", l.links, l.links + l.capacity * 8});
  for (uint64_t slot : {uint64_t{0}, l.capacity / 2, l.capacity - 1}) {
    if (slot && slot == l.capacity / 2 && l.capacity <= 2) continue;
    const uint64_t record = l.records + slot * l.record_stride;
    r.push_back({"row header", record, record + header_bytes(l)});
    for (const Field& f : l.fields) {
      if (f.nbytes) r.push_back({"field", f.offset + slot * f.stride, f.offset + slot * f.stride + f.nbytes});
    }
    if (l.capacity == 1) break;
  }
  return r;
}

void check_apart(const Layout& l) {
  std::vector<Range> r = ranges_of(l);
  std::sort(r.begin(), r.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < r.size(); i++) {
    BOOST_TEST_INFO(r[i].name << " and " << r[i + 1].name);
    BOOST_TEST(r[i].end <= r[i + 1].begin);
  }
  BOOST_TEST(r.back().end <= l.bytes);
}

void check_aligned(const Layout& l) {
  for (uint64_t region : {l.participants, l.config, l.records, l.at, l.pending, l.tree}) BOOST_TEST(region % 64 == 0);
  BOOST_TEST(l.record_stride % 8 == 0);
  BOOST_TEST(l.bytes % 4096 == 0);
  for (const Field& f : l.fields) {
    const auto size = static_cast<uint64_t>(item_size(f.element));
    BOOST_TEST(f.offset % (f.nbytes >= 1024 ? 64 : size) == 0);
    BOOST_TEST(f.stride % size == 0);
    BOOST_TEST(f.own_array == (f.nbytes >= 1024));
  }
}

// Often none.
std::vector<RaggedField> random_ragged(std::mt19937_64& random) {
  std::vector<RaggedField> fields;
  uint32_t groups = 0;
  for (uint64_t f = random() % 4; f > 0; f--) {
    const auto group = static_cast<uint32_t>(random() % (groups + 1));
    groups = std::max(groups, group + 1);
    fields.push_back({Element::kF32, 4 * (random() % 10), group});
  }
  return fields;
}

Field field(Element e, uint64_t count) { return {e, count * static_cast<uint64_t>(item_size(e))}; }

}  // namespace

BOOST_AUTO_TEST_CASE(header_rows_and_table_have_the_documented_sizes) {
  BOOST_TEST(sizeof(RowHeader) == 24U);
  BOOST_TEST(sizeof(Participant) <= 64U);
  BOOST_TEST(sizeof(Header) <= 4096U - 64U);
  BOOST_TEST(kMaxParticipants <= 1 << 15);
}

BOOST_AUTO_TEST_CASE(five_small_fields_share_one_line_with_the_row_header) {
  const Layout l = make_layout(
      1000, {field(Element::kF32, 4), field(Element::kI64, 1), field(Element::kF32, 1), field(Element::kBool, 1)}, {},
      100);
  BOOST_TEST(l.record_stride == 64U);
  BOOST_TEST(l.fields[1].offset == l.records + 16);  // the widest comes first
  check_apart(l);
  check_aligned(l);
}

BOOST_AUTO_TEST_CASE(a_small_transition_with_both_observations_is_one_line) {
  const Layout l = make_layout(1000,
                               {field(Element::kF32, 4), field(Element::kI64, 1), field(Element::kF32, 1),
                                field(Element::kF32, 4), field(Element::kBool, 1)},
                               {}, 100);
  BOOST_TEST(l.record_stride == 64U);
  check_apart(l);
  check_aligned(l);
}

BOOST_AUTO_TEST_CASE(narrow_fields_begin_right_behind_the_header) {
  const Layout l = make_layout(1000, {field(Element::kU8, 4)}, {}, 0);
  BOOST_TEST(l.fields[0].offset == l.records + 12);
  BOOST_TEST(l.record_stride == 16U);
}

BOOST_AUTO_TEST_CASE(a_field_of_a_kilobyte_has_its_own_array_and_a_smaller_one_has_not) {
  const Layout l =
      make_layout(10, {field(Element::kU8, 1023), field(Element::kU8, 1024), field(Element::kU8, 1025)}, {}, 0);
  BOOST_TEST(!l.fields[0].own_array);
  BOOST_TEST(l.fields[1].stride == 1024U);
  BOOST_TEST(l.fields[2].stride == 1032U);
  BOOST_TEST(l.record_stride >= 12U + 1023U);
  BOOST_TEST(l.record_stride <= 1088U);
  check_apart(l);
}

BOOST_AUTO_TEST_CASE(no_record_or_long_value_touches_more_lines_than_its_size_asks_for) {
  const auto check = [](uint64_t start, uint64_t stride, uint64_t bytes) {
    for (uint64_t begin = start; begin < start + 64 * stride; begin += stride)
      if ((begin + bytes - 1) / 64 - begin / 64 + 1 > (bytes + 63) / 64) BOOST_FAIL(bytes << " bytes at " << begin);
  };
  for (uint64_t n = 0; n < 3000; n++) {
    const Layout l = make_layout(64, {field(Element::kU8, n)}, {}, 0);
    const Field& f = l.fields[0];
    if (f.own_array)
      check(f.offset, f.stride, n);
    else
      check(l.records, l.record_stride, 12 + n);
  }
}

BOOST_AUTO_TEST_CASE(random_layouts_are_aligned_and_nothing_overlaps) {
  std::mt19937_64 random(1);
  for (int k = 0; k < 300; k++) {
    std::vector<Field> fields;
    for (uint64_t f = random() % 12; f > 0; f--)
      fields.push_back(field(static_cast<Element>(random() % kElements), random() % (random() % 5 ? 20 : 3000)));
    const uint64_t capacity = 1 + random() % (random() % 2 ? 100 : 100'000);
    const Layout l = make_layout(capacity, fields, {.span = static_cast<uint32_t>(random() % 2)}, random() % 10'000,
                                 random_ragged(random), 1024 + random() % (random() % 2 ? 10'000 : 10'000'000));
    check_apart(l);
    check_aligned(l);
  }
}

BOOST_AUTO_TEST_CASE(a_segment_without_ragged_fields_is_laid_out_as_before_there_were_any) {
  const std::vector<Field> fields = {field(Element::kF32, 4), field(Element::kU8, 3000), field(Element::kI64, 1)};
  const Layout single = make_layout(100, fields, {}, 64);
  const Layout linked = make_layout(1'000'000, fields, {.span = 3, .claimed = 1}, 700);
  BOOST_TEST(single.bytes == 593920U);
  BOOST_TEST(linked.bytes == 3113234432U + 8 * kMaxParticipants);  // since a holder says how many items it has lost
  BOOST_TEST(single.fixed_fields() == 3U);
  BOOST_TEST(!single.pages.are_there());
}

BOOST_AUTO_TEST_CASE(a_run_and_a_length_for_each_group_are_hidden_behind_the_fields) {
  const Layout l =
      make_layout(10, {field(Element::kF32, 2), field(Element::kU8, 2000)}, {}, 0,
                  {{Element::kI32, 4, 0}, {Element::kF32, 4, 0}, {Element::kU8, 1, 1}, {Element::kF32, 12, 0}}, 4096);
  BOOST_TEST(l.fixed_fields() == 2U);
  BOOST_TEST(l.pages.run_field == 2U);
  BOOST_TEST(l.pages.groups == 2U);
  BOOST_TEST(l.fields.size() == 5U);
  BOOST_TEST(l.fields[2].nbytes == 8U);
  for (size_t g : {3, 4}) BOOST_TEST(l.fields[g].nbytes == 4U);
  BOOST_TEST(l.record_stride == 64U);  // one line: word, priority, 8 bytes of the field, the run, two lengths
  check_apart(l);
  check_aligned(l);
}

BOOST_AUTO_TEST_CASE(pages_are_a_sixteenth_of_the_mean_row) {
  const auto bytes = [](uint64_t ragged_bytes, uint64_t capacity) {
    const Layout l = make_layout(capacity, {}, {}, 0, {{Element::kU8, 1, 0}}, ragged_bytes);
    BOOST_TEST(l.pages.count == ragged_bytes / l.pages.bytes);
    return l.pages.bytes;
  };
  BOOST_TEST(bytes(uint64_t{2} << 30, 20'000) == 4096U);
  BOOST_TEST(bytes(uint64_t{64} << 20, 1'000'000) == 64U);
  BOOST_TEST(bytes(16'384'000, 1000) == 1024U);
  BOOST_TEST(bytes(16'383'999, 1000) == 512U);
  BOOST_TEST(bytes(1024, 1) == 64U);
  BOOST_TEST(bytes(1'000'000, 1) == 4096U);
}

BOOST_AUTO_TEST_CASE(ragged_bytes_out_of_range_and_lengths_of_no_field_are_refused) {
  const std::vector<RaggedField> one = {{Element::kU8, 1, 0}};
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1023}, (uint64_t{1} << 46) + 1, kNever})
    BOOST_CHECK_THROW(make_layout(10, {}, {}, 0, one, bytes), std::invalid_argument);
  BOOST_CHECK_THROW(make_layout(10, {}, {}, 0, {{Element::kU8, 1, 1}}, 4096), std::invalid_argument);
  BOOST_CHECK_THROW(make_layout(10, {}, {}, 0, {{Element::kU8, 1, 0}, {Element::kU8, 1, 2}}, 4096),
                    std::invalid_argument);
  BOOST_CHECK_THROW(make_layout(10, {}, {}, 0, {{Element::kU8, (uint64_t{1} << 46) + 1, 0}}, 4096),
                    std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(one_slot_and_the_largest_capacity_are_laid_out) {
  for (uint64_t capacity : {uint64_t{1}, kMaxCapacity}) {
    const Layout l = make_layout(capacity, {field(Element::kF64, 1), field(Element::kU8, 4096)}, {.span = 1}, 64);
    check_apart(l);
    check_aligned(l);
  }
}

BOOST_AUTO_TEST_CASE(a_spec_without_fields_is_laid_out) { check_apart(make_layout(5, {}, {}, 0)); }

BOOST_AUTO_TEST_CASE(capacity_out_of_range_is_refused) {
  for (uint64_t capacity : {uint64_t{0}, kMaxCapacity + 1, kNever})
    BOOST_CHECK_THROW(make_layout(capacity, {}, {}, 0), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(sizes_beyond_the_address_space_are_refused) {
  for (uint64_t nbytes : {uint64_t{1} << 40, uint64_t{1} << 46, uint64_t{1} << 62, kNever - 10})
    BOOST_CHECK_THROW(make_layout(1'000'000, {{Element::kU8, nbytes}}, {}, 0), std::invalid_argument);
  BOOST_CHECK_THROW(make_layout(1, {}, {}, uint64_t{1} << 62), std::invalid_argument);
}

BOOST_AUTO_TEST_CASE(whatever_two_processes_must_agree_on_changes_the_hash) {
  const std::vector<Field> fields = {field(Element::kF32, 4), field(Element::kI64, 1)};
  std::map<uint64_t, std::string> seen;
  auto add = [&seen](const std::string& name, const Layout& l) {
    BOOST_TEST_INFO(name << " and " << seen[l.hash()]);
    BOOST_TEST(seen[l.hash()].empty());
    seen[l.hash()] = name;
  };
  add("itself", make_layout(100, fields, {}, 64));
  add("capacity", make_layout(101, fields, {}, 64));
  add("linked", make_layout(100, fields, {.span = 1}, 64));
  add("span", make_layout(100, fields, {.span = 2}, 64));
  add("min_steps", make_layout(100, fields, {.span = 2, .min_steps = 2}, 64));
  add("stride", make_layout(100, fields, {.span = 2, .stride = 2}, 64));
  add("history", make_layout(100, fields, {.span = 2, .history = 1}, 64));
  add("across", make_layout(100, fields, {.span = 2, .across = 1}, 64));
  add("priority_steps", make_layout(100, fields, {.span = 2, .priority_steps = 2}, 64));
  add("order", make_layout(100, {fields[1], fields[0]}, {}, 64));
  add("element", make_layout(100, {field(Element::kI32, 4), fields[1]}, {}, 64));
  add("size", make_layout(100, {field(Element::kF32, 3), fields[1]}, {}, 64));
  add("fewer", make_layout(100, {fields[0]}, {}, 64));
  add("ragged", make_layout(100, fields, {}, 64, {{Element::kI32, 4, 0}, {Element::kF32, 4, 0}}, 8192));
  add("ragged_bytes", make_layout(100, fields, {}, 64, {{Element::kI32, 4, 0}, {Element::kF32, 4, 0}}, 8256));
  add("groups", make_layout(100, fields, {}, 64, {{Element::kI32, 4, 0}, {Element::kF32, 4, 1}}, 8192));
  add("element of a value", make_layout(100, fields, {}, 64, {{Element::kI32, 4, 0}, {Element::kI32, 4, 0}}, 8192));
  add("size of a value", make_layout(100, fields, {}, 64, {{Element::kI32, 4, 0}, {Element::kF32, 8, 0}}, 8192));
  BOOST_TEST(make_layout(100, fields, {}, 64).hash() == make_layout(100, fields, {}, 64).hash());
}

BOOST_AUTO_TEST_SUITE_END()
