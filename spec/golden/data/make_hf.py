#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes small models of transformers 5.24 and writes to hf.json, for each: its config.json, the names and shapes of the tensors in its model.safetensors, and what it
computes. The tensors' values follow from their place among the sorted names (see hf_values.py), so the specs make the same file.  usage: make_hf.py [OUT_DIR [CASE...]]"""
import json, logging, os, sys, tempfile
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from hf_values import filled, values

here = os.path.dirname(os.path.abspath(__file__))
out = os.path.join(sys.argv[1] if len(sys.argv) > 1 else here, "hf.json")
T.utils.logging.set_verbosity_error()
T.utils.logging.disable_progress_bar()
VOCAB, B, S = 32, 2, 8


def ids(n=S, step=7):
    return (torch.arange(B * n).reshape(B, n) * step + 3) % VOCAB


def flat(t): return [float("%.7g" % x) for x in t.detach().double().flatten().tolist()]


def causal(model):
    x = ids()
    r = model(x, labels=x)
    r.loss.backward()
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(x, attention_mask=mask, position_ids=places).logits[:, -1]
        greedy = model.generate(x, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return dict(logits=flat(r.logits), loss=r.loss.item(), padded=flat(padded), greedy=greedy[:, S:].flatten().tolist())


def padding():
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, 5:] = 0
    return mask


def encoder(labels=None):
    def run(model):
        x = ids()
        if labels is None:
            r = model(x, attention_mask=padding())
            r.last_hidden_state[:, :5].square().sum().backward()
            return dict(hidden=flat(r.last_hidden_state[:, :5]), pooled=flat(r.pooler_output))
        y = torch.arange(B * S).reshape(B, S) % labels if isinstance(labels, int) else torch.tensor(labels)
        r = model(x, attention_mask=padding(), labels=y)
        r.loss.backward()
        logits = r.logits[:, :5] if r.logits.dim() == 3 else r.logits
        return dict(logits=flat(logits), loss=r.loss.item(), labels=y.flatten().tolist())
    return run


def pixels(): return values(77, B * 3 * 16 * 16).reshape(B, 3, 16, 16).float()


def vit(model):
    r = model(pixels())
    r.last_hidden_state.square().sum().backward()
    return dict(hidden=flat(r.last_hidden_state), pooled=flat(r.pooler_output))


def vit_classes(model):
    r = model(pixels(), labels=torch.tensor([1, 4]))
    r.loss.backward()
    return dict(logits=flat(r.logits), loss=r.loss.item())


def clip(model):
    x = ids()
    r = model(input_ids=x, pixel_values=pixels(), attention_mask=torch.ones_like(x), return_loss=True)
    r.loss.backward()
    return dict(logits=flat(r.logits_per_text), loss=r.loss.item(), texts=flat(model.get_text_features(input_ids=x).pooler_output),
                images=flat(model.get_image_features(pixel_values=pixels()).pooler_output))


