"""Images at the front door: what goes in, what comes out, and what is refused.

``tests/conformance/test_images.py`` compares every method with the same network as one of tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import held
from lapwing.errors import DataError, FileError, InputError, ModelError
from lapwing.networks.network import Network
from lapwing.networks.passes import outputs_along
from lapwing.predictives.base import ClassPredictive, MultilabelPredictive, NumberPredictive
from lapwing.tuners import grid as cells
from lapwing.values.gaussian import FunctionGaussian
from tests import problems
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

D = torch.float64
INPUTS, CHANNELS, HEIGHT, WIDTH, TOTAL = 2, 3, 4, 5, 7
PRIOR, NOISE = 3.0, 0.4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


X, NEW = drawn(TOTAL, INPUTS, HEIGHT, WIDTH, seed=1), drawn(6, INPUTS, HEIGHT, WIDTH, seed=2)
OTHER = drawn(6, INPUTS, WIDTH, HEIGHT, seed=3)  # as many pixels in another form
LABELS = torch.randint(0, CHANNELS, (TOTAL, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(4))
NUMBERS = drawn(TOTAL, CHANNELS, HEIGHT, WIDTH, seed=5)


def net(channels: int = CHANNELS, dtype: torch.dtype = D) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Conv2d(INPUTS, 8, (1, 3), padding="same"), nn.Tanh(), nn.Conv2d(8, channels, 1)).to(dtype)


@cache
def fitted(task: str, method: str = "kron") -> lw.Fitted:
    likelihood, y = {"labels": (lw.Categorical(), LABELS), "numbers": (lw.Gaussian(NOISE), NUMBERS)}[task]
    data = problems.split(X, y, (4, 3))
    return lw.fit(net(), data, likelihood, method={"kron": lw.Kron(), "full": lw.Full()}[method], prior=PRIOR)


def channels_last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


def test_full_is_the_dense_posterior_of_classes() -> None:
    """Every pixel a datum: Σ Jᵀ (diag p - p pᵀ) J from one backward pass for every number."""
    posterior, model = fitted("labels", "full"), Wrapped(lambda m, x: channels_last(m.net(x)), net=net())
    rows = lambda x: dense.jacobian(model, x, len(x)).reshape(-1, CHANNELS, posterior.network.selection.size)
    f = channels_last(net()(X)).detach().reshape(-1, CHANNELS)
    precision = dense.ggn(rows(X), dense.softmax_hessian(f)) + PRIOR * torch.eye(posterior.network.selection.size)
    covariance = torch.linalg.inv(precision)
    jac, belief = rows(NEW), posterior.functions(NEW)
    expected = dense.output_covariance(jac, covariance).reshape(6, HEIGHT, WIDTH, CHANNELS, CHANNELS)
    assert_close(belief.mean, net()(NEW).detach())
    assert_close(belief.cov, expected, SOLVED)
    assert_close(channels_last(belief.variance), expected.diagonal(dim1=-2, dim2=-1), SOLVED)
    joint = posterior.functions(NEW[:2], joint=True)
    flat = jac.reshape(6, HEIGHT, WIDTH, CHANNELS, -1)[:2].permute(0, 3, 1, 2, 4).flatten(0, 3)
    assert_close(joint.cov.reshape(len(flat), -1), flat @ covariance @ flat.T, SOLVED)
    assert joint.cov.shape == (2, CHANNELS, HEIGHT, WIDTH) * 2
    assert_close(joint.marginal.cov, belief.cov[:2], SOLVED)
    assert_close(joint.variance, belief.variance[:2], SOLVED)
    assert_close(joint.centred_variance, belief.centred_variance[:2], SOLVED)


def test_full_is_the_dense_posterior_of_numbers() -> None:
    posterior, model = fitted("numbers", "full"), Wrapped(lambda m, x: m.net(x), net=net())
    size = posterior.network.selection.size
    jac = dense.jacobian(model, X, TOTAL).reshape(-1, size)
    covariance = torch.linalg.inv(jac.T @ jac / NOISE**2 + PRIOR * torch.eye(size))
    new = dense.jacobian(model, NEW, 6)
    variance = torch.einsum("bmp,pq,bmq->bm", new, covariance, new).reshape(6, CHANNELS, HEIGHT, WIDTH)
    predictive = posterior.predict(NEW)
    assert_close(predictive.epistemic_variance, variance, SOLVED)
    assert_close(predictive.std, (variance + NOISE**2).sqrt(), SOLVED)
    low, high = predictive.interval(0.95)
    assert_close(high - low, 2 * 1.959963984540054 * predictive.std, SOLVED)
    loss = 0.5 * (net()(X).detach() - NUMBERS).square().sum()
    assert posterior.base.statistics.data == TOTAL * HEIGHT * WIDTH
    assert_close(torch.tensor(posterior.base.statistics.loss), loss)


def test_shapes_of_classes() -> None:
    posterior, shape, one = fitted("labels"), (6, CHANNELS, HEIGHT, WIDTH), (6, HEIGHT, WIDTH)
    belief, predictive = posterior.functions(NEW), posterior.predict(NEW)
    assert isinstance(belief, FunctionGaussian)
    assert ClassPredictive in type(predictive).__mro__
    for member in ("mean", "probs", "log_probs", "integrated_probs", "standard_error"):
        assert getattr(predictive, member).shape == shape, member
    for member in ("entropy", "aleatoric", "epistemic", "mutual_information"):
        assert getattr(predictive, member).shape == one, member
    assert_close(predictive.probs.sum(1), torch.ones(one, dtype=D))
    assert_close(predictive.entropy, torch.special.entr(predictive.probs).sum(1))
    y = torch.randint(0, CHANNELS, one)
    assert_close(predictive.log_prob(y), predictive.probs.gather(1, y[:, None])[:, 0].log())
    assert predictive.sample(9).shape == (9, *one)
    assert predictive.distribution.probs.shape == (6, HEIGHT * WIDTH, CHANNELS)
    assert belief.sample(9).shape == posterior.function_samples(NEW, 9).shape == (9, *shape)
    assert posterior.network_samples(NEW, 2).shape == (2, *shape)
    assert_close(belief.scaled(2.0).std, 2 * belief.std)


def test_shapes_of_numbers() -> None:
    predictive, shape = fitted("numbers").predict(NEW), (6, CHANNELS, HEIGHT, WIDTH)
    assert NumberPredictive in type(predictive).__mro__
    members = ("mean", "std", "variance", "epistemic", "aleatoric", "epistemic_variance", "aleatoric_variance")
    for member in members:
        assert getattr(predictive, member).shape == shape, member
    for member in ("entropy", "known_entropy", "mutual_information"):
        assert getattr(predictive, member).shape == (6, HEIGHT, WIDTH), member
    y = drawn(*shape, seed=8)
    assert predictive.log_prob(y).shape == (6, HEIGHT, WIDTH)
    assert_close(predictive.cdf(y), torch.special.ndtr((y - predictive.mean) / predictive.std))
    assert_close(predictive.cdf(0.5), torch.special.ndtr((0.5 - predictive.mean) / predictive.std))
    assert_close(predictive.quantile(0.5), predictive.mean)
    assert predictive.sample(3).shape == (3, *shape)
    assert fitted("numbers").predict(NEW, samples=16).std.shape == shape
    evaluation = fitted("numbers").evaluate([(NEW, y)], resamples=2)
    assert evaluation["rmse"].posterior.value == pytest.approx(lw.metrics.rmse(predictive.mean, y))


@pytest.mark.parametrize("likelihood", [lw.Gaussian(NOISE), lw.Bernoulli(), lw.Poisson()])
def test_one_channel_may_come_without_its_dimension(likelihood: Any) -> None:
    y = (NUMBERS[:, :1] > 0).double()
    fits = [lw.fit(net(1), [(X, y)], likelihood, prior=PRIOR), lw.fit(net(1), [(X, y[:, 0])], likelihood, prior=PRIOR)]
    one, two = (each.predict(NEW) for each in fits)
    assert one.mean.shape == (6, 1, HEIGHT, WIDTH)
    assert_close(one.mean, two.mean)
    targets = y[:6]
    assert_close(one.log_prob(targets), two.log_prob(targets[:, 0]))
    assert one.sample(2).shape == (2, 6, 1, HEIGHT, WIDTH)
    if isinstance(likelihood, lw.Bernoulli):
        assert MultilabelPredictive in type(one).__mro__
        assert one.entropy.shape == (6, HEIGHT, WIDTH)


def test_ignored_pixels_do_not_count() -> None:
    y = LABELS.clone()
    y[:, :, 3:] = -100
    posterior = lw.fit(net(), [(X, y)], "classification", method=lw.Full(), prior=PRIOR)
    assert posterior.base.statistics.data == TOTAL * HEIGHT * 3
    y[:, :, 3:] = 255
    other = lw.fit(net(), [(X, y)], lw.Categorical(ignore_index=255), method=lw.Full(), prior=PRIOR)
    assert_close(other.functions(NEW).cov, posterior.functions(NEW).cov)
    everything = fitted("labels", "full").functions(NEW).variance
    assert bool((posterior.functions(NEW).variance > everything).all())
    assert lw.metrics.accuracy(posterior.predict(X).probs, y, ignore_index=255) <= 1
    with pytest.raises(DataError, match="classes run from 0 to 255"):
        posterior.predict(X).log_prob(y)


def test_loaders_give_one_answer() -> None:
    for task in ("labels", "numbers"):
        posterior, batches = fitted(task), [(NEW[:4], 0), (NEW[4:], 0)]
        one, two = posterior.predict(batches), posterior.predict(NEW)
        assert_close(one.mean, two.mean)
        assert_close(one.entropy, two.entropy)
        assert_close(posterior.functions(batches).cov, posterior.functions(NEW).cov)
        assert_close(posterior.functions(batches).variance, posterior.functions(NEW).variance)
        assert_close(posterior.functions(NEW, device="cpu").cov, posterior.functions(NEW).cov)
    y = torch.zeros(6, HEIGHT, WIDTH, dtype=torch.long)
    assert_close(fitted("labels").predict([NEW]).log_prob(y), fitted("labels").predict(NEW).log_prob(y))
    with pytest.raises(DataError, match=r"images of 4 x 5 and of 5 x 4 in two batches; expected one size"):
        fitted("labels").predict([NEW, OTHER])


def test_images_of_other_sizes() -> None:
    """As many pixels in another form, and more: the form is that of the output, not that of the first batch."""
    turned = Wrapped(lambda m, x: m.net(x.mT).mT, net=net())  # the transposed network on transposed images
    posterior = lw.fit(turned, [(X.mT, NUMBERS.mT)], lw.Gaussian(NOISE), method=lw.Full(), prior=PRIOR)
    expected = fitted("numbers", "full").functions(NEW)
    assert_close(posterior.functions(NEW.mT).variance, expected.variance.mT, SOLVED)
    assert_close(posterior.functions(NEW.mT).mean, expected.mean.mT)
    large = drawn(2, INPUTS, 9, 11)
    belief = fitted("numbers", "full").functions(large)
    assert_close(belief.mean, net()(large).detach())
    assert belief.cov.shape == (2, 9, 11, CHANNELS, CHANNELS)
    assert fitted("labels").functions(OTHER).std.shape == (6, CHANNELS, WIDTH, HEIGHT)


def test_the_pixels_of_these_inputs_decide_whether_functions_are_drawn() -> None:
    """Above 256 outputs of an image, whatever the size of the images of the fit."""
    small, large = drawn(3, INPUTS, 4, 6), drawn(2, INPUTS, 12, 11)  # 72 and 396 outputs
    of_large = lw.fit(net(), [(large, torch.zeros(2, 12, 11).long())], "classification", method=lw.Kron(), prior=PRIOR)
    for posterior in (fitted("labels"), of_large):
        assert bool((posterior.predict(large).standard_error > 0).all())
        assert bool((posterior.predict(small).standard_error == 0).all())
        assert bool((posterior.predict([large]).standard_error > 0).all())


def test_validation_data_of_several_sizes_are_scored_by_their_own_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit to small images, validated by large ones too: the large ones take functions, the small ones none."""
    plain, sizes = cells.draw_beliefs, set()

    def draw_beliefs(members: Any, x: Tensor, *others: Any) -> Any:
        sizes.add(tuple(x.shape[2:]))
        return plain(members, x, *others)

    monkeypatch.setattr(cells, "draw_beliefs", draw_beliefs)
    large = drawn(2, INPUTS, 12, 11), torch.randint(0, CHANNELS, (2, 12, 11))
    lw.fit(net(), [(X, LABELS)], "classification", method=lw.Diagonal(), validation=[(X, LABELS), large])
    assert sizes == {(12, 11)}


