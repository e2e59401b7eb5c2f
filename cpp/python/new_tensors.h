// Torch tensors over memory of ours, through torch's DLPack exchange API: about 0.3 us each, no torch C++ needed.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <span>

#include "draw/ragged_batch.h"
#include "python/fields.h"
#include "python/object.h"
#include "system/blocks.h"

namespace torchreplay::py {

// A tensor's description, and what keeps its memory alive.
template <class Owner>
struct Managed {
  DLManagedTensorVersioned tensor;
  int64_t shape[StridedArray::kMaxDims + 1];
  int64_t strides[StridedArray::kMaxDims + 1];
  Owner owner;
};

// A new tensor of `element` over `data`; `strides` in elements, nullptr for contiguous. `owner`'s destructor runs when
// torch is done.
template <class Owner>
PyObject* make_tensor(void* data, Element element, int dims, const int64_t* shape, const int64_t* strides,
                      Owner owner) {
  auto* m = new Managed<Owner>{{}, {}, {}, std::move(owner)};
  int64_t dense = 1;
  for (int d = dims - 1; d >= 0; d--) {
    m->shape[d] = shape[d];
    m->strides[d] = strides ? strides[d] : dense;
    dense *= shape[d];
  }
  m->tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  m->tensor.manager_ctx = m;
  m->tensor.deleter = [](DLManagedTensorVersioned* t) { delete static_cast<Managed<Owner>*>(t->manager_ctx); };
  m->tensor.flags = 0;
  m->tensor.dl_tensor = {data, {kDLCPU, 0}, dims, dl_type(element), m->shape, m->strides, 0};
  void* out = nullptr;
  if (exchange->managed_tensor_to_py_object_no_sync(&m->tensor, &out)) throw PythonError{};
  return static_cast<PyObject*>(out);
}

// What a batch has beside its outputs: key, weight, probability, and, where rows have a policy version, age.
inline constexpr Element kReserved[] = {Element::kI64, Element::kF32, Element::kF32, Element::kI64};
constexpr size_t reserved_count(bool has_age) { return std::size(kReserved) - !has_age; }

// Where a batch goes: at(f) for each output, `bytes` together, and then what it has beside them.
template <class At>
void point_at(BatchPointers& out, size_t fields, bool has_age, uint64_t bytes, At&& at) {
  out.values.resize(fields);
  for (size_t f = 0; f < fields; f++) out.values[f] = at(f);
  out.bytes = bytes;
  out.keys = reinterpret_cast<int64_t*>(at(fields));
  out.weight = reinterpret_cast<float*>(at(fields + 1));
  out.probability = reinterpret_cast<float*>(at(fields + 2));
  out.age = has_age ? reinterpret_cast<int64_t*>(at(fields + 3)) : nullptr;
}

// torch.get_num_threads.
inline PyObject* get_num_threads = nullptr;

// Threads that may copy a batch: as many as torch may use for one operation, when there is enough to do.
inline int threads_for(const Fields& outputs, int64_t n) {
  constexpr uint64_t kSharedBytes = uint64_t{1} << 20;
  constexpr int64_t kMaxThreads = 16;
  uint64_t bytes = 0;
  for (const FieldSpec& f : outputs.specs) bytes += f.nbytes * static_cast<uint64_t>(n);
  if (bytes < kSharedBytes && outputs.ragged.empty()) return 1;  // of values of any length the draw sees how much it is
  const Ref most(checked(PyObject_CallNoArgs(get_num_threads)));
  return static_cast<int>(std::clamp<int64_t>(as_int(most.get()), 1, kMaxThreads));
}

struct BlockOwner {
  explicit BlockOwner(Block* b) : block(b) {}
  BlockOwner(BlockOwner&& other) noexcept : block(std::exchange(other.block, nullptr)) {}
  ~BlockOwner() {
    if (block) block->release();
  }
  Block* block;
};

// A new int64 tensor and its elements.
struct KeyTensor {
  explicit KeyTensor(int64_t n) : block(Block::make(8 * static_cast<size_t>(n), 1)) {
    keys = reinterpret_cast<int64_t*>(block.block->data());
  }
  PyObject* release(int dims, const int64_t* shape) {
    return make_tensor(keys, Element::kI64, dims, shape, nullptr, std::move(block));
  }
  BlockOwner block;
  int64_t* keys;
};

// Values of one size only, where a batch is rows: as the core counts them then.
inline void keep_fixed(BatchPointers& out, const Fields& fields) {
  for (size_t c = 0; c < fields.fixed.size(); c++) out.values[c] = out.values[fields.fixed[c]];
  out.values.resize(fields.fixed.size());
}

// The most elements that a batch may have, from a tuple of one number for each of its ragged outputs; -1: any.
inline void set_budget(RaggedBatch* batch, const RaggedPlan& plan, PyObject* limits) {
  if (!batch || PyTuple_Size(limits) != static_cast<Py_ssize_t>(plan.outputs.size()))
    throw std::invalid_argument("a budget has a limit for each ragged field of a batch");
  batch->budget.assign(plan.groups.size(), -1);
  for (size_t o = 0; o < plan.outputs.size(); o++) {
    const int64_t most = as_int(PyTuple_GetItem(limits, static_cast<Py_ssize_t>(o)));
    int64_t& own = batch->budget[plan.outputs[o].group];
    if (most >= 0 && (own < 0 || most < own)) own = most;
  }
}

// A batch under construction: one block of memory, one tensor per output. The draw gets another block for values of
// any length.
class BatchBuilder {
 public:
  // `of_items`: places are counted over all outputs, where items are more than rows; else over those of one size.
  BatchBuilder(const Fields& fields, const RaggedPlan& plan, bool of_items, bool has_age, int64_t n)
      : fields_(fields), plan_(plan), of_items_(of_items), has_age_(has_age), n_(n) {
    size_t bytes = 0;
    auto reserve = [&bytes](size_t size) {
      const size_t at = bytes;
      bytes += round_up(size, kLine);
      return at;
    };
    const std::span<const Element> reserved(kReserved, reserved_count(has_age));
    offsets_.reserve(fields.specs.size() + reserved.size());
    for (const FieldSpec& f : fields.specs)
      offsets_.push_back(reserve(f.ragged() ? 0 : f.nbytes * static_cast<size_t>(n)));
    value_bytes_ = bytes;
    for (const Element e : reserved) offsets_.push_back(reserve(static_cast<size_t>(item_size(e) * n)));
    block_ = Block::make(bytes, static_cast<int>(offsets_.size()) + 1);
    if (!plan.outputs.empty()) ragged_ = std::make_unique<RaggedBatch>(plan);
  }
  BatchBuilder(const BatchBuilder&) = delete;
  ~BatchBuilder() {
    for (size_t i = handed_out_; i < offsets_.size() + 1; i++) block_->release();
  }

