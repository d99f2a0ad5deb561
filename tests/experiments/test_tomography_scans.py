"""Scans, phantoms, noise, scores and the choice of angles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.tomography import phantoms, scores
from experiments.tomography.backprojection import fbp
from experiments.tomography.design import DenseBelief, SampledBelief, choose_angles, information_gain, squared_error
from experiments.tomography.geometry import FanBeam, Geometry, ParallelBeam, pixel_centres
from experiments.tomography.noise import measured
from experiments.tomography.rays import _lengths, angle_operators, ray_transform
from lapwing.errors import DataError, LapwingError, NumericalError
from lapwing.runtime.threads import normal
from tests.experiments.tomography.dense import normals
from tests.tolerances import assert_close, assert_near

# Where the rays of the geometries run, and settings that make no sense.

FAN = FanBeam(size=6, angles=5, bins=7, source_distance=11.0, detector_distance=13.0)


def test_parallel_rays_are_at_the_offsets_and_cross_the_image() -> None:
    beam = ParallelBeam(6, angles=(0.3, 1.9, -0.4), bins=5)
    start, end = beam.rays()
    assert start.shape == end.shape == (3, 5, 2)
    for angle, a, b in zip(beam.radians, start, end):
        across = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        along = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=torch.float64)
        assert_close(a @ across, beam.offsets)
        assert_close(b @ across, beam.offsets)
        assert bool((a @ along < -3 * math.sqrt(2)).all())
        assert bool((b @ along > 3 * math.sqrt(2)).all())


def test_a_fan_goes_from_the_source_to_the_detector() -> None:
    start, end = FAN.rays()
    assert FAN.radians == pytest.approx([0.4 * math.pi * i for i in range(5)])
    assert_close(start.norm(dim=2), torch.full((5, 7), 11.0, dtype=torch.float64))
    assert bool((start == start[:, :1]).all())
    for angle, a, b in zip(FAN.radians, start, end):
        along = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=torch.float64)
        assert_close((b - a) @ along, torch.full((7,), 24.0, dtype=torch.float64))
        assert_close((b[1:] - b[:-1]).norm(dim=1), torch.full((6,), FAN.width / 7, dtype=torch.float64))


def test_the_default_fan_touches_the_circle_around_the_image() -> None:
    source, edge = (0.0, -11.0), (FAN.width / 2, 13.0)
    dx, dy = edge[0] - source[0], edge[1] - source[1]
    distance = abs(dx * source[1] - dy * source[0]) / math.hypot(dx, dy)
    assert distance == pytest.approx(3 * math.sqrt(2), rel=1e-12)
    assert FanBeam(6, 5, 7, 11.0, 13.0, detector_width=8.0).width == 8.0


@pytest.mark.parametrize("geometry", [ParallelBeam(6, 4, 5), FAN])
def test_other_angles(geometry: Geometry) -> None:
    other = geometry.with_angles([0.5, 0.25])
    assert other.radians == (0.5, 0.25)
    assert other.shape == (2, geometry.shape[1])
    with pytest.raises(DataError, match="angles is "):
        geometry.with_angles(())


# Lengths of rays in pixels, against each pixel cut by each ray in turn.

D = torch.float64
GEOMETRIES: dict[str, Geometry] = {
    "parallel, even": ParallelBeam(6, angles=5, bins=8),  # no ray along an edge
    "parallel, odd": ParallelBeam(7, angles=4, bins=12),  # rays through corners at 45 degrees
    "parallel, any angles": ParallelBeam(5, angles=(0.1, 3.3, -1.2, 1e-7)),
    "fan": FanBeam(6, angles=7, bins=10, source_distance=9.0, detector_distance=14.0),
    "narrow fan": FanBeam(7, angles=4, bins=4, source_distance=6.0, detector_distance=6.0, detector_width=5.0),
}


def cut(low: float, high: float, start: float, step: float) -> tuple[float, float]:
    """Return the part of a ray between two parallel lines, as shares of its way."""
    if abs(step) < 1e-13:
        return (-math.inf, math.inf) if low < start < high else (math.inf, -math.inf)
    ends = (low - start) / step, (high - start) / step
    return min(ends), max(ends)


def reference(geometry: Geometry) -> Tensor:
    """Return the matrix: the length of each ray between the four sides of each pixel."""
    n = geometry.size
    start, end = (part.reshape(-1, 2).tolist() for part in geometry.rays())
    matrix = torch.zeros(len(start), n * n, dtype=D)
    for ray, ((x, y), (x_end, y_end)) in enumerate(zip(start, end)):
        for i in range(n):
            for j in range(n):
                across = cut(j - n / 2, j + 1 - n / 2, x, x_end - x)
                down = cut(n / 2 - i - 1, n / 2 - i, y, y_end - y)
                share = min(across[1], down[1]) - max(across[0], down[0])
                matrix[ray, i * n + j] = max(share, 0.0) * math.hypot(x_end - x, y_end - y)
    return matrix


@pytest.mark.parametrize("name", GEOMETRIES)
def test_lengths_are_those_of_each_ray_in_each_pixel(name: str) -> None:
    operator = ray_transform(GEOMETRIES[name])
    assert operator.rows == math.prod(GEOMETRIES[name].shape)
    assert_near(operator.dense(), reference(GEOMETRIES[name]), 1e-10)


@pytest.mark.parametrize("angle", [0.0, math.pi / 2, math.pi, 1.5 * math.pi, -math.pi / 2])
def test_a_ray_along_an_edge_counts_half_on_both_sides(angle: float) -> None:
    """The middle bin of an odd detector, in an even image."""
    columns = ray_transform(ParallelBeam(4, (angle,), bins=5)).dense()
    image = columns[2].reshape(4, 4)
    sideways = bool(abs(math.sin(angle)) > 0.5)
    lines = image if sideways else image.T
    assert_near(lines, torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=D)[:, None].expand(4, 4), 1e-12)
    assert float(columns[2].sum()) == pytest.approx(4, rel=1e-12)
    fan = FanBeam(4, (angle,), bins=3, source_distance=5.0, detector_distance=6.0)
    assert_near(ray_transform(fan).dense()[1], columns[2], 1e-12)


def test_a_ray_along_the_border_counts_half() -> None:
    """The first ray runs along the border, the second beside the image, and the third through the outer pixels."""
    start = torch.tensor([[2.0, -9.0], [2.1, -9.0], [1.9, -9.0]], dtype=D)
    row, column, length = _lengths(start, start * torch.tensor([1.0, -1.0], dtype=D), size=4, first=5)
    assert_near(length, torch.tensor([0.5] * 4 + [1.0] * 4, dtype=D), 1e-12)
    assert row.tolist() == [5] * 4 + [7] * 4
    assert sorted(column.tolist()) == [3, 3, 7, 7, 11, 11, 15, 15]


@pytest.mark.parametrize("make", [lambda a: ParallelBeam(6, a), lambda a: FanBeam(6, a, 9, 8.0, 10.0)])
def test_turning_image_and_scanner_by_90_degrees_changes_nothing(make: Any, generator: torch.Generator) -> None:
    """Rays along edges are among them: the middle bin of an odd detector, an even image, angle zero."""
    angles = (0.0, 0.3, math.pi / 4, 1.1)
    image = torch.rand(6, 6, generator=generator, dtype=D)
    upright = ray_transform(make(angles)).forward(image.reshape(-1))
    for turns in (1, 2, 3):
        turned = ray_transform(make(tuple(a + turns * math.pi / 2 for a in angles)))
        assert_near(turned.forward(image.rot90(turns).reshape(-1)), upright, 1e-10)


def test_projections_of_a_disc_have_its_chord_lengths() -> None:
    """A disc of radius 20 in pixels that know only whether their centre is inside: errors of about a pixel."""
    size, radius = 64, 20.0
    x, y = pixel_centres(size)
    beam = ParallelBeam(size, angles=7)
    sinogram = ray_transform(beam).forward((x.hypot(y) < radius).to(D).reshape(-1)).reshape(beam.shape)
    chords = 2 * (radius**2 - beam.offsets.square()).clamp_min(0).sqrt()
    inner = beam.offsets.abs() < 0.8 * radius
    assert_near(sinogram[:, inner], chords[inner].expand(7, -1), 3.5)
    assert_near(sinogram[:, inner].mean(0), chords[inner], 1.2)
    width = float(beam.offsets[1] - beam.offsets[0])
    mass = sinogram.sum(1) * width
    assert_near(mass / (math.pi * radius**2), torch.ones(7, dtype=D), 0.02)


# Filtered back-projection: discs come back, it is linear, and other sinograms are refused.

SIZE = 32
MANY: dict[str, Geometry] = {
    "parallel": ParallelBeam(SIZE, angles=60),
    "fan": FanBeam(SIZE, angles=90, bins=64, source_distance=48.0, detector_distance=70.0),
    "uneven": ParallelBeam(
        SIZE, tuple(i * math.pi / 50 for i in range(50)) + tuple(0.01 + 0.02 * i for i in range(40))
    ),
}
FEW: dict[str, Geometry] = {
    "parallel": ParallelBeam(7, angles=4),
    "fan": FanBeam(7, angles=3, bins=9, source_distance=10.0, detector_distance=12.0),
}


def disc(radius: float, x: float, y: float) -> tuple[Tensor, Tensor]:
    """Return a disc of value one, with the covered share of the pixels at its rim, and the distance from its centre."""
    across, up = pixel_centres(SIZE)
    parts = [(a + 0.5) / 8 - 0.5 for a in range(8)]
    image = sum((((across + a - x).hypot(up + b - y) < radius).to(D) for a in parts for b in parts), torch.zeros(1))
    return image / 64, (across - x).hypot(up - y)


@pytest.mark.parametrize("window", ["none", "hann"])
@pytest.mark.parametrize("name", MANY)
def test_a_disc_comes_back(name: str, window: str) -> None:
    """Off the centre, so that angles and directions matter. Rims are blurred over about two pixels."""
    image, distance = disc(9.0, 3.0, -1.5)
    geometry = MANY[name]
    result = fbp(geometry, ray_transform(geometry).forward(image.reshape(-1)), window)
    inside, outside = distance < 6, distance > 12
    assert float(result[inside].mean()) == pytest.approx(1, abs=0.01)
    assert float((result[inside] - 1).abs().max()) < 0.06
    assert float(result[outside].square().mean().sqrt()) < 0.03


@pytest.mark.parametrize("name", FEW)
def test_it_is_linear_and_takes_batches(name: str, generator: torch.Generator) -> None:
    geometry = FEW[name]
    y = torch.randn(3, 2, math.prod(geometry.shape), generator=generator, dtype=D)
    images = fbp(geometry, y)
    assert images.shape == (3, 2, 7, 7)
    assert_close(fbp(geometry, 2 * y[0, 1] - y[2, 0]), 2 * images[0, 1] - images[2, 0])
    assert_close(fbp(geometry, y.float()), images.float())


def test_the_ramp_filter_is_a_convolution(generator: torch.Generator) -> None:
    """One angle, bins over the middles of the columns: the sum with the published kernel of the ramp, written out."""
    bins = 11
    size = 6
    geometry = ParallelBeam(size, angles=1, bins=bins)
    width = size * math.sqrt(2) / bins
    y = torch.randn(bins, generator=generator, dtype=D)
    kernel = {0: 0.25 / width**2, **{k: -1 / (math.pi * k * width) ** 2 for k in range(1, bins, 2)}}
    filtered = [width * sum(float(y[j]) * kernel.get(abs(i - j), 0.0) for j in range(bins)) for i in range(bins)]
    columns = []
    for x in (c + 0.5 - size / 2 for c in range(size)):
        place = x / width + (bins - 1) / 2
        left = math.floor(place)
        columns.append(math.pi * ((1 - place + left) * filtered[left] + (place - left) * filtered[left + 1]))
    assert_close(fbp(geometry, y), torch.tensor(columns, dtype=D).expand(size, size))


@pytest.mark.parametrize("name", FEW)
def test_angles_may_come_in_any_order(name: str, generator: torch.Generator) -> None:
    """Also one turn later."""
    geometry = FEW[name]
    angles, bins = geometry.shape
    y = torch.randn(angles, bins, generator=generator, dtype=D)
    later = geometry.with_angles(
        [a + geometry.period * (2 if name == "parallel" else 1) for a in geometry.radians[::-1]]
    )
    assert_close(fbp(later, y.flip(0).reshape(-1)), fbp(geometry, y.reshape(-1)))


# Images to scan: their ranges, seeds and places; and digits from a file.

RANDOM: list[Callable[..., Tensor]] = [phantoms.rectangles, phantoms.ellipses]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_image(image: Tensor, size: int) -> None:
    assert (image.shape, image.dtype) == ((size, size), torch.float64)
    assert float(image.min()) == 0
    assert float(image.max()) == 1


def test_the_head() -> None:
    """The skull is one, the brain 0.2 and the ventricles zero; the tumours lie above and below the centre."""
    image = phantoms.shepp_logan(200)
    assert_image(image, 200)
    at = {  # value at (x, y) in [-1, 1]²
        (0.0, 0.9): 1.0, (0.0, -0.8): 0.2, (0.22, 0.0): 0.0, (-0.22, 0.0): 0.0, (0.0, 0.4): 0.3, (0.0, 0.1): 0.3,
        (0.0, -0.1): 0.3, (-0.08, -0.605): 0.3, (0.06, -0.605): 0.3, (0.9, 0.9): 0.0, (-0.3, 0.3): 0.0,
        (0.3, 0.25): 0.0, (-0.3, -0.3): 0.2,
    }  # fmt: skip
    for (x, y), value in at.items():
        row, column = math.floor(100 - 100 * y), math.floor(100 + 100 * x)
        assert float(image[row, column]) == pytest.approx(value, abs=1e-12), (x, y)
    assert_image(phantoms.shepp_logan(28), 28)


@pytest.mark.parametrize("made", RANDOM)
def test_random_shapes(made: Callable[..., Tensor]) -> None:
    for seed in range(5):
        image = made(33, seeded(seed))
        assert_image(image, 33)
        assert torch.equal(image, made(33, seeded(seed)))
        assert not torch.equal(image, made(33, seeded(seed + 1)))
        assert 0.02 < float((image > 0).double().mean()) < 0.9


def test_digits(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    test, train = (
        draw.integers(0, 256, (7, 28, 28)).astype(np.uint8),
        draw.integers(0, 256, (5, 28, 28)).astype(np.uint8),
    )
    np.savez(tmp_path / "mnist.npz", x_test=test, x_train=train)
    images = phantoms.digits(tmp_path, 3)
    assert (images.shape, images.dtype) == ((3, 28, 28), torch.float64)
    assert torch.equal((255 * images).round().to(torch.uint8), torch.from_numpy(test[:3]))
    assert torch.equal((255 * phantoms.digits(tmp_path, 5, "train")).round().to(torch.uint8), torch.from_numpy(train))
    with pytest.raises(DataError, match="count is 8; expected at most 7"):
        phantoms.digits(tmp_path, 8)
    with pytest.raises(DataError, match=r"kmnist.npz is not in the data folder"):
        phantoms.digits(tmp_path, 3, name="kmnist")
    with pytest.raises(LapwingError, match="part is 'validation'; expected one of test, train"):
        phantoms.digits(tmp_path, 3, "validation")


# Simulated measurements: the size of their noise, and input that makes no sense.

NOISE_SIZE = 9
BEAM = ParallelBeam(NOISE_SIZE, angles=40)
OPERATOR = ray_transform(BEAM)
IMAGE = torch.linspace(-0.2, 1, NOISE_SIZE**2, dtype=torch.float64).reshape(NOISE_SIZE, NOISE_SIZE)


def test_the_noise_has_its_share_of_the_mean() -> None:
    clean = OPERATOR.forward(IMAGE.reshape(-1))
    y, std = measured(OPERATOR, IMAGE, 0.05, seeded(0))
    assert std == pytest.approx(0.05 * float(clean.abs().mean()), rel=1e-12)
    error = (y - clean) / std
    assert abs(float(error.mean())) < 5 / len(error) ** 0.5
    assert abs(float(error.square().mean()) - 1) < 5 * (2 / len(error)) ** 0.5
    assert torch.equal(y, measured(OPERATOR, IMAGE, 0.05, seeded(0))[0])
    assert torch.equal(y, measured(OPERATOR, IMAGE.reshape(-1), 0.05, seeded(0))[0])
    assert not torch.equal(y, measured(OPERATOR, IMAGE, 0.05, seeded(1))[0])


# The choice of angles, against log-determinants of the whole scan that are computed from scratch.

DESIGN_SIZE, BINS, NOISE = 5, 7, 0.3
DESIGN_BEAM = ParallelBeam(DESIGN_SIZE, angles=(0.1, 0.7, 1.2, 1.6, 2.4, 2.9), bins=BINS)
CANDIDATES = angle_operators(DESIGN_BEAM)


def covariance() -> Tensor:
    """A belief that knows little about the upper left of the image, and nothing exactly."""
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(DESIGN_SIZE**2, DESIGN_SIZE**2, generator=generator, dtype=D) / DESIGN_SIZE
    scale = torch.linspace(2, 0.1, DESIGN_SIZE**2, dtype=D)
    return scale[:, None] * (root @ root.T + 0.1 * torch.eye(DESIGN_SIZE**2, dtype=D)) * scale


def stacked(chosen: Sequence[int]) -> Tensor:
    return torch.cat([CANDIDATES[c].dense() for c in chosen])


def log_det(chosen: Sequence[int]) -> float:
    """Return log det(I + A Σ Aᵀ / σ²) of all angles together."""
    if not chosen:
        return 0.0
    matrix = stacked(chosen)
    return float(torch.logdet(torch.eye(len(matrix), dtype=D) + matrix @ covariance() @ matrix.T / NOISE**2))


def after(chosen: Sequence[int]) -> Tensor:
    """Return the covariance after these angles, from the sum of the precisions."""
    matrix = stacked(chosen)
    return torch.linalg.inv(torch.linalg.inv(covariance()) + matrix.T @ matrix / NOISE**2)


def by_hand(count: int, criterion: str) -> tuple[list[int], list[float]]:
    """Choose greedily, with everything computed again for each candidate."""
    chosen: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        known = after(chosen) if chosen else covariance()
        rest = [c for c in range(len(CANDIDATES)) if c not in chosen]
        if criterion == "information":
            values = [0.5 * (log_det([*chosen, c]) - log_det(chosen)) for c in rest]
        else:
            values = [float(torch.trace(stacked([c]) @ known @ stacked([c]).T)) for c in rest]
        scores.append(max(values))
        chosen.append(rest[values.index(max(values))])
    return chosen, scores


def test_scores_of_one_angle() -> None:
    belief = DenseBelief(covariance())
    for number, operator in enumerate(CANDIDATES):
        gain, error = information_gain(belief, operator, NOISE), squared_error(belief, operator)
        assert float(gain) == pytest.approx(0.5 * log_det([number]), rel=1e-9)
        matrix = operator.dense()
        assert float(error) == pytest.approx(float((matrix @ covariance() * matrix).sum()), rel=1e-9)


@pytest.mark.parametrize("criterion", ["information", "error"])
def test_greedy_choices_are_those_of_brute_force(criterion: str) -> None:
    choice = choose_angles(DenseBelief(covariance()), CANDIDATES, 4, NOISE, criterion)
    chosen, scores = by_hand(4, criterion)
    assert list(choice.chosen) == chosen
    assert list(choice.scores) == pytest.approx(scores, rel=1e-7)
    assert isinstance(choice.belief, DenseBelief)
    assert_close(choice.belief.covariance, after(chosen), 1 / 2)


def test_all_candidates_gain_what_the_whole_scan_gains() -> None:
    """The chain rule of information; every candidate once."""
    choice = choose_angles(DenseBelief(covariance()), CANDIDATES, 6, NOISE)
    assert sorted(choice.chosen) == list(range(6))
    assert sum(choice.scores) == pytest.approx(0.5 * log_det(range(6)), rel=1e-8)


def samples(count: int, seed: int) -> Tensor:
    """Return samples around an image that is not zero."""
    root = torch.linalg.cholesky(covariance())
    draws = normal((count, DESIGN_SIZE**2), torch.Generator().manual_seed(seed), root)
    return 3.0 + draws @ root.T


def test_scores_of_samples() -> None:
    """The log-determinant of a covariance of K samples has variance 2 BINS / K at most, and a small bias BINS²/K."""
    count = 4000
    belief = SampledBelief(samples(count, 0))
    error_bar = 0.5 * (5 * (2 * BINS / count) ** 0.5 + BINS**2 / count)
    for number, operator in enumerate(CANDIDATES):
        assert abs(float(information_gain(belief, operator, NOISE)) - 0.5 * log_det([number])) < error_bar
        exact = stacked([number]) @ covariance() @ stacked([number]).T
        spread = (2 * float(exact.square().sum()) / count) ** 0.5  # of the trace
        assert abs(float(squared_error(belief, operator)) - float(exact.trace())) < 5 * spread


def test_samples_are_conditioned_as_the_covariance() -> None:
    """Covariances of K samples have entries with a standard error of at most √2 v / √K, for the largest variance v."""
    count = 8000
    generator = torch.Generator().manual_seed(1)
    belief = SampledBelief(samples(count, 2))
    for number in (2, 4):
        belief = belief.conditioned(CANDIDATES[number], NOISE, generator)
    known = after((2, 4))
    deviations = (belief.samples - belief.samples.mean(0)) / known.diagonal().sqrt()
    correlations = known / (known.diagonal()[:, None] * known.diagonal()).sqrt()
    gap = (deviations.T @ deviations / (count - 1) - correlations).abs().max()
    # five standard errors, and the bias of two gains that were estimated from the same samples
    assert float(gap) < 5 * (2 / count) ** 0.5 + 20 * BINS / count


def test_a_covariance_with_negative_eigenvalues_is_refused() -> None:
    with pytest.raises(NumericalError, match="not positive definite"):
        information_gain(DenseBelief(-torch.eye(DESIGN_SIZE**2, dtype=D)), CANDIDATES[0], NOISE)


# Scores of images against loops from their definitions.

SCORES_IMAGE, TRUTH = 0.5 + 0.2 * normals(9, 11), 0.5 + 0.3 * normals(9, 11, seed=1)
STD = 0.1 + normals(9, 11, seed=2).abs()


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_psnr_has_the_range_of_the_truth() -> None:
    error = sum((float(a) - float(b)) ** 2 for a, b in zip(SCORES_IMAGE.flatten(), TRUTH.flatten(), strict=True)) / 99
    expected = 10 * math.log10(float(TRUTH.max() - TRUTH.min()) ** 2 / error)
    assert_close(number(scores.psnr(SCORES_IMAGE, TRUTH)), number(expected))
    assert scores.psnr(TRUTH.float(), TRUTH) > 100
    assert scores.psnr(TRUTH, TRUTH) == math.inf


@pytest.mark.parametrize(("window", "offset"), [(7, 0.0), (4, 0.0), (7, 1e4)])
def test_ssim_is_the_mean_over_windows(window: int, offset: float) -> None:
    x, y = SCORES_IMAGE + offset, TRUTH + offset
    span = float(y.max() - y.min())
    values = []
    for i in range(9 - window + 1):
        for j in range(11 - window + 1):
            a, b = (t[i : i + window, j : j + window].flatten() for t in (x, y))
            cov = torch.cov(torch.stack([a, b]))
            top = (2 * a.mean() * b.mean() + (0.01 * span) ** 2) * (2 * cov[0, 1] + (0.03 * span) ** 2)
            base = (a.mean() ** 2 + b.mean() ** 2 + (0.01 * span) ** 2) * (cov[0, 0] + cov[1, 1] + (0.03 * span) ** 2)
            values.append(float(top / base))
    assert_close(number(scores.ssim(x, y, window)), number(sum(values) / len(values)))


def test_the_noise_floor_is_a_mean_of_the_pseudo_inverse() -> None:
    matrix, std = normals(8, 5), 0.3
    gram = matrix.mT @ matrix
    expected = std**2 * torch.linalg.inv(gram).diagonal().mean()
    assert_close(number(scores.noise_floor(matrix, std)), expected)
    values, vectors = torch.linalg.eigh(gram)
    top = vectors[:, -3:] / values[-3:] @ vectors[:, -3:].mT
    assert_close(number(scores.noise_floor(matrix, std, rank=3)), std**2 * top.diagonal().mean())
    wide = normals(3, 7)  # has four singular values of zero
    expected = std**2 * torch.linalg.pinv(wide.mT @ wide, rtol=1e-10).diagonal().mean()
    assert_close(number(scores.noise_floor(wide, std)), expected)
    doubled = torch.cat([wide, wide[:1]])  # one of rounding errors
    assert float(scores.noise_floor(doubled, std)) < 2 * float(expected)


def test_calibration_scores_are_those_of_a_loop() -> None:
    z = [
        (float(t) - float(m)) / float(s)
        for t, m, s in zip(TRUTH.flatten(), SCORES_IMAGE.flatten(), STD.flatten(), strict=True)
    ]
    assert_close(number(scores.rms_z(SCORES_IMAGE, STD, TRUTH)), number(math.sqrt(sum(v * v for v in z) / len(z))))
    for level in (0.5, 0.95):
        half = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.5 + level / 2)))
        share = sum(abs(v) <= half for v in z) / len(z)
        assert scores.coverage(SCORES_IMAGE, STD, TRUTH, level) == pytest.approx(share)
    errors = (TRUTH - SCORES_IMAGE).abs()
    cov = ((errors - errors.mean()) * (STD - STD.mean())).mean()
    expected = cov / (errors.std(correction=0) * STD.std(correction=0))
    assert_close(number(scores.error_std_correlation(SCORES_IMAGE, STD, TRUTH)), expected)
    assert math.isnan(scores.error_std_correlation(SCORES_IMAGE, torch.ones_like(STD), TRUTH))


def test_quantile_points_are_quantiles() -> None:
    expected, observed = scores.quantile_points(SCORES_IMAGE, STD, TRUTH, count=17)
    levels = torch.arange(1, 18, dtype=torch.float64) / 18
    assert_close(observed, torch.quantile(((TRUTH - SCORES_IMAGE) / STD).flatten(), levels))
    assert_close(expected, torch.distributions.Normal(number(0.0), number(1.0)).icdf(levels))
