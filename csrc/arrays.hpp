// Numpy arrays as the bindings take them: contiguous, of exactly the named type, never copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sakiyomi {

namespace nb = nanobind;

template <class Element, class... Rest>
using In = nb::ndarray<const Element, nb::c_contig, nb::device::cpu, Rest...>;
template <class Element, class... Rest>
using Out = nb::ndarray<Element, nb::c_contig, nb::device::cpu, Rest...>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;          // writable, any type
using AnyInput = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;  // any type
using NewBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// Zeroed bytes in pages of their own (`new_pages`).
NewBytes new_bytes(std::size_t count);

template <class Array>
bool is_half(const Array& array) {
    return array.dtype() == nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
}

template <class Array>
bool is_byte(const Array& array) {
    return array.dtype() == nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt), 8, 1};
}

template <class Array>
bool is_float(const Array& array) {
    return array.dtype() == nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 32, 1};
}

inline void check(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

inline void check_equal(const char* what, std::int64_t got, std::int64_t wanted) {
    if (got == wanted) return;
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(got) + " but must be " +
                                std::to_string(wanted) + ".");
}

inline int check_threads(int num_threads, int most) {
    if (num_threads < 1 || num_threads > most)
        throw std::invalid_argument("threads=" + std::to_string(num_threads) + " is not allowed; give 1 to " +
                                    std::to_string(most) + ".");
    return num_threads;
}

}  // namespace sakiyomi
