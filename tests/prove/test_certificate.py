"""What is proven is certified, what is wrong is refuted, and a test that shows nothing is void."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
from toys import PLAN, PROMPTS, RoundingModel, drafting, load, make_target

from sakiyomi.assemble import make_verifier
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.prove.certificate import Certificate, certify, describe_model, digest
from sakiyomi.prove.controls import AcceptControl, RedrawControl, ShiftControl
from sakiyomi.prove.page import provenance_rows, render, tables
from sakiyomi.tree import Draft
from sakiyomi.types import DrafterContext

SHORT = replace(PLAN, num_draws=400)


def run(rule: str, wrap: Callable = lambda verifier: verifier, width: int = 1, plan=SHORT) -> Certificate:
    target, verifier = make_target(), wrap(make_verifier(rule))
    return certify(target, drafting(target, verifier, width), verifier, PROMPTS, plan, provenance={"command": "<x>"})


@pytest.fixture(scope="module")
def proven() -> dict[str, Certificate]:
    return {rule: run(rule) for rule in ("match", "rejection")}


def test_correct_rules_are_certified(proven: dict[str, Certificate]) -> None:
    for certificate in proven.values():
        assert certificate.outcome == "proven", certificate.reason
        assert certificate.provenance["seed"] == SHORT.seed
        assert certificate.provenance["cpu_seconds"] >= 0
    match, rejection = proven["match"], proven["rejection"]
    assert {result.temperature for result in match.identity} == {0.0, 0.7, 1.0}
    assert {result.batch for result in match.identity} >= {1, 2, 3}
    assert len({result.budget for result in match.identity}) >= 4
    assert [control.finding for control in match.identity_controls] == ["fault"] * 3
    assert match.law is None
    assert rejection.law.num_draws == SHORT.num_draws
    assert {result.temperature for result in rejection.identity} == {0.0}
    assert any(control.is_rejected for control in rejection.law_controls)


def test_a_tree_rule_is_certified_over_trees() -> None:
    certificate = run("tree", width=2, plan=replace(SHORT, settings=(SamplingParams(temperature=1.0),)))
    assert certificate.outcome == "proven", certificate.reason
    assert {context.budget for context in certificate.contexts} == {6}
    assert not certificate.identity


@pytest.mark.parametrize("control", [AcceptControl, RedrawControl, ShiftControl])
def test_wrong_verifiers_are_refuted(control: type) -> None:
    plan = replace(SHORT, num_draws=3000, settings=(SamplingParams(temperature=1.0),))
    assert run("match", control, plan=plan).outcome == "refuted"
    assert run("rejection", control, plan=plan).outcome == "refuted"


def test_rounding_is_certified_as_such_and_a_fault_is_not() -> None:
    verifier = make_verifier("match")
    for model, outcome in ((RoundingModel(1e-6), "proven"), (RoundingModel(1e-6, fault=0.01), "refuted")):
        target = load(model)
        certificate = certify(target, drafting(target, verifier), verifier, PROMPTS, SHORT)
        assert certificate.outcome == outcome
        assert "rounding" in certificate.claim
        assert len(certificate.noise) == len(SHORT.settings)


def test_nothing_drafted_is_void() -> None:
    for rule in ("match", "rejection"):
        certificate = certify(make_target(), lambda wrap: NoneDrafter(), make_verifier(rule), PROMPTS, SHORT)
        assert certificate.outcome == "void"
        assert "guessed nothing" in certificate.reason


def test_a_drafter_that_equals_the_target_is_certified() -> None:
    target, verifier = make_target(), make_verifier("rejection")

    def build(wrap):
        context = DrafterContext(wrap(target.model), lambda name: wrap(target.model), verifier.draw)
        return ModelDrafter(ModelDrafter.Config(model="itself"), context)

    certificate = certify(target, build, verifier, PROMPTS, SHORT)
    assert certificate.outcome == "proven", certificate.reason
    assert certificate.law.num_accepted_tokens == certificate.law.num_draft_tokens
    assert [control.is_rejected for control in certificate.law_controls] == [False, False, True]


def test_a_setting_without_a_guess_is_void() -> None:
    class SomeTimes(NoneDrafter):
        def propose(self, sequences, budgets):
            return [Draft.chain([0] if one.params.temperature != 0.7 else []) for one in sequences]

    certificate = certify(make_target(), lambda wrap: SomeTimes(), make_verifier("rejection"), PROMPTS, SHORT)
    assert certificate.outcome == "void"
    assert "at temperature 0.7, top_p 0.9" in certificate.reason


def test_at_temperature_0_rules_of_a_law_are_certified_by_their_tokens() -> None:
    certificate = run("block", plan=replace(SHORT, settings=(SamplingParams(temperature=0.0),)))
    assert certificate.outcome == "proven"
    assert certificate.law is None
    assert [control.error.partition(":")[0] for control in certificate.identity_controls] == ["accept", "shift"]


def test_a_test_that_passes_wrong_verifiers_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    class Right(ShiftControl):
        def verify(self, *judged):
            return self.inner.verify(*judged)

    monkeypatch.setattr("sakiyomi.prove.certificate.CONTROLS", (Right,))
    for rule in ("match", "rejection"):
        certificate = run(rule)
        assert certificate.outcome == "void"
        assert "shows nothing" in certificate.reason


def test_lossy_verifiers_and_no_prompts_are_refused() -> None:
    target, lossy = make_target(), make_verifier("typical:lossy=true")
    with pytest.raises(ParameterError, match="typical is lossy"):
        certify(target, lambda wrap: NoneDrafter(), lossy, PROMPTS)
    with pytest.raises(ParameterError, match="no prompts"):
        certify(target, lambda wrap: NoneDrafter(), make_verifier("match"), [])
    with pytest.raises(ParameterError, match="num_draws=0"):
        replace(PLAN, num_draws=0)


def test_json_is_json(proven: dict[str, Certificate]) -> None:
    for certificate in proven.values():
        values = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
        assert values["certificate"] == 1
        assert values["proven"] is True
        assert set(values) >= {"outcome", "claim", "reason", "alpha", "power", "provenance", "noise", "contexts"}
        assert set(values) >= {"identity", "identity_controls", "law", "law_controls"}
    law = values["law"]
    assert law["rejected"] is False
    assert 0 < law["least_deviation"] <= 1
    assert law["curve"][-1][0] == SHORT.num_draws
    assert len(law["prefixes"][0]["probs"]) == len(law["prefixes"][0]["counts"])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag not in ("meta", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(proven: dict[str, Certificate]) -> None:
    for rule, certificate in proven.items():
        page = render(certificate)
        tags = Tags()
        tags.feed(page)
        assert tags.open == []
        assert not {"script", "link", "img", "iframe"} & set(tags.seen)
        assert not re.search(r"https?:|url\(|@import", page)
        assert ("svg" in tags.seen) == (rule == "rejection")
        assert "&lt;x&gt;" in page
        assert escape(certificate.claim) in page
        for table in tables(certificate):
            assert all(len(row) == len(table.head) for row in table.rows)
    assert ("command", "<x>") in provenance_rows(certificate)


def test_digests_tell_files_apart(tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert digest(folder / "none") is None
    (folder / "a").write_bytes(b"1")
    one, of_file = digest(folder), digest(folder / "a")
    (folder / "b").write_bytes(b"1")
    assert len({one, of_file, digest(folder)}) == 3
    assert describe_model(make_target())["backend"] == "toy"
