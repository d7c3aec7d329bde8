"""Answer prompts from Python, with any drafter: the tokens are those of plain decoding.

    python examples/generate.py [MODEL] [DRAFTER]

MODEL is "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.
"""

import sys

from sakiyomi import LLM, SamplingParams

model, drafter = [*sys.argv[1:], *("smollm2", "suffix")[len(sys.argv) - 1 :]]
llm = LLM(model, drafter=drafter)
prompts = ["One, two, three, one, two, three, one,", "The capital of France is"]
for result in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48)):
    answer, speculation = result.outputs[0], result.speculation
    print(f"{result.prompt}{answer.text}")
    print(
        f"  {len(answer.token_ids)} tokens in {speculation.num_steps} steps, {len(answer.drafted)} of them drafted; "
        f"{result.timing.tokens_per_s:.0f} tokens/s"
    )
