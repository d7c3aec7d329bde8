"""Prompts in groups, in the format of Spec-Bench (Xia et al., 2024): one JSON object per line.

    {"question_id": 1, "category": "qa", "turns": ["Why is the sky blue?"]}

The eight categories of MT-bench make one group, as in Spec-Bench; any other category is a group of its own. Only the
first turn is used. A small set of our own ships with the package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

from sakiyomi.errors import ParameterError

OWN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Groups = dict[str, list[str]]
"""Group -> its prompts."""


def read_prompts(path: Path | None = None, per_group: int | None = None, groups: Seq[str] | None = None) -> Groups:
    """The prompts of a file, in its order.

    Args:
        path: the file; None takes our own set.
        per_group: how many of each group at most, from the first on.
        groups: only these groups.

    Raises:
        ParameterError: a file that cannot be read, a line that is not in the format, a group that does not exist.
    """
    found: Groups = {}
    for number, line in enumerate(_read_lines(path or OWN_PROMPTS), 1):
        if line.strip():
            category, text = _read_line(line, f"{path}, line {number}")
            found.setdefault("mt_bench" if category in MT_BENCH else category, []).append(text)
    if not found:
        raise ParameterError(f"{path} holds no prompt; write one JSON object with category and turns per line.")
    for name in groups or ():
        if name not in found:
            raise ParameterError(f"there is no group {name!r} among the prompts; there are {', '.join(found)}.")
    return {name: texts[:per_group] for name, texts in found.items() if not groups or name in groups}


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParameterError(f"cannot read the prompts from {path} ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not valid UTF-8 (byte {error.start}); give a text in UTF-8.") from error


def _read_line(line: str, where: str) -> tuple[str, str]:
    """Category and first turn."""
    try:
        question = json.loads(line)
        category, text = question["category"], question["turns"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise ParameterError(f"{where} is no prompt; write an object with category and a list of turns.") from error
    is_list = isinstance(question["turns"], list)
    if not isinstance(category, str) or not is_list or not isinstance(text, str) or not text.strip():
        raise ParameterError(f"{where}: category is a text, and turns a list that begins with one.")
    return category, text
