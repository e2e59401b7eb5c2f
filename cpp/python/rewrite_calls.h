// The calls that change rows by key.
#pragma once

#include "draw/rewriter.h"
#include "python/field_values.h"
#include "python/learner_calls.h"

namespace torchreplay::py::segment {

// Values for some fields of the rows of a call.
class NewValues {
 public:
  explicit NewValues(const Fields& fields) : fields_(fields), given_(fields.specs.size()) {}

  // Finds the fields that `dict` names, some of a nest or all. Throws std::invalid_argument naming what is unknown.
  void read(PyObject* dict) { read(fields_.tree, dict, ""); }

  // Throws std::invalid_argument unless every value casts to its field and has `n` rows.
  void open(int64_t n) {
    values_ = std::vector<FieldValue>(fields_.specs.size());
    for (size_t f = 0; f < given_.size(); f++) {
      if (!given_[f]) continue;
      if (fields_.specs[f].ragged())
        throw std::invalid_argument("field '" + fields_.specs[f].path +
                                    "' is Ragged: a value of any length is written once; nothing was changed");
      Leading leading{.times = true};
      values_[f].open(given_[f].get(), fields_.specs[f], leading);
      if (leading.time_count != n)
        throw std::invalid_argument("field '" + fields_.specs[f].path + "': got " + std::to_string(leading.time_count) +
                                    " values, expected one for each of the " + std::to_string(n) +
                                    " keys; nothing was changed");
      chosen_.push_back(fields_.specs[f].column);
    }
    if (chosen_.empty()) throw std::invalid_argument("the values name no field; nothing was changed");
  }

  // Columns of the layout.
  const std::vector<size_t>& chosen() const { return chosen_; }
  void copy(int64_t row, size_t column, char* to) const { values_[fields_.fixed[column]].copy(to, row); }

 private:
  void read(const std::vector<Node>& level, PyObject* dict, const std::string& prefix) {
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value);) {
      const auto node = std::ranges::find_if(
          level, [&](const Node& n) { return PyUnicode_Check(name) && PyUnicode_Compare(n.name, name) == 0; });
      if (node == level.end()) throw_unknown(level, prefix, name);
      if (node->field >= 0)
        given_[static_cast<size_t>(node->field)] = Ref::borrow(value);
      else if (PyDict_Check(value))
        read(node->children, value, prefix + text_of(node->name) + "/");
      else
        throw std::invalid_argument("field '" + prefix + text_of(node->name) + "' is nested: expected a dict, got " +
                                    type_text(value));
    }
  }

  [[noreturn]] static void throw_unknown(const std::vector<Node>& level, const std::string& prefix, PyObject* name) {
    std::string known;
    for (const Node& n : level) known += (known.empty() ? "'" : ", '") + prefix + text_of(n.name) + "'";
    throw std::invalid_argument("unknown field '" + prefix +
                                (PyUnicode_Check(name) ? text_of(name) : "(not a string)") + "': expected some of " +
                                known + "; nothing was changed");
  }

  const Fields& fields_;
  std::vector<Ref> given_;  // of each field, null where none is
  std::vector<FieldValue> values_;
  std::vector<size_t> chosen_;
};

// Changes rows by change(rewriter, n, keys), and returns how many were. Batches that the calling thread
// ordered before are drawn from the rows of then.
template <class Change>
uint64_t change_rows(AttachedSegment& segment, std::vector<int64_t>& keys, Change&& change) {
  segment.settle();
  Rewriter rewriter(segment.memory());
  std::optional<BadKey> bad;
  {
    const Unlocked others;
    bad = change(rewriter, static_cast<int64_t>(keys.size()), keys.data());
  }
  if (bad) refuse(*bad);
  return rewriter.changed();
}

// Throws std::invalid_argument where one of the rows begins an episode.
inline void refuse_first_rows(AttachedSegment& segment, const std::vector<int64_t>& keys) {
  const auto n = static_cast<int64_t>(keys.size());
  const int64_t i = Rewriter(segment.memory()).first_without_step(n, keys.data());
  if (i < 0) return;
  throw std::invalid_argument("the row with key " + std::to_string(keys[static_cast<size_t>(i)]) + " at index " +
                              std::to_string(i) +
                              " begins an episode: it has an observation, and no step's values. A step's lie in the "
                              "row behind its observation: buffer.rows_of(keys)[:, 1]; nothing was changed");
}

// rewrite(keys, fields, of_steps) -> int: rows that got the values of the dict `fields`; with `of_steps` no row may be
// one that begins an episode.
inline PyObject* rewrite(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return on_segment(self, [&](AttachedSegment& segment) {
    expect_args("rewrite", nargs, 3);
    std::vector<int64_t> keys;
    read_keys(args[0], keys);
    NewValues values(segment.fields);
    values.read(args[1]);
    values.open(static_cast<int64_t>(keys.size()));
    if (const auto bad = unissued(segment.memory(), static_cast<int64_t>(keys.size()), keys.data())) refuse(*bad);
    if (as_bool(args[2])) refuse_first_rows(segment, keys);
    return change_rows(segment, keys, [&](Rewriter& rewriter, int64_t n, const int64_t* key) {
      return rewriter.rewrite(n, key, values.chosen(), [&](int64_t i, size_t f, char* to) { values.copy(i, f, to); });
    });
  });
}

// rows_of(keys) -> int64 [n, rows of an item]: the keys of the rows of the items anchored there, -1 where there is
// none.
inline PyObject* rows_of(PyObject* self, PyObject* given) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> keys;
    read_keys(given, keys);
    const auto n = static_cast<int64_t>(keys.size());
    if (const auto bad = unissued(segment.memory(), n, keys.data())) refuse(*bad);
    const ItemPlan* const plan = segment.plan();
    const int64_t shape[] = {n, plan ? int64_t{plan->steps} + 1 : 1};
    KeyTensor rows(n * shape[1]);
    {
      const Unlocked others;
      Rewriter(segment.memory()).rows_of(n, keys.data(), shape[1], rows.keys);
    }
    return rows.release(2, shape);
  });
}

// discard(keys) -> int: items that are not drawn any more.
inline PyObject* discard(PyObject* self, PyObject* given) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> keys;
    read_keys(given, keys);
    return change_rows(segment, keys,
                       [](Rewriter& rewriter, int64_t n, const int64_t* key) { return rewriter.discard(n, key); });
  });
}

// discard_episode(key) -> int: the same for all rows there are of the episode that the row is of.
inline PyObject* discard_episode(PyObject* self, PyObject* given) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> keys{as_int(given)};
    if (const auto bad = unissued(segment.memory(), 1, keys.data())) refuse(*bad);
    return change_rows(segment, keys, [&](Rewriter& rewriter, int64_t, const int64_t* key) {
      keys = rewriter.episode_of(static_cast<uint64_t>(*key));
      return rewriter.discard(static_cast<int64_t>(keys.size()), keys.data());
    });
  });
}

}  // namespace torchreplay::py::segment
