// What every operator needs of LibTorch's stable ABI: checks of the tensors it is given, and access to their memory.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>

#include "segment/element.h"

namespace torchreplay::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// In the order of Element.
inline constexpr ScalarType kScalarTypes[kElements] = {
    ScalarType::Bool,     ScalarType::Byte,  ScalarType::UInt16, ScalarType::UInt32, ScalarType::UInt64,
    ScalarType::Char,     ScalarType::Short, ScalarType::Int,    ScalarType::Long,   ScalarType::Half,
    ScalarType::BFloat16, ScalarType::Float, ScalarType::Double};

// Throws what Python sees as a ValueError.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Throws unless `tensor` is a 1-dimensional CPU tensor. `name` is that of the argument.
inline void check_row_of_numbers(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) fail(name, " is not on the CPU: move it there");
  if (tensor.dim() != 1) fail(name, " has ", tensor.dim(), " dimensions, expected 1");
  if (tensor.numel() > INT32_MAX) fail(name, " has ", tensor.numel(), " elements, expected less than 2**31");
}

inline void check_vector(const Tensor& tensor, const char* name, ScalarType dtype) {
  check_row_of_numbers(tensor, name);
  if (tensor.scalar_type() != dtype) fail(name, " is ", tensor.scalar_type(), ", expected ", dtype);
  if (!tensor.is_contiguous()) fail(name, " is not contiguous; pass ", name, ".contiguous()");
}

inline Tensor empty(int64_t n, ScalarType dtype) { return torch::stable::empty({n}, dtype); }
inline Tensor scalar(ScalarType dtype) { return torch::stable::empty({}, dtype); }
inline int64_t* longs(const Tensor& tensor) { return static_cast<int64_t*>(tensor.mutable_data_ptr()); }
inline float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

}  // namespace torchreplay::ops
