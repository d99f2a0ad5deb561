"""Mixtures of beliefs: around one network, to integrate over hyperparameters, and of the posteriors of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, check_finite, wants_slopes
from lapwing.errors import FileError, ModelError
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.labels import Categorical
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.network import Network
from lapwing.networks.passes import Functional, outputs_along
from lapwing.posteriors.base import (
    ALL,
    OF_NETWORKS,
    SUM_OVER_DATA,
    TRACE,
    Posterior,
    Trace,
    draw_numbers,
    predict_from_draws,
    short_number,
)
from lapwing.posteriors.weight_space import SharedAxes, beliefs_at, last_layer_axes, with_update_remark
from lapwing.predictives.base import Predictive
from lapwing.predictives.labels import CLASSES_TOGETHER, ClassMixture, SoftmaxPredictive
from lapwing.problem import Problem, Statistics
from lapwing.runtime.memory import batch_size_for
from lapwing.runtime.states import (
    ROUNDING,
    SMALLEST,
    Array,
    ListOf,
    Maybe,
    PartOf,
    Real,
    Record,
    State,
    Text,
    Unread,
    Whole,
    plain,
    saved,
)
from lapwing.runtime.threads import uniform
from lapwing.values.gaussian import Deferred, FunctionGaussian, FunctionSamples, Query, differentiable_beliefs

Draws = Callable[[Posterior, int], Tensor]  # from a posterior and a number to so many draws
TOGETHER_COPIES = 4  # of the covariances of all cells, while they are made and linked
NEGLIGIBLE = 1e-3  # part of the largest weight below which a cell is dropped
SHOWN_OFFSETS = 4  # offsets of the logits that a summary lists
SMALLEST_SHARE = 0.005  # of the shares that it lists
RARE = 1e-2  # weight below which a belief is dropped: each costs a product with the Jacobian at every prediction


@dataclass(frozen=True, eq=False)
class Belief:
    """One belief of a mixture: a fitted posterior under these precisions of its prior; as it is, if they are None."""

    base: int  # which of the mixture's posteriors
    precisions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """One component of a mixture: f ~ N(mean, scale · V) of a belief, and the likelihood that predicts from it.

    A scale of zero is the network without error bars. Cells with the same belief share its computation.
    """

    belief: int
    likelihood: Likelihood
    scale: float = 1.0

    def predict(self, belief: FunctionGaussian | FunctionSamples) -> Predictive:
        """Return the predictive distribution of y under this cell."""
        return self.likelihood.predict_widened(belief, self.scale)

    @property
    def spread(self) -> float:
        """The factor of V in the cell's covariance of f; Student tails widen f and the noise alike."""
        return self.scale * self.likelihood.widening


class CellLogits(nn.Module):
    """The moments of the logits that each of K cells predicts from, made of those of L beliefs, for all cells at once.

    A cell that has no spread must not be asked for slopes: that of a standard deviation at zero is infinite.
    """

    belief: Tensor
    factor: Tensor
    spread: Tensor
    offset: Tensor | None

    def __init__(self, cells: Sequence[Cell], dtype: torch.dtype) -> None:
        super().__init__()
        factors = [1 / cell.likelihood.link_temperature for cell in cells]  # type: ignore[operator]
        spreads = [cell.scale * factor**2 for cell, factor in zip(cells, factors, strict=True)]
        offsets = [cell.likelihood.logit_offset for cell in cells]
        moved = any(offset is not None for offset in offsets)
        zero = torch.zeros(1, dtype=torch.float64)
        rows = torch.broadcast_tensors(*(zero if each is None else each.reshape(-1).cpu() for each in offsets))
        self.register_buffer("belief", torch.tensor([cell.belief for cell in cells]))
        self.register_buffer("factor", torch.tensor(factors, dtype=torch.float64).to(dtype))
        self.register_buffer("spread", torch.tensor(spreads, dtype=torch.float64).to(dtype))
        self.register_buffer("offset", torch.stack(rows).to(dtype) if moved else None)

    def means(self, mean: Tensor) -> Tensor:
        """Return the means (K, ..., C), given that of the outputs (..., C)."""
        ones = [1] * mean.ndim
        means = self.factor.reshape(-1, *ones) * mean
        return means if self.offset is None else means + self.offset.reshape(len(self.offset), *ones[1:], -1)

    def covariances(self, covs: Tensor) -> Tensor:
        """Return the covariances (K, ..., C, C), given those of the beliefs (L, ..., C, C)."""
        return self.spread.reshape(-1, *[1] * (covs.ndim - 1)) * covs.index_select(0, self.belief)


