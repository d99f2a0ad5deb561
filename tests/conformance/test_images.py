"""Networks whose outputs are images (B, C, H, W), for every registered method.

The reference is the same network with a wrapper that returns the pixels (B, H W, C) as tokens, fitted to targets that
are rearranged by hand; other suites compare token-level outputs with dense matrices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import Wrapped
from tests.conformance.declared import SMALL, small_method
from tests.tolerances import SOLVED, assert_close

D = torch.float64
INPUTS, CHANNELS, HEIGHT, WIDTH, TOTAL, ASKED = 4, 3, 2, 5, 7, 8
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(TOTAL, INPUTS, HEIGHT, WIDTH, dtype=D, generator=GENERATOR)
NEW = torch.randn(ASKED, INPUTS, HEIGHT, WIDTH, dtype=D, generator=GENERATOR)
LABELS = torch.randint(0, CHANNELS, (TOTAL, HEIGHT, WIDTH), generator=GENERATOR)
LABELS[1, :, 2] = -100
LARGER = torch.randn(2, INPUTS, 4, 3, dtype=D, generator=GENERATOR)  # 12 pixels, not 10
NUMBERS = torch.randn(TOTAL, CHANNELS, HEIGHT, WIDTH, dtype=D, generator=GENERATOR)
CUT = (4, 3)
TASKS: dict[str, tuple[Any, Tensor]] = {"labels": (lw.Categorical(), LABELS), "numbers": (lw.Gaussian(0.7), NUMBERS)}
NO_TOKENS = {"fmgp", "variational_last_layer"}  # methods that refuse token-level outputs


def net() -> nn.Module:
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(INPUTS, 6, (2, 1), padding="same"),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Conv2d(6, CHANNELS, (1, 2), padding="same"),
    )
    return nn.Sequential(*layers).double().eval()


def pixels(images: Tensor) -> Tensor:
    """Rearrange (..., B, C, H, W) to (..., B, H W, C), written out."""
    rows = [images[..., h, w] for h in range(images.shape[-2]) for w in range(images.shape[-1])]
    return torch.stack(rows, -2)


def flat_net() -> nn.Module:
    return Wrapped(lambda m, x: pixels(m.net(x)), net=net()).eval()


def flat_labels(labels: Tensor) -> Tensor:
    return torch.stack([labels[..., h, w] for h in range(labels.shape[-2]) for w in range(labels.shape[-1])], -1)


def fitted(name: str, task: str, model: nn.Module, flat: bool) -> lw.Fitted:
    likelihood, y = TASKS[task]
    if flat:
        y = flat_labels(y) if task == "labels" else pixels(y)
    generator = torch.Generator().manual_seed(7)
    data = problems.split(X, y, CUT)
    return lw.fit(model, data, likelihood, method=small_method(name, model), prior=1e3, generator=generator)


@cache
def pair(name: str, task: str) -> tuple[lw.Fitted, lw.Fitted]:
    return fitted(name, task, net(), False), fitted(name, task, flat_net(), True)


def accepted(name: str, task: str) -> tuple[lw.Fitted, lw.Fitted]:
    """Return the fits to images and to pixels; skip where the method refuses token-level outputs."""
    if name.split()[0] in NO_TOKENS:
        for model, flat in ((net(), False), (flat_net(), True)):
            with pytest.raises(lw.errors.UnsupportedError, match="token"):
                fitted(name, task, model, flat)
        pytest.skip("refuses token-level outputs")
    return pair(name, task)


@pytest.mark.parametrize(("name", "task"), [(name, [*TASKS][i % 2]) for i, name in enumerate(SMALL)])
def test_images_are_their_pixels_as_tokens(name: str, task: str) -> None:
    images, tokens = accepted(name, task)
    belief, flat = images.functions(NEW), tokens.functions(NEW)
    assert belief.mean.shape == belief.std.shape == (ASKED, CHANNELS, HEIGHT, WIDTH)
    assert belief.cov.shape == (ASKED, HEIGHT, WIDTH, CHANNELS, CHANNELS)
    assert_close(pixels(belief.mean), flat.mean)
    assert_close(pixels(belief.variance), flat.variance, SOLVED)
    assert_close(belief.cov.flatten(1, 2), flat.cov, SOLVED)
    one, two = images.predict(NEW), tokens.predict(NEW)
    if task == "labels":
        assert_close(pixels(one.probs), two.probs, SOLVED)
        known = torch.arange(ASKED * HEIGHT * WIDTH).reshape(ASKED, HEIGHT, WIDTH) % CHANNELS
        assert_close(flat_labels(one.log_prob(known)), two.log_prob(flat_labels(known)), SOLVED)
    else:
        for member in ("mean", "std", "variance", "epistemic_variance", "aleatoric_variance"):
            assert_close(pixels(getattr(one, member)), getattr(two, member), SOLVED)
        assert_close(flat_labels(one.log_prob(NEW[:, 1:])), two.log_prob(pixels(NEW[:, 1:])), SOLVED)


@pytest.mark.parametrize("name", SMALL)
def test_images_of_another_size(name: str) -> None:
    """Beliefs do not depend on the size of the images of the fit, beside which they have more pixels."""
    images, tokens = accepted(name, "numbers")
    assert_close(pixels(images.functions(LARGER).variance), tokens.functions(LARGER).variance, SOLVED)
    assert_close(pixels(images.predict(LARGER).std), tokens.predict(LARGER).std, SOLVED)
