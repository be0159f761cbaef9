// SPDX-License-Identifier: MIT
// cpu/product/tiles_body.h -- micro-kernels of matrix products for one accumulating type on one level. REAL is the
// type, R(name) names its functions, K(name) those of this level; LANES numbers fill a vector of VEC bytes.
//
// tile: up to ROWS rows by VECS vectors of C stay in registers over the whole depth. A may have any strides (its
// elements are broadcast); the rows of B have adjacent columns, in a packed panel or in B itself. core: ROWS rows from
// packed panels, with prefetches. sweep: core for a group of panels of A and one panel of B after the other. Prefetch
// distances were measured, all variants interleaved in one process.

#define OPERANDS R(ms_operands)
#define WIDE (VECS * LANES)
#define INLINE static inline __attribute__((always_inline)) TARGET

#define SAME(s, l) (s)

typedef REAL K(vec) __attribute__((vector_size(VEC), aligned(sizeof(REAL)), may_alias));
typedef REAL K(loose) __attribute__((vector_size(VEC), aligned(2),
                                     may_alias));  // unaligned: a pair of bfloat16 begins at any even address

// The operands of rows from i on and columns from j on. (Functions that are not inlined take operands by pointer:
// copying the struct would load as vectors what was just stored as scalars, and stall.)
static inline OPERANDS K(at)(const OPERANDS *o, int64_t i, int64_t j)
{
    const REAL *a = o->a + i * o->a_rs, *bias = o->bias ? o->bias + j : NULL;
    return (OPERANDS) { a, o->a_rs, o->a_cs, o->b + j, o->b_rs, o->c + i * o->c_rs + j, o->c_rs, bias, o->add };
}

// Stores the sums of a tile.
INLINE void K(store)(const int rows, const int vecs, K(vec) s[ROWS][VECS], const OPERANDS *o)
{
    REAL *c = o->c;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++, c += o->c_rs)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) {
            K(vec) *d = (K(vec) *)(c + v * LANES);
            if (o->add) s[r][v] += *d;
            if (o->bias) s[r][v] += *(const K(vec) *)(o->bias + v * LANES);
            *d = s[r][v];
        }
}

INLINE void K(tile)(const int rows, const int vecs, int64_t k, OPERANDS o)
{
    K(vec) s[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) s[r][v] = (K(vec)) { 0 };
    if (k > 64)  // with fewer steps the stores come too soon after the prefetches to gain by them
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) __builtin_prefetch(o.c + r * o.c_rs + v * LANES, 1);
#pragma GCC unroll 1  // unrolled, GCC would hoist loads across steps and spill
    for (int64_t left = k; left > 0; left -= STEPS) {
        if (o.a_cs == 1)  // the rows of the next tile
            for (int r = 0; r < rows; r++) __builtin_prefetch(o.a + (rows + r) * o.a_rs);
#pragma GCC unroll 1
        for (int64_t p = left < STEPS ? left : STEPS; p > 0; p--) {
            K(vec) w[VECS];
#pragma GCC unroll 3
            for (int v = 0; v < vecs; v++) w[v] = *(const K(vec) *)(o.b + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                REAL x = o.a[r * o.a_rs];
#pragma GCC unroll 3
                for (int v = 0; v < vecs; v++) s[r][v] += x * w[v];
            }
            o.a += o.a_cs;
            o.b += o.b_rs;
        }
    }
    K(store)(rows, vecs, s, &o);
}

// Computes m rows of C by `vecs` vectors of columns.
INLINE void K(rows)(const int vecs, int64_t m, int64_t k, OPERANDS o)
{
    int64_t i = 0;
    for (; i + ROWS <= m; i += ROWS) K(tile)(ROWS, vecs, k, K(at)(&o, i, 0));
    if (ROWS > 4 && m & 4) {
        K(tile)(4, vecs, k, K(at)(&o, i, 0));
        i += 4;
    }
    if (m & 2) {
        K(tile)(2, vecs, k, K(at)(&o, i, 0));
        i += 2;
    }
    if (m & 1) K(tile)(1, vecs, k, K(at)(&o, i, 0));
}

