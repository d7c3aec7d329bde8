"""Other engines as servers that do one timed batch at a time, so that forward.py can take turns with them.

    PYTHON benchmarks/peers.py llama-cpp MODEL.gguf --threads 2 --work DIR

Runs under whatever interpreter has the engine and needs nothing of sakiyomi. One JSON object per line: the first line
out describes the engine, or says {"error": ...}; then each line in is a request and each line out its answer.

    {"do": "forward", "rows": M, "context": C, "repeats": R}    R passes over M rows behind C positions
    {"do": "decode", "prompt": P, "tokens": N}                  N greedy tokens after P
    {"do": "prompt", "prompt": P}                               time to the first token of a prompt of P

Answers hold "seconds", one number per repetition, or "unsupported".
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

MAX_CONTEXT = 2048
MAX_BATCH = 1024
FIRST_ID, NUM_IDS = 1000, 30000


def make_ids(count: int) -> list[int]:
    """Arbitrary token ids, the same for every engine."""
    return [FIRST_ID + (7919 * i * i + 104729 * i) % NUM_IDS for i in range(count)]


class Peer(ABC):
    """An engine that can be timed."""

    facts: dict[str, Any]
    """What the engine says of itself: version, instruction sets, precision."""

    @abstractmethod
    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        """Seconds of each of `repeats` passes over `rows` rows, logits of every row included."""

    @abstractmethod
    def decode(self, prompt: int, tokens: int) -> list[float]:
        """Seconds for `tokens` greedy tokens once the prompt but its last token is in the cache."""

    @abstractmethod
    def prompt(self, prompt: int) -> list[float]:
        """Seconds from an empty cache to the logits of the prompt's last token."""


class UnsupportedError(Exception):
    """The engine's interface does not offer this."""


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------- llama.cpp


