#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Gives small models of hf.json adapters of PEFT 0.21 and writes to peft.json what PEFT saves and computes. Values follow from the place among the sorted names, as in
make_hf.py.  usage: make_peft.py [OUT_DIR]"""
import json, os, sys, tempfile
import torch
import transformers as T
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from hf_values import filled

here = os.path.dirname(os.path.abspath(__file__))
out = os.path.join(sys.argv[1] if len(sys.argv) > 1 else here, "peft.json")
T.utils.logging.set_verbosity_error()
T.utils.logging.disable_progress_bar()


def case(base, targets):
    with tempfile.TemporaryDirectory() as folder:
        json.dump(base["config"], open(folder + "/config.json", "w"))
        save_file({n: filled(n, k, s) for k, (n, s, _) in enumerate(base["tensors"])}, folder + "/model.safetensors", {"format": "pt"})
        load = lambda: T.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        get_peft_model(load(), LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")).save_pretrained(folder + "/adapter")
        path = folder + "/adapter/adapter_model.safetensors"
        tensors = load_file(path)
        names = sorted(tensors)
        save_file({n: filled(n, k, tuple(tensors[n].shape)) for k, n in enumerate(names)}, path, {"format": "pt"})
        model = PeftModel.from_pretrained(load(), folder + "/adapter").eval()
        ids = (torch.arange(16).reshape(2, 8) * 7 + 3) % 32
        config = json.load(open(folder + "/adapter/adapter_config.json"))
        config["base_model_name_or_path"] = "base"
        return dict(config=config, tensors=[[n, list(tensors[n].shape)] for n in names], logits=[float("%.7g" % x) for x in model(ids).logits.detach().double().flatten().tolist()])


bases = json.load(open(os.path.join(here, "hf.json")))
cases = {"llama": case(bases["llama"], ["q_proj", "down_proj"]), "gpt2": case(bases["gpt2"], ["c_attn", "c_fc"])}
with open(out, "w") as f:
    json.dump(cases, f)
    f.write("\n")
