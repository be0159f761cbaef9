// SPDX-License-Identifier: MIT
// cpu/rows/rotary_body.h -- rotary positions of rows, once per accumulation type (rotary.c).

// The cosines or sines of a row.
MS_INLINE const REAL *R(angles_of)(const rotary *p, const void *from, int64_t at, REAL *room)
{
    bool same = (p->angles == MS_F64) == (sizeof(REAL) == 8);
    if (same) return (const REAL *)from + at;
    for (int64_t j = 0; j < p->q.half; j++) room[j] = ((const float *)from)[at + j];
    return room;
}

static MS_KERNEL void R(rotary)(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const rotary *p = arg;
    int64_t n = p->q.n, half = p->q.half;
    REAL *room = (REAL *)(p->room + p->room_bytes * (size_t)ms__thread_num()), sign = (REAL)p->sign;
    const REAL *w = p->w ? ROW_IN(p->dtype, p->w, 0, 1, n, room + n) : NULL;
    for (int64_t row = first / n; row < last / n; row++) {
        int64_t at = ms_rotary_angles(&p->q, row);
        const REAL *x = ROW_IN(p->dtype, p->x, ms_rotary_start(&p->q, row), 1, n, room);
        const REAL *c = R(angles_of)(p, p->cos, at, room + 2 * n),
                   *s = R(angles_of)(p, p->sin, at, room + 2 * n + half);
        REAL *restrict y = ROW_AT(p->dtype, p->out, row * n, 1, room + 3 * n), *restrict h = room + 4 * n;
        if (w) {
            REAL rstd = 1 / SQRT(R(ms__row_spread)(x, 0, n) / (REAL)n + (REAL)p->eps);
            if (p->stats) ((REAL *)p->stats)[2 * row] = 0, ((REAL *)p->stats)[2 * row + 1] = rstd;
            for (int64_t j = 0; j < n; j++) h[j] = x[j] * rstd * w[j];
            x = h;
        }
        for (int64_t j = 0; j < half; j++) {
            REAL a = x[j], b = x[j + half], turn = s[j] * sign;
            y[j] = R(ms_turned_first)(a, b, c[j], turn);
            y[j + half] = R(ms_turned_second)(a, b, c[j], turn);
        }
        for (int64_t j = 2 * half; j < n; j++) y[j] = x[j];
        ROW_OUT(p->dtype, p->out, row * n, 1, n, y);
    }
}