class LlamaCpp(Peer):
    """llama.cpp through the C interface of llama-cpp-python; one context per context length, filled once."""

    FILE_TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}

    def __init__(self, model: Path, threads: int, work: Path, precision: str) -> None:
        self.api = api = importlib.import_module("llama_cpp")
        self.log = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self.log, None)
        api.llama_backend_init()
        self.threads = threads
        if precision in self.FILE_TYPES:
            model = self._requantize(model, work, precision)
        self.model = api.llama_model_load_from_file(str(model).encode(), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {model}")
        self.num_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.greedy = api.llama_sampler_init_greedy()
        self.contexts: dict[int, Any] = {}
        self.facts = {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {api.__version__}",
            "precision": precision,
            "file_mb": round(model.stat().st_size / 1e6, 1),
            "instructions": api.llama_print_system_info().decode().strip(),
        }

    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        handle = self._at(context)
        ids = make_ids(rows)

        def run() -> None:
            self._feed(handle, ids, context, all_logits=True)
            self.api.llama_synchronize(handle)

        return [self._undone(handle, context, run) for _ in range(repeats)]

    def decode(self, prompt: int, tokens: int) -> list[float]:
        handle = self._at(prompt - 1)
        first = make_ids(prompt)[-1]

        def run() -> None:
            token = first
            for position in range(prompt - 1, prompt - 1 + tokens):
                self._feed(handle, [token], position)
                token = self.api.llama_sampler_sample(self.greedy, handle, -1)

        return [self._undone(handle, prompt - 1, run)]

    def prompt(self, prompt: int) -> list[float]:
        handle = self._at(0)

        def run() -> None:
            self._feed(handle, make_ids(prompt), 0)
            self.api.llama_synchronize(handle)

        return [self._undone(handle, 0, run)]

    def _requantize(self, model: Path, work: Path, precision: str) -> Path:
        api, out = self.api, work / f"{model.stem}.{precision}.gguf"
        if not out.exists():
            params = api.llama_model_quantize_default_params()
            params.ftype = getattr(api, self.FILE_TYPES[precision])
            params.allow_requantize = True
            params.nthread = self.threads
            part = out.with_suffix(".part")
            if api.llama_model_quantize(str(model).encode(), str(part).encode(), ctypes.byref(params)) != 0:
                raise RuntimeError(f"llama.cpp cannot quantize {model} to {precision}")
            part.rename(out)
        return out

    def _at(self, length: int) -> Any:
        """A context whose cache holds `length` positions."""
        if length not in self.contexts:
            api = self.api
            params = api.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = MAX_CONTEXT, MAX_BATCH, 512
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[length] = handle = api.llama_init_from_model(self.model, params)
            if length:
                self._feed(handle, make_ids(length), 0)
        return self.contexts[length]

    def _feed(self, handle: Any, ids: list[int], start: int, *, all_logits: bool = False) -> None:
        api = self.api
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(ids) - 1
        code = api.llama_decode(handle, batch)
        api.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _undone(self, handle: Any, length: int, run: Callable[[], None]) -> float:
        """Time `run`, then cut the cache back."""
        seconds = timed(run)
        api = self.api
        api.llama_memory_seq_rm(api.llama_get_memory(handle), 0, length, -1)
        return seconds


# ---------------------------------------------------------------------------------------------- transformers


class Transformers(Peer):
    """transformers on torch in float32, eager."""

    def __init__(self, model: Path, threads: int, work: Path, precision: str) -> None:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        os.environ["TQDM_DISABLE"] = "1"
        self.torch = torch = importlib.import_module("torch")
        self.library = library = importlib.import_module("transformers")
        torch.set_num_threads(threads)
        where: dict[str, Any] = {"gguf_file": model.name} if model.is_file() else {}
        folder = model.parent if model.is_file() else model
        self.model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
        self.caches: dict[int, Any] = {}
        self.facts = {
            "engine": "transformers",
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "precision": precision,
        }

    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        cache, ids = self._at(context), self.torch.tensor([make_ids(rows)])

        def run() -> None:
            with self.torch.inference_mode():
                self.model(input_ids=ids, past_key_values=cache, use_cache=True)

        seconds = []
        for _ in range(repeats):
            seconds.append(timed(run))
            self._cut(cache, context)
        return seconds

    def decode(self, prompt: int, tokens: int) -> list[float]:
        cache, ids = self._at(prompt - 1), self.torch.tensor([make_ids(prompt)])
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

        def run() -> None:
            with self.torch.inference_mode():
                mask = self.torch.ones_like(ids)
                self.model.generate(ids, attention_mask=mask, past_key_values=cache, **options)

        seconds = timed(run)
        self._cut(cache, prompt - 1)
        return [seconds]

    def prompt(self, prompt: int) -> list[float]:
        ids = self.torch.tensor([make_ids(prompt)])

        def run() -> None:
            with self.torch.inference_mode():
                self.model(input_ids=ids, use_cache=True, logits_to_keep=1)

        return [timed(run)]

    @staticmethod
    def _cut(cache: Any, length: int) -> None:
        cache.crop(length - cache.get_seq_length())  # below zero: how many to drop

    def _at(self, length: int) -> Any:
        if length not in self.caches:
            self.caches[length] = cache = self.library.DynamicCache()
            if length:
                with self.torch.inference_mode():
                    self.model(input_ids=self.torch.tensor([make_ids(length)]), past_key_values=cache, use_cache=True)
        return self.caches[length]


# ---------------------------------------------------------------------------------------------- OpenVINO


class OpenVino(Peer):
    """OpenVINO GenAI on a model that optimum-intel exports with 8-bit weights."""

    def __init__(self, model: Path, threads: int, work: Path, precision: str) -> None:
        genai = importlib.import_module("openvino_genai")
        self.tensors = importlib.import_module("openvino")
        self.numpy = importlib.import_module("numpy")
        self.genai = genai
        self.num_prompts = 0
        self.pipeline = genai.LLMPipeline(str(self._export(model, work)), "CPU", INFERENCE_NUM_THREADS=threads)
        self.facts = {
            "engine": "OpenVINO GenAI",
            "version": f"openvino-genai {version('openvino-genai')}",
            "precision": precision,
        }

    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        raise UnsupportedError("OpenVINO GenAI has no call for one pass over M rows")

    def decode(self, prompt: int, tokens: int) -> list[float]:
        # The first token comes out of the prompt; the others are single steps.
        metrics = self._generate(prompt, tokens + 1)
        return [metrics.get_tpot().mean * tokens / 1000]

    def prompt(self, prompt: int) -> list[float]:
        self.num_prompts += 1  # what was seen of a prompt is kept, so none begins as another one
        return [self._generate(prompt, 2, [FIRST_ID + self.num_prompts]).get_ttft().mean / 1000]

    def _generate(self, prompt: int, tokens: int, begin: list[int] | None = None) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        config.apply_chat_template = False
        begin = begin or []
        ids = self.tensors.Tensor(self.numpy.array([begin + make_ids(prompt)[len(begin) :]], self.numpy.int64))
        return self.pipeline.generate(ids, config).perf_metrics

    def _export(self, model: Path, work: Path) -> Path:
        out = work / f"{model.stem}.openvino-int8"
        if out.exists():
            return out
        library, optimum = importlib.import_module("transformers"), importlib.import_module("optimum.intel")
        where = {"gguf_file": model.name} if model.is_file() else {}
        folder = model.parent if model.is_file() else model
        plain, part = work / f"{model.stem}.transformers", out.with_suffix(".part")
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **where)
        library.AutoModelForCausalLM.from_pretrained(folder, **where).float().save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        config = optimum.OVWeightQuantizationConfig(bits=8)
        exported = optimum.OVModelForCausalLM.from_pretrained(
            plain, export=True, quantization_config=config, compile=False
        )
        exported.save_pretrained(part)
        tokenizer.save_pretrained(part)
        convert = importlib.import_module("openvino_tokenizers").convert_tokenizer
        for name, converted in zip(
            ("tokenizer", "detokenizer"), convert(tokenizer, with_detokenizer=True), strict=True
        ):
            self.tensors.save_model(converted, part / f"openvino_{name}.xml")
        part.rename(out)
        return out


# ---------------------------------------------------------------------------------------------- serving

PEERS: dict[str, Callable[[Path, int, Path, str], Peer]] = {
    "llama-cpp": LlamaCpp,
    "transformers": Transformers,
    "openvino": OpenVino,
}


def serve(peer: Peer, answer: Callable[[dict[str, Any]], None]) -> None:
    answer(peer.facts)
    for line in sys.stdin:
        request = json.loads(line)
        action = getattr(peer, request.pop("do"))
        try:
            answer({"seconds": action(**request)})
        except UnsupportedError as error:
            answer({"unsupported": str(error)})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=PEERS)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--precision", default="file", help="of llama-cpp: Q8_0, Q4_0, or the file as it is")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where converted models are kept")
    args = parser.parse_args()
    # Libraries print what they like; the answers go out on a channel of their own.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(fields: dict[str, Any]) -> None:
        channel.write(json.dumps(fields) + "\n")

    try:
        peer = PEERS[args.engine](args.model.absolute(), args.threads, args.work, args.precision)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    serve(peer, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
