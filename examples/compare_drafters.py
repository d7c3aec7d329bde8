"""Compare drafters on a prompt of your own: the same tokens, in different times.

python examples/compare_drafters.py [MODEL] [PROMPT] [DRAFTER ...]
"""

import sys

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model

DEFAULTS = ("smollm2", "Count: 1 one, 2 two, 3 three, 4 four, 1 one, 2 two,", "none", "ngram", "suffix", "suffix+ngram")

model, prompt, *drafters = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
loaded = load_model(model, ModelOptions())  # once, for all of them
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
answers = set()
print(f"{'drafter':<16} {'tokens/step':>11} {'tokens/s':>9}")
for drafter in drafters:
    llm = LLM.from_loaded(loaded, drafter=drafter)
    llm.generate(prompt, SamplingParams(max_tokens=2))  # the first answer also warms the machine up
    (result,) = llm.generate(prompt, params)
    answers.add(tuple(result.outputs[0].token_ids))
    print(f"{drafter:<16} {result.speculation.mean_acceptance_length:>11.2f} {result.timing.tokens_per_s:>9.1f}")
print("the same tokens from all of them:", len(answers) == 1)
