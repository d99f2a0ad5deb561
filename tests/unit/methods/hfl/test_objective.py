"""The regularised loss for many weights at once, against one set of weights at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.methods.hfl.response import Objective
from lapwing.networks.functionals import scalar
from tests import problems
from tests.cases import BY_NAME
from tests.minima import copied, data, fitted, new, small
from tests.references import dense
from tests.references.minimum import Energy
from tests.tolerances import assert_close

D = torch.float64
KINDS = [("gaussian", 2), ("categorical", 3), ("bernoulli", 1), ("poisson", 1)]


def built(energy: Energy, dtype: torch.dtype = D, **options: Any) -> Objective:
    posterior = fitted(energy, lw.baselines.MapOnly(), **options)
    device = torch.device("cpu")
    return Objective.build(posterior.network, posterior.likelihood, posterior.prior, Data(data(energy), device), dtype)


def steps(energy: Energy, count: int = 3) -> Tensor:
    return 0.3 * torch.randn(count, len(energy.theta), dtype=D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_gradients_and_curvature(kind: str, outputs: int) -> None:
    energy = copied(small(kind, outputs), mean=0.1)
    objective, d = built(energy), steps(energy)
    expected = torch.stack([energy.gradient(energy.theta + row) for row in d])
    assert_close(objective.gradient(d), expected)
    assert_close(objective.hessian_product(d), d @ energy.hessian())
    moved = objective.recentred(d[0])
    assert_close(moved.gradient(d), torch.stack([energy.gradient(energy.theta + d[0] + row) for row in d]))
    assert_close(moved.hessian_product(d), d @ energy.hessian(energy.theta + d[0]))
    values = torch.tensor([objective.value(row) - objective.value(0 * row) for row in d], dtype=D)
    constants = torch.stack([energy(energy.theta + row) - energy(energy.theta) for row in d]).detach()
    assert_close(values, constants)  # up to what does not depend on the weights
    assert objective.size == len(energy.theta)
    assert objective.data == 25


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_outputs_and_their_slopes(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    objective, d, x = built(energy), steps(energy), new(energy, 3)
    expected = torch.stack([energy.output(energy.theta + row, x) for row in d])
    assert_close(objective.outputs(d, x), expected)
    assert_close(objective.each_output(d, x), torch.stack([expected[k, k] for k in range(3)]))
    seeds = torch.randn(3, outputs, dtype=D)
    slopes = []
    for k in range(3):
        moved = copied(energy)
        moved.place(energy.theta + d[k])
        slopes.append(seeds[k] @ moved.jacobian(x[k : k + 1]))
    assert_close(objective.slopes(d, x, seeds), torch.stack(slopes))


def test_some_weights() -> None:
    index = torch.tensor([0, 7, 13, 24])
    energy = copied(small(), index=index)
    objective = built(energy, weights=lw.subnetwork(index))
    d = steps(energy)
    assert_close(objective.gradient(d), torch.stack([energy.gradient(energy.theta + row) for row in d]))
    assert_close(objective.hessian_product(d), d @ energy.hessian())
    named = objective.weights(d[0])
    expected = energy.named(energy.theta + d[0])
    assert set(named) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in named.items():
        assert_close(value, expected[name])


def test_some_batches_stand_for_all() -> None:
    """A batch of five of 25 counts five times; the prior counts once."""
    energy = small()
    objective, d = built(energy), steps(energy)
    batch = Batch(energy.x[:5], energy.y[:5])
    part = Energy("gaussian", energy.model, energy.x[:5], energy.y[:5], energy.precision, energy.phi / 5)
    expected = torch.stack([part.gradient(energy.theta + row) for row in d])
    assert_close(objective.gradient(d, (batch,)), expected)


def test_a_gradient_of_a_function_of_the_weights() -> None:
    energy = small()
    objective, d = built(energy), steps(energy)[:1]
    slope = lambda function: objective.each(torch.func.grad(lambda row: scalar(function(objective.weights(row)))), d, 1)
    expected = torch.zeros(25, dtype=D)
    expected[:12] = 2 * (energy.theta + d[0])[:12]
    expected[24] = 1
    assert_close(slope(lambda w: w["0.weight"].square().sum() + w["2.bias"].sum())[0], expected)
    with pytest.raises(
        lw.errors.ModelError, match=r"gives a tensor of the shape \(6, 2\); expected a tensor of one number"
    ):
        slope(lambda w: w["0.weight"])


def test_chunks_of_rows_make_no_difference() -> None:
    energy = small("categorical", 3)
    d = steps(energy, 7)
    whole = built(energy)
    expected = whole.gradient(d), whole.hessian_product(d), whole.outputs(d, energy.x)
    with lw.memory.limited(1):
        results = whole.gradient(d), whole.hessian_product(d), whole.outputs(d, energy.x)
    for found, wanted in zip(results, expected, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("name", ["lstm", "attention", "dict_input", "tuple_input", "token_level", "resnet_batchnorm"])
def test_other_networks_row_by_row(name: str) -> None:
    """Recurrent kernels have no vectorised form, several inputs are taken one by one: the same numbers as a loop."""
    case = BY_NAME[name]
    model = case.build()
    posterior = lw.fit(
        model, problems.batches(case), problems.likelihood(case), method=lw.baselines.MapOnly(), prior=0.7
    )
    source = Data(problems.batches(case), torch.device("cpu"))
    objective = problems.unchanged(
        model, lambda: Objective.build(posterior.network, posterior.likelihood, posterior.prior, source, D)
    )
    size = objective.size
    d = 0.1 * torch.randn(2, size, dtype=D, generator=torch.Generator().manual_seed(1))
    slope = problems.unchanged(model, lambda: objective.gradient(d))
    inputs, y = case.batch(6), problems.targets(case, 6)
    free = [p for p in model.parameters() if p.requires_grad]
    start = nn.utils.parameters_to_vector(free).detach().clone()
    for k in range(2):
        nn.utils.vector_to_parameters(start + d[k], free)
        f = dense.output(model, inputs)
        loss = nn.functional.cross_entropy(f.flatten(0, -2), y.reshape(-1), reduction="sum")
        grads = torch.autograd.grad(loss, free)
        assert_close(slope[k], torch.cat([g.reshape(-1) for g in grads]) + 0.7 * (start + d[k]))
        single = objective.each_output(d[k : k + 1], dense.one(inputs, 0))
        assert_close(single[0], f[0].detach())
    nn.utils.vector_to_parameters(start, free)


def test_single_precision_networks_are_widened() -> None:
    """The copy is float64, starts at the float32 weights, and the model stays as it is."""
    energy = small()
    model = copied(energy).model.float()
    posterior = lw.fit(
        model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.2), method=lw.baselines.MapOnly()
    )
    source = Data([(energy.x.float(), energy.y.float())], torch.device("cpu"))
    objective = problems.unchanged(
        model, lambda: Objective.build(posterior.network, posterior.likelihood, posterior.prior, source, D)
    )
    assert objective.dtype == D
    assert {p.dtype for p in objective.model.parameters()} == {D}
    assert objective.batches[0].inputs.dtype == objective.batches[0].targets.dtype == D
    assert torch.equal(objective.centre, nn.utils.parameters_to_vector(model.parameters()).detach().double())
    wide = Energy("gaussian", copied(energy).model.float().double(), energy.x.float().double(),
                  energy.y.float().double(), float(posterior.prior.values), 0.04)  # fmt: skip
    d = steps(energy)
    expected = torch.stack([wide.gradient(wide.theta + row) for row in d])
    assert_close(objective.gradient(d), expected)
    assert next(model.parameters()).dtype == torch.float32


def test_the_copy_keeps_no_graph() -> None:
    objective = built(small())
    assert not any(p.requires_grad for p in objective.model.parameters())
    d = steps(small())
    for found in (objective.gradient(d), objective.hessian_product(d), objective.outputs(d, small().x)):
        assert not found.requires_grad
