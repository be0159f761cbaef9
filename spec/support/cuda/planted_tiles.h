// SPDX-License-Identifier: MIT
// cuda/planted_tiles.h -- the part of planted.cpp about tensor cores and asynchronous copies.

uint16_t bf16_of(float v) { return ms_float_to_bf16(v).bits; }
uint16_t f16_of(float v) { return ms_float_to_f16(v).bits; }

// d (16 x 8) = 2 a (16 x 16) b (16 x 8), all row-major: the product is added twice. The fragments are made element by
// element as PTX's manual lists them: "mma.m16n8k16 with floating point type".
__global__ void product(const uint16_t *a, const uint16_t *b, float *d, int f16)
{
    int l = (int)threadIdx.x, group = l >> 2, in_group = l & 3;
    uint32_t fa[4] = {}, fb[2] = {};
    float fd[4] = {};
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        fa[i / 2] |= (uint32_t)a[row * 16 + column] << i % 2 * 16;
    }
    for (int i = 0; i < 4; i++) {
        int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        fb[i / 2] |= (uint32_t)b[row * 8 + group] << i % 2 * 16;
    }
    for (int round = 0; round < 2; round++) f16 ? mma_f16(fd, fa, fb) : mma_bf16(fd, fa, fb);
    for (int i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = fd[i];
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
        run("product", true, product, 1, 32, upload(a), upload(b), d, f16);
        right = right && read(d, 16 * 8) == plain;
    }
    return right;
}

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
