// SPDX-License-Identifier: MIT
// Calls of the C interface, for docs/api/c.md: one process on the CPU. Ends with status 1 where a result is wrong.
#define _GNU_SOURCE
#include <moonshard.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, ms_error()); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static void engine(void)
{
    CHECK(ms_init() == MS_OK);
    CHECK(ms_version() == MS_VERSION);
    printf("release %s on %s\n", ms_release_name(), ms_cpu_isa());
    CHECK(ms_get_state()->scope == 0);
    CHECK(ms_empty(-1, MS_CPU, 0, NULL) == 0 && ms_error_code() == MS_EINVAL);
    printf("why: %s\n", ms_error());
    ms_set_num_threads(ms_num_threads());
    double start = ms_time();
    CHECK(ms_time() >= start);
    int before = ms_set_grad_mode(0);
    ms_set_grad_mode(before);
    int autocast = ms_set_autocast(MS_BF16 + 1);
    ms_set_autocast(autocast);
    CHECK(ms_set_default_dtype(MS_F32) == MS_F32);
    printf("%s has %d bytes\n", ms_name_of(MS_NAME_DTYPE, MS_F16), ms_dtype_size(MS_F16));
    ms_catch_sigint(1);
    ms_catch_sigint(0);
    const double value = 1;
    ms_id number = ms_from_data(MS_F32, 0, NULL, &value);
    ms_interrupt();
    CHECK(ms_call1(ms_op_find("exp"), number) == 0 && ms_error_code() == MS_EINTR);
    ms_get_state()->interrupted = 0;
    ms_release(number);
    ms_catch_checkpoint_signals(1);
    double at;
    CHECK(ms_checkpoint_signal(&at) == 0);
    ms_catch_checkpoint_signals(0);
}

static void memory(void)
{
    ms_memory stats;
    CHECK(ms_memory_stats(MS_CPU, &stats) == MS_OK && stats.allocated <= stats.peak_allocated);
    ms_reset_peak_memory(MS_CPU);
    ms_memory_history(1);
    ms_memory now, peak;
    ms_memory_record records[8];
    ms_memory_site(1);
    double n = ms_memory_snapshot(MS_CPU, &now, &peak, records, 8);
    for (int k = 0; k < n && k < 8; k++)
        printf("%s: %.0f bytes of %s\n", records[k].what, records[k].bytes,
               ms_name_of(MS_NAME_MEMORY, records[k].kind));
    ms_memory_history(0);
    ms_empty_cache();
    ms_get_state()->gc_limit = 64 << 20;
}

static void tensors(void)
{
    const int64_t shape[] = { 2, 3 };
    const double values[] = { 1, 2, 3, 4, 5, 6 };
    float own[] = { 7, 8 };
    const int64_t two[] = { 2 };
    ms_id a = ms_from_data(MS_F32, 2, shape, values);
    ms_id b = ms_empty(MS_F32, MS_CPU, 2, shape);
    ms_id c = ms_from_pointer(own, MS_F32, 1, two);
    ms_info info;
    CHECK(ms_tensor_info(a, &info) == MS_OK && info.ndim == 2 && info.numel == 6);
    float *data = ms_data_ptr(c);
    CHECK(data == own);
    double out[6], one;
    CHECK(ms_read(a, out, 6) == MS_OK && out[5] == 6);
    const int64_t large[] = { 9007199254740993, 5 };
    int64_t exact[2];
    ms_id whole = ms_from_int64(1, two, large);
    CHECK(ms_read_int64(whole, exact, 2) == MS_OK && exact[0] == large[0]);
    ms_release(whole);
    ms_id sum = ms_call1(ms_op_find("sum"), a);
    CHECK(ms_item(sum, &one) == MS_OK && one == 21);
    ms_id view = ms_detach(a);
    CHECK(ms_same_storage(a, view) && ms_storage_is_shared(a));
    CHECK(ms_set_data(b, c) == MS_OK);
    CHECK(ms_set_name(a, "weights") == MS_OK);
    ms_release(a);
    CHECK(!ms_is_alive(a));
    ms_release(b), ms_release(c), ms_release(sum), ms_release(view);
}

static void scopes(void)
{
    double scope = ms_scope_open("step");
    CHECK(ms_scope_is_open(scope));
    const int64_t shape[] = { 4 };
    ms_id kept = ms_empty(MS_F32, MS_CPU, 1, shape), dropped = ms_empty(MS_F32, MS_CPU, 1, shape);
    CHECK(ms_scope_of(kept) != 0);
    ms_drop(dropped);
    CHECK(ms_keep(kept) == MS_OK);
    double inner = ms_scope_open("layer");
    ms_id output = ms_empty(MS_F32, MS_CPU, 1, shape);
    ms_scope_close(inner, &output, 1);
    CHECK(ms_is_alive(output));
    ms_scope_close(scope, NULL, 0);
    CHECK(ms_is_alive(kept) && !ms_is_alive(output));
    ms_release(kept);
    int chain = ms_chain_new(), main_chain = ms_chain_switch(chain);
    ms_chain_switch(main_chain);
    ms_chain_free(chain);
}

