"""Show an answer while it is made; what stands in [brackets] was drafted.

python examples/stream.py [MODEL] [PROMPT]
"""

import sys

from sakiyomi import LLM, SamplingParams

model, prompt = [*sys.argv[1:], *("smollm2", "Repeat after me: red, green, blue; red, green,")[len(sys.argv) - 1 :]]
llm = LLM(model, drafter="suffix")
print(prompt, end="")
was_drafted = False
for piece in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=48)):
    is_drafted = piece.source == "draft"
    print({(False, True): "[", (True, False): "]"}.get((was_drafted, is_drafted), ""), end="")
    print(piece.text, end="", flush=True)
    was_drafted = is_drafted
    if piece.output is not None:
        end = piece.output
print("]" if was_drafted else "")
print(f"{end.speculation.mean_acceptance_length:.2f} tokens per step")