static TARGET void K(strip)(int64_t n, int64_t m, int64_t k, const OPERANDS *o)
{
    for (int64_t j = 0, vecs; j < n; j += vecs * LANES) {
        vecs = (n - j) / LANES;
        // Four vectors are two and two: a tile of one waits for its loads.
        vecs = vecs == 4 ? 2 : vecs > VECS ? VECS : vecs;
        const OPERANDS d = K(at)(o, 0, j);
        if (vecs == VECS) K(rows)(VECS, m, k, d);
        else if (VECS > 2 && vecs == 2) K(rows)(2, m, k, d);
        else K(rows)(1, m, k, d);
    }
}

// Columns that do not fill a vector go through a buffer.
static void K(panel)(int64_t n, int64_t m, int64_t k, const OPERANDS *o)
{
    int64_t whole = n / LANES * LANES, rest = n - whole;
    if (whole) K(strip)(whole, m, k, o);
    if (!rest) return;
    REAL t[8 * LANES] __attribute__((aligned(VEC))), e[LANES] = { 0 }, *c = o->c + whole;
    OPERANDS d = K(at)(o, 0, whole);
    d.c = t;
    d.c_rs = LANES;
    if (d.bias) d.bias = memcpy(e, d.bias, (size_t)rest * sizeof(REAL));
    for (; m > 0; m -= 8, d.a += 8 * d.a_rs, c += 8 * o->c_rs) {
        int64_t rows = m < 8 ? m : 8;
        if (d.add)
            for (int64_t r = 0; r < rows; r++) memcpy(t + r * LANES, c + r * o->c_rs, (size_t)rest * sizeof(REAL));
        K(strip)(LANES, rows, k, &d);
        for (int64_t r = 0; r < rows; r++) memcpy(c + r * o->c_rs, t + r * LANES, (size_t)rest * sizeof(REAL));
    }
}

// One part of the depth of a tile, computed from packed panels: each step reads ROWS numbers of A's panel and `vecs` of
// the vectors of B's. from: the sums so far, in rows of WIDE; NULL: none. next: what will be read of A after this tile.
typedef struct {
    OPERANDS o;
    const REAL *from, *next;
    REAL *keep;
    gemm_ahead *ahead;
} K(part);

// Both panels are prefetched: B's may exceed the first-level cache, and after A's comes the next panel. The lines of C
// are prefetched row by row shortly before they are stored (all at once would delay the prefetches of B). Every STEPS
// steps, two lines of the data packed next and two lines of its destination are prefetched. first: B is read in place,
// and the loaded vectors are stored as its packed panel, `keep`: half the cost of packing it separately.
enum { K(AHEAD_B) = WIDE * 24, K(NEAR_ROWS) = 4, K(FAR_ROWS) = 24, K(UNROLL) = VEC == 64 ? 2 : 4 };
enum { K(DEPTH) = DEPTH / 16 * STEPS };

