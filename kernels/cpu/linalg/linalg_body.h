// SPDX-License-Identifier: MIT
// cpu/linalg/linalg_body.h -- part of linalg.c, included for float and double: REAL is the type, LIB(l) its functions.
// The kernels' own copies of matrices are column-major.

// Copies item b of t, a matrix, to `to`. ld: elements from a column of `to` to the next.
static void N(load_to)(const ms_tensor *t, int64_t b, REAL *to, int64_t ld)
{
    int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
    int64_t down = t->stride[t->ndim - 2], across = t->stride[t->ndim - 1];
    const REAL *from = (const REAL *)ms__data(t) + item_at(t, b, 2);
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = 0; i < rows; i++) to[j * ld + i] = from[i * down + j * across];
}
static void N(load)(const ms_tensor *t, int64_t b, REAL *to) { N(load_to)(t, b, to, t->shape[t->ndim - 2]); }

// Copies a matrix to item b of t, which is contiguous.
static void N(store)(ms_tensor *t, int64_t b, const REAL *from, int64_t ld)
{
    int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
    REAL *to = (REAL *)ms__data(t) + b * rows * columns;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) to[i * columns + j] = from[j * ld + i];
}
static void N(store_identity)(ms_tensor *t, int64_t b)
{
    int64_t n = t->shape[t->ndim - 1];
    REAL *to = (REAL *)ms__data(t) + b * n * n;
    for (int64_t k = 0; k < n * n; k++) to[k] = k % (n + 1) == 0;
}
// Item b of a contiguous tensor whose items are vectors of n elements.
static REAL *N(vector)(ms_tensor *t, int64_t b, int64_t n) { return (REAL *)ms__data(t) + b * n; }

static bool N(finite)(int64_t n, const REAL *x)
{
    REAL sum = 0;
    for (int64_t k = 0; k < n; k++) sum += x[k] * 0;
    return sum == 0;
}

// The size of a work array. best: the size that LAPACK asked for, in floating point, where it may be rounded down.
static int N(work_size)(REAL best) { return (int)(best + 4 * EPSILON * best) + 1; }

static ms_status N(inv)(const linalg_call *l)
{
    int n = l->n, work = 64 * n, info = 0;
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)n * n, sizeof *a), *w = room(&r, work, sizeof *w);
    int *pivots = room(&r, n, sizeof *pivots);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        N(load)(l->in[0], b, a);
        LIB(l)->getrf(&n, &n, a, &n, pivots, &info);
        if (info == 0) LIB(l)->getri(&n, a, &n, pivots, w, &work, &info);
        if (info > 0) return end(&r, singular(l, b, info));
        N(store)(l->out[0], b, a, n);
    }
    return end(&r, MS_OK);
}

static ms_status N(solve)(const linalg_call *l)
{
    int n = l->n, k = (int)l->in[1]->shape[l->in[1]->ndim - 1], info = 0;
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)n * n, sizeof *a), *x = room(&r, (int64_t)n * k, sizeof *x);
    int *pivots = room(&r, n, sizeof *pivots);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        N(load)(l->in[0], b, a);
        N(load)(l->in[1], b, x);
        LIB(l)->gesv(&n, &k, a, &n, pivots, x, &n, &info);
        if (info > 0) return end(&r, singular(l, b, info));
        N(store)(l->out[0], b, x, n);
    }
    return end(&r, MS_OK);
}

// Integers: whether the triangle is the upper one, whether its diagonal counts as ones.
static ms_status N(solve_triangular)(const linalg_call *l)
{
    int n = l->n, k = (int)l->in[1]->shape[l->in[1]->ndim - 1], info = 0;
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)n * n, sizeof *a), *x = room(&r, (int64_t)n * k, sizeof *x);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        N(load)(l->in[0], b, a);
        N(load)(l->in[1], b, x);
        LIB(l)->trtrs(l->c->i[0] ? "U" : "L", "N", l->c->i[1] ? "U" : "N", &n, &k, a, &n, x, &n, &info, 1, 1, 1);
        if (info > 0) return end(&r, singular(l, b, info));
        N(store)(l->out[0], b, x, n);
    }
    return end(&r, MS_OK);
}

