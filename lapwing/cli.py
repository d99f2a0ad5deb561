"""The command line: run the experiments and write their reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing.errors import LapwingError

if TYPE_CHECKING:
    from experiments.result import Result

    Picture = Callable[[Result, Path], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Zero when all went well; one with a message on stderr when not."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        COMMANDS[arguments.command](arguments)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("lapwing"):
            raise
        print(f"lapwing: {missing.name} is not installed; use pip install 'lapwing[run]'.", file=sys.stderr)
        return 1
    except (LapwingError, OSError) as error:
        print(f"lapwing: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lapwing", description="Calibrated error bars for trained networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="digits, diabetes and a 1-D gap: tables, pictures and results.json")
    run.add_argument("--quick", action="store_true", help="train shortly; for trying the command out")
    uci = commands.add_parser("uci", help="nine regression tables from a data folder")
    uci.add_argument("--data-dir", type=Path, help="folder of the uci_NAME.npz files; else LAPWING_DATA")
    uci.add_argument("--sets", nargs="+", metavar="NAME", help="names of tables; all nine by default")
    uci.add_argument("--splits", type=_positive, default=3, help="standard splits to use (3)")
    uci.add_argument("--variants", nargs="+", metavar="NAME", help="what to compare; the usual five by default")
    fashion = commands.add_parser("fashion", help="Fashion-MNIST: cross-validation against training with the evidence")
    fashion.add_argument("--epochs", type=_positive, default=60)
    normalised = commands.add_parser("normalised", help="MNIST: naive against corrected evidence, normalised networks")
    normalised.add_argument("--networks", nargs="+", metavar="NAME", help="resnet, transformer; both by default")
    normalised.add_argument("--epochs", type=_positive, default=20)
    sampling = commands.add_parser("sampling", help="digits: noise of the gradients of samples, and γ from one sample")
    sampling.add_argument("--quick", action="store_true", help="train shortly; for trying the command out")
    inducing = commands.add_parser(
        "inducing", help="functions of one input: inducing points against the exact posterior"
    )
    inducing.add_argument("--data-dir", type=Path, help="folder of toy1d.npz; else LAPWING_DATA")
    inducing.add_argument("--quick", action="store_true", help="small networks, few steps; for trying the command out")
    images = commands.add_parser("images", help="one network for images, every method: likelihood, calibration, OOD")
    images.add_argument(
        "--network", default="mlp", help="mlp, lenet (Fashion-MNIST), resnet20, 32, 44 or 56 (CIFAR-10)"
    )
    images.add_argument("--methods", nargs="+", metavar="NAME", help="what to compare; all but HFL by default")
    images.add_argument("--steps", type=_positive, default=500, help="learning steps of VaLLA (500)")
    images.add_argument("--test", type=_positive, help="number of test images")
    flights = commands.add_parser("flights", help="arrival delays: a large table, every method for regression")
    flights.add_argument("--methods", nargs="+", metavar="NAME", help="what to compare; everything by default")
    response = commands.add_parser("response", help="error bars by pushing: two tasks, sensitivity, tables")
    response.add_argument("--data-dir", type=Path, help="folder of the uci_NAME.npz files; without it no tables")
    response.add_argument("--seeds", type=_positive, default=10)
    response.add_argument("--quick", action="store_true", help="few seeds and steps; for trying the command out")
    pushed = commands.add_parser("pushed", help="a convolutional network at its minimum, pushed: Fashion-MNIST")
    pushed.add_argument("--data-dir", type=Path, help="folder of the .npz files; else LAPWING_DATA")
    pushed.add_argument("--seeds", type=_positive, default=1)
    pushed.add_argument("--quick", action="store_true", help="few weights and images; for trying the command out")
    for command in (fashion, normalised, images, flights):
        command.add_argument("--data-dir", type=Path, help="folder of the .npz files; else LAPWING_DATA")
        command.add_argument("--data", type=_positive, help="number of training images")
        command.add_argument("--seeds", type=_positive, default=3)
        command.add_argument("--device", default="cpu", help="cpu or cuda")
    for command in (run, uci, fashion, normalised, sampling, inducing, images, response, pushed, flights):
        command.add_argument("--out", type=Path, required=True, help="folder for what is written")
        command.add_argument("--seed", type=int, default=0)
    inducing.set_defaults(seed=2147483647)  # of the published task
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _run(arguments: argparse.Namespace) -> None:
    from experiments import bands, diabetes, digits, pictures

    settings = (
        digits.Digits(seed=arguments.seed),
        diabetes.Diabetes(seed=arguments.seed),
        bands.Bands(seed=arguments.seed),
    )
    if arguments.quick:
        settings = tuple(replace(s, recipe=replace(s.recipe, epochs=10)) for s in settings)  # type: ignore[assignment]
    results = [digits.run(settings[0]), diabetes.run(settings[1]), bands.run(settings[2])]
    drawn = {"digits.png": pictures.digits, "diabetes.png": pictures.observed, "bands.png": pictures.bands}
    _finish(results, arguments.out / "results.json", drawn)


def _uci(arguments: argparse.Namespace) -> None:
    from experiments import uci

    settings = uci.Uci(
        data_dir=_folder(arguments),
        sets=_known(arguments.sets, uci.SETS, "--sets"),
        splits=arguments.splits,
        variants=_known(arguments.variants or list(uci.USUAL), tuple(uci.VARIANTS), "--variants"),
        seed=arguments.seed,
    )
    _finish([uci.run(settings, report=_report)], arguments.out / "uci.json")


def _fashion(arguments: argparse.Namespace) -> None:
    from experiments import fashion

    settings = fashion.Fashion(
        data_dir=_folder(arguments), epochs=arguments.epochs, data=arguments.data, seeds=arguments.seeds,
        device=arguments.device, seed=arguments.seed,
    )  # fmt: skip
    _finish([fashion.run(settings, report=_report)], arguments.out / "fashion.json")


def _normalised(arguments: argparse.Namespace) -> None:
    from experiments import normalised, pictures

    settings = normalised.Normalised(
        data_dir=_folder(arguments),
        networks=_known(arguments.networks, tuple(normalised.NETWORKS), "--networks"),
        data=arguments.data or 5_000,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    settings = replace(settings, recipe=replace(settings.recipe, epochs=arguments.epochs))
    result = normalised.run(settings, report=_report)
    _finish([result], arguments.out / "normalised.json", {"normalised.png": pictures.distances})


def _sampling(arguments: argparse.Namespace) -> None:
    from experiments import pictures, sampling

    settings = sampling.Sampling(seed=arguments.seed)
    if arguments.quick:
        settings = replace(settings, recipe=replace(settings.recipe, epochs=100), draws=64, gradients=8)
    _finish([sampling.run(settings)], arguments.out / "sampling.json", {"sampling.png": pictures.sampling})


def _images(arguments: argparse.Namespace) -> None:
    from experiments import images

    settings = images.ImageTable(
        data_dir=_folder(arguments),
        network=arguments.network,
        steps=arguments.steps,
        methods=_known(arguments.methods or list(images.USUAL), tuple(images.METHODS), "--methods"),
        data=arguments.data,
        test=arguments.test,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    _finish([images.run(settings, report=_report)], arguments.out / f"images_{arguments.network}.json")


def _inducing(arguments: argparse.Namespace) -> None:
    from experiments import inducing, pictures

    settings = inducing.Inducing(_folder(arguments), seed=arguments.seed)
    targets = inducing.Targets(seed=arguments.seed)
    if arguments.quick:
        recipe = replace(settings.recipe, hidden=(10, 10), max_steps=300)
        settings = replace(settings, recipe=recipe, draws=2, published=(20, 40), shown=40, sizes=(3, 8), starts=1,
                           networks=1, steps=20)  # fmt: skip
        targets = replace(targets, recipe=recipe, test=200)
    results = [inducing.run(settings, _report), inducing.run_targets(targets, _report)]
    drawn = {"inducing.png": pictures.inducing, "inducing_targets.png": pictures.inducing_targets}
    _finish(results, arguments.out / "inducing.json", drawn)


def _flights(arguments: argparse.Namespace) -> None:
    from experiments import flights

    settings = flights.Flights(
        data_dir=_folder(arguments),
        methods=_known(arguments.methods, tuple(flights.METHODS), "--methods"),
        data=arguments.data or 100_000,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    _finish([flights.run(settings, report=_report)], arguments.out / "flights.json")


def _response(arguments: argparse.Namespace) -> None:
    from experiments import pictures, response

    settings = response.ResponseTask(data_dir=arguments.data_dir, seeds=arguments.seeds, seed=arguments.seed)
    if arguments.quick:
        settings = replace(settings, seeds=1, steps=(20, 50), members=2, epochs=50, new=50)
    result = response.run(settings, report=_report)
    _finish([result], arguments.out / "response.json", {"response.png": pictures.response})


def _pushed(arguments: argparse.Namespace) -> None:
    from experiments import pushed_images

    settings = pushed_images.PushedImages(_folder(arguments), seeds=arguments.seeds, seed=arguments.seed)
    if arguments.quick:
        settings = replace(settings, data=60, held=60, test=60, channels=(2, 3), pushes=4, each=2)
    _finish([pushed_images.run(settings, report=_report)], arguments.out / "pushed.json")


def _folder(arguments: argparse.Namespace) -> Path:
    from experiments.data import data_folder

    return data_folder(arguments.data_dir)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _known(given: list[str] | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise LapwingError(f"{option}: unknown {', '.join(unknown)}; expected some of {', '.join(known)}.")
    return tuple(given or known)


def _finish(results: Sequence[Result], path: Path, pictures: Mapping[str, Picture] | None = None) -> None:
    """Print the tables, draw a picture of each result beside the file, write all of them to it, and say where it is."""
    from experiments.tables import table

    for result in results:
        print(table(result), end="\n\n")
    drawn = {path.with_name(name): draw for name, draw in (pictures or {}).items()}
    for (place, draw), result in zip(drawn.items(), results, strict=False):
        draw(result, place)
    documents = {result.experiment: json.loads(result.to_json()) for result in results}
    path.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    print(*drawn, path, sep="\n")


COMMANDS = {
    "run": _run, "uci": _uci, "fashion": _fashion, "normalised": _normalised, "sampling": _sampling, "images": _images,
    "inducing": _inducing, "response": _response, "pushed": _pushed, "flights": _flights,
}  # fmt: skip
