"""`sakiyomi generate`: where the prompt comes from, what is printed where, and how it fails."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sakiyomi.cli import loading

TEXT = "The sky is blue\U0001f600\nDone."


def test_answer_on_stdout_and_the_rest_on_stderr(run, llm) -> None:
    result = run("generate", "Why is the sky blue?")
    assert result.code == 0
    assert result.stdout == TEXT + "\n"
    assert result.stderr == (
        "8 tokens · 64.0 tokens/s · 1.60 tokens per step · ngram: 3 of 6 drafted tokens accepted\n"
    )


def test_defaults_are_greedy_and_without_a_cap(run, llm) -> None:
    run("generate", "hello")
    prompt, params = llm.asked[0]
    assert prompt == [5], "the chat template was not applied"
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, None, None)
    assert (llm.options.model, llm.options.drafter, llm.options.verifier) == ("smollm2", "auto", "match")


EVERY_OPTION = """
generate hi -m m.gguf -d ngram:max_ngram=4 --verifier match --dtype q8 --device cpu --backend native --threads 2
--max-model-len 512
-n 5 -t 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 7 --stop END --stop '###' --presence-penalty 0.1
--frequency-penalty 0.2 --repetition-penalty 1.1 --min-tokens 2 --ignore-eos
"""


def test_every_option_arrives(run, llm) -> None:
    result = run(*shlex.split(EVERY_OPTION))
    assert result.code == 0, result.stderr
    assert result.stderr.endswith("cut by length · seed 7\n")
    _, params = llm.asked[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.7, 0.9, 40)
    assert (params.min_p, params.seed, params.stop_strings, params.min_tokens) == (0.05, 7, ("END", "###"), 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert params.ignore_eos
    options = llm.options
    assert (options.model, options.drafter, options.dtype) == ("m.gguf", "ngram:max_ngram=4", "q8")
    assert (options.device, options.backend) == ("cpu", "native")
    assert (options.threads, options.max_model_len) == (2, 512)


def test_a_drawn_seed_is_told_when_it_mattered(run, llm) -> None:
    assert "seed 1234" in run("generate", "hi", "-t", "1").stderr
    assert "seed" not in run("generate", "hi").stderr


@pytest.mark.parametrize("arguments", [("generate", "-"), ("generate",)])
def test_prompt_from_a_pipe_loses_one_line_end(run, llm, arguments: tuple[str, ...]) -> None:
    assert run(*arguments, "--raw", stdin="Où?\n\n".encode()).code == 0
    assert llm.asked[0][0] == "Où?\n"


def test_prompt_from_a_file(run, llm, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\r\n", newline="")
    assert run("generate", "--raw", "-f", str(tmp_path / "prompt.txt")).code == 0
    assert llm.asked[0][0] == "from a file"


def test_a_byte_order_mark_is_no_part_of_a_text(run, llm, tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbfO\xc3\xb9?"
    file = tmp_path / "prompt.txt"
    file.write_bytes(marked)
    for way in (("-f", str(file)), ("-",), ("hi", "--prediction", str(file))):
        assert run("generate", "--raw", *way, stdin=marked).code == 0
    assert [prompt for prompt, _ in llm.asked] == ["Où?", "Où?", "hi"]
    assert llm.wishes[-1][0] == "Où?"


def test_a_prediction_and_the_switch_of_speculation_arrive(run, llm, tmp_path: Path) -> None:
    (tmp_path / "expected.txt").write_text("The sky is blue.\n", newline="")
    assert run("generate", "hi", "--prediction", str(tmp_path / "expected.txt")).code == 0
    for text in ("on", "off", "0", "5"):
        assert run("generate", "hi", "--speculation", text).code == 0
    assert llm.wishes == [("The sky is blue.\n", True), (None, True), (None, False), (None, 0), (None, 5)]


def test_system_message(run, llm) -> None:
    run("generate", "hello", "--system", "Be brief.")
    assert llm.asked[0][0] == [9, 5]


def test_a_model_without_a_template_gets_the_prompt_as_it_is(run, llm) -> None:
    llm.chat_template = None
    run("generate", "hello")
    assert llm.asked[0][0] == "hello"
    result = run("generate", "hello", "--system", "Be brief.")
    assert (result.code, result.stdout) == (1, "")
    assert "drop --system" in result.stderr


def test_json_is_one_object_with_the_frozen_keys(run, llm) -> None:
    result = run("generate", "hello", "--json", "-n", "4")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == {
        "text": "The sky is blue",
        "token_ids": [100, 101, 102, 103],
        "finish_reason": "length",
        "stop_reason": None,
        "seed": 1234,
        "usage": {"prompt_tokens": 1, "completion_tokens": 4},
        "speculation": {
            "drafter": "ngram",
            "verifier": "match",
            "is_lossless": "tokens",
            "verifier_options": {},
            "num_steps": 5,
            "num_draft_tokens": 6,
            "num_accepted_tokens": 3,
            "num_lossy_tokens": 0,
            "mean_acceptance_length": 1.6,
            "acceptance_per_position": [0.4, 0.2],
            "tried_per_position": [0.5, 1.0],
        },
        "timing": {"load_s": 0.5, "prefill_s": 0.25, "decode_s": 0.125, "draft_s": 0.0625, "tokens_per_s": 64.0},
    }


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["generate", ""], 1, "the prompt is empty"),
        (["generate", "-"], 1, "the prompt is empty"),
        (["generate", "too long", "--raw"], 1, "shorten it"),
        (["generate", "\udcff"], 1, "not valid UTF-8"),
        (["generate", "hi", "--temperature", "-1"], 1, "temperature=-1.0 is not allowed"),
        (["generate", "hi", "--top-p", "0"], 1, "top_p=0.0 is not allowed"),
        (["generate", "hi", "-n", "0"], 1, "max_tokens=0 is not allowed"),
        (["generate", "hi", "--seed", "-1"], 1, "seed=-1 is not allowed"),
        (["generate", "hi", "--stop", ""], 1, "stop holds ''"),
        (["generate", "hi", "-d", "nonsense"], 1, "known: model, ngram, none"),
        (["generate", "hi", "--device", "tpu"], 1, "give cpu or cuda"),
        (["generate", "-f", "/no/such/file"], 1, "cannot read the prompt from /no/such/file"),
        (["generate", "hi", "--prediction", "/no/such/file"], 1, "cannot read the prediction from /no/such/file"),
        (["generate", "hi", "--speculation", "-1"], 2, "give on, off or a number"),
        (["generate", "hi", "--speculation", "maybe"], 2, "give on, off or a number"),
        (["generate", "bug", "--raw"], 1, "RuntimeError: a wire came loose (--debug shows where)"),
        (["generate", "hi", "-f", "x"], 2, "not both"),
        (["generate", "hi", "--raw", "--system", "x"], 2, "drop one"),
        (["generate", "hi", "-t", "warm"], 2, "valid"),
        (["generate", "hi", "--temprature", "1"], 2, "--temperature"),
        (["generate", "hi", "there"], 2, "there"),
        (["generate", "hi", "-n"], 2, "-n"),
        (["generat", "hi"], 2, "generat"),
    ],
)
def test_what_goes_wrong_is_one_line(run, llm, arguments: list[str], code: int, told: str) -> None:
    result = run(*arguments)
    assert (result.code, result.stdout) == (code, "")
    assert told in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["generate", "hi", "--foo"], ["--model", "--drafter", "--temperature", "--json", "--max-tokens", "--help"]),
        (["generate", "hi", "--temprature", "1"], ["--temperature", "--drafter"]),
        (["generate", "hi", "-Z"], ["--model", "--drafter"]),
        (["chat", "--raw"], ["--system", "--speculation"]),
        (["pull", "--foo"], ["--debug"]),
        (["--foo"], ["--version"]),
        (["generat", "hi"], ["generate", "chat", "pull", "demo"]),
    ],
)
def test_a_wrong_option_or_command_lists_the_known_ones(run, llm, arguments: list[str], known: list[str]) -> None:
    result = run(*arguments)
    assert (result.code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    told = result.stderr.partition("Known ")[2]
    assert set(known) <= set(re.findall(r"[\w-]+", told)), result.stderr


@pytest.mark.parametrize(
    ("option", "spec", "known"),
    [
        ("--drafter", "nonsense", ["ngram", "suffix", "model", "none"]),
        ("--drafter", "ngram:foo=1", ["max_ngram", "min_ngram"]),
        ("--drafter", "suffix:foo=1", ["min_match", "width"]),
        ("--drafter", "suffix+ngram:foo=1", ["max_ngram"]),
        ("--drafter", "combined:parts=suffix+ngram:foo=1", ["max_ngram"]),
        ("--drafter", "none:foo=1", ["none"]),
        ("--verifier", "nonsense", ["match", "block"]),
        ("--verifier", "typical:foo=1", ["epsilon", "delta"]),
    ],
)
def test_drafters_and_verifiers_are_checked_before_anything_is_fetched(
    run, monkeypatch: pytest.MonkeyPatch, option: str, spec: str, known: list[str]
) -> None:
    monkeypatch.setattr(loading, "fetch", lambda name: pytest.fail("the model was fetched"))
    result = run("generate", "hi", option, spec)
    assert (result.code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert set(known) <= set(re.findall(r"\w+", result.stderr)), result.stderr


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_model_is_not_the_current_folder(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for command in (("generate", "hi", "--model", name), ("pull", name)):
        result = run(*command)
        assert (result.code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "names no model; give smollm2" in result.stderr


def test_bytes_that_are_no_text(run, llm) -> None:
    result = run("generate", stdin=b"caf\xe9")
    assert (result.code, result.stdout) == (1, "")
    assert "not valid UTF-8 (byte 3)" in result.stderr


def test_debug_adds_the_traceback(run, llm) -> None:
    result = run("generate", "bug", "--raw", "--debug")
    assert result.code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: RuntimeError")


def test_parameters_are_checked_before_the_model_is_loaded(run, llm, monkeypatch: pytest.MonkeyPatch) -> None:
    run("generate", "hi", "-t", "-1")
    assert not hasattr(llm, "options")