// Factors the n x n matrix a in place, and returns the sign of its determinant: 0 for a singular matrix. The product of
// the result's diagonal has the determinant's absolute value.
static int N(factor)(const linalg_call *l, int n, REAL *a, int *pivots)
{
    int info = 0, sign = 1;
    LIB(l)->getrf(&n, &n, a, &n, pivots, &info);
    for (int k = 0; k < n; k++) {
        if (pivots[k] != k + 1) sign = -sign;
        if (a[(int64_t)k * n + k] < 0) sign = -sign;
        if (a[(int64_t)k * n + k] == 0) return 0;
    }
    return sign;
}

// out[0]: the sign, out[1]: the logarithm of the absolute value; or, without out[1], the determinant.
static ms_status N(determinants)(const linalg_call *l)
{
    int n = l->n;
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)n * n, sizeof *a);
    int *pivots = room(&r, n, sizeof *pivots);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch; b++) {
        N(load)(l->in[0], b, a);
        int sign = n ? N(factor)(l, n, a, pivots) : 1;
        REAL product = 1, logarithm = sign ? 0 : -(REAL)INFINITY;
        for (int64_t k = 0; k < n && sign; k++) {
            REAL size = (REAL)fabs((double)a[k * n + k]);
            product *= size;
            logarithm += (REAL)log((double)size);
        }
        *N(vector)(l->out[0], b, 1) = (REAL)sign * (l->out[1] ? 1 : product);
        if (l->out[1]) *N(vector)(l->out[1], b, 1) = logarithm;
    }
    return end(&r, MS_OK);
}
static ms_status N(det)(const linalg_call *l) { return N(determinants)(l); }
static ms_status N(slogdet)(const linalg_call *l) { return N(determinants)(l); }

// Integers: whether the result is the upper triangle.
static ms_status N(cholesky)(const linalg_call *l)
{
    int n = l->n, info = 0;
    bool upper = l->c->n_i > 0 && l->c->i[0];
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)n * n, sizeof *a);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        N(load)(l->in[0], b, a);
        LIB(l)->potrf(upper ? "U" : "L", &n, a, &n, &info, 1);
        if (info > 0)
            return end(&r, ms__fail(MS_EINVAL,
                                    "%s: %s is not positive-definite: its leading minor of order %d is not positive",
                                    l->who, matrix_text(l, b), info));
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < n; i++)
                if (upper ? i > j : i < j) a[j * n + i] = 0;
        N(store)(l->out[0], b, a, n);
    }
    return end(&r, MS_OK);
}

// Integers: whether Q is square. out[0]: Q, out[1]: R.
static ms_status N(qr)(const linalg_call *l)
{
    int m = l->m, n = l->n, k = m < n ? m : n, columns = (int)l->out[0]->shape[l->out[0]->ndim - 1], info = 0;
    int rows = columns, wide = n > columns ? n : columns, work = 64 * wide;
    rooms r = { 0 };
    REAL *a = room(&r, (int64_t)m * wide, sizeof *a), *w = room(&r, work, sizeof *w), *tau = room(&r, k, sizeof *tau);
    REAL *triangle = room(&r, (int64_t)rows * n, sizeof *triangle);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch; b++) {
        if (k == 0) {
            if (columns > 0) N(store_identity)(l->out[0], b);
            continue;
        }
        N(load)(l->in[0], b, a);
        LIB(l)->geqrf(&m, &n, a, &m, tau, w, &work, &info);
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < rows; i++) triangle[j * rows + i] = i <= j ? a[j * m + i] : 0;
        N(store)(l->out[1], b, triangle, rows);
        LIB(l)->orgqr(&m, &columns, &k, a, &m, tau, w, &work, &info);
        N(store)(l->out[0], b, a, m);
    }
    return end(&r, MS_OK);
}

// Memory for singular value decompositions of m x n matrices. job: "S", the first min(m, n) vectors; "A", all.
typedef struct {
    const char *job;
    int m, n, k, left, right, work;  // left, right: numbers of columns of u and of rows of vt
    REAL *a, *s, *u, *vt, *w;
    int *numbers;
} N(singular_values);

