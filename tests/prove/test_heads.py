"""`prove` over trained heads: rules that keep the distribution, with the laws that the heads tell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toys import PLAN

from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter, make_verifier
from sakiyomi.params import SamplingParams
from sakiyomi.prove.certificate import certify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import eagle3_parts, medusa_parts, write_head

HEADS: dict[str, Callable[[], Any]] = {
    "eagle3": eagle3_parts,
    "peagle": lambda: eagle3_parts(mask_token_id=5),
    "medusa": medusa_parts,
}
PROMPTS = [list(b"The river"), list(b"A boat was")]
WARM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> LoadedModel:
    return load_model(write_llama(tmp_path_factory.mktemp("target")), ModelOptions(dtype="float32", threads=1))


@pytest.mark.parametrize(("rule", "shape"), [("rejection", "width=1"), ("tree", "width=2,max_nodes=6")])
@pytest.mark.parametrize("name", HEADS)
def test_rules_of_a_law_are_certified(tmp_path: Path, target: LoadedModel, name: str, rule: str, shape: str) -> None:
    folder = write_head(tmp_path, *HEADS[name]())
    verifier = make_verifier(rule)
    certificate = certify(
        target,
        lambda wrap: make_drafter(
            f"{name}:path={folder},num_speculative_tokens=3,{shape}",
            target,
            ModelOptions(),
            draw=verifier.draw,
            wrap=wrap,
        ),
        verifier,
        PROMPTS,
        replace(PLAN, settings=(WARM,), num_draws=600),
    )
    assert certificate.outcome == "proven", certificate.reason
    assert certificate.law is not None
    assert certificate.law.num_accepted_tokens > 0
    assert any(control.is_rejected for control in certificate.law_controls)
