#!/usr/bin/env python3
"""Writes models.json: the outputs of small models in float64. The weights are those of `fill` (see make_golden.py), by their position in
named_parameters; the Llama is written here after the papers that lua/moonshard/models/llama.lua names.  usage: make_models.py [OUT_DIR]"""
import json, math, os, sys
import torch
from torch import nn
import torch.nn.functional as F
from torchvision.models import VisionTransformer

torch.set_default_dtype(torch.float64)


def wave(shape, offset, c=0.0, a=1.0, freq=0.13):
    n = torch.Size(shape).numel()
    return (c + a * torch.sin(freq * torch.arange(n) + offset)).reshape(shape)


def fill(model):
    ones = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    with torch.no_grad():
        for k, (_, p) in enumerate(model.named_parameters()):
            matrix = p.dim() > 1
            c, a = (0.0, 0.5 / math.sqrt(p.numel() / p.shape[0])) if matrix else (1.0 if id(p) in ones else 0.0, 0.1)
            p.copy_(wave(tuple(p.shape), 1.3 * k + 0.5, c, a, 0.37))
    return model.eval()


def ids(shape, vocab):
    return ((7 * torch.arange(torch.Size(shape).numel())) % vocab).reshape(shape)


class Lstm(nn.Module):
    def __init__(self, vocab, dim, layers):
        super().__init__()
        self.token, self.lstm, self.head = nn.Embedding(vocab, dim), nn.LSTM(dim, dim, layers, batch_first=True), nn.Linear(dim, vocab)

    def forward(self, x):
        y, (h, c) = self.lstm(self.token(x))
        return [self.head(y), h, c]


class Vae(nn.Module):
    def __init__(self, size, hidden, latent):
        super().__init__()
        self.encoder, self.mean, self.log_var = nn.Linear(size, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self, x):
        h = F.relu(self.encoder(x))
        mean, log_var = self.mean(h), self.log_var(h)
        y = self.decoder(mean)
        loss = F.binary_cross_entropy_with_logits(y, x, reduction="sum") - 0.5 * (1 + log_var - mean ** 2 - log_var.exp()).sum()
        return [y, mean, log_var, loss / x.shape[0]]


def rotate(x):
    """Hugging Face's order: feature i is paired with i + d / 2."""
    d, t = x.shape[-1], x.shape[-2]
    angle = torch.outer(torch.arange(t, dtype=x.dtype), 10000.0 ** (-torch.arange(0, d, 2) / d))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


class Block(nn.Module):
    def __init__(self, dim, heads, kv, inner):
        super().__init__()
        self.heads, self.kv, d = heads, kv, dim // heads
        attn = self.self_attn = nn.Module()
        for name, a, b in (("q_proj", dim, dim), ("k_proj", dim, kv * d), ("v_proj", dim, kv * d), ("o_proj", dim, dim)):
            setattr(attn, name, nn.Linear(a, b, bias=False))
        mlp = self.mlp = nn.Module()
        for name, a, b in (("gate_proj", dim, inner), ("up_proj", dim, inner), ("down_proj", inner, dim)):
            setattr(mlp, name, nn.Linear(a, b, bias=False))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)

    def forward(self, x):
        b, t, _ = x.shape
        y, attn, mlp = self.input_layernorm(x), self.self_attn, self.mlp
        split = lambda z, n: z.reshape(b, t, n, -1).transpose(1, 2)
        q, k, v = rotate(split(attn.q_proj(y), self.heads)), rotate(split(attn.k_proj(y), self.kv)), split(attn.v_proj(y), self.kv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        y = self.post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


class Llama(nn.Module):
    def __init__(self, vocab, dim, layers, heads, kv, inner):
        super().__init__()
        model = self.model = nn.Module()
        model.embed_tokens = nn.Embedding(vocab, dim)
        model.layers = nn.Sequential(*[Block(dim, heads, kv, inner) for _ in range(layers)])
        model.norm = nn.RMSNorm(dim, 1e-5)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x):
        m = self.model
        return [self.lm_head(m.norm(m.layers(m.embed_tokens(x))))]


def pictures():
    return wave((2, 3, 8, 8), 0.2)


models = {
    "mlp": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), wave((4, 5), 0.0)),
    "lstm_lm": (Lstm(11, 6, 2), ids((2, 5), 11)), "vae": (Vae(12, 8, 3), wave((4, 12), 0.0, 0.5, 0.5)),
    "vit": (VisionTransformer(image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=12, num_classes=5), pictures()),
    "llama": (Llama(17, 16, 2, 4, 2, 24), ids((2, 6), 17)),
}
out = {}
for name, (model, x) in models.items():
    with torch.no_grad():
        y = fill(model)(x)
    y = y if isinstance(y, list) else [y]
    out[name] = {"names": [n for n, _ in model.named_parameters()], "outputs": [t.reshape(-1).tolist() for t in y]}
with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "models.json"), "w") as f:
    json.dump({"phase": 0, "torch": torch.__version__.split("+")[0], "cases": out}, f, separators=(",", ":"))
    f.write("\n")
