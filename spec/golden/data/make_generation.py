#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes small models of transformers 5.24 and writes to generation.json, for each: its config.json, the names and shapes of its tensors, whose values follow as in
make_hf.py, and the texts that it generates.  usage: make_generation.py [OUT_DIR]"""
import json, os, sys, tempfile
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from hf_values import filled, values

here = os.path.dirname(os.path.abspath(__file__))
out = os.path.join(sys.argv[1] if len(sys.argv) > 1 else here, "generation.json")
T.utils.logging.set_verbosity_error()
T.utils.logging.disable_progress_bar()
VOCAB, B, S = 32, 2, 8


SMALL = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=None)
CASES = {
    "gpt2": (T.GPT2LMHeadModel, T.GPT2Config, dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, n_inner=24, bos_token_id=1, eos_token_id=2)),
    "llama": (T.LlamaForCausalLM, T.LlamaConfig, SMALL),
    "mistral": (T.MistralForCausalLM, T.MistralConfig, SMALL | dict(sliding_window=5)),
    "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config, SMALL | dict(
        head_dim=4, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=1.5, final_logit_softcapping=2.0)),
}
T5 = dict(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=10,
          decoder_start_token_id=0)
WHISPER = dict(vocab_size=VOCAB, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=24,
               decoder_ffn_dim=20, max_source_positions=12, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
               begin_suppress_tokens=None)
# Models of an encoder and a decoder, with what the encoder reads, and factors of tensors, without which they repeat one token.
CASES |= {
    "t5": (T.T5ForConditionalGeneration, T.T5Config, T5, "ids",
           [[".q.", 2], [".k.", 2], [".v.", 3], [".o.", 3], [".wo.", 2], ["relative", 8]]),
    "whisper": (T.WhisperForConditionalGeneration, T.WhisperConfig, WHISPER, "features",
                [["q_proj", 8], ["k_proj", 8], ["fc2", 2], ["embed_tokens", 0.3], ["embed_positions", 8]]),
}
# Options of generate by name; "eos" is the token that the case's greedy text has most often, so that texts end.
RUNS = {
    "greedy": dict(max_new_tokens=50),
    "penalty": dict(max_new_tokens=30, repetition_penalty=1.4),
    "beams": dict(max_new_tokens=20, num_beams=4),
    "beams_end": dict(max_new_tokens=20, num_beams=4, eos_token_id="eos", num_return_sequences=3),
    "beams_early": dict(max_new_tokens=20, num_beams=4, eos_token_id="eos", early_stopping=True, length_penalty=0.5),
    "beams_never": dict(max_new_tokens=20, num_beams=4, eos_token_id="eos", early_stopping="never", length_penalty=2.0),
    "beams_penalty": dict(max_new_tokens=20, num_beams=3, repetition_penalty=1.3),
    "suppressed": dict(max_length=24, suppress_tokens=["eos", 4], begin_suppress_tokens=[11, 15, 16, 19, 27]),
    "ngrams": dict(max_new_tokens=30, no_repeat_ngram_size=2, bad_words_ids=[["eos"], [5, 6]]),
    "least": dict(max_new_tokens=30, eos_token_id="eos", min_length=18),
    "beams_rules": dict(max_new_tokens=20, num_beams=3, no_repeat_ngram_size=3, suppress_tokens=["eos"], eos_token_id=7, min_new_tokens=9),
}


def with_eos(v, eos):
    return eos if v == "eos" else [with_eos(w, eos) for w in v] if isinstance(v, list) else v


def case(cls, config, options, reads=None, scales=()):
    x = (torch.arange(B * S).reshape(B, S) * 7 + 3) % VOCAB
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    with tempfile.TemporaryDirectory() as folder:
        cls(config(**options)).save_pretrained(folder)
        path = os.path.join(folder, "model.safetensors")
        tensors = load_file(path)
        names = sorted(tensors)
        save_file({n: filled(n, k, tuple(tensors[n].shape), scales) for k, n in enumerate(names)}, path, {"format": "pt"})
        model = cls.from_pretrained(folder, attn_implementation="eager").eval()

        def run(**o):
            o = dict(do_sample=False, eos_token_id=None, pad_token_id=31, attention_mask=torch.ones_like(x)) | o
            with torch.no_grad():
                if reads == "ids": return model.generate(x, **o)[:, 1:].tolist()
                if reads:  # Whisper's own generate adds rules for speech
                    start = torch.tensor([[1, 5], [1, 9]])
                    return T.GenerationMixin.generate(model, values(78, B * 8 * 24).reshape(B, 8, 24).float(), **o | dict(attention_mask=None, decoder_input_ids=start))[:, 2:].tolist()
                return model.generate(x, **o)[:, S:].tolist()

        texts = {"greedy": run(**RUNS["greedy"])}
        eos = max(range(VOCAB), key=lambda v: sum(row[:12].count(v) for row in texts["greedy"]))
        for name, o in RUNS.items():
            if name != "greedy":
                texts[name] = run(**{k: with_eos(v, eos) for k, v in o.items()})
        texts["padded"] = run(max_new_tokens=20, attention_mask=mask)
        texts["padded_beams"] = run(max_new_tokens=12, num_beams=3, attention_mask=mask)
        return dict(config=json.load(open(os.path.join(folder, "config.json"))), eos=eos, scales=scales, tensors=[[n, list(tensors[n].shape)] for n in names], texts=texts)


with open(out, "w") as f:
    made = {name: case(*c) for name, c in CASES.items()}
    f.write("{\n" + ",\n".join(json.dumps(n) + ": " + json.dumps(v, separators=(",", ":")) for n, v in made.items()) + "\n}\n")
