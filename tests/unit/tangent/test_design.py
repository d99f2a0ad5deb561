"""The design Rᵀ J: products held and streamed, against dense matrices and the network's own products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.errors import DataError, LapwingError
from lapwing.linalg.operators import back_product, forward_product, gram_product
from lapwing.networks.dense_jacobian import DenseJacobian
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.tangent import NetworkDesign, refuse_reordered, refuse_unsteady
from tests import problems
from tests.cases import BY_NAME, CASES, Case, cast
from tests.references import dense, ridge
from tests.references.structures import floored
from tests.tolerances import assert_close

D = torch.float64
CPU = torch.device("cpu")
CACHES = {"held": None, "streamed": 0}
SELECTIONS = {
    "last layer": lw.last_layer,
    "named": lw.named("bias"),
    "subnetwork": lw.subnetwork(torch.arange(1, 40, 3)),
}


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> int | None:
    return CACHES[request.param]


def kind_of(case: Case) -> str:
    return "categorical" if case.outputs[-1] > 1 else "bernoulli"


@lru_cache
def reference(name: str, dtype: torch.dtype = D) -> tuple[Tensor, Tensor]:
    """f (N, C) and J (N, C, P) of six samples, in float64 whatever the model was rounded to."""
    case = BY_NAME[name]
    model, inputs = case.build(dtype).double(), cast(case.batch(6, dtype), D)
    with torch.no_grad():
        f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(6)])
    return f.reshape(-1, f.shape[-1]), dense.by_datum(dense.jacobian(model, inputs, 6), case.outputs[-1])


def written_out(case: Case, curvature: str = "ggn", dtype: torch.dtype = D) -> Tensor:
    """The design as a matrix."""
    f, jac = reference(case.name, dtype)
    return jac.flatten(0, 1) if curvature == "jacobian" else ridge.design(kind_of(case), f, jac)


def built(
    case: Case, cache: int | None, curvature: str = "ggn", dtype: torch.dtype = D, weights: Any = None, **options: Any
) -> NetworkDesign:
    network = Network.build(case.build(dtype), case.batch(6, dtype), weights)
    data = Data(problems.batches(case, dtype=dtype), CPU)
    return NetworkDesign.build(network, problems.likelihood(case), data, cache, curvature, **options)


def rows(count: int, size: int, seed: int = 4) -> Tensor:
    return torch.randn(count, size, dtype=D, generator=torch.Generator().manual_seed(seed))


def assert_products(design: NetworkDesign, x: Tensor, dtype: torch.dtype = D) -> None:
    """X v, Xᵀ u and Xᵀ X v for several vectors, and X itself."""
    assert (design.rows, design.size) == x.shape
    v, u = rows(3, design.size), rows(2, design.rows)
    products = (forward_product(design, v), back_product(design, u), gram_product(design, v))
    for product, expected in zip(products, (v @ x.T, u @ x, v @ x.T @ x), strict=True):
        assert product.dtype == D
        assert_close(product, expected, dtype=dtype)
    assert_close(design.whole(), x, dtype=dtype)


@pytest.mark.parametrize("curvature", ["ggn", "jacobian"])
def test_products_equal_dense_ones(case: Case, cache: int | None, curvature: str) -> None:
    design = built(case, cache, curvature)
    assert design.streamed == (cache == 0)
    assert_products(design, written_out(case, curvature))


def test_the_references_own_gram_matrix_is_the_ggn(case: Case) -> None:
    f, jac = reference(case.name)
    x = written_out(case)
    assert_close(x.T @ x, dense.ggn(jac, problems.output_hessian(case, f)))


def test_float32(case: Case, cache: int | None) -> None:
    assert_products(built(case, cache, dtype=torch.float32), written_out(case, dtype=torch.float32), torch.float32)


def test_products_equal_the_networks_own(case: Case, cache: int | None) -> None:
    """Forward and backward passes through the network, batch after batch."""
    design = built(case, cache, "jacobian")
    v, u = rows(3, design.size), rows(2, design.rows)
    pieces = problems.batches(case)
    outputs = torch.cat([design.network.jvp(inputs, v).flatten(2) for inputs, _ in pieces], 1)
    assert_close(forward_product(design, v), outputs.flatten(1))
    seeds = u.reshape(2, 6, *case.outputs)
    total, start = torch.zeros(2, design.size, dtype=D), 0
    for inputs, y in pieces:
        total += design.network.vjp(inputs, seeds[:, start : start + len(y)])
        start += len(y)
    assert_close(back_product(design, u), total)


def test_statistics_are_those_of_the_pass(case: Case, cache: int | None) -> None:
    f, _ = reference(case.name)
    y = problems.targets(case, 6).reshape(-1)
    if kind_of(case) == "categorical":
        loss = F.cross_entropy(f, y, reduction="sum")
    else:
        loss = F.binary_cross_entropy_with_logits(f[:, 0], y.to(D), reduction="sum")
    statistics = built(case, cache).statistics
    assert statistics.loss == pytest.approx(float(loss), rel=1e-11)
    assert (statistics.data, statistics.outputs) == (len(f), case.outputs[-1])


@pytest.mark.parametrize("weights", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm", "embedding", "token_level", "conv_zoo"])
def test_some_of_the_weights(name: str, weights: Any, cache: int | None) -> None:
    case = BY_NAME[name]
    design = built(case, cache, weights=weights)
    where, start = [], 0
    for key, parameter in case.build().named_parameters():
        if key in design.network.selection.names:
            where += range(start, start + parameter.numel())
        start += parameter.numel()
    chosen = torch.arange(1, 40, 3) if design.network.selection.index is not None else torch.tensor(where)
    assert len(chosen) < start
    assert_products(design, written_out(case)[:, chosen])


def test_the_diagonal_is_that_of_the_ggn(case: Case, cache: int | None) -> None:
    """With no entry below a thousandth of the median of its layer, a layer being a module."""
    expected = written_out(case).square().sum(0)
    start, layers = 0, {}
    for name, parameter in case.build().named_parameters():
        if parameter.requires_grad:
            index = torch.arange(start, start + parameter.numel())
            layers.setdefault(name.rpartition(".")[0], []).append(index)
            start += parameter.numel()
    for index in (torch.cat(parts) for parts in layers.values()):
        expected[index] = floored(expected[index])
    assert_close(built(case, cache).diagonal(), expected)


def test_the_diagonal_of_a_subnetwork_knows_nothing_of_the_rest() -> None:
    """The floor is a thousandth of the median of the weights that are selected."""
    case = BY_NAME["mlp"]
    exact = written_out(case).square().sum(0)
    index = exact[:24].argsort()[:3].sort().values  # the three of the first layer that matter least
    index = torch.cat([index, torch.arange(70, 83)])
    expected = torch.cat([floored(exact[index[:3]]), floored(exact[index[3:]])])
    assert_close(built(case, None, weights=lw.subnetwork(index)).diagonal(), expected)


def test_a_small_budget_of_bytes_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples one at a time in every temporary and in every chunk."""
    monkeypatch.setattr("lapwing.networks.jacobians.CACHED", 1)
    with lw.memory.limited(1):
        assert_products(built(case, None), written_out(case))


