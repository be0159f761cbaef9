# SPDX-License-Identifier: MIT
"""scripts/bench/kernels in PyTorch: `peer_rows.py ROWS COLUMNS` prints `seconds S CASE` for each operator on rows, with
one thread and, where PyTorch has a variant that takes it, its output allocated before: the best of 30 turns. Then the
same for a call of small operators."""
import sys
import time
import timeit

import torch

rows, cols = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(1)
aten = torch.ops.aten
x, g, out = torch.randn(rows, cols), torch.randn(rows, cols), torch.empty(rows, cols)
w, b, dw, db = (torch.randn(cols) for _ in range(4))
ids, mean_of_one = torch.randint(0, cols, (rows,)), torch.ones(())
y, p = torch.log_softmax(x, 1), torch.softmax(x, 1)
mean, rstd = aten.native_layer_norm(x, [cols], w, b, 1e-5)[1:]
means, rstds = torch.empty_like(mean), torch.empty_like(rstd)
leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
normed = torch.nn.functional.rms_norm(leaf, [cols], weight, 1e-5)


def cross_entropy_backward():
    picked = aten.nll_loss_backward(mean_of_one, y, ids, None, 1, -100, torch.tensor(float(rows)))
    return aten._log_softmax_backward_data.out(picked, y, 1, torch.float32, out=out)


cases = {
    "softmax": lambda: torch.softmax(x, 1, out=out),
    "log_softmax": lambda: aten._log_softmax.out(x, 1, False, out=out),
    "layer_norm": lambda: aten.native_layer_norm.out(x, [cols], w, b, 1e-5, out0=out, out1=means, out2=rstds),
    "rms_norm": lambda: torch.nn.functional.rms_norm(x, [cols], w, 1e-5),
    "cross_entropy": lambda: torch.nn.functional.cross_entropy(x, ids),
    "softmax_backward": lambda: aten._softmax_backward_data.out(g, p, 1, torch.float32, grad_input=out),
    "log_softmax_backward": lambda: aten._log_softmax_backward_data.out(g, y, 1, torch.float32, out=out),
    "layer_norm_backward": lambda: aten.native_layer_norm_backward.out(
        g, x, [cols], mean, rstd, w, b, [True] * 3, out0=out, out1=dw, out2=db),
    "rms_norm_backward": lambda: torch.autograd.grad(normed, [leaf, weight], g, retain_graph=True),
    "cross_entropy_backward": cross_entropy_backward,
}
best = dict.fromkeys(cases, float("inf"))
for _ in range(30):
    for name, run in cases.items():
        with torch.set_grad_enabled(name == "rms_norm_backward"):
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
a, c, row = torch.randn(8, 32), torch.randn(8, 32), torch.randn(32)
small = {"relu 8x32": lambda: torch.relu(a), "add 8x32": lambda: a + c, "add 8x32 and 32": lambda: a + row}
for name, run in small.items():
    with torch.no_grad():
        best[name] = min(timeit.repeat(run, number=1000, repeat=9)) / 1000
for name, seconds in best.items():
    print("seconds", seconds, name)