BUDGET = 2 * 2**20


def segmenter() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, CHANNELS, 1))


def sized_batch(size: int) -> tuple[Tensor, Tensor]:
    return drawn(4, 1, size, size).float(), torch.zeros(4, size, size, dtype=torch.long)


def assert_independent(taken: dict[int, int]) -> None:
    """Assert that what calls took does not depend on the size of the first batch, 3 x 3 or 12 x 12."""
    assert taken[3] <= 1.2 * taken[12] <= 2 * BUDGET, taken


@pytest.mark.parametrize("joint", [False, True])
def test_the_byte_budget_of_predictions_at_another_size(joint: bool) -> None:
    taken, x = {}, sized_batch(12)[0][:3]
    for size in (3, 12):
        posterior = lw.fit(segmenter(), [sized_batch(size)], "classification", method=lw.Kron(), prior=PRIOR)
        with lw.memory.limited(BUDGET):
            call = lambda each=posterior: each.functions(x[:1], joint=True) if joint else each.functions(x).variance
            taken[size] = held(call).taken
    assert_independent(taken)


@pytest.mark.parametrize("method", [lw.Kron(curvature="ggn"), lw.Diagonal(curvature="ggn"), lw.Full()])
def test_the_byte_budget_of_a_fit_with_images_of_another_size(method: Any) -> None:
    """Larger images after the first batch are joined and cut as if they were the first."""
    taken = {}
    for size in (3, 12):
        data = [sized_batch(size), sized_batch(12), sized_batch(12)]
        with lw.memory.limited(BUDGET):
            fit = lambda data=data: lw.fit(segmenter(), data, "classification", method=method, prior=PRIOR)
            taken[size] = held(fit).taken
    assert_independent(taken)


