#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes spectra.json: torch.fft, with complex numbers as pairs, CTC, gamma functions, as_strided.  usage: make_spectra.py [OUT_DIR]"""
import os, sys
import torch
import torch.nn.functional as F
from torch import fft
from cases import record, wave

z, line, cube = wave((6, 2), 0.3, -1, 1, 0.9), wave((15,), 0.2, -2, 2, 0.7), wave((3, 4, 5, 2), 0.1, -1, 1, 1.1)
real, odd = wave((3, 8), 0.5, -1, 1, 0.8), wave((2, 7), 0.1, -1, 1, 0.6)


def c(fn):                                      # complex to complex
    return lambda *a: torch.view_as_real(fn(*map(torch.view_as_complex, a)).resolve_conj().contiguous())


def r(fn):                                      # real to complex
    return lambda *a: torch.view_as_real(fn(*a).resolve_conj().contiguous())


def h(fn):                                      # complex to real
    return lambda a: fn(torch.view_as_complex(a))


cases = {
    "fft": (c(fft.fft), [z]),
    "fft_dim": (c(lambda t: fft.fft(t, dim=0, norm="ortho")), [cube]),
    "fft_cut": (c(lambda t: fft.fft(t, n=3, dim=1, norm="forward")), [cube]),
    "fft_long": (c(lambda t: fft.fft(t, n=17)), [z]),
    "ifft": (c(fft.ifft), [cube]),
    "ifft_ortho": (c(lambda t: fft.ifft(t, norm="ortho")), [z]),
    "ifft_forward": (c(lambda t: fft.ifft(t, n=23, norm="forward")), [z]),
    "rfft": (r(fft.rfft), [line]),
    "rfft_even": (r(lambda t: fft.rfft(t, norm="ortho")), [real]),
    "rfft_dim": (r(lambda t: fft.rfft(t, n=5, dim=0, norm="forward")), [real]),
    "irfft": (h(fft.irfft), [z]),
    "irfft_odd": (h(lambda t: fft.irfft(t, n=9, norm="ortho")), [z]),
    "irfft_dim": (h(lambda t: fft.irfft(t, dim=1, norm="forward")), [cube]),
    "hfft": (h(fft.hfft), [z]),
    "hfft_ortho": (h(lambda t: fft.hfft(t, n=7, norm="ortho")), [z]),
    "ihfft": (r(fft.ihfft), [odd]),
    "ihfft_forward": (r(lambda t: fft.ihfft(t, norm="forward")), [odd]),
    "fft2": (c(fft.fft2), [cube]),
    "ifft2": (c(lambda t: fft.ifft2(t, s=(3, 6), dim=(0, 1))), [cube]),
    "fftn": (c(fft.fftn), [cube]),
    "fftn_s": (c(lambda t: fft.fftn(t, s=(5, 3), norm="ortho")), [cube]),
    "ifftn": (c(lambda t: fft.ifftn(t, dim=(0, 2))), [cube]),
    "rfft2": (r(lambda t: fft.rfft2(t, norm="ortho")), [real]),
    "irfft2": (h(fft.irfft2), [cube]),
    "rfftn": (r(fft.rfftn), [wave((2, 3, 4), 0.3)]),
    "irfftn": (h(lambda t: fft.irfftn(t, s=(3, 4, 7), norm="forward")), [cube]),
    "fftfreq": (lambda t: fft.fftfreq(7, 0.5) + 0 * t, [odd[0]]),
    "fftfreq_even": (lambda t: fft.fftfreq(8) + 0 * t, [real[0]]),
    "rfftfreq": (lambda t: fft.rfftfreq(13, 2) + 0 * t, [odd[0]]),
    "fftshift": (fft.fftshift, [odd]),
    "fftshift_dim": (lambda t: fft.fftshift(t, dim=1), [odd]),
    "fftshift_complex": (c(fft.fftshift), [cube]),
    "ifftshift": (fft.ifftshift, [odd]),
    "abs": (h(torch.abs), [z]),
    "angle": (h(torch.angle), [z]),
    "mul": (c(lambda a, b: a * b), [z, wave((6, 2), 1.3)]),
    "conj": (c(torch.conj), [z]),
}

targets = torch.tensor([[1, 3, 2, 2], [4, 4, 1, 0], [2, 0, 0, 0]])
flat = torch.tensor([1, 3, 2, 2, 4, 4, 1, 2])
times, sizes = torch.tensor([8, 6, 5]), torch.tensor([4, 3, 1])
logits = wave((8, 3, 5), 0.4, -2, 2, 1.7)
short = torch.tensor([3, 6, 5])                 # too short for the first target


def ctc(y=targets, times=times, **o):
    return lambda t: F.ctc_loss(t.log_softmax(-1), y, times, sizes, **o)


cases |= {
    "ctc": (ctc(), [logits]),
    "ctc_sum": (ctc(reduction="sum"), [logits]),
    "ctc_none": (ctc(reduction="none"), [logits]),
    "ctc_flat": (ctc(flat), [logits]),
    "ctc_blank": (lambda t: F.ctc_loss(t.log_softmax(-1), targets - 1, times, torch.tensor([4, 3, 1]), blank=4), [logits]),
    "ctc_short": (ctc(times=short, reduction="none", zero_infinity=True), [logits]),
    "ctc_one": (lambda t: F.ctc_loss(t.log_softmax(-1), targets[0], torch.tensor(8), torch.tensor(4)), [logits[:, 0].clone()]),
    "ctc_empty": (lambda t: F.ctc_loss(t.log_softmax(-1), targets, times, torch.tensor([0, 3, 0])), [logits]),
}
positive, negative = wave((3, 5), 0.3, 0.2, 6, 0.9), wave((4,), 0.2, -3.7, -0.2, 1.1)
cases |= {
    "lgamma": (torch.lgamma, [positive]),
    "lgamma_negative": (torch.lgamma, [negative]),
    "digamma": (lambda t: torch.digamma(t.detach()), [positive]),       # PyTorch's trigamma has only 9 digits
    "digamma_negative": (lambda t: torch.digamma(t.detach()), [negative]),
    "polygamma_2": (lambda t: torch.polygamma(2, t), [positive]),
    "polygamma_5": (lambda t: torch.polygamma(5, t), [positive]),
    "mvlgamma": (lambda t: torch.mvlgamma(t, 3), [positive + 1.5]),
    "as_strided": (lambda t: t.as_strided((3, 4, 2), (2, 1, 3), 1), [positive]),
}
out = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
record(os.path.join(out, "spectra.json"), cases)
