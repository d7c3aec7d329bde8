"""The stages in their order, each resumable and each callable alone: data, capture, fit, measure, export.

    OUT/data/unit-*.safetensors          the text (shared by all drafters of a target)
    OUT/capture/TAPS/shard-*.safetensors what the target's layers say on it (shared by drafters with the same taps)
    OUT/DRAFTER/                         what the fit keeps; drafter.safetensors, and fit.json when it is done
    OUT/DRAFTER/measured.json            what it reaches
    OUT/DRAFTER.safetensors              the drafter, for `--drafter DRAFTER:path=...`
    OUT/DRAFTER-speculators/             the same for vLLM, with export.format = "speculators"

Every file is whole or absent. A stage whose inputs have not changed since it finished is not done again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.checkpoints.drafter import read_drafter, write_drafter
from sakiyomi.errors import ParameterError
from sakiyomi.train.capture import capture, digest_text, open_captured
from sakiyomi.train.corpus import Corpus
from sakiyomi.train.data import load_corpus, write_corpus
from sakiyomi.train.estimate import Announce, Report, announce_nothing, say_nothing
from sakiyomi.train.export import check_export, export_speculators
from sakiyomi.train.files import hash_file, read_json, replacing, write_json
from sakiyomi.train.measure import choose_prompts, measure_drafter
from sakiyomi.train.recipe import Recipe
from sakiyomi.train.shards import Shards
from sakiyomi.train.target import check_target, identify_target

STAGES = ("data", "capture", "fit", "measure", "export")


@dataclass(frozen=True)
class Trained:
    """What a run left.

    Attributes:
        path: the exported drafter, or None where that stage was not asked for.
        folder: the same for another engine, or None.
        measured: the entries of measured.json, or None.
        counts: of the text: documents, answers, loops, duplicates.
    """

    path: Path | None
    folder: Path | None
    measured: list[dict[str, Any]] | None
    counts: dict[str, int]


class Pipeline:
    """The stages of one recipe for one target in one folder.

    Args:
        report: told what is going on.
        announce: told before each long stage what it will take.
    """

    def __init__(
        self,
        target: LoadedModel,
        recipe: Recipe,
        folder: Path,
        report: Report = say_nothing,
        announce: Announce = announce_nothing,
    ) -> None:
        self.target = target
        self.recipe = recipe
        self.folder = folder
        self.report = report
        self.announce = announce
        self.identity = identify_target(target)

    def run(self, stages: Sequence[str] = STAGES) -> Trained:
        """Do some stages, in their order; what they need of earlier ones must be there or among them.

        Raises:
            ParameterError: an unknown stage, a stage without its inputs, inputs of another target, no room.
        """
        for stage in stages:
            if stage not in STAGES:
                raise ParameterError(f"there is no stage {stage!r}; known are {', '.join(STAGES)}.")
        check_export(self.recipe.export, self.recipe.drafter, self.target)
        corpus = self._read_text("data" in stages)
        if "capture" in stages and self.recipe.capture.taps:
            self._capture(corpus)
        if "fit" in stages:
            self._fit(corpus, must_capture="capture" not in stages)
        measured = self._measure(corpus) if "measure" in stages else None
        path, folder = self._export() if "export" in stages else (None, None)
        return Trained(path, folder, measured, corpus.about["counts"])

    # ------------------------------------------------------------------------------------------ folders

    @property
    def work(self) -> Path:
        """Where the fit keeps its files."""
        return self.folder / self.recipe.drafter

    @property
    def captured(self) -> Path:
        layers = self.recipe.capture.layers(self.target.model.info.num_layers)
        return self.folder / "capture" / "-".join(map(str, layers))

    # ------------------------------------------------------------------------------------------ stages

    def _read_text(self, may_write: bool) -> Corpus:
        folder = self.folder / "data"
        if may_write:
            corpus = write_corpus(self.target, self.recipe.data, folder, self.report, self.announce)
            write_json(folder / "text.json", {**corpus.about, **_describe(corpus)})
            return corpus
        corpus = load_corpus(folder)
        told = {key: value for key, value in self.identity.items() if key != "dtype"}
        check_target(corpus.about["target"], told, f"the text in {folder}")
        return corpus

    def _split(self, corpus: Corpus) -> Corpus:
        """What the fit may see."""
        held_out = set(self.recipe.measure.held_out(len(corpus)))
        return corpus.subset([index for index in range(len(corpus)) if index not in held_out])

    def _capture(self, corpus: Corpus) -> Shards:
        settings = self.recipe.capture
        return capture(self.target, self._split(corpus), settings, self.captured, self.report, self.announce)

    def _fit(self, corpus: Corpus, must_capture: bool) -> Path:
        mine = self._split(corpus)
        marker, inputs = self.work / "fit.json", self._fit_inputs(mine)
        done = read_json(marker)
        if done is not None and done["inputs"] == inputs:
            there = self.work / str(done["file"])
            if there.exists() and hash_file(there) == done["sha256"]:
                return there
        fit = self.recipe.load_fit()
        shards = open_captured(self.target, mine, self.recipe.capture, self.captured, must_capture)
        self.work.mkdir(parents=True, exist_ok=True)
        path = fit(self.recipe.fit, shards, self.target.model, self.work, self.report, self.announce)
        write_json(marker, {"inputs": inputs, "file": path.name, "sha256": hash_file(path)})
        return path

    def _fit_inputs(self, corpus: Corpus) -> str:
        layers = list(self.recipe.capture.layers(self.target.model.info.num_layers))
        content = [self.identity, digest_text(corpus), layers, self.recipe.fit_with, dict(self.recipe.fit)]
        return _digest(content)

    def _fitted(self) -> Path:
        done = read_json(self.work / "fit.json")
        path = None if done is None else self.work / str(done["file"])
        if path is None or not path.exists():
            raise ParameterError(f"{self.work} holds no fitted drafter; run the stage fit first.")
        return path

    def _measure(self, corpus: Corpus) -> list[dict[str, Any]]:
        settings, path = self.recipe.measure, self._fitted()
        inputs = _digest([self.identity, hash_file(path), digest_text(corpus), self.recipe.as_dict()["measure"]])
        place = self.work / "measured.json"
        done = read_json(place)
        if done is not None and done["inputs"] == inputs:
            results: list[dict[str, Any]] = done["results"]
            return results
        held_out = settings.held_out(len(corpus))
        if settings.documents == "training":
            held_out = sorted(set(range(len(corpus))) - set(held_out))
        prompts = choose_prompts(corpus, held_out, settings.prompts)
        options = {"path": str(path)}
        measured = measure_drafter(
            self.target, self.recipe.drafter, options, prompts, settings, self.report, self.announce
        )
        results = json.loads(json.dumps([one.as_dict() for one in measured]))
        write_json(place, {"inputs": inputs, "documents": settings.documents, "results": results})
        return results

    def _export(self) -> tuple[Path, Path | None]:
        path = self.folder / f"{self.recipe.drafter}.safetensors"
        fitted = read_drafter(self._fitted())
        measured = read_json(self.work / "measured.json") or {}
        short = [_shorten(one) for one in measured.get("results", ())]
        told = {"recipe": self.recipe.as_dict(), "measured": {"results": short}}
        drafter = replace(fitted, recipe=json.loads(json.dumps(told["recipe"])), measured=told["measured"])
        with replacing(path) as working:
            write_drafter(working, drafter)
        if self.recipe.export.format == "sakiyomi":
            return path, None
        folder = self.folder / f"{self.recipe.drafter}-speculators"
        export_speculators(folder, drafter, self.target, self.recipe.export)
        return path, folder


def _shorten(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("drafter", "length", "temperature", "verifier", "mean_acceptance_length", "acceptance_per_position")
    return {key: result[key] for key in keys}


def _describe(corpus: Corpus) -> dict[str, Any]:
    groups = {name: int((corpus.groups == number).sum()) for number, name in enumerate(corpus.group_names)}
    answered = int((corpus.spans[:, 2] - corpus.spans[:, 1]).sum()) if len(corpus.spans) else 0
    return {
        "num_documents": len(corpus),
        "num_tokens": corpus.num_tokens,
        "num_answer_tokens": answered,
        "longest": int(np.max(corpus.lengths, initial=0)),
        "groups": {name: count for name, count in groups.items() if count},
        "sha256": digest_text(corpus),
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()
