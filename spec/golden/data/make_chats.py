#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Renders some chats by the templates of models with jinja2 3.1, set up as transformers does, and writes them to chats.json.  usage: make_chats.py [OUT_DIR]"""
import json, os, sys
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

out = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
turns = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
chatml = r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "chatml": "{% for message in messages %}" + chatml,
    "qwen2": r"{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + chatml,
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + turns + r"{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": r"{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    r"{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}" + turns
    + r"{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "mistral": "{{ bos_token }}{% for message in messages %}" + turns + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
}
say = lambda *texts: [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 4, texts)]
TEMPLATES["qwen2.5"] = TEMPLATES["qwen2"].replace("You are a helpful", "You are Qwen, created by Alibaba Cloud. You are a helpful")
CHATS = [say("Hello"), say(" Who\tare you? \n", "  I am <b>a</b> moon.\n\n"), say("a", "b", "c"), say("", "é 👍🏽", "x", " y", "z"),
         [{"role": "system", "content": " Be brief. "}] + say("Hello"), [{"role": "system", "content": "S"}] + say("a", "b", " c "),
         [{"role": "assistant", "content": "first"}], say("a") + say("b"), [{"role": "system", "content": "alone"}]]


def refuse(text): raise TemplateError(text)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.globals["raise_exception"] = refuse
cases = {}
for name, text in TEMPLATES.items():
    template, cases[name] = environment.from_string(text), {"template": text, "texts": []}
    for messages in CHATS:
        for prompt in (False, True):
            try:
                shown = template.render(messages=messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")
            except TemplateError:
                shown = None
            cases[name]["texts"].append(shown)
with open(os.path.join(out, "chats.json"), "w") as f:
    json.dump({"chats": CHATS, "formats": cases}, f, ensure_ascii=False)
    f.write("\n")
