"""A network and its data in numbers, the work of passes over them, and the cost of a method made of that work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from lapwing.core.memory import budget
from lapwing.curvature.seeds import MANY
from lapwing.methods.work import NOTHING, BlockWork, Work, summed
from lapwing.networks.budget import Footprint, temporary
from lapwing.networks.near_cache import NEAR
from lapwing.posteriors.draws import MANY as MANY_PREDICTED
from lapwing.posteriors.draws import SAMPLES
from lapwing.tangent.design import CACHE


@dataclass(frozen=True)
class Workload:
    """A network and its data in numbers, from which a method computes its cost. Work is that for one datum."""

    blocks: tuple[BlockWork, ...]
    weights: int  # P, the chosen weights
    parameters: int  # of the whole model
    output_shape: tuple[int, ...]  # (C,) or (T, C)
    input_size: int  # numbers in one input
    data: int
    forward: Work  # of a plain forward pass
    backward: Work  # of a backward pass to the chosen weights, without their gradients
    training: Work  # of a plain forward and backward pass with the gradients of all weights that are trained
    footprint: Footprint  # the memory that one datum takes
    dtype: torch.dtype  # of gradients
    device: torch.device
    inputs: int  # of a prediction
    single: bool = False  # weights are chosen one by one, so they have no Kronecker structure
    dropout: bool = False  # the model has a dropout layer
    drawn: int | None = None  # labels for each datum, if the curvature is estimated from them; or targets

    @property
    def outputs(self) -> int:
        """Numbers in the output for one input: C, or T C with an output for each token."""
        return torch.Size(self.output_shape).numel()

    def with_curvature(self, curvature: str | None, draws: int) -> Workload:
        """Return the workload of this curvature; None is the default, an estimate where there are many outputs."""
        many = self.outputs > MANY and not all(block.closed for block in self.blocks)
        if curvature == "empirical":  # one gradient for each token, of the last layer too
            blocks = tuple(replace(block, closed=False) for block in self.blocks)
            return replace(self, blocks=blocks, drawn=torch.Size(self.output_shape[:-1]).numel())
        estimated = curvature == "fisher_mc" or (curvature is None and many)
        return replace(self, drawn=draws if estimated else None)

    @property
    def seeds(self) -> int:
        """Backward passes of a fit for each datum: one for each output, or for each label that is drawn."""
        return self.outputs if self.drawn is None else self.drawn

    @property
    def rows(self) -> int:
        """Rows of the Jacobian over all data: n C."""
        return self.data * self.outputs

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the gradients."""
        return torch.finfo(self.dtype).bits // 8

    @property
    def activations(self) -> int:
        """Bytes that a plain forward pass of the inputs of a prediction holds."""
        return 4 * self.itemsize * self.inputs * max(self.input_size, *(block.ends[1] for block in self.blocks))

    def jacobian_bytes(self, formed: bool = False, streams: bool = False) -> int:
        """Return the bytes of the Jacobians that a fit or a prediction holds at once.

        A prediction forms those of single layers whose weight is shared; a fit only where ``formed``. Sums over blocks
        stream: they drop each gradient after its use.
        """
        options, sizes = (self.dtype, self.device), replace(self.footprint, streams=streams)
        joined = -(-sizes.joined(self.seeds, *options) // self.inputs) * self.inputs  # whole batches
        batch, seeds = max(1, min(self.data, joined)), 1 if self.lone_head else self.seeds
        fit = sizes.chunk_bytes(batch, seeds, *options)
        fit += self._formed_bytes(batch, seeds) if formed else 0
        if self.pairs:
            return max(fit, self.itemsize * self.pairs * 2 * (self.weights + self.inputs * sizes.width))
        predict = sizes.chunk_bytes(self.inputs, self.outputs, *options)
        return max(fit, predict + self._formed_bytes(self.inputs, self.outputs))

    def _formed_bytes(self, samples: int, seeds: int) -> int:
        """Return the bytes of the largest Jacobian of one layer that is formed, for a few samples at a time."""
        sizes = [self.itemsize * seeds * block.size for block in self.blocks if block.shared]
        if self.device.type == "cpu":  # larger ones are formed in pieces that stay in the cache
            sizes = [size for size in sizes if size <= NEAR]
        each = max(sizes, default=0)
        return min((min(samples, 32) + 2) * each, temporary(self.device) + each)

    @property
    def lone_head(self) -> bool:
        """Whether the last layer is the only block, so that no backward pass is needed."""
        return len(self.blocks) == 1 and self.blocks[0].closed and not self.single

    def jacobians(self, seeds: int | None = None) -> Work:
        """Return the work of the layer-wise Jacobians: a forward pass, a backward pass for each seed (S by default)."""
        seeds = self.outputs if seeds is None else seeds
        passes = self.forward + seeds * self.backward
        if any(block.opaque for block in self.blocks):  # one more, with gradients of the weights
            passes += seeds * self.training
        return passes + Work(numbers=sum(block.ends[0] for block in self.blocks if block.shared))

    @property
    def blockwise(self) -> Work:
        """Work of the layer-wise Jacobians for sums over blocks, in which the last layer has a closed form."""
        return self.jacobians(0 if self.lone_head else self.seeds)

    @property
    def pairs(self) -> int:
        """Pairs of functions that a prediction draws, where there are many outputs; otherwise none."""
        return SAMPLES // 2 if self.outputs > MANY_PREDICTED else 0

    @property
    def draws(self) -> Work:
        """Work of the weights that predictions of many outputs draw once."""
        return self.pairs * Work(numbers=2 * self.weights)

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output; also the work for one entry of the tangent kernel."""
        return sum(block.gradient for block in self.blocks)

    @property
    def formed(self) -> int:
        """Numbers kept of the gradients of all outputs for repeated products."""
        return sum(block.formed(self.outputs) for block in self.blocks)

    @property
    def squares(self) -> Work:
        """Work of a fit to sum the squared gradients of all seeds."""
        return summed(block.squares(self.seeds) for block in self.blocks)

    def whole(self, seeds: int) -> Work:
        """Return the work to form the Jacobian itself, of the chosen weights alone."""
        return summed(block.whole(seeds) for block in self.blocks) * (self.weights / sum(b.size for b in self.blocks))

    def predicted(self, covariance: Work) -> Work:
        """Return the work of a prediction, in which the covariance of the outputs takes this beside their Jacobians.

        Many outputs are predicted from drawn functions instead, with a forward pass for each.
        """
        if self.pairs:
            return (1 + 2 * self.pairs) * self.forward
        return self.jacobians() + covariance

    @property
    def quadratic(self) -> Work:
        """Work of J D Jᵀ of one input, with a diagonal D."""
        return summed(block.quadratic(self.outputs) for block in self.blocks)

    def along(self, vectors: int) -> Work:
        """Return the work of J v for so many vectors v, from gradients as they are computed."""
        return vectors * summed(block.along(self.outputs) for block in self.blocks)

    def products(self, vectors: float) -> Work:
        """Return the work of Jᵀ J v for so many vectors v, from gradients that are kept."""
        return vectors * summed(block.products(self.outputs) for block in self.blocks)

    @property
    def kept(self) -> int:
        """Bytes of the gradients of all data, if they are kept between products; otherwise zero."""
        size = self.itemsize * self.data * self.formed
        return size if size <= CACHE * budget(self.device) else 0

    def repeated(self, vectors: float, times: int) -> Work:
        """Return the work of Jᵀ J v for so many vectors v in so many passes, with the gradients kept if they fit."""
        formed = summed(block.whole(self.outputs) for block in self.blocks if block.form is None or block.shared)
        return (self.jacobians() + formed) * (1 if self.kept else 1 + times) + self.products(vectors)

    def low_rank(self, rank: int) -> Work:
        """Return the work of a prediction from the prior and so many directions, in float64."""
        along = self.along(rank) + Work(self.outputs * rank**2 / 2)
        return self.predicted((self.quadratic + along).in_double)

    def kernel(self, points: int) -> Work:
        """Return the work for the gradient of one output at each of ``points`` inputs, and for their kernel."""
        return points * self.jacobians(1) + Work(doubles=points**2 * self.gradient)

    def cost(self, stored: int, peak: int, fit: Work, predict: Work, once: Work = NOTHING, note: str = "") -> Cost:
        """Return the cost of a method.

        Args:
            stored: Bytes that the posterior keeps, besides the weights themselves.
            peak: Bytes that the fit or a prediction holds at most besides those.
            fit: The work of the fit for each datum.
            predict: The work of a prediction for each input.
            once: The work that does not grow with the data, such as factorisations, once before the first prediction.
            note: A remark.
        """
        kept = stored + self.itemsize * self.weights
        epochs = (fit + once / self.data).total / self.training.total
        passes = predict.total / max(1.0, self.forward.total)
        return Cost(kept, epochs, note, True, passes, kept + peak, self.data * fit, once, predict)


@dataclass(frozen=True)
class Cost:
    """What a method takes, before anything is fitted."""

    stored: int  # bytes that the posterior keeps
    fit_epochs: float  # work before the first prediction over that of plain passes, forward and backward, over the data
    note: str = ""
    supported: bool = True
    predict_passes: float = 0.0  # work of a prediction over that of a plain forward pass of the same inputs
    peak: int = 0  # bytes held at most, besides the model and the data
    fit: Work = field(default=NOTHING, repr=False)  # for all data
    once: Work = field(default=NOTHING, repr=False)  # that does not grow with the data
    predict: Work = field(default=NOTHING, repr=False)  # for one input
    fit_seconds: float | None = None  # after timing one batch
    predict_seconds: float | None = None  # of the batch, after timing it

    @classmethod
    def refused(cls, note: str) -> Cost:
        """Return the cost of a method that does not take this problem, with the reason."""
        return cls(0, 0.0, note, supported=False)

    def repeated(self, count: int, note: str) -> Cost:
        """Return the cost of the same method for ``count`` networks, fitted one after another and all kept."""
        if not self.supported:
            return self
        return Cost(
            count * self.stored, count * self.fit_epochs, note, True, count * self.predict_passes,
            self.peak + (count - 1) * self.stored, count * self.fit, count * self.once, count * self.predict,
        )  # fmt: skip
