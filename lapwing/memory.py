"""The memory that calls may take for intermediate results: one setting, in bytes.

>>> with limited("1GB"):  # or limit("1GB") for the whole process, or LAPWING_MEMORY=1GB in the environment
...     budget()
1000000000
"""

from lapwing.runtime.memory import budget, limit, limited

__all__ = ["budget", "limit", "limited"]
