"""Optimisers and rounded products: what moves how, what a run goes on from, and what rounding costs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sakiyomi.errors import ParameterError  # noqa: E402
from sakiyomi.train.optimizers import Optimizer  # noqa: E402
from sakiyomi.train.rounded import RoundedOps  # noqa: E402


def make_parameters(seed: int = 0):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wide.weight": (8, 24), "tall.weight": (24, 8), "start.tokens": (20, 8), "bias": (8,)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def put_gradients(parameters, seed: int) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    for value in parameters.values():
        # Directions of very different size: plain descent would hardly move along most of them.
        scales = torch.logspace(-3, 0, value.shape[-1])
        value.grad = torch.randn(value.shape, generator=generator) * scales


def make_optimizer(parameters, name: str, weight_decay: float = 0.0) -> Optimizer:  # type: ignore[no-untyped-def]
    return Optimizer(parameters, {"start.tokens"}, name, weight_decay, 2.0)


def test_muon_moves_all_directions_of_a_matrix_alike_and_leaves_tables_and_vectors_to_adamw() -> None:
    moves = {}
    for name in ("adamw", "muon"):
        parameters = make_parameters()
        optimizer = make_optimizer(parameters, name)
        before = {key: value.detach().clone() for key, value in parameters.items()}
        put_gradients(parameters, 1)
        gradients = {key: value.grad.clone() for key, value in parameters.items()}
        optimizer.step(0.01)
        moves[name] = {key: value.detach() - before[key] for key, value in parameters.items()}
    for key in ("start.tokens", "bias"):
        assert torch.equal(moves["adamw"][key], moves["muon"][key])
    for key in ("wide.weight", "tall.weight"):
        spreads = [
            values.max() / values.min() for values in map(torch.linalg.svdvals, (gradients[key], moves["muon"][key]))
        ]
        assert spreads[0] > 10
        assert spreads[1] < spreads[0] / 3
        # Told for updates of AdamW's size (0.2 a weight, times the factor), whatever the shape.
        assert float(moves["muon"][key].square().mean().sqrt()) == pytest.approx(0.2 * 0.02, rel=0.25)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_goes_on_from_the_sums(name: str) -> None:
    whole, halves = make_parameters(), make_parameters()
    optimizer, first = make_optimizer(whole, name, 0.05), make_optimizer(halves, name, 0.05)
    for seed in range(3):
        for parameters, one in ((whole, optimizer), (halves, first)):
            put_gradients(parameters, seed)
            one.step(0.01)
    kept = {key: value.clone() for key, value in first.tensors().items()}
    assert {key.partition(".")[2] for key in kept} == set(whole)
    second = make_optimizer(halves, name, 0.05)
    second.load(kept)
    for seed in range(3, 6):
        for parameters, one in ((whole, optimizer), (halves, second)):
            one.clear()
            assert all(value.grad is None for value in parameters.values())
            put_gradients(parameters, seed)
            one.step(0.005)
    for key, value in whole.items():
        assert torch.equal(value, halves[key])


def test_muon_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ParameterError, match=r"torch 2\.9"):
        make_optimizer(make_parameters(), "muon")
    make_optimizer(make_parameters(), "adamw")


@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 64, 64), (5, 3, 7), (257, 96, 300), (64, 128, 1), (70, 1, 9)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rounded_products_are_those_of_rounded_operands(rows: int, width: int, outputs: int, has_bias: bool) -> None:
    """Whatever the padding; and so are both gradients."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int):  # type: ignore[no-untyped-def]
        return torch.randn(shape, generator=generator)

    x, weight, bias, slope = draw(rows, width), draw(outputs, width), draw(outputs), draw(rows, outputs)
    found_x, found_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    found = RoundedOps().linear(found_x, found_weight, bias if has_bias else None)
    found.backward(slope)
    x, weight, slope = (one.bfloat16().float() for one in (x, weight, slope))
    wanted = x @ weight.T + (bias if has_bias else 0)
    pairs = [(found, wanted), (found_x.grad, slope @ weight), (found_weight.grad, slope.T @ x)]
    for one, other in pairs:
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))


def test_a_weight_that_stands_still_gets_no_gradient() -> None:
    x = torch.ones(3, 64, requires_grad=True)
    weight = torch.ones(64, 64)
    RoundedOps().linear(x, weight).sum().backward()
    assert weight.grad is None
    assert torch.equal(x.grad, torch.full((3, 64), 64.0))
