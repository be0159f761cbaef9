# SPDX-License-Identifier: MIT
"""scripts/bench/decode's models in llama.cpp (PyPI's llama-cpp-python): `llama.py FILE THREADS TOKENS IDS` generates
from a GGUF file, greedy, after the ids (1,2,3); prints `ids I ...`, the new ones, and `seconds S`, the time of each after
the first."""
import os, sys, time

try:
    import llama_cpp as L
except ImportError:
    sys.exit()
import numpy as np

path, threads, tokens, ids = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(i) for i in sys.argv[4].split(",")]
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)    # its log
L.llama_backend_init()
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 256, threads, threads
if "float32" in path: params.type_k = params.type_v = 0
context = L.llama_init_from_model(model, params)
vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))


def next_id(given):
    row = (L.llama_token * len(given))(*given)
    if L.llama_decode(context, L.llama_batch_get_one(row, len(given))): raise SystemExit("llama_decode failed")
    return int(np.argmax(np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), shape=(vocabulary,))))


new = [next_id(ids)]
for warm in range(2): new.append(next_id(new[-1:]))
start = time.perf_counter()
for _ in range(tokens): new.append(next_id(new[-1:]))
print("seconds", (time.perf_counter() - start) / tokens)
print("ids", *new)
