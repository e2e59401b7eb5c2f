// A batch's tensors in one block of memory, found again by one operator. In Python it takes three calls for each.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <optional>
#include <vector>

#include "ops/tensors.h"

namespace torchreplay::ops {

inline Tensor viewed_as(const Tensor& block, ScalarType dtype) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(block), torch::stable::detail::from(dtype)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::view", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns the tensors in a block. For each of them `places` has: its dtype (an Element), where it begins in elements of
// that, its dimensions, the sizes, the strides. Each has a version counter of its own.
inline std::vector<Tensor> unpack(const Tensor& block, const Tensor& places) {
  check_vector(places, "places", ScalarType::Long);
  std::array<std::optional<Tensor>, kElements> viewed;
  std::vector<Tensor> tensors;
  const int64_t* end = longs(places) + places.numel();
  for (const int64_t* place = longs(places); place < end;) {
    const int64_t element = place[0], offset = place[1], dims = place[2];
    if (element < 0 || element >= kElements || dims < 0 || place + 3 + 2 * dims > end) fail("places is not a layout");
    std::optional<Tensor>& typed = viewed[static_cast<size_t>(element)];
    if (!typed) typed = viewed_as(block, kScalarTypes[static_cast<size_t>(element)]);
    AtenTensorHandle found = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(typed->get(), dims, place + 3, place + 3 + dims, offset, &found));
    tensors.emplace_back(found);
    place += 3 + 2 * dims;
  }
  return tensors;
}

}  // namespace torchreplay::ops
