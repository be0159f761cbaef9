-- SPDX-License-Identifier: MIT
--- ms.fft, ctc_loss, gamma functions and as_strided, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local fft, F = ms.fft, ms.nn.F

local function with(name, given) return function(x) return fft[name](x, given) end end
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

local targets, flat = ids { { 1, 3, 2, 2 }, { 4, 4, 1, 0 }, { 2, 0, 0, 0 } }, ids { 1, 3, 2, 2, 4, 4, 1, 2 }
local function ctc(y, given, times)
  return function(t) return F.ctc_loss(t:log_softmax(-1), y, times or { 8, 6, 5 }, { 4, 3, 1 }, given) end
end

local cases = {
  fft = fft.fft, ifft = fft.ifft, rfft = fft.rfft, irfft = fft.irfft, hfft = fft.hfft, ihfft = fft.ihfft,
  fft_dim = with("fft", { dim = 1, norm = "ortho" }),
  fft_cut = with("fft", { n = 3, dim = 2, norm = "forward" }),
  fft_long = with("fft", { n = 17 }),
  ifft_ortho = with("ifft", { norm = "ortho" }),
  ifft_forward = with("ifft", { n = 23, norm = "forward" }),
  rfft_even = with("rfft", { norm = "ortho" }),
  rfft_dim = with("rfft", { n = 5, dim = 1, norm = "forward" }),
  irfft_odd = with("irfft", { n = 9, norm = "ortho" }),
  irfft_dim = with("irfft", { dim = 2, norm = "forward" }),
  hfft_ortho = with("hfft", { n = 7, norm = "ortho" }),
  ihfft_forward = with("ihfft", { norm = "forward" }),
  fft2 = fft.fft2,
  ifft2 = with("ifft2", { s = { 3, 6 }, dim = { 1, 2 } }),
  fftn = fft.fftn,
  fftn_s = with("fftn", { s = { 5, 3 }, norm = "ortho" }),
  ifftn = with("ifftn", { dim = { 1, 3 } }),
  rfft2 = with("rfft2", { norm = "ortho" }),
  irfft2 = fft.irfft2, rfftn = fft.rfftn,
  irfftn = with("irfftn", { s = { 3, 4, 7 }, norm = "forward" }),
  fftfreq = function(t) return fft.fftfreq(7, { d = 0.5, dtype = t.dtype }) + 0 * t end,
  fftfreq_even = function(t) return fft.fftfreq(8, { dtype = t.dtype }) + 0 * t end,
  rfftfreq = function(t) return fft.rfftfreq(13, { d = 2, dtype = t.dtype }) + 0 * t end,
  fftshift = fft.fftshift, ifftshift = fft.ifftshift,
  fftshift_dim = with("fftshift", { dim = 2 }),
  fftshift_complex = with("fftshift", { complex = true }),
  abs = fft.abs, angle = fft.angle, mul = fft.mul, conj = fft.conj,
  ctc = ctc(targets), ctc_sum = ctc(targets, { reduction = "sum" }), ctc_none = ctc(targets, { reduction = "none" }),
  ctc_flat = ctc(flat),
  ctc_blank = ctc(targets - 1, { blank = 4 }),
  ctc_short = ctc(targets, { reduction = "none", zero_infinity = true }, { 3, 6, 5 }),
  ctc_one = function(t) return F.ctc_loss(t:log_softmax(-1), targets[1], 8, 4) end,
  lgamma = ms.lgamma, lgamma_negative = ms.lgamma,
  digamma = function(t) return t:detach():digamma() end,
  digamma_negative = function(t) return t:detach():digamma() end,
  polygamma_2 = function(t) return t:polygamma(2) end,
  polygamma_5 = function(t) return t:polygamma(5) end,
  mvlgamma = function(t) return t:mvlgamma(3) end,
  as_strided = function(t) return t:as_strided({ 3, 4, 2 }, { 2, 1, 3 }, 1) end,
  ctc_empty = function(t) return F.ctc_loss(t:log_softmax(-1), targets, { 8, 6, 5 }, { 0, 3, 0 }) end,
}

golden_cases("spectra", cases)
