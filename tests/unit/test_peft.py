"""Adapters of the package ``peft`` in models of ``transformers``, with random weights; skipped without these packages.

They are no dependency. To run: ``pip install -c constraints.txt -e ".[test]" peft transformers`` in an environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.references import dense
from tests.tolerances import assert_close, assert_within

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # these packages warn of their own plans

WORDS, CLASSES, PAD = 30, 3, 0
SMALL = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": PAD}
ROTATED = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 12}


def bert() -> nn.Module:
    config = transformers.BertConfig(hidden_size=8, intermediate_size=12, **ROTATED, **SMALL)
    return transformers.BertForSequenceClassification(config)


def gpt2(kind: str = "GPT2ForSequenceClassification", **more: Any) -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12, "bos_token_id": 1, "eos_token_id": 1}
    return getattr(transformers, kind)(transformers.GPT2Config(**sizes, **{**SMALL, **more}))


def batch() -> dict[str, Tensor]:
    """Ten sentences of three to seven words, padded, and their classes."""
    tokens, lengths = torch.randint(2, WORDS, (10, 7)), torch.randint(3, 8, (10,))
    mask = torch.arange(7) < lengths.unsqueeze(1)
    return {
        "input_ids": tokens.masked_fill(~mask, PAD), "attention_mask": mask.long(),
        "labels": torch.randint(0, CLASSES, (10,)),
    }  # fmt: skip


def inputs_of(each: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in each.items() if key != "labels"}


def with_adapters(model: nn.Module, target: str, task: str = "SEQ_CLS", **more: Any) -> nn.Module:
    """The model with adapters of rank 2 in float64, trained or not: their second factor starts at zero."""
    config = peft.LoraConfig(task_type=task, target_modules=[target], r=2, lora_alpha=4, lora_dropout=0.1, **more)
    adapted = peft.get_peft_model(model, config).double().eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


CASES = {
    "bert": lambda: with_adapters(bert(), "query"),
    "gpt2": lambda: with_adapters(gpt2(), "c_attn", fan_in_fan_out=True),
    "rank-stabilised, with biases": lambda: with_adapters(bert(), "value", use_rslora=True, bias="lora_only"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_posterior_over_adapters_is_that_of_the_dense_jacobian(name: str) -> None:
    model, data = CASES[name](), batch()
    posterior = lw.fit(model, [data], "classification", method=lw.Full(), weights=lw.named("lora_"), prior=0.7)
    names = posterior.network.selection.names
    assert names
    assert all("lora_" in each for each in names)
    x = inputs_of(data)
    f, jac = dense.output(model, x).detach(), dense.jacobian(model, x, 10, list(names))
    precision = dense.ggn(jac, dense.softmax_hessian(f)) + 0.7 * torch.eye(jac.shape[-1], dtype=torch.float64)
    belief = posterior.functions(x)
    assert_close(belief.mean, f)
    assert_close(belief.cov, dense.output_covariance(jac, precision.inverse()))


def test_all_weights_are_the_adapters_and_the_head_that_was_trained_with_them() -> None:
    model, data = CASES["bert"](), batch()
    posterior = lw.fit(model, [data], "classification", prior=1.0)
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    assert posterior.network.selection.names == trained
    assert any("classifier" in name for name in trained)
    assert any("lora_A" in name for name in trained)
    assert {block.kind for block in posterior.network.layout} == {"rows"}  # no parameter takes the fallback


@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(4), lw.Sampled(4), lw.ELLA(20, 4)],
                         ids=lambda method: type(method).__name__)  # fmt: skip
def test_every_method_has_error_bars_for_adapters(method: Any) -> None:
    model, data = CASES["bert"](), batch()
    posterior = lw.fit(model, [data], "classification", method=method, weights=lw.named("lora_"), prior=1.0)
    std = posterior.functions(inputs_of(data)).std
    assert bool((std > 0).all())


def test_a_file_belongs_to_the_adapters_too(tmp_path: Path) -> None:
    model, data = CASES["bert"](), batch()
    posterior = lw.fit(model, [data], "classification", weights=lw.named("lora_"), prior=1.0)
    posterior.save(tmp_path / "adapters.lapwing")
    x = inputs_of(data)
    assert_close(lw.load(tmp_path / "adapters.lapwing", model).functions(x).cov, posterior.functions(x).cov)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_A" in name).add_(1.0)
    with pytest.raises(lw.LapwingError):
        lw.load(tmp_path / "adapters.lapwing", model)


def test_a_language_model_with_adapters_shifts_its_labels() -> None:
    """Its labels are its inputs, as the models' own loss has them; samples have the variance of the belief."""
    model = with_adapters(gpt2("GPT2LMHeadModel", vocab_size=9), "c_attn", "CAUSAL_LM", fan_in_fan_out=True)
    tokens = torch.randint(2, 9, (6, 5))
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    likelihood = lw.Categorical(shift=True)
    posterior = lw.fit(model, [data], likelihood, weights=lw.named("lora_"), prior=1.0)
    belief = posterior.functions(inputs_of(data))
    assert belief.mean.shape == (6, 5, 9)
    draws = posterior.function_samples(inputs_of(data), 200, torch.Generator().manual_seed(0))
    assert_within((draws - belief.mean).square(), belief.variance, errors=6.0)
    with pytest.raises(lw.LapwingError, match="shift=True"):
        lw.fit(model, [data], lw.Categorical(), weights=lw.named("lora_"), prior=1.0)
