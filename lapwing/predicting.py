"""What a posterior answers at inputs: beliefs about the outputs, and predictions of the targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.images import pixels
from lapwing.core.inputs import Inputs, as_tensors, check_finite, moved, wants_slopes
from lapwing.core.processes import ALONE, Processes, in_all_processes
from lapwing.core.progress import shows_progress
from lapwing.core.settings import FLAG, usable_device
from lapwing.core.slopes import differentiable_beliefs
from lapwing.core.streams import InputStream, is_loader
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import outside_autocast, refuse_training_mode
from lapwing.networks.network import Network
from lapwing.posteriors.draws import SAMPLES_RULE
from lapwing.predictives.images import Images
from lapwing.predictives.joined import joined, joined_beliefs, joined_processes
from lapwing.priors.bound import BoundPrior


class Predicts(Protocol):
    """A posterior around a model, with beliefs and predictions at inputs. ``Fitted`` inherits from it.

    Every call first checks that the model still has the weights that the posterior was fitted to.
    """

    posterior: Any  # the posterior of the method: a lapwing.posteriors.protocols.Posterior
    fingerprint: Fingerprint
    method: str  # the name of the method that was used

    @property
    def base(self) -> Any:
        """The posterior that was fitted: for a mixture the one that it varies, with evidence, prior and noise."""
        return self.posterior.base

    @property
    def network(self) -> Network:
        """The network as Lapwing sees it: the selected weights, outputs, Jacobians."""
        return self.posterior.problem.network

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with its learned noise."""
        return self.posterior.problem.likelihood

    @property
    def prior(self) -> BoundPrior:
        """The prior over the weights, with its learned precisions in ``prior.values``."""
        return self.posterior.problem.prior

    def __call__(self, x: Inputs) -> Any:
        """Return the predictive over y; the same as ``predict``."""
        return self.predict(x)

    @outside_autocast
    @in_all_processes
    def predict(
        self,
        x: Inputs,
        samples: int | None = None,
        *,
        target_key: str | None = None,
        progress: bool | None = None,
        device: torch.device | str | None = None,
        process_group: Any = None,
    ) -> Any:
        """Return the predictive distribution over targets y, observation noise included.

        Cost: one forward pass and the work of a backward pass for each output; for more than 256 classes (times
        tokens) some 33 forward passes, however many they are.

        Args:
            x: A batch of inputs, as the model takes them: tensors, NumPy arrays or a data frame, whose floating-point
                numbers get the dtype of the model; or a loader: a DataLoader, a Dataset, a list of batches, a
                generator. It is read once; its batches are inputs, or hold targets, which are left out. The answer is
                one predictive for all rows in their order. Memory: the answer, and that of one batch.
            samples: How many functions, drawn in pairs around the network's output, to predict from; an odd number is
                rounded up. They are the same at every call. Zero computes the variances of all outputs instead. None
                takes 32 functions if classes times tokens are more than 256, and variances otherwise.
            target_key: The key of the target in batches of a loader that are mappings, as for ``fit``.
            progress: Whether to show a progress bar while a loader is read; None shows one on a terminal.
            device: Where the answer is. None leaves it on the device of the model, and that for a loader on the CPU.
            process_group: The processes that read a loader together, as for ``fit``. Each gives its part, and gets the
                answer for all rows, those of one process after those of another. None is this process alone.

        Returns:
            For classification ``.probs`` (B, C) and their ``.standard_error``, zero unless functions were drawn; for
            regression ``.mean``, ``.std``, ``.interval(level)``; for all ``.log_prob(y)``, ``.sample(n)`` and
            ``.distribution``. For images (B, C, H, W) in place of (B, C), and (B, H, W) in place of (B,).

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If inputs are empty or not finite.
            UnsupportedError: If functions are asked for and the method has no draws of weights, or fewer; or if there
                are several processes and no loader.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> low, high = posterior.predict(x).interval(0.9)
        >>> bool((high > low).all())
        True
        """
        SAMPLES_RULE.check("samples", samples)
        processes, x = Processes.of(process_group), as_tensors(x, self.network.arithmetic)
        batches, home = self._batches(x, target_key, progress, device, processes)
        images = Images()
        if batches is None:
            return images.predictive(self._predictive(x, samples, images))
        each = (self._predictive(batch, samples, images) for batch in batches)
        if processes.group is None:
            return images.predictive(joined(each, home))
        first = next(each, None)
        own = None if first is None else joined(chain([first], each), torch.device("cpu"))
        images.over(processes.every(images.form))
        return images.predictive(joined_processes(own, processes, home))

    @outside_autocast
    def functions(
        self,
        x: Inputs,
        joint: bool = False,
        outputs: Any = None,
        tokens: Any = None,
        *,
        target_key: str | None = None,
        progress: bool | None = None,
        device: torch.device | str | None = None,
    ) -> FunctionGaussian:
        """Return the Gaussian belief about the network's output f(x), without observation noise.

        Args:
            x: A batch of inputs, as the model takes them, or a loader, as for ``predict``.
            joint: Whether to include the covariance between inputs. Memory then grows with the square of the batch.
            outputs: The numbers of some outputs, in the order wanted: (k,) for all inputs, or (B, k) for each, such as
                its top classes; (B, T, k) for token-level outputs, (B, k, H, W) for images. None means all. The
                answer is that for all outputs at these numbers, and costs the backward passes of these alone.
            tokens: For token-level outputs, the numbers of some tokens: (S,) for all inputs, or (B, S) for each. For
                images those of some pixels, h W + w; the answer is then (B, S, C), no image.
            target_key: As for ``predict``.
            progress: As for ``predict``.
            device: As for ``predict``.

        Returns:
            A ``FunctionGaussian``: ``mean`` and ``std`` (B, C), ``cov`` (B, C, C), or (B, C, B, C) if joint; with k in
            place of C if outputs are chosen. For images ``mean`` and ``std`` are (B, C, H, W), ``cov`` is
            (B, H, W, C, C), or the shape of the mean twice if joint. For a loader of more than 32 outputs it has
            variances alone.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If inputs are empty or not finite, or chosen numbers do not exist.
            UnsupportedError: If ``joint`` is set for a loader.

        >>> import lapwing as lw
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
        >>> belief = posterior.functions(x[:5], joint=True)
        >>> belief.std.shape, belief.cov.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 5, 1]))
        """
        FLAG.check("joint", joint)
        image_dims = len(self.network.image)
        if image_dims and isinstance(outputs, Tensor) and outputs.ndim == image_dims + 2:
            outputs = pixels(outputs)
        x = as_tensors(x, self.network.arithmetic)
        chosen = ChosenOutputs.given(outputs, tokens, self.network.output_shape, self.network.device, image_dims)
        batches, home = self._batches(x, target_key, progress, device)
        images = Images()
        if not isinstance(batches, InputStream):
            belief = self._belief(x, joint, chosen, images)
            if joint:
                belief = replace(belief, mean=belief.mean.to(home), covariance=belief.cov.to(home))
            elif batches is not None:
                belief = joined_beliefs([belief], home)
            return images.belief(belief)
        if joint or (chosen is not None and chosen.differ):
            raise UnsupportedError(
                "joint=True, or outputs for each input, and a loader were given; expected one batch of inputs for "
                "these. Ask for the batches one by one, or choose the same outputs for all."
            )
        return images.belief(joined_beliefs((self._belief(batch, False, chosen, images) for batch in batches), home))

    def _belief(self, x: Inputs, joint: bool, chosen: ChosenOutputs | None, images: Images) -> FunctionGaussian:
        """Return the belief about all or some outputs of one batch; of images about their pixels."""
        x = self._checked(x, slopes=True)
        if chosen is None or chosen.tokens is None:  # some pixels of an image are no image
            images.add(self.network.image_form(x))
        if chosen is not None:
            chosen.refuse_other(self.network.count(x))
        at = lambda x: self.posterior(x, joint) if chosen is None else self.posterior.chosen(x, chosen, joint)
        (belief,) = differentiable_beliefs(lambda x: [at(x)], x)
        check_finite(belief.mean, "outputs of the network")
        return belief

    def _predictive(self, x: Inputs, samples: int | None, images: Images) -> Any:
        """Return the predictive of one batch; of images that of their pixels."""
        x = self._checked(x, slopes=True)
        images.add(self.network.image_form(x))
        return self.posterior.predict(x, samples)

    def _batches(
        self,
        x: Inputs,
        target_key: str | None,
        progress: bool | None,
        device: torch.device | str | None,
        processes: Processes = ALONE,
    ) -> tuple[Iterable[Inputs] | None, torch.device]:
        """Return the batches of a loader, None for one batch that stays where it is, and the device of the answer."""
        network, visible = self.network, shows_progress(progress) and processes.writes
        home = network.device if device is None else usable_device(device)
        if not is_loader(x, network.input_places):
            if not processes.alone:
                raise UnsupportedError(
                    f"a process_group of {processes.size} and one batch of inputs; expected a loader or a Dataset, of "
                    "which each process reads its part. Leave out process_group: every process can predict by itself."
                )
            return (None if device is None else [x]), home
        stream = InputStream(
            x, network.device, network.input_places, target_key, visible, network.joined, processes, network.arithmetic
        )
        return stream, torch.device("cpu") if device is None else home

    def _unchanged(self) -> None:
        """Raise if the model is in training mode or its weights have changed."""
        model = self.network.model
        refuse_training_mode(model)
        self.fingerprint.refuse_other(model)

    def _checked(self, x: Inputs, slopes: bool = False) -> Inputs:
        """Return the inputs on the model's device; raise if they are empty or not finite, or the model has changed.

        With ``slopes``, those that require a gradient keep their path to it; raise if the method has none.
        """
        self._unchanged()
        device = self.network.device
        x = as_tensors(x, self.network.arithmetic)
        x = moved(x, lambda t: (t if slopes or not t.requires_grad else t.detach()).to(device))
        if wants_slopes(x) and not self.posterior.differentiable:
            raise UnsupportedError(
                f"x requires a gradient, and the beliefs of {self.method} are not differentiable in the inputs. Use "
                "x.detach(), or a method such as Kron, Full, KernelSpace or Sampled."
            )
        if self.network.count(x) == 0:
            raise DataError("the batch is empty; expected at least one input.")
        check_finite(x, "inputs")
        return x
