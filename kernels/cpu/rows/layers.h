// SPDX-License-Identifier: MIT
// cpu/rows/layers.h -- declares the CPU kernels of layers (softmax, norms, losses, embedding, dropout, attention,
// recurrent layers, convolutions, pooling, resampling, im2col) that the operators in kernels/rows use.
#ifndef MS_LAYERS_H
#define MS_LAYERS_H

#include "ops/op.h"

// clang-format off
#define MS_CPU_LAYERS(X)                                                                                     \
    X(softmax) X(softmax_backward) X(log_softmax) X(log_softmax_backward)                                    \
    X(layer_norm) X(layer_norm_backward) X(rms_norm) X(rms_norm_backward)                                    \
    X(add_layer_norm) X(add_rms_norm) X(rotary)                                                              \
    X(cross_entropy) X(cross_entropy_backward) X(mse_loss) X(mse_loss_backward)                              \
    X(linear_cross_entropy) X(linear_cross_entropy_backward)                                                 \
    X(embedding) X(embedding_backward) X(dropout) X(attention) X(attention_backward)                         \
    X(rnn) X(rnn_backward) X(lstm) X(lstm_backward) X(gru) X(gru_backward)                                   \
    X(batch_norm) X(batch_norm_backward) X(batch_norm_stats)                                                 \
    X(conv) X(conv_backward) X(conv_transpose) X(conv_transpose_backward)                                    \
    X(max_pool) X(max_pool_backward) X(avg_pool) X(avg_pool_backward)                                        \
    X(resample) X(resample_backward) X(im2col) X(col2im)
// clang-format on

#define MS_DECLARE_LAYER(name) ms_status ms__cpu_##name(ms_call *c);
MS_CPU_LAYERS(MS_DECLARE_LAYER)

#endif