  void point(BatchPointers& out) {
    point_at(out, fields_.specs.size(), has_age_, value_bytes_, [&](size_t output) { return at(output); });
    if (!ragged_) return;
    out.ragged = ragged_.get();
    if (!of_items_) keep_fixed(out, fields_);
  }

  // The most elements that it may have, as set_budget() says.
  void limit(PyObject* limits) { set_budget(ragged_.get(), plan_, limits); }

  // Hands out the first n items only.
  void shrink(int64_t n) { n_ = n; }

  // Fills `dict` with the fields, nested as the spec is. Where values have any length, it has their offsets and lengths
  // under these names, too.
  void fill(PyObject* dict) {
    fill_level(dict, fields_.tree, [this](int field) { return make_field(field); });
    if (!ragged_) return;
    if (!ragged_->data()) draw_nothing();
    static PyObject* const names[] = {interned("offsets"), interned("lengths")};
    std::vector<Ref> made(2 * plan_.groups.size());
    fill_nested(dict, names[0],
                [&](int field) { return made_once(made[group_of(field)], [&] { return offsets_of(field); }); });
    fill_nested(dict, names[1], [&](int field) {
      // Those of one row and those of a window of one are of different shapes.
      if (plan_.windows[plan_.groups[group_of(field)].window].count == 1) return lengths_of(field);
      return made_once(made[plan_.groups.size() + group_of(field)], [&] { return lengths_of(field); });
    });
  }

