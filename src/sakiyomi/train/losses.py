"""Losses between a drafter's law q and the target's law p, each as a plain reference and in a fast form.

    ce   -log q[argmax p]                      greedy decoding
    kl   sum of p log(p / q)                   covers p; p is renormalised over the draft vocabulary
    tv   1 - alpha, alpha = sum of min(p, q)   the probability that exact speculative sampling rejects
    lk   lambda kl + (1 - lambda) tv           lambda = exp(-eta alpha) without gradient (Samarin et al., 2026)

A draft vocabulary is a subset of the ids: q lives on it alone. `tv` and `lk` compare with p as it is, *not*
renormalised over the subset, since what lies outside is mass that no draft can earn; `ce` leaves rows out whose argmax
lies outside.

The reference takes logits and lets autograd work. The fast form (`head_loss`) takes what the head reads, multiplies
with the rows of a head, and returns the gradients by formula, so that logits are never kept.

Letters: R rows, K ids of the draft vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.errors import ParameterError

ETA = 3.0
LOWEST_ALPHA = 1e-6


@dataclass(frozen=True)
class Teacher:
    """The target's law at R rows, over a draft vocabulary of K ids.

    Attributes:
        probs: p [R, K], not renormalised: what the vocabulary leaves out is missing from the sum.
        inside: the same [R, K], renormalised over the vocabulary.
        negentropy: [R], the sum of inside * log(inside).
        labels: int64 [R], the column of the target's argmax over all its ids, or -1 where it lies outside.
    """

    probs: Tensor
    inside: Tensor
    negentropy: Tensor
    labels: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, log_total: Tensor | None = None) -> Teacher:
        """From logits [R, K] of the vocabulary's ids.

        Args:
            log_total: [R], the logarithm of the sum of exp(logit) over *all* ids; None where the vocabulary is all.
        """
        log_inside = torch.log_softmax(logits, -1)
        inside = log_inside.exp()
        probs = inside if log_total is None else torch.exp(logits - log_total[:, None])
        return cls(probs, inside, torch.linalg.vecdot(inside, log_inside), labels)

    def rows(self, index: Any) -> Teacher:
        """Some of the rows."""
        inside = self.inside[index]
        probs = inside if self.probs is self.inside else self.probs[index]
        return Teacher(probs, inside, self.negentropy[index], self.labels[index])


# ---------------------------------------------------------------------------------------------- references


def ce(logits: Tensor, teacher: Teacher) -> Tensor:
    """Cross-entropy with the target's choice: logits [R, K] -> [R]."""
    is_inside = teacher.labels >= 0
    chosen = torch.log_softmax(logits, -1).gather(1, teacher.labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(is_inside, -chosen, torch.zeros_like(chosen))


def kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """Divergence from the target's law, renormalised over the vocabulary: logits [R, K] -> [R]."""
    return teacher.negentropy - (teacher.inside * torch.log_softmax(logits, -1)).sum(-1)


def tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """The probability of a rejection: logits [R, K] -> [R]."""
    return 1 - torch.minimum(teacher.probs, torch.softmax(logits, -1)).sum(-1)


def lk(logits: Tensor, teacher: Teacher) -> Tensor:
    """kl while the laws hardly overlap, tv when they do: logits [R, K] -> [R]."""
    distance = tv(logits, teacher)
    weight = torch.exp(-ETA * (1 - distance.detach()).clamp(LOWEST_ALPHA, 1))
    return weight * kl(logits, teacher) + (1 - weight) * distance


Loss = Callable[[Tensor, Teacher], Tensor]
LOSSES: dict[str, Loss] = {"ce": ce, "kl": kl, "tv": tv, "lk": lk}


def check_mix(mix: Mapping[str, float]) -> None:
    """Raise ParameterError unless `mix` gives weights of at least 0 to losses that exist."""
    for name, weight in mix.items():
        if name not in LOSSES:
            raise ParameterError(f"there is no loss {name!r}; known are {', '.join(LOSSES)}.")
        if not (isinstance(weight, int | float) and weight >= 0):
            raise ParameterError(f"the loss {name} has weight {weight!r}; give a number of at least 0.")
    if not any(mix.values()):
        raise ParameterError("no loss has a weight above 0; give one such as kl = 1.")


def mixed(mix: Mapping[str, float], logits: Tensor, teacher: Teacher) -> Tensor:
    """The weighted sum of several losses: logits [R, K] -> [R]."""
    terms = [weight * LOSSES[name](logits, teacher) for name, weight in mix.items()]
    return torch.stack(terms).sum(0)


# ---------------------------------------------------------------------------------------------- the fast form


Linear = Callable[[Tensor, Tensor], Tensor]


def head_loss(
    features: Tensor,
    head: Tensor,
    teacher: Teacher,
    mix: Mapping[str, float],
    weights: Tensor,
    linear: Linear = F.linear,
) -> Tensor:
    """The sum over rows of weight * mixed loss, for features [R, H] and a head [K, H], whose gradient is found only
    where it wants one.

    Args:
        linear: multiplies rows with those of a matrix.
    """
    loss: Tensor = _HeadLoss.apply(features, head, teacher, mix, weights, linear)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head: Tensor,
        teacher: Teacher,
        mix: Mapping[str, float],
        weights: Tensor,
        linear: Linear,
    ) -> Tensor:
        with torch.no_grad():
            losses, slopes = _value_and_slope(linear(features, head), teacher, mix, weights)
            is_trained = ctx.needs_input_grad[1]
            ctx.save_for_backward(linear(slopes, head.T), linear(slopes.T, features.T) if is_trained else None)
            return losses.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        of_features, of_head = ctx.saved_tensors
        return upstream[0] * of_features, None if of_head is None else upstream[0] * of_head, None, None, None, None


def _value_and_slope(
    logits: Tensor, teacher: Teacher, mix: Mapping[str, float], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted mixed losses [R] and their slopes [R, K] by the logits, in few passes over [R, K]: they are the cost."""
    log_total = torch.logsumexp(logits, -1)
    q = torch.exp(logits - log_total[:, None])
    losses = torch.zeros_like(log_total)
    weight_kl, weight_tv = weights * mix.get("kl", 0.0), weights * mix.get("tv", 0.0)
    tv_slopes = None
    if mix.get("tv", 0.0) or mix.get("lk", 0.0):
        alpha = torch.minimum(teacher.probs, q).sum(-1)
        share = torch.exp(-ETA * alpha.clamp(LOWEST_ALPHA, 1))
        weight_kl = weight_kl + weights * mix.get("lk", 0.0) * share
        weight_tv = weight_tv + weights * mix.get("lk", 0.0) * (1 - share)
        losses += weight_tv * (1 - alpha)
        earns = q * (q < teacher.probs)
        tv_slopes = (q * earns.sum(-1, keepdim=True) - earns).mul_(weight_tv[:, None])
    weight_ce = weights * (teacher.labels >= 0) * mix.get("ce", 0.0)
    columns = teacher.labels.clamp(min=0)[:, None]
    losses += weight_kl * (teacher.negentropy + log_total - torch.linalg.vecdot(teacher.inside, logits))
    losses += weight_ce * (log_total - logits.gather(1, columns)[:, 0])
    slopes = q.mul_((weight_kl + weight_ce)[:, None]).addcmul_(teacher.inside, weight_kl[:, None], value=-1)
    slopes.scatter_add_(1, columns, -weight_ce[:, None])
    return losses, slopes if tv_slopes is None else slopes.add_(tv_slopes)