@pytest.mark.parametrize("held", [False, True])
def test_layer_jacobians_back(case: Case, held: bool) -> None:
    inputs = case.batch(4)
    jacobians = Network.build(case.build(), inputs).linearise(inputs).jacobians()
    chosen = jacobians.formed() if held else jacobians
    exact = dense.jacobian(case.build(), inputs, 4)  # (B, M, P)
    u, v = rows(2, 4 * exact.shape[1]).reshape(2, 4, -1), rows(3, exact.shape[-1])
    assert_close(chosen.vjp(u), torch.einsum("nbk,bkp->np", u, exact))
    assert_close(chosen.jvp(v), torch.einsum("bkp,np->nbk", exact, v))
    assert_close(chosen.whole(), exact)
    assert_close(chosen.double().whole(), exact)
    assert (chosen.batch, chosen.outputs, chosen.dtype) == (4, exact.shape[1], D)


def test_layer_jacobians_in_hand_have_the_same_sums(case: Case) -> None:
    """Σ J², Σ J w Jᵀ and its form across samples, whatever form a block is held in."""
    inputs = case.batch(4)
    jacobians = Network.build(case.build(), inputs).linearise(inputs).jacobians()
    for (block, plain), (_, held) in zip(jacobians, jacobians.formed(), strict=True):
        weights = rows(1, block.size)[0].square().reshape(block.form) + 0.1
        assert_close(held.squares().reshape(block.form), plain.squares().reshape(block.form))
        assert_close(held.between(held, weights), plain.between(plain, weights))
        for full in (True, False):
            assert_close(
                held.weighted(weights, jacobians.tokens, full), plain.weighted(weights, jacobians.tokens, full)
            )


def test_layer_jacobians_in_hand_are_not_formed_again() -> None:
    case = BY_NAME["cnn"]
    inputs = case.batch(4)
    jacobians = Network.build(case.build(), inputs).linearise(inputs).jacobians()
    held = jacobians.formed()
    for (_, one), (_, other) in zip(held, held, strict=True):
        assert one is other
    assert any(one is not other for (_, one), (_, other) in zip(jacobians, jacobians, strict=True))


