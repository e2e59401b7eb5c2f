// The calls of a learner: drawing a batch, and feeding TD errors back.
#pragma once

#include "attached.h"

namespace torchreplay::py::segment {

inline PyObject* interned(const char* s) { return checked(PyUnicode_InternFromString(s)); }

// sample(n, beta) -> batch, or (inserted, needed, drawable) when it has to wait, or "stopped" or "lapped".
inline PyObject* sample(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("sample", nargs, 2);
    auto& s = state_of<SegmentState>(self);
    const auto n = static_cast<int>(as_int(args[0]));
    const double beta = as_double(args[1]);
    const std::shared_ptr<Attached> attached = s.attached;  // close() may run in another thread meanwhile
    s.memory();
    s.become_learner();
    std::unique_ptr<BatchSampler> sampler;
    if (s.samplers.empty()) {
      sampler = std::make_unique<BatchSampler>(*attached->memory);
    } else {
      sampler = std::move(s.samplers.back());
      s.samplers.pop_back();
    }
    const DrawName name = s.next_draw;
    s.next_draw.step++;
    BatchBuilder builder(attached->fields, n);
    BatchPointers pointers;
    builder.point(pointers);
    Shortage shortage;
    Draw outcome;
    {
      WithoutGil unlocked;
      s.seen_rows_signal = attached->memory->header().rows_signal.load(std::memory_order_acquire);
      outcome = sampler->sample(n, beta, name, pointers, shortage);
      if (sampler->pending()) reclaim_dead(*attached->memory);
    }
    if (s.attached) s.samplers.push_back(std::move(sampler));
    if (outcome != Draw::kDone && s.next_draw.step == name.step + 1) s.next_draw.step = name.step;  // nothing was drawn
    if (outcome == Draw::kWait)
      return checked(Py_BuildValue("KKK", shortage.inserted, shortage.needed, shortage.drawable));
    if (outcome != Draw::kDone) return checked(PyUnicode_FromString(outcome == Draw::kStopped ? "stopped" : "lapped"));
    static PyObject* const names[] = {interned("key"), interned("weight"), interned("probability")};
    static PyObject* const source = interned("source");
    Ref batch(checked(PyObject_CallNoArgs(s.batch_type.get())));
    if (PyObject_SetAttr(batch.get(), source, s.nonce.get())) throw PythonError{};
    builder.fill(batch.get());
    builder.fill_reserved(batch.get(), names);
    return batch.release();
  });
}

// A 1-dimensional array of n numbers as doubles; throws std::invalid_argument that names `what`.
inline std::vector<double> read_td(PyObject* o, int64_t n) {
  ArrayView v;
  const bool opened = v.open_anything(o);
  if (!opened || v.array.dims != 1 || v.array.shape[0] != n)
    throw std::invalid_argument("the TD errors are " + describe(o, v, opened) +
                                ", expected one number for each key: shape (" + std::to_string(n) + ",)");
  std::vector<double> td(static_cast<size_t>(n));
  copy_converted(reinterpret_cast<char*>(td.data()), Element::kF64, v.array.data, v.array, 0);
  int64_t bad = 0, first = -1;
  for (int64_t i = 0; i < n; i++)
    if (!std::isfinite(td[i])) {
      if (first < 0) first = i;
      bad++;
    }
  if (bad)
    throw std::invalid_argument(std::to_string(bad) + " of " + std::to_string(n) +
                                " TD errors are NaN or infinite, the first at index " + std::to_string(first) +
                                ": nothing was applied; look for a diverged loss");
  return td;
}

// update(keys, td) -> None.
inline PyObject* update(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("update", nargs, 2);
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    s.memory();
    ArrayView keys;
    const bool opened = keys.open_anything(args[0]);
    if (!opened || keys.array.dims != 1 || keys.array.element != Element::kI64)
      throw std::invalid_argument(
          "the keys are " + describe(args[0], keys, opened) +
          ", expected int64 of shape (n,): batch['key'], or what append and extend returned" +
          (opened && keys.array.dims == 2 ? " (a DataLoader adds a dimension unless batch_size=None)" : ""));
    const int64_t n = keys.array.shape[0];
    std::vector<int64_t> key(static_cast<size_t>(n));
    if (is_dense(keys.array, 0))
      std::memcpy(key.data(), keys.array.data, 8 * key.size());
    else
      copy_converted(reinterpret_cast<char*>(key.data()), Element::kI64, keys.array.data, keys.array, 0);
    const std::vector<double> td = read_td(args[1], n);
    std::unique_ptr<PriorityUpdater> updater;
    if (s.updaters.empty()) {
      updater = std::make_unique<PriorityUpdater>(*attached->memory);
    } else {
      updater = std::move(s.updaters.back());
      s.updaters.pop_back();
    }
    std::optional<BadKey> bad;
    {
      WithoutGil unlocked;
      bad = updater->update(n, key.data(), td.data());
    }
    if (s.attached) s.updaters.push_back(std::move(updater));
    if (bad)
      throw std::invalid_argument("key " + std::to_string(bad->key) + " at index " + std::to_string(bad->index) +
                                  " was never issued by this buffer: expected 0 to " +
                                  std::to_string(static_cast<int64_t>(bad->issued) - 1) + "; nothing was applied");
    return Py_NewRef(Py_None);
  });
}

}  // namespace torchreplay::py::segment
