// SPDX-License-Identifier: MIT
// cuda/planted_tiles.h -- the part of planted.cpp about tensor cores and asynchronous copies.

uint16_t bf16_of(float v) { return ms_float_to_bf16(v).bits; }
uint16_t f16_of(float v) { return ms_float_to_f16(v).bits; }

// d (16 x 8) = c + rounds a (16 x 16) b (16 x 8), all row-major. The fragments are made element by element as PTX's
// manual lists them: "mma.m16n8k16 with floating point type".
__global__ void product(const uint16_t *a, const uint16_t *b, const float *c, float *d, int f16, int rounds)
{
    int l = (int)threadIdx.x, group = l >> 2, in_group = l & 3;
    uint32_t fa[4] = {}, fb[2] = {};
    float fd[4];
    auto place = [=](int i) { return (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1); };
    for (int i = 0; i < 4; i++) fd[i] = c[place(i)];
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        fa[i / 2] |= (uint32_t)a[row * 16 + column] << i % 2 * 16;
    }
    for (int i = 0; i < 4; i++) {
        int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        fb[i / 2] |= (uint32_t)b[row * 8 + group] << i % 2 * 16;
    }
    for (int round = 0; round < rounds; round++) f16 ? mma_f16(fd, fa, fb) : mma_bf16(fd, fa, fb);
    for (int i = 0; i < 4; i++) d[place(i)] = fd[i];
}
template <class T> T *upload(const std::vector<T> &v)
{
    T *p = zeros<T>(v.size());
    cudaMemcpyAsync(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, stream);
    return p;
}
bool mma()
{
    bool right = true;
    for (int f16 = 0; f16 < 2; f16++) {
        std::vector<uint16_t> a, b;
        std::vector<float> plain(16 * 8);
        auto value = [](int i, int j) { return (float)((i * 37 + j * 11) % 23 - 11) / 4; };  // exact in both types
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) a.push_back((f16 ? f16_of : bf16_of)(value(i, k)));
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) {
                b.push_back((f16 ? f16_of : bf16_of)(value(j + 5, k)));
                for (int i = 0; i < 16; i++) plain[i * 8 + j] += 2 * value(i, k) * value(j + 5, k);
            }
        float *d = zeros<float>(16 * 8);
        run("product", true, product, 1, 32, upload(a), upload(b), zeros<float>(16 * 8), d, f16, 2);
        right = right && read(d, 16 * 8) == plain;
    }
    return right;
}

// Sums of c and products of bfloat16, a[k] b: what a float of their exact sum is, and what an A100 and an H100 give.
// Products are dropped below 2^-24 of the largest on an A100, below 2^-25 on an H100.
struct known_sum {
    float c;
    struct {
        int k, n;  // n elements of a, from a[k] on
        float value;
    } a[3];
    float b, exact, a100, h100;
};
const float EPS = 0x1p-23f, MOST = 0x1.fffffep127f;
const known_sum KNOWN[] = {
    { 1, { { 0, 1, 0x1p-24f } }, 1, 1, 1, 1 },                          // half a last place: a tie
    { 1, { { 0, 1, 0x1.8p-24f } }, 1, 1 + EPS, 1, 1 },                  // 3/4 of a last place
    { -1, { { 0, 1, -0x1.8p-24f } }, 1, -1 - EPS, -1, -1 },             // toward zero
    { 1, { { 0, 2, 0x1p-24f } }, 1, 1 + EPS, 1 + EPS, 1 + EPS },        // the extra bits are added up
    { 1, { { 0, 4, 0x1p-25f } }, 1, 1 + EPS, 1, 1 + EPS },              // one extra bit, two
    { 1, { { 0, 8, 0x1p-26f } }, 1, 1 + EPS, 1, 1 },                    // three would be needed
    { 1, { { 0, 2, 0x1.8p-24f } }, 1, 1 + 2 * EPS, 1 + EPS, 1 + EPS },  // 3/2 of a last place: a tie
    { 0x1p-30f, { { 0, 1, 1 }, { 1, 1, -1 } }, 1, 0x1p-30f, 0, 0 },     // the sum so far is aligned, too
    { 0, { { 0, 1, 1 }, { 1, 1, -1 }, { 8, 1, 0x1p-26f } }, 1, 0x1p-26f, 0x1p-26f, 0 },  // blocks of 8, of 16
    { 0, { { 0, 1, 1 }, { 1, 1, 0x1p-25f }, { 8, 1, -1 } }, 1, 0x1p-25f, 0, 0x1p-25f },
    { 0x1p-24f, { { 0, 1, 1.5f }, { 1, 1, -1.5f } }, 1.5f, 0x1p-24f, 0x1p-24f, 0x1p-24f },  // 1.5 x 1.5 has exponent 0
    { 0x1p-24f, { { 0, 1, 3 }, { 1, 1, -3 } }, 1.5f, 0x1p-24f, 0, 0x1p-24f },               // 3 x 1.5 has 1
    { MOST, { { 0, 1, 0x1p103f } }, 1, INFINITY, MOST, MOST },  // the largest number, not infinity
    { MOST, { { 0, 1, 0x1p104f } }, 1, INFINITY, INFINITY, INFINITY },
    { 5, { { 3, 1, INFINITY } }, 1, INFINITY, INFINITY, INFINITY },
    { 0x1p60f, { { 0, 1, 1 }, { 15, 1, -0x1p60f } }, 1, 1, 0, 0 },  // a double would lose the 1
};
bool known_sums(float known_sum::*expected)
{
    std::vector<uint16_t> a(16 * 16), b(16 * 8);
    std::vector<float> c(16 * 8);
    for (int i = 0; i < 16; i++) {
        for (const auto &of : KNOWN[i].a)
            for (int k = of.k; k < of.k + of.n; k++) a[i * 16 + k] = bf16_of(of.value);
        for (int j = 0; j < 8; j++) c[i * 8 + j] = KNOWN[i].c;
    }
    for (int k = 0; k < 16; k++)  // columns of 1 and of 1.5
        for (int j = 0; j < 8; j++) b[k * 8 + j] = bf16_of(j < 4 ? 1 : 1.5f);
    float *d = zeros<float>(16 * 8);
    run("product", true, product, 1, 32, upload(a), upload(b), upload(c), d, 0, 1);
    std::vector<float> got = read(d, 16 * 8);
    bool right = true;
    for (int i = 0; i < 16; i++) {
        float is = got[i * 8 + (KNOWN[i].b == 1 ? 0 : 4)];
        if (is == KNOWN[i].*expected) continue;
        fprintf(stderr, "sum %d is %a, expected %a\n", i, is, KNOWN[i].*expected);
        right = false;
    }
    return right;
}
bool sums_exact() { return known_sums(&known_sum::exact); }
bool sums_a100() { return known_sums(&known_sum::a100); }
bool sums_h100() { return known_sums(&known_sum::h100); }

