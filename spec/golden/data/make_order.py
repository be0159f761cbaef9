#!/usr/bin/env python3
"""Writes order.json: sorting, searching, scans, and elements by position.  usage: make_order.py [OUT_DIR]"""
import os, sys
import torch
from cases import record, wave

nan, inf = float("nan"), float("inf")
x, cube, line = wave((3, 5), 0.3, -2.2, 2.2, 0.7), wave((2, 3, 4), 0.1, -2, 2, 0.7), wave((12,), 0.4, -3, 3, 1.3)
small = wave((2, 3), 0.9, -1, 1, 0.8)
zeros = torch.tensor([[1.5, 0.0, -2.0, 0.5, 3.0], [0.0, 2.0, 0.0, -1.0, 4.0], [1.0, 2.0, -3.0, 0.25, 0.0]])
whole = lambda t: (t * 1.4).round()            # with equal elements
ids = lambda *a: torch.tensor(*a)
rows, mask = ids([2, 0, 2]), x > 0.3
tie_ids = ids([[0, 1, 1, 0, 2], [2, 2, 1, 0, 0]])


def holes(t):                                   # every fourth element is nan
    return torch.where(torch.arange(t.numel()).reshape(t.shape) % 4 == 1, nan, t)


def pair(fn):                                   # values and positions as one tensor
    return lambda *a: (lambda r: torch.stack((r[0], r[1].double()), -1))(fn(*a))


def written(t, key, v):
    y = t * 1
    y[key] = v
    return y


def reduced(how, include=True):
    return lambda t, s: t.scatter_reduce(0, tie_ids, s, how, include_self=include)


