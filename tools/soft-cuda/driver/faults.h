// Faults on purpose: see faults.cpp.
#pragma once

#include "../kernel.h"

#include <vector>

namespace soft {

/// Notes the place of a call, and says whether the call is left out there.
bool skipped(const char* kind);
/// True if this operand (`a` or `b`) of a product is transposed here.
bool flipped(const char* operand);
bool skipped_kernel(const Kernel& kernel);
void change_launch(const Kernel& kernel, std::vector<void*>& values, unsigned& blocks);

}  // namespace soft
