// SPDX-License-Identifier: MIT
// cpu/special/special.h -- kernels of Fourier transforms along a dimension, of the CTC loss, and of gamma and Poisson
// numbers.
#ifndef MS_CPU_SPECIAL_H
#define MS_CPU_SPECIAL_H

#include "ops/op.h"

// Complex numbers are pairs in the last dimension. Integers: the dimension, which is never that of the pairs, then
// those that runtime/moonshard.h lists.
ms_status ms__cpu_fft_complex(ms_call *c);
ms_status ms__cpu_fft_real(ms_call *c);
ms_status ms__cpu_fft_half(ms_call *c);

ms_status ms__cpu_ctc_loss(ms_call *c);
ms_status ms__cpu_ctc_loss_backward(ms_call *c);

ms_status ms__cpu_gamma_draw(ms_call *c);
ms_status ms__cpu_gamma_draw_backward(ms_call *c);
ms_status ms__cpu_poisson_draw(ms_call *c);

#endif
