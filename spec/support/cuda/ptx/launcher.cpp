// SPDX-License-Identifier: MIT
// ptx/launcher.cpp -- runs the kernels' PTX, translated to C, on the emulated GPU (MOONSHARD_CUDA=ptx).
//
// A launch names a kernel of g++. Its symbol leads to the kernel of the PTX of the same source file with the same
// demangled name, template arguments and sizes of parameters. nvcc spells a few types differently, so parameters' types
// are not compared; none or several such kernels are an error. A kernel is compiled when it is first launched, unless
// its library is kept from an earlier run (prepare.lua).
#include <algorithm>
#include <cmath>
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "cuda/shim.h"
#include "cuda/tensor.h"
#include "runtime.h"
#include "checks.h"
#include "compare.h"
#include "functions.h"

namespace ms_shim
{
namespace
{

struct translation {
    std::string symbol, module, library;  // module: name of the source file without folder and ending
    std::vector<size_t> sizes;
    size_t shared = 0;           // bytes of static shared memory
    unsigned threads = 0;        // the most of a block, 0: MAX_THREADS
    unsigned registers[2] = {};  // of a thread, on sm_80 and sm_90
    void *loaded = nullptr;
    ptx_kernel *run = nullptr;
};

std::mutex lock;
std::multimap<std::string, translation> translations;  // by name with template arguments
struct function {
    std::string symbol, module;  // module: "" if the symbol is not local to a file
};
std::map<const void *, function> symbols;  // of this library
std::map<const void *, const translation *> found;
std::string folder, functions_folder;

[[noreturn]] void give_up(const std::string &what)
{
    fprintf(stderr, "emulated GPU: %s\n", what.c_str());
    _exit(2);
}

// "void f<int>(long)" -> "f<int>"
std::string name_of(const std::string &symbol)
{
    int status;
    char *text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
    if (!text) return symbol;
    std::string all = text, name;
    free(text);
    size_t from = 0, depth = 0;
    for (size_t k = 0; k < all.size(); k++) {
        char c = all[k];
        if (c == '<') depth++;
        if (c == '>') depth--;
        if (depth == 0 && c == ' ') from = k + 1;
        if (depth == 0 && c == '(') return all.substr(from, k - from);
    }
    return all.substr(from);
}

// The file's symbols, static ones too, which dladdr does not know.
void read_symbols(const char *path, char *base)
{
    std::ifstream file(path, std::ios::binary);
    std::stringstream all;
    all << file.rdbuf();
    const std::string text = all.str();
    const char *p = text.data();
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)p;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(p + head->e_shoff);
    for (int k = 0; k < head->e_shnum; k++) {
        if (sections[k].sh_type != SHT_SYMTAB) continue;
        const char *names = p + sections[sections[k].sh_link].sh_offset;
        const Elf64_Sym *s = (const Elf64_Sym *)(p + sections[k].sh_offset);
        std::string module;
        for (size_t i = 0; i < sections[k].sh_size / sizeof *s; i++) {
            const char *name = names + s[i].st_name;
            bool local = ELF64_ST_BIND(s[i].st_info) == STB_LOCAL;
            // A file's local symbols follow its name.
            if (ELF64_ST_TYPE(s[i].st_info) == STT_FILE) module = std::string(name, strcspn(name, "."));
            if (ELF64_ST_TYPE(s[i].st_info) == STT_FUNC && s[i].st_value)
                symbols[base + s[i].st_value] = { name, local ? module : "" };
        }
    }
    if (symbols.empty()) give_up(std::string(path) + " has no symbols: MOONSHARD_CUDA=ptx needs them");
}

// Lines of the index: symbol, module, sizes "8,4" or "-", static shared memory, threads or 0,
// registers of a thread on sm_80 and sm_90 or 0, name of the library or "-" for g++'s kernel.
void read_index()
{
    std::ifstream file(folder + "/index");
    std::string sizes;
    translation t;
    while (file >> t.symbol >> t.module >> sizes >> t.shared >> t.threads >> t.registers[0] >> t.registers[1] >>
           t.library) {
        t.sizes.clear();
        std::stringstream list(sizes);
        for (std::string one; std::getline(list, one, ',');) t.sizes.push_back(std::stoul(one));
        translations.emplace(name_of(t.symbol), t);
    }
    if (translations.empty()) give_up(folder + "/index lists no kernels");
}

void run_command(const std::string &command)
{
    int status = system(command.c_str());
    if (status != 0) give_up("'" + command + "' failed");
}

void compile(translation &t)
{
    const std::string path = folder + "/" + t.library + ".so";
    if (access(path.c_str(), R_OK) != 0)
        run_command("luajit '" MS_PTX_SOURCE "/prepare.lua' '" + folder + "' " + t.library);
    t.loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!t.loaded) give_up(dlerror());
    t.run = (ptx_kernel *)dlsym(t.loaded, "kernel");
    if (const char *marks = getenv("MOONSHARD_PTX_RAN")) {
        char *ran = (char *)dlsym(t.loaded, "ran");
        const std::string file = marks + ("/" + t.library);
        int f = open(file.c_str(), O_RDWR | O_CREAT, 0666);
        struct stat is;
        Dl_info info;
        const Elf64_Sym *symbol = nullptr;
        if (f < 0 || !ran || !dladdr1(ran, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol || fstat(f, &is) != 0 ||
            ((size_t)is.st_size < symbol->st_size && ftruncate(f, (off_t)symbol->st_size) != 0) ||
            mmap(ran, symbol->st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, f, 0) == MAP_FAILED)
            give_up("cannot map " + file);
        close(f);
    }
}

// A launch, as find answers it; its kernel is a line of the file MOONSHARD_PTX_LAUNCHED.
const void *launched(const translation &t)
{
    static const char *log = getenv("MOONSHARD_PTX_LAUNCHED");
    if (log) {
        FILE *f = fopen(log, "a");
        if (f) fprintf(f, "%s %s\n", t.symbol.c_str(), t.module.c_str()), fclose(f);
    }
    return t.library == "-" ? nullptr : &t;
}
void load_cudas_functions()
{
    run_command("luajit '" MS_PTX_SOURCE "/prepare.lua' '" + functions_folder + "'");
    const std::string why = load_functions(functions_folder);
    if (!why.empty()) give_up(why);
    functions_folder = "";
}
const void *find(const void *kernel, const size_t *sizes, size_t n)
{
    std::lock_guard<std::mutex> hold(lock);
    if (mode.compare && !functions_folder.empty()) load_cudas_functions();
    const translation *&known = found[kernel];
    if (known) return launched(*known);
    auto symbol = symbols.find(kernel);
    if (symbol == symbols.end()) give_up("a kernel without a symbol is launched");
    const auto &[mangled, module] = symbol->second;
    const std::string name = name_of(mangled);
    auto range = translations.equal_range(name);
    const std::vector<size_t> wanted(sizes, sizes + n);
    translation *fits = nullptr;
    int several = 0;
    for (auto k = range.first; k != range.second; k++) {
        translation &t = k->second;
        if (t.sizes != wanted || (!module.empty() && t.module != module)) continue;
        several += fits && fits->library != t.library;
        fits = &t;
    }
    if (!fits || several) {
        std::string text = "kernel " + name + " of " + (module.empty() ? "any file" : module) + " has " +
                           (fits ? "several translations" : "no translation") + " with parameters of these bytes:";
        for (size_t s : wanted) text += " " + std::to_string(s);
        give_up(text);
    }
    if (fits->library != "-") compile(*fits);
    known = fits;
    return launched(*fits);
}

// ---- what a block's threads do together ----

void barrier(int line)
{
    meet(1);
    if (mode.check) checks.passed(line);
}
// In the mode `check`: all lanes of a warp execute the same one of the instructions that a warp executes together.
void together(int line)
{
    if (!mode.check) return;
    checks.arrived(line);
    meet(2);
    checks.arrived_together(line);
}
void warp_barrier(uint32_t mask, int line)
{
    together(line);
    __syncwarp(mask);
    if (mode.check) checks.warp_passed();
}
uint32_t shuffle_word(uint32_t mask, uint32_t value, int from, int line)
{
    if (mask == ~0u) together(line);
    return shuffle("shfl.sync", mask, value, from, 32);
}
void product(int bf16, float *d, const uint32_t *a, const uint32_t *b, int line)
{
    together(line);
    if (bf16) mma_bf16(d, a, b);
    else mma_f16(d, a, b);
}
void load(int n, int transposed, uint32_t *r, const void *row, int line)
{
    together(line);
    if (n == 1) transposed ? load_matrices<1, true>(r, row) : load_matrices<1>(r, row);
    else if (n == 2) transposed ? load_matrices<2, true>(r, row) : load_matrices<2>(r, row);
    else transposed ? load_matrices<4, true>(r, row) : load_matrices<4>(r, row);
}
void copy(void *to, const void *from, int bytes, int read, int line)
{
    if (bytes == 16) copy_async<16>(to, from, read);
    else if (bytes == 8) copy_async<8>(to, from, read);
    else copy_async<4>(to, from, read);
    if (mode.check) checks.begin_copy(to, bytes, line);
}
void wait(int left)
{
    finish_copies(here.self->group - left);
    if (mode.check) checks.finish_copies();
}
void watch(char space, const void *at, int bytes, int write, int line) { checks.access(space, at, bytes, write, line); }

const ptx_machine machine = {
    barrier, warp_barrier, shuffle_word, product, load, copy, copy_async_commit, wait, watch
};

size_t lines_of(size_t bytes) { return (bytes + 127) / 128 * 128; }
char *window(const translation &t, size_t dynamic)
{
    return dynamic_base() + MOST_SHARED - lines_of(t.shared) - lines_of(dynamic);
}
thread_local char *shared_window;

bool before_launch(const void *of, const void *const *arguments, const size_t *sizes, size_t n)
{
    if (mode.check) checks.begin_launch((const void *)((const translation *)of)->run);
    return calls_cudas_library = mode.compare && twice.begin(arguments, sizes, n);
}
void other_ran()
{
    calls_cudas_library = false;
    twice.swap();
}
void after_launch(const void *of)
{
    if (mode.compare) twice.end(((const translation *)of)->symbol.c_str());
}

// What an A100 and an H100 offer a block.
void check_limits(const translation &t, size_t dynamic, unsigned threads)
{
    static const struct {
        const char *name;
        size_t shared;
    } gpus[] = { { "sm_80", 163 << 10 }, { "sm_90", 227 << 10 } };
    if (t.shared > STATIC_SHARED) fault("%zu bytes of static shared memory, the limit is %d", t.shared, STATIC_SHARED);
    if (t.threads && threads > t.threads) fault("%u threads, the kernel is compiled for %u", threads, t.threads);
    for (int k = 0; k < 2; k++) {
        if (t.shared + dynamic > gpus[k].shared)
            fault("%zu bytes of static and %zu of dynamic shared memory, %s has %zu", t.shared, dynamic, gpus[k].name,
                  gpus[k].shared);
        // Warps get registers in units of 256, four warps at a time.
        unsigned of_warp = (t.registers[k] * 32 + 255) / 256 * 256, warps = (threads + 127) / 128 * 4;
        if (of_warp * warps > 65536)
            fault("%u threads of %u registers, %s has 65536", threads, t.registers[k], gpus[k].name);
    }
}
void before_block(const void *of, size_t dynamic, unsigned threads)
{
    const translation &t = *(const translation *)of;
    check_limits(t, dynamic, threads);
    shared_window = window(t, dynamic);
    if (mode.check) checks.begin(shared_window, t.shared, shared_window + lines_of(t.shared), dynamic, threads);
}
void run(const void *of, const void *const *arguments)
{
    const place &p = *here.now;
    ptx_thread t = { p.thread.x,
                     p.block.x,
                     p.block_dim.x,
                     p.grid_dim.x,
                     shared_window,
                     mode.check,
                     mode.approx ? mode.approx + p.thread.x * 0x9e3779b97f4a7c15u + p.block.x : 0,
                     &machine,
                     mode.wide ? (uint32_t)((p.thread.x + p.block.x * 7 + 1) * 0x9e3779b97f4a7c15u >> 32) : 0 };
    ((const translation *)of)->run(&t, arguments);
}
void after_block()
{
    if (mode.check) checks.end();
}

const ptx_hooks hooks = { find, before_launch, other_ran, after_launch, before_block, run, after_block };

void start()
{
    const char *chosen = getenv("MOONSHARD_CUDA");
    if (!chosen || strcmp(chosen, "ptx") != 0) return;
    Dl_info here_is;
    if (!dladdr((const void *)start, &here_is)) give_up("dladdr fails");
    std::string path = here_is.dli_fname;
    functions_folder = path.substr(0, path.rfind('/')) + "/ptx/functions";
    // Child processes, and specs that plant faults, name a folder that is prepared.
    if (const char *prepared = getenv("MOONSHARD_PTX_FOLDER")) folder = prepared;
    else {
        folder = path.substr(0, path.rfind('/')) + "/ptx";
        run_command("luajit '" MS_PTX_SOURCE "/prepare.lua' '" + folder + "'");
        setenv("MOONSHARD_PTX_FOLDER", folder.c_str(), 1);
    }
    read_index();
    read_symbols(path.c_str(), (char *)here_is.dli_fbase);
    ptx = &hooks;
}
// After the variables above are constructed.
const struct starter {
    starter() { start(); }
} started;

}  // namespace
}  // namespace ms_shim
