"""`sakiyomi demo` compares two answers; when they differ it must say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sakiyomi.cli import loading


def test_both_answers_and_both_speeds(run, llm) -> None:
    result = run("demo", "hello")
    assert result.code == 0, result.stderr
    assert result.stdout.count("The sky is blue") == 2
    assert result.stdout.count("64.0") == 2
    assert "The same 8 token ids, 1.00 times as fast.\n" in result.stdout
    assert "hello" in result.stdout


def test_the_first_answer_is_plain_decoding(run, llm, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters: list[str] = []
    monkeypatch.setattr(loading, "load_llm", lambda options: drafters.append(options.drafter) or llm)
    run("demo", "-d", "ngram:max_ngram=3")
    assert drafters == ["none", "ngram:max_ngram=3"]


def test_a_difference_is_an_error(run, llm, fake_module, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongLLM(fake_module.FakeLLM):
        def _output(self, prompt, params, words) -> SimpleNamespace:
            output = super()._output(prompt, params, words)
            output.outputs[0].token_ids[2] = 0
            return output

    models = {"none": llm, "ngram": WrongLLM()}
    monkeypatch.setattr(loading, "load_llm", lambda options: models[options.drafter])
    result = run("demo", "hello")
    assert result.code == 1
    assert "differ from token 2 on" in result.stderr
    assert "The same" not in result.stdout
