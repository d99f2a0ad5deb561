"""The fitted posterior that users hold: the result of ``fit``, ``train`` and ``load``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing import files
from lapwing.core.known_rows import KnownRows
from lapwing.core.processes import ALONE, Processes
from lapwing.core.progress import shows_progress
from lapwing.core.settings import GENERATOR, PATH, usable_device
from lapwing.core.state import on_device
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.linearising import Linearises
from lapwing.modules.predicting import ModuleOf, module_of
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import outside_autocast, outside_inference
from lapwing.posteriors.effective import EffectiveParameters, HasGammas, effective_parameters
from lapwing.posteriors.protocols import (
    HasEvidence,
    Reweightable,
    required,
)
from lapwing.posteriors.updating import SUM, Updatable
from lapwing.priors.bound import Prior
from lapwing.registry import prior_given
from lapwing.report.reports import Reports
from lapwing.sampling import Draws
from lapwing.tuners.evidence import MaximiseEvidence
from lapwing.tuners.protocol import Tuner, applied
from lapwing.tuners.reuse import tuned_on, with_findings


@dataclass(frozen=True, eq=False, repr=False)
class Fitted(Draws, Linearises, Reports):
    """A fitted posterior: error bars for a network. Made by ``fit``, ``train`` and ``load``.

    Every call first checks that the model still has the weights that the posterior was fitted to, and raises
    ``ModelError`` if not. ``posterior`` is the method's own result, for code that works below this interface.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> lw.fit(torch.nn.Linear(1, 1), [(x, x)], lw.Gaussian(noise_std=0.1), prior=2.0)
    <Fitted: Kron, 2 weights, precision 2, noise variance 0.01>
    """

    posterior: Any  # the posterior of the method: a lapwing.posteriors.protocols.Posterior
    fingerprint: Fingerprint
    method: str = ""  # the name of the method that was used
    why: str = ""  # the reason for the method, if ``Auto`` chose it
    processes: Processes = ALONE  # those that fitted it together
    rows: KnownRows = KnownRows()  # sketches of the data that it was fitted to and validated on
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names that ``lapwing fit`` was given

    def __repr__(self) -> str:
        return f"<Fitted: {self.method}, {self.network.selection.size:,} weights, {self._numbers()}>"

    def summary(self) -> str:
        """Return a few lines: how good the predictions are beside those of the network alone, and what was fitted.

        The first line compares on held-out data, if there are any; the others say how the hyperparameters came about.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> data = [(x, (x[:, 0] > 0.1).long())]
        >>> print(lw.fit(torch.nn.Linear(1, 2), data, "classification", prior=2.0).summary())
        Kron over 4 of 4 weights, Categorical: precision 2
        Nothing was tuned.
        """
        selection, trace = self.network.selection, self.trace
        total = sum(p.numel() for p in self.network.model.parameters())
        what = f"{self.method} over {selection.size:,} of {total:,} weights, {type(self.likelihood).__name__}"
        lines = [trace.verdict] if trace is not None and trace.verdict else []
        lines.append(f"{what}: {self._numbers()}")
        lines += [f"Chosen by Auto: {self.why}"] if self.why else []
        if self.posterior is not self.base:
            lines.append(self.posterior.described())
        if self.network.normalised:
            lines.append("Norms cancel the scale of the weights before them (lw.check lists these). " + (
                "Each such group has a precision to itself." if self.prior.needs_groups else
                "The evidence depends on that scale; the corrected one does not: "
                "prior=lw.priors.per_normalised_group(), tuner=lw.tuners.LinearMode()."
            ))  # fmt: skip
        if trace is None or not trace.tuner:
            lines.append("Nothing was tuned.")
        elif trace.scores:
            lines.append(f"Hyperparameters by {trace.tuner}; {trace.comparison}.")
        else:
            lines.append(f"Hyperparameters by {trace.tuner}, after {len(trace.steps)} steps.")
        return "\n".join([*lines, *(f"Note: {finding}" for finding in self.findings)])

    def _numbers(self) -> str:
        """Return the precisions and the noise of the posterior that was fitted, the centre of a mixture, as text."""
        mixture = "" if self.posterior is self.base else f"mixture of {len(self.posterior.cells)} with its centre at "
        numbers = f"{mixture}precision {_first_three(self.prior.values)}"
        if self.likelihood.noise_variance is not None:
            numbers += f", noise variance {_first_three(self.likelihood.noise_variance)}"
        return numbers

    @outside_autocast
    @outside_inference
    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the tangent model, with every constant.

        A scalar tensor, differentiable in the prior and the noise where the method allows. ``evidence_error`` is its
        standard error where it is an estimate. For a mixture it is that of ``base``.

        Raises:
            UnsupportedError: If the method has no evidence.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> bool(posterior.log_evidence() > posterior.with_prior(1e6).log_evidence())
        True
        """
        self._unchanged()
        return required(self.base, HasEvidence, "evidence", self.method).log_evidence()

    @property
    @outside_autocast
    def evidence_error(self) -> float:
        """The standard error of ``log_evidence``; zero where it is computed and not estimated."""
        self._unchanged()
        return self.base.evidence_error

    @outside_autocast
    @torch.inference_mode(False)  # as for fit
    def tuned(self, tuner: Tuner | None = None) -> Fitted:
        """Return the same posterior under better hyperparameters; its ``trace`` lists what was tried.

        Args:
            tuner: An object from ``lw.tuners``; ``MaximiseEvidence()`` if None.

        Raises:
            DivergedError: If a hyperparameter has no optimum.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> tuned = posterior.tuned(lw.tuners.MaximiseEvidence())
        >>> bool(tuned.log_evidence() >= posterior.log_evidence())
        True
        """
        self._unchanged()
        chosen = MaximiseEvidence() if tuner is None else tuner
        with self.processes.together():
            tuned = applied(chosen, self.base, processes=self.processes)
            reused = tuned_on(self.rows, chosen, self.network, self.processes)
            return replace(self, posterior=with_findings(tuned, reused.findings), rows=reused.rows)

    @outside_autocast
    @torch.inference_mode(False)  # as for fit
    def updated(
        self,
        data: Iterable[Any],
        *,
        target_key: str | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted:
        """Return the posterior of the old data and these; the old data are not needed.

        Sums over the data are summed further, which equals a fit to all of them at the same weights, prior and noise.
        Those stay as they are, and so do the weights of a mixture: a posterior about data that the network was not
        trained on has its centre at the trained weights all the same. Call ``tuned()`` to choose the prior anew.

        Args:
            data: The new data alone, in the form that ``fit`` takes. Of several processes that fitted together, all
                call this, each with its part.
            target_key: As for ``fit``.
            generator: The source of randomness where the curvature is estimated from drawn labels; the sum is then one
                of estimates.
            progress: As for ``fit``.

        Raises:
            DataError: If the data are empty, not finite, or do not fit the likelihood.
            UnsupportedError: If the method is none of ``Full``, ``Diagonal``, ``Kron`` and ``KernelSpace``, whose sums
                add up.

        Cost: that of a fit to the new data.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1)
        >>> options = {"likelihood": lw.Gaussian(0.1), "prior": 1.0}
        >>> half, whole = (lw.fit(net, [(part, part)], **options) for part in (x[:20], x))
        >>> torch.allclose(half.updated([(x[20:], x[20:])]).functions(x).std, whole.functions(x).std)
        True
        """
        self._unchanged()
        GENERATOR.check("generator", generator)
        shown = shows_progress(progress) and self.processes.writes
        options: dict[str, Any] = {"target_key": target_key, "progress": shown, "processes": self.processes}
        options["sketched"] = True
        more = self.network.reading(data, "new data", **options)
        updatable = required(self.posterior, Updatable, SUM, self.method)
        with self.processes.together():
            rows = self.rows.with_training(more.sketch())
            return replace(self, posterior=updatable.updated(more, generator), rows=rows)

    @outside_autocast
    def effective_parameters(self) -> EffectiveParameters:
        """Return γ, the number of weights that the data determine: in total and for each layer. Print it to read it.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> 0 < posterior.effective_parameters().total < 2
        True
        """
        self._unchanged()
        return effective_parameters(required(self.base, HasGammas, "evidence", self.method))

    @property
    def trace(self) -> Trace | None:
        """The record of the tuner: values that it tried, with their evidence or score, and findings.

        For a mixture, the steps by which the evidence was maximised are in ``base.trace``.
        """
        return self.posterior.trace

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks in words on the posterior and from its tuner; ``summary`` shows them."""
        return (*(self.trace.findings if self.trace is not None else ()), *self.base.findings)

    def with_prior(self, prior: Prior | float) -> Fitted:
        """Return the same posterior under another prior; no data are touched.

        Args:
            prior: A prior, or a number for an isotropic precision.

        Raises:
            UnsupportedError: If the method has no prior over weights, or its mean belongs to its prior
                (``LinearMode(mean="tangent")``).

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.with_prior(5.0)
        <Fitted: Kron, 2 weights, precision 5, noise variance ...>
        """
        if self.network.shift is not None:
            raise UnsupportedError(
                "the mean of this posterior was computed for its prior (LinearMode with mean='tangent'); fit again, or "
                "tune the posterior that it came from."
            )
        base = required(self.base, Reweightable, "prior over weights to change", self.method)
        bound = prior_given(prior).bound(self.network.selection, self.network.theta(), self.prior.network_groups)
        return replace(self, posterior=base.with_prior(bound))

    def to(self, device: torch.device | str) -> Fitted:
        """Return the posterior on another device. Its model is moved there too, as ``model.to`` does.

        Args:
            device: A device or its name.

        Raises:
            UnsupportedError: If this machine has no such device.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> posterior.to("cpu").network.device
        device(type='cpu')
        """
        model, target = self.network.model, usable_device(device)
        model.to(target)
        return replace(self, posterior=on_device(self.posterior, target, keep=model))

    @outside_autocast
    @outside_inference
    def as_module(self, returns: str = "logits") -> ModuleOf:
        """Return the posterior as an ``nn.Module`` in evaluation mode that takes what the model takes.

        Its parameters are those of the model, which are shared and not copied. For a last-layer posterior it is a
        closed form of plain tensor operations, for ``torch.export`` and ``torch.onnx.export``; otherwise it calls
        ``predict``, and export is refused with the reason.

        Args:
            returns: "logits": what the model returns, in its shape, with the uncertainty inside: log-probabilities of
                classes, log-odds of binary labels, the mean of a regression. "probs": probabilities. "moments": two
                tensors, probabilities and variances of f, or mean and variance of the target.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            UnsupportedError: If ``returns`` is none of these, or "probs" for a regression.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> data = [(x, (x[:, 0] > 0.1).long())]
        >>> posterior = lw.fit(torch.nn.Linear(1, 2), data, "classification", prior=2.0)
        >>> torch.allclose(posterior.as_module()(x).softmax(-1), posterior.predict(x).probs, atol=1e-5)
        True
        """
        self._unchanged()
        return module_of(self, returns)

    @outside_autocast
    def save(self, path: str | Path) -> None:
        """Write the posterior to a file, whole or not at all; the model itself is not in it.

        Of several processes that fitted it, the first writes the file and the others do nothing. Samples from linear
        systems need all processes to call this, since their evidence takes products with the data of all.

        Args:
            path: Where to write; ``lw.load(path, model)`` reads it.

        Raises:
            UnsupportedError: If the method has no file form.
            FileError: If the file cannot be written, or ``load`` would refuse it; an existing file is unchanged.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     posterior.save(f"{folder}/net.lapwing")
        ...     lw.load(f"{folder}/net.lapwing", posterior.network.model)
        <Fitted: Kron, 2 weights, precision 2, noise variance ...>
        """
        PATH.check("path", path)
        self._unchanged()
        if not self.processes.alone and self.base.is_sampled:
            with self.processes.together():
                self.posterior.state()  # its products over the data need all processes
        if self.processes.writes:
            about = files.About(self.method, self.why, self.rows, self.columns)
            files.save(self.posterior, self.fingerprint, about, path)


def _first_three(values: Tensor) -> str:
    """Return up to three numbers as text, and how many there are."""
    flat = values.detach().flatten().tolist()
    more = f", ... ({len(flat)})" if len(flat) > 3 else ""
    return ", ".join(f"{value:.3g}" for value in flat[:3]) + more
