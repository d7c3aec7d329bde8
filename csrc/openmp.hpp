// A word to the OpenMP runtime that another library of the process uses.
//
// GNU's libgomp lets threads that wait turn for milliseconds as long as it knows of no more threads than there are cores,
// and for a moment only where there are more. It cannot see ours: on two cores torch's two threads then turn on cores
// that ours could use, and wait for each other whenever one of ours runs. So it is given as many threads to count as we
// have. They sleep for ever.
#pragma once

#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>
#endif

namespace sakiyomi {

#if defined(__linux__)
// A team's threads live as long as the one that started it, which itself is not counted.
inline void keep_openmp_team(void* library, unsigned num_threads) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    const auto parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    if (parallel == nullptr) return;
    try {
        std::thread([parallel, num_threads] {
            parallel([](void*) {}, nullptr, num_threads + 1, 0);
            for (;;) pause();
        }).detach();
    } catch (const std::system_error&) {  // no thread to be had: nothing is lost but speed
    }
}

// Lets each libgomp of the process count `num_threads` more. Returns whether there is one.
inline bool tell_openmp(int num_threads) {
    std::vector<std::string> paths;  // opened behind the walk, which holds a lock of the loader
    dl_iterate_phdr(
        [](dl_phdr_info* library, std::size_t, void* found) {
            if (std::strstr(library->dlpi_name, "libgomp") != nullptr)
                static_cast<std::vector<std::string>*>(found)->push_back(library->dlpi_name);
            return 0;
        },
        &paths);
    for (const std::string& path : paths)
        if (void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD))
            keep_openmp_team(library, static_cast<unsigned>(num_threads));
    return !paths.empty();
}
#else
inline bool tell_openmp(int) { return false; }
#endif

}  // namespace sakiyomi
