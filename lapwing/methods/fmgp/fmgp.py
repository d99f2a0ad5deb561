"""Fixed-mean Gaussian process: settings and fit (Ortega et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.core.settings import NONE, POSITIVE, one_of, require, require_integer
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.energies import refuse_energy, refuse_ignored
from lapwing.methods.fmgp.features import Sight, Table, Units, last_layer_network
from lapwing.methods.fmgp.learning import Learning, State
from lapwing.methods.fmgp.posterior import KERNELS, FunctionPosterior
from lapwing.methods.protocol import Conformance, Cost, Work, Workload, with_validation
from lapwing.problem import Problem

TRIAL = 20  # steps that are timed


@dataclass(frozen=True)
class FMGP:
    """A sparse Gaussian process whose mean is the network: cheap error bars without Jacobians.

    Kernel, inducing points and noise are learned on the predictive log-likelihood of the training data, together with a
    second process that has the same kernel and covariance but a learned mean: without it nothing would tie the kernel
    to the data. The prior over weights is not used. This is no Laplace posterior: error bars come from distances
    between inputs, not from curvature.

    Args:
        num_inducing: Number of inducing points, shared among the outputs; at most as many as there are data.
        kernel: "rbf" on the inputs, with a length-scale for every dimension, or "features", linear in the input of the
            last layer. None takes "rbf" for a single real output and "features" for several outputs or for classes.
        steps: Steps of Adam.
        learning_rate: Learning rate of Adam, for points in units of their spread.
        batch_size: Rows in a mini-batch.
        patience: Validation data, ``fit(..., validation=data)``, are evaluated about twenty times and the best state
            is kept. Learning stops after so many evaluations without a better one.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for outputs with tokens, likelihoods without
            a differentiable predictive, or "rbf" on inputs that are not one tensor of real numbers.
        ModelError: In ``fit``, for "features" of a network whose last layer is not a single linear map.
        NumericalError: In ``fit``, if the objective becomes infinite or NaN.

    Cost: one forward pass over the data, whose features and outputs are kept (n (D + C) numbers), then ``steps`` steps
    of B C M² + M³ without the network. A prediction costs one forward pass.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Linear(1, 1)
    >>> process = fit(net, [(x, x.sin())], "regression", method=FMGP(num_inducing=5, steps=20))
    >>> inside, outside = process.functions(torch.tensor([[0.0], [9.0]])).std
    >>> bool(inside < outside), torch.equal(process.functions(x).mean, net(x))
    (True, True)
    """

    num_inducing: int = 100
    kernel: str | None = None
    steps: int = 1000
    learning_rate: float = 0.01
    batch_size: int = 100
    patience: int = 5
    validation: Data | None = field(default=None, init=False, repr=False, compare=False)  # those of fit
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its kernel is learned and not that of the network",
        small=lambda model: {"": FMGP(num_inducing=3, steps=2)},
    )

    def __post_init__(self) -> None:
        for name in ("num_inducing", "steps", "batch_size", "patience"):
            require_integer(name, getattr(self, name))
        POSITIVE.check("learning_rate", self.learning_rate)
        require(self, kernel=one_of(KERNELS) | NONE)

    def stopped_by(self, validation: Data) -> FMGP:
        """Return the method with validation data."""
        return with_validation(self, validation)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> FunctionPosterior:
        """Return the learned process."""
        refuse_energy(problem.likelihood, 1.0)
        network = problem.network
        if len(network.output_shape) > 1:
            raise UnsupportedError("FMGP() takes outputs (B, C), not tokens (B, T, C) or images; use Kron().")
        generator = independent_generator(generator)
        one_number = network.output_shape[-1] == 1 and not problem.likelihood.has_logits
        kind = self.kernel or ("rbf" if one_number else "features")
        uses_features = KERNELS[kind].uses_features
        first = next(iter(data.batches("first batch"))).inputs
        sight = Sight(network, last_layer_network(network, first) if uses_features else None)
        table, statistics = Table.read(problem.likelihood, sight, data)
        problem = problem.with_known_prior().with_residual_noise(statistics)
        units = Units.of(table.u, per_column=not uses_features)
        held_out = None
        if self.validation is not None:
            rows, _ = Table.read(problem.likelihood, sight, self.validation)
            refuse_ignored(problem.likelihood, rows.y, "validation targets")
            held_out = units.measured(rows)
        table = units.measured(table)
        # A length-scale would otherwise be learned for the rounding in constant columns.
        table = replace(table, u=torch.where(units.varies, table.u, 0))
        state = State.initial(kind, problem.likelihood, table, units.varies, self.num_inducing, generator)
        learned, steps = Learning(self, problem.likelihood, table, held_out, generator, state).run(data.progress)
        return learned.in_features(units).posterior(problem, sight, statistics, steps)

    def cost(self, workload: Workload) -> Cost:
        if len(workload.output_shape) > 1:
            return Cost.refused("outputs for each token: use Kron")
        linear = [block.form for block in workload.blocks if block.form is not None]
        by_features = self.kernel == "features" or (self.kernel is None and workload.outputs > 1)
        dimensions = linear[-1][2] if by_features and linear else workload.input_size
        points, batch = min(self.num_inducing, workload.data), self.batch_size
        kernel = points * (batch + points) * dimensions  # of a batch with the points, and of the points
        rows = workload.outputs * batch * points
        step = 3 * Work(doubles=kernel + rows * points, numbers=4 * rows, cubes=points**3)  # with its gradient
        predict = workload.forward + Work(doubles=points * dimensions + workload.outputs * points**2)
        stored = 8 * (points * (dimensions + points + 1) + workload.outputs**2)
        peak = 8 * (workload.data * (dimensions + workload.outputs) + 6 * rows) + workload.activations
        note = f"{points} points, {self.steps} steps of {batch} data without the network"
        return workload.cost(stored, peak, workload.forward, predict, self.steps * step, note)

    def trial(self, workload: Workload) -> FMGP:
        """Return the method with a few steps."""
        return replace(self, steps=min(self.steps, TRIAL))
