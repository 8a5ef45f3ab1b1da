"""Branch, mutate, evaluate, prune: the loops of BranchBench and the price of each operation, on several systems. `benchmarks/branches.py` runs it.

data      the rows and tables, the same for every system
workload  the statements of the five loops, the same text for every system
loops     the tree of branches that a loop grows, and what is measured on the way
micro     one operation at a time, over depth and over the number of branches
systems   what is compared: our sessions, file copies, doltlite, savepoints; servers: PostgreSQL
run       starts the measurements, in turns
child     one measurement in a process of its own
report    rows, ratios and bounds; tables: the same for the docs
"""
