// SPDX-License-Identifier: MIT
// cpu/product/conv_depthwise.c -- convolutions whose groups have one input channel (depthwise convolutions). A channel
// is copied into a plane with its padding, in phases of the stride along columns, so that a kernel element multiplies
// adjacent elements; 16 outputs are summed at a time, over the kernel's elements in order. The gradient of the image is
// such a convolution, too: of the output's gradient, spread by the strides, with the reversed kernel. Half types are
// computed in float32. Bits depend neither on threads nor on the instruction set.
#include "cpu/product/conv_work.h"
#include "cpu/rows/rows.h"

// A correlation over three dimensions: output o reads place o * stride + k * dilation of a plane with element k of the
// kernel; element i of the input lies at place i * spread + pad.
typedef struct {
    int64_t in[3], out[3], kernel[3], stride[3], pad[3], dilation[3], spread[3];
} correlation;

typedef struct {
    const ms_conv_work *c;
    correlation k;
    int64_t outputs;             // output channels of each input channel
    int64_t rows[2], each, row;  // the plane's depth and height; columns of a phase; elements of a row
    int64_t elements, *offset;   // of the kernel; where in the plane each is, for the first output of a row
    int64_t *start;              // where in the plane each row of outputs begins
    int64_t task;                // the cost of a channel
    char *room;
    size_t room_bytes;  // for each thread: a plane, a row, the kernel
} depthwise;

#define BODY "cpu/product/conv_depthwise_body.h"
#include "cpu/both_types.h"

enum { LONGEST = 1 << 20 };

static int64_t product_of_sizes(const int64_t n[3]) { return n[0] * n[1] * n[2]; }

ms_status ms__conv_depthwise(const ms_conv_work *c, bool *done)
{
    const ms_conv *v = c->v;
    *done = false;
    if (v->groups != v->in || v->groups < 2) return MS_OK;
    correlation k = { .in = { v->d, v->h, v->w },
                      .out = { v->od, v->oh, v->ow },
                      .kernel = { v->kd, v->kh, v->kw },
                      .stride = { v->sd, v->sh, v->sw },
                      .pad = { v->front, v->top, v->left },
                      .dilation = { v->dd, v->dh, v->dw },
                      .spread = { 1, 1, 1 } };
    if (c->result == MS_CONV_IMAGE)
        for (int d = 0; d < 3; d++) {
            int64_t size = k.in[d];
            k.in[d] = k.out[d], k.out[d] = size;
            k.spread[d] = k.stride[d], k.stride[d] = 1;
            k.pad[d] = (k.kernel[d] - 1) * k.dilation[d] - k.pad[d];
        }
    depthwise j = { .c = c, .k = k, .outputs = v->out / v->groups, .elements = product_of_sizes(k.kernel) };
    for (int d = 0; d < 2; d++) j.rows[d] = (k.out[d] - 1) * k.stride[d] + (k.kernel[d] - 1) * k.dilation[d] + 1;
    j.each = (k.out[2] + 15) / 16 * 16 + (k.kernel[2] - 1) * k.dilation[2] / k.stride[2] + 1;
    j.row = j.each * k.stride[2];
    // Planes that are mostly padding are left to products.
    if (j.rows[0] > LONGEST || j.rows[1] > LONGEST || j.row > LONGEST) return MS_OK;
    int64_t plane = j.rows[0] * j.rows[1] * j.row, in = product_of_sizes(k.in), out = product_of_sizes(k.out);
    if (plane > 4 * (in > out ? in : out) + 4096) return MS_OK;
    size_t size = c->dtype == MS_F64 ? 8 : 4, threads = (size_t)ms_num_threads();
    j.room_bytes = ((size_t)(plane + k.out[2] + 16 + k.in[2] + 2 * j.elements) * size + 63) / 64 * 64;
    int64_t rows = k.out[0] * k.out[1];
    ms_block *room;
    MS_TRY(ms__alloc_scratch(&room, j.room_bytes * threads + (size_t)(j.elements + rows) * sizeof(int64_t), c->what));
    j.room = room->data;
    j.offset = (int64_t *)(j.room + j.room_bytes * threads);
    j.start = j.offset + j.elements;
    for (int64_t r = 0; r < rows; r++)
        j.start[r] = (r / k.out[1] * k.stride[0] * j.rows[1] + r % k.out[1] * k.stride[1]) * j.row;
    for (int64_t e = 0; e < j.elements; e++) {
        int64_t x = e % k.kernel[2] * k.dilation[2], y = e / k.kernel[2] % k.kernel[1] * k.dilation[1],
                z = e / k.kernel[2] / k.kernel[1] * k.dilation[0];
        j.offset[e] = (z * j.rows[1] + y) * j.row + x % k.stride[2] * j.each + x / k.stride[2];
    }
    j.task = plane + out * j.elements * j.outputs;
    bool weight = c->result == MS_CONV_WEIGHT;
    int64_t tasks = weight ? v->in : v->n * v->in, least = weight || j.task >= 65536 ? 1 : 65536 / j.task;
    if (weight) j.task *= v->n;
    ms__parallel(tasks * j.task, least * j.task,
                 c->dtype == MS_F64 ? (weight ? kernels_f64 : channels_f64)
                 : weight           ? kernels_f32
                                    : channels_f32,
                 &j);
    ms__free(room);
    *done = true;
    return MS_OK;
}