// Element (i, j) of matrix m is 64 m + 8 i + j.
template <int N, bool TRANSPOSED> __global__ void fragments(uint32_t *out)
{
    __shared__ __align__(16) uint16_t tiles[4 * 64];
    int l = (int)threadIdx.x;
    for (int k = l; k < 4 * 64; k += 32) tiles[k] = (uint16_t)k;
    __syncthreads();
    uint32_t r[4];
    load_matrices<N, TRANSPOSED>(r, tiles + l % (8 * N) * 8);
    for (int m = 0; m < N; m++) out[m * 32 + l] = r[m];
}
template <int N, bool TRANSPOSED> bool loads()
{
    uint32_t *out = zeros<uint32_t>(4 * 32);
    run("fragments", true, fragments<N, TRANSPOSED>, 1, 32, out);
    std::vector<uint32_t> got = read(out, 4 * 32);
    for (int m = 0; m < N; m++)
        for (int l = 0; l < 32; l++) {
            int i = l / 4, j = l % 4 * 2;
            int low = m * 64 + (TRANSPOSED ? j * 8 + i : i * 8 + j);
            if (got[m * 32 + l] != (uint32_t)(low | (low + (TRANSPOSED ? 8 : 1)) << 16)) return false;
        }
    return true;
}
bool ldmatrix()
{
    return loads<1, false>() && loads<2, false>() && loads<4, false>() && loads<1, true>() && loads<2, true>() &&
           loads<4, true>();
}

// Each thread copies an int, an int2 and the first 12 bytes of an int4. WAITS: it waits for the copies before it reads
// them.
template <bool WAITS> __global__ void copies(const int *from, int *out)
{
    __shared__ int4 four[32];
    __shared__ int one[32];
    __shared__ int2 two[32];
    int l = (int)threadIdx.x;
    copy_async<16>(&four[l], from + 4 * l, 12);
    copy_async<4>(&one[l], from + l);
    copy_async<8>(&two[l], from + 2 * l);
    copy_async_commit();
    if (WAITS) copy_async_wait<0>();
    __syncthreads();
    int k = 31 - l;
    bool right = four[k].x == 4 * k && four[k].y == 4 * k + 1 && four[k].z == 4 * k + 2 && four[k].w == 0;
    out[l] = right && one[k] == k && two[k].x == 2 * k && two[k].y == 2 * k + 1;
}
template <bool WAITS> bool copies_right()
{
    std::vector<int> source(128), ones(32, 1);
    for (int k = 0; k < 128; k++) source[k] = k;
    int *out = zeros<int>(32);
    run("copies", true, copies<WAITS>, 1, 32, upload(source), out);
    return read(out, 32) == ones;
}
bool cp_async() { return copies_right<true>(); }
bool cp_async_without_wait() { return copies_right<false>(); }

// Two groups of copies. After a wait that leaves one group pending, the first group's data has arrived and the second
// group's has not.
__global__ void two_groups(const int *from, int *out)
{
    __shared__ int first[32], second[32];
    int l = (int)threadIdx.x;
    copy_async<4>(&first[l], from + l);
    copy_async_commit();
    copy_async<4>(&second[l], from + l);
    copy_async_commit();
    copy_async_wait<1>();
    out[l] = first[l] == l && second[l] == -1;
    copy_async_wait<0>();
    out[l] = out[l] && second[l] == l;
}
bool cp_async_groups()
{
    std::vector<int> source(32), ones(32, 1);
    for (int k = 0; k < 32; k++) source[k] = k;
    int *out = zeros<int>(32);
    run("two_groups", true, two_groups, 1, 32, upload(source), out);
    return read(out, 32) == ones;
}
