// Torch tensors over memory of ours, through torch's DLPack exchange API: about 0.3 us each, no torch C++ needed.
#pragma once

#include <algorithm>
#include <memory>

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

// Where a batch goes: at(f) for each field, `bytes` together, and then key, weight and probability.
template <class At>
void point_at(BatchPointers& out, size_t fields, uint64_t bytes, At&& at) {
  out.values.resize(fields);
  for (size_t f = 0; f < fields; f++) out.values[f] = at(f);
  out.bytes = bytes;
  out.keys = reinterpret_cast<int64_t*>(at(fields));
  out.weight = reinterpret_cast<float*>(at(fields + 1));
  out.probability = reinterpret_cast<float*>(at(fields + 2));
}

// torch.get_num_threads.
inline PyObject* get_num_threads = nullptr;

// Threads that may copy a batch: as many as torch may use for one operation, when there is enough to do.
inline int threads_for(const Fields& outputs, int64_t n) {
  constexpr uint64_t kSharedBytes = uint64_t{1} << 20;
  constexpr int64_t kMaxThreads = 16;
  uint64_t bytes = 0;
  for (const FieldSpec& f : outputs.specs) bytes += f.nbytes * static_cast<uint64_t>(n);
  if (bytes < kSharedBytes) return 1;
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

// A batch under construction: one block of memory, one tensor per output.
class BatchBuilder {
 public:
  BatchBuilder(const Fields& fields, int64_t n) : fields_(fields), n_(n) {
    size_t bytes = 0;
    auto reserve = [&bytes](size_t size) {
      const size_t at = bytes;
      bytes += round_up(size, kLine);
      return at;
    };
    offsets_.reserve(fields.specs.size() + 3);
    for (const FieldSpec& f : fields.specs) offsets_.push_back(reserve(f.nbytes * static_cast<size_t>(n)));
    value_bytes_ = bytes;
    for (size_t size : {8, 4, 4}) offsets_.push_back(reserve(size * static_cast<size_t>(n)));
    block_ = Block::make(bytes, static_cast<int>(offsets_.size()) + 1);
  }
  BatchBuilder(const BatchBuilder&) = delete;
  ~BatchBuilder() {
    for (size_t i = handed_out_; i < offsets_.size() + 1; i++) block_->release();
  }

  void point(BatchPointers& out) const {
    point_at(out, fields_.specs.size(), value_bytes_, [&](size_t output) { return at(output); });
  }

  // Hands out the first n items only.
  void shrink(int64_t n) { n_ = n; }

  // Fills `dict` with the fields, nested as the spec is.
  void fill(PyObject* dict) { fill_level(dict, fields_.tree); }

  // Adds key, weight and probability under their (interned) names.
  void fill_reserved(PyObject* dict, PyObject* const* names) {
    constexpr Element elements[] = {Element::kI64, Element::kF32, Element::kF32};
    for (size_t i = 0; i < 3; i++) {
      Ref t(make(fields_.specs.size() + i, elements[i], 1, &n_));
      if (PyDict_SetItem(dict, names[i], t.get())) throw PythonError{};
    }
  }

 private:
  char* at(size_t output) const { return block_->data() + offsets_[output]; }

  PyObject* make(size_t output, Element element, int dims, const int64_t* shape) {
    handed_out_++;
    return make_tensor(at(output), element, dims, shape, nullptr, BlockOwner(block_));
  }

  void fill_level(PyObject* dict, const std::vector<Node>& level) {
    for (const Node& node : level) {
      Ref value(node.field >= 0 ? make_field(node.field) : checked(PyDict_New()));
      if (node.field < 0) fill_level(value.get(), node.children);
      if (PyDict_SetItem(dict, node.name, value.get())) throw PythonError{};
    }
  }

  PyObject* make_field(int field) {
    const FieldSpec& spec = fields_.specs[field];
    int64_t shape[StridedArray::kMaxDims + 1] = {n_};
    std::copy(spec.shape.begin(), spec.shape.end(), shape + 1);
    return make(field, spec.element, 1 + static_cast<int>(spec.shape.size()), shape);
  }

  const Fields& fields_;
  int64_t n_;
  std::vector<size_t> offsets_;
  size_t value_bytes_ = 0;
  Block* block_;
  size_t handed_out_ = 0;
};

}  // namespace torchreplay::py
