"""Edit a text: the old version is given as a prediction, and whatever stays the same is accepted many tokens at a time.

python examples/prediction.py [MODEL]
"""

import sys

from sakiyomi import LLM, SamplingParams

OLD = """\
def area(width, height):
    return width * height


def perimeter(width, height):
    return 2 * (width + height)
"""

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", drafter="suffix")
prompt = f"# Copy this program, with the name `height` replaced by `depth`.\n{OLD}\n# The new program:\n"
params = SamplingParams(temperature=0, max_tokens=80)
(alone,) = llm.generate(prompt, params, speculation=False)
(helped,) = llm.generate(prompt, params, prediction=OLD)
assert helped.outputs[0].token_ids == alone.outputs[0].token_ids  # a prediction is never more than a guess
print(helped.outputs[0].text)
print(f"{alone.speculation.num_steps} steps without the prediction, {helped.speculation.num_steps} with it")