cases = {
    "sort": (pair(lambda t: torch.sort(t, 1)), [cube]),
    "sort_down": (pair(lambda t: torch.sort(t, 0, descending=True)), [x]),
    "sort_equal": (pair(lambda t: torch.sort(whole(t), stable=True)), [line]),
    "sort_equal_down": (pair(lambda t: torch.sort(whole(t), stable=True, descending=True)), [line]),
    "sort_nan": (lambda t: torch.nan_to_num(torch.sort(holes(t), 1)[0], 7.0), [x]),
    "sort_nan_down": (lambda t: torch.nan_to_num(torch.sort(holes(t), 1, descending=True)[0], 7.0), [x]),
    "argsort": (lambda t: torch.argsort(t, -1), [cube]),
    "msort": (torch.msort, [x]),
    "topk": (pair(lambda t: torch.topk(t, 3)), [x]),
    "topk_smallest": (pair(lambda t: torch.topk(t, 2, 0, largest=False)), [x]),
    "topk_nan": (lambda t: torch.nan_to_num(torch.topk(holes(t), 3)[0], 7.0), [line]),
    "kthvalue": (pair(lambda t: torch.kthvalue(t, 2)), [x]),
    "kthvalue_first": (pair(lambda t: torch.kthvalue(t, 3, 0, keepdim=True)), [x]),
    "median": (torch.median, [line]),
    "median_rows": (pair(lambda t: torch.median(t, 1)), [x]),
    "median_columns": (pair(lambda t: torch.median(t, 0, keepdim=True)), [cube]),
    "median_nan": (lambda t: torch.nan_to_num(torch.median(holes(t), 0)[0], 7.0), [x]),
    "nanmedian": (lambda t: torch.nanmedian(holes(t)), [line]),
    "nanmedian_rows": (lambda t: torch.nanmedian(holes(t), 1)[0], [x]),
    "mode": (lambda t: torch.mode(whole(t))[0], [cube]),
    "mode_first": (lambda t: torch.mode(whole(t), 0, keepdim=True)[0], [x]),
    **{"quantile_" + how: (lambda t, how=how: torch.quantile(t, torch.tensor([0.1, 0.5, 0.77]), 1, interpolation=how), [cube])
       for how in ("linear", "lower", "higher", "midpoint", "nearest")},
    "quantile_all": (lambda t: torch.quantile(t, 0.3), [x]),
    "quantile_keepdim": (lambda t: torch.quantile(t, 0.6, 0, keepdim=True), [x]),
    "quantile_keepdim_all": (lambda t: torch.quantile(t, torch.tensor([0.25, 1.0]), keepdim=True), [x]),
    "quantile_nan": (lambda t: torch.nan_to_num(torch.quantile(holes(t), 0.6, 0), 7.0), [x]),
    "nanquantile": (lambda t: torch.nanquantile(holes(t), torch.tensor([0.0, 0.4]), 1), [x]),
    "unique": (lambda t: (lambda t: torch.unique(whole(t)))(t.detach()), [cube]),
    "unique_inverse": (lambda t: (lambda t: torch.unique(whole(t), return_inverse=True)[1])(t.detach()), [cube]),
    "unique_counts": (lambda t: (lambda t: torch.unique(whole(t), return_counts=True)[1])(t.detach()), [cube]),
    "unique_rows": (lambda t: (lambda t: torch.unique(torch.cat((t, t[:2] + 0, t)).round(), dim=0))(t.detach()), [x]),
    "unique_rows_inverse": (lambda t: (lambda t: torch.unique(torch.cat((t, t[:2] + 0, t)).round(), dim=0, return_inverse=True)[1])(t.detach()), [x]),
    "unique_columns_counts": (lambda t: (lambda t: torch.unique(torch.cat((t, t), 1), dim=1, return_counts=True)[1])(t.detach()), [x]),
    "unique_consecutive": (lambda t: (lambda t: torch.unique_consecutive(t.round()))(t.detach()), [line]),
    "unique_consecutive_counts": (lambda t: (lambda t: torch.unique_consecutive((t / 2).round(), return_counts=True)[1])(t.detach()), [cube]),
    "unique_consecutive_inverse": (lambda t: (lambda t: torch.unique_consecutive(torch.cat((t, t[2:], t)), dim=0, return_inverse=True)[1])(t.detach()), [x]),
    "nonzero": (lambda t: torch.nonzero(whole(t)), [cube]),
    "masked_select": (lambda t: torch.masked_select(t, t[0] > 0), [cube]),
    "masked_scatter": (lambda t, s: t.masked_scatter(t > 0, s), [x, line]),
    "searchsorted": (lambda t, v: torch.searchsorted(torch.sort(t, 1)[0].detach(), v.detach()), [x, wave((3, 4), 0.8, -3, 3, 0.9)]),
    "searchsorted_right": (lambda t: torch.searchsorted(torch.tensor([-1.0, 0.0, 0.0, 1.0]), whole(t).detach(), right=True), [cube]),
    "bucketize": (lambda t: torch.bucketize(whole(t).detach(), torch.tensor([-1.0, 0.0, 1.0])), [cube]),
    "bucketize_right": (lambda t: torch.bucketize(whole(t).detach(), torch.tensor([-1.0, 0.0, 1.0]), right=True), [cube]),
    "cumprod": (lambda t: torch.cumprod(t, 1), [cube]),
    "cumprod_zeros": (lambda t: torch.cumprod(t, 1), [zeros]),
    "cummax": (pair(lambda t: torch.cummax(whole(t), 1)), [cube]),
    "cummin": (pair(lambda t: torch.cummin(t, 0)), [x]),
    "logcumsumexp": (lambda t: torch.logcumsumexp(t * 30, 1), [cube]),
    "logcumsumexp_inf": (lambda t: torch.logcumsumexp(torch.cat((torch.full((2,), -inf), t)), 0)[2:], [line]),
    "index_add": (lambda t, s: t.index_add(0, rows, s, alpha=-1.5), [x, wave((3, 5), 1.1)]),
    "index_add_columns": (lambda t, s: t.index_add(1, ids([4, 1]), s), [x, wave((3, 2), 1.1)]),
    "index_copy": (lambda t, s: t.index_copy(1, ids([2, 0]), s), [cube, wave((2, 2, 4), 1.1)]),
    "index_fill": (lambda t: t.index_fill(1, ids([2, 0]), 0.5), [cube]),
    "index_put": (lambda t, s: t.index_put((rows, ids([1, 1, 3])), s), [x, wave((3,), 1.1)]),
    "index_put_accumulate": (lambda t, s: t.index_put((rows,), s, accumulate=True), [x, wave((3, 5), 1.1)]),
    "take": (lambda t: torch.take(t, ids([[0, 23], [5, 5]])), [cube]),
    "put": (lambda t, s: t.put(ids([[3, 1], [7, 0]]), s), [x, wave((2, 2), 1.1)]),
    "put_accumulate": (lambda t, s: t.put(ids([3, 3, 7]), s, accumulate=True), [x, wave((3,), 1.1)]),
    "scatter_add": (lambda t, s: t.scatter_add(0, tie_ids, s), [x, wave((2, 5), 1.1)]),
    **{"scatter_reduce_" + how: (reduced(how), [x, wave((2, 5), 1.1)]) for how in ("sum", "prod", "mean", "amax", "amin")},
    **{"scatter_reduce_%s_alone" % how: (reduced(how, False), [x, wave((2, 5), 1.1)]) for how in ("sum", "prod", "mean", "amax", "amin")},
    "scatter_reduce_zeros": (reduced("prod"), [zeros, zeros[1:] * 1.5]),
    "scatter_reduce_ties": (lambda t, s: t.round().scatter_reduce(0, tie_ids, s * 0, "amax") + t.scatter_reduce(0, tie_ids, s * 0 + t[:2], "amin"),
                            [x, wave((2, 5), 1.1)]),
    "unfold": (lambda t: t.unfold(1, 3, 2), [x]),
    "unfold_first": (lambda t: t.unfold(0, 2, 1), [cube]),
    "read_mask": (lambda t: t[mask], [x]),
    "read_row_mask": (lambda t: t[:, ids([True, False, True])], [cube]),
    "read_ids": (lambda t: t[rows], [x]),
    "read_ids_last": (lambda t: t[0, :, ids([[3, 1], [0, 0]])], [cube]),
    "read_two": (lambda t: t[ids([0, 1]), :, ids([[3], [1]])], [cube]),
    "read_beside": (lambda t: t[:, ids([2, 0]), ids([1, 3])], [cube]),
    "read_mask_ids": (lambda t: t[ids([True, False]), ids([0, 2])], [cube]),
    "read_steps": (lambda t: t[::2, 1:5:3], [x]),
    "write_part": (lambda t, s: written(t, (slice(0, 2), slice(1, 4)), s), [x, small]),
    "write_mask": (lambda t: written(t, mask, 0.5), [x]),
    "write_mask_values": (lambda t, s: written(t, mask, s[: int(mask.sum())]), [x, line]),
    "write_ids": (lambda t, s: written(t, ids([2, 0]), s[0]), [x, wave((1, 5), 1.1)]),
    "write_two": (lambda t, s: written(t, (ids([0, 1]), slice(None), ids([3, 1])), s), [cube, small]),
}

if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "order.json"), cases)