// A step: loads a row of B into w, and adds its products with ROWS numbers of A. A whole tile takes all 16 registers of
// AVX2; GCC spills sums in the loop, and it takes 1.35 times as long (Zen 2), so the registers are named here.
INLINE void K(step)(const int vecs, K(vec) s[ROWS][VECS], K(vec) w[VECS], const REAL *a, const REAL *b)
{
    K(vec) x;
#if VEC == 32
    K(vec) w0, w1, w2;
#define ROW(r)                                            \
    "vbroadcasts" KIND " " #r "*" SIZE "(%[a]), %[x]\n\t" \
    "vfmadd231p" KIND " %[w0], %[x], %[s" #r "0]\n\t"     \
    "vfmadd231p" KIND " %[w1], %[x], %[s" #r "1]\n\t"     \
    "vfmadd231p" KIND " %[w2], %[x], %[s" #r "2]\n\t"
#define SUMS(r) [s##r##0] "+x"(s[r][0]), [s##r##1] "+x"(s[r][1]), [s##r##2] "+x"(s[r][2])
    if (vecs == VECS) {
        __asm__("vmovup" KIND " (%[b]), %[w0]\n\t"
                "vmovup" KIND " 32(%[b]), %[w1]\n\t"
                "vmovup" KIND " 64(%[b]), %[w2]\n\t" ROW(0) ROW(1) ROW(2) ROW(3)
                : SUMS(0), SUMS(1), SUMS(2), SUMS(3), [w0] "=&x"(w0), [w1] "=&x"(w1), [w2] "=&x"(w2), [x] "=&x"(x)
                : [a] "r"(a), [b] "r"(b)
                : "memory");
        w[0] = w0, w[1] = w1, w[2] = w2;
        return;
    }
#undef ROW
#undef SUMS
#endif
#pragma GCC unroll 3
    for (int v = 0; v < vecs; v++) {
        w[v] = *(const K(vec) *)(b + v * LANES);
        KEEP(w[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        x = (K(vec)) { EACH_LANE(SAME, a[r]) };
        KEEP(x);
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++) s[r][v] += x * w[v];
    }
}

INLINE void K(core)(const int vecs, const bool first, int64_t k, const K(part) * part)
{
    K(vec) s[ROWS][VECS];
    const OPERANDS *o = &part->o;
    const REAL *a = o->a, *b = o->b, *next = part->next;
    const int64_t b_rs = first ? o->b_rs : WIDE;
    REAL *row = o->c, *keep = part->keep;
    gemm_ahead *ahead = part->ahead;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vecs; v++)
            s[r][v] = part->from ? *(const K(vec) *)(part->from + r * WIDE + v * LANES) : (K(vec)) { 0 };
            // The barriers keep GCC from hoisting loads across steps, and from loading numbers twice, when it runs
            // short of registers.
#define STEP(q)                                                                          \
    {                                                                                    \
        K(vec) w[VECS];                                                                  \
        K(step)(vecs, s, w, a + (q)*ROWS, b);                                            \
        _Pragma("GCC unroll 3") for (int v = 0; v < vecs; v++)                           \
        {                                                                                \
            if (first) *(K(vec) *)(keep + v * LANES) = w[v];                             \
            if (!first && ((q)*WIDE + v * LANES) * (int)sizeof(REAL) % 64 == 0)          \
                __builtin_prefetch(b + K(AHEAD_B) + v * LANES);                          \
            if (first && v * VEC % 64 == 0) {                                            \
                __builtin_prefetch(b + K(NEAR_ROWS) * b_rs + v * LANES);                 \
                __builtin_prefetch(b + K(FAR_ROWS) * b_rs + v * LANES, 0, 2);            \
            }                                                                            \
        }                                                                                \
        b += b_rs;                                                                       \
        if (first) keep += WIDE;                                                         \
        if ((q)*ROWS * (int)sizeof(REAL) % 64 == 0) __builtin_prefetch(next + (q)*ROWS); \
        __asm__ volatile("" ::: "memory");                                               \
    }
#pragma GCC unroll 1
    for (int64_t left = k / STEPS; left > 0; left--) {
        if (left <= ROWS + 2 && left > 2) {
            for (int v = 0; v < vecs; v += 64 / VEC) __builtin_prefetch(row + v * LANES, 1);
            __builtin_prefetch(row + vecs * LANES - 1, 1);
            row += o->c_rs;
        }
        if (ahead->groups > 0) {
            const char *at = ahead->at;
            __builtin_prefetch(at, 0, 2);
            __builtin_prefetch(at + ahead->apart, 0, 2);
            at += 2 * ahead->apart;
            if (++ahead->pairs * 2 == ahead->lines) {
                at += ahead->jump;
                ahead->pairs = 0;
                ahead->groups--;
            }
            ahead->at = at;
            if (ahead->to) {
                __builtin_prefetch(ahead->to, 1);
                __builtin_prefetch(ahead->to + 64, 1);
                ahead->to += 128;
            }
        }
#pragma GCC unroll 1
        for (int p = 0; p < STEPS / K(UNROLL); p++, a += K(UNROLL) * ROWS, next += K(UNROLL) * ROWS) {
            STEP(0)
            STEP(1)
            if (K(UNROLL) == 4) {
                STEP(2)
                STEP(3)
            }
        }
    }
#pragma GCC unroll 1
    for (k %= STEPS; k > 0; k--, a += ROWS) STEP(0)
#undef STEP
    K(store)(ROWS, vecs, s, o);
}

INLINE void K(any_core)(int64_t vecs, const bool first, int64_t k, const K(part) * part)
{
    if (vecs == VECS) K(core)(VECS, first, k, part);
    else if (VECS > 2 && vecs == 2) K(core)(2, first, k, part);
    else K(core)(1, first, k, part);
}

