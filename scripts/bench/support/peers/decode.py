# SPDX-License-Identifier: MIT
"""scripts/bench/decode's cases in transformers: `decode.py THREADS TOKENS RUNS TYPE BATCH CONFIG` makes a random model of
a config.json and prints `seconds S ...`, for each run the seconds of a token: those of TOKENS + 1 tokens without those
of the first one."""
import json
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers as T

threads, tokens, runs, batch = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
torch.set_num_threads(threads)
torch.manual_seed(1)
T.utils.logging.set_verbosity_error()
config = json.load(open(sys.argv[6]))
kind = config.pop("model_type")
config = T.AutoConfig.for_model(kind, **config)
model = T.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sys.argv[4])).eval()
ids = (torch.arange(batch * 32).reshape(batch, 32) * 7) % 1000
mask = torch.ones_like(ids)


def seconds(n):
    start = time.perf_counter()
    model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return time.perf_counter() - start


with torch.inference_mode():
    seconds(2)
    print("seconds", *[(seconds(tokens + 1) - seconds(1)) / tokens for _ in range(runs)])
