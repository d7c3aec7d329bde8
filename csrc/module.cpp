// The Python module `sakiyomi._native`. Each part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_choose(nb::module_&);
void bind_weights(nb::module_&);
void bind_ops(nb::module_&);
void bind_head(nb::module_&);
void bind_stack(nb::module_&);
void bind_suffix(nb::module_&);
void bind_ngram(nb::module_&);
void bind_speculator(nb::module_&);
void bind_medusa(nb::module_&);
void bind_bench(nb::module_&);

NB_MODULE(_native, m) {
    bind_choose(m);
    bind_weights(m);
    bind_ops(m);
    bind_head(m);
    bind_stack(m);
    bind_suffix(m);
    bind_ngram(m);
    bind_speculator(m);
    bind_medusa(m);
    bind_bench(m);
}
