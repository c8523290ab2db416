// The number types of tensors.
#pragma once

enum LevitType { kLevitFloat = 0, kLevitBFloat16 = 1, kLevitHalf = 2 };