def test_bytes_of_what_is_held() -> None:
    """Factors of the inputs and of the seeds, or the Jacobian itself where positions outnumber outputs; by hand."""
    numbers = {
        # inputs (4+1, 6+1, 5+1) and gradients of 3 outputs (6, 5, 3) of each layer
        "mlp": 5 + 7 + 6 + 3 * (6 + 5 + 3),
        # 16 and 4 positions in the convolutions, both above 3 outputs; then one linear map at one position
        "cnn": 3 * (4 * 2 * 9 + 4) + 3 * (5 * 4 * 9 + 5) + (6 + 3 * 3),
    }
    for name, each in numbers.items():
        inputs = BY_NAME[name].batch(4)
        held = Network.build(BY_NAME[name].build(), inputs).linearise(inputs).jacobians().formed()
        assert held.nbytes == 8 * 4 * each
        narrow = Network.build(BY_NAME[name].build(torch.float32), inputs.float()).linearise(inputs.float())
        assert narrow.jacobians().formed().nbytes == 4 * 4 * each


def test_bytes_of_an_embedding() -> None:
    """Gradients of the distinct tokens of each sample, and whole numbers that say whose they are."""
    case = BY_NAME["dict_input"]
    inputs = case.batch(4)
    held = Network.build(case.build(), inputs).linearise(inputs).jacobians().formed()
    distinct = sum(len(row.unique()) for row in inputs["ids"])
    table = 8 * (3 * distinct * 4 + 2 * distinct + inputs["ids"].numel())
    head = 8 * 4 * (5 + 3 * 3)
    assert held.nbytes == table + head


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("positions", "outputs"), [(3, 3), (4, 3), (1, 2)])
def test_whole_where_positions_outnumber_outputs(positions: int, outputs: int, groups: int) -> None:
    gen = torch.Generator().manual_seed(2)
    a = torch.randn(groups, 5, positions, 4, dtype=D, generator=gen)
    g = torch.randn(groups, outputs, 5, positions, 6, dtype=D, generator=gen)
    factors = LinearJacobian(a, g)
    compact = factors.formed()
    assert isinstance(compact, DenseJacobian if positions > outputs else LinearJacobian)
    exact = torch.einsum("gbti,gkbto->bkgoi", a, g)
    v = torch.randn(2, groups, 6, 4, dtype=D, generator=gen)
    u = torch.randn(7, 5, outputs, dtype=D, generator=gen)
    for jacobian in (factors, compact):
        assert_close(jacobian.jvp(v), torch.einsum("bkgoi,ngoi->nbk", exact, v))
        back = jacobian.vjp(u).reshape(7, groups, 6, 4)
        assert_close(back, torch.einsum("bkgoi,nbk->ngoi", exact, u))
        assert_close(jacobian.squares().reshape(groups, 6, 4), exact.square().sum((0, 1)))


class Loader:
    """Batches of a data set, made anew at every pass by a function of the pass."""

    def __init__(self, make: Any) -> None:
        self.passes, self._make = 0, make

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self._make(self.passes)