static void N(singular_rooms)(const linalg_call *l, N(singular_values) * v, rooms *r)
{
    REAL best = 0;
    int info = 0, ask = -1;
    v->m = l->m, v->n = l->n;
    v->k = v->m < v->n ? v->m : v->n;
    v->left = *v->job == 'A' ? v->m : v->k;
    v->right = *v->job == 'A' ? v->n : v->k;
    if (v->k > 0)
        LIB(l)->gesdd(v->job, &v->m, &v->n, &best, &v->m, &best, &best, &v->m, &best, &v->right, &best, &ask, &info,
                      &info, 1);
    v->work = N(work_size)(best);
    v->a = room(r, (int64_t)v->m * v->n, sizeof *v->a);
    v->s = room(r, v->k, sizeof *v->s);
    v->u = room(r, (int64_t)v->m * v->left, sizeof *v->u);
    v->vt = room(r, (int64_t)v->right * v->n, sizeof *v->vt);
    v->w = room(r, v->work, sizeof *v->w);
    v->numbers = room(r, 8 * (int64_t)v->k, sizeof *v->numbers);
}
static ms_status N(singular_of)(const linalg_call *l, N(singular_values) * v, int64_t b)
{
    int info = 0;
    N(load)(l->in[0], b, v->a);
    if (!N(finite)((int64_t)v->m * v->n, v->a)) return not_finite(l, b);
    LIB(l)->gesdd(v->job, &v->m, &v->n, v->a, &v->m, v->s, v->u, &v->m, v->vt, &v->right, v->w, &v->work, v->numbers,
                  &info, 1);
    return info > 0 ? not_converged(l, b, info) : MS_OK;
}

// Integers: whether U and V are square. out: U, S, V transposed.
static ms_status N(svd)(const linalg_call *l)
{
    N(singular_values) v = { .job = l->c->n_i > 0 && l->c->i[0] ? "A" : "S" };
    rooms r = { 0 };
    N(singular_rooms)(l, &v, &r);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch; b++) {
        if (v.k == 0) {
            if (v.left > 0) N(store_identity)(l->out[0], b);
            if (v.right > 0) N(store_identity)(l->out[2], b);
            continue;
        }
        ms_status st = N(singular_of)(l, &v, b);
        if (st != MS_OK) return end(&r, st);
        N(store)(l->out[0], b, v.u, v.m);
        memcpy(N(vector)(l->out[1], b, v.k), v.s, (size_t)v.k * sizeof *v.s);
        N(store)(l->out[2], b, v.vt, v.right);
    }
    return end(&r, MS_OK);
}

// Integers: whether the upper triangle is read. out: the eigenvalues, ascending; the eigenvectors as columns.
static ms_status N(eigh)(const linalg_call *l)
{
    int n = l->n, info = 0, ask = -1, count = 0;
    const char *part = l->c->n_i > 0 && l->c->i[0] ? "U" : "L";
    REAL best = 0;
    rooms r = { 0 };
    if (n > 0) LIB(l)->syevd("V", part, &n, &best, &n, &best, &best, &ask, &count, &ask, &info, 1, 1);
    int work = N(work_size)(best);
    REAL *a = room(&r, (int64_t)n * n, sizeof *a), *values = room(&r, n, sizeof *values);
    REAL *w = room(&r, work, sizeof *w);
    int *numbers = room(&r, count, sizeof *numbers);
    if (r.missing) return no_room(l, &r);
    for (int64_t b = 0; b < l->batch && n > 0; b++) {
        N(load)(l->in[0], b, a);
        for (int64_t j = 0; j < n; j++)  // overwrites the other triangle, which may hold inf or nan
            for (int64_t i = 0; i < n; i++)
                if (*part == 'U' ? i > j : i < j) a[j * n + i] = a[i * n + j];
        if (!N(finite)((int64_t)n * n, a)) return end(&r, not_finite(l, b));
        LIB(l)->syevd("V", part, &n, a, &n, values, w, &work, numbers, &count, &info, 1, 1);
        if (info > 0) return end(&r, not_converged(l, b, info));
        memcpy(N(vector)(l->out[0], b, n), values, (size_t)n * sizeof *values);
        N(store)(l->out[1], b, a, n);
    }
    return end(&r, MS_OK);
}
