#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_choose(nb::module_&) {}