@saved
@dataclass(frozen=True, eq=False)
class MixturePosterior(Posterior):
    """A mixture of Gaussian beliefs about the outputs, with a predictive for each. The tuners of ``fit`` make it.

    ``bases[0]`` is the posterior that was fitted, under the hyperparameters of the evidence. A mixture has no evidence
    and no precision of its own: ``base`` is the posterior that has them. All cells share one pass of the
    network and one Jacobian.
    """

    bases: tuple[Posterior, ...]
    beliefs: tuple[Belief, ...]
    cells: tuple[Cell, ...]
    weights: Tensor  # of the cells, float64; they sum to one
    trace: Trace | None = None

    @classmethod
    def of(
        cls, bases: Sequence[Posterior], beliefs: Sequence[Belief], cells: Sequence[Cell], weights: Tensor
    ) -> MixturePosterior:
        """Return the mixture without the beliefs and cells of negligible weight."""
        share = torch.zeros(len(beliefs), dtype=torch.float64)
        share.index_add_(0, torch.tensor([cell.belief for cell in cells]), weights.double())
        kept = [
            i
            for i, weight in enumerate(weights.tolist())
            if weight >= NEGLIGIBLE * float(weights.max()) and (cells[i].scale == 0 or share[cells[i].belief] >= RARE)
        ]
        wide = {cells[i].belief for i in kept if cells[i].scale > 0}
        narrow = {cells[i].belief for i in kept} - wide  # only their mean is needed: that of any belief of the base
        first = {beliefs[k].base: k for k in [*sorted(narrow), *sorted(wide, reverse=True)]}
        used = sorted(wide | set(first.values()))
        number = lambda k: used.index(k if k in wide else first[beliefs[k].base])
        cells = [replace(cells[i], belief=number(cells[i].belief)) for i in kept]
        weights = weights[kept].double()
        return cls(tuple(bases), tuple(beliefs[i] for i in used), tuple(cells), weights / weights.sum())

    @property
    def base(self) -> Posterior:
        return self.bases[0]

    @property
    def problem(self) -> Problem:  # type: ignore[override]
        return self.base.problem

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        return all(base.differentiable for base in self.bases)

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Loss and counts of the data that the posterior was fitted to."""
        return self.base.statistics

    @cached_property
    def members(self) -> tuple[Posterior, ...]:
        """The posterior of each belief."""
        return tuple(member(self.bases, belief) for belief in self.beliefs)

    def prepare(self) -> None:
        for each in self.members:
            each.prepare()

    def with_trace(self, trace: Trace) -> MixturePosterior:
        return replace(self, trace=trace)

    def updated(self, data: Data, generator: torch.Generator | None = None) -> MixturePosterior:
        """Return the mixture with the data added to every posterior; precisions and weights of the cells stay."""
        for base in self.bases:
            base.require(Posterior.updated, SUM_OVER_DATA)
        new = tuple(base.updated(data, generator) for base in self.bases)
        return replace(
            self, bases=new, trace=with_update_remark(self.trace, new[0].statistics.data - self.statistics.data)
        )

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        """Return the mean and covariance of the mixture, Σ w V if beliefs have one mean. They share one Jacobian."""
        if query.joint:
            return self._joint(each.belief(x, query) for each in self.members)
        return self._mix(beliefs_at(self.members, x, query))

    def _joint(self, beliefs: Iterable[FunctionGaussian]) -> FunctionGaussian:
        """Return the mean and joint covariance of the mixture of these beliefs, of which one at a time is in memory."""
        means, total = [], None
        for belief, spread in zip(beliefs, self._spreads.tolist(), strict=True):
            means.append(belief.mean)
            size = belief.mean.numel()
            total = torch.zeros(size, size).to(belief.mean) if total is None else total
            total.add_(belief.cov.reshape(size, size), alpha=spread)
            del belief
        assert total is not None
        mean = _weighted_sum(self._shares, means)
        for each, share in zip(means, self._shares.tolist(), strict=True):
            gap = (each - mean).flatten()
            total.addr_(gap, gap, alpha=share)
        return FunctionGaussian.across(mean, total)

    def _mix(self, beliefs: Sequence[FunctionGaussian]) -> FunctionGaussian:
        """Return the mean and covariance of the mixture of these beliefs."""
        spreads, shares = self._spreads, self._shares
        mean = _weighted_sum(shares, (belief.mean for belief in beliefs))
        gaps = [belief.mean - mean for belief in beliefs]
        outer = lambda gap: gap.unsqueeze(-1) * gap.unsqueeze(-2)
        variances = lambda: _weighted_sum(spreads, (b.variance for b in beliefs))
        covs = lambda: _weighted_sum(spreads, (b.cov for b in beliefs))
        return FunctionGaussian(
            mean,
            Deferred(
                lambda: variances() + _weighted_sum(shares, (gap.square() for gap in gaps)),
                lambda: covs().add_(_weighted_sum(shares, map(outer, gaps))),
            ),
        )

    @property
    def cell_count(self) -> int:
        return len(self.cells)

    def describe(self) -> str:
        """Return the shares of the cells in words: by precision or scale of the covariance, and the plain network."""
        shares: dict[str, float] = {}
        for cell, weight in zip(self.cells, self.weights.tolist(), strict=True):
            each = self.members[cell.belief]
            if not cell.scale:
                name = "plain network"
            elif each.linearised:
                name = f"precision {short_number(float(each.problem.prior.values.mean()))}"
            else:  # the scale has a factor for another noise too
                noise = float(cell.likelihood.dispersion / each.problem.likelihood.dispersion)
                name = f"covariance × {cell.scale / noise:.3g}"
            shares[name] = shares.get(name, 0.0) + weight
        ordered = sorted(shares.items(), key=lambda share: -share[1])
        parts = [f"{name} ({share:.2f})" for name, share in ordered if share >= SMALLEST_SHARE]
        wider = "; a smaller precision gives wider error bars" if any("precision" in name for name in shares) else ""
        what = f"The mixture averages the predictions of {len(self.cells)} settings, with shares in brackets"
        return f"{what}: {', '.join(parts)}{wider}.{self._describe_offset()}"

    def _describe_offset(self) -> str:
        """Return what the offset of the logits does, in words; nothing if no cell differs from the base in it."""
        own = self.problem.likelihood.logit_offset
        moved = [i for i, cell in enumerate(self.cells) if cell.likelihood.logit_offset is not own]
        offsets = [self.cells[i].likelihood.logit_offset for i in moved]
        added = [each if own is None else each - own for each in offsets if each is not None]
        if not added or not bool((added[0] != 0).any()):
            return ""
        named = [f"{float(value):+.2f} ({k})" for k, value in enumerate(added[0].reshape(-1))]
        named = sorted(named, key=lambda name: -abs(float(name.split()[0])))[:SHOWN_OFFSETS]
        more = "" if added[0].numel() <= SHOWN_OFFSETS else ", ..."
        share = float(self.weights[moved].sum())
        return f" With a share of {share:.2f} logits are shifted (output in brackets): {', '.join(named)}{more}."

    @property
    def _shares(self) -> Tensor:
        """The weight of each belief, (K,)."""
        return self._by_belief([1.0] * len(self.cells))

    @property
    def _spreads(self) -> Tensor:
        """The factor of the covariance of each belief in that of the mixture, (K,)."""
        return self._by_belief([cell.spread for cell in self.cells])

    @cached_property
    def _wide_shares(self) -> list[float]:
        """The weight of each belief in the cells that have a spread."""
        shares: list[float] = self._by_belief([float(cell.scale > 0) for cell in self.cells]).tolist()
        return shares

    def _by_belief(self, values: list[float]) -> Tensor:
        number = torch.tensor([cell.belief for cell in self.cells])
        weighted = self.weights.cpu() * torch.tensor(values, dtype=torch.float64)
        return torch.zeros(len(self.beliefs), dtype=torch.float64).index_add(0, number, weighted)

    def predict(self, x: Inputs, samples: int | None = None) -> Predictive:
        """Return the predictive over targets: probabilities or densities of all cells, averaged.

        Functions are drawn from the beliefs by the weights of their cells; cells with the same belief share them.
        """
        numbers = draw_numbers(self.members, self.problem.likelihood, self._wide_shares, samples, x)
        if numbers:
            return predict_from_draws(self.members, x, numbers, self.kept_draws, self._average)
        if self._logits is not None and not wants_slopes(x):
            together = self._predict_together(x)
            if together is not None:
                return together
        beliefs = differentiable_beliefs(lambda inner: beliefs_at(self.members, inner), x)
        for mean in {id(belief.mean): belief.mean for belief in beliefs}.values():
            check_finite(mean, "outputs of the network")
        return self._average(beliefs)

    @cached_property
    def _logits(self) -> CellLogits | None:
        """The logits of all cells; None unless all are of a few classes and differ in nothing else."""
        likelihoods, network = [cell.likelihood for cell in self.cells], self.problem.network
        kinds = {(type(each), getattr(each, "link", ""), getattr(each, "samples", 0)) for each in likelihoods}
        seeds = {getattr(each, "seed", 0) for each in likelihoods}
        one = len(kinds) == len(seeds) == 1 and type(likelihoods[0]) is Categorical
        if not one or len(network.output_shape) > 1 or network.output_shape[-1] > CLASSES_TOGETHER:
            return None
        return CellLogits(self.cells, network.dtype).to(network.device)

    @cached_property
    def _axes(self) -> SharedAxes | None:
        """The form of the covariances in the features of the last layer; None if there is none."""
        return last_layer_axes(self.members) if self._logits is not None else None

    @cached_property
    def _differences(self) -> Tensor | None:
        """The matrix from squared features to the variances of all differences of logits; None if it would be large."""
        if self._axes is None or self._logits is None:
            return None
        with torch.no_grad():
            return self._axes.differences(self._logits.belief, self._logits.spread)

    def _predict_together(self, x: Inputs) -> Predictive | None:
        """Return the predictive of classes from the moments of all cells; None where these take too much memory."""
        network, likelihood = self.problem.network, self.cells[0].likelihood
        count, outputs = network.count(x), network.output_shape[-1]
        each = TOGETHER_COPIES * network.dtype.itemsize * count * outputs**2
        if batch_size_for(len(self.cells), each, network.device) < len(self.cells):
            return None
        logits, axes = self._logits, self._axes
        both = None if axes is None else network.features_at_once(x)
        assert logits is not None
        assert isinstance(likelihood, Categorical)
        if both is None or axes is None:
            beliefs = beliefs_at(self.members, x)
            mean = beliefs[0].mean
            if any(each.mean is not mean for each in beliefs):
                return self._average(beliefs)
            covariance: Tensor | Deferred = logits.covariances(torch.stack([each.cov for each in beliefs]))
        else:
            mean, a = both
            cov, matrix, sizes = lambda: logits.covariances(axes(a)), self._differences, (-1, outputs, outputs)
            spread = partial(lambda rows: F.linear(axes.squares(a), rows).unflatten(-1, sizes).transpose(0, 1), matrix)
            variance = lambda: cov().diagonal(dim1=-2, dim2=-1)
            covariance = Deferred(variance, cov, None, None if matrix is None else spread)
        check_finite(mean, "outputs of the network")
        moments = FunctionGaussian(logits.means(mean), covariance)
        predictive = SoftmaxPredictive(moments, likelihood.link, likelihood.samples, likelihood.seed)
        return ClassMixture((predictive,), self.weights)

    def _average(self, beliefs: Sequence[FunctionGaussian] | Sequence[FunctionSamples]) -> Predictive:
        """Return the average of the predictives of all cells, given the belief of each posterior."""
        components = tuple(cell.predict(beliefs[cell.belief]) for cell in self.cells)
        mixed = getattr(type(components[0]), "mixed", Predictive.mixed)  # a user's own may lack it
        return mixed(components, self.weights)  # type: ignore[no-any-return]

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions, (n, B, [T,] C); each draws its cell first. One pass of the network for all of them."""
        if self._one_tangent_model:
            none = torch.zeros_like(self.members[0].theta)
            steps = self._draw(
                n, generator, lambda each, count: each.deviations(count, generator), lambda _: none, none
            )
            moving = steps.any(1)  # not those of the plain network
            f, products = outputs_along(self.members[0].problem.network, x, steps[moving])
            out = f.repeat(n, *[1] * f.ndim)
            out[moving] += products
            return out
        centre = lambda each: beliefs_at([each], x)[0].mean
        return self._draw(
            n, generator, lambda each, count: each.function_samples(x, count, generator),
            centre, centre(self._all_with(Posterior.function_samples, "function samples")[0]),
        )  # fmt: skip

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the weights, (n, P); each draws its cell first."""
        return self._draw(
            n, generator, lambda each, count: each.weight_samples(count, generator),
            lambda each: each.theta, self._all_with(Posterior.weight_samples, "weight samples")[0].theta,
        )  # fmt: skip

    @property
    def _one_tangent_model(self) -> bool:
        """Whether all beliefs are about the weights of the same tangent model."""
        networks = {id(each.problem.network) for each in self.members}
        return len(networks) == 1 and all(each.provides(Posterior.deviations) for each in self.members)

    def _all_with(self, capability: Callable[..., Tensor], what: str) -> tuple[Posterior, ...]:
        """Return the posterior of each belief; raise if a base does not provide this member."""
        for base in self.bases:
            base.require(capability, what)
        return self.members

    def _draw(
        self,
        n: int,
        generator: torch.Generator | None,
        draws: Draws,
        centre: Callable[[Posterior], Tensor],
        like: Tensor,
    ) -> Tensor:
        """Return n draws, (n, *like.shape): cells by their weights, then draws of their belief, spread by the cell.

        A belief is asked once for the draws of all its cells: methods with stored samples return the first ones.
        """
        edges = self.weights.cumsum(0)[:-1].contiguous()
        chosen = torch.searchsorted(edges, uniform((n,), generator, like).to(edges), right=True).cpu()
        beliefs = torch.tensor([cell.belief for cell in self.cells])[chosen]
        widths = torch.tensor([cell.spread**0.5 for cell in self.cells], dtype=torch.float64)[chosen]
        out = torch.zeros((n, *like.shape), dtype=like.dtype, device=like.device)
        for number in beliefs.unique().tolist():
            each, drawn = self.members[number], beliefs == number
            middle = centre(each).to(like)
            out[drawn.to(like.device)] = middle
            drawn &= widths > 0
            if bool(drawn.any()):
                steps = draws(each, int(drawn.sum())).to(like) - middle
                out[drawn.to(like.device)] += torch.einsum("n,n...->n...", widths[drawn].to(like), steps)
        return out

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights, or of the outputs at x: Σ w of the cells'."""
        members = self._all_with(Posterior.variance_of, "variance of functions of the weights")
        pairs = zip(self._spreads.tolist(), members, strict=True)
        return torch.as_tensor(sum(spread * each.variance_of(function, x) for spread, each in pairs))

    def state(self) -> State:
        shared = all(belief.precisions is None for belief in self.beliefs)
        if not shared and self.base.is_sampled:  # samples in a file belong to one prior: a base for every belief
            beliefs = tuple(Belief(i + 1) for i in range(len(self.members)))
            return replace(self, bases=(self.base, *self.members), beliefs=beliefs).state()
        parts = {f"base{i}": base.state() for i, base in enumerate(self.bases)}
        tensors = {"weights": self.weights}
        for i, base in enumerate(self.bases):
            tensors[f"precisions{i}"] = base.problem.prior.values
            parts[f"likelihood{i}"] = base.problem.likelihood.state()  # type: ignore[attr-defined]
        for i, belief in enumerate(self.beliefs):
            if belief.precisions is not None:
                tensors[f"belief{i}"] = belief.precisions
        for i, cell in enumerate(self.cells):
            parts[f"cell{i}"] = cell.likelihood.state()  # type: ignore[attr-defined]
        settings = {
            "bases": [type(base).__name__ for base in self.bases],
            "beliefs": [belief.base for belief in self.beliefs],
            "cells": [{"belief": cell.belief, "scale": cell.scale} for cell in self.cells],
            "trace": plain(self.trace),
        }
        return State("MixturePosterior", settings, tensors, parts)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> MixturePosterior:
        names, links, cells = (range(len(state.settings.get(key) or ())) for key in ("bases", "beliefs", "cells"))
        precisions = Array(tuple(problem.prior.values.shape), SMALLEST)
        fields = state.read(
            bases=ListOf(Text()), beliefs=ListOf(Whole(0, len(names) - 1)), trace=TRACE,
            cells=ListOf(Record(dict, belief=Whole(0, len(links) - 1), scale=Real(0))),
            weights=Array((len(cells),), 0, 1, also=_shares),
            **{f"precisions{i}": precisions for i in names}, **{f"belief{i}": Maybe(precisions) for i in links},
            **{f"base{i}": Unread() for i in names}, **{f"likelihood{i}": PartOf(Likelihood) for i in names},
            **{f"cell{i}": PartOf(Likelihood) for i in cells},
        )  # fmt: skip
        bases = []
        for i in names:
            own = problem.with_prior(problem.prior.with_precision(fields[f"precisions{i}"]))
            own = own.with_likelihood(fields[f"likelihood{i}"])
            bases.append(PartOf(Posterior, own).read(fields[f"base{i}"], state.known))
        beliefs = tuple(Belief(base, fields[f"belief{i}"]) for i, base in enumerate(fields["beliefs"]))
        parts = tuple(Cell(likelihood=fields[f"cell{i}"], **cell) for i, cell in enumerate(fields["cells"]))
        mixture = cls(tuple(bases), beliefs, parts, fields["weights"], fields["trace"])
        mixture._refuse_impossible(fields["bases"])
        return mixture

    def _refuse_impossible(self, names: Sequence[str]) -> None:
        """Raise ``FileError`` if the parts from a file do not fit each other."""
        if tuple(names) != tuple(type(base).__name__ for base in self.bases) or "MixturePosterior" in names:
            raise FileError(f"a mixture has the posteriors {names!r:.80}; expected those of its parts, and no mixture")
        if any(
            belief.precisions is not None and not self.bases[belief.base].provides(Posterior.with_problem)
            for belief in self.beliefs
        ):
            raise FileError("a belief of the mixture has its own prior, which its posterior cannot take")
        kinds = {
            type(each) for each in (*(b.problem.likelihood for b in self.bases), *(c.likelihood for c in self.cells))
        }
        if len(kinds) != 1 or not self.cells or not self.beliefs:
            raise FileError(
                f"a mixture has {len(self.cells)} cells with {len(kinds)} kinds of likelihoods; expected one kind"
            )


