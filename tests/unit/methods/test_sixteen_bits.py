"""Networks in bfloat16: Jacobians in its digits, sums in wider ones, and a finding where the digits are too few."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.cases import Wrapped
from tests.tolerances import assert_near

EPS = torch.finfo(torch.bfloat16).eps


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    run = lambda m, t: m.head(m.layer(m.table(t)).mean(1))
    return Wrapped(run, table=nn.Embedding(11, 8), layer=layer, head=nn.Linear(8, 3)).eval()


def pair(build: Any, x: Tensor, method: Any, **options: Any) -> tuple[lw.Fitted, lw.Fitted]:
    """The posterior of a network in bfloat16, and that of the same weights and inputs in float32."""
    torch.manual_seed(0)
    narrow = build().to(torch.bfloat16)
    wide, y = copy.deepcopy(narrow).float(), torch.arange(len(x)) % 3
    cast = lambda dtype: x.to(torch.bfloat16).to(dtype) if x.is_floating_point() else x
    fit = lambda model, dtype: lw.fit(model, [(cast(dtype), y)], "classification", method=method, **options)
    return fit(narrow, torch.bfloat16), fit(wide, torch.float32)


@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.Full()])
def test_variances_are_those_of_float32_up_to_the_digits(method: Any, tmp_path: Path) -> None:
    """A few products and sums in a row, each rounded: four units of rounding."""
    tokens = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(1))
    narrow, wide = pair(transformer, tokens, method, prior=1.0)
    variance = wide.functions(tokens).variance
    assert narrow.functions(tokens).variance.dtype == torch.float32
    assert_near(narrow.functions(tokens).variance, variance, 4 * EPS * float(variance.max()))
    assert_near(narrow.predict(tokens).probs, wide.predict(tokens).probs, 4 * EPS)
    assert bool(torch.isfinite(narrow.function_samples(tokens, 3)).all())
    narrow.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", narrow.network.model)
    assert_near(again.functions(tokens).variance, narrow.functions(tokens).variance, 1e-5 * float(variance.max()))


def test_a_posterior_beyond_the_digits_says_so() -> None:
    """At 40 data the trace of H in units of the prior is between what bfloat16 and float32 carry."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    build = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    narrow, wide = pair(build, x, lw.Kron(), prior=1e-3)
    assert 1e4 < wide.base.condition < 1e8
    assert wide.findings == ()
    assert "a network in bfloat16 carries 2e+02" in narrow.findings[0]
    assert "model.float()" in narrow.findings[0]
    assert pair(build, x, lw.Kron(), prior=100.0)[0].findings == ()