def shuffling(case: Case) -> DataLoader:
    """Eleven samples in another order at every pass."""
    pairs = TensorDataset(case.batch(11), problems.targets(case, 11))
    return DataLoader(pairs, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def over(case: Case, data: Any, cache: int | None) -> NetworkDesign:
    network = Network.build(case.build(), case.batch(6))
    return NetworkDesign.build(network, problems.likelihood(case), Data(data, CPU), cache)


@pytest.mark.parametrize("cache", [None, 15_000], ids=["factors held", "data held"])
def test_a_loader_that_shuffles_gives_the_same_rows_at_every_pass(cache: int | None) -> None:
    case = BY_NAME["cnn"]
    design = over(case, shuffling(case), cache)
    assert design.streamed == (cache is not None)
    x = forward_product(design, torch.eye(design.size, dtype=D)).T
    assert_products(design, x)
    refuse_reordered(design)
    ordered = over(case, [(case.batch(11), problems.targets(case, 11))], None)
    exact = gram_product(ordered, torch.eye(design.size, dtype=D))
    assert_close(x.T @ x, exact)
    gaps = torch.cdist(x, forward_product(ordered, torch.eye(design.size, dtype=D)).T)
    assert sorted(gaps.argmin(1).tolist()) == list(range(22))  # each of the rows once,
    assert gaps.argmin(1).tolist() != list(range(22))  # in another order


def test_a_loader_that_shuffles_and_fits_nowhere() -> None:
    """The GGN does not mind; rows do."""
    case = BY_NAME["cnn"]
    design = over(case, shuffling(case), 0)
    still = over(case, [(case.batch(11), problems.targets(case, 11))], 0)
    v = rows(2, design.size)
    for _ in range(2):
        assert_close(gram_product(design, v), gram_product(still, v))
    with pytest.raises(DataError, match=r"two passes over the data gave different rows.*shuffle=False"):
        refuse_reordered(design)
    assert still.streamed
    refuse_reordered(still)


def test_a_changing_number_of_rows_is_refused() -> None:
    case = BY_NAME["mlp"]
    x, y = case.batch(6), problems.targets(case, 6)
    data = Loader(lambda number: [(x[: 6 - number % 2], y[: 6 - number % 2])])
    design = over(case, data, 0)  # a pass to read and one to build: six data of two rows each
    with pytest.raises(DataError, match="gave 5 rows and the first one 6; expected the same rows"):
        gram_product(design, rows(1, design.size))


def flipped(x: Tensor, y: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """About half of the rows from the other side, as images are: every sum over all entries stays what it was."""
    return torch.where(torch.rand(len(x), 1, dtype=D, generator=gen) < 0.5, x, x.flip(1)), y


AUGMENTED: dict[str, Any] = {
    "noise": lambda x, y, gen: (x + 0.1 * torch.randn(x.shape, dtype=D, generator=gen), y),
    "flips": flipped,
    "other targets": lambda x, y, gen: (x, torch.randint(0, 3, y.shape, generator=gen)),
}


@pytest.mark.parametrize("name", AUGMENTED)
@pytest.mark.parametrize("cache", [None, 1000], ids=["factors held", "data held"])
@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_random_augmentation_is_refused_where_one_draw_was_kept(refuse: Any, cache: int | None, name: str) -> None:
    case = BY_NAME["mlp"]
    x, y, gen = case.batch(6), problems.targets(case, 6), torch.Generator().manual_seed(3)
    design = over(case, Loader(lambda _: [AUGMENTED[name](x, y, gen)]), cache)
    with pytest.raises(DataError, match=r"a second reading of the data gave other rows, by .*no random augmentation"):
        refuse(design)


def test_random_augmentation_is_refused_where_nothing_is_kept() -> None:
    case = BY_NAME["mlp"]
    x, y, gen = case.batch(6), problems.targets(case, 6), torch.Generator().manual_seed(3)
    with pytest.raises(DataError, match="a second reading of the data gave other rows"):
        refuse_reordered(over(case, Loader(lambda _: [AUGMENTED["noise"](x, y, gen)]), 0))


@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_what_is_kept_may_come_in_any_order(refuse: Any) -> None:
    """Other batches as well: a loader that shuffles was read once."""
    case = BY_NAME["mlp"]
    x, y, gen = case.batch(7), problems.targets(case, 7), torch.Generator().manual_seed(3)

    def shuffled(_: int) -> list[tuple[Tensor, Tensor]]:
        order = torch.randperm(7, generator=gen)
        return [(x[rows], y[rows]) for rows in order.split(3)]

    refuse(over(case, Loader(shuffled), None))


def test_padding_is_not_compared() -> None:
    """A row that is padded to the longest of its batch is another row in another batch."""
    x = torch.randn(6, 5, 4, dtype=D)
    cuts = [(5, 3), (3, 5)]
    data = Loader(lambda number: [(x[:3, : cuts[number % 2][0]], Y6[:3]), (x[3:, : cuts[number % 2][1]], Y6[3:])])
    network = Network.build(Pooled(), x)
    refuse_unsteady(NetworkDesign.build(network, lw.Gaussian(), Data(data, CPU)))


Y6 = torch.zeros(6, 1, dtype=D)


class Pooled(nn.Module):
    """The mean over a length that may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.mean(1))
        return outputs


@pytest.mark.parametrize("cache", [None, 1000], ids=["factors held", "data held"])
def test_what_is_held_is_read_once(cache: int | None) -> None:
    case = BY_NAME["mlp"]
    data = Loader(lambda _: problems.batches(case))
    design = over(case, data, cache)
    assert data.passes == 1
    assert design.streamed == (cache is not None)
    assert_products(design, written_out(case))
    assert data.passes == 1


def test_batches_with_different_numbers_of_tokens(cache: int | None) -> None:
    case = BY_NAME["token_level"]
    model, gen = case.build(), torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, 7, shape, generator=gen) for shape in ((2, 4), (3, 5), (1, 2))]
    data = [(x, torch.randint(0, 3, x.shape, generator=gen)) for x in tokens]
    network = Network.build(model, tokens[0])
    design = NetworkDesign.build(network, lw.Categorical(), Data(data, CPU), cache)
    parts = []
    for x in tokens:
        f = model(x).detach().reshape(-1, 3)
        parts.append(ridge.design("categorical", f, dense.by_datum(dense.jacobian(model, x, len(x)), 3)))
    assert_products(design, torch.cat(parts))


def test_ignored_targets_have_rows_of_noughts(cache: int | None) -> None:
    case = BY_NAME["mlp"]
    y = problems.targets(case, 6)
    y[2] = -100
    network = Network.build(case.build(), case.batch(6))
    design = NetworkDesign.build(network, lw.Categorical(), Data([(case.batch(6), y)], CPU), cache)
    x = written_out(case).clone()
    x[4:6] = 0
    assert_products(design, x)
    assert design.statistics.data == 5


def test_a_noise_for_each_output(cache: int | None) -> None:
    """Rows at unit dispersion, each output by its own noise."""
    case, std = BY_NAME["mlp"], (0.5, 1.0, 2.0)
    network = Network.build(case.build(), case.batch(6))
    data = Data([(case.batch(6), rows(6, 3))], CPU)
    design = NetworkDesign.build(network, lw.Gaussian(noise_std=std), data, cache)
    assert_products(design, (reference("mlp")[1] / torch.tensor(std, dtype=D)[:, None]).flatten(0, 1))
    one = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), data, cache)  # the dispersion enters later
    assert_products(one, reference("mlp")[1].flatten(0, 1))


@pytest.mark.parametrize("part", [0, -1])
def test_parts_without_data_are_refused(part: int) -> None:
    with pytest.raises(DataError, match=f"part is {part}; expected at least one datum"):
        built(BY_NAME["mlp"], None, part=part)


def test_the_model_is_left_as_it_was(case: Case, cache: int | None) -> None:
    model = case.build()
    network = Network.build(model, case.batch(6))

    def run() -> None:
        design = NetworkDesign.build(network, problems.likelihood(case), Data(problems.batches(case), CPU), cache)
        gram_product(design, rows(1, design.size))
        design.diagonal()

    problems.unchanged(model, run)


def test_one_batch_is_tried_where_the_data_are_kept_and_all_where_they_are_not() -> None:
    case = BY_NAME["cnn"]
    pairs = [(case.batch(11)[i : i + 4], problems.targets(case, 11)[i : i + 4]) for i in (0, 4, 8)]
    kept, streamed = over(case, pairs, 15_000), over(case, pairs, 0)
    assert kept.streamed
    v = rows(2, kept.size)
    assert_close(gram_product(kept.probe(), v), gram_product(over(case, pairs[:1], None), v))
    assert streamed.probe() is streamed
    refuse_unsteady(kept)


def test_what_is_kept_is_counted() -> None:
    case = BY_NAME["cnn"]
    x, y = case.batch(11), problems.targets(case, 11)
    data = x.nbytes + y.nbytes
    factors, streamed, nothing = (over(case, [(x, y)], cache) for cache in (None, data, 0))
    assert nothing.nbytes == 0
    assert streamed.nbytes == data
    assert factors.factors is not None
    assert factors.nbytes == data + sum(part.nbytes for part in factors.factors)
    assert factors.nbytes > 2 * data


class Noisy(nn.Module):
    """A layer that adds chance to what passes, in evaluation mode too, once it is told to."""

    size: Tensor  # which the copy that runs shares

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.randn_like(x)


@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_a_network_with_chance_in_it_is_found_on_one_batch(refuse: Any) -> None:
    case = BY_NAME["mlp"]
    noisy = Noisy()
    noisy.size = torch.zeros(())
    network = Network.build(nn.Sequential(noisy, case.build()), case.batch(6))
    x, y = case.batch(12), problems.targets(case, 12)
    data = Data([(x[:6], y[:6]), (x[6:], y[6:])], CPU)
    design = NetworkDesign.build(network, problems.likelihood(case), data, 1200)
    assert design.streamed
    assert design.source is data
    refuse(design)
    noisy.size.fill_(0.1)
    with pytest.raises(LapwingError, match=r"two calls|different rows"):
        refuse(design)


def test_looking_for_noise_leaves_the_callers_random_numbers_alone() -> None:
    x, y, net = torch.randn(8, 3), torch.randn(8, 1), torch.nn.Linear(3, 1)
    before = torch.get_rng_state()
    lw.fit(net, [(x, y)], "regression", prior=1.0).ggn([(x, y)])
    lw.fit(net, [(x, y)], "regression", prior=1.0, method=lw.KernelSpace())
    assert torch.equal(torch.get_rng_state(), before)
