"""The demo behind ``lapwing run``: digits, diabetes patients and a curve with a gap, all on embedded data.

Here live the three demo experiments and the parts that the experiments of the repository share with them: results,
tables, training, figures. The library itself imports nothing from here.
"""
