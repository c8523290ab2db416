// Convolutions of stride 2 and padding 1 between a fine and a coarse grid of pixels, channels last. Pixel c of the coarse
// grid meets pixel 2 c - 1 + t of the fine one through tap t of the kernel. A convolution sums what a coarse pixel meets,
// a transposed one what a fine pixel meets; each is the other's gradient, and a weight is always [coarse channels, fine
// channels, taps]. Per tap all this is one matrix product over the pairs that meet: their rows are gathered, so that
// nothing is multiplied with padding.
#include "../ops.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../errors.h"
#include "dot.h"
#include "panels.h"
#include "scratch.h"

namespace levit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kPairs = 240;   // rows of one product: a multiple of the rows that are multiplied together
constexpr int64_t kInputs = 256;  // channels of one product, so that a panel of weights stays in the first cache

enum class Memory { kPanels, kRows, kGradient, kPairs };

struct Grids {
  int64_t batch, coarse_height, coarse_width, fine_height, fine_width, kernel;

  int64_t taps() const { return kernel * kernel; }
  int64_t coarse() const { return coarse_height * coarse_width; }
  int64_t fine() const { return fine_height * fine_width; }

  // Pairs (coarse, fine) of pixels of one image that meet through a tap
  void pairs(int64_t tap, std::vector<int64_t>& coarse_pixels, std::vector<int64_t>& fine_pixels) const {
    coarse_pixels.clear(), fine_pixels.clear();
    for (int64_t y = 0; y < coarse_height; ++y) {
      const int64_t fine_y = 2 * y - 1 + tap / kernel;
      if (fine_y < 0 || fine_y >= fine_height) continue;
      for (int64_t x = 0; x < coarse_width; ++x) {
        const int64_t fine_x = 2 * x - 1 + tap % kernel;
        if (fine_x < 0 || fine_x >= fine_width) continue;
        coarse_pixels.push_back(y * coarse_width + x);
        fine_pixels.push_back(fine_y * fine_width + fine_x);
      }
    }
  }
};

// The pairs of a range of images, some at a time: of each the pixel in the whole batch, coarse and fine.
template <class Visit>
LEVIT_INLINE void each_block(const Grids& grids, int64_t tap, int64_t begin, int64_t end, const Visit& visit) {
  static thread_local std::vector<int64_t> coarse_pixels, fine_pixels, coarse, fine;
  grids.pairs(tap, coarse_pixels, fine_pixels);
  const int64_t count = static_cast<int64_t>(coarse_pixels.size()), all = (end - begin) * count;
  int64_t image = begin, pair = 0;
  for (int64_t first = 0; first < all; first += kPairs) {
    const int64_t size = std::min(kPairs, all - first);
    coarse.resize(size), fine.resize(size);
    for (int64_t i = 0; i < size; ++i) {
      coarse[i] = image * grids.coarse() + coarse_pixels[pair];
      fine[i] = image * grids.fine() + fine_pixels[pair];
      if (++pair == count) ++image, pair = 0;
    }
    visit(size, coarse.data(), fine.data());
  }
}

// One direction: rows of `source` [pixels, inputs] through the weights to rows of `target` [pixels, outputs].
template <class T>
struct Direction {
  const T *weight, *bias, *source;
  T *panels, *target;
  int64_t inputs, outputs, by_input, by_output;  // strides of the weight
  bool to_fine;
};

template <class T>
struct StridedConv {
  static constexpr int kWidth = kLanesOf<T>, kChannels = 12, kPanel = 2 * kWidth;
  using V = Lanes<T, kWidth>;

  // Numbers of one tap's panels; the last panel may be a single vector
  static int64_t panel_size(const Direction<T>& way) { return way.inputs * round_up(way.outputs, kWidth); }

