"""Laws that hold for every registered method, whatever it computes and with or without a declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posteriors.base import Posterior
from lapwing.registry import METHODS
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.conformance.declared import LAWFUL, SMALL, lawful_entries, net, small_method
from tests.tolerances import SOLVED, TRAINED, assert_close, assert_near

D = torch.float64
TOTAL, INPUTS, CLASSES = 10, 4, 3
X = torch.randn(TOTAL, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
NEW = torch.randn(5, INPUTS, dtype=D, generator=torch.Generator().manual_seed(2))
Y = torch.randint(0, CLASSES, (TOTAL,), generator=torch.Generator().manual_seed(3))
CUTS = [(10,), (4, 6), (1, 2, 3, 4)]
WHOLE_LAYERS = {  # methods that take no single weights, and what they say
    "kron": r"single weights .*Full\(\)", "ekron": r"single weights .*Full\(\)",
    "mixture_of_laplace": r"single weights .*Full\(\)", "variational_last_layer": "expected those of a last layer",
}  # fmt: skip
BY_ADAM = {"valla", "fmgp"}  # another order of the weights rounds otherwise, and its steps enlarge that


def fitted(name: str, cut: tuple[int, ...] = (10,), model: nn.Module | None = None, seed: int = 7) -> lw.Fitted:
    """A strong prior, so that the weights are near a minimum of the regularised loss."""
    model = net() if model is None else model
    generator = torch.Generator().manual_seed(seed)
    data = problems.split(X, Y, cut)
    method = small_method(name, model)
    return lw.fit(model, data, "classification", method=method, prior=1e3, generator=generator)


@cache
def standard(name: str) -> lw.Fitted:
    """Return the fit of one batch: posteriors are values, so tests can share it."""
    return fitted(name)


@pytest.fixture(params=SMALL)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def same(one: lw.Fitted, other: lw.Fitted, near: float = SOLVED) -> None:
    for joint in (False, True):
        a, b = one.functions(NEW, joint=joint), other.functions(NEW, joint=joint)
        assert_close(a.mean, b.mean)
        assert_close(a.cov, b.cov, near)
    assert_close(one.predict(NEW).probs, other.predict(NEW).probs, near)


def everything(posterior: lw.Fitted, x: Any, generator: torch.Generator) -> list[Tensor]:
    """Ask a posterior for all that it has, and check that it refuses the rest."""
    belief, joint = posterior.functions(x), posterior.functions(x, joint=True)
    results = [belief.mean, belief.cov, belief.std, joint.cov, posterior.predict(x).probs]
    if posterior.base.provides(Posterior.function_samples):
        results.append(posterior.function_samples(x, 2, generator))
    else:
        with pytest.raises(lw.errors.UnsupportedError, match="has no function samples"):
            posterior.function_samples(x, 2, generator)
    if posterior.base.provides(Posterior.weight_samples):
        results += [posterior.weight_samples(2, generator), posterior.network_samples(x, 2, generator)]
    else:
        with pytest.raises(lw.errors.UnsupportedError, match="has no weight samples"):
            posterior.network_samples(x, 2, generator)
    return results


def test_a_subnetwork_of_all_weights_is_the_network(name: str) -> None:
    """Methods that need whole layers say so; the others take single weights, in any order."""
    model, generator = net(), torch.Generator().manual_seed(7)
    size = sum(p.numel() for p in model.parameters())
    run = lambda weights: lw.fit(
        model, [(X, Y)], "classification", method=small_method(name, model), prior=1e3, weights=weights,
        generator=generator,
    )  # fmt: skip
    if name.partition(" ")[0] in WHOLE_LAYERS:
        with pytest.raises(lw.errors.UnsupportedError, match=WHOLE_LAYERS[name.partition(" ")[0]]):
            run(lw.subnetwork(torch.arange(size)))
        return
    by_adam = name.partition(" ")[0] in BY_ADAM
    same(run(lw.subnetwork(torch.arange(size))), standard(name), TRAINED if by_adam else SOLVED)
    some = run(lw.subnetworks.by_gradient(model, [(X, Y)], "classification", 11))
    assert some.network.selection.size == 11
    assert bool(torch.isfinite(some.functions(NEW).cov).all())


@pytest.mark.parametrize("cut", CUTS[1:])
def test_batches_may_be_cut_in_any_way(name: str, cut: tuple[int, ...]) -> None:
    same(fitted(name, cut), standard(name))


def test_equal_seeds_give_equal_results(name: str) -> None:
    posteriors = standard(name), fitted(name)
    one, two = (everything(posterior, NEW, torch.Generator().manual_seed(5)) for posterior in posteriors)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_shapes(name: str) -> None:
    posterior = standard(name)
    belief, joint = posterior.functions(NEW), posterior.functions(NEW, joint=True)
    assert belief.mean.shape == belief.variance.shape == belief.std.shape == (5, CLASSES)
    assert belief.cov.shape == (5, CLASSES, CLASSES)
    assert joint.cov.shape == (5, CLASSES, 5, CLASSES)
    assert posterior.predict(NEW).probs.shape == (5, CLASSES)
    size = posterior.network.selection.size
    assert size == sum(p.numel() for p in net().parameters()) or METHODS[name.split()[0]].weights is not None
    shapes = [tuple(t.shape) for t in everything(posterior, NEW, torch.Generator().manual_seed(5))[5:]]
    assert set(shapes) <= {(2, 5, CLASSES), (2, size)}
    for result in everything(posterior, NEW, torch.Generator().manual_seed(5)):
        assert result.dtype == D
        assert bool(torch.isfinite(result).all())
        assert not result.requires_grad


@pytest.mark.parametrize("chosen", [[2, 0], [1], [[0, 1], [2, 0], [1, 1], [2, 1], [0, 0]]])
def test_chosen_outputs_are_those_of_the_whole_answer(name: str, chosen: list[Any]) -> None:
    posterior, numbers, rows = standard(name), torch.tensor(chosen).expand(5, -1), torch.arange(5)[:, None]
    whole, some = posterior.functions(NEW), posterior.functions(NEW, outputs=chosen)
    assert_close(some.mean, whole.mean[rows, numbers])
    assert_close(some.variance, whole.variance[rows, numbers], SOLVED)
    assert_close(some.cov, whole.cov[rows[:, :, None], numbers[:, :, None], numbers[:, None, :]], SOLVED)
    joint, together = posterior.functions(NEW, joint=True, outputs=chosen), posterior.functions(NEW, joint=True)
    assert_close(joint.mean, some.mean)
    assert_close(joint.cov, together.cov[rows, numbers][:, :, rows, numbers], SOLVED)


def test_a_loader_gives_one_predictive_for_all_rows(name: str) -> None:
    posterior = standard(name)
    batches = [(NEW[:2], Y[:2]), (NEW[2:], Y[2:5])]
    whole, joined = posterior.predict(NEW), posterior.predict(batches)
    assert_close(joined.probs, whole.probs, SOLVED)
    assert_close(joined.log_prob(Y[:5]), whole.log_prob(Y[:5]), SOLVED)
    assert_close(posterior.functions(batches).cov, posterior.functions(NEW).cov, SOLVED)


def test_predictions_do_not_depend_on_the_batch_they_are_asked_in(name: str) -> None:
    posterior = standard(name)
    together = posterior.functions(NEW)
    alone = [posterior.functions(NEW[b : b + 1]) for b in range(len(NEW))]
    assert_close(torch.cat([each.mean for each in alone]), together.mean)
    assert_close(torch.cat([each.cov for each in alone]), together.cov, SOLVED)


def test_a_file_gives_the_same_posterior_or_is_refused(name: str, tmp_path: Path) -> None:
    model = net()
    posterior, path = fitted(name, model=model), tmp_path / "posterior.lapwing"
    try:
        posterior.save(path)
    except lw.errors.UnsupportedError as error:
        assert "fit" in str(error)  # noqa: PT017
        assert not path.exists()
    else:
        loaded = problems.unchanged(model, lambda: lw.load(path, model))
        same(loaded, posterior)
        if posterior.posterior.provides(Posterior.log_evidence):
            assert_close(loaded.log_evidence(), posterior.log_evidence(), SOLVED)
        if name in LAWFUL:
            same(loaded.with_prior(30.0), posterior.with_prior(30.0))
        one, two = (everything(p, NEW, torch.Generator().manual_seed(5)) for p in (loaded, posterior))
        for a, b in zip(one, two, strict=True):
            assert_close(a, b, SOLVED)


@pytest.mark.parametrize("part", [[2], [4, 0], [1, 1, 3]])
def test_functions_are_the_same_wherever_they_are_looked_at(name: str, part: list[int]) -> None:
    """At other inputs, in other batches, in another order; and an input twice is the same input."""
    posterior, seeded = standard(name), lambda: torch.Generator().manual_seed(5)
    if name == "fmgp" or not posterior.posterior.provides(Posterior.function_samples):
        return  # the functions of FMGP are drawn at the inputs of one call
    whole = posterior.function_samples(NEW, 2, seeded())
    assert_close(posterior.function_samples(NEW[part], 2, seeded()), whole[:, part], SOLVED)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_off_make_no_difference(name: str, around: Callable[[], Any]) -> None:
    model, generator = net(), torch.Generator().manual_seed(7)
    method = small_method(name, model)
    with around():
        posterior = lw.fit(model, [(X, Y)], "classification", method=method, prior=1e3, generator=generator)
        quiet = everything(posterior, NEW.clone(), torch.Generator().manual_seed(5))
    for a, b in zip(quiet, everything(standard(name), NEW, torch.Generator().manual_seed(5)), strict=True):
        assert_close(a.clone(), b, SOLVED)


def test_float32_is_near_float64(name: str) -> None:
    """But where weights are trained from random numbers, which the dtype of the network decides."""
    if name in ("ensemble", "swag", "ivon"):
        return
    model = net().float()
    data, generator = [(X.float(), Y)], torch.Generator().manual_seed(7)
    method = small_method(name, model)
    narrow = lw.fit(model, data, "classification", method=method, prior=1e3, generator=generator)
    belief, wide = narrow.functions(NEW.float()), standard(name).functions(NEW)
    assert belief.mean.dtype == belief.cov.dtype == torch.float32
    assert_near(belief.mean, wide.mean, 1e-4)
    assert float((belief.cov - wide.cov).norm()) <= 0.02 * float(wide.cov.norm())


def test_the_model_and_the_global_generator_are_unchanged(name: str) -> None:
    model = net()
    model.register_forward_hook(lambda *_: None)
    before, random = problems.state(model), torch.get_rng_state()
    posterior = fitted(name, (4, 6), model)
    problems.assert_unchanged(before, model)
    everything(posterior, NEW, torch.Generator().manual_seed(5))
    problems.assert_unchanged(before, model)
    assert torch.equal(torch.get_rng_state(), random)


MOST = 400  # more than the weights, and than the rows, of any named network with six data
VARIANTS: dict[str, Any] = {
    "hessian": lw.Full(curvature="hessian"), "fisher": lw.Diagonal(curvature="fisher_mc"),
    "plain network": lw.baselines.MapOnly(), "ekron reduce": lw.EKron(sharing="reduce"),
    "no full blocks": lw.Kron(full_limit=0),
}  # fmt: skip
SOME = ["cnn", "token_level", "dict_input"]  # where the other methods are tried as well


def methods_for(case: str, model: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield methods by name: those that take every network, on three of them all and on each of the others a third.

    Each of the other methods is tried on one of the three.
    """
    for_all: dict[str, Callable[[], Any]] = {
        name: lambda entry=entry: entry.settings(MOST, MOST) for name, entry in lawful_entries().items()
    }
    for_all |= {name: lambda method=method: method for name, method in VARIANTS.items()}
    if case not in SOME:
        yield from [*for_all.items()][list(BY_NAME).index(case) % 3 :: 3]
        return
    yield from for_all.items()
    for name in [name for name in SMALL if name not in LAWFUL][SOME.index(case) :: len(SOME)]:
        yield name, lambda name=name: small_method(name, model)


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor that a value holds, in its fields and theirs, but not the parameters of a network."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
        return
    seen = set() if seen is None else seen
    if isinstance(value, (str, int, float)) or id(value) in seen:
        return
    seen.add(id(value))
    parts = vars(value) if is_dataclass(value) else value
    for part in parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, (list, tuple)) else ():
        yield from tensors(part, seen)


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_call_leaves_the_model_bit_identical_and_keeps_no_graph(case: str) -> None:
    """Where a method refuses a network, too. A tensor that requires a gradient keeps the activations of a batch."""
    chosen = BY_NAME[case]
    model = chosen.build()
    next(iter(model.modules())).register_forward_hook(lambda *_: None)
    inputs, data, likelihood = chosen.batch(3, seed=1), problems.batches(chosen), problems.likelihood(chosen)
    random, before = torch.get_rng_state(), problems.state(model)
    generator, refused = torch.Generator().manual_seed(1), []
    for name, make in methods_for(case, model):
        learned = case in SOME and name in LAWFUL and name != "full"
        prior = None if learned else 1e3  # learned with the evidence, or given
        weights = lw.last_layer if name == "hessian" else None  # all weights would be slow
        try:
            options = {"method": make(), "weights": weights, "prior": prior, "generator": generator}
            posterior = lw.fit(model, data, likelihood, **options)
            problems.assert_unchanged(before, model)
            results = everything(posterior, inputs, generator)
        except lw.LapwingError:
            refused.append(name)
        else:
            kept = [*results, *tensors(posterior)]
            assert len(kept) > len(results), name
            assert not any(tensor.requires_grad for tensor in kept), name
        problems.assert_unchanged(before, model)
    assert not {*LAWFUL, *VARIANTS} & set(refused)
    assert torch.equal(torch.get_rng_state(), random)


def test_beliefs_are_differentiable_in_the_inputs_or_refuse(name: str) -> None:
    """Against finite differences: means, covariances, those between inputs, and probabilities."""
    posterior, x = standard(name), NEW[:2].clone().requires_grad_()
    if not posterior.posterior.differentiable:
        for ask in (posterior.functions, posterior.predict):
            with pytest.raises(lw.errors.UnsupportedError, match=r"not differentiable in the inputs. Use x.detach\(\)"):
                ask(x)
        assert not posterior.functions(x.detach()).mean.requires_grad
        return

    def results(x: Tensor) -> tuple[Tensor, ...]:
        belief = posterior.functions(x)
        return belief.mean, belief.cov, posterior.functions(x, joint=True).cov, posterior.predict(x).probs

    with torch.no_grad():
        plain = results(x)
    for one, other in zip(plain, results(x), strict=True):
        assert_close(other, one)
    assert torch.autograd.gradcheck(results, (x,), fast_mode=True)
