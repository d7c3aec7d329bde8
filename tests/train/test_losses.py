"""Losses: the fast form equals the plain one, gradients equal finite differences, and reduced vocabularies are fair."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sakiyomi.errors import ParameterError  # noqa: E402
from sakiyomi.train.losses import LOSSES, Teacher, check_mix, head_loss, mixed, tv  # noqa: E402

MIXES = [{name: 1.0} for name in LOSSES] + [{"ce": 0.3, "kl": 0.7}, {"ce": 0.1, "kl": 0.2, "tv": 0.3, "lk": 0.4}]
ROWS, IDS, WIDTH, VOCAB = 7, 11, 6, 29


def make_teacher(is_reduced: bool, seed: int = 0) -> Teacher:
    rng = np.random.default_rng(seed)
    everything = torch.from_numpy(rng.normal(0, 2, (ROWS, VOCAB if is_reduced else IDS)))
    labels = everything.argmax(-1)
    labels = torch.where(labels < IDS, labels, -1)
    return Teacher.of(everything[:, :IDS], labels, torch.logsumexp(everything, -1) if is_reduced else None)


def make_head(seed: int = 1):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.normal(0, 1, (ROWS, WIDTH))).requires_grad_()
    return features, torch.from_numpy(rng.normal(0, 1, (IDS, WIDTH)))


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_the_fast_form_equals_the_reference(mix: dict[str, float], is_reduced: bool) -> None:
    teacher = make_teacher(is_reduced)
    weights = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    features, head = make_head()
    plain = (mixed(mix, features @ head.T, teacher) * weights).sum()
    (wanted,) = torch.autograd.grad(plain, features)
    fast = head_loss(features, head, teacher, mix, weights)
    (found,) = torch.autograd.grad(3 * fast, features)
    assert float(fast.detach()) == pytest.approx(float(plain.detach()), abs=1e-10)
    assert torch.allclose(found, 3 * wanted, atol=1e-10)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if "lk" not in mix], ids=str)
def test_gradients_are_those_of_finite_differences(mix: dict[str, float]) -> None:
    """Not of lk, whose gradient leaves the change of its own weight out on purpose."""
    teacher = make_teacher(True)
    features, head = make_head()
    weights = torch.ones(ROWS, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: head_loss(x, head, teacher, mix, weights), features, atol=1e-6)


def test_the_formulas_of_the_literature() -> None:
    """Slopes by the logits: q - onehot, q - p, and q (s - E[s]) / 2 with s = sign(q - p)."""
    teacher = make_teacher(False)
    logits = torch.randn(ROWS, IDS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    q = torch.softmax(logits, -1).detach()
    sign = torch.sign(q - teacher.probs)
    wanted = {
        "ce": q - torch.nn.functional.one_hot(teacher.labels, IDS),
        "kl": q - teacher.probs,
        "tv": q * (sign - (q * sign).sum(-1, keepdim=True)) / 2,
    }
    for name, slope in wanted.items():
        (found,) = torch.autograd.grad(LOSSES[name](logits, teacher).sum(), logits)
        assert torch.allclose(found, slope, atol=1e-9), name


def test_every_loss_is_least_where_the_laws_agree() -> None:
    teacher = make_teacher(False)
    for name in ("kl", "tv", "lk"):
        assert torch.allclose(LOSSES[name](teacher.probs.log(), teacher), torch.zeros(ROWS, dtype=torch.float64))
    assert float(tv(torch.zeros(ROWS, IDS, dtype=torch.float64), teacher).min()) > 0.1


def test_what_a_vocabulary_leaves_out_cannot_be_earned() -> None:
    """alpha counts p as it is: over a vocabulary that holds a part of p, even the best q is rejected that often."""
    teacher = make_teacher(True)
    best = tv(teacher.inside.log(), teacher)
    assert torch.allclose(best, 1 - teacher.probs.sum(-1), atol=1e-9)
    outside = teacher.labels < 0
    assert outside.any()
    assert (LOSSES["ce"](teacher.inside.log(), teacher)[outside] == 0).all()


@pytest.mark.parametrize(("mix", "told"), [({"mse": 1}, "mse"), ({"kl": -1}, "-1"), ({"kl": 0}, "above 0")])
def test_a_wrong_mix_is_refused(mix: dict[str, float], told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        check_mix(mix)
