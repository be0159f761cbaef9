// SPDX-License-Identifier: MIT
// ptx/functions.cpp -- calls of the mathematical library by g++'s kernels (functions.h). The linker's option --wrap leads
// them here.
#include <cmath>
#include <dlfcn.h>
#include <fstream>
#include <string>

#include "functions.h"
#include "runtime.h"

namespace ms_shim
{
namespace
{

enum function {
#define NAME(name) OF_##name,
    MS_DOUBLES_1(NAME) MS_DOUBLES_2(NAME) MS_FLOATS_1(NAME) MS_FLOATS_2(NAME)
#undef NAME
        FUNCTIONS
};
const char *const names[] = {
#define NAME(name) "of_" #name,
    MS_DOUBLES_1(NAME) MS_DOUBLES_2(NAME) MS_FLOATS_1(NAME) MS_FLOATS_2(NAME)
#undef NAME
};
ptx_kernel *kernels[FUNCTIONS];

template <class T, class... X> T call(function f, X... x)
{
    const T in[] = { x... }, *at = in;
    T out, *to = &out;
    const void *arguments[] = { &to, &at };
    ptx_thread thread = {};
    thread.ntid = thread.nctaid = 1;
    kernels[f](&thread, arguments);
    return out;
}

}  // namespace

thread_local bool calls_cudas_library;

std::string load_functions(const std::string &folder)
{
    std::ifstream index(folder + "/index");
    std::string symbol, word, library;
    while (index >> symbol) {
        for (int k = 0; k < 7; k++) index >> library;
        for (int f = 0; f < FUNCTIONS; f++)
            if (symbol == names[f]) {
                void *loaded = dlopen((folder + "/" + library + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
                if (!loaded) return dlerror();
                kernels[f] = (ptx_kernel *)dlsym(loaded, "kernel");
            }
    }
    for (int f = 0; f < FUNCTIONS; f++)
        if (!kernels[f]) return folder + " has no " + names[f];
    return "";
}

extern "C" {
#define ONE(T, name)          \
    T __real_##name(T);       \
    T __wrap_##name(T x);     \
    T __wrap_##name(T x) { return calls_cudas_library ? call<T>(OF_##name, x) : __real_##name(x); }
#define TWO(T, name)               \
    T __real_##name(T, T);         \
    T __wrap_##name(T x, T y);     \
    T __wrap_##name(T x, T y) { return calls_cudas_library ? call<T>(OF_##name, x, y) : __real_##name(x, y); }
#define D1(name) ONE(double, name)
#define D2(name) TWO(double, name)
#define F1(name) ONE(float, name)
#define F2(name) TWO(float, name)
MS_DOUBLES_1(D1)
MS_DOUBLES_2(D2)
MS_FLOATS_1(F1)
MS_FLOATS_2(F2)
void __wrap_sincos(double x, double *s, double *c);
void __wrap_sincos(double x, double *s, double *c) { *s = __wrap_sin(x), *c = __wrap_cos(x); }
}

}  // namespace ms_shim
