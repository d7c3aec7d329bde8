"""transformers' own call, sooner: wrap a model and call `generate` as ever.

    python examples/transformers_generate.py [FOLDER]

FOLDER holds a causal language model with its tokenizer; without one, a tiny model with random weights is made.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from sakiyomi.hf import wrap

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    inputs = dict(tokenizer("One, two, three, one, two, three, one,", return_tensors="pt"))
else:
    config = GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=0, eos_token_id=1
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), "attention_mask": torch.ones(1, 8).long()}

plain = model.generate(**inputs, max_new_tokens=48, do_sample=False)
fast = wrap(model)
for name, ways in {
    "suffix": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 8},
    "assistant model": {"assistant_model": model},  # itself, for want of a smaller one
}.items():
    ids = fast.generate(**inputs, max_new_tokens=48, do_sample=False, **ways)
    counts = fast.last_speculation
    print(f"{name}: {counts.mean_acceptance_length:.2f} tokens per step, the same ids: {torch.equal(ids, plain)}")
