"""The demo behind ``lapwing demo``: digits, diabetes patients and a curve with a gap, all without a data folder.

Results, training and figures live here too, because ``experiments/`` uses them. Only ``lapwing.cli`` imports from here.
"""