// Multiplies packed panels of A, one below the other, by the panels of B for n columns. Tiles whose columns do not fill
// vectors go through a buffer.
static TARGET void K(sweep)(int64_t n, int64_t rows, int64_t k, const OPERANDS *all, REAL *keep, gemm_ahead *ahead)
{
    REAL sums[GROUP * ROWS * WIDE] __attribute__((aligned(VEC))), t[ROWS * WIDE] __attribute__((aligned(VEC))),
        e[WIDE] = { 0 };
    const int64_t whole = rows / ROWS * ROWS;
    const REAL *bias = all->bias, *b = all->b;
    REAL *c = all->c;
    for (; n > 0;
         n -= WIDE, c += WIDE, b += keep ? WIDE : WIDE * k, bias += bias ? WIDE : 0, keep += keep ? WIDE * k : 0) {
        const int64_t wide = n < WIDE ? n : WIDE, vecs = (wide + LANES - 1) / LANES;
        const bool full = wide % LANES == 0;
        const REAL *packed = keep ? keep : b;
        for (int64_t q = 0, depth; q < k && whole; q += depth) {
            depth = k - q < K(DEPTH) ? k - q : K(DEPTH);
            const bool last = q + depth == k;
            for (int64_t i = 0; i < whole; i += ROWS) {
                const REAL *a = all->a + i * k + q * ROWS;
                K(part)
                x = { { a, 1, ROWS, packed + q * WIDE, WIDE, sums + i * WIDE, WIDE, NULL, false },
                      q ? sums + i * WIDE : NULL,
                      GROUP == 1         ? a + 64 * ROWS
                      : i + ROWS < whole ? a + ROWS * k
                      : last             ? all->a
                                         : all->a + (q + depth) * ROWS,
                      NULL,
                      ahead };
                if (last) {
                    x.o.c = full ? c + i * all->c_rs : t;
                    x.o.c_rs = full ? all->c_rs : WIDE;
                    x.o.bias = bias && !full ? memcpy(e, bias, (size_t)wide * sizeof(REAL)) : bias;
                    x.o.add = all->add;
                    if (!full && all->add)
                        for (int64_t r = 0; r < ROWS; r++)
                            memcpy(t + r * WIDE, c + (i + r) * all->c_rs, (size_t)wide * sizeof(REAL));
                }
                if (ahead->groups == 0 && ahead->then) x.ahead = ahead = ahead->then;
                if (keep && i == 0) {
                    x.o.b = b + q * all->b_rs;
                    x.o.b_rs = all->b_rs;
                    x.keep = keep + q * WIDE;
                    K(any_core)(vecs, true, depth, &x);
                } else K(any_core)(vecs, false, depth, &x);
                for (int64_t r = 0; last && !full && r < ROWS; r++)
                    memcpy(c + (i + r) * all->c_rs, t + r * WIDE, (size_t)wide * sizeof(REAL));
            }
        }
        if (whole < rows) {
            OPERANDS o = {
                all->a + whole * k, 1, ROWS, packed, WIDE, c + whole * all->c_rs, all->c_rs, bias, all->add
            };
            K(panel)(wide, rows - whole, k, &o);
        }
    }
}

// Transposes a square of LANES x LANES in registers; its columns are in_cs bytes apart. Each stage exchanges the
// off-diagonal blocks of side `step`.
#define LOW(step, l) ((l) & (step) ? (l) - (step) + LANES : (l))
#define HIGH(step, l) ((l) & (step) ? (l) + LANES : (l) + (step))
#define STAGE(count, step)                                                                              \
    if ((step) < LANES && (step) < (count)) _Pragma("GCC unroll 16") for (int l = 0; l < (count); l++)  \
        {                                                                                               \
            if (l & (step)) continue;                                                                   \
            K(vec) y = x[l], z = x[(l + (step)) % (count)];                                             \
            x[l] = __builtin_shufflevector(y, z, EACH_LANE(LOW, (step) % LANES));                       \
            x[(l + (step)) % (count)] = __builtin_shufflevector(y, z, EACH_LANE(HIGH, (step) % LANES)); \
        }
