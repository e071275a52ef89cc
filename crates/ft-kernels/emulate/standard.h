// The headers of the standard library that the emulator uses. They take a fifth of the time of a compilation, so both
// builds (tests/emulated.rs, tools/soft-cuda/build.sh) compile them once and include the result in every file.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
