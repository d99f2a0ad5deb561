"""The whole matrix of a last layer: sums and forms are float64 whatever the network is."""

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

WIDE = 70  # features, with the bias in three strips


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDE), nn.ReLU(), nn.Linear(WIDE, 5))


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(800, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, :5] + 0.3 * x[:, 1:]).argmax(1)
    return list(zip(x.split(100), y.split(100), strict=True))


def fitted(model: nn.Module, precision: float, dtype: torch.dtype) -> lw.Fitted:
    batches = [(x.to(dtype), y) for x, y in data()]
    return lw.fit(model.to(dtype), batches, "classification", method=lw.Full(), weights="last_layer", prior=precision,
                  progress=False)  # fmt: skip


@pytest.mark.parametrize("precision", [10.0, 1e-2, 1e-4])
def test_a_weak_prior_survives_float32(precision: float) -> None:
    """In float32 sums the null direction of the softmax gets eigenvalues of -1e-4: 10 % off, or not definite."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    single, double = (fitted(network(), precision, dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(
        single.functions(x).cov.double(), double.functions(x.double()).cov, rtol=1e-4, atol=1e-5 / precision
    )
    assert float(single.log_evidence()) == pytest.approx(float(double.log_evidence()), abs=1e-3)


def test_strips_are_the_whole_sum() -> None:
    """Against J'HJ by autograd."""
    model = network().double()
    posterior = fitted(model, 1.0, torch.float64)
    features = torch.cat([model[1](model[0](x.double())) for x, _ in data()]).detach()
    inputs = torch.cat([features, torch.ones(len(features), 1)], 1)
    p = model[2](features).detach().softmax(-1)
    outputs = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    whole = torch.einsum("nij,na,nb->iajb", outputs, inputs, inputs)
    order = [(i, a) for i in range(5) for a in range(WIDE)] + [(i, WIDE) for i in range(5)]  # weights, then biases
    i, a = torch.tensor(order).unbind(1)
    expected = whole[i[:, None], a[:, None], i, a]
    torch.testing.assert_close(posterior.posterior.current.matrix, expected, rtol=1e-10, atol=1e-10)