INLINE void K(transpose)(REAL *out, int64_t out_rs, const void *in, int64_t in_cs)
{
    K(vec) x[LANES];
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) x[l] = *(const K(loose) *)((const char *)in + l * in_cs);
    STAGE(LANES, 8)
    STAGE(LANES, 4)
    STAGE(LANES, 2)
    STAGE(LANES, 1)
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) *(K(vec) *)(out + l * out_rs) = x[l];
}
// ROWS rows of LANES numbers, in_rs bytes apart, become LANES contiguous rows of ROWS.
INLINE void K(transpose_rows)(REAL *out, const void *in, int64_t in_rs)
{
    if (LANES <= ROWS) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r += LANES) K(transpose)(out + r, ROWS, (const char *)in + r * in_rs, in_rs);
        return;
    }
    _Static_assert(LANES <= 2 * ROWS, "two columns fill a vector");
    K(vec) x[ROWS];
#pragma GCC unroll 8
    for (int l = 0; l < ROWS; l++) x[l] = *(const K(loose) *)((const char *)in + l * in_rs);
    STAGE(ROWS, 4)
    STAGE(ROWS, 2)
    STAGE(ROWS, 1)
#pragma GCC unroll 8
    for (int l = 0; l < ROWS; l += 2) {  // column l in the lower half of x[l], column l + ROWS in the upper
        *(K(vec) *)(out + l * ROWS) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(LOW, ROWS % LANES));
        *(K(vec) *)(out + (l + ROWS) * ROWS) = __builtin_shufflevector(x[l], x[l + 1], EACH_LANE(HIGH, ROWS % LANES));
    }
}
#undef STAGE
#undef LOW
#undef HIGH

static TARGET void K(pack)(REAL *out, int64_t out_rs, const ms_matrix *m, int64_t k, int64_t n)
{
    const REAL *b = m->data;
    const int64_t rs = m->rs, cs = m->cs;
    int64_t j = 0, full = n / LANES * LANES, wide = (n + LANES - 1) / LANES * LANES;
    if (cs == 1) {
        for (int64_t p = 0; p < k; p++) {
            for (j = 0; j < full; j += LANES) *(K(vec) *)(out + p * out_rs + j) = *(const K(vec) *)(b + p * rs + j);
            for (; j < n; j++) out[p * out_rs + j] = b[p * rs + j];
            for (; j < wide; j++) out[p * out_rs + j] = 0;
        }
        return;
    }
    int64_t done = 0;
    if (rs == 1) {  // LANES columns at a time: the hardware prefetcher follows only a few streams
        done = k / LANES * LANES;
        for (j = 0; j < full; j += LANES)
            for (int64_t p = 0; p < done; p += LANES)
                K(transpose)(out + p * out_rs + j, out_rs, b + p + j * cs, cs * (int64_t)sizeof(REAL));
    }
    for (int64_t p = full == wide ? done : 0; p < k; p++) {
        for (j = p < done ? full : 0; j < n; j++) out[p * out_rs + j] = b[p * rs + j * cs];
        for (; j < wide; j++) out[p * out_rs + j] = 0;
    }
}

// Row by row, all panels of a row together. Prefetches later rows into the second-level cache.
static TARGET void K(pack_panels)(REAL *out, const REAL *b, int64_t rs, int64_t k, int64_t panels)
{
    for (int64_t p = 0; p < k; p++, b += rs, out += WIDE) {
        const REAL *x = b, *next = b + (p + 8 < k ? 8 * rs : 0);
        REAL *o = out;
        for (int64_t j = 0; j < panels; j++, x += WIDE, next += WIDE, o += WIDE * k)
#pragma GCC unroll 3
            for (int v = 0; v < VECS; v++) {
                *(K(vec) *)(o + v * LANES) = *(const K(vec) *)(x + v * LANES);
                __builtin_prefetch(next + v * LANES, 0, 2);
            }
    }
}