def t5(model):
    x, y = ids(), ids(6, 5)
    y[0, 4:] = -100
    r = model(input_ids=x, attention_mask=padding(), labels=y)
    r.loss.backward()
    with torch.no_grad(): greedy = model.generate(x, attention_mask=padding(), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return dict(logits=flat(r.logits), loss=r.loss.item(), memory=flat(r.encoder_last_hidden_state[:, :5]), greedy=greedy[:, 1:].flatten().tolist())


def t5_encoder(model):
    r = model(input_ids=ids(), attention_mask=padding()).last_hidden_state[:, :5]
    r.square().sum().backward()
    return dict(hidden=flat(r))


def whisper(model):
    x, y = values(78, B * 8 * 24).reshape(B, 8, 24).float(), ids(6, 5)
    y[0, 4:] = -100
    r = model(input_features=x, labels=y)
    r.loss.backward()
    tokens = torch.full((B, 1), 1)
    with torch.no_grad():
        for _ in range(12): tokens = torch.cat([tokens, model(input_features=x, decoder_input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return dict(logits=flat(r.logits), loss=r.loss.item(), memory=flat(r.encoder_last_hidden_state), greedy=tokens[:, 1:].flatten().tolist())


SMALL = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA31 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
TEXT = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16)
BERT, ROBERTA = TEXT | dict(num_labels=3), TEXT | dict(num_labels=3, pad_token_id=1, eos_token_id=2, bos_token_id=0)
IMAGE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)
T5 = dict(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=10,
          decoder_start_token_id=0)
WHISPER = dict(vocab_size=VOCAB, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=24,
               decoder_ffn_dim=20, max_source_positions=12, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
               begin_suppress_tokens=None)
LONGROPE = dict(rope_type="longrope", rope_theta=100.0, partial_rotary_factor=0.5, short_factor=[1.5], long_factor=[4.0])
CASES = {
    "t5": (t5, T.T5ForConditionalGeneration, T.T5Config, T5),
    "t5_gated": (t5, T.T5ForConditionalGeneration, T.T5Config, T5 | dict(feed_forward_proj="gated-gelu", num_decoder_layers=1, scale_decoder_outputs=False)),
    "t5_encoder": (t5_encoder, T.T5EncoderModel, T.T5Config, T5),
    "whisper": (whisper, T.WhisperForConditionalGeneration, T.WhisperConfig, WHISPER),
    "bert": (encoder(), T.BertModel, T.BertConfig, BERT),
    "bert_masked": (encoder(VOCAB), T.BertForMaskedLM, T.BertConfig, BERT),
    "bert_text": (encoder([2, 0]), T.BertForSequenceClassification, T.BertConfig, BERT),
    "bert_token": (encoder(3), T.BertForTokenClassification, T.BertConfig, BERT),
    "roberta": (encoder(), T.RobertaModel, T.RobertaConfig, ROBERTA),
    "roberta_masked": (encoder(VOCAB), T.RobertaForMaskedLM, T.RobertaConfig, ROBERTA),
    "roberta_text": (encoder([2, 0]), T.RobertaForSequenceClassification, T.RobertaConfig, ROBERTA),
    "roberta_token": (encoder(3), T.RobertaForTokenClassification, T.RobertaConfig, ROBERTA),
    "vit": (vit, T.ViTModel, T.ViTConfig, IMAGE),
    "vit_classes": (vit_classes, T.ViTForImageClassification, T.ViTConfig, IMAGE | dict(num_labels=5)),
    "clip": (clip, T.CLIPModel, T.CLIPConfig, dict(
        projection_dim=8, text_config=TEXT | dict(projection_dim=8, eos_token_id=30, bos_token_id=0, pad_token_id=1), vision_config=IMAGE | dict(projection_dim=8))),
    "gpt2": (causal, T.GPT2LMHeadModel, T.GPT2Config, dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=32, n_inner=24, bos_token_id=1, eos_token_id=2)),
    "llama": (causal, T.LlamaForCausalLM, T.LlamaConfig, SMALL),
    "llama_3.1": (causal, T.LlamaForCausalLM, T.LlamaConfig, SMALL | dict(tie_word_embeddings=True, rope_parameters=LLAMA31)),
    "llama_biases": (causal, T.LlamaForCausalLM, T.LlamaConfig, SMALL | dict(
        head_dim=6, attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=2.0))),
    "llama_yarn": (causal, T.LlamaForCausalLM, T.LlamaConfig, SMALL | dict(head_dim=8, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0))),
    "llama_dynamic": (causal, T.LlamaForCausalLM, T.LlamaConfig, SMALL | dict(max_position_embeddings=6, rope_parameters=dict(
        rope_type="dynamic", rope_theta=100.0, factor=2.0))),
    "phi3_short": (causal, T.Phi3ForCausalLM, T.Phi3Config, SMALL | dict(original_max_position_embeddings=32, rope_parameters=LONGROPE)),
    "phi3_long": (causal, T.Phi3ForCausalLM, T.Phi3Config, SMALL | dict(original_max_position_embeddings=4, rope_parameters=LONGROPE)),
    "mistral": (causal, T.MistralForCausalLM, T.MistralConfig, SMALL | dict(sliding_window=4)),
    "qwen2": (causal, T.Qwen2ForCausalLM, T.Qwen2Config, SMALL),
    "qwen2_window": (causal, T.Qwen2ForCausalLM, T.Qwen2Config, SMALL | dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    "qwen3": (causal, T.Qwen3ForCausalLM, T.Qwen3Config, SMALL | dict(head_dim=8)),
    "gemma": (causal, T.GemmaForCausalLM, T.GemmaConfig, SMALL | dict(head_dim=8)),
    "gemma2": (causal, T.Gemma2ForCausalLM, T.Gemma2Config, SMALL | dict(
        head_dim=4, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=1.5, final_logit_softcapping=2.0)),
    "phi3": (causal, T.Phi3ForCausalLM, T.Phi3Config, SMALL | dict(sliding_window=5)),
}


def trained(name):
    """Five steps on four texts: the losses, and of each tensor at the end the norm and the first values. The gradient of GPT-2's bias of keys is 0 but for rounding,
    which AdamW would turn into steps."""
    def run(model):
        x = (torch.arange(4 * S).reshape(4, S) * 5 + 1) % VOCAB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if name == "gpt2" else torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        losses = []
        for _ in range(5):
            loss = model(x, labels=x).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            end = load_file(os.path.join(folder, "model.safetensors"))
        return dict(losses=losses, end=[[n, float("%.7g" % end[n].norm()), flat(end[n].reshape(-1)[:3])] for n in sorted(end)])
    return run


def case(run, cls, config, options):
    with tempfile.TemporaryDirectory() as folder:
        cls(config(**options)).save_pretrained(folder)
        path = os.path.join(folder, "model.safetensors")
        tensors = load_file(path)
        names = sorted(tensors)
        save_file({n: filled(n, k, tuple(tensors[n].shape)) for k, n in enumerate(names)}, path, {"format": "pt"})
        model = cls.from_pretrained(folder, attn_implementation="eager").eval()
        results = run(model)
        # The norms of gradients, of the parameters whose names in the file are those in the model.
        grads = {n: float("%.7g" % p.grad.norm().item()) for n, p in model.named_parameters() if p.grad is not None and n in tensors}
        return dict(config=json.load(open(os.path.join(folder, "config.json"))), tensors=[[n, list(tensors[n].shape), grads.get(n)] for n in names], **results)


for name in ["gpt2", "llama_3.1", "phi3"]: CASES["trained_" + name] = (trained(name),) + CASES[name][1:]
old = json.load(open(out)) if len(sys.argv) > 2 else {}
made = {name: case(*CASES[name]) for name in sys.argv[2:] or CASES}
with open(out, "w") as f:
    rows = [json.dumps(name) + ": " + json.dumps(v, separators=(",", ":")) for name, v in (old | made).items()]
    f.write("{\n" + ",\n".join(rows) + "\n}\n")