def test_the_byte_budget_of_products_at_another_size() -> None:
    x, v = sized_batch(12)[0], torch.randn(8, sum(p.numel() for p in segmenter().parameters()))
    networks = {size: Network.build(segmenter(), sized_batch(size)[0]) for size in (3, 12)}
    for run in (lambda each: each.jvp(x, v), lambda each: each(x), lambda each: outputs_along(each, x, v)):
        with lw.memory.limited(BUDGET // 8):
            assert_independent({size: held(lambda: run(each)).taken for size, each in networks.items()})  # noqa: B023


def test_batches_of_several_sizes_in_one_fit() -> None:
    """The evidence is a sum over pixels: those of two sizes are as many batches."""
    more = torch.randint(0, CHANNELS, (6, WIDTH, HEIGHT))
    both = lw.fit(net(), [(X, LABELS), (OTHER, more)], "classification", method=lw.Full(), prior=PRIOR)
    single = [
        lw.fit(net(), [pair], "classification", method=lw.Full(), prior=PRIOR) for pair in ((X, LABELS), (OTHER, more))
    ]
    matrices = [each.base.curvature.matrix for each in (both, *single)]
    assert_close(matrices[0], matrices[1] + matrices[2])


def test_volumes() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv3d(INPUTS, CHANNELS, 1).double(), drawn(4, INPUTS, 6, HEIGHT, WIDTH)
    y = torch.randint(0, CHANNELS, (4, 6, HEIGHT, WIDTH))
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.Full(), prior=PRIOR)
    predictive, belief = posterior.predict(x), posterior.functions(x)
    assert predictive.probs.shape == belief.std.shape == (4, CHANNELS, 6, HEIGHT, WIDTH)
    assert belief.cov.shape == (4, 6, HEIGHT, WIDTH, CHANNELS, CHANNELS)
    assert predictive.log_prob(y).shape == (4, 6, HEIGHT, WIDTH)
    slab = posterior.functions(x[:, :, 2:4])  # a pixel of this network does not depend on the others
    assert_close(slab.variance, belief.variance[:, :, 2:4])