  // Panels [inputs, lanes of outputs] of every tap, for the inputs [begin, end)
  static LEVIT_INLINE void pack(const Direction<T>& way, int64_t taps, int64_t begin, int64_t end) {
    const int64_t by_tap = panel_size(way);
    for (int64_t o = 0; o < way.outputs; o += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, way.outputs - o), lanes = round_up(count, kWidth);
      for (int64_t i = begin; i < end; ++i) {
        T* to = way.panels + o * way.inputs + i * lanes;
        if (count < lanes) {
          for (int64_t tap = 0; tap < taps; ++tap) std::fill(to + tap * by_tap + count, to + tap * by_tap + lanes, T(0));
        }
        const T* from = way.weight + i * way.by_input + o * way.by_output;
        Tiles<T, kWidth, kChannels>::turn(from, way.by_output, count, taps, to, by_tap);
      }
    }
  }

  template <int kVectors>
  static LEVIT_INLINE void add_panel(const T* rows, int64_t stride, int64_t count, const T* panel, int64_t inputs,
                                     int64_t outputs, const int64_t* places, T* target, int64_t by_place) {
    Rows<T, kWidth, kChannels>::template each<kVectors>(
        count, Product<T>{rows, stride, 1, panel, kVectors * kWidth, inputs},
        FromZero{},
        [&]<int C>(int64_t row, V(&sums)[C][kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int n = 0; n < C; ++n) {
            T* to = target + places[row + n] * by_place;
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) add_part(to + v * kWidth, sums[n][v], outputs - v * kWidth);
          }
        });
  }

  static LEVIT_INLINE void add_part(T* to, const V& lanes, int64_t count) {
    if (count >= kWidth) {
      store(to, load<kWidth>(to) + lanes);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] += lanes[i];
    }
  }

  // The target's rows of the images [begin, end), bias first
  static LEVIT_INLINE void apply(const Grids& grids, const Direction<T>& way, int64_t begin, int64_t end) {
    const int64_t pixels = way.to_fine ? grids.fine() : grids.coarse(), by_tap = panel_size(way);
    for (int64_t pixel = begin * pixels; pixel < end * pixels; ++pixel) {
      T* to = way.target + pixel * way.outputs;
      if (way.bias) {
        std::copy(way.bias, way.bias + way.outputs, to);
      } else {
        std::fill(to, to + way.outputs, T(0));
      }
    }
    const auto [rows] = scratch<T, Memory::kRows>({kPairs * kInputs});
    T* gathered = rows;
    for (int64_t tap = 0; tap < grids.taps(); ++tap) {
      const auto visit = [&](int64_t count, const int64_t* coarse, const int64_t* fine) __attribute__((always_inline)) {
        const int64_t *from = way.to_fine ? coarse : fine, *to = way.to_fine ? fine : coarse;
        for (int64_t first = 0; first < way.inputs; first += kInputs) {
          const int64_t inputs = std::min(kInputs, way.inputs - first);
          for (int64_t i = 0; i < count; ++i) {
            const T* row = way.source + from[i] * way.inputs + first;
            std::copy(row, row + inputs, gathered + i * inputs);
          }
          for (int64_t o = 0; o < way.outputs; o += kPanel) {
            const int64_t left = way.outputs - o, lanes = std::min<int64_t>(kPanel, round_up(left, kWidth));
            const T* panel = way.panels + tap * by_tap + o * way.inputs + first * lanes;
            if (lanes == kPanel) {
              add_panel<2>(gathered, inputs, count, panel, inputs, left, to, way.target + o, way.outputs);
            } else {
              add_panel<1>(gathered, inputs, count, panel, inputs, left, to, way.target + o, way.outputs);
            }
          }
        }
      };
      each_block(grids, tap, begin, end, visit);
    }
  }

  // The weight's gradient of one tap, sums [coarse channels, fine channels in whole vectors]
  static LEVIT_INLINE void gradient(const Grids& grids, int64_t tap, const T* coarse, int64_t coarse_channels,
                                    const T* fine, int64_t fine_channels, T* sums) {
    const int64_t stride = round_up(fine_channels, kWidth);
    std::fill(sums, sums + coarse_channels * stride, T(0));
    const auto [coarse_rows, fine_panels] = scratch<T, Memory::kPairs>({kPairs * coarse_channels, kPairs * stride});
    T *rows = coarse_rows, *panels = fine_panels;
    const auto visit = [&](int64_t count, const int64_t* coarse_at,
                           const int64_t* fine_at) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) {
        const T* row = coarse + coarse_at[i] * coarse_channels;
        std::copy(row, row + coarse_channels, rows + i * coarse_channels);
      }
      for (int64_t f = 0; f < stride; f += kPanel) {
        const int64_t lanes = std::min<int64_t>(kPanel, stride - f), there = std::min(lanes, fine_channels - f);
        T* panel = panels;
        for (int64_t i = 0; i < count; ++i, panel += lanes) {
          const T* row = fine + fine_at[i] * fine_channels + f;
          std::fill(std::copy(row, row + there, panel), panel + lanes, T(0));
        }
        const Product<T> product{rows, 1, coarse_channels, panels, lanes, count};
        Tiles<T, kWidth, kChannels>::multiply(product, coarse_channels, lanes, true, sums + f, stride);
      }
    };
    each_block(grids, tap, 0, grids.batch, visit);
  }

  // What was summed per tap becomes the weight's gradient of the coarse channels [begin, end)
  static LEVIT_INLINE void unpack(const T* sums, int64_t taps, int64_t coarse_channels, int64_t fine_channels,
                                  int64_t begin, int64_t end, T* to) {
    const int64_t stride = round_up(fine_channels, kWidth);
    for (int64_t c = begin; c < end; ++c) {
      Tiles<T, kWidth, kChannels>::turn(sums + c * stride, coarse_channels * stride, taps, fine_channels,
                                        to + c * fine_channels * taps, taps);
    }
  }
};