  // Adds key, weight, probability and age under their (interned) names.
  void fill_reserved(PyObject* dict, PyObject* const* names) {
    for (size_t i = 0; i < reserved_count(has_age_); i++) {
      Ref t(make(fields_.specs.size() + i, kReserved[i], 1, &n_));
      if (PyDict_SetItem(dict, names[i], t.get())) throw PythonError{};
    }
  }

 private:
  char* at(size_t output) const { return block_->data() + offsets_[output]; }

  PyObject* make(size_t output, Element element, int dims, const int64_t* shape) {
    handed_out_++;
    return make_tensor(at(output), element, dims, shape, nullptr, BlockOwner(block_));
  }

  // Nobody drew anything: there is no item.
  void draw_nothing() {
    ragged_->allocate(std::vector<uint64_t>(plan_.outputs.size()), std::vector<int64_t>(plan_.groups.size()), false);
    for (const RaggedBatch::Lengths& bounds : ragged_->lengths) bounds.offsets[0] = 0;
  }

  template <class Make>
  static void fill_level(PyObject* dict, const std::vector<Node>& level, const Make& make) {
    for (const Node& node : level) {
      Ref value(node.field >= 0 ? make(node.field) : checked(PyDict_New()));
      if (node.field < 0) fill_level(value.get(), node.children, make);
      if (PyDict_SetItem(dict, node.name, value.get())) throw PythonError{};
    }
  }

  template <class Make>
  void fill_nested(PyObject* dict, PyObject* name, const Make& make) {
    const Ref inner(checked(PyDict_New()));
    fill_level(inner.get(), fields_.ragged_tree, make);
    if (PyDict_SetItem(dict, name, inner.get())) throw PythonError{};
  }

  template <class Make>
  static PyObject* made_once(Ref& made, const Make& make) {
    if (!made) made = Ref(make());
    return Py_NewRef(made.get());
  }

  uint32_t group_of(int field) const { return plan_.outputs[fields_.specs[static_cast<size_t>(field)].column].group; }
  // Of the n items.
  const RaggedBatch::Lengths& bounds_of(int field) const { return ragged_->lengths[group_of(field)]; }
  int64_t rows_of(int field) const { return int64_t{plan_.windows[plan_.groups[group_of(field)].window].count}; }

  PyObject* offsets_of(int field) {
    const int64_t shape[] = {n_ * rows_of(field) + 1};
    return make_tensor(bounds_of(field).offsets, Element::kI32, 1, shape, nullptr, BlockOwner(ragged_->share()));
  }
  PyObject* lengths_of(int field) {
    const int64_t shape[] = {n_, rows_of(field)};
    return make_tensor(bounds_of(field).lengths, Element::kI64,
                       fields_.specs[static_cast<size_t>(field)].several ? 2 : 1, shape, nullptr,
                       BlockOwner(ragged_->share()));
  }
  PyObject* make_ragged(const FieldSpec& spec, int field) {
    int64_t shape[StridedArray::kMaxDims + 1] = {bounds_of(field).offsets[n_ * rows_of(field)]};
    std::copy(spec.shape.begin(), spec.shape.end(), shape + 1);
    return make_tensor(ragged_->values[spec.column].data, spec.element, 1 + static_cast<int>(spec.shape.size()), shape,
                       nullptr, BlockOwner(ragged_->share()));
  }

  PyObject* make_field(int field) {
    const FieldSpec& spec = fields_.specs[static_cast<size_t>(field)];
    if (spec.ragged()) return make_ragged(spec, field);
    int64_t shape[StridedArray::kMaxDims + 1] = {n_};
    std::copy(spec.shape.begin(), spec.shape.end(), shape + 1);
    return make(field, spec.element, 1 + static_cast<int>(spec.shape.size()), shape);
  }

  const Fields& fields_;
  const RaggedPlan& plan_;
  bool of_items_, has_age_;
  int64_t n_;
  std::unique_ptr<RaggedBatch> ragged_;
  std::vector<size_t> offsets_;
  size_t value_bytes_ = 0;
  Block* block_;
  size_t handed_out_ = 0;
};

}  // namespace torchreplay::py
