// Errors about arguments: the message names the op and the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>

namespace levit {

// Instead of STD_TORCH_CHECK, which puts the source path of the machine that built the wheel in front of every message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... message) {
  std::ostringstream text;
  (text << ... << message);
  throw std::runtime_error(text.str());  // torch turns it into Python's RuntimeError
}

inline std::string shape(const torch::stable::Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

}  // namespace levit
