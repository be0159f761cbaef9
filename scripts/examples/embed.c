// SPDX-License-Identifier: MIT
// An MLP without Lua: cc embed.c $(pkg-config --cflags --libs moonshard) -o embed && ./embed
#include <moonshard.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int failed)
{
    if (failed && fprintf(stderr, "embed: %s\n", ms_error())) exit(1);
}
static ms_id call(const char *op, int n_in, const ms_id *in, int n_i, const int64_t *i, int n_f, const double *f)
{
    ms_args a = { .n_in = n_in, .n_i = n_i, .n_f = n_f };
    for (int k = 0; k < n_in; k++) a.in[k] = in[k];
    for (int k = 0; k < n_i; k++) a.i[k] = i[k];
    for (int k = 0; k < n_f; k++) a.f[k] = f[k];
    check(ms_call_op(ms_op_find(op), &a));
    return a.out[0];
}

static ms_id parameter(int rows, int columns, double bound)
{
    ms_id t = ms_empty(MS_F32, MS_CPU, columns ? 2 : 1, (int64_t[]) { rows, columns });
    check(!t);
    return ms_param_new(call("rand_", 1, &t, 0, NULL, 2, (double[]) { -bound, bound }), 1);
}

int main(void)
{
    enum { N = 512, STEPS = 300 };
    double points[2 * N], inside[N], taken[4] = { 0 }, loss = 0;
    check(ms_init());
    ms_manual_seed(1);
    for (int k = 0; k < N; k++) {
        double x = points[2 * k] = 2.0 * rand() / RAND_MAX - 1, y = points[2 * k + 1] = 2.0 * rand() / RAND_MAX - 1;
        inside[k] = x * x + y * y < 0.64;
    }
    ms_id x = ms_from_data(MS_F32, 2, (int64_t[]) { N, 2 }, points),
          labels = ms_from_data(MS_I64, 1, (int64_t[]) { N }, inside);
    ms_id p[4] = { parameter(32, 2, 0.7), parameter(32, 0, 0.7), parameter(2, 32, 0.2), parameter(2, 0, 0.2) };
    ms_id state[MS_OPTIM_STATES * 4] = { 0 };
    ms_optim_options adam = { .kind = MS_ADAMW, .lr = 0.02, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
    for (int step = 1; step <= STEPS; step++) {
        double scope = ms_scope_open("step");  // the scope releases the step's tensors at its end
        ms_id h = call("linear", 3, (ms_id[]) { x, p[0], p[1] }, 0, NULL, 0, NULL);
        h = call("tanh", 1, &h, 0, NULL, 0, NULL);
        ms_id y = call("linear", 3, (ms_id[]) { h, p[2], p[3] }, 0, NULL, 0, NULL);
        ms_id l = call("cross_entropy", 2, (ms_id[]) { y, labels }, 2, (int64_t[]) { 1, -100 }, 1, (double[]) { 0 });
        ms_run *run = ms_backward(1, &l, NULL, 0);
        ms_event event;
        check(!run || ms_run_next(run, &event) != MS_RUN_DONE);  // a run without hooks raises no events
        ms_run_free(run);
        check(ms_optim_step(&adam, 4, p, state, taken) || ms_item(l, &loss));
        for (int k = 0; k < 4; k++) check(ms_set_grad(p[k], 0));
        ms_scope_close(scope, NULL, 0);
        if (step % 100 == 0) printf("step %d  loss %.3f\n", step, loss);
    }
    return loss < 0.1 ? 0 : 1;
}