#define LEVIT_STRIDED(T)                                                                                              \
  LEVIT_MULTIVERSION void pack(const Direction<T>& way, int64_t taps, int64_t begin, int64_t end) {                   \
    StridedConv<T>::pack(way, taps, begin, end);                                                                      \
  }                                                                                                                   \
  LEVIT_MULTIVERSION void apply(const Grids& grids, const Direction<T>& way, int64_t begin, int64_t end) {            \
    StridedConv<T>::apply(grids, way, begin, end);                                                                    \
  }                                                                                                                   \
  LEVIT_MULTIVERSION void gradient(const Grids& grids, int64_t tap, const T* coarse, int64_t coarse_channels,         \
                                   const T* fine, int64_t fine_channels, T* sums) {                                   \
    StridedConv<T>::gradient(grids, tap, coarse, coarse_channels, fine, fine_channels, sums);                         \
  }                                                                                                                   \
  LEVIT_MULTIVERSION void unpack(const T* sums, int64_t taps, int64_t coarse_channels, int64_t fine_channels,         \
                                 int64_t begin, int64_t end, T* to) {                                                 \
    StridedConv<T>::unpack(sums, taps, coarse_channels, fine_channels, begin, end, to);                               \
  }
LEVIT_STRIDED(float)
LEVIT_STRIDED(double)
#undef LEVIT_STRIDED

template <class T>
void run(const Grids& grids, Direction<T> way) {
  const int64_t images = std::max<int64_t>(1, kPairs / grids.coarse());
  const auto [panels] = scratch<T, Memory::kPanels>({grids.taps() * way.inputs * round_up(way.outputs, kLanesOf<T>)});
  way.panels = panels;
  torch::stable::parallel_for(0, way.inputs, 64, [&](int64_t begin, int64_t end) {
    pack(way, grids.taps(), begin, end);
  });
  torch::stable::parallel_for(0, (grids.batch + images - 1) / images, 1, [&](int64_t begin, int64_t end) {
    apply(grids, way, begin * images, std::min(grids.batch, end * images));
  });
}

template <class T>
void run_gradient(const Grids& grids, const Tensor& coarse, const Tensor& fine, Tensor& result) {
  const int64_t coarse_channels = coarse.size(3), fine_channels = fine.size(3);
  const int64_t by_tap = coarse_channels * round_up(fine_channels, kLanesOf<T>);
  const auto [memory] = scratch<T, Memory::kGradient>({grids.taps() * by_tap});
  T* sums = memory;
  const T *of_coarse = static_cast<const T*>(coarse.data_ptr()), *of_fine = static_cast<const T*>(fine.data_ptr());
  torch::stable::parallel_for(0, grids.taps(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t tap = begin; tap < end; ++tap) {
      gradient(grids, tap, of_coarse, coarse_channels, of_fine, fine_channels, sums + tap * by_tap);
    }
  });
  torch::stable::parallel_for(0, coarse_channels, 16, [&](int64_t begin, int64_t end) {
    unpack(sums, grids.taps(), coarse_channels, fine_channels, begin, end, static_cast<T*>(result.data_ptr()));
  });
}