static TARGET void K(pack_rows)(REAL *out, const ms_matrix *from, int64_t m, int64_t k, int64_t depth)
{
    const REAL *a = from->data;
    const int64_t rs = from->rs, cs = from->cs;
    int64_t whole = m / ROWS * ROWS;
    if (whole < m) memset(out + whole * depth, 0, (size_t)(ROWS * k) * sizeof(REAL));
    if (rs == 1) {  // columns are contiguous: a part of each column goes to every panel
        int64_t p = 0;
        // 8 at a time: whole cache lines, prefetched explicitly because the hardware does not
        for (; p + 8 <= k && whole == m; p += 8, a += 8 * cs, out += 8 * ROWS) {
            REAL *o = out;
            for (int64_t i = 0; i < m; i += ROWS, o += ROWS * depth) {
                for (int l = 0; l < 8 * ROWS; l += 64 / (int)sizeof(REAL)) __builtin_prefetch(o + 16 * ROWS + l, 1);
                for (int q = 0; q < 8; q++) memcpy(o + q * ROWS, a + q * cs + i, ROWS * sizeof(REAL));
            }
        }
        for (; p < k; p++, a += cs, out += ROWS) {
            REAL *o = out;
            int64_t i = 0;
            for (; i < whole; i += ROWS, o += ROWS * depth) memcpy(o, a + i, ROWS * sizeof(REAL));
            if (i < m) memcpy(o, a + i, (size_t)(m - i) * sizeof(REAL));
        }
        return;
    }
    for (; m > 0; m -= ROWS, a += ROWS * rs, out += ROWS * depth) {
        int64_t rows = m < ROWS ? m : ROWS, p = 0;
        if (cs == 1 && rows == ROWS)
            for (; p + LANES <= k; p += LANES) K(transpose_rows)(out + p * ROWS, a + p, rs * (int64_t)sizeof(REAL));
        for (; p < k; p++)
            for (int64_t r = 0; r < rows; r++) out[p * ROWS + r] = a[r * rs + p * cs];
    }
}

#ifdef BF16
// bfloat16 is the upper half of a float32. Two adjacent numbers are transposed as one 32-bit word, which is then split.
typedef uint32_t K(pair) __attribute__((may_alias));

INLINE void K(split)(float *out, int64_t out_rs, const K(pair) * t, int n)
{
    for (int l = 0; l < LANES; l++) {
        K(pair) *even = (K(pair) *)out + 2 * l * out_rs, *odd = even + out_rs;
        for (int j = 0; j < n; j++) {
            even[j] = t[l * n + j] << 16;
            odd[j] = t[l * n + j] & 0xffff0000;
        }
    }
}

static TARGET int64_t K(pack_columns_bf16)(float *out, int64_t out_rs, const ms_bf16 *b, int64_t cs, int64_t k)
{
    enum { BOTH = 2 * LANES };
    K(pair) t[LANES * LANES] __attribute__((aligned(64)));
    for (int64_t p = 0; p < k / BOTH * BOTH; p += BOTH) {
        K(transpose)((float *)t, LANES, b + p, cs * 2);
        K(split)(out + p * out_rs, out_rs, t, LANES);
    }
    return k / BOTH * BOTH;
}

static TARGET int64_t K(pack_rows_bf16)(float *out, const ms_bf16 *a, int64_t rs, int64_t k)
{
    enum { BOTH = 2 * LANES };
    K(pair) t[LANES * ROWS] __attribute__((aligned(64)));
    for (int64_t p = 0; p < k / BOTH * BOTH; p += BOTH) {
        K(transpose_rows)((float *)t, a + p, rs * 2);
        K(split)(out + p * ROWS, ROWS, t, ROWS);
    }
    return k / BOTH * BOTH;
}

static TARGET void K(pack_panels_bf16)(float *out, const ms_bf16 *b, int64_t rs, int64_t k, int64_t panels)
{
    for (int64_t p = 0; p < k; p++, b += rs, out += WIDE)
        for (int64_t j = 0; j < panels; j++) {
            __builtin_prefetch(b + 8 * rs + j * WIDE);
            for (int q = 0; q < WIDE; q++) out[j * WIDE * k + q] = ms_bf16_to_float(b[j * WIDE + q]);
        }
}
#endif

static const R(ms_tiles) K(tiles) = {
    .rows = ROWS,
    .lanes = LANES,
    .wide = WIDE,
    .group = GROUP,
    .strip = K(strip),
    .panel = K(panel),
    .sweep = K(sweep),
    .pack = K(pack),
    .pack_panels = K(pack_panels),
    .pack_rows = K(pack_rows),
#ifdef BF16
    .pack_columns_bf16 = K(pack_columns_bf16),
    .pack_rows_bf16 = K(pack_rows_bf16),
    .pack_panels_bf16 = K(pack_panels_bf16),
#endif
};
#undef SAME
#undef OPERANDS
#undef WIDE
#undef INLINE