static void operators(void)
{
    const int64_t shape[] = { 2 };
    const double values[] = { -1, 2 };
    double out[2];
    ms_manual_seed(7);
    double seed, offset;
    ms_rng_get(&seed, &offset);
    ms_rng_set(seed, offset);
    ms_id x = ms_from_data(MS_F32, 1, shape, values);
    ms_id y = ms_call1(ms_op_find("relu"), x);
    ms_id z = ms_call2(ms_op_find("add"), x, y);
    ms_id w = ms_call1f(ms_op_find("mul_scalar"), z, 10);
    CHECK(ms_read(w, out, 2) == MS_OK && out[0] == -10 && out[1] == 40);
    ms_args args = { .n_in = 1, .n_i = 1, .in = { w }, .i = { MS_F64 } };
    CHECK(ms_call_op(ms_op_find("cast"), &args) == MS_OK);
    printf("operator 0 is %s of %d\n", ms_op_at(0)->name, ms_op_count());
    ms_release(x), ms_release(y), ms_release(z), ms_release(w), ms_release(args.out[0]);
}

static void gradients(void)
{
    const int64_t shape[] = { 2 };
    const double values[] = { 2, 3 };
    double out[2];
    ms_id x = ms_from_data(MS_F32, 1, shape, values);
    CHECK(ms_set_requires_grad(x, 1) == MS_OK);
    double hook = ms_register_hook(x, 1, 0), leaf_hook = ms_register_hook(x, 2, 1);
    ms_hook_remove(hook), ms_hook_remove(leaf_hook);
    ms_id square = ms_call2(ms_op_find("mul"), x, x);
    CHECK(ms_recompute(square) == MS_OK);  // what uses it computes x * x again in backward
    ms_id loss = ms_call1(ms_op_find("sum"), square), none = 0;
    ms_run *run = ms_backward(1, &loss, &none, 0);
    ms_event event;
    CHECK(run && ms_run_next(run, &event) == MS_RUN_DONE);
    ms_run_free(run);
    CHECK(ms_read(ms_get_grad(x), out, 2) == MS_OK && out[0] == 4 && out[1] == 6);
    CHECK(ms_set_grad(x, 0) == MS_OK);
    ms_release(square), ms_release(loss);

    ms_id twice = ms_call1f(ms_op_find("mul_scalar"), x, 2), total = ms_call1(ms_op_find("sum"), twice);
    ms_run *inputs = ms_grad(1, &total, &none, 1, &x, 0, 0);
    CHECK(inputs && ms_run_next(inputs, &event) == MS_RUN_DONE);
    ms_id gradient = ms_run_result(inputs, 0);
    CHECK(ms_read(gradient, out, 2) == MS_OK && out[0] == 2);
    ms_run_free(inputs);
    ms_release(x), ms_release(twice), ms_release(total), ms_release(gradient);
}

static void ranks(void)
{
    CHECK(ms_dist_init("self", 0) == MS_OK);
    CHECK(ms_dist_rank(0) == 0 && ms_dist_size(0) == 1);
    printf("rank %d on this node\n", ms_dist_local_rank());
    const int64_t shape[] = { 2, 3 };
    ms_id weight = ms_param_new(ms_empty(MS_F32, MS_CPU, 2, shape), 1);
    ms_unit_options options = { .device = -1,
                                .layout = MS_LAYOUT_ROWS,
                                .reshard_after_forward = -1,
                                .param_dtype = -1,
                                .reduce_dtype = -1,
                                .output_dtype = -1 };
    double unit = ms_unit_new("layer", 1, &weight, &options);
    CHECK(unit > 0);
    ms_unit_free(unit);
    ms_release(weight);
    ms_dist_finalize();
}

static void files(void)
{
    char name[] = "/tmp/moonshard-tokens-XXXXXX", sum[17];
    int file = mkstemp(name);
    CHECK(file >= 0 && write(file, "to be or not", 12) == 12 && close(file) == 0);
    ms_tokens *tokens = ms_tokens_new();
    CHECK(tokens && ms_tokens_add(tokens, name, 1, 0, 12) == MS_OK);
    ms_tokens_free(tokens);
    unlink(name);
    char *text;
    double size;
    CHECK(ms_file_put(name, "hello", 5) == MS_OK && ms_file_get(name, "example", &text, &size) == MS_OK && size == 5);
    ms_file_sum(text, size, sum);
    ms_file_free(text);

    const int64_t shape[] = { 2 };
    const double values[] = { 1, 2 };
    ms_id t = ms_from_data(MS_F32, 1, shape, values);
    ms_saver *saver = ms_saver_new(name);
    CHECK(saver && ms_saver_metadata(saver, "step", "10") == MS_OK);
    CHECK(ms_saver_declare(saver, "w", MS_F32, 1, shape) == MS_OK && ms_saver_write(saver, "w", t) == MS_OK);
    CHECK(ms_saver_commit(saver) == MS_OK);
    ms_saver_abort(saver);
    ms_loader *loader = ms_loader_open(name, 1);
    const char *other;
    CHECK(loader && ms_loader_find(loader, "w") == 0 && !ms_loader_name(loader, 1, &other));
    ms_id loaded = ms_loader_read(loader, 0, 0, -1);
    CHECK(loaded != 0);
    ms_loader_close(loader);
    ms_release(t), ms_release(loaded);
    unlink(name);
}

int main(void)
{
    engine();
    memory();
    tensors();
    scopes();
    operators();
    gradients();
    files();
    ranks();
    return 0;
}
