"""The steps of ``fit`` in their order: the problem, the method, the prior, and the finished posterior."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.batches import Batch
from lapwing.core.data import Data
from lapwing.core.inputs import Inputs
from lapwing.core.processes import Processes
from lapwing.core.random import independent_generator, uniform
from lapwing.core.weights import Weighted
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.likelihoods.weighted import spread
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.full import Full
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.protocol import Method
from lapwing.methods.workload import workload_of
from lapwing.networks.fingerprint import refuse_other_models
from lapwing.networks.forward import own_loss
from lapwing.networks.network import Network
from lapwing.networks.normalised import members, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.posteriors.beliefs import beliefs_at
from lapwing.posteriors.draws import MANY
from lapwing.posteriors.protocols import Tunable
from lapwing.priors.bound import Prior
from lapwing.problem import Problem, checked_targets, fitting_targets, mean_squared_residual
from lapwing.registry import Auto, named, prior_given
from lapwing.tuners.evidence import MaximiseEvidence, start_near_optimum
from lapwing.tuners.fixed_point import SampleEM
from lapwing.tuners.protocol import FollowsEvidence, Tuner, applied
from lapwing.tuners.reuse import with_findings

LARGEST = 4096  # weights or rows up to which the default for Gaussian noise includes the exact posterior
ROWS = 600  # data that it is computed from, if there are more
COMPARED = 200  # data at which the two are compared
FEW_OUTPUTS = 3  # of an input, up to which a Jacobian of so many data is small
MEMORY = 2**30  # bytes of the rows of a Jacobian for it
SMALLEST_REST = 1e-3  # of a variance that its own datum leaves: rounding is not divided by
LOOKED = 4  # samples from which ``Auto`` reads the sizes of a network


def problem_of(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood | str,
    weights: Weights | str | None,
    prior: Prior | float | None,
    output: tuple[str | int, ...] = (),
) -> Problem:
    """Look at the model with the first batch, and return network, likelihood and prior; raise if they do not fit."""
    first, several = data.look()
    network = Network.build(model, several.inputs, named("weights", weights), output)
    refuse_other_models(network.model, data.processes)
    f = network(first.inputs)
    chosen = likelihood_given(likelihood, network, first, f)
    fitting_targets(network, chosen, f, network.arranged(first).targets)
    if chosen.needs_residuals:
        chosen = chosen.prepared(mean_squared_residual(network, chosen, network.arranging(data)))
    given = prior_given(1.0 if prior is None else prior)
    groups = members(network, scale_free_groups(network, first.inputs)) if given.needs_groups else None
    groups = data.processes.every(groups)[0] if given.needs_groups else None
    return Problem(network, chosen, given.bound(network.selection, network.theta(), groups), prior is None)


def likelihood_given(given: Likelihood | str, network: Network, batch: Batch, f: Tensor) -> Likelihood:
    """Return the likelihood, or the one that a name stands for; raise if the outputs f of the batch do not fit it.

    "classification" with one output is binary. The loss of a model that takes labels must be that of the likelihood.
    """
    is_binary = isinstance(given, str) and given == "classification" and f.shape[-1] == 1
    likelihood: Likelihood = named("likelihood", "binary" if is_binary else given)
    likelihood.check_outputs(f.flatten(0, 1) if network.image else f)  # the channels of images are known
    likelihood.check_last(network.last_operation)
    own = None if network.output else own_loss(network.replica, batch, network.plain)  # it may be of another output
    if own is not None:
        likelihood.check_loss(f, network.arranged(batch).targets, own)
    return likelihood


def chosen_by(auto: Auto, problem: Problem, data: Data) -> tuple[Method, str]:
    """Return the method that ``Auto`` chooses, and the reason for it."""
    network, selection = problem.network, problem.network.selection
    auto = replace(auto, gpu=auto.gpu or network.device.type == "cuda")
    rows, few = 0, None
    for batch in data.batches("counting", weighted=True):
        few = network.take(batch.inputs, slice(0, LOOKED)) if few is None else few
        # Ignored data count too: they have rows of zeros in a design.
        rows += checked_targets(network, problem.likelihood, batch)[0].numel()
    rows, few = sum(data.processes.each(rows)), data.processes.lent(few)
    workload = workload_of(network, few, max(1, rows // torch.Size(network.output_shape).numel()))
    classes = problem.likelihood.has_logits
    choice = auto.choose(selection.size, rows, workload.single, problem.learn_prior, workload, classes)
    return choice.method, choice.why


def with_learned_prior(problem: Problem, tuner: Tuner | None, data: Data, generator: torch.Generator | None) -> Problem:
    """Return the problem with a prior for a method without an evidence: the given one, or one learned beforehand.

    It is learned by the evidence of ``Kron``, or of ``Diagonal`` where single weights are selected.
    """
    if problem.learn_prior:
        method = Kron() if problem.network.selection.index is None else Diagonal()
        return tuned_by(method.fit(problem, data, generator), tuner, data).problem.with_known_prior()
    if tuner is not None:
        raise UnsupportedError(
            "this method has no evidence for a tuner to use, and the prior was given; leave out the tuner, or the "
            "prior, which is then learned beforehand."
        )
    return problem


def tuned_by(posterior: Any, tuner: Tuner | None, data: Data) -> Any:
    """Return the posterior with its prior learned, starting near the optimum.

    A tuner that varies hyperparameters around those of the evidence runs after the evidence.
    """
    tuned = start_near_optimum(posterior)
    if tuner is None or isinstance(tuner, FollowsEvidence):
        default = SampleEM(mode="network") if posterior.is_sampled else MaximiseEvidence()
        tuned = default(tuned)
    if tuner is not None:
        tuned = applied(tuner, tuned, data)
    tuned = _in_step(tuned, data.processes)
    return tuned if tuned.trace is None else tuned.with_trace(tuned.trace.after(posterior.trace))


def _in_step(posterior: Any, processes: Processes) -> Any:
    """Return the posterior under the prior and noise of the first process: rounding may differ between machines."""
    if processes.group is None or not isinstance(posterior, Tunable):
        return posterior
    values, noise = posterior.problem.prior.values, posterior.noise
    own = [values.detach()] if noise is None else [values.detach(), noise.detach()]
    first = processes.same(own)
    if processes.all(all(map(torch.equal, own, first))):
        return posterior
    posterior = posterior.with_problem(posterior.problem.with_precisions(first[0]))
    return posterior if noise is None else posterior.with_noise(first[1])


def exact_other(posterior: Any, data: Data, generator: torch.Generator | None) -> tuple[Any, float] | None:
    """Return the exact posterior that the default for Gaussian noise averages with ``Kron``, and the factor of its V.

    None if the problem is too large for it. ``Kron`` is too narrow where networks are trained for long, the exact
    posterior where they are not. Of more than ``ROWS`` data it takes so many, drawn at random, each of which counts for
    several: with all it would cost more than the training.
    """
    problem, statistics = posterior.problem, posterior.statistics
    size, outputs = problem.network.selection.size, statistics.outputs
    rows = statistics.data * outputs
    if torch.Size(problem.network.output_shape).numel() > MANY:  # a backward pass for every output of every input
        return None
    counted = data.processes.all(not data.weighted)  # a sum of weights does not say how many rows there are
    small = size <= LARGEST or (counted and rows <= LARGEST)
    method: Method = KernelSpace()
    if small and ROWS * outputs < size and outputs <= FEW_OUTPUTS and 8 * ROWS * outputs * size <= MEMORY:
        data = _some_rows(problem.network, data, ROWS / statistics.data, generator)
    elif size <= LARGEST:
        method = Full()
    elif not (small and rows <= size and 8 * rows * size <= MEMORY and data.processes.all(data.repeats())):
        return None
    exact = tuned_by(method.fit(problem, data, generator), None, data)
    apart = problem.network.normalised or statistics.data > 2 * ROWS
    return exact, _agreed_scale(posterior, exact, data) if apart else 1.0


def _some_rows(network: Network, data: Data, share: float, generator: torch.Generator | None) -> Data:
    """Return a share of the data, drawn at random and kept in memory, which count as often as all; all if it is one."""
    generator = independent_generator(generator)
    batches, total, kept = list[tuple[Inputs, Tensor, Tensor]](), 0.0, 0.0
    for batch in data.batches("reading", weighted=True):
        weights = torch.ones(batch.n_samples, dtype=torch.float64) if batch.weights is None else batch.weights
        drawn = uniform((len(weights),), generator, weights) < share
        total, kept = total + float(weights.sum()), kept + float(weights[drawn].sum())
        rows = drawn.nonzero().flatten()
        if len(rows):
            targets = batch.targets[rows.to(batch.targets.device)]
            batches.append((network.take(batch.inputs, rows), targets, weights[drawn]))
    total, kept = (sum(data.processes.every(number)) for number in (total, kept))
    if not kept:
        return data
    each = total / kept
    weighted = each != 1 or data.weighted
    source = [(x, Weighted(y, weights * each) if weighted else y) for x, y, weights in batches]
    return Data(source, data.device, progress=data.progress, processes=data.processes)


def _agreed_scale(posterior: Any, exact: Any, data: Data) -> float:
    """Return the factor of the exact covariance that makes its median the geometric mean of both; 1 at most.

    The exact variances compared are those at data left out: a datum of leverage h had V / (1 - h) without itself. Where
    norms cancel the scale of weights, the evidence for that scale means little, and where few of the data are looked
    at, directions that others determine are missing: the exact variances are then up to a hundred times too large.
    """
    for each in () if data.processes.alone else (posterior, exact):  # not at the first batch: a process may have none
        each.prepare()
    variances, count = list[Tensor](), 0
    phi = exact.problem.likelihood.noise_variance
    for batch in data.batches("comparing variances", weighted=True):
        wide, own = (belief.variance.double() for belief in beliefs_at([posterior, exact], batch.inputs))
        weights = 1.0 if batch.weights is None else spread(batch.weights, own)
        left_out = own / (1 - weights * own / phi.to(own)).clamp_min(SMALLEST_REST)
        variances.append(torch.stack([wide.flatten(), left_out.flatten()], 1))
        count += batch.n_samples
        if count >= COMPARED:
            break
    everywhere = data.processes.gather(torch.cat(variances) if variances else None)
    assert everywhere is not None
    wide, own = everywhere.median(0).values.tolist()
    return math.sqrt(min(1.0, wide / own)) if own > 0 else 1.0


def finished(posterior: Any, data: Data, held_out: Data | None, more: tuple[str, ...] = ()) -> Any:
    """Return the posterior with the remarks on the data of all processes, and ``more``, after those of its tuner."""
    processes = data.processes
    for each in () if processes.alone else getattr(posterior, "members", (posterior,)):  # those of a mixture
        each.prepare()  # so that a process can predict without the others
    remarks = processes.every((*data.findings, *(held_out.findings if held_out else ()), *more))
    return with_findings(posterior, tuple(dict.fromkeys(remark for each in remarks for remark in each)))