def test_chosen_channels_and_pixels() -> None:
    posterior = fitted("labels", "full")
    whole = posterior.functions(NEW)
    some = posterior.functions(NEW, outputs=[2, 0])
    assert_close(some.mean, whole.mean[:, [2, 0]])
    assert_close(some.variance, whole.variance[:, [2, 0]], SOLVED)
    assert_close(some.cov, whole.cov[..., [2, 0], :][..., [2, 0]], SOLVED)
    top = whole.mean.topk(2, 1).indices
    assert_close(posterior.functions(NEW, outputs=top).std, whole.std.gather(1, top), SOLVED)
    pixels = posterior.functions(NEW, tokens=[0, 2 * WIDTH + 1])
    assert pixels.mean.shape == (6, 2, CHANNELS)
    assert_close(pixels.mean[:, 1], whole.mean[:, :, 2, 1])
    assert_close(pixels.cov[:, 1], whole.cov[:, 2, 1], SOLVED)
    joint = posterior.functions(NEW[:2], joint=True, tokens=[7])
    assert joint.cov.shape == (2, 1, CHANNELS) * 2


def test_functions_of_the_outputs_and_operators() -> None:
    posterior = fitted("numbers", "full")
    variance = posterior.variance_of(lambda f: f[1, 2, 3, 4], NEW)
    assert_close(variance, posterior.functions(NEW).variance[1, 2, 3, 4], SOLVED)
    jacobian = posterior.jacobian([(NEW, drawn(6, CHANNELS, HEIGHT, WIDTH))])
    direction = drawn(posterior.network.selection.size, 1)
    product = (jacobian @ direction).reshape(6, HEIGHT, WIDTH, CHANNELS)
    flat = dense.jacobian(net(), NEW, 6) @ direction[:, 0]
    assert_close(product, channels_last(flat.reshape(6, CHANNELS, HEIGHT, WIDTH)))


