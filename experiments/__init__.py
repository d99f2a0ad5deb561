"""The experiments of the repository. They use the library as any user would and are not part of the wheel.

``python -m experiments NAME --out DIR`` runs one. An experiment is a module with four parts: a frozen dataclass of
settings, ``add_options`` for its command-line options, ``command`` that turns them into a report, and ``run``. Adding
one is a module and a line in ``experiments/__main__.py``.
"""
