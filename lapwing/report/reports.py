"""The report that every posterior writes about itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lapwing.core.atomic import refuse_no_folder
from lapwing.core.settings import PATH, Rule, is_integer
from lapwing.decisions.decides import Decides
from lapwing.networks.forward import outside_autocast
from lapwing.report.page import Report, Source, template, written
from lapwing.report.uncertain import look

TEXT = Rule("a text, or None", lambda v: isinstance(v, str | None))
SEED = Rule("an integer, or None", lambda v: v is None or is_integer(v))


class Reports(Decides, Protocol):
    """A posterior that describes itself in one page. ``Fitted`` inherits from it."""

    @outside_autocast
    def report(
        self,
        data: Iterable[Any],
        path: str | Path,
        *,
        title: str | None = None,
        level: float = 0.95,
        resamples: int = 1000,
        seed: int | None = None,
        command: str | None = None,
        date: str | None = None,
        target_key: str | None = None,
        progress: bool | None = None,
    ) -> Report:
        """Write one self-contained HTML page: is it calibrated, is it better than the plain network, where is it not.

        The page opens with a verdict in words, which follows from the numbers by rules that it states. Then come a
        table of scores with bootstrap intervals, pictures, the most uncertain inputs, what was learned, and how the
        posterior came about. It needs no network and is smaller than 1 MB; its numbers are in it as JSON. Equal calls
        write equal files. It needs ``pip install 'lapwing[report]'``.

        Args:
            data: Data as for ``fit``, with targets, that were not used for the fit; read twice, the second
                time 2,000 inputs at most.
            path: Where to write the page.
            title: Its heading; the name of the model by default.
            level: The probability of the intervals whose coverage is scored, for numbers.
            resamples: How often the inputs are drawn again for bootstrap intervals.
            seed: The seed of the training or the fit, to be noted in the page.
            command: The command that made the page, to be noted in it.
            date: A date to be noted in the page; none by default, so that equal calls write equal files.
            target_key: The key of the target in batches that are mappings, as for ``fit``.
            progress: Whether to show a progress bar; None shows one on a terminal.

        Returns:
            The report, with its ``path``, its ``verdict`` and its ``numbers``; ``print`` shows the verdict.

        Raises:
            ModelError: If the model's weights have changed since the fit.
            DataError: If data are empty, not finite or do not fit the likelihood.
            UnsupportedError: If Matplotlib or Jinja2 is not installed.
            FileError: If the page cannot be written.

        Cost: that of ``evaluate``, predictions for at most 2,000 inputs, 37 factorisations for the evidence curve, and
        a second or two for the pictures.

        >>> import tempfile, torch, lapwing as lw
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = posterior.report([(x, x.sin())], folder + "/report.html")
        >>> page.verdict.startswith("The error bars are")
        True
        """
        PATH.check("path", path)
        for name, text in (("title", title), ("command", command), ("date", date)):
            TEXT.check(name, text)
        SEED.check("seed", seed)
        template()  # nothing is computed if a package is missing, or a folder
        refuse_no_folder(Path(path).resolve())
        evaluation = self.evaluate(data, level=level, resamples=resamples, target_key=target_key, progress=progress)
        looked = look(self, data, target_key, progress)
        heading = title or f"Error bars of {type(self.network.model).__name__}"
        return written(self, evaluation, looked, Path(path), Source(heading, seed, command, date))
