// A batch's tensors in one block of memory, found again by one operator. In Python it takes three calls for each.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <optional>
#include <vector>

#include "ops/tensor_checks.h"

namespace torchreplay::ops {

inline Tensor viewed_as(const Tensor& block, size_t element) {
  const auto size = static_cast<int64_t>(item_size(static_cast<Element>(element)));
  if (block.numel() % size != 0 || block.storage_offset() % size != 0)
    fail("block has ", block.numel(), " bytes from ", block.storage_offset(), " on, and values of ", size, " bytes");
  const ScalarType dtype = kScalarTypes[element];
  std::array<StableIValue, 2> stack{torch::stable::detail::from(block), torch::stable::detail::from(dtype)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::view", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Where a tensor lies in a block, in elements of its dtype.
struct Place {
  size_t element;  // an Element: its dtype
  int64_t offset;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
  const int64_t* next;  // place
};

inline Place place_at(const int64_t* at, const int64_t* end) {
  if (end - at < 3) fail("places ends in the midst of a place");
  if (at[0] < 0 || at[0] >= kElements) fail("places names dtype ", at[0], ", expected 0 to ", kElements - 1);
  if (at[1] < 0 || at[2] < 0 || at[2] > (end - at - 3) / 2) fail("places has no place of ", at[2], " dimensions");
  const int64_t* sizes = at + 3;
  return {static_cast<size_t>(at[0]), at[1], at[2], sizes, sizes + at[2], sizes + 2 * at[2]};
}

inline void check_within(const Place& place, int64_t elements) {
  if (place.offset > elements) fail("places names what lies beyond a block of ", elements, " elements");
  int64_t last = place.offset;
  bool empty = false, beyond = false;
  for (int64_t d = 0; d < place.dims; d++) {
    if (place.sizes[d] < 0 || place.strides[d] < 0) fail("places has a negative size or stride");
    empty |= place.sizes[d] == 0;
    int64_t step = 0;
    beyond |= __builtin_mul_overflow(place.sizes[d] - 1, place.strides[d], &step);
    beyond |= __builtin_add_overflow(last, step, &last);
  }
  if (!empty && (beyond || last >= elements)) fail("places names what lies beyond a block of ", elements, " elements");
}

// Returns the tensors in a block of bytes, of any device. For each of them `places` has: the dtype (an Element), the
// offset in elements, the number of dimensions, the sizes, the strides. Each has a version counter of its own.
inline std::vector<Tensor> unpack(const Tensor& block, const Tensor& places) {
  check_vector(places, "places", ScalarType::Long);
  if (block.scalar_type() != ScalarType::Byte || block.dim() != 1 || !block.is_contiguous())
    fail("block is not a contiguous vector of uint8");
  std::array<std::optional<Tensor>, kElements> viewed;
  std::vector<Tensor> tensors;
  const int64_t* const end = longs(places) + places.numel();
  for (const int64_t* at = longs(places); at < end;) {
    const Place place = place_at(at, end);
    std::optional<Tensor>& typed = viewed[place.element];
    if (!typed) typed = viewed_as(block, place.element);
    check_within(place, typed->numel());
    AtenTensorHandle found = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(typed->get(), place.dims, place.sizes, place.strides, place.offset, &found));
    tensors.emplace_back(found);
    at = place.next;
  }
  return tensors;
}

}  // namespace torchreplay::ops
