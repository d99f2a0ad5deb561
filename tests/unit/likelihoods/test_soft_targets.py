"""Label smoothing and soft targets: against ``cross_entropy`` of PyTorch, and its Hessian by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import DataError, UnsupportedError
from lapwing.values.functions import FunctionSamples
from lapwing.values.gaussian import FunctionGaussian
from tests.tolerances import assert_close

B, C = 5, 4
WEIGHTS = (0.5, 2.0, 1.0, 3.0)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, C, shape, generator=torch.Generator().manual_seed(seed))


def reference(likelihood: lw.Categorical, f: Tensor, y: Tensor) -> Tensor:
    weight = None if likelihood.class_weights is None else torch.tensor(WEIGHTS, dtype=torch.float64)
    soft = {"weight": weight, "label_smoothing": likelihood.label_smoothing, "reduction": "none"}
    return nn.functional.cross_entropy(f, y, **soft)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_loss_and_curvature_are_those_of_cross_entropy(label_smoothing, class_weights, soft):
    likelihood = lw.Categorical(class_weights=class_weights, label_smoothing=label_smoothing)
    f = drawn(0, B, C)
    y = likelihood.targets(f, drawn(1, B, C).softmax(-1) if soft else labels(1, B))
    assert_close(likelihood.loss(f, y), reference(likelihood, f, y))
    of = lambda b: lambda row: reference(likelihood, row[None], y[b : b + 1])[0]
    hessians = torch.stack([torch.autograd.functional.hessian(of(b), f[b]) for b in range(B)])
    root = likelihood.root(f, y)
    assert_close(root @ root.mT, hessians)
    assert_close(likelihood.hessian(f, y).dense(), hessians)
    assert int(likelihood.count(f, y)) == B


@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
def test_gradient_at_the_targets_has_the_root_of_the_weight(class_weights):
    likelihood = lw.Categorical(class_weights=class_weights)
    f, y = drawn(0, B, C), labels(1, B)
    weight = torch.ones(B).double() if class_weights is None else torch.tensor(WEIGHTS).double()[y]
    plain = f.softmax(-1) - nn.functional.one_hot(y, C)
    assert_close(likelihood.gradient(f, y), weight.sqrt()[:, None] * plain)


def test_gradient_of_ignored_and_weightless_labels_is_zero():
    f = drawn(0, B, C)
    y = torch.tensor([0, -100, 1, 2, 0])
    gradient = lw.Categorical(class_weights=(0.0, 1.0, 2.0, 1.0)).gradient(f, y)
    assert bool((gradient[[0, 1, 4]] == 0).all())
    assert bool((gradient[[2, 3]] != 0).all())


def test_gradient_of_binary_labels_has_the_root_of_the_weight():
    f, y = drawn(0, B, 3), labels(1, B, 3).clamp_max(1).double()
    expected = (f.sigmoid() - y) * torch.where(y > 0, 4.0, 1.0).sqrt()
    assert_close(lw.Bernoulli(pos_weight=4.0).gradient(f, y), expected)


def test_ignored_tokens_have_no_loss_with_smoothing():
    likelihood = lw.Categorical(label_smoothing=0.2)
    f, y = drawn(0, 2, 3, C), labels(1, 2, 3)
    y[0, 1] = -100
    expected = reference(likelihood, f.flatten(0, 1), y.flatten()).reshape(2, 3)
    assert_close(likelihood.loss(f, y), expected)
    assert int(likelihood.count(f, y)) == 5
    assert bool((likelihood.root(f, y)[0, 1] == 0).all())


def test_log_prob_of_soft_targets_is_the_mean_over_the_classes():
    likelihood = lw.Categorical()
    mean, y = drawn(0, B, C), drawn(1, B, C).softmax(-1)
    y[0] = torch.tensor([1.0, 0, 0, 0])
    predictive = likelihood.predict(FunctionGaussian(mean, torch.eye(C).double().expand(B, C, C)))
    assert_close(likelihood.known_log_prob(predictive, y), (y * predictive.log_probs).sum(-1))
    drawn_functions = FunctionSamples.of(mean, drawn(2, 6, B, C))
    averages = likelihood.predict_samples(drawn_functions)
    assert_close(averages.log_prob(y), (y * averages.log_probs).sum(-1))
    with pytest.raises(DataError, match="a row with the sum 4"):
        predictive.log_prob(torch.ones(B, C))
    first = predictive.log_prob(torch.zeros(B, dtype=torch.long))[:1]
    assert_close(likelihood.known_log_prob(predictive, y)[:1], first)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, C)).double()


def test_fit_to_one_hot_probabilities_equals_the_fit_to_labels(net):
    x, y = drawn(2, 12, 3), labels(3, 12)
    hard, soft = (lw.fit(net, [(x, t)], "classification") for t in (y, nn.functional.one_hot(y, C).double()))
    assert_close(soft.log_evidence(), hard.log_evidence())
    assert_close(soft.predict(x).probs, hard.predict(x).probs)


def test_predictives_of_mixtures_and_loaders_take_soft_targets(net):
    x, y = drawn(2, 12, 3), drawn(3, 12, C).softmax(-1)
    fitted = lw.fit(net, [(x, y)], "classification", tuner=lw.tuners.Grid([(x, y)], precisions=(1.0, 10.0)))
    mixture = lw.fit(net, [(x, y)], "classification", validation=[(x + 0.1, y)])
    for predictive in (fitted.predict(x), mixture.predict(x), mixture.predict([(x[:5], y[:5]), (x[5:], y[5:])])):
        assert_close(predictive.log_prob(y), (y * predictive.probs.log()).sum(-1))


def test_evidence_has_the_smoothed_loss_and_the_same_curvature(net):
    x, y = drawn(2, 12, 3), labels(3, 12)
    plain, smooth = (
        lw.fit(net, [(x, y)], lw.Categorical(label_smoothing=eps), method=lw.Full(), prior=2.0) for eps in (0.0, 0.1)
    )
    assert_close(smooth.base.curvature.matrix, plain.base.curvature.matrix)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(net(x), y, label_smoothing=e, reduction="sum") for e in (0.0, 0.1)]
    assert_close(smooth.log_evidence() - plain.log_evidence(), losses[0] - losses[1])


def test_files_hold_the_smoothing(net, tmp_path):
    x, y = drawn(2, 12, 3), labels(3, 12)
    lw.fit(net, [(x, y)], lw.Categorical(label_smoothing=0.1), prior=1.0).save(tmp_path / "net")
    assert lw.load(tmp_path / "net", net).likelihood.label_smoothing == 0.1


def test_segmentation_takes_probabilities_of_every_pixel():
    torch.manual_seed(0)
    net = nn.Conv2d(2, 3, 1).double()
    x, y = drawn(0, 4, 2, 5, 6), torch.randint(0, 3, (4, 5, 6))
    soft = nn.functional.one_hot(y, 3).double().movedim(-1, 1)
    one, other = (lw.fit(net, [(x, t)], "classification", prior=1.0) for t in (y, soft))
    assert_close(other.log_evidence(), one.log_evidence())


@pytest.mark.parametrize(
    ("y", "seen"),
    [
        (torch.full((B, C), 0.5), "a row with the sum 2"),
        (torch.tensor([1.5, -0.5, 0.0, 0.0]).expand(B, C), "an entry -0.5"),
        (torch.ones(B, C, dtype=torch.long), "whole class numbers"),
        (torch.full((B, C + 1), 1 / (C + 1)), "whole class numbers"),
        (torch.ones(B), "whole class numbers"),
    ],
)
def test_targets_that_are_no_distributions_are_refused(y, seen):
    with pytest.raises(DataError, match=seen):
        lw.Categorical().targets(torch.zeros(B, C), y)


def test_probabilities_do_not_shift():
    with pytest.raises(DataError, match="expected tokens"):
        lw.Categorical(shift=True).targets(torch.zeros(2, 3, C), torch.full((2, 3, C), 1 / C))


@pytest.mark.parametrize("label_smoothing", [1.0, -0.1, "some", None, True])
def test_smoothing_out_of_range_is_refused(label_smoothing):
    with pytest.raises(DataError, match="label_smoothing is"):
        lw.Categorical(label_smoothing=label_smoothing)


def test_methods_that_learn_by_the_predictive_refuse_smoothing():
    with pytest.raises(UnsupportedError, match=r"label_smoothing of Categorical is 0\.1"):
        lw.Categorical(label_smoothing=0.1).check_prediction()
