"""`sakiyomi chat`: turns, its own commands, and what ends what."""

from __future__ import annotations

TEXT = "The sky is blue\U0001f600\nDone.\n"


def test_turns_share_a_session(run, llm) -> None:
    result = run("chat", stdin=b"one\nthree\n")
    assert result.code == 0
    assert result.stdout == TEXT * 2
    assert [prompt for prompt, _ in llm.asked] == [[3], [3, 5]]
    assert llm.closed == 2


def test_reset_exit_and_empty_lines(run, llm) -> None:
    result = run("chat", stdin=b"one\n\n/reset\nthree\n/exit\nnever\n")
    assert result.code == 0
    assert [prompt for prompt, _ in llm.asked] == [[3], [5]]


def test_an_unknown_command_is_not_sent(run, llm) -> None:
    result = run("chat", stdin=b"/rest\n/etc/hosts?\n")
    assert "/reset forgets" in result.stderr
    assert [prompt for prompt, _ in llm.asked] == [[len("/etc/hosts?")]]


def test_system_and_sampling_options(run, llm) -> None:
    result = run("chat", "--system", "Be brief.", "-t", "0.5", "-n", "3", stdin=b"one\n")
    prompt, params = llm.asked[0]
    assert prompt == [9, 3]
    assert (params.temperature, params.max_tokens) == (0.5, 3)
    assert result.stderr.endswith("cut by length · seed 1234\n")


def test_a_turn_that_fails_does_not_end_the_conversation(run, llm) -> None:
    result = run("chat", stdin=b"too long\n/reset\none\n")
    assert result.code == 1, "a script must see that a turn failed"
    assert result.stdout == TEXT
    assert "error: the prompt has 9999 tokens and the context 2048; shorten it.\n" in result.stderr


def test_a_model_without_a_template_is_refused(run, llm) -> None:
    llm.chat_template = None
    result = run("chat", stdin=b"one\n")
    assert (result.code, result.stdout) == (1, "")
    assert "generate --raw" in result.stderr


def test_bytes_that_are_no_text(run, llm) -> None:
    result = run("chat", stdin=b"caf\xe9\n")
    assert result.code == 1
    assert result.stderr == "error: standard input is not valid UTF-8; give a text in UTF-8.\n"


def test_a_byte_order_mark_is_not_said(run, llm) -> None:
    assert run("chat", stdin=b"\xef\xbb\xbfone\n").code == 0
    assert [prompt for prompt, _ in llm.asked] == [[3]]
