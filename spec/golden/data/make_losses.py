#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes losses.json: losses and distances.  usage: make_losses.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from cases import record, wave

a, b, c = wave((4, 3), 0.3, -2, 2, 0.7), wave((4, 3), 1.4, -1.5, 2.2, 0.9), wave((4, 3), 2.2, -1, 1, 1.3)
p, q = wave((4, 3), 0.2, 0.05, 0.95, 0.7), wave((4, 3), 1.2, 0, 1, 0.9)
logits, counts, var = wave((4, 5), 0.4, -3, 3, 0.9), torch.tensor([[0.0, 1, 2], [5, 3, 0], [1, 1, 4], [2, 7, 0]]), wave((4, 3), 0.6, 0.1, 2, 0.7)
ids, weight = torch.tensor([1, 0, 4, 2]), torch.tensor([0.5, 1, 2, 0.7, 1.5])
factors = torch.tensor([[1, 2, 0], [0.5, 1, 3], [2, 2, 1], [0, 1, 0.25]])
sign = torch.tensor([1.0, -1, -1, 1])
signs = torch.tensor([[1.0, -1, 1], [-1, 1, 1], [1, 1, -1], [-1, -1, 1]])
image, classes = wave((2, 3, 2, 2), 0.4, -3, 3, 0.9), torch.tensor([[[0, 2], [1, 1]], [[2, 2], [0, -100]]])
cases = {
    "l1": (F.l1_loss, [a, b]), "l1_sum": (lambda x, y: F.l1_loss(x, y, reduction="sum"), [a, b]), "l1_none": (lambda x, y: F.l1_loss(x, y, reduction="none"), [a, b]),
    "smooth_l1": (F.smooth_l1_loss, [a, b]), "smooth_l1_beta": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.4), [a, b]), "smooth_l1_zero": (lambda x, y: F.smooth_l1_loss(x, y, beta=0), [a, b]),
    "mse_weight": (lambda x, y: F.mse_loss(x, y, weight=factors), [a, b]), "l1_weight": (lambda x, y: F.l1_loss(x, y, weight=factors), [a, b]),
    "mse_weight_none": (lambda x, y: F.mse_loss(x, y, weight=factors, reduction="none"), [a, b]), "l1_weight_sum": (lambda x, y: F.l1_loss(x, y, weight=factors, reduction="sum"), [a, b]),
    "huber_weight": (lambda x, y: F.huber_loss(x, y, delta=0.4, weight=factors), [a, b]),
    "huber": (F.huber_loss, [a, b]), "huber_delta": (lambda x, y: F.huber_loss(x, y, delta=0.4), [a, b]),
    "bce": (F.binary_cross_entropy, [p, q]), "bce_weight": (lambda x, y: F.binary_cross_entropy(x, y, weight=torch.tensor([0.5, 1, 2])), [p, q]),
    "bce_logits": (F.binary_cross_entropy_with_logits, [a, q]),
    "bce_logits_weights": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=torch.tensor([0.5, 1, 2]), pos_weight=torch.tensor([3, 1, 0.5])), [a, q]),
    "nll": (lambda x: F.nll_loss(x, ids), [logits]), "nll_weight": (lambda x: F.nll_loss(x, ids, weight), [logits]), "nll_none": (lambda x: F.nll_loss(x, ids, weight, reduction="none"), [logits]),
    "nll_ignore": (lambda x: F.nll_loss(x, ids, weight, ignore_index=4), [logits]), "nll_image": (lambda x: F.nll_loss(x, classes), [image]),
    "cross_entropy": (lambda x: F.cross_entropy(x, ids), [logits]),
    "cross_entropy_smoothing": (lambda x: F.cross_entropy(x, ids, weight, label_smoothing=0.1), [logits]),
    "cross_entropy_ignore": (lambda x: F.cross_entropy(x, ids, weight, ignore_index=4, label_smoothing=0.2, reduction="none"), [logits]),
    "cross_entropy_image": (lambda x: F.cross_entropy(x, classes, label_smoothing=0.1, reduction="sum"), [image]),
    "cross_entropy_shares": (lambda x, y: F.cross_entropy(x, torch.softmax(y, 1), weight, label_smoothing=0.1), [logits, logits.flip(0)]),
    "kl": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [torch.log(p), q]), "kl_mean": (lambda x, y: F.kl_div(x, y), [torch.log(p), q]),
    "kl_log": (lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True), [torch.log(p), torch.log(p.flip(0))]),
    "poisson": (lambda x: F.poisson_nll_loss(x, counts), [a]), "poisson_full": (lambda x: F.poisson_nll_loss(x, counts, log_input=False, full=True), [var]),
    "gaussian": (F.gaussian_nll_loss, [a, b, var]), "gaussian_full": (lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True, eps=0.5, reduction="sum"), [a, b, var]),
    "multi_margin": (lambda x: F.multi_margin_loss(x, ids), [logits]), "multi_margin_square": (lambda x: F.multi_margin_loss(x, ids, p=2, margin=0.5, weight=weight), [logits]),
    "cosine_embedding": (lambda x, y: F.cosine_embedding_loss(x, y, sign), [a, b]), "cosine_embedding_margin": (lambda x, y: F.cosine_embedding_loss(x, y, sign, margin=0.3, reduction="none"), [a, b]),
    "margin_ranking": (lambda x, y: F.margin_ranking_loss(x, y, signs, margin=0.5), [a, b]), "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, signs), [a]),
    "soft_margin": (lambda x: F.soft_margin_loss(x, signs), [a]), "triplet": (F.triplet_margin_loss, [a, b, c]),
    "triplet_swap": (lambda x, y, z: F.triplet_margin_loss(x, y, z, margin=2, p=1, swap=True, reduction="none"), [a, b, c]),
    "normalize": (F.normalize, [a]), "normalize_first": (lambda x: F.normalize(x, p=1, dim=0), [a]), "cosine_similarity": (F.cosine_similarity, [a, b]),
    "pairwise_distance": (F.pairwise_distance, [a, b]), "pairwise_distance_p": (lambda x, y: F.pairwise_distance(x, y, p=1, keepdim=True), [a, b]),
}
if __name__ == "__main__":
    record(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(__file__), "losses.json"), cases)
