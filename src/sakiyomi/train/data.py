"""Stage `data`: text of the target's own, prompts and answers, written in large batches unit by unit.

A drafter must predict the target, not people, so the target writes everything: user's turns after the opening of its
chat template (`prompts.py`), or those of the user's own conversations; then its answers, greedy ones and sampled ones.
Each unit is a file of its own and a function of seed, settings, target and the units before, so that a run that was
killed goes on to the very same result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.decode import prefill
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.engine.engine import Engine, Job
from sakiyomi.errors import ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.train.corpus import Corpus, CorpusBuilder, join_corpora
from sakiyomi.train.estimate import Announce, Estimate, Report, announce_nothing, say_nothing
from sakiyomi.train.files import check_room, hash_file
from sakiyomi.train.prompts import OWN, PLAIN, PassagePool, PromptBook, Task
from sakiyomi.train.target import check_target, identify_target
from sakiyomi.types import Cache
from sakiyomi.types import Sequence as TokenSequence
from sakiyomi.verify.match import MatchVerifier

MARK = "\u2063user\u2063"
LOOP_TOKENS = 32
"""An answer whose last tokens, this many, repeat with a period of at most half of them has run into a loop."""
MAX_PERIOD = 32
PROBE_STEPS = 3
MEAN_ROOM = 512
"""Positions that a cache holds on average, spare room included."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the stage `data`.

    Args:
        num_tokens: tokens to write, prompts included.
        seed: of every choice and of the noise.
        batch: sequences that are written at the same time.
        unit_documents: documents per file; what a killed run loses at most.
        answer_tokens, user_tokens: length of an answer, and of what the target writes of a user's turn, at most.
        plain, openers, templates: shares of unseeded prompts, of those with an opener, and of tasks on earlier answers.
        second_turn: share of the documents that get a second turn.
        greedy: share of the documents whose answers are greedy; the others are sampled.
        temperature, user_temperature: ranges for sampled answers, and for users' turns.
        user_top_k: tokens to choose from in users' turns.
        loop_tokens: an answer ends when so many of its last tokens repeat.
        conversations: a JSONL file of the user's own conversations in place of written prompts: one object per line
            with "messages" (role, content), or "prompt"; their answers are written anew.
        prompts: a TOML file of openers and templates in place of the package's own.
        start_from: a text that was written before (`pack_text`), to go on from.
    """

    num_tokens: int = 2_500_000
    seed: int = 0
    batch: int = 128
    unit_documents: int = 256
    answer_tokens: int = 256
    user_tokens: int = 80
    plain: float = 0.45
    openers: float = 0.35
    templates: float = 0.2
    second_turn: float = 0.2
    greedy: float = 0.5
    temperature: tuple[float, float] = (0.7, 1.0)
    user_temperature: tuple[float, float] = (0.8, 1.0)
    user_top_k: int = 48
    loop_tokens: int = 100
    conversations: str | None = None
    prompts: str | None = None
    start_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "batch", "unit_documents", "answer_tokens", "user_tokens"):
            if getattr(self, name) < 1:
                raise ParameterError(f"data: {name}={getattr(self, name)} is not allowed; give at least 1.")
        if self.loop_tokens < LOOP_TOKENS:
            raise ParameterError(f"data: loop_tokens={self.loop_tokens} is not allowed; give at least {LOOP_TOKENS}.")


def write_corpus(
    target: LoadedModel,
    config: DataConfig,
    folder: Path,
    report: Report = say_nothing,
    announce: Announce = announce_nothing,
) -> Corpus:
    """Write the text of a target, or go on where an earlier run ended.

    Args:
        folder: where the units lie.
        announce: told what the run will take before it begins.

    Raises:
        ParameterError: settings or a target other than those of the units that are there, no room on the disk.
    """
    writer = _Writer(target, config, folder)
    writer.unpack()
    units = writer.read_units()
    if writer.is_done(units):
        return _join(units)
    estimate = _estimate(target, config, sum(unit.num_tokens for unit in units))
    check_room(folder, estimate.disk_bytes, "the text")
    announce(estimate)
    while not writer.is_done(units):
        done = sum(unit.num_tokens for unit in units)
        report("writing text", done, config.num_tokens)
        unit = writer.write_unit(units, _Told(report, done, config.num_tokens))
        unit.save(writer.path(len(units)))
        units.append(unit)
    return _join(units)


def load_corpus(folder: Path) -> Corpus:
    """The text that `write_corpus` left in a folder.

    Raises:
        ParameterError: there is none.
    """
    paths = sorted(folder.glob("unit-*.safetensors"))
    if not paths:
        raise ParameterError(f"{folder} holds no text; run the stage data first.")
    return _join([Corpus.load(path) for path in paths])


def pack_text(folder: Path, path: Path) -> Corpus:
    """Put the text in a folder into one compressed file (.xz), to be kept and to go on from (`start_from`)."""
    corpus = load_corpus(folder)
    corpus.save(path)
    return corpus


def _estimate(target: LoadedModel, config: DataConfig, num_there: int) -> Estimate:
    missing = max(config.num_tokens - num_there, 0)
    rate, cache_bytes = _probe(target, config)
    num_id_bytes = 2 if target.model.info.vocab_size <= 1 << 16 else 4
    return Estimate(
        what=f"writing {missing:,} tokens",
        seconds=missing / rate,
        disk_bytes=int(missing * num_id_bytes * 1.1) + (1 << 20),
        memory_bytes=int(cache_bytes * config.batch * MEAN_ROOM),
    )


def _probe(target: LoadedModel, config: DataConfig) -> tuple[float, float]:
    """Tokens per second while a unit is written, and bytes of a cache per position.

    Timed in steps of a full batch over texts that are half as long as they become. The last dialogues of a unit end one
    after another, so that they meet half of a batch.
    """
    model, num_ids = target.model, target.model.info.vocab_size
    params = SamplingParams(temperature=0.9, top_k=48, max_tokens=None, ignore_eos=True)
    length = min((config.user_tokens + config.answer_tokens) // 2, (model.info.max_model_len - PROBE_STEPS) // 2)
    first = TokenSequence("", [i % num_ids for i in range(length)], length, params, 0, model.new_cache())
    prefill(model, NoneDrafter(), first)
    engine = Engine(model, NoneDrafter(), MatchVerifier(), max_num_seqs=config.batch, burst_seconds=0)
    for number in range(config.batch):
        engine.add(Job(TokenSequence(str(number), list(first.tokens), length, params, number, first.cache.fork())))
    engine.step()
    started = time.perf_counter()
    jobs = [job for _ in range(PROBE_STEPS) for job, _ in engine.step()]
    rate = len(jobs) / (time.perf_counter() - started)
    cache = jobs[0].sequence.cache
    drained = 1 + 0.5 * min(config.batch / config.unit_documents, 1)
    return rate / drained, cache.num_bytes / max(getattr(cache, "capacity", cache.length), 1)


@dataclass(frozen=True)
class _Told:
    """Passes progress within a unit on."""

    report: Report
    done: int
    total: int

    def __call__(self, num_new: int) -> None:
        self.report("writing text", min(self.done + num_new, self.total), self.total)


class _Writer:
    """Writes units."""

    def __init__(self, target: LoadedModel, config: DataConfig, folder: Path) -> None:
        self.target = target
        self.config = config
        self.folder = folder
        self.identity = {key: told for key, told in identify_target(target).items() if key != "dtype"}
        self.book = PromptBook(
            None if config.prompts is None else Path(config.prompts),
            (config.plain, config.openers, config.templates),
        )
        self.given = None if config.conversations is None else read_conversations(Path(config.conversations))
        given = () if self.given is None else {task.group for task in self.given}
        self.groups = sorted({*self.book.groups, *given})
        self.settings = self._settings()
        self._prefix: TokenSequence | None = None

    def _settings(self) -> str:
        """A digest of everything but the target that decides what a unit holds."""
        plain = asdict(replace(self.config, num_tokens=1))
        book = [asdict(one) for one in [*self.book.openers, *self.book.templates]]
        given = None if self.given is None else [asdict(task) for task in self.given]
        if self.config.start_from is not None:
            plain["start_from"] = hash_file(Path(self.config.start_from))
        return hashlib.sha256(json.dumps([plain, book, given], sort_keys=True).encode()).hexdigest()

    def new_cache(self, ids: Sequence[int]) -> Cache:
        """A cache for `ids` that holds what they share with the first prompt: the system message of the template."""
        if self._prefix is None:
            self._prefix = TokenSequence("", list(ids), len(ids), SamplingParams(), 0, self.target.model.new_cache())
            prefill(self.target.model, NoneDrafter(), self._prefix)
        cache = self._prefix.cache.fork()
        cache.truncate(_count_common(self._prefix.tokens[: cache.length], ids[:-1]))
        return cache

    def path(self, number: int) -> Path:
        return self.folder / f"unit-{number:05}.safetensors"

    def read_units(self) -> list[Corpus]:
        units: list[Corpus] = []
        while self.path(len(units)).exists():
            unit = Corpus.load(self.path(len(units)))
            check_target(unit.about["target"], self.identity, f"the text in {self.folder}")
            if unit.about["settings"] != self.settings:
                raise ParameterError(
                    f"the text in {self.folder} was written with other settings; delete it, choose another --out, or "
                    "take the settings back."
                )
            units.append(unit)
        return units

    def unpack(self) -> None:
        """Make the text to go on from the first unit."""
        if self.config.start_from is None or self.path(0).exists():
            return
        packed = Corpus.load(Path(self.config.start_from))
        check_target(packed.about["target"], self.identity, f"the text in {self.config.start_from}")
        replace(packed, about={**packed.about, "settings": self.settings, "unit": 0}).save(self.path(0))

    def is_done(self, units: Sequence[Corpus]) -> bool:
        if self.given is not None and len(units) * self.config.unit_documents >= len(self.given):
            return True
        return sum(unit.num_tokens for unit in units) >= self.config.num_tokens

    def write_unit(self, earlier: Sequence[Corpus], told: Callable[[int], None]) -> Corpus:
        """The next unit: as many dialogues at a time as the batch holds, a finished one makes room for another."""
        number = len(earlier)
        rng = np.random.default_rng([self.config.seed, number])
        pool = self._pool(earlier)
        seen = {int(one) for unit in earlier for one in unit.user_hashes}
        counts = _Counts()
        dialogues = [
            _Dialogue(self, task, np.random.default_rng([self.config.seed, number, index]), seen, counts)
            for index, task in enumerate(self._tasks(number, rng, pool))
        ]
        self._run(dialogues, told)
        builder = CorpusBuilder(self.target.model.info.vocab_size, self.groups)
        for dialogue in dialogues:
            dialogue.put_into(builder)
        about = {"target": self.identity, "settings": self.settings, "seed": self.config.seed, "unit": number}
        return builder.build({**about, "counts": asdict(counts)})

    def _run(self, dialogues: Sequence[_Dialogue], told: Callable[[int], None]) -> None:
        verifier = MatchVerifier()
        # Where a dialogue is enough is looked for behind each token, so that the text does not depend on the clock.
        engine = Engine(self.target.model, NoneDrafter(), verifier, max_num_seqs=self.config.batch, burst_seconds=0)
        waiting = list(reversed(dialogues))
        running: dict[Job, _Dialogue] = {}
        num_new = 0

        def start(dialogue: _Dialogue, done: Job | None) -> None:
            sequence = dialogue.next_sequence(None if done is None else done.sequence)
            if sequence is not None:
                job = Job(sequence, keeps_cache=True)
                engine.add(job)
                running[job] = dialogue

        while waiting or running:
            while waiting and len(running) < self.config.batch:
                start(waiting.pop(), None)
            num_new += len(engine.step())
            for job, dialogue in list(running.items()):
                if job.error is not None:
                    raise job.error
                if not job.is_finished and dialogue.is_enough(job.sequence):
                    engine.abort(job)
                if job.is_finished:
                    del running[job]
                    start(dialogue, job)
            told(num_new)

    def _tasks(self, number: int, rng: np.random.Generator, pool: PassagePool) -> list[Task]:
        size = self.config.unit_documents
        if self.given is not None:
            return self.given[number * size : (number + 1) * size]
        if self.target.chat_template is None or self.target.tokenizer is None:
            return [Task(group=PLAIN)] * size
        return [self.book.draw(rng, pool) for _ in range(size)]

    def _pool(self, earlier: Sequence[Corpus]) -> PassagePool:
        pool = PassagePool()
        tokenizer = self.target.tokenizer
        if tokenizer is None or self.given is not None:
            return pool
        for unit in earlier:
            for (document, start, stop), is_looping in zip(unit.spans.tolist(), unit.is_looping, strict=True):
                if not is_looping:
                    ids = unit.tokens_of(document)[start:stop].tolist()
                    pool.add(unit.group_of(document), tokenizer.decode(ids), len(ids))
        return pool


@dataclass
class _Counts:
    """What became of the dialogues of a unit.

    Attributes:
        duplicates: user's turns that were there before; their documents are dropped.
        empty: user's turns of less than two words, or that left no room for an answer; dropped too.
        loops: answers that ran into a loop; `cut_loops` of them were ended for it.
    """

    documents: int = 0
    answers: int = 0
    answer_tokens: int = 0
    duplicates: int = 0
    empty: int = 0
    loops: int = 0
    cut_loops: int = 0


class _Dialogue:
    """One document in the making: the user's turn, the answer, perhaps both again."""

    def __init__(self, writer: _Writer, task: Task, rng: np.random.Generator, seen: set[int], counts: _Counts) -> None:
        config = writer.config
        self._writer = writer
        self._target = writer.target
        self._config = config
        self._task = task
        self._seen = seen
        self._counts = counts
        self._seed = int(rng.integers(1 << 63))
        self._user_temperature = float(rng.uniform(*config.user_temperature))
        sampled = float(rng.uniform(*config.temperature))
        self._temperature = 0.0 if rng.random() < config.greedy else sampled
        has_second = rng.random() < config.second_turn and not task.is_complete and task.tail is None
        self._start_id = int(rng.integers(writer.target.model.info.vocab_size))
        self._turns = list(task.turns)
        self._num_written_turns = 1 if has_second and not task.turns and task.group != OWN else 0
        self._messages: list[dict[str, str]] = []
        self._head = ""
        self._is_user_turn = False
        self._answers: list[tuple[int, int, bool]] = []
        self._tokens: list[int] = []
        self._user_hash = 0

    # ------------------------------------------------------------------------------------------ the course of it

    def next_sequence(self, done: TokenSequence | None) -> TokenSequence | None:
        """What is to be written next, after `done`; None when the document is complete or dropped."""
        if done is None:
            return self._begin()
        if self._is_user_turn:
            return self._answer_written_turn(done)
        return self._end_answer(done)

    def _begin(self) -> TokenSequence | None:
        if self._target.chat_template is None or self._target.tokenizer is None:
            return self._begin_raw()
        if self._task.is_complete:
            return self._ask(self._task.head, None)
        return self._write_turn(self._task.head, None)

    def _begin_raw(self) -> TokenSequence | None:
        """Without a chat template a document is a text: a given prompt, or one token, and what follows."""
        tokenizer = self._target.tokenizer
        ids: list[int] = []
        if self._task.is_complete and tokenizer is not None:
            ids = tokenizer.encode(self._task.head)
        elif tokenizer is not None and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return self._start_answer(ids or [self._start_id], None)

    def _write_turn(self, head: str, done: TokenSequence | None) -> TokenSequence | None:
        """Let the target write a user's turn that begins with `head`."""
        template, tokenizer = self._target.chat_template, self._target.tokenizer
        assert template is not None
        assert tokenizer is not None
        opened, mark, _ = template.render([*self._messages, {"role": "user", "content": MARK}]).partition(MARK)
        if not mark:
            raise ParameterError("the chat template drops what the user says; give conversations of your own.")
        self._head, self._is_user_turn = head, True
        params = SamplingParams(
            temperature=self._user_temperature, top_k=self._config.user_top_k, max_tokens=self._config.user_tokens
        )
        return self._sequence(tokenizer.encode(opened + head, add_special_tokens=False), params, done)

    def _answer_written_turn(self, done: TokenSequence) -> TokenSequence | None:
        tokenizer = self._target.tokenizer
        assert tokenizer is not None
        text = self._head + tokenizer.decode(done.tokens[done.num_prompt :])
        if self._is_question:
            head, question = text[: len(self._head)], text[len(self._head) :]
            text = head + question.partition("\n")[0].rstrip() + (self._task.tail or "")
        elif done.finish_reason == "length":
            text = _end_sentence(text, len(self._head))
        return self._ask(text.strip(), done)

    def _ask(self, text: str, done: TokenSequence | None) -> TokenSequence | None:
        """Put a complete user's turn to the target."""
        if len(text.split()) < 2:
            self._counts.empty += 1
            return None
        if not self._messages:
            self._user_hash = hash_user_turn(text)
            if self._user_hash in self._seen:
                self._counts.duplicates += 1
                return None
            self._seen.add(self._user_hash)
        template, tokenizer = self._target.chat_template, self._target.tokenizer
        if template is None or tokenizer is None:
            return self._begin_raw()
        self._messages.append({"role": "user", "content": text})
        return self._start_answer(tokenizer.encode(template.render(self._messages), add_special_tokens=False), done)

    def _start_answer(self, ids: list[int], done: TokenSequence | None) -> TokenSequence | None:
        if self._answers and ids[: self._answers[-1][1]] != self._tokens[: self._answers[-1][1]]:
            return None  # the text of the last answer has other tokens than were sampled: the document ends with it
        self._is_user_turn = False
        params = SamplingParams(temperature=self._temperature, max_tokens=self._config.answer_tokens)
        return self._sequence(ids, params, done)

    def _end_answer(self, done: TokenSequence) -> TokenSequence | None:
        self._tokens = list(done.tokens)
        is_cut = done.finish_reason == "abort"
        is_looping = is_cut or (
            done.num_new >= LOOP_TOKENS and _is_periodic(done.tokens[-LOOP_TOKENS:], LOOP_TOKENS // 2)
        )
        self._answers.append((done.num_prompt, len(done.tokens), is_looping))
        self._counts.answers += 1
        self._counts.answer_tokens += done.num_new
        self._counts.loops += is_looping
        self._counts.cut_loops += is_cut
        if is_looping or done.finish_reason != "stop" or self._target.tokenizer is None:
            return None
        text = self._target.tokenizer.decode(done.tokens[done.num_prompt :])
        self._messages.append({"role": "assistant", "content": text})
        if self._turns and self._target.chat_template is not None:
            return self._ask(self._turns.pop(0), done)
        if self._num_written_turns > 0 and self._target.chat_template is not None:
            self._num_written_turns -= 1
            return self._write_turn("", done)
        return None

    def _sequence(self, ids: list[int], params: SamplingParams, done: TokenSequence | None) -> TokenSequence | None:
        """A sequence over `ids` that takes over what `done` has computed of them."""
        info = self._target.model.info
        if len(ids) + (params.max_tokens or 0) >= info.max_model_len:
            params = replace(params, max_tokens=max(info.max_model_len - len(ids), 1))
        if len(ids) + 2 >= info.max_model_len:
            self._counts.empty += 1
            return None
        if done is None:
            cache = self._writer.new_cache(ids)
        else:
            cache = done.cache
            cache.truncate(_count_common(done.tokens[: cache.length], ids[:-1]))
        return TokenSequence("", ids, len(ids), params, self._seed, cache, frozenset(info.end_token_ids))

    # ------------------------------------------------------------------------------------------ while it is written

    @property
    def _is_question(self) -> bool:
        return self._task.tail is not None and not self._messages

    def is_enough(self, sequence: TokenSequence) -> bool:
        """Whether to stop here: behind the line of a question, or in a loop."""
        tokenizer = self._target.tokenizer
        if self._is_user_turn and self._is_question and tokenizer is not None:
            return sequence.num_new > 3 and b"\n" in tokenizer.token_bytes(sequence.tokens[-1])
        num_loop = self._config.loop_tokens
        if sequence.num_new < num_loop or sequence.num_new % 8:
            return False
        return _is_periodic(sequence.tokens[-num_loop:], min(MAX_PERIOD, num_loop // 2))

    def put_into(self, builder: CorpusBuilder) -> None:
        """Append the document, if there is one."""
        if self._answers:
            self._counts.documents += 1
            builder.add(self._tokens, self._answers, self._task.group, self._user_hash)


def _is_periodic(tokens: Sequence[int], max_period: int) -> bool:
    """Whether the tokens repeat with a period of at most `max_period`."""
    return any(tokens[period:] == tokens[:-period] for period in range(1, max_period + 1))


def _count_common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _end_sentence(text: str, num_head: int) -> str:
    """A text that was cut by length, to its last whole sentence where there is one behind the head."""
    end = max(text.rfind(mark, num_head) for mark in (".", "?", "!", "\n"))
    return text[: end + 1] if end > num_head else text


def hash_user_turn(text: str) -> int:
    """64 bits of a user's turn, the same whatever its case and spaces."""
    words = " ".join(text.lower().split())
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _join(units: Sequence[Corpus]) -> Corpus:
    counts: dict[str, int] = {}
    for unit in units:
        for name, count in unit.about["counts"].items():
            counts[name] = counts.get(name, 0) + count
    about = {**units[0].about, "counts": counts, "num_units": len(units)}
    about.pop("unit", None)
    return join_corpora(units, about)


def read_conversations(path: Path) -> list[Task]:
    """The users' turns of a JSONL file: {"messages": [{"role", "content"}, ...]} or {"prompt": ...} on each line.

    An optional "group" names the kind. Answers in the file are not read.

    Raises:
        ParameterError: naming the line that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the conversations in {path} cannot be read ({error}); give a JSONL file.") from error
    tasks = [_read_conversation(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise ParameterError(f"{path} holds no conversation; write one JSON object per line.")
    return tasks


def _read_conversation(path: Path, number: int, line: str) -> Task:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(line)
        turns = [entry["prompt"]] if "prompt" in entry else list(_user_turns(entry["messages"]))
        group = entry.get("group", OWN)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f'{where}: cannot be read ({type(error).__name__}: {error}); write {{"messages": [{{"role": "user", '
            '"content": ...}, ...]} or {"prompt": ...}.'
        ) from None
    if not turns or not all(isinstance(text, str) and text.strip() for text in [*turns, group]):
        raise ParameterError(f"{where}: no user's turn with a text; give at least one.")
    return Task(group=group, head=turns[0], is_complete=True, turns=tuple(turns[1:]))


def _user_turns(messages: Iterable[Any]) -> Iterable[str]:
    return (message["content"] for message in messages if message["role"] == "user")
