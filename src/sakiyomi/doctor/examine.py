"""One checkpoint beside one target, from its file to its drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sakiyomi.assemble import LoadedModel, read_drafter_at
from sakiyomi.checkpoints.files import read_json
from sakiyomi.doctor.findings import Diagnosis, Finding, Probe
from sakiyomi.doctor.probe import (
    TRIAL_GAIN,
    TRIAL_LEVEL,
    Report,
    binomial_tail,
    run_probe,
    target_theta,
)
from sakiyomi.doctor.weights import EAGLE, check_copies, check_head_present, check_lent, check_zeros
from sakiyomi.errors import SakiyomiError
from sakiyomi.nets.binding import cut_padding, find_mismatch, resolve_taps
from sakiyomi.types import DrafterFile, Model


def examine(
    path: Path,
    target: LoadedModel,
    prompts: Seq[Seq[int]],
    *,
    num_tokens: int = 64,
    report: Report = lambda what, done, total: None,
) -> Diagnosis:
    """Check a trained drafter: its file, its weights, whether it fits `target`, and how it drafts.

    Args:
        path: a folder of EAGLE, P-EAGLE, speculators or Medusa heads, or a drafter file of ours.
        prompts: ids; no prompt leaves the probe out.
        num_tokens: of each answer of the probe.
    """
    report("reading", 0, 0)
    findings: list[Finding] = []
    try:
        stored = read_drafter_at(path)
    except SakiyomiError as error:
        findings.append(_told(error, "file"))
        return _diagnosis(path, target, None, findings, None)
    config = read_json(path / "config.json", {}) if path.is_dir() else {}
    report("weights", 0, 0)
    findings += check_zeros(stored)
    findings += check_copies(stored)
    if path.is_dir():
        findings += check_head_present(stored, target.model.info.vocab_size)
        findings += _check_settings(stored, config, target)
    is_fitting = True
    for finding in _check_target(stored, target.model):
        findings.append(finding)
        is_fitting = is_fitting and not finding.is_fault
    probe = None
    if is_fitting and "probe" not in stored.target:
        stored = cut_padding(stored, target.model.info.vocab_size)
    if is_fitting and prompts:
        room = max(target.model.info.max_model_len - num_tokens - 1, 1)
        try:
            probe = run_probe(stored, str(path), target, [ids[-room:] for ids in prompts], num_tokens, report)
            findings += _judge(probe)
        except (SakiyomiError, ValueError, IndexError) as error:
            findings.append(_told(error, "drafting"))
    return _diagnosis(path, target, stored, findings, probe)


def _diagnosis(
    path: Path, target: LoadedModel, stored: DrafterFile | None, findings: Seq[Finding], probe: Probe | None
) -> Diagnosis:
    return Diagnosis(
        checkpoint=str(path),
        target=target.model.info.name,
        summary=None if stored is None else describe(stored, target.model),
        findings=tuple(findings),
        probe=probe,
    )


def describe(stored: DrafterFile, model: Model) -> str:
    """A drafter in one line."""
    info, config = model.info, stored.config
    parts = [stored.kind]
    if stored.kind in (*EAGLE, "mlp"):
        try:
            parts.append("reads layers " + ", ".join(map(str, resolve_taps(stored, info.num_layers))))
        except SakiyomiError:
            parts.append(f"reads layers {list(stored.taps)}")
    if stored.kind == "medusa":
        parts.append(f"{config['num_heads']} heads of {config['num_layers']} blocks")
    flags = [flag for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output") if config.get(flag)]
    parts += [f"with {', '.join(flags)}"] if flags else []
    if stored.kind != "table":
        num_ids = info.vocab_size if stored.vocabulary is None else len(stored.vocabulary)
        parts.append(f"drafts {num_ids:,} of {info.vocab_size:,} ids")
    size = sum(int(getattr(tensor, "size", 0)) or _count(tensor.shape) for tensor in stored.tensors.values())
    return "; ".join([*parts, f"{size / 1e6:.2f} M numbers"])


def _count(shape: Seq[int]) -> int:
    return shape[0] * shape[1]


def _told(error: Exception, part: str) -> Finding:
    return Finding(part=part, found=" ".join(str(error).split()))


# ---------------------------------------------------------------------------------------------- what the file tells


def _check_settings(stored: DrafterFile, config: Mapping[str, Any], target: LoadedModel) -> Iterator[Finding]:
    if stored.kind == "medusa":
        yield from _check_medusa(stored, config)
    if stored.kind not in EAGLE:
        return
    num_layers = target.model.info.num_layers
    if stored.kind != "eagle1" and not stored.taps:
        default = (2, num_layers // 2, num_layers - 3)
        yield Finding(
            part="layer ids",
            found="config.json names no layers",
            expected=f"eagle_aux_hidden_state_layer_ids; engines then take {list(default)}",
            remedy="add the layers that it was trained with",
            is_fault=False,
        )
    if "speculators_model_type" in config and "norm_before_residual" not in config:
        yield Finding(
            part="norm_before_residual",
            found="config.json does not tell it",
            expected="true or false; vLLM takes true for eagle3 and false for peagle, the library's own class false",
            remedy="add it; the probe tries both",
            is_fault=False,
        )
    layers = config.get("transformer_layer_config") or config
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    told, theirs = layers.get("rope_theta", rope.get("rope_theta")), target_theta(target)
    if told is not None and theirs is not None and float(told) != theirs:
        yield Finding(
            part="rope_theta",
            found=f"rope_theta is {told:g}, the target's is {theirs:g}",
            expected="the base that it was trained with, mostly the target's; official EAGLE-3 heads have 10000 and no "
            "such key",
            remedy="if acceptance falls with the length of the text, set it to the target's",
            is_fault=False,
        )


def _check_medusa(stored: DrafterFile, config: Mapping[str, Any]) -> Iterator[Finding]:
    num_heads = int(stored.config["num_heads"])
    is_vllm = config.get("model_type") == "medusa"
    told = config.get("num_heads" if is_vllm else "medusa_num_heads")
    if told is not None and told < num_heads:
        yield Finding(
            part="heads",
            found=f"config.json tells of {told} heads, the weights hold {num_heads}",
            expected="one number; engines that believe the configuration leave heads out",
            remedy=f"set it to {num_heads}",
            is_fault=False,
        )
    if is_vllm and not config.get("medusa_fc_bias") and any(name.endswith(".bias") for name in stored.tensors):
        yield Finding(
            part="medusa_fc_bias",
            found="the blocks have biases and config.json does not say so",
            expected="medusa_fc_bias = true; without it vLLM drops them silently",
            remedy="set it (sakiyomi reads them all the same)",
            is_fault=False,
        )


# ---------------------------------------------------------------------------------------------- beside the target


def _check_target(stored: DrafterFile, model: Model) -> Iterator[Finding]:
    lent, info = model.lend(), model.info
    if lent is None:
        yield Finding(
            part="target",
            found=f"{info.name} lends no weights",
            expected="a target of the native or torch backend",
            remedy="load it with --backend native or torch",
        )
        return
    mismatch = _find_mismatch(stored, model)
    if mismatch is not None:
        yield Finding(
            part="target",
            found=f"made for {stored.target.get('name') or 'another model'}, not for {info.name}: {mismatch}",
            expected="a drafter of this target",
            remedy=f"take another, or train one with `sakiyomi train {stored.kind}`",
        )
        return
    if stored.vocabulary is not None:
        yield from _check_vocabulary(stored, info.vocab_size, info.padded_vocab_size)
    if stored.kind in EAGLE:
        try:
            resolve_taps(stored, info.num_layers)
        except SakiyomiError as error:
            yield _told(error, "layer ids")
            return
    if stored.kind in EAGLE and stored.config["hidden_size"] == info.hidden_size:
        yield from check_lent(stored, lent, info.vocab_size)


def _find_mismatch(stored: DrafterFile, model: Model) -> str | None:
    lent, info = model.lend(), model.info
    if stored.kind == "table":  # about tokens alone
        told = stored.target.get("vocab_size")
        return None if told == info.vocab_size else f"its vocabulary has {info.vocab_size} ids and not {told}"
    assert lent is not None, "asked of targets that lend"
    rows, own = stored.config.get("vocab_size"), stored.vocabulary
    if stored.kind == "medusa" and own is None and rows not in (None, info.vocab_size, info.padded_vocab_size):
        return f"its vocab_size is {info.vocab_size} and the heads have {rows} rows"
    return find_mismatch(stored.target, info, lent)


def _check_vocabulary(stored: DrafterFile, vocab_size: int, padded_size: int | None) -> Iterator[Finding]:
    ids = stored.vocabulary
    assert ids is not None
    if len(ids) and int(ids.max()) >= (padded_size or vocab_size):
        yield Finding(
            part="draft vocabulary",
            found=f"it names id {int(ids.max())}",
            expected=f"ids below the target's {vocab_size}",
            remedy="check that the drafter was made for this target",
        )
    elif 0 < len(ids) < vocab_size and int(ids[-1]) == len(ids) - 1:
        yield Finding(
            part="d2t",
            found=f"d2t is all zero, so the first {len(ids)} of {vocab_size} ids are drafted",
            expected="offsets to the most frequent ids",
            remedy="export d2t with the drafter, unless it was trained for the first ids",
            is_fault=False,
        )


# ---------------------------------------------------------------------------------------------- what the probe says


def _judge(probe: Probe) -> Iterator[Finding]:
    if probe.is_chance:
        yield Finding(
            part="acceptance",
            found=f"the first token is right at {probe.agreement:.1%} of {probe.num_starts} places, which is the level "
            f"of chance ({probe.chance:.1%})",
            expected="a trained drafter of this target is right at 20 % and more",
            remedy="check that the checkpoint is a trained one and was made for this very model and chat template",
            is_fault=False,
        )
    num_trials = max(len(probe.trials), 1)
    for trial in probe.trials:
        differing = trial.num_better + trial.num_worse
        luck = binomial_tail(trial.num_better, differing, 0.5) * num_trials
        if trial.mean_length - probe.mean_length > TRIAL_GAIN and luck < TRIAL_LEVEL:
            yield Finding(
                part=trial.part,
                found=f"as the file tells, {probe.mean_length:.2f} drafted tokens are right on average",
                expected=f"with {trial.change} it is {trial.mean_length:.2f} (better at {trial.num_better} places, "
                f"worse at {trial.num_worse})",
                remedy="correct config.json, or the export that wrote it"
                if trial.part not in ("lm_head", "lm_heads", "embed_tokens")
                else f"the file's {trial.part} was replaced: restore it, or drop it so that the target's is taken",
            )