void check_pixels(const char* name, const Tensor& pixels) {
  const ScalarType dtype = pixels.scalar_type();
  if (pixels.dim() != 4 || !pixels.is_contiguous() || (dtype != ScalarType::Float && dtype != ScalarType::Double)) {
    fail("strided_conv: ", name, " must be dense [B, H, W, C] in float32 or float64, got ", shape(pixels), " in ",
         torch::headeronly::toString(dtype));
  }
}

// From the pixels x of one grid to those of the other, [height, width]
Tensor convolve(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t height, int64_t width,
                bool to_fine) {
  check_pixels("x", x);
  const int64_t inputs = x.size(3), channel = to_fine ? 0 : 1;
  if (weight.dim() != 4 || weight.size(2) != weight.size(3) || weight.size(channel) != inputs ||
      weight.scalar_type() != x.scalar_type() || !weight.is_contiguous()) {
    fail("strided_conv: weight must be dense [coarse, fine, k, k] in x's dtype and fit x ", shape(x), ", got ",
         shape(weight));
  }
  const int64_t outputs = weight.size(1 - channel);
  if (bias && (bias->dim() != 1 || bias->size(0) != outputs || bias->scalar_type() != x.scalar_type() ||
               !bias->is_contiguous())) {
    fail("strided_conv: bias must be [", outputs, "] in x's dtype, got ", shape(*bias));
  }
  Tensor result = torch::stable::new_empty(x, {x.size(0), height, width, outputs});
  Grids grids{x.size(0), x.size(1), x.size(2), height, width, weight.size(2)};
  if (!to_fine) {
    std::swap(grids.coarse_height, grids.fine_height), std::swap(grids.coarse_width, grids.fine_width);
  }
  if (!grids.batch || !grids.coarse()) return result;
  const int64_t taps = grids.taps(), by_coarse = weight.size(1) * taps;
  const auto of = [&]<class T>(T) {
    Direction<T> way{};
    way.weight = static_cast<const T*>(weight.data_ptr()), way.source = static_cast<const T*>(x.data_ptr());
    way.bias = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
    way.target = static_cast<T*>(result.data_ptr());
    way.inputs = inputs, way.outputs = outputs, way.to_fine = to_fine;
    way.by_input = to_fine ? by_coarse : taps, way.by_output = to_fine ? taps : by_coarse;
    run(grids, way);
  };
  if (x.scalar_type() == ScalarType::Float) {
    of(float());
  } else {
    of(double());
  }
  return result;
}

}  // namespace

Tensor conv_to_coarse(const Tensor& fine, const Tensor& weight, const std::optional<Tensor>& bias, int64_t height,
                      int64_t width) {
  return convolve(fine, weight, bias, height, width, false);
}

Tensor conv_to_fine(const Tensor& coarse, const Tensor& weight, const std::optional<Tensor>& bias, int64_t height,
                    int64_t width) {
  return convolve(coarse, weight, bias, height, width, true);
}

Tensor conv_weight_gradient(const Tensor& coarse, const Tensor& fine, int64_t kernel) {
  check_pixels("coarse", coarse);
  check_pixels("fine", fine);
  if (coarse.size(0) != fine.size(0) || coarse.scalar_type() != fine.scalar_type() || kernel < 1) {
    fail("strided_conv: coarse and fine must agree in images and dtype, got ", shape(coarse), " and ", shape(fine));
  }
  Tensor result = torch::stable::new_empty(coarse, {coarse.size(3), fine.size(3), kernel, kernel});
  const Grids grids{coarse.size(0), coarse.size(1), coarse.size(2), fine.size(1), fine.size(2), kernel};
  if (coarse.scalar_type() == ScalarType::Float) {
    run_gradient<float>(grids, coarse, fine, result);
  } else {
    run_gradient<double>(grids, coarse, fine, result);
  }
  return result;
}

}  // namespace levit