def test_a_file_keeps_the_form(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "images.lapwing"
    posterior = lw.fit(model, [(X, LABELS)], "classification", method=lw.Kron(), prior=PRIOR)
    posterior.save(path)
    loaded = lw.load(path, model)
    assert loaded.network.image == (HEIGHT, WIDTH)
    assert_close(loaded.predict(OTHER).probs, posterior.predict(OTHER).probs)
    assert_close(loaded.functions(NEW).cov, posterior.functions(NEW).cov)
    state = posterior.network.state()
    assert (
        "image"
        not in lw.fit(nn.Linear(2, 3), [(drawn(4, 2).float(), torch.arange(4) % 3)], "classification")
        .network.state()
        .settings
    )
    for wrong in ([HEIGHT, WIDTH + 1], [HEIGHT * WIDTH], [0, 5]):
        state.settings["image"] = wrong
        with pytest.raises(FileError, match="image"):
            type(posterior.network).from_state(state, model)


def test_validation_tuners_and_the_default() -> None:
    held_out = (NEW, torch.randint(0, CHANNELS, (6, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(1)))
    data = problems.split(X, LABELS, (4, 3))
    posterior = lw.fit(net(), data, "classification", validation=[held_out])
    assert posterior.predict(NEW).probs.shape == (6, CHANNELS, HEIGHT, WIDTH)
    assert "Tuned by Integrate on validation data." in posterior.summary()
    for tuner in (lw.tuners.LinearMode(data), lw.tuners.Integrate([held_out])):
        assert posterior.tuned(tuner).predict(NEW).probs.shape == (6, CHANNELS, HEIGHT, WIDTH)
    assert float(lw.tuners.evidence_bound(fitted("labels"), data, block=2)) < 0
    with pytest.raises(DataError, match=r"batch 0 of validation: targets have the shape \(6, 5, 4\)"):
        lw.fit(net(), data, "classification", validation=[(held_out[0], held_out[1].mT)])


def test_the_default_for_numbers() -> None:
    posterior = lw.fit(net(), [(X, NUMBERS)], "regression")
    assert posterior.predict(NEW).std.shape == (6, CHANNELS, HEIGHT, WIDTH)
    each = lw.fit(net(), [(X, NUMBERS)], lw.Gaussian(per_output=True), method=lw.Kron(), prior=PRIOR)
    assert each.likelihood.noise_variance.shape == (CHANNELS,)
    noise = (net()(X) - NUMBERS).detach().square().mean((0, 2, 3))
    assert_close(each.predict(NEW).aleatoric_variance[1, :, 2, 3], noise)


def test_check() -> None:
    report = lw.check(net(), (X, LABELS), timed=["diagonal"])
    assert report.outputs == (CHANNELS, HEIGHT, WIDTH)
    assert "outputs (3, 4, 5) for each input" in str(report)
    assert report.costs["Diagonal"].fit_seconds is not None


def test_as_many_classes_as_pixels() -> None:
    """Classes of images are known: (B, 4, 2, 2) is not taken for outputs (B, T, C) that do not show their classes."""
    x, y = drawn(5, INPUTS, 2, 2), torch.randint(0, 4, (5, 2, 2))
    assert lw.fit(net(4), [(x, y)], "classification", prior=PRIOR).predict(x).probs.shape == (5, 4, 2, 2)


ONE_HOT = nn.functional.one_hot(LABELS, CHANNELS).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (lw.Categorical(), ONE_HOT, r"pixels \(B, H W, C\) of images .* from one-hot targets by y.argmax\(1\)"),
        (lw.Categorical(), LABELS.double(), "expected whole class numbers"),
        (
            lw.Categorical(),
            LABELS[:, :3],
            r"shape \(7, 3, 5\) and the outputs are images of 4 x 5; expected \(B, 4, 5\)",
        ),
        (lw.Categorical(), LABELS[:, 0, 0], r"shape \(7,\) and the outputs are images"),
        (lw.Categorical(), LABELS + 2, r"targets run from 2 to 4"),
        (lw.Categorical(), LABELS[:5], r"shape \(5, 20\) .* outputs \(7, 20, 3\)"),
        (lw.Gaussian(), NUMBERS[:, :2], r"targets have the shape \(7, 20, 2\) and outputs \(7, 20, 3\)"),
        (lw.Gaussian(), NUMBERS[:, 0], r"targets have the shape \(7, 20\)"),
        (lw.Gaussian(), NUMBERS.permute(0, 2, 3, 1), r"shape \(7, 4, 5, 3\) and the outputs are images of 4 x 5"),
    ],
)
def test_targets_that_do_not_fit(likelihood: Any, y: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lw.fit(net(), [(X, y)], likelihood, prior=PRIOR)


def test_targets_of_later_batches_and_of_predictions() -> None:
    with pytest.raises(DataError, match=r"batch 1: targets have the shape \(3, 5, 4\)"):
        lw.fit(net(), [(X[:4], LABELS[:4]), (X[4:], LABELS[4:].mT)], "classification", method=lw.Kron(), prior=PRIOR)
    labels, numbers = fitted("labels").predict(X), fitted("numbers").predict(X)
    for predictive, y in ((labels, LABELS.mT), (labels, LABELS[:, 0]), (numbers, NUMBERS.mT), (numbers, NUMBERS[0, 0])):
        with pytest.raises(DataError, match="the outputs are images of 4 x 5; expected"):
            predictive.log_prob(y)
    with pytest.raises(DataError, match="expected"):
        numbers.cdf(NUMBERS.mT)
    with pytest.raises(DataError, match="classes run from"):
        labels.log_prob(LABELS + 1)


def test_channels_last_is_refused_where_the_targets_show_it() -> None:
    model = Wrapped(lambda m, x: channels_last(m.net(x)), net=net())
    with pytest.raises(DataError, match=r"outputs with the channels last: wrap .* model\(x\).movedim\(-1, 1\)"):
        lw.fit(model, [(X, LABELS)], "classification", prior=PRIOR)


def test_outputs_of_other_forms_are_refused() -> None:
    posterior = fitted("labels")
    with pytest.raises(InputError, match=r"the first sample alone\. Has x a batch dimension"):
        posterior.predict(NEW[0])
    with pytest.raises(ModelError, match=r"shift=True"):
        lw.fit(net(), [(X, LABELS)], lw.Categorical(shift=True), prior=PRIOR)
    with pytest.raises(ModelError, match="sum to one"):
        lw.fit(
            nn.Sequential(net(), Wrapped(lambda m, f: f.exp() / f.exp().sum(1, True))), [(X, LABELS)], "classification"
        )
    with pytest.raises(DataError, match="outputs has 3; expected numbers of outputs from 0 to 2"):
        posterior.functions(NEW, outputs=[3])


def test_choices_that_do_not_exist_are_refused_in_the_words_of_images() -> None:
    posterior, shape = fitted("labels"), r"\(k,\), or \(B, k, H, W\)"
    zeros = lambda *sizes: torch.zeros(*sizes, dtype=torch.long)
    for wrong in (zeros(6, 2), 0, torch.zeros(6, 2, HEIGHT, WIDTH), zeros(6, 1, 1, HEIGHT, WIDTH)):
        with pytest.raises(DataError, match=f"expected numbers of outputs from 0 to 2, of shape {shape}"):
            posterior.functions(NEW, outputs=wrong)
    for wrong in (zeros(6, 2, WIDTH - 1, WIDTH - 2), zeros(6, HEIGHT * WIDTH - 8, 2)):
        with pytest.raises(
            DataError, match=r"each of 12 pixels, and there are 20; expected \(B, k, H, W\) with as many"
        ):
            posterior.functions(NEW, outputs=wrong)
    with pytest.raises(DataError, match=r"each of 2 pixels, and there are 3; expected \(B, S, k\) with as many"):
        posterior.functions(NEW, outputs=zeros(6, 2, 1), tokens=[0, 5, 7])
    with pytest.raises(DataError, match="pixel 20 was chosen of 20; expected numbers from 0 to 19"):
        posterior.functions(NEW, tokens=[20])
    with pytest.raises(DataError, match=r"expected numbers of pixels from 0 on, of shape \(S,\), or \(B, S\)"):
        posterior.functions(NEW, tokens=3)