def _shares(weights: Tensor) -> str:
    """Check that weights sum to one."""
    return "" if abs(float(weights.sum()) - 1) < ROUNDING else "does not sum to one; expected weights that do"


def _weighted_sum(weights: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """Return Σ w_k v_k of some parts v, of which one at a time is in memory."""
    total: Tensor | None = None
    for weight, part in zip(weights.tolist(), parts, strict=True):
        total = weight * part if total is None else total.add_(part, alpha=weight)
    assert total is not None
    return total


def member(bases: Sequence[Posterior], belief: Belief) -> Posterior:
    """Return the posterior of a belief."""
    base = bases[belief.base]
    if belief.precisions is None:
        return base
    return base.with_problem(base.problem.with_precisions(belief.precisions))


@dataclass(frozen=True, eq=False)
class NetworksPosterior(Posterior):
    """Posteriors of several networks with a share each: y ~ Σ share · predictive of each network.

    ``functions`` has the mean and covariance of the mixture. It has no evidence, no weight samples, no Jacobian and no
    GGN: those belong to the weights of one network.
    """

    mixture: MixturePosterior
    networks: tuple[Network, ...]
    fingerprints: tuple[Fingerprint, ...]  # of the networks at the fit
    trace: Trace | None = None  # the steps of the tuners of all networks, one after another
    of_one_network: ClassVar[bool] = False
    no_file: ClassVar[str] = (
        "a mixture of several networks has no file form, since a file does not hold networks; save those and fit "
        "again, or save the posterior of each."
    )

    @classmethod
    def of(cls, posteriors: Sequence[Posterior], shares: Sequence[float]) -> NetworksPosterior:
        """Return the mixture; raise if two networks have outputs of different shapes."""
        networks = tuple(each.problem.network for each in posteriors)
        for number, network in enumerate(networks):
            if network.output_shape != networks[0].output_shape:
                raise ModelError(
                    f"network {number} has outputs of the shape {network.output_shape}; expected "
                    f"{networks[0].output_shape}, that of the first."
                )
        marks = tuple(Fingerprint.of(network.model) for network in networks)
        return cls(
            concat_mixtures(posteriors, shares), networks, marks, _merge_traces([each.trace for each in posteriors])
        )

    @property
    def problem(self) -> Problem:  # type: ignore[override]
        """The problem of the first network."""
        return self.mixture.problem

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Loss and counts of the data, of the first network."""
        return self.mixture.statistics

    @property
    def findings(self) -> tuple[str, ...]:
        count, bases = len(self.networks), self.mixture.bases
        listed = (finding for each in bases for finding in each.findings)
        first = f"A mixture of the posteriors of {count} networks; the prior and noise shown are those of the first."
        return (first, *dict.fromkeys(listed))

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return self._checked_mixture().belief(x, query)

    def predict(self, x: Inputs, samples: int | None = None) -> Predictive:
        return self._checked_mixture().predict(x, samples)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions, (n, B, [T,] C); each draws its network first."""
        for base in self.mixture.bases:
            base.require(Posterior.function_samples, "function samples")
        return self._checked_mixture().function_samples(x, n, generator)

    def plain(self) -> Posterior:
        return self.mixture.base.plain()

    def _checked_mixture(self) -> MixturePosterior:
        """Return the mixture; raise ``ModelError`` if a network has other weights than at the fit."""
        for network, fingerprint in zip(self.networks, self.fingerprints, strict=True):
            fingerprint.refuse_other(network.model)
        return self.mixture


def concat_mixtures(posteriors: Sequence[Posterior], shares: Sequence[float]) -> MixturePosterior:
    """Return one mixture of posteriors with these shares; those that are mixtures bring their cells."""
    bases: list[Posterior] = []
    beliefs: list[Belief] = []
    cells: list[Cell] = []
    weights: list[Tensor] = []
    for posterior, share in zip(posteriors, shares, strict=True):
        each = posterior if isinstance(posterior, MixturePosterior) else _single_mixture(posterior)
        cells += [replace(cell, belief=cell.belief + len(beliefs)) for cell in each.cells]
        beliefs += [replace(belief, base=belief.base + len(bases)) for belief in each.beliefs]
        bases += each.bases
        weights.append(share * each.weights.cpu())
    return MixturePosterior(tuple(bases), tuple(beliefs), tuple(cells), torch.cat(weights))


def _single_mixture(posterior: Posterior) -> MixturePosterior:
    """Return the mixture of one posterior."""
    cell = Cell(0, posterior.problem.likelihood)
    return MixturePosterior((posterior,), (Belief(0),), (cell,), torch.ones(1, dtype=torch.float64))


def _merge_traces(traces: Sequence[Trace | None]) -> Trace | None:
    """Return one record of the tuners of several networks; scores are means over networks, each by itself."""
    known = [trace for trace in traces if trace is not None]
    if not known:
        return None
    first = known[0]
    names = [name for name in first.scores if all(name in trace.scores for trace in known)]
    return replace(
        first,
        tuner=f"{first.tuner} for each network" if first.tuner else "",
        steps=tuple(step for trace in known for step in trace.steps),
        verdict="",  # that of the first network is not one of the mixture
        findings=tuple(dict.fromkeys(finding for trace in known for finding in trace.findings)),
        scores={f"{name}{OF_NETWORKS}": sum(trace.scores[name] for trace in known) / len(known) for name in names},
    )
